"""The fused layer as torch custom operators, which is what `fused_moe` becomes inside ``torch.compile``.

    beam_moe::fused_moe       returns the layer's output
    beam_moe::fused_moe_out   writes it into ``out``

An operator takes tensors alone: a weight travels as a list, ``[dense]`` or the ``[data, scale(, rows)]`` of an
`MXFP8Tensor` in blocks along its last axis, and a bank as the list of its factors (empty without one). Arguments are
checked when the operator runs. The intermediates are memory of that call, under CUDA graphs the graph's own pool.
"""

from __future__ import annotations

import torch

from beam_moe.kernels.moe_lora import fused
from beam_moe.kernels.moe_lora.bank import ExpertLoRA
from beam_moe.kernels.mxfp8.format import MXFP8Tensor

Weight = torch.Tensor | MXFP8Tensor


def _parts(name: str, w: Weight) -> list[torch.Tensor]:
    if not isinstance(w, MXFP8Tensor):
        return [w]
    if w.axis != -1 or w.swizzled or w.offsets is not None:
        raise ValueError(
            f"fused_moe: {name} must be of row-major scales in blocks along its last axis, got axis {w.axis}, "
            f"swizzled {w.swizzled}"
        )
    return [w.data, w.scale] if w.rows is None else [w.data, w.scale, w.rows]


def _weight(parts: list[torch.Tensor]) -> Weight:
    if len(parts) == 1:
        return parts[0]
    return MXFP8Tensor(parts[0], parts[1], -1, rows=parts[2] if len(parts) == 3 else None)


def _factors(lora: ExpertLoRA | None) -> list[torch.Tensor]:
    if lora is None:
        return []
    (gate_a, up_a), (gate_b, up_b) = lora.gate_up_a, lora.gate_up_b
    return [gate_a, up_a, gate_b, up_b, lora.w2_a, lora.w2_b, lora.ranks, lora.enabled]


def _bank(factors: list[torch.Tensor]) -> ExpertLoRA | None:
    if not factors:
        return None
    gate_a, up_a, gate_b, up_b, w2_a, w2_b, ranks, enabled = factors
    return ExpertLoRA((gate_a, up_a), (gate_b, up_b), w2_a, w2_b, ranks=ranks, enabled=enabled)


def _launch(x, w13, w2, topk_weights, topk_ids, factors, lora_ids, expert_map, routed_scaling, out):
    return fused._fused_moe(
        x, _weight(w13), _weight(w2), topk_weights, topk_ids, _bank(factors), lora_ids, expert_map, routed_scaling, out,
        None, None,
    )  # fmt: skip


@torch.library.custom_op("beam_moe::fused_moe", mutates_args=())
def fused_moe_op(
    x: torch.Tensor, w13: list[torch.Tensor], w2: list[torch.Tensor], topk_weights: torch.Tensor,
    topk_ids: torch.Tensor, factors: list[torch.Tensor], lora_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None, routed_scaling: float,
) -> torch.Tensor:  # fmt: skip
    return _launch(x, w13, w2, topk_weights, topk_ids, factors, lora_ids, expert_map, routed_scaling, None)


@fused_moe_op.register_fake
def _(x, w13, w2, topk_weights, topk_ids, factors, lora_ids, expert_map, routed_scaling):
    return x.new_empty(x.shape)


@torch.library.custom_op("beam_moe::fused_moe_out", mutates_args=("out",))
def fused_moe_out_op(
    x: torch.Tensor, w13: list[torch.Tensor], w2: list[torch.Tensor], topk_weights: torch.Tensor,
    topk_ids: torch.Tensor, factors: list[torch.Tensor], lora_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None, routed_scaling: float, out: torch.Tensor,
) -> None:  # fmt: skip
    _launch(x, w13, w2, topk_weights, topk_ids, factors, lora_ids, expert_map, routed_scaling, out)


@fused_moe_out_op.register_fake
def _(x, w13, w2, topk_weights, topk_ids, factors, lora_ids, expert_map, routed_scaling, out):
    return None


def call(x, w13, w2, topk_weights, topk_ids, lora, lora_ids, expert_map, routed_scaling, out) -> torch.Tensor:
    """`fused_moe` through its operators; arguments and result as there."""
    weights = _parts("w13", w13), _parts("w2", w2)
    args = (x, *weights, topk_weights, topk_ids, _factors(lora), lora_ids, expert_map, float(routed_scaling))
    if out is None:
        return fused_moe_op(*args)
    fused_moe_out_op(*args, out)
    return out
