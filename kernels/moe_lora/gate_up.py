"""The first product: ``gate | up = W13 @ x`` and the adapters' ``t = A13 @ x`` in one grid, up to the activated rows.

    x    (T, H)             bf16/fp16  activations
    w13  (E, 2I, H)         as x       gate rows, then up rows
    a    (L, E|1, R, H)     as x       A of gate, and of up ``up_a_offset`` elements further
    gu   (SPLITS, P, 2I)    fp32       partial products, one plane per share of H
    t    (SPLITS, P|T, NA*R) fp32      the same for the adapters; one row a token where A is shared over experts

Weights stand on the long side of the matrix instruction (64 rows or more) and routed rows on its short one, so that
few rows waste nothing of it. Every weight is read once by each block of at most ``BLOCK_M`` rows. H is cut into
``SPLITS`` fixed shares, which keeps all processors busy to the end.

Where H is not shared out, a program makes a tile's gate and its up and `activate`s them from registers (JOINED). Else
each program that has stored its part of a tile of I (gate or up, one share of H) arrives at the tile's counter, and the
last of the 2 * SPLITS activates the tile: it adds the planes in their order, so a result depends neither on timing nor
on the other rows of the batch. It sets the counter back. Programs of t come before those that wait for them: a GPU
starts a grid's programs in their order, so a waiting one never keeps the others from starting.

    arrivals  int32: (MAX_BLOCKS,) programs of t that are through, in the first one alone where experts share A; then
              (MAX_BLOCKS, TILES) parts of a tile that are there. Zero before and after a layer: `down` clears the
              former.

W13 in MXFP8 is decoded in registers on the way (`mxfp8`); A stays as it is.
"""

import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.activate import activate, added_up, first_factors
from beam_moe.kernels.moe_lora.mxfp8 import mxfp8_rows_times_x
from beam_moe.kernels.moe_lora.pipeline import (
    adapter_slot,
    block_rows,
    dot,
    let_next_start,
    live_rank,
    wait_for_previous,
)


@triton.jit
def _rows_times_x(
    w_ptr, row_offsets, row_mask, x_ptr, x_offsets, mask_m, k_first, k_last, H,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, MASK_ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """fp32 (BLOCK_N, BLOCK_M): weight rows times x rows over k_first..k_last."""
    offs_k = k_first + tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + row_offsets[:, None] + offs_k[None, :]
    x_ptrs = x_ptr + x_offsets[:, None] + offs_k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(k_first, k_last, BLOCK_K):
        if EVEN_K:
            if MASK_ROWS:
                w = tl.load(w_ptrs, mask=row_mask[:, None], other=0.0)
            else:
                w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=mask_m[:, None], other=0.0)
        else:
            mask_k = k + tl.arange(0, BLOCK_K) < H
            w = tl.load(w_ptrs, mask=row_mask[:, None] & mask_k[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        acc = dot(w, tl.trans(x), acc, INTERPRETED)
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    return acc


@triton.jit
def _adapter_tile(
    x_ptr, x_offsets, a_ptr, expert, t_ptr, t_row, token, mask_m, tile, k_first, k_last,
    lora_ids_ptr, ranks_ptr, enabled_ptr, SLOTS, up_a_offset, stride_al, stride_ae, stride_ar,
    H: tl.constexpr, RANK: tl.constexpr, NA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """t of one tile of A's rows, for each adapter that the block's rows use; nothing past its live rank is read."""
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    r = n % RANK
    a_offsets = r.to(tl.int64) * stride_ar + tl.where(n >= RANK, up_a_offset, 0)
    out = t_ptr + t_row[:, None] * (NA * RANK) + n[None, :]
    slot_m = adapter_slot(lora_ids_ptr, token, mask_m, SLOTS)
    for slot in range(SLOTS):
        mine = slot_m == slot
        if tl.sum(mine.to(tl.int32), 0) > 0:
            mask_n = (n < NA * RANK) & (r < live_rank(ranks_ptr, enabled_ptr, slot, RANK))
            if tl.sum(mask_n.to(tl.int32), 0) > 0:
                acc = _rows_times_x(
                    a_ptr + tl.cast(slot, tl.int64) * stride_al + expert.to(tl.int64) * stride_ae,
                    a_offsets, mask_n, x_ptr, x_offsets, mask_m, k_first, k_last, H,
                    BLOCK_M, BLOCK_N, BLOCK_K, H % BLOCK_K == 0, True, INTERPRETED,
                )  # fmt: skip
                tl.store(out, tl.trans(acc), mask=mine[:, None] & mask_n[None, :], eviction_policy="evict_last")


@triton.jit
def _arrive(counter_ptr):
    """Counts this program in once everything it stored can be seen; how many were there before it."""
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")


@triton.jit(do_not_specialize=["T", "SLOTS", "MAX_BLOCKS"])
def _gate_up_kernel(
    x_ptr,  # (T, H)
    w13_ptr,  # (E, 2I, H)
    a_ptr,  # (L, E|1, R, H)
    b_ptr,  # (L, E, I, R)
    a2_ptr,  # (L, E, R, I)
    gu_ptr,  # (SPLITS, P, 2I)
    t_ptr,  # (SPLITS, P|T, NA * R)
    h_ptr,  # (P, I)
    s_ptr,  # (TILES, P, R)
    arrivals_ptr,  # (MAX_BLOCKS + MAX_BLOCKS * TILES,)
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
    MAX_BLOCKS,
    up_a_offset,
    up_b_offset,
    stride_xt,
    stride_we,
    stride_wn,
    stride_al,
    stride_ae,
    stride_ar,
    stride_bl,
    stride_be,
    stride_bi,
    stride_a2l,
    stride_a2e,
    stride_a2r,
    H: tl.constexpr,
    I: tl.constexpr,
    RANK: tl.constexpr,  # 0: no adapters
    NA: tl.constexpr,  # 1: gate and up share A
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    JOINED: tl.constexpr,  # a program's rows of W13 are BLOCK_I of gate and the same of up
    SHARED_A: tl.constexpr,
    MORE: tl.constexpr,  # more than one slot, or a rank above BLOCK_R
    HAS_MAP: tl.constexpr,
    BLOCK_P: tl.constexpr,  # 0: rows come from the plan
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,  # of an activation, a part of BLOCK_N
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
    xn_ptr=None,  # (T, H) fp16: what follows is there under an MXFP8 base
    x_words_ptr=None,  # (T,)
    scales_ptr=None,  # (E, 2I, H / 32)
    words_ptr=None,  # (E, 2I)
    stride_se=0,
    stride_sn=0,
    BASE: tl.constexpr = "dense",
    FP16: tl.constexpr = False,
    NORMALIZED: tl.constexpr = False,
    SOFT: tl.constexpr = False,
    W_TMA: tl.constexpr = False,
    AHEAD: tl.constexpr = False,
    STAGES: tl.constexpr = 1,
):
    """Grid (MAX_BLOCKS * units of a block,): t's row tiles, then W13's, times SPLITS.

    Where experts share A the units of t go by blocks of tokens and come before all blocks of experts.
    """
    COLUMNS: tl.constexpr = BLOCK_I if JOINED else BLOCK_N  # of I, that the programs of one tile make
    TILES: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    PARTS: tl.constexpr = COLUMNS // BLOCK_I
    W_UNITS: tl.constexpr = TILES if JOINED else 2 * TILES * SPLITS
    A_TILES: tl.constexpr = (NA * RANK + BLOCK_N - 1) // BLOCK_N
    A_UNITS: tl.constexpr = A_TILES * SPLITS
    A_BLOCK_K: tl.constexpr = BLOCK_K if BASE == "dense" else BLOCK_K // 2  # as many bytes of A as of codes
    K_SHARE: tl.constexpr = ((H + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)) * BLOCK_K
    program = tl.program_id(0)
    P = T * TOP_K
    wait_for_previous(PDL)
    let_next_start(PDL)

    t_arrivals = arrivals_ptr
    first = 0
    t_expected = A_UNITS
    if SHARED_A:
        first = tl.cdiv(T, BLOCK_M) * A_UNITS
        t_expected = first
    if SHARED_A and program < first:
        token = program // A_UNITS * BLOCK_M + tl.arange(0, BLOCK_M)
        split = program % A_UNITS // A_TILES
        mask_m = token < T
        token = tl.where(mask_m, token, 0)
        _adapter_tile(
            x_ptr, token.to(tl.int64) * stride_xt, a_ptr, program * 0, t_ptr, split.to(tl.int64) * T + token, token,
            mask_m, program % A_TILES, split * K_SHARE, tl.minimum(split * K_SHARE + K_SHARE, H),
            lora_ids_ptr, ranks_ptr, enabled_ptr, SLOTS, up_a_offset, stride_al, stride_ae, stride_ar,
            H, RANK, NA, BLOCK_M, BLOCK_N, A_BLOCK_K, INTERPRETED,
        )  # fmt: skip
        _arrive(t_arrivals)
    else:
        UNITS: tl.constexpr = W_UNITS if SHARED_A else W_UNITS + A_UNITS
        block = (program - first) // UNITS
        unit = (program - first) % UNITS
        expert, pair, mask_m = block_rows(
            topk_ids_ptr, expert_map_ptr, order_ptr, block_experts_ptr, block, P, E_GLOBAL, E,
            BLOCK_M, BLOCK_P, HAS_MAP,
        )  # fmt: skip
        if expert >= 0:
            token = pair // TOP_K
            x_offsets = token.to(tl.int64) * stride_xt
            if not SHARED_A:
                t_arrivals += block
            if (not SHARED_A) and unit < A_UNITS:
                split = unit // A_TILES
                _adapter_tile(
                    x_ptr, x_offsets, a_ptr, expert, t_ptr, split.to(tl.int64) * P + pair, token, mask_m,
                    unit % A_TILES, split * K_SHARE, tl.minimum(split * K_SHARE + K_SHARE, H),
                    lora_ids_ptr, ranks_ptr, enabled_ptr, SLOTS, up_a_offset, stride_al, stride_ae, stride_ar,
                    H, RANK, NA, BLOCK_M, BLOCK_N, A_BLOCK_K, INTERPRETED,
                )  # fmt: skip
                _arrive(t_arrivals)
            else:
                if not SHARED_A:
                    unit -= A_UNITS
                if JOINED:
                    split, tile = unit * 0, unit
                    i = tl.arange(0, BLOCK_N)
                    n = tile * BLOCK_I + i % BLOCK_I
                    i, n = n, n + tl.where(i >= BLOCK_I, I, 0)
                    is_up = 0
                else:
                    split = unit // (2 * TILES)
                    is_up = unit % (2 * TILES) // TILES
                    tile = unit % TILES
                    i = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                    n = is_up * I + i
                k_first = split * K_SHARE
                k_last = tl.minimum(k_first + K_SHARE, H)
                slot_m, first_slot, live_0 = pair, 0, 0
                if RANK > 0:
                    slot_m = adapter_slot(lora_ids_ptr, token, mask_m, SLOTS)
                    first_slot = tl.max(slot_m, 0)
                    live_0 = live_rank(ranks_ptr, enabled_ptr, first_slot, RANK)
                if BASE == "mxfp8":
                    e = expert.to(tl.int64)
                    acc = mxfp8_rows_times_x(
                        w13_ptr if W_TMA else w13_ptr + e * stride_we, (expert * 2 + is_up) * I + tile * BLOCK_N,
                        n.to(tl.int64) * stride_wn, scales_ptr + e * stride_se + n.to(tl.int64) * stride_sn,
                        words_ptr + e * (2 * I) + n, i < I, x_ptr, x_offsets,
                        xn_ptr, token.to(tl.int64) * H if NORMALIZED else x_offsets, x_words_ptr + token, mask_m,
                        k_first, k_last, H,
                        BLOCK_M, BLOCK_N, BLOCK_K, H % BLOCK_K == 0, I % BLOCK_N != 0,
                        FP16, NORMALIZED, SOFT, W_TMA, AHEAD, STAGES, INTERPRETED,
                    )  # fmt: skip
                else:
                    acc = _rows_times_x(
                        w13_ptr + expert.to(tl.int64) * stride_we, n.to(tl.int64) * stride_wn, i < I,
                        x_ptr, x_offsets, mask_m, k_first, k_last, H,
                        BLOCK_M, BLOCK_N, BLOCK_K, H % BLOCK_K == 0, I % COLUMNS != 0, INTERPRETED,
                    )  # fmt: skip
                if not JOINED:
                    row = split.to(tl.int64) * P + pair
                    out = gu_ptr + row[:, None] * (2 * I) + n[None, :]
                    tl.store(out, tl.trans(acc), mask=mask_m[:, None] & (i < I)[None, :], eviction_policy="evict_last")
                bg, bu, a2 = 0, 0, 0
                if RANK > 0 and PARTS == 1:  # on their way while the program waits for its counter
                    bg, bu, a2 = first_factors(
                        b_ptr, a2_ptr, first_slot, live_0, expert.to(tl.int64), tile, up_b_offset,
                        stride_bl, stride_be, stride_bi, stride_a2l, stride_a2e, stride_a2r, I, RANK, BLOCK_I, BLOCK_R,
                    )  # fmt: skip
                if JOINED:
                    both = tl.permute(tl.reshape(tl.trans(acc), (BLOCK_M, 2, BLOCK_I)), (0, 2, 1))
                    g, u = tl.split(both)
                    activate(
                        g, u, t_ptr, b_ptr, a2_ptr, h_ptr, s_ptr, tile, expert, pair, mask_m, T,
                        slot_m, first_slot, live_0, bg, bu, a2, t_arrivals, t_expected,
                        ranks_ptr, enabled_ptr, SLOTS, up_b_offset,
                        stride_bl, stride_be, stride_bi, stride_a2l, stride_a2e, stride_a2r,
                        I, RANK, NA, TOP_K, SPLITS, SHARED_A, MORE, BLOCK_M, BLOCK_I, BLOCK_R, INTERPRETED,
                    )  # fmt: skip
                elif _arrive(arrivals_ptr + MAX_BLOCKS + block * TILES + tile) == 2 * SPLITS - 1:
                    tl.store(arrivals_ptr + MAX_BLOCKS + block * TILES + tile, 0)
                    last_part = tl.minimum((tile + 1) * PARTS, (I + BLOCK_I - 1) // BLOCK_I)
                    for part in tl.range(tile * PARTS, last_part, num_stages=1):
                        factors = (bg, bu, a2)
                        if RANK > 0 and PARTS > 1:
                            factors = first_factors(
                                b_ptr, a2_ptr, first_slot, live_0, expert.to(tl.int64), part, up_b_offset,
                                stride_bl, stride_be, stride_bi, stride_a2l, stride_a2e, stride_a2r,
                                I, RANK, BLOCK_I, BLOCK_R,
                            )  # fmt: skip
                        g, u = added_up(gu_ptr, pair, mask_m, part, P, I, SPLITS, BLOCK_I)
                        activate(
                            g, u, t_ptr, b_ptr, a2_ptr, h_ptr, s_ptr, part, expert, pair, mask_m, T,
                            slot_m, first_slot, live_0, *factors, t_arrivals, t_expected,
                            ranks_ptr, enabled_ptr, SLOTS, up_b_offset,
                            stride_bl, stride_be, stride_bi, stride_a2l, stride_a2e, stride_a2r,
                            I, RANK, NA, TOP_K, SPLITS, SHARED_A, MORE, BLOCK_M, BLOCK_I, BLOCK_R, INTERPRETED,
                        )  # fmt: skip
