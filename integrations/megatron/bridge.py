"""Beam, and any MoE that a configuration and a mapping describe, on released Megatron-Bridge."""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    GatedMLPMapping,
    QKVGMapping,
    remove_non_pickleables,
)
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.models.gpt.gpt_model import GPTModel

from beam_moe.integrations.megatron.config import register_config
from beam_moe.integrations.megatron.layers import BeamOutputLayer
from beam_moe.integrations.megatron.linears import RecipeChecked
from beam_moe.integrations.megatron.spec import check_config, get_beam_layer_spec

logger = logging.getLogger(__name__)

MODULE_KINDS = {
    "BeamTopKRouter": "replicated",
    "BeamRMSNorm": "replicated",
    "BeamQKNorm": "replicated",
    "BeamOutputLayer": "column",
    "MXFP8ColumnParallelLinear": "column",
    "MXFP8LayerNormColumnParallelLinear": "column",
    "MXFP8RowParallelLinear": "row",
    "ColumnParallelGroupedLinear": "column",
    "RowParallelGroupedLinear": "row",
}


@dataclass
class BeamModelProvider(RecipeChecked, GPTModelProvider):
    """Configuration and builder of Beam as a megatron-core ``GPTModel``: one Beam layer is one transformer layer.

    With one layer per layer, ``layer_number`` is the Hugging Face layer plus one, in router replay, pipeline splits
    and checkpoint names alike.
    """

    final_logit_softcapping: float = 30.0
    lm_head_fp32: bool = True
    """Form logits in fp32 (vLLM: ``head_dtype=float32``); False rounds them to the model dtype before the softcap."""
    transformer_layer_spec: object = get_beam_layer_spec
    use_te_activation_func: bool = True
    bias_activation_fusion: bool = False
    bias_dropout_fusion: bool = False
    masked_softmax_fusion: bool = False
    gradient_accumulation_fusion: bool = False
    moe_grouped_gemm: bool = True
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    apply_rope_fusion: bool = False

    def finalize(self) -> None:
        """Settle derived fields and refuse, by ``ValueError``, what Beam cannot be trained with."""
        super().finalize()
        check_config(self)

    def provide(self, *args, **kwargs) -> GPTModel:
        """Build this stage's model; the last stage's head caps its logits."""
        model = super().provide(*args, **kwargs)
        if model.post_process and self.final_logit_softcapping:
            model.output_layer.__class__ = BeamOutputLayer
        return model


class QKVGateMapping(QKVGMapping):
    """megatron-core's fused ``[Q, gate, K, V]`` of each query group, with a gate as wide as the queries.

    Megatron: ``(groups * (2 r + 2) * D, hidden)`` with ``r`` heads in a group; Hugging Face: ``q_proj``, ``gate_proj``
    ``(heads * D, hidden)``, ``k_proj``, ``v_proj`` ``(groups * D, hidden)``.
    """

    def hf_to_megatron(self, hf_weights, megatron_module):
        merged = self.merge(self._get_config(megatron_module), hf_weights) if self.tp_rank == 0 else None
        return self._tp_mapping.hf_to_megatron(merged, megatron_module)

    def megatron_to_hf(self, megatron_weights, megatron_module):
        config = None
        if megatron_module is not None:
            config = remove_non_pickleables(self._get_config(megatron_module), max_depth=3)
        config = self.broadcast_obj_from_pp_rank(config, "qkvg_config")
        merged = self._tp_mapping.megatron_to_hf(megatron_weights, megatron_module)
        if not merged:
            return {}
        parts = self.split(config, next(iter(merged.values())))
        return {self.hf_param[name]: part for name, part in parts.items()}

    @staticmethod
    def merge(config, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """``q, g, k, v`` -> the fused rows, for weights and for LoRA's B factors alike."""
        groups, heads, width = config.num_query_groups, config.num_attention_heads, config.kv_channels
        rows = {"q": heads // groups * width, "g": heads // groups * width, "k": width, "v": width}
        fused = [parts[name].reshape(groups, rows[name], -1) for name in "qgkv"]
        return torch.cat(fused, 1).reshape(-1, parts["q"].shape[-1])

    @staticmethod
    def split(config, fused: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inverse of `merge`."""
        groups, heads, width = config.num_query_groups, config.num_attention_heads, config.kv_channels
        r, columns = heads // groups, fused.shape[-1]
        parts = fused.view(groups, (2 * r + 2) * width, columns).split([r * width, r * width, width, width], 1)
        return {name: part.reshape(-1, columns) for name, part in zip("qgkv", parts)}


@dataclass(frozen=True)
class ModelDescription:
    """A model as this integration needs it: a configuration and a mapping.

    Args:
        architecture: the Hugging Face class name, ``config.architectures[0]``.
        model_type: the Hugging Face ``model_type``.
        provider: the provider class, see `BeamModelProvider`.
        provider_fields: from the Hugging Face config to provider fields; what Bridge derives itself may be left out.
        mappings: the list of Bridge parameter mappings.
    """

    architecture: str
    model_type: str
    provider: type
    provider_fields: Callable[[object], dict]
    mappings: Callable[[], list]


class DescribedBridge(MegatronModelBridge):
    """A Bridge made of a `ModelDescription`, with LoRA on fused ``[Q, gate, K, V]`` exported part by part."""

    description: ModelDescription

    def provider_bridge(self, hf_pretrained):
        """The provider of a Hugging Face checkpoint; fields that the provider lacks are a ``ValueError``."""
        provider = super().provider_bridge(hf_pretrained)
        for name, value in self.description.provider_fields(hf_pretrained.config).items():
            if not hasattr(provider, name):
                raise ValueError(f"{self.description.architecture}: {type(provider).__name__} has no field {name!r}")
            setattr(provider, name, value)
        return provider

    def mapping_registry(self):
        """Bridge's registry of the description's mappings."""
        return MegatronMappingRegistry(*self.description.mappings())

    # Bridge 0.6.2 takes only {q, k, v}_proj for fused (peft_bridge.py, `_is_fused_qkv`): with a gate beside them all of
    # linear_qkv's adapter would be exported as q_proj, and the merged export fails.
    def _is_fused_qkv(self, hf_weight_names):
        names = list(hf_weight_names)
        gated = len(names) == 4 and all(".self_attn." in n for n in names)
        return gated or super()._is_fused_qkv(names)

    def _infer_qkv_projection_from_name(self, hf_name):
        if ".self_attn.gate_proj" in hf_name:
            return "gate_proj"
        return super()._infer_qkv_projection_from_name(hf_name)

    def _split_qkv_linear_out_weight(self, megatron_model, linear_out_weight):
        model = megatron_model[0] if isinstance(megatron_model, list) else megatron_model
        if not model.config.attention_output_gate:
            return super()._split_qkv_linear_out_weight(megatron_model, linear_out_weight)
        parts = QKVGateMapping.split(model.config, linear_out_weight)
        names = {"q": "q_proj", "g": "gate_proj", "k": "k_proj", "v": "v_proj"}
        return {names[n]: part for n, part in parts.items()}


LAYER, HF_LAYER = "decoder.layers.*.", "model.layers.*."


def expert_mappings(gate: str, up: str, down: str, prefix: str = "mlp.experts.") -> list:
    """Mappings of grouped and sequential experts to per-expert Hugging Face names below a layer.

    Args:
        gate, up, down: names below ``model.layers.*.`` with ``*`` for the expert, such as
            ``"mlp.experts.*.gate_proj.weight"``.
        prefix: where the experts are below ``decoder.layers.*.``.
    """
    out = []
    for form in ("linear_fc{}.weight*", "local_experts.*.linear_fc{}.weight"):
        out.append(GatedMLPMapping(LAYER + prefix + form.format(1), gate=HF_LAYER + gate, up=HF_LAYER + up))
        out.append(AutoMapping(LAYER + prefix + form.format(2), HF_LAYER + down))
    return out


def layer_mappings(names: dict[str, str]) -> list:
    """One `AutoMapping` per entry: name below ``decoder.layers.*.`` -> name below ``model.layers.*.``."""
    return [AutoMapping(LAYER + ours, HF_LAYER + theirs) for ours, theirs in names.items()]


def model_mappings() -> list:
    """Embedding, final norm and head under the names that nearly every causal LM has."""
    return [
        AutoMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        AutoMapping("decoder.final_layernorm.weight", "model.norm.weight"),
        AutoMapping("output_layer.weight", "lm_head.weight"),
    ]


def _beam_fields(c) -> dict:
    full = [t == "full_attention" for t in c.layer_types]
    if c.rope_parameters["full_attention"] is not None:
        raise ValueError(
            f"BeamForCausalLM: rope_parameters of full_attention is not None: {c.rope_parameters['full_attention']}"
        )
    rope = c.rope_parameters["sliding_attention"]
    if rope["rope_type"] != "default":
        raise ValueError(
            f"BeamForCausalLM: rope_type of sliding_attention must be 'default', got {rope['rope_type']!r}"
        )
    if not c.norm_topk_prob:
        raise ValueError(f"BeamForCausalLM: norm_topk_prob must be True, got {c.norm_topk_prob}")
    return {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": 1.0,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "share_embeddings_and_output_weights": c.tie_word_embeddings,
        "kv_channels": c.head_dim,
        "num_query_groups": c.num_key_value_heads,
        "vocab_size": c.vocab_size,
        "layernorm_epsilon": c.rms_norm_eps,
        "attention_output_gate": True,
        "no_rope_freq": [int(f) for f in full],
        "window_size": (c.sliding_window - 1, 0),
        "window_attn_skip_freq": [int(not f) for f in full],  # 1: this layer is windowed
        "moe_layer_freq": [int(t == "sparse") for t in c.mlp_layer_types],
        "num_moe_experts": c.num_experts,
        "moe_router_topk": c.num_experts_per_tok,
        "moe_ffn_hidden_size": c.moe_intermediate_size,
        "moe_router_num_groups": c.n_group,
        "moe_router_group_topk": c.topk_group,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": c.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_pre_softmax": False,
        "moe_token_dispatcher_type": "alltoall",
        "final_logit_softcapping": c.final_logit_softcapping,
    }


def _beam_mappings() -> list:
    attention = {n: HF_LAYER + f"self_attn.{p}_proj.weight" for n, p in zip("qgkv", ("q", "gate", "k", "v"))}
    return [
        *model_mappings(),
        *layer_mappings(
            {
                "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
                "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
                "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
                "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
                "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
                # separate norms in the local spec, fused into the next linear in Transformer Engine's
                "input_layernorm.weight": "input_layernorm.weight",
                "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
                "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
                "mlp.linear_fc1.layer_norm_weight": "pre_feedforward_layernorm.weight",
                "mlp.router.weight": "mlp.gate.weight",
                "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
                "mlp.linear_fc2.weight": "mlp.down_proj.weight",
            }
        ),
        ColumnParallelMapping(LAYER + "self_attention.output_gate_bias", HF_LAYER + "self_attn.gate_bias"),
        QKVGateMapping(LAYER + "self_attention.linear_qkv.weight", **attention),
        GatedMLPMapping(
            LAYER + "mlp.linear_fc1.weight",
            gate=HF_LAYER + "mlp.gate_proj.weight",
            up=HF_LAYER + "mlp.up_proj.weight",
        ),
        *expert_mappings(*(f"mlp.experts.*.{p}_proj.weight" for p in ("gate", "up", "down"))),
    ]


BEAM = ModelDescription("BeamForCausalLM", "beam", BeamModelProvider, _beam_fields, _beam_mappings)


def upstream_has(architecture: str) -> bool:
    """True if megatron-bridge itself brings a bridge for this architecture (one of ours does not count)."""
    if architecture == BEAM.architecture and importlib.util.find_spec("megatron.bridge.models.beam") is not None:
        return True
    for key, make in model_bridge.get_model_bridge._exact_types.items():
        if getattr(key, "__name__", key) == architecture:
            return not isinstance(make(None), DescribedBridge)
    return False


def register_model(description: ModelDescription, *, replace_upstream: bool = False) -> bool:
    """Give ``AutoBridge`` a bridge for the described model.

    Returns False, and changes nothing, where megatron-bridge has one of its own, unless ``replace_upstream``.
    """
    for name, kind in MODULE_KINDS.items():
        AutoMapping.register_module_type(name, kind)
    if upstream_has(description.architecture) and not replace_upstream:
        logger.info("%s: megatron-bridge has its own bridge; ours steps aside", description.architecture)
        return False
    key = next(
        (
            k
            for k in model_bridge.get_model_bridge._exact_types
            if getattr(k, "__name__", k) == description.architecture
        ),
        description.architecture,
    )
    bridge = type(f"{description.architecture}Bridge", (DescribedBridge,), {"description": description})
    MegatronModelBridge.register_bridge(
        source=key, target=GPTModel, provider=description.provider, model_type=description.model_type
    )(bridge)
    return True


def register_beam() -> bool:
    """`register_model` for Beam, and ``BeamConfig`` for a transformers that lacks it."""
    register_config()
    return register_model(BEAM)
