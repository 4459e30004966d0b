"""Training with expert LoRA: base and adapter of one grouped projection, forward and backward, base frozen.

    python bench/grouped_lora.py              # Beam's two projections, 32 experts a rank; rows to bench/results/
    python bench/grouped_lora.py --sweep      # times tiles of the grouped GEMM, writes kernels/configs/<device>/

``peer`` is the same in PyTorch, in the same process: a grouped GEMM for the base, two for the adapter (a plain GEMM for
a factor that experts share), an addition, and autograd. ``base_us`` is PyTorch's grouped GEMM of the base alone, once
forward and once for dx: what is above it is the adapter's cost. The floor is the larger of the bytes that must move
(weights and factors of experts that have rows, x, y, and for the backward pass dy, dx and gradients) over the read
bandwidth, and on an H200 the products over its dense bf16 peak. Every result of ours is compared with fp32 before it is
timed; of the peer's y and dx. Without a GPU small cases are compared in Triton's interpreter and nothing is written.
"""

import dataclasses
import sys
from dataclasses import dataclass

import harness
import torch
import typer

from beam_moe.kernels import tuning
from beam_moe.kernels.moe_lora import grouped_linear_lora
from beam_moe.kernels.moe_lora.grouped_linear import GroupedLoRAConfig, _project

BF16 = torch.bfloat16
LIMIT, PEER_LIMIT = 3e-3, 1e-2  # one rounding to bf16 is 1.7e-3; the peer rounds each part
H200_BF16_TFLOP_S = 989.5  # NVIDIA H200 SXM data sheet, dense
SCALE = 0.5

grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


@dataclass(frozen=True)
class Case:
    layer: str
    n: int
    k: int
    rows: int
    experts: int = 32
    rank: int = 32
    shared: bool = False
    backward: bool = False

    @property
    def key(self) -> str:
        passes = "forward and backward" if self.backward else "forward"
        kind = "shared-outer" if self.shared else "per-expert"
        return f"{self.layer}/{kind} r{self.rank}/{self.experts}x{self.n}x{self.k}/{self.rows}/{passes}"


LAYERS = {"gate and up": (5120, 5120), "down": (5120, 2560)}
SMALL = [
    Case("gate and up", 72, 40, 24, 4, 4, shared, backward) for shared in (False, True) for backward in (False, True)
]
TILES = [
    GroupedLoRAConfig(*form)
    for form in (
        (64, 128, 64, 4, 4),
        (64, 256, 64, 4, 2),
        (64, 256, 64, 4, 3),
        (64, 256, 64, 8, 3),
        (128, 128, 64, 4, 4),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 128, 8, 3),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
    )
]


def offsets_for(rows: int, groups: int) -> torch.Tensor:
    """Uneven groups that sum to ``rows``; the second has no row."""
    share = torch.rand(groups, generator=torch.Generator().manual_seed(1)) + 0.5
    share[1] = 0
    ends = (share.cumsum(0) / share.sum() * rows).round().int()
    return torch.cat([torch.zeros(1, dtype=torch.int32), ends]).to(harness.device())


def operands(case: Case):
    """x, w, offsets, a, b, dy; the factor on the hidden side is shared: a of gate and up, b of down."""

    def randn(*shape, scale=1.0):
        return torch.randn(*shape, device=harness.device(), dtype=BF16).mul_(scale)

    e, n, k, r = case.experts, case.n, case.k, case.rank
    up = case.layer != "down"
    x = randn(case.rows, k).requires_grad_()
    a = randn(1 if case.shared and up else e, r, k, scale=k**-0.5).requires_grad_()
    b = randn(1 if case.shared and not up else e, n, r, scale=r**-0.5).requires_grad_()
    return x, randn(e, n, k, scale=k**-0.5), offsets_for(case.rows, e), a, b, randn(case.rows, n)


def steps(case: Case, project):
    """One call: y, and with ``backward`` the gradients of x, a and b."""

    def call(x, w, offsets, a, b, dy):
        if not case.backward:
            with torch.no_grad():
                return (project(x, w, offsets, a, b),)
        y = project(x, w, offsets, a, b)
        return y.detach(), *torch.autograd.grad(y, (x, a, b), dy)

    return call


def ours(x, w, offsets, a, b):
    return grouped_linear_lora(x, w, offsets, a, b, scale=SCALE)


def peer(x, w, offsets, a, b):
    ends = offsets[1:]

    def times(rows, factor):
        return torch.mm(rows, factor[0].T) if len(factor) == 1 else grouped_mm(rows, factor.mT, offs=ends)

    return torch.add(grouped_mm(x, w.mT, offs=ends), times(times(x, a), b), alpha=SCALE)


def base_alone(case: Case):
    def call(x, w, offsets, a, b, dy):
        with torch.no_grad():
            y = grouped_mm(x, w.mT, offs=offsets[1:])
            return (y, grouped_mm(dy, w, offs=offsets[1:])) if case.backward else (y,)

    return call


def reference(case: Case, x, w, offsets, a, b, dy):
    """The same in fp32, expert by expert."""
    x, a, b = (t.detach() for t in (x, a, b))
    made = [torch.zeros_like(t, dtype=torch.float32) for t in (dy, x, a, b)]
    y, dx, da, db = made
    bounds = offsets.tolist()
    for e, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        rows, grad, fw = x[begin:end].float(), dy[begin:end].float(), w[e].float()
        ia, ib = min(e, len(a) - 1), min(e, len(b) - 1)
        t = SCALE * rows @ a[ia].float().T
        u = SCALE * grad @ b[ib].float()
        y[begin:end] = rows @ fw.T + t @ b[ib].float().T
        dx[begin:end] = grad @ fw + u @ a[ia].float()
        da[ia] += u.T @ rows
        db[ib] += grad.T @ t
    return made if case.backward else made[:1]


def floor_us(case: Case, offsets: torch.Tensor) -> float:
    passes, active = 1 + case.backward, int((offsets.diff() > 0).sum())
    factor = case.rank * (case.n + case.k)
    weights = active * (case.n * case.k * passes + factor * (3 if case.backward else 1))
    moved = 2 * (weights + case.rows * (case.n + case.k) * passes + (case.rows * case.k if case.backward else 0))
    us = moved / harness.floor_tb_s() / 1e6
    if "H200" in harness.device_name():
        products = 2e-6 * case.rows * (case.n * case.k * passes + factor * (3 if case.backward else 1))
        us = max(us, products / H200_BF16_TFLOP_S)
    return us


def gate(name: str, want: torch.Tensor, got: torch.Tensor, limit: float) -> None:
    """`harness.gate` where the tensors lie: these are too large to be compared on the host."""
    error = (got.float() - want).pow_(2).mean().sqrt() / want.float().pow(2).mean().sqrt()
    if not float(error) <= limit:
        raise harness.WrongResult(f"{name}: error ratio {float(error):.2e} against a limit of {limit:.0e}")


def check(case: Case, made) -> None:
    want = reference(case, *made)
    for name, ref, got in zip(("y", "dx", "da", "db"), want, steps(case, ours)(*made)):
        gate(f"{case.key}: {name}", ref, got, LIMIT)


def measure(case: Case, rounds: int) -> dict:
    made = operands(case)
    check(case, made)
    want = reference(case, *made)[: 1 + case.backward]
    calls = {"beam_moe": steps(case, ours), "base": base_alone(case)}
    try:
        for name, ref, got in zip(("y", "dx"), want, steps(case, peer)(*made)):
            gate(f"PyTorch: {case.key}: {name}", ref, got, PEER_LIMIT)
        calls["grouped_mm"] = steps(case, peer)
    except Exception as failure:  # a peer that does not run here, or is wrong, has no time
        print(f"{case.key}: grouped_mm: {type(failure).__name__}: {failure}"[:300], file=sys.stderr)
    del want
    times = harness.time_many_us({name: [lambda c=call: c(*made)] for name, call in calls.items()}, rounds)
    us, floor = times["beam_moe"], floor_us(case, made[2])
    other = times.get("grouped_mm", {}).get("us")
    passes = 1 + case.backward
    return {
        "case": case.key,
        "shape": [case.experts, case.rows, case.n, case.k, case.rank],
        **us,
        "floor_us": round(floor, 2),
        "share": round(floor / us["us"], 4),
        "peer": None if other is None else "grouped_mm",
        "peer_us": other,
        "base_us": times["base"]["us"],
        "tflop_s": round(2e-6 * passes * case.rows * case.n * case.k / us["us"], 1),
        "config": dataclasses.asdict(
            GroupedLoRAConfig.pick(
                case.rows, case.experts, case.n, case.k, turned=False, wide=False, device=harness.device()
            )
        ),
    }


def print_rows(rows: list[dict]) -> None:
    columns = ("case", "us", "peer us", "x peer", "base us", "floor us", "share %")
    harness.print_table(
        "Grouped linear with LoRA",
        columns,
        [
            (
                r["case"],
                r["us"],
                r["peer_us"],
                None if r["peer_us"] is None else r["peer_us"] / r["us"],
                r["base_us"],
                r["floor_us"],
                100 * r["share"],
            )
            for r in rows
        ],
    )


def run_interpreter() -> int:
    wrong, table = 0, []
    for case in SMALL:
        try:
            check(case, [t.detach().float().requires_grad_(t.requires_grad) if t.is_floating_point() else t
                         for t in operands(case)])  # fmt: skip
            table.append((case.key, "right"))
        except harness.WrongResult as failure:
            wrong += 1
            table.append((case.key, str(failure)))
    harness.print_table("No GPU: small shapes in Triton's interpreter", ("case", "result"), table)
    return wrong


def product_operands(rows: int, groups: int, n: int, k: int, rank: int, turned: bool):
    """Operands of one grouped GEMM with its adapter's part; w lies with N contiguous if ``turned``, as a dgrad's."""
    device = harness.device()
    w = torch.randn(groups, *((k, n) if turned else (n, k)), device=device, dtype=BF16).mul_(k**-0.5)
    b = torch.randn(groups, *((rank, n) if turned else (n, rank)), device=device, dtype=BF16)
    t = torch.randn(rows, rank, device=device) * 0.1
    x = torch.randn(rows, k, device=device, dtype=BF16)
    return x, w.mT if turned else w, t, b.mT if turned else b, offsets_for(rows, groups)


def compile_tile(config: GroupedLoRAConfig, turned: bool) -> None:
    """In a worker: one launch on a small layer that compiles to what the sweep's layers do, for the cache on disk."""
    try:
        _project(*product_operands(512, 32, 512, 512, 32, turned), BF16, config)
        torch.cuda.synchronize()
    except Exception as failure:
        print(f"{config}: {type(failure).__name__}: {failure}"[:300], file=sys.stderr)


def time_tiles(rows: int, n: int, k: int, turned: bool) -> GroupedLoRAConfig | None:
    """Times every tile on one product, prints them beside PyTorch's grouped GEMM, and returns the fastest right one."""
    x, w, t, b, offsets = product_operands(rows, 32, n, k, 32, turned)
    want = grouped_mm(x, w.mT, offs=offsets[1:]).float()
    bounds = offsets.tolist()
    for e, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        want[begin:end] += t[begin:end] @ b[e].float().T
    times: dict[GroupedLoRAConfig, float] = {}
    for config in TILES:
        try:
            gate(str(config), want, _project(x, w, t, b, offsets, BF16, config), PEER_LIMIT)
            call = [lambda c=config: _project(x, w, t, b, offsets, BF16, c)]
            times[config] = harness.time_us(call, rounds=5, target_ms=1.0)["us"]
        except Exception as failure:  # too much shared memory, a form the compiler refuses, a wrong result
            print(f"{config}: {type(failure).__name__}: {failure}"[:300], file=sys.stderr)
    base = harness.time_us([lambda: grouped_mm(x, w.mT, offs=offsets[1:])], rounds=5, target_ms=1.0)["us"]
    ranked = sorted(times, key=times.__getitem__)
    shown = "  ".join(f"{c.bm}x{c.bn}x{c.bk} w{c.warps} s{c.stages} {times[c]:.0f}us" for c in ranked)
    print(f"{n}x{k} turned={int(turned)} rows={rows}: {shown} | grouped_mm {base:.0f}us", flush=True)
    return ranked[0] if ranked else None


def sweep(counts: list[int], save: bool) -> None:
    with harness.compile_pool() as pool:
        for future in [pool.submit(compile_tile, c, turned) for c in TILES for turned in (False, True)]:
            try:
                future.result()
            except Exception as failure:  # a worker that died: its kernel compiles later
                print(f"worker: {type(failure).__name__}: {failure}"[:300], file=sys.stderr)
    entries = []
    for layer_n, layer_k in LAYERS.values():
        for turned in (False, True):
            n, k = (layer_k, layer_n) if turned else (layer_n, layer_k)
            for rows in counts:
                best = time_tiles(rows, n, k, turned)
                torch.cuda.empty_cache()
                if best is not None:
                    shape = {"groups": 32, "n": n, "k": k, "turned": int(turned)}
                    entries.append({"shape": shape, "rows": -(-rows // 32), "config": dataclasses.asdict(best)})
    if save and entries:
        print(tuning.save(harness.device(), "grouped_lora", entries))


def main(
    rows: str = typer.Option("8192,32768", help="Rows of all experts together, by comma."),
    only: str = typer.Option("", help="Comma-separated parts; a case runs if its name holds every one."),
    rounds: int = typer.Option(9, help="Graph replays per time."),
    do_sweep: bool = typer.Option(False, "--sweep", help="Time tiles instead of the grid."),
    save: bool = typer.Option(True, help="Write results, or the tuned table of a sweep."),
) -> None:
    if not torch.cuda.is_available():
        raise typer.Exit(run_interpreter())
    counts = [int(r) for r in rows.split(",")]
    if do_sweep:
        sweep(counts, save)
        return
    grid = [
        Case(layer, n, k, r, shared=shared, backward=backward)
        for layer, (n, k) in LAYERS.items()
        for r in counts
        for shared in (False, True)
        for backward in (False, True)
    ]
    done, failures = [], 0
    for case in grid:
        if not all(part in case.key for part in only.split(",") if part):
            continue
        try:
            done.append(measure(case, rounds))
        except Exception as failure:  # the other cases still have something to say
            failures += 1
            print(f"{case.key}: {type(failure).__name__}: {failure}"[:500], file=sys.stderr)
        torch.cuda.empty_cache()
    print_rows(done)
    if save and done:
        print(harness.write_rows("grouped_lora", done))
    if failures or not done:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
