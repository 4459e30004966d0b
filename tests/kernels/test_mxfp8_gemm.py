"""MXFP8 GEMM against float64 on the dequantised operands, on every route; each case names the failure it guards.

Where values are small integers and powers of two every order of summation gives the same bits, and tests ask for them.
"""

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from beam_moe.kernels.mxfp8 import MXFP8Tensor, dequantize_reference, prepare, quantize_reference, swizzle_scales
from beam_moe.kernels.mxfp8.decode_block import ROW_NAN, ROW_WIDE, TOKEN_WIDE, normalize_rows
from beam_moe.kernels.mxfp8.gemm import GemmConfig, gemm
from beam_moe.testing import assert_close

module = importlib.import_module("beam_moe.kernels.mxfp8.gemm")  # the package has its function by that name

# tensor cores truncate where they align the terms of a sum
LIMIT = {torch.float32: 1e-5 if torch.cuda.is_available() else 2e-6, torch.float16: 4e-4, torch.bfloat16: 2.5e-3}
BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
# each differs from the others in what it can get wrong: masks, two dots, splits, several token tiles
TILES = [
    GemmConfig("bf16", 16, 64, 32),
    GemmConfig("bf16", 16, 64, 128, split=2),
    GemmConfig("bf16", 32, 128, 64, split=3),
]
GPU_TILES = [
    GemmConfig("bf16", 16, 64, 256, 2, 4, 3),
    GemmConfig("bf16", 8, 64, 256, 3, 4, 3),
    GemmConfig("bf16", 16, 32, 256, 2, 2, 4),
    GemmConfig("bf16", 64, 64, 128, 1, 4, 4),
    GemmConfig("bf16", 16, 128, 128, 3, 8, 4),
    GemmConfig("bf16", 128, 128, 128, 1, 8, 3),
    GemmConfig("bf16", 256, 128, 64, 1, 8, 4),
    GemmConfig("bf16", 128, 128, 64, 1, 4, 4),
    GemmConfig("bf16", 128, 64, 128, 1, 4, 3),
    GemmConfig("bf16", 256, 64, 64, 1, 4, 3),
]


def weights(n, k, device, *, elem="e4m3", seed=0):
    g = torch.Generator().manual_seed(seed)
    return quantize_reference(torch.randn(n, k, generator=g), elem=elem).to(device)


def tokens(m, k, dtype, device, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=g).to(device, dtype)


def reference(a, b, bias=None):
    x = dequantize_reference(a, BF16) if isinstance(a, MXFP8Tensor) else a
    y = x.double() @ dequantize_reference(b, BF16).double().T
    return y if bias is None else y + bias.double()


def bound(a, b):
    """Per element, the sum of magnitudes: what an error of summation is measured by."""
    return a.double().abs() @ dequantize_reference(b, BF16).double().abs().T


def same(ref, got, scale, limit=1e-5):
    """NaN and infinities where the reference has them, and every other element within its own sum of magnitudes."""
    assert torch.equal(ref.isnan(), got.isnan()), (ref.isnan() ^ got.isnan()).nonzero()[:8].tolist()
    special = ~ref.isfinite()
    assert torch.equal(ref[special & ~ref.isnan()], got[special & ~ref.isnan()].double())
    worst = ((ref - got.double()).abs() - limit * scale)[~special]
    assert (worst <= 0).all(), f"{int((worst > 0).sum())} elements off, the worst by {float(worst.max()):.1e}"


HALF = GemmConfig("fp16", 16, 64, 64, 2, 4, 2)  # no rule picks this route for bf16 activations


@pytest.mark.parametrize("route", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 48, 32), (31, 40, 96), (33, 72, 160), (129, 16, 64), (2, 24, 2880)], ids=str
)
def test_matches_the_dequantised_product(m, n, k, dtype, route, device):
    b, a = weights(n, k, device), tokens(m, k, dtype, device)
    b = prepare(b) if route == "fp16" else b
    y = gemm(a, b, out_dtype=F32, config=HALF if route == "fp16" else None)
    assert_close("y", reference(a, b), y, LIMIT[F32])


@pytest.mark.parametrize("out_dtype", LIMIT, ids=str)
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("bias_dtype", [F32, BF16], ids=str)
def test_bias_and_out_dtypes(bias_dtype, split, out_dtype, device):
    b, a = weights(40, 96, device), tokens(5, 96, BF16, device)
    bias = tokens(1, 40, bias_dtype, device)[0]
    y = gemm(a, b, bias=bias, out_dtype=out_dtype, config=GemmConfig("bf16", 16, 64, 32, split))
    assert y.dtype == out_dtype
    assert_close("y", reference(a, b, bias), y, LIMIT[out_dtype])


@pytest.mark.parametrize("m", [3, 600])
def test_dequantised_route_and_the_callers_copy(m, device):
    b, a, bias = weights(40, 96, device), tokens(m, 96, BF16, device), tokens(1, 40, BF16, device)[0]
    config = GemmConfig("dequantize")
    for out_dtype, limit in LIMIT.items():
        y = gemm(a, b, bias=bias, out_dtype=out_dtype, config=config)
        assert_close("y", reference(a, b, bias), y, limit)
    dense = dequantize_reference(b, BF16)
    assert_close("copy", reference(a, b), gemm(a, b, b_dense=dense, config=config), LIMIT[BF16])
    dense.zero_()  # the copy is what is read
    assert not gemm(a, b, b_dense=dense, config=config).any()


def test_no_rows(device):
    assert gemm(tokens(0, 64, BF16, device), weights(40, 64, device)).shape == (0, 40)


@pytest.mark.parametrize("route", ["bf16", "fp16"])
@pytest.mark.parametrize("elem", ["e4m3", "e5m2"])
def test_element_types(elem, route, device):
    b, a = weights(40, 96, device, elem=elem), tokens(3, 96, BF16, device)
    b = prepare(b) if route == "fp16" else b
    y = gemm(a, b, out_dtype=F32, config=HALF if route == "fp16" else None)
    assert_close("y", reference(a, b), y, LIMIT[F32])


@pytest.mark.parametrize("a_elem", ["e4m3", "e5m2"])
@pytest.mark.parametrize("prepared", [False, True])
def test_two_quantised_operands(a_elem, prepared, device):
    b = weights(40, 96, device)
    a = quantize_reference(tokens(33, 96, F32, "cpu"), elem=a_elem).to(device)
    y = gemm(a, prepare(b) if prepared else b, out_dtype=F32)
    assert_close("y", reference(a, b), y, LIMIT[F32])


def special_weights(device):
    """Rows of three blocks with every scale that decoding can trip over, and the words that `prepare` owes them."""
    g = torch.Generator().manual_seed(3)
    code = torch.randint(0x28, 0x50, (10, 96), generator=g, dtype=torch.uint8)
    code |= torch.randint(0, 2, code.shape, generator=g, dtype=torch.uint8) << 7
    zero = torch.zeros(10, 3, dtype=torch.bool)
    scale, expected = torch.empty(10, 3, dtype=torch.uint8), []
    rows = [
        ((0, 120, 130), (1, 0, 0), 130),  # an all-zero block beside large ones
        ((120, 255, 121), (0, 0, 0), 121 + ROW_NAN),
        ((0, 0, 0), (0, 0, 0), 0 + ROW_WIDE),  # byte 0 with elements: 2**-127, not zero
        ((127, 106, 127), (0, 0, 0), 127),  # the widest spread that fp16 holds
        ((127, 105, 127), (0, 0, 0), 127 + ROW_WIDE),  # and the first that it does not
        ((100, 3, 140), (0, 0, 0), 140 + ROW_WIDE),
        ((0, 0, 0), (1, 1, 1), 0),
        ((0x69, 60, 61), (1, 0, 0), 61),  # an all-zero block with a byte of its own, far above the others
        ((254, 100, 101), (1, 0, 0), 101),
        ((255, 255, 255), (1, 1, 1), ROW_NAN),  # NaN scales over zeros are NaN
    ]
    for i, (bytes_, zeros, word) in enumerate(rows):
        scale[i], zero[i] = torch.tensor(bytes_, dtype=torch.uint8), torch.tensor(zeros, dtype=torch.bool)
        expected.append(word)
    code[zero.repeat_interleave(32, 1)] &= 0x80
    return MXFP8Tensor(code.view(torch.float8_e4m3fn), scale).to(device), expected


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("route", ["bf16", "fp16", "dequantize"])
def test_scale_bytes_of_every_kind(route, dtype, device):
    b, words = special_weights(device)
    if route == "fp16":
        b = prepare(b)
        assert b.rows.tolist() == words
    if route == "dequantize" and dtype == FP16:
        pytest.skip("fp16 activations do not take this route")
    a = tokens(4, 96, dtype, device)
    y = gemm(a, b, out_dtype=F32, config=GemmConfig(route, 16, 64, 32 if route == "bf16" else 128))
    # element by element: a row of scale 2**-127 must not vanish beside one of 2**13
    same(reference(a, b), y, bound(a, b).nan_to_num(), 1e-4)


def test_nan_elements_stay_nan(device):
    b = weights(16, 96, device)
    b.data.view(torch.uint8)[3, 40] = 0x7F
    b.data.view(torch.uint8)[5, 70] = 0xFF
    a = tokens(2, 96, BF16, device)
    for t in (b, prepare(b)):
        assert gemm(a, t, out_dtype=F32).isnan().any(0).nonzero().flatten().tolist() == [3, 5]


def awkward_tokens(dtype, device):
    """Rows of activations that fp16 cannot hold: not finite, or spread too far for one exponent."""
    a = tokens(6, 96, F32, "cpu")
    a[1, 7], a[2, 3], a[2, 9] = float("inf"), float("nan"), 1.0
    a[3] = torch.where(torch.arange(96) < 32, 2.0**60, a[3] * 2.0**-60) if dtype == BF16 else a[3] * 1e-5
    a[4] *= 2.0**100 if dtype == BF16 else 1e4
    a[5] = 0
    return a.to(device, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("prepared", [False, True])
def test_activations_that_fp16_does_not_hold(prepared, dtype, device):
    b = weights(24, 96, device)
    b.data.view(torch.uint8)[:, :32] &= 0x80  # the huge columns meet zeros: what is left of the row is the result
    a = awkward_tokens(dtype, device)
    y = gemm(a, prepare(b) if prepared else b, out_dtype=F32, config=HALF if prepared else None)
    same(reference(a, b), y, bound(a, b).nan_to_num(posinf=0))
    assert y[3].any()


def test_normalised_rows_say_what_they_lost(device):
    a = awkward_tokens(BF16, device)
    half, words = normalize_rows(a)
    wide = (words >= TOKEN_WIDE).tolist()
    assert wide == [False, True, True, True, False, False]
    exponent = (words % TOKEN_WIDE - 1024).double()
    back = half.double() * torch.exp2(-exponent)[:, None]
    keep = [0, 4, 5]
    assert torch.equal(back[keep], a.double()[keep])
    top = half[[0, 4]].double().abs().amax(1)
    assert ((top >= 2**14) & (top < 2**15)).all()


@pytest.mark.parametrize("prepared", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(prepared, device):
    """Bits of one token alone, among others of its class, and beside tokens that force the wide form."""
    b = weights(40, 160, device)
    b, config = (prepare(b), HALF) if prepared else (b, None)
    a = tokens(16, 160, BF16, device)
    whole = gemm(a, b, out_dtype=F32, config=config)
    for i in (0, 15):
        assert torch.equal(gemm(a[i : i + 1], b, out_dtype=F32, config=config)[0], whole[i])
    a[3], a[4] = float("nan"), float("inf")
    beside = gemm(a, b, out_dtype=F32, config=config)
    keep = [i for i in range(16) if i not in (3, 4)]
    assert torch.equal(beside[keep], whole[keep])


def exact_operands(n, k, m, dtype, device):
    """Values whose products and sums are exact in fp32 in any order, over several scales a row."""
    g = torch.Generator().manual_seed(5)
    w = torch.randint(-4, 5, (n, k), generator=g).float()
    w *= torch.exp2(torch.randint(-3, 4, (n, k // 32), generator=g).float()).repeat_interleave(32, 1)
    a = torch.randint(-3, 4, (m, k), generator=g).to(device, dtype)
    return a, quantize_reference(w).to(device)


@pytest.mark.parametrize("route", ["bf16", "fp16"])
def test_every_tile_gives_the_same_bits(route, device):
    a, b = exact_operands(72, 160, 40, BF16, device)
    ref = reference(a, b)
    b = prepare(b)
    for tile in TILES + (GPU_TILES if device.type == "cuda" else []):
        config = GemmConfig(route, *[getattr(tile, f) for f in ("bm", "bn", "bk", "split", "warps", "stages")])
        assert torch.equal(gemm(a, b, out_dtype=F32, config=config).double(), ref), config


def test_repeats_bit_for_bit_with_a_split(device):
    a, b = tokens(5, 512, BF16, device), weights(40, 512, device)
    config = GemmConfig("bf16", 16, 64, 128, split=4)
    first = gemm(a, b, out_dtype=F32, config=config)
    for _ in range(3):
        assert torch.equal(gemm(a, b, out_dtype=F32, config=config), first)


def poisoned(t, device):
    """``t`` in the middle of a larger matrix of NaN (0xFF for bytes), not contiguous."""
    wide = (t.shape[0] + 3, t.shape[1] + 64)
    if t.dtype in (torch.uint8, torch.float8_e4m3fn):
        whole = torch.full(wide, 0xFF, dtype=torch.uint8, device=device).view(t.dtype)
        view = whole[1 : 1 + t.shape[0], 32 : 32 + t.shape[1]]
        view.view(torch.uint8).copy_(t.view(torch.uint8))
    else:
        whole = torch.full(wide, float("nan"), dtype=t.dtype, device=device)
        view = whole[1 : 1 + t.shape[0], 32 : 32 + t.shape[1]]
        view.copy_(t)
    return view, whole


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("split", [1, 2])
def test_slices_of_poisoned_buffers(split, prepared, device):
    b, a = weights(40, 96, device), tokens(7, 96, BF16, device)
    ref = reference(a, b)
    b = MXFP8Tensor(poisoned(b.data, device)[0], poisoned(b.scale, device)[0])
    b = prepare(b) if prepared else b
    out, whole = poisoned(torch.zeros(7, 40, dtype=F32), device)
    config = GemmConfig("fp16" if prepared else "bf16", 16, 64, 64, split)
    assert gemm(poisoned(a, device)[0], b, out=out, config=config) is out
    assert_close("y", ref, out, LIMIT[F32])
    assert int(whole.isnan().sum()) == whole.numel() - out.numel()


@pytest.mark.parametrize("n", [33, 64])
@pytest.mark.parametrize("axis", [-1, -2])
def test_transposed_weights(axis, n, device):
    """A dgrad contracts over the columnwise copy, whose last block may be short; so may any operand be a view."""
    w, dy = tokens(n, 48, F32, "cpu"), tokens(5, n, BF16, device)
    b = quantize_reference(w, axis=-2).to(device)
    ref = dy.double() @ dequantize_reference(b, BF16).double()
    y = gemm(dy, b if axis == -2 else b.mT, out_dtype=F32)
    assert_close("dx", ref, y, LIMIT[F32])
    assert_close("prepared", ref, gemm(dy, prepare(b.mT), out_dtype=F32), LIMIT[F32])
    turned = dy.mT.contiguous().mT
    assert torch.equal(gemm(turned, b, out_dtype=F32), y)
    assert_close("both", ref, gemm(turned, prepare(b.mT), out_dtype=F32), LIMIT[F32])


def test_prepare_again_rewrites_in_place(device):
    """A captured graph holds the words' address; weights that change must reach it there."""
    b = prepare(weights(40, 96, device))
    before = b.rows.clone()
    other = weights(40, 96, device, seed=9)
    b.data.view(torch.uint8).copy_(other.data.view(torch.uint8))
    b.scale.copy_(other.scale + 9)
    again = prepare(b)
    assert again.rows.data_ptr() == b.rows.data_ptr() and not torch.equal(again.rows, before)
    a = tokens(3, 96, BF16, device)
    assert_close("y", reference(a, again), gemm(a, again, out_dtype=F32), LIMIT[F32])


@pytest.mark.skipif(torch.cuda.is_available(), reason="Hopper has no block-scaled instruction")
def test_native_kernel_in_the_interpreter(device):
    pytest.importorskip("triton", minversion="3.8.0")
    b = weights(40, 96, device)
    a = quantize_reference(tokens(5, 96, F32, device))
    bias = tokens(1, 40, F32, device)[0]
    y = gemm(a, b, bias=bias, out_dtype=F32, config=GemmConfig("native", 16, 128, 128, stages=1))
    assert_close("y", reference(a, b, bias), y, LIMIT[F32])


def swizzled(t):
    scale = t.scale if t.axis == -1 else t.scale.mT
    return MXFP8Tensor(t.data, swizzle_scales(scale), t.axis, swizzled=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Hopper has no block-scaled instruction")
@pytest.mark.parametrize("which", ["a", "b", "ab"])
@pytest.mark.parametrize(
    ("m", "n", "k", "bm", "bn", "bk"),
    [
        (5, 40, 96, 16, 128, 128),
        (130, 200, 352, 128, 128, 128),
        (300, 384, 800, 256, 128, 256),  # the last tile lies past the scales in both directions
        (130, 300, 640, 128, 256, 128),
        (150, 130, 300, 64, 64, 64),  # no tile of 128: by pointers
    ],
)
def test_swizzled_scales_in_the_interpreter(m, n, k, bm, bn, bk, which, device, monkeypatch):
    """By descriptors, as on Blackwell; scales differ widely, so that one in another's place shows."""
    pytest.importorskip("triton", minversion="3.8.0")
    monkeypatch.setattr(module, "_capability", lambda device: (10, 0))
    a, b = quantize_reference(tokens(m, k, F32, device)), weights(n, k, device)
    for t in (a, b):
        t.scale.copy_(torch.randint(118, 137, t.scale.shape, dtype=torch.uint8))
    args = {"a": swizzled(a) if "a" in which else a, "b": swizzled(b) if "b" in which else b}
    for name, rows in (("a", bm), ("b", bn)):
        layout = module._native_layout(args[name], rows, bk)[0]
        assert layout == ("rows" if name not in which else "tma" if rows >= 128 <= bk else "swizzled")
    y = gemm(**args, out_dtype=F32, config=GemmConfig("native", bm, bn, bk, stages=1))
    same(reference(a, b), y, bound(dequantize_reference(a, BF16), b), 1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Hopper has no block-scaled instruction")
def test_swizzled_scales_choose_the_native_route(device, monkeypatch):
    pytest.importorskip("triton", minversion="3.8.0")
    monkeypatch.setattr(module, "_capability", lambda device: (10, 0))
    a, b = quantize_reference(tokens(33, 160, F32, device)), quantize_reference(tokens(160, 40, F32, device), axis=-2)
    y = gemm(swizzled(a), swizzled(b), out_dtype=F32)
    assert torch.equal(y, gemm(a, b, out_dtype=F32))
    assert_close("y", reference(a, b.mT), y, LIMIT[F32])


@pytest.mark.parametrize("which", ["a", "b"])
def test_swizzled_scales_are_refused_off_blackwell(which, device, monkeypatch):
    args = {"a": quantize_reference(tokens(3, 96, F32, device)), "b": weights(40, 96, device)}
    args[which] = swizzled(args[which])
    message = rf"{which} has swizzled scales; pass row-major ones \(unswizzle_scales\)"
    for route in (None, "bf16", "dequantize"):
        with pytest.raises(ValueError, match=message):
            gemm(**args, config=route and GemmConfig(route))
    with pytest.raises(ValueError, match="b has swizzled scales"):
        gemm(tokens(3, 96, BF16, device), swizzled(weights(40, 96, device)))
    monkeypatch.setattr(module, "_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match=message):
        gemm(**args, config=GemmConfig("native"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(3, 64, dtype=BF16)}, "contracts over 64"),
        ({"a": torch.zeros(3, 96)}, "bf16, fp16 or MXFP8"),
        ({"bias": torch.zeros(39)}, "bias"),
        ({"out": torch.zeros(3, 39)}, "out must be"),
        ({"out": torch.zeros(40, 3).mT}, "last stride 1"),
        ({"out_dtype": torch.float64}, "out_dtype"),
        ({"b_dense": torch.zeros(40, 96)}, "b_dense"),
        ({"config": GemmConfig("fp16")}, "prepare"),
        ({"config": GemmConfig("native")}, "MXFP8 activations"),
        ({"b": torch.zeros(40, 96, dtype=BF16)}, "MXFP8Tensor"),
    ],
    ids=str,
)
def test_refuses(change, message, device):
    args = {"a": tokens(3, 96, BF16, device), "b": weights(40, 96, device)}
    change = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        gemm(**{**args, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["bf16", "fp16"])
def test_graph_replay_reads_new_weights(route, device):
    b, a = weights(256, 512, device), tokens(4, 512, BF16, device)
    b, config = (prepare(b), HALF) if route == "fp16" else (b, None)
    out = torch.empty(4, 256, dtype=F32, device=device)
    gemm(a, b, out=out, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(a, b, out=out, config=config)
    other = weights(256, 512, device, seed=7)
    b.data.view(torch.uint8).copy_(other.data.view(torch.uint8))
    b.scale.copy_(other.scale)
    if route == "fp16":
        prepare(b)
    graph.replay()
    assert_close("replay", reference(a, b), out, LIMIT[F32])


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["bf16", "fp16"])
def test_overlapped_launches_wait_for_each_other(route, device):
    """Each product takes the one before it as its tokens, and partial sums share memory: an early start would show."""
    config = GemmConfig(route, 16, 64, 256, 3, 4, 3)
    layers = [prepare(quantize_reference(torch.randn(2048, 2048, device=device) / 45)) for _ in range(6)]
    a = torch.randn(16, 2048, device=device, dtype=BF16)

    def chain(pause: bool):
        outs = [a]
        for b in layers:
            outs.append(gemm(outs[-1], b, config=config))
            if pause:
                torch.cuda.synchronize()
        return torch.stack(outs[1:])

    apart = chain(True)
    assert_close("first", reference(a, layers[0]), apart[0], LIMIT[BF16])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together = chain(False)
    for _ in range(10):
        graph.replay()
        assert torch.equal(together, apart)
        together.zero_()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 64, 200, 1024])
def test_large_shapes_through_descriptors(m, device):
    b = quantize_reference(torch.randn(1536, 2880, device=device))
    a = torch.randn(m, 2880, device=device, dtype=BF16)
    ref = reference(a, b)
    for t in (b, prepare(b)):
        assert_close("y", ref, gemm(a, t, out_dtype=F32), LIMIT[F32])
        assert_close("bf16", ref, gemm(a, t), LIMIT[BF16])
    assert_close("fp16", reference(a.half(), b), gemm(a.half(), prepare(b), out_dtype=F32), LIMIT[F32])
    col = quantize_reference(torch.randn(2880, 1536, device=device), axis=-2)
    assert_close("turned", reference(a, col.mT), gemm(a, col.mT, out_dtype=F32), LIMIT[F32])


@pytest.mark.gpu
def test_the_two_forms_agree_bit_for_bit(device):
    """Same tile, same order, exact operands: a power of two more or less changes no bit."""
    b, a = prepare(quantize_reference(torch.randn(512, 1024, device=device))), tokens(16, 1024, BF16, device)
    outs = [gemm(a, b, out_dtype=F32, config=GemmConfig(r, 16, 64, 128, 2, 4, 3)) for r in ("bf16", "fp16")]
    assert torch.equal(*outs)


NATIVE = """
import json, re, sys
sys.path.insert(0, sys.argv[1])
import compile_cases as cases
from beam_moe.kernels import mxfp8 as q
with cases.pretend(int(sys.argv[2])) as compiled:
    w = q.quantize(cases.empty(1024, 512))
    for rows in (1, 64, 300):
        q.gemm(q.quantize(cases.empty(rows, 512)), w)
    q.gemm(q.quantize(cases.empty(300, 1024)), q.quantize(cases.empty(1024, 512), axis=-2))
    q.gemm(q.quantize(cases.empty(300, 512), swizzle=True), q.quantize(cases.empty(1024, 512), swizzle=True))
for name, kernel, _ in compiled:
    if name.endswith("_native_kernel"):
        found = re.findall(r"tcgen05\\.mma\\S*kind::\\S+|mma\\.sync\\S+", kernel.asm["ptx"])
        row = {"tmem": getattr(kernel.metadata, "tmem_size", 0), "shared": kernel.metadata.shared}
        print(json.dumps({"mma": sorted(set(found)), **row}))
"""
SHARED = {100: 227 << 10, 120: 99 << 10}  # bytes that a program may have


@pytest.mark.compile
@pytest.mark.parametrize("arch", SHARED)
def test_blackwell_gets_block_scaled_instructions(arch, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    script = [sys.executable, "-c", NATIVE, str(Path(__file__).parent), str(arch)]
    done = subprocess.run(script, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 5
    for row in rows:
        assert row["mma"] and all("kind::mxf8f6f4.block_scale" in m for m in row["mma"]), row
        assert row["tmem"] <= 512, row  # beyond the tensor memory of an SM Triton emits a bare trap
        assert row["shared"] <= SHARED[arch], row


def test_threads_leave_the_switch_of_cublas_as_they_found_it():
    """It is the process's: a second thread's product must not take the first one's setting for the caller's."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    inside, leave = threading.Event(), threading.Event()

    def product():
        with module.fp32_reduction():
            inside.set()
            leave.wait()

    other = threading.Thread(target=product, daemon=True)
    with module.fp32_reduction():
        other.start()
        inside.wait(0.2)
        assert not flags.allow_bf16_reduced_precision_reduction
    inside.wait()
    assert not flags.allow_bf16_reduced_precision_reduction
    leave.set()
    other.join()
    assert flags.allow_bf16_reduced_precision_reduction == before


def test_refuses_what_is_no_tensor_and_rows_that_overlap(device):
    a, b = tokens(3, 96, BF16, device), weights(40, 96, device)
    with pytest.raises(ValueError, match="gemm: a must be a tensor, got list"):
        gemm([1.0], b)
    with pytest.raises(ValueError, match="gemm: bias must be a tensor, got float"):
        gemm(a, b, bias=1.0)
    with pytest.raises(ValueError, match="gemm: out must have rows that do not overlap, got strides \\(0, 1\\)"):
        gemm(a, b, out=torch.empty(1, 40, dtype=BF16, device=device).expand(3, 40))
