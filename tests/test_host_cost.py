"""What calls cost on the host: `fused_moe` up to its launches, and loading an adapter. Medians by pytest-benchmark.

The limits are several times what a slow core needs; they catch work that should happen once and happens in every call.
"""

import pytest
import torch

from beam_moe import BeamMoEConfig, load_adapter
from beam_moe.kernels.moe_lora import ExpertLoRA, fused_moe, moe_workspace

HIDDEN, INTER, EXPERTS, TOP_K, RANK, TOKENS = 64, 32, 8, 2, 4, 8
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTER,
    "num_hidden_layers": 2,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
}


def median_us(benchmark) -> float | None:
    """None under --benchmark-disable, which runs the call once."""
    return benchmark.stats.stats.median * 1e6 if benchmark.stats else None


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels launched, none of which runs."""
    if torch.cuda.is_available():
        pytest.skip("stubs the interpreter's launches; a GPU's are timed by bench/moe_decode.py")
    from triton.runtime.interpreter import InterpretedFunction

    names: list[str] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *args, **kwargs: names.append(self.fn.__name__))
    return names


@pytest.mark.parametrize("with_lora", [False, True], ids=["bare", "lora"])
def test_call_overhead_of_fused_moe(benchmark, launches, with_lora):
    x = torch.randn(TOKENS, HIDDEN).half()
    w13, w2 = torch.randn(EXPERTS, 2 * INTER, HIDDEN).half(), torch.randn(EXPERTS, HIDDEN, INTER).half()
    weights = torch.rand(TOKENS, TOP_K)
    ids = torch.randint(0, EXPERTS - 1, (TOKENS, TOP_K), dtype=torch.int32)
    extra = {}
    if with_lora:
        lora = ExpertLoRA(
            torch.randn(1, EXPERTS, 2, RANK, HIDDEN).half(),
            torch.randn(1, EXPERTS, 2, INTER, RANK).half(),
            torch.randn(1, EXPERTS, RANK, INTER).half(),
            torch.randn(1, EXPERTS, HIDDEN, RANK).half(),
        )
        extra = {"lora": lora, "lora_ids": torch.zeros(TOKENS, dtype=torch.int32)}
    shard = BeamMoEConfig.from_hf(CONFIG).shard()
    workspace = moe_workspace(TOKENS, TOP_K, shard, RANK, "cpu")
    out = torch.zeros_like(x)

    def call():
        fused_moe(x, w13, w2, weights, ids, out=out, workspace=workspace, **extra)

    call()
    first = list(launches)
    launches.clear()
    call()
    assert launches == first and len(first) <= 5, "a call is at most five launches, the same every time"
    benchmark.pedantic(call, rounds=60, warmup_rounds=5)
    us = median_us(benchmark)
    assert us is None or us < 1500, f"{us:.0f} us of host time before the launches return"


def test_loading_an_adapter(benchmark):
    config = BeamMoEConfig.from_hf(CONFIG)
    shapes = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
    tensors = {}
    for layer in range(2):
        for expert in range(EXPERTS):
            for name, (fan_out, fan_in) in shapes.items():
                key = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, fan_in)
                tensors[f"{key}.lora_B.weight"] = torch.randn(fan_out, RANK)

    adapter = benchmark.pedantic(load_adapter, (tensors, config), rounds=10, warmup_rounds=1)
    assert sorted(adapter.experts) == [0, 1] and adapter.rank == RANK
    last = "base_model.model.model.layers.1.mlp.experts.7.down_proj.lora_A.weight"
    assert torch.equal(adapter.experts[1].w2_a[0, 7], tensors[last])
    us = median_us(benchmark)
    assert us is None or us / len(tensors) < 2000, f"{us / len(tensors):.0f} us a tensor of a few kilobytes"
