"""vLLM plugin: Beam with LoRA on attention and experts, and beam-moe's fused layer underneath.

vLLM calls `register` through the entry point ``vllm.general_plugins`` in every process it starts; ``VLLM_PLUGINS``
filters it as any plugin. `seams` lists everything of vLLM that is touched.
"""

import logging
from typing import Any

from beam_moe import env
from beam_moe.integrations.vllm import seams

ARCHITECTURE = "BeamForCausalLM"
MODEL = "beam_moe.integrations.vllm.model:BeamForCausalLM"
QUANTIZATION = "beam_mxfp8"
"""Our name for ``--quantization``: vLLM's online MXFP8, and the promise that every expert runs on our kernel."""
_done = False


def register_quantization() -> None:
    """Make `QUANTIZATION` known to vLLM. Re-entrant; vLLM's layers are imported once an engine asks for the name."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class OnDemand(QuantizationConfig):
        """Stands in vLLM's table for `quantization.BeamMxfp8Config`, which an instance of this class is."""

        def __new__(cls) -> Any:
            from beam_moe.integrations.vllm.quantization import BeamMxfp8Config

            return BeamMxfp8Config.online()

        def get_name(self) -> Any:
            return QUANTIZATION

        def get_supported_act_dtypes(self) -> list[Any]:
            return []

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            raise ValueError(
                f"--quantization {QUANTIZATION} quantises unquantised weights, but the checkpoint's configuration says "
                f"quant_method={config.get('quant_method')!r}"
            )

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return None

    register_quantization_config(QUANTIZATION)(OnDemand)


def register() -> None:
    """Put Beam with LoRA over vLLM's own, and our experts under other models where ``BEAM_MOE_VLLM`` asks for it.

    Re-entrant. Imports neither CUDA nor the model. On a vLLM whose version or signatures it does not know, it logs one
    line and leaves vLLM as it is.
    """
    global _done
    if _done:
        return
    _done = True
    logger = logging.getLogger("vllm.beam_moe")
    problems = seams.check()
    if problems:
        logger.warning("beam-moe serves nothing here, vLLM keeps its own behaviour: %s", "; ".join(problems))
        return
    from vllm import ModelRegistry

    from beam_moe.integrations.vllm import kv_reuse, replay, weight_sync

    ModelRegistry.register_model(ARCHITECTURE, MODEL)
    register_quantization()
    replay.allow_pipeline_parallelism()
    weight_sync.load_on_every_rank_or_none()
    kv_reuse.tell_generations_apart()
    weight_sync.refuse_requests_between_versions()
    asked = env.vllm_models()
    unknown = asked - {"all"} - {name.lower() for name in ModelRegistry.get_supported_archs()}
    if unknown:
        names = ", ".join(sorted(unknown))
        logger.warning("beam-moe: BEAM_MOE_VLLM=%s: vLLM knows no architecture %s", env.text("VLLM"), names)
    if asked - unknown - {ARCHITECTURE.lower()}:
        from beam_moe.integrations.vllm import other_models

        other_models.register()
    logger.info("beam-moe: %s takes LoRA adapters; our experts under: %s", ARCHITECTURE, env.text("VLLM") or "none")
