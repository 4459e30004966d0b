"""What SkyRL 0.4.0 still does wrong for Beam, mended or refused: opt-in, for named versions only.

Call `patch_skyrl` in every Megatron worker process before its workers are imported, after `register`; `setup` does
both. Nothing here is needed without SkyRL.
"""

import importlib.util
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

from beam_moe.weight_sync import is_router

VERSIONS = ("0.4.0",)
_ROOT = "skyrl.backends.skyrl_train."


def _exact_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return tensor.dtype if is_router(name) and tensor.dtype == torch.float32 else dtype


def _patch_sources(sources) -> None:
    """``MegatronWeightSource`` casts every tensor to one type; fp32 routers keep theirs, in both of its channels."""
    source = sources.MegatronWeightSource
    if getattr(source, "__beam_moe__", False):
        return

    def metadata(self):
        if self._meta is None:
            self._meta = [
                sources.ParamMeta(n, _exact_dtype(n, t, self._dtype), tuple(t.shape)) for n, t in self._export()
            ]
        return self._meta

    def __iter__(self):
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        for name, tensor in self._export():
            dtype = _exact_dtype(name, tensor, self._dtype)
            yield name, tensor.to(device=device, dtype=dtype, non_blocking=True).detach().contiguous()

    source.metadata, source.__iter__, source.__beam_moe__ = metadata, __iter__, True


def _patch_fused_head(fused, others) -> None:
    """SkyRL's fused LM head goes around the output layer, and so around the softcap: refused for such a model."""
    original = fused.call_model_with_fused_lm_head
    if getattr(original, "__beam_moe__", False):
        return

    def call_model_with_fused_lm_head(model, *args, **kwargs):
        from megatron.core.utils import unwrap_model

        cap = getattr(unwrap_model(model).config, "final_logit_softcapping", None)
        if cap:
            raise ValueError(
                f"fused_lm_head_logprob must be False, got True: it skips final_logit_softcapping={cap} of this model"
            )
        return original(model, *args, **kwargs)

    call_model_with_fused_lm_head.__beam_moe__ = True
    for module in (fused, *others):  # importers hold the function by name
        if module is not None and hasattr(module, "call_model_with_fused_lm_head"):
            module.call_model_with_fused_lm_head = call_model_with_fused_lm_head


def _supply_bridge_names() -> None:
    """Two names of a later megatron-bridge that SkyRL's Megatron worker imports.

    They move the gradient sum of Bridge's EP-shared adapters from hooks to the end of the step. Our expert adapters are
    ordinary parameters to DDP, so on megatron-bridge 0.6.2 megatron-core's own ``finalize_model_grads`` is all they
    need; Bridge's EP-shared adapters are refused.
    """
    from megatron.bridge.peft import utils
    from megatron.core.distributed import finalize_model_grads

    def enable_expert_parallel_grad_sync_in_finalize(model) -> None:
        for chunk in model if isinstance(model, (list, tuple)) else [model]:
            for name, module in chunk.named_modules():
                shared = isinstance(module, utils.SharedOuterGroupedExpertAdapter) or (
                    isinstance(module, utils.ParallelLinearAdapter) and getattr(module, "is_expert", False)
                )
                if shared:
                    raise ValueError(
                        f"patch_skyrl: {name} is a {type(module).__name__} of megatron-bridge, whose shared gradient "
                        "this version sums wrongly; use our grouped experts (swap_modules)"
                    )

    for name, value in (
        ("enable_expert_parallel_grad_sync_in_finalize", enable_expert_parallel_grad_sync_in_finalize),
        ("finalize_model_grads_with_expert_adapter_sync", finalize_model_grads),
    ):
        if not hasattr(utils, name):
            setattr(utils, name, value)


def patch_skyrl() -> None:
    """Mend SkyRL for Beam in this process. Idempotent.

    * weight sync: fp32 router weights and correction biases are sent as fp32 (``MegatronWeightSource``);
    * ``fused_lm_head_logprob=True`` raises for a model with a softcap, which it would skip;
    * the names that SkyRL's Megatron worker imports and megatron-bridge 0.6.2 lacks are supplied.

    Not mended: ``weight_sync_backend=sharded_rdt``, which casts in several other places; use ``nccl`` or ``ipc``.

    Raises:
        ImportError: SkyRL is not installed, or of another version than `VERSIONS`.
    """
    try:
        found = version("skyrl")
    except PackageNotFoundError as e:
        raise ImportError(f"patch_skyrl needs skyrl {' or '.join(VERSIONS)}; it is not installed") from e
    if found not in VERSIONS:
        raise ImportError(f"patch_skyrl knows skyrl {' and '.join(VERSIONS)}; found {found}")
    _supply_bridge_names()
    _patch_sources(import_module(_ROOT + "weight_sync.sources"))
    _patch_fused_head(
        import_module(_ROOT + "distributed.megatron.fused_lm_head"),
        [sys.modules.get(_ROOT + "workers.megatron.megatron_model_wrapper")],
    )


def setup() -> None:
    """`register` and `patch_skyrl`, for Ray's ``worker_process_setup_hook``; nothing in a worker without Megatron."""
    if importlib.util.find_spec("megatron") is None:
        return
    from beam_moe.integrations.megatron import register

    register()
    patch_skyrl()
