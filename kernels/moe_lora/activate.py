"""Second launch: adds up gate and up, lets the adapters in, applies SwiGLU, and starts the adapters' second half.

    g, u  = sum over splits of gu, plus B13 @ t in the rows of each adapter       fp32
    h     = silu(g) * u                                                            rounded once, to x's dtype
    s[i]  = A2[:, tile i of I] @ h[tile i]                                         fp32, one plane per tile of I

    gu  (SPLITS, P, 2I)      t  (SPLITS, P|T, NA*R)      b  (L, E, I, R), up's ``up_b_offset`` elements further
    a2  (L, E, R, I)         h  (P, I)                   s  (TILES, P, R)

t stays in fp32: its products with B run as three tf32 ones, which together carry fp32's precision.
"""

import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.pipeline import (
    adapter_slot,
    block_rows,
    let_next_start,
    live_rank,
    load_ranks,
    wait_for_previous,
)


@triton.jit
def _load_t(t_ptrs, mask_rows, r, live, stride_split, RANK: tl.constexpr, SPLITS: tl.constexpr):
    """fp32 (BLOCK_M, BLOCK_R): the planes of t added in their order."""
    t = load_ranks(t_ptrs, mask_rows, r, live, RANK)
    for split in tl.static_range(1, SPLITS):
        t += load_ranks(t_ptrs + split * stride_split, mask_rows, r, live, RANK)
    return t


@triton.jit(do_not_specialize=["T", "SLOTS", "MAX_BLOCKS"])
def _activate_kernel(
    gu_ptr,  # (SPLITS, P, 2I)
    t_ptr,  # (SPLITS, P|T, NA * R)
    b_ptr,  # (L, E, I, R)
    a2_ptr,  # (L, E, R, I)
    h_ptr,  # (P, I)
    s_ptr,  # (TILES, P, R)
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
    up_b_offset,
    stride_bl,
    stride_be,
    stride_bi,
    stride_al,
    stride_ae,
    stride_ar,
    I: tl.constexpr,
    RANK: tl.constexpr,
    NA: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED_A: tl.constexpr,
    HAS_MAP: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(I / BLOCK_I), MAX_BLOCKS)."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    P = (T * TOP_K).to(tl.int64)
    i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_i = i < I
    expert, pair, mask_m = block_rows(
        topk_ids_ptr, expert_map_ptr, order_ptr, table_ptr, block, E_GLOBAL, E, MAX_BLOCKS, BLOCK_M, HAS_MAP, DIRECT
    )
    wait_for_previous(PDL)
    let_next_start(PDL)
    if expert < 0:
        return

    token = pair // TOP_K
    pair = pair.to(tl.int64)
    mask = mask_m[:, None] & mask_i[None, :]
    gate_ptrs = gu_ptr + pair[:, None] * (2 * I) + i[None, :]
    g = tl.load(gate_ptrs, mask=mask, other=0.0)
    u = tl.load(gate_ptrs + I, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        plane = gate_ptrs + split * P * (2 * I)
        g += tl.load(plane, mask=mask, other=0.0)
        u += tl.load(plane + I, mask=mask, other=0.0)

    if RANK > 0:
        slot_m = adapter_slot(lora_ids_ptr, token, mask_m, SLOTS)
        t_row = token.to(tl.int64) if SHARED_A else pair
        t_plane = (T.to(tl.int64) if SHARED_A else P) * (NA * RANK)
        for slot in range(SLOTS):
            live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
            mine = (slot_m == slot) & (live > 0)
            if tl.sum(mine.to(tl.int32), 0) > 0:
                dg = tl.zeros((BLOCK_I, BLOCK_M), tl.float32)
                du = tl.zeros((BLOCK_I, BLOCK_M), tl.float32)
                b_rows = b_ptr + tl.cast(slot, tl.int64) * stride_bl + expert.to(tl.int64) * stride_be
                b_rows = b_rows + i.to(tl.int64)[:, None] * stride_bi
                t_rows = t_ptr + t_row[:, None] * (NA * RANK)
                for first in tl.range(0, live, BLOCK_R, num_stages=1):
                    r = first + tl.arange(0, BLOCK_R)
                    bg = load_ranks(b_rows + r[None, :], mask_i, r, live, RANK).to(tl.float32)
                    bu = load_ranks(b_rows + up_b_offset + r[None, :], mask_i, r, live, RANK).to(tl.float32)
                    tg = _load_t(t_rows + r[None, :], mine, r, live, t_plane, RANK, SPLITS)
                    dg = tl.dot(bg, tl.trans(tg), dg, input_precision="tf32x3")
                    if NA == 2:
                        tg = _load_t(t_rows + RANK + r[None, :], mine, r, live, t_plane, RANK, SPLITS)
                    du = tl.dot(bu, tl.trans(tg), du, input_precision="tf32x3")
                # a row without this adapter keeps its bits: nothing is added to it, not even zero
                g = tl.where(mine[:, None], g + tl.trans(dg), g)
                u = tl.where(mine[:, None], u + tl.trans(du), u)

    h = (g * tl.sigmoid(g) * u).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + pair[:, None] * I + i[None, :], h, mask=mask)

    if RANK > 0:
        for slot in range(SLOTS):
            live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
            mine = (slot_m == slot) & (live > 0)
            if tl.sum(mine.to(tl.int32), 0) > 0:
                for first in tl.range(0, live, BLOCK_R, num_stages=1):
                    r = first + tl.arange(0, BLOCK_R)
                    mask_r = r < live
                    a_ptrs = a2_ptr + tl.cast(slot, tl.int64) * stride_al + expert.to(tl.int64) * stride_ae
                    a_ptrs = a_ptrs + r.to(tl.int64)[:, None] * stride_ar + i[None, :]
                    a = tl.load(a_ptrs, mask=mask_r[:, None] & mask_i[None, :], other=0.0)
                    s = tl.trans(tl.dot(a, tl.trans(h)))
                    out = s_ptr + (tile * P + pair)[:, None] * RANK + r[None, :]
                    tl.store(out, s, mask=mine[:, None] & mask_r[None, :])
