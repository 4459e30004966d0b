"""A tiny Beam in vLLM's own classes, adapters in every layout, and the tasks that several gloo ranks run on them.

As a script: ``ranks.py FOLDER TP PP RANK`` runs FOLDER/tasks.json and writes FOLDER/rank<RANK>.json.
"""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

from beam_moe.testing import load_script

H, I, D, E, R, TOP_K = 64, 32, 96, 8, 4, 2
HEADS, KV, HEAD = 4, 2, 16
DENSE, LAYERS = 2, 4  # two dense layers, two sparse ones: at PP 2 each stage is pure
ROOT = "base_model.model.model.layers."
BEAM = {
    "architectures": ["BeamForCausalLM"],
    "model_type": "beam",
    "vocab_size": 256,
    "hidden_size": H,
    "intermediate_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "sliding_window": 64,
    "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense"] * DENSE + ["sparse"] * 2,
    "moe_intermediate_size": I,
    "num_experts_per_tok": TOP_K,
    "num_experts": E,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "final_logit_softcapping": 30.0,
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": None},
}
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": H,
    "intermediate_size": D,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "moe_intermediate_size": I,
    "num_experts_per_tok": TOP_K,
    "num_experts": E,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 1e4,
    "attention_bias": False,
}


def write_config(folder: Path, base: dict = BEAM, **changes) -> str:
    """A model folder with a configuration alone; weights are dummies."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / f"config.{os.getpid()}"  # every rank writes it, while another may be reading
    whole.write_text(json.dumps({**base, **changes}))
    whole.replace(folder / "config.json")
    return str(folder)


def expert_factors(rank: int = R, seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Per projection A (E, r, in) and B (E, out, r), each expert its own; gate and up share A as in the flat form."""
    g = torch.Generator().manual_seed(seed)

    def new(*shape):
        return torch.randn(shape, generator=g) * 0.3

    a = new(E, rank, H)
    return {
        "gate": (a, new(E, I, rank)),
        "up": (a, new(E, I, rank)),
        "down": (new(E, rank, I), new(E, H, rank)),
    }


def adapter_tensors(
    layout: str, rank: int = R, seed: int = 0, attention=True, dense=True, router=False, only=("gate", "up", "down")
) -> dict[str, torch.Tensor]:
    """PEFT names and float32 tensors of an adapter on every layer, its experts in the given layout."""
    g = torch.Generator().manual_seed(100 + seed)
    tensors: dict[str, torch.Tensor] = {}

    def pair(name, fan_in, fan_out):
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, fan_in, generator=g) * 0.3
        tensors[f"{name}.lora_B.weight"] = torch.randn(fan_out, rank, generator=g) * 0.3

    def put(name, a, b):
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = (
            a.clone().contiguous(),
            b.clone().contiguous(),
        )

    for layer in range(LAYERS):
        p = f"{ROOT}{layer}."
        if attention:
            for name, fan_in, fan_out in (
                ("q_proj", H, HEADS * HEAD),
                ("k_proj", H, KV * HEAD),
                ("v_proj", H, KV * HEAD),
                ("gate_proj", H, HEADS * HEAD),
                ("o_proj", HEADS * HEAD, H),
            ):
                pair(f"{p}self_attn.{name}", fan_in, fan_out)
        if layer < DENSE:
            if dense:
                for name, fan_in, fan_out in (("gate_proj", H, D), ("up_proj", H, D), ("down_proj", D, H)):
                    pair(f"{p}mlp.{name}", fan_in, fan_out)
            continue
        if router:
            pair(f"{p}mlp.gate", H, E)
        f = expert_factors(rank, seed + layer)
        x = f"{p}mlp.experts"
        if layout == "per_expert":
            for projection in only:
                for e in range(E):
                    put(f"{x}.{e}.{projection}_proj", f[projection][0][e], f[projection][1][e])
        elif layout == "flat":
            gate_up = torch.cat([f["gate"][1], f["up"][1]], dim=1)
            put(f"{x}.base_layer", f["gate"][0].reshape(E * rank, H), gate_up.permute(1, 2, 0).reshape(2 * I, rank * E))
            put(x, f["down"][0].reshape(E * rank, I), f["down"][1].permute(1, 2, 0).reshape(H, rank * E))
        elif layout == "packed":
            put(f"{x}.gate_up_proj", f["gate"][0], torch.cat([f["gate"][1], f["up"][1]], dim=1))
            put(f"{x}.down_proj", *f["down"])
        elif layout == "shared":
            put(f"{x}.w1", f["gate"][0][:1], f["gate"][1])
            put(f"{x}.w3", f["up"][0][:1], f["up"][1])
            put(f"{x}.w2", f["down"][0], f["down"][1][:1])
        elif layout != "none":
            raise ValueError(layout)
    return tensors


def write_adapter(folder: Path, layout: str, alpha: int = 2 * R, rank: int = R, **options) -> str:
    """An adapter folder as PEFT writes it, alpha / r of 2."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter_tensors(layout, rank, **options), folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": "all-linear",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def checkpoint(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every weight of the tiny Beam by checkpoint name; routers in float32."""
    q, kv = HEADS * HEAD, KV * HEAD
    g = torch.Generator().manual_seed(seed)

    def new(*shape, dtype=torch.float16):
        return (torch.randn(shape, generator=g) * 0.1).to(dtype)

    out = {"model.embed_tokens.weight": new(256, H), "lm_head.weight": new(256, H), "model.norm.weight": new(H)}
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        for name in ("input", "pre_feedforward", "post_attention", "post_feedforward"):
            out[f"{p}{name}_layernorm.weight"] = new(H)
        for name, rows, cols in (("q", q, H), ("k", kv, H), ("v", kv, H), ("gate", q, H), ("o", H, q)):
            out[f"{p}self_attn.{name}_proj.weight"] = new(rows, cols)
        out[f"{p}self_attn.q_norm.weight"], out[f"{p}self_attn.k_norm.weight"] = new(HEAD), new(HEAD)
        out[f"{p}self_attn.gate_bias"] = new(HEADS)
        if layer < DENSE:
            out[f"{p}mlp.gate_proj.weight"], out[f"{p}mlp.up_proj.weight"] = new(D, H), new(D, H)
            out[f"{p}mlp.down_proj.weight"] = new(H, D)
            continue
        out[f"{p}mlp.gate.weight"] = new(E, H, dtype=torch.float32)
        out[f"{p}mlp.gate.e_score_correction_bias"] = new(E, dtype=torch.float32)
        for x in range(E):
            out[f"{p}mlp.experts.{x}.gate_proj.weight"] = new(I, H)
            out[f"{p}mlp.experts.{x}.up_proj.weight"] = new(I, H)
            out[f"{p}mlp.experts.{x}.down_proj.weight"] = new(H, I)
    return out


def init_ranks(tp: int, pp: int, rank: int, rendezvous: Path) -> None:
    """vLLM's process groups over gloo; once per process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.workspace import init_workspace_manager

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(tp * pp, rank, f"file://{rendezvous}", rank, backend="gloo")
        initialize_model_parallel(tp, pp)
    init_workspace_manager(torch.device("cpu"))


def engine_config(model: str, tp=1, pp=1, lora=True, max_loras=2, max_lora_rank=8, **options):
    """The VllmConfig that ``vllm serve`` would make of these arguments."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    # the model's class is asked in this process, which imports it anyway: vLLM starts another for each architecture
    registry._run_in_subprocess = lambda ask: ask()
    if lora:
        options.update(enable_lora=True, max_loras=max_loras, max_lora_rank=max_lora_rank, max_cpu_loras=4)
    args = {
        "model": model,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "dtype": "float16",
        "load_format": "dummy",
        "distributed_executor_backend": "mp" if tp * pp > 1 else None,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
    }
    return EngineArgs(**{**args, **options}).create_engine_config()


@contextmanager
def built(config, seed: int = 0, checkpoint: str | None = None):
    """``(model, worker manager or None)``: built, given random weights or a checkpoint's, processed and wrapped as a
    worker does it."""
    from vllm.config import set_current_vllm_config
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config):
        with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
            model = initialize_model(config)
        for module in model.modules():  # online quantisation builds its layers on the meta device
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.is_meta:
                    real = torch.nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype), requires_grad=False)
                    real.__dict__.update(parameter.__dict__)
                    module._parameters[name] = real
        g = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16, torch.float32):
                values = torch.randn(parameter.shape, generator=g) * 0.1
                parameter.data.copy_(values)
        if checkpoint is not None:
            from safetensors.torch import load_file

            model.load_weights(load_file(Path(checkpoint) / "model.safetensors").items())
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        manager = None
        if config.lora_config is not None:
            manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
            model = manager.create_lora_manager(model, config)
        yield model, manager


def request(path: str, number: int = 1, **options):
    """A LoRARequest by path."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter{number}", number, path, **options)


def own_layers(model) -> list[int]:
    """Global indices of the layers that this stage holds."""
    return list(range(model.model.start_layer, model.model.end_layer))


def experts_stacks(model, layer: int, slot: int) -> dict[str, torch.Tensor]:
    """One slot of the MoE LoRA buffers of a layer, by vLLM's names."""
    experts = model.model.layers[layer].mlp.experts
    return {
        "w1.a": experts.w13_lora_a_stacked[0][slot],
        "w3.a": experts.w13_lora_a_stacked[1][slot],
        "w1.b": experts.w13_lora_b_stacked[0][slot],
        "w3.b": experts.w13_lora_b_stacked[1][slot],
        "w2.a": experts.w2_lora_a_stacked[0][slot],
        "w2.b": experts.w2_lora_b_stacked[0][slot],
    }


def expected_stacks(
    layer: int, tp: int, tp_rank: int, shared_source: bool, scaling: float = 2.0, seed: int = 0
) -> dict:
    """What the buffers of one rank must hold, from the factors themselves: float32, live rank only."""
    f = expert_factors(R, seed + layer)
    if shared_source:
        f = {
            p: (a[:1].expand(E, -1, -1), b) if p != "down" else (a, b[:1].expand(E, -1, -1)) for p, (a, b) in f.items()
        }
    cut = slice(tp_rank * I // tp, (tp_rank + 1) * I // tp)
    return {
        "w1.a": f["gate"][0],
        "w3.a": f["up"][0],
        "w1.b": f["gate"][1][:, cut] * scaling,
        "w3.b": f["up"][1][:, cut] * scaling,
        "w2.a": f["down"][0][:, :, cut],
        "w2.b": f["down"][1] * scaling,
    }


def largest_difference(stacks: dict, expected: dict) -> float:
    """Largest error over the live rank, infinity where anything is not zero beyond it or a shape does not fit."""
    worst = 0.0
    for name, want in expected.items():
        got = stacks[name].float()
        live = got[:, : want.shape[1]] if name.endswith(".a") else got[:, :, : want.shape[2]]
        if got.shape[0] == 1:
            want = want[:1]
        if live.shape != want.shape or float(got.abs().sum() - live.abs().sum()) > 1e-3:
            return float("inf")
        worst = max(worst, float((live - want).abs().max()))
    return worst


def routing(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of a batch; the last expert gets no token."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(E - 1, generator=g)[:TOP_K] for _ in range(tokens)]).int()
    return torch.rand(tokens, TOP_K, generator=g), ids


def run_experts(runner, x, weights, ids) -> torch.Tensor:
    """A layer's routed sum as its runner computes it from the router's choice, the runner's scaling included."""
    layer = runner.routed_experts
    out = layer.quant_method.apply(
        layer=layer, x=x, topk_weights=weights, topk_ids=ids, shared_experts=None, shared_experts_input=None
    )
    _, out = runner._maybe_apply_routed_scale_to_output(None, out)
    return out


def choose_experts(block, layer: int) -> list:
    """Ids that a layer's runner chooses for five known tokens by known router weights, without its gate."""
    g = torch.Generator().manual_seed(layer)
    gate = getattr(block.gate, "base_layer", block.gate)
    gate.weight.data.copy_(torch.randn(E, H, generator=g))
    gate.e_score_correction_bias.data.zero_()
    runner = getattr(block.experts, "base_layer", block.experts)
    assert runner.gate is None
    x = torch.randn(5, H, generator=g).half()
    return runner.router.select_experts(x, x, runner._quant_method.topk_indices_dtype)[1].tolist()


def linear_error(manager, attention, slot: int) -> float:
    """Largest error of this rank's share of an adapter on both attention projections, none for a bare row."""
    worst = 0.0
    set_slots(manager, [slot, -1])
    for module in (attention.qkv_gate_proj, attention.o_proj):
        x = torch.randn(2, module.input_size, generator=torch.Generator().manual_seed(1)).half()
        base = module.base_layer.quant_method.apply(module.base_layer, x, None)
        got = module.apply(x, None)
        factors = zip(module.lora_a_stacked, module.lora_b_stacked)
        delta = torch.cat([b[slot, 0].float() @ (a[slot, 0].float() @ x[0].float()) for a, b in factors])
        worst = max(worst, float((base[0].float() + delta - got[0].float()).abs().max() / delta.abs().max()))
        worst = worst if torch.equal(got[1], base[1]) and float(delta.abs().max()) > 0 else float("inf")
    return worst


def set_slots(manager, slots: list[int]) -> None:
    """Tell vLLM which slot each token of the batch uses, -1 for none, through its own metadata."""
    meta = manager._adapter_manager.punica_wrapper_mapping["language_model"].token_mapping_meta
    meta.prepare_tensors(torch.tensor(slots, dtype=torch.long))


# --- tasks of several ranks ---


def task_load(folder: Path, tp: int, pp: int, layout: str, shared: bool = False, fixed: bool = True, **options) -> dict:
    """Load an adapter and compare every buffer of this rank with the factors."""
    from vllm.distributed import get_tensor_model_parallel_rank

    path = write_adapter(folder / f"adapter_{layout}_{os.getpid()}", layout)
    config = engine_config(write_config(folder / "model"), tp, pp, enable_moe_shared_loras=shared, **options)
    with built(config) as (model, manager):
        if not fixed:
            model.lora_skip_prefixes = []
        try:
            manager.add_adapter(request(path))
        except ValueError as error:
            return {"error": str(error), "layers": own_layers(model)}
        inner = manager._adapter_manager
        slot = inner.lora_index_to_id.index(1)
        rank, differences, attention, routed, linear = get_tensor_model_parallel_rank(), [], [], [], []
        experts_tp = 1 if config.parallel_config.enable_expert_parallel else tp
        for layer in own_layers(model):
            block = model.model.layers[layer]
            linear.append(linear_error(manager, block.self_attn, slot))
            attention.append(float(block.self_attn.qkv_gate_proj.lora_b_stacked[3][slot].abs().sum()))
            if layer >= DENSE:
                want = expected_stacks(layer, experts_tp, rank if experts_tp > 1 else 0, layout == "shared")
                if experts_tp != tp:
                    mine = slice(rank * E // tp, (rank + 1) * E // tp)
                    want = {k: v[mine] for k, v in want.items()}
                differences.append(largest_difference(experts_stacks(model, layer, slot), want))
                routed.append(choose_experts(block.mlp, layer))
        return {
            "layers": own_layers(model),
            "differences": differences,
            "attention": attention,
            "routed": routed,
            "linear": linear,
            "kernels": sorted(
                {type(r.routed_experts.quant_method.moe_kernel.fused_experts).__name__ for r in model.moe_layers}
            ),
        }


def task_part(folder: Path, tp: int, pp: int, keep: str, extra: str = "", **options) -> dict:
    """An adapter of which a rank may have no module, from a folder and from memory, then requests for the latter, the
    last of them when vLLM has forgotten all adapters.

    Args:
        keep: a pattern of the tensors that the adapter has.
        extra: a module that it has besides, of a name no rank may know.
    """
    import re
    from types import SimpleNamespace

    from safetensors.torch import load_file, save, save_file

    from beam_moe.integrations.vllm.weight_sync import IN_MEMORY, WeightSync

    path = write_adapter(folder / f"adapter_{os.getpid()}", "per_expert")
    file = Path(path) / "adapter_model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if re.search(keep, n)}
    if extra:
        tensors |= {f"{extra}.lora_A.weight": torch.ones(R, H), f"{extra}.lora_B.weight": torch.ones(I, R)}
    save_file(tensors, file)
    with built(engine_config(write_config(folder / "model"), tp, pp, **options)) as (model, manager):
        worker = WeightSync()
        worker.model_runner = SimpleNamespace(lora_manager=manager, get_model=lambda: model)
        worker.beam_moe_stage("key", save(tensors))
        try:
            names = worker.beam_moe_prepare_adapter("key", 2, {"r": R, "lora_alpha": 2 * R})
            worker.beam_moe_load_adapter("key", 2, {"r": R, "lora_alpha": 2 * R})
            taken = manager.add_adapter(request("/in/memory/only", 2))
            manager.add_adapter(request(path, 1))
        except ValueError as error:
            return {"error": str(error)}
        inner = manager._adapter_manager

        def held(number: int) -> float:
            slot = inner.lora_index_to_id.index(number)
            stacks = [experts_stacks(model, n, slot) for n in own_layers(model) if n >= DENSE]
            return sum(float(t.abs().sum()) for s in stacks for t in s.values())

        sums, active = [held(1), held(2)], sorted(inner.lora_index_to_id)
        manager.remove_all_adapters()
        manager.add_adapter(request(f"{IN_MEMORY}key/1", 2))
        return {"modules": len(names), "taken": taken, "active": active, "sums": [*sums, held(2)]}


def task_replay(folder: Path, tp: int, pp: int, sparse_from: int) -> dict:
    """Record known ids on every stage, hand them on as the workers do, and return what the last stage holds."""
    from vllm.distributed import get_pp_group
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCapturer,
        bind_routed_experts_capturer,
    )
    from vllm.models.beam.nvidia.model import BeamForCausalLM as VllmBeam
    from vllm.sequence import IntermediateTensors

    types = ["dense"] * sparse_from + ["sparse"] * (LAYERS - sparse_from)
    path = write_config(folder / "model", mlp_layer_types=types)
    config = engine_config(path, tp, pp, lora=False, enable_return_routed_experts=True, enable_prefix_caching=True)
    tokens = 5
    ids = torch.randint(0, E, (LAYERS, tokens, TOP_K), generator=torch.Generator().manual_seed(1), dtype=torch.int32)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        for runner in self.moe_layers:
            if runner.router.capture_fn is not None:
                runner.router.capture_fn(ids[runner.layer_id])
        hidden = torch.zeros(tokens, H)
        return hidden if get_pp_group().is_last_rank else IntermediateTensors({"hidden_states": hidden})

    with built(config) as (model, _):
        stock, VllmBeam.forward = VllmBeam.forward, forward
        try:
            profile = model(None, None, None) if get_pp_group().is_first_rank else None
            capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
            bind_routed_experts_capturer(model, capturer)
            empty = model.make_empty_intermediate_tensors(tokens, torch.float16, torch.device("cpu"))
            with set_forward_context(None, config, num_tokens=tokens):
                received = None
                if not get_pp_group().is_first_rank:
                    received = IntermediateTensors(get_pp_group().recv_tensor_dict())
                out = model(None, None, received)
            if not get_pp_group().is_last_rank:
                get_pp_group().send_tensor_dict(out.tensors)
                return {"keys": sorted(out.tensors), "profile": sorted(profile.tensors)}
        finally:
            VllmBeam.forward = stock
        got = capturer.snapshot_routing_data(tokens).permute(1, 0, 2).int()
        want = ids.clone()
        want[:sparse_from] = 0
        shapes = {k: [list(t.shape), str(t.dtype)] for k, t in empty.tensors.items()}
        return {"equal": torch.equal(got, want), "shapes": shapes, "received": str(received.tensors[KEY].dtype)}


def memory_parts(model) -> dict[str, int]:
    """Bytes of a rank's parameters and LoRA buffers, by the names of bench/memory_plan.py."""
    from vllm.lora.layers.fused_moe import FusedMoEWithLoRA

    parts: dict[str, int] = {}

    def add(name: str, tensors) -> None:
        for t in tensors:
            parts[name] = parts.get(name, 0) + t.numel() * t.element_size()

    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            part = "routers" if name.endswith("e_score_correction_bias") else "experts"
        elif ".mlp.gate." in name:
            part = "routers"
        elif ".mlp." in name:
            part = "dense layers"
        elif "embed_tokens" in name:
            part = "embedding"
        elif "lm_head" in name or name == "model.norm.weight":
            part = "head"
        else:
            part = "attention and norms"
        add(part, [parameter])
    for runner in model.moe_layers:
        experts = runner.routed_experts.quant_method.moe_kernel.impl.fused_experts
        add("rows of MXFP8 experts", [w for w in getattr(experts, "words", ()) if w is not None])
    manager = getattr(model, "lora_manager", None)
    for module in manager.modules.values() if manager is not None else ():
        if isinstance(module, FusedMoEWithLoRA):
            add("expert adapters", [*module.w13_lora_a_stacked, *module.w13_lora_b_stacked])
            add("expert adapters", [*module.w2_lora_a_stacked, *module.w2_lora_b_stacked])
        else:
            add("other adapters", [*module.lora_a_stacked, *module.lora_b_stacked])
    return parts


def task_memory(folder: Path, tp: int, pp: int, rank: int, **options) -> dict:
    """Bytes that this rank holds, by part."""
    config = engine_config(write_config(folder / "model"), tp, pp, lora=rank > 0, max_lora_rank=rank, **options)
    with built(config) as (model, _):
        return {"layers": own_layers(model), "parts": memory_parts(model)}


def task_shapes(folder: Path, tp: int, pp: int, **options) -> dict:
    """Which weights of a whole checkpoint this rank finds misshapen, and which where each has half its rows."""
    from beam_moe.integrations.vllm.weight_sync import foreign, misshapen

    with built(engine_config(write_config(folder / "model"), tp, pp, **options)) as (model, _):
        state = checkpoint()
        half = misshapen(model, {n: t[: len(t) // 2] for n, t in state.items()})
        whole = misshapen(model, state) + foreign(model, state)
        return {"layers": own_layers(model), "whole": whole, "half": [t.split()[0] for t in half]}


KEY = "beam_moe_routed_experts"
# What ranks of two layouts are asked, in processes of their own for as many tests as look at the answers.
TP2 = [
    *({"task": "load", "layout": layout} for layout in ("per_expert", "flat", "packed", "shared")),
    {"task": "load", "layout": "shared", "shared": True},
    {"task": "load", "layout": "per_expert", "enable_expert_parallel": True},
    {"task": "load", "layout": "flat", "enable_expert_parallel": True},
    {"task": "part", "keep": r"experts\.[0-3]\.", "enable_expert_parallel": True},
    {"task": "part", "keep": "", "extra": f"{ROOT}2.mlp.experts.9.gate_proj", "enable_expert_parallel": True},
    {"task": "memory", "rank": 8},
    {"task": "shapes"},
    {"task": "shapes", "enable_expert_parallel": True},
]
PP2 = [
    {"task": "load", "layout": "per_expert"},
    {"task": "load", "layout": "shared", "shared": True},
    {"task": "load", "layout": "per_expert", "fixed": False},
    {"task": "replay", "sparse_from": 0},
    {"task": "replay", "sparse_from": 2},
    {"task": "part", "keep": r"layers\.[23]\."},
    {"task": "memory", "rank": 8},
    {"task": "shapes"},
]
TASKS = {"load": task_load, "part": task_part, "replay": task_replay, "memory": task_memory, "shapes": task_shapes}


def main() -> None:
    folder, tp, pp, rank = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    load_script(Path(__file__).resolve().parents[2] / "interpreter.py").patch_language_once()
    init_ranks(tp, pp, rank, folder / "rendezvous")
    results = []
    for number, task in enumerate(json.loads((folder / "tasks.json").read_text())):
        name = task.pop("task")
        results.append(TASKS[name](folder / f"task{number}", tp, pp, **task))
        torch.distributed.barrier()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
