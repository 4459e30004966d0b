"""transformers' experts registry: the fused layer under the name ``beam_moe`` (transformers 5 and newer).

    from beam_moe.integrations.transformers import register
    register()
    model.set_experts_implementation("beam_moe")       # or from_pretrained(..., experts_implementation="beam_moe")

Served are experts with a gate under SiLU, gate rows before up rows, no bias and no norm, in bf16 or fp16, without a
gradient. Every other call goes the way that transformers takes by default, with the reason logged once;
``BEAM_MOE_STRICT=1`` makes that an error.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch

from beam_moe import env
from beam_moe.kernels.checks import reaches

logger = logging.getLogger("beam_moe.transformers")
NAME, DEFAULT = "beam_moe", "grouped_mm"
_LAYOUT = (
    ("has_gate", True, "they have no gate"),
    ("has_bias", False, "they have biases"),
    ("is_concatenated", True, "gate and up rows are interleaved"),
    ("is_transposed", False, "weights are stored transposed"),
    ("has_post_expert_norm", False, "a norm follows each expert"),
)
_logged: set[str] = set()
_theirs: dict[str, Any] = {}
"""Of transformers, resolved by `register`: Dynamo of torch 2.11 follows no import from transformers' lazy modules."""


def _gates_with_silu(experts: Any) -> bool:
    """Whether the activation is ``silu(gate) * up``, judged by values that show a clamp, a slope or another order."""
    known = experts.__dict__.get("_beam_moe_gates_with_silu")
    if known is None:
        gate = torch.tensor([-3e4, -40.0, -3.0, -0.5, 0.0, 0.5, 3.0, 40.0, 3e4, 2.0, -2.0], device="cpu")
        up = torch.tensor([2.0, -3.0, 0.25, 3e4, 5.0, -3e4, 40.0, -1.0, 3.0, 0.0, 7.0], device="cpu")
        want = torch.nn.functional.silu(gate) * up
        try:
            with torch.no_grad():
                got = experts._apply_gate(torch.cat([gate, up])[None])
            known = got.shape == (1, len(gate)) and torch.allclose(got[0].float(), want, rtol=1e-5, atol=1e-6)
        except Exception as error:  # the model's own code, given a tensor that it may not take
            logger.debug("beam-moe: %s's gating cannot be tried: %r", type(experts).__name__, error)
            known = False
        experts._beam_moe_gates_with_silu = known
    return known


def _plain_silu(experts: Any) -> bool:
    """The same by type alone, which a tracer can follow."""
    own = type(experts)._apply_gate is not _theirs["apply_gate"] or "_apply_gate" in experts.__dict__
    return not own and isinstance(experts.act_fn, (torch.nn.SiLU, _theirs["silu"]))


def _reason(experts: Any, x: torch.Tensor, top_k_weights: torch.Tensor) -> str | None:
    """Why this call is not served, or None."""
    for name, wanted, reason in _LAYOUT:
        if bool(getattr(experts, name, wanted)) != wanted:
            return reason
    w13, w2 = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if not isinstance(w13, torch.Tensor) or not isinstance(w2, torch.Tensor):
        return "weights are no stacks gate_up_proj and down_proj"
    if not all(type(w) in (torch.Tensor, torch.nn.Parameter) for w in (w13, w2)):
        return f"weights are {type(w13).__name__}"
    if w13.stride(-1) != 1 or w2.stride(-1) != 1:
        return "weights are transposed views, whose rows do not lie together"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, w13, w2, top_k_weights)):
        return "a gradient is wanted, and the layer has no backward pass"
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.dtype == w13.dtype == w2.dtype:
        return f"activations and weights are {x.dtype}, {w13.dtype} and {w2.dtype}, not all bf16 or all fp16"
    if not reaches(x.device):
        return f"they are on {x.device.type}"
    if w2.shape[0] > 1024:
        return f"they are {w2.shape[0]}, more than 1024"
    if not _plain_silu(experts):
        if torch.compiler.is_compiling() and "_beam_moe_gates_with_silu" not in experts.__dict__:
            return "their gating is their own and was not tried by a call before torch.compile"
        if not _gates_with_silu(experts):
            return "their activation is not silu(gate) * up"
    return None


def _fell_back(experts: Any, reason: str) -> None:
    message = f"beam-moe: {type(experts).__name__} stay with transformers' {DEFAULT}: {reason}"
    if env.flag("STRICT"):
        raise RuntimeError(f"{message} (BEAM_MOE_STRICT=1)")
    if not torch.compiler.is_compiling() and message not in _logged:
        _logged.add(message)
        logger.warning(message)


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What the registry holds: the experts of (T, H) states routed to (T, K) experts, summed under (T, K) weights.

    Ids at or above the number of experts, which expert parallelism uses for other ranks' experts, add nothing.
    """
    from beam_moe.kernels.moe_lora import fused_moe

    reason = _reason(experts, hidden_states, top_k_weights)
    if reason is not None:
        _fell_back(experts, reason)
        return _theirs["functions"][DEFAULT](experts, hidden_states, top_k_index, top_k_weights)
    return fused_moe(
        hidden_states.contiguous(),
        experts.gate_up_proj.detach(),
        experts.down_proj.detach(),
        top_k_weights.detach().float().contiguous(),
        top_k_index.int().contiguous(),
    )


def register() -> str:
    """Enter the layer into transformers' experts registry; returns the name to ask for.

    Raises:
        RuntimeError: transformers has no such registry (it came with version 5).
    """
    try:
        moe = importlib.import_module("transformers.integrations.moe")
        functions = moe.ALL_EXPERTS_FUNCTIONS
    except (ImportError, AttributeError) as error:
        import transformers

        raise RuntimeError(
            f"beam_moe: transformers {transformers.__version__} has no experts registry; version 5 has"
        ) from error
    from transformers.activations import ACT2FN

    silu, gate = type(ACT2FN["silu"]), getattr(moe, "_default_apply_gate", None)
    _theirs.update(functions=functions, silu=silu, apply_gate=gate)
    functions.register(NAME, experts_forward)
    return NAME
