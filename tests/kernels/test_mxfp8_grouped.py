"""Grouped MXFP8 GEMMs against a loop over groups in float64; groups of no row and of one row are in every case."""

from dataclasses import replace

import pytest
import torch

from beam_moe.kernels.mxfp8 import MXFP8Tensor, dequantize_reference, prepare, quantize_reference
from beam_moe.kernels.mxfp8.gemm import GemmConfig
from beam_moe.kernels.mxfp8.grouped import dequantize_groups, grouped_gemm, grouped_wgrad
from beam_moe.testing import assert_close

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = 1e-5 if torch.cuda.is_available() else 2e-6  # tensor cores truncate where they align the terms of a sum
SIZES = {
    "ragged": (33, 0, 1, 20),
    "all-empty": (0, 0, 0, 0),
    "last-only": (0, 0, 0, 17),
    "one-row": (1, 0, 0, 0),
}
TAIL = 3  # rows behind the last offset


def offsets_of(sizes, device):
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=device)


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(a, w, offsets):
    out = torch.zeros(a.shape[0], w.shape[1], dtype=torch.float64, device=a.device)
    bounds = offsets.tolist()
    for e, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        out[begin:end] = a[begin:end].double() @ w[e].double().T
    return out


def wgrad_reference(dy, x, offsets):
    bounds = offsets.tolist()
    return torch.stack([dy[b:e].double().T @ x[b:e].double() for b, e in zip(bounds, bounds[1:])])


def operands(sizes, n, k, device, dtype=BF16):
    offsets = offsets_of(sizes, device)
    a = randn(sum(sizes) + TAIL, k, seed=1).to(device, dtype)
    a[sum(sizes) :] = float("nan")  # rows of no group must be neither read into a result nor copied to it
    return a, quantize_reference(randn(len(sizes), n, k, seed=2)).to(device), offsets


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_forward(sizes, prepared, device):
    a, b, offsets = operands(sizes, 40, 96, device)
    y = grouped_gemm(a, prepare(b) if prepared else b, offsets, out_dtype=F32)
    assert_close("y", reference(a, dequantize_reference(b, BF16), offsets), y, LIMIT)
    assert not y[sum(sizes) :].any()


@pytest.mark.parametrize("prepared", [False, True])
def test_fp16_activations_and_bias(prepared, device):
    a, b, offsets = operands((9, 0, 1), 72, 64, device, FP16)
    bias = randn(3, 72, seed=4).to(device)
    ref = reference(a, dequantize_reference(b, BF16), offsets)
    for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        ref[begin:end] += bias[e].double()
    y = grouped_gemm(a, prepare(b) if prepared else b, offsets, bias=bias, out_dtype=F32)
    assert_close("y", ref, y, LIMIT)


def test_quantised_activations(device):
    a, b, offsets = operands((9, 0, 1), 40, 96, device)
    q = quantize_reference(a.nan_to_num())
    ref = reference(dequantize_reference(q, BF16), dequantize_reference(b, BF16), offsets)
    assert_close("y", ref, grouped_gemm(q, b, offsets, out_dtype=F32), LIMIT)


@pytest.mark.parametrize("n", [40, 64])
def test_dgrad_through_the_columnwise_copy(n, device):
    """Its last block is short when 32 does not divide N, and behind it lies the next expert."""
    offsets = offsets_of((20, 0, 1), device)
    w = quantize_reference(randn(3, n, 96, seed=2), axis=-2).to(device)
    dy = randn(24, n, seed=3).to(device, BF16)
    ref = reference(dy, dequantize_reference(w, BF16).mT, offsets)
    for b in (w, w.mT, prepare(w.mT)):
        assert_close("dx", ref, grouped_gemm(dy, b, offsets, out_dtype=F32), LIMIT)


def test_special_scales_beside_each_other(device):
    """Bytes 0 and 255 and all-zero blocks, in one expert; the others do not notice."""
    a, b, offsets = operands((5, 0, 2), 40, 96, device)
    scale, code = b.scale.clone(), b.data.view(torch.uint8).clone()
    scale[0, 0, 0], code[0, 0, :32] = 0, 0
    scale[0, 1, 1] = 255
    scale[0, 2] = 0
    b = MXFP8Tensor(code.view(b.data.dtype), scale)
    ref = reference(a, dequantize_reference(b, BF16), offsets)
    for t in (b, prepare(b)):
        y = grouped_gemm(a, t, offsets, out_dtype=F32)
        assert y[:5, 1].isnan().all() and int(y.isnan().sum()) == 5
        assert_close("y", ref.nan_to_num(), y.nan_to_num(), LIMIT)
        assert_close("byte 0", ref[:5, 2] * 2.0**100, y[:5, 2].double() * 2.0**100, 1e-4)


def poisoned(t):
    """``t`` inside a larger buffer of NaN (0xFF for bytes) on every side, not contiguous."""
    wide = [n + 2 for n in t.shape[:-1]] + [t.shape[-1] + 64]
    if t.dtype in (torch.uint8, torch.float8_e4m3fn):
        view = torch.full(wide, 0xFF, dtype=torch.uint8, device=t.device).view(t.dtype)
    else:
        view = torch.full(wide, float("nan"), dtype=t.dtype, device=t.device)
    whole = view
    for dim, n in enumerate(t.shape):
        view = view.narrow(dim, 1 if dim < t.ndim - 1 else 32, n)
    (view.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else view).copy_(
        t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
    )
    return view, whole


def test_slices_of_poisoned_buffers(device):
    a, b, offsets = operands((5, 0, 2), 40, 96, device)
    ref = reference(a, dequantize_reference(b, BF16), offsets)
    b = MXFP8Tensor(poisoned(b.data)[0], poisoned(b.scale)[0])
    out, whole = poisoned(torch.zeros(a.shape[0], 40, dtype=F32, device=device))
    assert grouped_gemm(poisoned(a)[0], b, offsets, out=out) is out
    assert_close("y", ref, out, LIMIT)
    assert int(whole.isnan().sum()) == whole.numel() - out.numel()


@pytest.mark.parametrize("route", ["bf16", "fp16"])
def test_every_tile_gives_the_same_bits(route, device):
    g = torch.Generator().manual_seed(6)
    a, b, offsets = operands((18, 0, 5), 72, 96, device)
    a[: sum((18, 0, 5))] = torch.randint(-3, 4, (23, 96), generator=g).to(device, BF16)
    b = prepare(quantize_reference(torch.randint(-4, 5, (3, 72, 96), generator=g).float()).to(device))
    ref = reference(a, dequantize_reference(b, BF16), offsets)
    tiles = [(16, 64, 32), (32, 128, 64)]
    if device.type == "cuda":
        tiles += [(16, 64, 256), (64, 64, 128), (128, 128, 128), (256, 128, 64)]
    for bm, bn, bk in tiles:
        config = GemmConfig(route, bm, bn, bk, warps=8 if bm >= 128 else 4)
        assert torch.equal(grouped_gemm(a, b, offsets, out_dtype=F32, config=config).double(), ref), config


@pytest.mark.parametrize("axis", [-1, -2])
def test_dequantised_experts(axis, device):
    w = quantize_reference(randn(3, 64, 96, seed=2), axis=axis).to(device)
    offsets = offsets_of((4, 0, 1), device)
    dense = dequantize_groups(w if axis == -1 else w.mT, offsets)
    dense = dense if axis == -1 else dense.mT
    assert dense.is_contiguous()  # as the codes lie: nothing is transposed in memory
    ref = dequantize_reference(w, BF16)
    assert torch.equal(dense[0], ref[0]) and torch.equal(dense[2], ref[2])


@pytest.mark.parametrize("out_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_wgrad(sizes, quantised, out_dtype, device):
    offsets, rows = offsets_of(sizes, device), sum(sizes) + TAIL
    dy, x = randn(rows, 40, seed=3).to(device, BF16), randn(rows, 72, seed=4).to(device, BF16)
    if quantised:
        dy, x = (quantize_reference(t, axis=-2, offsets=offsets) for t in (dy, x))
        ref = wgrad_reference(dequantize_reference(dy, BF16), dequantize_reference(x, BF16), offsets)
    else:
        ref = wgrad_reference(dy, x, offsets)
        dy[sum(sizes) :], x[sum(sizes) :] = float("nan"), float("nan")
    dw = grouped_wgrad(dy, x, offsets, out_dtype=out_dtype)
    assert_close("dw", ref, dw, LIMIT if out_dtype == F32 else 2.5e-3)
    for e, size in enumerate(sizes):
        assert size or not dw[e].any()


def test_no_rows(device):
    offsets = offsets_of((0, 0), device)
    b = quantize_reference(randn(2, 40, 64, seed=1)).to(device)
    assert grouped_gemm(torch.zeros(0, 64, dtype=BF16, device=device), b, offsets).shape == (0, 40)
    zero = grouped_wgrad(
        torch.zeros(0, 40, dtype=BF16, device=device), torch.zeros(0, 64, dtype=BF16, device=device), offsets
    )
    assert zero.shape == (2, 40, 64) and not zero.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.zeros(4, dtype=torch.int64)}, "int32"),
        ({"offsets": torch.zeros(3, dtype=torch.int32)}, "3 \\+ 1 entries"),
        ({"a": torch.zeros(5, 64, dtype=BF16)}, "contracts over 64"),
        ({"a": torch.zeros(5, 96)}, "bf16, fp16 or MXFP8"),
        ({"bias": torch.zeros(40)}, "bias"),
        ({"out": torch.zeros(5, 41)}, "out must be"),
        ({"b_dense": torch.zeros(3, 40, 96)}, "b_dense"),
        ({"config": GemmConfig("fp16")}, "prepare"),
        ({"config": GemmConfig("native")}, "config.route"),
        ({"bias": torch.zeros(3, 40), "config": GemmConfig("dequantize")}, "without bias"),
    ],
    ids=str,
)
def test_refuses(change, message, device):
    a, b, offsets = operands((1, 0, 1), 40, 96, device)
    change = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        grouped_gemm(**{"a": a, "b": b, "offsets": offsets, **change})


def test_wgrad_refuses_blocks_that_do_not_restart(device):
    offsets = offsets_of((3, 2), device)
    x = quantize_reference(randn(5, 64, seed=1), axis=-2).to(device)
    with pytest.raises(ValueError, match="rows of 2 groups"):
        grouped_wgrad(torch.zeros(5, 40, dtype=BF16, device=device), x, offsets)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [40, 1500, 6000])
def test_routes_agree_at_size(rows, device):
    """Descriptors, the library's grouped GEMM, empty and one-row groups, and rows behind the last offset."""
    groups, n, k = 6, 384, 640
    sizes = torch.tensor([rows // 4, 0, 1, rows // 2, 5, rows - rows // 4 - rows // 2 - 6])
    offsets = offsets_of(sizes.tolist(), device)
    a = torch.randn(rows + 37, k, device=device, dtype=BF16)
    b = quantize_reference(torch.randn(groups, n, k, device=device))
    ref = reference(a, dequantize_reference(b, BF16), offsets)
    for config in (None, GemmConfig("dequantize"), GemmConfig("bf16", 64, 64, 128, 1, 4, 4)):
        y = grouped_gemm(a, b, offsets, config=config)
        assert_close("y", ref, y, 2.5e-3)
        assert not y[rows:].any()
    assert_close("fp16 form", ref, grouped_gemm(a, prepare(b), offsets, out_dtype=F32), LIMIT)
    col = quantize_reference(torch.randn(groups, n, k, device=device), axis=-2)
    dy = torch.randn(rows + 37, n, device=device, dtype=BF16)
    ref = reference(dy, dequantize_reference(col, BF16).mT, offsets)
    for config in (None, GemmConfig("dequantize"), GemmConfig("bf16", 64, 64, 128, 1, 4, 4)):
        assert_close("dx", ref, grouped_gemm(dy, col.mT, offsets, config=config), 2.5e-3)
    ref = wgrad_reference(dy, a, offsets)
    for library in (False, True):
        dw = grouped_wgrad(dy, a, offsets, library=library)
        assert_close("dw", ref, dw, 2.5e-3)
        assert not dw[1].any()


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    """Expert offsets pass 32 bits; only the last expert and its neighbours have rows."""
    groups, n, k = 164, 2560, 5120
    data = torch.randint(0x20, 0x38, (groups, n, k), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    b = MXFP8Tensor(data, torch.full((groups, n, k // 32), 127, dtype=torch.uint8, device=device))
    offsets = torch.zeros(groups + 1, dtype=torch.int32, device=device)
    offsets[groups - 1], offsets[groups] = 3, 7
    a = torch.randn(7, k, device=device, dtype=BF16)
    y = grouped_gemm(a, prepare(b), offsets, out_dtype=F32)
    for rows, e in ((slice(0, 3), groups - 2), (slice(3, 7), groups - 1)):
        w = dequantize_reference(b[e : e + 1], BF16)[0]
        assert_close("y", a[rows].double() @ w.double().T, y[rows], LIMIT)


@pytest.mark.gpu
def test_graph_replay_reads_new_offsets(device):
    a, b, offsets = operands((5, 0, 2), 40, 96, device)
    out = torch.empty(a.shape[0], 40, dtype=F32, device=device)
    grouped_gemm(a, b, offsets, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(a, b, offsets, out=out)
    offsets.copy_(offsets_of((0, 6, 0), device))
    graph.replay()
    assert_close("replay", reference(a, dequantize_reference(b, BF16), offsets), out, LIMIT)


def test_refuses_what_is_no_tensor_and_rows_that_overlap(device):
    a, b, offsets = operands((1, 0, 1), 40, 96, device)
    one_row = torch.empty(1, 40, dtype=a.dtype, device=device)
    with pytest.raises(ValueError, match="grouped_gemm: a must be a tensor, got list"):
        grouped_gemm([1.0], b, offsets)
    with pytest.raises(ValueError, match="grouped_gemm: offsets must be a tensor, got list"):
        grouped_gemm(a, b, [0, 1, 1, 2])
    with pytest.raises(ValueError, match="grouped_wgrad: dy must be a tensor, got NoneType"):
        grouped_wgrad(None, a, offsets)
    with pytest.raises(ValueError, match="grouped_gemm: out must have rows that do not overlap"):
        grouped_gemm(a, b, offsets, out=one_row.expand(a.shape[0], 40))


def test_words_of_every_second_expert_are_refused(device):
    """Kernels of the fp16 form count on words that lie one behind another; other forms read none."""
    a, b, offsets = operands(SIZES["ragged"], 40, 96, device)
    few = prepare(b)[::2]
    offsets = torch.tensor([0, 9, 40], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"grouped_gemm: b.rows must be contiguous .* strides \(80, 1\)"):
        grouped_gemm(a.half(), few, offsets)
    y = grouped_gemm(a, few, offsets, out_dtype=F32, config=GemmConfig("bf16", 32, 64, 128, stages=1))
    assert_close("y", reference(a, dequantize_reference(few, BF16), offsets), y, LIMIT)


def test_prepare_writes_words_where_they_lie_or_refuses(device):
    b = operands(SIZES["ragged"], 40, 96, device)[1]
    want = prepare(b).rows
    some = torch.zeros(4, 2, 40, dtype=torch.int16, device=device)
    assert prepare(replace(b, rows=some[:, 1])).rows.data_ptr() == some[:, 1].data_ptr()
    assert torch.equal(some[:, 1], want) and not some[:, 0].any()
    with pytest.raises(ValueError, match=r"prepare: t.rows must have inner stride 1, .* got strides \(80, 2\)"):
        prepare(replace(b, rows=some.view(4, 40, 2)[..., 0]))
    deep = MXFP8Tensor(b.data.view(2, 2, 40, 96), b.scale.view(2, 2, 40, 3))
    with pytest.raises(ValueError, match="prepare: t.rows must have .* leading dimensions that merge"):
        prepare(replace(deep, rows=some.view(2, 2, 2, 40)[:, :, 0].transpose(0, 1).contiguous().transpose(0, 1)))
    none = prepare(MXFP8Tensor(b.data[:, :0], b.scale[:, :0]))
    assert none.rows.shape == (4, 0)


def test_wgrad_of_operands_quantised_with_other_offsets(device, monkeypatch):
    x = randn(40, 64, seed=1).to(device)
    offsets, other = offsets_of((8, 0, 32), device), offsets_of((32, 0, 8), device)
    dy, x = quantize_reference(x, axis=-2, offsets=other), quantize_reference(x, axis=-2, offsets=offsets)
    monkeypatch.setenv("BEAM_MOE_CHECK", "1")
    with pytest.raises(ValueError, match=r"grouped_wgrad: dy must have been quantised with offsets \[0, 8, 8, 40\]"):
        grouped_wgrad(dy, x, offsets)


def test_results_may_not_lie_in_scales_or_words(device):
    a, b, offsets = operands(SIZES["one-row"], 32, 32, device)
    pool = torch.zeros(2**12, dtype=torch.uint8, device=device)
    out = pool[: a.shape[0] * 64].view(BF16).view(-1, 32)
    scale = pool[: b.scale.numel()].view(b.scale.shape)
    with pytest.raises(ValueError, match="grouped_gemm: out must not share memory with b.scale"):
        grouped_gemm(a, MXFP8Tensor(b.data, scale), offsets, out=out)
    words = pool[: 8 * 32].view(torch.int16).view(4, 32)
    with pytest.raises(ValueError, match="grouped_gemm: out must not share memory with b.rows"):
        grouped_gemm(a, replace(b, rows=words), offsets, out=out)
