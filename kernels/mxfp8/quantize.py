"""Quantise to MXFP8 along rows, columns or both in one read, with or without SwiGLU before it, and back.

The bits are those of `beam_moe.kernels.mxfp8.format`, whose docstring is the contract. Block maxima are taken over the
integer images of the magnitudes (a float maximum drops NaN), scales come from one fp32 product and integer arithmetic
(``ex2`` and division are approximate on a GPU), and elements from the hardware's rounding, saturating conversion. Where
that conversion is missing or wrong (before sm_90, in Triton's interpreter) integer code makes the same bits.

Every operation reads its input once, through its strides, and writes only its outputs. Elements are written in the
order in which the input lies: quantising a transposed view gives a transposed view, never a transposing store. All
kernels are bound by memory; the floor is bytes read and written over copy bandwidth.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from beam_moe import env
from beam_moe.kernels.checks import refuse_gradient, refuse_overlap, require_device, require_distinct
from beam_moe.kernels.mxfp8.format import (
    BLOCK,
    ELEM_DTYPES,
    MXFP8Tensor,
    _check_names,
    _check_offsets,
    _require,
    _require_mxfp8,
    _require_tensor,
    num_blocks,
    swizzled_size,
    unswizzle_scales,
)
from beam_moe.kernels.tuning import lookup

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRAINS = "mxfp8.linear and mxfp8.grouped_linear train"


@dataclass(frozen=True)
class QuantizeConfig:
    """Launch shape: one program handles ``block_m`` rows by ``block_n`` columns.

    All are powers of two; ``block_n``, and ``block_m`` where blocks run along columns, are 32 at least.
    """

    block_m: int
    block_n: int
    num_warps: int


OP = "mxfp8_quantize"  # of the tuned table; its shapes are {"what": a key of CONFIGS, "bytes": of a dense element}

# Where no table serves. What a program writes decides its best shape: columnwise maxima want the 32 rows of a block in
# few threads. Names beginning with "fake" write dense values in one direction at least.
CONFIGS = {
    "rowwise": QuantizeConfig(32, 256, 4),
    "columnwise": QuantizeConfig(32, 256, 4),
    "both": QuantizeConfig(32, 256, 4),
    "fake_rowwise": QuantizeConfig(32, 256, 4),
    "fake_columnwise": QuantizeConfig(32, 256, 4),
    "fake_both": QuantizeConfig(32, 256, 4),
    "silu_mul": QuantizeConfig(32, 256, 4),
    "silu_mul_backward": QuantizeConfig(32, 128, 4),
    "dequantize": QuantizeConfig(32, 256, 4),
    "dequantize_columnwise": QuantizeConfig(32, 256, 4),
}


def alternatives(what: str) -> list[QuantizeConfig]:
    """Configurations of one of CONFIGS worth timing, besides the one there."""
    if what in ("rowwise", "fake_rowwise", "dequantize"):
        shapes = [(4, 1024, 4), (8, 512, 4), (16, 256, 2), (16, 256, 4), (16, 512, 8), (32, 128, 1), (32, 128, 2)]
        shapes += [(32, 128, 4), (32, 256, 8), (64, 128, 4)]
    elif what == "dequantize_columnwise":
        shapes = [(32, 128, 2), (32, 128, 4), (32, 256, 8), (32, 512, 8), (64, 256, 8)]
    else:
        shapes = [(32, 64, 1), (32, 64, 2), (32, 128, 1), (32, 128, 2), (32, 128, 4), (32, 256, 2), (32, 256, 8)]
        shapes += [(32, 512, 4), (32, 512, 8), (64, 128, 4), (64, 256, 8)]
    return [config for config in (QuantizeConfig(*shape) for shape in shapes) if config != CONFIGS[what]]


def pick(what: str, x: torch.Tensor, rows: int) -> QuantizeConfig:
    """The tuned configuration for this device, else that of CONFIGS."""
    found = lookup(x.device, OP, rows, what=what, bytes=x.element_size()) if x.is_cuda else None
    return CONFIGS[what] if found is None else QuantizeConfig(**found)


_PLAIN, _SILU_MUL, _SILU_MUL_BACKWARD = 0, 1, 2  # what the tile is made from
_SOURCES = {_SILU_MUL: "silu_mul", _SILU_MUL_BACKWARD: "silu_mul_backward"}
_NONE, _CODES, _VALUES = 0, 1, 2  # what is written in one direction


@functools.cache
def _soft(device: torch.device) -> bool:
    """Whether elements are converted in integer code: E4M3 from fp32 is exact in hardware from sm_90 on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0)


@triton.jit
def _to_float(x):
    """fp32 of a loaded tile; bf16 travels as int16, so that subnormals survive everywhere."""
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _bf16_bits(x, SOFT: tl.constexpr):
    """int16 image of fp32 rounded to bf16, to nearest even."""
    if SOFT:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return tl.where(nan, (bits >> 16) | 0x40, rounded).to(tl.int16)
    else:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True)


@triton.jit
def _store_values(ptr, x, mask, SOFT: tl.constexpr):
    """Round fp32 to the pointer's dtype (int16: bf16) and store."""
    if ptr.dtype.element_ty == tl.int16:
        tl.store(ptr, _bf16_bits(x, SOFT), mask=mask)
    else:
        tl.store(ptr, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scale_byte(magnitude, E5M2: tl.constexpr, RCEIL: tl.constexpr):
    """int32 E8M0 byte from the integer image of a block's largest magnitude; few instructions, since columnwise every
    thread makes the scales of all its columns."""
    if RCEIL:
        inverse: tl.constexpr = 1.0 / 57344.0 if E5M2 else 1.0 / 448.0
        q = (magnitude.to(tl.float32, bitcast=True) * inverse).to(tl.uint32, bitcast=True)
        # A carry out of the mantissa rounds the exponent up; 2**-127 (0x400000) and below are byte 0. Infinity gives
        # 255 and NaN 256.
        s = (tl.where(q > 0x400000, q + 0x7FFFFF, 0) >> 23).to(tl.int32)
        return tl.minimum(s, 255)
    else:
        emax: tl.constexpr = 15 if E5M2 else 8
        s = tl.maximum((magnitude >> 23) - emax, 0)
        return tl.where(magnitude >= 0x7F800000, 255, s)


@triton.jit
def _reciprocal(s):
    """fp32 ``2**(127 - s)``, NaN for 255; 254, whose reciprocal is subnormal, is no quantiser's scale."""
    return tl.where(s == 255, 0x7FC00000, 0x7F000000 - (s << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _scale_value(s):
    bits = tl.where(s == 0, 0x00400000, s << 23)
    return tl.where(s == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _encode(y, E5M2: tl.constexpr, SOFT: tl.constexpr):
    """uint8 element codes of fp32: to nearest even, saturated, NaN as 0x7F."""
    if SOFT:
        bits = y.to(tl.int32, bitcast=True)
        a = bits & 0x7FFFFFFF
        if E5M2:
            normal = ((a + 0xFFFFF + ((a >> 21) & 1)) >> 21) - 448
            # adding 2**7 leaves multiples of 2**-16, the subnormals' step, rounded to even by the addition itself
            tiny = (a.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
            code = tl.where(a < 0x38800000, tiny, tl.minimum(normal, 0x7B))
        else:
            normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960
            tiny = (a.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
            code = tl.where(a < 0x3C800000, tiny, tl.minimum(normal, 0x7E))
        code = tl.where(a > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))
        return code.to(tl.uint8)
    elif E5M2:
        return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _decode(code, E5M2: tl.constexpr, SOFT: tl.constexpr):
    """fp32 of uint8 element codes."""
    if E5M2:
        return (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif SOFT:
        c = code.to(tl.int32)
        a = ((c & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120 moves the exponent's bias
        bits = a.to(tl.int32, bitcast=True) | ((c & 0x80) << 24)
        return tl.where((c & 0x7F) == 0x7F, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _swizzled(r, c, cols):
    """Byte of scale (r, c) in the 128x4 layout of a matrix of scales with ``cols`` columns."""
    tile = (r // 128).to(tl.int64) * ((cols + 3) // 4) + c // 4
    return tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


@triton.jit
def _tile_rows(pid, rows, offsets_ptr, groups, BM: tl.constexpr, GROUPS_P2: tl.constexpr):
    """Rows of a tile: (block index (BM/32,), row (BM,), row exists (BM,), row belongs to a group (BM,)).

    With groups, tile rows come in runs of 32 that lie in one group each: block ``offsets[g] // 32 + g + j`` holds rows
    ``offsets[g] + 32 * j`` and on. Rows behind the last offset are the blocks of one more group, which owns no scales.
    """
    BLOCKS: tl.constexpr = BM // 32
    block = pid * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, 32)
    if GROUPS_P2 == 0:
        row = block.to(tl.int64)[:, None] * 32 + lane[None, :]
        exists = row < rows
        owned = exists
    else:
        g = tl.arange(0, GROUPS_P2)
        begin = tl.load(offsets_ptr + g, mask=g <= groups, other=0)
        first = begin // 32 + g
        before = (g[None, :] <= groups) & (first[None, :] <= block[:, None])
        owner = tl.maximum(tl.sum(before.to(tl.int32), axis=1) - 1, 0)
        start = tl.load(offsets_ptr + owner)
        stop = tl.load(offsets_ptr + owner + 1, mask=owner < groups, other=0)
        stop = tl.where(owner < groups, tl.minimum(stop, rows), rows)
        row = (start + (block - (start // 32 + owner)) * 32).to(tl.int64)[:, None] + lane[None, :]
        exists = (row >= start[:, None]) & (row < stop[:, None])
        owned = exists & (owner < groups)[:, None]
    return block, tl.reshape(row, (BM,)), tl.reshape(exists, (BM,)), tl.reshape(owned, (BM,))


@triton.jit
def _emit(
    x,  # (BM, BN) fp32, 0 where there is no row or column
    block,
    row,
    exists,
    owned,
    pid_n,
    batch,
    rows,
    cols,  # of the tile's half
    first,  # column of the output at which the half begins
    out_cols,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    scale_blocks,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    E5M2: tl.constexpr,
    RCEIL: tl.constexpr,
    SWIZZLE: tl.constexpr,
    GROUPED: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Quantise one tile in the directions asked for and store elements (or their values) and scales."""
    col = pid_n * BN + tl.arange(0, BN)
    mask = exists[:, None] & (col < cols)[None, :]
    out = (batch * rows + row)[:, None] * out_cols + (first + col)[None, :]
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if ROW != 0:
        amax = tl.max(tl.reshape(bits, (BM, BN // 32, 32)), axis=2)
        s = _scale_byte(amax, E5M2, RCEIL)
        code = _encode(tl.reshape(x, (BM, BN // 32, 32)) * _reciprocal(s)[:, :, None], E5M2, SOFT)
        if ROW == 1:
            tl.store(row_ptr + out, tl.reshape(code, (BM, BN)), mask=mask)
            c = pid_n * (BN // 32) + tl.arange(0, BN // 32)
            if SWIZZLE:
                # the grid covers the padding, whose maxima are 0 and so are its scales
                blocks = out_cols // 32
                padded = (rows + 127) // 128 * 128
                padded_blocks = (blocks + 3) // 4 * 4
                at = batch * padded * padded_blocks + _swizzled(row[:, None], c[None, :], blocks)
                inside = (row < padded)[:, None] & (c < padded_blocks)[None, :]
            else:
                at = (batch * rows + row)[:, None] * (out_cols // 32) + (first // 32 + c)[None, :]
                inside = exists[:, None] & (c < cols // 32)[None, :]
            tl.store(row_scale_ptr + at, s.to(tl.uint8), mask=inside)
        else:
            value = _decode(code, E5M2, SOFT) * _scale_value(s)[:, :, None]
            _store_values(row_ptr + out, tl.reshape(value, (BM, BN)), mask, SOFT)
    if COL != 0:
        if GROUPED:
            x = tl.where(owned[:, None], x, 0.0)
            bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amax = tl.max(tl.reshape(bits, (BM // 32, 32, BN)), axis=1)
        s = _scale_byte(amax, E5M2, RCEIL)
        code = _encode(tl.reshape(x, (BM // 32, 32, BN)) * _reciprocal(s)[:, None, :], E5M2, SOFT)
        if COL == 1:
            tl.store(col_ptr + out, tl.reshape(code, (BM, BN)), mask=mask)
            if SWIZZLE:
                padded = (out_cols + 127) // 128 * 128
                padded_blocks = (scale_blocks + 3) // 4 * 4
                at = batch * padded * padded_blocks + _swizzled(col[None, :], block[:, None], scale_blocks)
                inside = (block < padded_blocks)[:, None] & (col < padded)[None, :]
            else:
                at = (batch * scale_blocks + block)[:, None] * out_cols + (first + col)[None, :]
                inside = (block < scale_blocks)[:, None] & (col < cols)[None, :]
            tl.store(col_scale_ptr + at, s.to(tl.uint8), mask=inside)
        else:
            value = _decode(code, E5M2, SOFT) * _scale_value(s)[:, None, :]
            _store_values(col_ptr + out, tl.reshape(value, (BM, BN)), mask, SOFT)


@triton.jit
def _round_like(x, like, SOFT: tl.constexpr):
    """fp32 rounded to the dtype that ``like`` was loaded in (int16: bf16), as fp32."""
    if like.dtype == tl.int16:
        return (_bf16_bits(x, SOFT).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(like.dtype).to(tl.float32)


@triton.jit
def _sigmoid(x, SOFT: tl.constexpr):
    """fp32 sigmoid; the hardware form (3 ulp, 0 below 2**-126) costs a third of ``exp`` and ``/``."""
    if SOFT:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _quantize_kernel(
    x_ptr,  # (B, M, N), of SwiGLU (M, 2N); bf16 as int16
    dh_ptr,  # (M, N), SwiGLU backward only
    row_ptr,  # (B, M, N or 2N) uint8 codes, or values
    row_scale_ptr,  # (B, M, N/32 or 2N/32) uint8, or their 128x4 layout
    col_ptr,  # as row_ptr
    col_scale_ptr,  # (B, scale_blocks, N or 2N) uint8, or their 128x4 layout
    offsets_ptr,  # (groups + 1,) i32
    stride_xb,
    stride_xm,
    stride_xn,
    stride_dm,
    rows,
    cols,  # N
    groups,
    tiles_m,
    tiles_n,
    scale_blocks,
    SOURCE: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    E5M2: tl.constexpr,
    RCEIL: tl.constexpr,
    SWIZZLE: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Grid (B * tiles_m * tiles_n,): one tile of BM rows by BN columns (of each half of SwiGLU's input)."""
    pid = tl.program_id(0)
    pid_n = pid % tiles_n
    pid_m = pid // tiles_n % tiles_m
    batch = (pid // tiles_n // tiles_m).to(tl.int64)
    if COL != 0:
        block, row, exists, owned = _tile_rows(pid_m, rows, offsets_ptr, groups, BM, GROUPS_P2)
    else:
        block = pid_m
        row = pid_m.to(tl.int64) * BM + tl.arange(0, BM)
        exists = row < rows
        owned = exists
    col = pid_n * BN + tl.arange(0, BN)
    mask = exists[:, None] & (col < cols)[None, :]
    at = batch * stride_xb + row[:, None] * stride_xm + col.to(tl.int64)[None, :] * stride_xn
    raw = tl.load(x_ptr + at, mask=mask, other=0)
    x = _to_float(raw)
    if SOURCE == 0:
        _emit(
            x, block, row, exists, owned, pid_n, batch, rows, cols, 0, cols,
            row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, scale_blocks,
            ROW, COL, E5M2, RCEIL, SWIZZLE, GROUPS_P2 != 0, SOFT, BM, BN,
        )  # fmt: skip
    else:
        up = _to_float(tl.load(x_ptr + cols + at, mask=mask, other=0))
        sigmoid = _sigmoid(x, SOFT)
        if SOURCE == 1:
            _emit(
                _round_like(x * sigmoid * up, raw, SOFT),
                block, row, exists, owned, pid_n, batch, rows, cols, 0, cols,
                row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, scale_blocks,
                ROW, COL, E5M2, RCEIL, SWIZZLE, GROUPS_P2 != 0, SOFT, BM, BN,
            )  # fmt: skip
        else:
            dh = _to_float(tl.load(dh_ptr + row[:, None] * stride_dm + col[None, :], mask=mask, other=0))
            _emit(
                _round_like(dh * up * sigmoid * (1.0 + x * (1.0 - sigmoid)), raw, SOFT),
                block, row, exists, owned, pid_n, batch, rows, cols, 0, cols * 2,
                row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, scale_blocks,
                ROW, COL, E5M2, RCEIL, SWIZZLE, GROUPS_P2 != 0, SOFT, BM, BN,
            )  # fmt: skip
            _emit(
                _round_like(dh * x * sigmoid, raw, SOFT),
                block, row, exists, owned, pid_n, batch, rows, cols, cols, cols * 2,
                row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, scale_blocks,
                ROW, COL, E5M2, RCEIL, SWIZZLE, GROUPS_P2 != 0, SOFT, BM, BN,
            )  # fmt: skip


@triton.jit
def _dequantize_kernel(
    code_ptr,  # (B, M, N) uint8
    scale_ptr,  # (B, M, ceil(N/32)), columnwise (B, scale_blocks, N), uint8
    out_ptr,  # (B, M, N); bf16 as int16
    offsets_ptr,  # (groups + 1,) i32
    stride_cb,
    stride_cm,
    stride_cn,
    stride_sb,
    stride_sm,
    stride_sn,
    stride_ob,
    stride_om,
    rows,
    cols,
    groups,
    tiles_m,
    tiles_n,
    scale_blocks,
    COL: tl.constexpr,
    E5M2: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Grid (B * tiles_m * tiles_n,): one tile of BM rows by BN columns."""
    pid = tl.program_id(0)
    pid_n = pid % tiles_n
    pid_m = pid // tiles_n % tiles_m
    batch = (pid // tiles_n // tiles_m).to(tl.int64)
    if COL:
        block, row, exists, owned = _tile_rows(pid_m, rows, offsets_ptr, groups, BM, GROUPS_P2)
    else:
        row = pid_m.to(tl.int64) * BM + tl.arange(0, BM)
        exists = row < rows
    col = pid_n * BN + tl.arange(0, BN)
    wide = col.to(tl.int64)
    mask = exists[:, None] & (col < cols)[None, :]
    code = tl.load(
        code_ptr + batch * stride_cb + row[:, None] * stride_cm + wide[None, :] * stride_cn, mask=mask, other=0
    )
    if COL:
        inside = (block < scale_blocks)[:, None] & (col < cols)[None, :]
        at = batch * stride_sb + block.to(tl.int64)[:, None] * stride_sm + wide[None, :] * stride_sn
        value = _scale_value(tl.load(scale_ptr + at, mask=inside, other=0).to(tl.int32))[:, None, :]
        y = tl.reshape(_decode(tl.reshape(code, (BM // 32, 32, BN)), E5M2, SOFT) * value, (BM, BN))
        if GROUPS_P2 != 0:
            y = tl.where(owned[:, None], y, 0.0)
    else:
        c = pid_n * (BN // 32) + tl.arange(0, BN // 32)
        inside = exists[:, None] & (c < scale_blocks)[None, :]
        at = batch * stride_sb + row[:, None] * stride_sm + c.to(tl.int64)[None, :] * stride_sn
        value = _scale_value(tl.load(scale_ptr + at, mask=inside, other=0).to(tl.int32))[:, :, None]
        y = tl.reshape(_decode(tl.reshape(code, (BM, BN // 32, 32)), E5M2, SOFT) * value, (BM, BN))
    _store_values(out_ptr + batch * stride_ob + row[:, None] * stride_om + col[None, :], y, mask, SOFT)


def _image(t: torch.Tensor) -> torch.Tensor:
    """``t`` as the kernels take it: bf16 as int16, fp8 as uint8."""
    if t.dtype == torch.bfloat16:
        return t.view(torch.int16)
    return t.view(torch.uint8) if t.dtype in ELEM_DTYPES.values() else t


def _matrices(op: str, name: str, t: torch.Tensor) -> torch.Tensor:
    """A view (B, M, N) of (..., M, N)."""
    if t.ndim == 3:
        return t
    if t.ndim == 2:
        return t.unsqueeze(0)
    try:
        return t.view(-1, *t.shape[-2:])
    except RuntimeError:
        raise ValueError(
            f"{op}: the leading dimensions of {name} cannot be merged without a copy, got shape {tuple(t.shape)} with "
            f"strides {t.stride()}"
        ) from None


def _check_input(op: str, name: str, t: torch.Tensor) -> None:
    _require_tensor(op, **{name: t})
    _require(t.dtype in INPUT_DTYPES, f"{op}: {name} must be bf16, fp16 or fp32, got {t.dtype}")
    _require(t.ndim >= 2, f"{op}: {name} must have at least two dimensions, got shape {tuple(t.shape)}")
    require_device(op, name, t)
    refuse_gradient(op, TRAINS, **{name: t})


def _check_config(op: str, config: QuantizeConfig | None, columns: bool = False) -> None:
    """What a caller's configuration must be for a kernel to compile; ``columns``: some blocks run along columns."""
    if config is None:
        return
    _require(isinstance(config, QuantizeConfig), f"{op}: config must be a QuantizeConfig, got {type(config).__name__}")
    for name, least in (("block_m", BLOCK if columns else 1), ("block_n", BLOCK), ("num_warps", 1)):
        value = getattr(config, name)
        fits = isinstance(value, int) and value >= least and not value & (value - 1)
        _require(fits, f"{op}: config.{name} must be a power of two of at least {least}, got {value!r}")


def _check_grouping(op: str, offsets: torch.Tensor | None, t: torch.Tensor) -> None:
    if offsets is None:
        return
    _check_offsets(op, offsets, t)
    _require(offsets.is_contiguous(), f"{op}: offsets must be contiguous, got stride {offsets.stride()}")
    if env.flag("CHECK"):
        values = offsets.tolist()
        rising = values[0] == 0 and all(a <= b for a, b in zip(values, values[1:])) and values[-1] <= t.shape[0]
        _require(rising, f"{op}: offsets must rise from 0 to at most {t.shape[0]} rows, got {values}")


def _check_blocks(op: str, name: str, size: int) -> None:
    _require(size % BLOCK == 0, f"{op}: {name} must be a multiple of {BLOCK}, got {size}")


def _groups_p2(offsets: torch.Tensor | None) -> int:
    return 0 if offsets is None else triton.next_power_of_2(offsets.shape[0])


def _grid(rows: int, cols: int, config: QuantizeConfig, offsets: torch.Tensor | None, pad: bool) -> tuple[int, int]:
    """Tiles along rows and columns. With groups there is a short block for each and for the rows behind the last."""
    if offsets is not None:
        return triton.cdiv((rows // BLOCK + offsets.shape[0]) * BLOCK, config.block_m), triton.cdiv(
            cols, config.block_n
        )
    if pad:
        rows, cols = -(-rows // 128) * 128, -(-cols // 128) * 128
    return triton.cdiv(rows, config.block_m), triton.cdiv(cols, config.block_n)


def _run(
    op: str,
    x: torch.Tensor,
    *,
    row: torch.dtype | None,
    col: torch.dtype | None,
    elem: str,
    rounding: str,
    offsets: torch.Tensor | None = None,
    swizzle: bool = False,
    source: int = _PLAIN,
    dh: torch.Tensor | None = None,
    out: MXFP8Tensor | None = None,
    config: QuantizeConfig | None,
) -> tuple[MXFP8Tensor | torch.Tensor | None, MXFP8Tensor | torch.Tensor | None]:
    """Allocate, launch once, wrap. ``row`` and ``col``: None for not wanted, uint8 for MXFP8, else a dense dtype."""
    _check_config(op, config, columns=col is not None)
    x3 = _matrices(op, "x", x)
    batch, rows, cols = x3.shape
    cols = cols if source == _PLAIN else cols // 2
    shape = x.shape if source != _SILU_MUL else (*x.shape[:-1], cols)
    width = shape[-1]
    groups = None if offsets is None else offsets.shape[0] - 1
    blocks = num_blocks(rows, groups)
    lead = shape[:-2]

    def allocate(dtype, scale_shape):
        if dtype is None:
            return None, None
        if dtype != torch.uint8:
            return torch.empty(shape, dtype=dtype, device=x.device), None
        if out is not None:
            return out.data.view(torch.uint8), out.scale
        data = torch.empty(shape, dtype=torch.uint8, device=x.device)
        return data, torch.empty(scale_shape, dtype=torch.uint8, device=x.device)

    swizzled_row = (*lead, swizzled_size(rows, width // BLOCK))
    swizzled_col = (*lead, swizzled_size(width, blocks))
    row_data, row_scale = allocate(row, swizzled_row if swizzle else (*lead, rows, width // BLOCK))
    col_data, col_scale = allocate(col, swizzled_col if swizzle else (*lead, blocks, width))

    def mode(dtype):
        return _NONE if dtype is None else _CODES if dtype == torch.uint8 else _VALUES

    if batch and cols and (rows or offsets is not None):
        if config is None:
            what = "rowwise" if col is None else "columnwise" if row is None else "both"
            dense = any(dtype not in (None, torch.uint8) for dtype in (row, col))
            what = ("fake_" if dense else "") + what if source == _PLAIN else _SOURCES[source]
            config = pick(what, x, rows)
        block_m = config.block_m
        if col is None:
            block_m = min(block_m, triton.next_power_of_2(rows))
        config = QuantizeConfig(block_m, config.block_n, config.num_warps)
        tiles_m, tiles_n = _grid(rows, cols, config, None if col is None else offsets, swizzle)
        image = _image(x3)
        some = image  # a pointer for every argument that this specialisation never reads
        _quantize_kernel[(batch * tiles_m * tiles_n,)](
            image,
            some if dh is None else _image(dh),
            some if row_data is None else _image(row_data),
            some if row_scale is None else row_scale,
            some if col_data is None else _image(col_data),
            some if col_scale is None else col_scale,
            some if offsets is None else offsets,
            x3.stride(0),
            x3.stride(1),
            x3.stride(2),
            0 if dh is None else dh.stride(0),
            rows,
            cols,
            0 if groups is None else groups,
            tiles_m,
            tiles_n,
            blocks,
            SOURCE=source,
            ROW=mode(row),
            COL=mode(col),
            E5M2=elem == "e5m2",
            RCEIL=rounding == "rceil",
            SWIZZLE=swizzle,
            GROUPS_P2=0 if col is None else _groups_p2(offsets),
            SOFT=_soft(x.device),
            BM=config.block_m,
            BN=config.block_n,
            num_warps=config.num_warps,
        )

    def wrap(dtype, data, scale, axis):
        if dtype != torch.uint8:
            return data
        data = data.view(ELEM_DTYPES[elem])
        return MXFP8Tensor(data, scale, axis, offsets if axis == -2 else None, swizzled=swizzle)

    return wrap(row, row_data, row_scale, -1), wrap(col, col_data, col_scale, -2)


def _lies_transposed(x: torch.Tensor) -> bool:
    return x.stride(-1) != 1 and x.stride(-2) == 1 and x.shape[-1] > 1


def quantize(
    x: torch.Tensor,
    *,
    axis: int = -1,
    elem: str = "e4m3",
    rounding: str = "rceil",
    swizzle: bool = False,
    offsets: torch.Tensor | None = None,
    out: MXFP8Tensor | None = None,
    config: QuantizeConfig | None = None,
) -> MXFP8Tensor:
    """Quantise along one axis; the bits of `quantize_reference`.

    Args:
        x: (..., M, N) bf16, fp16 or fp32, any strides whose leading dimensions merge without a copy. Reading is fast if
            either of the last two strides is 1; if that is the second to last, the result is a transposed view too,
            unless ``axis`` is -2 and 32 does not divide M.
        axis: -1 (N must be a multiple of 32) or -2 (any M; the last block is short).
        elem: ``"e4m3"`` or ``"e5m2"``. rounding: ``"rceil"`` or ``"floor"``.
        swizzle: write the scales in the 128x4 layout of `swizzle_scales`, padding included.
        offsets: i32 (G + 1,) with ``axis=-2`` and a matrix: blocks restart at each group of rows; see `format`.
        out: written in place instead of allocating: x's shape, ``axis``, ``elem``, layout and number of groups as asked
            for; elements and scales contiguous or, where the result of a transposed x were a view, both transposed.
            Its ``rows`` are not written: `prepare` it again.

    Raises:
        ValueError: an argument does not fit the above.
    """
    _check_names("quantize", elem, rounding, axis)
    _check_input("quantize", "x", x)
    _check_grouping("quantize", offsets, x)
    _require(offsets is None or axis == -2, f"quantize: offsets need axis -2, got {axis}")
    _require(offsets is None or not swizzle, "quantize: swizzled scales of grouped rows have no defined layout")
    if axis == -1:
        _check_blocks("quantize", "the last dimension of x", x.shape[-1])
    if out is not None:
        _require_mxfp8("quantize", out=out)
        _require(
            out.shape == x.shape and out.elem == elem and out.swizzled == swizzle and out.axis == axis,
            f"quantize: out must have shape {tuple(x.shape)}, elem {elem}, axis {axis}, swizzled {swizzle}, got {out}",
        )
        _require((out.offsets is None) == (offsets is None), "quantize: offsets and out.offsets must come together")
        if offsets is not None:
            groups = offsets.shape[0] - 1
            _require(out.offsets.shape == offsets.shape, f"quantize: out must have {groups} groups, got {out}")
        _require(out.device == x.device, f"quantize: out is on {out.device}, x on {x.device}")
        refuse_gradient("quantize", TRAINS, out=out.data)
        refuse_overlap("quantize", out.data, x=x)
        refuse_overlap("quantize", out.scale, x=x)
    # of a transposed view the columns are the rows of what lies in memory, where no block is short
    turn = offsets is None and (axis == -1 or x.shape[-2] % BLOCK == 0)
    if turn and (_lies_transposed(x) if out is None else _lies_transposed(out.data)):
        turned = None if out is None else out.mT
        return _single("quantize", x.mT, -3 - axis, elem, rounding, swizzle, None, turned, config).mT
    return _single("quantize", x, axis, elem, rounding, swizzle, offsets, out, config)


def _single(op, x, axis, elem, rounding, swizzle, offsets, out, config) -> MXFP8Tensor:
    if out is not None:
        _require(
            out.data.is_contiguous() and out.scale.is_contiguous(),
            f"{op}: out must be contiguous, got strides {out.data.stride()} and {out.scale.stride()}",
        )
    row, col = (torch.uint8, None) if axis == -1 else (None, torch.uint8)
    made = _run(
        op, x, row=row, col=col, elem=elem, rounding=rounding, offsets=offsets, swizzle=swizzle, out=out, config=config
    )
    return made[0] if axis == -1 else made[1]


def _check_dtypes(op: str, **dtypes: torch.dtype | None) -> None:
    for name, dtype in dtypes.items():
        _require(
            dtype is None or dtype in INPUT_DTYPES, f"{op}: {name} must be None, bf16, fp16 or fp32, got {dtype!r}"
        )


def quantize_both(
    x: torch.Tensor,
    *,
    offsets: torch.Tensor | None = None,
    elem: str = "e4m3",
    rounding: str = "rceil",
    swizzle: bool = False,
    row_dtype: torch.dtype | None = None,
    col_dtype: torch.dtype | None = None,
    config: QuantizeConfig | None = None,
) -> tuple[MXFP8Tensor | torch.Tensor, MXFP8Tensor | torch.Tensor]:
    """Quantise along rows and along columns in one read: ``(row, col)`` with blocks along axis -1 and -2.

    The two are different numbers; neither can be derived from the other.

    Args:
        x: (..., M, N) as in `quantize`, N a multiple of 32, any M.
        offsets: i32 (G + 1,) for a matrix: the blocks of ``col`` restart at each group of rows; see `format`. ``row``
            has every row of x, those behind the last offset too.
        row_dtype, col_dtype: None for an `MXFP8Tensor`; bf16, fp16 or fp32 for the quantised values as a dense tensor
            in that dtype, as `fake_quantize` gives them.
        elem, rounding, swizzle: as in `quantize`.

    Raises:
        ValueError: an argument does not fit the above.
    """
    op = "quantize_both"
    _check_names(op, elem, rounding)
    _check_input(op, "x", x)
    _check_grouping(op, offsets, x)
    _check_blocks(op, "the last dimension of x", x.shape[-1])
    _check_dtypes(op, row_dtype=row_dtype, col_dtype=col_dtype)
    _require(offsets is None or not swizzle, f"{op}: swizzled scales of grouped rows have no defined layout")
    row, col = row_dtype or torch.uint8, col_dtype or torch.uint8
    kwargs = {"elem": elem, "rounding": rounding, "swizzle": swizzle, "config": config}
    # of a transposed view the columns are the rows of what lies in memory; a short block along them is not needed there
    if offsets is None and _lies_transposed(x) and x.shape[-2] % BLOCK == 0:
        turned_row, turned_col = _run(op, x.mT, row=col, col=row, **kwargs)
        return turned_col.mT, turned_row.mT
    return _run(op, x, row=row, col=col, offsets=offsets, **kwargs)


def fake_quantize(
    x: torch.Tensor,
    *,
    axis: int | str = -1,
    elem: str = "e4m3",
    rounding: str = "rceil",
    offsets: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    config: QuantizeConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``dequantize(quantize(x))`` in one pass: the values that MXFP8 keeps of x, as a dense tensor.

    Args:
        x: (..., M, N) as in `quantize`.
        axis: -1, -2, or ``"both"`` for ``(row, col)`` in one read of x.
        offsets: i32 (G + 1,) with ``axis`` -2 or ``"both"``; rows of ``col`` behind the last offset are 0.
        dtype: of the result, bf16, fp16 or fp32; rounded once from fp32 (see `dequantize_reference` on exactness).

    Raises:
        ValueError: an argument does not fit the above.
    """
    op = "fake_quantize"
    _require(axis in (-1, -2, "both"), f"{op}: axis must be -1, -2 or 'both', got {axis!r}")
    _require(dtype in INPUT_DTYPES, f"{op}: dtype must be bf16, fp16 or fp32, got {dtype}")
    if axis == "both":
        return quantize_both(
            x, offsets=offsets, elem=elem, rounding=rounding, row_dtype=dtype, col_dtype=dtype, config=config
        )
    _check_names(op, elem, rounding)
    _check_input(op, "x", x)
    _check_grouping(op, offsets, x)
    _require(offsets is None or axis == -2, f"{op}: offsets need axis -2 or 'both', got {axis}")
    if axis == -1:
        _check_blocks(op, "the last dimension of x", x.shape[-1])
    turn = offsets is None and _lies_transposed(x)
    memory_axis = -3 - axis if turn else axis
    row, col = (dtype, None) if memory_axis == -1 else (None, dtype)
    source = x.mT if turn else x
    made = _run(op, source, row=row, col=col, elem=elem, rounding=rounding, offsets=offsets, config=config)
    made = made[0] if memory_axis == -1 else made[1]
    return made.mT if turn else made


def _check_silu(op: str, gate_up: torch.Tensor, axis, elem: str, rounding: str, offsets, row_dtype, col_dtype) -> int:
    _check_names(op, elem, rounding)
    _require(axis in (-1, -2, "both"), f"{op}: axis must be -1, -2 or 'both', got {axis!r}")
    _check_input(op, "gate_up", gate_up)
    _require(gate_up.ndim == 2, f"{op}: gate_up must be a matrix, got shape {tuple(gate_up.shape)}")
    _require(
        gate_up.shape[1] <= 1 or gate_up.stride(1) == 1,
        f"{op}: gate_up must have inner stride 1, got strides {gate_up.stride()}",
    )
    _check_blocks(op, "half the last dimension of gate_up", gate_up.shape[1] // 2)
    _require(gate_up.shape[1] % 2 == 0, f"{op}: the last dimension of gate_up must be even, got {gate_up.shape[1]}")
    _check_grouping(op, offsets, gate_up)
    _require(offsets is None or axis != -1, f"{op}: offsets need axis -2 or 'both', got {axis}")
    _check_dtypes(op, row_dtype=row_dtype, col_dtype=col_dtype)
    return gate_up.shape[1] // 2


def _pick(axis, made):
    return made if axis == "both" else made[0] if axis == -1 else made[1]


def silu_mul_quantize(
    gate_up: torch.Tensor,
    *,
    axis: int | str = -1,
    offsets: torch.Tensor | None = None,
    elem: str = "e4m3",
    rounding: str = "rceil",
    swizzle: bool = False,
    row_dtype: torch.dtype | None = None,
    col_dtype: torch.dtype | None = None,
    config: QuantizeConfig | None = None,
) -> MXFP8Tensor | torch.Tensor | tuple[MXFP8Tensor | torch.Tensor, MXFP8Tensor | torch.Tensor]:
    """Quantise ``h = silu(gate) * up`` without writing h.

    h is computed in fp32 and rounded to gate_up's dtype before it is quantised, so that the result is that of the two
    operations one after the other.

    Args:
        gate_up: (T, 2I) bf16, fp16 or fp32, gate in the first I columns, inner stride 1, I a multiple of 32.
        axis: -1, -2, or ``"both"`` for ``(row, col)``.
        offsets, elem, rounding, swizzle, row_dtype, col_dtype: as in `quantize_both`.

    Returns:
        (T, I) per direction.

    Raises:
        ValueError: an argument does not fit the above.
    """
    op = "silu_mul_quantize"
    _check_silu(op, gate_up, axis, elem, rounding, offsets, row_dtype, col_dtype)
    _require(offsets is None or not swizzle, f"{op}: swizzled scales of grouped rows have no defined layout")
    made = _run(
        op,
        gate_up,
        row=None if axis == -2 else row_dtype or torch.uint8,
        col=None if axis == -1 else col_dtype or torch.uint8,
        elem=elem,
        rounding=rounding,
        offsets=offsets,
        swizzle=swizzle,
        source=_SILU_MUL,
        config=config,
    )
    return _pick(axis, made)


def silu_mul_backward_quantize(
    dh: torch.Tensor,
    gate_up: torch.Tensor,
    *,
    axis: int | str = "both",
    offsets: torch.Tensor | None = None,
    elem: str = "e4m3",
    rounding: str = "rceil",
    row_dtype: torch.dtype | None = None,
    col_dtype: torch.dtype | None = None,
    config: QuantizeConfig | None = None,
) -> MXFP8Tensor | torch.Tensor | tuple[MXFP8Tensor | torch.Tensor, MXFP8Tensor | torch.Tensor]:
    """Quantise the gradient of ``silu(gate) * up`` with respect to gate and up, without writing it densely.

    With s = sigmoid(gate): dgate = dh * up * s * (1 + gate * (1 - s)) and dup = dh * gate * s, in fp32, each rounded to
    gate_up's dtype before it is quantised.

    Args:
        dh: (T, I) of gate_up's dtype, inner stride 1.
        gate_up, axis, offsets, elem, rounding, row_dtype, col_dtype: as in `silu_mul_quantize`.

    Returns:
        (T, 2I) per direction, dgate in the first I columns.

    Raises:
        ValueError: an argument does not fit the above.
    """
    op = "silu_mul_backward_quantize"
    half = _check_silu(op, gate_up, axis, elem, rounding, offsets, row_dtype, col_dtype)
    _require_tensor(op, dh=dh)
    refuse_gradient(op, TRAINS, dh=dh)
    _require(
        dh.shape == (gate_up.shape[0], half) and dh.dtype == gate_up.dtype and dh.device == gate_up.device,
        f"{op}: dh must be {gate_up.dtype} {(gate_up.shape[0], half)} on {gate_up.device}, got {dh.dtype} "
        f"{tuple(dh.shape)} on {dh.device}",
    )
    _require(half <= 1 or dh.stride(1) == 1, f"{op}: dh must have inner stride 1, got strides {dh.stride()}")
    made = _run(
        op,
        gate_up,
        row=None if axis == -2 else row_dtype or torch.uint8,
        col=None if axis == -1 else col_dtype or torch.uint8,
        elem=elem,
        rounding=rounding,
        offsets=offsets,
        source=_SILU_MUL_BACKWARD,
        dh=dh,
        config=config,
    )
    return _pick(axis, made)


def dequantize(
    t: MXFP8Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.Tensor | None = None,
    config: QuantizeConfig | None = None,
) -> torch.Tensor:
    """Element times scale in fp32, rounded once to ``dtype``; the bits of `dequantize_reference`.

    Args:
        t: (..., M, N) with any strides whose leading dimensions merge without a copy; a transposed view gives one.
            Scales in the 128x4 layout are put in order by a copy first.
        dtype: bf16, fp16 or fp32.
        out: written in place: t's shape, ``dtype``, and the last stride (of a transposed t the one before) 1.

    Raises:
        ValueError: an argument does not fit the above.
    """
    op = "dequantize"
    _require_mxfp8(op, t=t)
    require_device(op, "t", t.data)
    refuse_gradient(op, TRAINS, t=t.data, out=out if isinstance(out, torch.Tensor) else None)
    _require(dtype in INPUT_DTYPES, f"{op}: dtype must be bf16, fp16 or fp32, got {dtype}")
    if out is not None:
        _require_tensor(op, out=out)
        _require(
            out.shape == t.shape and out.dtype == dtype and out.device == t.device,
            f"{op}: out must be {dtype} {tuple(t.shape)} on {t.device}, got {out.dtype} {tuple(out.shape)} on "
            f"{out.device}",
        )
        require_distinct(op, "out", out)
        refuse_overlap(op, out, **{"t": t.data, "t.scale": t.scale})
    if t.offsets is None and _lies_transposed(t.data if out is None else out):
        return dequantize(t.mT, dtype, out=None if out is None else out.mT, config=config).mT
    _check_config(op, config, columns=t.axis == -2)
    _check_grouping(op, t.offsets, t.data)
    if out is None:
        out = torch.empty(t.shape, dtype=dtype, device=t.device)
    _require(t.shape[-1] <= 1 or out.stride(-1) == 1, f"{op}: out must have a stride of 1, got strides {out.stride()}")
    scale = t.scale
    if t.swizzled:
        sizes = [num_blocks(n) if i == t.axis else n for i, n in ((-2, t.shape[-2]), (-1, t.shape[-1]))]
        scale = unswizzle_scales(scale, *sizes) if t.axis == -1 else unswizzle_scales(scale, *sizes[::-1]).mT
    code, scale, target = (
        _matrices(op, name, part) for name, part in (("data", t.data), ("scale", scale), ("out", out))
    )
    batch, rows, cols = code.shape
    config = config or pick("dequantize" if t.axis == -1 else "dequantize_columnwise", out, rows)
    tiles_m, tiles_n = _grid(rows, cols, config, t.offsets, False)
    if batch * rows * cols:
        _dequantize_kernel[(batch * tiles_m * tiles_n,)](
            _image(code),
            scale,
            _image(target),
            scale if t.offsets is None else t.offsets,
            *code.stride(),
            *scale.stride(),
            target.stride(0),
            target.stride(1),
            rows,
            cols,
            0 if t.offsets is None else t.offsets.shape[0] - 1,
            tiles_m,
            tiles_n,
            scale.shape[t.axis],
            COL=t.axis == -2,
            E5M2=t.elem == "e5m2",
            GROUPS_P2=_groups_p2(t.offsets),
            SOFT=_soft(t.device),
            BM=config.block_m,
            BN=config.block_n,
            num_warps=config.num_warps,
        )
    return out
