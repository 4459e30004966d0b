"""Expert LoRA for training: Bridge's own ``LoRA`` on our grouped experts, and adapters written as PEFT folders.

`install` teaches ``megatron.bridge.peft.lora.LoRA`` (the class that trainers construct) our grouped linears. It keeps
Bridge's parameter names (``adapter.linear_in.weight``, ``adapter.linear_out.weight``), so its export, merge and adapter
checkpoints work on them. Beside that it mends or refuses what is wrong in megatron-bridge 0.6.2:

* shared-outer factors: their gradient is summed by a hook and then once more by DDP (too large by the number of expert
  data parallel replicas). Here the shared factor is an ordinary data parallel parameter.
* ``lora_dtype`` is ignored on Megatron's linears: honoured on grouped experts, refused elsewhere if it differs.
* replicas of a factor could start different when built on the CPU: initial values depend on name and expert only.
* adapters of sequential experts under expert parallelism, of which the export has one rank's alone: refused.
* one adapter for all experts of an EP rank (``share_expert_adapters=True``, Bridge's default) is refused on grouped
  experts: neither vLLM nor PEFT can name it.
"""

import json
import re
import zlib
from collections import Counter
from pathlib import Path

import torch
from megatron.bridge.peft import utils as peft_utils
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import nn
from torch.nn import functional as F

from beam_moe.adapters import DOWN, GATE, PLAIN_LORA, PROJECTIONS, UP
from beam_moe.integrations.megatron.layers import BeamOutputLayer
from beam_moe.integrations.megatron.linears import (
    GroupedLinear,
    MXFP8LayerNormColumnParallelLinear,
    grouped_matmul,
    grouped_product,
    grouped_weight_grad,
    split_offsets,
)

PREFIX = "base_model.model."
LAYOUTS = ("per_expert", "shared_outer", "fused_3d")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
STACKED = {GATE: "w1", UP: "w3", DOWN: "w2"}


def _times(x, w, splits, offsets):
    """Rows times the transposed factor of their expert, ``w (E, N, K)``, or of all, ``w (1, N, K)``."""
    return F.linear(x, w[0]) if w.shape[0] == 1 and len(splits) > 1 else grouped_product(x, w, splits, offsets)


def _factor_grad(dy, x, splits, offsets, shared):
    """``dy.T @ x`` of each expert's rows -> ``(E, N, K)``, or of all rows -> ``(1, N, K)``."""
    return (dy.T @ x)[None] if shared else grouped_weight_grad(dy, x, splits, offsets)


class _GroupedLoRA(torch.autograd.Function):
    """``base + scale * B (A x)`` of one grouped projection as one node: ``x`` and ``A x`` are saved, once each.

    ``w`` may be None: the adapter's part alone. ``dw`` is formed only where the base is trained.
    """

    @staticmethod
    def forward(ctx, x, w, a, b, scale, splits):
        offsets = split_offsets(splits, x.device)
        h = _times(x.to(a.dtype), a, splits, offsets)
        y = _times(h, b, splits, offsets).float().mul_(scale)
        if w is not None:
            y += grouped_product(x, w, splits, offsets)
        ctx.save_for_backward(x, w, a, b, h, offsets)
        ctx.scale, ctx.splits = scale, splits
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, w, a, b, h, offsets = ctx.saved_tensors
        splits = ctx.splits
        shared_a, shared_b = (f.shape[0] == 1 and len(splits) > 1 for f in (a, b))
        g = (dy.float() * ctx.scale).to(a.dtype)
        dh = _times(g, b.transpose(1, 2), splits, offsets)
        db = _factor_grad(g, h, splits, offsets, shared_b) if ctx.needs_input_grad[3] else None
        da = _factor_grad(dh, x.to(a.dtype), splits, offsets, shared_a) if ctx.needs_input_grad[2] else None
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _times(dh, a.transpose(1, 2), splits, offsets).float()
            if w is not None:
                dx += grouped_product(dy, w.transpose(1, 2), splits, offsets)
            dx = dx.to(x.dtype)
        if w is not None and ctx.needs_input_grad[1]:
            dw = grouped_weight_grad(dy, x, splits, offsets)
        return dx, dw, da, db, None, None


def _fuses(x: torch.Tensor) -> bool:
    """Whether base and adapter run in `beam_moe.kernels.moe_lora.grouped_linear_lora`: on a GPU."""
    return x.is_cuda


def _grouped_lora(x, w, a, b, scale, splits, mxfp8):
    """``base + scale * B (A x)``; the adapter's part alone where ``w`` is None."""
    if w is None or not _fuses(x):
        return _GroupedLoRA.apply(x, w, a, b, scale, splits)
    from beam_moe.kernels.moe_lora import grouped_linear_lora

    return grouped_linear_lora(x, w, split_offsets(splits, x.device), a, b, scale=scale, mxfp8=mxfp8)


class Factor(nn.Module):
    """One factor as a module, read by calling it: DDP's parameter gather hooks modules, not parameters.

    Its dtype survives casts of the enclosing model.
    """

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.dtype = weight.dtype

    def forward(self) -> torch.Tensor:
        return self.weight if self.weight.dim() == 3 else self.weight[None]

    def _apply(self, fn, recurse=True):
        before = self.weight.data
        super()._apply(fn, recurse)
        if self.weight.dtype != self.dtype:
            self.weight.data = before.to(self.weight.device)
        return self


class GroupedExpertAdapter(nn.Module):
    """LoRA factors of one grouped projection.

    Per expert: ``linear_in.weight (E, r, in)``, ``linear_out.weight (E, out, r)``. Shared-outer: the factor on the
    hidden side, ``linear_in`` of fc1 and ``linear_out`` of fc2, is ``(r, in)`` or ``(out, r)``, one for all experts.
    E counts this rank's experts. Attribute names are those that Bridge's export reads.

    Args:
        base: the grouped linear.
        name: its full name; with the expert's number it seeds the initial values.
        dim, alpha: rank and scale, ``alpha / dim``.
        shared_outer: one factor for all experts on the hidden side.
        dtype: of the factors.
        init_a, init_b: in-place initialisers of a matrix.
        dropout, dropout_position: as Bridge's LoRA has them.
    """

    def __init__(
        self, base: GroupedLinear, name: str, dim, alpha, *, shared_outer, dtype, init_a, init_b, dropout, position
    ):
        super().__init__()
        self.config, self.base_linear_name, self.dim, self.alpha = base.config, name, dim, alpha
        self.input_is_parallel = base.parallel_mode_ == "row"
        self.base_linear_is_parallel, self.is_expert = True, True
        self.num_local_experts, self._pg_collection = base.num_gemms, base._pg_collection
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.dropout_position = position
        first = get_pg_rank(base._pg_collection.ep) * base.num_gemms
        device = base.weight0.device

        def make(side: str, rows: int, columns: int, init, shared: bool) -> Factor:
            experts = [-1] if shared else range(first, first + base.num_gemms)
            parts = []
            for e in experts:
                part = torch.empty(rows, columns)
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(zlib.crc32(f"{name}.{side}.{e}".encode()))
                    init(part)
                parts.append(part)
            factor = Factor((parts[0] if shared else torch.stack(parts)).to(device=device, dtype=dtype))
            weight = factor.weight
            if shared:
                # Every rank of the stage holds it and sees its own rows only: data parallel reduction over all of
                # them, and over tensor parallel ranks as for any weight under sequence parallelism.
                weight.sequence_parallel = base.config.sequence_parallel
            else:
                weight.allreduce = base.weight0.allreduce
                set_tensor_model_parallel_attributes(weight, True, 0, 1)
            return factor

        row = self.input_is_parallel
        self.linear_in = make("A", dim, base.in_features, init_a, shared_outer and not row)
        self.linear_out = make("B", base.out_features, dim, init_b, shared_outer and row)

    def drops(self) -> bool:
        """Whether base and adapter see different rows."""
        return self.training and isinstance(self.dropout, nn.Dropout)

    def forward(self, x: torch.Tensor, splits, w: torch.Tensor | None = None, mxfp8: bool = False) -> torch.Tensor:
        """The adapter's part of ``(T, in)`` rows -> ``(T, out)``; with base weights ``w (E, out, in)`` both added.

        ``mxfp8``: the products with ``w`` are in MXFP8; on a GPU, and not with dropout.
        """
        splits = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
        pre, post = (self.dropout if self.dropout_position == p else nn.Identity() for p in ("pre", "post"))
        if w is not None and self.drops():
            base = grouped_matmul(x, w, splits, split_offsets(splits, x.device))
            return base + self(x, splits)
        y = _grouped_lora(pre(x), w, self.linear_in(), self.linear_out(), self.alpha / self.dim, splits, mxfp8)
        return y if w is not None else post(y)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Per-expert factors sharded over EP ranks; shared ones written once."""
        state, groups = {}, self._pg_collection
        for side in ("linear_in", "linear_out"):
            key, weight = f"{prefix}{side}.weight", getattr(self, side).weight
            if weight.dim() == 2:
                state.update(
                    make_sharded_tensors_for_checkpoint(
                        {"weight": weight},
                        f"{prefix}{side}.",
                        {},
                        sharded_offsets,
                        tp_group=getattr(groups, "tp", None),
                        dp_cp_group=(metadata or {}).get("dp_cp_group"),
                    )
                )
                continue
            place = (len(sharded_offsets), get_pg_rank(groups.ep), get_pg_size(groups.ep))
            state[key] = ShardedTensor.from_rank_offsets(
                key,
                weight,
                *sharded_offsets,
                *([place] if place[2] > 1 else []),
                replica_id=(0, 0, get_pg_rank(groups.expt_dp)),
                prepend_axis_num=len(sharded_offsets),
            )
        return state


class GroupedLoRALinear(LoRALinear):
    """Bridge's LoRA wrapper of a grouped linear; base and adapter are one autograd node, in MXFP8 on a GPU only."""

    def forward(self, x, splits):
        base, adapter = self.to_wrap, self.adapter
        if not self._adapter_enabled:
            return base(x, splits)
        if base.mxfp8 and (adapter.drops() or not _fuses(x)):
            return base(x, splits)[0] + adapter(x, splits), None
        return adapter(x, splits, base.stacked(), base.mxfp8), None


def _refuse(what: str) -> None:
    raise ValueError(f"LoRA: {what}")


def _check_target(lora, module: nn.Module, name: str | None, prefix: str | None) -> None:
    """Refuse a module of which base and adapter would not add up, or not be exported."""
    capped = isinstance(module, BeamOutputLayer)
    partial = ".local_experts." in f"{prefix}." and parallel_state.get_expert_model_parallel_world_size() > 1
    if not (capped or partial) or lora.match(module, name, prefix) is None:
        return
    if capped:
        _refuse(
            f"target_modules must be without {name}: its logits are capped before the adapter's part would be added"
        )
    _refuse(
        f"moe_grouped_gemm must be True under expert parallelism, got sequential experts, {prefix}.{name}: "
        "megatron-bridge exports the adapters of one rank's experts alone"
    )


def _adapt_grouped(lora: LoRA, module: GroupedLinear, full_name: str) -> GroupedLoRALinear:
    if not lora.experts_shared_outer_loras and lora.share_expert_adapters:
        _refuse(
            f"share_expert_adapters must be False, or experts_shared_outer_loras True, for {full_name}, got "
            "share_expert_adapters=True: one adapter for all experts of a rank has no name in vLLM or PEFT"
        )
    dim = peft_utils.get_effective_lora_dim(
        module, dim=lora.dim, normalize_moe_lora=lora.normalize_moe_lora, is_expert=True
    )
    adapter = GroupedExpertAdapter(
        module,
        full_name,
        dim,
        lora.alpha,
        shared_outer=lora.experts_shared_outer_loras,
        dtype=lora.lora_dtype or module.weight0.dtype,
        init_a=peft_utils.ParallelLinearAdapter._get_init_fn(None, lora.lora_A_init_method),
        init_b=peft_utils.ParallelLinearAdapter._get_init_fn(None, lora.lora_B_init_method),
        dropout=lora.dropout,
        position=lora.dropout_position,
    )
    return GroupedLoRALinear(module, adapter)


def install() -> None:
    """Teach Bridge's ``LoRA`` our grouped linears, and refuse what it would do wrong. Idempotent."""
    original = LoRA.transform
    if getattr(original, "__beam_moe__", False):
        return

    def transform(self, module, name=None, prefix=None):
        if isinstance(module, GroupedLinear):
            found = self.match(module, name, prefix)
            return module if found is None else _adapt_grouped(self, module, found[1])
        _check_target(self, module, name, prefix)
        out = original(self, module, name, prefix)
        if out is module or not isinstance(out, LoRALinear):
            return out
        weight = next(module.parameters())
        if self.lora_dtype is not None and self.lora_dtype != weight.dtype:
            _refuse(
                f"lora_dtype must be None or {weight.dtype} for {name}, got {self.lora_dtype}: megatron-bridge "
                "ignores it on Megatron's linears"
            )
        if self.experts_shared_outer_loras and type(out.adapter) is peft_utils.SharedOuterGroupedExpertAdapter:
            _refuse(
                f"experts_shared_outer_loras on {type(module).__name__} {name}: its gradient is too large by the "
                "number of expert data parallel replicas; use our grouped experts (swap_modules)"
            )
        if isinstance(module, MXFP8LayerNormColumnParallelLinear):
            module.return_layernorm_output = True
        return out

    transform.__beam_moe__, transform.__wrapped__ = True, original
    LoRA.transform = transform

    canonical = CanonicalLoRA.transform

    def canonical_transform(self, module, name=None, prefix=None):
        if name == "linear_qkv" and getattr(getattr(module, "config", None), "attention_output_gate", False):
            _refuse("CanonicalLoRA on linear_qkv with attention_output_gate: it has no part for the gate; use LoRA")
        if isinstance(module, GroupedLinear) and self.match(module, name, prefix) is not None:
            _refuse(f"CanonicalLoRA on the grouped experts {name}: use LoRA")
        _check_target(self, module, name, prefix)
        return canonical(self, module, name, prefix)

    canonical_transform.__beam_moe__, canonical_transform.__wrapped__ = True, canonical
    CanonicalLoRA.transform = canonical_transform


def adapter_tensors(bridge, chunks, *, cpu: bool = True) -> dict[str, torch.Tensor]:
    """Every adapter tensor of the whole model by its Hugging Face name, on every rank.

    Expert factors: ``...experts.{e}.{gate,up,down}_proj.lora_{A,B}.weight``; a shared-outer factor once, ``(1, ., .)``
    without the expert's number. Collective: all ranks must call it.
    """
    return dict(bridge.export_adapter_weights(chunks, cpu=cpu, show_progress=False))


def adapter_scale(chunks) -> tuple[float, list[int]]:
    """``(alpha, dims)`` of the whole model's adapters, its ranks in ascending order.

    Collective over pipeline stages, one of which may have no adapter: all ranks must call it. On each of them
    ``ValueError`` if alphas differ or no stage has an adapter.
    """
    wrapped = [m.adapter for c in chunks for m in c.modules() if isinstance(m, LoRALinear)]
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list = [None] * get_pg_size(group)
    torch.distributed.all_gather_object(stages, {(float(a.alpha), a.dim) for a in wrapped}, group=group)
    found = set().union(*stages)
    alphas = {alpha for alpha, _ in found}
    if len(alphas) != 1:
        raise ValueError(f"adapter_scale: chunks must hold adapters of one alpha, got {sorted(alphas)}")
    return alphas.pop(), sorted({dim for _, dim in found})


def peft_ranks(tensors: dict[str, torch.Tensor]) -> tuple[int, dict[str, int]]:
    """PEFT's ``r`` and ``rank_pattern`` of factors by name: the commonest rank, and the modules of any other."""
    ranks = {n.removesuffix(".lora_A.weight"): t.shape[-2] for n, t in tensors.items() if ".lora_A." in n}
    ranks |= {n.removesuffix(".lora_B.weight"): t.shape[-1] for n, t in tensors.items() if ".lora_B." in n}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    return rank, {n: r for n, r in ranks.items() if r != rank}


def _is_shared(name: str, t: torch.Tensor) -> bool:
    return t.dim() == 3 and t.shape[0] == 1 and ".experts." in name


def _indexed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Shared factors ``(1, ., .)`` repeated under every expert's own name."""
    experts = 1 + max((int(m[2]) for m in map(EXPERT.fullmatch, tensors) if m), default=-1)
    out = {}
    for name, t in tensors.items():
        if _is_shared(name, t):
            head, tail = name.split(".experts.")
            out.update({f"{head}.experts.{e}.{tail}": t[0].clone() for e in range(experts)})
        else:
            out[name] = t
    return out


def stacked_outer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Projections with a shared factor under the names by which vLLM knows them, all experts in one tensor.

    ``experts.{w1,w3,w2}.lora_{A,B}.weight`` for gate, up and down: ``(1, ., .)`` the shared one, ``(E, ., .)`` the
    other, which Bridge exports by expert under another module's name. The rest stays as it is.
    """
    shared = {n.rpartition(".lora_")[0] for n, t in tensors.items() if _is_shared(n, t)}
    out: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, t in tensors.items():
        m = EXPERT.fullmatch(name)
        module, _, side = (f"{m[1]}.{m[3]}" if m else name).rpartition(".lora_")
        if module not in shared:
            out[name] = t
            continue
        head, _, projection = module.rpartition(".")
        key = f"{head}.{STACKED[PROJECTIONS[projection]]}.lora_{side}"
        if m is None:
            out[key] = t
        else:
            parts.setdefault(key, {})[int(m[2])] = t
    return out | {key: torch.stack([of[e] for e in sorted(of)]) for key, of in parts.items()}


def _write(tensors: dict[str, torch.Tensor], alpha: float, folder: Path, layout: str, config, base_model) -> None:
    """The files of `save_adapter`."""
    plain = _indexed(tensors)
    rank, rank_pattern = peft_ranks(plain if layout == "per_expert" else tensors)
    modules = {n.rpartition(".lora_A.")[0] for n in plain if ".lora_A." in n}
    peft = {
        **PLAIN_LORA,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": {},
        "target_modules": sorted({n.rpartition(".")[2] for n in modules}),
    }
    if layout == "per_expert":
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        ready = {PREFIX + n: t.detach().clone().contiguous() for n, t in plain.items()}
        save_file(ready, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(peft, indent=2) + "\n", encoding="utf-8")
    else:
        from beam_moe import BeamMoEConfig, export_adapter, load_adapter

        shape = BeamMoEConfig.from_hf(config)
        adapter = load_adapter({PREFIX + n: t for n, t in tensors.items()}, shape, peft_config=peft)
        export_adapter(adapter, folder, layout, config=shape, base_model=base_model)


def save_adapter(bridge, chunks, folder, *, layout: str = "per_expert", base_model: str | None = None) -> Path:
    """Write the model's adapter as a PEFT folder, ``adapter_model.safetensors`` and ``adapter_config.json``.

    Collective: all ranks must call it, rank 0 writes, and no other returns before it has, or raises where it could not.

    Args:
        bridge: the ``AutoBridge`` that the model came from.
        chunks: the list of this rank's model chunks.
        folder: made if need be.
        layout: "per_expert" (read by vLLM, `beam_moe.load_adapter`, and PEFT on a model with one module per expert;
            shared factors are repeated), "shared_outer" (shared factors once, vLLM's ``enable_moe_shared_loras``), or
            "fused_3d" (PEFT's ``target_parameters`` on transformers' packed experts).
        base_model: ``base_model_name_or_path`` of the configuration.

    Raises:
        ValueError: unknown layout, no adapter, adapters of different alpha, or "shared_outer" for per-expert factors.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"save_adapter: layout must be one of {LAYOUTS}, got {layout!r}")
    folder, config = Path(folder), bridge.hf_pretrained.config
    tensors = adapter_tensors(bridge, chunks)
    alpha, _ = adapter_scale(chunks)
    failed: list = [None]
    error: Exception | None = None
    if torch.distributed.get_rank() == 0:
        try:
            _write(tensors, alpha, folder, layout, config, base_model)
        except Exception as e:
            error, failed = e, [(isinstance(e, ValueError), f"save_adapter: rank 0 failed: {e}")]
    torch.distributed.broadcast_object_list(failed)
    if error is not None:
        raise error
    if failed[0] is not None:
        bad_input, message = failed[0]
        raise (ValueError if bad_input else RuntimeError)(message)
    return folder
