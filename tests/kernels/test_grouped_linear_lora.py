"""`grouped_linear_lora` against float64 autograd of the formula; experts of no row and of one row in every case."""

import pytest
import torch

from beam_moe.kernels.moe_lora import grouped_linear, grouped_linear_lora
from beam_moe.kernels.mxfp8 import MXFP8Tensor, dequantize_reference, quantize_both, quantize_reference
from beam_moe.testing import assert_close

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
GPU = torch.cuda.is_available()
# one rounding of the result; the interpreter truncates bf16 where hardware rounds to nearest
LIMIT = {BF16: 2e-3 if GPU else 4e-3, FP16: 3e-4, F32: 1e-5 if GPU else 2e-6}
SIZES = (19, 0, 1, 6)
TAIL = 3  # rows behind the last offset


def offsets_of(sizes, device):
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=device)


def plain(x, w, offsets, a, b, scale):
    """The formula, expert by expert; zeros behind the last offset."""
    pieces, bounds = [], offsets.tolist()
    for e, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        rows, fa, fb = x[begin:end], a[min(e, len(a) - 1)], b[min(e, len(b) - 1)]
        pieces.append(rows @ w[e].T + scale * (rows @ fa.T) @ fb.T)
    return torch.cat([*pieces, x.new_zeros(len(x) - bounds[-1], w.shape[1])])


def operands(sizes, n, k, rank, device, *, shared_a=False, shared_b=False, dtype=F32, factors=None):
    experts, outer = len(sizes), (1 if shared_a else len(sizes), 1 if shared_b else len(sizes))
    x = torch.randn(sum(sizes) + TAIL, k)
    x[sum(sizes) :] = float("nan")  # rows of no expert must be neither read into a result nor copied to it
    made = (
        (x, dtype),
        (torch.randn(experts, n, k) * k**-0.5, dtype),
        (torch.randn(outer[0], rank, k) * k**-0.5, factors or dtype),
        (torch.randn(outer[1], n, rank) * rank**-0.5, factors or dtype),
    )
    return [t.to(device, d).requires_grad_() for t, d in made]


def compare(ours, offsets, *, scale=0.5, out_dtype=None, limits=None):
    x, w, a, b = ours
    end = int(offsets[-1])
    y = grouped_linear_lora(x, w, offsets, a, b, scale=scale, out_dtype=out_dtype)
    assert y.dtype == (out_dtype or x.dtype)
    exact = [t.detach().double().requires_grad_() for t in ours]
    with torch.no_grad():
        exact[0][end:] = 0
    want = plain(exact[0], exact[1], offsets, exact[2], exact[3], scale)
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy.double())
    limits = limits or LIMIT
    assert_close("y", want, y, limits[y.dtype])
    assert not y[end:].any()
    for name, t, ref in zip(("dx", "dw", "da", "db"), ours, exact):
        if t.requires_grad:
            assert t.grad.dtype == t.dtype
            assert_close(name, ref.grad, t.grad, limits[t.dtype])
        else:
            assert t.grad is None
    assert not x.grad[end:].any()
    for e, size in enumerate(offsets.diff().tolist()):
        for t in (w, a, b):
            if size == 0 and t.requires_grad and len(t) > 1:
                assert not t.grad[e].any()


@pytest.mark.parametrize(
    "rank, shared_a, shared_b, dtype",
    [
        pytest.param(1, False, False, F32, id="rank1-fp32"),
        pytest.param(24, True, False, FP16, id="rank24-shared-a-fp16"),
        pytest.param(4, False, True, BF16, id="rank4-shared-b-bf16"),
    ],
)
def test_against_autograd(rank, shared_a, shared_b, dtype, device):
    """N and K end inside a tile."""
    ours = operands(SIZES, 72, 88, rank, device, shared_a=shared_a, shared_b=shared_b, dtype=dtype)
    compare(ours, offsets_of(SIZES, device))


def test_fp32_factors_and_result_beside_16_bit_layers(device):
    """Factors keep their precision: the gradients of fp32 factors are those of fp32 arithmetic."""
    ours = operands(SIZES, 40, 48, 4, device, dtype=FP16, factors=F32)
    ours[1].requires_grad_(False)
    compare(ours, offsets_of(SIZES, device), out_dtype=F32)


def test_strided_operands(device):
    x, w, a, b = operands(SIZES, 40, 48, 4, device)

    def spread(t):
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"), device=device)
        wide[..., ::2] = t.detach()
        return wide[..., ::2].requires_grad_()

    turned = w.detach().mT.contiguous().mT.requires_grad_()
    compare([spread(x), turned, spread(a), b.detach().mT.contiguous().mT.requires_grad_()], offsets_of(SIZES, device))


def test_shared_factors_over_several_runs_of_rows(device, monkeypatch):
    """Partial sums of a shared factor's gradient leave out rows behind the last offset, and come out the same twice."""
    monkeypatch.setattr(grouped_linear, "RUN_ROWS", 8)
    ours = operands(SIZES, 24, 16, 4, device, shared_a=True, shared_b=True)
    offsets = offsets_of(SIZES, device)
    compare(ours, offsets)
    x, w, a, b = (t.detach().clone().requires_grad_() for t in ours)
    again = torch.autograd.grad(grouped_linear_lora(x, w, offsets, a, b).square()[: sum(SIZES)].sum(), (x, a, b))
    once = torch.autograd.grad(grouped_linear_lora(x, w, offsets, a, b).square()[: sum(SIZES)].sum(), (x, a, b))
    assert all(torch.equal(p, q) for p, q in zip(again, once))


@pytest.mark.parametrize("rows", [0, 5])
def test_no_expert_has_rows(rows, device):
    offsets = torch.zeros(4, dtype=torch.int32, device=device)
    x = torch.randn(rows, 16, device=device, requires_grad=True)
    w = torch.randn(3, 24, 16, device=device, requires_grad=True)
    a = torch.randn(1, 4, 16, device=device, requires_grad=True)
    b = torch.randn(3, 24, 4, device=device, requires_grad=True)
    y = grouped_linear_lora(x, w, offsets, a, b)
    y.sum().backward()  # a gradient that is one number, expanded
    assert y.shape == (rows, 24) and not y.any()
    for t in (x, w, a, b):
        assert t.grad.shape == t.shape and not t.grad.any()


def test_only_what_is_trained_gets_a_gradient(device):
    x, w, a, b = (t.detach() for t in operands(SIZES, 24, 16, 4, device))
    offsets = offsets_of(SIZES, device)
    b.requires_grad_()
    y = grouped_linear_lora(x, w, offsets, a, b)
    y.sum(0).backward(torch.ones(24, device=device))  # every row of the gradient lies in one place
    exact = b.detach().double().requires_grad_()
    end = sum(SIZES)
    plain(x[:end].double(), w.double(), offsets, a.double(), exact, 1.0).sum().backward()
    assert_close("db", exact.grad, b.grad, LIMIT[F32])
    with torch.no_grad():
        assert not grouped_linear_lora(x, w, offsets, a, b).requires_grad


@pytest.mark.parametrize("paired", [True, False])
def test_mxfp8_base(paired, device):
    """Base products see quantised operands, those of `mxfp8.grouped_linear`; the adapter's see x and dy as they are."""
    n, k = 64, 96
    x, w, a, b = operands(SIZES, n, k, 4, device)
    offsets, end = offsets_of(SIZES, device), sum(SIZES)
    weight = quantize_both(w.detach()) if paired else w
    y = grouped_linear_lora(x, weight, offsets, a, b, scale=0.5, mxfp8=not paired)
    dy = torch.randn_like(y)
    y.backward(dy)

    def values(t, axis=-1):
        return dequantize_reference(quantize_reference(t.detach().cpu(), axis=axis), BF16).double().to(device)

    ex, ea, eb = (t.detach().double() for t in (x[:end], a, b))
    ex.requires_grad_(), ea.requires_grad_(), eb.requires_grad_()
    dy = dy[:end]
    zero = torch.zeros(len(SIZES), n, k, dtype=torch.float64, device=device)
    adapter = plain(ex, zero, offsets, ea, eb, 0.5)
    adapter.backward(dy.double())
    base, base_dx, dw = torch.zeros_like(adapter), torch.zeros_like(ex), torch.zeros_like(zero)
    bounds = offsets.tolist()
    for e, (begin, stop) in enumerate(zip(bounds, bounds[1:])):
        base[begin:stop] = values(x[:end])[begin:stop] @ values(w)[e].T
        base_dx[begin:stop] = values(dy)[begin:stop] @ values(w, -2)[e]
        if begin < stop:
            dw[e] = values(dy[begin:stop], -2).T @ values(x[begin:stop], -2)
    assert_close("y", adapter + base, y[:end], LIMIT[F32])
    assert_close("dx", ex.grad + base_dx, x.grad[:end], LIMIT[F32])
    assert_close("da", ea.grad, a.grad, LIMIT[F32])
    assert_close("db", eb.grad, b.grad, LIMIT[F32])
    if not paired:
        assert_close("dw", dw, w.grad, LIMIT[F32])
    assert not y[end:].any() and not x.grad[end:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 32, 512])
@pytest.mark.parametrize("rows", [200, 3000, 9000])
def test_tensor_memory_copies(rows, rank, device):
    """Sizes whose tiles come by descriptor, at each tile that `GroupedLoRAConfig.pick` knows."""
    sizes = (rows - rows // 3 - 1, 0, 1, rows // 3)
    ours = operands(sizes, 640, 768, rank, device, shared_a=rank == 16, dtype=BF16)
    compare(ours, offsets_of(sizes, device))


@pytest.mark.gpu
def test_rows_beyond_two_gigabytes(device):
    """Row strides that overflow 32 bits within a few rows."""
    rows, k, stride = 20, 64, 2**27
    memory = torch.zeros((rows - 1) * stride + k, dtype=BF16, device=device)
    x = memory.as_strided((rows, k), (stride, 1))
    x.copy_(torch.randn(rows, k))
    sizes = (rows - 4, 0, 1)
    _, w, a, b = operands(sizes, 64, k, 8, device, dtype=BF16)
    compare([x.requires_grad_(), w, a, b], offsets_of(sizes, device))


GOOD = {"x": (9, 64), "w": (3, 32, 64), "offsets": (4,), "a": (3, 4, 64), "b": (3, 32, 4)}


def arguments(device, **changes):
    made = {name: torch.randn(shape, device=device) for name, shape in GOOD.items()}
    made["offsets"] = offsets_of((4, 0, 5), device)
    return {**made, **{name: make(made[name]) for name, make in changes.items()}}


@pytest.mark.parametrize(
    "argument, make",
    [
        ("x", lambda t: t[0]),
        ("x", lambda t: t[:, :32]),
        ("x", lambda t: t.to(torch.int32)),
        ("w", lambda t: t[0]),
        ("w", lambda t: t.double()),
        ("w", lambda t: (t, t)),
        ("w", lambda t: tuple(reversed(quantize_both(t)))),
        ("a", lambda t: t[:2]),
        ("a", lambda t: t[:, :0]),
        ("a", lambda t: t.repeat(1, 200, 1)),
        ("b", lambda t: t[:, :, :3]),
        ("b", lambda t: t[:, :16]),
        ("b", lambda t: t.to("meta")),
        ("offsets", lambda t: t.long()),
        ("offsets", lambda t: t[:-1]),
    ],
)
def test_misfits_are_named(argument, make, device):
    given = arguments(device, **{argument: make})
    with pytest.raises(ValueError, match=rf"grouped_linear_lora: {argument} must be"):
        grouped_linear_lora(**given)


def test_misfits_of_values_are_named(device, monkeypatch):
    given = arguments(device)
    for name, value in (("scale", float("nan")), ("out_dtype", torch.float64)):
        with pytest.raises(ValueError, match=f"grouped_linear_lora: {name} must be"):
            grouped_linear_lora(**given, **{name: value})
    small = MXFP8Tensor(
        torch.zeros(3, 8, 64, device=device).to(torch.float8_e4m3fn), torch.zeros(3, 8, 2).byte().to(device)
    )
    turned = MXFP8Tensor(small.data, torch.zeros(3, 1, 64, dtype=torch.uint8, device=device), axis=-2)
    with pytest.raises(ValueError, match="grouped_linear_lora: w must be of N and K divisible by 32"):
        grouped_linear_lora(**{**given, "w": (small, turned)})
    with pytest.raises(ValueError, match="grouped_linear_lora: w must be of N and K divisible by 32"):
        grouped_linear_lora(**{**given, "w": torch.randn(3, 8, 64, device=device)}, mxfp8=True)
    monkeypatch.setenv("BEAM_MOE_CHECK", "1")
    for ends in ((0, 5, 4, 9), (1, 4, 4, 9), (0, 4, 4, 10)):
        given["offsets"] = torch.tensor(ends, dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match="grouped_linear_lora: offsets must be"):
            grouped_linear_lora(**given)
