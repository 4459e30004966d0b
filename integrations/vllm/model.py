"""vLLM's Beam with LoRA and our experts, registered over vLLM's own under the same architecture name.

All of the class is in this file: vLLM caches what it learns of a model class on disk under the hash of this one file.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.models.beam.nvidia.model import BeamForCausalLM as VllmBeam
from vllm.sequence import IntermediateTensors

from beam_moe.integrations.vllm import metrics, mxfp8_linear
from beam_moe.integrations.vllm.replay import StageRelay

INFO_VERSION = 1
"""Raise it when an attribute that vLLM inspects changes in another file: this file's hash is vLLM's cache key."""


def refuse(lora_config: Any) -> None:
    """Refuse LoRA options under which vLLM drops part of a Beam adapter without an error.

    Raises:
        ValueError: naming the option.
    """
    if lora_config.fully_sharded_loras:
        raise ValueError(
            "fully_sharded_loras=True: vLLM has no sharded wrapper for Beam's merged q/k/v/gate projection and would "
            "serve without its adapter; turn it off"
        )
    if lora_config.specialize_active_lora:
        raise ValueError(
            "specialize_active_lora=True: graphs are chosen by the number of adapters, and a batch that mixes adapter "
            "and bare rows replays one that skips its last adapter; turn it off"
        )


class BeamForCausalLM(VllmBeam, SupportsLoRA):
    """vLLM's ``BeamForCausalLM`` that takes adapters on attention, dense MLP and experts, on beam-moe's kernels."""

    is_3d_moe_weight = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        self._lora_enabled = vllm_config.lora_config is not None
        if self._lora_enabled:
            refuse(vllm_config.lora_config)
        mxfp8_linear.install()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        first, last, layers = self.model.start_layer, self.model.end_layer, self.config.num_hidden_layers
        if self._lora_enabled:
            # a stage knows only its own modules, and vLLM refuses an adapter that names others
            self.lora_skip_prefixes = [f"model.layers.{i}." for i in range(layers) if not first <= i < last]
        install(self, self.moe_layers, vllm_config)
        several_stages = vllm_config.parallel_config.pipeline_parallel_size > 1
        self.relay = StageRelay(self, vllm_config) if several_stages and vllm_config.aux_output_config.enabled else None

    def process_weights_after_loading(self) -> None:
        """vLLM's, without the low-latency projection under LoRA: it reads the raw weight past the adapter."""
        if not self._lora_enabled:
            super().process_weights_after_loading()

    @property
    def lora_manager(self) -> Any:
        """vLLM's LoRA manager, once it has wrapped this model's layers."""
        return self.__dict__.get("_lora_manager")

    @lora_manager.setter
    def lora_manager(self, manager: Any) -> None:
        from beam_moe.integrations.vllm import adapters, experts, linear_lora

        self.__dict__["_lora_manager"] = manager
        adapters.attach(manager)
        if experts.serves("BeamForCausalLM"):
            linear_lora.attach(manager)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]:
        """vLLM's; with routed experts returned over several stages, their ids travel along."""
        if self.relay is not None:
            self.relay.receive(intermediate_tensors)
        out = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        return out if self.relay is None else self.relay.send(out)


def install(model: torch.nn.Module, runners: list[Any], vllm_config: VllmConfig) -> None:
    """Give every MoE layer of Beam our experts and our router, before vLLM builds its kernels.

    Layers that we cannot serve keep vLLM's; a router is ours only where the experts are.
    """
    from beam_moe import env
    from beam_moe.integrations.vllm import experts as ours
    from beam_moe.integrations.vllm import router

    if not ours.serves("BeamForCausalLM"):
        metrics.log_once("beam-moe: BEAM_MOE_VLLM leaves Beam's experts to vLLM")
        return
    if vllm_config.lora_config is not None:
        ours.follow_ranks()
    served = 0
    for runner in runners:
        reason = ours.give_experts(runner)
        served += reason is None
        if reason is not None:
            metrics.fell_back(runner.layer_name, reason)
        elif env.number("VLLM_ROUTER"):
            reason = router.give_router(runner)
            if reason is not None:
                metrics.fell_back(f"the router of {runner.layer_name}", reason)
    if runners:
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        ours.ExpertsWarmup(runners, tokens).register_warmup()
        routing = next(filter(None, map(router.routing_of, runners)), None)
        if routing is not None:
            router.RouterWarmup(routing, tokens, vllm_config.model_config.dtype).register_warmup()
    if served:
        metrics.log_once("beam-moe: Beam's experts run on beam_moe.kernels.moe_lora")
