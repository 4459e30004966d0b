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

vLLM copies factors of too few rows or columns into a corner of its buffers, and finds others too large when the adapter
before is gone already: shapes are compared here, before anything is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.model_executor.layers.linear import QKVParallelLinear

SHARED = ("w1", "w2", "w3")
"""vLLM's names, and order, of gate, down and up."""
PROJECTIONS = dict(zip(SHARED, ("gate", "down", "up")))
PACKED = ("gate_up_proj", "down_proj")


def attach(manager: Any) -> None:
    """Make a freshly built ``LoRAModelManager`` accept every layout above for its MoE layers.

    The names are added to what its loader expects; the conversion happens where vLLM checks the layout, before packing.
    A rank may take an adapter of which it has no module, as a pipeline stage does: vLLM's packing fails there.
    """
    pack = manager._create_merged_loras_inplace
    manager._create_merged_loras_inplace = lambda lora_model: pack(lora_model) if lora_model.loras else None
    manager._validate_moe_lora_format = MethodType(normalise, manager)
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


def normalise(manager: Any, lora_model: LoRAModel) -> None:
    """Convert ``lora_model``'s experts, in place, to the layout of ``manager``'s MoE layers.

    Raises:
        ValueError: a router adapter, a tensor that no layer would take, factors that do not fit their layer, each other
            or ``max_lora_rank``, or per-expert outer factors in an engine that shares them; the message names the
            module.
    """
    limit = manager.lora_config.max_lora_rank
    for name, module in manager.modules.items():
        if isinstance(module, FusedMoEWithLoRA) and not isinstance(module, FusedMoE3DWithLoRA):
            _normalise_layer(lora_model, name, module, limit)
    refuse_router(lora_model)
    refuse_leftovers(manager, lora_model)
    refuse_misfits(manager, lora_model, limit)


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
    _refuse(lora_model, (name for name in lora_model.loras if name not in taken))


def _refuse(lora_model: LoRAModel, names: Iterable[str]) -> None:
    left = sorted(names)
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise ValueError(f"LoRA adapter {lora_model.id}: no layer takes its {shown}; they would be dropped in silence")


def output_sizes(linear: Any) -> list[int]:
    """Rows of each projection that one of vLLM's linear layers joins, as on one GPU."""
    if isinstance(linear, QKVParallelLinear):  # whose own sizes count heads once for each rank that repeats them
        heads, keys = linear.total_num_heads, linear.total_num_kv_heads
        return [heads * linear.head_size, keys * linear.head_size, keys * linear.v_head_size]
    return list(getattr(linear, "output_sizes", [linear.output_size]))


def linear_sizes(manager: Any) -> dict[str, tuple[int, int]]:
    """``(in, out)`` of each linear module that an adapter may name, as wide as on one GPU."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, module in manager.modules.items():
        if not isinstance(module, BaseLinearLayerWithLoRA):
            continue
        base = module.base_layer
        parts, outs = manager.packed_modules.get(name, [name]), output_sizes(base)
        if len(outs) == len(parts):
            sizes |= {part: (base.input_size, out) for part, out in zip(parts, outs)}
    return sizes


def refuse_misfits(manager: Any, lora_model: LoRAModel, limit: int) -> None:
    """Name a module of which one factor is absent, of another size than its layer or of a rank above ``limit``."""
    sizes = linear_sizes(manager)
    for name, weights in lora_model.loras.items():
        a, b = weights.lora_a, weights.lora_b
        if isinstance(a, list) or isinstance(b, list):
            continue  # packed: compared when it came
        if a is None or b is None:
            raise ValueError(f"LoRA adapter {lora_model.id}: {name} has only one of lora_A and lora_B")
        rank = a.shape[0]
        wide = sizes.get(name)
        fits = wide is None or (a.shape[1:] == wide[:1] and b.shape[:-1] == wide[1:])
        # vLLM's own dummies are as wide as the rank's shard, and all zeros
        if (not fits or b.shape[-1] != rank) and (bool(a.any()) or bool(b.any())):
            wanted = "(r, in) and (out, r)" if wide is None else f"(r, {wide[0]}) and ({wide[1]}, r)"
            raise ValueError(
                f"LoRA adapter {lora_model.id}: {name} must have factors of {wanted}, "
                f"got {tuple(a.shape)} and {tuple(b.shape)}"
            )
        _refuse_rank(name, rank, limit)


def _refuse_rank(name: str, rank: int, limit: int) -> None:
    if rank > limit:
        raise ValueError(f"{name} has rank {rank}, more than max_lora_rank={limit}")


def _normalise_layer(lora_model: LoRAModel, name: str, module: FusedMoEWithLoRA, limit: int) -> None:
    loras = lora_model.loras
    prefix = name[: -len("experts")]
    done = loras.get(name)
    if done is not None and isinstance(done.lora_a, list):
        return
    experts = module.global_num_experts
    numbered = [f"{name}.{i}.{p}_proj" for i in range(experts) for p in PROJECTIONS.values()]
    known = {name, f"{name}.base_layer", *(f"{name}.{w}" for w in (*SHARED, *PACKED)), *numbered}
    _refuse(lora_model, (k for k in loras if k.startswith(f"{name}.") and k not in known))
    flat = [loras.get(name), loras.get(f"{name}.base_layer")]
    shared = {w: loras.get(f"{name}.{w}") for w in SHARED}
    packed = [loras.get(f"{name}.{p}") for p in PACKED]
    layouts = {
        "flat 3-D": any(w is not None for w in flat),
        "shared-outer": any(w is not None for w in shared.values()),
        "packed": any(w is not None for w in packed),
        "per expert": any(n in loras for n in numbered),
    }
    found = [layout for layout, there in layouts.items() if there]
    if len(found) > 1:
        raise ValueError(f"LoRA adapter {lora_model.id}: {name} comes in two layouts, {' and '.join(found)}")
    if not found:
        return
    stacked = found == ["per expert"]
    if stacked:
        per_expert = {w: _stack(lora_model, name, p, module) for w, p in PROJECTIONS.items()}
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
    for w, (factor, _) in factors.items():
        _refuse_rank(f"{name}.{w}", factor.shape[1], limit)
    a, b = _complete(factors, module, name, stacked)
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
    if a.shape[-2] != b.shape[-1]:
        raise ValueError(f"{name}: lora_A has rank {a.shape[-2]}, lora_B {b.shape[-1]}")
    # out of place: these may be a trainer's live tensors
    return a, b if weights.scaling == 1 else (b.float() * weights.scaling).to(b.dtype)


def _flat(weights: LoRALayerWeights, name: str, experts: int) -> Factors:
    a, b = _scaled(weights, name, 2)
    if a.shape[0] % experts:
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


def _stack(lora_model: LoRAModel, name: str, projection: str, module: FusedMoEWithLoRA) -> Factors | None:
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
    for what, sizes in (
        ("ranks", {f[0].shape[0] for f in found if f is not None}),
        ("widths", {(f[0].shape[1], f[1].shape[0]) for f in found if f is not None}),
    ):
        if len(sizes) > 1:
            raise ValueError(f"{name}: its experts' {projection}_proj have different {what} {sorted(sizes)}")
    blank = (torch.zeros_like(some[0]), torch.zeros_like(some[1]))
    pairs = [blank if f is None else f for f in found]
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


def _complete(
    factors: dict[str, Factors], module: FusedMoEWithLoRA, name: str, stacked: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The three projections in vLLM's order, in the expert axes of the layer's buffers.

    Args:
        stacked: the factors are this rank's experts alone, else those of all, or one.
    """
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
        given = module.local_num_experts if stacked else module.global_num_experts
        a_list.append(_experts_axis(a, buffer_a, module, f"{name}.{w}.lora_A", given))
        b_list.append(_experts_axis(b, buffer_b, module, f"{name}.{w}.lora_B", given))
    return a_list, b_list


def _experts_axis(
    t: torch.Tensor, buffer: torch.Tensor, module: FusedMoEWithLoRA, name: str, given: int
) -> torch.Tensor:
    """``t``, of ``given`` experts or one for all, with the buffer's expert axis: this rank's experts, one factor
    repeated, or equal factors as one."""
    have, want = t.shape[0], buffer.shape[1]
    if have not in (1, given):
        raise ValueError(f"{name} has {have} experts, expected 1 or {given}")
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
    first = module.ep_rank * want
    return t[first : first + want].contiguous()
