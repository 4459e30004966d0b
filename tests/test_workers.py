"""Workers of pytest-xdist spread over the GPUs: what ``conftest.py`` does before CUDA starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"


@pytest.mark.parametrize(
    "named, count, owns, every",
    [
        (None, 3, ["0", "1", "2", "0"], "0,1,2"),
        ("5, 2", 2, ["5", "2", "5", "2"], "5,2"),
        ("4,6,9", 2, ["4", "6", "4", "6"], "4,6"),
        ("GPU-a,GPU-b", 2, ["GPU-a", "GPU-b", "GPU-a", "GPU-b"], "GPU-a,GPU-b"),
    ],
)
def test_each_worker_gets_one_of_the_visible_gpus(request, named, count, owns, every):
    conftest = request.config.pluginmanager.get_plugin(str(CONFTEST))
    got = [conftest.gpus_of_worker(f"gw{i}", named, count) for i in range(4)]
    assert got == [{"CUDA_VISIBLE_DEVICES": own, "BEAM_MOE_TEST_GPUS": every} for own in owns]


@pytest.mark.parametrize("named, count", [(None, 0), (None, 1), ("", 0), ("3", 1), ("3,9", 1)])
def test_with_no_choice_the_environment_stays(request, named, count):
    conftest = request.config.pluginmanager.get_plugin(str(CONFTEST))
    assert conftest.gpus_of_worker("gw1", named, count) == {}


@pytest.mark.parametrize("worker, own", [("gw4", "6"), (None, "4,6,8")])
def test_conftest_sets_it_before_cuda_starts(worker, own):
    code = (
        "import json, os, runpy, torch\n"
        "asked = []\n"
        "torch.cuda.device_count = lambda: 3\n"
        "torch.cuda.is_available = lambda: asked.append(os.environ['CUDA_VISIBLE_DEVICES']) or False\n"
        f"runpy.run_path({str(CONFTEST)!r})\n"
        "print(json.dumps([asked, os.environ.get('BEAM_MOE_TEST_GPUS'), torch.cuda.is_initialized()]))\n"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("PYTEST_XDIST_WORKER", "BEAM_MOE_TEST_GPUS")}
    env |= {"CUDA_VISIBLE_DEVICES": "4,6,8", **({"PYTEST_XDIST_WORKER": worker} if worker else {})}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [[own], "4,6,8" if worker else None, False]
