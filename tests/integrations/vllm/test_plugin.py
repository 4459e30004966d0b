"""Registration by the real entry point, vLLM's own choice of backends, the traps that the plugin mends or refuses."""

import importlib.metadata
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from beam_moe.integrations import vllm as plugin
from beam_moe.integrations.vllm import seams


def experts_of(runner):
    return runner.routed_experts.quant_method.moe_kernel.impl.fused_experts


# --- registration


def test_entry_point_registers_beam_over_vllms_own(harness, tmp_path):
    """vLLM finds `register` by itself, keeps the class lazy, and learns in its own subprocess that it takes LoRA."""
    found = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "beam_moe"]
    assert [e.value for e in found] == ["beam_moe.integrations.vllm:register"]
    harness.engine_config(harness.write_config(tmp_path / "m"))
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora
    from vllm.models.beam.nvidia.model import BeamForCausalLM as Stock

    entry = ModelRegistry.models["BeamForCausalLM"]
    assert entry.module_name == "beam_moe.integrations.vllm.model"
    assert entry.inspect_model_cls().supports_lora and entry.inspect_model_cls().supports_pp
    assert supports_lora(entry.load_model_cls()) and not supports_lora(Stock), "vLLM's own takes LoRA: retire this seam"


def test_register_is_reentrant_and_filtered(harness, monkeypatch):
    from vllm.model_executor.models import ModelRegistry
    from vllm.plugins import load_plugins_by_group

    monkeypatch.setattr(plugin, "_done", False)
    plugin.register()
    plugin.register()
    assert ModelRegistry.models["BeamForCausalLM"].module_name == "beam_moe.integrations.vllm.model"
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert "beam_moe" not in load_plugins_by_group("vllm.general_plugins")


def test_import_is_light():
    code = "import sys; from beam_moe.integrations.vllm import seams; seams.check()\n"
    code += "print(*(m in sys.modules for m in ('torch', 'vllm')))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    "version, served", [("0.32.9", False), ("0.33.0", True), ("0.34.2.dev1", True), ("0.35.0", False)]
)
def test_version_window(version, served):
    assert seams.in_window(version) is served


def test_unknown_vllm_keeps_its_own_behaviour(harness, monkeypatch):
    """One line, no registration, no exception."""
    from vllm.model_executor.models import ModelRegistry

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.beam_moe")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(plugin, "_done", False)
    monkeypatch.setattr(seams, "installed_version", lambda: "0.36.1")
    monkeypatch.setattr(ModelRegistry, "models", {})
    plugin.register()
    plugin.register()
    assert ModelRegistry.models == {}
    assert len(lines) == 1 and "0.36.1 is outside 0.33 <= version < 0.35" in lines[0]


@pytest.mark.parametrize(
    "value, unknown, others",
    [
        ("beam", None, False),
        ("Beam,BeamForCausalLM", None, False),
        ("beam,all", None, True),
        ("beam, qwen3moeforcausallm", None, True),
        ("beam,Qwen3Moe", "qwen3moe", False),
        ("1", "1", False),
        ("none", None, False),
    ],
)
def test_names_that_vllm_does_not_know_are_said(harness, monkeypatch, value, unknown, others):
    """A mistyped architecture would leave its experts to vLLM without a word."""
    from beam_moe.integrations.vllm import other_models

    lines, registered = [], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(logging.getLogger("vllm.beam_moe"), "handlers", [handler])
    monkeypatch.setattr(other_models, "register", lambda: registered.append(True))
    monkeypatch.setattr(plugin, "_done", False)
    monkeypatch.setenv("BEAM_MOE_VLLM", value)
    plugin.register()
    assert bool(registered) is others
    said = [line for line in lines if "knows no architecture" in line]
    assert [line.rsplit(" ", 1)[1] for line in said] == ([] if unknown is None else [unknown])


def test_changed_signatures_are_noticed(tmp_path):
    """Every seam fits the installed vLLM; a renamed parameter, a lost method and a lost file do not."""
    assert seams.check() == []
    seam = next(s for s in seams.SEAMS if s.symbol == "TritonExperts.apply")
    file = tmp_path / seam.file
    assert "does not exist" in seams.problem(seam, tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text("class TritonExperts:\n    def forward(self): ...\n")
    assert "has no TritonExperts.apply" in seams.problem(seam, tmp_path)
    file.write_text(f"class TritonExperts:\n    def apply({', '.join(seam.parameters)}, more): ...\n")
    assert "expected" in seams.problem(seam, tmp_path)
    file.write_text(f"class TritonExperts:\n    def apply({', '.join(seam.parameters)}): ...\n")
    assert seams.problem(seam, tmp_path) is None


def test_a_name_that_vllm_has_no_longer_is_noticed(tmp_path):
    """Whatever our sources import, at whatever depth: it would fail when the model is loaded, past vLLM's own."""
    here = Path(seams.__file__).parent
    assert {
        ("vllm.lora.layers.fused_moe", "FusedMoE3DWithLoRA"), ("vllm.model_executor.models.utils", "PPMissingLayer"),
    } <= seams.imports(here)  # fmt: skip
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "utils.py").write_text("def new_name(): ...\n")
    (tmp_path / "lora" / "__init__.py").write_text("from .utils import new_name\n")
    assert seams.lost("vllm.lora.layers", "X", tmp_path) == "vllm.lora.layers does not exist"
    assert seams.lost("vllm.lora.utils", "name", tmp_path) == "vllm.lora.utils has no name"
    assert seams.lost("vllm.lora", "other", tmp_path) == "vllm.lora has no other"
    for module, name in (("vllm.lora.utils", "new_name"), ("vllm.lora", "new_name"), ("vllm.lora", "utils")):
        assert seams.lost(module, name, tmp_path) is None
    problems = seams.check(tmp_path)
    assert "vllm.lora.layers.fused_moe does not exist" in problems and len(problems) > len(seams.SEAMS)


def test_every_seam_says_why_and_until_when():
    assert all(
        s.why and s.until and s.kind in {"registry", "subclass", "attribute", "wrap", "read"} for s in seams.SEAMS
    )


def test_the_serving_example_is_what_vllm_accepts(harness):
    """Everything that the README has a reader paste, by vLLM's own parsers."""
    import ast
    import re
    import shlex
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.import_utils import resolve_obj_by_qualname

    text = (Path(seams.__file__).parent / "README.md").read_text()
    command = re.search(r"vllm serve (.*?)\n```", text, re.S)[1].replace("\\\n", "")
    parser = make_arg_parser(FlexibleArgumentParser())
    flags = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--model", "--url"}  # of `beam-moe doctor`
    assert len(flags) > 12 and not flags - set(parser._option_string_actions)
    for more in ("", " --nnodes 2 --master-addr first --node-rank 1 --headless", " --quantization mxfp8"):
        args = parser.parse_args(shlex.split(command + more))
        validate_parsed_serve_args(args)
    assert [(m.name, m.path) for m in args.lora_modules] == [("policy", "/adapters/step-100")]
    assert hasattr(resolve_obj_by_qualname(args.worker_extension_cls), "beam_moe_report")
    bodies = [ast.literal_eval(b.replace("true", "True")) for b in re.findall(r"-d '(.*?)'", text)]
    update = bodies.pop()
    assert LoadLoRAAdapterRequest(**update).load_inplace and set(update) <= set(LoadLoRAAdapterRequest.model_fields)
    assert [b["model"] for b in bodies] == ["policy", args.model_tag]
    snippet = ast.parse(re.search(r"```python\n(.*?)```", text, re.S)[1])
    calls = [n for n in ast.walk(snippet) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "LLM"]
    assert {k.arg for k in calls[0].keywords} <= {f.name for f in fields(EngineArgs)}


# --- backends


@pytest.mark.parametrize("lora", [False, True])
def test_hopper_selection_gets_our_experts(harness, tmp_path, lora):
    """With and without LoRA, on vLLM's real selection; the routed scaling moves from the runner into the experts."""
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"), lora=lora)) as (model, _):
        assert len(model.moe_layers) == 2
        for runner in model.moe_layers:
            assert type(experts_of(runner)).__name__ == "BeamTritonExperts" and experts_of(runner).reason is None
            assert (runner.routed_scaling_factor, experts_of(runner).routed_scaling) == (1.0, 2.5)
            assert (experts_of(runner).bank is not None) == lora


def test_mxfp8_selection(harness, tmp_path, monkeypatch):
    """Online MXFP8: our experts on the plain layout, which vLLM would repack for its own kernel."""
    # the linear layers' repacking is compiled code that is not here
    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS", "HummingMxfp8LinearKernel,MarlinMxfp8LinearKernel,TorchMxFp8LinearKernel"
    )
    path = harness.write_config(tmp_path / "m")
    config = harness.engine_config(path, quantization="mxfp8", dtype="bfloat16")
    with harness.built(config) as (model, _):
        layer, experts = model.moe_layers[0].routed_experts, experts_of(model.moe_layers[0])
        assert type(experts).__name__ == "BeamMxfp8Experts" and experts.reason is None and experts.bank is not None
        assert layer.w13_weight.shape == (harness.E, 2 * harness.I, harness.H)
        assert layer.w13_weight.dtype == torch.float8_e4m3fn
        w13, w2 = experts._weights(layer.w13_weight, layer.w2_weight)
        assert w13.scale.shape == (harness.E, 2 * harness.I, harness.H // 32) and w13.scale.dtype == torch.uint8
        assert w2.scale.shape == (harness.E, harness.H, harness.I // 32)
        assert w13.rows.shape == (harness.E, 2 * harness.I) and w2.rows.shape == (harness.E, harness.H)

        # a reload quantises anew: a graph holds the words by address
        method, address = layer.quant_method.old_quant_method, w13.rows.data_ptr()
        before = w13.rows.clone()
        scale = layer.w13_weight_scale.data + 3
        method._setup_kernel(layer, layer.w13_weight, layer.w2_weight, scale, layer.w2_weight_scale.data, None, None)
        words = method.moe_kernel.impl.fused_experts.words
        assert words[0].data_ptr() == address and torch.equal(words[0], before + 3)


def test_other_quantised_experts_keep_vllms_class(experts_module):
    """An fp8 method that also builds on TritonExperts is not taken for an unquantised one."""
    method = SimpleNamespace(experts_cls=experts_module.TritonExperts)
    runner = SimpleNamespace(routed_experts=SimpleNamespace(quant_method=method), routed_scaling_factor=2.5)
    assert "TritonExperts (SimpleNamespace)" in experts_module.give_experts(runner)
    assert method.experts_cls is experts_module.TritonExperts and runner.routed_scaling_factor == 2.5


@pytest.fixture(scope="module")
def experts_module(fake_hopper):
    from beam_moe.integrations.vllm import experts

    return experts


def test_plugin_can_be_told_to_leave_the_experts(harness, tmp_path, monkeypatch):
    monkeypatch.setenv("BEAM_MOE_VLLM", "0")
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"))) as (model, _):
        assert type(experts_of(model.moe_layers[0])).__name__ == "TritonExperts"
        assert model.moe_layers[0].routed_scaling_factor == 2.5


def test_a_backend_that_is_not_ours_is_named(harness, tmp_path, monkeypatch):
    """vLLM's choice of another experts class is kept and reported; BEAM_MOE_STRICT makes it an error."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    from beam_moe.integrations.vllm import experts, metrics

    class Another(TritonExperts):
        pass

    monkeypatch.setattr(experts, "TritonExperts", Another)
    config = harness.engine_config(harness.write_config(tmp_path / "m"), lora=False)
    with harness.built(config) as (model, _):
        assert type(experts_of(model.moe_layers[0])).__name__ == "TritonExperts"
        assert model.moe_layers[0].routed_scaling_factor == 2.5
    assert metrics.calls[metrics.FALLBACK, "vLLM chose TritonExperts (UnquantizedFusedMoEMethod)"] >= 2
    monkeypatch.setenv("BEAM_MOE_STRICT", "1")
    config = harness.engine_config(harness.write_config(tmp_path / "m"), lora=False)
    with pytest.raises(RuntimeError, match="BEAM_MOE_STRICT"), harness.built(config):
        pass


# --- traps


def test_fully_sharded_loras_is_refused(harness, tmp_path, monkeypatch):
    """vLLM would leave the merged attention projection unwrapped, with a warning."""
    from beam_moe.integrations.vllm import model as ours

    config = harness.engine_config(harness.write_config(tmp_path / "m"), fully_sharded_loras=True)
    with pytest.raises(ValueError, match="fully_sharded_loras"), harness.built(config):
        pass
    monkeypatch.setattr(ours, "refuse", lambda lora_config: None)
    with harness.built(config) as (model, _):
        assert not hasattr(model.model.layers[0].self_attn.qkv_gate_proj, "lora_b_stacked"), "vLLM wraps it: allow it"


def test_specialize_active_lora_is_refused(harness, tmp_path):
    """A batch of adapter and bare rows is dispatched by its adapters alone, but -1 counts in the kernels' grids."""
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    config = harness.engine_config(harness.write_config(tmp_path / "m"), specialize_active_lora=True)
    with pytest.raises(ValueError, match="specialize_active_lora"), harness.built(config):
        pass
    meta = LoRAKernelMeta.make(2, 8, "cpu", [1, 2, 3])
    meta.prepare_tensors(torch.tensor([-1, 0]))
    # the graph of one adapter launches a grid of 1: it visits -1 and never adapter 0
    assert meta.active_lora_ids[0] == -1 and int(meta.num_active_loras_cpu) == 2


def test_router_adapter_is_refused_by_name(harness, tmp_path, monkeypatch):
    from beam_moe.integrations.vllm import adapters

    path = harness.write_adapter(tmp_path / "a", "per_expert", router=True)
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"))) as (model, manager):
        with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.gate is a router"):
            manager.add_adapter(harness.request(path))
        assert not manager.list_adapters()
    monkeypatch.setattr(adapters, "refuse_router", lambda lora_model: None)
    monkeypatch.setenv("BEAM_MOE_VLLM_ROUTER", "0")  # the runner then holds its gate, as vLLM wires it
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"))) as (model, manager):
        manager.add_adapter(harness.request(path))
        block = model.model.layers[2].mlp
        assert block.experts.base_layer.gate is not block.gate, "vLLM applies it: accept router adapters"


def test_low_latency_projection_stays_off_under_lora(harness, tmp_path, monkeypatch):
    """On a GPU where vLLM would read the raw attention weight past its LoRA wrapper."""
    from vllm.models.beam.nvidia.attention import BeamAttention

    def warm(self):
        self.low_latency_projection = True

    monkeypatch.setattr(BeamAttention, "warmup_projection", warm)
    path = harness.write_config(tmp_path / "m")
    for lora in (True, False):
        with harness.built(harness.engine_config(path, lora=lora)) as (model, _):
            model.process_weights_after_loading()
            assert model.model.layers[0].self_attn.low_latency_projection is not lora


def test_unused_tensors_are_named(harness, tmp_path):
    """An adapter for layers the model does not have would serve the base model in silence."""
    from safetensors.torch import load_file, save_file

    path = harness.write_adapter(tmp_path / "a", "none")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    extra = {
        k.replace("layers.0.", "layers.44."): v.clone() for k, v in tensors.items() if "layers.0.self_attn.o_proj" in k
    }
    save_file({**tensors, **extra}, file)
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"))) as (_, manager):
        with pytest.raises(ValueError, match=r"no layer takes its model\.layers\.44\.self_attn\.o_proj"):
            manager.add_adapter(harness.request(path))


@pytest.mark.parametrize("only", [("down",), ("gate", "up"), ("up",)])
def test_projections_an_adapter_leaves_out_are_zero(harness, tmp_path, only):
    """vLLM asserts on the missing ones."""
    path = harness.write_adapter(tmp_path / "a", "per_expert", only=only)
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"))) as (model, manager):
        manager.add_adapter(harness.request(path))
        stacks, want = harness.experts_stacks(model, 2, 0), harness.expected_stacks(2, 1, 0, False)
        for name, w in {"gate": "w1", "down": "w2", "up": "w3"}.items():
            b = stacks[f"{w}.b"]
            if name in only:
                assert harness.largest_difference({f"{w}.b": b}, {f"{w}.b": want[f"{w}.b"]}) < 2e-3
            else:
                assert not bool(b.any())


def test_per_expert_outer_factors_in_a_shared_engine(harness, tmp_path):
    """Refused where they differ; taken where every expert has the same, as some exporters repeat them."""
    from safetensors.torch import load_file, save_file

    path = harness.write_adapter(tmp_path / "a", "per_expert")
    config = harness.engine_config(harness.write_config(tmp_path / "m"), enable_moe_shared_loras=True)
    with harness.built(config) as (model, manager):
        with pytest.raises(ValueError, match="enable_moe_shared_loras"):
            manager.add_adapter(harness.request(path))
        file = tmp_path / "a" / "adapter_model.safetensors"
        tensors = load_file(file)
        for key in list(tensors):
            outer = "gate_proj.lora_A" in key or "up_proj.lora_A" in key or "down_proj.lora_B" in key
            if ".experts." in key and outer:
                head, tail = key.split(".experts.")
                tensors[key] = tensors[f"{head}.experts.0.{tail.split('.', 1)[1]}"].clone()
        save_file(tensors, file)
        manager.add_adapter(harness.request(path))
        assert (
            harness.largest_difference(harness.experts_stacks(model, 2, 0), harness.expected_stacks(2, 1, 0, True))
            < 2e-3
        )


def test_sizes_that_warm_up_compiles(harness, tmp_path, monkeypatch):
    """Every configuration of ours and of vLLM's, the latter by divisibility, with adapters and without."""
    from beam_moe.integrations.vllm import experts
    from beam_moe.kernels.moe_lora import MoEConfig

    config = harness.engine_config(harness.write_config(tmp_path / "m"), max_num_batched_tokens=256)
    with harness.built(config) as (model, manager):
        runner = model.moe_layers[0]
        for name in ("max_tokens", "max_lora_tokens"):
            monkeypatch.setattr(experts_of(runner), name, 64)
        warmup = experts.ExpertsWarmup([runner], 256)
        keys = warmup.get_warmup_keys()
        sizes = {n for n, _ in keys}
        assert len(keys) == 2 * len(sizes) and max(sizes) == 256

        def of(n):  # the plan and the search specialise on the power of two above the number of pairs
            config = MoEConfig.pick(torch.device("cpu"), n, harness.TOP_K, harness.E, harness.H, harness.I)
            return config, (n * harness.TOP_K - 1).bit_length()

        assert {of(n) for n in sizes if n <= 64} == {of(n) for n in range(1, 65)}
        assert {(n % 16 == 0, n % 2) for n in sizes if n > 64} == {(True, 0), (False, 0), (False, 1)}
        seen = []
        monkeypatch.setattr(experts, "fused_moe", lambda x, *a, lora, **k: seen.append((len(x), lora is not None)))
        ours = [key for key in keys if key[0] <= 64]
        harness.set_slots(manager, [1, -1, 0])
        meta = manager._adapter_manager.punica_wrapper_mapping["language_model"].token_mapping_meta
        tensors = {n: t for n, t in vars(meta).items() if isinstance(t, torch.Tensor)}
        before = {n: t.clone() for n, t in tensors.items()}
        for key in ours:
            warmup.compile(key)
        assert seen == ours
        assert all(torch.equal(before[n], t) for n, t in tensors.items()), "the next batch may take it for its own"


SIZES = [
    pytest.param(256, 8, 320, "dense", 512, id="Beam at TP 8"),
    pytest.param(256, 8, 640, "dense", 512, id="Beam at TP 4"),
    pytest.param(256, 8, 1280, "mxfp8", 2048, id="Beam at TP 2, MXFP8: by rule"),
    pytest.param(256, 8, 640, "mxfp8", 2048, id="Beam at TP 4, MXFP8"),
    pytest.param(128, 8, 768, "dense", 2048, id="Qwen3, every size ours"),
    pytest.param(32, 8, 2560, "dense", 4096, id="Beam at EP 8, more tokens than by default"),
]


@pytest.mark.parametrize("experts, top_k, inter, base, limit", SIZES)
def test_every_launch_of_a_gpus_table_is_warmed_up(fake_hopper, monkeypatch, experts, top_k, inter, base, limit):
    """Also one that serves few sizes only, as between two steps of the rule, and where the table widens blocks."""
    from beam_moe.integrations.vllm import experts as ours
    from beam_moe.kernels.moe_lora import MoEConfig, plan
    from beam_moe.kernels.moe_lora import config as configs

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H200")
    configs._pick.cache_clear()

    def launch(n):
        config = MoEConfig.pick(torch.device("cuda", 0), n, top_k, experts, 5120, inter, base=base)
        counted = config.rows == "plan" and n * top_k > plan.COUNT_FIRST  # by a launch of its own
        return config, min(4096, 1 << (n * top_k - 1).bit_length()) if config.rows != "direct" else 1, counted

    served = SimpleNamespace(reason=None, limit=lambda lora: limit, config=lambda n, *_: launch(n)[0])
    served.quant_config = SimpleNamespace(config_name=lambda dtype: None)
    w1, w2 = torch.empty(experts, 2 * inter, 5120, device="meta"), torch.empty(experts, 5120, inter, device="meta")
    runner = SimpleNamespace(
        routed_experts=SimpleNamespace(w13_weight=w1, w2_weight=w2),
        moe_config=moe_config(top_k),
    )
    monkeypatch.setattr(ours, "experts_of", lambda runner: served)
    monkeypatch.setattr(ours, "try_get_optimal_moe_config", lambda *a: {})
    sizes = ours.ExpertsWarmup([runner], limit)._sizes(runner, True)
    assert {launch(n) for n in sizes} == {launch(n) for n in range(1, limit + 1)}
    if base == "dense" and experts == 256:
        assert {launch(n)[0].wide for n in sizes} == {1, 2, 4}
    assert {launch(n)[2] for n in sizes} == {False, limit * top_k > plan.COUNT_FIRST}
    configs._pick.cache_clear()


def moe_config(top_k, replicas=1):
    parallel = SimpleNamespace(dp_size=replicas)
    return SimpleNamespace(experts_per_token=top_k, in_dtype=torch.bfloat16, moe_parallel_config=parallel)


@pytest.mark.parametrize("invariant", [False, True])
def test_sizes_beyond_one_pass_of_the_layer(fake_hopper, monkeypatch, invariant):
    """`fused_moe` cuts them: each pass has its own size's configuration, under batch invariance that of the whole."""
    from beam_moe.integrations.vllm import experts as ours
    from beam_moe.kernels.moe_lora.workspace import CHUNK

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    served = SimpleNamespace(reason=None, limit=lambda lora: ours.LARGEST_CALL)
    served.config = lambda n, *_: min(n, CHUNK + 1) // 64
    served.quant_config = SimpleNamespace(config_name=lambda dtype: None)
    weights = SimpleNamespace(w13_weight=torch.empty(0), w2_weight=torch.empty(0))
    runner = SimpleNamespace(routed_experts=weights, moe_config=moe_config(8))
    monkeypatch.setattr(ours, "experts_of", lambda runner: served)

    def launches(n):
        passes = [min(CHUNK, n - first) for first in range(0, n, CHUNK)]
        return {(served.config(n if invariant else rows), (rows * 8 - 1).bit_length()) for rows in passes}

    most = 3 * CHUNK
    sizes = ours.ExpertsWarmup([runner], most)._sizes(runner, True)
    assert set().union(*map(launches, sizes)) == set().union(*map(launches, range(1, most + 1)))
    assert len(sizes) < 200


@pytest.fixture
def replicas(harness, tmp_path, monkeypatch):
    """A Beam of two data-parallel replicas as one of them sees it: model, manager, and ``other``, whose rows the
    dispatch gathers before its own; without it a dispatch is an error."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize import (
        make_moe_prepare_and_finalize_naive_dp_ep,
        naive_dp_ep,
    )

    config = harness.engine_config(harness.write_config(tmp_path / "m"), max_num_batched_tokens=32)
    with harness.built(config) as (model, manager):
        for runner in model.moe_layers:
            parallel = replace(runner.moe_config.moe_parallel_config, dp_size=2)
            monkeypatch.setattr(runner.moe_config, "moe_parallel_config", parallel)
            impl = runner.routed_experts.quant_method.moe_kernel.impl
            dispatch = make_moe_prepare_and_finalize_naive_dp_ep(use_monolithic=False, num_dispatchers=2)
            dispatch.set_lora_context(impl.fused_experts._lora_context)
            monkeypatch.setattr(impl, "prepare_finalize", dispatch)
        seen = SimpleNamespace(model=model, manager=manager, other=None, dispatched=0)

        class Group:
            def dispatch(self, *tensors, is_sequence_parallel, extra_tensors):
                seen.dispatched += 1
                *gathered, slots = (torch.cat(both) for both in zip(seen.other, (*tensors, *extra_tensors)))
                return *gathered, [slots]

            def allocate_combine_input(self, *args, **kwargs):
                return None

            def combine_into_output(self, gathered, output, is_sequence_parallel):
                seen.gathered = gathered
                output.copy_(gathered[-len(output) :])

        monkeypatch.setattr(naive_dp_ep, "get_ep_group", Group)
        yield seen


def test_warm_up_of_a_replica_covers_what_it_gathers(harness, replicas, monkeypatch):
    """Up to the tokens of both, by itself, with adapters in the form that a dispatch leaves them in."""
    from beam_moe.integrations.vllm import experts
    from beam_moe.kernels.moe_lora import MoEConfig

    runner = replicas.model.moe_layers[0]
    impl = runner.routed_experts.quant_method.moe_kernel.impl
    dispatch, context = impl.prepare_finalize, impl.fused_experts._lora_context
    for name in ("max_tokens", "max_lora_tokens"):
        monkeypatch.setattr(experts_of(runner), name, 48)
    warmup = experts.ExpertsWarmup([runner], 32)
    sizes = {n for n, _ in warmup.get_warmup_keys()}
    assert max(sizes) == 64

    def of(n):
        config = MoEConfig.pick(torch.device("cpu"), n, harness.TOP_K, harness.E, harness.H, harness.I)
        return config, (n * harness.TOP_K - 1).bit_length()

    assert {of(n) for n in sizes if n <= 48} == {of(n) for n in range(1, 49)}
    seen, large = [], []
    monkeypatch.setattr(
        experts, "fused_moe", lambda x, *a, lora, lora_ids, **k: seen.append((len(x), lora is not None, lora_ids))
    )
    monkeypatch.setattr(experts.TritonExperts, "apply", lambda self, **k: large.append(len(k["hidden_states"])))
    for key in warmup.get_warmup_keys():
        warmup.compile(key)
    assert {n for n, _, _ in seen} == {n for n in sizes if n <= 48} and set(large) == {n for n in sizes if n > 48}
    assert all(with_lora and len(ids) == n and ids.dtype == torch.int32 for n, with_lora, ids in seen)
    assert {int(ids.max()) for n, _, ids in seen if n > 1} == {-1, 1}
    assert replicas.dispatched == 0, "the other replica need not take part"
    assert impl.prepare_finalize is dispatch and context.local_token_lora_mapping is None


def test_rows_of_another_replica_keep_their_adapter(harness, replicas, tmp_path):
    """This one's batch is bare, or none at all: its experts still owe the other's rows their adapter."""
    manager, runner = replicas.manager, replicas.model.moe_layers[0]
    manager.add_adapter(harness.request(harness.write_adapter(tmp_path / "a", "per_expert")))
    x, (weights, ids) = (torch.randn(6, harness.H) * 0.5).half(), harness.routing(6)
    impl = runner.routed_experts.quant_method.moe_kernel.impl
    slots = torch.tensor([0, -1, 0, 0], dtype=torch.int32)
    replicas.other = (x[:4], weights[:4], ids[:4], slots)
    harness.set_slots(manager, [-1, -1])
    own = harness.run_experts(runner, x[4:], weights[4:], ids[4:])
    got = replicas.gathered
    impl.prepare_finalize = no_dispatch()
    impl.fused_experts._lora_context.local_token_lora_mapping = None
    harness.set_slots(manager, [*slots.tolist(), -1, -1])
    assert torch.equal(got, harness.run_experts(runner, x, weights, ids)) and torch.equal(own, got[4:])
    harness.set_slots(manager, [-1] * 6)
    assert not torch.equal(got, harness.run_experts(runner, x, weights, ids)), "the adapter must matter to this test"


def no_dispatch():
    from vllm.model_executor.layers.fused_moe.prepare_finalize import make_moe_prepare_and_finalize_no_dp_ep

    return make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False)
