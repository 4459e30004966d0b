"""The MXFP8 format: OCP microscaling elements in blocks of 32 that share one power-of-two scale.

An element is E4M3 (largest value 448, no infinity) or E5M2 (largest value 57344). A block scale is an E8M0 byte ``s``
that means ``2**(s - 127)``; 255 is NaN and there is no zero. Scale rules (OCP Microscaling Formats v1.0, section 6.3,
and NVIDIA's "Recipes for pre-training LLMs with MXFP8", arXiv 2506.08027), from the block's largest magnitude ``amax``
in fp32:

=========  =====================================================================  ==========================
rounding   scale                                                                  amax after scaling, E4M3
=========  =====================================================================  ==========================
``rceil``  ``amax * fp32(1 / largest)`` rounded up to a power of two              (224, 448]: never saturates
``floor``  ``2**(exponent(amax) - emax)``, emax 8 for E4M3 and 15 for E5M2        [256, 512): saturates at 448
=========  =====================================================================  ==========================

An element is ``x * 2**(127 - s)`` in fp32, rounded to nearest even and saturated. Contract for special values:

- an all-zero block has scale byte 0 and elements +-0, the sign kept; byte 0 means ``2**-127``, not zero;
- subnormal inputs, scales, products and elements are kept: nothing is flushed to zero;
- NaN or infinity anywhere in a block gives scale byte 255 and 32 elements of 0x7F (NaN); other blocks are untouched;
- dequantising multiplies in fp32, which is exact unless the product overflows; scale byte 255 gives NaN.

**Blocks along rows, in groups.** A wgrad contracts over the rows of each expert, so its operands hold blocks along axis
-2 that restart at each group. With ``offsets`` i32 (G + 1,), starting with 0 and never falling, group g owns rows
``offsets[g] : offsets[g + 1]``; its block j covers rows ``offsets[g] + 32 * j`` up to
``min(offsets[g] + 32 * (j + 1), offsets[g + 1])`` and has its scales in row

    ``offsets[g] // 32 + g + j``

of ``scale``, (T // 32 + G, N). The rows of two groups never collide since
``(b - a + 31) // 32 <= b // 32 - a // 32 + 1``; the size is known on the host and no prefix sum is needed. A scale row
that no block owns holds 0, and rows of data that no group owns (from ``offsets[G]`` on) hold 0 and have no scale. Data
is not padded: the last block of a group is short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

BLOCK = 32
ELEM_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ELEM_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
ELEM_EMAX = {"e4m3": 8, "e5m2": 15}
ROUNDINGS = ("rceil", "floor")
NAN_BYTE = 0x7F  # the one NaN that both element types are written with
_ELEM_NAMES = {dtype: name for name, dtype in ELEM_DTYPES.items()}


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _require_tensor(op: str, **tensors: object) -> None:
    """Each of ``tensors`` is a torch.Tensor."""
    for name, t in tensors.items():
        _require(isinstance(t, torch.Tensor), f"{op}: {name} must be a tensor, got {type(t).__name__}")


def _require_mxfp8(op: str, **tensors: object) -> None:
    """Each of ``tensors`` is an MXFP8Tensor."""
    for name, t in tensors.items():
        _require(isinstance(t, MXFP8Tensor), f"{op}: {name} must be an MXFP8Tensor, got {type(t).__name__}")


def _require_rows_apart(op: str, out: torch.Tensor) -> None:
    """No two rows of a matrix that a kernel writes share memory."""
    (rows, n), stride = out.shape, out.stride(0)
    _require(rows <= 1 or stride >= n, f"{op}: out must have rows that do not overlap, got strides {out.stride()}")


def num_blocks(rows: int, groups: int | None = None) -> int:
    """Scale entries along a block axis of ``rows`` elements; with ``groups``, the rows of the grouped layout."""
    return -(-rows // BLOCK) if groups is None else rows // BLOCK + groups


@dataclass(frozen=True, eq=False)
class MXFP8Tensor:
    """A tensor in MXFP8: elements, one E8M0 byte per 32 of them along ``axis``, and where the blocks lie.

    Attributes:
        data: (..., M, N), ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, any strides.
        scale: uint8 of data's shape with the size n of ``axis`` replaced by ``ceil(n / 32)``, any strides;
            ``torch.float8_e8m0fnu`` is accepted and viewed as uint8. The last block is short if 32 does not divide n.
        axis: -1 or -2, the axis along which the blocks run (the axis a matrix product contracts over).
        offsets: i32 (G + 1,) if the blocks restart at each group of rows: ``data`` is (T, N), ``axis`` is -2 and
            ``scale`` (T // 32 + G, N) in the grouped layout of this module's docstring.
        swizzled: ``scale`` is in the 128x4 layout of `swizzle_scales`, (..., bytes).
        rows: i16 (..., M), what `decode_block.prepare` found in each row for the fp16 form of decode; None before it,
            and only with blocks along axis -1. It describes the bytes at the time of that call.

    It can be copied, pickled, saved by ``torch.save`` and, where this module is imported, loaded with
    ``weights_only=True``.

    Raises:
        ValueError: a dtype, shape, axis or device does not fit the above.
    """

    data: torch.Tensor
    scale: torch.Tensor
    axis: int = -1
    offsets: torch.Tensor | None = None
    swizzled: bool = False
    rows: torch.Tensor | None = None

    def __post_init__(self):
        data, scale = self.data, self.scale
        _require_tensor("MXFP8Tensor", data=data, scale=scale)
        _require(data.dtype in _ELEM_NAMES, f"MXFP8Tensor: data must be float8_e4m3fn or float8_e5m2, got {data.dtype}")
        _require(data.ndim >= 2, f"MXFP8Tensor: data must have at least two dimensions, got shape {tuple(data.shape)}")
        _require(self.axis in (-1, -2), f"MXFP8Tensor: axis must be -1 or -2, got {self.axis}")
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
            object.__setattr__(self, "scale", scale)
        _require(scale.dtype == torch.uint8, f"MXFP8Tensor: scale must be uint8 or float8_e8m0fnu, got {scale.dtype}")
        _require(scale.device == data.device, f"MXFP8Tensor: scale is on {scale.device}, data on {data.device}")
        groups = None
        if self.offsets is not None:
            _check_offsets("MXFP8Tensor", self.offsets, data)
            _require(self.axis == -2, f"MXFP8Tensor: offsets need blocks along axis -2, got axis {self.axis}")
            _require(not self.swizzled, "MXFP8Tensor: swizzled scales of grouped rows have no defined layout")
            groups = self.offsets.shape[0] - 1
        want = list(data.shape)
        want[self.axis] = num_blocks(want[self.axis], groups)
        if self.swizzled:
            rows, cols = (want[-2], want[-1]) if self.axis == -1 else (want[-1], want[-2])
            want = [*want[:-2], swizzled_size(rows, cols)]
        _require(
            list(scale.shape) == want,
            f"MXFP8Tensor: scale must have shape {tuple(want)} for data {tuple(data.shape)} with blocks along axis "
            f"{self.axis}, got {tuple(scale.shape)}",
        )
        if self.rows is not None:
            _require_tensor("MXFP8Tensor", rows=self.rows)
            _require(
                self.axis == -1 and self.rows.dtype == torch.int16 and self.rows.shape == data.shape[:-1],
                f"MXFP8Tensor: rows must be int16 {tuple(data.shape[:-1])} with blocks along axis -1, got "
                f"{self.rows.dtype} {tuple(self.rows.shape)} and axis {self.axis}",
            )

    @property
    def shape(self) -> torch.Size:
        """The logical shape, that of ``data``."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def elem(self) -> str:
        """``"e4m3"`` or ``"e5m2"``."""
        return _ELEM_NAMES[self.data.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of elements and scales."""
        return self.data.numel() + self.scale.numel()

    @property
    def mT(self) -> MXFP8Tensor:
        """The transposed matrices as a view: the same blocks, the axis swapped.

        Raises:
            ValueError: the blocks restart at groups of rows.
        """
        _require(self.offsets is None, "MXFP8Tensor.mT: blocks that restart at groups of rows cannot be transposed")
        scale = self.scale if self.swizzled else self.scale.mT  # the 128x4 layout has no order of axes to swap
        return replace(self, data=self.data.mT, scale=scale, axis=-3 - self.axis, rows=None)

    def __reduce__(self):
        # elements as bytes: PyTorch's fp8 tensors cannot be pickled outside torch.save
        rest = (self.axis, self.offsets, self.swizzled, self.rows)
        return _rebuild, (self.data.view(torch.uint8), self.elem, self.scale, *rest)

    def __getitem__(self, index) -> MXFP8Tensor:
        """Index the leading dimensions (all but the last two) by ints and slices; a view."""
        index = index if isinstance(index, tuple) else (index,)
        _require(
            len(index) <= self.ndim - 2 and all(isinstance(i, int | slice) for i in index),
            f"MXFP8Tensor: only the {self.ndim - 2} leading dimensions take an index (ints and slices), got {index}",
        )
        rows = self.rows if self.rows is None else self.rows[index]
        return replace(self, data=self.data[index], scale=self.scale[index], rows=rows)

    def to(self, device, non_blocking: bool = False) -> MXFP8Tensor:
        """The same tensor on another device."""
        offsets = self.offsets if self.offsets is None else self.offsets.to(device, non_blocking=non_blocking)
        return replace(
            self,
            data=self.data.to(device, non_blocking=non_blocking),
            scale=self.scale.to(device, non_blocking=non_blocking),
            offsets=offsets,
            rows=self.rows if self.rows is None else self.rows.to(device, non_blocking=non_blocking),
        )

    def __repr__(self) -> str:
        extra = "" if self.offsets is None else f", groups={self.offsets.shape[0] - 1}"
        extra += ", swizzled" if self.swizzled else ""
        return (
            f"MXFP8Tensor(shape={tuple(self.shape)}, elem={self.elem}, axis={self.axis}, device={self.device}{extra})"
        )


def _rebuild(codes: torch.Tensor, elem: str, *rest) -> MXFP8Tensor:
    return MXFP8Tensor(codes.view(ELEM_DTYPES[elem]), *rest)


torch.serialization.add_safe_globals([_rebuild])  # torch.load reads it as it reads tensors


def _check_offsets(op: str, offsets: torch.Tensor, data: torch.Tensor) -> None:
    _require_tensor(op, offsets=offsets)
    _require(
        offsets.dtype == torch.int32 and offsets.ndim == 1 and offsets.shape[0] >= 2,
        f"{op}: offsets must be int32 of shape (groups + 1,), groups >= 1, got {offsets.dtype} {tuple(offsets.shape)}",
    )
    _require(data.ndim == 2, f"{op}: offsets need a matrix, got shape {tuple(data.shape)}")
    _require(offsets.device == data.device, f"{op}: offsets are on {offsets.device}, the data on {data.device}")


def _check_names(op: str, elem: str, rounding: str, axis: int = -1) -> None:
    _require(
        isinstance(elem, str) and elem in ELEM_DTYPES, f"{op}: elem must be one of {sorted(ELEM_DTYPES)}, got {elem!r}"
    )
    _require(rounding in ROUNDINGS, f"{op}: rounding must be one of {list(ROUNDINGS)}, got {rounding!r}")
    _require(axis in (-1, -2), f"{op}: axis must be -1 or -2, got {axis!r}")


def _scale_bytes(op: str, scale: torch.Tensor) -> torch.Tensor:
    _require_tensor(op, scale=scale)
    e8m0 = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
    _require(e8m0, f"{op}: scale must be uint8 or float8_e8m0fnu, got {scale.dtype}")
    return scale.view(torch.uint8)


def e8m0_to_float(scale: torch.Tensor) -> torch.Tensor:
    """fp32 values ``2**(s - 127)`` of E8M0 bytes; 0 gives the subnormal ``2**-127``, 255 gives NaN.

    Raises:
        ValueError: ``scale`` is neither uint8 nor ``float8_e8m0fnu``.
    """
    s = _scale_bytes("e8m0_to_float", scale).to(torch.int32)
    bits = torch.where(s == 0, 0x00400000, s << 23)
    return torch.where(s == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def e8m0_reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """fp32 values ``2**(127 - s)`` of E8M0 bytes; 254 gives the subnormal ``2**-127``, 255 gives NaN.

    Raises:
        ValueError: ``scale`` is neither uint8 nor ``float8_e8m0fnu``.
    """
    s = _scale_bytes("e8m0_reciprocal", scale).to(torch.int32)
    bits = torch.where(s == 254, 0x00400000, (254 - s) << 23)
    return torch.where(s == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def e8m0_from_amax(amax: torch.Tensor, *, elem: str = "e4m3", rounding: str = "rceil") -> torch.Tensor:
    """uint8 block scales of fp32 block maxima (not negative), by the module's table; non-finite maxima give 255.

    Raises:
        ValueError: ``amax`` is no floating-point tensor, or ``elem`` or ``rounding`` is none of the module's.
    """
    _check_names("e8m0_from_amax", elem, rounding)
    _require_tensor("e8m0_from_amax", amax=amax)
    _require(amax.is_floating_point(), f"e8m0_from_amax: amax must be of a floating dtype, got {amax.dtype}")
    bits = amax.to(torch.float32).view(torch.int32)
    if rounding == "rceil":
        # the product, not a division: its fp32 rounding is part of the definition
        q = (amax.to(torch.float32) * torch.tensor(1.0 / ELEM_MAX[elem], dtype=torch.float32, device=amax.device)).view(
            torch.int32
        )
        exponent, mantissa = (q >> 23) & 0xFF, q & 0x7FFFFF
        scale = exponent + torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0).to(torch.int32)
    else:
        scale = ((bits >> 23) - ELEM_EMAX[elem]).clamp(0, 254)
    return torch.where((bits & 0x7FFFFFFF) >= 0x7F800000, 255, scale).to(torch.uint8)


def _quantize_last(x: torch.Tensor, elem: str, rounding: str) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.shape[-1]
    blocks = torch.nn.functional.pad(x.to(torch.float32), (0, -n % BLOCK)).unflatten(-1, (num_blocks(n), BLOCK))
    # integers order magnitudes with NaN above infinity above finite, so one maximum sees every special value
    magnitude = (blocks.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1)
    scale = e8m0_from_amax(magnitude.view(torch.float32), elem=elem, rounding=rounding)
    y = blocks * e8m0_reciprocal(scale).unsqueeze(-1)
    code = y.clamp(-ELEM_MAX[elem], ELEM_MAX[elem]).to(ELEM_DTYPES[elem]).view(torch.uint8)
    code = torch.where(y.isnan(), NAN_BYTE, code).to(torch.uint8).flatten(-2)[..., :n]
    return code.view(ELEM_DTYPES[elem]), scale


def quantize_reference(
    x: torch.Tensor,
    *,
    axis: int = -1,
    elem: str = "e4m3",
    rounding: str = "rceil",
    offsets: torch.Tensor | None = None,
) -> MXFP8Tensor:
    """The definition of quantisation, in plain torch and bit for bit.

    Args:
        x: (..., M, N) of any floating dtype, read as fp32.
        axis: -1 or -2, along which the blocks run; the last block is short if 32 does not divide the size.
        elem: ``"e4m3"`` or ``"e5m2"``. rounding: ``"rceil"`` or ``"floor"``.
        offsets: i32 (G + 1,), only with ``axis=-2`` and a matrix: blocks restart at each group of rows.

    Raises:
        ValueError: an argument does not fit the above.
    """
    _check_names("quantize_reference", elem, rounding, axis)
    _require_tensor("quantize_reference", x=x)
    _require(x.is_floating_point(), f"quantize_reference: x must be of a floating dtype, got {x.dtype}")
    _require(x.ndim >= 2, f"quantize_reference: x must have at least two dimensions, got shape {tuple(x.shape)}")
    if offsets is not None:
        _check_offsets("quantize_reference", offsets, x)
        _require(axis == -2, f"quantize_reference: offsets need axis -2, got {axis}")
        starts, rows = offsets.tolist(), x.shape[0]
        data = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
        scale = torch.zeros(num_blocks(rows, len(starts) - 1), x.shape[1], dtype=torch.uint8, device=x.device)
        for group, (begin, end) in enumerate(zip(starts, starts[1:])):
            if end > begin:
                part = quantize_reference(x[begin:end], axis=-2, elem=elem, rounding=rounding)
                data[begin:end] = part.data.view(torch.uint8)
                first = begin // BLOCK + group
                scale[first : first + part.scale.shape[0]] = part.scale
        return MXFP8Tensor(data.view(ELEM_DTYPES[elem]), scale, -2, offsets)
    if axis == -2:
        data, scale = _quantize_last(x.mT, elem, rounding)
        return MXFP8Tensor(data.mT.contiguous(), scale.mT.contiguous(), -2)
    return MXFP8Tensor(*_quantize_last(x, elem, rounding), -1)


def _expand_scale(t: MXFP8Tensor) -> torch.Tensor:
    """fp32 scale of every element, of data's shape; 1 for rows that no group owns."""
    if t.offsets is not None:
        values = e8m0_to_float(t.scale)
        full = torch.ones(t.shape, dtype=torch.float32, device=t.device)
        starts = t.offsets.tolist()
        for group, (begin, end) in enumerate(zip(starts, starts[1:])):
            first = begin // BLOCK + group
            part = values[first : first + num_blocks(end - begin)]
            full[begin:end] = part.repeat_interleave(BLOCK, -2)[: end - begin]
        return full
    scale = t.scale
    if t.swizzled:
        sizes = list(t.shape[-2:])
        sizes[t.axis] = num_blocks(sizes[t.axis])
        rows, cols = sizes if t.axis == -1 else sizes[::-1]
        scale = unswizzle_scales(scale, rows, cols)
        scale = scale if t.axis == -1 else scale.mT
    return e8m0_to_float(scale).repeat_interleave(BLOCK, t.axis).narrow(t.axis, 0, t.shape[t.axis])


def dequantize_reference(t: MXFP8Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Element times scale in fp32, rounded once to ``dtype``.

    Exact in fp32 unless the product overflows, and exact in bf16 for E4M3 with scale bytes 3 to 246 and E5M2 with 10 to
    239.

    Raises:
        ValueError: ``t`` is no `MXFP8Tensor`, or ``dtype`` no floating one.
    """
    _require_mxfp8("dequantize_reference", t=t)
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    _require(floating, f"dequantize_reference: dtype must be a floating dtype, got {dtype!r}")
    return (t.data.to(torch.float32) * _expand_scale(t)).to(dtype)


def swizzled_size(rows: int, cols: int) -> int:
    """Bytes of a (rows, cols) scale matrix in the 128x4 layout: both sizes padded, to 128 and to 4."""
    return -(-rows // 128) * 128 * (-(-cols // 4) * 4)


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales in the 128x4 layout of Blackwell's tensor cores (cuBLAS "block scaling factors layout").

    Args:
        scale: uint8 or ``float8_e8m0fnu`` (..., R, C), C blocks of each of R rows or columns; pass ``scale.mT``
            of a tensor with blocks along axis -2.

    Returns:
        uint8 (..., bytes), zero where padded to 128 rows and 4 columns. Byte
        ``((r // 128) * ceil(C / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4`` holds entry (r, c).

    Raises:
        ValueError: ``scale`` has another dtype or fewer than two dimensions.
    """
    _require_tensor("swizzle_scales", scale=scale)
    _require(
        scale.dtype in (torch.uint8, torch.float8_e8m0fnu) and scale.ndim >= 2,
        f"swizzle_scales: scale must be uint8 or float8_e8m0fnu with at least two dimensions, got {scale.dtype} "
        f"{tuple(scale.shape)}",
    )
    *lead, rows, cols = scale.shape
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, -cols % 4, 0, -rows % 128))
    tiles = padded.unflatten(-1, (-(-cols // 4), 4)).unflatten(-3, (-(-rows // 128), 4, 32))
    return tiles.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1)).reshape(*lead, swizzled_size(rows, cols))


def unswizzle_scales(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Scales (..., rows, cols) uint8 back from the (..., bytes) of `swizzle_scales`.

    Raises:
        ValueError: ``scale`` has another dtype, or not the bytes of ``rows`` and ``cols``.
    """
    size = swizzled_size(rows, cols)
    _require_tensor("unswizzle_scales", scale=scale)
    _require(
        scale.dtype in (torch.uint8, torch.float8_e8m0fnu) and scale.shape[-1:] == (size,),
        f"unswizzle_scales: scale must be uint8 or float8_e8m0fnu (..., {size}) for {rows} rows and {cols} columns, "
        f"got {scale.dtype} {tuple(scale.shape)}",
    )
    lead = scale.shape[:-1]
    tiles = scale.view(torch.uint8).reshape(*lead, -(-rows // 128), -(-cols // 4), 32, 4, 4)
    padded = tiles.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
    return padded.reshape(*lead, -(-rows // 128) * 128, -(-cols // 4) * 4)[..., :rows, :cols]
