"""Geometry of a sparse mixture-of-experts model, one rank's share of it, and the read floors that follow."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

# Bytes of one weight: MXFP8 has one byte a weight and one scale byte for a block of 32.
BASES: dict[str, float] = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "mxfp8": 1.0 + 1.0 / 32}
MXFP8_BLOCK = 32
# Adapter layouts: distinct A and B everywhere; one A for gate and up; A of w13 and B of w2 shared by all experts.
LAYOUTS = ("per_expert", "one_a", "shared_outer")

# What each family of Hugging Face configurations calls a quantity; the first key present wins.
NAMES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "intermediate": ("moe_intermediate_size", "moe_ffn_hidden_size", "expert_intermediate_size"),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "n_group": ("n_group", "num_expert_group", "n_groups"),
    "topk_group": ("topk_group", "num_limited_groups"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
}
ROUTING: dict[str, tuple[str, ...]] = {
    "scoring": ("scoring_func", "score_func", "score_function", "moe_router_activation_func", "expert_selection_fn"),
    "renormalize": ("norm_topk_prob", "moe_renormalize", "route_norm"),
    "routed_scaling": (
        *("routed_scaling_factor", "route_scale"),
        *("router_scaling_factor", "moe_routed_scaling_factor", "moe_router_scaling_factor"),
    ),
}

# Families whose modelling code fixes what their configuration does not say.
SIGMOID = set(
    "afmoe axk1 axk2 bailing_hybrid beam deepseek_v3 deepseek_v32 dots1 exaone_moe flint glm4_moe glm4_moe_lite "
    "glm4v_moe_text glm_moe_dsa hy_v3 kimi_k2 kimi_linear laguna lfm2_moe mimo_v2_flash minimax_m2 solar_open "
    "step3p5".split()
)
BIASED = SIGMOID - {"flint"} | {"ernie4_5_moe"}
RENORMALIZES = set(
    "afmoe aria_text beam deepseek_v3 deepseek_v32 ernie4_5_moe glm4_moe glm_moe_dsa granitemoe granitemoehybrid "
    "granitemoeshared hunyuan_v1_moe hy_v3 kimi_k2 laguna minimax minimax_m2 mistral_large4_text mixtral "
    "qwen3_5_moe_text qwen3_vl_moe_text step3p5".split()
)
BLOCK = {"mixtral": "block_sparse_moe", "minimax": "block_sparse_moe", "minimax_m2": "block_sparse_moe"}
W_NAMES = {"mixtral", "minimax", "minimax_m2", "phimoe"}
REFUSED = {
    "gpt_oss": "its experts have biases and a clamped, scaled SwiGLU with interleaved gate and up, none of which the "
    "fused layer computes",
    "llama4": "it multiplies the router weight into the experts' input",
    "llama4_text": "it multiplies the router weight into the experts' input",
    "nemotron_h": "its experts have no gate (squared ReLU)",
    "doge": "its experts are single rows, chosen by product keys",
}

MODELS: dict[str, dict[str, Any]] = {
    "beam-1.0": {
        "model_type": "beam",
        "hidden_size": 5120,
        "intermediate_size": 20480,
        "moe_intermediate_size": 2560,
        "num_hidden_layers": 52,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 49,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "hidden_act": "silu",
    },
}
"""Configurations by name, for benches and tests: the very keys of the models' own ``config.json``."""


def _fail(operation: str, argument: str, wanted: str, got: object) -> NoReturn:
    raise ValueError(f"{operation}: {argument} must be {wanted}, got {got!r}")


def _base_bytes(operation: str, base: str) -> float:
    if base not in BASES:
        _fail(operation, "base", f"one of {', '.join(BASES)}", base)
    return BASES[base]


def _read(source: Any) -> dict[str, Any]:
    """A dict from a dict, a path to ``config.json`` or its folder, a name in `MODELS`, or a configuration object."""
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, (str, Path)):
        if str(source) in MODELS:
            return dict(MODELS[str(source)])
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            _fail("BeamMoEConfig.from_hf", "config", f"a path or one of {', '.join(MODELS)}", str(source))
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"BeamMoEConfig.from_hf: config must be JSON, got {str(path)!r} ({error})") from error
        if not isinstance(read, dict):
            _fail("BeamMoEConfig.from_hf", "config", "a JSON object", read)
        return read
    if hasattr(source, "to_dict"):
        return dict(source.to_dict())
    if hasattr(source, "__dict__"):
        return {k: v for k, v in vars(source).items() if not k.startswith("_")}
    _fail("BeamMoEConfig.from_hf", "config", "a mapping, a path or an object with attributes", type(source).__name__)


def _text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a nested (multimodal or annotated) configuration."""
    for key in ("text_config", "language_config", "llm_config", "config"):
        inner = raw.get(key)
        if inner is not None and not any(k in raw for k in NAMES["hidden"]):
            return _read(inner)
    return raw


def _first(raw: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((raw[key] for key in names if raw.get(key) is not None), None)


def _whole(name: str, value: Any) -> int:
    """A whole number, in whatever type a configuration or a library holds it."""
    try:
        number = int(value)
        if not isinstance(value, bool) and (isinstance(value, str) or number == value):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    _fail("BeamMoEConfig.from_hf", name, "an integer", value)


def _sparse_layers(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers are sparse, from whichever of the ways in use the configuration says it."""
    types = raw.get("mlp_layer_types")
    if isinstance(types, str):  # "3 x dense, then 49 x sparse"
        types = [kind for n, kind in re.findall(r"(\d+) x (dense|sparse)", types) for _ in range(int(n))]
    if types is not None:
        words = isinstance(types, (list, tuple)) and all(t in ("dense", "sparse") for t in types)
        if not words or len(types) != layers:
            _fail("BeamMoEConfig.from_hf", "mlp_layer_types", f"{layers} times 'dense' or 'sparse'", types)
        return tuple(t == "sparse" for t in types)
    freq = raw.get("moe_layer_freq")
    if isinstance(freq, (list, tuple)):
        if len(freq) != layers:
            _fail("BeamMoEConfig.from_hf", "moe_layer_freq", f"{layers} entries", freq)
        return tuple(bool(f) for f in freq)

    def number(default: int, *names: str) -> int:
        return next((_whole(name, raw[name]) for name in names if raw.get(name)), default)

    first = number(0, "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    end = raw.get("moe_layer_end_index")
    last = layers - 1 if end is None or end == -1 else _whole("moe_layer_end_index", end)  # -1: the last layer
    every, step = number(1, "moe_layer_freq"), number(1, "decoder_sparse_step", "moe_layer_interval")
    period, offset = number(1, "expert_layer_period"), number(0, "expert_layer_offset")
    only = raw.get("mlp_only_layers") or ()
    if not isinstance(only, (list, tuple)):
        _fail("BeamMoEConfig.from_hf", "mlp_only_layers", "a list of layers", only)
    dense = {_whole("mlp_only_layers", i) for i in only}
    if raw.get("model_type") == "beam" and "first_k_dense_replace" not in raw:
        first = 3  # the default of transformers' BeamConfig
    return tuple(
        first <= i <= last and i % every == 0 and (i + 1) % step == 0 and i % period == offset and i not in dense
        for i in range(layers)
    )


@dataclass(frozen=True)
class BeamMoEConfig:
    """Geometry and routing of a sparse mixture-of-experts model, as far as experts and adapters need it.

    Args:
        hidden: H, the model's width.
        intermediate: I, the width of one routed expert, all shards together.
        num_experts: E, routed experts of one layer.
        top_k: experts that a token goes to.
        sparse: for every layer of the model, whether it has experts.
        scoring: "sigmoid" or "softmax". n_group, topk_group: grouped routing, None without groups. renormalize: whether
            the chosen weights are divided by their sum. routed_scaling: factor on the experts' sum. correction_bias:
            whether a bias takes part in the selection.
        dense_intermediate: width of a dense layer's MLP, None where the model has none.
        shared_experts: number of experts that every token visits.
        experts_path: module path of the experts, with ``{layer}``; projections: what the checkpoint calls gate, up
            and down.

    Raises:
        ValueError: an impossible geometry, naming the field.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    sparse: tuple[bool, ...]
    scoring: str = "softmax"
    n_group: int | None = None
    topk_group: int | None = None
    renormalize: bool = True
    routed_scaling: float = 1.0
    correction_bias: bool = False
    dense_intermediate: int | None = None
    shared_experts: int = 0
    model_type: str = ""
    experts_path: str = "model.layers.{layer}.mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        for field in ("hidden", "intermediate", "num_experts", "top_k"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                _fail("BeamMoEConfig", field, "a positive integer", value)
        if not (isinstance(self.routed_scaling, (int, float)) and math.isfinite(self.routed_scaling)):
            _fail("BeamMoEConfig", "routed_scaling", "a finite number", self.routed_scaling)
        if self.top_k > self.num_experts:
            _fail("BeamMoEConfig", "top_k", f"at most num_experts {self.num_experts}", self.top_k)
        if not isinstance(self.sparse, tuple):
            _fail("BeamMoEConfig", "sparse", "a tuple with an entry for each layer", self.sparse)
        if not any(self.sparse):
            _fail("BeamMoEConfig", "sparse", "true for at least one layer", self.sparse)
        if self.scoring not in ("sigmoid", "softmax"):
            _fail("BeamMoEConfig", "scoring", "'sigmoid' or 'softmax'", self.scoring)
        if (self.n_group is None) != (self.topk_group is None):
            _fail("BeamMoEConfig", "n_group and topk_group", "given together", (self.n_group, self.topk_group))
        if self.n_group is not None and self.topk_group is not None:
            if self.n_group < 1 or self.num_experts % self.n_group:
                _fail("BeamMoEConfig", "n_group", f"a divisor of num_experts {self.num_experts}", self.n_group)
            if not 1 <= self.topk_group <= self.n_group:
                _fail("BeamMoEConfig", "topk_group", f"in 1..{self.n_group}", self.topk_group)
            if self.top_k > self.topk_group * (self.num_experts // self.n_group):
                _fail("BeamMoEConfig", "top_k", "at most the experts of topk_group groups", self.top_k)

    @property
    def num_layers(self) -> int:
        """Layers of the model, dense ones included."""
        return len(self.sparse)

    @classmethod
    def from_hf(cls, config: Any, **overrides: Any) -> BeamMoEConfig:
        """Read a Hugging Face configuration of any gated-SiLU mixture of experts.

        Args:
            config: a mapping, an object with ``to_dict`` or attributes, a path to ``config.json`` or to its folder, or
                a name in `MODELS`. Nested configurations (``text_config``) are followed.
            overrides: fields of this class that replace what the configuration says, for a model whose modelling code
                fixes something that its configuration does not state.

        Raises:
            ValueError: a missing key (naming its known spellings), a dense model, or a model whose experts the fused
                layer does not compute, with the reason.
        """
        raw = _text_part(_read(config))
        model_type = str(raw.get("model_type") or "")
        if model_type in REFUSED:
            raise ValueError(
                f"BeamMoEConfig.from_hf: model_type {model_type!r} is not supported: {REFUSED[model_type]}"
            )
        for key in ("hidden_act", "hidden_activation", "mlp_hidden_act"):
            if raw.get(key) not in (None, "silu", "swish"):
                _fail("BeamMoEConfig.from_hf", key, "silu", raw[key])
        if raw.get("is_moe") is False:
            _fail("BeamMoEConfig.from_hf", "is_moe", "true: the model is dense", False)
        for key in ("swiglu_limit", "mlp_bias", "moe_apply_router_weight_on_input"):
            if raw.get(key):
                _fail("BeamMoEConfig.from_hf", key, "unset: the fused layer has no such term", raw[key])

        found = {field: _first(raw, names) for field, names in NAMES.items()}
        routing = {field: _first(raw, names) for field, names in ROUTING.items()}
        if found["num_experts"] is None:
            _fail("BeamMoEConfig.from_hf", "config", f"sparse: one of {NAMES['num_experts']}", sorted(raw)[:40])
        if found["intermediate"] is None:  # Mixtral and kin have no dense layers and one name
            found["intermediate"] = raw.get("intermediate_size")
        for field in ("hidden", "intermediate", "top_k", "num_layers"):
            if found[field] is None:
                _fail("BeamMoEConfig.from_hf", "config", f"given one of {NAMES[field]}", sorted(raw)[:40])

        found = {field: None if value is None else _whole(field, value) for field, value in found.items()}
        layers = found["num_layers"]
        groups = found["n_group"] if (found["n_group"] or 1) > 1 else None
        factor = routing["routed_scaling"]
        if isinstance(factor, bool) or not isinstance(factor, (int, float, type(None))):
            _fail("BeamMoEConfig.from_hf", "routed_scaling_factor", "a number", factor)
        unknown = set(overrides) - {field.name for field in dataclass_fields(cls)}
        if unknown:
            _fail("BeamMoEConfig.from_hf", "overrides", "fields of this class", sorted(unknown))
        biased = model_type in BIASED or raw.get("topk_method") == "noaux_tc"
        sigmoid = model_type in SIGMOID or raw.get("topk_method") == "noaux_tc"
        shared = found["shared_experts"]
        if shared is None:
            shared = 1 if raw.get("shared_expert_intermediate_size") else 0
        sparse = _sparse_layers(raw, layers)
        fields: dict[str, Any] = {
            "hidden": found["hidden"],
            "intermediate": found["intermediate"],
            "num_experts": found["num_experts"],
            "top_k": found["top_k"],
            "sparse": sparse,
            "scoring": str(routing["scoring"] or ("sigmoid" if sigmoid else "softmax")),
            "n_group": groups,
            "topk_group": (found["topk_group"] or 1) if groups else None,
            "renormalize": model_type in RENORMALIZES
            if routing["renormalize"] is None
            else bool(routing["renormalize"]),
            "routed_scaling": 1.0 if factor is None else float(factor),
            "correction_bias": biased,
            "dense_intermediate": None if all(sparse) else raw.get("intermediate_size"),
            "shared_experts": shared,
            "model_type": model_type,
            "experts_path": f"model.layers.{{layer}}.{BLOCK.get(model_type, 'mlp')}.experts",
            "projections": ("w1", "w3", "w2") if model_type in W_NAMES else ("gate_proj", "up_proj", "down_proj"),
        }
        return cls(**{**fields, **overrides})

    def with_(self, **changes: Any) -> BeamMoEConfig:
        """A copy with some fields replaced, for example fewer experts to fit one GPU."""
        return replace(self, **changes)

    def shard(
        self,
        tp: int = 1,
        tp_rank: int = 0,
        ep: int = 1,
        ep_rank: int = 0,
        pp: int = 1,
        pp_rank: int = 0,
        *,
        pp_layers: Sequence[int] | None = None,
    ) -> Shard:
        """One rank's share of the experts.

        Args:
            tp, tp_rank: tensor parallelism of the experts: each rank has ``intermediate / tp`` columns of every expert.
            ep, ep_rank: expert parallelism: each rank has ``num_experts / ep`` consecutive experts.
            pp, pp_rank: pipeline parallelism: each stage has ``num_layers / pp`` consecutive layers.
            pp_layers: layers of each stage, where they are not equal.

        Raises:
            ValueError: a rank out of range or something that does not divide, naming the argument.
        """
        for name, size, rank in (("tp", tp, tp_rank), ("ep", ep, ep_rank), ("pp", pp, pp_rank)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                _fail("shard", name, "a positive integer", size)
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
                _fail("shard", f"{name}_rank", f"in 0..{size - 1}", rank)
        if self.intermediate % tp:
            _fail("shard", "tp", f"a divisor of intermediate {self.intermediate}", tp)
        if self.num_experts % ep:
            _fail("shard", "ep", f"a divisor of num_experts {self.num_experts}", ep)
        if pp_layers is None:
            if self.num_layers % pp:
                _fail("shard", "pp", f"a divisor of num_layers {self.num_layers}, or pp_layers given", pp)
            pp_layers = [self.num_layers // pp] * pp
        counts = isinstance(pp_layers, Sequence) and all(type(n) is int and n > 0 for n in pp_layers)
        if not counts or len(pp_layers) != pp or sum(pp_layers) != self.num_layers:
            _fail("shard", "pp_layers", f"{pp} positive counts that sum to {self.num_layers}", pp_layers)
        first = sum(pp_layers[:pp_rank])
        return Shard(self, tp, tp_rank, ep, ep_rank, pp, pp_rank, first, first + pp_layers[pp_rank])


@dataclass(frozen=True)
class Shard:
    """One rank's share of a model's experts, with its bytes and its read floors. Made by `BeamMoEConfig.shard`.

    Attributes:
        first_layer, last_layer: the stage's layers are ``first_layer <= layer < last_layer``.
    """

    config: BeamMoEConfig
    tp: int
    tp_rank: int
    ep: int
    ep_rank: int
    pp: int
    pp_rank: int
    first_layer: int
    last_layer: int

    @property
    def hidden(self) -> int:
        """H, never sharded."""
        return self.config.hidden

    @property
    def intermediate(self) -> int:
        """I of this rank."""
        return self.config.intermediate // self.tp

    @property
    def intermediate_range(self) -> tuple[int, int]:
        """First and one-past-last column of every expert that this rank has."""
        return self.tp_rank * self.intermediate, (self.tp_rank + 1) * self.intermediate

    @property
    def num_experts(self) -> int:
        """E of this rank: rows of its w13, w2 and adapter banks."""
        return self.config.num_experts // self.ep

    @property
    def expert_range(self) -> tuple[int, int]:
        """First and one-past-last global id of this rank's experts."""
        return self.ep_rank * self.num_experts, (self.ep_rank + 1) * self.num_experts

    @property
    def num_global_experts(self) -> int:
        """E over all ranks."""
        return self.config.num_experts

    @property
    def top_k(self) -> int:
        """Experts of a token, over all ranks."""
        return self.config.top_k

    def expert_map(self, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """int32 ``(E_global,)``: row of each global expert on this rank, -1 for foreign ones; None without EP."""
        if self.ep == 1:
            return None
        import torch

        first, last = self.expert_range
        table = torch.full((self.config.num_experts,), -1, dtype=torch.int32)
        table[first:last] = torch.arange(self.num_experts, dtype=torch.int32)
        return table.to(device)

    @cached_property
    def sparse_layers(self) -> tuple[int, ...]:
        """Global numbers of this stage's layers that have experts."""
        return tuple(i for i in range(self.first_layer, self.last_layer) if self.config.sparse[i])

    def expert_bytes(self, base: str = "bf16") -> int:
        """Bytes of one expert's w13 and w2 on this rank: 3 H I weights.

        Raises:
            ValueError: an unknown base, or MXFP8 with H or this rank's I not a multiple of 32.
        """
        each = _base_bytes("expert_bytes", base)
        if base == "mxfp8":
            for name, n in (("hidden", self.hidden), ("intermediate", self.intermediate)):
                if n % MXFP8_BLOCK:
                    _fail("expert_bytes", f"{name} under mxfp8", f"a multiple of {MXFP8_BLOCK}", n)
        return int(3 * self.hidden * self.intermediate * each)

    def layer_bytes(self, base: str = "bf16") -> int:
        """Bytes of one sparse layer's routed experts on this rank."""
        return self.num_experts * self.expert_bytes(base)

    def rank_bytes(self, base: str = "bf16") -> int:
        """Bytes of all routed experts on this rank, without attention, router, shared experts and dense layers."""
        return len(self.sparse_layers) * self.layer_bytes(base)

    def adapter_bytes(self, rank: int, layout: str = "per_expert", *, itemsize: int = 2) -> tuple[int, int]:
        """Bytes of one adapter slot of one layer: (of one expert's own factors, of the factors that all share).

        The factors on the hidden side (A of w13, B of w2) are not split by tensor parallelism.

        Raises:
            ValueError: a negative rank or an unknown layout.
        """
        if layout not in LAYOUTS:
            _fail("adapter_bytes", "layout", f"one of {', '.join(LAYOUTS)}", layout)
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            _fail("adapter_bytes", "rank", "an integer of at least 0", rank)
        inner = 3 * self.intermediate * rank * itemsize
        outer = (2 if layout == "one_a" else 3) * self.hidden * rank * itemsize
        return (inner, outer) if layout == "shared_outer" else (inner + outer, 0)

    def adapter_layer_bytes(self, rank: int, layout: str = "per_expert", *, itemsize: int = 2) -> int:
        """Bytes of one adapter slot of one sparse layer on this rank."""
        own, common = self.adapter_bytes(rank, layout, itemsize=itemsize)
        return self.num_experts * own + common

    def adapter_rank_bytes(self, rank: int, layout: str = "per_expert", *, itemsize: int = 2) -> int:
        """Bytes of one adapter slot of all sparse layers on this rank."""
        return len(self.sparse_layers) * self.adapter_layer_bytes(rank, layout, itemsize=itemsize)

    def expected_experts(self, tokens: int) -> float:
        """Expected number of this rank's experts that some token chose, when every token picks any top_k with equal
        chance: ``E (1 - (1 - top_k / E_global)^tokens)``. Grouped selection, being symmetric, does not change it."""
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            _fail("expected_experts", "tokens", "an integer of at least 0", tokens)
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.config.num_experts) ** tokens)

    def floor_bytes(
        self,
        tokens: int,
        distinct_experts: float | None = None,
        *,
        rank: int | None = None,
        layout: str = "per_expert",
        base: str = "bf16",
        distinct_pairs: float | None = None,
        slots: int = 1,
    ) -> int:
        """Bytes that one sparse layer reads at the least: each distinct expert once, each distinct factor once.

        Activations are not counted: at decode they are under a thousandth of the weights.

        Args:
            tokens: rows of the batch.
            distinct_experts: this rank's experts that some token chose; None takes `expected_experts`.
            rank: live rank of the adapters, None or 0 without.
            layout: one of per_expert, one_a, shared_outer.
            base: the weights' format, one of bf16, fp16, fp32, mxfp8; adapters have 2 bytes a value.
            distinct_pairs: distinct (slot, expert) pairs of rows with an adapter; None: one slot, every row has it.
            slots: distinct slots in the batch; counts for factors shared over experts.

        Raises:
            ValueError: more experts than exist or than the tokens could choose, or an unknown base or layout.
        """
        if distinct_experts is None:
            distinct_experts = self.expected_experts(tokens)
        most = min(self.num_experts, tokens * self.top_k)
        if not 0 <= distinct_experts <= most:
            _fail("floor_bytes", "distinct_experts", f"in 0..{most} for {tokens} tokens", distinct_experts)
        total = distinct_experts * self.expert_bytes(base)
        if rank:
            own, common = self.adapter_bytes(rank, layout)
            pairs = distinct_experts if distinct_pairs is None else distinct_pairs
            if not 0 <= pairs <= min(distinct_experts * slots, tokens * self.top_k):
                _fail("floor_bytes", "distinct_pairs", "at most distinct_experts * slots and tokens * top_k", pairs)
            total += pairs * own + (slots * common if pairs else 0)
        return round(total)

    def floor_us(self, tokens: int, read_tb_s: float, distinct_experts: float | None = None, **layer: Any) -> float:
        """Microseconds that `floor_bytes` take at a read bandwidth of ``read_tb_s`` (1e12 bytes a second)."""
        if not read_tb_s > 0:
            _fail("floor_us", "read_tb_s", "positive", read_tb_s)
        return self.floor_bytes(tokens, distinct_experts, **layer) / (read_tb_s * 1e6)
