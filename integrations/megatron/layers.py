"""Beam's layers: sandwich norms, depth-scaled residual, gated attention, SSMax, fp32 router, softcap."""

import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

SSMAX_SCALE, SSMAX_EXPONENT = 2048, 0.1  # a query at position p is multiplied by (1 + (p + 1) / 2048) ** 0.1


class BeamRMSNorm(torch.nn.Module):
    """RMS norm over the last axis, in fp32 with one rounding; its weight is marked for sequence parallelism.

    megatron-core's own norm without Transformer Engine refuses sequence parallelism.

    Args:
        config: gives ``sequence_parallel`` and ``params_dtype``.
        hidden_size: length of the normalised axis.
        eps: added to the mean square.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = x.float()
        return (self.weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class BeamQKNorm(BeamRMSNorm):
    """`BeamRMSNorm` of queries and keys, its rounded result held in fp32.

    megatron-core's RoPE computes, cosines included, in the type of its input: with this it is Beam's, in fp32. The
    attention rounds afterwards.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()


class SwiGLU(torch.nn.Module):
    """``silu(gate) * up`` of ``(..., 2 I)`` with the gate first: in fp32, one rounding to the input's dtype."""

    def __init__(self, config=None):
        super().__init__()

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


class BeamTransformerLayer(TransformerLayer):
    """A transformer layer whose two residual additions are ``norm(x) / sqrt(i) + residual * sqrt((i - 1) / i)``.

    ``i = 2 * layer_number`` after attention and one more after the MLP, with megatron-core's 1-based global layer
    number. Both sit where megatron-core adds bias, dropout and residual, so recomputation and offloading are its own.
    """

    post_norm: type = BeamRMSNorm

    def __init__(self, config, submodules, layer_number: int = 1, **kwargs):
        super().__init__(config, submodules, layer_number=layer_number, **kwargs)
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = self.post_norm(**norm)
        self.post_mlp_layernorm = self.post_norm(**norm)
        self.self_attn_bda = self._scaled_add("post_self_attn_layernorm", 2 * self.layer_number)
        self.mlp_bda = self._scaled_add("post_mlp_layernorm", 2 * self.layer_number + 1)

    def _scaled_add(self, norm: str, i: int):
        new, kept = 1.0 / math.sqrt(i), math.sqrt((i - 1) / i)

        def add(x_with_bias, residual, dropout):
            x, bias = x_with_bias
            if bias is not None or dropout:
                raise ValueError(
                    f"BeamTransformerLayer: bias and hidden_dropout must be absent, got dropout={dropout}, bias={bias}"
                )
            return getattr(self, norm)(x) * new + residual * kept  # looked up late: a wrapper may replace the norm

        return lambda training, fused: add


class BeamSelfAttention(SelfAttention):
    """Self-attention whose output is multiplied by ``sigmoid(gate_proj(x) + output_gate_bias[head])``.

    ``output_gate_bias``: ``(heads / tp,)`` in the model dtype, sharded over tensor parallel ranks as the heads are.
    """

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        heads = self.num_attention_heads_per_partition
        bias = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
        bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride = True, 0, 1
        self.output_gate_bias = bias

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        heads = self.num_attention_heads_per_partition
        gate = gate.reshape(*x.shape[:-1], heads, -1) + self.output_gate_bias[:, None]
        return (x * torch.sigmoid(gate.float()).view(x.shape)).to(x.dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        name = "output_gate_bias"
        state.update(
            make_sharded_tensors_for_checkpoint(
                {name: self.output_gate_bias},
                prefix,
                {name: 0},
                sharded_offsets,
                tp_group=self.pg_collection.tp,
                dp_cp_group=(metadata or {}).get("dp_cp_group"),
            )
        )
        return state


def ssmax_scale(positions: torch.Tensor) -> torch.Tensor:
    """Scalable softmax: fp32 factor of the query at each position, ``(1 + (position + 1) / 2048) ** 0.1``."""
    return torch.exp(SSMAX_EXPONENT * torch.log1p((positions.float() + 1) / SSMAX_SCALE))


def packed_bounds(packed_seq_params) -> list[int]:
    """Row bounds of the sequences of a packed batch, as a list; read from the device once per batch."""
    bounds = getattr(packed_seq_params, "_beam_moe_bounds", None)
    if bounds is None:
        offsets = packed_seq_params.cu_seqlens_q_padded
        offsets = packed_seq_params.cu_seqlens_q if offsets is None else offsets
        bounds = packed_seq_params._beam_moe_bounds = offsets.tolist()
    return bounds


def packed_positions(packed_seq_params, tokens: int, device: torch.device) -> torch.Tensor:
    """Position of every row within its own sequence, int64 ``(tokens,)``; rows after the last sequence count on."""
    offsets = packed_seq_params.cu_seqlens_q_padded
    offsets = packed_seq_params.cu_seqlens_q if offsets is None else offsets
    offsets = offsets.to(device=device, dtype=torch.int64)
    rows = torch.arange(tokens, device=device)
    return rows - offsets[torch.searchsorted(offsets, rows, right=True).clamp_(max=offsets.numel()) - 1]


def _is_full_attention(config, layer_number: int) -> bool:
    return bool(config.no_rope_freq and config.no_rope_freq[layer_number - 1])


def scale_queries(query: torch.Tensor, packed_seq_params) -> torch.Tensor:
    """Queries ``(S, B, heads, D)``, or packed ``(T, heads, D)``, times `ssmax_scale` of their positions."""
    if packed_seq_params is None:
        positions = torch.arange(query.shape[0], device=query.device)
    else:
        positions = packed_positions(packed_seq_params, query.shape[0], query.device)
    scale = ssmax_scale(positions).view(-1, *[1] * (query.dim() - 1))
    return (query.float() * scale).to(query.dtype)


class BeamCoreAttention(MegatronModule):
    """Softmax attention of the local spec, by PyTorch's SDPA: causal, sliding window, SSMax, packed sequences.

    ``forward(query (S, B, heads, D), key, value (S, B, groups, D), attention_mask)`` gives ``(S, B, heads D)``; with
    ``packed_seq_params`` (``thd``) the inputs are ``(T, heads, D)`` and each sequence attends to itself only. A
    boolean ``attention_mask`` (True: hidden) is combined with the causal and window masks.

    Raises ``ValueError`` for context parallelism, dropout, an additive bias, and any ``qkv_format`` but ``thd``.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *args, softmax_scale=None, **kwargs):
        super().__init__(config)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"BeamCoreAttention: context_parallel_size must be 1, got {config.context_parallel_size}: SSMax "
                "needs the position of every query in its whole sequence"
            )
        if config.attention_dropout:
            raise ValueError(f"BeamCoreAttention: attention_dropout must be 0, got {config.attention_dropout}")
        self.layer_number = max(1, layer_number)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None

    def _mask(self, rows: int, device, attention_mask):
        if self.window is None and attention_mask is None:
            return None
        q, k = torch.arange(rows, device=device)[:, None], torch.arange(rows, device=device)[None]
        seen = k <= q
        if self.window is not None:
            seen &= q - k < self.window
        return seen if attention_mask is None else seen & ~attention_mask

    def _attend(self, query, key, value, attention_mask):
        """``(B, heads, S, D)`` each."""
        mask = self._mask(query.shape[2], query.device, attention_mask)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
        **_,
    ):
        if attention_bias is not None:
            raise ValueError("BeamCoreAttention: attention_bias must be None")
        if packed_seq_params is not None and packed_seq_params.qkv_format != "thd":
            raise ValueError(
                f"BeamCoreAttention: packed_seq_params.qkv_format must be 'thd', got {packed_seq_params.qkv_format!r}"
            )
        if _is_full_attention(self.config, self.layer_number):
            query = scale_queries(query, packed_seq_params)
        query, key = query.to(value.dtype), key.to(value.dtype)
        if packed_seq_params is None:
            q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            out = self._attend(q, k, v, attention_mask)
            return out.permute(2, 0, 1, 3).flatten(2)
        bounds = packed_bounds(packed_seq_params)
        if bounds[-1] < query.shape[0]:  # rows of padding behind the last sequence
            bounds = [*bounds, query.shape[0]]
        parts = []
        for start, stop in zip(bounds, bounds[1:]):
            if stop > start:
                q, k, v = (t[start:stop].transpose(0, 1)[None] for t in (query, key, value))
                parts.append(self._attend(q, k, v, None)[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)


@contextmanager
def _full_fp32():
    """fp32 matrix products of this block are not rounded to TF32, whatever the trainer chose, by either of PyTorch's
    two settings: it raises where they are found to disagree, so the one that was used is the one that is changed."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    if precision != "tf32" if precision is not None else not matmul.allow_tf32:
        yield
        return
    setting: tuple[str, object, object]
    try:
        setting = ("allow_tf32", False, matmul.allow_tf32)
    except RuntimeError:
        setting = ("fp32_precision", "ieee", precision)
    name, exact, before = setting
    setattr(matmul, name, exact)
    try:
        yield
    finally:
        setattr(matmul, name, before)


class _Fp32Linear(torch.autograd.Function):
    """``x @ weight.T`` with fp32 operands and no TF32, forward and backward; ``x`` is saved in its own dtype."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with _full_fp32():
            return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.float()
        dx = dw = None
        with _full_fp32():
            if ctx.needs_input_grad[0]:
                dx = (grad @ weight.float()).to(x.dtype)
            if ctx.needs_input_grad[1]:
                dw = (grad.flatten(0, -2).T @ x.float().flatten(0, -2)).to(weight.dtype)
        return dx, dw


class BeamTopKRouter(TopKRouter):
    """Router with fp32 weights, correction bias and GEMM.

    megatron-core creates the weight in fp32 and casts it to ``params_dtype`` at once; ``Float16Module`` casts weight
    and bias again. Here both stay fp32 through every cast of an enclosing module (``bfloat16()``, ``to(dtype)``).
    """

    def reset_parameters(self):
        super().reset_parameters()
        if self.weight.dtype != torch.float32:
            weight = self.weight.data.float()
            if self.config.perform_initialization:
                self.config.init_method(weight)
            self.weight.data = weight

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        return _Fp32Linear.apply(input, self.weight)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """megatron-core's count of tokens per expert, which it compiles anew for every router.

        Args:
            routing_map: bool (T, E). padding_mask: bool (T,), True for rows that are padding; megatron-core 0.19.2
                spreads it over experts instead of rows, which fails or, with as many tokens as experts, miscounts.
        """
        if self.enable_expert_bias and torch.is_grad_enabled():
            seen = routing_map if padding_mask is None else routing_map & ~padding_mask.reshape(-1, 1)
            self.local_tokens_per_expert += seen.sum(0)

    def _apply(self, fn, recurse=True):
        kept = {n: t.data for n, t in (("weight", self.weight), ("expert_bias", self.expert_bias)) if t is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            t = getattr(self, name)
            if t.dtype != torch.float32:
                t.data = before.to(device=t.device, dtype=torch.float32)
        return self


class BeamOutputLayer(ColumnParallelLinear):
    """LM head with softcap: fp32 logits ``cap * tanh(z / cap)``.

    ``config.lm_head_fp32`` (default True) forms ``z`` in fp32 from the weights and activations as they are; otherwise
    ``z`` is rounded to the model dtype first, as transformers' Beam does it.
    """

    def forward(self, input_, weight=None, **kwargs):
        weight = self.weight if weight is None else weight
        if self.config.lm_head_fp32:
            with _full_fp32():
                logits, bias = super().forward(input_.float(), weight=weight.float(), **kwargs)
        else:
            logits, bias = super().forward(input_, weight=weight, **kwargs)
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits.float() / cap) * cap, bias
