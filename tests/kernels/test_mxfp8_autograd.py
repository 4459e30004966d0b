"""Gradients of the MXFP8 layers: against each step done with the references, and against unquantised float64."""

import importlib
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from beam_moe.kernels.mxfp8 import (
    autograd,
    dequantize_reference,
    fake_quantize,
    prepare,
    quantize,
    quantize_both,
    quantize_reference,
    torch_ops,
)
from beam_moe.kernels.mxfp8.autograd import _native, grouped_linear, linear
from beam_moe.testing import assert_close, error_ratio

gemm = importlib.import_module("beam_moe.kernels.mxfp8.gemm")  # the package's attribute is the function

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
# tensor cores truncate where they align the terms of a sum
LIMIT = {F32: 1e-5 if torch.cuda.is_available() else 2e-6, FP16: 4e-4, BF16: 2.5e-3}


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def q(t, axis, offsets=None):
    return dequantize_reference(quantize_reference(t, axis=axis, offsets=offsets), BF16).double()


def steps(x, w, dy):
    """y, dx, dw as Transformer Engine's recipe orders them, one reference step at a time."""
    return q(x, -1) @ q(w, -1).T, q(dy, -1) @ q(w, -2), q(dy, -2).T @ q(x, -2)


def run(x, w, dy, **kwargs):
    x = x.clone().requires_grad_()
    w = w.clone().requires_grad_()
    y = linear(x, w, **kwargs)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(BF16, BF16), (BF16, F32), (F32, F32), (FP16, F32)], ids=str)
def test_linear_follows_the_recipe(x_dtype, w_dtype, rows, device):
    x, w = randn(rows, 96, seed=1).to(device, x_dtype), randn(64, 96, seed=2).to(device, w_dtype)
    dy = randn(rows, 64, seed=3).to(device, x_dtype)
    for name, ref, got in zip(("y", "dx", "dw"), steps(x, w, dy), run(x, w, dy)):
        assert got.dtype == (w_dtype if name == "dw" else x_dtype)
        assert_close(name, ref, got, LIMIT[got.dtype])


def test_row_and_column_copies_are_not_mixed_up(device):
    """Every other row of x and column of w is tiny: blocks across them lose what blocks along them keep."""
    x, w = randn(64, 64, seed=1), randn(64, 64, seed=2)
    x[::2] *= 2.0**-16
    w[:, ::2] *= 2.0**-16
    x, w, dy = x.to(device), w.to(device), randn(64, 64, seed=3).to(device)
    ref, got = steps(x, w, dy), run(x, w, dy)
    assert_close("y", ref[0][::2], got[0][::2], LIMIT[F32])
    assert_close("dx", ref[1][:, ::2], got[1][:, ::2], LIMIT[F32])
    assert_close("dw", ref[2], got[2], LIMIT[F32])
    assert error_ratio((q(x, -2) @ q(w, -1).T)[::2], got[0][::2]) > 0.05
    assert error_ratio((q(dy, -1) @ q(w, -1))[:, ::2], got[1][:, ::2]) > 0.05


def test_exact_values_bit_for_bit(device):
    g = torch.Generator().manual_seed(4)
    x, dy = (torch.randint(-3, 4, (33, 96), generator=g).to(device, BF16) for _ in range(2))
    w = torch.randint(-4, 5, (96, 96), generator=g).float().to(device)
    got = run(x, w, dy)
    ref = x.double() @ w.double().T, dy.double() @ w.double(), dy.double().T @ x.double()
    for name, r, value in zip(("y", "dx", "dw"), ref, got):
        assert torch.equal(value, r.to(value.dtype)), name


def test_gradients_approach_those_without_quantisation(device):
    """MXFP8 keeps about 3.5 % of relative error an operand; a wrong axis, transpose or scale is far from that."""
    x, w, dy = (randn(64, 64, seed=i).to(device) for i in range(3))
    got = run(x, w, dy)
    ref = x.double() @ w.double().T, dy.double() @ w.double(), dy.double().T @ x.double()
    for r, value in zip(ref, got):
        assert 1e-3 < error_ratio(r, value) < 6e-2


def test_bias_and_leading_dimensions(device):
    x = randn(2, 5, 64, seed=1).to(device, BF16).requires_grad_()
    w, bias = randn(32, 64, seed=2).to(device), randn(32, seed=3).to(device).requires_grad_()
    y = linear(x, w, bias)
    assert y.shape == (2, 5, 32)
    ref = q(x.detach().reshape(10, 64), -1) @ q(w, -1).T + bias.detach().double()
    assert_close("y", ref.reshape(2, 5, 32), y, LIMIT[BF16])
    y.sum().backward()  # an expanded gradient: strides of zero
    assert torch.equal(bias.grad, torch.full_like(bias, 10.0))
    ones = torch.ones(10, 32, device=device)
    assert_close("dx", (q(ones, -1) @ q(w, -2)).reshape(2, 5, 64), x.grad, LIMIT[BF16])
    assert w.grad is None


def test_transposed_and_sliced_inputs(device):
    whole, w = randn(64, 70, seed=1).to(device), randn(96, 32, seed=2).to(device)
    x = whole.mT[3:43].detach()  # (40, 64), a view whose rows are not contiguous
    w = w.mT  # (32, 96) -> used as (N=32, K=96) needs K = 64
    w = w[:, :64]
    dy = randn(32, 40, seed=3).to(device).mT
    for name, ref, got in zip(("y", "dx", "dw"), steps(x, w, dy), run(x, w, dy)):
        assert_close(name, ref, got, LIMIT[F32])


def test_no_rows(device):
    y, dx, dw = run(
        torch.zeros(0, 64, device=device), randn(32, 64, seed=1).to(device), torch.zeros(0, 32, device=device)
    )
    assert y.shape == (0, 32) and dx.shape == (0, 64) and not dw.any()


@pytest.mark.parametrize("kept", ["pair", "values"])
def test_weights_quantised_by_the_caller(kept, device):
    x, w, dy = randn(9, 64, seed=1).to(device), randn(32, 64, seed=2).to(device), randn(9, 32, seed=3).to(device)
    y, dx, dw = run(x, w, dy)
    if kept == "values":
        again = run(x, w, dy, values=fake_quantize(w, axis="both"))
        assert all(torch.equal(*p) for p in zip((y, dx, dw), again))
    else:
        x = x.clone().requires_grad_()
        z = linear(x, quantize_both(w))
        z.backward(dy)
        assert_close("y", y, z.detach(), LIMIT[F32])
        assert_close("dx", dx, x.grad, LIMIT[F32])


SIZES = {"ragged": (33, 0, 1, 20), "all-empty": (0, 0, 0, 0), "last-only": (0, 0, 0, 17)}


def grouped_steps(x, w, dy, offsets):
    bounds = offsets.tolist()
    y = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64, device=x.device)
    dx, dw = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(w, dtype=torch.float64)
    xr, dyr, wr, wc = q(x, -1), q(dy, -1), q(w, -1), q(w, -2)
    xc, dyc = q(x, -2, offsets), q(dy, -2, offsets)
    for e, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        y[begin:end] = xr[begin:end] @ wr[e].T
        dx[begin:end] = dyr[begin:end] @ wc[e]
        dw[e] = dyc[begin:end].T @ xc[begin:end]
    return y, dx, dw


@pytest.mark.parametrize("kept", ["none", "pair", "values"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_grouped_linear_follows_the_recipe(sizes, kept, device):
    if kept != "none" and sizes != SIZES["ragged"]:
        pytest.skip("one size is enough")
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=device)
    rows = sum(sizes) + 2
    x, dy = randn(rows, 64, seed=1).to(device, BF16), randn(rows, 96, seed=2).to(device, BF16)
    w = randn(4, 96, 64, seed=3).to(device)
    ref = grouped_steps(x, w, dy, offsets)
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    if kept == "pair":
        y = grouped_linear(leaf, quantize_both(w), offsets)
    else:
        y = grouped_linear(leaf, weight, offsets, values=fake_quantize(w, axis="both") if kept == "values" else None)
    y.backward(dy)
    assert_close("y", ref[0], y.detach(), LIMIT[BF16])
    assert_close("dx", ref[1], leaf.grad, LIMIT[BF16])
    if kept != "pair":
        assert_close("dw", ref[2], weight.grad, LIMIT[F32])
        assert all(size or not weight.grad[e].any() for e, size in enumerate(sizes))
    assert not y[rows - 2 :].any() and not leaf.grad[rows - 2 :].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 32)}, "features"),
        ({"x": torch.zeros(3, 64, dtype=torch.float64)}, "bf16, fp16 or fp32"),
        ({"w": torch.zeros(33, 64)}, "N must be a multiple"),
        ({"w": torch.zeros(2, 32, 64)}, "2 dimensions"),
        (
            {"w": quantize_reference(torch.zeros(32, 64))},
            r"w must be a tensor or a pair \(row, col\) .* got MXFP8Tensor",
        ),
        ({"bias": torch.zeros(33)}, "bias"),
        ({"values": (torch.zeros(32, 64), torch.zeros(32, 64))}, "values"),
    ],
    ids=str,
)
def test_refuses(change, message, device):
    change = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        linear(**{"x": torch.zeros(3, 64, device=device), "w": torch.zeros(32, 64, device=device), **change})


def test_refuses_a_pair_of_one_direction(device):
    row, _ = quantize_both(randn(32, 64, seed=1).to(device))
    with pytest.raises(ValueError, match="axis -1 and -2"):
        linear(torch.zeros(3, 64, device=device), (row, row))


def test_one_row_and_no_features(device):
    x, w = randn(64, seed=1).to(device), randn(32, 64, seed=2).to(device)
    leaf = x.clone().requires_grad_()
    y = linear(leaf, w)
    y.sum().backward()
    assert torch.equal(y, linear(x[None], w)[0]) and leaf.grad.shape == (64,)
    bias = randn(32, seed=3).to(device)
    assert torch.equal(linear(x[:0].expand(3, 0), w[:, :0], bias), bias.expand(3, 32))


WANTED = [(True, True), (True, False), (False, True)]
KINDS = ["dense", "values", "pair"]


def layer(kind, grouped, want_x, want_w, device):
    """(x, w, call) of one layer; w is dense whatever the call multiplies by."""
    x, w = randn(40, 64, seed=1).to(device), randn(2, 96, 64, seed=2).to(device)
    w = w if grouped else w[0].contiguous()
    x.requires_grad_(want_x)
    w.requires_grad_(want_w and kind != "pair")
    values, weight = None, w
    if kind == "values":
        values = fake_quantize(w.detach(), axis="both")
    elif kind == "pair":
        weight = quantize_both(w.detach())
    if grouped:
        offsets = torch.tensor([0, 33, 38], dtype=torch.int32, device=device)
        return x, w, values, weight, lambda: grouped_linear(x, weight, offsets, values=values)
    return x, w, values, weight, lambda: linear(x, weight, values=values)


@pytest.mark.parametrize(("want_x", "want_w"), WANTED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
def test_what_is_kept_for_the_backward_pass(grouped, kind, want_x, want_w, device):
    """x for dw, the weight for dx, nothing else; gradients are those of a call that wants both, twice the same."""
    if kind == "pair" and not want_x:
        pytest.skip("nothing wants a gradient")
    x, w, values, weight, call = layer(kind, grouped, want_x, want_w, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = call()
    want = []
    if want_w and kind != "pair":
        want.append(x)
    if want_x:
        want += (
            [w]
            if kind == "dense" or (kind == "values" and values_unused(grouped, device))
            else ([values[1]] if kind == "values" else [weight[1].data, weight[1].scale])
        )
    kept = [t for t in kept if t.dtype != torch.int32]
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in want)
    dy = randn(*y.shape, seed=3).to(device)
    leaves = [t for t in (x, w) if t.requires_grad]
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    again = torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    both_x, both_w, _, _, both = layer("dense", grouped, True, True, device)
    wanted = dict(zip(("x", "w"), torch.autograd.grad(both(), (both_x, both_w), dy)))
    for leaf, got in zip(leaves, first):
        assert_close("gradient", wanted["x" if leaf is x else "w"].double(), got, LIMIT[F32])


def values_unused(grouped, device):
    """Kept values are read before Blackwell; by the grouped layer only in bf16, which PyTorch's grouped GEMM takes."""
    return grouped or _native(device)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_changes_before_the_backward_pass_is_an_error(kind, device):
    if kind == "values" and values_unused(False, device):
        pytest.skip("does not read them")
    x, w, values, weight, call = layer(kind, False, True, False, device)
    y = call()
    changed = w if kind == "dense" else values[1] if kind == "values" else weight[1].scale
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_weight_gradient_starts_with_the_memory_of_the_input_gradient_free(device, monkeypatch):
    """dy's rows and w's columns are dead once dx is there: at most one product's operands are alive."""
    from beam_moe.kernels.mxfp8 import autograd

    x, w, _, _, call = layer("dense", False, True, True, device)
    y = call()
    real, seen, alive = autograd._multiply, [], []

    def multiply(a, b, *args):
        alive.append(sum(t() is not None for t in seen))
        seen.extend((weakref.ref(a), weakref.ref(b)))
        return real(a, b, *args)

    monkeypatch.setattr(autograd, "_multiply", multiply)
    y.sum().backward()
    assert len(seen) == 4 and alive == [0, 0]


# --- Blackwell, in the interpreter ------------------------------------------------------------------------------------


@pytest.fixture
def layouts(monkeypatch):
    """Says that the device is a Blackwell; the layouts in which each product reads the scales of a and of b."""
    pytest.importorskip("triton", minversion="3.8.0")
    if torch.cuda.is_available():
        pytest.skip("Hopper has no block-scaled instruction")
    for module in (gemm, autograd):
        monkeypatch.setattr(module, "_capability", lambda device: (10, 0))
    found, real = [], gemm._native_layout

    def layout(t, *tile):
        made = real(t, *tile)
        found.append(made[0])
        return made

    monkeypatch.setattr(gemm, "_native_layout", layout)
    return found


def spread(*shape, seed):
    """Blocks of very different scales in both directions, so that one in another's place shows."""
    g = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randint(-6, 7, size, generator=g) for size in ((shape[0], 1), (1, shape[1])))
    return torch.ldexp(randn(*shape, seed=seed), rows + columns)


@pytest.mark.parametrize(
    ("rows", "want_x", "layouts_of_a"),
    [
        (0, True, []),
        (33, True, ["rows", "rows", "rows"]),  # rows and columns of dy are quantised together
        (33, False, ["rows", "tma"]),
        (65, True, ["tma", "tma", "tma"]),
        (300, True, ["tma", "tma", "tma"]),
    ],
)
def test_scales_are_swizzled_where_a_product_copies_them(rows, want_x, layouts_of_a, layouts, device, monkeypatch):
    """The weight side always, the other from 65 rows on; no bit depends on it."""
    x, w, dy = spread(rows, 160, seed=1), spread(96, 160, seed=2), spread(rows, 96, seed=3)

    def gradients():
        leaves = [x.clone().requires_grad_(want_x), w.clone().requires_grad_()]
        y = linear(*leaves)
        return y.detach(), *torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy)

    got = gradients()
    assert layouts[::2] == layouts_of_a and layouts[1::2] == ["tma"] * len(layouts_of_a)
    layouts.clear()
    monkeypatch.setattr(autograd, "quantize", lambda t, axis, swizzle: quantize(t, axis=axis))
    monkeypatch.setattr(autograd, "quantize_both", lambda t, swizzle: quantize_both(t))
    for row_major, value in zip(gradients(), got, strict=True):
        assert torch.equal(row_major, value)
    assert set(layouts) <= {"rows"}
    if rows and want_x:
        for name, ref, value in zip(("y", "dx", "dw"), steps(x, w, dy), got):
            assert_close(name, ref, value, LIMIT[F32])


@pytest.mark.parametrize("swizzled", ["row", "col"])
def test_torch_compile_keeps_the_layout_of_a_quantised_weight(swizzled, layouts, device):
    w = spread(96, 160, seed=2)
    weight = (quantize(w, swizzle=swizzled == "row"), quantize(w, axis=-2, swizzle=swizzled == "col"))
    same_bits_in_one_graph(lambda x: linear(x, weight), [spread(33, 160, seed=1).requires_grad_()], [])
    assert layouts[1::2] == (["tma", "rows"] if swizzled == "row" else ["rows", "tma"]) * 2


# --- torch.compile ----------------------------------------------------------------------------------------------------


def compiled(f):
    """(``f`` compiled whole for any number of rows, the count of graphs)."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(f, backend=counter, fullgraph=True, dynamic=True), counter


def same_bits_in_one_graph(f, inputs, leaves):
    """``f`` of each of ``inputs`` has the results and gradients of an eager call, in a graph for all of them."""
    whole, counter = compiled(f)
    for x in inputs:
        wanted = [t for t in (x, *leaves) if t is not None and t.requires_grad]
        results = []
        for call in (f, whole):
            y = call(x)
            dy = randn(*y.shape, seed=7).to(y)
            results.append((y, *torch.autograd.grad(y, wanted, dy)))
        for want, got in zip(*results, strict=True):
            assert torch.equal(want, got) and want.stride() == got.stride() and want.dtype == got.dtype
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("kind", "want_x", "want_w"), [*(("dense", *w) for w in WANTED), ("values", True, True), ("pair", True, False)]
)
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
def test_torch_compile_takes_the_layer_whole(grouped, kind, want_x, want_w, device):
    """With gradients, and one graph for any number of rows."""
    _, w, values, weight, _ = layer(kind, grouped, want_x, want_w, device)
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32, device=device)

    def f(x):
        x = x * 1.5  # the operator stands between others
        y = grouped_linear(x, weight, offsets, values=values) if grouped else linear(x, weight, values=values)
        return y * 2

    inputs = [randn(rows, 64, seed=rows).to(device, BF16).requires_grad_(want_x) for rows in (40, 9)]
    same_bits_in_one_graph(f, inputs, [w])


def test_torch_compile_with_a_bias_and_leading_dimensions(device):
    w, bias = randn(32, 64, seed=1).to(device).requires_grad_(), randn(32, seed=2).to(device).requires_grad_()
    inputs = [randn(2, rows, 64, seed=rows).to(device).requires_grad_() for rows in (5, 7)]
    same_bits_in_one_graph(lambda x: linear(x, w, bias), inputs, [w, bias])


def test_torch_compile_keeps_the_forms_of_a_quantised_weight(device):
    """Words that `prepare` found and swizzled scales arrive, or are refused, as outside."""
    x, w = randn(3, 64, seed=1).to(device), randn(32, 64, seed=2).to(device)
    row, col = quantize_both(w)
    ready = (prepare(row), col)
    assert torch.equal(compiled(lambda x: linear(x, ready))[0](x), linear(x, ready))
    swizzled = quantize_both(w, swizzle=True)
    if not _native(device):
        for call in (linear, compiled(linear)[0]):
            with pytest.raises(ValueError, match="b has swizzled scales"):
                call(x, swizzled)


def test_what_an_operator_refuses(device):
    """Its arguments are checked when it runs."""
    x, w = torch.zeros(3, 32, device=device), torch.zeros(32, 64, device=device)
    with pytest.raises(ValueError, match="^linear: x has 32 features, w takes 64"):
        compiled(linear)[0](x, w)
    with pytest.raises(ValueError, match="^grouped_linear: offsets must be contiguous int32"):
        compiled(grouped_linear)[0](x, w[None, :, :32], torch.zeros(2, device=device))


@pytest.mark.parametrize("kind", ["dense", "pair"])
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
def test_the_operators_meet_torchs_contract(grouped, kind, device):
    """Schema, fake tensors, gradients, and ahead-of-time dispatch."""
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    utils += ("test_schema",) if kind == "dense" else ()  # torch's own comparison does not take fp8
    x, _, _, weight, _ = layer(kind, grouped, True, True, device)
    dense, pair, *swizzled = torch_ops._parts("linear", weight)
    kept = (x.detach(), dense.detach(), None, None) if kind == "dense" else (None, None, pair[2], pair[3])
    dy = randn(40, 96, seed=5).to(device)
    if grouped:
        offsets = torch.tensor([0, 33, 38], dtype=torch.int32, device=device)
        calls = [
            (torch_ops.grouped_linear_op, (x, dense, offsets, pair, [], *swizzled)),
            (torch_ops.grouped_linear_backward_op, (dy, offsets, *kept, False, F32, F32)),
        ]
    else:
        bias = randn(96, seed=4).to(device).requires_grad_()
        calls = [
            (torch_ops.linear_op, (x, dense, bias, pair, [], *swizzled)),
            (torch_ops.linear_backward_op, (dy, *kept, False, F32, F32, BF16)),
        ]
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils=utils)


def test_an_eager_call_imports_no_compiler():
    """torch's compiler takes seconds to import; the operators are there once something compiles."""
    code = (
        "import sys, torch; from beam_moe.kernels import mxfp8; mxfp8.linear(torch.ones(1, 32), torch.ones(32, 32));"
        "print([m for m in ('torch._dynamo', 'beam_moe.kernels.mxfp8.torch_ops') if m in sys.modules])"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_training_size_through_the_libraries(device):
    """cuBLAS and PyTorch's grouped GEMM, with bf16 weights, at a size where they are chosen."""
    x, w = torch.randn(1024, 512, device=device, dtype=BF16), torch.randn(768, 512, device=device, dtype=BF16)
    dy = torch.randn(1024, 768, device=device, dtype=BF16)
    for name, ref, got in zip(("y", "dx", "dw"), steps(x, w, dy), run(x, w, dy)):
        assert_close(name, ref, got, LIMIT[BF16])
    offsets = torch.tensor([0, 700, 700, 701, 1000], dtype=torch.int32, device=device)
    w = torch.randn(4, 768, 512, device=device, dtype=BF16)
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = grouped_linear(leaf, weight, offsets)
    y.backward(dy)
    for name, ref, got in zip(
        ("y", "dx", "dw"), grouped_steps(x, w, dy, offsets), (y.detach(), leaf.grad, weight.grad)
    ):
        assert_close(name, ref, got, LIMIT[BF16])
