"""``--quantization beam_mxfp8``: vLLM's online MXFP8, every expert on our kernel, or an error that names the layer."""

import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from beam_moe.testing import assert_close, load_script

LIMIT = 4e-3
NAME = "beam_mxfp8"


@pytest.fixture(autouse=True)
def portable_linears(monkeypatch):
    """Linear kernels that a machine without a GPU has: the others' repacking is compiled code."""
    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS", "HummingMxfp8LinearKernel,MarlinMxfp8LinearKernel,TorchMxFp8LinearKernel"
    )


@pytest.fixture(scope="module")
def reference():
    return load_script(Path(__file__).parent / "test_experts.py").reference


def runners(model):
    from vllm.model_executor.layers.fused_moe import MoERunner

    return [m for m in model.modules() if isinstance(m, MoERunner)]


def experts_of(runner):
    return runner.routed_experts.quant_method.moe_kernel.impl.fused_experts


def methods(model) -> dict[str, str]:
    """Class of the quantisation method of every module that has one."""
    found = {n: getattr(m, "quant_method", None) for n, m in model.named_modules()}
    return {n: type(m).__name__ for n, m in found.items() if m is not None}


def dequantised(layer) -> SimpleNamespace:
    from beam_moe.kernels.mxfp8 import MXFP8Tensor, dequantize_reference

    names = ("w13_weight", "w2_weight")
    parts = {n: MXFP8Tensor(getattr(layer, n).data, getattr(layer, f"{n}_scale").data) for n in names}
    return SimpleNamespace(**{n: dequantize_reference(part, torch.float32) for n, part in parts.items()})


def refused(harness, config, *words: str) -> None:
    """Building the model fails with the name of the method and these words."""
    with pytest.raises(ValueError, match=f"--quantization {NAME}: ") as error, harness.built(config):
        pass
    assert all(word in str(error.value) for word in words), str(error.value)


# --- registration


def test_vllm_knows_the_name(harness, tmp_path):
    """By the plugin's entry point, from the engine's arguments to a configuration that reaches other processes."""
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    config = harness.engine_config(harness.write_config(tmp_path / "m"), quantization=NAME)
    assert config.model_config.quantization == NAME
    for quant in (config.quant_config, pickle.loads(pickle.dumps(config.quant_config))):
        assert type(quant).__name__ == "BeamMxfp8Config" and isinstance(quant, OnlineQuantizationConfig)
        assert quant.get_name() == NAME and str(quant.args.moe) == str(quant.args.linear) == "mxfp8"


def test_the_entry_point_does_not_import_layers(fake_hopper):
    """The name is known after `register`, twice, while vLLM's layers and quantisation methods are not imported."""
    code = (
        "import sys\n"
        "from beam_moe.integrations import vllm as plugin\n"
        "plugin.register(); plugin._done = False; plugin.register()\n"
        "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS\n"
        f"layers = 'vllm.model_executor.layers.'\n"
        f"print(QUANTIZATION_METHODS.count('{NAME}'), *(layers + m in sys.modules for m in"
        " ('fused_moe', 'linear', 'quantization.online.base')))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], env=fake_hopper, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "False", "False", "False"], done.stderr[-2000:]


def test_quantised_checkpoints_and_a_second_configuration_are_refused(harness, tmp_path):
    """The name quantises unquantised weights, all of them."""
    stored = {"quant_method": "compressed-tensors", "format": "mxfp8", "config_groups": {}, "ignore": []}
    path = harness.write_config(tmp_path / "q", quantization_config=stored)
    with pytest.raises(ValueError, match=rf"compressed-tensors[\s\S]*{NAME}"):
        harness.engine_config(path, quantization=NAME)
    path = harness.write_config(tmp_path / "ours", quantization_config={"quant_method": NAME})
    with pytest.raises(ValueError, match="quantises unquantised weights"):
        harness.engine_config(path, quantization=NAME)
    path = harness.write_config(tmp_path / "m")
    with pytest.raises(ValueError, match="takes no quantization_config"):
        harness.engine_config(path, quantization=NAME, quantization_config={"moe": "mxfp8", "ignore": ["*.layers.2.*"]})


# --- what is quantised


def test_layers_of_beam(harness, tmp_path):
    """Linears for the engine's kernels, experts for ours; router, embedding, norms and head as they were."""
    config = harness.engine_config(harness.write_config(tmp_path / "m"), quantization=NAME, lora=False)
    with harness.built(config) as (model, _):
        got = methods(model)
        for layer in range(harness.LAYERS):
            name = f"model.layers.{layer}."
            for part in ("self_attn.qkv_gate_proj", "self_attn.o_proj"):
                assert got.pop(name + part) == "Mxfp8OnlineLinearMethod"
            if layer < harness.DENSE:
                for part in ("mlp.gate_up_proj", "mlp.down_proj"):
                    assert got.pop(name + part) == "Mxfp8OnlineLinearMethod"
            else:
                assert got.pop(name + "mlp.gate") == "UnquantizedLinearMethod"
                assert got.pop(name + "mlp.experts.routed_experts") == "BeamMxfp8MoEMethod"
        kept = {k: v for k, v in got.items() if not k.endswith("attn.attn")}  # the key-value cache has its own
        assert kept == {"model.embed_tokens": "UnquantizedEmbeddingMethod", "lm_head": "UnquantizedEmbeddingMethod"}
        fp8 = {n for n, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn}
        assert fp8 and not any("norm" in n or "embed" in n or "lm_head" in n or ".mlp.gate." in n for n in fp8)
        for runner in model.moe_layers:
            experts = experts_of(runner)
            assert type(experts).__name__ == "BeamMxfp8Experts" and experts.promised.startswith("model.layers.")
            assert (runner.routed_scaling_factor, experts.routed_scaling) == (1.0, 2.5)


def test_experts_compute_what_their_weights_say(harness, tmp_path, reference):
    """With an adapter and bare rows; the very bits of vLLM's ``mxfp8`` on the same weights; again after a reload."""
    path, outputs = harness.write_config(tmp_path / "m"), {}
    adapter = harness.write_adapter(tmp_path / "a", "per_expert")
    x, (weights, ids) = (torch.randn(4, harness.H) * 0.5).half(), harness.routing(4)
    for name in ("mxfp8", NAME):
        with harness.built(harness.engine_config(path, quantization=name)) as (model, manager):
            manager.add_adapter(harness.request(adapter))
            runner = model.moe_layers[0]
            layer, slots = runner.routed_experts, [0, -1, 0, -1]
            stacks = {0: harness.experts_stacks(model, 2, 0)}
            harness.set_slots(manager, slots)
            outputs[name] = harness.run_experts(runner, x, weights, ids)
            want = reference(harness, dequantised(layer), x, weights, ids, slots, stacks)
            assert_close(name, want, outputs[name], LIMIT)
    assert torch.equal(outputs["mxfp8"], outputs[NAME])
    method, words = layer.quant_method.old_quant_method, experts_of(runner).words[1]
    w13, w2 = (0.2 * torch.randn(layer.w13_weight.shape), 0.2 * torch.randn(layer.w2_weight.shape))
    layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(w.half(), requires_grad=False) for w in (w13, w2))
    layer._already_called_process_weights_after_loading = False
    method.process_weights_after_loading(layer)
    experts = method.moe_kernel.impl.fused_experts
    assert experts.promised and experts.words[1].data_ptr() == words.data_ptr(), "a captured graph reads the old words"
    assert_close("reloaded", w13, dequantised(layer).w13_weight, 0.04)


def test_routers_by_name(harness):
    """Some models make their router a plain linear layer; vLLM's class for routers is one under any name."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import ReplicatedLinear

    from beam_moe.integrations.vllm.quantization import BeamMxfp8Config

    quant = BeamMxfp8Config.online()
    kept = ("mlp.gate", "mlp.router", "mlp.text_experts_gate", "mlp.shared_expert_gate", "self_attn.v_router")
    assert not any(quant.resolve_quant_method_cls(ReplicatedLinear, f"model.layers.0.{n}") for n in kept)
    assert quant.resolve_quant_method_cls(GateLinear, "model.layers.0.mlp.chooser") is None
    for name in ("mlp.gate_proj", "mlp.gate_up_proj", "self_attn.output_gate_proj"):
        assert quant.resolve_quant_method_cls(ReplicatedLinear, f"model.layers.0.{name}") is not None


@pytest.mark.parametrize("wanted", ["all", "Qwen3MoeForCausalLM"])
def test_models_that_are_asked_for(harness, tmp_path, monkeypatch, reference, wanted):
    """Qwen3-MoE on our kernel with an adapter's stacks; its router, which vLLM's ``mxfp8`` quantises, keeps its own."""
    from beam_moe.integrations.vllm import quantization

    monkeypatch.setenv("BEAM_MOE_VLLM", wanted)
    path = harness.write_config(tmp_path / "q", harness.QWEN)
    with harness.built(harness.engine_config(path, quantization=NAME)) as (model, manager):
        got = {n.removesuffix(".base_layer"): m for n, m in methods(model).items()}
        assert got["model.layers.0.mlp.gate"] == "UnquantizedLinearMethod"
        assert got["model.layers.0.self_attn.qkv_proj"] == "Mxfp8OnlineLinearMethod"
        (runner,) = runners(model)
        experts = experts_of(runner)
        assert type(experts).__name__ == "BeamMxfp8Experts" and experts.promised and experts.routed_scaling == 1.0
        assert experts.bank is not None and experts.words[0] is not None
        x, (weights, ids) = (torch.randn(3, harness.H) * 0.5).half(), harness.routing(3)
        harness.set_slots(manager, [-1] * 3)
        got = harness.run_experts(runner, x, weights, ids)
        want = reference(harness, dequantised(runner.routed_experts), x, weights, ids, [-1] * 3, {}, scaling=1.0)
        assert_close("Qwen3 experts", want, got, LIMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "ROUTERS", re.compile("none"))
        patch.setattr(quantization, "GateLinear", type("Another", (), {}))
        with harness.built(harness.engine_config(path, quantization=NAME, lora=False)) as (model, _):
            gate = methods(model)["model.layers.0.mlp.gate"]
            assert gate == "Mxfp8OnlineLinearMethod", "vLLM keeps it: drop ROUTERS"


# --- the promise


def test_a_model_that_is_not_asked_for(harness, tmp_path, monkeypatch):
    path = harness.write_config(tmp_path / "q", harness.QWEN)
    config = harness.engine_config(path, quantization=NAME)
    refused(harness, config, "model.layers.0.mlp.experts", "BEAM_MOE_VLLM='beam'", "Qwen3MoeForCausalLM")
    monkeypatch.setenv("BEAM_MOE_VLLM", "0")
    config = harness.engine_config(harness.write_config(tmp_path / "m"), quantization=NAME)
    refused(harness, config, "model.layers.2.mlp.experts", "BEAM_MOE_VLLM='0'", "BeamForCausalLM")


@pytest.mark.parametrize(
    "change, options, words",
    [
        ({"moe_intermediate_size": 48}, {}, ("intermediate_size_per_partition of 48", "32")),
        ({}, {"moe_backend": "marlin"}, ("moe_backend='marlin'",)),
    ],
)
def test_a_layer_that_cannot_be_served(harness, tmp_path, change, options, words):
    config = harness.engine_config(harness.write_config(tmp_path / "m", **change), quantization=NAME, **options)
    refused(harness, config, "model.layers.2.mlp.experts", *words)


@pytest.mark.parametrize("when", ["before its weights", "with its kernel"])
def test_conditions_on_a_layer(harness, tmp_path, monkeypatch, when):
    """Known from the configuration, or only once vLLM has made the layer's own quantisation parameters."""
    from beam_moe.integrations.vllm import experts, quantization

    config = harness.engine_config(harness.write_config(tmp_path / "m"), quantization=NAME)
    known = experts.why_not

    def why_not(moe, quant, activation):
        early = quant is quantization.FUSED_MOE_UNQUANTIZED_CONFIG
        return "it has one more bias" if early is (when == "before its weights") else known(moe, quant, activation)

    monkeypatch.setattr(experts, "why_not", why_not)
    refused(harness, config, "model.layers.2.mlp.experts", "it has one more bias")


def test_experts_left_to_vllm(harness, tmp_path, monkeypatch):
    """A model class that gives its layers no experts of ours."""
    from beam_moe.integrations.vllm import model

    monkeypatch.setattr(model, "install", lambda *args: None)
    config = harness.engine_config(harness.write_config(tmp_path / "m"), quantization=NAME, lora=False)
    refused(harness, config, "model.layers.2.mlp.experts", "it was left to M")


def test_adapters_that_our_kernel_cannot_read(harness, tmp_path, monkeypatch):
    """Refused when the LoRA layers are made, not when the first request comes."""
    monkeypatch.setenv("BEAM_MOE_VLLM", "all")
    path = harness.write_config(tmp_path / "q", harness.QWEN)
    config = harness.engine_config(path, quantization=NAME, fully_sharded_loras=True)
    refused(harness, config, "model.layers.0.mlp.experts", "fully_sharded_loras")


def test_a_call_that_cannot_be_served(harness, tmp_path, monkeypatch):
    """The first call, of the memory profile, is part of start-up."""
    from vllm.model_executor.layers.fused_moe.experts.mxfp8_emulation_moe import Mxfp8TritonExpertsBase

    monkeypatch.setattr(Mxfp8TritonExpertsBase, "apply", lambda self, output, **kwargs: output.zero_())
    config = harness.engine_config(harness.write_config(tmp_path / "m"), quantization=NAME, lora=False)
    with harness.built(config) as (model, _):
        x, (weights, ids) = torch.randn(3, harness.H).half(), harness.routing(3)
        with pytest.raises(ValueError, match=rf"{NAME}: .*model\.layers\.2\.mlp\.experts.*torch\.int64 ids"):
            harness.run_experts(model.moe_layers[0], x, weights, ids.long())
