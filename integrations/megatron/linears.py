"""Linears swapped into any megatron-core layer spec: bf16, or MXFP8 where the model's quantisation recipe says so.

megatron-core calls ``finish_init(quant_config)`` on every module that has it, with the match of ``config.quant_recipe``
(``megatron/core/quantization/quant_config.py``). A matched configuration of ``{"format": "mxfp8"}`` sends that module's
forward and backward through `beam_moe.kernels.mxfp8`; ``{"format": "bf16"}``, or no match, leaves it as it is. Weights
stay in the model dtype, so the optimizer's fp32 masters, checkpoints and exports do not change.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.quantization.quant_config import GlobMatcher, MatchContext, RecipeConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size, unwrap_model

BLOCK = 32  # elements that share one MXFP8 scale
FORMATS = ("bf16", "mxfp8")


def mxfp8_recipe(patterns: Sequence[str] = ("*",), *, keep: Sequence[str] = ()) -> RecipeConfig:
    """A quantisation recipe: modules whose path matches ``patterns`` run in MXFP8, unless they match ``keep``.

    Args:
        patterns: shell patterns over module paths such as ``decoder.layers.3.mlp.experts.linear_fc1``. Layer numbers
            are those of the pipeline stage. ``"*"``: every swapped linear; ``"*.experts.*"``: experts only.
        keep: patterns that stay in the model dtype; they win over ``patterns``.

    Router, embeddings, LM head and norms are not swapped, so no pattern can reach them.
    """
    matchers = [GlobMatcher(p, "bf16") for p in keep] + [GlobMatcher(p, "mxfp8") for p in patterns]
    return RecipeConfig(matchers, {f: {"format": f} for f in FORMATS})


def check_recipe(chunks: list) -> list:
    """Refuse a shell pattern of ``config.quant_recipe`` that no linear or expert of the whole model matches.

    Such a pattern is a misspelt one: the modules meant would train in bf16, and nothing would say so. Collective over
    pipeline stages. A pre-wrap hook for a provider, which gives ``chunks`` back; ours have it.

    Raises:
        ValueError: on every rank of the pipeline, naming the patterns.
    """
    recipe = unwrap_model(chunks[0]).config.quant_recipe
    if recipe is None:
        return chunks
    modules = [(n, m) for c in chunks for n, m in unwrap_model(c).named_modules() if hasattr(m, "finish_init")]
    paths = [MatchContext(n.replace(".to_wrap", ""), None) for n, _ in modules]  # LoRA's wrapper
    globs = [m for m in recipe.matchers if isinstance(m, GlobMatcher)]
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list = [None] * get_pg_size(group)
    used = {g.pattern for g in globs if any(g.match(p) for p in paths)}
    torch.distributed.all_gather_object(stages, used, group=group)
    unused = [g.pattern for g in globs if g.pattern not in set().union(*stages)]
    if unused:
        raise ValueError(
            f"check_recipe: patterns of quant_recipe must match a linear or the experts of a layer, got {unused}; "
            "layers are numbered within the pipeline stage"
        )
    return chunks


class RecipeChecked:
    """Mixed into a provider: a recipe with a pattern that matches nothing is refused before weights are read."""

    def finalize(self) -> None:
        super().finalize()
        if check_recipe not in getattr(self, "_pre_wrap_hooks", ()):
            self.register_pre_wrap_hook(check_recipe, prepend=True)


def _wants_mxfp8(module: object, quant_config, out_features: int, in_features: int) -> bool:
    """The format of one module from its match; ``ValueError`` for an unknown format or a dimension that is not / 32."""
    if quant_config is None:
        return False
    name, path = type(module).__name__, quant_config.match_input.module_path
    chosen = quant_config.config.get("format")
    if chosen not in FORMATS:
        raise ValueError(f"{name}: quant_recipe format of {path} must be one of {FORMATS}, got {quant_config.config}")
    if chosen == "mxfp8":
        for what, size in (("output", out_features), ("input", in_features)):
            if size % BLOCK:
                raise ValueError(
                    f"{name}: MXFP8 needs {what} features per rank divisible by {BLOCK}, got {size} for {path}; "
                    "leave it out of quant_recipe or change the tensor parallel size"
                )
    return chosen == "mxfp8"


def check_no_fusion(operation: str, config) -> None:
    """Refuse ``gradient_accumulation_fusion``, which writes weight gradients past autograd and past our kernels."""
    if config.gradient_accumulation_fusion:
        raise ValueError(f"{operation}: gradient_accumulation_fusion must be False, got True")


class _MXFP8Linear:
    """The GEMM of a megatron-core linear, in MXFP8 where the recipe says so; all around it is megatron-core's."""

    mxfp8 = False

    def finish_init(self, quant_config) -> None:
        """megatron-core's per-module recipe hook."""
        out_features, in_features = self.weight.shape
        self.mxfp8 = _wants_mxfp8(self, quant_config, out_features, in_features)
        if self.mxfp8:
            check_no_fusion(f"{type(self).__name__} in MXFP8", self.config)

    def _forward_impl(self, input, weight, bias=None, allreduce_dgrad=False, sequence_parallel=False, **kwargs):
        if not self.mxfp8:
            return super()._forward_impl(
                input=input,
                weight=weight,
                bias=bias,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel,
                **kwargs,
            )
        from beam_moe.kernels import mxfp8

        group = kwargs.get("tp_group")
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=group)
        out = mxfp8.linear(input.flatten(0, -2), weight).view(*input.shape[:-1], -1)
        return out if bias is None else out + bias


class MXFP8ColumnParallelLinear(_MXFP8Linear, ColumnParallelLinear):
    """megatron-core's `ColumnParallelLinear` with a per-module choice of MXFP8."""


class MXFP8RowParallelLinear(_MXFP8Linear, RowParallelLinear):
    """megatron-core's `RowParallelLinear` with a per-module choice of MXFP8."""


class MXFP8LayerNormColumnParallelLinear(MXFP8ColumnParallelLinear):
    """RMS norm and column-parallel linear under the parameter names of Transformer Engine's fused module.

    ``layer_norm_weight (in,)`` and ``weight (out / tp, in)``; takes that module's place in a Transformer Engine spec.
    With ``return_layernorm_output`` (set by LoRA) the forward gives ``((y, norm(x)), bias)``.
    """

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError(
                "MXFP8LayerNormColumnParallelLinear: normalization must be RMSNorm with plain weights, got "
                f"{config.normalization}, layernorm_zero_centered_gamma={config.layernorm_zero_centered_gamma}"
            )
        self.eps = config.layernorm_epsilon
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype, device=device))
        weight.sequence_parallel = config.sequence_parallel
        self.layer_norm_weight = weight
        self.return_layernorm_output = False

    def forward(self, input_, weight=None, runtime_gather_output=None):
        f = input_.float()
        normed = self.layer_norm_weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps))
        normed = normed.to(input_.dtype)
        out, bias = super().forward(normed, weight, runtime_gather_output)
        return ((out, normed), bias) if self.return_layernorm_output else (out, bias)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.update(
            make_sharded_tensors_for_checkpoint(
                {"layer_norm_weight": self.layer_norm_weight},
                prefix,
                {},
                sharded_offsets,
                tp_group=self.tp_group,
                dp_cp_group=(metadata or {}).get("dp_cp_group"),
            )
        )
        return state


class _Stack(torch.autograd.Function):
    """``(E, N, K)`` of E parameters ``(N, K)``: a view where they lie behind each other in one storage, else a copy."""

    @staticmethod
    def forward(ctx, *weights):
        w, size = weights[0], weights[0].numel()
        base = w.untyped_storage().data_ptr()
        if all(
            p.is_contiguous()
            and p.untyped_storage().data_ptr() == base
            and p.storage_offset() == w.storage_offset() + i * size
            for i, p in enumerate(weights)
        ):
            return w.detach().as_strided((len(weights), *w.shape), (size, *w.stride()), w.storage_offset())
        return torch.stack(weights)

    @staticmethod
    def backward(ctx, grad):
        return tuple(grad.unbind(0))


def split_offsets(splits: Sequence[int], device: torch.device) -> torch.Tensor:
    """Row bounds int32 ``(E + 1,)`` of groups of ``splits`` rows."""
    bounds = torch.zeros(len(splits) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(splits, dtype=torch.int32), 0, out=bounds[1:], dtype=torch.int32)
    return bounds.to(device, non_blocking=True)


def grouped_product(x: torch.Tensor, w: torch.Tensor, splits: Sequence[int], offsets: torch.Tensor) -> torch.Tensor:
    """``x (T, K)``, rows sorted by expert, times ``w (E, N, K)`` transposed -> ``(T, N)`` in x's dtype; no gradient.

    One grouped GEMM of PyTorch for bf16 on a GPU with dimensions divisible by 8, otherwise one GEMM per expert.

    Args:
        splits: rows of every expert, adding up to T.
        offsets: int32 ``(E + 1,)`` on x's device, see `split_offsets`.
    """
    fused = x.is_cuda and x.dtype == w.dtype == torch.bfloat16 and x.shape[0] > 0
    if fused and w.shape[1] % 8 == 0 and w.shape[2] % 8 == 0 and hasattr(F, "grouped_mm"):
        return F.grouped_mm(x.contiguous(), w.transpose(1, 2), offs=offsets[1:])
    return torch.cat([F.linear(rows, w[e]) for e, rows in enumerate(x.split(list(splits)))])


def grouped_weight_grad(
    dy: torch.Tensor, x: torch.Tensor, splits: Sequence[int], offsets: torch.Tensor
) -> torch.Tensor:
    """``dy.T @ x`` of each expert's rows -> ``(E, N, K)`` in dy's dtype, zeros for an expert without rows."""
    if x.is_cuda and dy.dtype == x.dtype and dy.dtype in (torch.bfloat16, torch.float16):
        from beam_moe.kernels.mxfp8 import grouped_wgrad

        return grouped_wgrad(dy.contiguous(), x.contiguous(), offsets, out_dtype=dy.dtype)
    return torch.stack([d.T @ rows for d, rows in zip(dy.split(list(splits)), x.split(list(splits)))])


class _GroupedMatmul(torch.autograd.Function):
    """`grouped_product` with gradients; that of an expert without rows is zeros, whichever GEMM ran."""

    @staticmethod
    def forward(ctx, x, w, splits, offsets):
        ctx.save_for_backward(x, w, offsets)
        ctx.splits = splits
        return grouped_product(x, w, splits, offsets)

    @staticmethod
    def backward(ctx, dy):
        x, w, offsets = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = grouped_product(dy, w.transpose(1, 2), ctx.splits, offsets)
        if ctx.needs_input_grad[1]:
            dw = grouped_weight_grad(dy, x, ctx.splits, offsets)
        return dx, dw, None, None


def grouped_matmul(x: torch.Tensor, w: torch.Tensor, splits: Sequence[int], offsets: torch.Tensor) -> torch.Tensor:
    """`grouped_product`, differentiable in ``x`` and ``w``."""
    return _GroupedMatmul.apply(x, w, list(splits), offsets)


class GroupedLinear(torch.nn.Module):
    """The experts of one MoE projection as megatron-core's ``TEGroupedMLP`` calls them, without Transformer Engine.

    Parameters ``weight0 .. weight{E-1}``, each ``(out, in)``: the names and attributes of Transformer Engine's grouped
    linear, so mappings, checkpoints and optimizers treat them alike. They are made as views of one block, which saves
    the copy into a stacked operand as long as nothing moves them apart.

    ``forward(x (T, in), splits: list[int])`` -> ``((T, out), None)``.

    Raises ``ValueError`` for a bias, for expert tensor parallelism above 1, and for ``gradient_accumulation_fusion``.
    """

    parallel_mode_: str

    def __init__(
        self,
        num_gemms,
        input_size,
        output_size,
        *,
        config,
        init_method,
        bias,
        skip_bias_add=False,
        is_expert=True,
        tp_comm_buffer_name=None,
        pg_collection=None,
        name=None,
    ):
        super().__init__()
        operation = type(self).__name__
        etp = get_pg_size(pg_collection.expt_tp)
        if bias:
            raise ValueError(f"{operation}: bias must be False, got {bias}")
        if etp != 1:
            raise ValueError(f"{operation}: expert_tensor_parallel_size must be 1, got {etp}; use expert parallelism")
        check_no_fusion(operation, config)
        self.num_gemms, self.config, self.use_bias, self.mxfp8 = num_gemms, config, False, False
        self.in_features, self.out_features = input_size, output_size
        self._pg_collection, self._tp_group = pg_collection, pg_collection.expt_tp
        self.explicit_expert_comm, self.parallel_mode = True, None
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        block = torch.empty(num_gemms, output_size, input_size, dtype=config.params_dtype, device=device)
        expert_groups = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for i in range(num_gemms):
            if config.perform_initialization:
                init_method(block[i])
            weight = torch.nn.Parameter(block[i])
            weight.allreduce = not expert_groups
            set_tensor_model_parallel_attributes(weight, True, 0 if self.parallel_mode_ == "column" else 1, 1)
            self.register_parameter(f"weight{i}", weight)

    def finish_init(self, quant_config) -> None:
        """megatron-core's per-module recipe hook."""
        self.mxfp8 = _wants_mxfp8(self, quant_config, self.out_features, self.in_features)

    def stacked(self) -> torch.Tensor:
        """The weights as one ``(E, out, in)`` tensor, differentiable in each."""
        return _Stack.apply(*(getattr(self, f"weight{i}") for i in range(self.num_gemms)))

    def project(self, x: torch.Tensor, splits: Sequence[int], offsets: torch.Tensor) -> torch.Tensor:
        """The product alone: ``x (T, in)`` -> ``(T, out)``."""
        if self.mxfp8:
            from beam_moe.kernels import mxfp8

            return mxfp8.grouped_linear(x, self.stacked(), offsets)
        return grouped_matmul(x, self.stacked(), splits, offsets)

    def forward(self, x, splits):
        splits = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
        return self.project(x, splits, split_offsets(splits, x.device)), None

    def backward_dw(self) -> None:
        """Weight gradients are formed in the backward pass itself."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """One sharded tensor per expert, under the keys that megatron-core's sequential experts have."""
        metadata = metadata or {}
        single = metadata.get("singleton_local_shards", False)
        experts = get_pg_size(self._pg_collection.ep) * self.num_gemms
        first = get_pg_rank(self._pg_collection.ep) * self.num_gemms
        state = {}
        for i in range(self.num_gemms):
            offsets = sharded_offsets if single else (*sharded_offsets, (len(sharded_offsets), first + i, experts))
            sub = make_sharded_tensors_for_checkpoint(
                {"weight": getattr(self, f"weight{i}")},
                f"{first + i}.{prefix}" if single else prefix,
                {"weight": 0 if self.parallel_mode_ == "column" else 1},
                offsets,
                tp_group=self._tp_group,
                dp_cp_group=metadata.get("dp_cp_group"),
            )
            (tensor,) = sub.values()
            tensor.replica_id = (*tensor.replica_id[:2], get_pg_rank(self._pg_collection.expt_dp))
            state[f"{prefix}weight{i}"] = tensor
        return state


class ColumnParallelGroupedLinear(GroupedLinear):
    """`GroupedLinear` of the gate and up projections (``linear_fc1``): gate rows first."""

    parallel_mode_ = "column"


class RowParallelGroupedLinear(GroupedLinear):
    """`GroupedLinear` of the down projection (``linear_fc2``)."""

    parallel_mode_ = "row"


GROUPED_EXPERTS = partial(
    TEGroupedMLP,
    submodules=GroupedMLPSubmodules(linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear),
)


def _replacements() -> dict[type, type]:
    found: dict[type, type] = {
        ColumnParallelLinear: MXFP8ColumnParallelLinear,
        RowParallelLinear: MXFP8RowParallelLinear,
    }
    from megatron.core.extensions import transformer_engine as te

    for name, ours in (
        ("TEColumnParallelLinear", MXFP8ColumnParallelLinear),
        ("TERowParallelLinear", MXFP8RowParallelLinear),
        ("TELayerNormColumnParallelLinear", MXFP8LayerNormColumnParallelLinear),
    ):
        theirs = getattr(te, name, None)
        if isinstance(theirs, type):
            found[theirs] = ours
    return found


def swap_modules(spec, *, linears: bool = True, experts: bool = True):
    """A copy of a layer or block spec with our linears and grouped experts in place of megatron-core's.

    Walks ``ModuleSpec``, submodule dataclasses, ``functools.partial`` and lists, so it fits specs of GPT, hybrid and
    third-party models alike. Router, embeddings, LM head and norms are not part of what it replaces.

    Args:
        spec: as given to a model's ``transformer_layer_spec`` or ``hybrid_stack_spec``.
        linears: replace column- and row-parallel linears (also Transformer Engine's, and its fused norm + linear).
        experts: replace the experts of MoE layers by `GROUPED_EXPERTS`.
    """
    table = _replacements() if linears else {}

    def walk(s):
        if isinstance(s, type):
            return table.get(s, s)
        if isinstance(s, ModuleSpec):
            return replace(s, module=walk(s.module), params=dict(s.params), submodules=walk(s.submodules))
        if isinstance(s, partial):
            return partial(walk(s.func), *(walk(a) for a in s.args), **{k: walk(v) for k, v in s.keywords.items()})
        if isinstance(s, (list, tuple)):
            return type(s)(walk(v) for v in s)
        if is_dataclass(s) and not isinstance(s, type):
            changed = {f.name: walk(getattr(s, f.name)) for f in fields(s) if f.init}
            if experts and isinstance(s, MoESubmodules):
                changed["experts"] = GROUPED_EXPERTS
            return replace(s, **changed)
        return s

    return walk(spec)
