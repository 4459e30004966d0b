"""Checkpoints of the distributed optimizer for parameters of two types, such as a bf16 model with an fp32 router."""

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


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
    """Run `repair_group_map` on every distributed optimizer as it is built. Idempotent."""
    original = DistributedOptimizer.__init__
    if getattr(original, "__beam_moe__", False):
        return

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if not self.is_stub_optimizer:
            repair_group_map(self)

    __init__.__beam_moe__, __init__.__wrapped__ = True, original
    DistributedOptimizer.__init__ = __init__
