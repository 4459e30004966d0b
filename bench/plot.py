"""Draw the committed results: PNG files beside the JSON they come from.

    python bench/plot.py                        # every device under bench/results
    python bench/plot.py bench/results/nvidia_h200

moe_decode_share.png     share of the read floor over tokens, ours and vLLM's
moe_decode_launches.png  time of one layer by launch, ours beside vLLM's
moe_decode_tax.png       what adapters cost over their rank
vllm_decode.png          decode step of the real engine, stock kernels and ours, by batch
rl_loop.png              reward by step, trainer against engine with each exact part undone, seconds by phase
megatron_train.png       loss of every training mode by step
vllm_decode_full.png     the same of full-size layers over several GPUs, beside a single rank's prediction
mxfp8_gemm.png           share of each product: of the read floor at decode, of the bf16 library in training
mxfp8_quantize.png       share of copy bandwidth of each conversion
"""

import argparse
from pathlib import Path

import harness
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from readme_table import provenance

GROUP = {"model": "beam-1.0", "tp": 8, "base": "bf16", "routing": "uniform"}
TITLE = "one MoE layer of Beam, one rank of TP 8, bf16"
LABELS = {
    "none": "no adapter",
    "per_expert_r32": "per-expert LoRA, rank 32",
    "shared_outer_r32": "shared-outer LoRA, rank 32",
}


def pick(rows: list[dict], **wanted: object) -> list[dict]:
    """Rows of the headline group with the given values, by tokens, decode only."""
    wanted = GROUP | wanted
    found = [row for row in rows if row["tokens"] <= 256 and all(row[key] == value for key, value in wanted.items())]
    return sorted(found, key=lambda row: row["tokens"])


def finish(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def plot_share(rows: list[dict], folder: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2))
    plotted: list[dict] = []
    for i, (layout, label) in enumerate(LABELS.items()):
        mine = pick(rows, layout=layout)
        if not mine:
            continue
        plotted += mine
        axes.plot([r["tokens"] for r in mine], [100 * r["share"] for r in mine], f"C{i}o-", label=f"{label}: beam-moe")
        if peers := [r for r in mine if r["peer_us"]]:
            axes.plot(
                [r["tokens"] for r in peers],
                [100 * r["floor_us"] / r["peer_us"] for r in peers],
                f"C{i}x:",
                label=f"{label}: vLLM",
            )
    axes.set(xscale="log", xlabel="tokens", ylabel="share of the read floor, %", ylim=(0, 102), title=TITLE)
    tokens = sorted({r["tokens"] for r in pick(rows)})
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.text(0.01, 0.005, provenance(plotted).replace("`", ""), fontsize=5)
    finish(figure, folder / "moe_decode_share.png")


def short(kernel: str) -> str:
    return kernel.split("<")[0].split("(")[0].removeprefix("void ").split("::")[-1].strip("_")[:36]


def plot_launches(rows: list[dict], folder: Path) -> None:
    """Stacked bars; kernel times of launches that overlap add up to more than the layer's time, drawn as a mark."""
    mine = (r for r in rows if r["layout"] == "per_expert_r32" and "/bf16/" in r["case"] and r["tokens"] <= 256)
    chosen = sorted(mine, key=lambda r: r["tokens"])
    if not chosen:
        return
    sides = [("launches", "us", "beam-moe")]
    if any("peer_launches" in r for r in chosen):
        sides.append(("peer_launches", "peer_us", "vLLM"))
    figure, grid = plt.subplots(1, len(sides), figsize=(5.5 * len(sides), 4.4), sharey=True, squeeze=False)
    for axes, (parts, total, name) in zip(grid[0], sides):
        here = [r for r in chosen if parts in r]
        x = range(len(here))
        bottom = [0.0] * len(here)
        kernels = list(dict.fromkeys(kernel for r in reversed(here) for kernel in r[parts]))  # the plan lowest
        for i, kernel in enumerate(kernels):
            heights = [r[parts].get(kernel, 0.0) for r in here]
            axes.bar(x, heights, bottom=bottom, color=plt.get_cmap("tab20")(i % 20), label=short(kernel))
            bottom = [b + h for b, h in zip(bottom, heights)]
        axes.plot(x, [r[total] for r in here], "k_", markersize=14, label="the layer")
        axes.set_xticks(list(x), [str(r["tokens"]) for r in here])
        axes.set(xlabel="tokens", title=f"{name}, {LABELS['per_expert_r32']}")
        axes.set_ylim(0, 1.05 * max(bottom))
        axes.legend(fontsize=6)
    grid[0][0].set_ylabel("us")
    finish(figure, folder / "moe_decode_launches.png")


def plot_tax(rows: list[dict], folder: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2))
    plotted: list[dict] = []
    for i, tokens in enumerate((16, 32, 64)):
        layouts = ("per_expert_r4", "per_expert_r16", "per_expert_r32", "per_expert_r64")
        mine = [r for layout in layouts for r in pick(rows, layout=layout) if r["tokens"] == tokens and "tax" in r]
        if not mine:
            continue
        plotted += mine
        ranks = [r["rank"] for r in mine]
        axes.plot(ranks, [100 * r["tax"] for r in mine], f"C{i}o-", label=f"{tokens} tokens")
        bytes_alone = [100 * (r["floor_us"] / r["floor_base_us"] - 1) for r in mine]
        axes.plot(ranks, bytes_alone, f"C{i}:", label=f"{tokens} tokens, bytes alone")
        peers = [r for r in mine if r["peer_us"]]
        taxes = [100 * (r["peer_us"] / r["without_us"] - 1) for r in peers]
        axes.plot([r["rank"] for r in peers], taxes, f"C{i}x--", label=f"{tokens} tokens, vLLM")
    if not plotted:
        plt.close(figure)
        return
    axes.set(xlabel="rank", ylabel="time over the fastest without adapters, %", title=TITLE)
    axes.set_xticks([4, 16, 32, 64])
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=3, loc="upper center")
    figure.text(0.01, 0.005, provenance(plotted).replace("`", ""), fontsize=5)
    finish(figure, folder / "moe_decode_tax.png")


def plot_engine(rows: list[dict], folder: Path) -> None:
    """us per layer of the engine's whole decode step."""
    rows = [r for r in rows if r["arch"] == "beam" and r["base"] == "bf16" and (r["tp"], r["pp"]) == (1, 1)]
    rows = [r for r in rows if not r["attention_adapter"] and r["layers"] == 16 and r["rank"] in (0, 32)]
    rows = [r for r in rows if r.get("of_tp", 8) == 8]
    batches = sorted({r["batch"] for r in rows})
    if not batches:
        return
    figure, axes = plt.subplots(figsize=(8, 4.4))
    bars = [(k, a) for a in ("none", "per-expert", "shared-outer") for k in ("stock", "ours")]
    for i, (kernels, adapters) in enumerate(bars):
        mine = sorted(
            (r for r in rows if r["kernels"] == kernels and r["adapters"] == adapters), key=lambda r: -r["lora_enabled"]
        )
        time = {r["batch"]: r["us_per_layer"] for r in mine}
        here = [b for b in batches if b in time]
        x = [batches.index(b) + (i - 2.5) * 0.14 for b in here]
        color = plt.get_cmap("tab20")(2 * (i // 2) + (kernels == "stock"))
        axes.bar(x, [time[b] for b in here], 0.13, color=color, label=f"{adapters}: {kernels}")
    axes.set_xticks(range(len(batches)), [str(b) for b in batches])
    axes.set(
        xlabel="batch", ylabel="us per layer", title="vLLM 0.33 decode step, Beam, one rank of TP 8, bf16, 16 layers"
    )
    axes.legend(fontsize=8)
    figure.text(0.01, 0.005, provenance(rows).replace("`", ""), fontsize=5)
    finish(figure, folder / "vllm_decode.png")


def plot_full(rows: list[dict], folder: Path) -> None:
    """Step of the full-size model over several GPUs by concurrent requests, and what a single rank predicts."""
    rows = [r for r in rows if r["arch"] == "beam-full"]
    groups = sorted({(r["tp"], r["pp"], r["layers"], r["base"]) for r in rows})
    if not groups:
        return
    figure, grid = plt.subplots(1, len(groups), figsize=(6.5 * len(groups), 4.8), squeeze=False)
    for axes, group in zip(grid[0], groups):
        here = [r for r in rows if (r["tp"], r["pp"], r["layers"], r["base"]) == group]
        lines = sorted({(r["adapters"], r["rank"], r["kernels"]) for r in here})
        for i, (adapters, rank, kernels) in enumerate(lines):
            mine = [r for r in here if (r["adapters"], r["rank"], r["kernels"]) == (adapters, rank, kernels)]
            mine.sort(key=lambda r: r["batch"])
            name = f"{adapters} r {rank}" if rank else "no adapter"
            style = "o-" if kernels == "ours" else "x--"
            axes.plot([r["batch"] for r in mine], [r["step_ms"] for r in mine], style, color=f"C{i}",
                      label=f"{kernels}, {name}")  # fmt: skip
            known = [r for r in mine if r["predicted_step_ms"] is not None]
            axes.plot([r["batch"] for r in known], [r["predicted_step_ms"] for r in known], ":", color=f"C{i}")
        axes.set_xscale("log", base=2)
        batches = sorted({r["batch"] for r in here})
        axes.set_xticks(batches, [str(b) for b in batches])
        tp, pp, layers, base = group
        axes.set(xlabel="concurrent requests", title=f"Beam, {layers} layers, TP {tp} x PP {pp}, {base}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6, title="dotted: a single rank's prediction", title_fontsize=6)
    grid[0][0].set_ylabel("decode step, ms")
    figure.text(0.01, 0.005, provenance(rows).replace("`", ""), fontsize=5)
    finish(figure, folder / "vllm_decode_full.png")


def plot_loop(rows: list[dict], folder: Path) -> None:
    """The newest run of each mode on one GPU."""
    rows = [r for r in rows if (r["train_pp"], r["train_ep"], r["rollout_tp"], r["wire"]) == (1, 1, 1, "bf16")]
    newest = {mode: max(r["run"] for r in rows if r["mode"] == mode) for mode in sorted({r["mode"] for r in rows})}
    rows = [r for r in rows if r["run"] == newest[r["mode"]]]
    if not rows:
        return
    figure, (reward, difference, phases) = plt.subplots(1, 3, figsize=(15, 4.2))
    bottom = [0.0] * len(newest)
    for i, mode in enumerate(newest):
        mine = sorted((r for r in rows if r["mode"] == mode), key=lambda r: r["step"])
        reward.plot([r["step"] for r in mine], [r["reward"] for r in mine], f"C{i}", label=mode)
        difference.plot([r["step"] for r in mine], [r["logprob_diff_mean"] for r in mine], f"C{i}", label=mode)
        compared = [r for r in mine if "variants" in r]
        for style, what in zip((":", "--", "-."), ("r3_off", "router_bf16", "head_bf16")):
            values = [r["variants"][what]["logprob_diff_mean"] for r in compared]
            difference.plot([r["step"] for r in compared], values, f"C{i}{style}", label=f"{mode}, {what}")
    for name in ("rollout", "score", "update", "sync"):
        times = [sorted(r["seconds"][name] for r in rows if r["mode"] == mode) for mode in newest]
        heights = [t[len(t) // 2] for t in times]
        phases.bar(list(newest), heights, bottom=bottom, label=name)
        bottom = [b + h for b, h in zip(bottom, heights)]
    reward.axhline(0.25, color="grey", linewidth=0.5)
    reward.set(xlabel="step", ylabel="reward", ylim=(0, 1), title="share of tokens of the named class")
    difference.set(xlabel="step", ylabel="mean |log p difference|", yscale="log", title="trainer against engine")
    phases.set(ylabel="seconds of a step, median", title="phases")
    for axes in (reward, difference, phases):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)
    figure.text(0.01, 0.005, provenance(rows).replace("`", ""), fontsize=5)
    finish(figure, folder / "rl_loop.png")


def plot_curves(rows: list[dict], folder: Path) -> None:
    rows = [r for r in rows if "losses" in r]
    if not rows:
        return
    groups = {"all weights trained": [], "LoRA, rank 32": []}
    for row in rows:
        groups[list(groups)["lora" in row["mode"]]].append(row)
    groups = {title: members for title, members in groups.items() if members}
    figure, axes = plt.subplots(1, len(groups), figsize=(6 * len(groups), 4.2), sharey=True, squeeze=False)
    for axis, (title, members) in zip(axes[0], groups.items()):
        for row in members:
            axis.plot(row["losses"], linewidth=0.8, label=f"{row['mode']}: {row['last_20']:.3f}")
        axis.set(xlabel="step", ylabel="loss", title=title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, title="mean of the last 20")
    figure.text(0.01, 0.005, provenance(rows).replace("`", ""), fontsize=5)
    finish(figure, folder / "megatron_train.png")


def plot_shares(rows: list[dict], folder: Path, name: str, title: str) -> None:
    """A bar for each case, ours and its peer's share of the same floor."""
    rows = [row for row in rows if row["us"] > 5]  # smaller calls measure the launch
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.24 * len(rows)))
    places = range(len(rows), 0, -1)
    axes.barh(places, [100 * row["share"] for row in rows], height=0.7, label="beam-moe")
    peers = [(y, 100 * r["share"] * r["us"] / r["peer_us"]) for y, r in zip(places, rows) if r["peer_us"]]
    axes.plot([x for _, x in peers], [y for y, _ in peers], "k|", markersize=9, label="peer of the case")
    axes.set_yticks(list(places), [row["case"] for row in rows], fontsize=7)
    axes.set(xlabel="share, %", title=title)
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8)
    figure.text(0.01, 0.004, provenance(rows).replace("`", ""), fontsize=6)
    finish(figure, folder / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="devices' results, all of them by default")
    folders = parser.parse_args().folders or sorted((harness.ROOT / "bench" / "results").glob("*/"))
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        parser.error(f"no such folder: {', '.join(missing)}")
    for folder in folders:
        if rows := harness.read_rows(folder / "moe_decode.json"):
            if pick(rows):
                plot_share(rows, folder)
            plot_tax(rows, folder)
        plot_engine(harness.read_rows(folder / "vllm_decode.json"), folder)
        plot_full(harness.read_rows(folder / "vllm_decode.json"), folder)
        plot_launches(harness.read_rows(folder / "moe_decode_launches.json"), folder)
        plot_loop(harness.read_rows(folder / "rl_loop.json"), folder)
        plot_curves(harness.read_rows(folder / "megatron_train.json"), folder)
        for bench, title in (
            ("mxfp8_gemm", "MXFP8 products: of the read floor (decode), of the bf16 library (train)"),
            ("mxfp8_quantize", "MXFP8 conversions: of copy bandwidth"),
        ):
            if rows := harness.read_rows(folder / f"{bench}.json"):
                plot_shares(rows, folder, bench, title)


if __name__ == "__main__":
    main()
