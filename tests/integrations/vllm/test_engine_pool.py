"""The pool that runs the GPU scenarios, with a small script in the engine's place."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from beam_moe.testing import load_script

HERE = Path(__file__).parent
SCRIPT = """
import json, os, subprocess, sys, time
name, folder, sleep = sys.argv[1], sys.argv[2], float(sys.argv[3])
start = time.time()
print("hello from", name)
print("and its errors", file=sys.stderr)
if name == "breaks":
    subprocess.Popen(["sleep", "60"])
    sys.exit("it broke")
if name == "hangs":
    child = subprocess.Popen(["sleep", "60"])
    open(os.path.join(folder, "pids"), "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(60)
time.sleep(sleep)
env = {n: os.environ.get(n) for n in ("CUDA_VISIBLE_DEVICES", "VLLM_PORT", "BEAM_MOE_TEST_PP", "BEAM_MOE_TEST_TP",
       "BEAM_MOE_TEST_BASE", "TRITON_INTERPRET")}
json.dump({"start": start, "end": time.time(), **env}, open(os.path.join(folder, name + ".json"), "w"))
"""


@pytest.fixture(scope="module")
def engine_pool():
    return load_script(HERE / "engine_pool.py")


@pytest.fixture
def pool(engine_pool, tmp_path):
    made = []

    def make(gpus, jobs, sleep=0.3, **options):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)

        def command(scenario, folder):
            return [sys.executable, str(script), scenario.name, str(folder), str(sleep)]

        made.append(engine_pool.Pool(gpus, jobs, tmp_path / "work", tmp_path / "logs", command, **options))
        return made[-1]

    yield make
    for p in made:
        p.stop()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


def left(pids: Path) -> list[str]:
    """Those that are alive though they were killed, given the moment that a killed process takes to end."""
    patience = time.monotonic() + 10
    while (still := [pid for pid in pids.read_text().split() if alive(int(pid))]) and time.monotonic() < patience:
        time.sleep(0.05)
    return still


def read(pool, scenario) -> dict:
    outcome = pool.outcome(scenario)
    assert outcome.error == ""
    return json.loads(outcome.result.read_text())


def test_visible_gpus_are_those_of_the_run(engine_pool, monkeypatch):
    """A worker of pytest-xdist keeps to one GPU itself; its engines may use all."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.delenv("BEAM_MOE_TEST_GPUS", raising=False)
    assert engine_pool.visible_gpus() == ["5"]
    monkeypatch.setenv("BEAM_MOE_TEST_GPUS", "4,5")
    assert engine_pool.visible_gpus() == ["4", "5"]


def test_order_labels_and_the_least_busy_gpu(engine_pool):
    s = engine_pool.Scenario
    scenarios = [s("plain"), s("stored", base="fp8"), s("replay", tp=2), s("lora"), s("replay", pp=2)]
    assert [x.label for x in engine_pool.in_order(scenarios)] == [
        "lora", "replay-tp2", "replay-pp2", "plain", "stored-fp8",
    ]  # fmt: skip
    assert engine_pool.least_busy(["3", "5", "7"], ["3", "5", "3"], 1) == ["7"]
    assert engine_pool.least_busy(["3", "5", "7"], ["3", "7", "3"], 2) == ["5", "7"]


def test_scenarios_run_side_by_side(engine_pool, pool, monkeypatch):
    """As many as asked, on the GPU with the fewest, each with its own port; two GPUs for those that need two."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    s = engine_pool.Scenario
    scenarios = [s(n) for n in ("a", "b", "c", "d")] + [s("two", tp=2, base="fp8"), s("three", pp=3)]
    p = pool(["4", "6"], jobs=3)
    p.add(scenarios)
    p.add(scenarios)
    with pytest.raises(KeyError):  # too many GPUs: never started
        p.outcome(s("three", pp=3))
    found = {x: read(p, x) for x in scenarios[:-1]}
    times = [(f["start"], f["end"]) for f in found.values()]
    most = max(sum(a <= start < b for a, b in times) for start, _ in times)
    assert 2 <= most <= 3
    assert len({f["VLLM_PORT"] for f in found.values()}) == 5
    two = found[s("two", tp=2, base="fp8")]
    assert two["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert two["VLLM_PORT"] == min(f["VLLM_PORT"] for f in found.values()), "started first: ports go up"
    assert (two["BEAM_MOE_TEST_PP"], two["BEAM_MOE_TEST_TP"], two["BEAM_MOE_TEST_BASE"]) == ("1", "2", "fp8")
    assert {found[s("a")]["CUDA_VISIBLE_DEVICES"], found[s("b")]["CUDA_VISIBLE_DEVICES"]} == {"4", "6"}
    assert all(f["TRITON_INTERPRET"] is None for f in found.values())
    lines = (p.logs / "engines.txt").read_text().splitlines()
    assert len(lines) == 5 and all("ended with 0" in line and " s on GPU " in line for line in lines)
    assert "hello from a" in (p.logs / "a.log").read_text()


def test_one_at_a_time(engine_pool, pool):
    scenarios = [engine_pool.Scenario(n) for n in ("a", "b")]
    p = pool(["0", "1"], jobs=1, sleep=0.1)
    p.add(scenarios)
    a, b = (read(p, x) for x in scenarios)
    assert a["end"] <= b["start"]


def test_a_failure_is_its_own(engine_pool, pool):
    """With the tail of both streams; one that hangs ends with its children when its time is over."""
    s = engine_pool.Scenario
    p = pool(["0"], jobs=3, limit=3.0)
    p.add([s("breaks"), s("hangs"), s("fine")])
    error = p.outcome(s("breaks")).error
    for text in ("breaks ended with 1", "hello from breaks", "and its errors", "it broke"):
        assert text in error
    assert read(p, s("fine"))["CUDA_VISIBLE_DEVICES"] == "0"
    assert "hangs took over 3.0 s" in p.outcome(s("hangs")).error
    assert not left(p.folder / "hangs" / "pids")


def test_pools_of_one_folder_share_what_they_run(engine_pool, pool):
    scenario = engine_pool.Scenario("a")
    first, second = (pool(["0", "1"], jobs=1, worker=w) for w in (0, 1))
    for p in (first, second):
        p.add([scenario])
    assert read(first, scenario) == read(second, scenario)
    assert len((first.logs / "engines.txt").read_text().splitlines()) == 1


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_interrupted_pytest_leaves_no_process(tmp_path, name):
    """The real module's fixtures around a scenario that hangs: pytest ends, and so do engine and child."""
    (tmp_path / "script.py").write_text(SCRIPT)
    text = (HERE / "test_engine_gpu.py").read_text()
    head = text[: text.index('@needs("plain", "lora")')].replace(
        "HERE = Path(__file__).parent", f"HERE = Path({str(HERE)!r})"
    )
    (tmp_path / "test_hangs.py").write_text(
        head.replace("pytest.mark.gpu, pytest.mark.slow", "")
        + f"""
import sys

engine_pool.visible_gpus = lambda: ["0"]
engine_pool.Pool.__init__.__defaults__ = (
    lambda s, f: [sys.executable, {str(tmp_path / "script.py")!r}, s.name, str(f), "0"], 580, 0)


@needs("fine")
def test_fine(results):
    assert results[0]["CUDA_VISIBLE_DEVICES"] == "0"


@needs("breaks", "fine")
def test_breaks(results):
    pass


@needs("fine", Scenario("two", tp=2))
def test_two(results):
    pass


@needs("deselected")
def test_deselected(results):
    pass


@needs("hangs")
def test_hangs(results):
    pass
"""
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = engines\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--import-mode=importlib",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--basetemp", str(tmp_path / "t"), "-k", "not deselected", str(tmp_path / "test_hangs.py")]
    logs = tmp_path / "logs"
    env = {**os.environ, "BEAM_MOE_TEST_ENGINES": "3", "BEAM_MOE_TEST_LOGS": str(logs)}
    env.pop("PYTEST_XDIST_WORKER", None)
    pids, out = tmp_path / "t" / "engines" / "hangs" / "pids", tmp_path / "out"
    # these tests may be a shell's background job, which ignores the interrupt, and what it starts inherits that
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(out, "w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file, cwd=tmp_path)
    signal.signal(signal.SIGINT, ignored)
    try:
        deadline = time.monotonic() + 60
        while not (pids.exists() and "test_two" in out.read_text() and "test_hangs" in out.read_text()):
            assert time.monotonic() < deadline and process.poll() is None, out.read_text()
            time.sleep(0.1)
        time.sleep(0.3)
        process.send_signal(signal.Signals[f"SIG{name}"])
        assert process.wait(30) == 2, out.read_text()
    finally:
        process.kill()
    said = out.read_text()
    for test, word in (("fine", "PASSED"), ("breaks", "ERROR"), ("two", "SKIPPED")):
        assert f"test_{test} {word}" in said, said
    assert "it broke" in said and sorted(p.name for p in logs.glob("*.log")) == ["breaks.log", "fine.log", "hangs.log"]
    assert not left(pids)
