"""MXFP8 (OCP microscaling, blocks of 32): the format and its reference, quantisation, and matrix products."""

from beam_moe.kernels.mxfp8.autograd import grouped_linear, linear
from beam_moe.kernels.mxfp8.decode_block import prepare
from beam_moe.kernels.mxfp8.format import (
    MXFP8Tensor,
    dequantize_reference,
    e8m0_from_amax,
    e8m0_reciprocal,
    e8m0_to_float,
    quantize_reference,
    swizzle_scales,
    unswizzle_scales,
)
from beam_moe.kernels.mxfp8.gemm import GemmConfig, gemm
from beam_moe.kernels.mxfp8.grouped import grouped_gemm, grouped_wgrad
from beam_moe.kernels.mxfp8.quantize import (
    QuantizeConfig,
    dequantize,
    fake_quantize,
    quantize,
    quantize_both,
    silu_mul_backward_quantize,
    silu_mul_quantize,
)

__all__ = [
    "GemmConfig",
    "MXFP8Tensor",
    "dequantize_reference",
    "e8m0_from_amax",
    "e8m0_reciprocal",
    "e8m0_to_float",
    "quantize_reference",
    "swizzle_scales",
    "unswizzle_scales",
    "QuantizeConfig",
    "dequantize",
    "fake_quantize",
    "quantize",
    "quantize_both",
    "silu_mul_backward_quantize",
    "silu_mul_quantize",
    "gemm",
    "grouped_gemm",
    "grouped_linear",
    "grouped_wgrad",
    "linear",
    "prepare",
]
