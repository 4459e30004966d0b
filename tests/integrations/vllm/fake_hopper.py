"""A platform plugin that reports one Hopper GPU to vLLM while every tensor stays on the CPU.

vLLM then makes its CUDA choices (experts backend, LoRA wrappers, attention) and its Python runs; compiled operators are
absent and answer with mocks, so a model can be built, wrapped and loaded, and our kernels run in Triton's interpreter.
"""

import importlib.machinery
import sys
import types
from unittest.mock import MagicMock

COMPILED = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_C", "_moe_C")
OPERATORS = ("_C", "_moe_C", "_C_cache_ops", "_C_cuda_utils", "_C_custom_ar")


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return module


def _mock_missing_operators() -> None:
    import torch.library
    from torch._ops import _OpNamespace

    if getattr(_OpNamespace, "__fake_hopper__", False):
        return
    real_getattr, real_fake = _OpNamespace.__getattr__, torch.library.register_fake

    def getattr_(self, name):
        try:
            return real_getattr(self, name)
        except AttributeError:
            if self.name not in OPERATORS or name.startswith("_"):
                raise
            # the questions about support ("cutlass_scaled_mm_supports_fp8", ...) are answered: no
            return (lambda *a, **k: False) if "support" in name else MagicMock(name=f"{self.name}.{name}")

    def register_fake(op, *args, **kwargs):
        if isinstance(op, str) and op.split("::")[0] in OPERATORS:
            return lambda f: f
        return real_fake(op, *args, **kwargs)

    _OpNamespace.__getattr__, torch.library.register_fake = getattr_, register_fake
    _OpNamespace.__fake_hopper__ = True


def plugin() -> str:
    """Entry point of group ``vllm.platform_plugins``."""
    for name in COMPILED:
        sys.modules.setdefault(f"vllm.{name}", _module(f"vllm.{name}"))
    for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        if name not in sys.modules:
            module = _module(name)
            module.__path__ = []

            def attribute(item, name=name):
                if item.startswith("__"):
                    raise AttributeError(item)
                return MagicMock(name=f"{name}.{item}")

            module.__getattr__ = attribute
            sys.modules[name] = module
    _mock_missing_operators()
    return "fake_hopper.FakeHopper"


def __getattr__(name: str):
    """The class is made on first use: its base can only be imported once vLLM asks for a platform."""
    if name != "FakeHopper":
        raise AttributeError(name)
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class FakeHopper(CudaPlatformBase):
        device_type = "cpu"
        dispatch_key = "CPU"
        dist_backend = "gloo"

        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(9, 0)

        @classmethod
        def has_device_capability(cls, capability, device_id=0):
            return (9, 0) >= capability if isinstance(capability, tuple) else capability <= 90

        @classmethod
        def get_device_name(cls, device_id=0):
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 141 << 30

        @classmethod
        def device_count(cls):
            return 1

        @classmethod
        def num_compute_units(cls, device_id=0):
            return 132

        @classmethod
        def is_fully_connected(cls, physical_device_ids):
            return True

        @classmethod
        def log_warnings(cls):
            return None

        @classmethod
        def set_device(cls, device):
            return None

        @classmethod
        def use_custom_allreduce(cls):
            return False

        @classmethod
        def get_device_communicator_cls(cls):
            return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

        @classmethod
        def manual_seed_all(cls, seed):
            return None

        @classmethod
        def is_pin_memory_available(cls):
            return False

    globals()[name] = FakeHopper
    return FakeHopper
