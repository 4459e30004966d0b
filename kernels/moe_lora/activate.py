"""The end of the first launch: adds up gate and up, lets the adapters in, applies SwiGLU, starts A2.

    g, u  = sum over splits of gu, plus B13 @ t in the rows of each adapter       fp32
    h     = silu(g) * u                                                            rounded once, to x's dtype
    s[i]  = A2[:, tile i of I] @ h[tile i]                                         fp32, one plane per tile of I

    gu  (SPLITS, P, 2I)      t  (SPLITS, P|T, NA*R)      b  (L, E, I, R), up's ``up_b_offset`` elements further
    a2  (L, E, R, I)         h  (P, I)                   s  (TILES, P, R)

No launch of its own stands between the two products: a tile of I of one block of rows is activated by the program of
`gate_up` that made it or, where several made parts of it, by the one that finishes last. Which one that is changes
nothing: it reads the parts from memory in their order. t keeps fp32's precision through its product with B.
"""

import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.pipeline import dot, dot_fp32, live_rank, load_ranks


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
def _adapter_rows(b_ptr, up_b_offset, slot, e, i, mask_i, r, live, stride_bl, stride_be, stride_bi, RANK: tl.constexpr):
    """Rows ``i`` of one slot's B of gate and of up: (BLOCK_I, BLOCK_R) each."""
    rows = b_ptr + slot * stride_bl + e * stride_be + i.to(tl.int64)[:, None] * stride_bi + r[None, :]
    return load_ranks(rows, mask_i, r, live, RANK), load_ranks(rows + up_b_offset, mask_i, r, live, RANK)


@triton.jit
def first_factors(
    b_ptr, a2_ptr, first_slot, live, e, tile, up_b_offset,
    stride_bl, stride_be, stride_bi, stride_al, stride_ae, stride_ar,
    I: tl.constexpr, RANK: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A tile's factors of a block's first adapter: B of gate and of up (BLOCK_I, BLOCK_R), A2 (BLOCK_R, BLOCK_I)."""
    i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    r = tl.arange(0, BLOCK_R)
    slot = tl.maximum(first_slot, 0).to(tl.int64)
    bg, bu = _adapter_rows(b_ptr, up_b_offset, slot, e, i, i < I, r, live, stride_bl, stride_be, stride_bi, RANK)
    a_ptrs = a2_ptr + slot * stride_al + e * stride_ae + r.to(tl.int64)[:, None] * stride_ar + i[None, :]
    return bg, bu, tl.load(a_ptrs, mask=(r < live)[:, None] & (i < I)[None, :], other=0.0)


@triton.jit
def added_up(gu_ptr, pair, mask_m, tile, P, I: tl.constexpr, SPLITS: tl.constexpr, BLOCK_I: tl.constexpr):
    """Gate and up, fp32 (BLOCK_M, BLOCK_I): their planes in memory added in their order."""
    i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = mask_m[:, None] & (i < I)[None, :]
    gate_ptrs = gu_ptr + pair.to(tl.int64)[:, None] * (2 * I) + i[None, :]
    g = tl.load(gate_ptrs, mask=mask, other=0.0)
    u = tl.load(gate_ptrs + I, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        plane = gate_ptrs + tl.cast(split * P, tl.int64) * (2 * I)
        g += tl.load(plane, mask=mask, other=0.0)
        u += tl.load(plane + I, mask=mask, other=0.0)
    return g, u


@triton.jit
def activate(
    g, u, t_ptr, b_ptr, a2_ptr, h_ptr, s_ptr, tile, expert, pair, mask_m, T,
    slot_m, first_slot, live_0, bg_0, bu_0, a_0, t_arrivals_ptr, t_expected,
    ranks_ptr, enabled_ptr, SLOTS, up_b_offset,
    stride_bl, stride_be, stride_bi, stride_al, stride_ae, stride_ar,
    I: tl.constexpr, RANK: tl.constexpr, NA: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr,
    SHARED_A: tl.constexpr, MORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile of I of one block of rows, from its gate and up, fp32 (BLOCK_M, BLOCK_I).

    t may still be on its way: its programs come first in the grid, and ``t_expected`` of them arrive.
    """
    P = tl.cast(T * TOP_K, tl.int64)
    e = expert.to(tl.int64)
    token = pair // TOP_K
    pair = pair.to(tl.int64)
    i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_i = i < I
    r_0 = tl.arange(0, BLOCK_R)

    mask = mask_m[:, None] & mask_i[None, :]
    if RANK > 0:
        while tl.atomic_add(t_arrivals_ptr, 0, sem="acquire", scope="gpu") < t_expected:
            pass
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
                    done = tl.where(slot == first_slot, BLOCK_R, 0)
                    for first in tl.range(done, live, BLOCK_R, num_stages=1):
                        r = first + r_0
                        bg, bu = _adapter_rows(
                            b_ptr, up_b_offset, tl.cast(slot, tl.int64), e, i, mask_i, r, live,
                            stride_bl, stride_be, stride_bi, RANK,
                        )  # fmt: skip
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
