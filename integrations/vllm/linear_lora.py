"""Adapters of linear layers in a small batch: one launch of ours where vLLM takes a fill, a shrink and an expand.

vLLM wraps every linear layer and launches those three at each step for each of them, also while no loaded adapter has
factors there, as for adapters of the experts alone. A captured graph cannot leave them out. Our launch stands in their
place and finds on the device, from the live rank of each slot in each slice, that there is nothing to do.

Which of the two runs depends on the number of tokens alone. Rows without an adapter are touched by neither.

Beam runs eagerly. Most other models are traced by ``torch.compile``, where sizes are symbols and a tensor has no
address: what is traced there is one operator, which decides when it runs.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
import vllm.envs as envs
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.utils.torch_utils import direct_register_custom_op

from beam_moe import env
from beam_moe.integrations.vllm import metrics
from beam_moe.integrations.vllm.experts import clear_stale_ids
from beam_moe.kernels.linear_lora import MAX_RANK, MAX_SLICES, MAX_TOKENS, add_lora, launch_form


def live_ranks(factors: Any, slices: int) -> list[int]:
    """Rank of each slice, 0 where it has none, of what a wrapper's ``set_lora`` takes as ``lora_a``: ``(r, in)`` or a
    list of them."""
    if isinstance(factors, torch.Tensor):
        return [factors.shape[0]] * slices
    ranks = [0 if f is None else f.shape[0] for f in factors]
    return ranks if len(ranks) == slices else [max(ranks, default=0)] * slices


class LinearBank:
    """One wrapped layer's factors, as vLLM keeps them, and the live rank of each slot in each slice.

    Attributes:
        adapters: what stands for ``add_lora_linear`` of the layer's punica wrapper.
        a, b: ``(L, R, K)`` and ``(L, W, R)`` of each slice: views of vLLM's buffers.
        ranks: int32 ``(L, slices)``.
        reason: why our kernel cannot serve the layer, None when it can.
    """

    def __init__(self, module: BaseLinearLayerWithLoRA, adapters: LinearAdapters) -> None:
        self.adapters = adapters
        self.a = tuple(t.squeeze(1) for t in module.lora_a_stacked)
        self.b = tuple(t.squeeze(1) for t in module.lora_b_stacked)
        slots, rank, _ = self.a[0].shape
        self.ranks = torch.zeros(slots, len(self.a), dtype=torch.int32, device=self.a[0].device)
        self.reason: str | None = None
        if len(self.a) > MAX_SLICES:
            self.reason = f"it has {len(self.a)} slices, more than {MAX_SLICES}"
        elif rank > MAX_RANK:
            self.reason = f"max_lora_rank is above {MAX_RANK}"
        elif self.a[0].dtype not in (torch.bfloat16, torch.float16):
            self.reason = f"its factors are {self.a[0].dtype}"
        set_lora, reset_lora = module.set_lora, module.reset_lora

        def reset(index: int) -> None:
            reset_lora(index)
            self.ranks[index].fill_(0)

        def set_(index: int, lora_a: Any, lora_b: Any) -> None:
            set_lora(index, lora_a, lora_b)  # resets first
            self.ranks[index].copy_(torch.tensor(live_ranks(lora_a, len(self.a)), dtype=torch.int32))

        module.reset_lora, module.set_lora = reset, set_

    def form(self, tokens: int) -> tuple:
        """What a call of ``tokens`` tokens compiles."""
        widths = tuple(t.shape[1] for t in self.b)
        return (self.a[0].shape[1:], widths, self.a[0].dtype, launch_form(tokens, widths))


class LinearAdapters:
    """In the place of one ``PunicaWrapperGPU.add_lora_linear``."""

    def __init__(self, punica: Any) -> None:
        self.meta = punica.token_mapping_meta
        self.__wrapped__ = punica.add_lora_linear
        self.max_tokens = min(env.number("VLLM_LINEAR_LORA"), MAX_TOKENS)
        self.banks: dict[int, LinearBank] = {}

    def follow(self, module: BaseLinearLayerWithLoRA) -> None:
        """Serve a wrapped layer, and note the ranks that are written into its slots from here on. Re-entrant."""
        key = module.lora_a_stacked[0].data_ptr()
        if key not in self.banks:
            self.banks[key] = _banks[key] = LinearBank(module, self)

    def _why_not(
        self, bank: LinearBank | None, y: torch.Tensor, x: torch.Tensor, scale: float, rest: dict
    ) -> str | None:
        if bank is None:
            return "its factors are not a wrapped linear layer's"
        if bank.reason is not None:
            return bank.reason
        if scale != 1.0 or rest:
            return f"it is called with scale {scale} and {rest}"
        if x.dim() != 2 or y.dim() != 2 or x.dtype != bank.a[0].dtype or y.dtype != x.dtype:
            # without sizes: a reason is counted and logged once, whatever the batch
            return f"{x.dim()}-D {x.dtype} goes in and {y.dim()}-D {y.dtype} comes out"
        if x.shape[1] != bank.a[0].shape[2] or y.shape != (len(x), sum(t.shape[1] for t in bank.b)):
            return "its input or its output is not as wide as its factors"
        for name, t in (("input", x), ("output", y)):
            if t.stride(1) != 1 or (len(t) > 1 and t.stride(0) < t.shape[1]):
                return f"strides of its {name} are not those of rows one after another"
        return None

    def __call__(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **rest: Any,
    ) -> None:
        """Add to ``y`` (T, N) each row's adapter on ``x`` (T, K), in place."""
        if torch.compiler.is_compiling() and scale == 1.0 and not rest:
            torch.ops.beam_moe.add_lora_linear(y, x, list(lora_a_stacked), list(lora_b_stacked), list(output_slices))
            return
        bank = self.banks.get(lora_a_stacked[0].data_ptr())
        reason = self._why_not(bank, y, x, scale, rest)
        if reason is not None:
            metrics.fell_back("adapters of a dense layer", reason)
        elif x.shape[0] > self.max_tokens:
            metrics.calls[metrics.PREFILL, f"dense LoRA, more than {self.max_tokens} tokens"] += 1
        else:
            assert bank is not None
            metrics.calls[metrics.SERVED, "dense LoRA"] += 1
            # a tensor on the host. A graph captured while it is set is replayed for batches without adapters only
            if not self.meta.no_lora_flag_cpu.item():
                add_lora(y, x, bank.a, bank.b, self.meta.token_lora_mapping[: x.shape[0]], bank.ranks)
            return
        self.__wrapped__(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **rest)


_banks: WeakValueDictionary[int, LinearBank] = WeakValueDictionary()
"""Those of every engine in this process, by the address of the first A: how the operator below finds its layer's."""


def add_lora_linear(
    y: torch.Tensor, x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], output_slices: list[int]
) -> None:
    """`LinearAdapters` of the layer with these factors, as ``torch.ops.beam_moe.add_lora_linear``."""
    bank = _banks.get(a[0].data_ptr())
    if bank is None:
        raise ValueError("add_lora_linear: a must be the factors of a layer that is served, got others")
    bank.adapters(y, x, tuple(a), tuple(b), 1.0, tuple(output_slices))


def _fake(
    y: torch.Tensor, x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], output_slices: list[int]
) -> None:
    return None


_library = torch.library.Library("beam_moe", "FRAGMENT")  # the operator lives as long as this
direct_register_custom_op("add_lora_linear", add_lora_linear, ["y"], _fake, _library)


def attach(manager: Any) -> bool:
    """Serve the wrapped linear layers of a freshly built ``LoRAModelManager``; whether any is ours. Re-entrant.

    Not under ``VLLM_BATCH_INVARIANT``: vLLM's kernels then sum in one order at every size, which ours must share. Not
    with ``fully_sharded_loras``, whose layers exchange what they shrink between the ranks before they expand it.
    """
    if not env.number("VLLM_LINEAR_LORA") or envs.VLLM_BATCH_INVARIANT:
        metrics.log_once("beam-moe: adapters of dense layers are left to vLLM")
        return False
    if manager.lora_config.fully_sharded_loras:
        metrics.fell_back("adapters of a dense layer", "fully_sharded_loras splits the rank over ranks of the TP group")
        return False
    any_served = False
    for module in manager.modules.values():
        if not isinstance(module, BaseLinearLayerWithLoRA):
            continue
        punica = module.punica_wrapper
        if getattr(punica, "token_mapping_meta", None) is None:
            metrics.fell_back("adapters of a dense layer", f"{type(punica).__name__} keeps no map from tokens to slots")
            continue
        adapters = punica.add_lora_linear
        if not isinstance(adapters, LinearAdapters):
            punica.add_lora_linear = adapters = LinearAdapters(punica)
            clear_stale_ids(punica.token_mapping_meta)
            LinearWarmup(adapters).register_warmup()
        adapters.follow(module)
        any_served = True
    return any_served


class LinearWarmup(VllmJitKernel[Any]):
    """Compiles, before the engine is ready, every launch form that a later batch size can reach; keys are ``(tokens,
    place among the banks)``."""

    CompileKey = tuple

    def __init__(self, adapters: LinearAdapters) -> None:
        super().__init__()
        self.adapters = adapters

    def get_warmup_keys(self, *args: Any, **kwargs: Any) -> list[tuple[int, int]]:
        """A size and a layer for each form."""
        first: dict[tuple, tuple[int, int]] = {}
        for place, bank in enumerate(self.adapters.banks.values()):
            for tokens in range(1, self.adapters.max_tokens + 1):
                if bank.reason is None:
                    first.setdefault(bank.form(tokens), (tokens, place))
        return list(first.values())

    @torch.inference_mode()
    def compile(self, compile_key: tuple[int, int]) -> None:
        """One call without adapters on zeros."""
        tokens, place = compile_key
        bank = list(self.adapters.banks.values())[place]
        a = bank.a[0]
        x = torch.zeros(tokens, a.shape[2], dtype=a.dtype, device=a.device)
        out = torch.zeros(tokens, sum(t.shape[1] for t in bank.b), dtype=a.dtype, device=a.device)
        ids = torch.full((tokens,), -1, dtype=torch.int32, device=a.device)
        add_lora(out, x, bank.a, bank.b, ids, bank.ranks)
