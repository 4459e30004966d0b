"""Adapters of a dense layer on a decode batch: one launch of ours beside vLLM's fill, shrink and expand.

    python bench/linear_lora.py                    # layers of Beam at TP 8 and Qwen3-30B-A3B; rows to bench/results/
    python bench/linear_lora.py --only beam --tokens 8,16

``live``: every row of the batch uses one adapter of rank 32 with factors in every slice. ``idle``: it has none in this
layer, as an adapter of experts alone, whose captured graph still holds these launches.

Everything is timed twice. ``us``: alone, one call after another. ``added_us``, of the peer ``peer_added_us``: what it
adds to the layer's own product (`torch.mm`), the time of both less that of the product alone, timed in turn with it:
a product lets nothing start early. A provider is timed only after its result agreed with the reference on these
operands. The peer is ``PunicaWrapperGPU.add_lora_linear`` of vLLM 0.33, where vLLM is installed.

Without a GPU small cases run in Triton's interpreter against the reference; nothing is written.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import harness
import torch
import typer
from peers import vllm_missing

from beam_moe.kernels.linear_lora import add_lora, add_lora_reference

RANK = 32
LIMIT = 8e-3  # of bf16 results, against fp32
PEER_LIMIT = 2e-2  # it rounds the adapter's product before it adds it
TOKENS = (1, 8, 16, 32, 64)


@dataclass(frozen=True)
class Layer:
    hidden: int
    widths: tuple[int, ...]


LAYERS = {
    "beam-1.0/tp8/qkv and gate": Layer(5120, (768, 128, 128, 768)),
    "beam-1.0/tp8/o": Layer(768, (5120,)),
    "qwen3-30b-a3b/tp1/qkv": Layer(2048, (4096, 512, 512)),
    "qwen3-30b-a3b/tp1/o": Layer(4096, (2048,)),
}
SMALL = Layer(1536, (48, 16, 80))


@dataclass
class Operands:
    """One layer's: ``out`` is what the product left, ``weight`` what it is made of."""

    out: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    ids: torch.Tensor
    ranks: torch.Tensor


def operands(layer: Layer, tokens: int, live: bool, device: torch.device, dtype: torch.dtype) -> Operands:
    def randn(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device).mul_(std)

    def factor(*shape: int, std: float) -> torch.Tensor:
        return randn(*shape, std=std) if live else torch.zeros(shape, dtype=dtype, device=device)

    n = sum(layer.widths)
    return Operands(
        out=randn(tokens, n),
        x=randn(tokens, layer.hidden),
        weight=randn(layer.hidden, n, std=layer.hidden**-0.5),
        a=[factor(1, RANK, layer.hidden, std=layer.hidden**-0.5) for _ in layer.widths],
        b=[factor(1, w, RANK, std=0.5 * RANK**-0.5) for w in layer.widths],
        ids=torch.zeros(tokens, dtype=torch.int32, device=device),
        ranks=torch.full((1, len(layer.widths)), RANK if live else 0, dtype=torch.int32, device=device),
    )


def case_of(name: str, tokens: int, live: bool) -> str:
    return f"{name}/{'live' if live else 'idle'}/t{tokens}"


def ours(o: Operands) -> Callable[[], object]:
    return lambda: add_lora(o.out, o.x, o.a, o.b, o.ids, o.ranks)


def vllm_calls(layer: Layer, tokens: int, sets: list[Operands]) -> list[Callable[[], object]]:
    """One wrapper for all layers, as in an engine; a batch that uses an adapter, whatever it has here."""
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    config = SimpleNamespace(max_loras=1, specialize_active_lora=False, fully_sharded_loras=False)
    punica = PunicaWrapperGPU(
        max_num_batched_tokens=tokens, max_batches=tokens, device=sets[0].x.device, lora_config=config
    )
    punica.token_mapping_meta.prepare_tensors(sets[0].ids.long())
    calls = []
    for o in sets:
        a, b = tuple(t[:, None] for t in o.a), tuple(t[:, None] for t in o.b)
        calls.append(lambda o=o, a=a, b=b: punica.add_lora_linear(o.out, o.x, a, b, 1.0, layer.widths))
    return calls


def check(name: str, call: Callable[[], object], o: Operands, limit: float) -> None:
    before = o.out.clone()
    call()
    want = add_lora_reference(before, o.x, o.a, o.b, o.ids, o.ranks)
    try:
        harness.gate(name, want, o.out, limit)
    finally:
        o.out.copy_(before)


def behind_product(sets: list[Operands], calls: list[Callable[[], object]] | None) -> list[Callable[[], object]]:
    def run(o: Operands, call: Callable[[], object] | None) -> None:
        torch.mm(o.x, o.weight, out=o.out)
        if call is not None:
            call()

    pairs = zip(sets, calls or [None] * len(sets), strict=True)
    return [lambda o=o, call=call: run(o, call) for o, call in pairs]


def measure(name: str, layer: Layer, tokens: int, live: bool, peer: bool, rounds: int) -> dict:
    key = case_of(name, tokens, live)
    n, slices = sum(layer.widths), len(layer.widths)
    factors = 2 * RANK * (slices * layer.hidden + n) if live else 0
    count = harness.copies_for(2 * layer.hidden * n, most=32)
    sets = [operands(layer, tokens, live, harness.device(), torch.bfloat16) for _ in range(count)]
    calls = {"ours": [ours(o) for o in sets]}
    check(f"{key}: ours", calls["ours"][0], sets[0], LIMIT)
    if peer and not vllm_missing():
        try:
            theirs = vllm_calls(layer, tokens, sets)
            check(f"{key}: vllm", theirs[0], sets[0], PEER_LIMIT)
            calls["vllm"] = theirs
        except Exception as failure:  # a peer that fails or is wrong gets no time, and costs us none of ours
            harness.complain(key, failure)
    providers = dict(calls)
    providers |= {f"{who}, product": behind_product(sets, those) for who, those in calls.items()}
    providers["product"] = behind_product(sets, None)
    times = harness.time_many_us(providers, rounds)

    def added(who: str) -> float | None:
        return round(times[f"{who}, product"]["us"] - times["product"]["us"], 2) if who in calls else None

    floor = (factors + 2 * tokens * (layer.hidden + 2 * n) * live) / harness.floor_tb_s() / 1e6
    return {
        "case": key, "layer": name, "tokens": tokens, "live": live, "rank": RANK, **times["ours"],
        "floor_us": round(floor, 2), "product_us": times["product"]["us"], "added_us": added("ours"),
        "peer": "vllm" if "vllm" in calls else None, "peer_us": times["vllm"]["us"] if "vllm" in calls else None,
        "peer_added_us": added("vllm"),
    }  # fmt: skip


def run_interpreter() -> int:
    """Small cases in Triton's interpreter: 0 if all are right."""
    table, wrong = [], 0
    for tokens, live in ((1, True), (18, True), (3, False)):
        o = operands(SMALL, tokens, live, harness.device(), torch.float16)
        key = case_of("small", tokens, live)
        try:
            check(key, ours(o), o, 2e-3)
            table.append((key, "right"))
        except harness.WrongResult as failure:
            wrong += 1
            table.append((key, str(failure)))
    harness.print_table("No GPU: a small layer in Triton's interpreter", ("case", "result"), table)
    return wrong


def main(
    only: str = typer.Option("", help="Comma-separated parts of case names to keep, such as 'beam' or 'qkv/live'."),
    tokens: str = typer.Option(",".join(map(str, TOKENS)), help="Comma-separated token counts."),
    peer: bool = typer.Option(True, help="Time vLLM beside ours, where it is installed."),
    rounds: int = typer.Option(15, help="Graph replays per time."),
    save: bool = typer.Option(True, help="Write results."),
) -> None:
    if not torch.cuda.is_available():
        raise typer.Exit(run_interpreter())
    print(harness.fingerprint(), harness.ceilings(), flush=True)
    rows, failures = [], 0
    counts = [int(t) for t in tokens.split(",")]
    for (name, layer), live, count in itertools.product(LAYERS.items(), (True, False), counts):
        if only and not any(part in case_of(name, count, live) for part in only.split(",")):
            continue
        try:
            rows.append(measure(name, layer, count, live, peer, rounds))
        except harness.WrongResult as failure:
            failures += 1
            print(failure, file=sys.stderr)
    columns = ("case", "us", "added_us", "floor_us", "product_us", "peer_us", "peer_added_us")
    harness.print_table("LoRA of dense layers", columns, [[row[c] for c in columns] for row in rows])
    if save and rows:
        print(harness.write_rows("linear_lora", rows))
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
