"""What the fused layer computes, as a loop that one can read."""

import torch


def fused_moe_reference(
    x, w13, w2, topk_weights, topk_ids, *, lora=None, lora_ids=None, expert_map=None, routed_scaling=1.0
) -> torch.Tensor:
    """The routed experts of one layer with their adapters, in fp32 with `fused_moe`'s two roundings.

    Arguments as for `fused_moe`. The activation ``h`` is rounded once to x's dtype (the second product's operand), and
    so is the result; everything between stays in fp32. Returns (T, H) in x's dtype.
    """
    if not isinstance(w13, torch.Tensor):
        from beam_moe.kernels.mxfp8 import dequantize_reference

        w13, w2 = dequantize_reference(w13), dequantize_reference(w2)
    experts, inter = w2.shape[0], w2.shape[2]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    ids = topk_ids.tolist()
    slots = [-1] * len(ids) if lora is None or lora_ids is None else lora_ids.tolist()
    if lora is not None:
        ranks, enabled = lora.ranks.tolist(), lora.enabled.tolist()
    mapping = None if expert_map is None else expert_map.tolist()

    for token, chosen in enumerate(ids):
        slot = slots[token]
        has_adapter = lora is not None and 0 <= slot < lora.slots and bool(enabled[slot])
        rank = min(max(ranks[slot], 0), lora.rank) if has_adapter else 0
        for k, expert in enumerate(chosen):
            if mapping is not None:
                expert = mapping[expert] if 0 <= expert < len(mapping) else -1
            if not 0 <= expert < experts:
                continue
            xt = x[token].float()
            gate, up = (w13[expert].float() @ xt).split(inter)
            if rank:
                sides = []
                for base, a, b in zip((gate, up), lora.gate_up_a, lora.gate_up_b):
                    a = a[slot, 0 if lora.shared_a else expert, :rank].float()
                    sides.append(base + b[slot, expert, :, :rank].float() @ (a @ xt))
                gate, up = sides
            h = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
            y = w2[expert].float() @ h
            if rank:
                b = lora.w2_b[slot, 0 if lora.shared_b else expert, :, :rank].float()
                y = y + b @ (lora.w2_a[slot, expert, :rank].float() @ h)
            out[token] += float(topk_weights[token, k]) * y
    return (out * routed_scaling).to(x.dtype)
