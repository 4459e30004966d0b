"""Adapter layouts on their way into vLLM's LoRA manager: recognised by their own names, converted, never cut down.

vLLM's manager holds expert adapters in one layout per engine: per-expert factors, or with ``enable_moe_shared_loras``
one A of gate and up and one B of down for all experts. An adapter comes in one of four:

    per expert      experts.{i}.{gate,up,down}_proj   A (r, in)   B (out, r)
    flat 3-D        experts.base_layer                A (E r, H)  B (2I, r E)     gate and up; A (e, r), B (r, e)
                    experts                           A (E r, I)  B (H, r E)      down
    shared-outer    experts.w1, experts.w3            A (1, r, H) B (E, I, r)     gate, up
                    experts.w2                        A (E, r, I) B (1, H, r)     down
    packed          experts.gate_up_proj, .down_proj  A (E|1, r, in)  B (E|1, out, r)

A projection that an adapter leaves out is a zero adapter. ``alpha / r`` is folded into B in fp32, on a copy.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

SHARED = ("w1", "w2", "w3")
"""vLLM's names, and order, of gate, down and up."""
PACKED = ("gate_up_proj", "down_proj")


def attach(manager: Any) -> None:
    """Make a freshly built ``LoRAModelManager`` accept every layout above for its MoE layers.

    The names are added to what its loader expects; the conversion happens where vLLM checks the layout, before packing.
    """
    names = manager.packed_modules_mapping.get("experts")
    if names is None:
        return
    extra = [f"experts.{n}" for n in (*SHARED, *PACKED)]
    for module in manager.modules.values():
        if isinstance(module, FusedMoEWithLoRA):
            extra += [f"experts.{i}.{p}_proj" for i in range(module.global_num_experts) for p in ("gate", "down", "up")]
            break
    known = list(dict.fromkeys([*names, *extra]))
    # a manager's own copy: its modules took their sub-names from the list before this one was extended
    manager.packed_modules_mapping = {**manager.packed_modules_mapping, "experts": known}
    manager._validate_moe_lora_format = MethodType(normalise, manager)


def normalise(manager: Any, lora_model: LoRAModel) -> None:
    """Convert ``lora_model``'s experts, in place, to the layout of ``manager``'s MoE layers.

    Raises:
        ValueError: a router adapter, a tensor that no layer would take, factors that do not fit, or per-expert outer
            factors in an engine that shares them; the message names the module.
    """
    for name, module in manager.modules.items():
        if isinstance(module, FusedMoEWithLoRA) and not isinstance(module, FusedMoE3DWithLoRA):
            _normalise_layer(lora_model, name, module)
    refuse_router(lora_model)
    refuse_leftovers(manager, lora_model)


def refuse_router(lora_model: LoRAModel) -> None:
    """Name a router that an adapter would change: vLLM loads such an adapter and then routes without it."""
    for name, weights in lora_model.loras.items():
        if name.endswith(".mlp.gate") and isinstance(weights.lora_b, torch.Tensor) and bool(weights.lora_b.any()):
            raise ValueError(
                f"LoRA adapter {lora_model.id}: {name} is a router; vLLM would load its adapter and route without it. "
                "Train without it, or sync the router's weight itself"
            )


def refuse_leftovers(manager: Any, lora_model: LoRAModel) -> None:
    """Name every module of an adapter that no layer of this rank would take."""
    taken = set(manager.modules)
    for parts in manager.packed_modules.values():
        taken.update(parts)
    left = sorted(name for name in lora_model.loras if name not in taken)
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise ValueError(f"LoRA adapter {lora_model.id}: no layer takes its {shown}; they would be dropped in silence")


def _normalise_layer(lora_model: LoRAModel, name: str, module: FusedMoEWithLoRA) -> None:
    loras = lora_model.loras
    prefix = name[: -len("experts")]
    done = loras.get(name)
    if done is not None and isinstance(done.lora_a, list):
        return
    flat = [loras.get(name), loras.get(f"{name}.base_layer")]
    shared = {w: loras.get(f"{name}.{w}") for w in SHARED}
    packed = [loras.get(f"{name}.{p}") for p in PACKED]
    layouts = {
        "flat 3-D": any(w is not None for w in flat),
        "shared-outer": any(w is not None for w in shared.values()),
        "packed": any(w is not None for w in packed),
        "per expert": any(n.startswith(f"{name}.") and n[len(name) + 1 :].split(".")[0].isdigit() for n in loras),
    }
    found = [layout for layout, there in layouts.items() if there]
    if len(found) > 1:
        raise ValueError(f"LoRA adapter {lora_model.id}: {name} comes in two layouts, {' and '.join(found)}")
    if not found:
        return
    experts = module.global_num_experts
    if found == ["per expert"]:
        per_expert = {w: _stack(lora_model, name, w, p, module) for w, p in zip(SHARED, ("gate", "down", "up"))}
        factors = {w: f for w, f in per_expert.items() if f is not None}
    elif found == ["flat 3-D"]:
        factors = {}
        if flat[0] is not None:
            factors["w2"] = _flat(flat[0], name, experts)
        if flat[1] is not None:
            factors.update(_halves(_flat(flat[1], f"{name}.base_layer", experts), f"{name}.base_layer"))
    elif found == ["packed"]:
        factors = {}
        if packed[0] is not None:
            factors.update(_halves(_scaled(packed[0], f"{name}.gate_up_proj", 3), f"{name}.gate_up_proj"))
        if packed[1] is not None:
            factors["w2"] = _scaled(packed[1], f"{name}.down_proj", 3)
    else:
        factors = {w: _scaled(f, f"{name}.{w}", 3) for w, f in shared.items() if f is not None}
    a, b = _complete(factors, module, name)
    for key in [k for k in loras if k == name or k.startswith(prefix + "experts.")]:
        del loras[key]
    rank = max(t.shape[1] for t in a)
    loras[name] = PackedLoRALayerWeights(name, rank, [None, None, None], a, b, scaling=[1, 1, 1])


Factors = tuple[torch.Tensor, torch.Tensor]


def _scaled(weights: LoRALayerWeights, name: str, dims: int) -> Factors:
    a, b = weights.lora_a, weights.lora_b
    if a is None or b is None:
        raise ValueError(f"{name} has only one of lora_A and lora_B")
    if a.dim() != dims or b.dim() != dims:
        raise ValueError(f"{name} must have factors of {dims} dimensions, got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[-2] != b.shape[-1] and dims == 3:
        raise ValueError(f"{name}: lora_A has rank {a.shape[-2]}, lora_B {b.shape[-1]}")
    # out of place: these may be a trainer's live tensors
    return a, b if weights.scaling == 1 else (b.float() * weights.scaling).to(b.dtype)


def _flat(weights: LoRALayerWeights, name: str, experts: int) -> Factors:
    a, b = _scaled(weights, name, 2)
    if a.shape[0] != b.shape[1] or a.shape[0] % experts:
        raise ValueError(
            f"{name}: flat 3-D factors must be (r * {experts}, in) and (out, r * {experts}), "
            f"got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    return a.view(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1).contiguous()


def _halves(factors: Factors, name: str) -> dict[str, Factors]:
    a, b = factors
    if b.shape[1] % 2:
        raise ValueError(f"{name}: lora_B must have 2 * I rows, gate first, got {b.shape[1]}")
    half = b.shape[1] // 2
    return {"w1": (a, b[:, :half].contiguous()), "w3": (a, b[:, half:].contiguous())}


def _stack(lora_model: LoRAModel, name: str, w: str, projection: str, module: FusedMoEWithLoRA) -> Factors | None:
    """One projection of every local expert as (E_local, r, in) and (E_local, out, r); an absent expert is zeros."""
    first = module.ep_rank * module.local_num_experts if module.use_ep else 0
    found: list[Factors | None] = []
    for i in range(first, first + module.local_num_experts):
        key = f"{name}.{i}.{projection}_proj"
        weights = lora_model.loras.get(key)
        found.append(None if weights is None else _scaled(weights, key, 2))
    some = next((f for f in found if f is not None), None)
    if some is None:
        return None
    ranks = {f[0].shape[0] for f in found if f is not None}
    if len(ranks) > 1:
        raise ValueError(f"{name}: its experts' {projection}_proj have different ranks {sorted(ranks)}")
    blank = (torch.zeros_like(some[0]), torch.zeros_like(some[1]))
    pairs = [blank if f is None else f for f in found]
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


def _complete(
    factors: dict[str, Factors], module: FusedMoEWithLoRA, name: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The three projections in vLLM's order, in the expert axes of the layer's buffers."""
    some = next(iter(factors.values()))
    rank = some[0].shape[1]
    h, i = module.hidden_size, module.moe_config.intermediate_size
    buffers = {
        "w1": (module.w13_lora_a_stacked[0], module.w13_lora_b_stacked[0]),
        "w2": (module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0]),
        "w3": (module.w13_lora_a_stacked[-1], module.w13_lora_b_stacked[-1]),
    }
    a_list, b_list = [], []
    for w in SHARED:
        fan_in, fan_out = (i, h) if w == "w2" else (h, i)
        buffer_a, buffer_b = buffers[w]
        if w not in factors:
            e_a, e_b = buffer_a.shape[1], buffer_b.shape[1]
            a_list.append(some[0].new_zeros(e_a, rank, fan_in))
            b_list.append(some[1].new_zeros(e_b, fan_out, rank))
            continue
        a, b = factors[w]
        if a.shape[2] != fan_in or b.shape[1] != fan_out:
            raise ValueError(
                f"{name}.{w}: factors must be (E, r, {fan_in}) and (E, {fan_out}, r), "
                f"got {tuple(a.shape)} and {tuple(b.shape)}"
            )
        a_list.append(_experts_axis(a, buffer_a, module, f"{name}.{w}.lora_A"))
        b_list.append(_experts_axis(b, buffer_b, module, f"{name}.{w}.lora_B"))
    return a_list, b_list


def _experts_axis(t: torch.Tensor, buffer: torch.Tensor, module: FusedMoEWithLoRA, name: str) -> torch.Tensor:
    """``t`` with the buffer's expert axis: this rank's experts, one factor repeated, or equal factors as one."""
    have, want = t.shape[0], buffer.shape[1]
    if have == want:
        return t
    if have == 1:
        return t.expand(want, -1, -1).contiguous()
    if want == 1:
        if bool((t == t[:1]).all()):
            return t[:1].contiguous()
        raise ValueError(
            f"{name} differs between experts, but the engine runs with enable_moe_shared_loras, which keeps one for all"
        )
    if have == module.global_num_experts:
        first = module.ep_rank * want
        return t[first : first + want].contiguous()
    raise ValueError(f"{name} has {have} experts, expected 1, {want} or {module.global_num_experts}")
