"""Third launch: every expert's output, ``y = W2 @ h + B2 @ s``, one fp32 row for each routed pair.

    w2  (E, H, I)       as x     h  (P, I)  as x     s  (TILES, P, R)  fp32, planes added in their order
    b2  (L, E, H, R)    as x     y  (P, H)  fp32

Where B2 is shared over experts, `combine` applies it once a token instead, to v = sum_k w[k] s[k] formed here. y is
stored to leave L2 last: the stream of weights would push it out to memory, and reads that alternate with writes are
slow.

W2 in MXFP8 is decoded in registers on the way (`mxfp8`): in the fp16 form where a program holds whole rows of h, which
it then normalises itself, else in the bf16 form; B2 stays as it is.
"""

import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.mxfp8 import (
    decoded_dot,
    load_codes,
    load_scales,
    magnitudes,
    shift_of,
    shifted,
    with_factors,
)
from beam_moe.kernels.moe_lora.pipeline import (
    adapter_slot,
    dot,
    dot_fp32,
    dot_thirds,
    let_next_start,
    live_rank,
    load_ranks,
    local_expert,
    planned_rows,
    single_row,
    thirds,
    wait_for_count,
    wait_for_previous,
    wide_rows,
    wide_stages,
)
from beam_moe.kernels.mxfp8.decode_block import row_top, settled

TOKENS = tl.constexpr(16)  # of one program that sums s over experts


@triton.jit
def load_s(s_ptr, pair, mask_rows, r, live, P, RANK: tl.constexpr, TILES: tl.constexpr):
    """fp32 (BLOCK_M, BLOCK_R): the planes of s added in their order."""
    s_ptrs = s_ptr + pair[:, None] * RANK + r[None, :]
    s = load_ranks(s_ptrs, mask_rows, r, live, RANK)
    for tile in tl.static_range(1, TILES):
        s += load_ranks(s_ptrs + tile * P * RANK, mask_rows, r, live, RANK)
    return s


@triton.jit
def _load_b(slot, live, e, n, mask_n, adapters, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """int16 (BLOCK_N, BLOCK_R): the bits of the first ranks of an adapter's B2 in some rows of an expert.

    A loop that carried the values themselves would bring them to shared memory in each of its steps.
    """
    _, b2_ptr, _, _, _, stride_bl, stride_be, stride_bn = adapters
    r = tl.arange(0, BLOCK_R)
    rows = b2_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_bl + e * stride_be + n.to(tl.int64) * stride_bn
    return load_ranks(rows[:, None] + r[None, :], mask_n, r, live, RANK).to(tl.int16, bitcast=True)


@triton.jit
def _add_adapters(
    acc, b, n, mask_n, ahead, e, pair, P, own, adapters, H: tl.constexpr,
    RANK: tl.constexpr, TILES: tl.constexpr, MORE: tl.constexpr, BLOCK_R: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """acc (BLOCK_N, BLOCK_M) with B2 @ s added in the columns of each adapter's rows; the others keep their bits.

    ``b`` has the bits of the first adapter's B2. Also returns those of the next tile, asked for a tile ahead where
    there is one (``ahead``).
    """
    slot_m, first_slot, live_0, s_0 = own
    s_ptr, b2_ptr, ranks_ptr, enabled_ptr, SLOTS, stride_bl, stride_be, stride_bn = adapters
    mine = (slot_m == first_slot) & (live_0 > 0)
    b = b.to(b2_ptr.dtype.element_ty, bitcast=True)
    acc = tl.where(mine[None, :], dot_thirds(b, s_0, acc, INTERPRETED), acc)
    if MORE:
        r_0 = tl.arange(0, BLOCK_R)
        b_offsets = e * stride_be + n.to(tl.int64) * stride_bn
        for slot in range(SLOTS):
            live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
            mine = (slot_m == slot) & (live > 0)
            if tl.sum(mine.to(tl.int32), 0) > 0:
                b_rows = b2_ptr + tl.cast(slot, tl.int64) * stride_bl + b_offsets
                done = tl.where(slot == first_slot, BLOCK_R, 0)
                for first in tl.range(done, live, BLOCK_R, num_stages=1):
                    r = first + r_0
                    more = load_ranks(b_rows[:, None] + r[None, :], mask_n, r, live, RANK)
                    s = tl.trans(load_s(s_ptr, pair, mine, r, live, P, RANK, TILES))
                    acc = tl.where(mine[None, :], dot_fp32(more, s, acc, INTERPRETED), acc)
    n += acc.shape[0]
    return acc, _load_b(first_slot, live_0, e, n, (n < H) & ahead, adapters, RANK, BLOCK_R)


@triton.jit
def sum_experts(
    s_ptr, v_ptr, topk_weights_ptr, topk_ids_ptr, expert_map_ptr, lora_ids_ptr, ranks_ptr, enabled_ptr,
    first_token, T, E_GLOBAL, E, SLOTS, P,
    RANK: tl.constexpr, TILES: tl.constexpr, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """v[t] = sum over k of w[t, k] * s[t, k] for a B2 that all experts share, up to the rank of the token's adapter."""
    token = first_token + tl.arange(0, BLOCK_T)
    mask_t = token < T
    slot = adapter_slot(lora_ids_ptr, token, mask_t, SLOTS)
    live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
    for first in tl.range(0, RANK, BLOCK_R, num_stages=1):
        r = first + tl.arange(0, BLOCK_R)
        v = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for k in tl.static_range(TOP_K):
            pair = token * TOP_K + k
            valid = local_expert(topk_ids_ptr, expert_map_ptr, pair, mask_t, E_GLOBAL, E, HAS_MAP) >= 0
            weight = tl.load(topk_weights_ptr + pair, mask=valid, other=0.0)
            mask = valid[:, None] & (r[None, :] < live[:, None])
            s_ptrs = s_ptr + pair.to(tl.int64)[:, None] * RANK + r[None, :]
            s = tl.load(s_ptrs, mask=mask, other=0.0)
            for tile in tl.static_range(1, TILES):
                s += tl.load(s_ptrs + tile * P * RANK, mask=mask, other=0.0)
            v += weight[:, None] * s
        tl.store(v_ptr + token.to(tl.int64)[:, None] * RANK + r[None, :], v, mask=mask_t[:, None] & (r < RANK)[None, :])


@triton.jit
def _mxfp8_tiles(
    h_tiles, exponent_m, h_wide, mask_m, w2, first_row, w_offsets, stride_wn, s_rows, stride_sn, words, y_rows,
    first_tile, tiles, e, pair, P, own, b, adapters,
    H: tl.constexpr, I: tl.constexpr, ADAPTED: tl.constexpr, RANK: tl.constexpr, TILES: tl.constexpr,
    MORE: tl.constexpr, STEPS: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    FP16: tl.constexpr, ONLY_WIDE: tl.constexpr, SOFT: tl.constexpr, W_TMA: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A program's tiles of y from whole rows of h; returns whether some of their elements do not fit in fp16.

    The fp16 form stores the elements that fit, with ONLY_WIDE the bf16 form stores the others, without it all. Scales,
    words and B2 are loaded a tile ahead of their use: they are too narrow for asynchronous copies.
    """
    offs_n = tl.arange(0, BLOCK_N)
    n = first_tile * BLOCK_N + offs_n
    scales_ahead = ()
    for step in tl.static_range(STEPS):
        s_now = load_scales(s_rows + n * stride_sn, n < H, step * BLOCK_K, I, BLOCK_K, not EVEN_N, I % BLOCK_K == 0)
        scales_ahead = scales_ahead + (s_now,)
    word_ahead = tl.load(words + n, mask=n < H, other=0)
    seen = tl.zeros((BLOCK_N,), tl.int16)
    for tile in tl.range(first_tile, first_tile + tiles, num_stages=STAGES):
        n = tile * BLOCK_N + offs_n
        mask_n = n < H
        scales = scales_ahead
        word = word_ahead
        following = n + BLOCK_N
        scales_ahead = ()
        for step in tl.static_range(STEPS):
            s_now = load_scales(
                s_rows + following * stride_sn, following < H, step * BLOCK_K, I, BLOCK_K, True, I % BLOCK_K == 0
            )
            scales_ahead = scales_ahead + (s_now,)
        word_ahead = tl.load(words + following, mask=following < H, other=0)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for step in tl.static_range(STEPS):
            code = load_codes(
                w2, first_row + tile * BLOCK_N, w_offsets + tl.cast(tile * BLOCK_N, tl.int64) * stride_wn, mask_n,
                step * BLOCK_K, I, W_TMA, BLOCK_K, not EVEN_N, I % BLOCK_K == 0,
            )  # fmt: skip
            acc = decoded_dot(code, scales[step], row_top(word), h_tiles[step], acc, FP16, SOFT, INTERPRETED)
        if FP16:
            acc = with_factors(acc, word, exponent_m)
        if ADAPTED:
            acc, b = _add_adapters(
                acc, b, n, mask_n, tile + 1 < first_tile + tiles, e, pair, P, own, adapters, H,
                RANK, TILES, MORE, BLOCK_R, INTERPRETED,
            )  # fmt: skip
        y = tl.trans(acc)
        mask = mask_m[:, None] & mask_n[None, :]
        if FP16 or ONLY_WIDE:
            seen |= word
            wide = h_wide[:, None] | ((word & 256) != 0)[None, :]
            if FP16:
                mask = mask & (wide == 0)
            else:
                mask = mask & wide
        tl.store(y_rows + tile * BLOCK_N, y, mask=mask, eviction_policy="evict_last")
    return tl.maximum(tl.max(h_wide.to(tl.int32), 0), tl.max((seen & 256).to(tl.int32), 0))


@triton.jit
def _mxfp8_steps(
    h_rows, mask_m, w2, first_row, w_offsets, stride_wn, s_rows, stride_sn, y_rows, first_tile, tiles,
    e, pair, P, own, b, adapters,
    H: tl.constexpr, I: tl.constexpr, ADAPTED: tl.constexpr, RANK: tl.constexpr, TILES: tl.constexpr,
    MORE: tl.constexpr, STEPS: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    SOFT: tl.constexpr, W_TMA: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The same in the bf16 form from a step of h's columns at a time, scales one step ahead."""
    EVEN_K: tl.constexpr = I % BLOCK_K == 0
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    n = first_tile * BLOCK_N + offs_n
    scales = load_scales(s_rows + n * stride_sn, n < H, 0, I, BLOCK_K, not EVEN_N, EVEN_K)
    for step in tl.range(0, STEPS * tiles, num_stages=STAGES):
        tile = first_tile + step // STEPS
        k = (step % STEPS) * BLOCK_K
        n = tile * BLOCK_N + offs_n
        mask_n = n < H
        code = load_codes(
            w2, first_row + tile * BLOCK_N, w_offsets + tl.cast(tile * BLOCK_N, tl.int64) * stride_wn,
            mask_n, k, I, W_TMA, BLOCK_K, not EVEN_N, EVEN_K,
        )  # fmt: skip
        mask = mask_m[:, None] if EVEN_K else mask_m[:, None] & (k + offs_k < I)[None, :]
        h = tl.load(h_rows + k, mask=mask, other=0.0)
        s_now = scales
        following = (first_tile + (step + 1) // STEPS) * BLOCK_N + offs_n
        scales = load_scales(
            s_rows + following * stride_sn, following < H, ((step + 1) % STEPS) * BLOCK_K, I, BLOCK_K, True, EVEN_K
        )
        acc = decoded_dot(code, s_now, 0, tl.trans(h), acc, False, SOFT, INTERPRETED)
        acc = settled(acc, SOFT)
        if step % STEPS == STEPS - 1:
            if ADAPTED:
                acc, b = _add_adapters(
                    acc, b, n, mask_n, tile + 1 < first_tile + tiles, e, pair, P, own, adapters, H,
                    RANK, TILES, MORE, BLOCK_R, INTERPRETED,
                )  # fmt: skip
            y = tl.trans(acc)
            tl.store(y_rows + tile * BLOCK_N, y, mask=mask_m[:, None] & mask_n[None, :], eviction_policy="evict_last")
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)


@triton.jit
def _dense_tiles(
    h_rows, mask_m, w_rows, stride_wn, y_rows, first_tile, tiles, e, pair, P, own, b, adapters,
    H: tl.constexpr, I: tl.constexpr, ADAPTED: tl.constexpr, RANK: tl.constexpr, TILES: tl.constexpr,
    MORE: tl.constexpr, WHOLE: tl.constexpr, STEPS: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A program's tiles of y of dense W2; with WHOLE one step spans all of I, and h stays in shared memory.

    B2 is loaded a tile ahead of its use, for the first tile (``b``) by the caller.
    """
    EVEN_K: tl.constexpr = I % BLOCK_K == 0
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    last_tile = first_tile + tiles
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if WHOLE:
        h_tiles = ()
        for step in tl.static_range(STEPS):
            mask = mask_m[:, None] if EVEN_K else mask_m[:, None] & (step * BLOCK_K + offs_k < I)[None, :]
            h_tiles = h_tiles + (tl.trans(tl.load(h_rows + step * BLOCK_K, mask=mask, other=0.0)),)
        for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
            n = tile * BLOCK_N + offs_n
            mask_n = n < H
            w_tile = w_rows + tl.cast(tile * BLOCK_N, tl.int64) * stride_wn
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for step in tl.static_range(STEPS):
                if EVEN_K and EVEN_N:
                    w = tl.load(w_tile + step * BLOCK_K)
                else:
                    mask_w = mask_n[:, None] & (step * BLOCK_K + offs_k < I)[None, :]
                    w = tl.load(w_tile + step * BLOCK_K, mask=mask_w, other=0.0)
                acc = dot(w, h_tiles[step], acc, INTERPRETED)
            if ADAPTED:
                acc, b = _add_adapters(
                    acc, b, n, mask_n, tile + 1 < last_tile, e, pair, P, own, adapters, H,
                    RANK, TILES, MORE, BLOCK_R, INTERPRETED,
                )  # fmt: skip
            y = tl.trans(acc)
            tl.store(y_rows + tile * BLOCK_N, y, mask=mask_m[:, None] & mask_n[None, :], eviction_policy="evict_last")
    else:
        for step in tl.range(0, STEPS * tiles, num_stages=STAGES):
            tile = first_tile + step // STEPS
            k = (step % STEPS) * BLOCK_K
            n = tile * BLOCK_N + offs_n
            mask_n = n < H
            w_ptrs = w_rows + tl.cast(tile * BLOCK_N, tl.int64) * stride_wn + k
            if EVEN_K and EVEN_N:
                w = tl.load(w_ptrs)
                h = tl.load(h_rows + k, mask=mask_m[:, None], other=0.0)
            else:
                mask_k = k + offs_k < I
                w = tl.load(w_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
                h = tl.load(h_rows + k, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            acc = dot(w, tl.trans(h), acc, INTERPRETED)
            if step % STEPS == STEPS - 1:
                if ADAPTED:
                    acc, b = _add_adapters(
                        acc, b, n, mask_n, tile + 1 < last_tile, e, pair, P, own, adapters, H,
                        RANK, TILES, MORE, BLOCK_R, INTERPRETED,
                    )  # fmt: skip
                y = tl.trans(acc)
                mask = mask_m[:, None] & mask_n[None, :]
                tl.store(y_rows + tile * BLOCK_N, y, mask=mask, eviction_policy="evict_last")
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)


@triton.jit
def _rows_of_y(
    first_tile, tiles, expert, pair, mask_m, slot_m, first_slot, live_0, b, h_ptr, w2_ptr, y_ptr, adapters, P,
    stride_we, stride_wn, H: tl.constexpr, I: tl.constexpr, ADAPTED: tl.constexpr, RANK: tl.constexpr,
    TILES: tl.constexpr, MORE: tl.constexpr, WHOLE: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, INTERPRETED: tl.constexpr,
    scales_ptr, words_ptr, stride_se, stride_sn, BASE: tl.constexpr, FP16: tl.constexpr, NORMALIZED: tl.constexpr,
    SOFT: tl.constexpr, W_TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some tiles of an expert's W2 for BLOCK_M routed pairs whose h and s are there."""
    STEPS: tl.constexpr = (I + BLOCK_K - 1) // BLOCK_K
    EVEN_K: tl.constexpr = I % BLOCK_K == 0
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    e = expert.to(tl.int64)
    pair = pair.to(tl.int64)
    own = ()
    if ADAPTED:
        r_0 = tl.arange(0, BLOCK_R)
        mine = (slot_m == first_slot) & (live_0 > 0)
        s_0 = tl.trans(load_s(adapters[0], pair, mine, r_0, live_0, P, RANK, TILES))
        own = (slot_m, first_slot, live_0, thirds(s_0, INTERPRETED))
    h_rows = h_ptr + pair[:, None] * I + offs_k[None, :]
    y_rows = y_ptr + pair[:, None] * H + offs_n[None, :]
    if BASE == "mxfp8":
        codes = w2_ptr if W_TMA else w2_ptr + e * stride_we
        w_offsets = offs_n.to(tl.int64) * stride_wn
        s_rows = scales_ptr + e * stride_se
        words = words_ptr + e * H
    if BASE != "mxfp8":
        w_rows = w2_ptr + e * stride_we + offs_n.to(tl.int64)[:, None] * stride_wn + offs_k[None, :]
        _dense_tiles(
            h_rows, mask_m, w_rows, stride_wn, y_rows, first_tile, tiles, e, pair, P, own, b, adapters,
            H, I, ADAPTED, RANK, TILES, MORE, WHOLE, STEPS, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, STAGES,
            INTERPRETED,
        )  # fmt: skip
    elif WHOLE:
        h_tiles = ()
        for step in tl.static_range(STEPS):
            mask = mask_m[:, None] if EVEN_K else mask_m[:, None] & (step * BLOCK_K + offs_k < I)[None, :]
            h_tiles = h_tiles + (tl.load(h_rows + step * BLOCK_K, mask=mask, other=0.0),)
        shift = tl.zeros((BLOCK_M,), tl.int32)
        h_wide = shift != 0
        if FP16 and NORMALIZED:
            high = tl.zeros((BLOCK_M,), tl.int32)
            low = tl.full((BLOCK_M,), 0x7FFFFFFF, tl.int32)
            for step in tl.static_range(STEPS):
                size = magnitudes(h_tiles[step])
                high = tl.maximum(high, tl.max(size, 1))
                low = tl.minimum(low, tl.min(tl.where(size == 0, 0x7FFFFFFF, size), 1))
            shift, h_wide = shift_of(high, low)
        columns = ()
        for step in tl.static_range(STEPS):
            h = h_tiles[step]
            if FP16 and NORMALIZED:
                h = shifted(h, shift)
            columns = columns + (tl.trans(h),)
        found = _mxfp8_tiles(
            columns, -shift, h_wide, mask_m, codes, expert * H, w_offsets, stride_wn, s_rows, stride_sn, words,
            y_rows, first_tile, tiles, e, pair, P, own, b, adapters,
            H, I, ADAPTED, RANK, TILES, MORE, STEPS, EVEN_N,
            BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, FP16, False, SOFT, W_TMA, STAGES, INTERPRETED,
        )  # fmt: skip
        if FP16:
            if found != 0:
                first_b = b
                if ADAPTED:
                    n = first_tile * BLOCK_N + offs_n
                    first_b = _load_b(first_slot, live_0, e, n, n < H, adapters, RANK, BLOCK_R)
                raw = ()
                for step in tl.static_range(STEPS):
                    mask_raw = mask_m[:, None] & (step * BLOCK_K + offs_k < I)[None, :]
                    raw = raw + (tl.trans(tl.load(h_rows + step * BLOCK_K, mask=mask_raw, other=0.0)),)
                _mxfp8_tiles(
                    raw, shift, h_wide, mask_m, codes, expert * H, w_offsets, stride_wn, s_rows, stride_sn, words,
                    y_rows, first_tile, tiles, e, pair, P, own, first_b, adapters,
                    H, I, ADAPTED, RANK, TILES, MORE, STEPS, EVEN_N,
                    BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, False, True, SOFT, W_TMA, 1, INTERPRETED,
                )  # fmt: skip
    else:
        _mxfp8_steps(
            h_rows, mask_m, codes, expert * H, w_offsets, stride_wn, s_rows, stride_sn, y_rows, first_tile, tiles,
            e, pair, P, own, b, adapters, H, I, ADAPTED, RANK, TILES, MORE, STEPS, EVEN_N,
            BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, SOFT, W_TMA, STAGES, INTERPRETED,
        )  # fmt: skip


@triton.jit
def down_unit(
    first_tile, tiles, block, h_ptr, w2_ptr, s_ptr, b2_ptr, y_ptr, topk_ids_ptr, expert_map_ptr, order_ptr,
    block_experts_ptr, widths_ptr, lora_ids_ptr, ranks_ptr, enabled_ptr, T, E_GLOBAL, E, SLOTS, stride_we, stride_wn,
    stride_bl, stride_be, stride_bn, H: tl.constexpr, I: tl.constexpr, RANK: tl.constexpr, SHARED_B: tl.constexpr,
    TILES: tl.constexpr, TOP_K: tl.constexpr, MORE: tl.constexpr, HAS_MAP: tl.constexpr, WHOLE: tl.constexpr,
    DIRECT: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr, scales_ptr, words_ptr, stride_se, stride_sn,
    BASE: tl.constexpr, FP16: tl.constexpr, NORMALIZED: tl.constexpr, SOFT: tl.constexpr, W_TMA: tl.constexpr,
    STAGES: tl.constexpr, counts_ptr, wanted, MAX_BLOCKS, JOINED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Some tiles of a block of pairs, once the programs before (JOINED: those of the block) are through.

    EVEN_N: none of them reaches beyond H. With WIDE above 1 the first of up to WIDE blocks of one expert stands for all
    (``widths``), the others have nothing to do.
    """
    WIDE_STAGES: tl.constexpr = wide_stages(STAGES, BLOCK_N, BLOCK_M, WIDE)
    ADAPTED: tl.constexpr = RANK > 0 and not SHARED_B
    if DIRECT:
        expert, pair, mask_m = single_row(topk_ids_ptr, expert_map_ptr, block, T * TOP_K, E_GLOBAL, E, BLOCK_M, HAS_MAP)
    else:
        expert, pair, mask_m = planned_rows(order_ptr, block_experts_ptr, block, BLOCK_M)
    width = 1
    if WIDE > 1:
        width = tl.load(widths_ptr + block)
        expert = tl.where(width > 0, expert, -1)
    P = tl.cast(T * TOP_K, tl.int64)
    adapters = (s_ptr, b2_ptr, ranks_ptr, enabled_ptr, SLOTS, stride_bl, stride_be, stride_bn)
    n = first_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    slot_m, first_slot, live_0, b = 0, 0, 0, 0
    if ADAPTED:
        slot_m = adapter_slot(lora_ids_ptr, pair // TOP_K, mask_m & (expert >= 0), SLOTS)
        first_slot = tl.max(slot_m, 0)
        live_0 = live_rank(ranks_ptr, enabled_ptr, first_slot, RANK)
        b = _load_b(first_slot, live_0, expert.to(tl.int64), n, (n < H) & (width == 1), adapters, RANK, BLOCK_R)

    if JOINED:
        if expert >= 0:
            if WIDE > 1:
                for i in range(width):
                    wait_for_count(counts_ptr + MAX_BLOCKS + block + i, wanted, INTERPRETED)
            else:
                wait_for_count(counts_ptr + MAX_BLOCKS + block, wanted, INTERPRETED)
    else:
        wait_for_previous(PDL)
        let_next_start(PDL)
    if expert >= 0:
        if width == 1:
            _rows_of_y(
                first_tile, tiles, expert, pair, mask_m, slot_m, first_slot, live_0, b, h_ptr, w2_ptr, y_ptr, adapters,
                P, stride_we, stride_wn, H, I, ADAPTED, RANK, TILES, MORE, WHOLE, EVEN_N,
                BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, INTERPRETED, scales_ptr, words_ptr, stride_se, stride_sn,
                BASE, FP16, NORMALIZED, SOFT, W_TMA, STAGES,
            )  # fmt: skip
        if WIDE > 1:
            if width > 1:
                pairs, mask = wide_rows(order_ptr, block, width, WIDE, BLOCK_M)
                slots, slot, live, b_wide = 0, 0, 0, 0
                if ADAPTED:
                    slots = adapter_slot(lora_ids_ptr, pairs // TOP_K, mask, SLOTS)
                    slot = tl.max(slots, 0)
                    live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
                    b_wide = _load_b(slot, live, expert.to(tl.int64), n, n < H, adapters, RANK, BLOCK_R)
                _rows_of_y(
                    first_tile, tiles, expert, pairs, mask, slots, slot, live, b_wide, h_ptr, w2_ptr, y_ptr, adapters,
                    P, stride_we, stride_wn, H, I, ADAPTED, RANK, TILES, MORE, WHOLE, EVEN_N,
                    WIDE * BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, INTERPRETED, scales_ptr, words_ptr, stride_se, stride_sn,
                    BASE, FP16, NORMALIZED, SOFT, W_TMA, WIDE_STAGES,
                )  # fmt: skip


@triton.jit(do_not_specialize=["T", "SLOTS"])
def _down_kernel(
    h_ptr,  # (P, I)
    w2_ptr,  # (E, H, I)
    s_ptr,  # (TILES, P, R)
    b2_ptr,  # (L, E, H, R)
    y_ptr,  # (P, H)
    v_ptr,  # (T, R), where B2 is shared
    topk_weights_ptr,  # (P,)
    topk_ids_ptr,  # (P,)
    expert_map_ptr,  # (E_GLOBAL,)
    order_ptr,  # (MAX_BLOCKS, BLOCK_M)
    block_experts_ptr,  # (MAX_BLOCKS,)
    widths_ptr,  # (MAX_BLOCKS,), where WIDE is above 1
    lora_ids_ptr,  # (T,)
    ranks_ptr,  # (L,)
    enabled_ptr,  # (L,)
    T,
    E_GLOBAL,
    E,
    SLOTS,
    stride_we,
    stride_wn,
    stride_bl,
    stride_be,
    stride_bn,
    H: tl.constexpr,
    I: tl.constexpr,
    RANK: tl.constexpr,  # 0: no adapters
    SHARED_B: tl.constexpr,
    TILES: tl.constexpr,
    TOP_K: tl.constexpr,
    MORE: tl.constexpr,  # more than one slot, or a rank above BLOCK_R
    HAS_MAP: tl.constexpr,
    WHOLE: tl.constexpr,  # a step takes the whole of I, and h stays in shared memory
    DIRECT: tl.constexpr,
    TILES_PER_PROGRAM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
    scales_ptr=None,  # (E, H, I / 32): what follows is there under an MXFP8 base
    words_ptr=None,  # (E, H)
    stride_se=0,
    stride_sn=0,
    BASE: tl.constexpr = "dense",
    FP16: tl.constexpr = False,
    NORMALIZED: tl.constexpr = False,
    SOFT: tl.constexpr = False,
    W_TMA: tl.constexpr = False,
    STAGES: tl.constexpr = 3,
    WIDE: tl.constexpr = 1,  # blocks of one expert that a program takes together
):
    """Grid (ceil(H / (BLOCK_N * TILES_PER_PROGRAM)), MAX_BLOCKS), after the blocks of tokens where experts share B2.

    One loop over a program's tiles, so that the loads of a tile are under way while the one before it is finished.
    """
    block = tl.program_id(1)
    token_blocks = 0
    if SHARED_B:
        token_blocks = tl.cdiv(T, TOKENS)
    if SHARED_B and block < token_blocks:
        wait_for_previous(PDL)
        let_next_start(PDL)
        if tl.program_id(0) == 0:
            sum_experts(
                s_ptr, v_ptr, topk_weights_ptr, topk_ids_ptr, expert_map_ptr, lora_ids_ptr, ranks_ptr, enabled_ptr,
                block * TOKENS, T, E_GLOBAL, E, SLOTS, tl.cast(T * TOP_K, tl.int64),
                RANK, TILES, TOP_K, HAS_MAP, TOKENS, BLOCK_R,
            )  # fmt: skip
    else:
        down_unit(
            tl.program_id(0) * TILES_PER_PROGRAM, TILES_PER_PROGRAM, block - token_blocks,
            h_ptr=h_ptr, w2_ptr=w2_ptr, s_ptr=s_ptr, b2_ptr=b2_ptr, y_ptr=y_ptr,
            topk_ids_ptr=topk_ids_ptr, expert_map_ptr=expert_map_ptr, order_ptr=order_ptr,
            block_experts_ptr=block_experts_ptr, widths_ptr=widths_ptr, lora_ids_ptr=lora_ids_ptr, ranks_ptr=ranks_ptr,
            enabled_ptr=enabled_ptr, T=T, E_GLOBAL=E_GLOBAL, E=E, SLOTS=SLOTS, stride_we=stride_we, stride_wn=stride_wn,
            stride_bl=stride_bl, stride_be=stride_be, stride_bn=stride_bn, H=H, I=I, RANK=RANK, SHARED_B=SHARED_B,
            TILES=TILES, TOP_K=TOP_K, MORE=MORE, HAS_MAP=HAS_MAP, WHOLE=WHOLE, DIRECT=DIRECT,
            EVEN_N=H % (BLOCK_N * TILES_PER_PROGRAM) == 0, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
            BLOCK_R=BLOCK_R, INTERPRETED=INTERPRETED, PDL=PDL, scales_ptr=scales_ptr, words_ptr=words_ptr,
            stride_se=stride_se, stride_sn=stride_sn, BASE=BASE, FP16=FP16, NORMALIZED=NORMALIZED, SOFT=SOFT,
            W_TMA=W_TMA, STAGES=STAGES, counts_ptr=order_ptr, wanted=0, MAX_BLOCKS=0, JOINED=False, WIDE=WIDE,
        )  # fmt: skip
