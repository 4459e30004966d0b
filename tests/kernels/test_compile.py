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

NOT_ON_HOPPER = {"beam_moe.kernels.mxfp8.gemm._native_kernel"}

pytestmark = pytest.mark.compile


def compile_cases(triton: str, tmp_path, *arguments: str) -> tuple[list[dict], dict]:
    """Rows of the kernels compiled, and the inventory of the package's kernels."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    if triton == "oldest":
        if not OLDEST.is_dir():
            pytest.skip("no .venv-triton: make venv-triton")
        env["PYTHONPATH"] = str(OLDEST)
    done = subprocess.run(
        [sys.executable, str(CASES), *arguments], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    errors = [row for row in rows if "error" in row]
    assert done.returncode == 0 and not errors, f"{errors}\n{done.stderr[-4000:]}"
    (inventory,) = (row for row in rows if "kernels" in row)
    return [row for row in rows if "kernel" in row], inventory


@pytest.mark.parametrize("triton", ["oldest", "own"])
def test_every_kernel_compiles_for_sm_90a(triton, tmp_path):
    compiled, inventory = compile_cases(triton, tmp_path, "90")
    assert {row["target"] for row in compiled} == {"sm_90a"}
    over = [row for row in compiled if row["shared"] > 232448]
    assert not over, f"more shared memory than an H200 has: {over}"
    running_on = [row for row in compiled if row["running_on"]]
    assert not running_on, f"products of one step may read what the next one decodes (`settled`): {running_on}"
    if triton == "oldest":
        assert inventory["triton"] == "3.6.0"
    missing = set(inventory["kernels"]) - {row["kernel"] for row in compiled} - NOT_ON_HOPPER
    assert not missing, f"no case in {CASES.name} launches {sorted(missing)}"


@pytest.mark.parametrize("triton", ["oldest", "own"])
def test_mxfp8_takes_block_scaled_instructions_on_sm_100a(triton, tmp_path):
    """No such GPU is needed to see that the products of two MXFP8 operands use the hardware's own scaling.

    Swizzled scales of 128 rows reach tensor memory by copies from shared memory: all that is stored there from
    registers is the accumulator's zeros, one word a lane for each token of the tile.
    """
    compiled, _ = compile_cases(triton, tmp_path, "100", "mxfp8_native")
    assert {row["target"] for row in compiled} == {"sm_100a"}
    native = [row for row in compiled if row["kernel"] in NOT_ON_HOPPER]
    # products of given operands; forward, dgrad and wgrad of `linear` with 16 tokens and with 300
    tokens = [16, 256, 16, 128, 256, 16, 16, 256, 256, 256, 256]
    assert len(native) == len(tokens)
    for row in native:
        assert row["mma"] and all("kind::mxf8f6f4.block_scale" in mma for mma in row["mma"]), row
        assert row["tmem"] <= 512 and not row["trap"], row
    for row in native[:2]:  # row-major scales
        assert row["tmem_copies"] == 0, row
    for row in native[2:]:
        assert row["tmem_copies"] > 0, row
    stored = [row["tmem_stores"] - columns for row, columns in zip(native, tokens, strict=True)]
    by_registers = [0, 1, 2, 5, 6, 7]  # row-major scales, and any of 16 tokens
    assert [i for i, words in enumerate(stored) if words] == by_registers, stored


def test_rules_fit_in_little_shared_memory(tmp_path):
    """An sm_120 has 99 KiB for a program, less than half of an H200's."""
    compiled, _ = compile_cases("oldest", tmp_path, "120", "moe_lora_rules", "linear_lora")
    assert len(compiled) >= 36 and {row["target"] for row in compiled} == {"sm_120a"}
    over = [row for row in compiled if row["shared"] > 99 << 10]
    assert not over, over
