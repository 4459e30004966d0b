"""What tests and benches share: numerical comparison, and a script as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch


def load_script(path: Path) -> ModuleType:
    """A file of a folder that is no package, such as ``bench/``, executed anew and registered by folder and name."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None, f"{path} is no module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def error_ratio(ref: torch.Tensor, got: torch.Tensor) -> float:
    """RMS of ``got - ref`` over RMS of ``ref``: one number that survives a change of shape or scale; NaN stays NaN."""
    ref, got = ref.detach().double().cpu(), got.detach().double().cpu()
    if ref.numel() == 0:
        return 0.0
    return float((ref - got).pow(2).mean().sqrt() / ref.pow(2).mean().sqrt().clamp_min(1e-300))


def assert_close(name: str, ref: torch.Tensor, got: torch.Tensor, limit: float) -> None:
    """Fail unless ``got`` has ``ref``'s shape, is finite and stays within ``limit`` of it in `error_ratio`."""
    assert got.shape == ref.shape, f"{name}: shape {tuple(got.shape)} is not {tuple(ref.shape)}"
    assert torch.isfinite(got.double()).all(), f"{name}: non-finite values"
    ratio = error_ratio(ref, got)
    assert ratio <= limit, f"{name}: error ratio {ratio:.2e} exceeds {limit:.1e}"
