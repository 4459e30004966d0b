"""Third launch: every expert's output, ``y = W2 @ h + B2 @ s``, one fp32 row for each routed pair.

    w2  (E, H, I)       as x     h  (P, I)  as x     s  (TILES, P, R)  fp32, planes added in their order
    b2  (L, E, H, R)    as x     y  (P, H)  fp32

Where B2 is shared over experts, `combine` applies it once a token instead. The first
programs start while the first product ends: until they may read h, their tiles of W2 are brought into L2.
"""

import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.pipeline import (
    adapter_slot,
    dot,
    dot_fp32,
    let_next_start,
    live_rank,
    load_ranks,
    local_expert,
    planned_rows,
    prefetch,
    wait_for_previous,
)


@triton.jit
def load_s(s_ptr, pair, mask_rows, r, live, P, RANK: tl.constexpr, TILES: tl.constexpr):
    """fp32 (BLOCK_M, BLOCK_R): the planes of s added in their order."""
    s_ptrs = s_ptr + pair[:, None] * RANK + r[None, :]
    s = load_ranks(s_ptrs, mask_rows, r, live, RANK)
    for tile in tl.static_range(1, TILES):
        s += load_ranks(s_ptrs + tile * P * RANK, mask_rows, r, live, RANK)
    return s


@triton.jit(do_not_specialize=["T", "SLOTS", "MAX_BLOCKS"])
def _down_kernel(
    h_ptr,  # (P, I)
    w2_ptr,  # (E, H, I)
    s_ptr,  # (TILES, P, R)
    b2_ptr,  # (L, E, H, R)
    y_ptr,  # (P, H)
    topk_ids_ptr,  # (P,)
    expert_map_ptr,  # (E_GLOBAL,)
    order_ptr,  # (P,)
    table_ptr,  # (3 * MAX_BLOCKS + 1,)
    lora_ids_ptr,  # (T,)
    ranks_ptr,  # (L,)
    enabled_ptr,  # (L,)
    T,
    E_GLOBAL,
    E,
    SLOTS,
    MAX_BLOCKS,
    stride_we,
    stride_wn,
    stride_bl,
    stride_be,
    stride_bn,
    H: tl.constexpr,
    I: tl.constexpr,
    RANK: tl.constexpr,  # 0: no adapters, or a B2 that `combine` applies
    TILES: tl.constexpr,
    TOP_K: tl.constexpr,
    MORE: tl.constexpr,  # more than one slot, or a rank above BLOCK_R
    HAS_MAP: tl.constexpr,
    INLINE_PLAN: tl.constexpr,
    PREFETCH: tl.constexpr,  # programs that prefetch; 0 for none
    TILES_PER_PROGRAM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(H / (BLOCK_N * TILES_PER_PROGRAM)), MAX_BLOCKS)."""
    # one loop over (row tile, share of I): the loads of a tile are under way while the one before it is finished
    STEPS: tl.constexpr = (I + BLOCK_K - 1) // BLOCK_K
    EVEN_K: tl.constexpr = I % BLOCK_K == 0
    EVEN_N: tl.constexpr = H % (BLOCK_N * TILES_PER_PROGRAM) == 0
    first_tile = tl.program_id(0) * TILES_PER_PROGRAM
    block = tl.program_id(1)
    if PREFETCH > 0:
        if (block * tl.num_programs(0) + tl.program_id(0) < PREFETCH) & (first_tile * BLOCK_N + BLOCK_N <= H):
            if INLINE_PLAN:  # whether or not pair `block` leads its block, some program needs this expert's rows
                soon = local_expert(topk_ids_ptr, expert_map_ptr, block, block < T * TOP_K, E_GLOBAL, E, HAS_MAP)
            else:
                soon = tl.load(table_ptr + block)
            if soon >= 0:
                w_tile = w2_ptr + soon.to(tl.int64) * stride_we + (first_tile * BLOCK_N).to(tl.int64) * I
                prefetch(w_tile, BLOCK_N * I * (w2_ptr.dtype.element_ty.primitive_bitwidth // 8))
    if INLINE_PLAN:  # there `gate_up` wrote the table
        wait_for_previous(PDL)
    expert, pair, mask_m = planned_rows(order_ptr, table_ptr, block, MAX_BLOCKS, BLOCK_M)
    P = tl.cast(T * TOP_K, tl.int64)
    e = expert.to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    r_0 = tl.arange(0, BLOCK_R)
    token = pair // TOP_K
    pair = pair.to(tl.int64)
    zero = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if RANK > 0:
        slot_m = adapter_slot(lora_ids_ptr, token, mask_m & (expert >= 0), SLOTS)
        first_slot = tl.max(slot_m, 0)
        live_0 = live_rank(ranks_ptr, enabled_ptr, first_slot, RANK)
        mine_0 = (slot_m == first_slot) & (live_0 > 0)
        b_0 = b2_ptr + tl.maximum(first_slot, 0).to(tl.int64) * stride_bl + e * stride_be

    if not INLINE_PLAN:
        wait_for_previous(PDL)
    let_next_start(PDL)
    if expert >= 0:
        if RANK > 0:
            s_0 = tl.trans(load_s(s_ptr, pair, mine_0, r_0, live_0, P, RANK, TILES))
        h_rows = h_ptr + pair * I
        w_expert = w2_ptr + e * stride_we
        acc = zero
        for step in range(STEPS * TILES_PER_PROGRAM):
            n = (first_tile + step // STEPS) * BLOCK_N + offs_n
            k = (step % STEPS) * BLOCK_K + offs_k
            mask_n = n < H
            w_ptrs = w_expert + n.to(tl.int64)[:, None] * stride_wn + k[None, :]
            h_ptrs = h_rows[:, None] + k[None, :]
            if EVEN_K and EVEN_N:
                w = tl.load(w_ptrs)
                h = tl.load(h_ptrs, mask=mask_m[:, None], other=0.0)
            else:
                mask_k = k < I
                w = tl.load(w_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
                h = tl.load(h_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            acc = dot(w, tl.trans(h), acc, INTERPRETED)
            if step % STEPS == STEPS - 1:
                y = tl.trans(acc)
                if RANK > 0:
                    b_offsets = n.to(tl.int64) * stride_bn
                    b = load_ranks(b_0 + b_offsets[:, None] + r_0[None, :], mask_n, r_0, live_0, RANK)
                    # a row without an adapter keeps its bits: nothing is added to it, not even zero
                    y = tl.where(mine_0[:, None], y + tl.trans(dot_fp32(b, s_0, zero, INTERPRETED)), y)
                    if MORE:
                        for slot in range(SLOTS):
                            live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
                            mine = (slot_m == slot) & (live > 0)
                            if tl.sum(mine.to(tl.int32), 0) > 0:
                                b_rows = b2_ptr + tl.cast(slot, tl.int64) * stride_bl + e * stride_be + b_offsets
                                done = tl.where(slot == first_slot, BLOCK_R, 0)
                                for first in tl.range(done, live, BLOCK_R, num_stages=1):
                                    r = first + r_0
                                    b = load_ranks(b_rows[:, None] + r[None, :], mask_n, r, live, RANK)
                                    s = tl.trans(load_s(s_ptr, pair, mine, r, live, P, RANK, TILES))
                                    y = tl.where(mine[:, None], y + tl.trans(dot_fp32(b, s, zero, INTERPRETED)), y)
                tl.store(y_ptr + pair[:, None] * H + n[None, :], y, mask=mask_m[:, None] & mask_n[None, :])
                acc = zero
