"""activate and down in one launch, where every routed pair is a block of its own (`MoEConfig.down_ahead` above 0).

    h  = silu(g) * u      g, u as in `activate`, for the one row that a program works on
    s  = A2 h
    y  = W2 h + B2 s      some tiles of H a program

With one or two tokens the layer is short, and each launch that waits for the one before it leaves the memory idle for
a while. Here a program activates its pair for itself, a few thousand multiplications that others of the pair repeat.
So nothing stands between the end of `gate_up` and the product with W2, and what does not depend on `gate_up` (adapters
and the first tiles of W2) is asked for while that one still streams W13.

I is cut into ``CHUNKS``, powers of two, since a tile has no other sizes.
"""

import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.pipeline import (
    adapter_slot,
    dot,
    dot_thirds,
    let_next_start,
    live_rank,
    load_ranks,
    local_expert,
    thirds,
    wait_for_previous,
)

COLUMNS = tl.constexpr(16)  # of the matrix instruction's short side, of which one is in use


def chunks_of(size: int) -> tuple[int, ...]:
    """Powers of two, each of 16 or more, that add up to ``size`` or, in the last, to a little more."""
    chunks = []
    while size > 0:
        chunks.append(max(16, 1 << (size.bit_length() - 1)))
        size -= chunks[-1]
    return tuple(chunks)


@triton.constexpr_function
def _first_of(chunks, c):
    return sum(chunks[:c])


@triton.jit
def _first_column(x):
    """(len(x), COLUMNS): x, and zeros behind it."""
    return tl.where((tl.arange(0, COLUMNS) == 0)[None, :], x[:, None], 0.0)


@triton.jit
def _load_tile(w_row, stride_wn, n, H, I: tl.constexpr, CHUNKS: tl.constexpr, EVEN_N: tl.constexpr):
    """A tuple of (BLOCK_N, CHUNKS[c]): rows ``n`` of an expert's W2."""
    rows = w_row + n.to(tl.int64)[:, None] * stride_wn
    tile = ()
    for c in tl.static_range(len(CHUNKS)):
        i = _first_of(CHUNKS, c) + tl.arange(0, CHUNKS[c])
        if EVEN_N and _first_of(CHUNKS, c + 1) <= I:
            tile = tile + (tl.load(rows + i[None, :]),)
        else:
            tile = tile + (tl.load(rows + i[None, :], mask=(n < H)[:, None] & (i < I)[None, :], other=0.0),)
    return tile


@triton.jit
def _load_factor(b2_row, stride_bn, n, H, r, live, RANK: tl.constexpr):
    """int16 (BLOCK_N, BLOCK_R): the bits of rows ``n`` of an adapter's B2, which a loop carries better than values."""
    if RANK > 0:
        ptrs = b2_row + n.to(tl.int64)[:, None] * stride_bn + r[None, :]
        return load_ranks(ptrs, n < H, r, live, RANK).to(tl.int16, bitcast=True)
    else:
        return 0


@triton.jit
def _store_tile(
    y_row, n, w, columns, factor, s, live, H, RANK: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """y of rows ``n`` of W2 (BLOCK_N,): the first column of their product with h, and of B2 with s."""
    acc = tl.zeros((w[0].shape[0], COLUMNS), tl.float32)
    for c in tl.static_range(len(columns)):
        acc = dot(w[c], columns[c], acc, INTERPRETED)
    if RANK > 0:  # a row without an adapter keeps its bits
        acc = tl.where(live > 0, dot_thirds(factor.to(DTYPE, bitcast=True), s, acc, INTERPRETED), acc)
    mask = (n < H)[:, None] & (tl.arange(0, COLUMNS) == 0)[None, :]
    tl.store(y_row + n[:, None] + tl.zeros((1, COLUMNS), tl.int32), acc, mask=mask, eviction_policy="evict_last")


@triton.jit
def _sum_planes(ptrs, mask, stride, PLANES: tl.constexpr):
    """Planes of fp32 added in their order."""
    total = tl.load(ptrs, mask=mask, other=0.0)
    for plane in tl.static_range(1, PLANES):
        total += tl.load(ptrs + plane * stride, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["T", "SLOTS"])
def _single_down_kernel(
    gu_ptr,  # (SPLITS, P, 2I)
    t_ptr,  # (SPLITS, P|T, NA * R)
    b_ptr,  # (L, E, I, R), of up ``up_b_offset`` elements further
    a2_ptr,  # (L, E, R, I)
    w2_ptr,  # (E, H, I)
    b2_ptr,  # (L, E, H, R)
    y_ptr,  # (P, H)
    topk_ids_ptr,  # (P,)
    expert_map_ptr,  # (E_GLOBAL,)
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
    stride_we,
    stride_wn,
    stride_b2l,
    stride_b2e,
    stride_b2n,
    H: tl.constexpr,
    I: tl.constexpr,
    RANK: tl.constexpr,  # 0: no adapters; at most BLOCK_R
    NA: tl.constexpr,  # 1: gate and up share A
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED_A: tl.constexpr,
    HAS_MAP: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    AHEAD: tl.constexpr,  # tiles of W2 that are asked for before the wait
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(H / (BLOCK_N * TILES)), P)."""
    EVEN_N: tl.constexpr = H % (BLOCK_N * TILES) == 0
    pair = tl.program_id(1)
    expert = local_expert(topk_ids_ptr, expert_map_ptr, pair, pair < T * TOP_K, E_GLOBAL, E, HAS_MAP)
    if expert < 0:
        wait_for_previous(PDL)
        let_next_start(PDL)
        return
    P = tl.cast(T * TOP_K, tl.int64)
    e = expert.to(tl.int64)
    token = (pair // TOP_K).to(tl.int64)
    pair = pair.to(tl.int64)
    first_n = tl.program_id(0) * (TILES * BLOCK_N) + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    live = 0
    own = tl.cast(0, tl.int64)
    if RANK > 0:
        slot = adapter_slot(lora_ids_ptr, token, True, SLOTS)
        live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
        own = tl.maximum(slot, 0).to(tl.int64)
    w_row = w2_ptr + e * stride_we
    b2_row = b2_ptr + own * stride_b2l + e * stride_b2e
    gates, ups, downs = (), (), ()
    if RANK > 0:
        for c in tl.static_range(len(CHUNKS)):
            i = _first_of(CHUNKS, c) + tl.arange(0, CHUNKS[c])
            mask_i = i < I
            b_ptrs = b_ptr + own * stride_bl + e * stride_be + i.to(tl.int64)[:, None] * stride_bi + r[None, :]
            gates = gates + (load_ranks(b_ptrs, mask_i, r, live, RANK),)
            ups = ups + (load_ranks(b_ptrs + up_b_offset, mask_i, r, live, RANK),)
            a_ptrs = a2_ptr + own * stride_al + e * stride_ae + r.to(tl.int64)[:, None] * stride_ar + i[None, :]
            downs = downs + (tl.load(a_ptrs, mask=(r < live)[:, None] & mask_i[None, :], other=0.0),)
    tiles, factors = (), ()
    for tile in tl.static_range(AHEAD):
        n = first_n + tile * BLOCK_N
        tiles = tiles + (_load_tile(w_row, stride_wn, n, H, I, CHUNKS, EVEN_N),)
        factors = factors + (_load_factor(b2_row, stride_b2n, n, H, r, live, RANK),)

    wait_for_previous(PDL)
    let_next_start(PDL)
    t_gate, t_up = 0.0, 0.0
    if RANK > 0:
        t_ptrs = t_ptr + (token if SHARED_A else pair) * (NA * RANK) + r
        t_plane = (tl.cast(T, tl.int64) if SHARED_A else P) * (NA * RANK)
        t_gate = _sum_planes(t_ptrs, r < live, t_plane, SPLITS)
        t_up = t_gate
        if NA == 2:
            t_up = _sum_planes(t_ptrs + RANK, r < live, t_plane, SPLITS)
    gate_sums, up_sums = (), ()
    for c in tl.static_range(len(CHUNKS)):  # all of them asked for before the first is needed
        i = _first_of(CHUNKS, c) + tl.arange(0, CHUNKS[c])
        gate_ptrs = gu_ptr + pair * (2 * I) + i
        gate_sums = gate_sums + (_sum_planes(gate_ptrs, i < I, P * (2 * I), SPLITS),)
        up_sums = up_sums + (_sum_planes(gate_ptrs + I, i < I, P * (2 * I), SPLITS),)
    s = tl.zeros((BLOCK_R,), tl.float32)
    columns = ()
    for c in tl.static_range(len(CHUNKS)):
        g, u = gate_sums[c], up_sums[c]
        if RANK > 0:
            g = tl.where(live > 0, g + tl.sum(gates[c].to(tl.float32) * t_gate[None, :], 1), g)
            u = tl.where(live > 0, u + tl.sum(ups[c].to(tl.float32) * t_up[None, :], 1), u)
        h = (g * tl.sigmoid(g) * u).to(w2_ptr.dtype.element_ty)
        if RANK > 0:
            s += tl.sum(downs[c].to(tl.float32) * h.to(tl.float32)[None, :], 1)
        columns = columns + (_first_column(h),)

    y_row = y_ptr + pair * H
    DTYPE: tl.constexpr = b2_ptr.dtype.element_ty
    s = thirds(_first_column(s), INTERPRETED)
    for tile in tl.static_range(AHEAD):
        n = first_n + tile * BLOCK_N
        _store_tile(y_row, n, tiles[tile], columns, factors[tile], s, live, H, RANK, DTYPE, INTERPRETED)
    if TILES > AHEAD:
        factor = _load_factor(b2_row, stride_b2n, first_n + AHEAD * BLOCK_N, H, r, live, RANK)
        for tile in tl.range(AHEAD, TILES, num_stages=STAGES):
            n = first_n + tile * BLOCK_N
            w = _load_tile(w_row, stride_wn, n, H, I, CHUNKS, EVEN_N)
            following = _load_factor(b2_row, stride_b2n, n + BLOCK_N, H, r, live, RANK)
            _store_tile(y_row, n, w, columns, factor, s, live, H, RANK, DTYPE, INTERPRETED)
            factor = following
