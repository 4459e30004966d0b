"""One decode step of one MoE layer with LoRA adapters on its experts: time, read floor, and vLLM's kernels beside it.

    python bench/moe_decode.py                        # the whole grid; on a GPU rows go to bench/results/<device>/
    python bench/moe_decode.py --quick                # Beam's share at TP 8: no adapter, per-expert, shared-outer
    python bench/moe_decode.py --only beam-1.0/tp8 --tokens 16,32 --layouts none,per_expert_r32
    python bench/moe_decode.py --sections launches    # time by launch, for the stacked plot

The time is `fused_moe` from ``topk_ids`` to ``out``, its plan included, with the launch table as shipped, inside a CUDA
graph over rotated layers. The floor counts each distinct expert's weights once and each distinct (slot, expert) adapter
factor once at its live rank, read at the larger of 4.42 TB/s and the bandwidth that this process measures. The tax is
the time over the faster of our and vLLM's time without any adapter, minus one. The peer is vLLM's own expert kernels on
the same operands in the same process, where vLLM is installed.

Without a GPU a small layer of the same structure runs in Triton's interpreter against the reference, and the floors of
the H200 are printed; nothing is written.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import harness
import torch
import typer

from beam_moe.config import MODELS, BeamMoEConfig, Shard
from beam_moe.kernels.moe_lora import ExpertLoRA, MoEConfig, Workspace, fused_moe, fused_moe_reference, moe_workspace
from beam_moe.kernels.moe_lora.workspace import CHUNK, Shape, bytes_needed
from beam_moe.kernels.mxfp8 import MXFP8Tensor, prepare

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FEW_TOKENS = (1, 4, 16, 64, 256)
PREFILL = (1024, 4096)
LIMIT, PEER_LIMIT = 5e-3, 2e-2  # error ratios in bf16; vLLM rounds gate, up, their product, each expert's row and delta
GATE_ROWS = 6

SMALL = MODELS["beam-1.0"] | {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}


@dataclass(frozen=True)
class Layout:
    """How the adapters of a case lie: ``bank_rank`` columns of which ``rank`` are live, in ``slots`` slots."""

    rank: int = 0
    bank_rank: int = 0
    slots: int = 1
    shared_outer: bool = False
    one_a: bool = False
    bare_rows: bool = False

    @property
    def name(self) -> str:
        """What `Shard.floor_bytes` calls it."""
        return "shared_outer" if self.shared_outer else "one_a" if self.one_a else "per_expert"


LAYOUTS = {
    "none": Layout(),
    "per_expert_r4": Layout(4, 4),
    "per_expert_r16": Layout(16, 16),
    "per_expert_r32": Layout(32, 32),
    "per_expert_r64": Layout(64, 64),
    "shared_outer_r32": Layout(32, 32, shared_outer=True),
    "one_a_r32": Layout(32, 32, one_a=True),
    "per_expert_r4_of_32": Layout(4, 32),
    "four_slots_r32": Layout(32, 32, slots=4, bare_rows=True),
}
HEADLINE = ("none", "per_expert_r32", "shared_outer_r32")


@dataclass(frozen=True)
class Case:
    model: str
    tp: int
    base: str
    layout: str
    routing: str
    tokens: int

    @property
    def group(self) -> str:
        return f"{self.model}/tp{self.tp}/{self.base}"

    @property
    def key(self) -> str:
        return f"{self.group}/{self.layout}/{self.routing}/t{self.tokens}"


def grid() -> Iterator[Case]:
    """The published grid: Beam's share at TP 8 in full, its neighbours where they differ, and prefill."""
    for tokens in TOKENS:
        for layout in LAYOUTS:
            yield Case("beam-1.0", 8, "bf16", layout, "uniform", tokens)
    for routing in ("zipf", "hot8"):
        for tokens in TOKENS:
            for layout in ("none", "per_expert_r32"):
                yield Case("beam-1.0", 8, "bf16", layout, routing, tokens)
    for model, tp in (("qwen3-30b-a3b", 1), ("beam-1.0", 4), ("beam-1.0", 2), ("beam-1.0", 1)):
        for tokens in TOKENS if model != "beam-1.0" else FEW_TOKENS:
            for layout in HEADLINE:
                yield Case(model, tp, "bf16", layout, "uniform", tokens)
    for model, tp in (("beam-1.0", 8), ("qwen3-30b-a3b", 1)):
        for tokens in PREFILL:
            for layout in HEADLINE:
                yield Case(model, tp, "bf16", layout, "uniform", tokens)


def mxfp8_grid() -> Iterator[Case]:
    """The headline layouts on an MXFP8 base."""
    for tokens in (*TOKENS, *PREFILL):
        for layout in HEADLINE:
            yield Case("beam-1.0", 8, "mxfp8", layout, "uniform", tokens)


# --- routing and floors


def route(routing: str, tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """Expert ids i32 (tokens, top_k) on the CPU, without repeats in a row; the same in every process.

    ``uniform``: every expert alike. ``zipf``: the k-th most popular expert has weight 1 / k. ``hot8``: every token on
    the same top_k experts.
    """
    g = torch.Generator().manual_seed(1000 + tokens)
    noise = -torch.log(-torch.log(torch.rand(tokens, experts, generator=g).clamp(1e-9, 1 - 1e-7)))
    if routing == "zipf":
        popularity = 1.0 / torch.arange(1, experts + 1, dtype=torch.float32)
        noise = noise + popularity[torch.randperm(experts, generator=g)].log()
    elif routing == "hot8":
        noise = noise[:1].expand(tokens, -1)
    elif routing != "uniform":
        raise ValueError(f"route: routing must be uniform, zipf or hot8, got {routing!r}")
    return noise.topk(top_k, dim=-1).indices.int()


def adapter_ids(layout: Layout, tokens: int) -> torch.Tensor:
    """Slots i32 (tokens,): slot 0 throughout, or the slots in turn with every (slots + 1)-th row bare."""
    if not layout.bare_rows:
        return torch.zeros(tokens, dtype=torch.int32)
    turn = torch.arange(1, tokens + 1) % (layout.slots + 1)
    return (turn - 1).int()


def floor_bytes(case: Case, shard: Shard, ids: torch.Tensor) -> tuple[int, int, int]:
    """(bytes with adapters, bytes without, distinct experts) of one call with routing ``ids`` (tokens, top_k)."""
    layout, distinct = LAYOUTS[case.layout], ids.unique().numel()
    base = shard.floor_bytes(case.tokens, distinct, base=case.base)
    if not layout.rank:
        return base, base, distinct
    slots = adapter_ids(layout, case.tokens).long()
    served = slots >= 0
    pairs = (slots[:, None] * shard.num_experts + ids.long())[served].unique().numel()
    with_adapters = shard.floor_bytes(
        case.tokens,
        distinct,
        rank=layout.rank,
        layout=layout.name,
        base=case.base,
        distinct_pairs=pairs,
        slots=slots[served].unique().numel(),
    )
    return with_adapters, base, distinct


# --- operands


def shard_of(model: str, tp: int) -> Shard:
    return BeamMoEConfig.from_hf(SMALL if model == "small" else model).shard(tp=tp)


def randn(*sizes: int, std: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(sizes, dtype=dtype, device=device).mul_(std)


def weight(experts: int, rows: int, cols: int, base: str, dtype: torch.dtype, device: torch.device, filled=True):
    """A random (experts, rows, cols) weight of standard deviation cols ** -0.5: dense, or MXFP8 (zeros if unfilled)."""
    if base != "mxfp8":
        return randn(experts, rows, cols, std=cols**-0.5, dtype=dtype, device=device)
    data = torch.zeros(experts, rows, cols, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    for e in range(experts if filled else 0):  # an expert at a time: the source is twice the size
        data[e] = randn(rows, cols, std=64.0, dtype=dtype, device=device).clamp_(-448, 448).to(data.dtype)
    middle = 127 - round(math.log2(64 * cols**0.5))
    scale = torch.randint(middle - 1, middle + 2, (experts, rows, cols // 32), dtype=torch.uint8, device=device)
    return prepare(MXFP8Tensor(data, scale, axis=-1))


def bank(layout: Layout, shard: Shard, dtype: torch.dtype, device: torch.device) -> ExpertLoRA:
    """Random factors whose delta is of the size of the base's product; columns past the live rank are zero."""
    h, i, e, r, slots = shard.hidden, shard.intermediate, shard.num_experts, layout.bank_rank, layout.slots
    outer = 1 if layout.shared_outer else e
    w13_a = randn(slots, outer, 1 if layout.one_a else 2, r, h, std=h**-0.5, dtype=dtype, device=device)
    w13_b = randn(slots, e, 2, i, r, std=0.5 * r**-0.5, dtype=dtype, device=device)
    w2_a = randn(slots, e, r, i, std=i**-0.5, dtype=dtype, device=device)
    w2_b = randn(slots, outer, h, r, std=0.5 * r**-0.5, dtype=dtype, device=device)
    if layout.rank < r:
        w13_a[..., layout.rank :, :], w13_b[..., layout.rank :] = 0, 0
        w2_a[..., layout.rank :, :], w2_b[..., layout.rank :] = 0, 0
    ranks = torch.full((slots,), layout.rank, dtype=torch.int32, device=device)
    return ExpertLoRA(w13_a, w13_b, w2_a, w2_b, ranks=ranks)


class Layers:
    """The weights of one (model, TP, base), in as many layers as rotate through L2 and fit; banks on demand."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype, max_tokens: int, timed: bool = True):
        self.device, self.dtype = device, dtype
        shard, copies = shard_of(case.model, case.tp), 1
        if device.type == "cuda" and timed:
            budget = 0.6 * torch.cuda.mem_get_info()[0]
            while shard.layer_bytes(case.base) > budget:
                shard = shard.config.with_(num_experts=shard.num_experts // 2).shard(tp=case.tp)
            wanted = max(3, harness.copies_for(shard.top_k * shard.expert_bytes(case.base)))
            copies = max(1, min(wanted, int(budget / shard.layer_bytes(case.base))))
        self.shard = shard
        e, h, i = shard.num_experts, shard.hidden, shard.intermediate

        def make(rows: int, cols: int) -> list:
            if timed or case.base == "mxfp8":
                return [weight(e, rows, cols, case.base, dtype, device, filled=timed) for _ in range(copies)]
            # only compiled for, by many processes at once: one expert's memory stands for all
            return [weight(1, rows, cols, case.base, dtype, device).expand(e, -1, -1)]

        self.w13, self.w2 = make(2 * i, h), make(h, i)
        self.workspace = moe_workspace(max_tokens, shard.top_k, shard, 64, device)
        self._banks: dict[str, list[ExpertLoRA]] = {}
        self._room: Workspace | None = None

    def room(self, tokens: int, config: MoEConfig) -> Workspace:
        """One workspace for any configuration: what launches hand on lies where it lay the last time, as in engines."""
        shard = self.shard
        shape = Shape(min(tokens, CHUNK), shard.top_k, shard.num_experts, shard.hidden, shard.intermediate, 64)
        need = bytes_needed(shape, config)
        if self._room is None or self._room.buffer.numel() < need:
            self._room = Workspace(
                torch.empty(need * 2, dtype=torch.uint8, device=self.device), tokens, shard.top_k, 64
            )
        return self._room

    def banks(self, layout: str) -> list[ExpertLoRA | None]:
        if not LAYOUTS[layout].rank:
            return [None] * len(self.w13)
        if layout not in self._banks:
            self._banks = {}  # one layout at a time: cases come in any order, memory does not
            self._banks[layout] = [bank(LAYOUTS[layout], self.shard, self.dtype, self.device) for _ in self.w13]
        return self._banks[layout]


# --- one case


@dataclass
class Bound:
    """Everything one case needs to be checked and timed: the same operands for our calls and for the peer's."""

    case: Case
    ids: torch.Tensor  # on the CPU
    out: torch.Tensor
    ours: Callable[..., list]  # our calls, by launch configuration; without one as shipped
    peer: list
    reference: torch.Tensor | None  # of `rows`
    rows: torch.Tensor


def subset(value, experts: torch.Tensor):
    """The given experts of a weight, so that a reference touches no more of it than it must."""
    if isinstance(value, torch.Tensor):
        return value[experts]
    data = value.data.view(torch.uint8)[experts].view(value.data.dtype)
    return replace(value, data=data, scale=value.scale[experts], rows=None)


def subset_bank(lora: ExpertLoRA, experts: torch.Tensor) -> ExpertLoRA:
    gate_a, up_a = lora.gate_up_a
    if not lora.shared_a:
        gate_a, up_a = gate_a[:, experts], up_a[:, experts]
    w13_b = tuple(b[:, experts] for b in lora.gate_up_b)
    w2_b = lora.w2_b if lora.shared_b else lora.w2_b[:, experts]
    return ExpertLoRA((gate_a, up_a), w13_b, lora.w2_a[:, experts], w2_b, ranks=lora.ranks, enabled=lora.enabled)


def bind(case: Case, layers: Layers, peers: list, *, reference: bool = True) -> Bound:
    """Operands of ``case``, calls over every layer for each provider, and the reference of a few rows of layer 0."""
    device, dtype, shard = layers.device, layers.dtype, layers.shard
    torch.manual_seed(case.tokens)
    cpu_ids = route(case.routing, case.tokens, shard.num_experts, shard.top_k)
    ids = cpu_ids.to(device)
    weights = torch.softmax(torch.randn(case.tokens, shard.top_k, device=device), -1)
    x = randn(case.tokens, shard.hidden, std=1.0, dtype=dtype, device=device)
    out = torch.full_like(x, float("nan"))
    banks = layers.banks(case.layout)
    slots = adapter_ids(LAYOUTS[case.layout], case.tokens).to(device) if LAYOUTS[case.layout].rank else None

    def ours(config: MoEConfig | None = None) -> list[Callable[[], torch.Tensor]]:
        workspace = layers.room(case.tokens, config) if config else layers.workspace
        common = {"lora_ids": slots, "out": out, "workspace": workspace, "config": config}
        return [
            partial(fused_moe, x, w13, w2, weights, ids, lora=lora, **common)
            for w13, w2, lora in zip(layers.w13, layers.w2, banks)
        ]

    rows = torch.linspace(0, case.tokens - 1, min(case.tokens, GATE_ROWS)).round().long().unique().to(device)
    wanted = None
    if reference:
        experts, local = ids[rows].unique(return_inverse=True)
        wanted = fused_moe_reference(
            x[rows],
            subset(layers.w13[0], experts),
            subset(layers.w2[0], experts),
            weights[rows],
            local.int(),
            lora=None if banks[0] is None else subset_bank(banks[0], experts),
            lora_ids=None if slots is None else slots[rows],
        )
    return Bound(
        case=case,
        ids=cpu_ids,
        out=out,
        ours=ours,
        peer=[
            peer.bind(x, weights, ids, lora=bank, lora_ids=slots, out=out)
            for peer, bank in zip(peers, banks, strict=bool(peers))
        ],
        reference=wanted,
        rows=rows,
    )


def checked(name: str, call, bound: Bound, limit: float) -> tuple[float, torch.Tensor]:
    """(error ratio of the sampled rows, the whole result) of one call; raises `harness.WrongResult`."""
    bound.out.fill_(float("nan"))
    call()
    result = bound.out.clone()
    if not torch.isfinite(result).all():
        raise harness.WrongResult(f"{name} on {bound.case.key}: rows left unwritten or not finite")
    return harness.gate(f"{name} on {bound.case.key}", bound.reference, result[bound.rows], limit), result


def measure(case: Case, layers: Layers, peers: list, rounds: int, limit: float = LIMIT) -> dict:
    """The row of one case; raises `harness.WrongResult` when our result is wrong."""
    bound = bind(case, layers, peers)
    error, result = checked("beam_moe", bound.ours()[0], bound, limit)
    providers = {"beam_moe": bound.ours()}
    peer_error = None
    if bound.peer:
        try:
            peer_error, peer_result = checked("vllm", bound.peer[0], bound, PEER_LIMIT)
            harness.gate(f"all rows of beam_moe against vllm on {case.key}", peer_result, result, PEER_LIMIT)
            providers["vllm"] = bound.peer
        except Exception as failure:  # a peer that fails or is wrong gets no time, and costs us none of ours
            print(f"peer left out on {case.key}: {type(failure).__name__}: {failure}", file=sys.stderr)
    times = harness.time_many_us(providers, rounds=rounds)
    with_lora, base, distinct = floor_bytes(case, layers.shard, bound.ids)
    tb_s = harness.floor_tb_s()
    layout, us = LAYOUTS[case.layout], times["beam_moe"]["us"]
    floor_us = with_lora / tb_s / 1e6
    row = {
        "case": case.key,
        "model": case.model,
        "tp": case.tp,
        "layout": case.layout,
        "rank": layout.rank,
        "slots": layout.slots if layout.rank else 0,
        "base": case.base,
        "routing": case.routing,
        "tokens": case.tokens,
        **times["beam_moe"],
        "floor_us": round(floor_us, 2),
        "floor_bytes": with_lora,
        "floor_base_us": round(base / tb_s / 1e6, 2),
        "read_tb_s": harness.ceilings().get("read_tb_s"),
        "floor_tb_s": tb_s,
        "distinct_experts": distinct,
        "experts": layers.shard.num_experts,
        "share": round(floor_us / us, 4),
        "error": float(f"{error:.2e}"),
        "peer": peers[0].name if "vllm" in providers else None,
        "peer_us": times["vllm"]["us"] if "vllm" in providers else None,
    }
    if "vllm" in providers:
        row |= {"peer_us_p20": times["vllm"]["us_p20"], "peer_us_p80": times["vllm"]["us_p80"]}
        row |= {"peer_error": float(f"{peer_error:.2e}")}
    return row


def add_tax(rows: Sequence[dict], known: Sequence[dict] = ()) -> None:
    """``without_us`` and ``tax`` of each row with adapters: against the faster of our and vLLM's time without any.

    That is of the same run, or where it timed no call without adapters, of those on record (``known``).
    """
    bare = {}
    for row in (*known, *rows):
        if not row["rank"]:
            bare[row["model"], row["tp"], row["base"], row["routing"], row["tokens"]] = row
    for row in rows:
        other = bare.get((row["model"], row["tp"], row["base"], row["routing"], row["tokens"]))
        if row["rank"] and other:
            without = min(t for t in (other["us"], other["peer_us"]) if t is not None)
            row["without_us"] = without
            row["without_share"] = round(other["floor_us"] / without, 4)
            row["tax"] = round(row["us"] / without - 1, 4)


# --- runs


def in_order(cases: list[Case]) -> list[Case]:
    """Group by group, so that weights are made once; within a group layout by layout, so that banks are."""
    groups = list(dict.fromkeys(case.group for case in cases))
    layouts, routings = list(LAYOUTS), ["uniform", "zipf", "hot8"]
    return sorted(
        cases,
        key=lambda c: (groups.index(c.group), layouts.index(c.layout), routings.index(c.routing), c.tokens),
    )


def vllm_missing() -> str | None:
    import peers

    return peers.vllm_missing()


def vllm_layers(layers: Layers, max_tokens: int) -> list:
    import peers

    shard = layers.shard
    experts = peers.VllmExperts(
        shard.num_experts,
        shard.top_k,
        shard.hidden,
        shard.intermediate,
        max_tokens=max_tokens,
        dtype=layers.dtype,
        device=layers.device,
    )
    return [experts.layer(w13, w2) for w13, w2 in zip(layers.w13, layers.w2)]


def groups_of(cases: list[Case]) -> Iterator[tuple[str, list[Case]]]:
    for group in dict.fromkeys(case.group for case in cases):
        yield group, [case for case in cases if case.group == group]


def run_grid(cases: list[Case], peer: bool, rounds: int, save: bool) -> tuple[list[dict], list[str]]:
    """Rows of all cases, each written as it is there, and the messages of those that failed."""
    from rich.progress import Progress

    rows: list[dict] = []
    failures: list[str] = []
    known = harness.read_rows(harness.results_path("moe_decode"))
    with Progress(disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("cases", total=len(cases))
        for group, members in groups_of(in_order(cases)):
            most = max(case.tokens for case in members)
            layers = Layers(members[0], harness.device(), torch.bfloat16, most)
            peers = vllm_layers(layers, most) if peer else []
            done = []
            for case in members:
                progress.update(task, description=case.key, advance=1)
                try:
                    done.append(measure(case, layers, peers, rounds))
                except Exception as failure:  # one bad case must not cost the others their place on the machine
                    failures.append(f"{case.key}: {type(failure).__name__}: {failure}")
                    print(failures[-1], file=sys.stderr, flush=True)
                    continue
                add_tax(done, known)
                if save:  # a run that is cut short keeps what it measured
                    harness.write_rows("moe_decode", done[-1:])
            rows += done
            print_rows(group, done)
            del layers, peers
            torch.cuda.empty_cache()
    return rows, failures


def print_rows(title: str, rows: list[dict]) -> None:
    columns = ("layout", "routing", "tokens", "experts", "us", "floor us", "share", "tax", "vLLM us", "x vLLM", "error")
    harness.print_table(
        title,
        columns,
        (
            (
                row["layout"],
                row["routing"],
                row["tokens"],
                row["distinct_experts"],
                row["us"],
                row["floor_us"],
                f"{row['share']:.1%}",
                f"{row['tax']:.1%}" if "tax" in row else None,
                row["peer_us"],
                row["peer_us"] / row["us"] if row["peer_us"] else None,
                f"{row['error']:.1e}",
            )
            for row in rows
        ),
    )


def run_launches(cases: list[Case], peer: bool, save: bool) -> None:
    """Kernel time by launch, ours and the peer's, of each case, written as it is there."""
    for _, members in groups_of(in_order(cases)):
        most = max(case.tokens for case in members)
        layers = Layers(members[0], harness.device(), torch.bfloat16, most)
        peers = vllm_layers(layers, most) if peer else []
        for case in members:
            bound = bind(case, layers, peers)
            checked("beam_moe", bound.ours()[0], bound, LIMIT)
            row = {"case": case.key, "layout": case.layout, "tokens": case.tokens}
            row |= {"us": harness.time_us(bound.ours())["us"], "launches": harness.kernel_us(bound.ours())}
            if bound.peer:
                row |= {"peer_us": harness.time_us(bound.peer)["us"], "peer_launches": harness.kernel_us(bound.peer)}
            harness.print_table(case.key, ("launch", "us"), row["launches"].items())
            if save:
                harness.write_rows("moe_decode_launches", [row])


_compiled: dict[str, tuple[Layers, list]] = {}  # the operands of one group, kept between a worker's cases


def compile_case(case: Case, peer: bool, configs: Sequence[MoEConfig | None] = (None,)) -> str:
    """In a worker: launch ``case`` once with each configuration, for the compiler's cache; what failed, as text."""
    if case.group not in _compiled:
        _compiled.clear()
        torch.cuda.empty_cache()
        layers = Layers(case, harness.device(), torch.bfloat16, max(*PREFILL, case.tokens), timed=False)
        _compiled[case.group] = layers, vllm_layers(layers, max(PREFILL)) if peer and not vllm_missing() else []
    layers, peers = _compiled[case.group]
    failed = ""
    bound = bind(case, layers, peers, reference=False)
    for config in configs:
        for call in bound.ours(config)[:1] + bound.peer[:1]:
            try:
                call()
                torch.cuda.synchronize()
            except Exception as failure:
                failed += f"{case.key} {config or ''}: {type(failure).__name__}: {failure}\n"
    return failed


def compile_ahead(cases: list[Case], jobs: int, peer: bool) -> None:
    """Run every case once in other processes; what fails there fails again, with its reason, when it is timed."""
    with harness.compile_pool(jobs) as pool:
        futures = [pool.submit(compile_case, case, peer) for case in cases]
        if peer:
            vllm_missing()  # import vLLM here while the others compile
        for future in futures:
            try:
                if failed := future.result():
                    print(failed, file=sys.stderr)
            except Exception as failure:  # a worker that died: its kernels compile later, one by one
                print(f"compiling ahead: {type(failure).__name__}: {failure}", file=sys.stderr)


def small_cases() -> list[Case]:
    dense = [
        Case("small", 1, "bf16", layout, routing, tokens)
        for layout in LAYOUTS
        for routing, tokens in (("uniform", 1), ("zipf", 6))
    ]
    return dense + [Case("small", 1, "mxfp8", layout, "zipf", 6) for layout in HEADLINE]


def run_interpreter() -> int:
    """The layer's kernels in Triton's interpreter on a small Beam, checked; then the H200's floors; counts failures."""
    wrong = 0
    table = []
    for _, cases in groups_of(small_cases()):
        layers = Layers(cases[0], harness.device(), torch.float16, max(case.tokens for case in cases))
        for case in cases:
            bound = bind(case, layers, [])
            what = (case.base, case.layout, case.routing, case.tokens)
            try:
                error, _ = checked("beam_moe", bound.ours()[0], bound, LIMIT)
                table.append((*what, f"{error:.1e}", "right"))
            except harness.WrongResult as failure:
                wrong += 1
                table.append((*what, None, str(failure)))
    title = "No GPU: a small Beam layer in Triton's interpreter, fp16 in place of bf16, against the fp32 reference"
    harness.print_table(title, ("base", "layout", "routing", "tokens", "error", f"limit {LIMIT:.0e}"), table)
    print_floors()
    return wrong


def print_floors() -> None:
    """Read floors of one layer on an H200: microseconds, by layout and tokens."""
    for model, tp, base in (("beam-1.0", 8, "bf16"), ("beam-1.0", 8, "mxfp8"), ("qwen3-30b-a3b", 1, "bf16")):
        shard = shard_of(model, tp)
        lines = []
        for layout in LAYOUTS:
            line: list[object] = [layout]
            for tokens in TOKENS:
                case = Case(model, tp, base, layout, "uniform", tokens)
                ids = route("uniform", tokens, shard.num_experts, shard.top_k)
                line.append(floor_bytes(case, shard, ids)[0] / harness.H200_READ_TB_S / 1e6)
            lines.append(line)
        title = f"Read floor of {model} at TP {tp}, {base}, one layer on an H200 at 4.42 TB/s: us by tokens"
        harness.print_table(title, ("layout", *map(str, TOKENS)), lines)


def main(
    quick: bool = typer.Option(False, help="Beam at TP 8 only: no adapter, per-expert and shared-outer of rank 32."),
    only: str = typer.Option("", help="Comma-separated prefixes of cases: model/tp/base/layout/routing/tokens."),
    tokens: str = typer.Option("", help="Comma-separated token counts to keep."),
    mxfp8: bool = typer.Option(False, help="The MXFP8 base too."),
    layouts: str = typer.Option("", help=f"Comma-separated layouts to keep: {', '.join(LAYOUTS)}."),
    sections: str = typer.Option("grid", help="Comma-separated: grid, launches."),
    peer: bool = typer.Option(True, help="Time vLLM's kernels beside ours where vLLM is installed."),
    rounds: int = typer.Option(15, help="Graph replays per time."),
    jobs: int = typer.Option(
        -1, help="Processes that compile before anything is timed; 0: none, -1: by the machine's cores."
    ),
    save: bool = typer.Option(True, help="Write bench/results/<device>/moe_decode.json."),
) -> None:
    if not torch.cuda.is_available():
        raise typer.Exit(run_interpreter())
    cases = [*grid(), *(mxfp8_grid() if mxfp8 else ())]
    if quick:
        cases = [c for c in cases if c.group == "beam-1.0/tp8/bf16" and c.layout in HEADLINE and c.routing == "uniform"]
    if only:
        cases = [c for c in cases if c.key.startswith(tuple(only.split(",")))]
    if tokens:
        cases = [c for c in cases if c.tokens in map(int, tokens.split(","))]
    if layouts:
        cases = [c for c in cases if c.layout in layouts.split(",")]
    if not cases:
        raise typer.BadParameter("no case of the grid is left")
    if jobs and len(cases) > 4:
        compile_ahead(in_order(cases), jobs, peer)
    if peer and (reason := vllm_missing()):
        peer = False
        print(f"no peer: {reason}")
    failures: list[str] = []
    if "grid" in sections.split(","):
        print(harness.fingerprint(), harness.ceilings(), flush=True)
        _, failures = run_grid(cases, peer, rounds, save)
    if "launches" in sections.split(","):
        groups = ("beam-1.0/tp8/bf16", "beam-1.0/tp8/mxfp8")
        run_launches(
            [c for c in cases if c.group in groups and c.layout in HEADLINE and c.routing == "uniform"], peer, save
        )
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
