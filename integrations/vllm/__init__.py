"""vLLM plugin: Beam with LoRA on attention and experts, and beam-moe's fused layer underneath.

vLLM calls `register` through the entry point ``vllm.general_plugins`` in every process it starts; ``VLLM_PLUGINS``
filters it as any plugin. `seams` lists everything of vLLM that is touched.
"""

import logging

from beam_moe import env
from beam_moe.integrations.vllm import seams

ARCHITECTURE = "BeamForCausalLM"
MODEL = "beam_moe.integrations.vllm.model:BeamForCausalLM"
_done = False


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

    from beam_moe.integrations.vllm import kv_reuse, replay

    ModelRegistry.register_model(ARCHITECTURE, MODEL)
    replay.allow_pipeline_parallelism()
    kv_reuse.tell_generations_apart()
    others = env.text("VLLM").strip()
    if others.lower() not in ("", "0", "none", "beam", ARCHITECTURE.lower()):
        from beam_moe.integrations.vllm import other_models

        other_models.register()
    logger.info("beam-moe: %s takes LoRA adapters; our experts under: %s", ARCHITECTURE, others)
