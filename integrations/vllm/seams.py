"""Every place where beam-moe touches vLLM: what is used, why, and when it can go. Nothing else is patched.

`check` compares the signatures with the installed vLLM by reading its source, so it imports nothing of vLLM, and looks
there for every name that this package imports. The entry point registers nothing when one differs.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

WINDOW = ((0, 33), (0, 35))
"""Versions served: at least the first, below the second (major, minor)."""


class Seam(NamedTuple):
    """One touched place of vLLM.

    Attributes:
        file, symbol: where; ``symbol`` is ``name``, ``Class`` or ``Class.method``.
        parameters: the parameter names the symbol must have, in order; None where only its existence matters.
        kind: ``registry`` (documented extension point), ``subclass``, ``attribute`` (set on an instance), ``wrap`` (a
            method replaced by one that calls it; carries ``__wrapped__``), ``read`` (only called or read).
        why, until: the reason, and what has to change in vLLM before it can go.
    """

    file: str
    symbol: str
    parameters: tuple[str, ...] | None
    kind: str
    why: str
    until: str


MOE = "model_executor/layers/fused_moe/"
SEAMS: tuple[Seam, ...] = (
    Seam(
        "model_executor/models/registry.py",
        "_ModelRegistry.register_model",
        ("self", "model_arch", "model_cls"),
        "registry",
        "vLLM's Beam declares no LoRA support; ours is registered, lazily, under the same architecture name",
        "vLLM's own Beam takes adapters and lets a plugin choose its experts class",
    ),
    Seam(
        "models/beam/nvidia/model.py",
        "BeamForCausalLM.__init__",
        ("self", "vllm_config", "prefix"),
        "subclass",
        "LoRA, pipeline-stage prefixes, refusal of options that drop projections, choice of the experts class",
        "as above",
    ),
    Seam(
        "models/beam/nvidia/attention.py",
        "BeamAttention.warmup_projection",
        ("self",),
        "attribute",
        "its low-latency projection reads the raw weight past the LoRA wrapper: left off under LoRA",
        "the projection goes through the wrapper",
    ),
    Seam(
        MOE + "experts/triton_moe.py",
        "TritonExperts.apply",
        (
            "self",
            "output",
            "hidden_states",
            "w1",
            "w2",
            "topk_weights",
            "topk_ids",
            "activation",
            "global_num_experts",
            "expert_map",
            "a1q_scale",
            "a2_scale",
            "workspace13",
            "workspace2",
            "expert_tokens_meta",
            "apply_router_weight_on_input",
        ),
        "subclass",
        "decode runs through beam_moe.kernels.moe_lora.fused_moe; large batches through TritonExperts itself",
        "vLLM has a registry of experts backends that LoRA honours",
    ),
    Seam(
        MOE + "experts/triton_moe.py",
        "TritonExperts.activation",
        ("self", "activation", "output", "input", "kwargs"),
        "subclass",
        "SwiGLU of Beam's experts is rounded once, as in its dense layers and its reference",
        "vLLM's expert path rounds once",
    ),
    Seam(
        MOE + "unquantized_fused_moe_method.py",
        "UnquantizedFusedMoEMethod.__init__",
        ("self", "moe"),
        "registry",
        "experts_cls names the class that the kernel is built from: set per layer in the model subclass; for other"
        " models (BEAM_MOE_VLLM) by a subclass under CustomOp.register_oot",
        "as for TritonExperts.apply",
    ),
    Seam(
        "model_executor/layers/quantization/online/mxfp8.py",
        "Mxfp8OnlineMoEMethod.__init__",
        ("self", "moe"),
        "attribute",
        "experts_cls, fp8_backend (plain row-major layout) and _setup_kernel (followed by prepare) for MXFP8 experts",
        "vLLM has a registry of fp8 experts backends",
    ),
    Seam(
        "model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe/"
        "compressed_tensors_moe_w8a8_mxfp8.py",
        "CompressedTensorsW8A8Mxfp8MoEMethod.process_weights_after_loading",
        ("self", "layer"),
        "attribute",
        "the same for compressed-tensors' MXFP8 checkpoints: experts_cls, fp8_backend, prepare after the kernel",
        "as above",
    ),
    Seam(
        "model_executor/layers/quantization/modelopt.py",
        "ModelOptMxFp8FusedMoE.process_weights_after_loading",
        ("self", "layer"),
        "attribute",
        "the same for ModelOpt's MXFP8 checkpoints: experts_cls, mxfp8_backend, prepare after the kernel",
        "as above",
    ),
    Seam(
        "model_executor/layers/quantization/__init__.py",
        "register_quantization_config",
        ("quantization",),
        "registry",
        "--quantization beam_mxfp8: vLLM's online MXFP8 that refuses to start where an expert is not ours",
        "never",
    ),
    Seam(
        "model_executor/model_loader/weight_utils.py",
        "get_quant_config",
        ("model_config", "load_config"),
        "read",
        "calls the registered class without arguments where the checkpoint says nothing of quantisation, and sets"
        " online_quantization_config where the user gave a quantization_config: refused",
        "never",
    ),
    Seam(
        "model_executor/layers/quantization/online/base.py",
        "OnlineQuantizationConfig.resolve_quant_method_cls",
        ("self", "layer_cls", "prefix"),
        "subclass",
        "beam_mxfp8 leaves routers unquantised, which vLLM's online MXFP8 quantises in some models",
        "vLLM leaves routers alone",
    ),
    Seam(
        "model_executor/layers/quantization/online/base.py",
        "OnlineQuantizationConfig.get_quant_method",
        ("self", "layer", "prefix"),
        "subclass",
        "beam_mxfp8 gives experts a method that builds no kernel but ours",
        "as for Mxfp8OnlineMoEMethod.__init__",
    ),
    Seam(
        "model_executor/layers/quantization/online/mxfp8.py",
        "Mxfp8OnlineMoEMethod.create_weights",
        (
            "self",
            "layer",
            "num_experts",
            "hidden_size",
            "intermediate_size_per_partition",
            "params_dtype",
            "extra_weight_attrs",
        ),
        "subclass",
        "beam_mxfp8 names the layer whose size MXFP8 cannot divide",
        "vLLM's error names the layer",
    ),
    Seam(
        "model_executor/kernels/linear/__init__.py",
        "init_mxfp8_linear_kernel",
        ("weight_shape", "bmm_batch_size"),
        "registry",
        "takes the first kernel of _POSSIBLE_MXFP8_KERNELS that says yes: ours is put before vLLM's, and says no to"
        " every model that BEAM_MOE_VLLM does not name. register_linear_kernel only appends",
        "register_linear_kernel takes a place in the list",
    ),
    Seam(
        "model_executor/kernels/linear/mxfp8/Mxfp8LinearKernel.py",
        "Mxfp8LinearKernel.apply_weights",
        ("self", "layer", "x", "bias"),
        "subclass",
        "MXFP8 linears by beam_moe.kernels.mxfp8.gemm; one operator of our own in what torch.compile traces",
        "never",
    ),
    Seam(
        "config/compilation.py",
        "CompilationConfig.compute_hash",
        ("self",),
        "read",
        "reads custom_ops, where that operator's name keeps a compiled model apart from one with vLLM's kernel",
        "as for VllmConfig.compute_hash",
    ),
    Seam(
        "model_executor/layers/quantization/utils/mxfp8_utils.py",
        "dequant_mxfp8_to_bf16",
        ("x", "scales"),
        "read",
        "calls of a linear that our kernel does not take",
        "never",
    ),
    Seam(
        MOE + "runner/moe_runner.py",
        "MoERunner._maybe_apply_routed_scale_to_output",
        ("self", "shared_output", "fused_output"),
        "attribute",
        "routed_scaling_factor of Beam's runner becomes 1: the experts fold it into their last sum, one rounding and"
        " one launch less",
        "the runner hands the factor to the experts",
    ),
    Seam(
        MOE + "router/grouped_topk_router.py",
        "GroupedTopKRouter._compute_routing",
        ("self", "hidden_states", "router_logits", "indices_type", "input_ids"),
        "attribute",
        "Beam's logits and choice by beam_moe.kernels.router.grouped_topk, without the gate's launches",
        "vLLM's router may hold the gate, or a plugin may choose the router",
    ),
    Seam(
        MOE + "runner/moe_runner.py",
        "MoERunner._forward_impl",
        ("self", "hidden_states", "router_logits", "shared_experts_input", "input_ids"),
        "attribute",
        "gate of Beam's runner becomes None: it then hands its router the hidden states, and the router calls the gate"
        " where vLLM's path serves",
        "as above",
    ),
    Seam(
        MOE + "router/gate_linear.py",
        "GateLinear.forward",
        ("self", "x"),
        "read",
        "the gate of batches that vLLM's own router serves",
        "as above",
    ),
    Seam(
        MOE + "experts/lora_context.py",
        "MoELoRAContext",
        None,
        "read",
        "adapter stacks, enabled flags and the token-to-slot map that the experts read",
        "never: this is how vLLM hands LoRA to experts",
    ),
    Seam(
        MOE + "experts/lora_experts_mixin.py",
        "LoRAExpertsMixin.set_lora_context",
        ("self", "ctx"),
        "subclass",
        "the bank over vLLM's stacks is built once, when the context arrives",
        "never",
    ),
    Seam(
        "lora/layers/fused_moe.py",
        "FusedMoEWithLoRA.set_lora",
        ("self", "index", "lora_a", "lora_b"),
        "wrap",
        "notes the live rank of a slot, so that kernels read that rank and not max_lora_rank",
        "the context carries live ranks",
    ),
    Seam(
        "lora/layers/fused_moe.py",
        "FusedMoEWithLoRA.reset_lora",
        ("self", "index"),
        "wrap",
        "sets the slot's live rank to 0",
        "as for set_lora",
    ),
    Seam(
        "lora/punica_wrapper/punica_gpu.py",
        "PunicaWrapperGPU.add_lora_linear",
        ("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices", "buffer", "kwargs"),
        "attribute",
        "adapters of linear layers in a small batch, in Beam and in other models whose experts are ours, by"
        " beam_moe.kernels.linear_lora.add_lora: one launch, which ends at once where no adapter has factors, instead"
        " of a fill, a shrink and an expand; an operator of our own in what torch.compile traces",
        "vLLM's kernels know live ranks",
    ),
    Seam(
        "lora/layers/base_linear.py",
        "BaseLinearLayerWithLoRA.set_lora",
        ("self", "index", "lora_a", "lora_b"),
        "attribute",
        "notes the live rank of each slice of a slot",
        "as above",
    ),
    Seam(
        "lora/layers/base_linear.py",
        "BaseLinearLayerWithLoRA.reset_lora",
        ("self", "index"),
        "attribute",
        "sets the slot's live ranks to 0",
        "as above",
    ),
    Seam(
        "lora/ops/triton_ops/lora_kernel_metadata.py",
        "LoRAKernelMeta.prepare_tensors",
        ("self", "token_lora_mapping"),
        "attribute",
        "the map is left stale for batches without adapters and for padding rows; cleared to -1 after the call",
        "vLLM clears it",
    ),
    Seam(
        "lora/model_manager.py",
        "LoRAModelManager._validate_moe_lora_format",
        ("self", "lora_model"),
        "attribute",
        "brings flat 3-D, shared-outer and partial adapters to the engine's layout, refuses what would be dropped",
        "vLLM recognises the layout by the adapter's own names and reports unused tensors",
    ),
    Seam(
        "lora/model_manager.py",
        "LoRAModelManager._create_lora_modules",
        ("self",),
        "wrap",
        "where BEAM_MOE_VLLM names other models: the layers that it has wrapped get our LoRA kernel if their model's"
        " experts are ours. Beam needs no wrap: the manager puts itself on the model as lora_manager, and our model"
        " takes that moment to attach the layouts too",
        "vLLM has a hook after the manager is built",
    ),
    Seam(
        "config/vllm.py",
        "VllmConfig.compute_hash",
        ("self", "include_version"),
        "read",
        "reads additional_config, where our mark keeps a model compiled with our LoRA operator apart from vLLM's",
        "vLLM's cache knows the operators of a graph before it loads it",
    ),
    Seam(
        "utils/torch_utils.py",
        "direct_register_custom_op",
        ("op_name", "op_func", "mutates_args", "fake_impl", "target_lib", "dispatch_key", "tags"),
        "read",
        "registers our operators, beam_moe::add_lora_linear and beam_moe::vllm_mxfp8_linear",
        "never",
    ),
    Seam(
        "lora/worker_manager.py",
        "WorkerLoRAManager._load_adapter",
        ("self", "lora_request"),
        "attribute",
        "reads hf_to_vllm_mapper, lora_skip_prefixes and packed_modules_mapping from the model and the manager; finds"
        " an adapter from memory again that vLLM has dropped",
        "LoRARequest carries tensors",
    ),
    Seam(
        "lora/worker_manager.py",
        "LRUCacheWorkerLoRAManager.add_adapter",
        ("self", "lora_request"),
        "read",
        "what weight_sync.put_adapter does with tensors from memory, and in two steps with a folder's",
        "as above",
    ),
    Seam(
        "lora/worker_manager.py",
        "WorkerLoRAManager.remove_adapter",
        ("self", "adapter_id"),
        "attribute",
        "forgets an adapter from memory",
        "as above",
    ),
    Seam(
        "lora/lora_model.py",
        "LoRAModel.from_lora_tensors",
        (
            "cls",
            "lora_model_id",
            "tensors",
            "peft_helper",
            "device",
            "dtype",
            "model_vocab_size",
            "weights_mapper",
            "skip_prefixes",
        ),
        "read",
        "adapters from tensors in memory: a LoRARequest can only name a path",
        "LoRARequest carries tensors",
    ),
    Seam(
        MOE + "experts/mxfp8_emulation_moe.py",
        "Mxfp8TritonExpertsBase",
        None,
        "subclass",
        "experts of MXFP8 weights: dequantised by it where fused_moe does not serve a call",
        "as for Mxfp8OnlineMoEMethod.__init__",
    ),
    Seam(
        "lora/lora_model.py",
        "_is_remote_expert_key",
        ("raw_name", "spec"),
        "read",
        "leaves out other ranks' experts of an adapter from memory, as vLLM does of a folder's",
        "LoRARequest carries tensors",
    ),
    Seam(
        "v1/worker/worker_base.py",
        "WorkerWrapperBase.init_worker",
        ("self", "all_kwargs"),
        "registry",
        "worker_extension_cls adds the weight-sync methods that collective_rpc calls",
        "never",
    ),
    Seam(
        "model_executor/warmup/jit_warmup.py",
        "VllmJitKernel.register_warmup",
        ("self", "args", "kwargs"),
        "subclass",
        "compiles every tile configuration that a prefill or a graph can reach before the engine is ready",
        "never",
    ),
    Seam(
        "model_executor/warmup/jit_warmup.py",
        "JitWarmupRegistry.warmup",
        ("self",),
        "read",
        "hands its vllm_config to a kernel that asks for it, and keeps one of those that are equal: for other models",
        "never",
    ),
    Seam(
        MOE + "runner/moe_runner.py",
        "register_layer_for_moe_forward_op",
        ("vllm_config", "layer"),
        "read",
        "keeps every MoE layer by name in vllm_config, where the warm-up of other models finds them",
        "never",
    ),
    Seam(
        MOE + "prepare_finalize/no_dp_ep.py",
        "make_moe_prepare_and_finalize_no_dp_ep",
        ("use_monolithic",),
        "attribute",
        "stands for a data-parallel dispatch while the warm-up runs a layer on as many rows as replicas can gather",
        "never",
    ),
    Seam(
        "config/vllm.py",
        "VllmConfig._verify_aux_output_compatibility",
        ("self",),
        "wrap",
        "routed experts are refused under pipeline parallelism; for Beam with our model the refusal is lifted",
        "vLLM relays routed experts between stages",
    ),
    Seam(
        "distributed/aux_output_connector/worker.py",
        "AuxOutputWorkerConnector.begin_step",
        ("self", "metadata"),
        "wrap",
        "earlier stages keep no request state: only the last one returns outputs that would clear it",
        "as above",
    ),
    Seam(
        MOE + "routed_experts_capturer.py",
        "RoutedExpertsCapturer.capture",
        ("self", "layer_id", "topk_ids"),
        "read",
        "a stage's captured ids travel to the next stage on IntermediateTensors",
        "as above",
    ),
    Seam(
        "v1/core/kv_cache_utils.py",
        "_gen_lora_extra_hash_keys",
        ("request",),
        "wrap",
        "block hashes know an adapter's name and path only: a load in place adds its generation",
        "hashes know an adapter's generation",
    ),
    Seam(
        "v1/engine/core.py",
        "EngineCore.add_lora",
        ("self", "lora_request"),
        "wrap",
        "counts loads in place for the block hashes; reads an adapter on every rank before any replaces one, and takes"
        " it back where a rank fails",
        "hashes know an adapter's generation, and a rank that refuses leaves the others as they are",
    ),
    Seam(
        "v1/executor/abstract.py",
        "Executor.collective_rpc",
        ("self", "method", "timeout", "args", "kwargs", "non_block"),
        "read",
        "runs a function of ours on each worker, for the above",
        "as above",
    ),
    Seam(
        "v1/worker/lora_model_runner_mixin.py",
        "LoRAModelRunnerMixin._ensure_lora_enabled",
        ("self",),
        "read",
        "vLLM's error for an engine without LoRA, for the above",
        "as above",
    ),
    Seam(
        "v1/engine/core.py",
        "EngineCore.remove_lora",
        ("self", "lora_id"),
        "wrap",
        "what is loaded under this number and path next may be other weights: counted too",
        "hashes know an adapter's generation",
    ),
    Seam(
        "v1/engine/core.py",
        "EngineCore.collective_rpc",
        ("self", "method", "timeout", "args", "kwargs"),
        "wrap",
        "counts adapters that WeightSync replaces: a request that still names the version before reads none of its KV",
        "as above",
    ),
    Seam(
        "v1/engine/core.py",
        "EngineCore.add_request",
        ("self", "request", "request_wave"),
        "wrap",
        "hashes a request again whose adapter was replaced between its arrival and here",
        "as above",
    ),
    Seam(
        "v1/request.py",
        "Request.update_block_hashes",
        ("self",),
        "read",
        "the same for requests that wait",
        "as above",
    ),
    Seam(
        "lora/model_manager.py",
        "LoRAModelManager._create_merged_loras_inplace",
        ("self", "lora_model"),
        "attribute",
        "fails on an adapter without modules, which is what a pipeline stage may have of one: passed over",
        "vLLM takes an adapter of which a rank has nothing",
    ),
    Seam(
        "v1/worker/gpu_worker.py",
        "Worker.reload_weights",
        ("self", "args", "kwargs"),
        "read",
        "full-weight sync; its warnings about weights that did not arrive become errors",
        "never",
    ),
    Seam(
        "v1/worker/gpu/model_runner.py",
        "GPUModelRunner.execute_model",
        None,
        "attribute",
        "a worker whose full-weight sync failed halfway runs nothing until one has gone through",
        "vLLM keeps the old weights until a reload is whole",
    ),
    Seam(
        "model_executor/model_loader/reload/layerwise.py",
        "_place_kernel_tensors",
        ("layer", "info"),
        "read",
        "gives layers that a failed reload left without memory their tensors back, so that the next one starts afresh",
        "vLLM ends a reload that fails",
    ),
    Seam(
        "v1/engine/core.py",
        "EngineCore.preprocess_add_request",
        ("self", "request"),
        "wrap",
        "requests are refused one by one while a failed full-weight sync left weights of two versions",
        "as for GPUModelRunner.execute_model",
    ),
    Seam(
        "v1/engine/core.py",
        "EngineCore.reset_prefix_cache",
        ("self", "reset_running_requests", "reset_connector"),
        "read",
        "no KV of the old base weights after a full-weight sync, running requests and KV connectors included",
        "never",
    ),
)


def installed_version() -> str | None:
    """vLLM's version, None when it is not installed."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def in_window(version: str) -> bool:
    """Whether ``version`` lies in `WINDOW`."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and WINDOW[0] <= (int(found[1]), int(found[2])) < WINDOW[1]


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    a = node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    if a.vararg:
        names.append(a.vararg.arg)
    names += [p.arg for p in a.kwonlyargs]
    if a.kwarg:
        names.append(a.kwarg.arg)
    return tuple(names)


def _find(tree: ast.Module, symbol: str) -> ast.AST | None:
    body: list[ast.stmt] = tree.body
    node: ast.AST | None = None
    for part in symbol.split("."):
        # the last definition wins, as at run time; overloads come before the implementation
        found = [
            n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and n.name == part
        ]
        if not found:
            return None
        node = found[-1]
        body = node.body
    return node


def problem(seam: Seam, root: Path, trees: dict[str, ast.Module] | None = None) -> str | None:
    """Why ``seam`` does not fit the vLLM under ``root`` (the package's folder), None when it does.

    Files that were parsed are kept in ``trees``.
    """
    path, trees = root / seam.file, {} if trees is None else trees
    if not path.exists():
        return f"{seam.file} does not exist"
    if seam.file not in trees:
        trees[seam.file] = ast.parse(path.read_text(encoding="utf-8"))
    node = _find(trees[seam.file], seam.symbol)
    if node is None:
        return f"{seam.file} has no {seam.symbol}"
    if seam.parameters is not None:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        got = _parameters(node)
        if got != seam.parameters:
            return f"{seam.symbol} takes ({', '.join(got)}), expected ({', '.join(seam.parameters)})"
    return None


def imports(folder: Path) -> set[tuple[str, str]]:
    """Modules of vLLM, and the names in them, that the sources in ``folder`` import."""
    nodes = (n for f in sorted(folder.glob("*.py")) for n in ast.walk(ast.parse(f.read_text(encoding="utf-8"))))
    froms = (n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "vllm")
    return {(n.module or "", alias.name) for n in froms for alias in n.names}


def lost(module: str, name: str, root: Path) -> str | None:
    """Why ``from module import name`` would fail with the vLLM under ``root``, None when it should not."""
    path = root.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return f"{module} does not exist"
    text = file.read_text(encoding="utf-8")
    if (path / f"{name}.py").exists() or "import *" in text or re.search(rf"\b{name}\b", text):
        return None
    return f"{module} has no {name}"


def check(root: Path | None = None) -> list[str]:
    """What keeps the plugin from serving the installed vLLM; empty when everything fits."""
    version = installed_version()
    if version is None:
        return ["vLLM is not installed"]
    if not in_window(version):
        low, high = (".".join(map(str, v)) for v in WINDOW)
        return [f"vLLM {version} is outside {low} <= version < {high}"]
    if root is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            return ["vLLM is installed but has no source tree"]
        root = Path(spec.origin).parent
    trees: dict[str, ast.Module] = {}
    found = [problem(seam, root, trees) for seam in SEAMS]
    found += [lost(module, name, root) for module, name in sorted(imports(Path(__file__).parent))]
    return [p for p in found if p is not None]
