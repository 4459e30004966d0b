"""Keeps the repository root off sys.path, picks the device, spreads workers, and poisons uninitialised memory."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]

import pytest
import torch

from beam_moe.testing import load_script


def gpus_of_worker(worker: str, named: str | None, count: int) -> dict[str, str]:
    """Environment that gives a worker of pytest-xdist one of the visible GPUs, in turn, and keeps the list of all.

    Args:
        worker: its name, ``gw0`` and on.
        named: CUDA_VISIBLE_DEVICES, if set.
        count: GPUs that are visible.
    """
    names = [str(i) for i in range(count)] if named is None else [n.strip() for n in named.split(",")][:count]
    if len(names) < 2:
        return {}
    own = names[int(worker.removeprefix("gw")) % len(names)]
    return {"CUDA_VISIBLE_DEVICES": own, "BEAM_MOE_TEST_GPUS": ",".join(names)}


if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and "BEAM_MOE_TEST_GPUS" not in os.environ:
    # device_count asks NVML and leaves CUDA as it is, which reads the variable once, when it starts
    os.environ.update(gpus_of_worker(worker, os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()))

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated: must precede the first import
    torch.set_num_threads(1)
    load_script(ROOT / "tests" / "interpreter.py").patch_language_once()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """``torch.empty`` and kin hand out NaN (or a large id), so an element that no kernel wrote fails its comparison."""

    def poison(real):
        def empty(*args, **kwargs):
            t = real(*args, **kwargs)
            if t.device.type == "meta" or kwargs.get("dtype") in (torch.float8_e4m3fn, torch.float8_e5m2):
                return t
            if t.is_floating_point():
                return t.fill_(float("nan"))
            if t.dtype == torch.uint8:  # memory that is cut into other types: NaN in any of them
                return t.fill_(255)
            return t.fill_(torch.iinfo(t.dtype).max // 3) if t.dtype != torch.bool else t

        return empty

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if DEVICE == "cuda" and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")  # runs on the GPU, so `-m gpu` takes it there
        if item.get_closest_marker("gpu") and DEVICE != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
