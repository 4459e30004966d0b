"""SwiGLU's elementwise half with one rounding: ``out = silu(gate) * up``, both factors in fp32.

silu(g) = g / (1 + exp(-g)). A kernel that rounds silu(g) before the product differs from Beam's reference.
"""

import torch
import triton
import triton.language as tl

from beam_moe.kernels.checks import refuse_gradient, refuse_overlap, require_device, require_distinct

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 1024


@triton.jit
def _silu_mul_kernel(
    x_ptr,  # (M, 2 * I)
    out_ptr,  # (M, I)
    stride_x,
    stride_out,
    I: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (M, cdiv(I, BLOCK)): one program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < I
    gate = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + I + offs, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * stride_out + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up`` in fp32, rounded once to ``out``'s dtype.

    Args:
        gate_up: ``(M, 2 * I)`` bf16, fp16 or fp32, the gate's columns first; innermost stride 1.
        out: ``(M, I)`` of the same dtype and device, innermost stride 1; allocated when None.

    Raises:
        ValueError: a shape, dtype, stride or device that does not fit, an ``out`` that overlaps itself or ``gate_up``,
            or an input that requires a gradient while gradients are enabled.
    """
    for name, t in (("gate_up", gate_up), ("out", gate_up if out is None else out)):
        if not isinstance(t, torch.Tensor):
            raise ValueError(f"silu_mul: {name} must be a tensor, got {type(t).__name__}")
        if t.device != gate_up.device:
            raise ValueError(f"silu_mul: {name} must be on {gate_up.device}, got {t.device}")
    require_device("silu_mul", "gate_up", gate_up)
    refuse_gradient("silu_mul", "torch's own silu and product train", gate_up=gate_up, out=out)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul: gate_up must be (M, 2 * I), got shape {tuple(gate_up.shape)}")
    if gate_up.dtype not in DTYPES:
        raise ValueError(f"silu_mul: gate_up must be bfloat16, float16 or float32, got {gate_up.dtype}")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.shape != (rows, width) or out.dtype != gate_up.dtype:
        raise ValueError(f"silu_mul: out must be ({rows}, {width}) {gate_up.dtype}, got {tuple(out.shape)} {out.dtype}")
    for name, t in (("gate_up", gate_up), ("out", out)):
        if t.shape[1] > 1 and t.stride(1) != 1:
            raise ValueError(f"silu_mul: {name} must have innermost stride 1, got strides {t.stride()}")
    require_distinct("silu_mul", "out", out)
    refuse_overlap("silu_mul", out, gate_up=gate_up)
    if rows and width:
        _silu_mul_kernel[(rows, triton.cdiv(width, BLOCK))](
            gate_up, out, gate_up.stride(0), out.stride(0), I=width, BLOCK=min(BLOCK, triton.next_power_of_2(width))
        )
    return out
