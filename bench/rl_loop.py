"""The RL loop closed on one machine: vLLM with our plugin rolls out, Megatron trains, weights go back, repeat.

    python bench/rl_loop.py train --mode lora                  # or bf16, mxfp8
    python bench/rl_loop.py train --mode bf16 --train-pp 2     # two GPUs: two pipeline stages train
    python bench/rl_loop.py train --mode bf16 --rollout-tp 2   # two GPUs: tensor parallel rollouts

A small Beam (12 layers, 32 experts, fp32 router, random to begin with) learns a task with a verifiable reward and no
tokenizer: the prompt names one of four classes of tokens, the reward is the share of generated tokens of that class, a
quarter by chance. Updates are GRPO's with a reward for each token, its own hit or miss: advantages normalised within
the group of one prompt, importance ratios against the engine's own log-probabilities, clipped.

Trainer and engine need different transformers, so the engine is a process of its own, started by rank 0 with
``--engine-python`` (default: this Python), ``--engine-path`` as its PYTHONPATH and ``--engine-preload`` as its
LD_PRELOAD. They share one GPU, or use the engine's ``--engine-devices``. Tensors pass through a file in memory. An
engine that fails or ends stops the loop with the engine's traceback, or the end of its log.

Each step logs the reward, seconds by phase, and how far the trainer's log-probabilities of the generated tokens lie
from the engine's: with router replay, router and LM head in fp32 (the default on both sides), and, every
``--compare-every`` steps, with one of them undone in the trainer. ``rounding``, first and last, is what bf16 explains:
the same weights and tokens in fp32 arithmetic, against the bf16 trainer and against the engine. Rows are written as
each step ends; ``--minutes`` ends the loop in time.
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Client, Listener
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLASSES, FIRST, PROMPT = 4, 8, 8  # token t >= FIRST is of class t % CLASSES; ids below name things
MODEL = {
    "architectures": ["BeamForCausalLM"], "model_type": "beam", "vocab_size": 512, "hidden_size": 1024,
    "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "sliding_window": 64,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2, "tie_word_embeddings": False,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 10, "moe_intermediate_size": 256, "num_experts": 32,
    "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "final_logit_softcapping": 30.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": None},
}  # fmt: skip
EXPERTS = ["*.experts.*_proj.weight"]  # what the MXFP8 wire carries quantised
MODES = ("lora", "bf16", "mxfp8")
LR = {"lora": 5e-4, "bf16": 5e-5, "mxfp8": 5e-5}
KV_BYTES = 4 << 30
VARIANTS = ("r3_off", "router_bf16", "head_bf16")


# --- the checkpoint that both sides begin with


def random_weights(config: dict, seed: int = 0):
    """Names and tensors of a random Beam: bf16, router and bias fp32."""
    import torch

    g = torch.Generator().manual_seed(seed)

    def new(*shape, std, dtype=torch.bfloat16):
        return (torch.randn(shape, generator=g) * std).to(dtype)

    h, d, v = config["hidden_size"], config["head_dim"], config["vocab_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    ones = lambda n: torch.ones(n, dtype=torch.bfloat16)  # noqa: E731
    yield "model.embed_tokens.weight", new(v, h, std=1.0)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for norm in ("input", "pre_feedforward", "post_attention", "post_feedforward"):
            yield f"{p}{norm}_layernorm.weight", ones(h)
        for name, rows in (("q", heads * d), ("k", kv * d), ("v", kv * d), ("gate", heads * d)):
            yield f"{p}self_attn.{name}_proj.weight", new(rows, h, std=h**-0.5)
        yield f"{p}self_attn.o_proj.weight", new(h, heads * d, std=h**-0.5)
        yield f"{p}self_attn.q_norm.weight", ones(d)
        yield f"{p}self_attn.k_norm.weight", ones(d)
        yield f"{p}self_attn.gate_bias", torch.zeros(heads, dtype=torch.bfloat16)
        sparse = config["mlp_layer_types"][i] == "sparse"
        width = config["moe_intermediate_size"] if sparse else config["intermediate_size"]
        blocks = [f"{p}mlp.experts.{e}." for e in range(config["num_experts"])] if sparse else [f"{p}mlp."]
        for block in blocks:
            yield f"{block}gate_proj.weight", new(width, h, std=h**-0.5)
            yield f"{block}up_proj.weight", new(width, h, std=h**-0.5)
            yield f"{block}down_proj.weight", new(h, width, std=width**-0.5)
        if sparse:
            yield f"{p}mlp.gate.weight", new(config["num_experts"], h, std=h**-0.5, dtype=torch.float32)
            bias = new(config["num_experts"], std=0.01, dtype=torch.float32)
            yield f"{p}mlp.gate.e_score_correction_bias", bias
    yield "model.norm.weight", ones(h)
    yield "lm_head.weight", new(v, h, std=0.5 * h**-0.5)


def write_checkpoints(folder: Path, wire: str = "bf16") -> tuple[Path, Path]:
    """The trainer's checkpoint and the engine's, whose experts are quantised already for the MXFP8 wire."""
    from safetensors.torch import save_file

    trainer = folder / "trainer"
    trainer.mkdir(parents=True, exist_ok=True)
    tensors = dict(random_weights(MODEL))
    save_file(tensors, trainer / "model.safetensors", metadata={"format": "pt"})
    (trainer / "config.json").write_text(json.dumps(MODEL))
    if wire != "mxfp8":
        return trainer, trainer
    import fnmatch

    import torch

    from beam_moe.kernels.mxfp8 import quantize
    from beam_moe.mxfp8_io import save_checkpoint

    device = "cuda" if torch.cuda.is_available() else "cpu"
    packed = (
        (n, quantize(t.to(device)) if any(fnmatch.fnmatchcase(n, p) for p in EXPERTS) else t)
        for n, t in tensors.items()
    )
    return trainer, save_checkpoint(packed, folder / "engine", config=MODEL, activations=False)


# --- the engine's process


def engine(args: argparse.Namespace) -> None:
    """Serve ``generate``, ``weights``, ``adapter`` and ``routers`` over a socket until ``stop`` or a first error."""
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # tensors go to the workers from here, not by another process
    os.environ.setdefault("VLLM_PLUGINS", "beam_moe")
    with Client(args.socket, "AF_UNIX") as wire:
        try:
            serve(args, wire)
        except BaseException:
            wire.send((False, traceback.format_exc()))
            raise


def serve(args: argparse.Namespace, wire) -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    import vllm_decode

    vllm_decode.importable(Path(args.folder))
    import numpy as np
    import vllm
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    from beam_moe.integrations.vllm.weight_sync import EXTENSION, AdapterSync, sync_weights

    more: dict = {"enable_lora": True, "max_loras": 1, "max_lora_rank": args.rank} if args.rank else {}
    if args.quantization:
        more["quantization"] = args.quantization
    # A KV cache of a given size: nothing is measured while the trainer takes its own memory.
    llm = LLM(
        model=args.model, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=256, max_num_seqs=256,
        max_num_batched_tokens=4096, gpu_memory_utilization=args.memory, kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=True, enable_return_routed_experts=True, hf_overrides={"head_dtype": "float32"},
        worker_extension_cls=EXTENSION, tensor_parallel_size=args.tp, kernel_config={"enable_jit_warmup": False},
        compilation_config={"cudagraph_capture_sizes": [1, 8, 32, 128, 256]}, **more,
    )  # fmt: skip
    adapter, request = AdapterSync("policy", 1), None
    params = SamplingParams(temperature=1.0, max_tokens=args.new, ignore_eos=True, detokenize=False, logprobs=0)
    answer: object = {**llm.collective_rpc("beam_moe_report")[0], "vllm": vllm.__version__}
    while True:
        wire.send((True, answer))
        try:
            what, *given = wire.recv()
        except EOFError:  # the trainer is gone
            return
        answer = None
        if what == "stop":
            return
        if what == "generate":
            (prompts,) = given
            inputs = [{"prompt_token_ids": p} for p in prompts]
            outs = llm.generate(inputs, params, use_tqdm=False, lora_request=request)
            done = [o.outputs[0] for o in outs]
            answer = (
                [list(o.token_ids) for o in done],
                [[d[t].logprob for d, t in zip(o.logprobs, o.token_ids)] for o in done],
                np.stack([np.asarray(o.routed_experts) for o in done]).astype(np.uint8),
            )
        elif what == "weights":
            path, routers = given
            sync_weights(llm, load_file(path), routers)
        elif what == "adapter":
            path, config = given
            request = adapter.update(llm, load_file(path), config)
        elif what == "routers":
            found = llm.collective_rpc("beam_moe_check_routers", args=given)
            answer = sorted({n for names in found for n in names})


class Engine:
    """Rank 0's end of the engine's process. An engine that failed, ended or is silent is a ``RuntimeError``."""

    # what the trainer's process has for itself; the engine gets its own or none
    OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "LD_PRELOAD")

    def __init__(self, args: argparse.Namespace, folder: Path, model: Path):
        shared = Path("/dev/shm")
        roomy = shared.is_dir() and shutil.disk_usage(shared).free > 4 << 30
        self.scratch = Path(tempfile.mkdtemp(prefix="rl_loop", dir=shared if roomy else None))
        self.log = Path(args.engine_log or folder / f"engine_{args.mode}.log")
        self.wire, address = None, str(self.scratch / "socket")
        self.listener = Listener(address, "AF_UNIX")
        env = {k: v for k, v in os.environ.items() if k not in (*self.OWN, "CUDA_DEVICE_MAX_CONNECTIONS")}
        given = {"PYTHONPATH": "path", "LD_PRELOAD": "preload", "CUDA_VISIBLE_DEVICES": "devices"}
        env |= {k: v for k, name in given.items() if (v := getattr(args, f"engine_{name}"))}
        command = [
            args.engine_python, str(Path(__file__).resolve()), "engine", "--socket", address, "--model", str(model),
            "--folder", str(folder), "--rank", str(args.rank if args.mode == "lora" else 0), "--tp",
            str(args.rollout_tp), "--memory", str(args.engine_memory), "--new", str(args.new),
        ]  # fmt: skip
        if args.mode == "mxfp8" and args.wire == "bf16":
            command += ["--quantization", "mxfp8"]
        # Not in the checkout: a bare folder beam_moe/ in the working directory would hide the package from vLLM.
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, env=env, cwd=self.scratch, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def failed(self, why: str) -> RuntimeError:
        lines = self.log.read_text(errors="replace").splitlines()[-60:]
        return RuntimeError("\n".join([f"engine: {why}; the end of {self.log}:", *lines]))

    def ready(self, seconds: float = 420) -> dict:
        """Wait until the model is loaded; what serves its layers."""
        accepted: list = []
        threading.Thread(target=lambda: accepted.append(self.listener.accept()), daemon=True).start()
        end = time.time() + seconds
        while not accepted:
            if self.process.poll() is not None:
                raise self.failed(f"exited with {self.process.returncode} before it was ready")
            if time.time() > end:
                raise self.failed(f"did not connect within {seconds} s")
            time.sleep(0.1)
        (self.wire,) = accepted
        return self._answer("start", end - time.time())

    def _answer(self, what: str, seconds: float):
        end = time.time() + seconds
        try:
            while not self.wire.poll(1):
                if time.time() > end:
                    raise self.failed(f"no answer to {what} within {seconds:.0f} s")
            ok, answer = self.wire.recv()
        except (EOFError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            raise self.failed(f"ended during {what} with {self.process.returncode}") from None
        if not ok:
            raise RuntimeError(f"engine: {what}: {answer}")
        return answer

    def ask(self, what: str, *given, seconds: float = 240):
        with contextlib.suppress(ConnectionError):  # then reading says what happened
            self.wire.send((what, *given))
        return self._answer(what, seconds)

    def send(self, what: str, tensors, *given) -> None:
        """Named tensors through a file in memory."""
        from safetensors.torch import save_file

        path = self.scratch / "tensors.safetensors"
        save_file({n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors}, path)
        self.ask(what, str(path), *given)
        path.unlink()

    def stop(self) -> None:
        if self.wire is not None:
            with contextlib.suppress(OSError):
                self.wire.send(("stop",))
        try:
            self.process.wait(20 if self.wire is not None else 0.1)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):  # its workers too
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.listener.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


# --- the trainer


def new_prompts(count: int) -> tuple[list[list[int]], list[int]]:
    """``count`` prompts, each BOS and the name of its class, and the classes."""
    classes = [i % CLASSES for i in range(count)]
    return [[1] + [2 + 1 + c] * (PROMPT - 1) for c in classes], classes


class Trainer:
    """A Megatron Beam, its optimizer, and the passes that a step needs."""

    def __init__(self, args: argparse.Namespace, checkpoint: Path):
        import torch
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.args, self.checkpoint = args, checkpoint
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.bridge, self.chunks = self.build(torch.bfloat16, ddp)
        config = OptimizerConfig(
            optimizer="adam", lr=args.lr, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
            clip_grad=1.0, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        self.last = parallel_state.is_pipeline_last_stage()
        self.device = next(self.chunks[0].parameters()).device

    def build(self, dtype, ddp):
        """Bridge and chunks of the checkpoint in ``dtype``, in this run's mode."""
        from megatron.bridge import AutoBridge
        from megatron.bridge.peft.lora import LoRA

        from beam_moe.integrations.megatron import mxfp8_recipe, register

        register()
        args = self.args
        bridge = AutoBridge.from_hf_pretrained(str(self.checkpoint), dtype=dtype)
        provider = bridge.to_megatron_provider(load_weights=True)
        fields = {
            "params_dtype": dtype, "pipeline_dtype": dtype, "bf16": ddp is not None, "fp16": False,
            "pipeline_model_parallel_size": args.train_pp, "expert_model_parallel_size": args.train_ep,
            "expert_tensor_parallel_size": 1, "moe_enable_routing_replay": True, "cross_entropy_loss_fusion": False,
            "persist_layer_norm": False, "seq_length": PROMPT + args.new,
        }  # fmt: skip
        if args.mode == "mxfp8":
            fields["quant_recipe"] = mxfp8_recipe(["*"] if args.wire == "bf16" else ["*.experts.*"])
        for name, value in fields.items():
            setattr(provider, name, value)
        if args.mode == "lora":
            lora = LoRA(
                dim=args.rank, alpha=2 * args.rank, share_expert_adapters=False, lora_A_init_method="kaiming",
                experts_shared_outer_loras=args.shared_outer,
            )  # fmt: skip

            def hook(chunks):
                chunks = lora(chunks, training=True)
                lora.set_params_to_save(chunks)
                return chunks

            provider.register_pre_wrap_hook(hook)
        provider.finalize()
        return bridge, provider.provide_distributed_model(
            wrap_with_ddp=ddp is not None, ddp_config=ddp, bf16=ddp is not None
        )

    def schedule(self, chunks, batch, routes, loss=None):
        """Micro-batches through the pipeline; on the last stage, log p of the generated tokens ``(B, new)``."""
        import torch
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        from beam_moe.integrations.megatron.replay import forward, replaying

        micro = min(self.args.micro_batch, len(batch["tokens"]))
        parts = range(0, len(batch["tokens"]), micro)
        found, starts = [], iter(parts)

        def step(_, model):
            start = next(starts)
            rows = slice(start, start + micro)
            ids = batch["tokens"][rows, :-1]
            position = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
            logits = forward(model, routes[rows] if routes is not None else None, ids, position, None)

            def score(y):
                y = y[:, PROMPT - 1 :].float().log_softmax(-1)
                logp = y.gather(-1, batch["tokens"][rows, PROMPT:, None])[..., 0]
                found.append(logp.detach())
                value = logp.sum() * 0 if loss is None else loss(logp, rows)
                return value, {"loss": value.detach()}

            return logits, score

        with contextlib.nullcontext() if loss else torch.no_grad(), replaying(chunks):
            get_forward_backward_func()(
                forward_step_func=step, data_iterator=None, model=chunks, num_microbatches=len(parts),
                seq_length=batch["tokens"].shape[1] - 1, micro_batch_size=micro, forward_only=loss is None,
            )  # fmt: skip
        return torch.cat(found) if found else None

    def update(self, batch) -> float:
        """One optimizer step on a rollout, shared out over data parallel ranks; the gradient norm."""
        import torch
        from megatron.core import parallel_state

        share, number = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        batch = {name: t.chunk(share)[number] for name, t in batch.items()}

        def loss(logp, rows):
            ratio = (logp - batch["logprobs"][rows]).exp()
            advantage = batch["advantages"][rows]
            clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            return -clipped.mean()

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.schedule(self.chunks, batch, batch["routes"], loss)
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(self.chunks)
        done, norm, _ = self.optimizer.step()
        if not done:
            raise RuntimeError("the optimizer skipped a step")
        return float(norm)

    @contextlib.contextmanager
    def undone(self, what: str):
        """The trainer with one of its exact parts rounded, for the block."""
        import torch
        from megatron.core.utils import unwrap_model

        from beam_moe.integrations.megatron.layers import BeamTopKRouter

        models = [unwrap_model(c) for c in self.chunks]
        routers = [m for model in models for m in model.modules() if isinstance(m, BeamTopKRouter)]
        kept = [(r.weight.detach().clone(), r.expert_bias.clone()) for r in routers]
        if what == "router_bf16":
            for r in routers:
                r.weight.data.copy_(r.weight.data.bfloat16())
                r.expert_bias.copy_(r.expert_bias.bfloat16())
        for model in models:
            model.config.lm_head_fp32 = what != "head_bf16"
        yield
        for model in models:
            model.config.lm_head_fp32 = True
        with torch.no_grad():
            for r, (weight, bias) in zip(routers, kept):
                r.weight.data.copy_(weight)
                r.expert_bias.copy_(bias)

    def in_fp32(self, batch):
        """The same weights and routes in fp32 arithmetic: what a bf16 pass rounds."""
        import torch

        _, chunks = self.build(torch.float32, None)
        ours = [dict(c.named_parameters()) | dict(c.named_buffers()) for c in map(_plain, self.chunks)]
        with torch.no_grad():
            for chunk, source in zip(map(_plain, chunks), ours):
                for name, t in (*chunk.named_parameters(), *chunk.named_buffers()):
                    if name in source:
                        t.copy_(source[name])
        return self.schedule(chunks, batch, batch["routes"])


def _plain(chunk):
    from megatron.core.utils import unwrap_model

    return unwrap_model(chunk)


def difference(ours, theirs) -> dict[str, float]:
    """Mean and largest |log p - log q| over tokens, and the k3 estimate of KL(q || p) from samples of q."""
    d = ours.double() - theirs.double()
    return {
        "logprob_diff_mean": float(d.abs().mean()),
        "logprob_diff_max": float(d.abs().max()),
        "kl": float((d.exp() - 1 - d).mean()),
    }


def open_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launch(world: int) -> None:
    """This command once for each rank, on one machine; the first that fails ends the others."""
    command = [sys.executable, *sys.argv]
    shared = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": open_port()}
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(world)]
    while any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks):
        time.sleep(0.5)
    for p in ranks:
        p.terminate()
    if failed := [r for r, p in enumerate(ranks) if p.wait()]:
        raise SystemExit(f"rl_loop: ranks {failed} failed")


def train(args: argparse.Namespace) -> None:
    if args.wire == "mxfp8" and args.mode != "mxfp8":
        raise SystemExit("--wire mxfp8 goes with --mode mxfp8")
    rows, micro = args.prompts * args.group, args.micro_batch
    parts = rows, rows // args.train_ep  # scored whole, updated in a share for each expert parallel rank
    if rows % args.train_ep or min(*parts, micro) < 1 or any(n % min(micro, n) for n in parts):
        raise SystemExit(
            f"--train-ep must divide --prompts times --group, {rows} rows, and --micro-batch them and their share, got "
            f"--train-ep {args.train_ep} --micro-batch {micro}"
        )
    if args.train_pp * args.train_ep > 1 and "RANK" not in os.environ:
        return launch(args.train_pp * args.train_ep)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sys.path.insert(0, str(ROOT / "bench"))
    folder = Path(args.folder) / args.mode
    from engines import importable

    importable(folder / f"rank{rank}")
    import harness
    import torch
    import torch.distributed as dist

    args.lr = args.lr or LR[args.mode]
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    logging.disable(logging.INFO)  # megatron-core lists every parameter
    started = time.time()
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT') or open_port()}"
    dist.init_process_group("nccl" if cuda else "gloo", address, rank=rank, world_size=world)
    paths = [write_checkpoints(folder, args.wire)] if rank == 0 else [None]
    host = Engine(args, folder, paths[0][1]) if rank == 0 else None
    try:
        dist.broadcast_object_list(paths)
        loop(args, host, paths[0][0], harness, started)
    finally:
        if host:
            host.stop()
    dist.destroy_process_group()


def loop(args: argparse.Namespace, host: Engine | None, checkpoint: Path, harness, started: float) -> None:
    """Roll out, score, update, sync, until ``--steps`` or ``--minutes``; ``host`` on rank 0 alone."""
    import torch
    import torch.distributed as dist
    from rich.progress import Progress

    from beam_moe.integrations.megatron import AdapterSource, WeightSource, register
    from beam_moe.weight_sync import declare_routers

    register()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    world, cuda = dist.get_world_size(), torch.cuda.is_available()
    parallel_state.initialize_model_parallel(
        1, args.train_pp, expert_model_parallel_size=args.train_ep, expert_tensor_parallel_size=1
    )
    model_parallel_cuda_manual_seed(0)
    trainer = Trainer(args, checkpoint)
    report: dict = {}
    if host:
        report = host.ready()
        served = sorted({str(layer["experts"]) for layer in report["layers"]})
        print(f"rl_loop {args.mode}: ready in {time.time() - started:.0f} s, experts {', '.join(served)}", flush=True)

    def whole(found):
        """A last stage's result on every rank."""
        size = (args.prompts * args.group, args.new)
        out = found if found is not None else torch.empty(size, device=trainer.device)
        dist.broadcast(out, world - 1)  # the last rank is of the last stage
        return out

    frozen: dict = {}

    def sync() -> bool:
        """Send what was trained; whether the engine's routers have the trainer's bits."""
        weights = WeightSource(
            trainer.bridge, trainer.chunks, merge_adapters=False, mxfp8=EXPERTS if args.wire == "mxfp8" else ()
        )
        if args.mode == "lora":
            if not frozen:  # the router is not trained, and not sent: what the trainer holds, once
                frozen.update(declare_routers(weights))
            source, declared = AdapterSource(trainer.bridge, trainer.chunks), frozen
            sent = ("adapter", list(source), source.peft_config)
        else:
            tensors = list(weights)
            declared = declare_routers(tensors)
            sent = ("weights", tensors, declared)
        if host:
            host.send(*sent)
        return host is None or set(host.ask("routers", declared)) == set(declared)

    seconds, mark = {}, [0.0]

    def lap(name: str) -> None:
        if cuda:
            torch.cuda.synchronize()
        now = time.time()
        seconds[name], mark[0] = round(now - mark[0], 3), now
        bar.update(task, description=f"{args.mode}: {name} done, {seconds[name]:.1f} s")

    layout = args.mode + ("/wire" if args.wire != "bf16" else "")
    for name, size in (("pp", args.train_pp), ("ep", args.train_ep), ("tp", args.rollout_tp)):
        layout += f"/{name}{size}" if size > 1 else ""
    run = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    exact, first, longest, number, last = sync(), None, 0.0, 0, False
    bar = Progress(disable=host is None or not sys.stdout.isatty())  # off a terminal a line for each step is all
    task = bar.add_task(args.mode, total=args.steps)
    with bar:
        while not last:
            seconds.clear()
            begun = mark[0] = time.time()
            prompts, classes = new_prompts(args.prompts)
            given = [p for p in prompts for _ in range(args.group)]
            last = number + 1 >= args.steps or begun - started + 2 * longest > 60 * args.minutes
            box = [(host.ask("generate", given), last)] if host else [None]
            dist.broadcast_object_list(box)
            (new, logprobs, routes), last = box[0]
            lap("rollout")
            tokens = torch.tensor([p + n for p, n in zip(given, new)], device=trainer.device)
            wanted = torch.tensor(classes, device=trainer.device).repeat_interleave(args.group)
            answer = tokens[:, PROMPT:]
            hit = (answer % CLASSES == wanted[:, None]) & (answer >= FIRST)
            groups = hit.float().view(args.prompts, -1)
            advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
            batch = {
                "tokens": tokens, "logprobs": torch.tensor(logprobs, device=trainer.device),
                "advantages": advantage.view_as(hit), "routes": torch.from_numpy(routes).to(trainer.device),
            }  # fmt: skip
            if routes.shape[1] != tokens.shape[1] - 1:
                raise RuntimeError(f"routes {routes.shape} for {tuple(tokens.shape)} tokens")
            ours = whole(trainer.schedule(trainer.chunks, batch, batch["routes"]))
            row = {
                "case": f"{layout}/{args.tag}{number}", "mode": args.mode, "step": number, "run": run,
                "reward": float(hit.float().mean()), **difference(ours, batch["logprobs"]), "router_exact": exact,
                "train_pp": args.train_pp, "train_ep": args.train_ep, "rollout_tp": args.rollout_tp, "wire": args.wire,
                "lr": args.lr, "vllm_version": report.get("vllm"),
            }  # fmt: skip
            lap("score")
            if number % args.compare_every == 0 or last:
                row["variants"] = {}
                for what in VARIANTS:
                    with trainer.undone(what):
                        replay = None if what in ("r3_off", "router_bf16") else batch["routes"]
                        other = whole(trainer.schedule(trainer.chunks, batch, replay))
                    row["variants"][what] = difference(other, batch["logprobs"])
                lap("compare")
            if last or number == 0:  # a policy that has become certain leaves rounding nothing to show
                exactly = whole(trainer.in_fp32(batch))
                row["rounding"] = {
                    "trainer": difference(ours, exactly),
                    "engine": difference(batch["logprobs"], exactly),
                }
                lap("rounding")
            row["grad_norm"] = trainer.update(batch)
            lap("update")
            exact = sync()
            lap("sync")
            row["seconds"] = dict(seconds)
            longest = max(longest, time.time() - begun) if number else longest  # the first step compiles
            first = row["reward"] if first is None else first
            if host:
                path = harness.write_rows("rl_loop", [row])
                spent = " ".join(f"{name} {value:.1f}" for name, value in seconds.items())
                print(
                    f"{args.mode} step {number} reward {row['reward']:.3f} |dlogp| mean {row['logprob_diff_mean']:.4f} "
                    f"max {row['logprob_diff_max']:.3f} kl {row['kl']:.1e} router "
                    f"{'exact' if row['router_exact'] else 'DIFFERS'} grad {row['grad_norm']:.2f} s: {spent}",
                    flush=True,
                )
            number += 1
            bar.advance(task)
    if host:
        took = time.time() - started
        print(f"rl_loop {args.mode}: {number} steps in {took:.0f} s, reward {first:.3f} -> {row['reward']:.3f}, {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    t = commands.add_parser("train")
    t.add_argument("--mode", choices=MODES, required=True)
    t.add_argument("--steps", type=int, default=50)
    t.add_argument("--prompts", type=int, default=32, help="prompts in a step")
    t.add_argument("--group", type=int, default=16, help="answers to each prompt")
    t.add_argument("--new", type=int, default=12, help="tokens of an answer")
    t.add_argument("--micro-batch", type=int, default=128)
    t.add_argument("--lr", type=float, default=None)
    t.add_argument("--rank", type=int, default=16, help="of LoRA")
    t.add_argument("--shared-outer", action="store_true", help="share the adapters' outer factors over experts")
    t.add_argument(
        "--wire", choices=["bf16", "mxfp8"], default="bf16",
        help="in MXFP8 mode: bf16 weights that the engine quantises (every linear), or experts already quantised",
    )  # fmt: skip
    t.add_argument("--compare-every", type=int, default=5)
    t.add_argument("--minutes", type=float, default=9, help="end after the step that would pass this")
    t.add_argument("--train-pp", type=int, default=1, help="pipeline stages of the trainer, one GPU each")
    t.add_argument("--train-ep", type=int, default=1, help="expert parallel ranks of the trainer")
    t.add_argument("--folder", default=tempfile.gettempdir() + "/rl_loop")
    t.add_argument("--tag", default="", help="put before the step in a row's case")
    t.add_argument("--engine-python", default=sys.executable)
    t.add_argument("--engine-path", default=None, help="PYTHONPATH of the engine's process")
    t.add_argument("--engine-preload", default=None, help="LD_PRELOAD of the engine's process")
    t.add_argument("--engine-devices", default=None, help="CUDA_VISIBLE_DEVICES of the engine's process")
    t.add_argument("--engine-log", default=None, help="file of the engine's output, default in --folder")
    t.add_argument("--engine-memory", type=float, default=0.3, help="share of the GPU that must be free for the engine")
    t.add_argument("--rollout-tp", type=int, default=1, help="tensor parallel ranks of the engine")
    t.set_defaults(run=train)
    e = commands.add_parser("engine")
    for name in ("socket", "model", "folder"):
        e.add_argument(f"--{name}", required=True)
    e.add_argument("--rank", type=int, default=0)
    e.add_argument("--tp", type=int, default=1)
    e.add_argument("--memory", type=float, default=0.3)
    e.add_argument("--new", type=int, default=12)
    e.add_argument("--quantization", default=None)
    e.set_defaults(run=engine)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
