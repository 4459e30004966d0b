"""Second launch: adds up gate and up, lets the adapters in, applies SwiGLU, and starts the adapters' second half.

    g, u  = sum over splits of gu, plus B13 @ t in the rows of each adapter       fp32
    h     = silu(g) * u                                                            rounded once, to x's dtype
    s[i]  = A2[:, tile i of I] @ h[tile i]                                         fp32, one plane per tile of I

    gu  (SPLITS, P, 2I)      t  (SPLITS, P|T, NA*R)      b  (L, E, I, R), up's ``up_b_offset`` elements further
    a2  (L, E, R, I)         h  (P, I)                   s  (TILES, P, R)

t keeps fp32's precision through its product with B. What does not depend on the launch before (the block's rows, the
factors of its first adapter) is loaded while that one drains.
"""

import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.pipeline import (
    adapter_slot,
    block_rows,
    count_up,
    dot,
    dot_fp32,
    let_next_start,
    live_rank,
    load_ranks,
    local_expert,
    part_rows,
    wait_for_count,
    wait_for_previous,
)


@triton.jit
def _load_t(t_ptrs, mask_rows, r, live, stride_split, RANK: tl.constexpr, SPLITS: tl.constexpr):
    """fp32 (BLOCK_M, BLOCK_R): the planes of t added in their order."""
    t = load_ranks(t_ptrs, mask_rows, r, live, RANK)
    for split in tl.static_range(1, SPLITS):
        t += load_ranks(t_ptrs + split * stride_split, mask_rows, r, live, RANK)
    return t


@triton.jit
def _adapt(
    g, u, bg, bu, t_rows, t_plane, mine, r, live,
    RANK: tl.constexpr, NA: tl.constexpr, SPLITS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Gate and up with one adapter's B13 @ t added in its rows."""
    zero = tl.zeros((bg.shape[0], g.shape[0]), tl.float32)
    t = _load_t(t_rows + r[None, :], mine, r, live, t_plane, RANK, SPLITS)
    dg = dot_fp32(bg, tl.trans(t), zero, INTERPRETED)
    if NA == 2:
        t = _load_t(t_rows + RANK + r[None, :], mine, r, live, t_plane, RANK, SPLITS)
    du = dot_fp32(bu, tl.trans(t), zero, INTERPRETED)
    # a row without this adapter keeps its bits: nothing is added to it, not even zero
    return tl.where(mine[:, None], g + tl.trans(dg), g), tl.where(mine[:, None], u + tl.trans(du), u)


@triton.jit
def _activate_row(
    tile, pair, gu_ptr, t_ptr, b_ptr, a2_ptr, h_ptr, s_ptr, topk_ids_ptr, expert_map_ptr, lora_ids_ptr, ranks_ptr,
    enabled_ptr, T, E_GLOBAL, E, SLOTS, up_b_offset, stride_bl, stride_be, stride_bi, stride_al, stride_ae, stride_ar,
    I: tl.constexpr, RANK: tl.constexpr, NA: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr,
    SHARED_A: tl.constexpr, MORE: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Tile ``tile`` of one routed pair: a single row needs no matrix instruction, which would keep it waiting."""
    expert = local_expert(topk_ids_ptr, expert_map_ptr, pair, pair < T * TOP_K, E_GLOBAL, E, HAS_MAP)
    P = tl.cast(T * TOP_K, tl.int64)
    e = expert.to(tl.int64)
    token = (pair // TOP_K).to(tl.int64)
    pair = pair.to(tl.int64)
    i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_i = i < I
    live = 0
    if RANK > 0:
        slot = adapter_slot(lora_ids_ptr, token, expert >= 0, SLOTS)
        live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
        r = tl.arange(0, BLOCK_R)
        own = tl.maximum(slot, 0).to(tl.int64)
        b_rows = b_ptr + own * stride_bl + e * stride_be + i.to(tl.int64)[:, None] * stride_bi
        bg = load_ranks(b_rows + r[None, :], mask_i, r, live, RANK)
        bu = load_ranks(b_rows + up_b_offset + r[None, :], mask_i, r, live, RANK)
        a_rows = a2_ptr + own * stride_al + e * stride_ae + i[None, :]
        a_ptrs = a_rows + r.to(tl.int64)[:, None] * stride_ar
        a = tl.load(a_ptrs, mask=(r < live)[:, None] & mask_i[None, :], other=0.0)
    wait_for_previous(PDL)
    let_next_start(PDL)
    if expert >= 0:
        gate_ptrs = gu_ptr + pair * (2 * I) + i
        g = tl.load(gate_ptrs, mask=mask_i, other=0.0)
        u = tl.load(gate_ptrs + I, mask=mask_i, other=0.0)
        for split in tl.static_range(1, SPLITS):
            plane = gate_ptrs + split * P * (2 * I)
            g += tl.load(plane, mask=mask_i, other=0.0)
            u += tl.load(plane + I, mask=mask_i, other=0.0)
        if RANK > 0:
            if live > 0:
                t_row = t_ptr + (token if SHARED_A else pair) * (NA * RANK)
                t_plane = (tl.cast(T, tl.int64) if SHARED_A else P) * (NA * RANK)
                g, u = _adapt_row(g, u, bg, bu, t_row, t_plane, r, live, RANK, NA, SPLITS)
                if MORE:
                    for first in tl.range(BLOCK_R, live, BLOCK_R, num_stages=1):
                        more = first + r
                        bg = load_ranks(b_rows + more[None, :], mask_i, more, live, RANK)
                        bu = load_ranks(b_rows + up_b_offset + more[None, :], mask_i, more, live, RANK)
                        g, u = _adapt_row(g, u, bg, bu, t_row, t_plane, more, live, RANK, NA, SPLITS)
        h = (g * tl.sigmoid(g) * u).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + pair * I + i, h, mask=mask_i, eviction_policy="evict_last")
        if RANK > 0:
            h = tl.where(mask_i, h.to(tl.float32), 0.0)
            out = s_ptr + (tile * P + pair) * RANK
            s = tl.sum(a.to(tl.float32) * h[None, :], 1)
            tl.store(out + r, s, mask=r < live, eviction_policy="evict_last")
            if MORE:
                for first in tl.range(BLOCK_R, live, BLOCK_R, num_stages=1):
                    more = first + r
                    a_ptrs = a_rows + more.to(tl.int64)[:, None] * stride_ar
                    a = tl.load(a_ptrs, mask=(more < live)[:, None] & mask_i[None, :], other=0.0)
                    s = tl.sum(a.to(tl.float32) * h[None, :], 1)
                    tl.store(out + more, s, mask=more < live)


@triton.jit
def _adapt_row(
    g, u, bg, bu, t_row, t_plane, r, live, RANK: tl.constexpr, NA: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """`_adapt` of one row."""
    t = _row_of_t(t_row + r, r < live, t_plane, SPLITS)
    t_up = t
    if NA == 2:  # asked for before the first sum, whose barrier it would wait behind
        t_up = _row_of_t(t_row + RANK + r, r < live, t_plane, SPLITS)
    g += tl.sum(bg.to(tl.float32) * t[None, :], 1)
    u += tl.sum(bu.to(tl.float32) * t_up[None, :], 1)
    return g, u


@triton.jit
def _row_of_t(t_ptrs, mask, stride_split, SPLITS: tl.constexpr):
    """`_load_t` of one row."""
    t = tl.load(t_ptrs, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        t += tl.load(t_ptrs + split * stride_split, mask=mask, other=0.0)
    return t


@triton.jit
def activate_unit(
    tile, block, gu_ptr, t_ptr, b_ptr, a2_ptr, h_ptr, s_ptr, topk_ids_ptr, expert_map_ptr, order_ptr,
    block_experts_ptr, lora_ids_ptr, ranks_ptr, enabled_ptr, T, E_GLOBAL, E, SLOTS, up_b_offset, stride_bl,
    stride_be, stride_bi, stride_al, stride_ae, stride_ar, I: tl.constexpr, RANK: tl.constexpr, NA: tl.constexpr,
    TOP_K: tl.constexpr, SPLITS: tl.constexpr, SHARED_A: tl.constexpr, MORE: tl.constexpr, HAS_MAP: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr, counts_ptr, wanted, wanted_shared, MAX_BLOCKS,
    JOINED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Tile ``tile`` of a block, once the programs before it are through (JOINED: those of its block; it counts up).

    A block of the plan has PARTS of BLOCK_M rows, and ``block`` counts those.
    """
    if PARTS > 1:
        expert, pair, mask_m = part_rows(order_ptr, block_experts_ptr, block, PARTS, BLOCK_M)
    else:
        expert, pair, mask_m = block_rows(
            topk_ids_ptr, expert_map_ptr, order_ptr, block_experts_ptr, block, T * TOP_K, E_GLOBAL, E,
            BLOCK_M, BLOCK_P, HAS_MAP,
        )  # fmt: skip
    P = tl.cast(T * TOP_K, tl.int64)
    e = expert.to(tl.int64)
    token = pair // TOP_K
    pair = pair.to(tl.int64)
    i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_i = i < I
    if RANK > 0:
        slot_m = adapter_slot(lora_ids_ptr, token, mask_m & (expert >= 0), SLOTS)
        first_slot = tl.max(slot_m, 0)
        live_0 = live_rank(ranks_ptr, enabled_ptr, first_slot, RANK)
        r_0 = tl.arange(0, BLOCK_R)
        b_rows = b_ptr + tl.maximum(first_slot, 0).to(tl.int64) * stride_bl + e * stride_be
        b_ptrs = b_rows + i.to(tl.int64)[:, None] * stride_bi + r_0[None, :]
        bg_0 = load_ranks(b_ptrs, mask_i, r_0, live_0, RANK)
        bu_0 = load_ranks(b_ptrs + up_b_offset, mask_i, r_0, live_0, RANK)
        a_rows = a2_ptr + tl.maximum(first_slot, 0).to(tl.int64) * stride_al + e * stride_ae
        a_ptrs = a_rows + r_0.to(tl.int64)[:, None] * stride_ar + i[None, :]
        a_0 = tl.load(a_ptrs, mask=(r_0 < live_0)[:, None] & mask_i[None, :], other=0.0)

    if JOINED:
        if expert >= 0:
            wait_for_count(counts_ptr + block, wanted, INTERPRETED)
            if SHARED_A:
                wait_for_count(counts_ptr + 2 * MAX_BLOCKS, wanted_shared, INTERPRETED)
    else:
        wait_for_previous(PDL)
        let_next_start(PDL)
    if expert >= 0:
        mask = mask_m[:, None] & mask_i[None, :]
        gate_ptrs = gu_ptr + pair[:, None] * (2 * I) + i[None, :]
        g = tl.load(gate_ptrs, mask=mask, other=0.0)
        u = tl.load(gate_ptrs + I, mask=mask, other=0.0)
        for split in tl.static_range(1, SPLITS):
            plane = gate_ptrs + split * P * (2 * I)
            g += tl.load(plane, mask=mask, other=0.0)
            u += tl.load(plane + I, mask=mask, other=0.0)

        if RANK > 0:
            t_row = token.to(tl.int64) if SHARED_A else pair
            t_plane = (tl.cast(T, tl.int64) if SHARED_A else P) * (NA * RANK)
            t_rows = t_ptr + t_row[:, None] * (NA * RANK)
            mine = (slot_m == first_slot) & (live_0 > 0)
            g, u = _adapt(g, u, bg_0, bu_0, t_rows, t_plane, mine, r_0, live_0, RANK, NA, SPLITS, INTERPRETED)
            if MORE:
                for slot in range(SLOTS):
                    live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
                    mine = (slot_m == slot) & (live > 0)
                    if tl.sum(mine.to(tl.int32), 0) > 0:
                        b_slot = b_ptr + tl.cast(slot, tl.int64) * stride_bl + e * stride_be
                        b_slot = b_slot + i.to(tl.int64)[:, None] * stride_bi
                        done = tl.where(slot == first_slot, BLOCK_R, 0)
                        for first in tl.range(done, live, BLOCK_R, num_stages=1):
                            r = first + r_0
                            bg = load_ranks(b_slot + r[None, :], mask_i, r, live, RANK)
                            bu = load_ranks(b_slot + up_b_offset + r[None, :], mask_i, r, live, RANK)
                            g, u = _adapt(g, u, bg, bu, t_rows, t_plane, mine, r, live, RANK, NA, SPLITS, INTERPRETED)

        h = (g * tl.sigmoid(g) * u).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + pair[:, None] * I + i[None, :], h, mask=mask, eviction_policy="evict_last")

        if RANK > 0:
            out = s_ptr + (tile * P + pair)[:, None] * RANK
            zero = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
            mine = (slot_m == first_slot) & (live_0 > 0)
            s = tl.trans(dot(a_0, tl.trans(h), zero, INTERPRETED))
            mask = mine[:, None] & (r_0 < live_0)[None, :]
            tl.store(out + r_0[None, :], s, mask=mask, eviction_policy="evict_last")
            if MORE:
                for slot in range(SLOTS):
                    live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
                    mine = (slot_m == slot) & (live > 0)
                    if tl.sum(mine.to(tl.int32), 0) > 0:
                        a_slot = a2_ptr + tl.cast(slot, tl.int64) * stride_al + e * stride_ae + i[None, :]
                        done = tl.where(slot == first_slot, BLOCK_R, 0)
                        for first in tl.range(done, live, BLOCK_R, num_stages=1):
                            r = first + r_0
                            a_ptrs = a_slot + r.to(tl.int64)[:, None] * stride_ar
                            a = tl.load(a_ptrs, mask=(r < live)[:, None] & mask_i[None, :], other=0.0)
                            s = tl.trans(dot(a, tl.trans(h), zero, INTERPRETED))
                            tl.store(out + r[None, :], s, mask=mine[:, None] & (r < live)[None, :])
        if JOINED:
            count_up(counts_ptr + MAX_BLOCKS + block)


@triton.jit(do_not_specialize=["T", "SLOTS"])
def _activate_kernel(
    gu_ptr,  # (SPLITS, P, 2I)
    t_ptr,  # (SPLITS, P|T, NA * R)
    b_ptr,  # (L, E, I, R)
    a2_ptr,  # (L, E, R, I)
    h_ptr,  # (P, I)
    s_ptr,  # (TILES, P, R)
    topk_ids_ptr,  # (P,)
    expert_map_ptr,  # (E_GLOBAL,)
    order_ptr,  # (MAX_BLOCKS, BLOCK_M)
    block_experts_ptr,  # (MAX_BLOCKS,)
    lora_ids_ptr,  # (T,)
    ranks_ptr,  # (L,)
    enabled_ptr,  # (L,)
    T,
    E_GLOBAL,
    E,
    SLOTS,
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
    MORE: tl.constexpr,  # more than one slot, or a rank above BLOCK_R
    HAS_MAP: tl.constexpr,
    BLOCK_P: tl.constexpr,  # 0: rows come from the plan
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,  # of BLOCK_M rows that a block of the plan has
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(I / BLOCK_I), MAX_BLOCKS * PARTS)."""
    if BLOCK_P == 1:
        _activate_row(
            tl.program_id(0), tl.program_id(1), gu_ptr=gu_ptr, t_ptr=t_ptr, b_ptr=b_ptr, a2_ptr=a2_ptr, h_ptr=h_ptr,
            s_ptr=s_ptr, topk_ids_ptr=topk_ids_ptr, expert_map_ptr=expert_map_ptr, lora_ids_ptr=lora_ids_ptr,
            ranks_ptr=ranks_ptr, enabled_ptr=enabled_ptr, T=T, E_GLOBAL=E_GLOBAL, E=E, SLOTS=SLOTS,
            up_b_offset=up_b_offset, stride_bl=stride_bl, stride_be=stride_be, stride_bi=stride_bi, stride_al=stride_al,
            stride_ae=stride_ae, stride_ar=stride_ar, I=I, RANK=RANK, NA=NA, TOP_K=TOP_K, SPLITS=SPLITS,
            SHARED_A=SHARED_A, MORE=MORE, HAS_MAP=HAS_MAP, BLOCK_I=BLOCK_I, BLOCK_R=BLOCK_R, PDL=PDL,
        )  # fmt: skip
        return
    activate_unit(
        tl.program_id(0), tl.program_id(1), gu_ptr=gu_ptr, t_ptr=t_ptr, b_ptr=b_ptr, a2_ptr=a2_ptr, h_ptr=h_ptr,
        s_ptr=s_ptr, topk_ids_ptr=topk_ids_ptr, expert_map_ptr=expert_map_ptr, order_ptr=order_ptr,
        block_experts_ptr=block_experts_ptr, lora_ids_ptr=lora_ids_ptr, ranks_ptr=ranks_ptr, enabled_ptr=enabled_ptr,
        T=T, E_GLOBAL=E_GLOBAL, E=E, SLOTS=SLOTS, up_b_offset=up_b_offset, stride_bl=stride_bl, stride_be=stride_be,
        stride_bi=stride_bi, stride_al=stride_al, stride_ae=stride_ae, stride_ar=stride_ar, I=I, RANK=RANK, NA=NA,
        TOP_K=TOP_K, SPLITS=SPLITS, SHARED_A=SHARED_A, MORE=MORE, HAS_MAP=HAS_MAP, BLOCK_P=BLOCK_P, BLOCK_M=BLOCK_M,
        BLOCK_I=BLOCK_I, BLOCK_R=BLOCK_R, INTERPRETED=INTERPRETED, PDL=PDL, counts_ptr=order_ptr, wanted=0,
        wanted_shared=0, MAX_BLOCKS=0, JOINED=False, PARTS=PARTS,
    )  # fmt: skip
