"""Fused mixture-of-experts layer with LoRA adapters on every expert; see `fused` for the launches."""

from beam_moe.kernels.moe_lora.bank import ExpertLoRA
from beam_moe.kernels.moe_lora.config import MoEConfig
from beam_moe.kernels.moe_lora.fused import fused_moe
from beam_moe.kernels.moe_lora.grouped_linear import grouped_linear_lora
from beam_moe.kernels.moe_lora.reference import fused_moe_reference
from beam_moe.kernels.moe_lora.workspace import Workspace, moe_workspace

__all__ = [
    "ExpertLoRA",
    "MoEConfig",
    "Workspace",
    "fused_moe",
    "fused_moe_reference",
    "grouped_linear_lora",
    "moe_workspace",
]
