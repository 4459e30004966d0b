"""vLLM's own expert kernels on our operands, called the way its engine calls them inside a captured decode step.

`VllmExperts` builds the very objects that vLLM 0.33 builds for one layer (``TritonExperts``, or ``MarlinExperts`` for
an MXFP8 base, with a ``MoELoRAContext`` over a ``PunicaWrapperGPU``) and times nothing itself. Weights and adapters are
shared with our call: dense weights and LoRA factors have one layout in both; an MXFP8 base is repacked for Marlin.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from types import SimpleNamespace

import torch

from beam_moe.kernels.moe_lora import ExpertLoRA

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@functools.cache
def vllm_missing() -> str | None:
    """Why vLLM's kernels cannot be called here, or None when they can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    try:
        import vllm.lora.punica_wrapper.punica_gpu
        import vllm.model_executor.layers.fused_moe.experts.triton_moe  # noqa: F401
    except Exception as error:  # a broken install fails in its own ways; the reason is what matters
        return f"vLLM does not import: {type(error).__name__}: {error}"
    return None


class VllmExperts:
    """vLLM's experts of one geometry; `bind` makes a call over one layer's operands.

    Args:
        experts, top_k, hidden, intermediate: the layer's shape on this rank.
        max_tokens: rows of the largest call; sizes the workspaces that all bound calls share.
        dtype, device: of the activations.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        *,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import (
            FusedMoEConfig,
            FusedMoEParallelConfig,
            RoutingMethodType,
        )

        self.experts, self.top_k, self.hidden, self.intermediate = experts, top_k, hidden, intermediate
        self.activation = MoEActivation.SILU
        self.config = FusedMoEConfig(
            num_experts=experts,
            experts_per_token=top_k,
            hidden_dim=hidden,
            intermediate_size=intermediate,
            num_local_experts=experts,
            num_logical_experts=experts,
            activation=self.activation,
            device=device,
            routing_method=RoutingMethodType.DeepSeekV3,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=dtype,
            is_lora_enabled=True,
        )
        elements = max_tokens * top_k * max(2 * intermediate, hidden)
        self.workspace13 = torch.empty(elements, dtype=dtype, device=device)
        self.workspace2 = torch.empty(elements, dtype=dtype, device=device)

    def _experts(self, w13, w2):
        """vLLM's experts object and the two weights in the layout that it reads."""
        if isinstance(w13, torch.Tensor):
            from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
            from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

            return TritonExperts(self.config, FUSED_MOE_UNQUANTIZED_CONFIG), w13, w2
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a16_moe_quant_config
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import prepare_mxfp8_moe_layer_for_marlin

        default = torch.get_default_dtype()
        torch.set_default_dtype(self.config.in_dtype)  # the repacked scales take torch's default dtype
        try:
            w13, w2, s13, s2 = prepare_mxfp8_moe_layer_for_marlin(None, w13.data, w2.data, w13.scale, w2.scale)
        finally:
            torch.set_default_dtype(default)
        quant = fp8_w8a16_moe_quant_config(w1_scale=s13, w2_scale=s2, block_shape=[1, 32])
        return MarlinExperts(self.config, quant), w13, w2

    def _lora_context(self, lora: ExpertLoRA, lora_ids: torch.Tensor):
        from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
        from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext

        if lora.shared_a != lora.shared_b:
            raise ValueError("vLLM shares both outer factors or none")
        punica = PunicaWrapperGPU(
            max_num_batched_tokens=lora_ids.numel(),
            max_batches=lora_ids.numel(),
            device=lora_ids.device,
            lora_config=SimpleNamespace(max_loras=lora.slots, specialize_active_lora=False),
        )
        punica.token_mapping_meta.prepare_tensors(lora_ids.long())
        return MoELoRAContext(
            w13_lora_a_stacked=tuple(lora.gate_up_a),
            w13_lora_b_stacked=tuple(lora.gate_up_b),
            w2_lora_a_stacked=(lora.w2_a,),
            w2_lora_b_stacked=(lora.w2_b,),
            adapter_enabled=torch.ones(lora.slots + 1, dtype=torch.int32, device=lora_ids.device),
            max_loras=lora.slots,
            top_k=self.top_k,
            w13_num_slices=2,
            fully_sharded=False,
            tp_rank=0,
            tp_size=1,
            local_num_experts=self.experts,
            punica_wrapper=punica,
            use_tuned_config=bool(os.environ.get("VLLM_TUNED_CONFIG_FOLDER")),
            enable_moe_shared_loras=lora.shared_a,
        )

    def layer(self, w13, w2) -> "VllmLayer":
        """One layer's weights, repacked if they must be; bind as many calls to it as wanted."""
        return VllmLayer(self, *self._experts(w13, w2))


class VllmLayer:
    """One layer's weights inside vLLM's experts object."""

    def __init__(self, shape: VllmExperts, experts, w13: torch.Tensor, w2: torch.Tensor):
        self.shape, self.experts, self.w13, self.w2 = shape, experts, w13, w2

    @property
    def name(self) -> str:
        return f"vllm {type(self.experts).__name__}"

    def bind(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        lora: ExpertLoRA | None,
        lora_ids: torch.Tensor | None,
        out: torch.Tensor,
    ) -> Callable[[], torch.Tensor]:
        """A call without arguments that fills ``out`` from ``topk_ids``, alignment included, as a decode step does."""
        shape, experts = self.shape, self.experts
        context = None if lora is None or lora_ids is None else shape._lora_context(lora, lora_ids)

        def call() -> torch.Tensor:
            experts._lora_context = context
            experts.apply(
                output=out,
                hidden_states=x,
                w1=self.w13,
                w2=self.w2,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=shape.activation,
                global_num_experts=shape.experts,
                expert_map=None,
                a1q_scale=None,
                a2_scale=None,
                workspace13=shape.workspace13,
                workspace2=shape.workspace2,
                expert_tokens_meta=None,
                apply_router_weight_on_input=False,
            )
            return out

        return call
