"""Beam and expert-LoRA training on released megatron-core and megatron-bridge.

``register()`` is the one call a trainer makes, in every process, before it uses ``AutoBridge``. Importing this
package imports no Megatron; ``register()``, or the first use of a name, does.
"""

from importlib import import_module

_HOME = {
    "BeamConfig": "config",
    "BeamModelProvider": "bridge",
    "ModelDescription": "bridge",
    "register_model": "bridge",
    "get_beam_layer_spec": "spec",
    "get_moe_layer_spec": "spec",
    "QWEN3_MOE": "qwen3_moe",
    "patch_skyrl": "skyrl",
    "WeightSource": "sync",
    "AdapterSource": "sync",
    "check_config": "spec",
    "swap_modules": "linears",
    "check_recipe": "linears",
    "mxfp8_recipe": "linears",
    "save_adapter": "lora",
    "adapter_tensors": "lora",
}

__all__ = ["register", *_HOME]


def register() -> bool:
    """Make this process ready to train Beam. Idempotent.

    Makes megatron-bridge importable without Transformer Engine, gives ``AutoBridge`` a bridge for
    ``BeamForCausalLM`` (and transformers a ``BeamConfig`` where it has none), teaches its ``LoRA`` our experts,
    megatron-core's distributed optimizer where its parameters are, and its router replay rows without a route.

    Returns:
        True if Beam's bridge is ours, False if megatron-bridge brings its own and ours stepped aside.

    Raises:
        ImportError: megatron-core or megatron-bridge is missing or of another version than supported.
    """
    from beam_moe.integrations.megatron import compat

    compat.prepare()
    from beam_moe.integrations.megatron import lora, optimizer, replay
    from beam_moe.integrations.megatron.bridge import register_beam

    for part in (lora, optimizer, replay):
        part.install()
    return register_beam()


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from beam_moe.integrations.megatron import compat

    compat.prepare()
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
