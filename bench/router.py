"""The router of a layer: fp32 logits and exact top-k, beside its floor, torch and vLLM's own kernels.

    python bench/router.py                    # Beam's and Qwen3's routers, 1 to 4096 tokens; rows to bench/results/
    python bench/router.py --sweep            # times launch configurations, writes kernels/configs/<device>/router.json

The floor of a case is its bytes, the router's weights and the activations each read once, over the read bandwidth that
the other benches use. Launches cost more than that: ``launches`` says how many ours takes. A provider is timed only
after its ids agreed with the reference on these operands. Peers, on the same operands in the same process: torch (fp32
linear without TF32, then a chain of sigmoid and top-k operations), and what vLLM 0.33 launches (`fp32_router_gemm` up
to 32 tokens, else an fp32 linear; its fused top-k), where vLLM is installed.

Without a GPU small cases run in Triton's interpreter against the reference; nothing is written.
"""

import contextlib
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


def check(model: Model, args: tuple) -> None:
    """Ours: logits to fp32 rounding, and the choice that these logits demand."""
    weights, ids, logits = grouped_topk(*args, **model.options, return_logits=True)
    exact = (args[0].double() @ args[1].double().T).float()
    harness.gate("logits", exact, logits, LIMIT)
    rows = torch.arange(0, len(ids), max(1, len(ids) // 16))
    ref_weights, ref_ids = router.route_reference(logits[rows], args[2], **model.options)
    harness.gate("topk_ids", ref_ids, ids[rows], 0.0)
    harness.gate("topk_weights", ref_weights, weights[rows], 1e-6)


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
        times = harness.time_many_us(providers, rounds)
    config = tuning.lookup(harness.device(), router.OP, tokens, experts=model.experts, hidden=model.hidden)
    config = config or router.heuristic(tokens)
    floor = floor_us(model, tokens)
    peers = {k: times[k]["us"] for k in times if k != "ours"}
    best = min(peers, key=peers.get, default=None)
    return {
        "case": f"{name}/{tokens}", "model": name, "tokens": tokens, **times["ours"], "floor_us": round(floor, 2),
        "share": round(floor / times["ours"]["us"], 3), "launches": 1 if config["fused"] else 2, "config": config,
        "peer": best, "peer_us": peers.get(best), "peers": peers,
    }  # fmt: skip


def candidates(tokens: int) -> list[dict]:
    """Launch configurations worth timing: none changes a bit of the result."""
    forms = []
    for block_t, warps, stages in itertools.product((16, 32, 64, 128), (2, 4, 8), (4, 8)):
        if block_t > max(16, tokens) or (block_t >= 64 and warps < 4) or (block_t == 128 and stages > 4):
            continue
        for fused, split_grid in ((True, True), (False, True), (False, False)):
            if (fused and tokens > 256) or (split_grid and tokens > 1024) or (not split_grid and tokens < 128):
                continue
            forms.append(
                {"block_t": block_t, "fused": fused, "split_grid": split_grid, "warps": warps, "stages": stages}
            )
    return forms


def compile_forms(name: str, forms: list[dict]) -> None:
    """In a worker: launch each form once, for the compiler's cache."""
    model = MODELS[name]
    args = operands(model, 64, harness.device(), 0)
    for form in forms:
        with contextlib.suppress(Exception), tuning.override(router.OP, form):  # a form that does not fit is left out
            grouped_topk(*args, **model.options)
    torch.cuda.synchronize()


def sweep(tokens: list[int], rounds: int, jobs: int, save: bool) -> None:
    entries = []
    if jobs:
        every = {repr(f): f for t in tokens for f in candidates(t)}
        with harness.compile_pool(jobs) as pool:
            work = [(name, list(every.values())[i::6]) for name in MODELS for i in range(6)]
            for future in [pool.submit(compile_forms, *w) for w in work]:
                future.result()
    for (name, model), count in itertools.product(MODELS.items(), tokens):
        sets = operand_sets(model, count)
        call, providers = ours(model), {}

        def run(a, form, call=call):
            with tuning.override(router.OP, form):
                return call(*a)

        forms = {repr(form): form for form in candidates(count)}
        for key, form in forms.items():
            try:
                with tuning.override(router.OP, form):
                    check(model, sets[0])
            except harness.WrongResult as failure:
                print(f"{name}/{count}: {key}: {failure}", file=sys.stderr)
                continue
            except Exception as failure:
                print(f"{name}/{count}: {key}: {type(failure).__name__}", file=sys.stderr)
                continue
            providers[key] = [lambda a=a, form=form: run(a, form) for a in sets]
        times = harness.time_many_us(providers, rounds, target_ms=1.0)
        ranked = sorted(times, key=lambda key: times[key]["us"])
        for fused in (True, False):
            for key in [k for k in ranked if forms[k]["fused"] is fused][:2]:
                print(f"{name}/{count}: {times[key]['us']:7.2f} us  {forms[key]}", flush=True)
        shape = {"experts": model.experts, "hidden": model.hidden}
        entries.append({"shape": shape, "rows": count, "config": forms[ranked[0]]})
        if save:
            tuning.save(harness.device(), router.OP, entries)


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
    only: str = typer.Option("", help="Comma-separated parts of case names to keep, such as 'beam' or 'beam/16'."),
    peer: bool = typer.Option(True, help="Time torch and vLLM beside ours."),
    rounds: int = typer.Option(15, help="Graph replays per time."),
    do_sweep: bool = typer.Option(False, "--sweep", help="Time launch configurations instead."),
    jobs: int = typer.Option(-1, help="Processes that compile before a sweep; 0: none, -1: by the machine's cores."),
    save: bool = typer.Option(True, help="Write results, or the tuned table of a sweep."),
) -> None:
    if not torch.cuda.is_available():
        raise typer.Exit(run_interpreter())
    print(harness.fingerprint(), harness.ceilings(), flush=True)
    if do_sweep:
        sweep(list(TOKENS), rounds, jobs, save)
        return
    rows, failures = [], 0
    for (name, model), tokens in itertools.product(MODELS.items(), TOKENS):
        if only and not any(part in f"{name}/{tokens}" for part in only.split(",")):
            continue
        try:
            rows.append(measure(name, model, tokens, peer, rounds))
        except harness.WrongResult as failure:
            failures += 1
            print(failure, file=sys.stderr)
    columns = ("case", "us", "floor_us", "share", "launches", "peer", "peer_us")
    harness.print_table("Router", columns, [[row[c] for c in columns] for row in rows])
    if save and rows:
        print(harness.write_rows("router", rows))
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
