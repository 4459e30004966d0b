"""Every kernel of the package compiles for Hopper, with this environment's Triton and with the oldest one supported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).with_name("compile_cases.py")
OLDEST = ROOT / ".venv-triton"

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("triton", ["oldest", "own"])
def test_every_kernel_compiles_for_sm_90a(triton, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    if triton == "oldest":
        if not OLDEST.is_dir():
            pytest.skip("no .venv-triton: make venv-triton")
        env["PYTHONPATH"] = str(OLDEST)
    done = subprocess.run([sys.executable, str(CASES), "90"], capture_output=True, text=True, env=env, cwd=tmp_path)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    errors = [row for row in rows if "error" in row]
    assert done.returncode == 0 and not errors, f"{errors}\n{done.stderr[-4000:]}"
    compiled = [row for row in rows if "kernel" in row]
    assert {row["target"] for row in compiled} == {"sm_90a"}
    over = [row for row in compiled if row["shared"] > 232448]
    assert not over, f"more shared memory than an H200 has: {over}"
    (inventory,) = (row for row in rows if "kernels" in row)
    if triton == "oldest":
        assert inventory["triton"] == "3.6.0"
    missing = set(inventory["kernels"]) - {row["kernel"] for row in compiled}
    assert not missing, f"no case in {CASES.name} launches {sorted(missing)}"
