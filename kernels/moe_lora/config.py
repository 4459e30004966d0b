"""Launch parameters of the fused layer: the tuned table of the device, else a rule that is safe everywhere."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton

from beam_moe import env
from beam_moe.kernels import tuning
from beam_moe.kernels.launch import shared_memory

OPS = {"dense": "moe_lora", "mxfp8": "moe_lora_mxfp8"}  # the table of each kind of weights


@dataclass(frozen=True)
class MoEConfig:
    """Launch parameters of one layer.

    They depend on the shape of the call alone, never on adapters or routing, and what of them a call uses beside its
    adapters (`lora_wide`) does not show in its sums: a row's bits are the same whether or not an adapter is loaded.
    """

    # routed rows of a block; for 8 Triton takes mma.sync, for more wgmma: the former holds weights in registers, where
    # MXFP8 codes come from shared memory four and more at a time
    block_m: int = 16
    # up to how many blocks of one expert, a power of two, a program of gate_up and down takes as one tile, reading
    # weights and adapters once for them; needs "plan" and, in one launch, a lag of at least as many. For bf16 alone: on
    # an H200 mma.sync (blocks of 8) and wgmma (tiles of 16 and more) give its sums the same bits, but not those of fp16
    wide: int = 1
    lora_wide: int = 1  # the same with a B2 for each expert, whose tiles take so many registers that few are wide
    # how a block finds its rows: by the "plan"; by a "search" through all pairs, which pays while they are few; or
    # "direct", one pair a block, while hardly two tokens share an expert
    rows: str = "plan"
    plan_warps: int = 4
    plan_experts: int = 1  # experts that one program of the plan writes
    up_block_n: int = 64
    up_block_k: int = 128
    up_warps: int = 4
    up_stages: int = 4
    splits: int = 4  # shares of the hidden axis in the first product
    act_block_i: int = 64
    act_block_m: int = 0  # rows that a program of activate takes of a block, in a launch of its own; 0: all
    act_warps: int = 4
    down_block_n: int = 128
    down_block_k: int = 64
    down_warps: int = 4
    down_stages: int = 5
    down_tiles: int = 1  # row tiles of W2 that one program takes one after another
    down_whole: bool = False  # a tile of W2 spans all of I in one step, and h stays in shared memory
    combine_block_h: int = 256
    combine_block_t: int = 1
    combine_warps: int = 4
    # blocks by which activate follows gate_up, and down activate, in one launch (`joined`; needs "plan" and one number
    # of warps); 0: a launch each
    lag: int = 0
    # in the last ``tail`` blocks of one launch programs of down take ``tail_tiles`` tiles, a divisor of ``down_tiles``,
    # so that the end comes sooner after the last byte; 0: as everywhere
    tail: int = 0
    tail_tiles: int = 0
    # most that a thread of gate_up, or of the one launch, may take; 0: as many as it likes, with MXFP8 weights a rule
    registers: int = 0

    @classmethod
    def pick(
        cls,
        device: torch.device,
        tokens: int,
        top_k: int,
        experts: int,
        hidden: int,
        inter: int,
        *,
        base: str = "dense",
    ) -> MoEConfig:
        """The tuned entry for this device, shape and base ("dense" or "mxfp8"), bucketed on tokens, else a rule.

        The rule serves other shapes, and tokens past a table's end where blocks must grow.
        """
        config = _pick(device.type, device.index, tokens, top_k, experts, hidden, inter, base)
        return config if not config.lag or env.flag("JOIN") else replace(config, lag=0)

    @classmethod
    def heuristic(cls, tokens: int, top_k: int, experts: int, hidden: int, inter: int) -> MoEConfig:
        """A rule that fits any device: blocks near the mean rows of an expert, splits until the grid is large."""
        rows = tokens * top_k / max(experts, 1)
        block_m = min(128, max(16, triton.next_power_of_2(int(rows))))
        block_k = min(128, max(16, triton.next_power_of_2(hidden)))
        blocks = min(tokens * top_k, experts)
        tiles = triton.cdiv(2 * inter, 64) * blocks
        splits = 1
        while splits < 8 and tiles * splits < 1200 and hidden // (2 * splits) >= 4 * block_k:
            splits *= 2
        big = block_m >= 32
        return cls(
            block_m=block_m,
            rows="direct" if tokens * top_k <= 16 else "search" if tokens * top_k <= 128 else "plan",
            plan_warps=4 if tokens * top_k <= 1024 else 8,
            up_block_n=128 if big else 64,
            up_block_k=min(64, block_k) if big else block_k,
            up_stages=3,
            splits=1 if big else splits,
            act_block_i=min(64, max(16, triton.next_power_of_2(inter))),
            act_block_m=32,
            down_block_n=min(128 if big else 64, max(16, triton.next_power_of_2(hidden))),
            down_block_k=min(64, max(16, triton.next_power_of_2(inter))),
            down_warps=8 if big else 4,
            down_stages=4 if big else 2 if inter <= 512 else 3,
            down_tiles=8 if big or inter <= 512 else 2,
            down_whole=inter <= 512 and not big,
            combine_block_h=min(1024 if big else 256, triton.next_power_of_2(hidden)),
            combine_warps=8 if big else 4,
        )

    @classmethod
    def mxfp8_heuristic(cls, tokens: int, top_k: int, experts: int, hidden: int, inter: int) -> MoEConfig:
        """The same for MXFP8 weights.

        A plan always: the launch that normalises x carries it. Steps are as many bytes as a dense base's, and whole
        rows of h are kept where they fit, which the fp16 form of W2 needs.
        """
        dense = cls.heuristic(tokens, top_k, experts, hidden, inter)
        big = dense.block_m >= 64
        whole = inter <= 1024 and not big
        return replace(
            dense,
            block_m=min(dense.block_m, 64),
            rows="plan",
            up_block_n=128 if big else 64,
            up_block_k=min(128 if big else 256, max(32, triton.next_power_of_2(hidden))),
            up_warps=4,
            up_stages=3,
            splits=dense.splits if hidden // dense.splits >= 1024 else 1,
            down_block_n=min(64, max(16, triton.next_power_of_2(hidden))),
            down_block_k=32 if inter <= 32 else 64 if big or inter % 128 else 128,
            down_warps=4,
            down_stages=3 if whole else 4,
            down_tiles=8 if big else 4,
            down_whole=whole,
        )

    def candidates(self, base: str = "dense") -> Iterator[MoEConfig]:
        """Neighbours of this one, a group of fields at a time: what `bench/tune.py` tries."""
        for fields, choices in GROUPS[base]:
            for values in choices:
                neighbour = replace(self, **dict(zip(fields, values, strict=True)))
                if neighbour != self and neighbour.joins:
                    yield neighbour

    def summing_as(self, other: MoEConfig, *, base: str = "dense") -> MoEConfig:
        """This one with every sum in the order of ``other``, so that both give a row the same bits.

        ``splits`` orders the first product, whose shares are whole steps of ``up_block_k``; the number of tiles of I
        the adapters' second half; ``down_whole`` decides the form of MXFP8 weights; and blocks of 8 rows take another
        matrix instruction than larger ones, and single pairs none.
        """
        whole = other.down_whole if base == "mxfp8" else self.down_whole
        out = replace(self, splits=other.splits, act_block_i=other.act_block_i, down_whole=whole)
        if whole and not self.down_whole:
            out = replace(out, down_stages=2)  # steps of whole rows are larger ones
        if other.splits > 1 and self.up_block_k != other.up_block_k:
            stages = max(2, self.up_stages * self.up_block_k // other.up_block_k)  # of as much shared memory
            out = replace(out, up_block_k=other.up_block_k, up_stages=min(stages, self.up_stages))
        if self.rows == "direct" and other.rows != "direct":
            out = replace(out, rows="search")
        if self.rows != "direct" and other.rows == "direct":
            out = replace(out, rows="direct", wide=1, lora_wide=1, lag=0)
        if self.block_m < 16:
            out = replace(out, block_m=16, wide=1, lora_wide=1, registers=0)
        return out

    @property
    def act_rows(self) -> int:
        """The rows that a program of activate takes in a launch of its own: of a plan's block, or a part of one."""
        return min(self.act_block_m or self.block_m, self.block_m) if self.rows == "plan" else self.block_m

    @property
    def widest(self) -> int:
        """The most blocks that a program may take together, whatever adapters a call has."""
        return max(self.wide, self.lora_wide)

    @property
    def joins(self) -> bool:
        """Whether the launch form fits: one launch for the products needs a plan and one number of warps.

        With a negative lag a program would wait for later ones, which a GPU may never start; where ``tail_tiles`` is
        negative or does not divide ``down_tiles``, tiles of down would be left out.
        """
        one = self.up_warps == self.act_warps == self.down_warps
        narrow = self.tail_tiles == 0 or (self.tail_tiles > 0 and self.down_tiles % self.tail_tiles == 0)
        whole = self.tail >= 0 and narrow
        # activate of the last of ``wide`` blocks stands ``lag`` after it, down of all ``2 * lag`` after the first
        ahead = self.lag == 0 or self.lag >= self.widest
        powers = all(n > 0 and n & (n - 1) == 0 for n in (self.wide, self.lora_wide, self.act_block_m or 1))
        together = powers and (self.widest == 1 or (self.rows == "plan" and ahead))
        return together and (self.lag == 0 or (self.lag > 0 and self.rows == "plan" and one and whole))

    def blocks(self, pairs: int, experts: int) -> int:
        """The largest number of blocks that ``pairs`` routed pairs over ``experts`` experts can need.

        An expert of n rows has ``1 + (n - 1) // block_m`` of them: most come of a pair on each expert and whole blocks
        of the rest.
        """
        if self.rows != "plan":
            return pairs
        chosen = min(pairs, experts)
        return chosen + (pairs - chosen) // self.block_m


_Groups = tuple[tuple[tuple[str, ...], tuple[tuple, ...]], ...]
_DENSE: _Groups = (
    (("rows",), (("plan",), ("search",), ("direct",))),
    (("splits",), ((1,), (2,), (3,), (4,), (5,), (8,), (10,))),
    (
        ("rows", "lag", "splits"),
        (
            ("plan", 0, 1),
            ("plan", 4, 4),
            ("plan", 8, 2),
            ("plan", 8, 4),
            ("plan", 16, 2),
            ("plan", 16, 1),
            ("plan", 32, 1),
        ),
    ),
    (("lag",), ((2,), (4,), (6,), (8,), (12,), (16,), (24,), (32,))),
    (("splits", "up_stages"), ((3, 3), (4, 3), (5, 3))),  # more programs need room for more of them
    (
        ("up_block_n", "up_block_k", "up_warps", "up_stages"),
        (
            (64, 64, 4, 6),
            (64, 128, 4, 3),
            (64, 128, 4, 4),
            (64, 256, 4, 3),
            (128, 64, 4, 4),
            (128, 64, 8, 4),
            (128, 128, 8, 3),
        ),
    ),
    (("act_block_i", "act_warps"), ((16, 4), (32, 4), (64, 4), (64, 8), (128, 8))),
    (
        ("down_whole", "down_block_n", "down_warps", "down_stages", "down_tiles"),
        (
            (False, 64, 4, 3, 1),
            (False, 64, 4, 3, 2),
            (False, 64, 4, 5, 1),
            (False, 128, 4, 3, 1),
            (False, 128, 8, 3, 2),
            (True, 64, 4, 2, 4),
            (True, 64, 4, 2, 8),
            (True, 64, 4, 3, 8),
        ),
    ),
    (("combine_block_h", "combine_warps"), ((256, 4), (512, 4), (1024, 8))),
    (("plan_warps", "plan_experts"), ((2, 1), (4, 1), (4, 2), (8, 2))),
    (
        ("block_m", "wide", "registers"),  # wide tiles take registers, which programs run short of
        (
            (8, 1, 0),
            (8, 2, 0),
            (8, 2, 128),
            (8, 4, 0),
            (8, 4, 128),
            (8, 8, 0),
            (8, 8, 128),
            (16, 1, 0),
            (16, 2, 0),
            (16, 4, 0),
            (16, 4, 128),
            (32, 1, 0),
            (64, 1, 0),
            (128, 1, 0),
        ),
    ),
    (("lora_wide",), ((1,), (2,), (4,))),
)
_MXFP8: _Groups = (
    (("lag", "splits"), ((0, 1), (0, 2), (4, 2), (8, 2), (16, 1), (32, 1), (16, 2))),
    (("splits",), ((1,), (2,), (4,), (5,))),
    (("up_block_k", "up_stages"), ((256, 2), (256, 3), (256, 4), (128, 4), (128, 6))),
    (("act_block_i", "act_warps"), ((32, 4), (64, 4), (64, 8))),
    (
        ("down_block_n", "down_block_k", "down_stages", "down_tiles"),
        (
            (64, 64, 2, 4),
            (64, 64, 3, 2),
            (64, 64, 3, 4),
            (64, 64, 3, 8),
            (64, 64, 4, 8),
            (64, 128, 3, 4),
            (128, 64, 2, 4),
        ),
    ),
    (("tail", "tail_tiles"), ((0, 0), (16, 1), (16, 2), (32, 4))),
    (("combine_block_h", "combine_warps"), ((256, 4), (512, 4))),
    (("block_m", "registers"), ((8, 128), (8, 168), (16, 0))),
)
GROUPS: dict[str, _Groups] = {"dense": _DENSE, "mxfp8": _MXFP8}


def _in_little_shared_memory(ruled: MoEConfig, inter: int, base: str) -> MoEConfig:
    """A rule's configuration for 227 KiB of shared memory in 99 KiB, as sm_120 and sm_89 have.

    Whole rows of h stay there under MXFP8 weights where they are short: by I alone, since `summing_as` gives every
    size the same form of W2, for which blocks are small at the sizes that do not ask for it too.
    """
    if base == "mxfp8":
        short = inter <= 320
        block_m = min(ruled.block_m, 32) if short else ruled.block_m
        return replace(ruled, down_stages=2, down_whole=ruled.down_whole and short, block_m=block_m)
    return replace(ruled, down_stages=2) if ruled.down_stages > 3 else ruled


@functools.lru_cache(maxsize=4096)
def _pick(
    kind: str, index: int | None, tokens: int, top_k: int, experts: int, hidden: int, inter: int, base: str
) -> MoEConfig:
    rule = MoEConfig.heuristic if base == "dense" else MoEConfig.mxfp8_heuristic
    ruled = rule(tokens, top_k, experts, hidden, inter)
    if kind == "cuda":
        if torch.cuda.is_available() and shared_memory(index) < 200 << 10:
            ruled = _in_little_shared_memory(ruled, inter, base)
        name = torch.cuda.get_device_name(index)
        tuned = tuning.lookup(name, OPS[base], tokens, top_k=top_k, experts=experts, hidden=hidden, intermediate=inter)
        if tuned is not None:
            config = MoEConfig(**tuned)
            if not config.joins:
                raise ValueError(
                    f"MoEConfig.pick: the table of {name} for {OPS[base]} holds a launch that does not fit: {config}"
                )
            # past a table's end its last entry is small: it would read an expert once for every few of many rows
            return config if ruled.block_m <= max(16, config.block_m) else ruled
    return ruled
