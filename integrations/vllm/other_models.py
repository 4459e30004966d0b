"""Our kernels under other gated-SiLU MoE models, where ``BEAM_MOE_VLLM`` names them or says ``all``.

Unquantised experts get ours here (MXFP8 ones in `quantization`), and then the model's linear layers our LoRA kernel.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from beam_moe.integrations.vllm import metrics, mxfp8_linear

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


CACHE_KEY = "beam_moe_linear_lora"
"""In ``additional_config``, which is part of the name under which vLLM keeps a compiled model on disk."""


def serve_linears(manager: Any) -> None:
    """Serve the linear layers' adapters of a ``LoRAModelManager`` whose model has experts of ours; else do nothing.

    A graph compiled with our operator is another one than vLLM's: each is kept on disk under a name of its own.
    """
    from beam_moe.integrations.vllm import experts, linear_lora

    runners = (m for m in manager.model.modules() if isinstance(m, MoERunner))
    if not any(e is not None and e.reason is None for e in map(experts.experts_of, runners)):
        return
    # of each compiled part: one inside a multimodal model has a configuration of its own
    configs = [m.__dict__["vllm_config"] for m in manager.model.modules() if "vllm_config" in m.__dict__]
    if not all(isinstance(config.additional_config, dict) for config in configs):
        metrics.fell_back("adapters of a dense layer", "additional_config is an object, which takes no mark of ours")
    elif linear_lora.attach(manager):
        for config in configs:
            config.additional_config = {**config.additional_config, CACHE_KEY: 1}
        name = type(manager.model).__name__
        metrics.log_once(f"beam-moe: adapters of {name}'s linear layers run on beam_moe.kernels.linear_lora")


def follow_managers() -> None:
    """Have every ``LoRAModelManager`` pass through `serve_linears` when it has wrapped its layers. Re-entrant."""
    create = LoRAModelManager._create_lora_modules
    if hasattr(create, "__wrapped__"):
        return

    @wraps(create)
    def _create_lora_modules(self: Any) -> None:
        create(self)
        serve_linears(self)

    LoRAModelManager._create_lora_modules = _create_lora_modules


def register() -> None:
    """Have vLLM instantiate `BeamMoEMethod` for `UnquantizedFusedMoEMethod`, and follow its LoRA managers.

    Another plugin's claim on the method is left alone.
    """
    follow_managers()
    mxfp8_linear.install()
    holder = op_registry_oot.get(NAME)
    if holder is not None and holder is not BeamMoEMethod:
        metrics.fell_back("every other model", f"{holder.__module__}.{holder.__name__} already stands for {NAME}")
    elif holder is None:
        UnquantizedFusedMoEMethod.register_oot(BeamMoEMethod, name=NAME)
