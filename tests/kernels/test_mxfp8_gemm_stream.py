"""Decode's routes of the MXFP8 GEMM: partial sums joined within the launch, and Hopper's `stream` route."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from beam_moe.kernels.mxfp8 import MXFP8Tensor, dequantize_reference, quantize_reference, stream
from beam_moe.kernels.mxfp8.gemm import STREAM_ROWS, GemmConfig, gemm, streams
from beam_moe.testing import assert_close

BF16, F32 = torch.bfloat16, torch.float32
STREAM = [
    GemmConfig("stream", 8, 64, 256, 4, 4, 2, join=True),  # the launch table's
    GemmConfig("stream", 8, 128, 256, 3, 8, 2, join=True),
    GemmConfig("stream", 8, 64, 128, 1, 4, 2, join=True),  # one part of K
    GemmConfig("stream", 8, 256, 128, 3, 8, 2, join=True),  # 32 outputs a warp
    GemmConfig("stream", 8, 256, 256, 5, 4, 2, join=True),  # 64
]

module = importlib.import_module("beam_moe.kernels.mxfp8.gemm")  # the package has its function by that name


@pytest.fixture
def hopper(device):
    if device.type != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the stream route is Hopper's")
    return device


def operands(m, n, k, device, elem="e4m3"):
    g = torch.Generator().manual_seed(m + n + k)
    b = quantize_reference(torch.randn(n, k, generator=g), elem=elem).to(device)
    return torch.randn(m, k, generator=g).to(device, BF16), b


def exact_operands(m, n, k, device):
    """Values whose products and sums are exact in fp32 in any order, over several scales a row."""
    g = torch.Generator().manual_seed(5)
    w = torch.randint(-4, 5, (n, k), generator=g).float()
    w *= torch.exp2(torch.randint(-3, 4, (n, k // 32), generator=g).float()).repeat_interleave(32, 1)
    return torch.randint(-3, 4, (m, k), generator=g).to(device, BF16), quantize_reference(w).to(device)


def reference(a, b):
    return a.double() @ dequantize_reference(b, BF16).double().T


@pytest.mark.parametrize(("m", "n", "k", "split"), [(5, 40, 512, 4), (17, 200, 352, 3), (1, 130, 96, 2)], ids=str)
def test_joined_sums_are_those_of_a_second_launch(m, n, k, split, device, monkeypatch):
    """Over several tiles, again and again: each launch must leave its counts at zero."""
    a, b = operands(m, n, k, device)
    bias = torch.randn(n).to(device)
    apart = gemm(a, b, bias=bias, out_dtype=F32, config=GemmConfig("bf16", 16, 64, 32, split))
    config = GemmConfig("bf16", 16, 64, 32, split, join=True)
    for _ in range(3):
        assert torch.equal(gemm(a, b, bias=bias, out_dtype=F32, config=config), apart)
    monkeypatch.setattr(module, "ARRIVAL_COUNTERS", 0)  # more tiles than counts
    assert torch.equal(gemm(a, b, bias=bias, out_dtype=F32, config=config), apart)


def test_operands_the_stream_route_refuses(device):
    a, b = operands(3, 64, 512, device)
    assert streams(a, b) == (device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9)
    for x, w in ((a.half(), b), (a[:, :496], operands(3, 64, 480, device)[1]), (operands(9, 64, 512, device)[0], b)):
        assert not streams(x[:, : w.shape[1]], w)
        with pytest.raises(ValueError, match="route stream does not take"):
            gemm(x[:, : w.shape[1]], w, config=STREAM[0])


@pytest.mark.parametrize(("n", "k"), [(1, 512), (200, 640), (1792, 5120), (4097, 1408), (33000, 2560), (128, 60032)])
def test_the_rule_takes_stream_where_it_fits(n, k, monkeypatch):
    """On an H200, for shapes that its table has not: every part of K has steps, and programs of one wave fit."""
    monkeypatch.setattr(module, "_sms", lambda device: 132)
    config, taken = module.stream_config(n, k, 128, torch.device("cpu")), []
    monkeypatch.setattr(module, "_stream", lambda x, b, bias, out, given: taken.append(given))
    monkeypatch.setattr(module, "streams", lambda a, b: len(a) <= STREAM_ROWS)
    b = MXFP8Tensor(torch.zeros(n, k, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.zeros(n, k // 32).byte(), -1)
    gemm(torch.zeros(8, k).to(BF16), b)  # which refuses a configuration that the kernel cannot take
    assert taken == [config]
    steps, tiles = k // config.bk, -(-n // config.bn)
    share = max((s + 1) * steps // config.split - s * steps // config.split for s in range(config.split))
    assert 1 <= config.split <= steps and tiles * config.split <= 264 and 2 * tiles * config.split * share > steps
    assert config.bk == (256 if k % 256 == 0 else 128) and 16 * config.warps == config.bn
    words = 1 << (share - 1).bit_length()  # of steps that shared memory has room for: bf16 tokens and factors
    assert 2 * (words * (8 * config.bk + config.bn * config.bk // 32) * 2 + 1024) <= 227 << 10


def test_the_rule_beside_stream(monkeypatch):
    monkeypatch.setattr(module, "_sms", lambda device: 132)

    def chosen(rows, n, k, stream=False):
        device = torch.device("cpu")
        return module.choose(rows, n, k, device, x_dtype=BF16, prepared=False, both=False, stream=stream)

    assert chosen(8, 1792, 131072, True).route == "bf16", "a share of K that no program has room for"
    assert [(c.route, c.join) for c in (chosen(rows, 96, 512) for rows in (8, 9, 64, 65))] == [
        *[("bf16", True)] * 3,
        ("bf16", False),
    ]


@pytest.mark.parametrize(
    "change", [{"bm": 16}, {"bn": 32}, {"bk": 64}, {"bk": 512}, {"warps": 8}, {"stages": 3}, {"join": False}], ids=str
)
def test_tiles_the_stream_route_refuses(change, device):
    a, b = operands(3, 64, 512, device)
    with pytest.raises(ValueError, match="route stream needs"):
        gemm(a, b, config=dataclasses.replace(STREAM[0], **change))


def test_tokens_of_a_stream_tile_are_those_of_its_kernel():
    assert stream.BM.value == STREAM_ROWS


@pytest.mark.gpu
@pytest.mark.parametrize("config", STREAM, ids=str)
@pytest.mark.parametrize(("n", "k"), [(256, 512), (200, 768), (5120, 2560), (72, 1280), (128, 4096)], ids=str)
def test_stream_gives_exact_sums(n, k, config, hopper):
    for m in (1, 5, 8):
        a, b = exact_operands(m, n, k, hopper)
        assert torch.equal(gemm(a, b, out_dtype=F32, config=config).double(), reference(a, b)), m


@pytest.mark.gpu
@pytest.mark.parametrize("elem", ["e4m3", "e5m2"])
@pytest.mark.parametrize("config", STREAM, ids=str)
def test_stream_matches_the_dequantised_product(config, elem, hopper):
    a, b = operands(STREAM_ROWS, 520, 1536, hopper, elem)
    bias = torch.randn(520, device=hopper)
    y = gemm(a, b, bias=bias, out_dtype=F32, config=config)
    assert_close("y", reference(a, b) + bias.double(), y, 1e-5)
    assert torch.equal(gemm(a, b, bias=bias, config=config), y.to(BF16))
    for i in (0, 4, 7):  # no row's bits depend on its neighbours
        assert torch.equal(gemm(a[i : i + 1], b, bias=bias, out_dtype=F32, config=config)[0], y[i])


@pytest.mark.gpu
@pytest.mark.parametrize("config", STREAM, ids=str)
def test_stream_gives_the_same_bits_where_a_second_launch_adds(config, hopper, monkeypatch):
    a, b = operands(STREAM_ROWS, 520, 1536, hopper)
    bias = torch.randn(520, device=hopper)
    joined = gemm(a, b, bias=bias, out_dtype=F32, config=config)
    monkeypatch.setattr(module, "ARRIVAL_COUNTERS", 0)  # more tiles than counts
    assert torch.equal(gemm(a, b, bias=bias, out_dtype=F32, config=config), joined)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [STREAM[0], STREAM[3]], ids=str)
def test_stream_decodes_every_code_and_scale(config, hopper):
    """One code times one scale an output: all 256 codes, and the scale bytes that decoding can trip over."""
    code = torch.zeros(256, 512, dtype=torch.uint8, device=hopper)
    code[:, 37] = torch.arange(256, device=hopper)
    a = torch.zeros(1, 512, dtype=BF16, device=hopper)
    a[0, 37] = 1.0
    for byte in (0, 1, 2, 3, 100, 127, 140, 246, 254, 255):
        scale = torch.full((256, 16), 127, dtype=torch.uint8, device=hopper)
        scale[:, 1] = byte
        b = MXFP8Tensor(code.view(torch.float8_e4m3fn), scale)
        y, want = gemm(a, b, out_dtype=F32, config=config)[0], dequantize_reference(b, BF16)[:, 37].float()
        assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y.nan_to_num(), want.nan_to_num()), byte


@pytest.mark.gpu
def test_stream_reads_and_writes_nothing_else(hopper):
    """Operands and result lie in the middle of NaN."""
    ref_a, ref_b = operands(7, 200, 768, hopper)

    def within(t, fill, behind=32):
        whole = torch.full((t.shape[0] + 2, t.shape[1] + 32 + behind), fill, dtype=t.dtype, device=hopper)
        view = whole[1:-1, 32:-behind]
        view.copy_(t)
        return view, whole

    code, _ = within(ref_b.data.view(torch.uint8), 0xFF)
    scale = torch.full((202, 24), 0xFF, dtype=torch.uint8, device=hopper)
    scale[:200] = ref_b.scale
    a, _ = within(ref_a, float("nan"), behind=8)  # rows aligned to 16 bytes and to no more
    out, whole = within(torch.zeros(7, 200, device=hopper), float("nan"))
    b = MXFP8Tensor(code.view(torch.float8_e4m3fn), scale[:200])
    for config in STREAM:
        out.zero_()
        gemm(a, b, out=out, config=config)
        assert_close("y", reference(ref_a, ref_b), out, 1e-5)
        assert int(whole.isnan().sum()) == whole.numel() - out.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*STREAM[:3], GemmConfig("bf16", 16, 64, 256, 3, 4, 3, True)], ids=str)
def test_overlapped_launches_wait_for_each_other(config, hopper):
    """Each product takes the one before it as its tokens, and weights change right before they are read."""
    first, then = ([quantize_reference(torch.randn(2048, 2048, device=hopper) / 45) for _ in range(4)] for _ in "ab")
    layers = [MXFP8Tensor(b.data.clone(), b.scale.clone()) for b in first]
    a = torch.randn(config.bm, 2048, device=hopper, dtype=BF16)

    def chain(values, pause=False):
        outs = [a]
        for layer, new in zip(layers, values, strict=True):
            layer.data.view(torch.uint8).copy_(new.data.view(torch.uint8))
            layer.scale.copy_(new.scale)
            for _ in range(2):
                outs.append(gemm(outs[-1], layer, config=config))
                if pause:
                    torch.cuda.synchronize()
        return torch.stack(outs[1:])

    want = [chain(values, pause=True) for values in (first, then)]
    graphs = []
    for values in (first, then):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(values)
        graphs.append((graph, got))
    for _ in range(5):
        for (graph, got), apart in zip(graphs, want, strict=True):
            got.zero_()
            graph.replay()
            assert torch.equal(got, apart)


COMPILE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import compile_cases as cases
from beam_moe.kernels import mxfp8 as q
from beam_moe.kernels.mxfp8.gemm import GemmConfig
with cases.pretend(90) as compiled:
    b = q.quantize(cases.empty(8192, 8192))
    for config in json.loads(sys.argv[2]):
        x = cases.empty(8, 8200)[:, :8192]  # rows aligned to 16 bytes and to no more
        q.gemm(x, b, config=GemmConfig(**config))
for name, kernel, _ in compiled:
    if name.endswith("_stream_kernel"):
        ptx = kernel.asm["ptx"]
        print(json.dumps({
            "shared": kernel.metadata.shared, "local": ".local" in ptx, "wide": ptx.count("L2::256B.v4"),
            "bytes": ptx.count("ld.global.u8") + ptx.count("ld.global.b8"),
        }))
"""


@pytest.mark.compile
def test_stream_compiles_for_hopper(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    arguments = [str(Path(__file__).parent), json.dumps([dataclasses.asdict(c) for c in STREAM])]
    command = [sys.executable, "-c", COMPILE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len(STREAM)
    for row in rows:
        assert row["shared"] <= 227 << 10 and not row["local"] and row["wide"] and not row["bytes"], row
