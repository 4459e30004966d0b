"""`get_beam_layer_spec`: Beam's block spec for megatron-core, and the checks on a configuration that goes with it."""

from dataclasses import fields, is_dataclass, replace
from functools import partial

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from beam_moe.integrations.megatron.compat import has_transformer_engine
from beam_moe.integrations.megatron.layers import (
    BeamCoreAttention,
    BeamQKNorm,
    BeamRMSNorm,
    BeamSelfAttention,
    BeamTopKRouter,
    BeamTransformerLayer,
    SwiGLU,
    _is_full_attention,
    scale_queries,
)
from beam_moe.integrations.megatron.linears import swap_modules

REQUIRED = {
    "fp8": (None, "MXFP8 is chosen per module by quant_recipe; config.fp8 selects Transformer Engine's own path"),
    "fp4": (None, "no FP4 path"),
    "add_bias_linear": (False, "Beam's projections have no bias"),
    "hidden_dropout": (0.0, "the depth-scaled residual has no dropout"),
    "attention_dropout": (0.0, "Beam has no attention dropout"),
    "bias_activation_fusion": (False, "the fused SwiGLU rounds twice; ours computes in fp32 and rounds once"),
    "use_te_activation_func": (True, "this flag is how megatron-core takes an activation module (ours) from the spec"),
    "moe_router_fusion": (False, "the fused top-k returns before router replay"),
    "moe_expert_capacity_factor": (None, "the engine drops no token of a full expert"),
    "moe_input_jitter_eps": (None, "the engine's router sees its input as it is"),
    "moe_router_force_load_balancing": (False, "it routes at random"),
    "moe_shared_expert_overlap": (False, "Beam has no shared expert"),
    "context_parallel_size": (1, "SSMax needs the position of every query in its whole sequence"),
    "hybrid_context_parallel": (False, "SSMax needs the position of every query in its whole sequence"),
    "gradient_accumulation_fusion": (False, "weight gradients must pass through autograd to reach our kernels"),
}


def check_config(config) -> None:
    """Raise ``ValueError``, naming field and value, for a configuration that would train something other than Beam."""
    for name, (wanted, why) in REQUIRED.items():
        value = getattr(config, name)
        if value != wanted:
            raise ValueError(f"get_beam_layer_spec: {name} must be {wanted!r}, got {value!r}: {why}")
    if config.num_moe_experts is None:
        return
    if (config.expert_tensor_parallel_size or 1) != 1:
        raise ValueError(
            f"get_beam_layer_spec: expert_tensor_parallel_size must be 1, got {config.expert_tensor_parallel_size}: "
            "shard experts by expert_model_parallel_size"
        )
    if config.moe_router_num_groups and config.moe_router_topk // config.moe_router_group_topk != 2:
        raise ValueError(
            "get_beam_layer_spec: moe_router_topk // moe_router_group_topk must be 2, got "
            f"{config.moe_router_topk} // {config.moe_router_group_topk}: megatron-core scores a group by that many "
            "of its experts, Beam by its two best"
        )
    if getattr(config, "cross_entropy_loss_fusion", False) and config.cross_entropy_fusion_impl == "linear":
        raise ValueError(
            "get_beam_layer_spec: cross_entropy_fusion_impl must not be 'linear': a fused LM head and loss skips the "
            "softcap of the logits"
        )
    if getattr(config, "mtp_num_layers", None):
        raise ValueError(f"get_beam_layer_spec: mtp_num_layers must be unset, got {config.mtp_num_layers}")


def _te_classes():
    """Transformer Engine's norm and attention under Beam's rules; only where it can be imported."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

    class BeamTEDotProductAttention(TEDotProductAttention):
        """Transformer Engine's attention with SSMax on the layers without RoPE; packed sequences included.

        Queries and keys come in fp32 from `BeamQKNorm` and are rounded here, once.
        """

        def forward(self, query, key, value, *args, packed_seq_params=None, **kwargs):
            if _is_full_attention(self.config, self.layer_number):
                query = scale_queries(query, packed_seq_params)
            query, key = query.to(value.dtype), key.to(value.dtype)
            return super().forward(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)

    class BeamTETransformerLayer(BeamTransformerLayer):
        """`BeamTransformerLayer` with Transformer Engine's norms after attention and MLP."""

        post_norm = TENorm

    return BeamTEDotProductAttention, BeamTETransformerLayer


def _place(spec, **changes):
    """A copy of an ``mlp`` spec with fp32 SwiGLU, and with ``changes`` made to its `MoESubmodules`."""
    if isinstance(spec, partial):
        return partial(spec.func, *spec.args, **{k: _place(v, **changes) for k, v in spec.keywords.items()})
    if isinstance(spec, ModuleSpec):
        return replace(spec, submodules=_place(spec.submodules, **changes))
    if not is_dataclass(spec) or isinstance(spec, type):
        return spec
    new = {f.name: _place(getattr(spec, f.name), **changes) for f in fields(spec)}
    if isinstance(spec, (MLPSubmodules, GroupedMLPSubmodules)):
        new["activation_func"] = SwiGLU
    if isinstance(spec, MoESubmodules):
        new.update(changes)
    return replace(spec, **new)


def get_moe_layer_spec(config, vp_stage: int | None = None, *, use_transformer_engine: bool | None = None):
    """The block spec of a pre-norm transformer with routed experts, with our linears and grouped experts in it.

    What a new model needs whose layers are megatron-core's own: a `ModelDescription` with this spec.

    Args:
        config, vp_stage, use_transformer_engine: as in `get_beam_layer_spec`.

    Raises:
        ImportError: ``use_transformer_engine=True`` without Transformer Engine.
    """
    te = _use_te("get_moe_layer_spec", use_transformer_engine)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization="RMSNorm", vp_stage=vp_stage, qk_l2_norm=False
    )
    layers = swap_modules(
        list(spec.layer_specs), linears=not te or config.quant_recipe is not None, experts=config.moe_grouped_gemm
    )
    if te:
        return replace(spec, layer_specs=layers)
    for layer in layers:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = BeamRMSNorm
        if config.qk_layernorm:
            inner = parts.self_attention.submodules
            inner.q_layernorm = inner.k_layernorm = BeamRMSNorm
    return replace(spec, layer_specs=layers, layer_norm=BeamRMSNorm)


def _use_te(operation: str, wanted: bool | None) -> bool:
    available = has_transformer_engine()
    if wanted and not available:
        raise ImportError(f"{operation}: use_transformer_engine=True, but transformer_engine is not installed")
    return available if wanted is None else wanted


def get_beam_layer_spec(config, vp_stage: int | None = None, *, use_transformer_engine: bool | None = None):
    """The ``TransformerBlockSubmodules`` of this pipeline stage of a Beam model.

    Give it (or a ``functools.partial`` of it) to a provider's ``transformer_layer_spec``.

    Args:
        config: megatron-core ``TransformerConfig`` with Beam's fields, as `BeamModelProvider` has them.
        vp_stage: virtual pipeline stage.
        use_transformer_engine: attention, norms and (without ``config.quant_recipe``) dense linears of Transformer
            Engine. None: where it can be imported. Experts are ours in both cases when ``config.moe_grouped_gemm``.

    Raises:
        ValueError: for any field that `check_config` refuses.
        ImportError: ``use_transformer_engine=True`` without Transformer Engine.
    """
    check_config(config)
    te = _use_te("get_beam_layer_spec", use_transformer_engine)
    recomputed = set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()
    if not te and recomputed & {"layernorm", "moe_act"}:
        raise ValueError(
            "get_beam_layer_spec: recompute_modules must be without 'layernorm' and 'moe_act' where Transformer Engine "
            f"is not used, got {sorted(recomputed)}: megatron-core 0.19.2 recomputes these by a name it then lacks"
        )
    spec = get_moe_layer_spec(config, vp_stage, use_transformer_engine=te)
    attention, layer = _te_classes() if te else (BeamCoreAttention, BeamTransformerLayer)
    for one in spec.layer_specs:
        one.module = layer
        parts = one.submodules
        parts.self_attention.module = BeamSelfAttention
        parts.self_attention.submodules.core_attention = attention
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = BeamQKNorm
        parts.mlp = _place(parts.mlp, router=BeamTopKRouter)
    return spec
