"""`fake_hopper` as far as vLLM's whole engine: requests are scheduled, run and sampled, all Triton in the interpreter.

A platform plugin and the worker it names. Attention is vLLM's Triton backend; weights are fp16, whose arithmetic the
interpreter has right; the three CUDA library functions that Beam's kernels call are written in Triton.
"""

import types
from pathlib import Path

import fake_hopper
import torch

from beam_moe.testing import load_script


def plugin() -> str:
    """Entry point of group ``vllm.platform_plugins``."""
    fake_hopper.plugin()
    return "cpu_hopper.CpuHopper"


def _platform():
    class CpuHopper(fake_hopper.FakeHopper):
        @classmethod
        def get_attn_backend_cls(cls, *args, **kwargs):
            return "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"

        @classmethod
        def check_and_update_config(cls, vllm_config):
            from vllm.config import CompilationMode, CUDAGraphMode

            super().check_and_update_config(vllm_config)
            vllm_config.parallel_config.worker_cls = "cpu_hopper.Worker"
            vllm_config.scheduler_config.async_scheduling = False
            vllm_config.kernel_config.enable_jit_warmup = False
            compilation = vllm_config.compilation_config
            compilation.cudagraph_mode, compilation.mode = CUDAGraphMode.NONE, CompilationMode.NONE
            compilation.cudagraph_capture_sizes = []
            vllm_config.model_config.dtype = torch.float16
            if vllm_config.lora_config is not None:
                vllm_config.lora_config.lora_dtype = torch.float16

        @classmethod
        def get_current_memory_usage(cls, device=None):
            return 0.0

        @classmethod
        def inference_mode(cls):
            return torch.no_grad()

    return CpuHopper


def _worker():
    from vllm.triton_utils import tl
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.workspace import init_workspace_manager

    class Worker(CPUWorker):
        def init_device(self):
            load_script(Path(__file__).resolve().parents[2] / "interpreter.py").patch_language_once()
            torch.cuda.get_device_capability = lambda *a, **k: (9, 0)
            super().init_device()
            init_workspace_manager(self.device, 1)

        def load_model(self, *args, **kwargs):
            super().load_model(*args, **kwargs)
            from vllm.models.beam.nvidia import activation, attention_ops

            activation.libdevice = attention_ops.libdevice = types.SimpleNamespace(
                exp=lambda x: tl.exp(x),
                tanh=lambda x: 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0,
                log1p=lambda x: tl.log(1.0 + x),
            )

        def _should_warm_up_model(self):
            return False

        def determine_available_memory(self):
            return 16 << 20

    return Worker


def __getattr__(name: str):
    """Made on first use: their bases can only be imported once vLLM asks for a platform."""
    make = {"CpuHopper": _platform, "Worker": _worker}.get(name)
    if make is None:
        raise AttributeError(name)
    globals()[name] = made = make()
    return made
