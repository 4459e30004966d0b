"""vLLM's modular MoE experts on beam-moe's fused layer: decode by `fused_moe`, larger batches by vLLM's own experts.

Which of the two runs depends on the number of tokens and on whether a row of the batch has an adapter, not on whether
LoRA is on or an adapter is loaded: a batch of bare rows gives the same bits with and without. Between
``BEAM_MOE_VLLM_TOKENS`` and ``BEAM_MOE_VLLM_LORA_TOKENS`` tokens a bare row beside one with an adapter is ours, in a
batch of bare rows vLLM's; with data parallelism, where other replicas' rows are not known beforehand, ours in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.mxfp8_emulation_moe import Mxfp8TritonExpertsBase
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.prepare_finalize import (
    MoEPrepareAndFinalizeNaiveDPEPModular,
    make_moe_prepare_and_finalize_no_dp_ep,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_mxfp8 import (  # noqa: E501
    CompressedTensorsW8A8Mxfp8MoEMethod,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8FusedMoE
from vllm.model_executor.layers.quantization.online.mxfp8 import Mxfp8OnlineMoEMethod
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

from beam_moe import env
from beam_moe.integrations.vllm import metrics
from beam_moe.kernels.moe_lora import ExpertLoRA, MoEConfig, fused_moe
from beam_moe.kernels.moe_lora.plan import COUNT_FIRST
from beam_moe.kernels.moe_lora.workspace import CHUNK
from beam_moe.kernels.mxfp8 import MXFP8Tensor, prepare
from beam_moe.kernels.silu_mul import silu_mul

PINNED_TOKENS = 32
"""Under ``VLLM_BATCH_INVARIANT`` every batch sums in the order of this size."""
LARGEST_CALL = 16384
"""Most tokens `fused_moe` takes in one call."""
MXFP8_METHODS: dict[type, tuple[str, str]] = {
    Mxfp8OnlineMoEMethod: ("fp8_backend", "_setup_kernel"),
    CompressedTensorsW8A8Mxfp8MoEMethod: ("fp8_backend", "process_weights_after_loading"),
    ModelOptMxFp8FusedMoE: ("mxfp8_backend", "process_weights_after_loading"),
}
"""vLLM's methods for MXFP8 experts, quantised online or read from a checkpoint that says so: the attribute that names
the backend, hence the layout, and the method that builds the kernel."""


def why_not(moe_config: Any, quant_config: Any, activation_config: Any) -> str | None:
    """Why our kernel cannot stand for a layer of this configuration, None when it can.

    Args: vLLM's ``FusedMoEConfig``, ``FusedMoEQuantConfig`` and ``ApplyMoEActivationConfig`` of the layer.
    """
    if not moe_config.is_act_and_mul or moe_config.activation != MoEActivation.SILU:
        return f"its activation is {moe_config.activation.value}, not gated SiLU"
    if activation_config.clamp_limit is not None:
        return f"its SwiGLU has a clamp limit of {activation_config.clamp_limit}"
    if activation_config.alpha != 1.0:
        return f"its SwiGLU has alpha {activation_config.alpha}"
    if activation_config.beta != 0.0:
        return f"its SwiGLU has beta {activation_config.beta}"
    if moe_config.has_bias or quant_config.w1_bias is not None or quant_config.w2_bias is not None:
        return "its experts have a bias"
    if moe_config.moe_parallel_config.enable_eplb:
        return "EPLB moves its experts"
    if moe_config.in_dtype not in (torch.bfloat16, torch.float16):
        return f"its activations are {moe_config.in_dtype}"
    return None


def broken_promise(layer: str, reason: str) -> ValueError:
    """The error of ``--quantization beam_mxfp8`` where our kernel cannot serve ``layer``."""
    return ValueError(f"--quantization beam_mxfp8: beam-moe's kernel cannot serve {layer}: {reason}")


class _FusedExperts:
    """What dense and MXFP8 experts share; mixed in before one of vLLM's experts classes."""

    routed_scaling: ClassVar[float] = 1.0
    """Factor of the routed sum that vLLM's runner no longer applies."""
    single_rounding: ClassVar[bool] = False
    """Whether vLLM's own path must round SwiGLU once too, as the model's reference does."""
    base: ClassVar[str] = "dense"
    """The kind of weights, as `MoEConfig.pick` takes it."""
    promised: ClassVar[str] = ""
    """Name of a layer that must be ours: what would fall back is a ValueError that names it."""
    max_tokens: int = 0
    """Most tokens per call without adapters that our kernel serves; larger calls go to vLLM's experts."""
    max_lora_tokens: int = 0
    """The same with adapters."""

    @classmethod
    def configured(cls, **options: Any) -> type:
        """A subclass of the same name with other class options, as a layer's ``experts_cls``."""
        return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **options})

    def _start(self) -> None:
        self.reason: str | None = why_not(self.moe_config, self.quant_config, self.activation_config)
        self.reason = self.reason or self._why_not_weights()
        if self.promised and self.reason is not None:
            raise broken_promise(self.promised, self.reason)
        self.no_bank: str | None = None
        self.bank: ExpertLoRA | None = None
        self.ranks: torch.Tensor | None = None

    def _why_not_weights(self) -> str | None:
        """Why the layer's weights are not ours to serve, None when they are."""
        return None

    def limit(self, lora: bool) -> int:
        """Most tokens per call that our kernel serves, with adapters or without."""
        if envs.VLLM_BATCH_INVARIANT:  # one kernel for every size is part of it
            return LARGEST_CALL
        return min(LARGEST_CALL, self.max_lora_tokens if lora else self.max_tokens)

    def activation(self, activation: MoEActivation, output: torch.Tensor, input: torch.Tensor, **kwargs: Any) -> None:
        """vLLM's own path: SwiGLU rounded once where the model's reference does, else vLLM's."""
        if self.single_rounding and self.reason is None and activation == MoEActivation.SILU:
            silu_mul(input, output)
        else:
            super().activation(activation, output, input, **kwargs)  # type: ignore[misc]

    def set_lora_context(self, ctx: MoELoRAContext) -> None:
        """Build the bank over vLLM's stacks, once: their storage stays, adapters are copied into it."""
        super().set_lora_context(ctx)  # type: ignore[misc]
        self.bank = None
        self.no_bank = "fully_sharded_loras splits the rank over ranks of the TP group" if ctx.fully_sharded else None
        meta = getattr(ctx.punica_wrapper, "token_mapping_meta", None)
        if meta is None:
            self.no_bank = f"{type(ctx.punica_wrapper).__name__} keeps no map from tokens to slots on the device"
        if self.promised and self.no_bank is not None:
            raise broken_promise(self.promised, self.no_bank)
        if self.reason is not None or self.no_bank is not None:
            return
        a, b = ctx.w13_lora_a_stacked, ctx.w13_lora_b_stacked
        if ctx.w13_num_slices == 1:  # gate and up fused on disk: one A for both, B's rows gate first
            half = b[0].shape[2] // 2
            gate_up_a, gate_up_b = (a[0], a[0]), (b[0][:, :, :half], b[0][:, :, half:])
        else:
            gate_up_a, gate_up_b = (a[0], a[1]), (b[0], b[1])
        # a reload may build new experts around the same context: the ranks of loaded adapters go along
        ranks = getattr(ctx, "beam_moe_ranks", None)
        if ranks is None:
            ranks = ctx.beam_moe_ranks = torch.zeros(ctx.max_loras, dtype=torch.int32, device=a[0].device)
        self.ranks = ranks
        self.bank = ExpertLoRA(
            gate_up_a,
            gate_up_b,
            ctx.w2_lora_a_stacked[0],
            ctx.w2_lora_b_stacked[0],
            ranks=ranks,
            enabled=ctx.adapter_enabled[: ctx.max_loras],
        )
        clear_stale_ids(meta)

    def note_rank(self, slot: int, factors: Iterable[torch.Tensor | None]) -> None:
        """Record the live rank of a slot: the largest of its A factors ``(E|1, r, in)``; no factors, rank 0."""
        if self.ranks is not None:
            self.ranks[slot].fill_(max((f.shape[1] for f in factors if f is not None), default=0))

    def _why_not_call(self, topk_weights: torch.Tensor, topk_ids: torch.Tensor, on_input: bool) -> str | None:
        if on_input:
            return "router weights are applied to its input"
        if self.post_gemm2_hook is not None:  # type: ignore[attr-defined]
            return "its reduction is done by a later kernel"
        if topk_ids.dtype != torch.int32 or topk_weights.dtype != torch.float32:
            return f"its router gives {topk_ids.dtype} ids and {topk_weights.dtype} weights"
        return self.no_bank

    def _lora(self, rows: int) -> tuple[ExpertLoRA | None, torch.Tensor | None]:
        ctx = self._lora_context  # type: ignore[attr-defined]
        if ctx is None:
            return None, None
        meta = ctx.punica_wrapper.token_mapping_meta
        if ctx.local_token_lora_mapping is not None:
            # gathered from every replica: neither this one's flag nor its graph knows of the others' adapters
            return self.bank, ctx.local_token_lora_mapping[:rows]
        # a tensor on the host. A graph captured while it is set is replayed for batches without adapters only
        if meta.no_lora_flag_cpu.item():
            return None, None
        return self.bank, meta.token_lora_mapping[:rows]

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *args: Any) -> tuple[tuple[int, ...], ...]:
        """Ours needs only the output; `fused_moe` takes its own scratch memory.

        vLLM's buffers cannot grow once the engine is ready, so a size that is vLLM's in any batch has them in all.
        """
        if self.reason is None and min(self.limit(False), self.limit(True)) >= M:
            return (0,), (0,), (M, K)
        return super().workspace_shapes(M, N, K, topk, *args)  # type: ignore[misc]

    def _weights(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[Any, Any]:
        return w1, w2

    def config(self, rows: int, top_k: int, w1: torch.Tensor, w2: torch.Tensor) -> MoEConfig:
        """What `fused_moe` picks for a call of ``rows`` tokens on this layer."""
        return MoEConfig.pick(w1.device, rows, top_k, w1.shape[0], w2.shape[1], w2.shape[2], base=self.base)

    def _pinned(self, rows: int, top_k: int, w1: torch.Tensor, w2: torch.Tensor) -> MoEConfig:
        """One order of summation for every batch size."""
        pinned = self.config(PINNED_TOKENS, top_k, w1, w2)
        return self.config(rows, top_k, w1, w2).summing_as(pinned, base=self.base)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> Any:
        """Weighted sum of each token's experts into ``output`` (T, H), a partial sum under TP and EP."""
        rows = hidden_states.shape[0]
        reason = self.reason or self._why_not_call(topk_weights, topk_ids, apply_router_weight_on_input)
        lora, lora_ids = self._lora(rows) if reason is None else (None, None)
        limit = self.limit(lora is not None)
        if reason is not None:
            if self.promised:
                raise broken_promise(self.promised, reason)
            metrics.fell_back("an MoE layer", reason)
        elif rows <= limit:
            metrics.calls[metrics.SERVED, "with LoRA" if lora is not None else "bare"] += 1
            w13, w2_ = self._weights(w1, w2)
            fused_moe(
                hidden_states,
                w13,
                w2_,
                topk_weights,
                topk_ids,
                lora=lora,
                lora_ids=lora_ids,
                expert_map=expert_map,
                routed_scaling=self.routed_scaling,
                out=output,
                config=self._pinned(rows, topk_ids.shape[1], w1, w2) if envs.VLLM_BATCH_INVARIANT else None,
            )
            return None
        else:
            metrics.calls[metrics.PREFILL, f"more than {limit} tokens"] += 1
        need13, need2, _ = super().workspace_shapes(  # type: ignore[misc]
            rows,
            w1.shape[1],
            hidden_states.shape[1],
            topk_ids.shape[1],
            global_num_experts,
            w1.shape[0],
            None,
            activation,
        )
        if workspace13.numel() < _size(need13):  # a call that turned out not to be ours after its buffers were made
            workspace13 = torch.empty(need13, dtype=workspace13.dtype, device=workspace13.device)
            workspace2 = torch.empty(need2, dtype=workspace2.dtype, device=workspace2.device)
        result = super().apply(  # type: ignore[misc]
            output=output,
            hidden_states=hidden_states,
            w1=w1,
            w2=w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            a1q_scale=a1q_scale,
            a2_scale=a2_scale,
            workspace13=workspace13,
            workspace2=workspace2,
            expert_tokens_meta=expert_tokens_meta,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        if self.routed_scaling != 1.0:
            output.mul_(self.routed_scaling)
        return result


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


class BeamTritonExperts(_FusedExperts, TritonExperts):
    """bf16 or fp16 experts: ours up to ``BEAM_MOE_VLLM_TOKENS`` tokens a batch, ``BEAM_MOE_VLLM_LORA_TOKENS`` with
    adapters, `TritonExperts` above."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        TritonExperts.__init__(self, moe_config, quant_config)
        self.max_tokens, self.max_lora_tokens = env.number("VLLM_TOKENS"), env.number("VLLM_LORA_TOKENS")
        self._start()

    def _why_not_weights(self) -> str | None:
        if self.quant_dtype is not None or self.quant_config.weight_quant_dtype is not None:
            return (
                f"its weights or activations are quantised ({self.quant_dtype or self.quant_config.weight_quant_dtype})"
            )
        return None


class BeamMxfp8Experts(_FusedExperts, Mxfp8TritonExpertsBase):
    """MXFP8 weights, activations as they are: ours for every size `fused_moe` takes, dequantised experts above.

    w1 (E, 2I, H) and w2 (E, H, I) e4m3 with uint8 E8M0 scales (E, 2I, H/32) and (E, H, I/32), row-major.
    """

    base = "mxfp8"
    max_tokens = max_lora_tokens = LARGEST_CALL

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        Mxfp8TritonExpertsBase.__init__(self, moe_config, quant_config)
        self._start()
        self.words: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._views: tuple[Any, Any, Any, Any] | None = None

    @property
    def quant_dtype(self) -> None:
        """Activations are not quantised."""
        return None

    @property
    def block_shape(self) -> None:
        """For `TritonExperts`, which sees dequantised weights."""
        return None

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Activations arrive in the model's dtype."""
        return True

    def _weights(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[Any, Any]:
        if self._views is None or self._views[0] is not w1 or self._views[1] is not w2:
            w13 = MXFP8Tensor(w1.data, self.w1_scale_val.data, -1, rows=self.words[0])
            self._views = (w1, w2, w13, MXFP8Tensor(w2.data, self.w2_scale_val.data, -1, rows=self.words[1]))
        return self._views[2], self._views[3]

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *args: Any,
              **kwargs: Any) -> Any:  # fmt: skip
        """As the dense experts; a call past ``fused_moe``'s size is cut into pieces of that size."""
        if hidden_states.shape[0] > LARGEST_CALL:
            raise ValueError(
                f"BeamMxfp8Experts: at most {LARGEST_CALL} tokens a call, got {hidden_states.shape[0]}: "
                "lower max_num_batched_tokens, which counts once for each data-parallel replica"
            )
        return super().apply(output, hidden_states, w1, w2, *args, **kwargs)


def prepare_with(method: Any, builds: str) -> None:
    """Have an MXFP8 method find, each time ``builds`` has made its kernel, what the weights' fp16 form needs.

    The words that `prepare` finds stay with the method and are rewritten where they lie, so that a graph captured
    before a reload reads the new ones.
    """
    build = getattr(method, builds)
    words: list[torch.Tensor | None] = [None, None]

    def build_and_prepare(layer: Any, *args: Any, **kwargs: Any) -> None:
        build(layer, *args, **kwargs)
        for i, name in enumerate(("w13", "w2")):
            weight = getattr(layer, f"{name}_weight").data
            scale = getattr(layer, f"{name}_weight_scale").data
            if weight.is_meta:  # online quantisation builds its layers without memory
                return
            words[i] = prepare(MXFP8Tensor(weight, scale, -1, rows=words[i])).rows
        method.moe_kernel.impl.fused_experts.words = tuple(words)

    setattr(method, builds, build_and_prepare)


def clear_stale_ids(meta: Any) -> None:
    """Make vLLM's token-to-slot map say -1 wherever the batch has no adapter.

    vLLM returns early for a batch without adapters and leaves the map of the batch before; rows past the batch keep old
    ids too. A kernel driven by that map alone, inside a graph that serves both kinds of batch, would apply a stale one.
    """
    if getattr(meta.prepare_tensors, "__wrapped__", None) is not None:
        return
    prepare = meta.prepare_tensors

    def prepare_tensors(token_lora_mapping: torch.Tensor) -> None:
        prepare(token_lora_mapping)
        live = 0 if meta.no_lora_flag_cpu.item() else token_lora_mapping.shape[0]
        meta.token_lora_mapping[live:].fill_(-1)

    prepare_tensors.__wrapped__ = prepare  # type: ignore[attr-defined]
    meta.prepare_tensors = prepare_tensors
    meta.token_lora_mapping.fill_(-1)


def follow_ranks() -> None:
    """Have vLLM's MoE LoRA layer tell our experts the live rank of the slot it writes. Re-entrant."""
    from functools import wraps

    from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA

    def patch(cls: type, name: str, factors: Any) -> None:
        original = cls.__dict__[name]
        if getattr(original, "__beam_moe__", False):
            return

        @wraps(original)
        def method(self: Any, index: int, *args: Any, **kwargs: Any) -> Any:
            result = original(self, index, *args, **kwargs)
            experts = getattr(self._moe_kernel.impl, "fused_experts", None)
            if isinstance(experts, _FusedExperts):
                experts.note_rank(index, factors(*args, **kwargs))
            return result

        method.__beam_moe__ = True  # type: ignore[attr-defined]
        setattr(cls, name, method)

    for cls in (FusedMoEWithLoRA, FusedMoE3DWithLoRA):
        patch(cls, "set_lora", lambda lora_a, lora_b: lora_a)
    patch(FusedMoEWithLoRA, "reset_lora", tuple)


def give_mxfp8(method: Any, **options: Any) -> bool:
    """Make one of `MXFP8_METHODS` build its kernel from our experts with these class options; False for another."""
    names = next((names for cls, names in MXFP8_METHODS.items() if isinstance(method, cls)), None)
    if names is None:
        return False
    method.experts_cls = BeamMxfp8Experts.configured(promised=getattr(method, "promised", ""), **options)
    # this backend's layout is the plain row-major one; others repack, and emulation may dequantise at load
    setattr(method, names[0], Fp8MoeBackend.TRITON_MXFP8)
    prepare_with(method, names[1])
    return True


def give_experts(runner: Any) -> str | None:
    """Make a Beam ``MoERunner`` build its kernel from our experts; the reason when it keeps vLLM's.

    The runner's routed scaling moves into the experts: one rounding and one launch less.
    """
    method = runner.routed_experts.quant_method
    options = {"routed_scaling": float(runner.routed_scaling_factor), "single_rounding": True}
    chosen = getattr(method, "experts_cls", None)
    if isinstance(method, UnquantizedFusedMoEMethod) and chosen is TritonExperts:
        method.experts_cls = BeamTritonExperts.configured(**options)
    elif not give_mxfp8(method, **options):
        return f"vLLM chose {getattr(chosen, '__name__', chosen)} ({type(method).__name__})"
    runner.routed_scaling_factor = 1.0
    return None


def experts_of(runner: Any) -> Any:
    """The experts object of a ``MoERunner`` when it is ours, else None."""
    kernel = getattr(runner.routed_experts.quant_method, "moe_kernel", None)
    experts = getattr(getattr(kernel, "impl", None), "fused_experts", None)
    return experts if isinstance(experts, _FusedExperts) else None


def serves(architecture: str | None) -> bool:
    """Whether ``BEAM_MOE_VLLM`` asks for our experts under this architecture."""
    return env.serves_in_vllm(architecture)


class ExpertsWarmup(VllmJitKernel[Any]):
    """Compiles, before the engine is ready, every configuration that a later batch size can reach.

    Keys are ``(tokens, with LoRA)``; compiling one runs the layer's own experts on zeros. One layer stands for all
    layers of its shape.
    """

    CompileKey = tuple

    def __init__(self, runners: list[Any], max_tokens: int) -> None:
        super().__init__()
        self.runners, self.max_tokens = runners, max_tokens

    def get_warmup_keys(self, *args: Any, **kwargs: Any) -> list[tuple[int, bool]]:
        """The sizes of every distinct layer's experts, each with adapters and without where the engine has LoRA."""
        with_lora = any(e._lora_context is not None for r in self.runners if (e := experts_of(r)) is not None)
        keys = {(n, lora) for lora in {False, with_lora} for r in self._distinct() for n in self._sizes(r, lora)}
        return sorted(keys)

    def _largest(self, runner: Any) -> int:
        """Most tokens of one call: with data parallelism those of every replica, which each gathers."""
        return self.max_tokens * runner.moe_config.moe_parallel_config.dp_size

    def _sizes(self, runner: Any, lora: bool) -> set[int]:
        """A size for each configuration that can be launched, and the largest of all."""
        layer, experts, largest = runner.routed_experts, experts_of(runner), self._largest(runner)
        w1, w2, top_k = layer.w13_weight, layer.w2_weight, runner.moe_config.experts_per_token
        limit = 0 if experts is None or experts.reason else min(experts.limit(lora), largest)
        first: dict[Any, int] = {}
        for n in range(1, limit + 1):  # each: a configuration may serve a few sizes only
            if n > CHUNK and not envs.VLLM_BATCH_INVARIANT:
                break  # its passes are calls of fewer tokens, each with the configuration of its own size
            config = experts.config(n, top_k, w1, w2)
            for tokens in {min(n, CHUNK), (n - 1) % CHUNK + 1}:  # a full pass and the last one
                pairs = tokens * top_k
                # our kernels specialise on their configuration and, where they look through all pairs, on their number
                first.setdefault((config, (pairs - 1).bit_length(), pairs > COUNT_FIRST), n)
        name = None if experts is None else experts.quant_config.config_name(runner.moe_config.in_dtype)
        for bucket in (*(2**i for i in range(17)), *(3 * 2**i for i in range(15)), largest):
            for n in (bucket, bucket - 14, bucket - 15):  # vLLM's: on divisibility of the tokens too
                if limit < n <= largest:
                    chosen = try_get_optimal_moe_config(w1.size(), w2.size(), top_k, name, n)
                    first.setdefault((tuple(sorted(chosen.items())), n % 16 == 0, n % 2), n)
        return {*first.values(), largest}

    def _distinct(self) -> list[Any]:
        """One runner for each compiled form: shapes, and how Triton sees the offset from gate's to up's factors."""
        forms: dict[Any, Any] = {}
        for runner in self.runners:
            layer, config, experts = runner.routed_experts, runner.moe_config, experts_of(runner)
            form: list[Any] = [layer.w13_weight.shape, layer.w2_weight.shape, layer.w13_weight.dtype]
            form += [config.in_dtype, config.experts_per_token]
            if experts is not None and experts.bank is not None:
                for gate, up in (experts.bank.gate_up_a, experts.bank.gate_up_b):
                    offset = (up.data_ptr() - gate.data_ptr()) // gate.element_size()
                    form += [-(2**31) <= offset < 2**31, offset % 16 == 0]
            forms.setdefault(tuple(form), runner)
        return list(forms.values())

    @torch.inference_mode()
    def compile(self, compile_key: tuple[int, bool]) -> None:
        """Run one size, with or without adapters, through every distinct layer.

        Under data parallelism the rows stand for those that a dispatch has gathered: no other replica takes part.
        """
        tokens, with_lora = compile_key
        for runner in self._distinct():
            layer, config, experts = runner.routed_experts, runner.moe_config, experts_of(runner)
            impl = getattr(layer.quant_method.moe_kernel, "impl", None)
            gathers = isinstance(getattr(impl, "prepare_finalize", None), MoEPrepareAndFinalizeNaiveDPEPModular)
            if config.moe_parallel_config.dp_size > 1 and not gathers:
                continue  # other dispatches hand over rows in forms of their own
            device = layer.w13_weight.device
            x = torch.zeros(tokens, config.hidden_dim, dtype=config.in_dtype, device=device)
            k, e = config.experts_per_token, config.num_experts
            ids = (torch.arange(tokens * k, device=device, dtype=torch.int32) % e).view(tokens, k)
            weights = torch.full((tokens, k), 1.0 / k, device=device)
            context: Any = None if experts is None else experts._lora_context
            meta = None if context is None else getattr(context.punica_wrapper, "token_mapping_meta", None)
            slots: torch.Tensor | None = None
            with as_it_was(meta):
                if meta is not None:
                    mapping = torch.full((tokens,), -1, dtype=torch.long, device=device)
                    if with_lora:
                        mapping = torch.arange(tokens, device=device) % context.max_loras
                    meta.prepare_tensors(mapping[: self.max_tokens])  # the map has rows for one replica
                    slots = mapping.to(meta.token_lora_mapping.dtype)
                with already_gathered(impl, context, slots) if gathers else nullcontext():
                    layer.quant_method.apply(
                        layer=layer,
                        x=x,
                        topk_weights=weights,
                        topk_ids=ids,
                        shared_experts=None,
                        shared_experts_input=None,
                    )


class ModelWarmup(ExpertsWarmup):
    """The same for a model whose class is vLLM's, where a layer of its own can only say that there is one of ours.

    All instances are equal, so that vLLM's registry keeps one for the engine, which finds the layers when it is asked.
    """

    def __init__(self) -> None:
        super().__init__([], 0)

    def __eq__(self, other: object) -> bool:
        return type(other) is ModelWarmup

    def __hash__(self) -> int:
        return hash(ModelWarmup)

    def get_warmup_keys(self, vllm_config: Any) -> list[tuple[int, bool]]:
        """As above, of every layer of the engine that our experts serve."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        served = ((m, experts_of(m)) for m in layers if isinstance(m, MoERunner))
        self.runners = [m for m, experts in served if experts is not None and experts.reason is None]
        self.max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        return super().get_warmup_keys()


@contextmanager
def as_it_was(meta: Any) -> Iterator[None]:
    """Leave vLLM's map from tokens to slots as it is: it makes no other for a batch that is like the one before."""
    tensors = [] if meta is None else [t for t in vars(meta).values() if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    try:
        yield
    finally:
        for tensor, values in zip(tensors, before):
            tensor.copy_(values)


@contextmanager
def already_gathered(impl: Any, context: Any, slots: torch.Tensor | None) -> Iterator[None]:
    """Have vLLM's modular kernel take its rows for those of every replica, with ``slots`` as their adapters."""
    dispatch = impl.prepare_finalize
    impl.prepare_finalize = make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False)
    if context is not None:
        context.local_token_lora_mapping = slots
    try:
        yield
    finally:
        impl.prepare_finalize = dispatch
        if context is not None:
            context.local_token_lora_mapping = None
