"""For the rank processes of these tests: megatron-core on the CPU, a plain fp32 Beam, and model builders."""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import beam_moe.integrations.megatron as integration
from beam_moe.testing import load_script

# imported once, in the fork server: megatron-core and megatron-bridge, the kernels, and what the tests' files import
integration.get_beam_layer_spec  # noqa: B018
import pytest  # noqa: F401

import beam_moe.kernels.moe_lora
import beam_moe.weight_sync  # noqa: F401

load_script(Path(__file__).resolve().parents[2] / "interpreter.py").patch_language_once()

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "architectures": ["BeamForCausalLM"],
}


# ---- megatron-core without a CUDA driver: each line is one thing it takes for granted
class _Stream:
    def __init__(self, *a, **k): ...
    def wait_stream(self, *a): ...
    def wait_event(self, *a): ...
    def synchronize(self): ...
    def record_event(self, *a):
        return self

    __enter__ = record_event

    def __exit__(self, *a):
        return False


def cpu_only() -> None:
    from megatron.core.tensor_parallel import random as mcore_random
    from torch.overrides import TorchFunctionMode

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = lambda *a, **k: _Stream()
    torch.cuda.stream = lambda s: contextlib.nullcontext()
    torch.cuda.synchronize = lambda *a, **k: None
    torch.Tensor.record_stream = lambda self, s: None

    class Tracker(mcore_random.CudaRNGStatesTracker):
        def add(self, name, seed):
            self._is_initialized = True

        @contextlib.contextmanager
        def fork(self, name=None):
            yield

    mcore_random.initialize_rng_tracker()
    mcore_random._CUDA_RNG_STATE_TRACKER = Tracker()
    mcore_random._CUDA_RNG_STATE_TRACKER._is_initialized = True
    # activation recomputation and get_model save and set the CUDA generator
    mcore_random._get_cuda_rng_state = lambda *a, **k: torch.zeros(1)
    mcore_random._set_cuda_rng_state = lambda *a, **k: None

    class CudaToCpu(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs["device"] = "cpu"
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1:  # optimizers compare with "torch.cuda.FloatTensor"
                return func(*args).replace("torch.", "torch.cuda.")
            return func(*args, **kwargs)

    CudaToCpu().__enter__()

    real = dist.all_to_all_single  # split sizes stay tensors on the CPU; gloo wants lists

    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        def plain(s):
            return None if s is None else s.tolist() if isinstance(s, torch.Tensor) else [int(x) for x in s]

        return real(output, input, plain(output_split_sizes), plain(input_split_sizes), group=group, async_op=async_op)

    dist.all_to_all_single = all_to_all_single


# ---- Beam in plain fp32 torch, under the parameter names of its checkpoint
class Norm(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, c, i):
        super().__init__()
        self.c, self.full = c, c.layer_types[i] == "full_attention"
        h, d, n, g = c.hidden_size, c.head_dim, c.num_attention_heads, c.num_key_value_heads
        for name, rows in (("q", n), ("k", g), ("v", g), ("gate", n)):
            setattr(self, f"{name}_proj", nn.Linear(h, rows * d, bias=False))
        self.o_proj = nn.Linear(n * d, h, bias=False)
        self.q_norm, self.k_norm = Norm(d, c.rms_norm_eps), Norm(d, c.rms_norm_eps)
        self.gate_bias = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        c, (b, s, _) = self.c, x.shape
        heads = lambda t: t.view(b, s, -1, c.head_dim).transpose(1, 2)  # noqa: E731
        q, k, v = self.q_norm(heads(self.q_proj(x))), self.k_norm(heads(self.k_proj(x))), heads(self.v_proj(x))
        position = torch.arange(s)
        seen = position[:, None] >= position
        if self.full:
            q = q * ((1 + (position + 1) / 2048) ** 0.1)[:, None]
        else:
            theta = c.rope_parameters["sliding_attention"]["rope_theta"]
            angle = position[:, None] / theta ** (torch.arange(0, c.head_dim, 2) / c.head_dim)
            cos, sin = (f(torch.cat([angle, angle], -1)) for f in (torch.cos, torch.sin))
            turn = lambda t: t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin  # noqa: E731
            q, k = turn(q), turn(k)
            seen &= position[:, None] - position < c.sliding_window
        r = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        score = (q @ k.transpose(-1, -2) / c.head_dim**0.5).masked_fill(~seen, float("-inf"))
        out = (score.softmax(-1) @ v).transpose(1, 2)
        gate = self.gate_proj(x).view_as(out) + self.gate_bias[:, None]
        return self.o_proj((out * gate.sigmoid()).flatten(2))


class MLP(nn.Module):
    def __init__(self, h, i):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(h, i, bias=False), nn.Linear(h, i, bias=False)
        self.down_proj = nn.Linear(i, h, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.num_experts))


class MoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, self.gate, self.ids, self.replay = c, Gate(c), None, None
        self.experts = nn.ModuleList(MLP(c.hidden_size, c.moe_intermediate_size) for _ in range(c.num_experts))

    def route(self, x):
        c = self.c
        scores = F.linear(x, self.gate.weight).sigmoid()
        biased = scores + self.gate.e_score_correction_bias
        groups = biased.view(len(x), c.n_group, -1)
        best = groups.topk(2, -1)[0].sum(-1).topk(c.topk_group, -1)[1]
        shut = torch.ones(len(x), c.n_group, dtype=torch.bool).scatter_(1, best, False)
        ids = groups.masked_fill(shut[..., None], float("-inf")).flatten(1).topk(c.num_experts_per_tok, -1)[1]
        if self.replay is not None:
            ids = self.replay
        self.ids = ids
        weights = scores.gather(1, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids

    def forward(self, x):
        rows = x.flatten(0, -2)
        weights, ids = self.route(rows)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            t, k = (ids == e).nonzero(as_tuple=True)
            if len(t):
                out = out.index_add(0, t, expert(rows[t]) * weights[t, k, None])
        return (out * self.c.routed_scaling_factor).view_as(x)


class Layer(nn.Module):
    def __init__(self, c, i):
        super().__init__()
        self.self_attn, self.i = Attention(c, i), i
        self.mlp = MoE(c) if c.mlp_layer_types[i] == "sparse" else MLP(c.hidden_size, c.intermediate_size)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{name}_layernorm", Norm(c.hidden_size, c.rms_norm_eps))

    def forward(self, x):
        for j, (before, inner, after) in enumerate(
            (
                (self.input_layernorm, self.self_attn, self.post_attention_layernorm),
                (self.pre_feedforward_layernorm, self.mlp, self.post_feedforward_layernorm),
            )
        ):
            n = 2 * (self.i + 1) + j
            x = after(inner(before(x))) / n**0.5 + x * ((n - 1) / n) ** 0.5
        return x


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Beam(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config, self.model = c, Body(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def prepare_inputs_for_generation(self, *a, **k):  # PEFT looks it up
        raise NotImplementedError

    def forward(self, ids, **_):
        cap = self.config.final_logit_softcapping
        return torch.tanh(self.lm_head(self.model(ids)) / cap) * cap


def reference(seed: int = 0, **changes) -> Beam:
    """A tiny Beam with every parameter random; one expert of each layer is never chosen."""
    from beam_moe.integrations.megatron.config import register_config

    c = register_config()(**{**TINY, **changes})
    torch.manual_seed(seed)
    model = Beam(c)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(1 + 0.1 * torch.randn(p.shape))
            else:
                p.copy_(torch.randn(p.shape) * (0.5 if "gate_bias" in name else 0.08))
        for _, b in model.named_buffers():
            b.copy_(torch.randn(b.shape) * 0.05)
            b[3] = -10.0  # an expert without tokens
    return model.eval()


def checkpoint(model: Beam, folder: Path) -> str:
    """Write the model as a Hugging Face checkpoint; every rank may call it, rank 0 writes."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors", {"format": "pt"}
        )
        model.config.save_pretrained(folder)
    dist.barrier()
    return str(folder)


# ---- the Megatron side
def tokens(batch: int = 2, length: int = 24, vocab: int = 128) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(1))


def load(folder: str, *, tp=1, pp=1, ep=1, dtype=torch.float32, hooks=(), ddp=None, **fields):
    """``(bridge, provider, chunks)`` of a checkpoint at a parallel layout; ``fields`` go onto the provider."""
    from megatron.bridge import AutoBridge

    integration.register()
    bridge = AutoBridge.from_hf_pretrained(folder, dtype=dtype)
    provider = bridge.to_megatron_provider(load_weights=True)
    settings = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": None,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "use_cpu_initialization": True,
        "cross_entropy_loss_fusion": False,
        "persist_layer_norm": False,
        "batch_p2p_comm": False,
        "seq_length": 24,
        "gradient_accumulation_fusion": False,
    }
    for name, value in {**settings, **fields}.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    for hook in hooks:
        provider.register_pre_wrap_hook(hook)
    provider.finalize()
    chunks = provider.provide_distributed_model(
        wrap_with_ddp=ddp is not None,
        ddp_config=ddp,
        use_cpu_initialization=True,
        bf16=dtype == torch.bfloat16,
        data_parallel_random_init=False,
    )
    return bridge, provider, chunks


def run(chunks, ids, *, backward=False, loss=None):
    """One micro-batch through the pipeline schedule; the last stage returns full-vocabulary logits ``(B, S, V)``."""
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    out = []
    position = torch.arange(ids.shape[1])[None].expand_as(ids)

    def step(_, model):
        logits = model(ids, position, None)

        def reduce(y):
            out.append(y.detach())
            value = y.float().logsumexp(-1).mean() if loss is None else loss(y)
            return value, {"loss": value.detach()}

        return logits, reduce

    with contextlib.nullcontext() if backward else torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=chunks,
            num_microbatches=1,
            seq_length=ids.shape[1],
            micro_batch_size=ids.shape[0],
            forward_only=not backward,
        )
    if not out:
        return None
    group = mpu.get_tensor_model_parallel_group()
    if group.size() == 1:
        return out[0]
    parts = [torch.empty_like(out[0]) for _ in range(group.size())]
    dist.all_gather(parts, out[0].contiguous(), group=group)
    return torch.cat(parts, -1)


def inner(chunk) -> nn.Module:
    """The GPTModel under wrappers."""
    from megatron.core.utils import unwrap_model

    return unwrap_model(chunk)
