"""Keeps the repository root off sys.path, picks the device, and poisons uninitialised memory."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated: must precede the first import
    torch.set_num_threads(1)


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
