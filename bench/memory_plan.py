"""GPU memory of every rank of a Beam served by vLLM, by arithmetic: what is laid out before an engine is started.

The experts' share is `BeamMoEConfig.shard`'s; the other parts are what vLLM's Beam keeps per rank: attention, dense
layers, fp32 routers, embedding and head (vocabulary padded to 64), KV cache, and the LoRA buffers that vLLM sizes by
slots and maximal rank for every linear layer. Two parts are estimates and say so: the activations of the largest batch
and what CUDA, NCCL and graphs take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beam_moe import BeamMoEConfig

LAYOUTS = {"per-expert": "per_expert", "shared-outer": "shared_outer"}
KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
RUNTIME = 5 << 30
"""Estimate: CUDA context, NCCL's and the custom all-reduce's buffers, CUDA graphs, the allocator's slack."""
BLOCK = 16
"""Tokens of a block of the KV cache."""


@dataclass(frozen=True)
class RankPlan:
    """Bytes of one pipeline stage's rank (ranks of one tensor-parallel group are alike).

    Attributes:
        stage: pipeline rank. layers: (first, one past the last).
        parts: bytes by name, all there at once while serving.
        loading: bytes at the worst moment of loading, when one layer is there in bf16 and in its quantised form twice.
    """

    stage: int
    layers: tuple[int, int]
    parts: dict[str, int]
    loading: int

    @property
    def serving(self) -> int:
        return sum(self.parts.values())

    @property
    def need(self) -> int:
        return max(self.serving, self.loading)

    def lines(self) -> list[str]:
        """The plan as text, GiB."""
        parts = ", ".join(f"{k} {v / 2**30:.2f}" for k, v in self.parts.items() if v)
        first, last = self.layers
        return [
            f"stage {self.stage}, layers {first} to {last - 1}: {self.need / 2**30:.1f} GiB a rank",
            f"  serving {self.serving / 2**30:.1f} ({parts}); loading at most {self.loading / 2**30:.1f}",
        ]


def _linear(out: int, inner: int, base: str) -> int:
    """Bytes of a linear layer's weight: bf16, or MXFP8 elements with one scale byte for 32."""
    return out * inner + out * (inner // 32) if base == "mxfp8" else 2 * out * inner


def plan(
    model: Mapping[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    base: str = "bf16",
    adapters: str = "none",
    rank: int = 0,
    slots: int = 1,
    ours: bool = True,
    requests: int = 64,
    tokens_each: int = 352,
    batch_tokens: int = 2048,
) -> list[RankPlan]:
    """One plan for each pipeline stage.

    Args:
        model: Beam's ``config.json``.
        base: bf16, or mxfp8 for experts, attention and dense layers.
        adapters, rank, slots: none, per-expert or shared-outer; the engine's maximal rank and slots.
        ours: whether our experts serve, which keep two bytes for each row of MXFP8 weights.
        requests, tokens_each: most concurrent requests and their longest length.
        batch_tokens: most tokens in a batch.

    Raises:
        ValueError: a geometry that these sizes do not divide, a size below 1, a config without a needed key, or an
            unknown base or layout.
    """
    if base not in ("bf16", "mxfp8"):
        raise ValueError(f"plan: base must be bf16 or mxfp8, got {base!r}")
    if adapters not in ("none", *LAYOUTS):
        raise ValueError(f"plan: adapters must be none, {', '.join(LAYOUTS)}, got {adapters!r}")
    given = {"tp": tp, "pp": pp, "slots": slots, "requests": requests, "tokens_each": tokens_each}
    given |= {"batch_tokens": batch_tokens} | ({} if adapters == "none" else {"rank": rank})
    for name, n in given.items():
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"plan: {name} must be an integer of at least 1, got {n!r}")
    if not isinstance(model, Mapping) or any(k not in model for k in KEYS):
        got = f"one without {sorted(set(KEYS) - set(model))}" if isinstance(model, Mapping) else type(model).__name__
        raise ValueError(f"plan: model must be Beam's config with {', '.join(KEYS)}, got {got}")
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    for name, n in (("num_attention_heads", heads), ("intermediate_size", model["intermediate_size"])):
        if n % tp:
            raise ValueError(f"plan: tp must be a divisor of {name} {n}, got {tp}")
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(f"plan: tp must divide num_key_value_heads {kv_heads} or be a multiple of it, got {tp}")
    config = BeamMoEConfig.from_hf(model)
    h, head = config.hidden, model["head_dim"]
    q, kv = heads // tp * head, max(1, kv_heads // tp) * head
    wide = model["intermediate_size"] // tp
    vocab = -(-model["vocab_size"] // 64) * 64
    if vocab % tp:
        raise ValueError(f"plan: tp must be a divisor of the padded vocabulary {vocab}, got {tp}")
    r = rank if adapters != "none" else 0

    out = []
    for stage in range(pp):
        shard = config.shard(tp=tp, pp=pp, pp_rank=stage)
        layers = shard.last_layer - shard.first_layer
        sparse = len(shard.sparse_layers)
        dense = layers - sparse
        e, inter = shard.num_experts, shard.intermediate
        attention = _linear(2 * q + 2 * kv, h, base) + _linear(h, q, base) + 2 * (4 * h + 2 * head + heads // tp)
        parts = {
            "experts": shard.rank_bytes(base),
            "rows of MXFP8 experts": sparse * e * (2 * inter + h) * 2 if base == "mxfp8" and ours else 0,
            "attention and norms": layers * attention,
            "dense layers": dense * (_linear(2 * wide, h, base) + _linear(h, wide, base)),
            "routers": sparse * 4 * (config.num_experts * h + config.num_experts),
            "embedding": 2 * vocab // tp * h if stage == 0 else 0,
            "head": 2 * vocab // tp * h + 2 * h if stage == pp - 1 else 0,
        }
        weights = sum(parts.values())
        if r:
            parts["expert adapters"] = slots * shard.adapter_rank_bytes(r, LAYOUTS[adapters])
            # A of every slice reads the whole hidden state; o and down read this rank's share of theirs
            each = layers * (4 * h + 2 * q + 2 * kv + q + h) + dense * (2 * h + 2 * wide + wide + h)
            parts["other adapters"] = 2 * slots * r * (each + sparse * (h + config.num_experts))
        blocks = requests * -(-tokens_each // BLOCK)
        parts["KV cache"] = layers * blocks * BLOCK * 2 * kv * 2
        pairs = batch_tokens * config.top_k
        logits = 3 * 4 * requests * model["vocab_size"] if stage == pp - 1 else 0
        parts["activations (estimate)"] = 2 * (pairs * (3 * inter + h) + 16 * batch_tokens * h) + logits
        parts["runtime (estimate)"] = RUNTIME
        loading = weights + RUNTIME
        if base == "mxfp8":
            loading += shard.layer_bytes("bf16") + 2 * shard.layer_bytes("mxfp8") if sparse else 0
        out.append(RankPlan(stage, (shard.first_layer, shard.last_layer), parts, loading))
    return out


def refuse(plans: Sequence[RankPlan], available: int, what: str) -> None:
    """Raise when a rank would not fit.

    Raises:
        ValueError: naming the stage, its need and the memory of a GPU that an engine may use.
    """
    for p in plans:
        if p.need > available:
            raise ValueError(
                f"{what}: a rank of stage {p.stage} needs {p.need / 2**30:.1f} GiB and may use "
                f"{available / 2**30:.1f} GiB; more GPUs, fewer layers, a smaller rank or shared-outer adapters"
            )
