"""What every operation refuses alike: operands without memory, gradients that would be lost, results over operands."""

import os
import subprocess
import sys

import pytest
import torch

from beam_moe.kernels.linear_lora import add_lora
from beam_moe.kernels.moe_lora import ExpertLoRA, fused_moe
from beam_moe.kernels.mxfp8 import (
    GemmConfig,
    MXFP8Tensor,
    dequantize,
    fake_quantize,
    gemm,
    grouped_gemm,
    grouped_linear,
    grouped_wgrad,
    linear,
    quantize,
    quantize_both,
    quantize_reference,
    silu_mul_backward_quantize,
    silu_mul_quantize,
    swizzle_scales,
)
from beam_moe.kernels.mxfp8.decode_block import prepare
from beam_moe.kernels.router import grouped_topk, route
from beam_moe.kernels.silu_mul import silu_mul

T, K, N, E = 4, 64, 32, 2


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def operations(device):
    """``name: (function, operands)``: calls that are served, all of whose floating operands have a gradient."""

    def half(*shape):
        return torch.randn(shape, device=device).half()

    x, w, experts = half(T, K), quantize(half(N, K)), quantize(half(E, N, K))
    offsets = ints([0, 3, T], device)
    bank = {
        "w13_a": half(1, E, 2, 8, K),
        "w13_b": half(1, E, 2, N, 8),
        "w2_a": half(1, E, 8, N),
        "w2_b": half(1, E, K, 8),
    }
    routed = {"topk_ids": ints([[0], [1], [0], [1]], device), "lora_ids": ints([0] * T, device)}

    def fused(x, w13, w2, topk_weights, topk_ids, lora_ids, **bank):
        return fused_moe(x, w13, w2, topk_weights, topk_ids, lora=ExpertLoRA(**bank), lora_ids=lora_ids)

    def lora(out, x, a, b, **rest):
        add_lora(out, x, [a], [b], **rest)
        return out

    return {
        "add_lora": (
            lora,
            {"out": half(T, N), "x": x, "a": half(1, 8, K), "b": half(1, N, 8)}
            | {"lora_ids": ints([0] * T, device), "ranks": ints([[8]], device)},
        ),
        "grouped_topk": (lambda **o: grouped_topk(**o, top_k=1), {"x": x, "gate_weight": half(E, K)}),
        "route": (lambda **o: route(**o, top_k=1), {"logits": x}),
        "silu_mul": (silu_mul, {"gate_up": x}),
        "quantize": (quantize, {"x": x}),
        "quantize_both": (quantize_both, {"x": x}),
        "fake_quantize": (fake_quantize, {"x": x}),
        "silu_mul_quantize": (silu_mul_quantize, {"gate_up": x}),
        "silu_mul_backward_quantize": (silu_mul_backward_quantize, {"dh": half(T, K // 2), "gate_up": x}),
        "dequantize": (dequantize, {"t": w}),
        "prepare": (prepare, {"t": w}),
        "gemm": (gemm, {"a": x, "b": w, "bias": half(N)}),
        "grouped_gemm": (grouped_gemm, {"a": x, "b": experts, "offsets": offsets, "bias": half(E, N)}),
        "grouped_wgrad": (grouped_wgrad, {"dy": half(T, N), "x": x, "offsets": offsets}),
        "linear": (linear, {"x": x, "w": half(N, K), "bias": half(N)}),
        "grouped_linear": (grouped_linear, {"x": x, "w": half(E, N, K), "offsets": offsets}),
        "fused_moe": (
            fused,
            {"x": x, "w13": half(E, 2 * N, K), "w2": half(E, K, N), "topk_weights": torch.rand(T, 1, device=device)}
            | routed | bank,
        ),
    }  # fmt: skip


FORWARD = (
    "add_lora", "grouped_topk", "route", "silu_mul", "quantize", "quantize_both", "fake_quantize", "silu_mul_quantize",
    "silu_mul_backward_quantize", "gemm", "grouped_gemm", "grouped_wgrad",
)  # fmt: skip
TRAINED = ("linear", "grouped_linear")


def to_meta(t):
    return MXFP8Tensor(t.data.to("meta"), t.scale.to("meta"), t.axis) if isinstance(t, MXFP8Tensor) else t.to("meta")


@pytest.mark.parametrize("name", (*FORWARD, *TRAINED, "dequantize", "prepare", "fused_moe"))
def test_operands_without_memory_are_refused(device, name):
    function, operands = operations(device)[name]
    with pytest.raises(ValueError, match=rf"^{name}: \w+ must be on a GPU.*got meta"):
        function(**{k: to_meta(t) for k, t in operands.items()})


def test_an_interpreter_asked_for_after_the_import_is_named():
    """Triton's own words would be that there is no driver."""
    code = """
import os, torch
from beam_moe.kernels.router import route
os.environ["TRITON_INTERPRET"] = "1"
route(torch.zeros(1, 4), top_k=1)
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    wanted = "ValueError: route: logits must be on a GPU (or on the CPU, with TRITON_INTERPRET=1 set before"
    assert done.stderr.splitlines()[-1].startswith(wanted), done.stderr[-2000:]


@pytest.mark.parametrize("name", (*FORWARD, "fused_moe"))
def test_a_gradient_is_never_lost_in_silence(device, name):
    """Each operand alone, by its own name; under no_grad the same operands are served."""
    function, operands = operations(device)[name]
    for argument, t in operands.items():
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            leaf = {argument: t.clone().requires_grad_()}
            with pytest.raises(ValueError, match=rf"^{name}: (lora\.)?{argument}(\[0\])? must .*gradient.* train"):
                function(**{**operands, **leaf})
            with torch.no_grad():
                function(**{**operands, **leaf})


@pytest.mark.parametrize("name", TRAINED)
def test_what_trains_takes_gradients_once(device, name):
    """Not twice: the second derivative would be that of constants."""
    function, operands = operations(device)[name]
    leaves = {k: t.clone().requires_grad_() if t.is_floating_point() else t for k, t in operands.items()}
    y = function(**leaves).float().square().sum()
    (dx,) = torch.autograd.grad(y, leaves["x"], create_graph=True)
    assert dx.isfinite().all() and dx.any()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.float().sum().backward()


def test_results_over_operands_are_refused(device):
    """Programs still read what others of the same launch would have overwritten; columns side by side are apart."""
    square = torch.randn(T, K, device=device).half()
    w, offsets = quantize(torch.randn(K, K, device=device)), ints([0, T], device)
    stack = MXFP8Tensor(w.data[None], w.scale[None])
    wide = torch.randn(T + 1, 2 * K, device=device).half()
    for name, call in {
        "gemm": lambda x, out: gemm(x, w, out=out),
        "grouped_gemm": lambda x, out: grouped_gemm(x, stack, offsets, out=out),
        "add_lora": lambda x, out: add_lora(
            out, x, [torch.zeros(1, 8, K, device=device).half()], [torch.zeros(1, K, 8, device=device).half()],
            ints([0] * T, device), ints([[8]], device),
        ),
    }.items():  # fmt: skip
        for x, out in ((square, square), (wide[:T, :K], wide[:T, 8 : 8 + K]), (wide[1:, :K], wide[:T, :K])):
            with pytest.raises(ValueError, match=f"^{name}: out must not share memory with [ax], got"):
                call(x, out)
        call(wide[:T, :K], wide[:T, K:])
    flat = torch.zeros(K * K, device=device).half()
    with pytest.raises(ValueError, match="^grouped_wgrad: out must not share memory with dy"):
        grouped_wgrad(flat[: T * K].view(T, K), square, offsets, out=flat.view(1, K, K))
    with pytest.raises(ValueError, match="^silu_mul: out must not share memory with gate_up"):
        silu_mul(square, out=square[:, : K // 2])
    with pytest.raises(ValueError, match="^silu_mul: out must have elements that do not overlap"):
        silu_mul(square, out=square.new_empty(1, K // 2).expand(T, K // 2))
    with pytest.raises(ValueError, match="^dequantize: out must have elements that do not overlap"):
        dequantize(w, torch.float16, out=square[:1].expand(K, K))


def test_what_is_no_tensor_is_named(device):
    """A ValueError with the argument's name, never an AttributeError from inside."""
    x, w = torch.randn(T, K, device=device).half(), quantize(torch.randn(N, K, device=device))
    offsets, dense = ints([0, T], device), torch.randn(N, K, device=device)
    stack = MXFP8Tensor(w.data[None], w.scale[None])
    for message, call in {
        "gemm: b_dense must be a tensor, got list": lambda: gemm(x, w, b_dense=[1]),
        "gemm: config must be a GemmConfig, got dict": lambda: gemm(x, w, config={}),
        "grouped_gemm: b_dense must be a tensor, got str": lambda: grouped_gemm(x, stack, offsets, b_dense="b"),
        "grouped_gemm: config must be a GemmConfig, got int": lambda: grouped_gemm(x, stack, offsets, config=1),
        "grouped_wgrad: out must be a tensor, got list": lambda: grouped_wgrad(x, x, offsets, out=[1]),
        "quantize: elem must be one of": lambda: quantize(x, elem=["e4m3"]),
        "quantize: out must be an MXFP8Tensor, got Tensor": lambda: quantize(x, out=x),
        "quantize: config must be a QuantizeConfig, got int": lambda: quantize(x, config=3),
        "quantize_reference: x must be a tensor, got NoneType": lambda: quantize_reference(None),
        "dequantize: t must be an MXFP8Tensor, got Tensor": lambda: dequantize(x),
        "dequantize: out must be a tensor, got list": lambda: dequantize(w, out=[1]),
        "silu_mul_backward_quantize: dh must be a tensor": lambda: silu_mul_backward_quantize(None, x),
        "MXFP8Tensor: scale must be a tensor, got NoneType": lambda: MXFP8Tensor(w.data, None),
        "MXFP8Tensor: rows must be a tensor, got list": lambda: MXFP8Tensor(w.data, w.scale, rows=[1]),
        "prepare: t must be an MXFP8Tensor, got NoneType": lambda: prepare(None),
        "swizzle_scales: scale must be a tensor, got NoneType": lambda: swizzle_scales(None),
        "linear: x must be a tensor, got NoneType": lambda: linear(None, dense),
        r"linear: w must be a tensor or a pair .*, got list": lambda: linear(x, [w, w]),
        "linear: x is on .*, w on meta": lambda: linear(x, dense.to("meta")),
        "linear: bias must be a tensor, got list": lambda: linear(x, dense, [0.0]),
        "linear: values must be": lambda: linear(x, dense, values=3),
        "grouped_linear: x must be a tensor, got int": lambda: grouped_linear(1, dense, offsets),
        "silu_mul: gate_up must be a tensor, got NoneType": lambda: silu_mul(None),
        "silu_mul: out must be on": lambda: silu_mul(x, out=x[:, :32].to("meta")),
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


@pytest.mark.parametrize(
    ("field", "value"),
    [("bm", 4), ("bm", 24), ("bn", 0), ("bk", 48), ("bk", 16), ("warps", 3), ("split", 0), ("stages", 0), ("bm", "16")],
)
def test_launch_configurations_that_cannot_compile(device, field, value):
    x, w = torch.randn(T, K, device=device).half(), quantize(torch.randn(N, K, device=device))
    with pytest.raises(ValueError, match=f"^gemm: config.{field} must be .*, got {value!r}"):
        gemm(x, w, config=GemmConfig("bf16", **{field: value}))


@pytest.mark.parametrize("bad", [[0, -5, 4], [0, 3, 2], [1, 2, 4], [0, 2, 5]])
def test_offsets_of_products_are_checked_on_request(device, monkeypatch, bad):
    """Kernels trust offsets: outside the rows they would write over other memory."""
    monkeypatch.setenv("BEAM_MOE_CHECK", "1")
    for name in ("grouped_gemm", "grouped_wgrad", "grouped_linear"):
        function, operands = operations(device)[name]
        function(**operands)
        with pytest.raises(ValueError, match=f"^{name}: offsets must be 0, then ends that never fall, at most 4 rows"):
            function(**{**operands, "offsets": ints(bad, device)})
