"""Training on Megatron with our modules: loss curves of every mode beside bf16's, and one MoE layer's time and memory.

    python bench/megatron_train.py layer [--rows 16384]      # experts of one layer, forward and backward
    python bench/megatron_train.py curves [--steps 200]      # one small Beam, the same data in the same order

``curves`` trains the Beam of ``rl_loop.py`` on sequences of a random second-order Markov chain over 64 tokens, from one
random checkpoint, with the distributed optimizer: in bf16, with MXFP8 experts, with every linear in MXFP8, and with
LoRA on bf16 and MXFP8 bases. ``layer`` times the experts of one rank of Beam (32 of 256 experts, hidden 5120,
intermediate 2560) as megatron-core calls them: its own sequential ones, PyTorch's grouped GEMM, Transformer Engine's
where it is there, and ours; one whose output or input gradient is wrong gets no time. Needs megatron-core 0.19.2 and
megatron-bridge 0.6.2.

A row is written as soon as it is known, a curve's every 25 steps. A curve that is complete in the result file is not
trained again (``--again`` does), so a second call goes on where ``--minutes`` ended the first.
"""

import argparse
import gc
import logging
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

MODES = {
    "bf16": {},
    "mxfp8_experts": {"recipe": ["*.experts.*"]},
    "mxfp8": {"recipe": ["*"]},
    "lora": {"lora": {"share_expert_adapters": False}},
    "lora_shared_outer": {"lora": {"experts_shared_outer_loras": True}},
    "lora_mxfp8": {"recipe": ["*"], "lora": {"share_expert_adapters": False}},
}
SYMBOLS = 64
LIMITS = {"mxfp8": 0.1, "bf16": 0.01}  # of the error over the reference's RMS; MXFP8 rounds both operands to 4 bits


def begin() -> None:
    """One rank of one: process groups, register, seeds."""
    import torch
    import torch.distributed as dist

    logging.disable(logging.INFO)  # megatron-core lists every parameter
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(0)
    store = f"file://{tempfile.mkdtemp()}/rendezvous"
    dist.init_process_group("nccl" if cuda else "gloo", store, rank=0, world_size=1)
    from beam_moe.integrations.megatron import register

    register()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=1, expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(0)


def data(steps: int, batch: int, length: int):
    """``steps`` batches of Markov sequences ``(batch, length + 1)``, the same for every mode."""
    import torch

    g = torch.Generator().manual_seed(0)
    following = torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=g).mul(2).softmax(-1)
    for _ in range(steps):
        ids = torch.randint(0, SYMBOLS, (batch, 2), generator=g)
        for _ in range(length - 1):
            ids = torch.cat([ids, torch.multinomial(following[ids[:, -2], ids[:, -1]], 1, generator=g)], 1)
        yield ids


def curve(mode: str, checkpoint: Path, args: argparse.Namespace) -> dict:
    """Losses of one mode, seconds a step and peak memory; written on the way."""
    import harness
    import rl_loop
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft.lora import LoRA
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from beam_moe.integrations.megatron import mxfp8_recipe

    what, cuda = MODES[mode], torch.cuda.is_available()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    bridge = AutoBridge.from_hf_pretrained(str(checkpoint), dtype=torch.bfloat16)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.params_dtype = provider.pipeline_dtype = torch.bfloat16
    provider.bf16, provider.expert_tensor_parallel_size = True, 1
    provider.cross_entropy_loss_fusion = provider.persist_layer_norm = False
    provider.seq_length = args.length
    if "recipe" in what:
        provider.quant_recipe = mxfp8_recipe(what["recipe"])
    if "lora" in what:
        lora = LoRA(dim=32, alpha=32, lora_A_init_method="kaiming", **what["lora"])

        def hook(chunks):
            chunks = lora(chunks, training=True)
            lora.set_params_to_save(chunks)
            return chunks

        provider.register_pre_wrap_hook(hook)
    provider.finalize()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunks = provider.provide_distributed_model(ddp_config=ddp, bf16=True)
    rate = args.lora_lr if "lora" in what else args.lr
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=rate, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
            clip_grad=1.0, weight_decay=0.0, adam_beta2=0.95,
        ),
        chunks,
    )  # fmt: skip
    device = next(chunks[0].parameters()).device
    losses: list[float] = []
    times: list[float] = []

    def row() -> dict:
        tail, half = losses[-20:], sorted(times)[len(times) // 2]
        return {
            "case": f"curves/{mode}", "mode": mode, "steps": len(losses), "batch": args.batch, "length": args.length,
            "hidden": rl_loop.MODEL["hidden_size"], "losses": losses, "last_20": sum(tail) / len(tail),
            "chance": math.log(rl_loop.MODEL["vocab_size"]), "ms_a_step": 1e3 * half, "lr": rate,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
            "trained_parameters": sum(p.numel() for p in chunks[0].parameters() if p.requires_grad),
        }  # fmt: skip

    for ids in data(args.steps, args.batch, args.length):
        ids, start = ids.to(device), time.time()
        position = torch.arange(args.length, device=device)[None].expand(args.batch, -1)

        def step(_, model, ids=ids, position=position):
            def loss(y):
                value = torch.nn.functional.cross_entropy(y.float().flatten(0, 1), ids[:, 1:].flatten())
                return value, {"loss": value.detach()}

            return model(ids[:, :-1], position, None), loss

        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=step, data_iterator=None, model=chunks, num_microbatches=1, seq_length=args.length,
            micro_batch_size=args.batch, forward_only=False,
        )  # fmt: skip
        finalize_model_grads(chunks)
        optimizer.step()
        losses.append(round(float(found[0]["loss"]), 5))
        times.append(time.time() - start)
        if len(losses) % 25 == 0 or len(losses) == args.steps:
            harness.write_rows("megatron_train", [row()])
            print(f"{mode} step {len(losses)} loss {losses[-1]:.4f} {1e3 * times[-1]:.0f} ms", flush=True)
    return row()


def curves(args: argparse.Namespace) -> None:
    import harness
    import rl_loop

    begin()
    started, longest = time.time(), 0.0
    checkpoint, _ = rl_loop.write_checkpoints(Path(tempfile.mkdtemp()))
    shape = {"steps": args.steps, "batch": args.batch, "length": args.length, "hidden": rl_loop.MODEL["hidden_size"]}
    known = {r["case"]: r for r in harness.read_rows(harness.results_path("megatron_train"))}
    rows, left = [], []
    for mode in args.modes:
        old = known.get(f"curves/{mode}")
        if old and not args.again and shape.items() <= old.items():
            rows.append(old)
            continue
        begun = time.time()
        if begun - started + longest > 60 * args.minutes:
            left.append(mode)
            continue
        rows.append(curve(mode, checkpoint, args))
        longest = max(longest, time.time() - begun)
    harness.print_table(
        "loss curves",
        ("mode", "first", "last 20", "ms a step", "peak GiB"),
        [(r["mode"], r["losses"][0], r["last_20"], r["ms_a_step"], r["peak_gib"]) for r in rows],
    )
    if left:
        print(f"out of time before {' '.join(left)}: call again")


def layer(args: argparse.Namespace) -> None:
    """Experts of one layer and one rank, forward and backward, uneven routing with one expert idle."""
    import harness
    import torch
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    begin()
    from torch.nn.functional import grouped_mm

    from beam_moe.integrations.megatron import linears
    from beam_moe.integrations.megatron.layers import SwiGLU
    from beam_moe.integrations.megatron.lora import GroupedExpertAdapter, GroupedLoRALinear

    cuda = torch.cuda.is_available()
    config = TransformerConfig(
        num_layers=1, hidden_size=args.hidden, num_attention_heads=8, num_moe_experts=args.experts,
        moe_ffn_hidden_size=args.intermediate, moe_router_topk=2, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, bf16=True, params_dtype=torch.bfloat16, moe_grouped_gemm=True,
        gradient_accumulation_fusion=False, bias_activation_fusion=False, use_te_activation_func=True,
        use_cpu_initialization=not cuda,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    ours = GroupedMLPSubmodules(
        linear_fc1=linears.ColumnParallelGroupedLinear,
        linear_fc2=linears.RowParallelGroupedLinear,
        activation_func=SwiGLU,
    )

    class TorchColumn(linears.ColumnParallelGroupedLinear):
        def project(self, x, splits, offsets):
            return grouped_mm(x, self.stacked().transpose(1, 2), offs=offsets[1:])

    class TorchRow(linears.RowParallelGroupedLinear):
        project = TorchColumn.project

    torchs = GroupedMLPSubmodules(linear_fc1=TorchColumn, linear_fc2=TorchRow, activation_func=SwiGLU)
    local = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=SwiGLU)
    made = {
        "megatron-core, sequential": (lambda: SequentialMLP(args.experts, config, local, groups), {}),
        "PyTorch grouped GEMM, bf16": (lambda: TEGroupedMLP(args.experts, config, torchs, groups), {}),
        "ours, bf16": (lambda: TEGroupedMLP(args.experts, config, ours, groups), {}),
        "ours, mxfp8": (lambda: TEGroupedMLP(args.experts, config, ours, groups), {"mxfp8": True}),
        "ours, bf16 + LoRA": (lambda: TEGroupedMLP(args.experts, config, ours, groups), {"lora": False}),
        "ours, bf16 + shared-outer LoRA": (lambda: TEGroupedMLP(args.experts, config, ours, groups), {"lora": True}),
        "ours, mxfp8 + LoRA": (
            lambda: TEGroupedMLP(args.experts, config, ours, groups),
            {"mxfp8": True, "lora": False},
        ),
    }
    if isinstance(te.TEColumnParallelGroupedLinear, type):
        theirs = GroupedMLPSubmodules(
            linear_fc1=te.TEColumnParallelGroupedLinear,
            linear_fc2=te.TERowParallelGroupedLinear,
            activation_func=SwiGLU,
        )
        made["Transformer Engine, bf16"] = (lambda: TEGroupedMLP(args.experts, config, theirs, groups), {})
    g = torch.Generator().manual_seed(0)
    share = torch.rand(args.experts, generator=g).add(0.2)
    share[args.experts // 2] = 0
    splits = (share / share.sum() * args.rows).int()
    splits[0] += args.rows - int(splits.sum())
    device = harness.device()
    x = torch.randn(args.rows, args.hidden, generator=g).to(device, torch.bfloat16)
    probs = torch.rand(args.rows, generator=g).to(device)
    dy = torch.randn(args.rows, args.hidden, generator=g).to(device, torch.bfloat16)
    flops = 2 * 3 * args.rows * args.hidden * args.intermediate
    rows, reference = [], None
    for name, (make, change) in made.items():
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        experts = make()
        with torch.no_grad():
            for n, p in experts.named_parameters():  # the same values under either naming of experts
                projection, expert = int("linear_fc2" in n), int(re.search(r"\.(?:weight)?(\d+)", "." + n)[1])
                gen = torch.Generator(p.device).manual_seed(2 * expert + projection)
                p.copy_(torch.randn(p.shape, generator=gen, device=p.device) * p.shape[-1] ** -0.5)
        for part in ("linear_fc1", "linear_fc2"):
            inner = getattr(experts, part, None)
            if isinstance(inner, linears.GroupedLinear):
                inner.mxfp8 = change.get("mxfp8", False)
                if "lora" in change:
                    for p in inner.parameters():
                        p.requires_grad_(False)
                    adapter = GroupedExpertAdapter(
                        inner, part, 32, 32, shared_outer=change["lora"], dtype=torch.bfloat16,
                        init_a=torch.nn.init.kaiming_uniform_, init_b=torch.nn.init.zeros_, dropout=0.0, position="pre",
                    )  # fmt: skip
                    setattr(experts, part, GroupedLoRALinear(inner, adapter))
        frozen = "lora" in change

        def once(experts=experts):
            for p in experts.parameters():
                p.grad = None
            rows_in = x.detach().requires_grad_()
            y, _ = experts(rows_in, splits, probs)
            y.backward(dy)
            return y.detach(), rows_in.grad

        error = None
        y, dx = once()
        if reference is None:
            reference = y, dx
        else:
            limit = LIMITS["mxfp8" if change.get("mxfp8") else "bf16"]
            error = max(harness.gate(f"{name}, {w}", r, g, limit) for w, r, g in zip(("y", "dx"), reference, (y, dx)))
        once()
        samples = []
        for _ in range(args.repeats):
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            once()
            if cuda:
                torch.cuda.synchronize()
            samples.append(time.perf_counter() - start)
        best = sorted(samples)[len(samples) // 2]
        rows.append(
            {
                "case": f"layer/{name}/{args.rows}x{args.hidden}x{args.intermediate}x{args.experts}", "name": name,
                "rows": args.rows, "hidden": args.hidden, "intermediate": args.intermediate, "experts": args.experts,
                "ms": best * 1e3, "tflops": flops * (2 if frozen else 3) / best / 1e12,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None, "error": error,
            }
        )  # fmt: skip
        harness.write_rows("megatron_train", rows[-1:])
        print(f"{name}: {best * 1e3:.2f} ms", flush=True)
        del experts, inner, once, y, dx  # or the next peak counts them
    harness.print_table(
        "experts of one layer, forward and backward",
        ("experts", "ms", "TFLOP/s", "peak GiB", "error"),
        [(r["name"], r["ms"], r["tflops"], r["peak_gib"], r["error"]) for r in rows],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    c = commands.add_parser("curves")
    c.add_argument("--steps", type=int, default=200)
    c.add_argument("--batch", type=int, default=32)
    c.add_argument("--length", type=int, default=256)
    c.add_argument("--lr", type=float, default=3e-4)
    c.add_argument("--lora-lr", type=float, default=3e-3)
    c.add_argument("--minutes", type=float, default=9, help="begin no curve that would end later")
    c.add_argument("--again", action="store_true", help="train what the result file already has, too")
    c.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    c.set_defaults(run=curves)
    m = commands.add_parser("layer")
    m.add_argument("--rows", type=int, default=16384)
    m.add_argument("--hidden", type=int, default=5120)
    m.add_argument("--intermediate", type=int, default=2560)
    m.add_argument("--experts", type=int, default=32)
    m.add_argument("--repeats", type=int, default=15)
    m.set_defaults(run=layer)
    args = parser.parse_args()
    from engines import importable, need

    bridge = ("megatron.bridge",) if args.command == "curves" else ()
    need(f"megatron_train.py {args.command}", "megatron.core", *bridge)
    importable(Path(tempfile.mkdtemp()))
    args.run(args)


if __name__ == "__main__":
    main()
