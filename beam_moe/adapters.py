"""LoRA adapters on experts: PEFT folders and tensors in, one `ExpertLoRA` bank a layer out, and the way back.

Layouts that are read, below ``[base_model.model.]model.layers.N.mlp.`` (E experts, r rank, H hidden, I intermediate):

* per expert: ``experts.{e}.{gate,up,down}_proj.lora_A (r, in)``, ``.lora_B (out, r)``; ``gate_up_proj`` and Mixtral's
  ``w1, w3, w2`` (gate, up, down) too;
* stacked: ``experts.{gate,up,gate_up,down}_proj.lora_A (E, r, in)``, ``.lora_B (E, out, r)``, or ``w1, w3, w2``; an
  expert axis of 1 is a factor shared by all experts (A of gate and up, B of down), also beside indexed ones;
* flat, as PEFT's ``target_parameters`` writes it: ``experts.base_layer.lora_A (E r, H)``, ``.lora_B (2 I, r E)`` for
  gate and up, ``experts.lora_A (E r, I)``, ``.lora_B (H, r E)`` for down; A has experts outermost, B innermost. PEFT
  before 0.19.1 took a parameter ``(E, out, in)`` for ``(E, in, out)`` and wrote A and B swapped: told apart by shape.

Facts on layouts were read in PEFT 0.21.2, vLLM 0.33.0 and Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Union

import torch

from beam_moe import env
from beam_moe.config import BeamMoEConfig, Shard
from beam_moe.kernels.moe_lora.bank import DTYPES, ExpertLoRA

PREFIX = "base_model.model."
WEIGHTS, PICKLED, CONFIG = "adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"
LAYOUTS = ("per_expert", "fused_3d", "shared_outer")
SWAPPED_BEFORE = (0, 19, 1)  # PEFT versions whose target_parameters have A and B of (E, out, in) swapped
PLAIN_LORA: dict[str, object] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "lora_dropout": 0.0,
    "use_rslora": False,
    "use_dora": False,
    "init_lora_weights": True,
    "inference_mode": True,
}
"""What an adapter_config.json of ours says whatever its ranks: scales are folded into the factors, or are alpha / r."""

GATE, UP, DOWN, GATE_UP = "gate", "up", "down", "gate_up"
PROJECTIONS = {
    "gate_proj": GATE,
    "w1": GATE,
    "up_proj": UP,
    "w3": UP,
    "down_proj": DOWN,
    "w2": DOWN,
    "gate_up_proj": GATE_UP,
    "w13": GATE_UP,
}
WHOLE = -1  # expert index of a tensor that has every expert in it
INNER, OUTER = "experts.base_layer", "experts"  # the two flat modules

KEY = re.compile(
    r"(?P<module>.+?)\.(?P<kind>lora_[A-Za-z_]+)(?:\.(?P<name>(?!weight$|bias$)[^.]+))?(?:\.(?P<leaf>weight|bias))?"
)
# What the model's own layers may stand under: another stack beside them (mtp, a talker, a vision tower) is none of its.
ROOT = r"(?:(?:base_model|model|module|_orig_mod|language_model|text_model|thinker|llm|transformer|decoder)\.)*layers\."
BLOCK = r"(?:mlp|block_sparse_moe|feed_forward|moe|ffn)"
EXPERTS = re.compile(BLOCK + r"\.experts(?:\.(.+))?")
INDEXED = re.compile(r"(\d+)\.(\w+)")
COMMON = re.compile(ROOT + r"(\d+)\." + BLOCK + r"\.experts\.(\d+)\.(\w+)\.lora_([AB])\.weight")

# Modules beside the routed experts that a LoRA may be on, by their path inside a layer or at the top.
ATTENTION_BLOCK = re.compile(r"(?:self_attn|attention|attn|linear_attn)\.(?:indexer\.)?(\w+)")
ATTENTION = set(
    "q_proj k_proj v_proj o_proj gate_proj qkv_proj out_proj q_a_proj q_b_proj kv_b_proj kv_a_proj_with_mqa "
    "in_proj_qkvz in_proj_qkv in_proj_ba in_proj_z in_proj_a in_proj_b wq_b wk weights_proj".split()
)
MLP_LEAF = r"(?:gate_proj|up_proj|down_proj|gate_up_proj)"
DENSE = re.compile(rf"(?:mlp|feed_forward)\.{MLP_LEAF}")
ROUTER = re.compile(rf"{BLOCK}\.(?:gate|router)")
SHARED = re.compile(rf"{BLOCK}\.(?:shared_experts?\.{MLP_LEAF}|shared_expert_gate)")
TOP = re.compile(r"(?:.*\.)?(?:embed_tokens|lm_head)")

Source = Union[torch.Tensor, "list[torch.Tensor]"]  # (E|1, ., .) or E matrices


def _fail(message: str) -> NoReturn:
    raise ValueError(f"load_adapter: {message}")


@dataclass
class Adapter:
    """A loaded adapter.

    Attributes:
        experts: one bank of one slot for every layer that has expert tensors, scale folded into B.
        other: the tensors of every other module, whole, by the name they came with, neither scaled nor copied.
        scaling: the factor ``alpha / r`` (or ``alpha / sqrt(r)``) of each module in ``other``, by module name.
        peft_config: what ``adapter_config.json`` said; empty for bare tensors.
    """

    experts: dict[int, ExpertLoRA]
    other: dict[str, torch.Tensor] = field(default_factory=dict)
    scaling: dict[str, float] = field(default_factory=dict)
    peft_config: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The highest rank of the banks; 0 without any."""
        return max((bank.rank for bank in self.experts.values()), default=0)


# ---------------------------------------------------------------------------------------------- adapter_config.json


class _Peft:
    """Rank and scale of each module, after refusing what a pair of factors cannot express."""

    REFUSED = {
        "use_dora": "DoRA scales the base weights",
        "lora_bias": "B has a bias",
        "alora_invocation_tokens": "aLoRA applies from a token on, not to a whole row",
        "layer_replication": "the base model has other layers",
        "modules_to_save": "whole modules were trained",
        "trainable_token_indices": "embeddings were trained",
        "use_qalora": "A reads pooled inputs",
        "use_bdlora": "factors are block-diagonal",
        "arrow_config": "adapters are routed per token",
        "kasa_config": "the base weights were truncated",
        "monteclora_config": "factors are sampled",
        "fan_in_fan_out": "base weights are (in, out)",
    }
    INITS = ("true", "false", "gaussian", "eva", "orthogonal")
    CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

    def __init__(self, given: Mapping[str, Any] | None) -> None:
        if not isinstance(given, (Mapping, type(None))):
            _fail(f"adapter_config must be a mapping, got {given!r}")
        config = given or {}
        for name in ("use_rslora", *self.REFUSED):
            if isinstance(config.get(name), str):
                _fail(f"adapter_config field {name} must not be text, got {config[name]!r}")
        self.raw = dict(config)
        self.given = given is not None
        unknown = {n: "not known here" for n in config if str(n).startswith("use_") and n != "use_rslora"}
        for name, why in {**unknown, **self.REFUSED}.items():
            if config.get(name):
                _fail(f"adapter_config field {name} must be unset ({why}), got {config[name]!r}")
        if config.get("bias") not in (None, "none"):
            _fail(f"adapter_config field bias must be 'none', got {config['bias']!r}")
        if str(config.get("peft_type") or "LORA").upper().rpartition(".")[2] != "LORA":
            _fail(f"adapter_config field peft_type must be 'LORA', got {config['peft_type']!r}")
        init = str(config.get("init_lora_weights", True)).lower()
        if init.startswith(self.CHANGED_BASE):
            _fail(
                f"adapter_config field init_lora_weights must keep the base weights, got {init!r}, which changes them"
            )
        if init not in self.INITS and config.get("init_lora_weights") is not None:
            _fail(f"adapter_config field init_lora_weights must be one of {', '.join(self.INITS)}, got {init!r}")
        self.r = self._number("r", config.get("r", 8), whole=True)
        self.alpha = self._number("lora_alpha", config.get("lora_alpha", 8))
        self.rslora = bool(config.get("use_rslora"))
        self.ranks = self._pattern("rank_pattern", whole=True)
        self.alphas = self._pattern("alpha_pattern")
        self.transposed = self._transposed()
        self._known: dict[str, tuple[int, float]] = {}
        self.uniform = not self.raw.get("rank_pattern") and not self.raw.get("alpha_pattern")

    @staticmethod
    def _number(name: str, value: Any, whole: bool = False) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            _fail(f"adapter_config field {name} must be a number, got {value!r}")
        if whole and (value != int(value) or value < 1):
            _fail(f"adapter_config field {name} must be a positive integer, got {value!r}")
        return int(value) if whole else float(value)

    def _pattern(self, name: str, whole: bool = False) -> _Patterns:
        given = self.raw.get(name) or {}
        if not isinstance(given, Mapping):
            _fail(f"adapter_config field {name} must be a mapping, got {type(given).__name__}")
        for k in given:
            if not isinstance(k, str):
                _fail(f"adapter_config field {name} must have text as keys, got {k!r}")
        return _Patterns(name, {k: self._number(f"{name}[{k!r}]", v, whole) for k, v in given.items()})

    def _transposed(self) -> bool | None:
        """Whether flat factors are swapped, where shapes do not say it; None when the configuration does not either."""
        if not self.raw.get("target_parameters"):
            return False
        version = re.findall(r"\d+", str(self.raw.get("peft_version") or ""))[:3]
        return tuple(map(int, version)) < SWAPPED_BEFORE if version else None

    def expected_rank(self, module: str) -> int | None:
        """r of a module by name; None for bare tensors, whose shapes are all there is."""
        return self._of(module)[0] if self.given else None

    def scale(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA, of a module by name; 1 for bare tensors."""
        if not self.given:
            return 1.0
        return self._of(module)[1]

    def _of(self, module: str) -> tuple[int, float]:
        """(r, scale), remembered: a module is asked for with its A, its B and its scale."""
        if module not in self._known:
            r = self.ranks.get(module, self.r)
            scale = self.alphas.get(module, self.alpha) / (math.sqrt(r) if self.rslora else r)
            self._known[module] = (r, scale)
        return self._known[module]


class _Patterns:
    """PEFT's patterns: the first key that, as a regular expression, matches the name or its end after a dot."""

    def __init__(self, name: str, patterns: dict[str, Any]) -> None:
        self.literal: dict[str, tuple[int, Any]] = {}
        self.compiled: list[tuple[int, re.Pattern[str], Any]] = []
        for i, (key, value) in enumerate(patterns.items()):
            if re.fullmatch(r"[\w.]+", key):
                self.literal[key] = (i, value)
                continue
            try:
                self.compiled.append((i, re.compile(rf"(.*\.)?({key})$"), value))
            except re.error as error:
                _fail(f"adapter_config field {name} must hold regular expressions, got {key!r} ({error})")

    def get(self, module: str, default: Any) -> Any:
        if not self.literal and not self.compiled:
            return default
        best: tuple[float, Any] = (math.inf, default)
        if self.literal:
            at = 0
            while True:
                hit = self.literal.get(module[at:])
                if hit is not None and hit[0] < best[0]:
                    best = hit
                dot = module.find(".", at)
                if dot < 0:
                    break
                at = dot + 1
        for i, pattern, value in self.compiled:
            if i > best[0]:
                break
            if pattern.match(module):
                return value
        return best[1]


# ------------------------------------------------------------------------------------------------------------- keys


@dataclass
class _Names:
    """Keys of one adapter, sorted by what they belong to."""

    experts: dict[int, dict[tuple[str, str], dict[int, str]]] = field(default_factory=dict)  # layer, (module, side), e
    other: dict[str, dict[str, str]] = field(default_factory=dict)  # module, side


def _strip(module: str) -> str:
    """A module's name inside the model, as PEFT's patterns see it."""
    return module[len(PREFIX) :] if module.startswith(PREFIX) else module


def _sort_keys(keys: Iterable[str], config: BeamMoEConfig) -> _Names:
    names = _Names()
    adapter_names: set[str] = set()
    head, _, block = config.experts_path.partition("{layer}.")
    own = re.compile(re.escape(block) + r"(?:\.(.+))?")
    layers = re.compile(rf"(?:{ROOT}|(?:{re.escape(PREFIX)})?{re.escape(head)})(\d+)\.(.+)")
    count, sparse, e_count = config.num_layers, config.sparse, config.num_experts
    for key in keys:
        if not isinstance(key, str):
            _fail(f"source must have names as keys, got {key!r}")
        m = COMMON.fullmatch(key)
        if m is not None:  # nearly all of a large adapter's names: one match instead of four
            layer, expert = int(m[1]), int(m[2])
            if layer < count and sparse[layer] and expert < e_count and m[3] in PROJECTIONS:
                _put(names.experts.setdefault(layer, {}).setdefault((PROJECTIONS[m[3]], m[4]), {}), expert, key)
                continue
        m = KEY.fullmatch(key)
        if m is None:
            _fail(f"no module of the model consumes {key!r}")
        module, kind, leaf = m["module"], m["kind"], m["leaf"]
        if "modules_to_save" in key:
            _fail(f"modules_to_save must be unset, got {key!r}")
        if kind == "lora_magnitude_vector":
            _fail(f"use_dora must be unset (DoRA scales the base weights), got {key!r}")
        if leaf == "bias":
            _fail(f"lora_bias must be unset, got {key!r}")
        side = {"lora_A": "A", "lora_B": "B", "lora_embedding_A": "A", "lora_embedding_B": "B"}.get(kind)
        if side is None:
            _fail(f"no module of the model consumes {key!r}")
        if m["name"] is not None:
            adapter_names.add(m["name"])
        if len(adapter_names) > 1:
            _fail(f"tensors must be of one adapter, got {key!r} among those of {sorted(adapter_names)}")

        in_layer = layers.fullmatch(module)
        if in_layer is None:
            if not TOP.fullmatch(_strip(module)):
                _fail(f"no module of the model consumes {key!r}")
            _put(names.other.setdefault(module, {}), side, key)
            continue
        layer, rest = int(in_layer[1]), in_layer[2]
        if layer >= count:
            _fail(f"layers must be in 0..{count - 1}, got {key!r}")
        inside = own.fullmatch(rest) or EXPERTS.fullmatch(rest)
        if inside is None:
            if not _is_other(rest, sparse[layer], config):
                _fail(f"no module of the model consumes {key!r}")
            _put(names.other.setdefault(module, {}), side, key)
            continue
        if not sparse[layer]:
            _fail(f"layer {layer} is dense, no module consumes {key!r}")
        which, expert = _expert_module(inside[1], key, config)
        _put(names.experts.setdefault(layer, {}).setdefault((which, side), {}), expert, key)
    return names


def _put(into: dict[Any, str], at: Any, key: str) -> None:
    if at in into:
        _fail(f"one tensor for one factor, got {into[at]!r} and {key!r}")
    into[at] = key


def _is_other(rest: str, sparse: bool, config: BeamMoEConfig) -> bool:
    attention = ATTENTION_BLOCK.fullmatch(rest)
    if attention is not None:
        return attention[1] in ATTENTION
    if not sparse:
        return DENSE.fullmatch(rest) is not None
    return ROUTER.fullmatch(rest) is not None or (config.shared_experts > 0 and SHARED.fullmatch(rest) is not None)


def _expert_module(inner: str | None, key: str, config: BeamMoEConfig) -> tuple[str, int]:
    """(module, expert) of the part of a name after ``experts``."""
    if inner is None:
        return OUTER, WHOLE
    if inner == "base_layer":
        return INNER, WHOLE
    if inner in PROJECTIONS:
        return PROJECTIONS[inner], WHOLE
    m = INDEXED.fullmatch(inner)
    if m is None or m[2] not in PROJECTIONS:
        _fail(f"no module of the model consumes {key!r}")
    if int(m[1]) >= config.num_experts:
        _fail(f"experts must be in 0..{config.num_experts - 1}, got {key!r}")
    return PROJECTIONS[m[2]], int(m[1])


# ------------------------------------------------------------------------------------------------- one layer's factors


@dataclass
class _Projection:
    """A and B of one projection over all experts, unsharded, as views of the caller's tensors."""

    a: Source
    b: Source
    ranks: list[int]  # of each expert, or one for all
    scales: list[float]

    @property
    def shared_a(self) -> bool:
        return len(self.a) == 1

    @property
    def shared_b(self) -> bool:
        return len(self.b) == 1 and len(set(self.scales)) == 1


class _Layer:
    """Gathers, checks and normalises one layer's expert tensors."""

    def __init__(
        self,
        layer: int,
        keys: dict[tuple[str, str], dict[int, str]],
        tensors: Mapping[str, torch.Tensor],
        peft: _Peft,
        config: BeamMoEConfig,
        flat_transposed: bool | None,
        max_rank: int | None,
    ) -> None:
        self.layer, self.keys, self.tensors, self.peft, self.config = layer, keys, tensors, peft, config
        self.max_rank = max_rank
        self.projections: dict[str, _Projection] = {}
        modules = {module for module, _ in keys}
        flat = modules & {INNER, OUTER}
        if flat and modules - flat:
            _fail(f"layer {layer} must have one layout, got {self._any(flat)!r} and {self._any(modules - flat)!r}")
        if GATE_UP in modules and modules & {GATE, UP}:
            _fail(f"gate and up must come fused or apart, got {self._any({GATE_UP})!r} and {self._any({GATE, UP})!r}")
        if flat:
            self._flat(flat_transposed)
        for module in sorted(modules - flat):
            self._named(module)
        if GATE_UP in self.projections:
            self._split()

    def _any(self, modules: set[str]) -> str:
        return next(key for (module, _), by in self.keys.items() if module in modules for key in by.values())

    def _sizes(self, module: str) -> tuple[int, int]:
        h, i = self.config.hidden, self.config.intermediate
        return {GATE: (h, i), UP: (h, i), GATE_UP: (h, 2 * i), DOWN: (i, h)}[module]

    def _pair(self, module: str) -> tuple[dict[int, str], dict[int, str]]:
        a, b = self.keys.get((module, "A")), self.keys.get((module, "B"))
        if a is None or b is None:
            have = next(iter((a or b or {}).values()))
            gone = "lora_B" if b is None else "lora_A"
            _fail(f"{have!r} has no {gone} beside it")
        return a, b

    def _rank(self, key: str, module: str, shape: Sequence[int], rank: int, wanted: str) -> None:
        expected = self.peft.expected_rank(module)
        if expected is not None and rank != expected:
            _fail(f"{key!r} must have rank {expected} by adapter_config, got {rank} in shape {tuple(shape)} ({wanted})")
        if rank < 1:
            _fail(f"{key!r} must have a rank of at least 1, got shape {tuple(shape)}")

    # -- indexed and stacked names

    def _named(self, module: str) -> None:
        a_keys, b_keys = self._pair(module)
        n_in, n_out = self._sizes(module)
        a, a_ranks = self._side(a_keys, module, n_in, axis=0)
        b, b_ranks = self._side(b_keys, module, n_out, axis=1)
        ranks = a_ranks if len(a_ranks) >= len(b_ranks) else b_ranks
        for e in range(len(ranks)):
            a_rank, b_rank = (many[e if len(many) > 1 else 0] for many in (a_ranks, b_ranks))
            if a_rank != b_rank:
                b_key = b_keys[e] if WHOLE not in b_keys else b_keys[WHOLE]
                _fail(f"{b_key!r} must have the rank of its lora_A, {a_rank}, got {b_rank}")
        scale_keys = a_keys if WHOLE not in a_keys else b_keys
        scale_of = sorted(scale_keys)[:1] if self.peft.uniform else sorted(scale_keys)
        scales = [self.peft.scale(self._module_of(scale_keys[e])) for e in scale_of]
        self.projections[module] = _Projection(a, b, ranks, scales)

    def _module_of(self, key: str) -> str:
        m = KEY.fullmatch(key)
        assert m is not None  # every key went through _sort_keys
        return _strip(m["module"])

    def _side(self, keys: dict[int, str], module: str, width: int, axis: int) -> tuple[Source, list[int]]:
        """One factor over all experts and the rank of each; ``axis`` is the rank axis of a matrix."""
        e_count = self.config.num_experts
        form = f"(r, {width})" if axis == 0 else f"({width}, r)"
        if WHOLE in keys:
            key = keys[WHOLE]
            if len(keys) > 1:
                other = next(k for e, k in keys.items() if e != WHOLE)
                _fail(f"one layout for one factor, got {key!r} and {other!r}")
            t = self.tensors[key]
            t = t[None] if t.dim() == 2 else t
            if t.dim() != 3 or t.shape[0] not in (1, e_count) or t.shape[2 - axis] != width:
                _fail(f"{key!r} must have shape (1|{e_count}, {form[1:]}, got {tuple(self.tensors[key].shape)}")
            self._rank(key, self._module_of(key), t.shape, t.shape[1 + axis], form)
            return t, [t.shape[1 + axis]] * t.shape[0]
        if len(keys) != e_count:
            gone = next(e for e in range(e_count) if e not in keys)
            have = next(iter(keys.values()))
            missing = re.sub(r"experts\.\d+\.", f"experts.{gone}.", have)
            _fail(f"{missing!r} is missing ({len(keys)} of {e_count} experts are there)")
        found, ranks = [], []
        known = self.peft.r if self.peft.given and self.peft.uniform else None
        for e in range(e_count):
            key = keys[e]
            t = self.tensors[key]
            shape = t.shape
            if len(shape) != 2 or shape[1 - axis] != width:
                _fail(f"{key!r} must have shape {form}, got {tuple(shape)}")
            if shape[axis] != known:
                self._rank(key, self._module_of(key), shape, shape[axis], form)
            found.append(t)
            ranks.append(shape[axis])
        return found, ranks

    # -- flat names

    def _flat(self, transposed: bool | None) -> None:
        pairs: dict[str, tuple[str, str]] = {}
        for module in (INNER, OUTER):
            if (module, "A") in self.keys or (module, "B") in self.keys:
                a_keys, b_keys = self._pair(module)
                pairs[module] = (a_keys[WHOLE], b_keys[WHOLE])
        options = {module: _flat_options(self.tensors, keys, self.config) for module, keys in pairs.items()}
        for module, keys in pairs.items():
            if not options[module]:
                h, i = self.config.hidden, self.config.intermediate
                e = self.config.num_experts
                _fail(
                    f"{keys[0]!r} and {keys[1]!r} must have shapes (r*{e}, {h}) and ({2 * i}, r*{e}) for gate and up "
                    f"or (r*{e}, {i}) and ({h}, r*{e}) for down, got {tuple(self.tensors[keys[0]].shape)} and "
                    f"{tuple(self.tensors[keys[1]].shape)}"
                )
        chosen: dict[str, tuple[str, bool]] = {}
        for module, forms in options.items():
            taken = {what for what, _ in chosen.values()}
            forms = [f for f in forms if f[0] not in taken]
            if len(forms) > 1 and transposed is not None:
                forms = [f for f in forms if f[1] == transposed]
            if not forms:
                _fail(f"one module for gate and up and one for down, got {pairs[module][0]!r} beside its like")
            if len(forms) > 1:
                _fail(
                    f"{pairs[module][0]!r} reads as (in, out) and as (out, in), since 2 I = H: adapter_config must "
                    f"name the peft_version that wrote it, got {self.peft.raw.get('peft_version')!r}"
                )
            chosen[module] = forms[0]
        for module, (what, swap) in chosen.items():
            a_key, b_key = pairs[module]
            a, b = self.tensors[a_key], self.tensors[b_key]
            e = self.config.num_experts
            rank = a.shape[0] // e
            path = self._module_of(a_key)
            path = path[: -len(".base_layer")] if module == INNER else path
            name = f"{path}.{'gate_up_proj' if what == GATE_UP else 'down_proj'}"
            self._rank(a_key, name, a.shape, rank, f"r*{e} rows")
            a3, b3 = a.reshape(e, rank, -1), b.reshape(-1, rank, e).permute(2, 0, 1)
            if swap:
                a3, b3 = b3.transpose(1, 2), a3.transpose(1, 2)
            self.projections[what] = _Projection(a3, b3, [rank] * e, [self.peft.scale(name)])

    # -- fused gate and up

    def _split(self) -> None:
        """Gate and up out of a fused pair: one A for both, or each its half of the rank where B is block-diagonal."""
        p = self.projections.pop(GATE_UP)
        i, rank = self.config.intermediate, p.ranks[0]
        half = rank // 2
        down = self.projections.get(DOWN)
        base = down.ranks[0] if down is not None else (self.peft.r if self.peft.given else None)
        doubled = half == base
        worth_a_look = doubled or not self.peft.uniform or (self.max_rank is not None and rank > self.max_rank)
        if len(set(p.ranks)) == 1 and rank % 2 == 0 and worth_a_look:
            mats = [p.b] if isinstance(p.b, torch.Tensor) else p.b
            apart = not any(bool(m[..., :i, half:].any()) or bool(m[..., i:, :half].any()) for m in mats)
            # a B of zeros says nothing, unless the rank does
            if apart and (doubled or any(bool(m.any()) for m in mats)):
                for what, rows, cols in ((GATE, slice(0, i), slice(0, half)), (UP, slice(i, None), slice(half, None))):
                    self.projections[what] = _Projection(
                        _cut(p.a, cols, slice(None)), _cut(p.b, rows, cols), [half] * len(p.ranks), p.scales
                    )
                return
        for what, rows in ((GATE, slice(0, i)), (UP, slice(i, None))):
            self.projections[what] = _Projection(p.a, _cut(p.b, rows, slice(None)), p.ranks, p.scales)


def _cut(source: Source, rows: slice, cols: slice) -> Source:
    if isinstance(source, torch.Tensor):
        return source[:, rows, cols]
    return [m[rows, cols] for m in source]


def _flat_options(
    tensors: Mapping[str, torch.Tensor], keys: tuple[str, str], config: BeamMoEConfig
) -> list[tuple[str, bool]]:
    """What a flat pair can be by its shapes: (projection, whether A and B are swapped)."""
    a, b = tensors[keys[0]].shape, tensors[keys[1]].shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % config.num_experts or not a[0]:
        return []
    h, i = config.hidden, config.intermediate
    forms = {(GATE_UP, False): (h, 2 * i), (GATE_UP, True): (2 * i, h), (DOWN, False): (i, h), (DOWN, True): (h, i)}
    return [form for form, sizes in forms.items() if (a[1], b[0]) == sizes]


def _flat_orientation(
    names: _Names, tensors: Mapping[str, torch.Tensor], peft: _Peft, config: BeamMoEConfig
) -> bool | None:
    """Whether this adapter's flat factors are swapped: as any pair with one reading says, else as its configuration."""
    for modules in names.experts.values():
        for module in (INNER, OUTER):
            a, b = modules.get((module, "A")), modules.get((module, "B"))
            if a and b:
                forms = {swap for _, swap in _flat_options(tensors, (a[WHOLE], b[WHOLE]), config)}
                if len(forms) == 1:
                    return forms.pop()
    return peft.transposed


# ------------------------------------------------------------------------------------------------------------- banks


def _fill(into: torch.Tensor, source: Source, scale: float) -> None:
    """Copy ``source`` over the experts of ``into``, times ``scale``, with one rounding; the source is left alone."""
    if scale != 1.0:
        if source[0].dtype == into.dtype:  # the copy is exact, the product is rounded once
            _fill(into, source, 1.0)
            into.mul_(scale)
            return
        if isinstance(source, list):
            source = torch.stack(source)
        into.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) * scale)
    elif isinstance(source, torch.Tensor):
        into.copy_(source)
    elif len(source) == into.shape[0] and source[0].dtype == into.dtype:
        torch.stack(source, out=into)
    else:
        into.copy_(torch.stack(source))


def _fill_factor(
    into: torch.Tensor, source: Source, ranks: list[int], scales: list[float], axis: int, first: int, count: int
) -> None:
    """Fill ``into`` (E|1, ., .) from the experts ``first .. first + count`` of ``source``, each at its own rank."""
    shared = len(source) == 1
    if not shared:
        source = source[first : first + count]
    if shared or len(ranks) == 1:
        ranks = ranks[:1]
    else:
        ranks = ranks[first : first + count]
    scales = scales[first : first + count] if len(scales) > 1 else scales
    if len(set(ranks)) == 1 and len(set(scales)) == 1:
        _fill(into.narrow(axis, 0, ranks[0]), source, scales[0])
        return
    for e in range(into.shape[0]):
        rank, scale = ranks[e if len(ranks) > 1 else 0], scales[e if len(scales) > 1 else 0]
        _fill(into[e : e + 1].narrow(axis, 0, rank), source[0 if shared else e][None], scale)


def _same_a(gate: _Projection, up: _Projection, first: int, count: int) -> bool:
    """Whether gate and up have one A: the same tensor, or equal values."""
    if gate.a is up.a:
        return True
    if len(gate.a) != len(up.a) or gate.ranks != up.ranks:
        return False
    if not torch.equal(gate.a[0], up.a[0]):
        return False
    span = range(1) if len(gate.a) == 1 else range(first, first + count)
    return all(gate.a[e] is up.a[e] or torch.equal(gate.a[e], up.a[e]) for e in span)


def _build(
    layer: _Layer, shard: Shard, max_rank: int | None, dtype: torch.dtype, device: torch.device | str
) -> ExpertLoRA:
    gate, up, down = (layer.projections.get(p) for p in (GATE, UP, DOWN))
    live = max(r for p in (gate, up, down) if p is not None for r in p.ranks)
    if max_rank is not None and live > max_rank:
        key = next(iter(next(iter(layer.keys.values())).values()))
        _fail(f"max_rank must be at least the adapter's rank in {key!r}, {live}, got {max_rank}")
    rank = max_rank or live
    h, i, e = shard.hidden, shard.intermediate, shard.num_experts
    first = shard.expert_range[0]
    columns = slice(*shard.intermediate_range)
    one_a = gate is None or up is None or _same_a(gate, up, first, e)
    w13 = [p for p in (gate, up) if p is not None]
    # a missing side follows the other: nothing reads an A whose B is zero
    shared_a = bool(w13) and all(p.shared_a for p in w13)
    shared_b = down is not None and down.shared_b
    some = next(p for p in (gate, up, down) if p is not None)
    near = some.a[0].device

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=near)

    w13_a = zeros(1, 1 if shared_a else e, 1 if one_a else 2, rank, h)
    w13_b, w2_a = zeros(1, e, 2, i, rank), zeros(1, e, rank, i)
    w2_b = zeros(1, 1 if shared_b else e, h, rank)
    for s, p in enumerate((gate, up)):
        if p is None:
            continue
        if s == 0 or not one_a or gate is None:
            _fill_factor(w13_a[0, :, 0 if one_a else s], p.a, p.ranks, [1.0], 1, first, e)
        _fill_factor(w13_b[0, :, s], _cut(p.b, columns, slice(None)), p.ranks, p.scales, 2, first, e)
    if down is not None:
        _fill_factor(w2_a[0], _cut(down.a, slice(None), columns), down.ranks, [1.0], 1, first, e)
        _fill_factor(w2_b[0], down.b, down.ranks, down.scales, 2, first, e)
    ranks = torch.full((1,), live, dtype=torch.int32, device=near)
    return ExpertLoRA(w13_a, w13_b, w2_a, w2_b, ranks=ranks).to(device)


def _read(
    source: str | Path | Mapping[str, torch.Tensor],
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any] | None]:
    """Tensors and ``adapter_config.json`` of a folder or file; tensors given are given back."""
    if isinstance(source, Mapping):
        return source, None
    if not isinstance(source, (str, Path)):
        _fail(f"source must be a path or a mapping of tensors, got {type(source).__name__}")
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    files = [folder / WEIGHTS, folder / PICKLED] if path.is_dir() else [path]
    weights = next((f for f in files if f.is_file()), None)
    if weights is None:
        _fail(f"source must hold {WEIGHTS} or {PICKLED}, got {str(path)!r}")
    if not (folder / CONFIG).is_file():
        _fail(f"source must hold {CONFIG}, got {str(folder)!r}")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"load_adapter: {CONFIG} must be JSON, got {str(folder / CONFIG)!r} ({error})") from error
    if not isinstance(config, dict):
        _fail(f"{CONFIG} must be a JSON object, got {config!r}")
    if weights.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(weights), config
        except SafetensorError as error:
            raise ValueError(f"load_adapter: source must be safetensors, got {str(weights)!r} ({error})") from error
    try:
        # a file of the format before torch 1.6 cannot be mapped
        tensors = torch.load(weights, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(weights))
    except Exception as error:  # of any type, by where a damaged file is damaged
        raise ValueError(f"load_adapter: source must be tensors that torch.save wrote, got {str(weights)!r}") from error
    if not isinstance(tensors, Mapping):
        _fail(f"source must hold a mapping of tensors, got {type(tensors).__name__} in {str(weights)!r}")
    return tensors, config


def _each(layers: list[int], progress: bool) -> Iterator[int]:
    if not progress:
        yield from layers
        return
    from rich.progress import track

    yield from track(layers, description="adapter layers")


@torch.no_grad()
def load_adapter(
    source: str | Path | Mapping[str, torch.Tensor],
    config: BeamMoEConfig | Shard,
    *,
    max_rank: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    peft_config: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> Adapter:
    """Read a LoRA adapter into one `ExpertLoRA` bank (one slot) for every layer of a rank that it touches.

    Args:
        source: a PEFT folder, a weights file beside its ``adapter_config.json``, or a mapping of names to tensors (any
            of the layouts above; with or without ``base_model.model.``, ``.weight``, an adapter's name). Not
            written to.
        config: the model, or one rank's `Shard`: TP takes this rank's columns of I, EP its experts, PP its layers.
        max_rank: R of the banks, so that they fit a bank of that rank; None takes each layer's own rank.
        dtype: of the banks, rounded once from ``B * scale`` in fp32; None keeps the tensors' own.
        device: of the banks.
        peft_config: ``adapter_config.json`` for tensors given as a mapping; without it ``alpha / r`` is 1.
        progress: show a progress bar; None asks ``BEAM_MOE_PROGRESS``.

    Returns:
        An `Adapter`. A projection that the adapter lacks has zero factors (a lone gate or up lends its A to the other,
        so that it counts as one A). Gate and up with equal A become one A. Live ranks are in ``bank.ranks``.

    Raises:
        ValueError: a tensor that no module of the model consumes, a missing expert or factor, a wrong shape or rank,
            each by its key; a field of ``adapter_config.json`` that a pair of factors cannot express, by its name.
    """
    if not isinstance(config, (BeamMoEConfig, Shard)):
        _fail(f"config must be a BeamMoEConfig or a Shard, got {type(config).__name__}")
    shard = config if isinstance(config, Shard) else config.shard()
    tensors, found = _read(source)
    peft = _Peft(found if peft_config is None else peft_config)
    if max_rank is not None and (isinstance(max_rank, bool) or not isinstance(max_rank, int) or max_rank < 1):
        _fail(f"max_rank must be a positive integer, got {max_rank!r}")
    if not tensors:
        _fail("source must hold tensors, got none")
    names = _sort_keys(tensors, shard.config)

    kinds = set()
    for modules in names.experts.values():
        for by_expert in modules.values():
            for key in by_expert.values():
                t = tensors[key]
                if not isinstance(t, torch.Tensor):
                    _fail(f"{key!r} must be a tensor, got {type(t).__name__}")
                if t.is_meta or t.layout is not torch.strided:
                    _fail(f"{key!r} must be a dense tensor in memory, got one on {t.device} of layout {t.layout}")
                if t.dtype not in kinds:
                    if not t.dtype.is_floating_point or t.dtype.itemsize < 2:
                        _fail(f"{key!r} must be a floating-point tensor of 16 bits or more, got {t.dtype}")
                    kinds.add(t.dtype)
    if dtype is None and kinds:
        dtype = kinds.pop()
        for kind in kinds:
            dtype = torch.promote_types(dtype, kind)
    if kinds or names.experts:
        if dtype not in DTYPES:
            _fail(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")

    transposed = _flat_orientation(names, tensors, peft, shard.config)
    experts: dict[int, ExpertLoRA] = {}
    show = env.flag("PROGRESS") if progress is None else progress
    for number in _each(sorted(names.experts), show):
        layer = _Layer(number, names.experts[number], tensors, peft, shard.config, transposed, max_rank)
        if shard.first_layer <= number < shard.last_layer:
            assert dtype is not None  # names.experts is not empty
            experts[number] = _build(layer, shard, max_rank, dtype, device)

    other: dict[str, torch.Tensor] = {}
    scaling: dict[str, float] = {}
    for module, sides in names.other.items():
        if len(sides) != 2:
            (have,) = sides.values()
            _fail(f"{have!r} has no {'lora_B' if 'A' in sides else 'lora_A'} beside it")
        for key in sides.values():
            if not isinstance(tensors[key], torch.Tensor):
                _fail(f"{key!r} must be a tensor, got {type(tensors[key]).__name__}")
        a, b = tensors[sides["A"]], tensors[sides["B"]]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            _fail(f"{sides['B']!r} must have shape (out, {a.shape[0]}) to fit its lora_A, got {tuple(b.shape)}")
        expected = peft.expected_rank(_strip(module))
        if expected is not None and a.shape[0] != expected:
            _fail(f"{sides['A']!r} must have rank {expected} by adapter_config, got shape {tuple(a.shape)}")
        other.update({key: tensors[key] for key in sides.values()})
        scaling[module] = peft.scale(_strip(module))
    return Adapter(experts, other, scaling, dict(peft.raw))


# ------------------------------------------------------------------------------------------------------------- export


class _Writer:
    """Collects tensors and ranks of a PEFT folder."""

    def __init__(self, layout: str, path: str, projections: Sequence[str]) -> None:
        self.layout, self.path, self.projections = layout, path, dict(zip((GATE, UP, DOWN), projections))
        self.tensors: dict[str, torch.Tensor] = {}
        self.ranks: dict[tuple[int, str], int] = {}  # (layer, pattern of its expert modules): rank
        self.live: Counter[int] = Counter()

    def put(self, module: str, a: torch.Tensor, b: torch.Tensor) -> None:
        self.tensors[f"{PREFIX}{module}.lora_A.weight"] = a
        self.tensors[f"{PREFIX}{module}.lora_B.weight"] = b

    def add(self, layer: int, bank: ExpertLoRA) -> None:
        """One layer of a bank of one slot on the CPU."""
        r = int(bank.ranks[0])
        self.live[r] += 1
        a13 = [a[0, :, :r] for a in bank.gate_up_a]
        b13 = [b[0, :, :, :r] for b in bank.gate_up_b]
        a2, b2 = bank.w2_a[0, :, :r], bank.w2_b[0, :, :, :r]
        base, e = self.path.format(layer=layer), bank.num_experts
        parts = {GATE: (a13[0], b13[0]), UP: (a13[1], b13[1]), DOWN: (a2, b2)}
        full = {what: bool(b.any()) for what, (_, b) in parts.items()}
        lone = bank.one_a and full[GATE] != full[UP]  # the side without a B has the other's A
        keep = {what: full[what] or (bool(parts[what][0].any()) and not (lone and what != DOWN)) for what in parts}
        if not any(keep.values()):
            keep = dict.fromkeys(parts, True)
        if self.layout == "shared_outer":
            if ((keep[GATE] or keep[UP]) and not bank.shared_a) or (keep[DOWN] and not bank.shared_b):
                raise ValueError(
                    f"export_adapter: layout 'shared_outer' must have banks with shared outer factors, got layer "
                    f"{layer} with shared_a={bank.shared_a}, shared_b={bank.shared_b}"
                )
            for what, name in ((GATE, "w1"), (UP, "w3"), (DOWN, "w2")):
                if keep[what]:
                    self.put(f"{base}.{name}", *parts[what])
            self.ranks[layer, "(w1|w2|w3)"] = r
        elif self.layout == "per_expert":
            for what, name in self.projections.items():
                if keep[what]:
                    a, b = (t.expand(e, -1, -1).unbind() for t in parts[what])
                    for i in range(e):
                        self.put(f"{base}.{i}.{name}", a[i], b[i])
            self.ranks[layer, rf"\d+\.({'|'.join(self.projections.values())})"] = r
        else:
            if keep[GATE] or keep[UP]:
                rank = r if bank.one_a else 2 * r
                a = (a13[0] if bank.one_a else torch.cat(a13, dim=1)).expand(e, -1, -1)
                if bank.one_a:
                    b = torch.cat(b13, dim=1)
                else:
                    b = b13[0].new_zeros(e, 2 * bank.intermediate, rank)
                    b[:, : bank.intermediate, :r], b[:, bank.intermediate :, r:] = b13
                self.put(f"{base}.base_layer", a.reshape(e * rank, -1), b.permute(1, 2, 0).reshape(-1, rank * e))
                self.ranks[layer, "gate_up_proj"] = rank
            if keep[DOWN]:
                b2 = b2.expand(e, -1, -1)
                self.put(base, a2.reshape(e * r, -1), b2.permute(1, 2, 0).reshape(-1, r * e))
                self.ranks[layer, "down_proj"] = r

    def unnest(self) -> None:
        """Name a lone gate_up as PEFT does: its wrapper is the innermost of two only where down has one as well."""
        if self.layout == "fused_3d" and not any(tail == "down_proj" for _, tail in self.ranks):
            self.tensors = {key.replace(".base_layer.lora_", ".lora_"): t for key, t in self.tensors.items()}

    def rank_pattern(self) -> tuple[int, dict[str, int]]:
        """The commonest live rank and patterns for modules that differ: one for all layers where they agree."""
        if not self.ranks:
            return 8, {}
        common = self.live.most_common(1)[0][0]
        block = re.escape(self.path.partition("{layer}.")[2])
        patterns: dict[str, int] = {}
        for tail in {t: None for _, t in self.ranks}:
            of = {layer: rank for (layer, t), rank in self.ranks.items() if t == tail}
            if len(set(of.values())) == 1:
                if common not in of.values():
                    patterns[rf"{block}\.{tail}"] = next(iter(of.values()))
                continue
            patterns.update({rf"layers\.{n}\.{block}\.{tail}": rank for n, rank in of.items() if rank != common})
        return common, patterns


@torch.no_grad()
def export_adapter(
    adapter: Adapter | Mapping[int, ExpertLoRA],
    folder: str | Path,
    layout: str = "per_expert",
    *,
    slot: int = 0,
    config: BeamMoEConfig | None = None,
    base_model: str | None = None,
) -> Path:
    """Write a slot of each layer's bank as a PEFT folder that `load_adapter` reads back bit for bit.

    Factors are cut to the slot's live rank; the scale is already in B, so ``lora_alpha`` equals ``r``. Layers whose
    slot has rank 0 are left out, and so are projections without any factor.

    Args:
        adapter: unsharded banks by layer, or an `Adapter`, whose other modules' tensors are written too.
        folder: made if need be; ``adapter_model.safetensors`` and ``adapter_config.json`` in it are replaced.
        layout: "per_expert" (shared factors are repeated); "fused_3d": PEFT's flat ``target_parameters`` layout as
            of 0.19.1, gate and up with different A at twice the rank and a block-diagonal B; "shared_outer": stacked
            ``w1, w3, w2`` with an expert axis of 1 on the shared factors, as vLLM's ``enable_moe_shared_loras`` reads.
        slot: which slot of the banks.
        config: names of the experts and shapes to check; without it ``model.layers.{layer}.mlp.experts`` and
            ``gate_proj, up_proj, down_proj``.
        base_model: ``base_model_name_or_path`` of the configuration.

    Returns:
        The folder.

    Raises:
        ValueError: an unknown layout, no bank or only empty ones, a bank that is not a whole layer of ``config``, or
            separate factors for the layout "shared_outer".
    """
    if layout not in LAYOUTS:
        raise ValueError(f"export_adapter: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if not isinstance(adapter, (Adapter, Mapping)):
        raise ValueError(f"export_adapter: adapter must be an Adapter or banks by layer, got {type(adapter).__name__}")
    if not isinstance(config, (BeamMoEConfig, type(None))):
        raise ValueError(f"export_adapter: config must be a BeamMoEConfig, got {type(config).__name__}")
    given = adapter if isinstance(adapter, Adapter) else Adapter(dict(adapter))
    for layer, bank in given.experts.items():
        whole = isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0
        if not whole or (config is not None and not (layer < config.num_layers and config.sparse[layer])):
            raise ValueError(f"export_adapter: adapter must have sparse layers of the model as keys, got {layer!r}")
        if not isinstance(bank, ExpertLoRA):
            raise ValueError(f"export_adapter: layer {layer} must be an ExpertLoRA, got {type(bank).__name__}")
    path = config.experts_path if config is not None else "model.layers.{layer}.mlp.experts"
    names = config.projections if config is not None else ("gate_proj", "up_proj", "down_proj")
    writer = _Writer(layout, path, names)
    for layer, bank in sorted(given.experts.items()):
        if config is not None:
            got, want = ((c.num_experts, c.hidden, c.intermediate) for c in (bank, config))
            if got != want:
                raise ValueError(f"export_adapter: bank of layer {layer} must be whole (E, H, I) = {want}, got {got}")
        one = bank.slot(slot).to("cpu")
        if int(one.ranks[0]) > 0 and int(one.enabled[0]):
            writer.add(layer, one)
    if not writer.tensors and not given.other:
        raise ValueError(f"export_adapter: slot {slot} must hold an adapter, got {len(given.experts)} empty banks")

    writer.unnest()
    rank, rank_pattern = writer.rank_pattern()
    alpha_pattern: dict[str, float] = dict(rank_pattern)
    modules = set(names) if writer.tensors and layout == "per_expert" else set()
    if layout == "shared_outer" and writer.tensors:
        modules |= {"w1", "w2", "w3"}
    for key, t in given.other.items():
        m = KEY.fullmatch(key)
        if m is None:
            raise ValueError(f"export_adapter: other must hold LoRA tensors, got {key!r}")
        inside = _strip(m["module"])
        leaf = "" if m["kind"].startswith("lora_embedding") else ".weight"
        writer.tensors[f"{PREFIX}{inside}.{m['kind']}{leaf}"] = t.detach().cpu()
        modules.add(inside.rpartition(".")[2])
        if m["kind"].endswith("_A"):
            r, alpha = t.shape[0], given.scaling.get(m["module"], 1.0) * t.shape[0]
            if r != rank:
                rank_pattern[inside] = r
            if alpha != rank:
                alpha_pattern[inside] = alpha
    fused = sorted(f"mlp.experts.{t}" for t in {tail for _, tail in writer.ranks}) if layout == "fused_3d" else []
    peft = {
        **PLAIN_LORA,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "target_modules": sorted(modules),
        "target_parameters": fused or None,
        "peft_version": ".".join(map(str, SWAPPED_BEFORE)),
    }
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[int] = set()
    ready = {}
    for key, t in writer.tensors.items():
        t = t.contiguous()
        if t.data_ptr() in seen:  # safetensors refuses tensors that share memory
            t = t.clone()
        seen.add(t.data_ptr())
        ready[key] = t
    for name, write in (
        (WEIGHTS, lambda to: save_file(ready, to, metadata={"format": "pt"})),
        (CONFIG, lambda to: Path(to).write_text(json.dumps(peft, indent=2) + "\n", encoding="utf-8")),
    ):
        part = folder / f"{name}.part"
        write(part)
        os.replace(part, folder / name)
    return folder
