"""MXFP8 GEMM and grouped GEMM: decode against the read floor, training against cuBLAS and PyTorch's grouped GEMM.

    python bench/mxfp8_gemm.py                            # the whole grid; rows go to bench/results/<device>/
    python bench/mxfp8_gemm.py --only decode,8192x8192    # cases whose name holds every part
    python bench/mxfp8_gemm.py --sweep                    # times tiles and writes kernels/configs/<device>/
    python bench/mxfp8_gemm.py --sweep --only decode/8192 # only decode's; also times a plain read of the same bytes
    python bench/mxfp8_gemm.py --sweep --quick            # without Beam's dense shapes and the grouped decode sizes

A decode case's floor is the bytes of weights, scales, activations and result over the read bandwidth; its ``share`` is
floor over time, its ``read_us`` the time of a launch that only reads as many bytes, measured in the same way. A
training case's floor and peer is bf16 through cuBLAS or PyTorch's grouped GEMM on the same shapes in the same process,
and its ``share`` is of that; "linear" cases start from bf16 x and w with every quantisation and dequantisation inside,
"weights" cases from MXFP8 weights and bf16 activations, "cached" ones from a bf16 copy of the weights that was made
before. ``peak`` is the memory that one call takes above its operands (a cached copy included), ``least`` the bytes of
its results. Every result is compared with the product of the dequantised operands before it is timed. Kernels are
compiled in parallel first; rows and table entries are saved as soon as they are measured. Without a GPU small cases are
compared in Triton's interpreter and nothing is written.
"""

import dataclasses
import functools
import importlib.util
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, field

import harness
import torch
import typer

from beam_moe.kernels import tuning
from beam_moe.kernels.launch import supports_pdl
from beam_moe.kernels.mxfp8 import (
    GemmConfig,
    MXFP8Tensor,
    dequantize,
    dequantize_reference,
    fake_quantize,
    gemm,
    grouped_gemm,
    grouped_linear,
    grouped_wgrad,
    linear,
    prepare,
    quantize,
    quantize_both,
)
from beam_moe.kernels.mxfp8.gemm import STREAM_ROWS, stream_config
from beam_moe.kernels.mxfp8.grouped import grouped_matmul

BF16 = torch.bfloat16
LIMIT = 3e-3  # one rounding to bf16 is 1.7e-3
EXPERTS = 32


@dataclass(frozen=True)
class Case:
    """``what`` names a builder; rows x n x k, with ``groups`` matrices of n x k if not 0."""

    what: str
    rows: int
    n: int
    k: int
    groups: int = 0

    @property
    def key(self) -> str:
        groups = f"{self.groups}x" if self.groups else ""
        return f"{self.what}/{groups}{self.n}x{self.k}/{self.rows}"


@dataclass
class Bound:
    """A case on operands: our call and the peers' as functions of one operand set, and what ours must equal."""

    sets: list[tuple]
    ours: Callable
    reference: Callable
    peers: dict[str, Callable] = field(default_factory=dict)
    read_bytes: int = 0  # 0: the peer's time is the floor
    kept: int = 0  # bytes of a copy made before the call


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=harness.device(), dtype=BF16)


def weight(*shape: int) -> MXFP8Tensor:
    return quantize(randn(*shape))


def values(t: MXFP8Tensor) -> torch.Tensor:
    return dequantize_reference(t, BF16)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.float() @ w.float().T


def offsets_for(rows: int, groups: int) -> torch.Tensor:
    """Uneven groups that sum to ``rows``; the second has no row."""
    share = torch.rand(groups) + 0.5
    share[1] = 0
    ends = (share.cumsum(0) / share.sum() * rows).round().int()
    return torch.cat([torch.zeros(1, dtype=torch.int32), ends]).to(harness.device(), torch.int32)


def in_worker() -> bool:
    """Whether this process only compiles: it needs one operand set and no peer."""
    return multiprocessing.parent_process() is not None


def copies_for(bytes_of_one: int, most: int) -> int:
    return 1 if in_worker() else harness.copies_for(bytes_of_one, most)


def marlin(b: MXFP8Tensor) -> Callable | None:
    """vLLM's Marlin on the same weights, or None where it is not installed."""
    if harness.device().type != "cuda" or importlib.util.find_spec("vllm") is None:
        return None
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8 as vllm_marlin

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(b.data, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(b.scale, requires_grad=False)
    layer.output_size_per_partition, layer.input_size_per_partition = b.shape
    default = torch.get_default_dtype()
    torch.set_default_dtype(BF16)  # the repacked scales take torch's default dtype
    try:
        vllm_marlin.prepare_mxfp8_layer_for_marlin(layer)
    finally:
        torch.set_default_dtype(default)
    n, k = b.shape
    packed, scale = layer.weight, layer.weight_scale
    return lambda x: vllm_marlin.apply_mxfp8_marlin_linear(x, packed, scale, None, n, k)


def marlin_or_none(b: MXFP8Tensor) -> Callable | None:
    try:
        return None if in_worker() else marlin(b)
    except Exception as failure:  # a broken or partial install: the peer is left out, with its reason
        harness.complain("vllm Marlin", failure)
        return None


# --- builders: a Bound from a case and the number of operand sets


def decode(case: Case, prepared: bool = True, with_marlin: bool = True) -> Bound:
    one = case.n * case.k * 33 // 32 + 2 * case.rows * (case.n + case.k)
    sets = []
    for _ in range(copies_for(one, 16)):
        b = weight(case.n, case.k)
        b = prepare(b) if prepared else b
        sets.append((randn(case.rows, case.k), b, dequantize(b), marlin_or_none(b) if with_marlin else None))
    peers = {"cuBLAS bf16": lambda x, b, w, m: torch.mm(x, w.T)}
    if all(s[3] is not None for s in sets):
        peers["vllm Marlin"] = lambda x, b, w, m: m(x)
    return Bound(
        sets, lambda x, b, w, m: gemm(x, b), lambda x, b, w, m: (product(x, values(b)),), peers, read_bytes=one
    )


def train_weights(case: Case, cached: bool = False) -> Bound:
    sets = []
    for _ in range(copies_for(2 * case.n * case.k, 3)):
        b = weight(case.n, case.k)
        sets.append((randn(case.rows, case.k), b, dequantize(b)))
    return Bound(
        sets,
        lambda x, b, w: gemm(x, b, b_dense=w if cached else None),
        lambda x, b, w: (product(x, values(b)),),
        {"cuBLAS bf16": lambda x, b, w: torch.mm(x, w.T)},
        kept=2 * case.n * case.k if cached else 0,
    )


def reference_steps(x, w, dy):
    q = {name: [values(t) for t in quantize_both(v)] for name, v in (("x", x), ("w", w), ("dy", dy))}
    y = product(q["x"][0], q["w"][0])
    return y, product(q["dy"][0], q["w"][1].mT), product(q["dy"][1].mT, q["x"][1].mT)


def train_linear(case: Case, backward: bool = False, cached: bool = False) -> Bound:
    sets = []
    for _ in range(copies_for(2 * case.n * case.k, 3)):
        x, w, dy = randn(case.rows, case.k), randn(case.n, case.k), randn(case.rows, case.n)
        if backward:
            x.requires_grad_(), w.requires_grad_()
        kept = fake_quantize(w.detach(), axis="both") if cached else None
        sets.append((x, w, dy, kept))

    def ours(x, w, dy, kept):
        if not backward:
            with torch.no_grad():
                return linear(x, w, values=kept)
        y = linear(x, w, values=kept)
        return y.detach(), *torch.autograd.grad(y, (x, w), dy)

    def bf16(x, w, dy, kept):
        if not backward:
            with torch.no_grad():
                return torch.mm(x, w.T)
        y = torch.mm(x, w.T)
        return y.detach(), *torch.autograd.grad(y, (x, w), dy)

    def reference(x, w, dy, kept):
        steps = reference_steps(x.detach(), w.detach(), dy)
        return steps if backward else steps[:1]

    return Bound(sets, ours, reference, {"cuBLAS bf16": bf16}, kept=4 * case.n * case.k if cached else 0)


def loop(x, w, offsets):
    """fp32 product of each group of rows with its matrix (n, k)."""
    out = torch.zeros(x.shape[0], w.shape[1], device=x.device)
    bounds = offsets.tolist()
    for e, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        out[begin:end] = product(x[begin:end], w[e])
    return out


def grouped(case: Case, cached: bool = False, dgrad: bool = False, prepared: bool = False) -> Bound:
    """Forward over (groups, n, k), or the dgrad of weights (groups, k, n) through their columnwise copy."""
    w = quantize(randn(case.groups, case.k, case.n), axis=-2).mT if dgrad else weight(case.groups, case.n, case.k)
    w = prepare(w) if prepared else w
    dense = dequantize(w)
    sets = [
        (randn(case.rows, case.k), w, dense, offsets_for(case.rows, case.groups))
        for _ in range(copies_for(dense.numel() * 2, 3))
    ]
    return Bound(
        sets,
        lambda x, b, d, o: grouped_gemm(x, b, o, b_dense=d if cached else None),
        lambda x, b, d, o: (loop(x, d, o),),
        {"grouped_mm bf16": lambda x, b, d, o: grouped_matmul(x, d, o)},
        kept=dense.numel() * 2 if cached else 0,
    )


def grouped_decode(case: Case) -> Bound:
    bound = grouped(case, prepared=True)
    active = int((bound.sets[0][3].diff() > 0).sum())
    bound.read_bytes = active * case.n * case.k * 33 // 32 + 2 * case.rows * (case.n + case.k)
    return bound


def grouped_backward(case: Case) -> Bound:
    """wgrad from dy and x with blocks along the rows of each group."""
    sets = []
    for _ in range(2):
        o = offsets_for(case.rows, case.groups)
        dy, x = randn(case.rows, case.n), randn(case.rows, case.k)
        dyq, xq = (quantize(t, axis=-2, offsets=o) for t in (dy, x))
        sets.append((dyq, xq, dequantize(dyq), dequantize(xq), o))

    def reference(dyq, xq, dy, x, o):
        bounds = o.tolist()
        return (torch.stack([product(dy[b:e].T, x[b:e].T) for b, e in zip(bounds, bounds[1:])]),)

    return Bound(
        sets,
        lambda dyq, xq, dy, x, o: grouped_wgrad(dyq, xq, o),
        reference,
        {"grouped_mm bf16": lambda dyq, xq, dy, x, o: grouped_wgrad(dy, x, o, library=True)},
    )


def grouped_train(case: Case, cached: bool = False) -> Bound:
    """Forward of `grouped_linear` from bf16 x and w."""
    w = randn(case.groups, case.n, case.k)
    kept = fake_quantize(w, axis="both") if cached else None
    sets = [(randn(case.rows, case.k), w, offsets_for(case.rows, case.groups)) for _ in range(2)]

    def ours(x, w, o):
        with torch.no_grad():
            return grouped_linear(x, w, o, values=kept)

    def reference(x, w, o):
        return (loop(values(quantize(x)), fake_quantize(w), o),)

    return Bound(
        sets,
        ours,
        reference,
        {"grouped_mm bf16": lambda x, w, o: grouped_matmul(x, w, o)},
        kept=4 * w.numel() if cached else 0,
    )


BUILDERS: dict[str, Callable[[Case], Bound]] = {
    "decode": decode,
    "decode, not prepared": lambda c: decode(c, prepared=False),
    "train weights": train_weights,
    "train weights, cached": lambda c: train_weights(c, cached=True),
    "train linear forward": train_linear,
    "train linear forward and backward": lambda c: train_linear(c, backward=True),
    "train linear forward and backward, cached": lambda c: train_linear(c, backward=True, cached=True),
    "decode grouped": grouped_decode,
    "train grouped forward": grouped,
    "train grouped forward, cached": lambda c: grouped(c, cached=True),
    "train grouped dgrad": lambda c: grouped(c, dgrad=True),
    "train grouped wgrad": grouped_backward,
    "train grouped linear forward": grouped_train,
    "train grouped linear forward, cached": lambda c: grouped_train(c, cached=True),
}

SQUARE = (8192, 8192)
# of Beam at TP 8: gate and up, and down, of a dense layer; q, k, v and gate, and o, of attention
BEAM = ((5120, 5120), (5120, 2560), (1792, 5120), (5120, 768))
GRID = [
    *(Case("decode", m, *SQUARE) for m in (1, 2, 4, 8, 16, 32, 64)),
    *(Case("decode, not prepared", m, *SQUARE) for m in (1, 16, 64)),
    *(Case("decode", m, *shape) for shape in BEAM for m in (1, 8, 16, 32, 64)),
    *(Case("train weights", m, *SQUARE) for m in (128, 256, 512, 1024, 2048, 4096, 8192)),
    Case("train weights, cached", 8192, *SQUARE),
    *(Case("train linear forward", m, *SQUARE) for m in (2048, 4096, 8192)),
    Case("train linear forward and backward", 8192, *SQUARE),
    Case("train linear forward and backward, cached", 8192, *SQUARE),
    *(Case("decode grouped", m, 2560, 5120, EXPERTS) for m in (32, 128)),
    *(
        Case(what, m, 2560, 5120, EXPERTS)
        for m in (8192, 65536)
        for what in BUILDERS
        if what.startswith("train grouped")
    ),
]


# --- measuring


def as_tuple(result) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def check(name: str, want: tuple, got) -> None:
    for reference, value in zip(want, as_tuple(got), strict=True):
        error = (value.float() - reference).pow_(2).mean().sqrt() / reference.float().pow(2).mean().sqrt()
        if not float(error) <= LIMIT:
            raise harness.WrongResult(f"{name}: error ratio {float(error):.2e} against a limit of {LIMIT:.0e}")


def rotated(call: Callable, sets: list[tuple]) -> list[Callable[[], object]]:
    return [lambda s=s: call(*s) for s in sets]


def peak_bytes(call: Callable[[], object]) -> tuple[int, int]:
    """(bytes above the operands at the peak, bytes of the results)."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    least = sum(t.numel() * t.element_size() for t in as_tuple(result))
    return torch.cuda.max_memory_allocated() - before, least


@functools.cache
def read_us(size: int) -> dict[str, float]:
    """Microseconds of a launch that reads ``size`` bytes and does nothing else, with and without overlap."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    words = size // 4 // 16384 * 16384
    sources = [
        torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
        for _ in range(harness.copies_for(size))
    ]
    sink = torch.empty(sms * 16, dtype=torch.int32, device="cuda")
    found = {}
    for name, pdl in (("plain", False), ("overlapped", True)):
        if pdl and not supports_pdl(harness.device()):
            continue
        times = []
        for block, unroll, warps, per_sm in ((4096, 2, 8, 4), (2048, 4, 4, 8), (4096, 4, 8, 4), (2048, 2, 4, 8)):
            constants = {"BLOCK": block, "UNROLL": unroll, "PDL": pdl, "num_warps": warps}
            constants |= {"launch_pdl": True} if pdl else {}
            grid, blocks = (sms * per_sm,), words // (block * unroll)
            calls = [
                lambda t=t, g=grid, b=blocks, c=constants: harness.read_kernel[g](t, sink, b, **c) for t in sources
            ]
            times.append(harness.time_us(calls, 7, 1.0)["us"])
        found[name] = min(times) * size / (4 * words)
    return found


def measure(case: Case, rounds: int) -> dict:
    bound = BUILDERS[case.what](case)
    want = bound.reference(*bound.sets[0])
    check(case.key, want, bound.ours(*bound.sets[0]))
    providers = {"beam_moe": rotated(bound.ours, bound.sets)}
    for name, peer in bound.peers.items():
        try:
            if "linear" not in case.what:  # there the peer multiplies what was not quantised
                check(name, want, peer(*bound.sets[0]))
            calls = rotated(peer, bound.sets)
            harness.time_us(calls, rounds=1, target_ms=0.1)  # one that no graph holds shows here
            providers[name] = calls
        except Exception as failure:  # a peer that does not run here, or is wrong, has no time
            harness.complain(f"{case.key}: {name}", failure)
    del want
    peak, least = peak_bytes(lambda: bound.ours(*bound.sets[0]))
    times = harness.time_many_us(providers, rounds)
    ours = times.pop("beam_moe")
    best = min(times, key=lambda name: times[name]["us"], default=None)
    floor = bound.read_bytes / harness.floor_tb_s() / 1e6 if bound.read_bytes else times[best]["us"]
    row = {
        "case": case.key,
        "shape": [v for v in (case.groups, case.rows, case.n, case.k) if v],
        **ours,
        "floor_us": round(floor, 2),
        "share": round(floor / ours["us"], 4),
        "peer": best,
        "peer_us": None if best is None else times[best]["us"],
        "peers_us": {name: t["us"] for name, t in times.items()},
        "peak_bytes": peak + bound.kept,
        "least_bytes": least,
    }
    if bound.read_bytes:
        row["read_us"] = round(min(read_us(bound.read_bytes).values()), 2)
        return {**row, "tb_s": round(bound.read_bytes / ours["us"] / 1e6, 3), "read_tb_s": harness.floor_tb_s()}
    products = 3 if "backward" in case.what else 1
    return {**row, "tflop_s": round(2e-6 * products * case.rows * case.n * case.k / ours["us"], 1)}


def print_rows(rows: list[dict]) -> None:
    columns = ("case", "us", "floor us", "share %", "read us", "peer", "peer us", "peak MB", "least MB")
    harness.print_table(
        "MXFP8 GEMM",
        columns,
        [
            (
                r["case"], r["us"], r["floor_us"], 100 * r["share"], r.get("read_us"), r["peer"], r["peer_us"],
                r["peak_bytes"] / 1e6, r["least_bytes"] / 1e6,
            )
            for r in rows
        ],
    )  # fmt: skip


# --- sweep


def stream_tiles(n: int, k: int) -> list[GemmConfig]:
    """Tiles of the route `stream`."""
    configs = (stream_config(n, k, bn, harness.device()) for bn in (64, 128))
    return [c for c in configs if c is not None]


def dense_tiles(rows: int, n: int, k: int) -> list[GemmConfig]:
    """What decode's dense products choose from: `stream`, and the bf16 form whose partial sums are joined in place."""
    if rows > 32:
        forms = [(64, 128, 2, 4, 4), (64, 128, 2, 4, 5)]
    elif rows > 16:
        forms = [(64, 256, 2, 4, 3), (64, 256, 3, 4, 3)]
    else:
        forms = [(64, 256, 2, 4, 5), (64, 256, 3, 4, 3), (64, 256, 4, 4, 3)]
    for bn, bk in ((64, 256), (64, 128)) if rows <= 32 else ((64, 128),):  # few tiles: shares for one wave or two
        steps, tiles = -(-k // bk), -(-n // bn)
        splits = {min(steps, max(1, programs // tiles)) for programs in (132, 264, 396)}
        forms += [(bn, bk, s, 4, 3 if bk == 256 else 4) for s in sorted(splits)]
    forms = list(dict.fromkeys(forms))
    joined = [GemmConfig("bf16", max(8, rows), *form, join=True) for form in forms]
    return joined + (stream_tiles(n, k) if rows <= STREAM_ROWS else [])


def decode_tiles(bm: int) -> list[GemmConfig]:
    """Tiles for up to ``bm`` rows of a launch that reads weights."""
    if bm <= 32:
        forms = [(64, 256, s, 4, 3) for s in (1, 2, 3, 4, 6)] + [(64, 256, 3, 4, 4), (64, 256, 2, 4, 5)]
        forms += [(64, 128, 3, 4, 6), (64, 512, 3, 4, 2), (128, 128, 6, 4, 4), (128, 128, 3, 8, 5), (128, 256, 4, 8, 3)]
        # two warps take the synchronous instruction, as eight tokens do: codes come to registers four at a time
        forms += [(32, 256, s, 2, 4) for s in (1, 2, 3)] + [(64, 256, s, 2, 3) for s in (2, 3, 4)]
        forms += [(32, 512, 2, 2, 3), (64, 128, 3, 2, 6), (16, 512, 1, 1, 3), (32, 256, 2, 1, 4)]
        # one share of K needs no second launch, and more steps under way
        forms += [(32, 256, 1, 2, 6), (32, 256, 1, 2, 8), (32, 512, 1, 2, 4), (32, 512, 1, 4, 4), (32, 256, 1, 4, 8)]
    else:
        forms = [(64, 128, s, 4, 4) for s in (1, 2, 3)] + [(64, 128, 2, 4, 5), (64, 256, 2, 4, 3), (128, 128, 3, 8, 3)]
    return [GemmConfig("fp16", bm, *form) for form in forms]


def middle_tiles(rows: int) -> list[GemmConfig]:
    forms = [(128, 128, 64, 1, 4, 4), (128, 128, 64, 1, 8, 4), (256, 64, 64, 1, 4, 3), (128, 64, 128, 1, 4, 3)]
    forms += [(128, 128, 128, 1, 8, 3), (256, 128, 64, 1, 8, 4), (64, 128, 128, 1, 8, 4)]
    if rows <= 256:
        forms += [(128, 128, 128, 2, 8, 3), (128, 128, 64, 3, 8, 4), (128, 128, 64, 2, 4, 4), (64, 64, 128, 1, 4, 4)]
    return [GemmConfig("fp16", *form) for form in forms]


def both_forms(tiles: list[GemmConfig]) -> list[GemmConfig]:
    """With the bf16 form of each; a tile of 256 tokens spills in the fp16 form."""
    other = [dataclasses.replace(t, route="bf16") for t in tiles]
    return [t for t in tiles if t.bm < 256] + other


@dataclass(frozen=True)
class Target:
    """What a sweep times: a shape, its candidates, and the table entry that it makes."""

    case: Case
    candidates: tuple[GemmConfig, ...]
    dgrad: bool = False


def targets(quick: bool, only: str = "") -> list[Target]:
    out = []
    shapes = [SQUARE] if quick else [SQUARE, *BEAM]
    for n, k in shapes:
        for rows in (1, 8, 16, 32, 64):
            out.append(Target(Case("decode", rows, n, k), tuple(dense_tiles(rows, n, k))))
    for rows in (128, 256, 512):
        tiles = (*both_forms(middle_tiles(rows)), GemmConfig("dequantize"))
        out.append(Target(Case("train weights", rows, *SQUARE), tiles))
    grouped_tiles = (*both_forms(middle_tiles(512)), GemmConfig("dequantize"))
    for rows in (8192, 24576):  # 256 and 768 rows an expert
        for dgrad in (False, True):
            case = Case("train grouped dgrad" if dgrad else "train grouped forward", rows, 2560, 5120, EXPERTS)
            out.append(Target(case, grouped_tiles, dgrad))
    for rows, bm in () if quick else ((128, 16), (512, 16), (2048, 64)):
        tiles = {dataclasses.replace(t, split=1) for t in decode_tiles(bm) if t.bn * t.bk <= 128 * 128}
        case = Case("decode grouped", rows, 2560, 5120, EXPERTS)
        out.append(Target(case, tuple(both_forms(sorted(tiles, key=str)))))
    return [t for t in out if chosen(t.case, only)]


def chosen(case: Case, only: str) -> bool:
    return all(part in case.key for part in only.split(",") if part)


def operands(target: Target) -> Bound:
    case = target.case
    if case.groups:
        return grouped(case, dgrad=target.dgrad, prepared=True)
    return decode(case, with_marlin=False)


def call_with(target: Target, config: GemmConfig) -> Callable:
    if target.case.groups:
        return lambda x, b, d, o: grouped_gemm(x, b, o, config=config)
    return lambda x, b, w, m: gemm(x, b, config=config)


def compile_target(target: Target, configs: tuple[GemmConfig, ...]) -> None:
    """In a worker: launch candidates once, for the compiler's cache."""
    bound = operands(target)
    for config in configs:
        try:
            call_with(target, config)(*bound.sets[0])
            torch.cuda.synchronize()
        except Exception:  # it fails again, and is told, when it is timed
            continue


def compile_cases(cases: tuple[Case, ...]) -> None:
    """In a worker: what cases of the grid launch, once."""
    for case in cases:
        try:
            bound = BUILDERS[case.what](case)
            bound.ours(*bound.sets[0])
            bound.reference(*bound.sets[0])
            torch.cuda.synchronize()
        except Exception:  # it fails again, and is told, when it is timed
            continue
        finally:
            torch.cuda.empty_cache()


def time_candidates(target: Target, bound: Bound) -> dict[GemmConfig, float]:
    """Microseconds of every candidate whose result is right."""
    want = bound.reference(*bound.sets[0])
    times: dict[GemmConfig, float] = {}
    for config in target.candidates:
        call = call_with(target, config)
        try:
            check("result", want, call(*bound.sets[0]))
            times[config] = harness.time_us(rotated(call, bound.sets), rounds=7, target_ms=1.0)["us"]
        except Exception as failure:  # too much shared memory, a shape the compiler refuses, a wrong result
            harness.complain(f"{target.case.key} {config}", failure)
    return times


def tile(c: GemmConfig) -> str:
    return f"{c.bm}x{c.bn}x{c.bk} s{c.split} w{c.warps} st{c.stages}" + (" joined" if c.join and c.split > 1 else "")


def best_forms(case: Case, bound: Bound, times: dict[GemmConfig, float]) -> list[tuple]:
    """Rows of the table: a plain read of the same bytes, then the fastest candidate of each route."""
    floor, reads = bound.read_bytes / harness.floor_tb_s() / 1e6, read_us(bound.read_bytes)
    shown = [(case.key, f"read, {name}", None, us, 100 * floor / us, None, None) for name, us in reads.items()]
    for name in sorted({c.route for c in times}):
        c = min((c for c in times if c.route == name), key=times.__getitem__)
        against = [100 * reads[r] / times[c] if r in reads else None for r in ("plain", "overlapped")]
        shown.append((case.key, name, tile(c), times[c], 100 * floor / times[c], *against))
    return shown


def sweep(work: list[Target], jobs: int, save: bool) -> None:
    harness.compile_ahead(
        jobs, [(compile_target, t, t.candidates[i::4]) for t in work for i in range(4) if t.candidates[i::4]]
    )
    table = []
    for target in work:
        case, bound = target.case, operands(target)
        times = time_candidates(target, bound)
        if case.what == "decode":
            table += best_forms(case, bound, times)
        peer = {name: harness.time_us(rotated(p, bound.sets), 7, 1.0)["us"] for name, p in bound.peers.items()}
        floor = bound.read_bytes / harness.floor_tb_s() / 1e6
        entries = []
        for prepared in (True, False):
            ranked = sorted((c for c in times if prepared or c.route != "fp16"), key=times.__getitem__)
            if not ranked:
                continue
            shown = "  ".join(
                f"{c.route} {tile(c)} {times[c]:.1f}us" + (f" {100 * floor / times[c]:.0f}%" if floor else "")
                for c in ranked[:4]
            )
            harness.say(f"{case.key} {'prepared' if prepared else 'bf16 only'}: {shown} | {peer}")
            shape = {"n": case.n, "k": case.k, "route": "fp16" if prepared else "bf16"}
            rows = case.rows
            if case.groups:
                shape |= {"groups": case.groups, "turned": int(target.dgrad)}
                rows = -(-case.rows // case.groups)
            config = dataclasses.asdict(ranked[0])
            if not config["join"]:  # left out, as where there is no such choice
                del config["join"]
            entries.append({"shape": shape, "rows": rows, "config": config})
        if save and entries:
            tuning.save(harness.device(), "mxfp8_grouped" if case.groups else "mxfp8_gemm", entries)
        del bound
        torch.cuda.empty_cache()
    if table:
        columns = ("case", "route", "tile", "us", "share of the floor %", "of a read %", "of an overlapped read %")
        harness.print_table("Decode, the best of each route", columns, table)


SMALL = [
    Case("decode", 3, 64, 96),
    Case("decode, not prepared", 3, 64, 96),
    Case("train weights", 40, 64, 96),
    Case("train linear forward and backward", 9, 64, 96),
    Case("train grouped forward", 20, 64, 96, 3),
    Case("train grouped dgrad", 20, 64, 96, 3),
    Case("train grouped wgrad", 20, 64, 96, 3),
    Case("train grouped linear forward", 20, 64, 96, 3),
]


def run_interpreter() -> int:
    wrong, table = 0, []
    for case in SMALL:
        bound = BUILDERS[case.what](case)
        try:
            check(case.key, bound.reference(*bound.sets[0]), bound.ours(*bound.sets[0]))
            table.append((case.key, "right"))
        except harness.WrongResult as failure:
            wrong += 1
            table.append((case.key, str(failure)))
    harness.print_table("No GPU: small shapes in Triton's interpreter", ("case", "result"), table)
    return wrong


def main(
    only: str = typer.Option("", help="Comma-separated parts; a case or sweep runs if its name holds every one."),
    rounds: int = typer.Option(15, help="Graph replays per time."),
    do_sweep: bool = typer.Option(False, "--sweep", help="Time tiles instead of the grid."),
    quick: bool = typer.Option(False, help="Sweep 8192 x 8192 only among the dense shapes, and no grouped decode."),
    jobs: int = typer.Option(-1, help="Processes that compile first; 0: none, -1: by the machine's cores."),
    save: bool = typer.Option(True, help="Write results, or the tuned tables of a sweep."),
) -> None:
    if not torch.cuda.is_available():
        raise typer.Exit(run_interpreter())
    print(harness.fingerprint(), harness.ceilings(), flush=True)
    if do_sweep:
        work = targets(quick, only)
        if not work:
            raise typer.BadParameter("no target of the sweep is left")
        sweep(work, jobs, save)
        return
    cases = [c for c in GRID if chosen(c, only)]
    if not cases:
        raise typer.BadParameter("no case of the grid is left")
    harness.compile_ahead(jobs, [(compile_cases, tuple(cases[i::12])) for i in range(min(12, len(cases)))])
    rows, failures = [], 0
    for case in cases:
        try:
            row = measure(case, rounds)
            rows.append(row)
            harness.say(f"{case.key}: {row['us']} us, {100 * row['share']:.1f} % | {row['peers_us']}")
            if save:
                harness.write_rows("mxfp8_gemm", [row])
        except Exception as failure:  # the other cases still have something to say
            failures += 1
            harness.complain(case.key, failure)
        torch.cuda.empty_cache()
    print_rows(rows)
    if save:
        print(harness.results_path("mxfp8_gemm"))
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
