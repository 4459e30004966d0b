"""``--quantization beam_mxfp8``: vLLM's online MXFP8 with every expert on our kernel, or no engine at all.

Under vLLM's own ``mxfp8`` a layer that we cannot serve stays with vLLM and a log line says so. Here it is a ValueError
at start-up that names the layer and the reason. Linears are quantised for the kernel that the engine has for them, on
Hopper ours (`mxfp8_linear`) without the promise; routers, embeddings, norms and the head keep their precision.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEConfig
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.mxfp8 import Mxfp8OnlineMoEMethod

from beam_moe import env
from beam_moe.integrations.vllm import ARCHITECTURE, QUANTIZATION, experts, metrics

BLOCK = 32
ROUTERS = re.compile(r"gate|(.*_)?router|.*experts?_gate")
"""Last part of the name of a linear layer that weighs or chooses experts; `GateLinear` is one under any name."""


def why_not(moe_config: FusedMoEConfig, architectures: list[str]) -> str | None:
    """What is known before its weights of why our kernel cannot serve a layer, None when it can."""
    if not any(map(experts.serves, architectures)):
        return f"BEAM_MOE_VLLM={env.text('VLLM')!r} does not ask for the experts of {', '.join(architectures) or 'it'}"
    if moe_config.moe_backend != "auto":
        return f"moe_backend={moe_config.moe_backend!r} asks for vLLM's own experts"
    if moe_config.moe_parallel_config.use_batched_activation_format:
        return "its all-to-all hands tokens over in batches per expert"
    unquantized = FUSED_MOE_UNQUANTIZED_CONFIG
    return experts.why_not(moe_config, unquantized, ApplyMoEActivationConfig.from_configs(moe_config, unquantized))


class BeamMxfp8MoEMethod(Mxfp8OnlineMoEMethod):
    """vLLM's method for experts quantised online, which builds no kernel but ours.

    Args:
        moe: the layer's configuration.
        promised: the layer's name.
    """

    def __init__(self, *, moe: FusedMoEConfig, promised: str) -> None:
        super().__init__(moe=moe)
        self.promised = promised

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """vLLM's; a size that MXFP8 cannot divide is a ValueError with the layer's name."""
        sizes = {"hidden_size": hidden_size, "intermediate_size_per_partition": intermediate_size_per_partition}
        for name, size in sizes.items():
            if size % BLOCK:
                raise experts.broken_promise(self.promised, f"its {name} of {size} is not a multiple of {BLOCK}")
        super().create_weights(
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
        )

    def _setup_kernel(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        if not issubclass(self.experts_cls, experts.BeamMxfp8Experts):
            raise experts.broken_promise(self.promised, f"it was left to {self.experts_cls.__name__}")
        super()._setup_kernel(layer, *args, **kwargs)


class BeamMxfp8Config(OnlineQuantizationConfig):
    """vLLM's online MXFP8 for linears and experts, the experts under `BeamMxfp8MoEMethod`."""

    @classmethod
    def online(cls) -> BeamMxfp8Config:
        """With what ``--quantization mxfp8`` stands for."""
        args = resolve_quantization_config("mxfp8", {})
        assert args is not None
        return cls(args)

    @classmethod
    def get_name(cls) -> Any:
        """As on the command line."""
        return QUANTIZATION

    @property
    def online_quantization_config(self) -> None:
        """None: nothing is quantised online besides this."""
        return None

    @online_quantization_config.setter
    def online_quantization_config(self, config: OnlineQuantizationConfig | None) -> None:
        raise ValueError(
            f"--quantization {QUANTIZATION} takes no quantization_config, which could take experts out of its promise: "
            "use --quantization mxfp8 with it"
        )

    def resolve_quant_method_cls(self, layer_cls: type[torch.nn.Module], prefix: str) -> Any:
        """vLLM's, and nothing for a router."""
        if issubclass(layer_cls, GateLinear) or ROUTERS.fullmatch(prefix.rsplit(".", 1)[-1]):
            return None
        return super().resolve_quant_method_cls(layer_cls, prefix)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """vLLM's for all but experts; experts get ours.

        Raises:
            ValueError: naming the layer and why our kernel cannot serve it.
        """
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        vllm_config = get_current_vllm_config_or_none()
        model_config = None if vllm_config is None else vllm_config.model_config
        architectures = [] if model_config is None else list(model_config.architectures or [])
        reason = why_not(layer.moe_config, architectures)
        if reason is not None:
            raise experts.broken_promise(prefix, reason)
        method = BeamMxfp8MoEMethod(moe=layer.moe_config, promised=prefix)
        self.quantized_layers[prefix] = ("moe", str(self.args.moe), None)
        if ARCHITECTURE not in architectures:  # Beam's own layers get their options from the model class
            if layer.moe_config.is_lora_enabled:
                experts.follow_ranks()
            experts.give_mxfp8(method)
            experts.ModelWarmup().register_warmup()
            metrics.log_once(f"beam-moe: {architectures[0]}'s experts run on beam_moe.kernels.moe_lora")
        return method
