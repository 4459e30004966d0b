"""Routed experts of every layer under pipeline parallelism, which vLLM refuses.

vLLM records the ids of a stage's own layers in a buffer of that stage and returns what the last stage has. Here the ids
of the earlier layers travel to the next stage beside the hidden states, as one more intermediate tensor, so the last
stage's buffer, which vLLM publishes as it is, holds every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from vllm.sequence import IntermediateTensors

KEY = "beam_moe_routed_experts"


class StageRelay(nn.Module):
    """Hands a stage's routed experts to the next stage; a submodule of the model, so vLLM binds its recorder to it.

    The tensor under `KEY` is ``(T, layers before the next stage, top_k)``, uint8 for at most 256 experts, else int16.

    Attributes:
        layer_id, capture_fn: what vLLM looks for when it binds its recorder; a stage of dense layers only has no router
            that it could bind to otherwise.
    """

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__()
        self.layer_id = model.model.start_layer
        self.capture_fn: Any = None
        self.first, self.last = model.model.start_layer, model.model.end_layer
        self.top_k = vllm_config.model_config.get_num_experts_per_tok()
        self.dtype = torch.uint8 if vllm_config.model_config.get_num_experts() <= 256 else torch.int16
        make = model.make_empty_intermediate_tensors

        def make_empty_intermediate_tensors(batch_size: int, dtype: torch.dtype, device: torch.device) -> Any:
            tensors = make(batch_size, dtype, device)
            tensors.tensors[KEY] = torch.zeros(batch_size, self.first, self.top_k, dtype=self.dtype, device=device)
            return tensors

        model.make_empty_intermediate_tensors = make_empty_intermediate_tensors
        own_output_only()

    def _rows(self, tokens: int) -> torch.Tensor | None:
        """This batch's rows of vLLM's recorder, ``(tokens, layers, top_k)`` int32; None before it is bound."""
        if self.capture_fn is None:
            return None
        from vllm.v1.worker.ubatching import dbo_current_ubatch_token_offset

        offset = dbo_current_ubatch_token_offset()
        return self.capture_fn.func.__self__.device_buffer[offset : offset + tokens]

    def receive(self, tensors: IntermediateTensors | None) -> None:
        """Put what earlier stages recorded into this stage's recorder."""
        if tensors is None or self.first == 0:
            return
        ids = tensors[KEY]
        rows = self._rows(ids.shape[0])
        if rows is not None:
            rows[:, : self.first].copy_(ids)

    def send(self, out: Any) -> Any:
        """Add every layer recorded so far to what the next stage gets; the last stage's output passes unchanged."""
        if not isinstance(out, IntermediateTensors):
            return out
        hidden = next(iter(out.tensors.values()))
        rows = self._rows(hidden.shape[0])
        if rows is None:
            ids = torch.zeros(hidden.shape[0], self.last, self.top_k, dtype=self.dtype, device=hidden.device)
        else:
            ids = rows[:, : self.last].to(self.dtype)
        return IntermediateTensors({**out.tensors, KEY: ids})


def _wrap(cls: type, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(cls, name)
    if not getattr(original, "__beam_moe__", False):
        replacement = wraps(original)(make(original))
        replacement.__beam_moe__ = True  # type: ignore[attr-defined]
        setattr(cls, name, replacement)


def own_output_only() -> None:
    """Keep request state on the stage that returns it: other stages' would wait for outputs that never come."""
    from vllm.distributed import get_pp_group
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

    def make(original: Any) -> Any:
        def begin_step(self: Any, metadata: Any) -> None:
            if get_pp_group().is_last_rank:
                original(self, metadata)

        return begin_step

    _wrap(AuxOutputWorkerConnector, "begin_step", make)


def allow_pipeline_parallelism() -> None:
    """Lift vLLM's refusal of routed experts with pipeline parallelism, for Beam alone; every other check stays."""
    from vllm.config import VllmConfig

    def make(original: Any) -> Any:
        def _verify_aux_output_compatibility(self: Any) -> None:
            parallel, model = self.parallel_config, self.model_config
            stages = parallel.pipeline_parallel_size
            names = (model.architectures or []) if model is not None else []
            if not self.aux_output_config.enabled or stages == 1 or "BeamForCausalLM" not in names:
                return original(self)
            parallel.pipeline_parallel_size = 1
            try:
                return original(self)
            finally:
                parallel.pipeline_parallel_size = stages

        return _verify_aux_output_compatibility

    _wrap(VllmConfig, "_verify_aux_output_compatibility", make)
