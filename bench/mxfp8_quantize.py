"""MXFP8 quantise and dequantise: time, share of copy bandwidth, peers and peak memory.

    python bench/mxfp8_quantize.py                    # the whole grid; on a GPU rows go to bench/results/<device>/
    python bench/mxfp8_quantize.py --quick --no-peer  # 8192 x 8192 bf16 only
    python bench/mxfp8_quantize.py --sweep            # times launch configurations, writes kernels/configs/<device>/

The floor of a case is the bytes it must read and write over the copy bandwidth that this process measures; ``share`` is
floor over time. Every result is compared bit for bit with the reference before it is timed. Peers, on the same operands
in the same process: torch.compile of the plain torch definition, and torchao's Triton kernels where they run. ``peak``
is the memory that one call takes above its input, ``least`` the bytes of its outputs.

Kernels, ours and torch.compile's, are compiled in parallel first; rows and table entries are saved as soon as they are
measured. Without a GPU small cases run in Triton's interpreter against the reference; nothing is written.
"""

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import harness
import torch
import typer

from beam_moe.kernels import tuning
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
)
from beam_moe.kernels.mxfp8.format import e8m0_from_amax, e8m0_reciprocal, e8m0_to_float

kernels = import_module("beam_moe.kernels.mxfp8.quantize")  # the package exports the function of that name

GROUPS = 32  # local experts of a grouped case
SWIGLU_LIMIT = 3e-3  # error ratio after quantising: the last bit of a sigmoid may move an element by a step
PEER_LIMIT = 1e-3


@dataclass(frozen=True)
class Case:
    """One operation on one shape. ``shape`` is that of the dense operand or result, per direction."""

    what: str
    shape: tuple[int, ...] = (8192, 8192)
    dtype: torch.dtype = torch.bfloat16

    @property
    def key(self) -> str:
        return f"{self.what}/{'x'.join(map(str, self.shape))}/{str(self.dtype).removeprefix('torch.')}"

    @property
    def numbers(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Operation:
    """What a case's name means.

    Attributes:
        make: operands from (shape, dtype, device).
        call: the operation, of the operands and a configuration (None: as shipped).
        reference: the results that ``call`` must equal, of the operands.
        moved: bytes read and written per number of ``shape``, given the bytes of a dense one.
        written: of those, the bytes written.
        tuned: its key in the kernels' CONFIGS, None for a variant that shares another's.
        peer: its key in PEERS.
        limit: error ratio allowed instead of equal bits.
    """

    make: Callable
    call: Callable
    reference: Callable
    moved: Callable[[int], float]
    written: Callable[[int], float]
    tuned: str | None = None
    peer: str | None = None
    limit: float | None = None


CODE = 1 + 1 / 32  # an element and its share of a scale


def dense(shape, dtype, device):
    return (torch.randn(shape, device=device, dtype=torch.float32).to(dtype),)


def turned(shape, dtype, device):
    return (dense((shape[1], shape[0]), dtype, device)[0].mT,)


def grouped(shape, dtype, device):
    cuts = torch.randint(0, shape[0] + 1, (GROUPS - 2,)).tolist()
    offsets = torch.tensor(
        sorted([0, 0, *cuts, shape[0]]), dtype=torch.int32, device=device
    )  # the first expert is idle
    return (*dense(shape, dtype, device), offsets)


def gate_up(shape, dtype, device):
    return dense((shape[0], 2 * shape[1]), dtype, device)


def gate_up_and_gradient(shape, dtype, device):
    return (*dense(shape, dtype, device), *gate_up(shape, dtype, device))


def swiglu(x):
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def swiglu_gradient(dh, x):
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(dh.double())
    return wide.grad.to(x.dtype)


def both_reference(x, offsets=None):
    return quantize_reference(x), quantize_reference(x, axis=-2, offsets=offsets)


def quantized(axis):
    return lambda shape, dtype, device: (quantize(dense(shape, torch.float32, device)[0], axis=axis), dtype)


OPERATIONS = {
    "quantize rowwise": Operation(
        dense, lambda c, x: quantize(x, config=c), quantize_reference,
        lambda b: b + CODE, lambda b: CODE, "rowwise", "rowwise",
    ),
    "quantize columnwise": Operation(
        dense, lambda c, x: quantize(x, axis=-2, config=c), lambda x: quantize_reference(x, axis=-2),
        lambda b: b + CODE, lambda b: CODE, "columnwise", "columnwise",
    ),
    "quantize both": Operation(
        dense, lambda c, x: quantize_both(x, config=c), both_reference,
        lambda b: b + 2 * CODE, lambda b: 2 * CODE, "both", "both",
    ),
    "quantize both, grouped": Operation(
        grouped, lambda c, x, o: quantize_both(x, offsets=o, config=c), both_reference,
        lambda b: b + 2 * CODE, lambda b: 2 * CODE,
    ),
    "quantize rowwise, swizzled": Operation(
        dense, lambda c, x: quantize(x, swizzle=True, config=c), quantize_reference,
        lambda b: b + CODE, lambda b: CODE,
    ),
    "quantize rowwise, transposed": Operation(
        turned, lambda c, x: quantize(x, config=c), quantize_reference, lambda b: b + CODE, lambda b: CODE,
    ),
    "fake quantize rowwise": Operation(
        dense, lambda c, x: fake_quantize(x, dtype=x.dtype, config=c),
        lambda x: dequantize_reference(quantize_reference(x), x.dtype),
        lambda b: 2 * b, lambda b: b, "fake_rowwise", "fake rowwise",
    ),
    "fake quantize columnwise": Operation(
        dense, lambda c, x: fake_quantize(x, axis=-2, dtype=x.dtype, config=c),
        lambda x: dequantize_reference(quantize_reference(x, axis=-2), x.dtype),
        lambda b: 2 * b, lambda b: b, "fake_columnwise",
    ),
    "fake quantize both": Operation(
        dense, lambda c, x: fake_quantize(x, axis="both", dtype=x.dtype, config=c),
        lambda x: tuple(dequantize_reference(t, x.dtype) for t in both_reference(x)),
        lambda b: 3 * b, lambda b: 2 * b, "fake_both",
    ),
    "quantize both, row dense": Operation(
        dense, lambda c, x: quantize_both(x, row_dtype=x.dtype, config=c),
        lambda x: (dequantize_reference(quantize_reference(x), x.dtype), quantize_reference(x, axis=-2)),
        lambda b: 2 * b + CODE, lambda b: b + CODE,
    ),
    "SwiGLU and quantize both": Operation(
        gate_up, lambda c, x: silu_mul_quantize(x, axis="both", config=c), lambda x: both_reference(swiglu(x)),
        lambda b: 2 * b + 2 * CODE, lambda b: 2 * CODE, "silu_mul", "swiglu", SWIGLU_LIMIT,
    ),
    "SwiGLU backward and quantize both": Operation(
        gate_up_and_gradient, lambda c, dh, x: silu_mul_backward_quantize(dh, x, config=c),
        lambda dh, x: both_reference(swiglu_gradient(dh, x)),
        lambda b: 3 * b + 4 * CODE, lambda b: 4 * CODE, "silu_mul_backward", None, SWIGLU_LIMIT,
    ),
    "dequantize rowwise": Operation(
        quantized(-1), lambda c, t, dtype: dequantize(t, dtype, config=c), dequantize_reference,
        lambda b: b + CODE, lambda b: b, "dequantize", "dequantize",
    ),
    "dequantize columnwise": Operation(
        quantized(-2), lambda c, t, dtype: dequantize(t, dtype, config=c), dequantize_reference,
        lambda b: b + CODE, lambda b: b, "dequantize_columnwise",
    ),
}  # fmt: skip

QUICK = [Case(what) for what in OPERATIONS]
GRID = [
    *QUICK,
    *(Case(what, dtype=dtype) for what in list(OPERATIONS)[:3] for dtype in (torch.float16, torch.float32)),
    *(Case(what, (16384, 7168)) for what in list(OPERATIONS)[:3]),
    *(Case(what, (8192, 2880)) for what in list(OPERATIONS)[:3]),
    Case("quantize both, grouped", (65536, 5120)),
    Case("quantize rowwise", (32, 5120, 5120)),
    Case("quantize columnwise", (32, 5120, 5120)),
    Case("dequantize rowwise", (32, 5120, 5120)),
    Case("quantize rowwise", (1, 8192)),
    Case("quantize rowwise", (16, 8192)),
    Case("quantize rowwise", (64, 5120)),
]


# --- peers: name -> function of the operands giving tensors, and how to read values from them


def torch_rowwise(x):
    blocks = x.float().unflatten(-1, (-1, 32))
    amax = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1).view(torch.float32)
    scale = e8m0_from_amax(amax)
    y = blocks * e8m0_reciprocal(scale).unsqueeze(-1)
    return y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).flatten(-2), scale


def torch_columnwise(x):
    data, scale = torch_rowwise(x.mT)
    return data.mT.contiguous(), scale.mT.contiguous()


def torch_values(data, scale, dtype):
    return (data.float() * e8m0_to_float(scale).repeat_interleave(32, -1)).to(dtype)


def row_values(data, scale):
    return dequantize_reference(MXFP8Tensor(data, scale))


def column_values(data, scale):
    return dequantize_reference(MXFP8Tensor(data, scale, -2))


@dataclass(frozen=True)
class Peer:
    """Another implementation: its call, how to read values from its result, and the reference it must equal."""

    call: Callable
    values: Callable
    reference: Callable | None = None


def compiled_peers() -> dict[str, Peer]:
    """torch.compile of the definition."""
    functions = {
        "rowwise": (torch_rowwise, lambda out: (row_values(*out),)),
        "columnwise": (torch_columnwise, lambda out: (column_values(*out),)),
        "both": (
            lambda x: (*torch_rowwise(x), *torch_columnwise(x)),
            lambda out: (row_values(*out[:2]), column_values(*out[2:])),
        ),
        "fake rowwise": (lambda x: torch_values(*torch_rowwise(x), x.dtype), lambda out: (out,)),
        "swiglu": (
            lambda x: (*torch_rowwise(swiglu(x)), *torch_columnwise(swiglu(x))),
            lambda out: (row_values(*out[:2]), column_values(*out[2:])),
        ),
        "dequantize": (lambda t, dtype: torch_values(t.data, t.scale, dtype), lambda out: (out,)),
    }
    compiled = {}
    for name, (f, values) in functions.items():
        # tensors only at the compiled boundary
        if name == "dequantize":
            inner = torch.compile(torch_values, dynamic=False)
            compiled[name] = Peer(lambda t, dtype, inner=inner: inner(t.data, t.scale, dtype), values)
        else:
            compiled[name] = Peer(torch.compile(f, dynamic=False), values)
    return compiled


def torchao_peers() -> dict[str, Peer]:
    """torchao's Triton kernels, {} where they are not installed.

    torchao defines them on sm_100 alone, but their "floor" rounding uses nothing that sm_90 lacks; the check is
    answered for the import so that they have a time here.
    """
    try:
        import torchao.utils
    except ImportError:
        return {}
    except Exception as failure:  # built for another torch
        harness.complain("torchao", failure)
        return {}
    real = torchao.utils.is_sm_at_least_100
    torchao.utils.is_sm_at_least_100 = lambda: True
    try:
        from torchao.prototype.mx_formats.kernels import triton_to_mxfp8_dim0, triton_to_mxfp8_dim1
    except Exception as failure:
        harness.complain("torchao", failure)
        return {}
    finally:
        torchao.utils.is_sm_at_least_100 = real
    return {
        "rowwise": Peer(
            lambda x: triton_to_mxfp8_dim0(x, scaling_mode="floor"),
            lambda out: (row_values(*out),),
            lambda x: quantize_reference(x, rounding="floor"),
        ),
        "columnwise": Peer(
            lambda x: triton_to_mxfp8_dim1(x, scaling_mode="floor"),
            lambda out: (column_values(out[0], out[1].view(torch.uint8).mT),),  # stored transposed, returned as a view
            lambda x: quantize_reference(x, axis=-2, rounding="floor"),
        ),
    }


def peers() -> dict[str, dict[str, Peer]]:
    return {"torch.compile": compiled_peers(), "torchao (floor)": torchao_peers()}


# --- measuring


def as_tuple(result) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def values(t) -> torch.Tensor:
    return dequantize_reference(t) if isinstance(t, MXFP8Tensor) else t


def bits(t) -> torch.Tensor:
    return t if t.dtype in (torch.bfloat16, torch.float16, torch.float32) else t.view(torch.uint8)


def check(case: Case, operation: Operation, got, want) -> None:
    """Raise `harness.WrongResult` unless ``got`` equals ``want`` in bits, or within the operation's limit."""
    for a, b in zip(as_tuple(want), as_tuple(got), strict=True):
        if operation.limit is not None:
            harness.gate(case.key, values(a), values(b), operation.limit)
            continue
        if isinstance(b, MXFP8Tensor) and b.swizzled:
            right = torch.equal(bits(a.data), bits(b.data)) and torch.equal(values(a), values(b))
        elif isinstance(b, MXFP8Tensor):
            right = torch.equal(bits(a.data), bits(b.data)) and torch.equal(a.scale, b.scale)
        else:
            right = torch.equal(a, b)
        if not right:
            raise harness.WrongResult(f"{case.key}: bits differ from the reference")


def rotated(call: Callable, sets: list[tuple]) -> list[Callable[[], object]]:
    """One call per operand set; each keeps its result until its next turn, so that outputs rotate as inputs do."""
    kept: list[object] = [None] * len(sets)

    def bind(i: int, operands: tuple) -> Callable[[], object]:
        def run() -> None:
            kept[i] = call(*operands)

        return run

    return [bind(i, operands) for i, operands in enumerate(sets)]


def operand_sets(case: Case, operation: Operation, device: torch.device) -> list[tuple]:
    moved = int(case.numbers * operation.moved(case.dtype.itemsize))
    return [operation.make(case.shape, case.dtype, device) for _ in range(harness.copies_for(moved, 32))]


def peak_bytes(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, found: dict[str, dict[str, Peer]], rounds: int) -> dict:
    """Check, then time ours and the peers in turn. Raises `harness.WrongResult` for ours only."""
    operation, device = OPERATIONS[case.what], harness.device()
    sets = operand_sets(case, operation, device)
    want = operation.reference(*sets[0])
    check(case, operation, operation.call(None, *sets[0]), want)
    peak = peak_bytes(lambda: operation.call(None, *sets[0]))
    providers = {"beam_moe": rotated(lambda *a: operation.call(None, *a), sets)}
    for name, table in found.items():
        if operation.peer not in table or case not in QUICK:  # a compilation for each shape would take the longest
            continue
        other = table[operation.peer]
        try:
            target = as_tuple(want if other.reference is None else other.reference(*sets[0]))
            for a, b in zip(target, other.values(other.call(*sets[0])), strict=True):
                harness.gate(name, values(a), values(b), operation.limit or PEER_LIMIT)
            calls = rotated(other.call, sets)
            harness.time_us(calls, rounds=1, target_ms=0.1)  # one that no graph holds shows here
            providers[name] = calls
        except Exception as failure:  # a peer that does not run here, or is wrong, has no time
            harness.complain(f"{case.key}: {name}", failure)
    del want
    times = harness.time_many_us(providers, rounds)
    ours, size = times.pop("beam_moe"), case.dtype.itemsize
    moved = case.numbers * operation.moved(size)
    floor = moved / harness.ceilings()["copy_tb_s"] / 1e6
    best = min(times, key=lambda name: times[name]["us"], default=None)
    return {
        "case": case.key,
        "shape": list(case.shape),
        "dtype": str(case.dtype).removeprefix("torch."),
        **ours,
        "floor_us": round(floor, 2),
        "share": round(floor / ours["us"], 4),
        "peer": best,
        "peer_us": None if best is None else times[best]["us"],
        "peers_us": {name: t["us"] for name, t in times.items()},
        "tb_s": round(moved / ours["us"] / 1e6, 3),
        "copy_tb_s": harness.ceilings()["copy_tb_s"],
        "peak_bytes": peak,
        "least_bytes": int(case.numbers * operation.written(size)),
    }


def copy_row() -> dict:
    """A copy of 8192 x 8192 bf16, timed as the cases are: what 100 % means at this size."""
    case = Case("copy")
    moved = case.numbers * 4
    pairs = [(torch.empty(case.shape, device="cuda", dtype=torch.bfloat16), *dense(case.shape, case.dtype, "cuda"))]
    pairs += [(torch.empty_like(pairs[0][0]), *dense(case.shape, case.dtype, "cuda")) for _ in range(2)]
    times = harness.time_us([lambda a=a, b=b: a.copy_(b) for a, b in pairs])
    floor = moved / harness.ceilings()["copy_tb_s"] / 1e6
    return {
        "case": case.key,
        "shape": list(case.shape),
        "dtype": "bfloat16",
        **times,
        "floor_us": round(floor, 2),
        "share": round(floor / times["us"], 4),
        "peer": None,
        "peer_us": None,
        "tb_s": round(moved / times["us"] / 1e6, 3),
        "copy_tb_s": harness.ceilings()["copy_tb_s"],
    }


def print_rows(rows: list[dict]) -> None:
    columns = ("case", "us", "floor us", "share %", "peer", "peer us", "peak MB", "least MB")
    harness.print_table(
        "MXFP8 quantise",
        columns,
        [
            (
                row["case"], row["us"], row["floor_us"], 100 * row["share"], row["peer"], row["peer_us"],
                row["peak_bytes"] / 1e6 if "peak_bytes" in row else None,
                row["least_bytes"] / 1e6 if "least_bytes" in row else None,
            )
            for row in rows
        ],
    )  # fmt: skip


# --- sweep


def tuned_operations() -> dict[str, tuple[str, Operation]]:
    return {o.tuned: (name, o) for name, o in OPERATIONS.items() if o.tuned is not None}


def compile_configs(what: str, dtype: torch.dtype, configs: list[QuantizeConfig | None]) -> None:
    """In a worker: launch each configuration of a case's operation once, for the compiler's cache."""
    operation = OPERATIONS[what]
    operands = operation.make((128, 1024), dtype, harness.device())
    for config in configs:
        try:
            operation.call(config, *operands)
            torch.cuda.synchronize()
        except Exception:  # it fails again, and is told, when it is timed
            continue


def compile_peer(case: Case) -> None:
    """In a worker: torch.compile's code of a case's peer, for its cache."""
    warnings.filterwarnings("ignore", category=UserWarning)
    operation = OPERATIONS[case.what]
    peer = compiled_peers().get(operation.peer)
    if peer is not None:
        peer.call(*operation.make(case.shape, case.dtype, harness.device()))
        torch.cuda.synchronize()


def sweep(dtypes: list[torch.dtype], shape: tuple[int, int], jobs: int, save: bool) -> None:
    """Time every configuration of every tuned operation, print them by time, keep the fastest right one."""
    work = [
        (what, dtype, [kernels.CONFIGS[what], *kernels.alternatives(what)])
        for what in kernels.CONFIGS
        for dtype in dtypes
    ]
    named = [(tuned_operations()[what][0], dtype, configs) for what, dtype, configs in work]
    harness.compile_ahead(jobs, [(compile_configs, n, d, c[i::2]) for n, d, c in named for i in range(2)])
    for what, dtype, configs in work:
        name, operation = tuned_operations()[what]
        case = Case(name, shape, dtype)
        sets = operand_sets(case, operation, harness.device())
        times = {}
        try:
            want = operation.call(configs[0], *sets[0])
            check(case, operation, want, operation.reference(*sets[0]))
        except Exception as failure:
            harness.complain(f"{what}: no right result to compare with", failure)
            continue
        for config in configs:
            try:  # all agree with the first to the bit, which agrees with the reference as the operation can
                check(case, dataclasses.replace(operation, limit=None), operation.call(config, *sets[0]), want)
                calls = rotated(lambda *a, c=config, o=operation: o.call(c, *a), sets)
                times[config] = harness.time_us(calls, rounds=7, target_ms=1.5)["us"]
            except Exception as failure:
                harness.complain(f"{what} {config}", failure)
        if not times:
            continue
        floor = case.numbers * operation.moved(dtype.itemsize) / harness.ceilings()["copy_tb_s"] / 1e6
        ranked = sorted(times, key=times.__getitem__)
        shown = "  ".join(f"{c.block_m}x{c.block_n}w{c.num_warps} {100 * floor / times[c]:.1f}%" for c in ranked)
        harness.say(f"{what} {dtype.itemsize}B, floor {floor:.1f} us: {shown}")
        entry = {
            "shape": {"what": what, "bytes": dtype.itemsize},
            "rows": shape[0],
            "config": dataclasses.asdict(ranked[0]),
        }
        if save:
            tuning.save(harness.device(), kernels.OP, [entry])


def run_interpreter() -> int:
    """Every operation on a small shape in Triton's interpreter, checked against the reference."""
    wrong, table = 0, []
    for what, operation in OPERATIONS.items():
        case = Case(what, (96, 128), torch.float32)
        operands = operation.make(case.shape, case.dtype, harness.device())
        try:
            check(case, operation, operation.call(None, *operands), operation.reference(*operands))
            table.append((what, "right"))
        except harness.WrongResult as failure:
            wrong += 1
            table.append((what, str(failure)))
    harness.print_table("No GPU: small shapes in Triton's interpreter against the reference", ("case", "bits"), table)
    return wrong


def main(
    quick: bool = typer.Option(False, help="8192 x 8192 bf16 only."),
    only: str = typer.Option("", help="Comma-separated parts of case names to keep, such as 'rowwise' or '8192x2880'."),
    peer: bool = typer.Option(True, help="Time torch.compile and torchao beside ours."),
    rounds: int = typer.Option(15, help="Graph replays per time."),
    do_sweep: bool = typer.Option(False, "--sweep", help="Time launch configurations instead, 8192 x 8192."),
    fp32: bool = typer.Option(False, help="Sweep fp32 too."),
    jobs: int = typer.Option(
        -1, help="Processes that compile before anything is timed; 0: none, -1: by the machine's cores."
    ),
    save: bool = typer.Option(True, help="Write results, or the tuned table of a sweep."),
) -> None:
    if not torch.cuda.is_available():
        raise typer.Exit(run_interpreter())
    print(harness.fingerprint(), harness.ceilings(), flush=True)
    if do_sweep:
        sweep([torch.bfloat16, *([torch.float32] if fp32 else [])], (8192, 8192), jobs, save)
        return
    cases = QUICK if quick else GRID
    if only:
        cases = [case for case in cases if any(part in case.key for part in only.split(","))]
    if not cases:
        raise typer.BadParameter("no case of the grid is left")
    warnings.filterwarnings("ignore", category=UserWarning)  # of torch.compile
    found = peers() if peer else {}
    if len(cases) > 4:
        ahead: list[tuple] = [(compile_peer, case) for case in cases if peer and case in QUICK]
        harness.compile_ahead(
            jobs, ahead + [(compile_configs, *w, [None]) for w in dict.fromkeys((c.what, c.dtype) for c in cases)]
        )
    rows, failures = [copy_row()], 0
    if save:
        harness.write_rows("mxfp8_quantize", rows)
    for case in cases:
        try:
            row = measure(case, found, rounds)
            rows.append(row)
            harness.say(f"{case.key}: {row['us']} us, {100 * row['share']:.1f} % | {row['peers_us']}")
            if save:
                harness.write_rows("mxfp8_quantize", [row])
        except Exception as failure:  # the other cases still have something to say
            failures += 1
            harness.complain(case.key, failure)
        torch.cuda.empty_cache()
    print_rows(rows)
    if save:
        print(harness.results_path("mxfp8_quantize"))
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
