"""The plan of a layer, built on the device: routed pairs sorted by expert, in blocks of at most ``BLOCK_M`` rows.

    topk_ids       (P,)                   int32  routed experts, P = tokens * top_k; invalid ids are left out
    expert_map     (E_GLOBAL,)            int32  optional: global expert -> local, -1 for another rank's
    order          (MAX_BLOCKS, BLOCK_M)  int32  the routed pairs of each block, ascending; -1 in the rows left over
    block_experts  (MAX_BLOCKS,)          int32  the expert of each block, ascending; -1 past the last

Every program counts all experts for itself (P is small and hot in L2) and then writes the rows of its own ones. So
the plan takes one launch without any exchange between programs, and is the same in every run. For few pairs there is
no plan: each program of `gate_up` finds its block's rows among all pairs (`pipeline.gathered_rows`) and writes both
tables for `down`, with a block for each pair.
"""

import torch
import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.pipeline import let_next_start, local_expert, wait_for_previous


@triton.jit(do_not_specialize=["P", "MAX_BLOCKS"])
def _plan_kernel(
    topk_ids_ptr,  # (P,)
    expert_map_ptr,  # (E_GLOBAL,)
    order_ptr,  # (MAX_BLOCKS, BLOCK_M)
    block_experts_ptr,  # (MAX_BLOCKS,)
    P,
    E_GLOBAL,
    E,
    MAX_BLOCKS,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EXPERTS_PER_PROGRAM: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(E / EXPERTS_PER_PROGRAM),): each program writes the rows and blocks of its own experts."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    program = tl.program_id(0)
    offs_p = tl.arange(0, BLOCK_P)
    offs_e = tl.arange(0, BLOCK_E)  # BLOCK_E > E: the last bin takes the pairs that are left out

    counts = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, P, BLOCK_P):
        pair = first + offs_p
        expert = local_expert(topk_ids_ptr, expert_map_ptr, pair, pair < P, E_GLOBAL, E, HAS_MAP)
        counts += tl.histogram(tl.where(expert >= 0, expert, BLOCK_E - 1), BLOCK_E)
    counts = tl.where(offs_e < E, counts, 0)
    blocks = (counts + (BLOCK_M - 1)) // BLOCK_M
    block = tl.cumsum(blocks, 0) - blocks

    if program == 0:
        used = tl.sum(blocks, 0)
        for first in range(used, MAX_BLOCKS, BLOCK_E):
            tl.store(block_experts_ptr + first + offs_e, -1, mask=first + offs_e < MAX_BLOCKS)

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
                tl.store(block_experts_ptr + block_e + first + offs_e, e, mask=first + offs_e < blocks_e)


def build_plan(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    block_m: int,
    order: torch.Tensor,
    block_experts: torch.Tensor,
    *,
    num_warps: int,
    experts_per_program: int,
    pdl: bool,
) -> None:
    """Launch the plan of ``topk_ids`` (T, K) into ``order`` and ``block_experts``, laid out as above."""
    pairs = topk_ids.numel()
    extra = {"launch_pdl": True} if pdl else {}
    _plan_kernel[(triton.cdiv(experts, experts_per_program),)](
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        order,
        block_experts,
        pairs,
        0 if expert_map is None else expert_map.numel(),
        experts,
        block_experts.numel(),
        BLOCK_M=block_m,
        BLOCK_P=min(4096, max(16, triton.next_power_of_2(pairs))),
        BLOCK_E=triton.next_power_of_2(experts + 1),
        EXPERTS_PER_PROGRAM=experts_per_program,
        HAS_MAP=expert_map is not None,
        PDL=pdl,
        num_warps=num_warps,
        **extra,
    )
