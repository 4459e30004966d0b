"""Before megatron-bridge is imported: supported versions, and a way to do without Transformer Engine."""

import importlib.util
import sys
import types
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = {"megatron-core": ("0.19.2", "0.20"), "megatron-bridge": ("0.6.2", "0.7")}


def _key(v: str) -> tuple[int, ...]:
    return tuple(int(p) for p in v.split("+")[0].split(".")[:3] if p.isdigit())


def check_versions() -> None:
    """Raise ``ImportError`` unless megatron-core and megatron-bridge are within `SUPPORTED` (lower bound included)."""
    for name, (low, high) in SUPPORTED.items():
        try:
            found = version(name)
        except PackageNotFoundError as e:
            raise ImportError(f"beam_moe.integrations.megatron needs {name}>={low},<{high}; it is not installed") from e
        if not _key(low) <= _key(found) < _key(high):
            raise ImportError(f"beam_moe.integrations.megatron supports {name}>={low},<{high}; found {found}")


def has_transformer_engine() -> bool:
    """True if the real Transformer Engine can be imported (a stand-in of ours does not count)."""
    module = sys.modules.get("transformer_engine")
    if module is not None:
        return not getattr(module, "__beam_moe_stub__", False)
    return importlib.util.find_spec("transformer_engine") is not None


def prepare() -> None:
    """Make ``megatron.bridge`` importable. Idempotent; call before the first import of it.

    Bridge 0.6.2 imports ``transformer_engine.pytorch`` unconditionally in ``peft/lora_layers.py`` though nothing else
    needs it. Without Transformer Engine, megatron-core is imported first, so that its own ``HAVE_TE`` stays False, and
    an empty module then satisfies that one import. It also takes any name it could import as proof of Transformer
    Engine, but megatron-core defines those names as None (``peft/utils.py``).
    """
    check_versions()
    if has_transformer_engine():
        return
    if "transformer_engine" not in sys.modules:
        import megatron.core.extensions.transformer_engine
        import megatron.core.fp8_utils
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.hybrid.hybrid_layer_specs  # noqa: F401

        for name in ("transformer_engine", "transformer_engine.pytorch"):
            module = types.ModuleType(name)
            module.__path__ = []
            module.__beam_moe_stub__ = True
            sys.modules[name] = module

        class Absent:
            """Stands for a Transformer Engine class; nothing is an instance of it."""

        pytorch = sys.modules["transformer_engine.pytorch"]
        pytorch.ops = types.SimpleNamespace(Sequential=Absent)
        pytorch.Linear = pytorch.LayerNormLinear = pytorch.TransformerLayer = Absent
        sys.modules["transformer_engine"].pytorch = pytorch

    import megatron.bridge.peft.utils as utils

    utils.HAVE_TE = False
