"""First launch over weights: ``gate | up = W13 @ x``, and the adapters' ``t = A13 @ x`` as further rows of one grid.

    x    (T, H)             bf16/fp16  activations
    w13  (E, 2I, H)         as x       gate rows, then up rows
    a    (L, E|1, R, H)     as x       A of gate, and of up ``up_a_offset`` elements further
    gu   (SPLITS, P, 2I)    fp32       partial products, one plane per share of H
    t    (SPLITS, P|T, NA*R) fp32      the same for the adapters; one row a token where A is shared over experts

Weights stand on the long side of the matrix instruction (64 rows or more) and routed rows on its short one, so that
few rows waste nothing of it. Every weight is read once for each block of at most ``BLOCK_M`` rows, or for up to
``WIDE`` blocks of an expert (`MoEConfig.wide`). H is cut into ``SPLITS`` fixed shares, which keeps all processors busy
to the end; `activate` adds the planes in their order, so a result depends neither on timing nor on the other rows of
the batch.

W13 in MXFP8 is decoded in registers on the way (`mxfp8`); A stays as it is.
"""

import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.mxfp8 import mxfp8_rows_times_x
from beam_moe.kernels.moe_lora.pipeline import (
    adapter_slot,
    adapter_tile,
    block_rows,
    dot,
    let_next_start,
    live_rank,
    wait_for_previous,
    wide_rows,
    wide_stages,
)


@triton.jit
def _rows_times_x(
    w, row_offsets, row_mask, x_ptr, x_offsets, mask_m, k_first, k_last, H,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    MASK_ROWS: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """fp32 (BLOCK_N, BLOCK_M): weight rows times x rows over k_first..k_last."""
    offs_k = k_first + tl.arange(0, BLOCK_K)
    w_ptrs = w + row_offsets[:, None] + offs_k[None, :]
    x_ptrs = x_ptr + x_offsets[:, None] + offs_k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(k_first, k_last, BLOCK_K, num_stages=STAGES):
        mask_k = k + tl.arange(0, BLOCK_K) < H
        if EVEN_K and not MASK_ROWS:
            tile = tl.load(w_ptrs)
        elif EVEN_K:
            tile = tl.load(w_ptrs, mask=row_mask[:, None], other=0.0)
        else:
            tile = tl.load(w_ptrs, mask=row_mask[:, None] & mask_k[None, :], other=0.0)
        if EVEN_K:
            x = tl.load(x_ptrs, mask=mask_m[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        acc = dot(tile, tl.trans(x), acc, INTERPRETED)
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    return acc


@triton.jit
def _adapter_tile(
    x_ptr, x_offsets, a_ptr, expert, t_ptr, t_row, token, mask_m, tile, k_first, k_last,
    lora_ids_ptr, ranks_ptr, enabled_ptr, SLOTS, up_a_offset, stride_al, stride_ae, stride_ar,
    H: tl.constexpr, RANK: tl.constexpr, NA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
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
                    BLOCK_M, BLOCK_N, BLOCK_K, H % BLOCK_K == 0, True, STAGES, INTERPRETED,
                )  # fmt: skip
                tl.store(out, tl.trans(acc), mask=mine[:, None] & mask_n[None, :], eviction_policy="evict_last")


@triton.jit
def _expert_tile(
    tile, split, expert, pair, mask_m, x_ptr, w13_ptr, a_ptr, gu_ptr, t_ptr, lora_ids_ptr, ranks_ptr, enabled_ptr,
    SLOTS, up_a_offset, stride_xt, stride_we, stride_wn, stride_al, stride_ae, stride_ar, P, H: tl.constexpr,
    N: tl.constexpr, RANK: tl.constexpr, NA: tl.constexpr, TOP_K: tl.constexpr, K_SHARE: tl.constexpr,
    A_BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr, W_TMA: tl.constexpr, xn_ptr, x_words_ptr, scales_ptr, words_ptr, stride_se, stride_sn,
    BASE: tl.constexpr, FP16: tl.constexpr, NORMALIZED: tl.constexpr, SOFT: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One tile and share of an expert's W13, or behind those of its A13, for BLOCK_M routed pairs."""
    W_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    k_first = split * K_SHARE
    k_last = tl.minimum(k_first + K_SHARE, H)
    token = pair // TOP_K
    x_offsets = token.to(tl.int64) * stride_xt
    row = split.to(tl.int64) * P + pair
    if tile < W_TILES:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        w_offsets = n.to(tl.int64) * stride_wn
        e = expert.to(tl.int64)
        if BASE == "mxfp8":
            acc = mxfp8_rows_times_x(
                w13_ptr if W_TMA else w13_ptr + e * stride_we, expert * N + tile * BLOCK_N,
                w_offsets, scales_ptr + e * stride_se + n.to(tl.int64) * stride_sn,
                words_ptr + e * N + n, n < N, x_ptr, x_offsets,
                xn_ptr, token.to(tl.int64) * H if NORMALIZED else x_offsets, x_words_ptr + token, mask_m,
                k_first, k_last, H,
                BLOCK_M, BLOCK_N, BLOCK_K, H % BLOCK_K == 0, N % BLOCK_N != 0,
                FP16, NORMALIZED, SOFT, W_TMA, AHEAD, STAGES, INTERPRETED,
            )  # fmt: skip
        else:
            acc = _rows_times_x(
                w13_ptr + e * stride_we, w_offsets, n < N, x_ptr, x_offsets, mask_m, k_first, k_last, H,
                BLOCK_M, BLOCK_N, BLOCK_K, H % BLOCK_K == 0, N % BLOCK_N != 0, STAGES, INTERPRETED,
            )  # fmt: skip
        ptrs = gu_ptr + row[:, None] * N + n[None, :]
        tl.store(ptrs, tl.trans(acc), mask=mask_m[:, None] & (n < N)[None, :], eviction_policy="evict_last")
    elif RANK > 0:
        _adapter_tile(
            x_ptr, x_offsets, a_ptr, expert, t_ptr, row, token, mask_m, tile - W_TILES, k_first, k_last,
            lora_ids_ptr, ranks_ptr, enabled_ptr, SLOTS, up_a_offset, stride_al, stride_ae, stride_ar,
            H, RANK, NA, BLOCK_M, adapter_tile(BLOCK_N, NA * RANK), A_BLOCK_K, STAGES, INTERPRETED,
        )  # fmt: skip


@triton.jit
def gate_up_unit(
    unit, block, x_ptr, w13_ptr, a_ptr, gu_ptr, t_ptr, topk_ids_ptr, expert_map_ptr, order_ptr, block_experts_ptr,
    widths_ptr, lora_ids_ptr, ranks_ptr, enabled_ptr, T, E_GLOBAL, E, SLOTS, up_a_offset, stride_xt, stride_we,
    stride_wn, stride_al, stride_ae, stride_ar, H: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, NA: tl.constexpr,
    TOP_K: tl.constexpr, SPLITS: tl.constexpr, SHARED_A: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr,
    W_TMA: tl.constexpr, xn_ptr, x_words_ptr, scales_ptr, words_ptr, stride_se, stride_sn, BASE: tl.constexpr,
    FP16: tl.constexpr, NORMALIZED: tl.constexpr, SOFT: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Tile and share ``unit`` of a block; blocks of tokens come before those of pairs where experts share A.

    Returns for how many blocks from this one on it is done: 0 where no pair fell in the block, or where the program of
    an earlier block takes its rows too (``widths``).
    """
    W_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    A_N: tl.constexpr = adapter_tile(BLOCK_N, NA * RANK)
    A_TILES: tl.constexpr = (NA * RANK + A_N - 1) // A_N
    TILES: tl.constexpr = W_TILES if SHARED_A else W_TILES + A_TILES
    A_BLOCK_K: tl.constexpr = BLOCK_K if BASE == "dense" else BLOCK_K // 2  # as many bytes of A as of codes
    K_SHARE: tl.constexpr = ((H + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)) * BLOCK_K
    WIDE_STAGES: tl.constexpr = wide_stages(STAGES, BLOCK_N, BLOCK_M, WIDE)
    P = T * TOP_K
    done = 0
    token_blocks = 0
    if SHARED_A:
        token_blocks = tl.cdiv(T, BLOCK_M)
    if SHARED_A and block < token_blocks:
        done = 1
        split = unit // A_TILES
        if split < SPLITS:
            token = block * BLOCK_M + tl.arange(0, BLOCK_M)
            mask_m = token < T
            token = tl.where(mask_m, token, 0)
            _adapter_tile(
                x_ptr, token.to(tl.int64) * stride_xt, a_ptr, unit * 0, t_ptr, split.to(tl.int64) * T + token, token,
                mask_m, unit % A_TILES, split * K_SHARE, tl.minimum(split * K_SHARE + K_SHARE, H),
                lora_ids_ptr, ranks_ptr, enabled_ptr, SLOTS, up_a_offset, stride_al, stride_ae, stride_ar,
                H, RANK, NA, BLOCK_M, A_N, A_BLOCK_K, STAGES, INTERPRETED,
            )  # fmt: skip
    elif unit < TILES * SPLITS:
        block -= token_blocks
        expert, pair, mask_m = block_rows(
            topk_ids_ptr, expert_map_ptr, order_ptr, block_experts_ptr, block, P, E_GLOBAL, E,
            BLOCK_M, BLOCK_P, HAS_MAP,
        )  # fmt: skip
        if BLOCK_P > 1:
            if unit == 0:
                tl.store(block_experts_ptr + block, expert)
                tl.store(order_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M), tl.where(mask_m, pair, -1))
        width = 1
        if WIDE > 1:
            width = tl.load(widths_ptr + block)
        if expert >= 0:
            done = width
            if width == 1:
                _expert_tile(
                    unit % TILES, unit // TILES, expert, pair, mask_m, x_ptr, w13_ptr, a_ptr, gu_ptr, t_ptr,
                    lora_ids_ptr, ranks_ptr, enabled_ptr, SLOTS, up_a_offset, stride_xt, stride_we, stride_wn,
                    stride_al, stride_ae, stride_ar, P, H, N, RANK, NA, TOP_K, K_SHARE, A_BLOCK_K,
                    BLOCK_M, BLOCK_N, BLOCK_K, INTERPRETED, W_TMA, xn_ptr, x_words_ptr, scales_ptr, words_ptr,
                    stride_se, stride_sn, BASE, FP16, NORMALIZED, SOFT, AHEAD, STAGES,
                )  # fmt: skip
            if WIDE > 1:
                if width > 1:
                    pairs, mask = wide_rows(order_ptr, block, width, WIDE, BLOCK_M)
                    _expert_tile(
                        unit % TILES, unit // TILES, expert, pairs, mask, x_ptr, w13_ptr, a_ptr, gu_ptr, t_ptr,
                        lora_ids_ptr, ranks_ptr, enabled_ptr, SLOTS, up_a_offset, stride_xt, stride_we, stride_wn,
                        stride_al, stride_ae, stride_ar, P, H, N, RANK, NA, TOP_K, K_SHARE, A_BLOCK_K,
                        WIDE * BLOCK_M, BLOCK_N, BLOCK_K, INTERPRETED, W_TMA, xn_ptr, x_words_ptr, scales_ptr,
                        words_ptr, stride_se, stride_sn, BASE, FP16, NORMALIZED, SOFT, AHEAD, WIDE_STAGES,
                    )  # fmt: skip
    return done


@triton.jit(do_not_specialize=["T", "SLOTS"])
def _gate_up_kernel(
    x_ptr,  # (T, H)
    w13_ptr,  # (E, 2I, H)
    a_ptr,  # (L, E|1, R, H)
    gu_ptr,  # (SPLITS, P, 2I)
    t_ptr,  # (SPLITS, P|T, NA * R)
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
    up_a_offset,
    stride_xt,
    stride_we,
    stride_wn,
    stride_al,
    stride_ae,
    stride_ar,
    H: tl.constexpr,
    N: tl.constexpr,  # 2I
    RANK: tl.constexpr,  # 0: no adapters
    NA: tl.constexpr,  # 1: gate and up share A
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED_A: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_P: tl.constexpr,  # 0: rows come from the plan
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
    W_TMA: tl.constexpr = False,  # w13_ptr is a descriptor of (E * 2I, H) codes
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
    AHEAD: tl.constexpr = False,
    STAGES: tl.constexpr = 3,
    WIDE: tl.constexpr = 1,  # blocks of one expert that a program takes together
):
    """Grid (row tiles of W13 and A times SPLITS, MAX_BLOCKS), after the blocks of tokens where experts share A."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    gate_up_unit(
        tl.program_id(0), tl.program_id(1), x_ptr=x_ptr, w13_ptr=w13_ptr, a_ptr=a_ptr, gu_ptr=gu_ptr, t_ptr=t_ptr,
        topk_ids_ptr=topk_ids_ptr, expert_map_ptr=expert_map_ptr, order_ptr=order_ptr,
        block_experts_ptr=block_experts_ptr, widths_ptr=widths_ptr, lora_ids_ptr=lora_ids_ptr, ranks_ptr=ranks_ptr,
        enabled_ptr=enabled_ptr, T=T, E_GLOBAL=E_GLOBAL, E=E, SLOTS=SLOTS, up_a_offset=up_a_offset,
        stride_xt=stride_xt, stride_we=stride_we,
        stride_wn=stride_wn, stride_al=stride_al, stride_ae=stride_ae, stride_ar=stride_ar, H=H, N=N, RANK=RANK, NA=NA,
        TOP_K=TOP_K, SPLITS=SPLITS, SHARED_A=SHARED_A, HAS_MAP=HAS_MAP, BLOCK_P=BLOCK_P, BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, INTERPRETED=INTERPRETED, W_TMA=W_TMA, xn_ptr=xn_ptr, x_words_ptr=x_words_ptr,
        scales_ptr=scales_ptr, words_ptr=words_ptr, stride_se=stride_se, stride_sn=stride_sn, BASE=BASE, FP16=FP16,
        NORMALIZED=NORMALIZED, SOFT=SOFT, AHEAD=AHEAD, STAGES=STAGES, WIDE=WIDE,
    )  # fmt: skip
