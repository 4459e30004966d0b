"""Rewrite the measured tables of README.md from the committed results, so that no number there is typed by hand.

    python bench/readme_table.py            # rewrite
    python bench/readme_table.py --check    # fail if README.md is not what the results say

A table stands between ``<!-- results NAME -->`` and ``<!-- /results -->``; NAME is a key of `TABLES`.
"""

import argparse
import re
from collections.abc import Callable, Iterable

import harness
import rl_loop

DEVICE = "nvidia_h200"
README = harness.ROOT / "README.md"
LAYERS = 16  # of the engine's rows: with fewer a step of 8 requests waits for the host
NONE = "*No measurement is committed yet.*"
SECTION = re.compile(r"(<!-- results (\w+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def rows_of(bench: str, **wanted: object) -> list[dict]:
    rows = harness.read_rows(harness.ROOT / "bench" / "results" / DEVICE / f"{bench}.json")
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def table(columns: Iterable[str], lines: Iterable[Iterable[str]], source: list[dict]) -> str:
    columns = list(columns)
    out = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    out += ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*out, "", provenance(source)])


def provenance(rows: list[dict]) -> str:
    """Device, versions and commits of the rows, which may come from several runs."""
    versions = rows[0]["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("driver", "torch", "triton", "vllm") if name in versions)
    commits = ", ".join(dict.fromkeys(f"`{cut(row['commit'])}`" for row in rows))
    reads = sorted({row["read_tb_s"] for row in rows if row.get("read_tb_s")})
    read = f"; read bandwidth {' to '.join(map(str, dict.fromkeys((reads[0], reads[-1]))))} TB/s" if reads else ""
    return f"{rows[0]['device']}; {named}{read}; commit {commits}, {max(row['date'] for row in rows)}."


def cut(commit: str) -> str:
    """Ten digits of a hash, and that the sources were not all of that commit where they were not."""
    return commit[:10] + "-dirty" * commit.endswith("-dirty")


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def decode(model: str, tp: int, base: str) -> str:
    """By tokens: without adapter, per-expert and shared-outer, each with time, share of its floor, vLLM's time."""
    layouts = {"none": "no adapter", "per_expert_r32": "per-expert r 32", "shared_outer_r32": "shared-outer r 32"}
    found = {
        (row["layout"], row["tokens"]): row
        for row in rows_of("moe_decode", model=model, tp=tp, base=base, routing="uniform")
        if row["layout"] in layouts and row["tokens"] <= 256
    }
    if not found:
        return NONE
    columns = ["tokens", "experts read"]
    for layout, label in layouts.items():
        columns += [f"{label}, us", "share", *([] if layout == "none" else ["tax"]), "vLLM, us"]
    lines = []
    for tokens in sorted({tokens for _, tokens in found}):
        here = {layout: found.get((layout, tokens), {}) for layout in layouts}
        experts = next(row["distinct_experts"] for row in here.values() if row)
        line = [str(tokens), str(experts)]
        for layout, row in here.items():
            line += [us(row.get("us")), percent(row.get("share"))]
            line += [] if layout == "none" else [percent(row.get("tax"))]
            line += [us(row.get("peer_us"))]
        lines.append(line)
    return table(columns, lines, list(found.values()))


def variants() -> str:
    """Beam at TP 8, 32 tokens: every layout and routing of the grid."""
    rows = rows_of("moe_decode", model="beam-1.0", tp=8, base="bf16", tokens=32)
    if not rows:
        return NONE
    columns = ["adapters", "routing", "experts read", "us", "floor, us", "share", "tax", "vLLM, us"]
    lines = [
        [
            row["layout"].replace("_", " "),
            row["routing"],
            str(row["distinct_experts"]),
            us(row["us"]),
            us(row["floor_us"]),
            percent(row["share"]),
            percent(row.get("tax")),
            us(row["peer_us"]),
        ]
        for row in rows
    ]
    return table(columns, lines, rows)


def routings() -> str:
    """Skewed routing by tokens: ours beside vLLM, without adapters and with per-expert ones."""
    found = {
        (row["routing"], row["layout"], row["tokens"]): row
        for routing in ("zipf", "hot8")
        for row in rows_of("moe_decode", model="beam-1.0", tp=8, base="bf16", routing=routing)
        if row["layout"] in ("none", "per_expert_r32")
    }
    if not found:
        return NONE
    pairs = [(r, a) for r in ("zipf", "hot8") for a in ("none", "per_expert_r32")]
    columns = ["tokens"]
    for routing, layout in pairs:
        columns += [f"{routing}, {'no adapter' if layout == 'none' else 'per-expert r 32'}, us", "vLLM, us"]
    lines = []
    for tokens in sorted({tokens for *_, tokens in found}):
        here = [found.get((*pair, tokens), {}) for pair in pairs]
        lines.append([str(tokens), *(us(row.get(key)) for row in here for key in ("us", "peer_us"))])
    return table(columns, lines, list(found.values()))


def prefill() -> str:
    """Beyond decode: us of ours and of vLLM's by tokens."""
    rows = [row for row in rows_of("moe_decode", routing="uniform") if row["tokens"] > 256]
    if not rows:
        return NONE
    found = {(row["model"], row["tp"], row["base"], row["layout"], row["tokens"]): row for row in rows}
    sizes = sorted({row["tokens"] for row in rows})
    columns = ["model", "experts", "adapters", *(name for n in sizes for name in (f"{n} tokens, us", "vLLM, us"))]
    lines = []
    for model, tp, base, layout in dict.fromkeys(key[:4] for key in found):
        here = [found.get((model, tp, base, layout, n), {}) for n in sizes]
        cells = (us(row.get(key)) for row in here for key in ("us", "peer_us"))
        lines.append([f"{model} TP {tp}", base, layout.replace("_", " "), *cells])
    return table(columns, lines, rows)


def step_rows(**wanted: object) -> list[dict]:
    """Rows of one rank's share of TP 8; those of an engine without LoRA come last, so that a dict keeps them."""
    rows = rows_of("vllm_decode", tp=1, pp=1, layers=LAYERS, **wanted)
    rows = [row for row in rows if row["rank"] in (0, 32) and row.get("of_tp", 8) == 8]
    return sorted(rows, key=lambda row: row["lora_enabled"], reverse=True)


def engine() -> str:
    """The real engine on Beam, bf16: stock kernels and ours by batch, and what ours gains."""
    rows = step_rows(arch="beam", base="bf16", attention_adapter=False)
    times = {(row["batch"], row["kernels"], row["adapters"]): row for row in rows}
    if not times:
        return NONE
    columns = ["batch", "experts read", "stock, no adapter", "stock, per-expert", "stock, shared-outer"]
    columns += ["ours, no adapter", "ours, per-expert", "ours, shared-outer"]
    columns += [
        "per-expert over stock",
        "shared-outer over stock per-expert",
        "shared-outer over stock without adapter",
    ]
    lines = []
    for batch in sorted({batch for batch, *_ in times}, reverse=True):
        here = [times.get((batch, k, a), {}) for k in ("stock", "ours") for a in ("none", "per-expert", "shared-outer")]
        line = [str(batch), str(next(row["distinct_experts"] for row in here if row))]
        line += [us(row.get("us_per_layer")) for row in here]
        for row, key in (
            (here[4], "ratio_to_stock_lora"),
            (here[5], "ratio_to_stock_lora"),
            (here[5], "ratio_to_stock_base"),
        ):
            line.append("-" if row.get(key) is None else f"x{row[key]:.2f}")
        lines.append(line)
    return table(columns, lines, list(times.values()))


def engine_mxfp8() -> str:
    """The same engine on an MXFP8 base, with and without per-expert adapters."""
    rows = step_rows(arch="beam", base="mxfp8", attention_adapter=False)
    found = {(row["batch"], row["kernels"], row["adapters"]): row for row in rows}
    if not found:
        return NONE
    columns = ["batch", "stock, no adapter", "stock, per-expert", "ours, no adapter", "ours, per-expert"]
    columns += ["per-expert over stock MXFP8 per-expert", "over stock bf16 per-expert"]
    lines = []
    for batch in sorted({batch for batch, *_ in found}, reverse=True):
        here = [found.get((batch, k, a), {}) for k in ("stock", "ours") for a in ("none", "per-expert")]
        line = [str(batch), *(us(row.get("us_per_layer")) for row in here)]
        for key in ("ratio_to_stock_same", "ratio_to_stock_lora"):
            line.append("-" if here[3].get(key) is None else f"x{here[3][key]:.2f}")
        lines.append(line)
    return table(columns, lines, rows)


def engine_others() -> str:
    """The same step of Qwen3-MoE, and of Beam with adapters on attention too."""
    kinds = {
        "Beam, attention and experts": step_rows(arch="beam", attention_adapter=True),
        "Qwen3-MoE, experts": step_rows(arch="qwen3", attention_adapter=False),
    }
    columns = ["model, adapters on", "base", "batch", "stock, per-expert", "ours, no adapter", "ours, per-expert"]
    columns += ["ours, shared-outer", "per-expert over stock"]
    lines = []
    for kind, mine in kinds.items():
        found = {(row["base"], row["batch"], row["kernels"], row["adapters"]): row for row in mine}
        for base, batch in sorted({key[:2] for key in found}, key=lambda k: (k[0], -k[1])):
            stock = found.get((base, batch, "stock", "per-expert"), {})
            ours = [found.get((base, batch, "ours", a), {}) for a in ("none", "per-expert", "shared-outer")]
            ratio = ours[1].get("ratio_to_stock_lora")
            line = [kind, base, str(batch), *(us(row.get("us_per_layer")) for row in (stock, *ours))]
            lines.append([*line, "-" if ratio is None else f"x{ratio:.2f}"])
    return table(columns, lines, [r for mine in kinds.values() for r in mine]) if lines else NONE


def engine_full() -> str:
    """Full-size layers over several GPUs: milliseconds a step of all of them, communication included."""
    rows = rows_of("vllm_decode", arch="beam-full")
    found = {
        (row["tp"], row["pp"], row["layers"], row["base"], row["batch"], row["kernels"], row["adapters"]): row
        for row in rows
        if row["rank"] in (0, 32)
    }
    if not found:
        return NONE
    columns = ["TP x PP, layers", "requests", "stock, no adapter, ms", "stock, per-expert, ms"]
    columns += ["ours, no adapter, ms", "ours, per-expert, ms", "per-expert over stock", "tokens/s/GPU"]
    columns += ["a single rank's prediction, ms", "one all-reduce, us"]
    lines = []
    for key in sorted({key[:5] for key in found}, key=lambda k: (*k[:4], -k[4])):
        here = [found.get((*key, k, a), {}) for k in ("stock", "ours") for a in ("none", "per-expert")]
        times = [row.get("step_ms") for row in here]
        line = [f"{key[0]} x {key[1]}, {key[2]}", str(key[4]), *("-" if t is None else f"{t:.2f}" for t in times)]
        line.append(f"x{times[1] / times[3]:.2f}" if times[1] and times[3] else "-")
        last = here[3]
        line.append(f"{last['tokens_per_s_per_gpu']:.0f}" if last.get("tokens_per_s_per_gpu") else "-")
        line.append(f"{last['predicted_step_ms']:.2f}" if last.get("predicted_step_ms") else "-")
        line.append(us(last.get("all_reduce_us")))
        lines.append(line)
    return table(columns, lines, list(found.values()))


def peers_of(row: dict) -> dict[str, float]:
    """Every peer's time, or that of the one which the row names."""
    return row.get("peers_us") or ({row["peer"]: row["peer_us"]} if row["peer"] else {})


def mxfp8(bench: str, *cases: str, reads: bool = False) -> str:
    """Chosen rows of an MXFP8 bench with the peer of each; ``reads``: and a plain read of the same bytes."""
    by_case = {row["case"]: row for row in rows_of(bench)}
    rows = [by_case[case] for case in cases if case in by_case]
    if not rows:
        return NONE
    lines = [
        [
            row["case"],
            us(row["us"]),
            percent(row["share"]),
            *([us(row.get("read_us"))] if reads else []),
            ", ".join(f"{name} {us(time)}" for name, time in peers_of(row).items()) or "-",
        ]
        for row in rows
    ]
    columns = ["case", "us", "share", *(["plain read, us"] if reads else []), "peer, us"]
    return table(columns, lines, rows)


def parity() -> str:
    """The engine's log-probabilities against the reference's."""
    rows = [row for row in rows_of("vllm_parity") if row["adapter"]]
    if not rows:
        return NONE
    columns = ["TP, PP", "tokens", "mean difference", "largest", "argmax differs, of clear steps"]
    columns += ["choices that flip without replay"]
    lines = []
    for row in rows:
        replayed = row["replayed"]
        line = [f"{row['tp']}, {row['pp']}", str(row["tokens"]), f"{replayed['mean']:.3f}", f"{replayed['max']:.3f}"]
        line.append(f"{replayed['argmax_disagreements']} of {replayed['clear_steps']}")
        lines.append([*line, row["own_routes"]["flips"]])
    return table(columns, lines, rows)


def router() -> str:
    """Logits and choice of Beam's router beside vLLM's launches for the same, alone and behind the norm of x."""
    rows = [row for row in rows_of("router", model="beam") if row["tokens"] in (1, 8, 16, 32, 64, 256, 4096)]
    if not rows:
        return NONE
    columns = ["tokens", "us", "vLLM, us", "behind a norm, us", "vLLM behind a norm, us"]
    fields = ("us", "peer_us", "behind_norm_us", "peer_behind_norm_us")
    lines = [
        [str(row["tokens"]), *(us(row.get(field)) for field in fields)]
        for row in sorted(rows, key=lambda r: r["tokens"])
    ]
    return table(columns, lines, rows)


def linear_lora() -> str:
    """What adapters of dense layers add to a layer's product, with factors and without, beside vLLM's launches."""
    rows = [row for row in rows_of("linear_lora") if row["tokens"] in (8, 32)]
    if not rows:
        return NONE
    found = {(row["layer"], row["tokens"], row["live"]): row for row in rows}
    columns = [
        "layer",
        "tokens",
        "its product, us",
        "rank 32 adds, us",
        "vLLM, us",
        "no factors here adds, us",
        "vLLM, us",
    ]
    lines = []
    for layer, tokens in dict.fromkeys(key[:2] for key in found):
        here = [found.get((layer, tokens, live), {}) for live in (True, False)]
        line = [layer, str(tokens), us(here[0].get("product_us"))]
        lines.append(line + [us(row.get(field)) for row in here for field in ("added_us", "peer_added_us")])
    return table(columns, lines, rows)


def training_layer() -> str:
    """Forward and backward of the experts of one layer in training."""
    rows = [row for row in rows_of("megatron_train") if row["case"].startswith("layer/")]
    if not rows:
        return NONE
    columns = ["experts", "forward and backward, ms", "peak memory, GiB"]
    lines = [[row["name"], f"{row['ms']:.2f}", f"{row['peak_gib']:.2f}"] for row in rows]
    return table(columns, lines, rows)


def loop() -> str:
    """The RL loop: reward, and how far trainer and engine are apart at the first step, with one part undone each."""
    modes: dict[str, list[dict]] = {}
    for row in sorted(rows_of("rl_loop"), key=lambda r: r["step"]):
        modes.setdefault(row["case"].rpartition("/")[0], []).append(row)
    order = list(rl_loop.MODES)
    modes = dict(sorted(modes.items(), key=lambda item: ("/" in item[0], order.index(item[1][0]["mode"]), item[0])))
    if not modes:
        return NONE
    columns = ["mode", "steps", "reward, first", "reward, last", "router exact", "mean difference of log-probabilities"]
    columns += ["without router replay", "nor an fp32 router", "head in bf16"]
    lines = []
    for steps in modes.values():
        first = steps[0]
        apart = (("train_pp", "training at PP"), ("train_ep", "training at EP"), ("rollout_tp", "rollout at TP"))
        named = [f"{what} {first[size]}" for size, what in apart if first[size] > 1]
        named += [f"{first['wire']} on the wire"] if first["wire"] != "bf16" else []
        line = [", ".join([first["mode"], *named]), str(len(steps))]
        line += [f"{first['reward']:.3f}", f"{steps[-1]['reward']:.3f}"]
        line.append("every step" if all(row["router_exact"] for row in steps) else "NOT always")
        line.append(f"{first['logprob_diff_mean']:.4f}")
        line += [f"{first['variants'][name]['logprob_diff_mean']:.4f}" for name in rl_loop.VARIANTS]
        lines.append(line)
    return table(columns, lines, [row for steps in modes.values() for row in steps])


SQUARE = "8192x8192/bfloat16"
TABLES: dict[str, Callable[[], str]] = {
    "vllm_decode": engine,
    "vllm_decode_mxfp8": engine_mxfp8,
    "vllm_decode_others": engine_others,
    "vllm_decode_full": engine_full,
    "router": router,
    "linear_lora": linear_lora,
    "vllm_parity": parity,
    "megatron_layer": training_layer,
    "rl_loop": loop,
    "mxfp8_quantize": lambda: mxfp8(
        "mxfp8_quantize",
        *(
            f"quantize {kind}/{SQUARE}"
            for kind in ("rowwise", "columnwise", "both", "both, grouped", "rowwise, swizzled")
        ),
        f"fake quantize rowwise/{SQUARE}",
        f"SwiGLU and quantize both/{SQUARE}",
        f"dequantize rowwise/{SQUARE}",
    ),
    "mxfp8_gemm": lambda: mxfp8(
        "mxfp8_gemm",
        *(f"decode/8192x8192/{rows}" for rows in (1, 8, 16, 32, 64)),
        *(f"decode/{shape}/{rows}" for shape in ("1792x5120", "5120x768") for rows in (8, 16, 32)),
        "decode grouped/32x2560x5120/32",
        *(f"train linear forward/8192x8192/{rows}" for rows in (2048, 4096, 8192)),
        "train linear forward and backward/8192x8192/8192",
        *(
            f"train grouped {what}/32x2560x5120/{rows}"
            for rows in (8192, 65536)
            for what in ("forward", "forward, cached", "dgrad", "wgrad", "linear forward")
        ),
        reads=True,
    ),
    "moe_decode_beam": lambda: decode("beam-1.0", 8, "bf16"),
    "moe_decode_beam_mxfp8": lambda: decode("beam-1.0", 8, "mxfp8"),
    "moe_decode_qwen3": lambda: decode("qwen3-30b-a3b", 1, "bf16"),
    "moe_decode_beam_tp4": lambda: decode("beam-1.0", 4, "bf16"),
    "moe_decode_variants": variants,
    "moe_decode_routings": routings,
    "moe_prefill": prefill,
}


def rewritten(text: str) -> str:
    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise SystemExit(f"README.md asks for results {name}; known: {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[name]()}\n{match[3]}"

    return SECTION.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where README.md differs")
    check = parser.parse_args().check
    text = README.read_text()
    new = rewritten(text)
    if check:
        if new != text:
            raise SystemExit("README.md differs from the committed results: run python bench/readme_table.py")
    elif new != text:
        README.write_text(new)


if __name__ == "__main__":
    main()
