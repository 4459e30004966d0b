"""MXFP8 weight blocks decoded in registers: device helpers shared by the GEMMs and the fused experts.

A weight tile is (BN, BK) uint8 codes with (BN, BK/32) uint8 scales. The tensor core multiplies it in one of two
forms, both of which give ``dequantize(weights, bf16) @ x`` to accumulation order:

**bf16** (`weights_bf16`, no preconditions): element times scale, rounded to bf16 as `dequantize` does; exact for E4M3
with scale bytes 3 to 246 and for E5M2 with 10 to 239. Hopper has no packed fp8 to bf16 conversion, so it costs about
half as many instructions again as the other.

**fp16** (`weights_fp16`, after `prepare`): element times ``2**(s - top + LIFT)`` in fp16, where ``top`` is the
largest scale byte of the output row; the row's factor ``2**(top - 127 - LIFT)`` is left to the epilogue
(`row_exponent`). Exact while ``top - s`` stays within ``LIMIT`` (21 for E4M3, 8 for E5M2: fp16 keeps 24 binades below
1, the element needs some of them). `prepare` finds ``top`` over blocks that are not all zero, since such a block has
byte 0 and would widen every spread, and marks rows that do not fit; `weights_fp16` keeps every factor finite, so that a
zero block is 0 whatever its byte. Marked rows must take the bf16 form. A row with scale byte 255 is NaN as a whole: its
factor is.

Activations for the fp16 form are fp16. bf16 has more exponents than fp16: `normalize_rows` multiplies each row by a
power of two that brings its largest magnitude into ``[2**14, 2**15)`` and marks rows that are not exact even so (not
finite, or a spread beyond 2**31): those must take the bf16 form too.

In Triton's interpreter and before sm_90 (``SOFT``) codes are decoded by integer arithmetic and the products are taken
in fp32, which holds both forms.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from beam_moe.kernels.checks import require_device
from beam_moe.kernels.mxfp8.format import MXFP8Tensor, _require, _require_mxfp8
from beam_moe.kernels.mxfp8.quantize import _decode, _scale_value, _soft, _to_float

ROW_WIDE = 256  # bit of a row's word: its scales spread too far for fp16
ROW_NAN = 512  # bit of a row's word: one of its scale bytes is 255
TOKEN_WIDE = 1 << 16  # bit of a token's word: not exact in fp16
TOKEN_BIAS = 1024  # a token's word holds its exponent plus this


@triton.jit
def codes_fp16(code, E5M2: tl.constexpr, SOFT: tl.constexpr):
    """fp16 of uint8 element codes, exact; NaN stays NaN."""
    if E5M2:
        return code.to(tl.float8e5, bitcast=True).to(tl.float16)
    elif SOFT:
        return _decode(code, False, True).to(tl.float16)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _scale_blocks(w, factor):
    """(BN, BK) times (BN, BK/32), one factor per 32 elements."""
    BN: tl.constexpr = w.shape[0]
    BK: tl.constexpr = w.shape[1]
    return tl.reshape(tl.reshape(w, (BN, BK // 32, 32)) * factor[:, :, None], (BN, BK))


@triton.jit
def weights_fp16(code, s, top, E5M2: tl.constexpr, SOFT: tl.constexpr):
    """(BN, BK) fp16 weights relative to their row's largest scale.

    Args: code uint8 (BN, BK); s uint8 (BN, BK/32); top int16 (BN,), `row_top` of the rows' words.
    """
    # fp16's exponent field of 2**(s - top + LIFT): 1 and more where the block is not all zero, below 31 everywhere
    field: tl.constexpr = 15 if E5M2 else 22
    above = (field - top).to(tl.int16)[:, None]
    if SOFT:
        f = s.to(tl.int16) + above
        f = tl.where((f < 0) | (f > 30), 30, f)
        factor = (f << 10).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        # pairs of 16-bit fields, four scales at a time: a scale costs two instructions instead of seven
        factor = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, most;
            mov.b32 most, 0x001e001e;
            prmt.b32 low, $2, 0, 0x4140;
            prmt.b32 high, $2, 0, 0x4342;
            add.u16x2 low, low, $3;
            add.u16x2 high, high, $4;
            min.u16x2 low, low, most;
            min.u16x2 high, high, most;
            shl.b32 $0, low, 10;
            shl.b32 $1, high, 10;
            }
            """,
            "=r,=r,r,r,r", [s, tl.broadcast_to(above, s.shape)], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return _scale_blocks(codes_fp16(code, E5M2, SOFT), factor)


@triton.jit
def weights_bf16(code, s, E5M2: tl.constexpr, SOFT: tl.constexpr):
    """(BN, BK) weights as `dequantize` to bf16 gives them, in fp32 under SOFT.

    Args: code uint8 (BN, BK); s uint8 (BN, BK/32).
    """
    if SOFT:
        return _scale_blocks(_decode(code, E5M2, True), _scale_value(s.to(tl.int32)))
    else:
        # through fp16 and fp32: both steps are packed or free, the direct conversion is one slow instruction an element
        w = codes_fp16(code, E5M2, False).to(tl.float32).to(tl.bfloat16)
        bits = tl.maximum(s.to(tl.int16) << 7, 0x0040)  # byte 0 is bf16's subnormal 2**-127
        bits = tl.where(s == 255, 0x7FC0, bits).to(tl.int16)
        return _scale_blocks(w, bits.to(tl.bfloat16, bitcast=True))


@triton.jit
def settled(acc, SOFT: tl.constexpr):
    """``acc`` once the products that make it are through: needed after each step of a loop over decoded weights.

    Hopper's matrix instructions read decoded weights from registers while they run. Triton (seen in 3.6 and 3.8) lets
    the last ones of a step run on into the next step, which decodes into the same registers; long tiles then lose
    products. A use of the sum inside the loop makes it wait. Costs nothing else: the move is not an instruction.
    """
    if SOFT:
        return acc
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def row_top(word):
    """int16 largest scale byte from a row's word."""
    return (word & 0xFF).to(tl.int16)


@triton.jit
def row_exponent(word, E5M2: tl.constexpr):
    """int32 exponent of the factor that the fp16 form leaves to the epilogue."""
    lift: tl.constexpr = 0 if E5M2 else 7
    return (word & 0xFF).to(tl.int32) - (127 + lift)


@triton.jit
def scale_by_exponent(x, e):
    """fp32 ``x * 2**e`` for int32 e, without ``ex2`` (which flushes) and without a needless overflow.

    In two factors, which reach ``2**-252`` and ``2**254``: enough for ``|x| <= 2**60`` and e up to 254.
    """
    a = tl.minimum(tl.maximum(e, -126), 127)
    b = tl.minimum(tl.maximum(e - a, -126), 127)
    return x * ((a + 127) << 23).to(tl.float32, bitcast=True) * ((b + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def nan_rows(x, word):
    """``x`` (BN, BM) with the rows of NaN words set to NaN."""
    nan = tl.full(x.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(((word & 512) != 0)[:, None], nan, x)


@triton.jit
def _prepare_kernel(
    code_ptr,
    scale_ptr,
    word_ptr,
    rows,
    blocks,
    cols,
    stride_b,
    stride_n,
    stride_k,
    stride_sb,
    stride_sn,
    stride_sk,
    stride_wb,
    LIMIT: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """Grid (cdiv(rows, BN), batch): the words of BN rows from one read of their codes and scales."""
    batch = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    inside = n < rows
    top = tl.full((BN,), -1, tl.int32)
    low = tl.full((BN,), 256, tl.int32)
    nan = tl.zeros((BN,), tl.int32)
    for first in range(0, blocks, BB):
        b = first + tl.arange(0, BB)
        mask = inside[:, None] & (b < blocks)[None, :]
        at = batch * stride_sb + n[:, None] * stride_sn + b.to(tl.int64)[None, :] * stride_sk
        s = tl.load(scale_ptr + at, mask=mask, other=0).to(tl.int32)
        k = first * 32 + tl.arange(0, BB * 32)
        at = batch * stride_b + n[:, None] * stride_n + k.to(tl.int64)[None, :] * stride_k
        code = tl.load(code_ptr + at, mask=inside[:, None] & (k < cols)[None, :], other=0).to(tl.int32) & 0x7F
        used = mask & (tl.max(tl.reshape(code, (BN, BB, 32)), axis=2) != 0)
        nan = tl.maximum(nan, tl.max((mask & (s == 255)).to(tl.int32), axis=1))
        used = used & (s != 255)
        top = tl.maximum(top, tl.max(tl.where(used, s, -1), axis=1))
        low = tl.minimum(low, tl.min(tl.where(used, s, 256), axis=1))
    # outside LOW..HIGH dequantising to bf16 rounds or overflows, which only the bf16 form repeats
    low_exact: tl.constexpr = 10 if LIMIT == 8 else 3
    high_exact: tl.constexpr = 239 if LIMIT == 8 else 246
    wide = (top >= 0) & ((top - low > LIMIT) | (low < low_exact) | (top > high_exact))
    word = tl.maximum(top, 0) + wide.to(tl.int32) * 256 + nan * 512
    tl.store(word_ptr + batch * stride_wb + n, word.to(tl.int16), mask=inside)


def prepare(t: MXFP8Tensor) -> MXFP8Tensor:
    """``t`` with what the fp16 form of its rows needs, found in one pass over elements and scales.

    Call it once for weights that decode reads, and again after every change of them in place: a tensor that already
    has ``rows`` gets them rewritten where they lie, so that captured graphs and other holders see the new ones. Rows
    too wide for fp16 stay correct: kernels read the marks on the device.

    Args:
        t: (..., N, K) with blocks along axis -1 and row-major scales.

    Returns:
        ``t`` with ``rows``, int16 (..., N): the row's largest scale byte over blocks that are not all zero (0 if all
        are), plus `ROW_WIDE` if its scales spread too far, plus `ROW_NAN` if a scale byte is 255.

    Raises:
        ValueError: the blocks do not run along axis -1, the scales are swizzled, or ``t.rows`` are there but lie on
            another device, with an inner stride other than 1, or so that their leading dimensions do not merge.
    """
    _require_mxfp8("prepare", t=t)
    require_device("prepare", "t", t.data)
    _require(t.axis == -1 and t.offsets is None, f"prepare: t must have its blocks along axis -1, got axis {t.axis}")
    _require(not t.swizzled, "prepare: t has swizzled scales; pass row-major ones")
    *lead, n, k = t.shape
    rows = t.rows if t.rows is not None else torch.empty((*lead, n), dtype=torch.int16, device=t.device)
    codes = t.data.view(torch.uint8).flatten(0, -3) if lead else t.data.view(torch.uint8).unsqueeze(0)
    scale = t.scale.flatten(0, -3) if lead else t.scale.unsqueeze(0)
    try:
        words = rows.view(codes.shape[0], n)
    except RuntimeError:
        words = None
    _require(
        words is not None and (n <= 1 or words.stride(1) == 1) and rows.device == t.device,
        f"prepare: t.rows must have inner stride 1, leading dimensions that merge, and lie on {t.device}, got strides "
        f"{rows.stride()} for shape {tuple(rows.shape)} on {rows.device}",
    )
    if words.numel():
        bn = 16
        _prepare_kernel[(triton.cdiv(n, bn), codes.shape[0])](
            codes,
            scale,
            words,
            n,
            scale.shape[-1],
            k,
            *codes.stride(),
            *scale.stride(),
            words.stride(0),
            LIMIT=8 if t.elem == "e5m2" else 21,
            BN=bn,
            BB=8,
            num_warps=4,
        )
    return replace(t, rows=rows)


@triton.jit
def normalize_row(x_row, out_row, cols, stride_xk, BLOCK: tl.constexpr):
    """int32 word of one row of bf16 (or fp32, or bf16 as int16), whose normalised fp16 elements go to ``out_row``."""
    lane = tl.arange(0, BLOCK)
    x_row += lane.to(tl.int64) * stride_xk
    top = tl.zeros((BLOCK,), tl.int32)
    for k in range(0, cols, BLOCK):
        x = _to_float(tl.load(x_row + tl.cast(k, tl.int64) * stride_xk, mask=k + lane < cols, other=0))
        top = tl.maximum(top, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    amax = tl.max(top, axis=0)
    shift = tl.where(amax == 0, 0, 14 - (tl.maximum(amax >> 23, 1) - 127))
    bad = tl.zeros((BLOCK,), tl.int32)
    for k in range(0, cols, BLOCK):
        inside = k + lane < cols
        x = _to_float(tl.load(x_row + tl.cast(k, tl.int64) * stride_xk, mask=inside, other=0))
        y = scale_by_exponent(x, shift)
        half = y.to(tl.float16)
        lost = (half.to(tl.float32) != y) | ((half == 0.0) & (x != 0.0))
        bad = tl.maximum(bad, lost.to(tl.int32))
        tl.store(out_row + k + lane, half, mask=inside)
    wide = (tl.max(bad, axis=0) != 0) | (amax >= 0x7F800000)
    return shift + 1024 + wide.to(tl.int32) * 65536


@triton.jit
def _normalize_kernel(
    x_ptr,
    out_ptr,
    word_ptr,
    cols,
    stride_xm,
    stride_xk,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,): one row to normalised fp16 and its word."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tl.store(word_ptr + row, normalize_row(x_ptr + row * stride_xm, out_ptr + row * cols, cols, stride_xk, BLOCK))


@triton.jit
def token_exponent(word):
    """int32 exponent by which the epilogue multiplies a normalised token's results."""
    return 1024 - (word & 0xFFFF)


def normalize_rows(x: torch.Tensor, *, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 rows, each times a power of two, and one word per row.

    Args:
        x: (M, K) bf16 or fp32, any strides.
        pdl: let the next launch of the stream, which must call ``gdc_wait`` before it reads the results, begin early.

    Returns:
        fp16 (M, K), contiguous, and int32 (M,): the exponent plus `TOKEN_BIAS`, plus `TOKEN_WIDE` if the row is not
        finite or lost bits.
    """
    out = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    words = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    if x.shape[0]:
        soft, cols = _soft(x.device), x.shape[1]
        block = min(16384, triton.next_power_of_2(max(cols, 16)))
        _normalize_kernel[(x.shape[0],)](
            bits_if_soft(x, soft),
            out,
            words,
            cols,
            *x.stride(),
            PDL=pdl,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )
    return out, words


def bits_if_soft(x: torch.Tensor, soft: bool) -> torch.Tensor:
    """bf16 as its int16 image where bf16 arithmetic is wrong or missing; any other tensor as it is."""
    return x.view(torch.int16) if soft and x.dtype == torch.bfloat16 else x
