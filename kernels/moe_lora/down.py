"""Third launch: every expert's output, ``y = W2 @ h + B2 @ s``, one fp32 row for each routed pair.

    w2  (E, H, I)       as x     h  (P, I)  as x     s  (TILES, P, R)  fp32, planes added in their order
    b2  (L, E, H, R)    as x     y  (P, H)  fp32

Where B2 is shared over experts, `combine` applies it once a token instead.
"""

import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.pipeline import (
    adapter_slot,
    block_rows,
    dot,
    dot_fp32,
    let_next_start,
    live_rank,
    load_ranks,
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
    table_ptr,  # (3, MAX_BLOCKS)
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
    DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(H / BLOCK_N), MAX_BLOCKS)."""
    EVEN_K: tl.constexpr = I % BLOCK_K == 0
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert, pair, mask_m = block_rows(
        topk_ids_ptr, expert_map_ptr, order_ptr, table_ptr, block, E_GLOBAL, E, MAX_BLOCKS, BLOCK_M, HAS_MAP, DIRECT
    )
    P = tl.cast(T * TOP_K, tl.int64)
    e = expert.to(tl.int64)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = n < H
    token = pair // TOP_K
    pair = pair.to(tl.int64)
    zero = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if RANK > 0:
        slot_m = adapter_slot(lora_ids_ptr, token, mask_m & (expert >= 0), SLOTS)
        first_slot = tl.max(slot_m, 0)
        live_0 = live_rank(ranks_ptr, enabled_ptr, first_slot, RANK)
        r_0 = tl.arange(0, BLOCK_R)
        b_rows = b2_ptr + tl.maximum(first_slot, 0).to(tl.int64) * stride_bl + e * stride_be
        b_0 = load_ranks(b_rows + n.to(tl.int64)[:, None] * stride_bn + r_0[None, :], mask_n, r_0, live_0, RANK)

    wait_for_previous(PDL)
    let_next_start(PDL)
    if expert >= 0:
        if RANK > 0:
            mine_0 = (slot_m == first_slot) & (live_0 > 0)
            s_0 = load_s(s_ptr, pair, mine_0, r_0, live_0, P, RANK, TILES)

        offs_k = tl.arange(0, BLOCK_K)
        w_rows = w2_ptr + e * stride_we + n.to(tl.int64) * stride_wn
        w_ptrs = w_rows[:, None] + offs_k[None, :]
        h_ptrs = h_ptr + pair[:, None] * I + offs_k[None, :]
        acc = zero
        for k in range(0, I, BLOCK_K):
            if EVEN_K:
                if H % BLOCK_N == 0:
                    w = tl.load(w_ptrs)
                else:
                    w = tl.load(w_ptrs, mask=mask_n[:, None], other=0.0)
                h = tl.load(h_ptrs, mask=mask_m[:, None], other=0.0)
            else:
                mask_k = k + offs_k < I
                w = tl.load(w_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
                h = tl.load(h_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            acc = dot(w, tl.trans(h), acc, INTERPRETED)
            w_ptrs += BLOCK_K
            h_ptrs += BLOCK_K
        y = tl.trans(acc)

        if RANK > 0:
            # a row without an adapter keeps its bits: nothing is added to it, not even zero
            y = tl.where(mine_0[:, None], y + tl.trans(dot_fp32(b_0, tl.trans(s_0), zero, INTERPRETED)), y)
            if MORE:
                for slot in range(SLOTS):
                    live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
                    mine = (slot_m == slot) & (live > 0)
                    if tl.sum(mine.to(tl.int32), 0) > 0:
                        b_rows = b2_ptr + tl.cast(slot, tl.int64) * stride_bl + e * stride_be
                        b_rows = b_rows + n.to(tl.int64)[:, None] * stride_bn
                        done = tl.where(slot == first_slot, BLOCK_R, 0)
                        for first in tl.range(done, live, BLOCK_R, num_stages=1):
                            r = first + r_0
                            b = load_ranks(b_rows + r[None, :], mask_n, r, live, RANK)
                            s = load_s(s_ptr, pair, mine, r, live, P, RANK, TILES)
                            delta = tl.trans(dot_fp32(b, tl.trans(s), zero, INTERPRETED))
                            y = tl.where(mine[:, None], y + delta, y)

        tl.store(y_ptr + pair[:, None] * H + n[None, :], y, mask=mask_m[:, None] & mask_n[None, :])
