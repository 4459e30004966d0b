"""MXFP8 weights in the fused layer's two products: loads, decoding, and the factors that the fp16 form leaves over.

    codes   (E, N, K)      uint8  E4M3 elements     scales  (E, N, K/32)  uint8  E8M0, blocks along K
    words   (E, N)         int16  what `prepare` found in each row; without them everything takes the bf16 form

The forms are those of `beam_moe.kernels.mxfp8.decode_block`. In the fp16 form each weight row carries a power of two,
and so does each row of bf16 activations: x is normalised beside the plan, h by the program that multiplies it. Rows
and tokens that fp16 cannot hold take the bf16 form, element by element of a tile, so that no row's bits depend on
another's.

Weights come by TMA descriptors where they are contiguous and the GPU has them: pointer loads of single bytes become
copies half as wide as the hardware's. Scales are a few bytes a thread, in short rows too few for an asynchronous copy:
those are loaded to registers one step ahead (``AHEAD``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.pipeline import dot
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
from beam_moe.kernels.mxfp8.format import MXFP8Tensor
from beam_moe.kernels.mxfp8.gemm import _stack_descriptor
from beam_moe.kernels.mxfp8.quantize import _soft


class Operand(NamedTuple):
    """One weight as a launch takes it."""

    codes: Any  # descriptor of blocks of (E * N, K), or the uint8 tensor
    strides: tuple[int, int]  # of codes: expert, row
    constants: dict[str, Any]  # and its scales and words, by name


def operand(w: MXFP8Tensor, block_n: int, block_k: int) -> Operand:
    """``w`` (E, N, K) for tiles of (block_n, block_k)."""
    codes = w.data.view(torch.uint8)
    blocks = _stack_descriptor(codes, block_n, block_k)
    constants = {
        "scales_ptr": w.scale,
        "words_ptr": w.scale if w.rows is None else w.rows,
        "stride_se": w.scale.stride(0),
        "stride_sn": w.scale.stride(1),
        "BASE": "mxfp8",
        "FP16": w.rows is not None,
        "SOFT": _soft(codes.device),
        "W_TMA": blocks is not None,
    }
    return Operand(codes if blocks is None else blocks, (codes.stride(0), codes.stride(1)), constants)


@triton.jit
def load_codes(
    w, first_row, row_offsets, mask_rows, k, K,
    W_TMA: tl.constexpr, BLOCK_K: tl.constexpr, MASK_ROWS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """uint8 (BLOCK_N, BLOCK_K) codes from column k on: of a descriptor's rows from ``first_row``, or of a pointer's."""
    if W_TMA:
        return w.load([first_row, k])
    else:
        cols = k + tl.arange(0, BLOCK_K)
        ptrs = w + row_offsets[:, None] + cols[None, :]
        if EVEN_K and not MASK_ROWS:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=mask_rows[:, None] & (cols < K)[None, :], other=0)


@triton.jit
def load_scales(s_rows, mask_rows, k, K, BLOCK_K: tl.constexpr, MASK_ROWS: tl.constexpr, EVEN_K: tl.constexpr):
    """uint8 (BLOCK_N, BLOCK_K / 32) scales of the columns from k on, 127 outside."""
    block = k // 32 + tl.arange(0, BLOCK_K // 32)
    ptrs = s_rows[:, None] + block[None, :]
    if EVEN_K and not MASK_ROWS:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask_rows[:, None] & (block * 32 < K)[None, :], other=127)


@triton.jit
def decoded_dot(code, s, top, x, acc, FP16: tl.constexpr, SOFT: tl.constexpr, INTERPRETED: tl.constexpr):
    """``acc + weights @ x``: codes (BLOCK_N, BLOCK_K) times x (BLOCK_K, BLOCK_M), fp16 in the fp16 form."""
    if FP16:
        return dot(weights_fp16(code, s, top, False, SOFT), x, acc, INTERPRETED)
    elif INTERPRETED:
        return acc + tl.dot(weights_bf16(code, s, False, SOFT), x.to(tl.float32))
    else:
        w = weights_bf16(code, s, False, SOFT).to(tl.bfloat16)
        if x.dtype == tl.bfloat16:
            return tl.dot(w, x, acc)
        else:
            # fp16 has three bits more than bf16: two terms hold it; infinities are in the first one
            high = x.to(tl.bfloat16)
            low = x.to(tl.float32) - high.to(tl.float32)
            low = tl.where(low == low, low, 0.0).to(tl.bfloat16)
            return tl.dot(w, low, tl.dot(w, high, acc))


@triton.jit
def with_factors(acc, word, exponent_m):
    """fp16-form sums (BLOCK_N, BLOCK_M) times the factors of their weight rows and activation rows."""
    e = row_exponent(word, False)[:, None] + exponent_m[None, :]
    return nan_rows(scale_by_exponent(acc, e), word)


@triton.jit
def _product(
    w, first_row, row_offsets, s_rows, mask_rows, top, x_ptr, x_offsets, mask_m, k_first, k_last, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, MASK_ROWS: tl.constexpr,
    FP16: tl.constexpr, SOFT: tl.constexpr, W_TMA: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """fp32 (BLOCK_N, BLOCK_M) over k_first..k_last, in the fp16 form without factors."""
    offs_k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + x_offsets[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if AHEAD:
        ahead = load_scales(s_rows, mask_rows, k_first, K, BLOCK_K, MASK_ROWS, EVEN_K)
    for k in tl.range(k_first, k_last, BLOCK_K, num_stages=STAGES):
        code = load_codes(w, first_row, row_offsets, mask_rows, k, K, W_TMA, BLOCK_K, MASK_ROWS, EVEN_K)
        mask = mask_m[:, None] if EVEN_K else mask_m[:, None] & (k + offs_k < K)[None, :]
        x = tl.load(x_rows + (k + offs_k)[None, :], mask=mask, other=0.0)
        if AHEAD:
            s = ahead
            ahead = load_scales(s_rows, mask_rows, k + BLOCK_K, K, BLOCK_K, MASK_ROWS, False)
        else:
            s = load_scales(s_rows, mask_rows, k, K, BLOCK_K, MASK_ROWS, EVEN_K)
        acc = decoded_dot(code, s, top, tl.trans(x), acc, FP16, SOFT, INTERPRETED)
        acc = settled(acc, SOFT)
    return acc


@triton.jit
def mxfp8_rows_times_x(
    w, first_row, row_offsets, s_rows, word_ptrs, mask_rows, x_ptr, x_offsets, xn_ptr, xn_offsets, x_word_ptrs, mask_m,
    k_first, k_last, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, MASK_ROWS: tl.constexpr,
    FP16: tl.constexpr, NORMALIZED: tl.constexpr, SOFT: tl.constexpr, W_TMA: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """fp32 (BLOCK_N, BLOCK_M): weight rows times x rows over k_first..k_last, every factor applied.

    ``xn`` is x's fp16 image with its rows' words (NORMALIZED), else x itself.
    """
    if FP16:
        word = tl.load(word_ptrs, mask=mask_rows, other=0)
        acc = _product(
            w, first_row, row_offsets, s_rows, mask_rows, row_top(word), xn_ptr, xn_offsets, mask_m, k_first, k_last, K,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, MASK_ROWS, True, SOFT, W_TMA, AHEAD, STAGES, INTERPRETED,
        )  # fmt: skip
        wide = ((word & 256) != 0)[:, None] & mask_m[None, :]
        exponent = tl.zeros((BLOCK_M,), tl.int32)
        if NORMALIZED:
            x_word = tl.load(x_word_ptrs, mask=mask_m, other=1024)
            wide = wide | (x_word >= 65536)[None, :]
            exponent = token_exponent(x_word)
        acc = with_factors(acc, word, exponent)
        if tl.max(tl.max(wide.to(tl.int32), axis=1), axis=0) != 0:
            other = _product(
                w, first_row, row_offsets, s_rows, mask_rows, row_top(word), x_ptr, x_offsets, mask_m,
                k_first, k_last, K,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, MASK_ROWS, False, SOFT, W_TMA, True, 1, INTERPRETED,
            )  # fmt: skip
            acc = tl.where(wide, other, acc)
    else:
        acc = _product(
            w, first_row, row_offsets, s_rows, mask_rows, 0, x_ptr, x_offsets, mask_m, k_first, k_last, K,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, MASK_ROWS, False, SOFT, W_TMA, AHEAD, STAGES, INTERPRETED,
        )  # fmt: skip
    return acc


@triton.jit
def magnitudes(h):
    """int32 images of |h|, which order as the numbers do."""
    return h.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def shift_of(high, low):
    """Exponent that takes rows to fp16, and whether they do not fit.

    Args: high, low int32 (BLOCK_M,), images of a row's largest and its smallest non-zero magnitude; low is the largest
    int32 in a row of zeros.
    """
    top = tl.maximum(high >> 23, 1) - 127
    shift = tl.where(high == 0, 0, tl.minimum(14 - top, 126))
    # bf16 has 8 significant bits and fp16 reaches down to 2**-24; subnormals count as not fitting
    lost = (high != 0) & ((low < 0x00800000) | ((low >> 23) - 127 + shift < -17))
    return shift, lost | (high >= 0x7F800000)


@triton.jit
def shifted(h, shift):
    """fp16 ``h * 2**shift`` for (BLOCK_M, BLOCK_K) h and (BLOCK_M,) shift within -126..126."""
    factor = ((shift + 127) << 23).to(tl.float32, bitcast=True)
    return (h.to(tl.float32) * factor[:, None]).to(tl.float16)
