"""The real engine on a GPU: bare rows, swaps under graphs, KV reuse, sleep, routed experts. One process a scenario."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Nothing here runs in this process."""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    done: dict[tuple, dict] = {}

    def run(name: str, pp: int = 1, tp: int = 1, base: str = "") -> dict:
        if (name, pp, tp, base) in done:
            return done[name, pp, tp, base]
        if torch.cuda.device_count() < pp * tp:
            pytest.skip(f"needs {pp * tp} GPUs")
        folder = tmp_path_factory.mktemp(name)
        env = {**os.environ, "BEAM_MOE_TEST_PP": str(pp), "BEAM_MOE_TEST_TP": str(tp), "BEAM_MOE_TEST_BASE": base}
        env.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-P", str(HERE / "engine.py"), name, str(folder)]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580)
        assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
        path = next(line.split()[1] for line in result.stdout.splitlines() if line.startswith("RESULT "))
        done[name, pp, tp, base] = json.loads(Path(path).read_text())
        return done[name, pp, tp, base]

    return run


def test_bare_rows_are_bit_equal(scenario):
    """No LoRA in the engine; LoRA on and nothing loaded; one adapter, two adapters, another in the same slot."""
    reference, lora = scenario("plain")["bare"], scenario("lora")
    assert lora["bare"] == reference and lora["after_removal"] == reference
    for name in ("mixed_a", "mixed_ab", "mixed_b"):
        assert lora[name][:4] == reference[:4], name
        assert lora[name][4:] != reference[4:], "the adapter must change something"
    assert lora["mixed_ab"][4] == lora["mixed_a"][4] and lora["mixed_ab"][5] == lora["mixed_b"][5]
    assert lora["mixed_a"][4:] != lora["mixed_b"][4:]


def test_every_layer_is_ours(scenario):
    for name in ("plain", "lora"):
        layers = scenario(name)["report"]["layers"]
        assert len(layers) == 3 and {r["experts"] for r in layers} == {"BeamTritonExperts"}
        assert not [c for c in scenario(name)["report"]["calls"] if c["path"] == "fallback"]


def test_nothing_compiles_once_the_engine_is_ready(scenario):
    """Batches and prompts of sizes that no graph has, with adapters and without."""
    ours = [n for n in scenario("lora")["compiled"] if "vllm.v1" not in n]
    assert ours == []


def test_swaps_under_mixed_traffic(scenario):
    """Adapters swapped in place while graphs exist: every output as the first time, and no memory kept."""
    lora = scenario("lora")
    assert lora["swaps"] >= 20 and lora["drift"] == 0
    memory = lora["memory"]
    assert max(memory[2:]) - min(memory[2:]) < 8 << 20, memory


def test_prefix_caching_never_reads_an_older_version(scenario):
    caching = scenario("caching")
    assert caching["b"] == caching["b_fresh"] != caching["a"]


def test_sleep_and_wake_with_an_adapter(scenario):
    sleeping = scenario("sleeping")
    assert sleeping["before"] == sleeping["level1"] == sleeping["level2"]


def test_batch_invariance(scenario):
    """With VLLM_BATCH_INVARIANT a request's output does not depend on what it is batched with."""
    result = scenario("invariant")
    assert result["together"] == result["alone"]


@pytest.mark.parametrize("base", ["fp8", "mxfp8"])
def test_quantised_base_with_adapters(scenario, base):
    """On our kernels or on vLLM's, with the reason said; the adapter works and leaves bare rows alone."""
    result = scenario("quantised", base=base)
    assert result["mixed"][:4] == result["bare"][:4] and result["mixed"][4:] != result["bare"][4:]
    for row in result["report"]["layers"]:
        assert row["ours_up_to_tokens"] > 0 or row["reason"], row


FORMATS = ("fp8", "ct-fp8", "modelopt-fp8", "ct-nvfp4", "modelopt-nvfp4", "ct-mxfp8", "modelopt-mxfp8")


@pytest.mark.parametrize("fmt", FORMATS)
def test_quantised_checkpoint_with_adapters(scenario, fmt):
    """Each format loads: MXFP8 on our kernels, FP8 and NVFP4 on vLLM's with the reason said; the adapter works."""
    result = scenario("stored", base=fmt)
    assert result["mixed"][:4] == result["bare"][:4] and result["mixed"][4:] != result["bare"][4:]
    assert len({tuple(tokens) for tokens, _ in result["bare"][:4]}) == 4, "the model must depend on its prompt"
    reasons = [c["detail"] for c in result["report"]["calls"] if c["path"] == "fallback"]
    for row in result["report"]["layers"]:
        assert (row["experts"] == "BeamMxfp8Experts") == fmt.endswith("mxfp8"), row
        assert row["ours_up_to_tokens"] > 0 or [r for r in reasons if "vLLM chose" in r], (row, reasons)


def test_draft_model_with_adapters(scenario):
    """A DFlash2 draft beside adapters: tokens are drafted, and each row's first token is the engine's without one."""
    result, alone = scenario("draft"), scenario("stored", base="plain")
    assert result["mixed"][4:] != result["bare"][4:], "the adapter must change something"
    for rows in ("bare", "mixed"):
        assert all(len(tokens) == 12 for tokens, _ in result[rows])
        assert [tokens[0] for tokens, _ in result[rows]] == [tokens[0] for tokens, _ in alone[rows]]
    assert result["drafted"].get("vllm:spec_decode_num_draft_tokens", 0) > 0, result["drafted"]
    assert {r["experts"] for r in result["report"]["layers"]} == {"BeamTritonExperts"}


@pytest.mark.parametrize("pp, tp", [(2, 1), (1, 2)])
def test_routed_experts_over_ranks(scenario, pp, tp):
    """Every layer of every token, as one GPU routes them."""
    one, many = scenario("replay"), scenario("replay", pp, tp)
    assert many["tokens"] == one["tokens"] and many["ids"] == one["ids"]
    assert {len(rows[0]) for rows in one["ids"]} == {4}
    assert all(any(any(k) for layer in rows for k in layer[1:]) for rows in one["ids"])
