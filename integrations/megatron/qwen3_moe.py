"""Qwen3-MoE by description alone: what bringing up another model takes, a configuration and a mapping.

megatron-bridge has its own bridge for it, so `register_model` steps aside unless told to replace it.
"""

from dataclasses import dataclass

import torch
from megatron.bridge.models.conversion.param_mapping import QKVMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider

from beam_moe.integrations.megatron.bridge import (
    HF_LAYER,
    LAYER,
    ModelDescription,
    expert_mappings,
    layer_mappings,
    model_mappings,
)
from beam_moe.integrations.megatron.linears import RecipeChecked
from beam_moe.integrations.megatron.spec import get_moe_layer_spec


@dataclass
class MoEModelProvider(RecipeChecked, GPTModelProvider):
    """A ``GPTModel`` of megatron-core's own layers with our linears and grouped experts."""

    transformer_layer_spec: object = get_moe_layer_spec
    gradient_accumulation_fusion: bool = False
    moe_grouped_gemm: bool = True
    bias_activation_fusion: bool = False
    masked_softmax_fusion: bool = False


def _fields(c) -> dict:
    if c.mlp_only_layers or c.decoder_sparse_step != 1:
        raise ValueError(
            f"Qwen3MoeForCausalLM: every layer must be sparse, got mlp_only_layers={c.mlp_only_layers}, "
            f"decoder_sparse_step={c.decoder_sparse_step}"
        )
    return {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "position_embedding_type": "rope",
        "rotary_base": c.rope_parameters["rope_theta"],
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
        "num_moe_experts": c.num_experts,
        "moe_router_topk": c.num_experts_per_tok,
        "moe_ffn_hidden_size": c.moe_intermediate_size,
        "moe_router_pre_softmax": not c.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }


def _mappings() -> list:
    return [
        *model_mappings(),
        *layer_mappings(
            {
                "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
                "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
                "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
                "input_layernorm.weight": "input_layernorm.weight",
                "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
                "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
                "mlp.router.weight": "mlp.gate.weight",
            }
        ),
        QKVMapping(
            LAYER + "self_attention.linear_qkv.weight",
            **{n: HF_LAYER + f"self_attn.{n}_proj.weight" for n in "qkv"},
        ),
        *expert_mappings(*(f"mlp.experts.*.{p}_proj.weight" for p in ("gate", "up", "down"))),
    ]


QWEN3_MOE = ModelDescription("Qwen3MoeForCausalLM", "qwen3_moe", MoEModelProvider, _fields, _mappings)
