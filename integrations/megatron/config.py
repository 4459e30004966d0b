"""``BeamConfig`` for transformers releases that lack it (those that megatron-bridge 0.6.2 can be installed with)."""

import importlib.util

from transformers import AutoConfig, PretrainedConfig


class BeamConfig(PretrainedConfig):
    """Beam's configuration, with the field names and defaults of transformers' own ``BeamConfig`` (Beam-1.0-501B-A23B).

    Raises ``ValueError`` if heads do not divide into key/value heads or a list of layer types has the wrong length.
    """

    model_type = "beam"

    def __init__(
        self,
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=20480,
        num_hidden_layers=52,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=8192,
        initializer_range=0.02,
        rms_norm_eps=1e-6,
        use_cache=True,
        tie_word_embeddings=False,
        rope_parameters=None,
        attention_bias=False,
        sliding_window=512,
        attention_dropout=0.0,
        moe_intermediate_size=2560,
        num_experts_per_tok=8,
        num_experts=256,
        norm_topk_prob=True,
        output_router_logits=False,
        layer_types=None,
        mlp_layer_types=None,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        final_logit_softcapping=30.0,
        **kwargs,
    ):
        if num_attention_heads % num_key_value_heads:
            raise ValueError(
                f"BeamConfig: num_attention_heads={num_attention_heads} is not divisible by "
                f"num_key_value_heads={num_key_value_heads}"
            )
        if layer_types is None:  # every sixth layer and the last run full attention
            layer_types = [
                "full_attention" if (i + 1) % 6 == 0 or i == num_hidden_layers - 1 else "sliding_attention"
                for i in range(num_hidden_layers)
            ]
        if mlp_layer_types is None:
            dense = min(3, num_hidden_layers)
            mlp_layer_types = ["dense"] * dense + ["sparse"] * (num_hidden_layers - dense)
        for name, value in (("layer_types", layer_types), ("mlp_layer_types", mlp_layer_types)):
            if len(value) != num_hidden_layers:
                raise ValueError(
                    f"BeamConfig: {name} has {len(value)} entries for num_hidden_layers={num_hidden_layers}"
                )
        if rope_parameters is None:  # None marks a layer type without positional encoding
            rope_parameters = {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": None,
            }
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads, self.head_dim, self.hidden_act = num_key_value_heads, head_dim, hidden_act
        self.max_position_embeddings, self.initializer_range = max_position_embeddings, initializer_range
        self.rms_norm_eps, self.use_cache = rms_norm_eps, use_cache
        self.attention_bias, self.sliding_window, self.attention_dropout = (
            attention_bias,
            sliding_window,
            attention_dropout,
        )
        self.moe_intermediate_size, self.num_experts_per_tok = moe_intermediate_size, num_experts_per_tok
        self.num_experts, self.norm_topk_prob, self.output_router_logits = (
            num_experts,
            norm_topk_prob,
            output_router_logits,
        )
        self.layer_types, self.mlp_layer_types = list(layer_types), list(mlp_layer_types)
        self.n_group, self.topk_group, self.routed_scaling_factor = n_group, topk_group, routed_scaling_factor
        self.final_logit_softcapping = final_logit_softcapping
        special = {n: kwargs.pop(n, None) for n in ("pad_token_id", "bos_token_id", "eos_token_id")}
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        for name, value in special.items():
            setattr(self, name, value)
        self.rope_parameters = rope_parameters  # last: the base class's check does not know a layer type without RoPE

    def validate(self) -> None:
        """Checked in ``__init__``; the base class's check of ``rope_parameters`` fails on a layer type without RoPE."""

    def convert_rope_params_to_dict(self, **kwargs):
        """Leaves the per-layer-type mapping alone: the generic converter would add keys at its top level."""
        return kwargs


def register_config() -> type:
    """Return transformers' own ``BeamConfig``, or register ours under ``model_type="beam"`` and return it."""
    if importlib.util.find_spec("transformers.models.beam") is not None:
        from transformers import BeamConfig as Upstream

        return Upstream
    try:
        AutoConfig.register("beam", BeamConfig)
    except ValueError:  # registered before, by us or by remote code
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING["beam"]
    return BeamConfig
