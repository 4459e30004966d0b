"""The trainer's half of the RL loop on a tiny model, with a process in place of the engine: rows, layouts, failures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def loop(tmp_path):
    """``loop(*arguments, engine="") -> (finished process, rows)``."""
    python = tmp_path / "engine-python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_engine.py"} "$@"\n')
    python.chmod(0o755)

    def run(*arguments, engine=""):
        env = {**os.environ, "BEAM_MOE_RESULTS": str(tmp_path / "results"), "FAKE_ENGINE": engine, "RANK": ""}
        env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "GLOO_SOCKET_IFNAME": "lo"}
        del env["RANK"]
        command = [
            sys.executable, "-P", str(HERE / "rl_loop_cpu.py"), "train", "--engine-python", str(python), "--folder",
            str(tmp_path / "work"), "--prompts", "4", "--group", "2", "--new", "4", "--micro-batch", "4", "--rank", "4",
            "--compare-every", "2", *arguments,
        ]  # fmt: skip
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        files = list((tmp_path / "results").glob("*/rl_loop.json"))
        return done, json.loads(files[0].read_text()) if files else []

    return run


@pytest.mark.parametrize("arguments", [["--mode", "lora"], ["--mode", "bf16", "--train-pp", "2"]], ids="/".join)
def test_steps_and_their_rows(loop, arguments):
    """Every step has its row; parts are undone now and then; the last step knows what rounding explains."""
    done, rows = loop(*arguments, "--steps", "3")
    assert done.returncode == 0, done.stderr[-4000:]
    assert [r["step"] for r in rows] == [0, 1, 2] and len({r["run"] for r in rows}) == 1
    assert all(r["router_exact"] and r["grad_norm"] > 0 and 0 <= r["reward"] <= 1 for r in rows)
    assert ["variants" in r for r in rows] == [True, False, True]
    assert set(rows[0]["rounding"]) == set(rows[2]["rounding"]) == {"trainer", "engine"}
    assert rows[2]["rounding"]["trainer"]["logprob_diff_mean"] < 0.05, "fp32 of the same weights, routes and tokens"
    assert {"rollout", "score", "update", "sync"} <= set(rows[0]["seconds"])


ENDS = [["--mode", "bf16"], ["--mode", "mxfp8", "--wire", "mxfp8"], ["--mode", "lora", "--shared-outer"]]


@pytest.mark.parametrize("arguments", ENDS, ids="/".join)
def test_ends_in_time(loop, arguments):
    """With no time left the first step is the last, and a whole one; experts may be quantised before they are sent."""
    done, rows = loop(*arguments, "--steps", "50", "--new", "2", "--minutes", "0")
    assert done.returncode == 0, done.stderr[-4000:]
    assert [r["step"] for r in rows] == [0] and "rounding" in rows[0] and rows[0]["router_exact"]


@pytest.mark.parametrize(
    "engine, said", [("dies", "the fake engine has died"), ("fails", "Traceback of the fake engine")]
)
def test_a_broken_engine_ends_the_loop(loop, engine, said):
    """With what it said, and with the rows of the steps before."""
    done, rows = loop("--mode", "bf16", "--steps", "3", engine=engine)
    assert done.returncode != 0 and said in done.stderr
    assert [r["step"] for r in rows] == [0]


@pytest.mark.parametrize(
    "arguments", [["--micro-batch", "3"], ["--train-ep", "3"], ["--prompts", "3", "--train-ep", "2"]]
)
def test_rows_that_cannot_be_shared_out_are_refused_before_anything_starts(loop, tmp_path, arguments):
    done, rows = loop("--mode", "bf16", *arguments)
    assert done.returncode != 0 and "--micro-batch" in done.stderr and not rows
    assert not (tmp_path / "work").exists()
