"""Which kernel serves which layer of a running engine, and why not ours."""

from __future__ import annotations

from typing import Any

from beam_moe.integrations.vllm import metrics


def report(model: Any) -> dict[str, Any]:
    """``layers``: one row per MoE layer of this rank (name, experts class, up to how many tokens ours serve,
    reason, up to how many tokens the router is ours); ``calls``: `metrics.snapshot`."""
    from vllm.model_executor.layers.fused_moe import MoERunner

    from beam_moe.integrations.vllm.experts import experts_of
    from beam_moe.integrations.vllm.router import routing_of

    rows = []
    for module in model.modules():
        if not isinstance(module, MoERunner):
            continue
        method = module.routed_experts.quant_method
        kernel = getattr(method, "moe_kernel", None)
        stock = getattr(getattr(kernel, "impl", None), "fused_experts", None)
        ours = experts_of(module)
        rows.append(
            {
                "layer": module.layer_name,
                "experts": type(stock).__name__ if stock is not None else type(method).__name__,
                "ours_up_to_tokens": 0 if ours is None or ours.reason or ours.no_bank else ours.limit(False),
                "with_adapters_up_to_tokens": 0 if ours is None or ours.reason or ours.no_bank else ours.limit(True),
                "lora": ours is not None and ours.bank is not None,
                "router_up_to_tokens": 0 if (routing := routing_of(module)) is None else routing.limit(),
                "reason": "vLLM's choice" if ours is None else ours.reason or ours.no_bank,
            }
        )
    return {"layers": rows, "calls": metrics.snapshot()}
