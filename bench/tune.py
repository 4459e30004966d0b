"""Write the launch table of the fused layer for this GPU: ``kernels/configs/<device>/moe_lora.json``, and
``moe_lora_mxfp8.json`` for MXFP8 weights.

    python bench/tune.py                                  # Beam at TP 8
    python bench/tune.py --model qwen3-30b-a3b --tp 1 --tokens 8,16,32 --passes 1
    python bench/tune.py --base mxfp8 --tokens 16,32,64 --passes 1

Coordinate descent by whole-layer times as `moe_decode.py` takes them, from the fastest of the present configuration and
those that the table has for as many tokens of other shapes: each pass times every neighbour of the best configuration
so far that differs in one group of fields, then puts the groups that gained together, the largest gain first, as long
as each addition makes the layer faster. All neighbours of a pass are compiled in parallel first. A configuration whose
result leaves the reference's is discarded. The table holds one entry for each token count, saved as soon as its pass is
through; a call is served by the smallest entry that holds it.
"""

import dataclasses
import math
import sys
from collections.abc import Iterable

import harness
import torch
import typer
from moe_decode import LAYOUTS, LIMIT, PREFILL, TOKENS, Bound, Case, Layers, bind, checked, compile_case

from beam_moe.config import Shard
from beam_moe.kernels import tuning
from beam_moe.kernels.moe_lora import MoEConfig
from beam_moe.kernels.moe_lora.config import OPS

MIN_GAIN = 0.003  # smaller differences are noise between replays


class Sweep:
    """Times of configurations of one case, each taken once and only if its result is right."""

    def __init__(self, cases: list[Case], layers: Layers):
        self.cases, self.layers = cases, layers
        self.base = kernel_base(cases[0])
        per_expert = {bool(how.rank) and not how.shared_outer for how in (LAYOUTS[case.layout] for case in cases)}
        self.unseen = {name for name, taken in (("wide", False), ("lora_wide", True)) if taken not in per_expert}
        self.known: dict[MoEConfig, float] = {}
        self.bound: dict[str, Bound] = {}

    def relative(self, config: MoEConfig, start: dict[str, float]) -> float:
        """Mean time over the layouts, each relative to ``start`` (filled on the first call); infinite if it fails."""
        if config in self.known:
            return self.known[config]
        total = 0.0
        try:
            for case in self.cases:
                if case.key not in self.bound:
                    self.bound[case.key] = bind(case, self.layers, [])
                bound = self.bound[case.key]
                calls = bound.ours(config)
                checked("candidate", calls[0], bound, LIMIT)
                us = harness.time_us(calls, rounds=11, target_ms=2.0)["us"]
                total += us / start.setdefault(case.key, us) / len(self.cases)
        except Exception as failure:  # too much shared memory, a shape the compiler refuses, a wrong result
            print(f"{self.cases[0].key} {describe(config)}: {type(failure).__name__}: {failure}"[:300], file=sys.stderr)
            total = float("inf")
        self.known[config] = total
        return total

    def fastest(self, configs: Iterable[MoEConfig], start: dict[str, float]) -> MoEConfig:
        """The first one fills ``start``."""
        return min(configs, key=lambda config: self.relative(config, start))

    def neighbours(self, best: MoEConfig) -> list[MoEConfig]:
        """Candidates beside ``best``, without those of another width that no case takes: noise would choose it."""
        return [c for c in best.candidates(self.base) if not self.unseen & changed(best, c).keys()]

    def improve(self, best: MoEConfig, start: dict[str, float]) -> MoEConfig:
        """One pass over the neighbours of ``best``."""
        origin, now = best, self.relative(best, start)
        gains = []
        for candidate in self.neighbours(best):
            gain = now - self.relative(candidate, start)
            if gain > MIN_GAIN:
                gains.append((gain, changed(best, candidate)))
        for _, fields in sorted(gains, key=lambda g: -g[0]):
            if any(getattr(best, name) != getattr(origin, name) for name in fields):
                continue  # a larger gain has set one of these
            together = dataclasses.replace(best, **fields)
            then = self.relative(together, start)
            if then < now - MIN_GAIN / 2:
                best, now = together, then
        return best


def kernel_base(case: Case) -> str:
    """What `MoEConfig` calls the case's weights."""
    return "mxfp8" if case.base == "mxfp8" else "dense"


def changed(old: MoEConfig, new: MoEConfig) -> dict[str, object]:
    """The fields in which ``new`` differs, with its values."""
    ours, theirs = dataclasses.asdict(old), dataclasses.asdict(new)
    return {name: theirs[name] for name in ours if ours[name] != theirs[name]}


def describe(config: MoEConfig) -> str:
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def starts(sweep: Sweep, count: int) -> list[MoEConfig]:
    """The configuration that ``count`` tokens have now, then those of other shapes."""
    layers, shard = sweep.layers, sweep.layers.shard
    sizes = (shard.top_k, shard.num_experts, shard.hidden, shard.intermediate)
    now = MoEConfig.pick(layers.device, count, *sizes, base=sweep.base)
    found = tuning.of_other_shapes(layers.device, OPS[sweep.base], count, **shape_of(shard))
    others = (MoEConfig(**config) for config in found)
    return list(dict.fromkeys((now, *others)))


def shape_of(shard: Shard) -> dict[str, int]:
    """The key of its entries in the table."""
    return {
        "top_k": shard.top_k,
        "experts": shard.num_experts,
        "hidden": shard.hidden,
        "intermediate": shard.intermediate,
    }


def compile_pass(pool, sweeps: Iterable[tuple[Sweep, Iterable[MoEConfig]]]) -> None:
    """Compile what a sweep is about to try, all processes busy."""
    work = []
    for sweep, wanted in sweeps:
        configs = [c for c in wanted if c not in sweep.known]
        for first in range(0, len(configs), 6):
            work += [(case, False, configs[first : first + 6]) for case in sweep.cases]
    for future in [pool.submit(compile_case, *item) for item in work]:
        future.result()  # what failed here fails again, with its reason, when it is timed


def main(
    model: str = typer.Option("beam-1.0", help="A name in beam_moe.config.MODELS."),
    tp: int = typer.Option(8, help="Tensor parallelism of the experts."),
    base: str = typer.Option("bf16", help="bf16 or mxfp8: the experts' weights."),
    tokens: str = typer.Option(
        ",".join(map(str, (*TOKENS, *PREFILL))), help="Comma-separated token counts, one entry each."
    ),
    layouts: str = typer.Option(
        "per_expert_r32", help="Layouts of moe_decode.py whose mean time counts; `wide` is tuned by none, say."
    ),
    passes: int = typer.Option(2, help="Rounds of neighbours."),
    jobs: int = typer.Option(-1, help="Processes that compile; -1: by the machine's cores."),
    save: bool = typer.Option(True, help="Write the table; otherwise only print it."),
) -> None:
    if not torch.cuda.is_available():
        print("tune.py measures launches: it needs a GPU", file=sys.stderr)
        raise typer.Exit(2)
    counts = numbers(tokens)
    layers = Layers(Case(model, tp, base, "none", "uniform", 1), harness.device(), torch.bfloat16, max(counts))
    shape = shape_of(layers.shard)
    sweeps, best, start = {}, {}, {}
    for count in counts:
        cases = [Case(model, tp, base, layout, "uniform", count) for layout in layouts.split(",")]
        sweeps[count], start[count] = Sweep(cases, layers), {}
    firsts = {count: starts(sweeps[count], count) for count in counts}
    with harness.compile_pool(jobs) as pool:
        compile_pass(pool, ((sweeps[count], firsts[count]) for count in counts))
        for count in counts:
            best[count] = sweeps[count].fastest(firsts[count], start[count])
        for _ in range(passes):
            compile_pass(pool, ((sweeps[n], (best[n], *sweeps[n].neighbours(best[n]))) for n in counts))
            for count in counts:
                best[count] = sweeps[count].improve(best[count], start[count])
                relative = sweeps[count].relative(best[count], start[count])
                if math.isinf(relative):
                    print(f"{count:5} tokens: no configuration gave a right result", file=sys.stderr)
                    continue
                times = ", ".join(f"{us * relative:.1f} of {us:.1f} us" for us in start[count].values())
                print(f"{count:5} tokens: {times}: {describe(best[count])}", flush=True)
                if save:
                    entry = {"shape": shape, "rows": count, "config": dataclasses.asdict(best[count])}
                    tuning.save(None, OPS[sweeps[count].base], [entry])


if __name__ == "__main__":
    typer.run(main)
