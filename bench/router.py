"""The router of a layer: fp32 logits and exact top-k, beside its floor, torch and vLLM's own kernels.

    python bench/router.py                    # Beam's and Qwen3's routers, 1 to 4096 tokens; rows to bench/results/
    python bench/router.py --sweep --only beam       # times launch forms at 1 to 64 tokens, writes the best of each to
                                                     # kernels/configs/<device>/router.json; --no-save only prints them
    python bench/router.py --sweep --tokens 128,256,1024,4096

The floor of a case is its bytes, the router's weights and the activations each read once, over the read bandwidth that
the other benches use. Launches cost more than that: ``launches`` says how many ours takes. A provider is timed only
after its ids agreed with the reference on these operands. Peers, on the same operands in the same process: torch (fp32
linear without TF32, then a chain of sigmoid and top-k operations), and what vLLM 0.33 launches (`fp32_router_gemm` up
to 32 tokens, else an fp32 linear; its fused top-k), where vLLM is installed.

Everything is timed twice. ``us``: alone, one call after another, where a call's first launch may overlap with the
choice of the call before it. ``behind_norm_us``, of the peer ``peer_behind_norm_us``: behind an RMS norm (torch's) that
makes x and lets nothing start early, as in an engine; it is the time of norm and router less that of the norm alone,
timed in turn with it.

A sweep's best form is the fastest behind the norm. A form is timed only after its logits, ids and weights were found
right, and the same bits as the first form's.

Without a GPU small cases run in Triton's interpreter against the reference; nothing is written.
"""

import contextlib
import functools
import itertools
import sys
from dataclasses import dataclass

import harness
import torch
import typer
from peers import vllm_missing

from beam_moe.kernels import router, tuning
from beam_moe.kernels.router import grouped_topk, grouped_topk_reference

LIMIT = 2e-6  # of the logits, against fp64
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


@dataclass(frozen=True)
class Model:
    experts: int
    hidden: int
    top_k: int
    n_group: int | None
    topk_group: int | None
    scoring: str
    biased: bool

    @property
    def options(self) -> dict:
        return {"top_k": self.top_k, "n_group": self.n_group, "topk_group": self.topk_group, "scoring": self.scoring}


MODELS = {
    "beam": Model(256, 5120, 8, 8, 4, "sigmoid", True),
    "qwen3-30b-a3b": Model(128, 2048, 8, None, None, "softmax", False),
}
SMALL = Model(48, 320, 4, 4, 2, "sigmoid", True)


def operands(model: Model, tokens: int, device: torch.device, seed: int) -> tuple:
    """(x, gate_weight, bias)."""
    g = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=g, device=device)

    x = randn(tokens, model.hidden).bfloat16()
    return (
        x,
        randn(model.experts, model.hidden) * model.hidden**-0.5,
        randn(model.experts) * 0.1 if model.biased else None,
    )


def ours(model: Model):
    return lambda x, weight, bias: grouped_topk(x, weight, bias, **model.options)


@contextlib.contextmanager
def true_fp32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def with_torch(model: Model):
    """What a model file says without a kernel."""

    def call(x, weight, bias):
        logits = torch.nn.functional.linear(x.float(), weight)
        scores = logits.sigmoid() if model.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if bias is None else scores + bias
        if model.n_group:
            grouped = choice.view(len(x), model.n_group, -1)
            best = grouped.topk(2, -1).values.sum(-1) if bias is not None else grouped.amax(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(model.topk_group, -1).indices, True)
            choice = grouped.masked_fill(~kept[..., None], -float("inf")).view_as(choice)
        ids = choice.topk(model.top_k, -1).indices
        weights = scores.gather(1, ids)
        return weights / (weights.sum(-1, keepdim=True) + router.EPS), ids.int()

    return call


def with_vllm(model: Model):
    """vLLM's launches for this model, or None where it has another way for it."""
    if vllm_missing() or not model.n_group:
        return None
    from vllm import _custom_ops as ops

    if not hasattr(torch.ops._C, "fp32_router_gemm"):
        return None

    def call(x, weight, bias):
        logits = ops.fp32_router_gemm(x, weight) if len(x) <= 32 else torch.nn.functional.linear(x.float(), weight)
        return ops.grouped_topk(logits, model.n_group, model.topk_group, model.top_k, True, 1.0, bias, 1)

    return call


def check(model: Model, args: tuple) -> tuple:
    """Ours: logits to fp32 rounding, and the choice that these logits demand; returns (weights, ids, logits)."""
    weights, ids, logits = grouped_topk(*args, **model.options, return_logits=True)
    exact = (args[0].double() @ args[1].double().T).float()
    harness.gate("logits", exact, logits, LIMIT)
    rows = torch.arange(0, len(ids), max(1, len(ids) // 16))
    ref_weights, ref_ids = router.route_reference(logits[rows], args[2], **model.options)
    harness.gate("topk_ids", ref_ids, ids[rows], 0.0)
    harness.gate("topk_weights", ref_weights, weights[rows], 1e-6)
    return weights, ids, logits


def agrees(model: Model, call, args: tuple) -> float:
    """Share of rows in which a peer chose the same set of experts; near ties may fall otherwise there."""
    _, ids = call(*args)
    _, want = grouped_topk(*args, **model.options)
    return float((ids.sort(1).values == want.sort(1).values).all(1).float().mean())


def floor_us(model: Model, tokens: int) -> float:
    return (model.experts * model.hidden * 4 + tokens * model.hidden * 2) / harness.floor_tb_s() / 1e6


def operand_sets(model: Model, tokens: int) -> list[tuple]:
    count = harness.copies_for(model.experts * model.hidden * 4 + tokens * model.hidden * 2)
    return [operands(model, tokens, harness.device(), seed) for seed in range(count)]


def behind_norm(sets: list[tuple], call=None) -> list:
    """Calls of an RMS norm that makes x, of hidden states of their own, each followed by ``call`` on it if given."""
    gain = torch.ones_like(sets[0][0][0])

    def run(hidden, weight, bias):
        x = torch.nn.functional.rms_norm(hidden, gain.shape, gain)
        return call(x, weight, bias) if call else x

    return [functools.partial(run, torch.randn_like(x), weight, bias) for x, weight, bias in sets]


def measure(name: str, model: Model, tokens: int, peer: bool, rounds: int) -> dict:
    sets = operand_sets(model, tokens)
    check(model, sets[0])
    calls = {"ours": ours(model), "torch": with_torch(model), "vllm": with_vllm(model)}
    if not peer:
        calls = {"ours": calls["ours"]}
    calls = {k: v for k, v in calls.items() if v}
    with true_fp32():
        same = {k: agrees(model, v, sets[0]) for k, v in calls.items() if k != "ours"}
        for k, share in same.items():
            if share < 0.98:
                raise harness.WrongResult(f"{name}/{tokens}: {k} chose other experts in {1 - share:.0%} of the rows")
        providers = {k: [lambda a=a, call=call: call(*a) for a in sets] for k, call in calls.items()}
        providers |= {f"{k}, norm": behind_norm(sets, call) for k, call in calls.items()}
        providers["norm"] = behind_norm(sets)
        times = harness.time_many_us(providers, rounds)
    behind = {k: round(times[f"{k}, norm"]["us"] - times["norm"]["us"], 2) for k in calls}
    config = tuning.lookup(harness.device(), router.OP, tokens, experts=model.experts, hidden=model.hidden)
    config = config or router.heuristic(tokens)
    floor = floor_us(model, tokens)
    peers = {k: times[k]["us"] for k in calls if k != "ours"}
    best = min(peers, key=peers.get, default=None)
    return {
        "case": f"{name}/{tokens}", "model": name, "tokens": tokens, **times["ours"], "floor_us": round(floor, 2),
        "share": round(floor / times["ours"]["us"], 3), "launches": 2, "config": config,
        "behind_norm_us": behind["ours"], "peer": best, "peer_us": peers.get(best),
        "peer_behind_norm_us": behind.get(best), "peers": peers,
    }  # fmt: skip


def candidates(tokens: int) -> dict[str, dict]:
    """Launch forms worth timing, by a short name: none changes a bit of the result."""
    forms = {}

    def add(name, block_e, block_t, warps, stages, abreast=False, split_grid=True):
        forms[f"{name} e{block_e} t{block_t} w{warps} s{stages}"] = {
            "block_e": block_e, "block_t": block_t, "abreast": abreast, "split_grid": split_grid, "warps": warps,
            "stages": stages,
        }  # fmt: skip

    if tokens <= 64:
        blocks = [b for b in (8, 16, 32, 64) if b <= max(8, 2 * tokens) and 4 * b >= tokens][-3:]
        for block_t in blocks:
            add("abreast", 16, block_t, 4, 6 if block_t < 64 else 4, abreast=True)
        add("abreast", 16, blocks[0], 4, 3, abreast=True)
        add("in turn", 16, max(16, blocks[0]), 2, 6)
        return forms
    tiles = ((16, 32, 2), (16, 64, 4), (32, 64, 4), (16, 128, 4), (32, 128, 4), (32, 128, 8))
    for tile, stages, split_grid in itertools.product(tiles, (4, 6), (True, False)):
        if (split_grid and tokens <= 1024) or (not split_grid and tokens >= 256):
            add("shares" if split_grid else "whole", *tile, stages, split_grid=split_grid)
    if tokens <= 256:
        add("abreast", 16, 64, 4, 4, abreast=True)
    return forms


def cut_for(programs: int) -> None:
    """Cut H as for ``programs`` programs: another order of sums, for a trial of the rule itself."""
    router.PROGRAMS = programs
    router.shares.cache_clear()


def compile_forms(model: Model, work: list[tuple[int, dict]], programs: int) -> None:
    """In a worker: launch each form once at its number of tokens, for the compiler's cache."""
    cut_for(programs)
    for tokens, form in work:
        with contextlib.suppress(Exception), tuning.override(router.OP, form):  # the sweep reports what does not fit
            grouped_topk(*operands(model, tokens, harness.device(), 0), **model.options)
    torch.cuda.synchronize()


def sweep(models: dict[str, Model], tokens: list[int], rounds: int, jobs: int, programs: int, save: bool) -> None:
    cut_for(programs)
    if jobs:
        work = []
        for model in models.values():
            every = {repr(f): (t, f) for t in tokens for f in candidates(t).values()}  # one compiles for all sizes
            work += [(compile_forms, model, list(every.values())[i::6], programs) for i in range(6)]
        harness.compile_ahead(jobs, work)
    entries, table = [], []
    for (name, model), count in itertools.product(models.items(), tokens):
        sets, forms, providers, first = operand_sets(model, count), candidates(count), {}, None

        def run(*args, form, model=model):
            with tuning.override(router.OP, form):
                return grouped_topk(*args, **model.options)

        for key, form in forms.items():
            try:
                with tuning.override(router.OP, form):
                    got = check(model, sets[0])
                first = first or got
                if not all(torch.equal(a, b) for a, b in zip(got, first)):
                    raise harness.WrongResult("other bits than the first form's")
            except Exception as failure:
                harness.complain(f"{name}/{count}: {key}", failure)
                continue
            call = functools.partial(run, form=form)
            providers[key] = [functools.partial(call, *a) for a in sets]
            providers[f"{key}, norm"] = behind_norm(sets, call)
        providers["norm"] = behind_norm(sets)
        times = {key: timed["us"] for key, timed in harness.time_many_us(providers, rounds, target_ms=1.0).items()}
        behind = {key: times[f"{key}, norm"] - times["norm"] for key in forms if key in times}
        ranked = sorted(behind, key=behind.get)
        table += [(f"{name}/{count}", key, round(times[key], 2), round(behind[key], 2)) for key in ranked]
        if ranked:
            shape = {"experts": model.experts, "hidden": model.hidden}
            entries.append({"shape": shape, "rows": count, "config": forms[ranked[0]]})
    harness.print_table("Router, the best form of each size first", ("case", "form", "us", "us behind a norm"), table)
    if save:
        print(tuning.save(harness.device(), router.OP, entries))


def run_interpreter() -> int:
    """Small cases in Triton's interpreter: 0 if all are right."""
    table, wrong = [], 0
    for name, tokens in (("small", 1), ("small", 5), ("small", 33)):
        args = operands(SMALL, tokens, harness.device(), tokens)
        try:
            weights, ids, logits = grouped_topk(*args, **SMALL.options, return_logits=True)
            ref = grouped_topk_reference(*args, **SMALL.options)
            harness.gate("logits", ref[2], logits, LIMIT)
            harness.gate("topk_ids", ref[1], ids, 0.0)
            table.append((f"{name}/{tokens}", "right"))
        except harness.WrongResult as failure:
            wrong += 1
            table.append((f"{name}/{tokens}", str(failure)))
    harness.print_table(
        "No GPU: a small router in Triton's interpreter against the reference", ("case", "result"), table
    )
    floors = [(name, t, floor_us(m, t)) for name, m in MODELS.items() for t in (1, 16, 256)]
    harness.print_table("Floors of an NVIDIA H200", ("model", "tokens", "us"), floors)
    return wrong


def main(
    only: str = typer.Option(
        "", help="Comma-separated parts of case names to keep, such as 'beam' or 'beam/16'; of a sweep, models."
    ),
    peer: bool = typer.Option(True, help="Time torch and vLLM beside ours."),
    rounds: int = typer.Option(15, help="Graph replays per time."),
    do_sweep: bool = typer.Option(False, "--sweep", help="Time launch forms instead."),
    tokens: str = typer.Option("1,2,4,8,16,32,64", help="Comma-separated token counts of a sweep."),
    programs: int = typer.Option(0, help="Sweep with H cut for so many programs instead; saves nothing."),
    jobs: int = typer.Option(-1, help="Processes that compile before a sweep; 0: none, -1: by the machine's cores."),
    save: bool = typer.Option(True, help="Write results, or the tuned table of a sweep."),
) -> None:
    if not torch.cuda.is_available():
        raise typer.Exit(run_interpreter())
    print(harness.fingerprint(), harness.ceilings(), flush=True)
    if do_sweep:
        models = {name: model for name, model in MODELS.items() if not only or name in only.split(",")}
        counts = [int(t) for t in tokens.split(",")]
        sweep(models, counts, rounds, jobs, programs or router.PROGRAMS, save and not programs)
        return
    rows, failures = [], 0
    for (name, model), count in itertools.product(MODELS.items(), TOKENS):
        if only and not any(part in f"{name}/{count}" for part in only.split(",")):
            continue
        try:
            rows.append(measure(name, model, count, peer, rounds))
        except harness.WrongResult as failure:
            failures += 1
            print(failure, file=sys.stderr)
    columns = ("case", "us", "behind_norm_us", "floor_us", "share", "peer", "peer_us", "peer_behind_norm_us")
    harness.print_table("Router", columns, [[row[c] for c in columns] for row in rows])
    if save and rows:
        print(harness.write_rows("router", rows))
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
