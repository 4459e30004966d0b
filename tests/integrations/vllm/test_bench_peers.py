"""The bench's peer is vLLM's own kernels on our operands: here in the interpreter, at sizes that need no C++ op."""

from pathlib import Path

import pytest
import torch

from beam_moe.kernels.moe_lora import ExpertLoRA, fused_moe_reference
from beam_moe.testing import assert_close

TOKENS, TOP_K, EXPERTS, HIDDEN, INTER, RANK = 2, 2, 64, 64, 32, 8  # vLLM aligns nothing at so few tokens


@pytest.fixture
def peers(fake_hopper, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "bench"))
    import peers
    from vllm import _custom_ops as ops

    def silu_and_mul(out, x):
        gate, up = x.float().chunk(2, -1)
        out.copy_((torch.nn.functional.silu(gate) * up).to(out.dtype))

    assert peers.vllm_missing() is None
    monkeypatch.setattr(ops, "moe_sum", lambda x, out, *extra: out.copy_(x.float().sum(1).to(out.dtype)))
    monkeypatch.setattr(torch.ops._C, "silu_and_mul", silu_and_mul, raising=False)
    return peers


def factors(slots, shared):
    def f(*sizes):
        return (torch.randn(sizes) * sizes[-1] ** -0.5).half()

    outer = 1 if shared else EXPERTS
    return ExpertLoRA(
        f(slots, outer, 2, RANK, HIDDEN),
        f(slots, EXPERTS, 2, INTER, RANK),
        f(slots, EXPERTS, RANK, INTER),
        f(slots, outer, HIDDEN, RANK),
    )


@pytest.mark.parametrize("adapters", ["none", "per_expert", "shared_outer", "two_slots"])
def test_vllm_experts_compute_what_the_reference_does(peers, adapters):
    w13 = (torch.randn(EXPERTS, 2 * INTER, HIDDEN) * HIDDEN**-0.5).half()
    w2 = (torch.randn(EXPERTS, HIDDEN, INTER) * INTER**-0.5).half()
    x = torch.randn(TOKENS, HIDDEN).half()
    ids = torch.rand(TOKENS, EXPERTS - 1).topk(TOP_K).indices.int()  # the last expert has no token
    weights = torch.softmax(torch.randn(TOKENS, TOP_K), -1)
    lora = lora_ids = None
    if adapters != "none":
        lora = factors(2 if adapters == "two_slots" else 1, adapters == "shared_outer")
        lora_ids = torch.tensor([1, -1] if adapters == "two_slots" else [0, 0], dtype=torch.int32)
    out = torch.empty_like(x)
    shape = peers.VllmExperts(
        EXPERTS, TOP_K, HIDDEN, INTER, max_tokens=TOKENS, dtype=torch.float16, device=torch.device("cpu")
    )
    layer = shape.layer(w13, w2)
    layer.bind(x, weights, ids, lora=lora, lora_ids=lora_ids, out=out)()
    assert layer.name == "vllm TritonExperts"
    reference = fused_moe_reference(x, w13, w2, weights, ids, lora=lora, lora_ids=lora_ids)
    assert_close(adapters, reference, out, 5e-3)


def test_half_shared_factors_are_not_called_a_peer(peers):
    lora = ExpertLoRA(
        torch.randn(1, 1, 2, RANK, HIDDEN).half(),
        torch.randn(1, EXPERTS, 2, INTER, RANK).half(),
        torch.randn(1, EXPERTS, RANK, INTER).half(),
        torch.randn(1, EXPERTS, HIDDEN, RANK).half(),
    )
    shape = peers.VllmExperts(
        EXPERTS, TOP_K, HIDDEN, INTER, max_tokens=TOKENS, dtype=torch.float16, device=torch.device("cpu")
    )
    x = torch.randn(TOKENS, HIDDEN).half()
    layer = shape.layer(torch.randn(EXPERTS, 2 * INTER, HIDDEN).half(), torch.randn(EXPERTS, HIDDEN, INTER).half())
    ids = torch.zeros(TOKENS, dtype=torch.int32)
    with pytest.raises(ValueError, match="both outer factors"):
        layer.bind(x, torch.rand(TOKENS, TOP_K), torch.zeros(TOKENS, TOP_K).int(), lora=lora, lora_ids=ids, out=x)
