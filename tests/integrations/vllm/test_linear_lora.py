"""Adapters of wrapped dense layers by our launch: values, live ranks of every slot, when it serves, when vLLM does."""

from types import SimpleNamespace

import pytest
import torch

from beam_moe.testing import assert_close

LIMIT = 3e-3

pytestmark = pytest.mark.usefixtures("no_calls_yet")


@pytest.fixture(scope="module")
def ours(fake_hopper):
    from beam_moe.integrations.vllm import linear_lora

    return linear_lora


@pytest.fixture(scope="module")
def served(harness, tmp_path_factory):
    """A Beam with two adapters on everything in two slots."""
    folder = tmp_path_factory.mktemp("served")
    config = harness.engine_config(harness.write_config(folder / "m"))
    with harness.built(config) as (model, manager):
        for number in (1, 2):
            path = harness.write_adapter(folder / f"a{number}", "per_expert", seed=number)
            manager.add_adapter(harness.request(path, number))
        punica = manager._adapter_manager.punica_wrapper_mapping["language_model"]
        yield SimpleNamespace(model=model, manager=manager, folder=folder, adapters=punica.add_lora_linear)


def layers(model):
    """Name and wrapper of every dense layer that Beam's forward pass runs through one."""
    dense, sparse = model.model.layers[0], model.model.layers[2]
    return {
        "qkv_gate": dense.self_attn.qkv_gate_proj,
        "o": sparse.self_attn.o_proj,
        "gate_up": dense.mlp.gate_up_proj,
        "down": dense.mlp.down_proj,
    }


def bank_of(served, module):
    return served.adapters.banks[module.lora_a_stacked[0].data_ptr()]


def slot_of(served, number):
    return served.manager._adapter_manager.lora_index_to_id.index(number)


def reference(module, x, slots):
    """Base output plus each row's factors in float32, from vLLM's own buffers."""
    want = module.base_layer(x)[0].float()
    for t, slot in enumerate(slots):
        if slot >= 0:
            parts = [
                b[slot, 0].float() @ (a[slot, 0].float() @ x[t].float())
                for a, b in zip(module.lora_a_stacked, module.lora_b_stacked)
            ]
            want[t] += torch.cat(parts)
    return want


@pytest.mark.parametrize("name", ["qkv_gate", "o", "gate_up", "down"])
def test_mixed_batch_matches_a_reference(harness, ours, served, name):
    """Two adapters and bare rows; a bare row keeps the base layer's bits, by our launch and by no other."""
    module, slots = layers(served.model)[name], [0, -1, 1, 1, -1, 0]
    x = torch.randn(6, module.input_size, generator=torch.Generator().manual_seed(1)).half()
    harness.set_slots(served.manager, slots)
    got, _ = module(x)
    assert_close(name, reference(module, x, slots), got, LIMIT)
    base = module.base_layer(x)[0]
    assert torch.equal(got[[1, 4]], base[[1, 4]])
    assert all(not torch.equal(got[t], base[t]) for t in (0, 2, 3, 5))
    assert ours.metrics.calls == {(ours.metrics.SERVED, "dense LoRA"): 1}


def test_no_launch_for_a_batch_without_adapters(harness, ours, served, monkeypatch):
    """Neither ours nor vLLM's, as the graph of such batches is captured."""
    monkeypatch.setattr(ours, "add_lora", lambda *a: pytest.fail("a launch"))
    monkeypatch.setattr(served.adapters, "__wrapped__", lambda *a, **k: pytest.fail("a launch of vLLM's"))
    module = layers(served.model)["o"]
    x = torch.randn(3, module.input_size).half()
    harness.set_slots(served.manager, [-1] * 3)
    assert torch.equal(module(x)[0], module.base_layer(x)[0])


def test_live_ranks_follow_the_slots(harness, served):
    """An adapter of the experts alone, of some projections, of a smaller rank, and the first one again."""
    modules = layers(served.model)
    slot = slot_of(served, 2)

    def ranks():
        return {name: bank_of(served, m).ranks[slot].tolist() for name, m in modules.items()}

    full = {"qkv_gate": [4] * 4, "o": [4], "gate_up": [4] * 2, "down": [4]}
    assert ranks() == full

    def load(name, **options):
        path = harness.write_adapter(served.folder / name, "per_expert", **options)
        served.manager.add_adapter(harness.request(path, 2, load_inplace=True))
        assert slot_of(served, 2) == slot

    load("experts", attention=False, dense=False)
    assert ranks() == {name: [0] * len(r) for name, r in full.items()}
    assert bank_of(served, modules["o"]).ranks[1 - slot].tolist() == [4], "another slot lost its adapter"
    load("attention", dense=False, rank=2, alpha=4)
    assert ranks() == {"qkv_gate": [2] * 4, "o": [2], "gate_up": [0] * 2, "down": [0]}
    load("again", seed=2)
    assert ranks() == full


def test_slices_an_adapter_leaves_out(harness, served):
    """Only the value projection: the other slices of the merged layer keep the base layer's bits."""
    from safetensors.torch import load_file, save_file

    path = harness.write_adapter(served.folder / "value", "none", dense=False)
    file = served.folder / "value" / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if ".v_proj." in k}, file)
    served.manager.add_adapter(harness.request(path, 2, load_inplace=True))
    module, slot = layers(served.model)["qkv_gate"], slot_of(served, 2)
    assert bank_of(served, module).ranks[slot].tolist() == [0, 0, 4, 0]
    x = torch.randn(2, module.input_size).half()
    harness.set_slots(served.manager, [slot, slot])
    got, base = module(x)[0], module.base_layer(x)[0]
    q, k, v, gate = module.output_slices
    bare = torch.ones(q + k + v + gate, dtype=torch.bool)
    bare[q + k : q + k + v] = False
    assert torch.equal(got[:, bare], base[:, bare]) and not torch.equal(got[:, ~bare], base[:, ~bare])
    assert_close("qkv_gate", reference(module, x, [slot, slot]), got, LIMIT)
    again = harness.write_adapter(served.folder / "whole", "per_expert", seed=2)
    served.manager.add_adapter(harness.request(again, 2, load_inplace=True))


def test_large_batches_go_to_vllm(harness, ours, served, monkeypatch):
    """The number of tokens alone decides, and vLLM's own gets the very arguments."""
    module, seen = layers(served.model)["qkv_gate"], []
    monkeypatch.setattr(served.adapters, "__wrapped__", lambda *a, **k: seen.append((a, k)))
    x = torch.randn(6, module.input_size).half()
    harness.set_slots(served.manager, [0] * 6)
    monkeypatch.setattr(served.adapters, "max_tokens", 6)
    module(x)
    assert not seen
    monkeypatch.setattr(served.adapters, "max_tokens", 5)
    got, _ = module(x)
    (y, given, a, b, scale, slices), rest = seen[0]
    assert y.data_ptr() == got.data_ptr() and given is x and (scale, rest) == (1.0, {})
    assert a is module.lora_a_stacked and b is module.lora_b_stacked and slices == module.output_slices
    assert ours.metrics.calls[ours.metrics.PREFILL, "dense LoRA, more than 5 tokens"] == 1


@pytest.mark.parametrize(
    "change, reason",
    [
        ("stranger", "not a wrapped linear layer's"),
        ("bank", "its test says so"),
        ("scale", "scale 0.5"),
        ("stream", "'add_inputs': False"),
        ("dtype", "torch.float32"),
        ("wide", "not as wide as its factors"),
        ("padded", "not as wide as its factors"),
        ("stride", "strides of its input"),
        ("expanded", "strides of its input"),
        ("over", "strides of its output"),
    ],
)
def test_each_condition_on_a_call(harness, ours, served, monkeypatch, change, reason):
    """vLLM's own with the reason counted, or an error under BEAM_MOE_STRICT."""
    module, seen = layers(served.model)["o"], []
    monkeypatch.setattr(served.adapters, "__wrapped__", lambda *a, **k: seen.append(k))
    x = torch.randn(2, module.input_size).half()
    y = torch.zeros(2, module.output_size).half()
    a, b, scale, rest = module.lora_a_stacked, module.lora_b_stacked, 1.0, {}
    if change == "stranger":
        a = tuple(t.clone() for t in a)
    elif change == "bank":
        monkeypatch.setattr(bank_of(served, module), "reason", "its test says so")
    elif change == "scale":
        scale = 0.5
    elif change == "stream":
        rest = {"add_inputs": False}
    elif change == "dtype":
        x = x.float()
    elif change == "wide":
        x = x.repeat(1, 2)
    elif change == "padded":
        y = torch.zeros(2, module.output_size + 16).half()
    elif change == "expanded":
        x = x[:1].expand(2, -1)
    elif change == "over":
        y = y[:1].expand(2, -1)
    else:
        x = torch.randn(module.input_size, 2).half().t()
    harness.set_slots(served.manager, [0, 0])

    def call():
        served.adapters(y, x, a, b, scale, module.output_slices, **rest)

    call()
    assert seen == [rest]
    assert any(reason in detail for path, detail in ours.metrics.calls if path == ours.metrics.FALLBACK)
    monkeypatch.setenv("BEAM_MOE_STRICT", "1")
    with pytest.raises(RuntimeError, match="BEAM_MOE_STRICT"):
        call()


def test_arguments_that_the_operator_has_not_are_no_operator(harness, ours, served, monkeypatch):
    """What is traced of such a call is vLLM's own."""
    module, seen = layers(served.model)["o"], []
    monkeypatch.setattr(served.adapters, "__wrapped__", lambda *a, **k: seen.append((a[4], k)))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x, y = torch.randn(2, module.input_size).half(), torch.zeros(2, module.output_size).half()
    for scale, rest in ((1.0, {"add_inputs": False}), (0.5, {})):
        served.adapters(y, x, module.lora_a_stacked, module.lora_b_stacked, scale, module.output_slices, **rest)
    assert seen == [(1.0, {"add_inputs": False}), (0.5, {})]


def test_layers_that_are_not_ours(harness, ours, tmp_path):
    """A bank of a larger rank than the kernel takes is vLLM's, and says so."""
    config = harness.engine_config(harness.write_config(tmp_path / "m"), max_lora_rank=128)
    with harness.built(config) as (_, manager):
        adapters = manager._adapter_manager.punica_wrapper_mapping["language_model"].add_lora_linear
        assert {bank.reason for bank in adapters.banks.values()} == {"max_lora_rank is above 64"}
        assert ours.LinearWarmup(adapters).get_warmup_keys() == []


@pytest.mark.parametrize(
    "variable, value", [("BEAM_MOE_VLLM_LINEAR_LORA", "0"), ("BEAM_MOE_VLLM", "0"), ("VLLM_BATCH_INVARIANT", "1")]
)
def test_adapters_can_be_left_to_vllm(harness, ours, tmp_path, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"))) as (model, manager):
        punica = manager._adapter_manager.punica_wrapper_mapping["language_model"]
        assert "add_lora_linear" not in punica.__dict__
        assert "set_lora" not in model.model.layers[0].self_attn.o_proj.__dict__


def test_stale_ids_are_cleared_without_our_experts(harness, tmp_path, monkeypatch):
    """The map that our launch reads says -1 for the rows of a batch before, whatever serves the experts."""
    from beam_moe.integrations.vllm import experts

    monkeypatch.setattr(experts, "give_experts", lambda runner: "its test says so")
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"))) as (_, manager):
        harness.set_slots(manager, [0, 1, 0, 1])
        harness.set_slots(manager, [1, -1])
        meta = manager._adapter_manager.punica_wrapper_mapping["language_model"].token_mapping_meta
        assert meta.token_lora_mapping[:4].tolist() == [1, -1, -1, -1]


def test_warm_up_reaches_every_launch_form(ours, served, monkeypatch):
    """Also where the engine is told to take as many tokens as the kernel does."""
    adapters = served.adapters
    monkeypatch.setattr(adapters, "max_tokens", ours.MAX_TOKENS)
    keys = ours.LinearWarmup(adapters).get_warmup_keys()
    banks = list(adapters.banks.values())
    reached = {banks[place].form(tokens) for tokens, place in keys}
    assert reached == {bank.form(n) for bank in banks for n in range(1, ours.MAX_TOKENS + 1)} and len(keys) == len(
        reached
    )
    seen = []
    monkeypatch.setattr(ours, "add_lora", lambda out, x, a, b, ids, ranks: seen.append((len(x), int(ids.max()))))
    for key in keys:
        ours.LinearWarmup(adapters).compile(key)
    assert seen == [(tokens, -1) for tokens, _ in keys]


def test_warm_up_is_registered(harness, ours, tmp_path, monkeypatch):
    from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

    registered = []
    monkeypatch.setattr(VllmJitKernel, "register_warmup", lambda self, *a, **k: registered.append(self))
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"))) as (_, manager):
        punica = manager._adapter_manager.punica_wrapper_mapping["language_model"]
        found = [k for k in registered if isinstance(k, ours.LinearWarmup)]
        assert len(found) == 1 and found[0].adapters is punica.add_lora_linear
