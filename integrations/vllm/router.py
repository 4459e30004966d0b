"""Beam's router under vLLM's MoE runner: fp32 logits and grouped top-k by `grouped_topk`, for small batches.

vLLM's runner launches the gate's GEMM, then the choice: two kernels up to 32 tokens, three above. Here the router takes
the hidden states, and either answers by our kernels, or calls the gate and chooses as vLLM does. Which of the two
depends on the number of tokens alone. Everything after the choice stays vLLM's: routed experts are recorded (R3) and
ids converted in `BaseRouter`, whose step is replaced.

A row's logits, ids and weights are the same bits at every size that ours serves, whatever shares its batch. Past
``BEAM_MOE_VLLM_ROUTER`` tokens vLLM's fp32 GEMM sums in another order, so a near-tie may fall otherwise there;
``VLLM_BATCH_INVARIANT`` has ours serve every size.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

from beam_moe import env
from beam_moe.integrations.vllm import metrics
from beam_moe.kernels.router import MAX_EXPERTS, MAX_TOP_K, PIECES, SCORING, grouped_topk, launch_form

LARGEST_CALL = 1 << 20
"""Most tokens of one call of ours, whatever the environment says."""


def why_not(router: Any, gate: Any) -> str | None:
    """Why our kernel cannot stand for this gate and router of vLLM, None when it can."""
    if type(router) is not GroupedTopKRouter:
        return f"its router is {type(router).__name__}"
    if not isinstance(gate, GateLinear):
        return f"its gate is {type(gate).__name__}"
    if not gate.is_unquantized:
        return "its gate is quantised"
    if gate.bias is not None:
        return "its gate has a bias"
    if gate.weight.dtype not in PIECES or gate.out_dtype != torch.float32:
        return f"its gate is {gate.weight.dtype} with {gate.out_dtype} logits, not float32"
    experts = gate.weight.shape[0]
    if experts > MAX_EXPERTS or router.top_k > MAX_TOP_K:
        return f"it chooses {router.top_k} of {experts} experts, more than {MAX_TOP_K} of {MAX_EXPERTS}"
    if experts % router.num_expert_group or experts == router.num_expert_group:
        return f"its {experts} experts are not {router.num_expert_group} groups"
    eligible = router.topk_group * (experts // router.num_expert_group)
    if not 1 <= router.topk_group <= router.num_expert_group or router.top_k > eligible:
        return f"it chooses {router.top_k} of the {eligible} experts in {router.topk_group} groups"
    bias = router.e_score_correction_bias
    if bias is not None and bias.dtype != torch.float32:
        return f"its correction bias is {bias.dtype}"
    if router.scoring_func not in SCORING:
        return f"its scores are {router.scoring_func}"
    if router.routed_scaling_factor != 1.0:
        return f"its weights are scaled by {router.routed_scaling_factor}"
    if router.num_fused_shared_experts:
        return "shared experts are among its ids"
    if router.skip_padding:
        return "it marks padding rows"
    return None


class FusedRouting:
    """A layer's choice of experts, in the place of ``GroupedTopKRouter._compute_routing``; holds the runner's gate."""

    def __init__(self, router: Any, gate: Any) -> None:
        self.router, self.gate = router, gate
        self.__wrapped__ = router._compute_routing
        self.max_tokens = env.number("VLLM_ROUTER")

    def limit(self) -> int:
        """Most tokens per call that our kernel serves."""
        # one kernel for every size is part of batch invariance
        return LARGEST_CALL if envs.VLLM_BATCH_INVARIANT else min(self.max_tokens, LARGEST_CALL)

    def form(self, tokens: int) -> tuple:
        """What a call of ``tokens`` tokens compiles."""
        weight = self.gate.weight
        return launch_form(weight.device, tokens, *weight.shape)

    def choose(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(weights f32, ids i32)``, each (T, top_k), of hidden states (T, H), by our kernel."""
        router = self.router
        # parameters are looked up at each call: a reload may have put others in their place
        return grouped_topk(
            hidden_states,
            self.gate.weight,
            router.e_score_correction_bias,
            top_k=router.top_k,
            n_group=router.num_expert_group,
            topk_group=router.topk_group,
            scoring=router.scoring_func,
            renormalize=bool(router.renormalize),
        )

    def __call__(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(weights, ids)`` of the hidden states; ``router_logits`` is what a runner without gate hands on, unused."""
        if hidden_states.dim() != 2 or hidden_states.stride(1) != 1 or hidden_states.dtype not in PIECES:
            # without sizes: a reason is counted and logged once, whatever the batch
            inner = "" if hidden_states.stride(-1) == 1 else ", not of innermost stride 1"
            layout = f"{hidden_states.dtype} of {hidden_states.dim()} dimensions{inner}"
            metrics.fell_back("a router", f"its hidden states are {layout}")
        elif hidden_states.shape[0] <= self.limit():
            metrics.calls[metrics.SERVED, "router"] += 1
            return self.choose(hidden_states)
        else:
            metrics.calls[metrics.PREFILL, f"router, more than {self.limit()} tokens"] += 1
        logits, _ = self.gate(hidden_states)
        return self.__wrapped__(hidden_states, logits, indices_type, input_ids=input_ids)


def give_router(runner: Any) -> str | None:
    """Have the router of a Beam ``MoERunner`` do its gate's part too, by our kernel; the reason when vLLM's stays.

    The runner then holds no gate and hands the hidden states on; the parameters stay where they are in the model.
    """
    reason = why_not(runner.router, runner.gate)
    if reason is None:
        runner.router._compute_routing = FusedRouting(runner.router, runner.gate)
        runner.gate = None
    return reason


def routing_of(runner: Any) -> FusedRouting | None:
    """Our choice of experts where a ``MoERunner`` has it, else None."""
    routing = getattr(runner.router, "_compute_routing", None)
    return routing if isinstance(routing, FusedRouting) else None


class RouterWarmup(VllmJitKernel[Any]):
    """Compiles, before the engine is ready, every launch form that a later batch size can reach; keys are tokens.

    One layer stands for all: a model's routers are of one shape. Under data parallelism too a router sees its own
    replica's tokens only, which vLLM gathers after the choice.
    """

    CompileKey = tuple

    def __init__(self, routing: FusedRouting, max_tokens: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.routing, self.max_tokens, self.dtype = routing, max_tokens, dtype

    def get_warmup_keys(self, *args: Any, **kwargs: Any) -> list[tuple[int]]:
        """A size for each form."""
        first: dict[tuple, int] = {}
        for n in range(1, min(self.routing.limit(), self.max_tokens) + 1):
            first.setdefault(self.routing.form(n), n)
        return [(n,) for n in first.values()]

    @torch.inference_mode()
    def compile(self, compile_key: tuple[int]) -> None:
        """Choose experts for one size of zeros."""
        weight = self.routing.gate.weight
        self.routing.choose(torch.zeros(compile_key[0], weight.shape[1], dtype=self.dtype, device=weight.device))
