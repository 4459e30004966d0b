"""Weights out of a Megatron model, for an inference engine: each tensor in its own type, the router exact.

Router weights and correction bias are fp32 in trainer and engine. Rounded on the way, they send tokens to other experts
than the trainer's, and nothing says so: the engine widens them again. Sources here follow vLLM's trainer-side contract
(``metadata()`` and iteration agree element for element; iteration is lazy and collective over the trainer's ranks).
`beam_moe.integrations.vllm.weight_sync` takes them into the engine; `beam_moe.weight_sync` checks the router's bits on
both sides.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from beam_moe.integrations.megatron.lora import adapter_scale, adapter_tensors, peft_ranks, stacked_outer
from beam_moe.weight_sync import is_router


class TensorMeta(NamedTuple):
    """What the receiver must allocate for one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The whole model under its Hugging Face names.

    Args:
        bridge: the ``AutoBridge`` that the model came from.
        chunks: the list of this rank's model chunks.
        dtype: of every tensor but the router's, which keep their own.
        mxfp8: shell patterns of names to send quantised: ``name`` in E4M3 and ``name + "_scale"`` in E8M0 (uint8), the
            layout of `beam_moe.mxfp8_io`. They must be matrices with a last axis divisible by 32.
        merge_adapters: add LoRA to the weights it adapts; False sends the base weights alone.

    All ranks must iterate; every rank gets whole tensors. A tensor may alias the model's own memory: copy what must
    outlive the next optimizer step.

    Raises:
        ValueError: while iterating, for a router tensor that the trainer does not hold in fp32, or a pattern of
            ``mxfp8`` that matches none, a router tensor, or one that cannot be quantised.
    """

    def __init__(
        self,
        bridge,
        chunks,
        *,
        dtype: torch.dtype = torch.bfloat16,
        mxfp8: Sequence[str] = (),
        merge_adapters: bool = True,
    ):
        self.bridge, self.chunks, self.dtype = bridge, chunks, dtype
        self.mxfp8, self.merge_adapters = tuple(mxfp8), merge_adapters
        self._metadata: list[TensorMeta] | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        unused = set(self.mxfp8)
        exported = self.bridge.export_hf_weights(
            self.chunks, cpu=False, show_progress=False, merge_adapter_weights=self.merge_adapters
        )
        for name, tensor in exported:
            name, tensor = name.replace(".base_layer.", "."), tensor.detach()
            matched = [p for p in self.mxfp8 if fnmatch.fnmatchcase(name, p)]
            unused -= set(matched)
            if is_router(name):
                if tensor.dtype != torch.float32 or matched:
                    raise ValueError(
                        f"WeightSource: router tensor {name} must be fp32 in the trainer and match no mxfp8 pattern, "
                        f"got {tensor.dtype}, {matched}"
                    )
                yield name, tensor.contiguous()
            elif matched:
                yield from self._quantized(name, tensor)
            else:
                yield name, tensor.to(self.dtype).contiguous()
        if unused:
            raise ValueError(f"WeightSource: mxfp8 patterns must match a name, got {sorted(unused)}")

    def _quantized(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        from beam_moe.kernels.mxfp8 import quantize
        from beam_moe.mxfp8_io import pack

        if tensor.dim() < 2 or tensor.shape[-1] % 32:
            raise ValueError(
                f"WeightSource: mxfp8 needs a matrix with a last axis divisible by 32, got {name} {tuple(tensor.shape)}"
            )
        yield from pack(name, quantize(tensor.detach().contiguous())).items()

    def metadata(self) -> list[TensorMeta]:
        """Name, type and shape of every tensor, in order. The first call exports once to learn them."""
        if self._metadata is None:
            self._metadata = [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self]
        return self._metadata


class AdapterSource:
    """The LoRA adapter alone, under PEFT's names, each factor in its own type, the scale ``alpha / r`` not applied.

    Shared-outer experts come as ``experts.{w1,w3,w2}`` with all experts in one tensor, see `lora.stacked_outer`.

    Args:
        bridge, chunks: as in `WeightSource`.

    ``peft_config`` has ``r``, ``lora_alpha`` and, where ranks differ, ``rank_pattern`` for `beam_moe.load_adapter` and
    the engine. All ranks must make it and iterate.
    """

    def __init__(self, bridge, chunks):
        self.bridge, self.chunks = bridge, chunks
        alpha, dims = adapter_scale(chunks)
        self.peft_config: dict = {"peft_type": "LORA", "r": dims[0], "lora_alpha": alpha}
        if len(dims) > 1:  # which module has which rank is in the tensors alone
            rank, pattern = peft_ranks(stacked_outer(adapter_tensors(bridge, chunks, cpu=False)))
            self.peft_config.update(r=rank, rank_pattern=pattern)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stacked_outer(adapter_tensors(self.bridge, self.chunks, cpu=False)).items():
            yield f"base_model.model.{name}", tensor.detach().contiguous()

    def metadata(self) -> list[TensorMeta]:
        """Name, type and shape of every factor, in order."""
        return [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self]
