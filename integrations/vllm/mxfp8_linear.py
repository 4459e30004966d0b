"""MXFP8 linear layers on our GEMM, where Hopper has vLLM's Marlin: for models that ``BEAM_MOE_VLLM`` names.

`BeamMxfp8LinearKernel` stands in front of vLLM's list and says no to every other model, device and
dtype, so that vLLM goes on to its own choice. Weights stay as quantisation or a checkpoint leaves them: e4m3 (N, K)
with uint8 scales (N, K/32), row-major. The order of sums depends on the class of row counts (`kernels.mxfp8.gemm`),
hence nothing is ours under ``VLLM_BATCH_INVARIANT``.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_MXFP8_KERNELS,
    Mxfp8LinearKernel,
    Mxfp8LinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
from vllm.model_executor.utils import replace_parameter
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.platforms import PlatformEnum, current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from beam_moe import env
from beam_moe.integrations.vllm import metrics
from beam_moe.kernels.checks import reaches
from beam_moe.kernels.launch import ARRIVAL_COUNTERS
from beam_moe.kernels.mxfp8 import MXFP8Tensor, gemm
from beam_moe.kernels.mxfp8.format import BLOCK
from beam_moe.kernels.mxfp8.gemm import DECODE_ROWS, DEQUANTIZE_ROWS, OUT_DTYPES, choose, streams

OPERATOR = "vllm_mxfp8_linear"
"""Name under ``torch.ops.beam_moe``, and among the compilation's custom ops: these are part of the name under which
vLLM keeps a compiled model on disk, and one with vLLM's own kernel reads weights of another layout."""


def why_not(config: Mxfp8LinearLayerConfig) -> str | None:
    """Why a layer of the model that is being built is not ours, None when it is."""
    vllm_config = get_current_vllm_config_or_none()
    model_config = None if vllm_config is None else vllm_config.model_config
    if not env.flag("VLLM_MXFP8_LINEAR"):
        return "BEAM_MOE_VLLM_MXFP8_LINEAR=0 leaves MXFP8 linears to vLLM"
    if model_config is None:
        return "no model is being built"
    architectures = list(model_config.architectures or [])
    if not any(map(env.serves_in_vllm, architectures)) or not model_config.is_moe:
        return f"BEAM_MOE_VLLM={env.text('VLLM')!r} does not ask for the experts of {', '.join(architectures) or 'it'}"
    reason = None
    if config.bmm_batch_size is not None:
        reason = "it is a batch of products"
    elif min(config.weight_shape) <= 0 or config.weight_shape[1] % BLOCK:
        reason = f"its weight {tuple(config.weight_shape)} is not in blocks of {BLOCK} along K"
    elif model_config.dtype != torch.bfloat16:
        reason = f"activations are {model_config.dtype}, not torch.bfloat16"
    elif envs.VLLM_BATCH_INVARIANT:
        reason = "the order of our sums depends on the number of rows (VLLM_BATCH_INVARIANT)"
    if reason is not None:
        metrics.log_once(f"beam-moe: MXFP8 linears are left to vLLM: {reason}", key=f"MXFP8 linears: {reason}")
    return reason


class BeamMxfp8LinearKernel(Mxfp8LinearKernel):
    """One layer's product by `beam_moe.kernels.mxfp8.gemm`: MXFP8 weights, activations unquantised."""

    def __init__(self, c: Mxfp8LinearLayerConfig) -> None:
        super().__init__(c)
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is not None:
            compilation = vllm_config.compilation_config  # one object for all parts of a model
            if f"+{OPERATOR}" not in compilation.custom_ops:
                compilation.custom_ops.append(f"+{OPERATOR}")
            compilation.enabled_custom_ops.update([OPERATOR])  # or vLLM warns of an operator that no layer has

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """On Hopper, as vLLM sees the device."""
        if compute_capability is None:
            found = current_platform.get_device_capability()
            compute_capability = 0 if found is None else found[0] * 10 + found[1]
        if not current_platform.is_cuda() or compute_capability // 10 != 9:
            return False, "our MXFP8 GEMM is the faster one on Hopper only"
        if not reaches(torch.device(current_platform.device_type)):
            return False, "our kernels do not reach the device's memory"
        return True, None

    @classmethod
    def can_implement(cls, c: Mxfp8LinearLayerConfig) -> tuple[bool, str | None]:
        """By the model, its dtype and the weight's shape."""
        reason = why_not(c)
        return reason is None, reason

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the layout, which stays, and ask for the warm-up of what the layer can launch.

        Raises:
            ValueError: weight or scales are not what vLLM's MXFP8 methods hand over.
        """
        (n, k), weight, scale = self.config.weight_shape, layer.weight.data, layer.weight_scale.data
        if weight.dtype != torch.float8_e4m3fn or weight.shape != (n, k):
            raise ValueError(
                f"BeamMxfp8LinearKernel: weight must be float8_e4m3fn {(n, k)}, got {weight.dtype} "
                f"{tuple(weight.shape)}"
            )
        if scale.element_size() != 1 or scale.ndim != 2 or scale.shape[0] < n or scale.shape[1] < k // BLOCK:
            raise ValueError(
                f"BeamMxfp8LinearKernel: weight_scale must be row-major bytes {(n, k // BLOCK)}, got {scale.dtype} "
                f"{tuple(scale.shape)}"
            )
        replace_parameter(layer, "weight", weight.contiguous())
        replace_parameter(layer, "weight_scale", scale[:n, : k // BLOCK].view(torch.uint8).contiguous())
        LinearWarmup(layer).register_warmup()

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` (..., K) to (..., N) in x's dtype."""
        run = torch.ops.beam_moe.vllm_mxfp8_linear if torch.compiler.is_compiling() else linear
        return run(x, layer.weight, layer.weight_scale, bias)


def _why_not_call(x: torch.Tensor, n: int, bias: torch.Tensor | None) -> str | None:
    if x.dtype != torch.bfloat16:
        return f"its input is {x.dtype}"
    if bias is not None and not (bias.dtype in OUT_DTYPES and bias.is_contiguous() and bias.shape == (n,)):
        return f"its bias is {bias.dtype} {tuple(bias.shape)} with strides {bias.stride()}"
    return None


def _in_one_form(x: torch.Tensor) -> torch.Tensor:
    """Rows (M, K) laid out as the warm-up's: aligned, one after another. Views that are not are copied."""
    rows, k = x.shape
    if rows == 1 and x.stride(1) == 1:
        x = x.as_strided((1, k), (k, 1))  # the stride of a single row may be anything
    aligned = x.stride(1) == 1 and x.stride(0) >= k and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` (..., K), any strides, times ``weight`` (N, K) with scales (N, K/32), plus ``bias`` (N,), in x's dtype.

    What the kernel does not take is multiplied with dequantised weights, and counted as a fall-back.
    """
    n, k = weight.shape
    reason = _why_not_call(x, n, bias)
    if reason is not None:
        metrics.fell_back("an MXFP8 linear", reason)
        dense = dequant_mxfp8_to_bf16(weight, scale).to(x.dtype)
        return torch.nn.functional.linear(x, dense, None if bias is None else bias.to(x.dtype))
    metrics.calls[metrics.SERVED, "MXFP8 linear"] += 1
    flat = x.reshape(-1, k) if x.numel() else x.new_empty(x.shape[:-1].numel(), k)
    y = gemm(_in_one_form(flat), MXFP8Tensor(weight.detach(), scale.detach(), -1), bias=bias)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], n)


def _fake(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library = torch.library.Library("beam_moe", "FRAGMENT")  # the operator lives as long as this
direct_register_custom_op(OPERATOR, linear, [], _fake, _library)


def launch_form(rows: int, weight: MXFP8Tensor, x: torch.Tensor) -> tuple:
    """What a call of ``rows`` rows, the first of ``x``, compiles for a weight without a bias or with one.

    Triton compiles again for another constant, and for an argument that is 1 or divides by 16. Besides a configuration
    these follow from the rows, the tiles along them, whether the rows are few enough to ask for weights ahead, and
    whether all tiles have a place to count their arrivals.
    """
    n, k = weight.shape
    config = choose(rows, n, k, x.device, x_dtype=x.dtype, prepared=False, both=False, stream=streams(x[:rows], weight))
    if config.route == "dequantize":  # a copy of the weight, and cuBLAS
        return (config.route,)
    tiles = -(-rows // config.bm)
    few, counted = rows <= DECODE_ROWS, tiles * -(-n // config.bn) <= ARRIVAL_COUNTERS
    return config, few, counted, rows == 1, rows % 16 == 0, tiles == 1, tiles % 16 == 0


class LinearWarmup(VllmJitKernel[Any]):
    """Compiles, before the engine is ready, every launch form that a later batch size can reach.

    Keys are ``(rows, with bias)``. Layers of one shape are equal, so that vLLM's registry keeps one of them.
    """

    CompileKey = tuple

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        bias = getattr(layer, "bias", None)
        # some ranks add the bias and others do not
        self.biases: tuple[bool, ...] = (False,) if bias is None else (False, True)
        self.shape = (*layer.weight.shape, None if bias is None else bias.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinearWarmup) and self.shape == other.shape

    def __hash__(self) -> int:
        return hash(self.shape)

    def _weight(self) -> MXFP8Tensor:
        return MXFP8Tensor(self.layer.weight.detach(), self.layer.weight_scale.detach(), -1)

    def get_warmup_keys(self, vllm_config: Any) -> list[tuple[int, bool]]:
        """A size for each form."""
        weight, most = self._weight(), vllm_config.scheduler_config.max_num_batched_tokens
        most = min(most, DEQUANTIZE_ROWS + 1)  # there and above it is one form
        x = torch.zeros(most, weight.shape[1], dtype=torch.bfloat16, device=weight.device)
        first: dict[tuple, int] = {}
        for rows in range(1, most + 1):
            first.setdefault(launch_form(rows, weight, x), rows)
        return [(rows, bias) for bias in self.biases for rows in first.values()]

    @torch.inference_mode()
    def compile(self, compile_key: tuple[int, bool]) -> None:
        """One call on zeros."""
        rows, bias = compile_key
        weight = self._weight()
        x = torch.zeros(rows, weight.shape[1], dtype=torch.bfloat16, device=weight.device)
        gemm(x, weight, bias=self.layer.bias if bias else None)


def install() -> None:
    """Put the kernel before vLLM's own for MXFP8 linears on CUDA. Re-entrant.

    vLLM's function for that appends, and its own kernels before ours would take every layer. A ``--linear-backend``
    that has a kernel for MXFP8 leaves ours out.
    """
    kernels = _POSSIBLE_MXFP8_KERNELS.setdefault(PlatformEnum.CUDA, [])
    if BeamMxfp8LinearKernel not in kernels:
        kernels.insert(0, BeamMxfp8LinearKernel)
