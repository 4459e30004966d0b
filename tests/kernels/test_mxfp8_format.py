"""The MXFP8 reference against golden vectors and against rules stated another way (float64, integers, tables)."""

import copy
import io
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from beam_moe.kernels.mxfp8 import (
    MXFP8Tensor,
    dequantize_reference,
    e8m0_from_amax,
    e8m0_reciprocal,
    e8m0_to_float,
    quantize_reference,
    swizzle_scales,
    unswizzle_scales,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "mxfp8_golden.json").read_text())
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
MODES = [(elem, rounding) for elem in ("e4m3", "e5m2") for rounding in ("rceil", "floor")]


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def codes(t) -> np.ndarray:
    return t.data.view(torch.uint8).numpy()


def element_values(elem: str) -> np.ndarray:
    """float64 values of the finite codes 0.. in rising order, from the format's definition."""
    mantissa_bits, bias = (3, 7) if elem == "e4m3" else (2, 15)
    code = np.arange(0x7F if elem == "e4m3" else 0x7C)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / 2.0**mantissa_bits + (exponent > 0)
    return fraction * 2.0 ** (np.maximum(exponent, 1) - bias)


def nearest_code(y: np.ndarray, elem: str) -> np.ndarray:
    """Nearest element of float64 ``y`` by search in the table, ties to the even code, saturated, sign kept."""
    table = element_values(elem)
    a = np.minimum(np.abs(y), table[-1])
    high = np.clip(np.searchsorted(table, a), 1, len(table) - 1)
    low = high - 1
    down, up = a - table[low], table[high] - a
    code = np.where((down < up) | ((down == up) & (low % 2 == 0)), low, high)
    return (code | (np.signbit(y) << 7)).astype(np.uint8)


def exact_scale(amax: np.ndarray, elem: str, rounding: str) -> np.ndarray:
    """Scale bytes of finite float64 maxima, from exact binary fractions."""
    f, q = np.frexp(amax)
    f_max, q_max = np.frexp(LARGEST[elem])
    if rounding == "rceil":  # the least k with amax <= largest * 2**k
        k = q - q_max + (f > f_max)
    else:
        k = (q - 1) - (q_max - 1)
    return np.where(amax == 0, 0, np.clip(k + 127, 0, 254)).astype(np.uint8)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name):
    case = GOLDEN[name]
    bits = np.frombuffer(bytes.fromhex(case["x_bf16"]), dtype=">i2").astype(np.int16)
    x = torch.from_numpy(bits).view(torch.bfloat16)[None]
    for elem, rounding in MODES:
        scale, data = case[f"{elem}/{rounding.upper()}"]
        got = quantize_reference(x, elem=elem, rounding=rounding)
        assert got.scale.numpy().tobytes().hex() == scale, (elem, rounding)
        assert codes(got).tobytes().hex() == data, (elem, rounding)
        turned = quantize_reference(x.mT, axis=-2, elem=elem, rounding=rounding)
        assert turned.scale.numpy().tobytes().hex() == scale and codes(turned).tobytes().hex() == data


@pytest.mark.parametrize(("elem", "rounding"), MODES)
def test_every_bf16_as_block_maximum(elem, rounding):
    v = every_bf16()
    x = torch.zeros(v.numel(), 32, dtype=torch.bfloat16)
    x[:, 5], x[:, 9] = v, v * 0.37
    got = quantize_reference(x, elem=elem, rounding=rounding)
    finite = torch.isfinite(v).numpy()
    wide = x.double().numpy()
    want = exact_scale(np.abs(wide[:, 5]), elem, rounding)
    assert (got.scale.numpy()[finite, 0] == want[finite]).all()
    assert (got.scale.numpy()[~finite] == 255).all() and (codes(got)[~finite] == 0x7F).all()
    y = wide[finite] * 2.0 ** (127 - want[finite].astype(float))[:, None]
    assert (codes(got)[finite] == nearest_code(y, elem)).all()


@pytest.mark.parametrize(("elem", "rounding"), MODES)
def test_random_fp32_blocks(elem, rounding):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(512, 32, generator=g) * torch.exp2(torch.randint(-100, 100, (512, 1), generator=g).float())
    x *= torch.exp2(torch.randint(-12, 1, (512, 32), generator=g).float())
    got = quantize_reference(x, elem=elem, rounding=rounding)
    wide = x.double().numpy()
    want = exact_scale(np.abs(wide).max(1), elem, rounding)
    assert (got.scale.numpy()[:, 0] == want).all()
    assert (codes(got) == nearest_code(wide * 2.0 ** (127 - want.astype(float))[:, None], elem)).all()


@pytest.mark.parametrize("elem", LARGEST)
def test_scale_around_its_steps(elem):
    """fp32 maxima within 64 ulp of ``largest * 2**k``, where ceil(log2) in fp32 is one too small."""
    step = torch.tensor([LARGEST[elem] * 2.0**k for k in range(-100, 100)]).view(torch.int32)
    amax = (step[:, None] + torch.arange(-64, 65, dtype=torch.int32)).view(torch.float32)
    for rounding in ("rceil", "floor"):
        got = e8m0_from_amax(amax, elem=elem, rounding=rounding).numpy()
        assert (got == exact_scale(amax.double().numpy(), elem, rounding)).all()


def test_rceil_never_saturates_and_floor_does():
    x = torch.zeros(1, 32)
    x[0, 0] = 500.0
    assert dequantize_reference(quantize_reference(x, rounding="floor"))[0, 0] == 448
    assert dequantize_reference(quantize_reference(x, rounding="rceil"))[0, 0] == 512


def test_special_blocks_leave_their_neighbours_alone():
    x = torch.ones(1, 4 * 32)
    x[0, 3], x[0, 40] = float("nan"), float("-inf")
    x[0, 64:96] = 0
    x[0, 65:96:2] = -0.0
    got = quantize_reference(x)
    assert got.scale.tolist() == [[255, 255, 0, 119]]
    data = codes(got)[0]
    assert (data[:64] == 0x7F).all() and (data[64:96] == [0x00, 0x80] * 16).all() and (data[96:] == 0x78).all()
    values = dequantize_reference(got)[0]
    assert values[:64].isnan().all() and (values[64:96] == 0).all() and (values[96:] == 1).all()


@pytest.mark.parametrize("elem", LARGEST)
def test_dequantise_every_code_and_scale(elem):
    table = element_values(elem)
    code = torch.arange(256, dtype=torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8)
    t = MXFP8Tensor(
        code.expand(256, 256).contiguous().view(torch.float8_e4m3fn if elem == "e4m3" else torch.float8_e5m2),
        scale[:, None].expand(256, 8).contiguous(),
    )
    got = dequantize_reference(t).double().numpy()
    values = np.full(256, np.nan)
    values[: len(table)], values[128 : 128 + len(table)] = table, -table
    if elem == "e5m2":
        values[0x7C], values[0xFC] = np.inf, -np.inf
    want = values[None] * 2.0 ** (np.arange(256.0)[:, None] - 127)
    want[255] = np.nan
    want[np.abs(want) >= 2.0**128] = np.copysign(np.inf, want[np.abs(want) >= 2.0**128])
    np.testing.assert_array_equal(got, want)
    exact = slice(3, 247) if elem == "e4m3" else slice(10, 240)
    finite = np.isfinite(want[exact])
    assert (dequantize_reference(t, torch.bfloat16).double().numpy()[exact][finite] == want[exact][finite]).all()


def test_scale_bytes():
    s = torch.arange(256, dtype=torch.uint8)
    value, reciprocal = e8m0_to_float(s).double(), e8m0_reciprocal(s).double()
    assert torch.equal(value[:255], torch.exp2(s[:255].double() - 127)) and value[255].isnan()
    assert torch.equal(value[:255] * reciprocal[:255], torch.ones(255, dtype=torch.float64)) and reciprocal[255].isnan()
    assert torch.equal(e8m0_to_float(s.view(torch.float8_e8m0fnu))[:255].double(), value[:255])


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (300, 7), (5, 1), (0, 3)], ids=str)
def test_swizzle_is_the_formula(shape):
    rows, cols = shape
    scale = torch.randint(1, 256, (2, rows, cols), dtype=torch.uint8)
    got = swizzle_scales(scale.view(torch.float8_e8m0fnu))
    want = torch.zeros(2, -(-rows // 128) * 128 * -(-cols // 4) * 4, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            at = ((r // 128) * -(-cols // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            want[:, at] = scale[:, r, c]
    assert torch.equal(got, want)
    assert torch.equal(unswizzle_scales(got, rows, cols), scale)


def test_swizzled_tensor_dequantises_in_both_directions():
    x = torch.randn(40, 160)
    for axis in (-1, -2):
        t = quantize_reference(x, axis=axis)
        s = MXFP8Tensor(t.data, swizzle_scales(t.scale if axis == -1 else t.scale.mT), axis, swizzled=True)
        assert torch.equal(dequantize_reference(s), dequantize_reference(t))
        assert torch.equal(dequantize_reference(s.mT), dequantize_reference(t).mT)


def test_grouped_scale_rows_never_collide_and_cover_every_block():
    offsets = torch.tensor([0, 0, 1, 34, 34, 97, 161], dtype=torch.int32)
    x = torch.randn(170, 33)
    t = quantize_reference(x, axis=-2, offsets=offsets)
    seen = set()
    values = dequantize_reference(t)
    for group, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        alone = quantize_reference(x[begin:end], axis=-2)
        rows = range(begin // 32 + group, begin // 32 + group + alone.scale.shape[0])
        assert not seen & set(rows)
        seen |= set(rows)
        assert torch.equal(t.scale[rows.start : rows.stop], alone.scale)
        assert torch.equal(values[begin:end], dequantize_reference(alone))
    assert max(seen) < t.scale.shape[0] == 170 // 32 + 6
    assert (t.scale[[r for r in range(t.scale.shape[0]) if r not in seen]] == 0).all()
    assert (values[161:] == 0).all()


def test_views_and_devices():
    t = quantize_reference(torch.randn(3, 4, 5, 64))
    assert t.shape == (3, 4, 5, 64) and t.scale.shape == (3, 4, 5, 2) and t.elem == "e4m3" and t.nbytes == 60 * 66
    assert torch.equal(dequantize_reference(t[1, 2]), dequantize_reference(t)[1, 2])
    assert torch.equal(dequantize_reference(t[1:]), dequantize_reference(t)[1:])
    assert torch.equal(dequantize_reference(t[2].mT), dequantize_reference(t)[2].mT)
    assert t.mT.axis == -2 and t.mT.data.data_ptr() == t.data.data_ptr() and t.mT.mT.axis == -1
    assert t.to("cpu").device == torch.device("cpu")
    e8m0 = MXFP8Tensor(t.data, t.scale.view(torch.float8_e8m0fnu))
    assert e8m0.scale.dtype == torch.uint8


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "save"])
@pytest.mark.parametrize("kind", ["rows", "grouped", "swizzled", "e5m2-turned"])
def test_copies_and_pickles(kind, way):
    x = torch.randn(2, 33, 64)
    t = quantize_reference(x)
    if kind == "rows":
        t = replace(t, rows=torch.arange(66, dtype=torch.int16).view(2, 33))
    elif kind == "grouped":
        t = quantize_reference(x[0], axis=-2, offsets=torch.tensor([0, 3, 33], dtype=torch.int32))
    elif kind == "swizzled":
        t = MXFP8Tensor(t.data, swizzle_scales(t.scale), swizzled=True)
    else:
        t = quantize_reference(x, elem="e5m2").mT
    if way == "save":
        file = io.BytesIO()
        torch.save({"w": t}, file)
        file.seek(0)
        got = torch.load(file, weights_only=True)["w"]
    elif way == "pickle":
        got = pickle.loads(pickle.dumps(t))
    else:
        got = getattr(copy, way)(t)
    assert got.elem == t.elem and got.axis == t.axis and got.swizzled == t.swizzled
    assert torch.equal(got.data.view(torch.uint8), t.data.view(torch.uint8)) and torch.equal(got.scale, t.scale)
    for a, b in ((got.rows, t.rows), (got.offsets, t.offsets)):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert (got.data.data_ptr() == t.data.data_ptr()) == (way == "copy")


DATA, SCALE = torch.zeros(4, 64, dtype=torch.float8_e4m3fn), torch.zeros(4, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MXFP8Tensor(DATA.to(torch.float32), SCALE), "float8"),
        (lambda: MXFP8Tensor(DATA[0], SCALE[0]), "two dimensions"),
        (lambda: MXFP8Tensor(DATA, SCALE, 1), "axis must be -1 or -2, got 1"),
        (lambda: MXFP8Tensor(DATA, SCALE.float()), "uint8"),
        (lambda: MXFP8Tensor(DATA, SCALE[:3]), r"scale must have shape \(4, 2\)"),
        (lambda: MXFP8Tensor(DATA, SCALE, -2), r"scale must have shape \(1, 64\)"),
        (lambda: MXFP8Tensor(DATA, SCALE, swizzled=True), r"scale must have shape \(512,\)"),
        (lambda: MXFP8Tensor(DATA, SCALE, -1, torch.tensor([0, 4], dtype=torch.int32)), "axis -2"),
        (lambda: MXFP8Tensor(DATA, SCALE, -2, torch.tensor([0, 4])), "int32"),
        (lambda: MXFP8Tensor(DATA, SCALE)[0], "leading dimensions"),
        (lambda: quantize_reference(torch.zeros(4, 64), elem="e3m4"), "e3m4"),
        (lambda: quantize_reference(torch.zeros(4, 64), rounding="even"), "even"),
        (lambda: unswizzle_scales(torch.zeros(100, dtype=torch.uint8), 4, 4), "unswizzle_scales"),
        (lambda: swizzle_scales(torch.zeros(4, 4)), "swizzle_scales"),
        (lambda: e8m0_to_float(torch.zeros(4)), "e8m0_to_float: scale must be uint8 .* got torch.float32"),
        (lambda: e8m0_reciprocal(SCALE.int()), "e8m0_reciprocal: scale must be uint8 .* got torch.int32"),
        (lambda: e8m0_to_float(127), "e8m0_to_float: scale must be a tensor, got int"),
        (lambda: e8m0_from_amax(SCALE), "e8m0_from_amax: amax must be of a floating dtype, got torch.uint8"),
        (lambda: quantize_reference(torch.zeros(4, 32, dtype=torch.int32)), "floating dtype, got torch.int32"),
        (lambda: dequantize_reference(DATA), "dequantize_reference: t must be an MXFP8Tensor, got Tensor"),
        (lambda: dequantize_reference(MXFP8Tensor(DATA, SCALE), "bf16"), "dtype must be a floating dtype, got 'bf16'"),
        (lambda: dequantize_reference(MXFP8Tensor(DATA, SCALE), torch.int8), "a floating dtype, got torch.int8"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()
