"""The MXFP8 kernels against the reference, bit for bit, in the interpreter and on a GPU alike.

The kernels carry bf16 and element codes as integers, so the interpreter's wrong bf16 and fp8 casts are not involved;
what only hardware does (its conversions, 64-bit offsets at size, graphs, memory) is marked gpu.
"""

import pytest
import torch
import torch.nn.functional as F

from beam_moe.kernels.mxfp8 import (
    MXFP8Tensor,
    QuantizeConfig,
    dequantize,
    dequantize_reference,
    fake_quantize,
    quantize,
    quantize_both,
    quantize_reference,
    silu_mul_backward_quantize,
    silu_mul_quantize,
    swizzle_scales,
)
from beam_moe.kernels.mxfp8.quantize import alternatives
from beam_moe.testing import assert_close

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MODES = [(elem, rounding) for elem in ("e4m3", "e5m2") for rounding in ("rceil", "floor")]
OFFSETS = [0, 0, 1, 34, 34, 97]  # groups of 0, 1, 33, 0 and 63 rows


def same(name: str, want: MXFP8Tensor, got: MXFP8Tensor) -> None:
    assert (got.shape, got.axis, got.elem) == (want.shape, want.axis, want.elem), name
    assert torch.equal(got.scale, want.scale), f"{name}: {int((got.scale != want.scale).sum())} scales differ"
    a, b = got.data.view(torch.uint8), want.data.view(torch.uint8)
    assert torch.equal(a, b), f"{name}: {int((a != b).sum())} elements differ"


def same_values(name: str, want: torch.Tensor, got: torch.Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, name
    assert torch.equal(got.isnan(), want.isnan()), f"{name}: NaN in other places"
    assert torch.equal(got.nan_to_num(1.0), want.nan_to_num(1.0)), f"{name}: {int((got != want).sum())} values differ"


def wild(rows: int, cols: int, dtype=torch.float32, device="cpu", seed=0) -> torch.Tensor:
    """Values over many binades, with zero rows and columns, NaN, infinity and subnormals where there is room."""
    g = torch.Generator().manual_seed(seed)
    reach = 12 if dtype == torch.float16 else 60
    x = torch.randn(rows, cols, generator=g) * torch.exp2(
        torch.randint(-reach, reach // 4, (rows, 1), generator=g).float()
    )
    x = (x * torch.exp2(torch.randint(-9, 1, (rows, cols), generator=g).float())).to(dtype)
    if rows > 4:
        x[:, 3], x[2] = 0, 0
        x[2, ::2] = -0.0
        x[0, 1], x[3, -1], x[1, 0] = float("nan"), float("-inf"), torch.finfo(dtype).tiny / 4
        x[-1] = torch.finfo(dtype).tiny * x[-1].sign() / 8
    return x.to(device)


def within_nan(x: torch.Tensor) -> torch.Tensor:
    """The same values in the middle of a wider NaN buffer: any element read from outside spoils its block."""
    *lead, rows, cols = x.shape
    pool = torch.full((*lead, rows + 3, cols + 64), float("nan"), dtype=x.dtype, device=x.device)
    pool[..., 1 : rows + 1, 32 : cols + 32] = x
    return pool[..., 1 : rows + 1, 32 : cols + 32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("elem", "rounding"), MODES)
def test_bits_of_every_direction(elem, rounding, dtype, device):
    x = within_nan(wild(37, 96, dtype, device))
    modes = {"elem": elem, "rounding": rounding}
    row, col = (quantize_reference(x, axis=axis, **modes) for axis in (-1, -2))
    same("rowwise", row, quantize(x, **modes))
    same("columnwise", col, quantize(x, axis=-2, **modes))
    both = quantize_both(x, **modes)
    same("both, row", row, both[0])
    same("both, col", col, both[1])
    for out in DTYPES:
        want = [dequantize_reference(t, out) for t in (row, col)]
        same_values("dequantise row", want[0], dequantize(row, out))
        same_values("dequantise col", want[1], dequantize(col, out))
        fake = fake_quantize(x, axis="both", dtype=out, **modes)
        same_values("fake row", want[0], fake[0])
        same_values("fake col", want[1], fake[1])
    same_values("fake rowwise", dequantize_reference(row, dtype), fake_quantize(x, dtype=dtype, **modes))
    same_values("fake columnwise", dequantize_reference(col, dtype), fake_quantize(x, axis=-2, dtype=dtype, **modes))


@pytest.mark.parametrize(("elem", "rounding"), MODES)
def test_every_bf16_as_block_maximum(elem, rounding, device):
    v = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(2048, 32)
    x = torch.zeros(2048, 32, 32, dtype=torch.bfloat16)
    x[:, torch.arange(32), torch.arange(32)] = v  # the maximum visits every place of a block
    x[:, torch.arange(32), (torch.arange(32) + 7) % 32] = v * -0.61
    x = x.view(2048, 1024).to(device)
    modes = {"elem": elem, "rounding": rounding}
    # few, large programs: the interpreter's time goes by programs
    large = {"config": QuantizeConfig(256, 1024, 8)} if device.type == "cpu" else {}
    want = quantize_reference(x, **modes)
    same("rowwise", want, quantize(x, **modes, **large))
    same("columnwise", want.mT, quantize(x.mT.contiguous(), axis=-2, **modes, **large))


@pytest.mark.parametrize(("rows", "cols"), [(0, 96), (1, 2880), (31, 32), (33, 7168), (129, 96)], ids=lambda v: str(v))
def test_shapes(rows, cols, device):
    x = within_nan(wild(rows, cols, torch.float32, device))
    row, col = quantize_both(x)
    same("row", quantize_reference(x), row)
    same("col", quantize_reference(x, axis=-2), col)
    same_values("dequantise", dequantize_reference(col), dequantize(col, torch.float32))
    if rows % 32 == 0 or cols == 96:
        narrow = x[:, :31]  # any number of columns when the blocks run down them
        same("narrow", quantize_reference(narrow, axis=-2), quantize(narrow, axis=-2))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.mT,
        lambda x: x[:, ::2],
        lambda x: x[::3],
        lambda x: x.view(8, 24, 192)[::2, 1:, 32:160],
        lambda x: x.view(8, 24, 192)[:, 8:].mT,
        lambda x: x.view(2, 4, 24, 192),
        lambda x: x[:1].expand(64, 192),
    ],
    ids=["transposed", "inner-stride-2", "row-stride", "batch-slice", "batch-transposed", "4d", "stride-0"],
)
def test_strided_input(view, device):
    x = view(wild(192, 192, torch.float32, device))
    rows_fit = x.shape[-2] % 32 == 0
    for axis in (-1, -2):
        if x.shape[-1] % 32 and axis == -1:
            continue
        want = quantize_reference(x, axis=axis)
        got = quantize(x, axis=axis)
        same(f"axis {axis}", want, got)
        same_values(f"dequantise {axis}", dequantize_reference(want), dequantize(got, torch.float32))
        same_values(f"fake {axis}", dequantize_reference(want), fake_quantize(x, axis=axis, dtype=torch.float32))
        if x.stride(-2) == 1 and (rows_fit or axis == -1):
            assert got.data.stride(-2) == 1, "a transposed view must give one"
    if x.shape[-1] % 32 == 0:
        row, col = quantize_both(x)
        same("both, row", quantize_reference(x), row)
        same("both, col", quantize_reference(x, axis=-2), col)


@pytest.mark.parametrize("rows", [1, 31, 33, 129])
@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_transposed_input_whose_last_block_is_short(lead, rows, device):
    """Blocks run along what is contiguous in memory, where a row need not hold a whole number of them."""
    x = wild(128 if lead else 64, 129, torch.float32, device)[:, :rows].contiguous().view(*lead, 64, rows).mT
    want = quantize_reference(x, axis=-2)
    same("columns", want, quantize(x, axis=-2))
    swizzled = quantize(x, axis=-2, swizzle=True)
    assert torch.equal(swizzled.scale, swizzle_scales(want.scale.mT))
    same("in place", want, quantize(x, axis=-2, out=quantize_reference(x * 2, axis=-2)))
    same_values("values", dequantize_reference(want), fake_quantize(x, axis=-2, dtype=torch.float32))
    same("rows", quantize_reference(x), quantize(x))


@pytest.mark.parametrize("offsets", [OFFSETS, [0] * 5, [0, 100], [0, 32, 64, 96]], ids=str)
def test_groups(offsets, device):
    x = within_nan(wild(100, 64, torch.float32, device))
    where = torch.tensor(offsets, dtype=torch.int32, device=device)
    want = quantize_reference(x, axis=-2, offsets=where)
    row, col = quantize_both(x, offsets=where)
    same("row", quantize_reference(x), row)
    same("col", want, col)
    same("columnwise", want, quantize(x, axis=-2, offsets=where))
    same_values("dequantise", dequantize_reference(want), dequantize(col, torch.float32))
    fake_row, fake_col = fake_quantize(x, axis="both", offsets=where, dtype=torch.float32)
    same_values("fake row", dequantize_reference(row), fake_row)
    same_values("fake col", dequantize_reference(want), fake_col)


def test_groups_without_rows(device):
    where = torch.zeros(4, dtype=torch.int32, device=device)
    row, col = quantize_both(torch.zeros(0, 64, device=device), offsets=where)
    assert row.shape == col.shape == (0, 64) and col.scale.shape == (3, 64) and (col.scale == 0).all()


def test_more_groups_than_rows(device):
    """Many experts, most of them idle, with more groups than one power of two below holds."""
    counts = torch.zeros(129, dtype=torch.int32)
    counts[5], counts[77], counts[128] = 40, 1, 3
    where = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)]).to(device)
    x = wild(44, 32, torch.float32, device)
    same("col", quantize_reference(x, axis=-2, offsets=where), quantize(x, axis=-2, offsets=where))


@pytest.mark.parametrize(("rows", "cols"), [(33, 96), (128, 128), (130, 160)], ids=str)
def test_fused_swizzle(rows, cols, device):
    x = wild(2 * rows, cols, torch.float32, device).view(2, rows, cols)
    row, col = quantize_both(x, swizzle=True)
    assert torch.equal(row.scale, swizzle_scales(quantize_reference(x).scale))
    assert torch.equal(col.scale, swizzle_scales(quantize_reference(x, axis=-2).scale.mT))
    same("rowwise", row, quantize(x, swizzle=True))
    same("columnwise", col, quantize(x, axis=-2, swizzle=True))
    if rows % 32 == 0:
        same("transposed", col.mT, quantize(x.mT, swizzle=True))
    for t in (row, col):
        same_values("dequantise", dequantize_reference(t), dequantize(t, torch.float32))


def test_writes_only_its_outputs(device):
    """In place, between guard bytes; the scale too."""
    x = wild(33, 96, torch.float32, device)
    for axis, scales in ((-1, 33 * 3), (-2, 2 * 96)):
        pool = torch.full((64 + 33 * 96 + 64 + scales + 64,), 0xAB, dtype=torch.uint8, device=device)
        data = pool[64 : 64 + 33 * 96].view(33, 96).view(torch.float8_e4m3fn)
        scale = pool[128 + 33 * 96 : 128 + 33 * 96 + scales].view((33, 3) if axis == -1 else (2, 96))
        out = MXFP8Tensor(data, scale, axis)
        assert quantize(x, axis=axis, out=out).data.data_ptr() == data.data_ptr()
        same("in place", quantize_reference(x, axis=axis), out)
        for guard in (pool[:64], pool[64 + 33 * 96 : 128 + 33 * 96], pool[-64:]):
            assert (guard == 0xAB).all()


def test_requantise_a_transposed_tensor_in_place(device):
    t = quantize(wild(64, 96, torch.float32, device).mT)
    x = wild(64, 96, torch.float32, device, seed=1)
    assert quantize(x.mT, out=t).data.data_ptr() == t.data.data_ptr()
    same("in place", quantize_reference(x.mT), t)


@pytest.mark.parametrize("name", ["rowwise", "columnwise", "both", "dequantize", "dequantize_columnwise"])
def test_every_configuration_gives_the_same_bits(name, device):
    x = wild(70, 192, torch.float32, device)
    row, col = quantize_reference(x), quantize_reference(x, axis=-2)
    for config in alternatives(name):
        if name == "rowwise":
            same(str(config), row, quantize(x, config=config))
        elif name == "columnwise":
            same(str(config), col, quantize(x, axis=-2, config=config))
        elif name == "both":
            got = quantize_both(x, config=config)
            same(str(config), row, got[0])
            same(str(config), col, got[1])
        else:
            t = row if name == "dequantize" else col
            same_values(str(config), dequantize_reference(t), dequantize(t, torch.float32, config=config))


def test_one_direction_dense_and_the_other_not(device):
    x = wild(40, 64, torch.float16, device)
    dense, col = quantize_both(x, row_dtype=torch.float16)
    same_values("row", dequantize_reference(quantize_reference(x), torch.float16), dense)
    same("col", quantize_reference(x, axis=-2), col)
    row, dense = quantize_both(x, col_dtype=torch.float32)
    same("row", quantize_reference(x), row)
    same_values("col", dequantize_reference(quantize_reference(x, axis=-2)), dense)


def swiglu(rows: int, half: int, dtype, device):
    g = torch.Generator().manual_seed(3)
    gate_up = torch.randn(rows, 2 * half, generator=g) * 3
    gate_up[1] *= 30  # both tails of the sigmoid
    return within_nan(gate_up.to(dtype).to(device)), torch.randn(rows, half, generator=g).to(dtype).to(device)


# A last-bit difference of exp can move a rounded value, and with it an element, by a step: a few in ten thousand may.
SWIGLU_LIMIT = {torch.bfloat16: 3e-3, torch.float16: 3e-3, torch.float32: 3e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_then_quantise(dtype, device):
    gate_up, _ = swiglu(100, 96, dtype, device)
    gate, up = gate_up.float().chunk(2, -1)
    h = (F.silu(gate) * up).to(dtype)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    row, col = silu_mul_quantize(gate_up, axis="both", offsets=offsets)
    assert_close(
        "row", dequantize_reference(quantize_reference(h)), dequantize(row, torch.float32), SWIGLU_LIMIT[dtype]
    )
    want = quantize_reference(h, axis=-2, offsets=offsets)
    assert_close("col", dequantize_reference(want), dequantize(col, torch.float32), SWIGLU_LIMIT[dtype])
    same("rowwise", row, silu_mul_quantize(gate_up))
    same("columnwise", col, silu_mul_quantize(gate_up, axis=-2, offsets=offsets))
    dense, _ = silu_mul_quantize(gate_up, axis="both", offsets=offsets, row_dtype=torch.float32)
    same_values("dense", dequantize_reference(row), dense)
    swizzled = silu_mul_quantize(gate_up, swizzle=True)
    assert torch.equal(swizzled.scale, swizzle_scales(row.scale))


def test_swiglu_bits_where_the_sigmoid_is_one(device):
    """With gates above 30 the sigmoid is exactly 1, so h = gate * up has one right rounding."""
    up = torch.randn(33, 64, device=device).to(torch.bfloat16)
    gate = (torch.rand(33, 64, device=device) * 60 + 30).to(torch.bfloat16)
    h = (gate.float() * up.float()).to(torch.bfloat16)
    row, col = silu_mul_quantize(torch.cat([gate, up], -1), axis="both")
    same("row", quantize_reference(h), row)
    same("col", quantize_reference(h, axis=-2), col)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_backward_then_quantise(dtype, device):
    gate_up, dh = swiglu(100, 96, dtype, device)
    wide = gate_up.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    (F.silu(gate) * up).backward(dh.double())
    grad = wide.grad.float().to(dtype)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    row, col = silu_mul_backward_quantize(dh, gate_up, offsets=offsets, elem="e5m2")
    want_row = quantize_reference(grad, elem="e5m2")
    want_col = quantize_reference(grad, axis=-2, elem="e5m2", offsets=offsets)
    limit = SWIGLU_LIMIT[dtype] * 3  # steps of e5m2 are twice as wide, and dgate cancels near its zero
    assert_close("row", dequantize_reference(want_row), dequantize(row, torch.float32), limit)
    assert_close("col", dequantize_reference(want_col), dequantize(col, torch.float32), limit)
    same("rowwise", row, silu_mul_backward_quantize(dh, gate_up, axis=-1, elem="e5m2"))
    same("columnwise", col, silu_mul_backward_quantize(dh, gate_up, axis=-2, offsets=offsets, elem="e5m2"))


@pytest.mark.parametrize("name", ["silu_mul", "silu_mul_backward"])
def test_every_swiglu_configuration_gives_the_same_bits(name, device):
    gate_up, dh = swiglu(40, 160, torch.float16, device)

    def call(config):
        if name == "silu_mul":
            return silu_mul_quantize(gate_up, axis="both", config=config)
        return silu_mul_backward_quantize(dh, gate_up, config=config)

    want = call(None)
    for config in alternatives(name):
        for a, b in zip(want, call(config)):
            same(str(config), a, b)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize(x[:, :33]), "quantize: the last dimension of x must be a multiple of 32, got 33"),
        (lambda x: quantize_both(x[:, :33]), "quantize_both: .* got 33"),
        (lambda x: fake_quantize(x[:, :33]), "fake_quantize: .* got 33"),
        (lambda x: quantize(x.double()), "float64"),
        (lambda x: quantize(x[0]), "two dimensions"),
        (lambda x: quantize(x, axis=0), "axis must be -1 or -2, got 0"),
        (lambda x: quantize(x, elem="e2m1"), "e2m1"),
        (lambda x: quantize(x, rounding="even"), "even"),
        (lambda x: quantize(x, offsets=torch.tensor([0, 4], dtype=torch.int32)), "offsets need axis -2"),
        (lambda x: quantize_both(x, offsets=torch.tensor([0, 4])), "int32"),
        (lambda x: quantize_both(x, offsets=torch.zeros(2, dtype=torch.int32), swizzle=True), "swizzled"),
        (lambda x: quantize(x, out=quantize(x, axis=-2)), "out must have"),
        (lambda x: quantize(x.view(2, 2, 2, 16, 64).transpose(0, 1)), "merged without a copy"),
        (lambda x: dequantize(quantize(x), torch.float64), "float64"),
        (lambda x: silu_mul_quantize(x[:, :48]), "silu_mul_quantize: half .* got 24"),
        (lambda x: silu_mul_quantize(x.mT), "inner stride 1"),
        (lambda x: silu_mul_backward_quantize(x, x), "dh must be"),
        (lambda x: quantize_both(x, row_dtype=torch.int8), "row_dtype"),
        (lambda x: quantize(x, config=QuantizeConfig(32, 16, 4)), "quantize: config.block_n must be .* got 16"),
        (lambda x: quantize(x, config=QuantizeConfig(24, 64, 4)), "quantize: config.block_m must be .* got 24"),
        (lambda x: quantize(x, axis=-2, config=QuantizeConfig(16, 64, 4)), "quantize: config.block_m must .* got 16"),
        (lambda x: quantize(x.mT, config=QuantizeConfig(16, 64, 4)), "quantize: config.block_m must .* got 16"),
        (lambda x: quantize_both(x, config=QuantizeConfig(8, 64, 4)), "quantize_both: config.block_m must .* got 8"),
        (lambda x: fake_quantize(x, config=QuantizeConfig(32, 64, 0)), "fake_quantize: config.num_warps .* got 0"),
        (lambda x: dequantize(quantize(x), config=QuantizeConfig(32, 48, 4)), "dequantize: config.block_n .* got 48"),
        (
            lambda x: dequantize(quantize(x, axis=-2), config=QuantizeConfig(16, 32, 4)),
            "dequantize: config.block_m .* got 16",
        ),
        (lambda x: silu_mul_quantize(x, axis=-2, config=QuantizeConfig(4, 64, 4)), "silu_mul_quantize: config.block_m"),
        (lambda x: dequantize(quantize(x), out=x.bfloat16().requires_grad_()), "dequantize: out must not require"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(128, 64))


def test_refuses_an_output_of_other_groups(device):
    """A layout of fewer groups has fewer rows of scales, behind which a launch would write."""
    x = torch.zeros(64, 32, device=device)
    one, three = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 64], [0, 10, 40, 64]))
    out = quantize(x, axis=-2, offsets=one)
    with pytest.raises(ValueError, match="quantize: out must have 3 groups"):
        quantize(x, axis=-2, offsets=three, out=out)
    same("moved", quantize(x, axis=-2, offsets=one // 2), quantize(x, axis=-2, offsets=one // 2, out=out))


def test_refuses_outputs_in_an_operands_memory(device):
    pool = torch.zeros(4 * 64 * 4, dtype=torch.uint8, device=device)
    x = pool.view(torch.float32).view(4, 64)
    data = torch.empty(4, 64, dtype=torch.float8_e4m3fn, device=device)
    with pytest.raises(ValueError, match="quantize: out must not share memory with x"):
        quantize(x, out=MXFP8Tensor(data, pool[:8].view(4, 2)))
    t = MXFP8Tensor(data, pool[:8].view(4, 2))
    with pytest.raises(ValueError, match="dequantize: out must not share memory with t.scale"):
        dequantize(t, torch.float32, out=x)


@pytest.mark.parametrize("value", ["1", "true"])
def test_offsets_are_checked_on_request(monkeypatch, device, value):
    monkeypatch.setenv("BEAM_MOE_CHECK", value)
    x = torch.zeros(64, 32, device=device)
    for bad in ([0, 40, 30], [1, 64], [0, 65]):
        with pytest.raises(ValueError, match="offsets must rise"):
            quantize_both(x, offsets=torch.tensor(bad, dtype=torch.int32, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("elem", "rounding"), MODES)
def test_random_bits_in_hardware(elem, rounding, dtype, device):
    g = torch.Generator(device=device).manual_seed(5)
    if dtype == torch.float32:
        x = torch.randint(-(2**31), 2**31 - 1, (2048, 2880), dtype=torch.int32, device=device, generator=g).view(dtype)
    else:
        x = torch.randint(-(2**15), 2**15, (2048, 2880), dtype=torch.int16, device=device, generator=g).view(dtype)
    # keep one block in four free of the NaN and infinities that random bits are full of
    x = torch.where((torch.arange(2880, device=device) // 32 % 4 > 0) & ~x.isfinite(), torch.ones_like(x), x)
    modes = {"elem": elem, "rounding": rounding}
    row, col = quantize_both(x, **modes)
    same("row", quantize_reference(x, **modes), row)
    same("col", quantize_reference(x, axis=-2, **modes), col)
    for t in (row, col):
        for out in DTYPES:
            same_values("dequantise", dequantize_reference(t, out), dequantize(t, out))


@pytest.mark.gpu
@pytest.mark.parametrize("elem", ["e4m3", "e5m2"])
def test_hardware_dequantises_every_code_and_scale(elem, device):
    code = torch.arange(256, dtype=torch.uint8, device=device)
    t = MXFP8Tensor(
        code.repeat(256, 1).view(torch.float8_e4m3fn if elem == "e4m3" else torch.float8_e5m2),
        code[:, None].repeat(1, 8),
    )
    for out in DTYPES:
        same_values(str(out), dequantize_reference(t, out), dequantize(t, out))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    rows, cols = 65536 + 33, 32768
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device=device)
    x[-65:] = torch.randn(65, cols, device=device)
    x[:2] = torch.randn(2, cols, device=device)
    row, col = quantize_both(x)
    for t, axis in ((row, -1), (col, -2)):
        part = quantize_reference(x[65536:], axis=axis)
        assert torch.equal(t.data[65536:].view(torch.uint8), part.data.view(torch.uint8))
        assert torch.equal(t.scale[-part.scale.shape[0] :], part.scale)
        head = quantize_reference(x[:32], axis=axis)
        assert torch.equal(t.data[:32].view(torch.uint8), head.data.view(torch.uint8))
    values = torch.empty(rows, cols, dtype=torch.bfloat16, device=device)
    for t in (row, col):
        dequantize(t, out=values)
        part = MXFP8Tensor(t.data[65536:], t.scale[65536:] if t.axis == -1 else t.scale[2048:], t.axis)
        assert torch.equal(values[65536:], dequantize_reference(part, torch.bfloat16))
    offsets = torch.tensor([0, 5, rows], dtype=torch.int32, device=device)
    grouped = quantize(x, axis=-2, offsets=offsets, out=None)
    tail = 65536 + 33 - 5  # rows of the last group
    first = tail // 32 * 32 + 5  # where its last block begins
    part = quantize_reference(x[first:], axis=-2)
    assert torch.equal(grouped.data[first:].view(torch.uint8), part.data.view(torch.uint8))
    assert torch.equal(grouped.scale[5 // 32 + 1 + tail // 32 :][:1], part.scale)


@pytest.mark.gpu
def test_allocates_only_its_outputs(device):
    x = torch.randn(4096, 4096, device=device).to(torch.bfloat16)
    offsets = torch.tensor([0, 1000, 4096], dtype=torch.int32, device=device)
    size, scale = x.numel(), x.numel() // 32
    cases = {
        "rowwise": (lambda: quantize(x), size + scale),
        "columnwise": (lambda: quantize(x, axis=-2), size + scale),
        "both": (lambda: quantize_both(x), 2 * (size + scale)),
        "grouped": (lambda: quantize_both(x, offsets=offsets), 2 * (size + scale) + 2 * 4096),
        "transposed": (lambda: quantize_both(x.mT), 2 * (size + scale)),
        "fake": (lambda: fake_quantize(x), 2 * size),
        "swiglu": (lambda: silu_mul_quantize(x, axis="both"), size + scale),
        "swiglu backward": (lambda: silu_mul_backward_quantize(x[:, :2048], x), 2 * (size + scale)),
    }
    for name, (call, least) in cases.items():
        call()  # compile
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        used = torch.cuda.max_memory_allocated() - before
        assert used <= least + 4096, f"{name}: {used} bytes above the input, {least} are its outputs"


@pytest.mark.gpu
def test_graph_replay_reads_new_offsets(device):
    x = torch.randn(100, 64, device=device)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    quantize_both(x, offsets=offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, col = quantize_both(x, offsets=offsets)
    offsets.copy_(torch.tensor([0, 10, 10, 50, 99, 100], dtype=torch.int32))
    x.neg_()
    graph.replay()
    same("replay", quantize_reference(x, axis=-2, offsets=offsets), col)
