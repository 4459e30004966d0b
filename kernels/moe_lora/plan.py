"""The plan of a layer, built on the device: routed pairs sorted by expert, in blocks of at most ``BLOCK_M`` rows.

    topk_ids       (P,)                   int32  routed experts, P = tokens * top_k; invalid ids are left out
    expert_map     (E_GLOBAL,)            int32  optional: global expert -> local, -1 for another rank's
    order          (MAX_BLOCKS, BLOCK_M)  int32  the routed pairs of each block, ascending; -1 in the rows left over
    block_experts  (MAX_BLOCKS,)          int32  the expert of each block, ascending; -1 past the last
    widths         (MAX_BLOCKS,)          int32  with WIDE above 1: how many blocks of the expert the programs of this
                                                 one take together, up to WIDE; 0 where an earlier one takes it

Every program counts all experts for itself (P is small and hot in L2) and then writes the rows of its own ones. So
the plan takes one launch without any exchange between programs, and is the same in every run. Beyond `COUNT_FIRST`
pairs that would be most of its time, so a launch before it counts, an expert a program. For few pairs there is no
plan: each program of `gate_up` finds its block's rows among all pairs (`pipeline.gathered_rows`) and writes both tables
for `down`, with a block for each pair.

MXFP8 weights are multiplied with fp16 activations: where x is bf16, the same launch normalises its rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.pipeline import let_next_start, local_expert, wait_for_previous
from beam_moe.kernels.mxfp8.decode_block import normalize_row

AT_ONCE = 4096  # pairs of one step
COUNT_FIRST = 4096  # pairs beyond which a launch of its own counts them


@triton.jit(do_not_specialize=["P"])
def _count_kernel(
    topk_ids_ptr,  # (P,)
    expert_map_ptr,  # (E_GLOBAL,)
    totals_ptr,  # (E,)
    P,
    E_GLOBAL,
    E,
    BLOCK_P: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (E,): each program counts the pairs of one expert."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    e = tl.program_id(0)
    offs_p = tl.arange(0, BLOCK_P)
    mine = tl.zeros((BLOCK_P,), tl.int32)
    for first in range(0, P, BLOCK_P):
        pair = first + offs_p
        expert = local_expert(topk_ids_ptr, expert_map_ptr, pair, pair < P, E_GLOBAL, E, HAS_MAP)
        mine += (expert == e).to(tl.int32)
    tl.store(totals_ptr + e, tl.sum(mine, 0))


@triton.jit(do_not_specialize=["P", "MAX_BLOCKS", "programs"])
def _plan_kernel(
    topk_ids_ptr,  # (P,)
    expert_map_ptr,  # (E_GLOBAL,)
    order_ptr,  # (MAX_BLOCKS, BLOCK_M)
    block_experts_ptr,  # (MAX_BLOCKS,)
    widths_ptr,  # (MAX_BLOCKS,)
    P,
    E_GLOBAL,
    E,
    MAX_BLOCKS,
    counts_ptr,  # (2 * MAX_BLOCKS + 1,)
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EXPERTS_PER_PROGRAM: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
    x_ptr=None,  # (T, H), where its rows are normalised too
    xn_ptr=None,  # (T, H) fp16
    words_ptr=None,  # (T,)
    programs=0,
    stride_xt=0,
    H: tl.constexpr = 0,
    BLOCK_H: tl.constexpr = 0,  # 0: a plan and nothing else
    COUNTED: tl.constexpr = False,  # the 2 * MAX_BLOCKS + 1 counts of the joined launch are set to zero
    totals_ptr=None,  # (E,), with TOTALS: the pairs of each expert
    TOTALS: tl.constexpr = False,
):
    """Grid (ceil(E / EXPERTS_PER_PROGRAM),): each program writes the rows and blocks of its own experts.

    With BLOCK_H the grid is (programs + T,): a program behind the plan's own (none, where no plan is wanted) normalises
    a row of x.
    """
    wait_for_previous(PDL)
    let_next_start(PDL)
    program = tl.program_id(0)
    if BLOCK_H > 0:
        if program >= programs:
            row = (program - programs).to(tl.int64)
            word = normalize_row(x_ptr + row * stride_xt, xn_ptr + row * H, H, 1, BLOCK_H)
            tl.store(words_ptr + row, word)
            return
    offs_p = tl.arange(0, BLOCK_P)
    offs_e = tl.arange(0, BLOCK_E)

    if TOTALS:
        counts = tl.load(totals_ptr + offs_e, mask=offs_e < E, other=0)
    else:
        counts = tl.zeros((BLOCK_E,), tl.int32)
        for first in range(0, P, BLOCK_P):
            pair = first + offs_p
            expert = local_expert(topk_ids_ptr, expert_map_ptr, pair, pair < P, E_GLOBAL, E, HAS_MAP)
            counts += tl.histogram(tl.maximum(expert, 0), BLOCK_E, mask=expert >= 0)
    blocks = (counts + (BLOCK_M - 1)) // BLOCK_M
    block = tl.cumsum(blocks, 0) - blocks

    if program == 0:
        if COUNTED:
            for first in range(0, 2 * MAX_BLOCKS + 1, BLOCK_E):
                tl.store(counts_ptr + first + offs_e, 0, mask=first + offs_e < 2 * MAX_BLOCKS + 1)
        used = tl.sum(blocks, 0)
        for first in range(used, MAX_BLOCKS, BLOCK_E):
            tl.store(block_experts_ptr + first + offs_e, -1, mask=first + offs_e < MAX_BLOCKS)
            if WIDE > 1:
                tl.store(widths_ptr + first + offs_e, 0, mask=first + offs_e < MAX_BLOCKS)

    for e in range(program * EXPERTS_PER_PROGRAM, tl.minimum((program + 1) * EXPERTS_PER_PROGRAM, E)):
        own = offs_e == e
        count_e = tl.sum(tl.where(own, counts, 0), 0)
        if count_e > 0:
            block_e = tl.sum(tl.where(own, block, 0), 0)
            blocks_e = (count_e + BLOCK_M - 1) // BLOCK_M
            row = order_ptr + block_e.to(tl.int64) * BLOCK_M
            for first in range(0, P, BLOCK_P):
                pair = first + offs_p
                expert = local_expert(topk_ids_ptr, expert_map_ptr, pair, pair < P, E_GLOBAL, E, HAS_MAP)
                mine = expert == e
                rank = tl.cumsum(mine.to(tl.int32), 0)
                tl.store(row + rank - 1, pair, mask=mine)
                row += tl.sum(mine.to(tl.int32), 0)
            over = tl.arange(0, BLOCK_M)
            tl.store(row + over, -1, mask=count_e + over < blocks_e * BLOCK_M)
            for first in range(0, blocks_e, BLOCK_E):
                at = first + offs_e
                tl.store(block_experts_ptr + block_e + at, e, mask=at < blocks_e)
                if WIDE > 1:
                    width = tl.where(at % WIDE == 0, tl.minimum(blocks_e - at, WIDE), 0)
                    tl.store(widths_ptr + block_e + at, width, mask=at < blocks_e)


def totals_needed(pairs: int, experts: int) -> int:
    """Elements of ``totals`` for `build_plan`."""
    return experts if pairs > COUNT_FIRST else 0


def build_plan(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    block_m: int,
    order: torch.Tensor,
    block_experts: torch.Tensor,
    widths: torch.Tensor,
    counts: torch.Tensor,
    totals: torch.Tensor,
    *,
    wide: int,
    num_warps: int,
    experts_per_program: int,
    pdl: bool,
    planned: bool = True,
    x: torch.Tensor | None = None,
    xn: torch.Tensor | None = None,
    words: torch.Tensor | None = None,
) -> None:
    """Launch the plan of ``topk_ids`` (T, K) into ``order``, ``block_experts`` and, with ``wide`` above 1, ``widths``,
    laid out as above; zero ``counts``. ``totals`` int32, of `totals_needed` elements, is
    used beyond `COUNT_FIRST` pairs.

    With ``x`` (T, H), of inner stride 1, further programs of the same launch write its rows' fp16 images to ``xn``
    (T, H) and their words to ``words`` int32 (T,), as `normalize_rows` does; without ``planned`` they are alone.
    """
    pairs = topk_ids.numel()
    launch = {"launch_pdl": True} if pdl else {}
    extra: dict[str, Any] = {}
    programs = triton.cdiv(experts, experts_per_program) if planned else 0
    rows = 0
    if x is not None:
        rows, hidden = x.shape
        block_h = min(16384, max(16, triton.next_power_of_2(hidden)))
        num_warps = max(num_warps, min(16, block_h // 1024))
        extra |= {"x_ptr": x, "xn_ptr": xn, "words_ptr": words, "programs": programs}
        extra |= {"stride_xt": x.stride(0), "H": hidden, "BLOCK_H": block_h}
    emap = topk_ids if expert_map is None else expert_map
    e_global = 0 if expert_map is None else expert_map.numel()
    common: dict[str, Any] = dict(
        BLOCK_P=min(AT_ONCE, max(16, triton.next_power_of_2(pairs))), HAS_MAP=expert_map is not None, PDL=pdl, **launch
    )
    if planned and pairs > COUNT_FIRST:
        _count_kernel[(experts,)](topk_ids, emap, totals, pairs, e_global, experts, num_warps=8, **common)
        extra |= {"totals_ptr": totals, "TOTALS": True}
    _plan_kernel[(programs + rows,)](
        topk_ids,
        emap,
        order,
        block_experts,
        widths,
        pairs,
        e_global,
        experts,
        block_experts.numel(),
        counts,
        WIDE=wide,
        BLOCK_M=block_m,
        BLOCK_E=max(32, triton.next_power_of_2(experts)),
        EXPERTS_PER_PROGRAM=experts_per_program,
        COUNTED=counts.numel() > 0,
        num_warps=num_warps,
        **common,
        **extra,
    )
