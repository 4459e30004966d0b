"""Memory between the launches of a layer: one buffer, cut the same way for the same call."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from beam_moe.kernels.moe_lora.config import OPS, MoEConfig
from beam_moe.kernels.moe_lora.plan import totals_needed

CHUNK = 4096  # tokens of one pass: beyond it the fp32 rows of `y` would outgrow what they save
_ALIGN = 256


class Shape(NamedTuple):
    """What decides the sizes of the intermediates."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inter: int
    rank: int  # of the bank; 0 without adapters


class Buffers(NamedTuple):
    """The intermediates of one pass; shapes in `plan`, `gate_up`, `activate` and `down`."""

    order: torch.Tensor
    block_experts: torch.Tensor
    widths: torch.Tensor
    gu: torch.Tensor
    t: torch.Tensor
    h: torch.Tensor
    s: torch.Tensor
    y: torch.Tensor
    xn: torch.Tensor  # x's fp16 image under MXFP8 weights
    words: torch.Tensor
    counts: torch.Tensor  # of parts done, see `joined`
    totals: torch.Tensor  # pairs of each expert, counted first where they are many, see `plan`


def _parts(shape: Shape, config: MoEConfig) -> list[tuple[int, torch.dtype | None]]:
    """Elements and dtype (None: x's) of each buffer, in the order of `Buffers`."""
    pairs = shape.tokens * shape.top_k
    blocks = config.blocks(pairs, shape.experts)
    tiles = triton.cdiv(shape.inter, config.act_block_i)
    return [
        (0 if config.rows == "direct" else blocks * config.block_m, torch.int32),
        (0 if config.rows == "direct" else blocks, torch.int32),
        (blocks if config.widest > 1 else 0, torch.int32),
        (config.splits * pairs * 2 * shape.inter, torch.float32),
        (config.splits * pairs * 2 * shape.rank, torch.float32),
        (pairs * shape.inter, None),
        (tiles * pairs * shape.rank, torch.float32),
        (pairs * shape.hidden, torch.float32),
        (shape.tokens * shape.hidden, torch.float16),
        (shape.tokens, torch.int32),
        (2 * blocks + 1 if config.lag else 0, torch.int32),
        (totals_needed(pairs, shape.experts), torch.int32),
    ]


def _aligned(elements: int, dtype: torch.dtype) -> int:
    return triton.cdiv(elements * dtype.itemsize, _ALIGN) * _ALIGN


def bytes_needed(shape: Shape, config: MoEConfig) -> int:
    """Bytes of the buffers of one pass; x is counted at two bytes an element."""
    return sum(_aligned(n, dtype or torch.float16) for n, dtype in _parts(shape, config))


def carve(buffer: torch.Tensor, shape: Shape, config: MoEConfig, dtype: torch.dtype) -> Buffers:
    """Cut ``buffer`` (uint8, at least `bytes_needed`) into the intermediates of one pass."""
    views, first = [], 0
    for elements, part_dtype in _parts(shape, config):
        part_dtype = part_dtype or dtype
        views.append(buffer[first : first + elements * part_dtype.itemsize].view(part_dtype))
        first += _aligned(elements, part_dtype)
    return Buffers(*views)


class Workspace:
    """Intermediates for calls of at most ``max_tokens`` tokens, made once so that a call allocates nothing.

    Layers that run one after another on a stream may share it; calls on two streams need one each. See `moe_workspace`.

    Attributes:
        buffer: the memory, uint8.
        max_tokens, top_k, max_rank: what it was sized for.
    """

    def __init__(self, buffer: torch.Tensor, max_tokens: int, top_k: int, max_rank: int) -> None:
        self.buffer = buffer
        self.max_tokens, self.top_k, self.max_rank = max_tokens, top_k, max_rank
        self._cuts: dict[Any, Buffers] = {}

    def buffers(self, shape: Shape, config: MoEConfig, dtype: torch.dtype) -> Buffers:
        """The intermediates of one pass; ValueError where this workspace is too small for it."""
        key = (shape, config, dtype)
        cut = self._cuts.get(key)
        if cut is None:
            need = bytes_needed(shape, config)
            if need > self.buffer.numel():
                raise ValueError(
                    f"fused_moe: workspace is too small: {shape} needs {need} bytes, it has {self.buffer.numel()} "
                    f"(made for max_tokens={self.max_tokens}, top_k={self.top_k}, max_rank={self.max_rank})"
                )
            cut = self._cuts[key] = carve(self.buffer, shape, config, dtype)
        return cut


@functools.lru_cache(maxsize=256)
def _largest(
    max_tokens: int, top_k: int, experts: int, hidden: int, inter: int, rank: int, device: torch.device
) -> int:
    top = min(max_tokens, CHUNK)
    return max(
        bytes_needed(
            Shape(t, top_k, experts, hidden, inter, rank),
            MoEConfig.pick(device, t, top_k, experts, hidden, inter, base=base),
        )
        for base in OPS
        for t in range(1, top + 1)  # parameters change with t, so the largest batch is not the one that needs most
    )


def moe_workspace(max_tokens: int, top_k: int, shard: Any, max_rank: int, device: torch.device | str) -> Workspace:
    """A `Workspace` for every call of up to ``max_tokens`` tokens (required: a guess would be too small one day).

    It serves dense and MXFP8 weights alike.

    Args:
        max_tokens, top_k: the largest batch and the experts of each token; batches beyond `CHUNK` tokens run in passes.
        shard: anything with ``hidden``, ``intermediate`` and ``num_experts`` (local), as ``BeamMoEConfig.shard`` gives.
        max_rank: the rank of the largest bank, 0 for none.
        device: where the layer runs.

    Raises:
        ValueError: an argument out of range, or a shard without those attributes.
    """
    for name, value, least in (("max_tokens", max_tokens, 1), ("top_k", top_k, 1), ("max_rank", max_rank, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"moe_workspace: {name} must be an integer of at least {least}, got {value!r}")
    try:
        hidden, inter, experts = int(shard.hidden), int(shard.intermediate), int(shard.num_experts)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"moe_workspace: shard needs hidden, intermediate and num_experts, got {shard!r}") from error
    for name, size in (("hidden", hidden), ("intermediate", inter), ("num_experts", experts)):
        if size < 1:
            raise ValueError(f"moe_workspace: shard's {name} must be at least 1, got {size}")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    size = _largest(max_tokens, top_k, experts, hidden, inter, max_rank, device)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    return Workspace(buffer, max_tokens, top_k, max_rank)
