"""beam-moe: kernels and integrations for reinforcement learning on sparse mixture-of-experts models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from beam_moe.adapters import Adapter, export_adapter, load_adapter
    from beam_moe.config import BeamMoEConfig
    from beam_moe.kernels.moe_lora import ExpertLoRA

__version__ = "0.1.0"

__all__ = ["Adapter", "BeamMoEConfig", "ExpertLoRA", "__version__", "export_adapter", "load_adapter"]

_HOMES = {
    "Adapter": "beam_moe.adapters",
    "BeamMoEConfig": "beam_moe.config",
    "ExpertLoRA": "beam_moe.kernels.moe_lora.bank",
    "export_adapter": "beam_moe.adapters",
    "load_adapter": "beam_moe.adapters",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that ``import beam_moe`` needs neither torch nor Triton."""
    if name not in _HOMES:
        raise AttributeError(f"module 'beam_moe' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
