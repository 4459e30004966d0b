"""Adapters of linear layers by our launch in a model that vLLM's own class builds and torch.compile traces."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from beam_moe.testing import assert_close

LIMIT = 3e-3
LAYERS = 2

pytestmark = pytest.mark.usefixtures("no_calls_yet")


@pytest.fixture(scope="module")
def ours(fake_hopper):
    from beam_moe.integrations.vllm import linear_lora

    return linear_lora


@contextmanager
def asked_for(models: str):
    """vLLM as the entry point leaves it under ``BEAM_MOE_VLLM=models``, which names more than Beam."""
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.custom_op import op_registry_oot

    from beam_moe.integrations.vllm import other_models

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEAM_MOE_VLLM", models)
        patch.setattr(LoRAModelManager, "_create_lora_modules", LoRAModelManager._create_lora_modules)
        other_models.register()
        other_models.register()  # as each plugin load of one process does
        try:
            yield
        finally:
            op_registry_oot.pop(other_models.NAME, None)


def write_adapter(harness, folder, seed: int, rank: int = 4):
    """q, k, v and o of every layer, as PEFT writes them, alpha / r of 2."""
    from safetensors.torch import save_file

    h, q, kv = harness.H, harness.HEADS * harness.HEAD, harness.KV * harness.HEAD
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, fan_in, fan_out in (("q", h, q), ("k", h, kv), ("v", h, kv), ("o", q, h)):
            p = f"{harness.ROOT}{layer}.self_attn.{name}_proj"
            tensors[f"{p}.lora_A.weight"] = torch.randn(rank, fan_in, generator=g) * 0.3
            tensors[f"{p}.lora_B.weight"] = torch.randn(fan_out, rank, generator=g) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": "all-linear"}))
    return str(folder)


def qwen(harness, folder, **options):
    """Engine configuration of a tiny Qwen3-MoE with adapters."""
    path = harness.write_config(folder / "q", harness.QWEN, num_hidden_layers=LAYERS)
    return harness.engine_config(path, **options)


@pytest.fixture(scope="module")
def served(harness, ours, tmp_path_factory):
    """A Qwen3-MoE that is opted in, adapters on its attention in two slots."""
    folder = tmp_path_factory.mktemp("served")
    with asked_for("Qwen3MoeForCausalLM"), harness.built(qwen(harness, folder)) as (model, manager):
        for number in (1, 2):
            path = write_adapter(harness, folder / f"a{number}", seed=number)
            manager.add_adapter(harness.request(path, number))
        punica = manager._adapter_manager.punica_wrapper_mapping["language_model"]
        yield SimpleNamespace(model=model, manager=manager, punica=punica)


def layer(served, name):
    attention = served.model.model.layers[1].self_attn
    return {"qkv": attention.qkv_proj, "o": attention.o_proj}[name]


def inputs(module, tokens: int):
    return torch.randn(tokens, module.input_size, generator=torch.Generator().manual_seed(tokens)).half()


def vllms(served, module, x):
    """The layer by vLLM's own kernels, which expand on the base layer's output."""
    out = module.base_layer(x)[0]
    own = type(served.punica).add_lora_linear
    own(served.punica, out, x, module.lora_a_stacked, module.lora_b_stacked, 1.0, module.output_slices)
    return out


@pytest.mark.parametrize("name", ["qkv", "o"])
def test_mixed_batch_matches_vllms_own(harness, ours, served, name):
    """Two adapters and bare rows, which keep the base layer's bits; by our launch and by no other."""
    module, slots = layer(served, name), [0, -1, 1, 1, -1, 0]
    x = inputs(module, len(slots))
    harness.set_slots(served.manager, slots)
    got, base = module(x)[0], module.base_layer(x)[0]
    assert_close(name, vllms(served, module, x), got, LIMIT)
    assert torch.equal(got[[1, 4]], base[[1, 4]])
    assert all(not torch.equal(got[t], base[t]) for t in (0, 2, 3, 5))
    assert ours.metrics.calls == {(ours.metrics.SERVED, "dense LoRA"): 1}


@pytest.mark.parametrize("name", ["qkv", "o"])
def test_one_traced_graph_serves_every_size(harness, ours, served, name, monkeypatch):
    """In one graph without a break, our operator decides by the size of the batch that runs, not of the one traced."""
    module, graphs = layer(served, name), []

    def backend(graph, example_inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    traced = torch.compile(lambda x: module(x)[0], fullgraph=True, dynamic=True, backend=backend)
    monkeypatch.setattr(served.punica.add_lora_linear, "max_tokens", 6)
    for tokens in (5, 6, 7):
        x = inputs(module, tokens)
        slots = [t % 3 - 1 for t in range(tokens)]
        harness.set_slots(served.manager, slots)
        got = traced(x)
        assert_close(name, vllms(served, module, x), got, LIMIT)
        assert torch.equal(got[::3], module.base_layer(x)[0][::3])
    path, rest = (ours.metrics.SERVED, "dense LoRA"), (ours.metrics.PREFILL, "dense LoRA, more than 6 tokens")
    assert ours.metrics.calls == {path: 2, rest: 1}
    assert len(graphs) == 1 and any("beam_moe.add_lora_linear" in node for node in graphs[0])
    torch._dynamo.reset()


def test_live_ranks_follow_the_slots(harness, ours, served):
    for name, slices in (("qkv", 3), ("o", 1)):
        bank = served.punica.add_lora_linear.banks[layer(served, name).lora_a_stacked[0].data_ptr()]
        assert bank.ranks.tolist() == [[4] * slices] * 2 and bank.reason is None


def test_operator_refuses_factors_that_no_layer_has(ours):
    x = torch.zeros(2, 16).half()
    with pytest.raises(ValueError, match="a must be the factors of a layer that is served"):
        torch.ops.beam_moe.add_lora_linear(x, x, [torch.zeros(1, 1, 4, 16)], [torch.zeros(1, 1, 16, 4)], [16])


def test_a_second_attach_changes_nothing(ours, served):
    """As for a Beam built after another model's engine, whose own class attaches too."""
    adapters = served.punica.add_lora_linear
    banks, module = dict(adapters.banks), layer(served, "o")
    set_lora = module.set_lora
    ours.attach(served.manager._adapter_manager)
    assert served.punica.add_lora_linear is adapters and adapters.banks == banks and module.set_lora is set_lora


@pytest.mark.parametrize(
    "asked, change, is_ours",
    [
        ("Qwen3MoeForCausalLM", None, True),
        ("all", None, True),
        ("all", "beam_mxfp8", True),
        ("beam,MixtralForCausalLM", None, False),
        ("all", "switched off", False),
        ("all", "experts are vLLM's", False),
        ("all", "fully_sharded_loras", False),
        ("all", "additional_config", False),
    ],
)
def test_who_is_served(harness, ours, tmp_path, monkeypatch, asked, change, is_ours):
    """Models whose experts are ours and no other, and only what they compile is kept on disk apart from vLLM's."""
    from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

    from beam_moe.integrations.vllm import experts

    options, registered = {}, []
    monkeypatch.setattr(VllmJitKernel, "register_warmup", lambda self, *a, **k: registered.append(self))
    if change == "beam_mxfp8":
        options = {"quantization": change}
        kernels = "HummingMxfp8LinearKernel,MarlinMxfp8LinearKernel,TorchMxFp8LinearKernel"
        monkeypatch.setenv("VLLM_DISABLED_KERNELS", kernels)
    elif change == "switched off":
        monkeypatch.setenv("BEAM_MOE_VLLM_LINEAR_LORA", "0")
    elif change == "experts are vLLM's":
        monkeypatch.setattr(experts, "why_not", lambda *a: "its test says so")
    elif change == "fully_sharded_loras":
        options = {"fully_sharded_loras": True}
    with asked_for(asked):
        config = qwen(harness, tmp_path, **options)
        if change == "additional_config":
            config.additional_config = SimpleNamespace(compute_hash=lambda: "its test says so")
        else:
            config.additional_config = {"another plugin's": 1}
        given = config.additional_config
        with harness.built(config) as (model, manager):
            punica = manager._adapter_manager.punica_wrapper_mapping["language_model"]
            warmups = [k.adapters for k in registered if isinstance(k, ours.LinearWarmup)]
            assert ("add_lora_linear" in punica.__dict__) is is_ours
            assert ("set_lora" in model.model.layers[0].self_attn.o_proj.__dict__) is is_ours
            assert warmups == ([punica.add_lora_linear] if is_ours else [])
            marked = config.compute_hash()
            if is_ours:
                assert config.additional_config.items() >= given.items(), "what others keep there"
            config.additional_config = given
            assert (config.compute_hash() != marked) is is_ours
