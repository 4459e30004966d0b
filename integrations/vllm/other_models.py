"""Our experts under other unquantised gated-SiLU MoE models, where ``BEAM_MOE_VLLM`` names them or says ``all``."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from beam_moe.integrations.vllm import metrics

NAME = "UnquantizedFusedMoEMethod"


class BeamMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's method for unquantised experts, building its kernel from our experts class.

    The conditions on one layer (activation, biases, ...) are checked by the experts themselves, which serve a layer or
    call vLLM's. Beam's own layers come here too and are given their options by the model class afterwards.
    """

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        from beam_moe.integrations.vllm import experts

        config = get_current_vllm_config_or_none()
        names = (
            (config.model_config.architectures or []) if config is not None and config.model_config is not None else []
        )
        wanted = [n for n in names if n != "BeamForCausalLM" and experts.serves(n)]
        if not wanted:
            return
        if self.experts_cls is not experts.TritonExperts:
            chosen: Any = self.experts_cls
            metrics.fell_back(wanted[0], f"vLLM chose {getattr(chosen, '__name__', chosen)}")
            return
        if moe.is_lora_enabled:
            experts.follow_ranks()
        self.experts_cls = experts.BeamTritonExperts
        experts.ModelWarmup().register_warmup()
        metrics.log_once(f"beam-moe: {wanted[0]}'s experts run on beam_moe.kernels.moe_lora")


def register() -> None:
    """Have vLLM instantiate `BeamMoEMethod` for `UnquantizedFusedMoEMethod`; another plugin's claim is left alone."""
    holder = op_registry_oot.get(NAME)
    if holder is not None and holder is not BeamMoEMethod:
        metrics.fell_back("every other model", f"{holder.__module__}.{holder.__name__} already stands for {NAME}")
    elif holder is None:
        UnquantizedFusedMoEMethod.register_oot(BeamMoEMethod, name=NAME)
