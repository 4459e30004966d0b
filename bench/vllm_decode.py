"""Decode speed of the real vLLM engine with and without expert LoRA: stock kernels and ours, one ladder, same settings.

Each cell is one engine in one process: Beam itself (or Qwen3-MoE of the same geometry) with the share of a sparse layer
that one of TP8's ranks holds (hidden 5120, 2560 / 8 = 320 columns, 256 experts, top-8, 6 of 48 heads), 16 such layers,
random weights and a router re-initialised to near-uniform choice. A step's time is the difference between a long and a
short generation over the tokens between them, so prefill and start-up cancel. ``us_per_layer`` is the whole step,
sampling and scheduling included, over the layers; ``host_stolen_s`` is what other machines of the host took meanwhile.
An engine gets no row where, before it is measured, logits are not finite or the first pipeline stage reads other tokens
than the last has sampled, nor where a measured generation has ids outside the vocabulary.

    python bench/vllm_decode.py                                     # the bf16 ladder of Beam, one cell per visible GPU
    python bench/vllm_decode.py --bases bf16,mxfp8 --archs beam,qwen3
    python bench/vllm_decode.py --together 3                        # three engines share a GPU, measured in turn
    python bench/vllm_decode.py --together 3 --hold FILE            # none is measured while FILE exists
    python bench/vllm_decode.py --tp 2                              # the same work a rank, and communication; or --pp 2
    python bench/vllm_decode.py --only "beam/bf16/ours/none,per-expert;beam/bf16/stock/none,per-expert"
    python bench/vllm_decode.py --cell --kernels ours --adapters none,per-expert --base bf16 --arch beam
    python bench/vllm_decode.py --full --tp 8                       # Beam at its full size; also --pp 2 --tp 4
    python bench/vllm_decode.py --full --tp 2 --layers 6 --together 2   # a cut depth for fewer GPUs
    python bench/vllm_decode.py --full --tp 8 --plan                # its memory per rank, no GPU needed
    python bench/vllm_decode.py --of-tp 2 --layers 4 --bases mxfp8 --ranks 16,32   # one rank's share of TP 2, alone
    python bench/vllm_decode.py --report                            # the tables of what has been measured

``--full`` serves whole layers of Beam-1.0 (256 experts of 2560 columns, 48 heads, the whole vocabulary, its share of
dense layers) over ``tp * pp`` GPUs, MXFP8 by default, random weights made on the GPUs. Every rank's memory is computed
and printed first, and a cell that would not fit (``--together``: in its part of the memory) is refused. Under pipeline
parallelism requests are admitted in as many parts as there are stages, so that each stage has a micro-batch, and stages
of fewer than 6 layers have full attention more often than Beam's, so that each has both kinds. Its rows
add step_ms, tokens_per_s_per_gpu, all_reduce_us (one all-reduce of a micro-batch, measured alone; a layer has two),
predicted_step_ms (us_per_layer of a single rank's share at the micro-batch, times the layers: no communication, dense
layers counted as sparse) and gap (step_ms less predicted_step_ms).

``--together N`` runs the ladder in waves, for an engine takes longer to start than to be measured, and one that starts
lengthens the steps of another on the same host: N engines start at once on each set of tp * pp GPUs, then wait, and
when none of the wave is starting they are measured one after another on each set, each alone on its GPUs
(``--one-at-a-time``: alone on the machine). They share a GPU's memory, so N is bounded by the engine's weights.
``--hold FILE`` lets what else runs on the machine end first while this ladder's engines start already: no cell gets its
turn while FILE exists. It goes in waves too, of one engine a set without ``--together``.

Adapters: ``none`` is an engine without LoRA; ``per-expert`` and ``shared-outer`` (one A of gate and up, one B of down
for all experts; ``enable_moe_shared_loras``) are on gate, up and down of every expert, at rank 32 or those of
``--ranks``; ``--attention`` adds q, k, v, o and the attention gate. vLLM's own Beam takes no LoRA: its stock column
runs vLLM's kernels under a subclass that only declares it.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCAB, RANK = 5120, 2560, 256, 8, 151936, 32
WIDE, HEADS, KV_HEADS, LAYERS, DENSE = 20480, 48, 8, 52, 3
FULL_EVERY = 6  # the others of Beam's attention layers see a window
SHARE = 8  # of a single rank's cells: one of eight tensor-parallel ranks
SHARE_LAYERS = 16  # of such a cell: with fewer a step of 8 requests waits for the host, and not for the GPU
PROMPT, SHORT, LONG = 64, 32, 288
STOCK = "beam_moe_bench_stock"
OPTIONAL = {
    "flashinfer": "flashinfer-python",
    "humming": "humming-kernels",
    "cutlass": "nvidia-cutlass-dsl",
    "quack": "quack-kernels",
    "tilelang": "tilelang",
}
FULL_TOKENS = 2048  # most tokens in a batch of a full-size engine
FULL_USE = 0.92  # share of a GPU's memory that a full-size engine may use
USE = 0.85  # that other engines may use, all those on a GPU together
MODEL_LEN = 2048
FULL_MODES = ("none", "per-expert", "shared-outer")


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


def model_config(arch: str, layers: int, of_tp: int = SHARE, pp: int = 1) -> dict:
    """A model's ``config.json``: ``beam`` and ``qwen3`` are one rank's share of ``of_tp``, ``beam-full`` is whole.

    A stage of two layers or more has attention of both kinds, as Beam's have at up to 8 stages: where ``pp`` stages of
    a cut depth have too few layers for it, full attention comes more often. In a stage of one kind vLLM takes another
    path through FlashAttention 3, with a schedule made ahead, and the KV cache has groups without a layer.
    """
    share = 1 if arch == "beam-full" else of_tp
    dense = round(DENSE * layers / LAYERS) if arch == "beam-full" else 0
    common = {
        "torch_dtype": "bfloat16", "hidden_act": "silu", "vocab_size": VOCAB // share, "hidden_size": HIDDEN,
        "intermediate_size": WIDE // share, "num_hidden_layers": layers, "num_attention_heads": HEADS // share,
        "num_key_value_heads": KV_HEADS // share, "head_dim": 128, "moe_intermediate_size": INTERMEDIATE // share,
        "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    if arch == "qwen3":
        return {
            **common, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
            "mlp_only_layers": [], "max_position_embeddings": 32768, "rope_theta": 1e6, "attention_bias": False,
            "use_sliding_window": False,
        }  # fmt: skip
    every = max(1, min(FULL_EVERY, layers // pp))
    first = layers % every if every < FULL_EVERY else 0
    full = [(i + 1 - first) % every == 0 or i == layers - 1 for i in range(layers)]
    return {
        **common, "architectures": ["BeamForCausalLM"], "model_type": "beam", "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "final_logit_softcapping": 30.0, "sliding_window": 512,
        "max_position_embeddings": 8192, "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "layer_types": ["full_attention" if f else "sliding_attention" for f in full],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": None,
        },
    }  # fmt: skip


def write_model(folder: Path, arch: str, layers: int, of_tp: int = SHARE, pp: int = 1) -> None:
    """A configuration without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(arch, layers, of_tp, pp)))


# --- in the workers: each takes the model of its rank


def on_workers(llm, function, *args) -> list:
    """``function(worker, *args)`` on every rank, sent by value: a script's functions have no module to find them in."""
    return llm.collective_rpc(lambda worker: function(worker, *args))


def on_models(llm, function, *args) -> list:
    """``function(model, *args)`` on every rank. `LLM.apply_model` pickles by name, which a closure has none of."""
    return on_workers(llm, lambda worker: function(worker.get_model(), *args))


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


def add_adapter(model, number: int, shared: bool, attention: bool, rank: int = RANK) -> int:
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
                wide = [new(1, rank, hidden).expand(outer, -1, -1).contiguous() for _ in range(2)]
                experts_of[key] = (
                    [wide[0], new(1, rank, inter).expand(e, -1, -1).contiguous(), wide[1]],
                    [new(1, inter, rank).expand(e, -1, -1).contiguous(),
                     new(1, hidden, rank).expand(outer, -1, -1).contiguous(),
                     new(1, inter, rank).expand(e, -1, -1).contiguous()],
                )  # fmt: skip
            a, b = experts_of[key]
            loras[name] = PackedLoRALayerWeights(name, rank, [None] * 3, list(a), list(b), scaling=[1, 1, 1])
        elif attention and ".self_attn." in name:
            tp = getattr(module, "tp_size", 1)
            row = type(module).__name__.startswith("RowParallel")
            parts = manager.packed_modules.get(name)
            in_dim = module.lora_a_stacked[0].shape[-1] * (tp if row else 1)
            a = [new(rank, in_dim) for _ in module.lora_a_stacked]
            b = [new(s.shape[-2] * (1 if row else tp), rank) for s in module.lora_b_stacked]
            if parts:
                loras[name] = PackedLoRALayerWeights(name, rank, [None] * len(a), a, b, scaling=[1] * len(a))
            else:
                loras[name] = LoRALayerWeights(name, rank, rank, a[0], b[0], scaling=1)
    manager.add_adapter(LoRAModel(number, rank, loras))
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


def on_the_models_stream(worker) -> bool:
    """Let the pipeline's exchange of sampled tokens wait for the stream that the model runs on; whether it did not.

    vLLM runs the model on a stream that it makes at its first need of one, and its `PPHandler` keeps the stream it was
    made on. Where PyNccl is there, its first call makes the stream before. Where it is not (``VLLM_DISABLE_PYNCCL``, or
    an NCCL older than vLLM's) the handler may be first: it then sends tokens before they are sampled and reads them
    before they have come, which are token ids and counts of anything.
    """
    import torch

    runner = worker.model_runner
    handler = getattr(runner, "pp_handler", None)
    if handler is None or not torch.cuda.is_available():
        return False
    runner.__dict__.pop("main_stream", None)  # the same, kept at its first use
    stream = torch.cuda.current_stream(worker.device)
    moved = handler.main_stream != stream
    torch.cuda.synchronize()
    handler.main_stream = stream
    return moved


def watch_steps(worker, on: bool) -> dict | None:
    """With ``on`` keep what the first stage reads and the last computes; without, return it and stop.

    ``read``: by request the token ids that were embedded, over all steps. ``logits``, ``bad``: how many rows the last
    stage computed, and how many of their values are not finite.
    """
    import torch

    runner = worker.model_runner
    model = runner.get_model()
    if on:
        prepare, compute = runner.prepare_inputs, model.compute_logits
        kept = runner.__dict__["_bench_kept"] = ([], [], prepare, compute)

        def prepare_inputs(*args, **kwargs):
            batch = prepare(*args, **kwargs)
            if runner.is_first_pp_rank:
                kept[0].append((batch.req_ids, batch.query_start_loc_np.copy(), batch.input_ids.clone()))
            return batch

        def compute_logits(*args, **kwargs):
            logits = compute(*args, **kwargs)
            if logits is not None:
                kept[1].append((len(logits), (~torch.isfinite(logits)).sum()))
            return logits

        runner.prepare_inputs = prepare_inputs
        object.__setattr__(model, "compute_logits", compute_logits)  # a Module's own would look for a parameter
        return None
    steps, logits, runner.prepare_inputs, compute = runner.__dict__.pop("_bench_kept")
    object.__setattr__(model, "compute_logits", compute)
    read: dict[str, list[int]] = {}
    for requests, starts, ids in steps:
        ids = ids.tolist()
        for i, request in enumerate(requests):
            read.setdefault(request, []).extend(ids[starts[i] : starts[i + 1]])
    return {
        "read": list(read.values()),
        "logits": sum(n for n, _ in logits),
        "bad": sum(int(bad) for _, bad in logits),
    }


def faults(found: list[dict], outputs: list, vocab: int) -> list[str]:
    """What is wrong with a generation that `watch_steps` saw on every rank and that returned ``outputs``."""
    said = ids_out_of_range(outputs, vocab)
    rows, bad = sum(f["logits"] for f in found), sum(f["bad"] for f in found)
    if bad or not rows:
        said.append(f"{bad} values of {rows} rows of logits are not finite" if rows else "no stage computed logits")
    expected = [[*o.prompt_token_ids, *o.outputs[0].token_ids[:-1]] for o in outputs]
    for f in found:
        if not f["read"]:
            continue  # of a later stage
        wrong = sum(not any(read[: len(want)] == want for read in f["read"]) for want in expected)
        if wrong:
            ids = [i for read in f["read"] for i in read]
            said.append(
                f"of {len(expected)} requests the first stage embedded other tokens than were sampled for {wrong}: "
                f"ids {min(ids)} to {max(ids)}, vocabulary {vocab}"
            )
    if not any(f["read"] for f in found):
        said.append("no stage read a token")
    return said


def ids_out_of_range(outputs: list, vocab: int) -> list[str]:
    ids = [i for o in outputs for i in o.outputs[0].token_ids]
    if ids and 0 <= min(ids) and max(ids) < vocab:
        return []
    return [f"sampled ids {min(ids)} to {max(ids)}, vocabulary {vocab}" if ids else "no token was sampled"]


def all_reduce_us(model, batches: list[int], hidden: int) -> dict[int, float]:
    """Microseconds of one all-reduce of (batch, hidden) bf16 over the tensor-parallel group, in a graph of many."""
    import torch
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm.distributed.parallel_state import graph_capture

    device, calls, replays, found = next(model.parameters()).device, 64, 8, {}
    with torch.inference_mode():
        for batch in batches:
            x = torch.ones(batch, hidden, dtype=torch.bfloat16, device=device)
            tensor_model_parallel_all_reduce(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with graph_capture(device) as context, torch.cuda.graph(graph, stream=context.stream):
                for _ in range(calls):
                    tensor_model_parallel_all_reduce(x)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            torch.cuda.synchronize()
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            found[batch] = round(begin.elapsed_time(end) * 1e3 / (calls * replays), 2)
    return found


# --- one cell


def distinct_experts(ids: dict[str, list[list[int]]], batch: int) -> float:
    """Mean over layers of the distinct experts that ``batch`` tokens choose, over random draws of captured tokens."""
    rng, total, draws = random.Random(0), 0, 32
    for rows in ids.values():
        for _ in range(draws):
            chosen = rng.sample(rows, min(batch, len(rows)))
            total += len({e for row in chosen for e in row})
    return round(total / (draws * max(len(ids), 1)), 1)


def quiet_multicast() -> None:
    """Where the machine keeps NVLink multicast off (NCCL_NVLS_ENABLE=0), keep vLLM from it too.

    Raises:
        SystemExit: FlashInfer is there, through which Beam's own all-reduce would map multicast memory.
    """
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        return
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.update(VLLM_ALLREDUCE_USE_SYMM_MEM="0", VLLM_ALLREDUCE_USE_FLASHINFER="0")
    if importlib.util.find_spec("flashinfer") is not None:
        raise SystemExit("NVLink multicast is off here, and vLLM's Beam would use it through FlashInfer: remove that")


def stolen_s(stat: str = "/proc/stat") -> float:
    """Seconds of processor time that this machine's host has given to others so far, over all processors.

    It lengthens steps that are short, which wait for the host: a row with much of it is worth another run.
    """
    try:
        first = Path(stat).read_text().splitlines()[0].split()
        return int(first[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def keep_rows(path: Path | None, rows: list[dict]) -> None:
    """Write what has been measured so far, whole or not at all."""
    if path is not None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(rows))
        part.replace(path)


def most_requests(opts: argparse.Namespace) -> int:
    return max(64, *map(int, opts.batches.split(",")))


def kv_bytes(opts: argparse.Namespace) -> int:
    """KV cache of a rank: twice what the largest batch and one request of ``MODEL_LEN`` need, in whole GiB."""
    config = model_config(opts.arch, opts.layers, opts.of_tp)
    heads = max(1, config["num_key_value_heads"] // opts.tp)
    token = config["num_hidden_layers"] * 2 * heads * config["head_dim"] * 2  # K and V, bf16; all stages' layers
    need = 2 * token * (most_requests(opts) * (PROMPT + LONG) + MODEL_LEN)
    return -(-need // 2**30) * 2**30


def memory_options(opts: argparse.Namespace) -> dict:
    """An engine's memory. With a fixed KV cache vLLM does not profile, which fails where a neighbour frees memory.

    ``gpu_memory_utilization`` is then only the share that must be free when the engine starts.
    """
    if opts.arch == "beam-full":
        fixed = {"kv_cache_memory_bytes": kv_bytes(opts)} if opts.together > 1 else {}
        return {"gpu_memory_utilization": FULL_USE / opts.together} | fixed
    return {"gpu_memory_utilization": USE / opts.together, "kv_cache_memory_bytes": kv_bytes(opts)}


def wait_for_turn(rows: Path, ladder: int) -> None:
    """Say, by a file beside ``rows``, that the engine is ready, and sleep until there is one that says go.

    Raises:
        SystemExit: process ``ladder``, which writes it, is no longer this one's parent.
    """
    begin = time.monotonic()
    rows.with_suffix(".ready").touch()
    print("ready, waits for its turn", flush=True)
    while not rows.with_suffix(".go").exists():
        if os.getppid() != ladder:
            raise SystemExit("the ladder has gone: no turn will come")
        time.sleep(0.2)
    print(f"its turn, after a wait of {time.monotonic() - begin:.1f} s", flush=True)


def print_kernels(title: str, generate: Callable[[int], object], layers: int) -> None:
    """GPU time of a decode step by kernel, summed over its launches, a layer each: by the profiler, which sees every
    launch whole, so that those that overlap add up to more than the step."""
    from harness import print_table
    from torch.profiler import ProfilerActivity, profile

    def seen(tokens: int) -> tuple[Counter, Counter]:
        us, launches = Counter(), Counter()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            generate(tokens)
        for event in prof.key_averages():
            us[event.key] += event.self_device_time_total
            launches[event.key] += event.count
        return us, launches

    few, many = 4, 20
    (us, launches), (us_many, launches_many) = seen(few), seen(many)
    per = (many - few) * layers
    rows = [
        (name[:100], (launches_many[name] - launches[name]) / per, (us_many[name] - us[name]) / per) for name in us_many
    ]
    rows = sorted((row for row in rows if row[2] > 0.005), key=lambda row: -row[2])
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    print_table(f"Kernels of a step, {title}", ("kernel", "launches a layer", "us a layer"), rows)


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
    gpus = opts.tp * opts.pp
    if gpus > 1:
        quiet_multicast()
    if opts.pp > 1:  # vLLM tells no error of a stage before the last: the others wait for it this long
        os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "120")
    import torch
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    modes = opts.adapters.split(",")
    lora = modes != ["none"]
    shared = "shared-outer" in modes
    full = opts.arch == "beam-full"
    if shared and "per-expert" in modes:
        raise SystemExit("one engine keeps one layout: per-expert or shared-outer")
    model = opts.work / f"{opts.arch}{opts.layers}"
    write_model(model, opts.arch, opts.layers, opts.of_tp, opts.pp)
    batches = [int(b) for b in opts.batches.split(",")]
    micro = {b: -(-b // opts.pp) for b in batches}
    extra = {}
    if lora:
        extra = {
            "enable_lora": True, "max_loras": 1, "max_lora_rank": opts.rank, "max_cpu_loras": 1,
            "enable_moe_shared_loras": shared,
        }  # fmt: skip
    if opts.target_modules:
        extra["lora_target_modules"] = opts.target_modules.split(",")
    start = time.perf_counter()
    llm = LLM(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
        max_model_len=MODEL_LEN, max_num_seqs=most_requests(opts), max_num_batched_tokens=FULL_TOKENS if full else 4096,
        enable_prefix_caching=False, quantization="mxfp8" if opts.base == "mxfp8" else None,
        tensor_parallel_size=opts.tp, pipeline_parallel_size=opts.pp,
        distributed_executor_backend="mp" if gpus > 1 else None,
        compilation_config={"cudagraph_capture_sizes": sorted({*batches, *micro.values()})},
        kernel_config={"enable_jit_warmup": opts.jit_warmup}, **memory_options(opts), **extra,
    )  # fmt: skip
    if any(on_workers(llm, on_the_models_stream)):
        print("vLLM's exchange of sampled tokens waited for another stream than the model's: put right", flush=True)
    routers = on_models(llm, spread_routing)
    added = on_models(llm, add_adapter, 1, shared, opts.attention, opts.rank) if lora else [0]
    started = time.perf_counter() - start
    used = sorted({k for names in on_models(llm, kernels_in_use) for k in names})
    print(f"engine started in {started:.0f} s; routers {routers}, adapter modules {added}, experts {used}", flush=True)
    request = LoRARequest("adapter", 1, "/in/memory") if lora else None
    rng = random.Random(0)

    vocab = model_config(opts.arch, opts.layers, opts.of_tp)["vocab_size"]

    def serve(prompts: list[dict], params, adapter, parts: int) -> list:
        """As ``LLM.generate``, the requests admitted in ``parts`` steps: a pipeline then has as many micro-batches."""
        engine, outputs = llm.llm_engine, []
        for part in range(parts):
            for i in range(part, len(prompts), parts):
                engine.add_request(f"{time.monotonic_ns()}-{i}", prompts[i], params, lora_request=adapter)
            outputs += engine.step()
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return outputs

    def generate(batch: int, tokens: int, adapter, length: int = PROMPT) -> tuple[float, list]:
        """Seconds, and what vLLM returned."""
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, VOCAB // SHARE) for _ in range(length)]} for _ in range(batch)
        ]
        params = SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        # with several GPUs this process has none of them: a result is there when its tokens are
        wait = torch.accelerator.synchronize if gpus == 1 else lambda: None
        wait()
        begin = time.perf_counter()
        if opts.pp > 1:
            outputs = serve(prompts, params, adapter, min(opts.pp, batch))
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        wait()
        seconds = time.perf_counter() - begin
        refuse(ids_out_of_range(outputs, vocab))
        return seconds, outputs

    def refuse(said: list[str]) -> None:
        if said:
            raise SystemExit(f"no time is printed, what this engine computes is nothing: {'; '.join(said)}")

    if opts.ladder:
        wait_for_turn(opts.rows, opts.ladder)
    on_models(llm, capture_routing, True)
    generate(32, 2, request)
    ids = {}
    for found in on_models(llm, capture_routing, False):
        ids.update(found)
    reduce_us = {}
    if opts.tp > 1:
        per_rank = on_models(llm, all_reduce_us, sorted(set(micro.values())), HIDDEN)
        reduce_us = {b: max(rank[b] for rank in per_rank) for b in per_rank[0]}
        print(f"all-reduce of a micro-batch, us: {reduce_us}", flush=True)
    missing = sorted(p for m, p in OPTIONAL.items() if importlib.util.find_spec(m) is None)
    rows: list[dict] = []
    for mode in modes:
        adapter = None if mode == "none" else request
        on_workers(llm, watch_steps, True)
        _, outputs = generate(batches[0], 8, adapter)
        refuse(faults(on_workers(llm, watch_steps, False), outputs, vocab))
        for batch in batches:
            before = stolen_s()
            short, long = (min(generate(batch, n, adapter)[0] for _ in range(opts.repeats)) for n in (SHORT, LONG))
            stolen = round(stolen_s() - before, 2)
            step = (long - short) / (LONG - SHORT)
            row = {
                "batch": batch, "arch": opts.arch, "base": opts.base, "adapters": mode, "kernels": opts.kernels,
                "attention_adapter": opts.attention and mode != "none", "lora_enabled": lora, "tp": opts.tp,
                "pp": opts.pp, "layers": opts.layers, "rank": opts.rank if mode != "none" else 0, "gpus": gpus,
                "of_tp": 1 if full else opts.of_tp,
                "target_modules": opts.target_modules or "all", "step_us": round(step * 1e6, 1),
                "us_per_layer": round(step * 1e6 / opts.layers, 1), "tokens_per_s": round(batch / step, 1),
                "tokens_per_s_per_gpu": round(batch / step / gpus, 1), "step_ms": round(step * 1e3, 3),
                "micro_batch": micro[batch], "all_reduce_us": reduce_us.get(micro[batch]),
                "distinct_experts": distinct_experts(ids, micro[batch]), "missing": missing, "experts_class": used,
                "vllm_version": vllm.__version__, "start_s": round(started, 1), "together": opts.together,
                "host_stolen_s": stolen,
            }  # fmt: skip
            row["case"] = case_of(row)
            rows.append(row)
            print("ROW " + json.dumps(row), flush=True)
            keep_rows(opts.rows, rows)
            if opts.profile:
                print_kernels(
                    f"{mode}, {batch} requests", functools.partial(generate, batch, adapter=adapter), opts.layers
                )
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
    if row.get("rank") not in (0, None, RANK):
        parts.append(f"rank={row['rank']}")
    if row["arch"] != "beam-full" and row.get("of_tp", SHARE) * row["tp"] != SHARE:
        parts.append(f"of-tp={row['of_tp']}")
    return "/".join([*parts, f"tp{row['tp']}pp{row['pp']}", f"layers={row['layers']}", f"batch={row['batch']}"])


def with_ratios(rows: list[dict]) -> list[dict]:
    """Every row with its speed over stock's: bf16 per-expert LoRA; the same base and layout; the same base, no adapter.

    The last is an engine without LoRA, or, where none was measured, one that has it and no request that uses it.
    """
    time_of = {row["case"]: row["us_per_layer"] for row in rows}

    def stock(row: dict, **changes) -> float | None:
        other = {**row, "kernels": "stock", **changes}
        if other["adapters"] == "none":
            other.update(lora_enabled=False, attention_adapter=False, target_modules="all", rank=0)
        elif not other.get("rank"):
            other["rank"] = RANK
        return time_of.get(case_of(other))

    def bare(row: dict) -> str:
        plain = {"adapters": "none", "attention_adapter": False, "target_modules": "all", "rank": 0}
        return case_of({**row, **plain, "kernels": "stock", "lora_enabled": True})

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
                "ratio_to_stock_base": over(stock(row, adapters="none") or time_of.get(bare(row)), row),
            }
        )
    return out


def with_predictions(rows: list[dict]) -> list[dict]:
    """Full-size rows with the step that a single rank's share predicts, None where no such share was measured."""
    single = {}
    for row in sorted(rows, key=lambda r: r["layers"]):  # the deepest wins: it has the least of the head in a layer
        if row["arch"] == "beam" and (row["tp"], row["pp"], row["target_modules"]) == (1, 1, "all"):
            key = (row.get("of_tp", SHARE), row["base"], row["kernels"], row["adapters"], row["rank"])
            single[(*key, row["lora_enabled"], row["attention_adapter"], row["batch"])] = row
    out = []
    for row in rows:
        if row["arch"] != "beam-full":
            out.append(row)
            continue
        key = (row["tp"], row["base"], row["kernels"], row["adapters"], row["rank"], row["lora_enabled"])
        one = single.get((*key, row["attention_adapter"], row["micro_batch"]))
        predicted = None if one is None else round(one["us_per_layer"] * row["layers"] / 1e3, 3)
        out.append(
            {
                **row,
                "predicted_step_ms": predicted,
                "predicted_from": None if one is None else one["case"],
                "gap": None if predicted is None else round(row["step_ms"] - predicted, 3),
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
    ladder = FULL_MODES if opts.full else ("none", "none,per-expert", "shared-outer")
    for arch in ["beam-full"] if opts.full else opts.archs.split(","):
        for base in opts.bases.split(","):
            for kernels in opts.kernels_list.split(","):
                if (arch, base, kernels) == ("qwen3", "mxfp8", "ours"):
                    print("qwen3/mxfp8/ours: left out, our experts serve other models in bf16 only")
                    continue
                for adapters in ladder:
                    for rank in opts.ranks.split(","):
                        cell = {"arch": arch, "base": base, "kernels": kernels, "adapters": adapters, "rank": rank}
                        if adapters != "none" or cell["rank"] == opts.ranks.split(",")[0]:
                            out.append(cell)
            if opts.attention_cells:
                for kernels in opts.kernels_list.split(","):
                    for adapters in ("per-expert", "shared-outer"):
                        for rank in opts.ranks.split(","):
                            cell = {"arch": arch, "base": base, "kernels": kernels, "adapters": adapters}
                            out.append({**cell, "rank": rank, "attention": True})
    if opts.only:
        wanted = opts.only.split(";")

        def names(c: dict) -> set[str]:
            name = "/".join([c["arch"], c["base"], c["kernels"], c["adapters"]])
            return {name, f"{name}/r{c['rank']}"}

        unknown = [w for w in wanted if not any(w in names(c) for c in out)]
        if unknown:
            raise SystemExit(f"--only names no cell: {', '.join(unknown)}; there are {[sorted(names(c)) for c in out]}")
        out = [c for c in out if names(c) & set(wanted)]
    return out


def gpu_bytes(opts: argparse.Namespace) -> int:
    """Memory of one GPU: the smallest that nvidia-smi names, ``--gpu-gib`` where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        found = [int(line) for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        found = []
    return min(found) << 20 if found else int(opts.gpu_gib * 2**30)


def fits(opts: argparse.Namespace, cell: dict) -> bool:
    """Print a full-size cell's memory plan; whether every rank fits."""
    from memory_plan import plan, refuse

    adapters = cell["adapters"].split(",")[-1]
    name = f"{cell['base']} {cell['kernels']} {adapters} rank {cell['rank']}, TP {opts.tp}, PP {opts.pp}"
    try:
        plans = plan(
            model_config("beam-full", opts.layers), tp=opts.tp, pp=opts.pp, base=cell["base"], adapters=adapters,
            rank=int(cell["rank"]), ours=cell["kernels"] == "ours", tokens_each=PROMPT + LONG,
            requests=max(64, *map(int, opts.batches.split(","))), batch_tokens=FULL_TOKENS,
        )  # fmt: skip
        print(f"{name}, {opts.layers} layers", *(line for p in plans for line in p.lines()), sep="\n", flush=True)
        refuse(plans, int(FULL_USE * gpu_bytes(opts)) // opts.together, name)
    except ValueError as error:
        print(f"REFUSED {error}", flush=True)
        return False
    return True


def merge(rows: list[dict]) -> list[dict]:
    """Add rows to this device's file; ratios and predictions of all its rows are computed anew."""
    import harness

    path = harness.write_rows("vllm_decode", rows) if rows else harness.results_path("vllm_decode")
    merged = with_predictions(with_ratios(harness.read_rows(path)))
    if merged:
        harness._merge(path, merged)
    return merged


@dataclass
class Running:
    """A cell's process: starting, ready (waits for its turn, ``limit`` the seconds left) or measured (until when)."""

    process: subprocess.Popen
    name: str
    rows: Path
    gpus: list[str]
    begun: float
    limit: float
    stage: str


def processors_near(gpus: list[str], root: Path = Path("/sys/bus/pci/devices")) -> set[int] | None:
    """Processors of the memory nodes that these GPUs hang on; None where the machine does not say it of each."""
    near = set()
    for gpu in gpus:
        query = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader", "-i", gpu]
        try:
            bus = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip().lower()
            ranges = (root / bus[-12:] / "local_cpulist").read_text().strip()
            of_gpu = set()
            for part in ranges.split(","):
                first, _, last = part.partition("-")
                of_gpu |= set(range(int(first), int(last or first) + 1))
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        if not of_gpu & os.sched_getaffinity(0):
            return None
        near |= of_gpu
    return near & os.sched_getaffinity(0) or None


def start_cell(opts: argparse.Namespace, cell: dict, gpus: list[str], logs: Path, port: int, turns: bool) -> Running:
    """Start a cell's process, in a process group of its own; with ``turns`` it waits for `give_turns`."""
    name = "_".join(str(v).replace(",", "+") for v in cell.values()) + f"_tp{opts.tp}pp{opts.pp}"
    rows = logs / f"{name}.json"
    for suffix in (".json", ".ready", ".go"):
        rows.with_suffix(suffix).unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--cell", "--rows", str(rows)]
    command += ["--tp", str(opts.tp), "--pp", str(opts.pp), "--of-tp", str(opts.of_tp)]
    command += ["--layers", str(opts.layers), "--batches", opts.batches, "--together", str(opts.together)]
    command += ["--repeats", str(opts.repeats), "--work", str(opts.work / name)]
    command += ["--target-modules", opts.target_modules] if opts.target_modules else []
    command += ["--jit-warmup"] if opts.jit_warmup else []
    command += ["--ladder", str(os.getpid())] if turns else []
    for key, value in cell.items():
        command += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    # engines of a wave compile at once, and vLLM does not write all of its cache whole or not at all
    cache = opts.work / name / "cache" if turns else opts.work / "cache"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "VLLM_CACHE_ROOT": str(cache)}
    env["VLLM_PORT"] = str(port)
    env["PYTHONFAULTHANDLER"] = "1"  # a worker that dies outside Python says where, in the cell's log
    with open(logs / f"{name}.log", "w") as log:
        # outside the checkout: vLLM's own subprocesses would import its folders by their bare names
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=opts.work, start_new_session=True
        )
    now = time.monotonic()
    return Running(process, name, rows, gpus, now, now + opts.timeout, "starting" if turns else "measured")


def give_turns(running: list[Running], one_at_a_time: bool, hold: Path | None) -> None:
    """When no cell is starting and no file ``hold`` exists, let one that waits measure on each set where none does.

    A cell's limit stands still while it waits: the seconds left when it was ready are those left at its turn.
    """
    now = time.monotonic()
    for r in running:
        if r.stage == "starting" and r.rows.with_suffix(".ready").exists():
            r.stage, r.limit = "ready", r.limit - now
    if any(r.stage == "starting" for r in running) or (hold and hold.exists()):
        return
    for r in running:
        busy = (other.stage == "measured" and (one_at_a_time or other.gpus == r.gpus) for other in running)
        if r.stage == "ready" and not any(busy):
            r.stage, r.limit = "measured", r.limit + now
            r.rows.with_suffix(".go").touch()


def lives(group: int) -> bool:
    """Whether a process group has a process left; a zombie holds no GPU."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended meanwhile
            continue
        if own == str(group) and state not in "ZX":
            return True
    return False


def see_off(process: subprocess.Popen, patience: float) -> None:
    """Return when a cell has gone with its engine's workers, which hold GPUs; those left after a while are killed."""
    for seconds in (patience, 10):
        end = time.monotonic() + seconds
        while lives(process.pid) and time.monotonic() < end:
            process.poll()
            time.sleep(0.1)
        if lives(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    process.poll()  # not wait: a process that the driver does not let go must not hold the others


FAULT = re.compile(
    r"^(?!.*\b(?:DEBUG|INFO|WARNING) \d\d-\d\d ).*"  # what vLLM can do without it logs as a warning, traceback and all
    r"(?:Traceback \(most recent call last\)|Fatal Python error|terminate called|died unexpectedly|hit an exception"
    r"|CUDA error)",  # FlashAttention 3 prints it and ends the process: no signal, no traceback
    re.MULTILINE,
)


def why(log: str, around: int = 3000) -> str:
    """The end of a failed cell's log and, before it, where the first fault stands: a worker's, often far above."""
    log = "\n".join(line[:400] for line in log.splitlines())  # vLLM dumps a whole batch in one line
    first, end = FAULT.search(log), max(0, len(log) - around)
    if first is None or first.start() >= end:
        return log[end:]
    begin = max(0, first.start() - around // 10)
    return log[begin : min(begin + around, end)] + "\n[...]\n" + log[end:]


def run_ladder(opts: argparse.Namespace) -> int:
    """Run the cells as processes over the visible GPUs, merge the rows of each as it ends, print the tables."""
    waiting, failed = cells(opts), []
    running: list[Running] = []
    if opts.full:
        asked, waiting = len(waiting), [c for c in waiting if fits(opts, c)]
        failed += ["refused"] * (asked - len(waiting))
        if opts.plan or not waiting:
            return 1 if failed else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        names = visible.split(",")
    else:
        import torch

        names = [str(i) for i in range(torch.cuda.device_count())]
    per_cell = opts.tp * opts.pp
    sets = [names[i : i + per_cell] for i in range(0, len(names) - per_cell + 1, per_cell)]
    if not sets:
        print(f"needs {per_cell} GPUs, sees {len(names)}")
        return 1
    logs = opts.work.resolve() / "vllm_decode_logs"
    logs.mkdir(parents=True, exist_ok=True)
    print(
        f"{len(waiting)} cells on {len(sets)} x {per_cell} GPU, {opts.together} at a time on each; logs in {logs}",
        flush=True,
    )
    turns = opts.together > 1 or opts.one_at_a_time or opts.hold is not None
    deadline = time.monotonic() + opts.budget
    while waiting or running:
        if fresh := not running:  # a wave that does not fill the slots is spread over the sets
            free = sets * opts.together
        while waiting and free and (fresh or not turns) and time.monotonic() < deadline:
            cell, gpus = waiting.pop(0), free.pop(0)
            # two engines that start at once must not meet at one port
            running.append(start_cell(opts, cell, gpus, logs, 21000 + 50 * len(waiting), turns))
        if waiting and time.monotonic() >= deadline:
            print(f"out of time before {len(waiting)} cells: {[' '.join(map(str, c.values())) for c in waiting]}")
            waiting = []
        for r in list(running):
            late = r.stage != "ready" and time.monotonic() >= r.limit
            if r.process.poll() is None and not late:
                continue
            see_off(r.process, 0 if r.process.poll() is None else 10)
            running.remove(r)
            free.append(r.gpus)
            rows_found = json.loads(r.rows.read_text()) if r.rows.exists() else []
            merge(rows_found)
            state = "ok"
            if r.process.returncode != 0:
                failed.append(r.name)
                state = f"FAILED ({r.process.returncode})"
            print(f"{r.name}: {state}, {len(rows_found)} rows, {time.monotonic() - r.begun:.0f} s", flush=True)
            if r.process.returncode != 0:
                print(why((logs / f"{r.name}.log").read_text()), f"--- end of {r.name}", sep="\n", flush=True)
        give_turns(running, opts.one_at_a_time, opts.hold)
        time.sleep(0.5)
    report(merge([]))
    return 1 if failed else 0


def report(rows: list[dict]) -> None:
    """Tables by architecture and parallelism, the slowest ladder first."""
    import harness

    def group(r: dict) -> tuple:
        return r["arch"], r["tp"], r["pp"], r["layers"], r.get("of_tp", SHARE)

    for key in sorted({group(r) for r in rows}):
        arch, tp, pp, layers, of_tp = key
        mine = [r for r in rows if group(r) == key]
        mine.sort(key=lambda r: (r["base"], -r["batch"], r["kernels"] != "stock", r["adapters"]))
        harness.print_table(
            f"{arch}, TP {tp}, PP {pp}, {layers} layers"
            + (f", each rank's share that of TP {of_tp * tp}" if arch != "beam-full" else ""),
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
                    + (" (LoRA on)" if r["adapters"] == "none" and r["lora_enabled"] else "")
                    + (f" r{r['rank']}" if r["rank"] not in (0, RANK) else ""),
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
        if arch == "beam-full":
            harness.print_table(
                "step of all layers, with its communication",
                [
                    "base",
                    "batch",
                    "kernels",
                    "adapters",
                    "rank",
                    "ms",
                    "predicted",
                    "gap",
                    "all-reduce us",
                    "tok/s/GPU",
                ],
                [
                    [
                        *(r[k] for k in ("base", "batch", "kernels", "adapters", "rank", "step_ms")),
                        *(r[k] for k in ("predicted_step_ms", "gap", "all_reduce_us", "tokens_per_s_per_gpu")),
                    ]
                    for r in mine
                ],
            )
        for r in mine:
            if r["batch"] == 16 and r["arch"] == "beam" and r.get("of_tp", SHARE) == SHARE and (tp, pp) == (1, 1):
                print(
                    f"  PP2 x TP8 at 32 requests by this step, {r['base']} {r['kernels']} {r['adapters']}: "
                    f"{deployment(r['us_per_layer']):.0f} tokens/s/GPU, without all-reduces and pipeline hop"
                )
    missing = sorted({m for r in rows for m in r["missing"]})
    if missing:
        print(f"vLLM's optional packages not there: {', '.join(missing)}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="store_true", help="measure one engine in this process")
    parser.add_argument("--kernels", choices=["stock", "ours"], default="ours")
    parser.add_argument("--adapters", default="none,per-expert", help="modes of the cell's engine, by comma")
    parser.add_argument("--base", choices=["bf16", "mxfp8"], default="bf16")
    parser.add_argument("--arch", choices=["beam", "qwen3", "beam-full"], default="beam")
    parser.add_argument("--rank", type=int, default=RANK, help="the cell's adapter and bank")
    parser.add_argument("--attention", action="store_true", help="the adapter covers attention too")
    parser.add_argument("--profile", action="store_true", help="the cell, on one GPU, prints its step's time by kernel")
    parser.add_argument("--rows", type=Path, help="where the cell writes its rows")
    parser.add_argument("--ladder", type=int, help="the cell's parent, whose word it awaits, by files beside --rows")
    parser.add_argument("--archs", default="beam")
    parser.add_argument("--bases", help="by comma; bf16, with --full mxfp8")
    parser.add_argument("--ranks", help="adapter ranks, by comma; 32, with --full 16,32")
    parser.add_argument("--full", action="store_true", help="Beam at its full size over tp * pp GPUs")
    parser.add_argument("--plan", action="store_true", help="with --full: print the memory plans only")
    parser.add_argument("--gpu-gib", type=float, default=140.4, help="GPU memory to plan with where no GPU is")
    parser.add_argument(
        "--of-tp",
        type=int,
        choices=[1, 2, 4, 8],
        help="the model is this share of Beam; 8 / tp, one rank's of TP 8 each",
    )
    parser.add_argument("--kernels-list", default="stock,ours")
    parser.add_argument("--attention-cells", action="store_true", help="add cells with attention adapters")
    parser.add_argument("--only", help="arch/base/kernels/adapters[/rRANK] of the cells to run, by semicolon")
    parser.add_argument("--batches", help="by comma; 64,32,16,8,4,2,1, with --full 64,32,8,1")
    parser.add_argument("--layers", type=int, help="16, with --full 52")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--target-modules", default="", help="lora_target_modules; vLLM wraps every linear layer without"
    )
    parser.add_argument("--jit-warmup", action="store_true", help="compile every size first, as a served engine does")
    parser.add_argument("--together", type=int, default=1, help="engines that start at once on a GPU and share it")
    parser.add_argument("--one-at-a-time", action="store_true", help="measure one engine at a time on all the GPUs")
    parser.add_argument("--hold", type=Path, metavar="FILE", help="no cell gets its turn while FILE exists")
    parser.add_argument(
        "--timeout", type=float, default=400, help="seconds a cell may take, without its wait for a turn"
    )
    parser.add_argument(
        "--budget", type=float, default=570, help="seconds after which no cell is started, waits for a turn included"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "beam_moe_vllm_decode")
    parser.add_argument("--report", action="store_true", help="print the tables of the committed results")
    opts = parser.parse_args(arguments)
    for name in ("tp", "pp", "rank", "repeats", "together"):
        if (value := getattr(opts, name)) < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if opts.layers is not None and opts.layers < 1:
        parser.error(f"--layers must be at least 1, got {opts.layers}")
    for name, value in (("batches", opts.batches), ("ranks", opts.ranks)):
        if value and not all(part.isdigit() and int(part) > 0 for part in value.split(",")):
            parser.error(f"--{name} must be integers of at least 1 by comma, got {value}")
    if opts.plan and not opts.full:
        parser.error("--plan goes with --full")
    full = opts.full or opts.arch == "beam-full"
    if opts.profile and (not opts.cell or opts.tp * opts.pp > 1):
        parser.error("--profile goes with --cell on one GPU")
    if opts.ladder and not opts.rows:
        parser.error("--ladder goes with --rows")
    opts.bases = opts.bases or ("mxfp8" if full else "bf16")
    opts.ranks = opts.ranks or ("16,32" if full else str(RANK))
    opts.batches = opts.batches or ("64,32,8,1" if full else "64,32,16,8,4,2,1")
    opts.layers = opts.layers or (LAYERS if full else SHARE_LAYERS)
    if not opts.of_tp and SHARE % opts.tp and not full:
        parser.error(f"--tp {opts.tp} does not divide {SHARE}: name --of-tp")
    opts.of_tp = opts.of_tp or (1 if full else SHARE // opts.tp)
    opts.work = opts.work.resolve()
    opts.rows = opts.rows and opts.rows.resolve()
    opts.hold = opts.hold and opts.hold.resolve()
    return opts


def main() -> int:
    opts = parse()
    importable(opts.work)
    sys.path.insert(0, str(ROOT / "bench"))
    if opts.report:
        import harness

        root = harness.results_path("vllm_decode").parents[1]
        found = sorted(root.glob("*/vllm_decode.json"))
        for path in found:
            print(path.parent.name)
            report(with_predictions(with_ratios(harness.read_rows(path))))
        if not found:
            print(f"no */vllm_decode.json in {root}; BEAM_MOE_RESULTS names another folder")
        return 0 if found else 1
    if not opts.plan:
        from engines import need

        need("vllm_decode.py", "vllm")
    if not opts.cell:
        return run_ladder(opts)
    if near := processors_near(list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))):
        os.sched_setaffinity(0, near)  # a step that waits for the host is longer from the other socket
    os.chdir(opts.work)  # vLLM's own subprocesses would import a checkout's folders by their bare names
    run_cell(opts)
    if opts.ladder and opts.tp * opts.pp == 1:
        sys.stdout.flush()
        os._exit(0)  # the next of the wave waits for this GPU; an engine of several processes has workers to end
    return 0


if __name__ == "__main__":
    sys.exit(main())
