"""Linear layers in MXFP8 with gradients: every product quantises both operands along the axis it contracts over.

=========  ==================  ================================  =============================
product    contracts over      operands, with their block axis   as in Transformer Engine
=========  ==================  ================================  =============================
forward    K                   x row, w row                      input rowwise, weight rowwise
dgrad      N                   dy row, w column                  grad rowwise, weight columnwise
wgrad      tokens              dy column, x column               grad and input columnwise
=========  ==================  ================================  =============================

("MXFP8", Transformer Engine's documentation of its recipes; NVIDIA, "Recipes for pre-training LLMs with MXFP8", arXiv
2506.08027: E4M3 throughout.) Row and column copies of one tensor are different numbers, so each is made from the tensor
itself. dy is read once for both. What is kept for the backward pass is what a bf16 layer keeps: x as it is if w is
trained, w as it is (or the caller's column copy) if x wants a gradient; the columns are quantised in the backward pass.

Where the hardware has no block-scaled product (before Blackwell) operands are quantised to bf16 values in one pass
(`fake_quantize`) and multiplied by cuBLAS: the same numbers, to accumulation order. On Blackwell `linear` swizzles the
scales that its products then copy to tensor memory as they are (`takes_swizzled`).

Inside ``torch.compile`` both layers are custom operators with gradients (`torch_ops`).
"""

import torch
from torch.autograd.function import once_differentiable

from beam_moe.kernels.checks import require_device
from beam_moe.kernels.mxfp8.format import BLOCK, MXFP8Tensor, _require, _require_tensor
from beam_moe.kernels.mxfp8.gemm import OUT_DTYPES, _capability, dense_matmul, gemm, takes_swizzled
from beam_moe.kernels.mxfp8.grouped import (
    _check_offsets,
    grouped_gemm,
    grouped_matmul,
    grouped_matmul_fits,
    grouped_wgrad,
)
from beam_moe.kernels.mxfp8.quantize import fake_quantize, quantize, quantize_both

Weight = torch.Tensor | tuple[MXFP8Tensor, MXFP8Tensor]


def _native(device: torch.device) -> bool:
    return _capability(device)[0] >= 10


def _quantized(t: torch.Tensor, axis: int, *, first: bool):
    """``t`` quantised along ``axis``, as its device multiplies it, with that axis last.

    Args:
        first: for `_multiply`'s first operand.
    """
    if _native(t.device):
        q = quantize(t, axis=axis, swizzle=not first or takes_swizzled(t.shape[-3 - axis]))
    else:
        q = fake_quantize(t, axis=axis)
    return q if axis == -1 else q.mT


def _quantized_both(t: torch.Tensor):
    """``t`` quantised along each axis, for a first operand."""
    if _native(t.device):
        row, col = quantize_both(t, swizzle=takes_swizzled(min(t.shape)))
    else:
        row, col = fake_quantize(t, axis="both")
    return row, col.mT


def _multiply(a, b, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(M, N) from a (M, K) and b (N, K), each dense bf16 or MXFP8."""
    if isinstance(b, MXFP8Tensor):
        return gemm(a, b, bias=bias, out_dtype=dtype)
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=b.device)
    dense_matmul(a, b, bias, out)
    return out


def _save(ctx, x, w, bias, pair, values, *more: torch.Tensor) -> None:
    """Keep for the backward pass what the gradients that are wanted need, and ``more``.

    All of it as saved tensors, so that hooks see them and writing to one before the backward pass is an error. The
    inputs of ctx's function start with x and w, and with bias if there is one.
    """
    need_x, need_w = ctx.needs_input_grad[:2]
    w_dtype = None if w is None else w.dtype
    col = scale = None
    if pair is not None:
        w, col, scale = None, pair[1].data, pair[1].scale
    elif values is not None:
        w, col = None, values[1]
    weights = (w, col, scale) if need_x else (None, None, None)
    ctx.save_for_backward(x if need_w else None, *weights, *more)
    need_bias = bias is not None and ctx.needs_input_grad[2]
    dtypes = x.dtype, w_dtype, bias.dtype if need_bias else None
    ctx.options = (pair is not None and pair[1].swizzled, *dtypes)


def _saved_columns(w, col, scale, swizzled, quantized):
    """The weights of dgrad, with the axis that it contracts over last."""
    if scale is not None:
        return MXFP8Tensor(col, scale, -2, swizzled=swizzled).mT
    return quantized(w) if col is None else col.mT


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, pair, values):
        if pair is not None:
            wq = pair[0]
        else:
            wq = values[0] if values is not None else _quantized(w, -1, first=False)
        _save(ctx, x, w, bias, pair, values)
        return _multiply(_quantized(x, -1, first=True), wq, x.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *linear_gradients(dy, *ctx.saved_tensors, *ctx.options), None, None


def linear_gradients(dy, x, w, col, scale, swizzled, x_dtype, w_dtype, bias_dtype):
    """(dx, dw, dbias) from what `_save` kept; None for those that nothing was kept for, or no dtype of the bias."""
    need_x, need_w = w is not None or col is not None, x is not None
    dx = dw = dbias = row = dyc = None
    if need_x and need_w:
        row, dyc = _quantized_both(dy)
    elif need_x:
        row = _quantized(dy, -1, first=True)
    elif need_w:
        dyc = _quantized(dy, -2, first=True)
    if need_x:
        wq = _saved_columns(w, col, scale, swizzled, lambda w: _quantized(w, -2, first=False))
        dx = _multiply(row, wq, x_dtype)
        row = wq = None  # their memory is free for the wgrad's operands
    if need_w:
        dw = _multiply(dyc, _quantized(x, -2, first=False), w_dtype)
    if bias_dtype is not None:
        dbias = dy.sum(0, dtype=torch.float32).to(bias_dtype)
    return dx, dw, dbias


def linear_values(x: torch.Tensor, values):
    """``values`` where `linear` reads them."""
    return None if _native(x.device) else values


def _check_weight(op: str, x: torch.Tensor, w: Weight, values, ndim: int) -> torch.Size:
    if isinstance(w, tuple):
        _require(
            len(w) == 2 and all(isinstance(t, MXFP8Tensor) and t.ndim == ndim for t in w),
            f"{op}: a quantised w must be (row, col), two {ndim}-dimensional MXFP8Tensor",
        )
        row, col = w
        _require(
            row.axis == -1 and col.axis == -2 and row.shape == col.shape and col.offsets is None,
            f"{op}: w must be (row, col) of one shape with blocks along axis -1 and -2, got {row} and {col}",
        )
        _require(values is None, f"{op}: values go with a dense w, not with a quantised one")
        shape = row.shape
    else:
        kinds = "a tensor or a pair (row, col) of MXFP8Tensor"
        _require(isinstance(w, torch.Tensor), f"{op}: w must be {kinds}, got {type(w).__name__}")
        _require(
            w.ndim == ndim and w.dtype in OUT_DTYPES,
            f"{op}: w must have {ndim} dimensions in bf16, fp16 or fp32, got {w.dtype} {tuple(w.shape)}",
        )
        shape = w.shape
    on = [t.device for t in w] if isinstance(w, tuple) else [w.device]
    _require(all(d == x.device for d in on), f"{op}: x is on {x.device}, w on {' and '.join(map(str, on))}")
    require_device(op, "x", x)
    _require(x.shape[-1] == shape[-1], f"{op}: x has {x.shape[-1]} features, w takes {shape[-1]}")
    _require(x.dtype in OUT_DTYPES, f"{op}: x must be bf16, fp16 or fp32, got {x.dtype}")
    for name, size in (("K", shape[-1]), ("N", shape[-2])):
        _require(size % BLOCK == 0, f"{op}: {name} must be a multiple of {BLOCK}, got {size}")
    if values is not None:
        _require(
            isinstance(values, (tuple, list))
            and len(values) == 2
            and all(isinstance(v, torch.Tensor) for v in values)
            and all(v.shape == shape and v.dtype == torch.bfloat16 and v.device == x.device for v in values),
            f"{op}: values must be fake_quantize(w, axis='both'), two bf16 tensors of w's shape {tuple(shape)}",
        )
    return shape


def linear(
    x: torch.Tensor,
    w: Weight,
    bias: torch.Tensor | None = None,
    *,
    values: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """``x @ w.T + bias`` in MXFP8, with gradients; see the module's table.

    Args:
        x: (..., K) bf16, fp16 or fp32; K a multiple of 32. The result and dx have its dtype.
        w: (N, K) bf16, fp16 or fp32 (a master weight), N a multiple of 32; dw has its dtype. Or a pair of `MXFP8Tensor`
            ``(row, col)``, ``quantize_both(w)``: frozen, no dw.
        bias: (N,), added in fp32; its gradient is the fp32 sum of dy, not quantised.
        values: ``fake_quantize(w, axis="both")`` kept by the caller over the micro-batches of one optimizer step: w is
            then not quantised again, for 4 bytes an element. Not read on Blackwell.

    Raises:
        ValueError: an argument does not fit the above.
    """
    if not torch.compiler.is_compiling():
        return _linear(x, w, bias, values)
    from beam_moe.kernels.mxfp8 import torch_ops

    return torch_ops.linear(x, w, bias, values)


def _linear(x, w, bias, values) -> torch.Tensor:
    op = "linear"
    _require_tensor(op, x=x)
    _require(x.ndim >= 1, f"{op}: x must have at least one dimension, got {tuple(x.shape)}")
    shape = _check_weight(op, x, w, values, 2)
    if bias is not None:
        _require_tensor(op, bias=bias)
        _require(
            bias.shape == (shape[0],) and bias.dtype in OUT_DTYPES and bias.device == x.device,
            f"{op}: bias must be bf16, fp16 or fp32 ({shape[0]},) on {x.device}, got {bias.dtype} {tuple(bias.shape)} "
            f"on {bias.device}",
        )
    flat = x.reshape(x.shape[:-1].numel(), shape[1])
    if isinstance(w, tuple):
        y = _Linear.apply(flat, None, bias, w, None)
    else:
        y = _Linear.apply(flat, w, bias, None, linear_values(x, values))
    return y.reshape(*x.shape[:-1], shape[0]) if x.ndim != 2 else y


def _grouped_multiply(x, wq, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(T, N) from rows x (T, K) and wq (E, N, K), dense bf16 or MXFP8."""
    if isinstance(wq, MXFP8Tensor):
        return grouped_gemm(x, wq, offsets, out_dtype=dtype)
    return grouped_matmul(x, wq, offsets).to(dtype)


def _grouped_weight(w: torch.Tensor, axis: int, dtype: torch.dtype):
    """w (E, N, K) quantised along ``axis``, with that axis last; bf16 values if PyTorch's grouped GEMM takes them."""
    q = fake_quantize(w, axis=axis) if grouped_matmul_fits(w, dtype) else quantize(w, axis=axis)
    return q if axis == -1 else q.mT


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, offsets, pair, values):
        if pair is not None:
            wq = pair[0]
        else:
            wq = values[0] if values is not None else _grouped_weight(w, -1, x.dtype)
        _save(ctx, x, w, None, pair, values, offsets)
        return _grouped_multiply(fake_quantize(x), wq, offsets, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        *kept, offsets = ctx.saved_tensors
        swizzled, x_dtype, w_dtype, _ = ctx.options
        return *grouped_gradients(dy, offsets, *kept, swizzled, x_dtype, w_dtype), None, None, None


def grouped_gradients(dy, offsets, x, w, col, scale, swizzled, x_dtype, w_dtype):
    """(dx, dw) as in `linear_gradients`."""
    need_x, need_w = w is not None or col is not None, x is not None
    dx = dw = row = dyc = None
    dy = dy.contiguous()  # a gradient can come as an expanded scalar, which no grouped GEMM takes
    if need_x and need_w:
        row, dyc = fake_quantize(dy, axis="both", offsets=offsets)
    elif need_x:
        row = fake_quantize(dy)
    elif need_w:
        dyc = fake_quantize(dy, axis=-2, offsets=offsets)
    if need_x:
        wq = _saved_columns(w, col, scale, swizzled, lambda w: _grouped_weight(w, -2, x_dtype))
        dx = _grouped_multiply(row, wq, offsets, x_dtype)
        row = wq = None  # their memory is free for the wgrad's operands
    if need_w:
        dw = grouped_wgrad(dyc, fake_quantize(x, axis=-2, offsets=offsets), offsets, out_dtype=w_dtype)
    return dx, dw


def grouped_values(x: torch.Tensor, w: torch.Tensor, values):
    """``values`` where `grouped_linear` reads them."""
    return values if grouped_matmul_fits(w, x.dtype) else None


def grouped_linear(
    x: torch.Tensor,
    w: Weight,
    offsets: torch.Tensor,
    *,
    values: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`linear` with one weight per group of rows: ``y[i] = x[i] @ w[e].T`` for the rows i of group e.

    Args:
        x: (T, K) bf16, fp16 or fp32, rows sorted by group; rows behind the last offset give zeros and get zero
            gradients.
        w: (E, N, K) bf16, fp16 or fp32, or a pair ``(row, col)`` of `MXFP8Tensor`: frozen, no dw. Blocks of the wgrad's
            operands restart at each group. Groups without rows get zero gradients.
        offsets: i32 (E + 1,), as in `grouped_gemm`.
        values: as in `linear`.

    Raises:
        ValueError: an argument does not fit the above.
    """
    if not torch.compiler.is_compiling():
        return _grouped_linear(x, w, offsets, values)
    from beam_moe.kernels.mxfp8 import torch_ops

    return torch_ops.grouped_linear(x, w, offsets, values)


def _grouped_linear(x, w, offsets, values) -> torch.Tensor:
    op = "grouped_linear"
    _require_tensor(op, x=x)
    _require(x.ndim == 2, f"{op}: x must be (T, K), got {tuple(x.shape)}")
    shape = _check_weight(op, x, w, values, 3)
    _check_offsets(op, offsets, shape[0], x.shape[0], x.device)
    if isinstance(w, tuple):
        return _GroupedLinear.apply(x, None, offsets, w, None)
    return _GroupedLinear.apply(x, w, offsets, None, grouped_values(x, w, values))
