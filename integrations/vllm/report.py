"""Which kernel serves which layer of a running engine, and why not ours."""

from __future__ import annotations

from collections import Counter
from typing import Any

from beam_moe.integrations.vllm import metrics


def report(model: Any) -> dict[str, Any]:
    """``layers``: one row per MoE layer of this rank (name, experts class, up to how many tokens ours serve,
    reason, up to how many tokens the router is ours); ``mxfp8_linears``: how many MXFP8 linear layers each kernel
    class has; ``calls``: `metrics.snapshot`."""
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
    return {"layers": rows, "mxfp8_linears": mxfp8_linears(model), "calls": metrics.snapshot()}


def mxfp8_linears(model: Any) -> dict[str, int]:
    """How many MXFP8 linear layers of ``model`` each class of kernels serves."""
    from vllm.model_executor.kernels.linear import Mxfp8LinearKernel

    # vLLM's methods, and compressed-tensors' schemes, keep a layer's kernel under names of their own
    holders = (getattr(m, name, None) for m in model.modules() for name in ("quant_method", "scheme"))
    kept = (v for holder in holders if holder is not None for v in vars(holder).values())
    kernels = {id(k): type(k).__name__ for k in kept if isinstance(k, Mxfp8LinearKernel)}  # a LoRA wrapper's once more
    return dict(Counter(kernels.values()))
