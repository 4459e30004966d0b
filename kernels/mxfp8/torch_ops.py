"""`linear` and `grouped_linear` as torch custom operators with gradients: what they become inside ``torch.compile``.

    beam_moe::mxfp8_linear             y
    beam_moe::mxfp8_linear_backward    those of dx, dw and dbias that are wanted, in this order
    beam_moe::mxfp8_grouped_linear, beam_moe::mxfp8_grouped_linear_backward    the same, without a bias

An operator takes tensors alone: a quantised weight travels as the list ``[row.data, row.scale, col.data,
col.scale(, row.rows)]``, kept values as theirs; both are empty where there are none. Arguments are checked when the
operator runs. A backward operator takes what `autograd._save` keeps, so that a gradient is wanted where its operands
are there.
"""

from __future__ import annotations

import torch

from beam_moe.kernels.mxfp8 import autograd
from beam_moe.kernels.mxfp8.format import MXFP8Tensor


def _parts(op: str, w: autograd.Weight) -> tuple[torch.Tensor | None, list[torch.Tensor], bool, bool]:
    """(dense, parts of the pair, whether their scales are swizzled)."""
    if isinstance(w, torch.Tensor):
        return w, [], False, False
    row, col = w
    if row.axis != -1 or col.axis != -2 or col.offsets is not None:
        raise ValueError(
            f"{op}: w must be (row, col) with blocks along axis -1 and -2 that restart nowhere, got axis {row.axis} "
            f"and {col.axis}"
        )
    parts = [row.data, row.scale, col.data, col.scale]
    return None, parts if row.rows is None else [*parts, row.rows], row.swizzled, col.swizzled


def _pair(parts: list[torch.Tensor], row_swizzled: bool, col_swizzled: bool) -> tuple[MXFP8Tensor, MXFP8Tensor] | None:
    if not parts:
        return None
    row = MXFP8Tensor(*parts[:2], -1, swizzled=row_swizzled, rows=parts[4] if len(parts) == 5 else None)
    return row, MXFP8Tensor(*parts[2:4], -2, swizzled=col_swizzled)


def _weight_shape(w: torch.Tensor | None, pair: list[torch.Tensor]) -> torch.Size:
    return pair[0].shape if w is None else w.shape


def _wanted(*gradients: torch.Tensor | None) -> list[torch.Tensor]:
    return [t for t in gradients if t is not None]


def _in_place(gradients: list[torch.Tensor], *wanted: bool) -> list[torch.Tensor | None]:
    """The gradients of a backward operator, each in its place."""
    rest = iter(gradients)
    return [next(rest) if here else None for here in wanted]


@torch.library.custom_op("beam_moe::mxfp8_linear", mutates_args=())
def linear_op(
    x: torch.Tensor, w: torch.Tensor | None, bias: torch.Tensor | None, pair: list[torch.Tensor],
    values: list[torch.Tensor], row_swizzled: bool, col_swizzled: bool,
) -> torch.Tensor:  # fmt: skip
    weight = _pair(pair, row_swizzled, col_swizzled) or w
    return autograd._linear(x, weight, bias, tuple(values) or None)


@linear_op.register_fake
def _(x, w, bias, pair, values, row_swizzled, col_swizzled):
    return x.new_empty((x.shape[0], _weight_shape(w, pair)[0]))


@torch.library.custom_op("beam_moe::mxfp8_linear_backward", mutates_args=())
def linear_backward_op(
    dy: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor | None, col: torch.Tensor | None,
    scale: torch.Tensor | None, swizzled: bool, x_dtype: torch.dtype, w_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> list[torch.Tensor]:  # fmt: skip
    return _wanted(*autograd.linear_gradients(dy, x, w, col, scale, swizzled, x_dtype, w_dtype, bias_dtype))


@linear_backward_op.register_fake
def _(dy, x, w, col, scale, swizzled, x_dtype, w_dtype, bias_dtype):
    (rows, n), kept = dy.shape, col if w is None else w
    return _wanted(
        None if kept is None else dy.new_empty((rows, kept.shape[1]), dtype=x_dtype),
        None if x is None else dy.new_empty((n, x.shape[1]), dtype=w_dtype),
        None if bias_dtype is None else dy.new_empty((n,), dtype=bias_dtype),
    )


def _linear_setup(ctx, inputs, output) -> None:
    x, w, bias, pair, values, *swizzled = inputs
    autograd._save(ctx, x, w, bias, _pair(pair, *swizzled), autograd.linear_values(x, values or None))
    ctx.lists = len(pair), len(values)


def _linear_backward(ctx, dy):
    kept = ctx.saved_tensors
    x, w, col, _ = kept
    made = linear_backward_op(dy, *kept, *ctx.options)
    wanted = w is not None or col is not None, x is not None, ctx.options[-1] is not None
    return *_in_place(made, *wanted), *([None] * n for n in ctx.lists), None, None


linear_op.register_autograd(_linear_backward, setup_context=_linear_setup)


@torch.library.custom_op("beam_moe::mxfp8_grouped_linear", mutates_args=())
def grouped_linear_op(
    x: torch.Tensor, w: torch.Tensor | None, offsets: torch.Tensor, pair: list[torch.Tensor],
    values: list[torch.Tensor], row_swizzled: bool, col_swizzled: bool,
) -> torch.Tensor:  # fmt: skip
    weight = _pair(pair, row_swizzled, col_swizzled) or w
    return autograd._grouped_linear(x, weight, offsets, tuple(values) or None)


@grouped_linear_op.register_fake
def _(x, w, offsets, pair, values, row_swizzled, col_swizzled):
    return x.new_empty((x.shape[0], _weight_shape(w, pair)[1]))


@torch.library.custom_op("beam_moe::mxfp8_grouped_linear_backward", mutates_args=())
def grouped_linear_backward_op(
    dy: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor | None, col: torch.Tensor | None,
    scale: torch.Tensor | None, swizzled: bool, x_dtype: torch.dtype, w_dtype: torch.dtype | None,
) -> list[torch.Tensor]:  # fmt: skip
    return _wanted(*autograd.grouped_gradients(dy, offsets, x, w, col, scale, swizzled, x_dtype, w_dtype))


@grouped_linear_backward_op.register_fake
def _(dy, offsets, x, w, col, scale, swizzled, x_dtype, w_dtype):
    (rows, n), kept = dy.shape, col if w is None else w
    return _wanted(
        None if kept is None else dy.new_empty((rows, kept.shape[2]), dtype=x_dtype),
        None if x is None else dy.new_empty((offsets.shape[0] - 1, n, x.shape[1]), dtype=w_dtype),
    )


def _grouped_setup(ctx, inputs, output) -> None:
    x, w, offsets, pair, values, *swizzled = inputs
    read = autograd.grouped_values(x, w, values) if values else None
    autograd._save(ctx, x, w, None, _pair(pair, *swizzled), read, offsets)
    ctx.lists = len(pair), len(values)


def _grouped_backward(ctx, dy):
    *kept, offsets = ctx.saved_tensors
    x, w, col, _ = kept
    made = grouped_linear_backward_op(dy, offsets, *kept, *ctx.options[:-1])
    wanted = w is not None or col is not None, x is not None
    return *_in_place(made, *wanted), None, *([None] * n for n in ctx.lists), None, None


grouped_linear_op.register_autograd(_grouped_backward, setup_context=_grouped_setup)


def linear(x, w, bias, values) -> torch.Tensor:
    """`autograd.linear` through its operator; arguments and result as there."""
    dense, pair, *swizzled = _parts("linear", w)
    flat = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = linear_op(flat, dense, bias, pair, list(values or ()), *swizzled)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[1])


def grouped_linear(x, w, offsets, values) -> torch.Tensor:
    """`autograd.grouped_linear` through its operator; arguments and result as there."""
    dense, pair, *swizzled = _parts("grouped_linear", w)
    return grouped_linear_op(x, dense, offsets, pair, list(values or ()), *swizzled)
