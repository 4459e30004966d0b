"""Checkpoints of the distributed optimizer for parameters of two types, such as a bf16 model with an fp32 router."""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer


def repair_group_map(optimizer: DistributedOptimizer) -> int:
    """Make the map from parameter to optimizer slot say where the parameter is; returns how many entries were wrong.

    megatron-core (0.19.2, and 0.20 in development) builds ``model_param_group_index_map`` in the order of its gradient
    buffers but hands the optimizer every group as ``[fp32..., bf16...]``. Steps do not use the map; saving and loading
    do, so with parameters of both types a checkpoint fails or mixes their states.
    """
    changed = 0
    for group, (fp32, fp16) in enumerate(zip(optimizer.model_fp32_groups, optimizer.model_float16_groups)):
        for slot, param in enumerate([*fp32, *fp16]):
            if optimizer.model_param_group_index_map[param] != (group, slot):
                optimizer.model_param_group_index_map[param] = (group, slot)
                changed += 1
    return changed


def install() -> None:
    """Mend every distributed optimizer: `repair_group_map` as it is built, saving and loading. Idempotent.

    The optimizer's own shard of an fp32 parameter is a view of that parameter, not a copy: loading a checkpoint writes
    into it, which autograd refuses outside ``no_grad``. PyTorch's Adam, used without Transformer Engine and Apex, comes
    back with one step counter for all parameters, which each of them then advances, and its counter is missed among
    the tensors of the format ``fully_reshardable``. Where a rank trains no parameter of one kind, as with adapters on
    the experts alone under expert parallelism or in a pipeline stage of dense layers, its optimizer of that kind is an
    empty one, of which megatron-core asks steps and state all the same.
    """
    build, load = DistributedOptimizer.__init__, DistributedOptimizer.load_state_dict
    save, fill = DistributedOptimizer.sharded_state_dict, DistributedOptimizer._set_main_param_and_optimizer_states
    align = ChainedOptimizer._synchronize_steps
    if getattr(build, "__beam_moe__", False):
        return

    def empty(optimizer) -> bool:
        return optimizer.is_stub_optimizer or not getattr(optimizer, "buffers", True)

    def __init__(self, *args, **kwargs):
        build(self, *args, **kwargs)
        if not self.is_stub_optimizer:
            repair_group_map(self)

    def load_state_dict(self, state_dict):
        if empty(self):
            return
        if "optimizer" not in state_dict:
            raise ValueError(
                "DistributedOptimizer: its state must be in the checkpoint, got none: fully_reshardable keeps that of "
                "the first pipeline stage, which trained nothing; save by dp_reshardable"
            )
        steps = {group["step"] for group in state_dict["optimizer"]["param_groups"] if "step" in group}
        with torch.no_grad():
            load(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor) and len(steps) == 1:
                state["step"] = torch.full_like(state["step"], float(*steps))

    def sharded_state_dict(self, *args, **kwargs):
        if not empty(self):
            return save(self, *args, **kwargs)
        chosen = (kwargs.get("metadata") or {}).get("distrib_optim_sharding_type", "fully_sharded_model_space")
        return {"param_state_sharding_type": chosen}  # which all ranks read as rank 0 wrote it

    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        fill(self, model_param, {"step": None, **tensors})

    def _synchronize_steps(self):
        every = self.chained_optimizers
        self.chained_optimizers = [o for o in every if not getattr(o, "is_stub_optimizer", False)]
        try:
            return align(self)
        finally:
            self.chained_optimizers = every

    patches: list[tuple[type, Any, Any]] = [
        (DistributedOptimizer, __init__, build),
        (DistributedOptimizer, load_state_dict, load),
        (DistributedOptimizer, sharded_state_dict, save),
        (DistributedOptimizer, _set_main_param_and_optimizer_states, fill),
        (ChainedOptimizer, _synchronize_steps, align),
    ]
    for owner, ours, theirs in patches:
        ours.__beam_moe__, ours.__wrapped__ = True, theirs
        setattr(owner, ours.__name__, ours)
