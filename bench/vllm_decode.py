"""Decode speed of the real vLLM engine with and without expert LoRA: stock kernels and ours, one ladder, same settings.

Each cell is one engine in one process: Beam itself (or Qwen3-MoE of the same geometry) with the share of a sparse layer
that one of TP8's ranks holds (hidden 5120, 2560 / 8 = 320 columns, 256 experts, top-8, 6 of 48 heads), 12 such layers,
random weights and a router re-initialised to near-uniform choice. A step's time is the difference between a long and a
short generation over the tokens between them, so prefill and start-up cancel. ``us_per_layer`` is the whole step,
sampling and scheduling included, over the layers.

    python bench/vllm_decode.py                                     # the bf16 ladder of Beam, one cell per visible GPU
    python bench/vllm_decode.py --bases bf16,mxfp8 --archs beam,qwen3
    python bench/vllm_decode.py --tp 2                              # or --pp 2: real communication between GPUs
    python bench/vllm_decode.py --only "beam/bf16/ours/none,per-expert;beam/bf16/stock/none,per-expert"
    python bench/vllm_decode.py --cell --kernels ours --adapters none,per-expert --base bf16 --arch beam
    python bench/vllm_decode.py --report                            # the tables of what has been measured

Adapters: ``none`` is an engine without LoRA; ``per-expert`` and ``shared-outer`` (one A of gate and up, one B of down
for all experts; ``enable_moe_shared_loras``) are rank 32 on gate, up and down of every expert; ``--attention`` adds q,
k, v, o and the attention gate. vLLM's own Beam takes no LoRA: its stock column runs vLLM's kernels under a subclass
that only declares it.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCAB, RANK = 5120, 320, 256, 8, 18992, 32
PROMPT, SHORT, LONG = 64, 32, 288
STOCK = "beam_moe_bench_stock"
OPTIONAL = {
    "flashinfer": "flashinfer-python",
    "humming": "humming-kernels",
    "cutlass": "nvidia-cutlass-dsl",
    "quack": "quack-kernels",
    "tilelang": "tilelang",
}
FIGURES = ("us_per_layer", "tokens_per_s", "ratio_to_stock_lora", "ratio_to_stock_same", "ratio_to_stock_base")


def importable(work: Path) -> None:
    """Show this checkout and the stock plugin to vLLM's processes, entry points included, without installing."""
    site = work / "site"
    (site / STOCK).mkdir(parents=True, exist_ok=True)
    (site / STOCK / "__init__.py").write_text(
        "def register():\n    from vllm import ModelRegistry\n\n"
        f'    ModelRegistry.register_model("BeamForCausalLM", "{STOCK}.model:BeamForCausalLM")\n'
    )
    (site / STOCK / "model.py").write_text(
        "from vllm.model_executor.models.interfaces import SupportsLoRA\n"
        "from vllm.models.beam.nvidia.model import BeamForCausalLM as Stock\n\n\n"
        "class BeamForCausalLM(Stock, SupportsLoRA):\n    pass\n"
    )
    plugins = {STOCK: f"{STOCK}:register"}
    if importlib.util.find_spec("beam_moe") is None:
        package = site / "beam_moe"
        package.mkdir(exist_ok=True)
        for source in (*(ROOT / "beam_moe").iterdir(), ROOT / "kernels", ROOT / "integrations"):
            if not (package / source.name).exists():
                (package / source.name).symlink_to(source)
    if not any(e.name == "beam_moe" for e in importlib.metadata.entry_points(group="vllm.general_plugins")):
        plugins["beam_moe"] = "beam_moe.integrations.vllm:register"
    for name, target in plugins.items():
        info = site / f"{name}-0.1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {target}\n")
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))


def write_model(folder: Path, arch: str, layers: int) -> None:
    """A configuration without weights."""
    common = {
        "torch_dtype": "bfloat16", "hidden_act": "silu", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": 2560, "num_hidden_layers": layers, "num_attention_heads": 6, "num_key_value_heads": 1,
        "head_dim": 128, "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip
    full = [(i + 1) % 6 == 0 or i == layers - 1 for i in range(layers)]
    own = {
        "beam": {
            "architectures": ["BeamForCausalLM"], "model_type": "beam", "n_group": 8, "topk_group": 4,
            "routed_scaling_factor": 2.5, "final_logit_softcapping": 30.0, "sliding_window": 512,
            "max_position_embeddings": 8192, "mlp_layer_types": ["sparse"] * layers,
            "layer_types": ["full_attention" if f else "sliding_attention" for f in full],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": None,
            },
        },
        "qwen3": {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
            "mlp_only_layers": [], "max_position_embeddings": 32768, "rope_theta": 1e6, "attention_bias": False,
            "use_sliding_window": False,
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**common, **own[arch]}))


# --- in the workers: each takes the model, as `LLM.apply_model` hands it over


def spread_routing(model) -> int:
    """Normal router weights, the same on every rank, no bias: dummy weights send every token to the same experts."""
    import torch

    count = 0
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "mlp.gate.base_layer.weight")):
            g = torch.Generator().manual_seed(count)
            parameter.data.copy_(torch.randn(parameter.shape, generator=g) * 0.02)
            count += 1
        elif name.endswith("e_score_correction_bias"):
            parameter.data.zero_()
    return count


def add_adapter(model, number: int, shared: bool, attention: bool) -> int:
    """Register an adapter in vLLM's LoRA manager, as if read from disk: the same values in every expert and layer."""
    import torch
    from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

    manager = model.lora_manager
    device = next(model.parameters()).device
    g = torch.Generator(device=device).manual_seed(number)

    def new(*shape):
        return (torch.randn(shape, generator=g, device=device) * 0.02).bfloat16()

    loras, experts_of = {}, {}
    for name, module in manager.modules.items():
        if isinstance(module, FusedMoEWithLoRA):
            inter, hidden, e = module.moe_config.intermediate_size, module.hidden_size, module.local_num_experts
            outer = 1 if shared else e
            key = (inter, hidden, e)
            if key not in experts_of:
                wide = [new(1, RANK, hidden).expand(outer, -1, -1).contiguous() for _ in range(2)]
                experts_of[key] = (
                    [wide[0], new(1, RANK, inter).expand(e, -1, -1).contiguous(), wide[1]],
                    [new(1, inter, RANK).expand(e, -1, -1).contiguous(),
                     new(1, hidden, RANK).expand(outer, -1, -1).contiguous(),
                     new(1, inter, RANK).expand(e, -1, -1).contiguous()],
                )  # fmt: skip
            a, b = experts_of[key]
            loras[name] = PackedLoRALayerWeights(name, RANK, [None] * 3, list(a), list(b), scaling=[1, 1, 1])
        elif attention and ".self_attn." in name:
            tp = getattr(module, "tp_size", 1)
            row = type(module).__name__.startswith("RowParallel")
            parts = manager.packed_modules.get(name)
            in_dim = module.lora_a_stacked[0].shape[-1] * (tp if row else 1)
            a = [new(RANK, in_dim) for _ in module.lora_a_stacked]
            b = [new(s.shape[-2] * (1 if row else tp), RANK) for s in module.lora_b_stacked]
            if parts:
                loras[name] = PackedLoRALayerWeights(name, RANK, [None] * len(a), a, b, scaling=[1] * len(a))
            else:
                loras[name] = LoRALayerWeights(name, RANK, RANK, a[0], b[0], scaling=1)
    manager.add_adapter(LoRAModel(number, RANK, loras))
    return len(loras)


def capture_routing(model, on: bool):
    """With ``on`` record every router's ids; without, return per layer the ids of the largest batch and stop."""
    from vllm.model_executor.layers.fused_moe import MoERunner

    if on:
        model.__dict__["_bench_ids"] = {}

        def hook(layer):
            def keep(ids):
                seen = model.__dict__["_bench_ids"]
                if layer not in seen or len(ids) > len(seen[layer]):
                    seen[layer] = ids.clone()

            return keep

        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(hook(module.layer_name))
        return None
    for module in model.modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(None)
    return {name: ids.cpu().tolist() for name, ids in model.__dict__.pop("_bench_ids").items()}


def kernels_in_use(model) -> list[str]:
    """Class names of the experts that this rank's layers run."""
    from vllm.model_executor.layers.fused_moe import MoERunner

    names = set()
    for module in model.modules():
        if isinstance(module, MoERunner):
            kernel = module.routed_experts.quant_method.moe_kernel
            names.add(type(kernel.impl.fused_experts).__name__ if kernel is not None else "?")
    return sorted(names)


# --- one cell


def distinct_experts(ids: dict[str, list[list[int]]], batch: int) -> float:
    """Mean over layers of the distinct experts that ``batch`` tokens choose, over random draws of captured tokens."""
    rng, total, draws = random.Random(0), 0, 32
    for rows in ids.values():
        for _ in range(draws):
            chosen = rng.sample(rows, min(batch, len(rows)))
            total += len({e for row in chosen for e in row})
    return round(total / (draws * max(len(ids), 1)), 1)


def run_cell(opts: argparse.Namespace) -> list[dict]:
    """Start one engine and measure every asked adapter mode and batch."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        VLLM_PLUGINS="beam_moe" if opts.kernels == "ours" else STOCK,
        BEAM_MOE_VLLM="all",
    )
    import torch
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    modes = opts.adapters.split(",")
    lora = modes != ["none"]
    shared = "shared-outer" in modes
    if shared and "per-expert" in modes:
        raise SystemExit("one engine keeps one layout: per-expert or shared-outer")
    model = opts.work / f"{opts.arch}{opts.layers}"
    write_model(model, opts.arch, opts.layers)
    batches = [int(b) for b in opts.batches.split(",")]
    extra = {}
    if lora:
        extra = {
            "enable_lora": True, "max_loras": 1, "max_lora_rank": RANK, "max_cpu_loras": 1,
            "enable_moe_shared_loras": shared,
        }  # fmt: skip
    if opts.target_modules:
        extra["lora_target_modules"] = opts.target_modules.split(",")
    start = time.perf_counter()
    llm = LLM(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=2048,
        max_num_seqs=max(64, *batches), max_num_batched_tokens=4096, gpu_memory_utilization=0.85,
        enable_prefix_caching=False, quantization="mxfp8" if opts.base == "mxfp8" else None,
        tensor_parallel_size=opts.tp, pipeline_parallel_size=opts.pp,
        compilation_config={"cudagraph_capture_sizes": sorted(set(batches))},
        kernel_config={"enable_jit_warmup": opts.jit_warmup}, **extra,
    )  # fmt: skip
    routers = llm.apply_model(spread_routing)
    added = llm.apply_model(lambda m: add_adapter(m, 1, shared, opts.attention)) if lora else [0]
    started = time.perf_counter() - start
    used = sorted({k for names in llm.apply_model(kernels_in_use) for k in names})
    print(f"engine started in {started:.0f} s; routers {routers}, adapter modules {added}, experts {used}", flush=True)
    request = LoRARequest("adapter", 1, "/in/memory") if lora else None
    rng = random.Random(0)

    def generate(batch: int, tokens: int, adapter, length: int = PROMPT) -> float:
        prompts = [{"prompt_token_ids": [rng.randrange(10, VOCAB - 10) for _ in range(length)]} for _ in range(batch)]
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        torch.accelerator.synchronize()
        return time.perf_counter() - begin

    llm.apply_model(lambda m: capture_routing(m, True))
    generate(32, 2, request)
    ids = {}
    for found in llm.apply_model(lambda m: capture_routing(m, False)):
        ids.update(found)
    missing = sorted(p for m, p in OPTIONAL.items() if importlib.util.find_spec(m) is None)
    rows = []
    for mode in modes:
        adapter = None if mode == "none" else request
        generate(batches[0], 8, adapter)
        for batch in batches:
            short, long = (min(generate(batch, n, adapter) for _ in range(opts.repeats)) for n in (SHORT, LONG))
            step = (long - short) / (LONG - SHORT)
            row = {
                "batch": batch, "arch": opts.arch, "base": opts.base, "adapters": mode, "kernels": opts.kernels,
                "attention_adapter": opts.attention and mode != "none", "lora_enabled": lora, "tp": opts.tp,
                "pp": opts.pp, "layers": opts.layers, "rank": RANK if mode != "none" else 0,
                "target_modules": opts.target_modules or "all", "step_us": round(step * 1e6, 1),
                "us_per_layer": round(step * 1e6 / opts.layers, 1), "tokens_per_s": round(batch / step, 1),
                "distinct_experts": distinct_experts(ids, batch), "missing": missing, "experts_class": used,
                "vllm_version": vllm.__version__, "start_s": round(started, 1),
            }  # fmt: skip
            row["case"] = case_of(row)
            rows.append(row)
            print("ROW " + json.dumps(row), flush=True)
    return rows


# --- the ladder


def case_of(row: dict) -> str:
    """The key of a row: what was measured, without the figures."""
    parts = [row["arch"], row["base"], row["kernels"], row["adapters"]]
    if row["adapters"] == "none" and row["lora_enabled"]:
        parts.append("lora-on")
    if row["attention_adapter"]:
        parts.append("attention")
    if row["target_modules"] != "all":
        parts.append(f"wrapped={row['target_modules']}")
    return "/".join([*parts, f"tp{row['tp']}pp{row['pp']}", f"layers={row['layers']}", f"batch={row['batch']}"])


def with_ratios(rows: list[dict]) -> list[dict]:
    """Every row with its speed over stock's: bf16 per-expert LoRA; the same base and layout; the same base, no LoRA."""
    time_of = {row["case"]: row["us_per_layer"] for row in rows}

    def stock(row: dict, **changes) -> float | None:
        other = {**row, "kernels": "stock", **changes}
        if other["adapters"] == "none":
            other.update(lora_enabled=False, attention_adapter=False, target_modules="all")
        return time_of.get(case_of(other))

    def over(us: float | None, row: dict) -> float | None:
        return None if us is None else round(us / row["us_per_layer"], 3)

    out = []
    for row in rows:
        attention = row["attention_adapter"]
        out.append(
            {
                **row,
                "ratio_to_stock_lora": over(stock(row, adapters="per-expert", base="bf16", lora_enabled=True), row),
                "ratio_to_stock_same": over(stock(row, attention_adapter=attention), row),
                "ratio_to_stock_base": over(stock(row, adapters="none"), row),
            }
        )
    return out


def deployment(us_per_layer: float) -> float:
    """Tokens per second and GPU of PP2 x TP8 at 32 requests, two micro-batches of 16, from the time of a layer at 16.

    Each of the two stages runs 26 layers for each micro-batch in turn: 32 tokens every 2 * 26 layers, on 16 GPUs. Left
    out: the all-reduces of TP8, the hop between stages, three dense layers (counted as sparse ones).
    """
    return 32 / (2 * 26 * us_per_layer * 1e-6) / 16


def cells(opts: argparse.Namespace) -> list[dict]:
    """The ladder: which engines to start, and which modes each measures."""
    out = []
    for arch in opts.archs.split(","):
        for base in opts.bases.split(","):
            for kernels in opts.kernels_list.split(","):
                for adapters in ("none", "none,per-expert", "shared-outer"):
                    out.append({"arch": arch, "base": base, "kernels": kernels, "adapters": adapters})
            if opts.attention_cells:
                for kernels in opts.kernels_list.split(","):
                    for adapters in ("per-expert", "shared-outer"):
                        cell = {"arch": arch, "base": base, "kernels": kernels, "adapters": adapters}
                        out.append({**cell, "attention": True})
    if opts.only:
        wanted = opts.only.split(";")
        out = [c for c in out if "/".join([c["arch"], c["base"], c["kernels"], c["adapters"]]) in wanted]
    return out


def run_ladder(opts: argparse.Namespace) -> int:
    """Run the cells as processes over the visible GPUs, merge their rows, print the tables."""
    import harness
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    per_cell = opts.tp * opts.pp
    free = [names[i : i + per_cell] for i in range(0, len(names) - per_cell + 1, per_cell)]
    if not free:
        print(f"needs {per_cell} GPUs, sees {len(names)}")
        return 1
    waiting, running, failed = cells(opts), [], []
    logs = Path(os.environ.get("OUT") or opts.work) / "vllm_decode_logs"
    logs.mkdir(parents=True, exist_ok=True)
    print(f"{len(waiting)} cells on {len(free)} x {per_cell} GPU; logs in {logs}", flush=True)
    deadline = time.monotonic() + opts.budget
    while waiting or running:
        while waiting and free and time.monotonic() < deadline:
            cell, gpus = waiting.pop(0), free.pop(0)
            name = "_".join(str(v).replace(",", "+") for v in cell.values())
            command = [sys.executable, __file__, "--cell", "--rows", str(logs / f"{name}.json"), "--tp", str(opts.tp)]
            command += ["--pp", str(opts.pp), "--layers", str(opts.layers), "--batches", opts.batches]
            command += ["--repeats", str(opts.repeats), "--work", str(opts.work / name)]
            command += ["--target-modules", opts.target_modules] if opts.target_modules else []
            command += ["--jit-warmup"] if opts.jit_warmup else []
            for key, value in cell.items():
                command += [f"--{key}"] if value is True else [f"--{key}", str(value)]
            log = open(logs / f"{name}.log", "w")
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "VLLM_CACHE_ROOT": str(opts.work / "cache")}
            # two engines that start at once must not meet at one port
            env["VLLM_PORT"] = str(21000 + 50 * len(waiting))
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
            running.append((process, name, gpus, time.monotonic()))
        if waiting and time.monotonic() >= deadline:
            print(f"out of time before {len(waiting)} cells: {[' '.join(map(str, c.values())) for c in waiting]}")
            waiting = []
        for entry in list(running):
            process, name, gpus, begun = entry
            if process.poll() is None and time.monotonic() < min(begun + opts.timeout, deadline + opts.timeout):
                continue
            if process.poll() is None:
                process.kill()
                process.wait()
            running.remove(entry)
            free.append(gpus)
            rows = logs / f"{name}.json"
            if process.returncode == 0 and rows.exists():
                harness.write_rows("vllm_decode", json.loads(rows.read_text()))
            else:
                failed.append(name)
            state = "ok" if process.returncode == 0 else f"FAILED ({process.returncode}), see its log"
            print(f"{name}: {state}, {time.monotonic() - begun:.0f} s", flush=True)
        time.sleep(0.5)
    path = harness.results_path("vllm_decode")
    merged = with_ratios(harness.read_rows(path))
    harness._merge(path, merged)
    report(merged)
    for name in failed:
        print(f"--- {name}\n" + (logs / f"{name}.log").read_text()[-3000:])
    return 1 if failed else 0


def report(rows: list[dict]) -> None:
    """Tables by architecture and parallelism, the slowest ladder first."""
    import harness

    groups = sorted({(r["arch"], r["tp"], r["pp"], r["layers"]) for r in rows})
    for arch, tp, pp, layers in groups:
        mine = [r for r in rows if (r["arch"], r["tp"], r["pp"], r["layers"]) == (arch, tp, pp, layers)]
        mine.sort(key=lambda r: (r["base"], -r["batch"], r["kernels"] != "stock", r["adapters"]))
        harness.print_table(
            f"{arch}, TP {tp}, PP {pp}, {layers} layers",
            [
                "base",
                "batch",
                "kernels",
                "adapters",
                "experts",
                "us/layer",
                "tok/s",
                "x stock LoRA",
                "x same",
                "x base",
            ],
            [
                [
                    r["base"],
                    r["batch"],
                    r["kernels"],
                    r["adapters"]
                    + (" +attention" if r["attention_adapter"] else "")
                    + (" (LoRA on)" if r["adapters"] == "none" and r["lora_enabled"] else ""),
                    r["distinct_experts"],
                    r["us_per_layer"],
                    r["tokens_per_s"],
                    r["ratio_to_stock_lora"],
                    r["ratio_to_stock_same"],
                    r["ratio_to_stock_base"],
                ]
                for r in mine
            ],
        )
        for r in mine:
            if r["batch"] == 16 and (tp, pp) == (1, 1):
                print(
                    f"  PP2 x TP8 at 32 requests by this step, {r['base']} {r['kernels']} {r['adapters']}: "
                    f"{deployment(r['us_per_layer']):.0f} tokens/s/GPU, without all-reduces and pipeline hop"
                )
    missing = sorted({m for r in rows for m in r["missing"]})
    if missing:
        print(f"vLLM's optional packages not there: {', '.join(missing)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="store_true", help="measure one engine in this process")
    parser.add_argument("--kernels", choices=["stock", "ours"], default="ours")
    parser.add_argument("--adapters", default="none,per-expert", help="modes of the cell's engine, by comma")
    parser.add_argument("--base", choices=["bf16", "mxfp8"], default="bf16")
    parser.add_argument("--arch", choices=["beam", "qwen3"], default="beam")
    parser.add_argument("--attention", action="store_true", help="the adapter covers attention too")
    parser.add_argument("--rows", type=Path, help="where the cell writes its rows")
    parser.add_argument("--archs", default="beam")
    parser.add_argument("--bases", default="bf16")
    parser.add_argument("--kernels-list", default="stock,ours")
    parser.add_argument("--attention-cells", action="store_true", help="add cells with attention adapters")
    parser.add_argument("--only", help="arch/base/kernels/adapters of the cells to run, by semicolon")
    parser.add_argument("--batches", default="64,32,16,8,4,2,1")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--target-modules", default="", help="lora_target_modules; vLLM wraps every linear layer without"
    )
    parser.add_argument("--jit-warmup", action="store_true", help="compile every size first, as a served engine does")
    parser.add_argument("--timeout", type=float, default=400, help="seconds a cell may take")
    parser.add_argument("--budget", type=float, default=570, help="seconds after which no cell is started")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "beam_moe_vllm_decode")
    parser.add_argument("--report", action="store_true", help="print the tables of the committed results")
    opts = parser.parse_args()
    importable(opts.work)
    sys.path.insert(0, str(ROOT / "bench"))
    if opts.report:
        import harness

        path = harness.results_path("vllm_decode")
        rows = harness.read_rows(path)
        if not rows:
            print(f"no results in {path}; BEAM_MOE_RESULTS names another folder")
            return 1
        report(with_ratios(rows))
        return 0
    if not opts.cell:
        return run_ladder(opts)
    rows = run_cell(opts)
    if opts.rows:
        opts.rows.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
