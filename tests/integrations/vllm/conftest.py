"""vLLM's real Python tree under a fake Hopper GPU, and what the tests build with it."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAVE_VLLM = importlib.util.find_spec("vllm") is not None

collect_ignore = ["checkpoints.py", "engine.py", "engine_pool.py", "fake_hopper.py", "ranks.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not HAVE_VLLM:
                item.add_marker(pytest.mark.skip(reason="needs vLLM's Python tree"))


@pytest.fixture(scope="session")
def fake_hopper(tmp_path_factory) -> dict[str, str]:
    """Environment in which vLLM meets the fake platform through its real entry point; set for this process too."""
    site = tmp_path_factory.mktemp("fake_hopper")
    info = site / "fake_hopper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-hopper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nfake_hopper = fake_hopper:plugin\n")
    (site / "fake_hopper.py").write_text((HERE / "fake_hopper.py").read_text())
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")])),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "VLLM_TARGET_DEVICE": "cuda",
        "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("vllm_cache")),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    os.environ.update(env)
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
    return {**os.environ, **env}


@pytest.fixture(scope="session")
def ranks(fake_hopper, tmp_path_factory):
    """``ranks(tp, pp, tasks) -> [result per rank]``: run ``ranks.py`` on tp * pp gloo processes."""

    def run(tp: int, pp: int, tasks: list[dict], timeout: int = 400) -> list[list[dict]]:
        folder = tmp_path_factory.mktemp(f"tp{tp}pp{pp}")
        (folder / "tasks.json").write_text(json.dumps(tasks))
        processes = []
        for rank in range(tp * pp):
            log = open(folder / f"rank{rank}.log", "w")
            command = [sys.executable, "-P", str(HERE / "ranks.py"), str(folder), str(tp), str(pp), str(rank)]
            processes.append((subprocess.Popen(command, env=fake_hopper, stdout=log, stderr=log), log))
        results = []
        for rank, (process, log) in enumerate(processes):
            code = process.wait(timeout=timeout)
            log.close()
            assert code == 0, f"rank {rank} ended with {code}:\n" + (folder / f"rank{rank}.log").read_text()[-4000:]
            results.append(json.loads((folder / f"rank{rank}.json").read_text()))
        return results

    return run


@pytest.fixture(scope="session")
def harness(fake_hopper, tmp_path_factory):
    """The functions of ``ranks.py`` in this process, its one-rank groups made."""
    spec = importlib.util.spec_from_file_location("beam_vllm_harness", HERE / "ranks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.init_ranks(1, 1, 0, tmp_path_factory.mktemp("rendezvous") / "file")
    return module


@pytest.fixture(scope="session")
def tp2(ranks, harness):
    return ranks(2, 1, harness.TP2)


@pytest.fixture(scope="session")
def pp2(ranks, harness):
    return ranks(1, 2, harness.PP2)


@pytest.fixture
def no_calls_yet(fake_hopper, monkeypatch):
    """The plugin's counters at zero."""
    from beam_moe.integrations.vllm import metrics

    monkeypatch.setattr(metrics, "calls", Counter())
