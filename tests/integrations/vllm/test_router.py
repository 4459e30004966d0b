"""Our router under vLLM's MoE runner: what it chooses, what it records, when it serves and when vLLM's own does."""

from types import SimpleNamespace

import pytest
import torch

from beam_moe.kernels import router as kernel
from beam_moe.testing import assert_close

BEAM = {"top_k": 2, "n_group": 4, "topk_group": 2}

pytestmark = pytest.mark.usefixtures("no_calls_yet")


@pytest.fixture(scope="module")
def ours(fake_hopper):
    from beam_moe.integrations.vllm import router

    return router


@pytest.fixture(scope="module")
def served(harness, tmp_path_factory):
    """A Beam with LoRA buffers, and the hidden states of six tokens."""
    config = harness.engine_config(harness.write_config(tmp_path_factory.mktemp("served") / "m"))
    with harness.built(config) as (model, manager):
        x = (torch.randn(6, harness.H, generator=torch.Generator().manual_seed(3)) * 0.5).half()
        yield SimpleNamespace(model=model, manager=manager, config=config, x=x)


def select(runner, x):
    """As the runner asks its router once it holds no gate: the hidden states stand for the logits."""
    dtype = runner._quant_method.topk_indices_dtype
    return runner.router.select_experts(hidden_states=x, router_logits=x, topk_indices_dtype=dtype)


def chosen(block, x):
    """(weights, ids) by the reference, from the parameters as the model names them."""
    bias = block.gate.e_score_correction_bias.data
    return kernel.grouped_topk_reference(x, block.gate.weight.data, bias, **BEAM)[:2]


@pytest.mark.parametrize("lora", [False, True])
def test_beams_router_is_ours(harness, ours, tmp_path, lora):
    """With LoRA and without; no parameter of the model has moved, and vLLM's seams are where they were."""
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"), lora=lora)) as (model, _):
        names = {n.replace(".base_layer", "") for n, _ in model.named_parameters() if ".gate." in n}
        for layer in (2, 3):
            runner = model.moe_layers[layer - 2]
            assert runner.gate is None and isinstance(runner.router, GroupedTopKRouter)
            routing = ours.routing_of(runner)
            assert routing.limit() == 512
            gate = model.model.layers[layer].mlp.gate
            assert routing.gate is (gate.base_layer if lora else gate)
            assert f"model.layers.{layer}.mlp.gate.weight" in names
            assert f"model.layers.{layer}.mlp.gate.e_score_correction_bias" in names


def test_choice_is_the_references(harness, served):
    """fp32 weights, ids and their order, through vLLM's own entry; with and without adapters the same bits."""
    for layer, runner in zip((2, 3), served.model.moe_layers):
        want_weights, want_ids = chosen(served.model.model.layers[layer].mlp, served.x)
        harness.set_slots(served.manager, [-1] * 6)
        weights, ids = select(runner, served.x)
        assert weights.dtype == torch.float32 and ids.dtype == torch.int32
        assert torch.equal(ids, want_ids)
        assert_close("weights", want_weights, weights, 1e-6)
        harness.set_slots(served.manager, [0, 1, -1, 0, 1, -1])
        with_adapters = select(runner, served.x)
        assert torch.equal(with_adapters[0], weights) and torch.equal(with_adapters[1], ids)
        for t in range(6):
            alone = select(runner, served.x[t : t + 1])
            assert torch.equal(alone[0], weights[t : t + 1]) and torch.equal(alone[1], ids[t : t + 1])


def test_the_runner_launches_no_gate(harness, ours, served, monkeypatch):
    """A whole layer as its custom op runs it: one call of ours, no GEMM of the gate, the routed sum of the choice."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    calls = []
    monkeypatch.setattr(ours, "grouped_topk", lambda *a, **k: calls.append(a) or kernel.grouped_topk(*a, **k))
    monkeypatch.setattr(GateLinear, "forward", lambda self, x: pytest.fail("the gate ran"))
    runner = served.model.moe_layers[0]
    harness.set_slots(served.manager, [-1] * 6)
    with set_forward_context(None, served.config, num_tokens=6):
        got = runner._forward_impl(served.x, served.x, None)
    weights, ids = chosen(served.model.model.layers[2].mlp, served.x)
    assert len(calls) == 1
    assert_close("routed sum", harness.run_experts(runner, served.x, weights, ids), got, 1e-3)


def test_routed_experts_are_recorded_at_every_size(ours, served, monkeypatch):
    """R3 reads what the layer was given: our choice, and vLLM's for a batch past the limit."""
    runner, recorded = served.model.moe_layers[0], []
    runner.router.set_capture_fn(lambda ids: recorded.append(ids.clone()))
    stock = torch.full((6, 2), 7, dtype=torch.int32)
    routing = ours.routing_of(runner)
    monkeypatch.setattr(routing, "__wrapped__", lambda *a, **k: (torch.ones(6, 2), stock))
    try:
        _, ids = select(runner, served.x)
        assert len(recorded) == 1 and torch.equal(recorded[0], ids) and not torch.equal(ids, stock)
        monkeypatch.setattr(routing, "max_tokens", 5)
        _, ids = select(runner, served.x)
        assert len(recorded) == 2 and torch.equal(recorded[1], stock) and torch.equal(ids, stock)
    finally:
        runner.router.set_capture_fn(None)


def test_large_batches_go_to_vllm(ours, served, monkeypatch):
    """Past the limit vLLM's gate makes the logits and vLLM's step chooses from them; the limit itself is ours."""
    from beam_moe.integrations.vllm import metrics

    runner, seen = served.model.moe_layers[0], []
    routing = ours.routing_of(runner)

    def stock(hidden_states, router_logits, indices_type, *, input_ids=None):
        seen.append(router_logits)
        return torch.ones(6, 2), torch.zeros(6, 2, dtype=torch.int32)

    monkeypatch.setattr(routing, "__wrapped__", stock)
    monkeypatch.setattr(routing, "max_tokens", 6)
    select(runner, served.x)
    assert not seen
    monkeypatch.setattr(routing, "max_tokens", 5)
    select(runner, served.x)
    weight = served.model.model.layers[2].mlp.gate.weight
    assert_close("logits", served.x.float() @ weight.data.T, seen[0], 1e-5)
    assert seen[0].dtype == torch.float32
    assert metrics.calls[metrics.PREFILL, "router, more than 5 tokens"] == 1
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    select(runner, served.x)
    assert len(seen) == 1, "one order of sums for every size is part of batch invariance"


def test_hidden_states_that_do_not_fit(ours, served, monkeypatch):
    """vLLM's own path with the reason counted, or an error under BEAM_MOE_STRICT."""
    from beam_moe.integrations.vllm import metrics

    runner = served.model.moe_layers[0]
    routing, x = ours.routing_of(runner), served.x.double()
    monkeypatch.setattr(routing, "__wrapped__", lambda *a, **k: (torch.ones(6, 2), torch.zeros(6, 2).int()))
    select(runner, x)
    select(runner, x[:3])
    reasons = {detail: n for (path, detail), n in metrics.calls.items() if path == metrics.FALLBACK}
    assert reasons == {"its hidden states are torch.float64 of 2 dimensions": 2}
    monkeypatch.setenv("BEAM_MOE_STRICT", "1")
    with pytest.raises(RuntimeError, match="BEAM_MOE_STRICT"):
        select(runner, x)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"router": "RoutingSimulatorRouter"}, "its router is RoutingSimulatorRouter"),
        ({"gate": None}, "its gate is NoneType"),
        ({"is_unquantized": False}, "quantised"),
        ({"bias": torch.zeros(8)}, "bias"),
        ({"weight": torch.zeros(8, 64, dtype=torch.float64)}, "torch.float64"),
        ({"out_dtype": torch.bfloat16}, "torch.bfloat16 logits"),
        ({"weight": torch.zeros(2048, 64)}, "2048 experts"),
        ({"top_k": 17}, "chooses 17"),
        ({"num_expert_group": 3}, "not 3 groups"),
        ({"num_expert_group": 8}, "not 8 groups"),
        ({"topk_group": 5}, "in 5 groups"),
        ({"topk_group": 1, "top_k": 7}, "chooses 7 of the"),
        ({"e_score_correction_bias": torch.zeros(8).bfloat16()}, "correction bias is torch.bfloat16"),
        ({"scoring_func": "sqrtsoftplus"}, "sqrtsoftplus"),
        ({"routed_scaling_factor": 2.5}, "scaled by 2.5"),
        ({"num_fused_shared_experts": 1}, "shared experts"),
        ({"skip_padding": True}, "padding rows"),
    ],
)
def test_each_condition(ours, served, monkeypatch, change, reason):
    router, gate = served.model.moe_layers[0].router, ours.routing_of(served.model.moe_layers[0]).gate
    assert ours.why_not(router, gate) is None
    for name, value in change.items():
        if name == "router":
            router = type(value, (), {})()
        elif name == "gate":
            gate = value
        elif hasattr(router, name):
            monkeypatch.setattr(router, name, value)
        else:
            monkeypatch.setitem(gate.__dict__ if name in gate.__dict__ else gate._parameters, name, value)
    assert reason in ours.why_not(router, gate)


def test_a_router_that_is_not_ours_is_named(harness, ours, tmp_path, monkeypatch):
    """vLLM's gate and router stay whole under our experts; BEAM_MOE_STRICT makes it an error."""
    from beam_moe.integrations.vllm import metrics

    monkeypatch.setattr(ours, "why_not", lambda router, gate: "its test says so")
    config = harness.engine_config(harness.write_config(tmp_path / "m"), lora=False)
    with harness.built(config) as (model, _):
        for runner in model.moe_layers:
            assert runner.gate is not None and ours.routing_of(runner) is None
    assert metrics.calls[metrics.FALLBACK, "its test says so"] == 2
    monkeypatch.setenv("BEAM_MOE_STRICT", "1")
    config = harness.engine_config(harness.write_config(tmp_path / "m"), lora=False)
    with pytest.raises(RuntimeError, match="BEAM_MOE_STRICT"), harness.built(config):
        pass


@pytest.mark.parametrize("variable", ["BEAM_MOE_VLLM_ROUTER", "BEAM_MOE_VLLM"])
def test_router_can_be_left_to_vllm(harness, ours, tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, "0")
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"), lora=False)) as (model, _):
        for layer, runner in zip((2, 3), model.moe_layers):
            assert runner.gate is model.model.layers[layer].mlp.gate and ours.routing_of(runner) is None


def test_new_router_weights_are_used_in_place(harness, ours, tmp_path):
    """vLLM's in-place reload: fp32 bits arrive, the storage a graph holds stays, and the next choice is theirs."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    config = harness.engine_config(harness.write_config(tmp_path / "m"), lora=False)
    with harness.built(config) as (model, _):
        runner, gate = model.moe_layers[0], model.model.layers[2].mlp.gate
        x = torch.randn(6, harness.H).half()
        before, address = select(runner, x)[1], gate.weight.data_ptr()
        new = torch.randn(harness.E, harness.H) * 0.1
        bias = torch.randn(harness.E)
        checkpoint = [
            ("model.layers.2.mlp.gate.weight", new),
            ("model.layers.2.mlp.gate.e_score_correction_bias", bias),
        ]
        with set_current_vllm_config(config):
            reload_weights(config, model, iter(checkpoint), None, True)
        held = ours.routing_of(runner).gate.weight
        assert held.data_ptr() == address and held.dtype == torch.float32 and torch.equal(held.data, new)
        weights, ids = select(runner, x)
        want_weights, want_ids, _ = kernel.grouped_topk_reference(x, new, bias, **BEAM)
        assert torch.equal(ids, want_ids) and not torch.equal(ids, before)
        assert_close("weights", want_weights, weights, 1e-6)


def test_warm_up_reaches_every_launch_form(ours, served, monkeypatch):
    """One size for each form of the sizes that ours serves, and each is run."""
    routing = ours.routing_of(served.model.moe_layers[0])
    warmup = ours.RouterWarmup(routing, 100, torch.float16)
    keys = warmup.get_warmup_keys()
    # the model is in no table, so the rule decides, and its forms follow each other
    firsts = [n for n in range(1, 101) if n == 1 or kernel.heuristic(n) != kernel.heuristic(n - 1)]
    assert keys == [(n,) for n in firsts] and len(keys) > 1
    seen = []
    monkeypatch.setattr(ours, "grouped_topk", lambda x, *a, **k: seen.append((len(x), x.dtype)))
    for key in keys:
        warmup.compile(key)
    assert seen == [(n, torch.float16) for (n,) in keys]
    monkeypatch.setattr(routing, "max_tokens", 16)
    assert warmup.get_warmup_keys() == [(n,) for n in firsts if n <= 16]


def test_warm_up_is_registered(harness, ours, tmp_path, monkeypatch):
    from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

    registered = []
    monkeypatch.setattr(VllmJitKernel, "register_warmup", lambda self, *a, **k: registered.append(self))
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"), lora=False)):
        found = [k for k in registered if isinstance(k, ours.RouterWarmup)]
        assert len(found) == 1 and found[0].max_tokens == 64 and found[0].dtype == torch.float16
