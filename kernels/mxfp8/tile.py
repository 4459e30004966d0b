"""One output tile of weights times activations, the inner loop of the fused GEMM and of the fused grouped GEMM.

Operands are swapped: weights are the tensor core's long side, tokens its short one, so that 16 tokens fill an
instruction and decoded weights go from registers straight into the product. A tile is (BN outputs, BM tokens) in fp32.
"""

import triton
import triton.language as tl

from beam_moe.kernels.mxfp8.decode_block import (
    nan_rows,
    row_exponent,
    row_top,
    scale_by_exponent,
    settled,
    token_exponent,
    weights_bf16,
    weights_fp16,
)
from beam_moe.kernels.mxfp8.quantize import _to_float


@triton.jit
def tile_place(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(tile_m, tile_n) of a program: runs of GROUP token tiles sweep all output tiles, so that both stay in L2."""
    per_run = GROUP * tiles_n
    run = pid // per_run
    height = tl.minimum(tiles_m - run * GROUP, GROUP)
    within = pid % per_run
    return run * GROUP + within % height, within // height


@triton.jit
def rows_within(row, rows, EVEN: tl.constexpr):
    """int64 rows, none out of bounds; untouched if EVEN, so that the compiler still sees that they are consecutive."""
    if EVEN:
        return row.to(tl.int64)
    else:
        return tl.minimum(row, rows - 1).to(tl.int64)


@triton.jit
def ask_for_rows(code_ptr, s_ptr, row, begin, K, stride_wn, stride_sn):
    """Ask for the first 512 codes of each row from ``begin``, and for their scales, in L2: a hint, it reads nothing.

    For rows of at least 512 contiguous codes, 16-byte aligned, with contiguous scales. Nothing outside a row's own
    16-byte lines is asked for.
    """
    near = tl.minimum(begin + tl.arange(0, 2) * 256, (K - 256) // 16 * 16)
    code = (code_ptr + row[:, None] * stride_wn + near.to(tl.int64)[None, :]).to(tl.int64)
    scale = (s_ptr + row * stride_sn + tl.minimum(begin, K - 1) // 32).to(tl.int64) // 16 * 16
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;",
        "=r,l", [code], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 16; mov.u32 $0, 0;",
        "=r,l", [scale], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def product(
    x,  # descriptor of blocks (BM, BK), or pointer; bf16, fp16, or bf16 as int16 (SOFT)
    w,  # descriptor of blocks (BN, BK), of (BK, BN) if TURNED, or pointer; uint8 codes
    s_ptr,  # uint8 scales of the tile's matrix
    top,  # int16 (BN,), read in the fp16 form only
    x_first,  # first row of the tile, for the descriptor
    x_row,  # int64 (BM,) rows, in bounds, for the pointer
    w_first,  # first output of the tile, for the descriptor
    w_base,  # what the descriptor adds to k (TURNED)
    w_row,  # int64 (BN,), in bounds, of the tile's matrix
    begin,  # multiple of BK
    end,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_sn,
    stride_sk,
    FP16: tl.constexpr,
    E5M2: tl.constexpr,
    SOFT: tl.constexpr,
    X_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    TURNED: tl.constexpr,
    EVEN_K: tl.constexpr,
    AHEAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(BN, BM) fp32 sums over ``begin..end``; in the fp16 form without the factors of rows and tokens.

    ``AHEAD`` loads scales one step early into registers: where a thread's share is under 4 bytes or not aligned to
    them, there is no asynchronous copy and the compiler would wait for each load.
    """
    acc = tl.zeros((BN, BM), tl.float32)
    lane = tl.arange(0, BK)
    block = tl.arange(0, BK // 32)
    s_row = s_ptr + w_row[:, None] * stride_sn
    if AHEAD:
        b = begin // 32 + block
        ahead = tl.load(s_row + b.to(tl.int64)[None, :] * stride_sk, mask=(b * 32 < K)[None, :], other=127)
    for k in tl.range(begin, end, BK, num_stages=STAGES):
        inside = k + lane < K
        if X_TMA:
            xt = x.load([x_first, k])
        else:
            at = x + x_row[:, None] * stride_xm + (k + lane).to(tl.int64)[None, :] * stride_xk
            if EVEN_K:
                xt = tl.load(at)
            else:
                xt = tl.load(at, mask=inside[None, :], other=0)
        if W_TMA and TURNED:
            code = w.load([w_base + k, w_first]).T
        elif W_TMA:
            code = w.load([w_first, k])
        else:
            at = w + w_row[:, None] * stride_wn + (k + lane).to(tl.int64)[None, :] * stride_wk
            if EVEN_K:
                code = tl.load(at)
            else:
                code = tl.load(at, mask=inside[None, :], other=0)
        if AHEAD:
            s = ahead
            b = (k + BK) // 32 + block
            ahead = tl.load(s_row + b.to(tl.int64)[None, :] * stride_sk, mask=(b * 32 < K)[None, :], other=127)
        else:
            b = k // 32 + block
            at = s_row + b.to(tl.int64)[None, :] * stride_sk
            if EVEN_K:
                s = tl.load(at)
            else:
                s = tl.load(at, mask=(b * 32 < K)[None, :], other=127)
        if FP16:
            acc = tl.dot(weights_fp16(code, s, top, E5M2, SOFT), xt.T, acc)
        elif SOFT:
            acc = tl.dot(weights_bf16(code, s, E5M2, True), _to_float(xt).T, acc)
        else:
            wt = weights_bf16(code, s, E5M2, False)
            if xt.dtype == tl.bfloat16:
                acc = tl.dot(wt, xt.T, acc)
            else:
                # fp16 has three bits more than bf16: two terms hold it
                high = xt.to(tl.bfloat16)
                low = xt.to(tl.float32) - high.to(tl.float32)
                low = tl.where(low == low, low, 0.0).to(tl.bfloat16)
                acc = tl.dot(wt, high.T, acc)
                acc = tl.dot(wt, low.T, acc)
        acc = settled(acc, SOFT)
    return acc


@triton.jit
def finished_product(
    x,
    w,
    s_ptr,
    raw_ptr,  # activations as given, where x is their normalised image
    word_ptr,  # int16 words of the tile's matrix (fp16 form)
    token_ptr,  # int32 words of the tokens (NORMALIZED)
    x_first,
    x_row,
    w_first,
    w_base,
    w_row,
    begin,
    end,
    K,
    stride_xm,
    stride_xk,
    stride_rm,
    stride_rk,
    stride_wn,
    stride_wk,
    stride_sn,
    stride_sk,
    FP16: tl.constexpr,
    NORMALIZED: tl.constexpr,
    E5M2: tl.constexpr,
    SOFT: tl.constexpr,
    X_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    TURNED: tl.constexpr,
    EVEN_K: tl.constexpr,
    AHEAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(BN, BM) fp32 sums with every factor applied.

    In the fp16 form rows and tokens that are marked as not fitting take the bf16 form. The choice is made for each
    element of the tile, so that no token's result depends on another's.
    """
    if FP16:
        word = tl.load(word_ptr + w_row)
        acc = product(
            x, w, s_ptr, row_top(word), x_first, x_row, w_first, w_base, w_row, begin, end, K,
            stride_xm, stride_xk, stride_wn, stride_wk, stride_sn, stride_sk,
            True, E5M2, SOFT, X_TMA, W_TMA, TURNED, EVEN_K, AHEAD, BM, BN, BK, STAGES,
        )  # fmt: skip
        wide = ((word & 256) != 0)[:, None]
        exponent = row_exponent(word, E5M2)[:, None]
        if NORMALIZED:
            token = tl.load(token_ptr + x_row)
            wide = wide | (token >= 65536)[None, :]
            exponent = exponent + token_exponent(token)[None, :]
        acc = nan_rows(scale_by_exponent(acc, exponent), word)
        if tl.max(tl.max(wide.to(tl.int32), axis=1), axis=0) != 0:
            other = product(
                raw_ptr, w, s_ptr, row_top(word), x_first, x_row, w_first, w_base, w_row, begin, end, K,
                stride_rm, stride_rk, stride_wn, stride_wk, stride_sn, stride_sk,
                False, E5M2, SOFT, False, W_TMA, TURNED, EVEN_K, True, BM, BN, BK, 1,
            )  # fmt: skip
            acc = tl.where(wide, other, acc)
    else:
        acc = product(
            x, w, s_ptr, 0, x_first, x_row, w_first, w_base, w_row, begin, end, K,
            stride_xm, stride_xk, stride_wn, stride_wk, stride_sn, stride_sk,
            False, E5M2, SOFT, X_TMA, W_TMA, TURNED, EVEN_K, AHEAD, BM, BN, BK, STAGES,
        )  # fmt: skip
    return acc
