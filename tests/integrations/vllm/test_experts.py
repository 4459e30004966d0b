"""Our experts inside vLLM's modular MoE kernel: what they compute, when they serve, and when they stand aside."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from beam_moe.testing import assert_close

LIMIT = 4e-3  # fp16 factors and sums against float32


def reference(harness, layer, x, weights, ids, slots, adapters, scaling=2.5):
    """The routed sum in float32 from the layer's weights and each token's adapter ({slot: stacks})."""
    w13, w2 = layer.w13_weight.float(), layer.w2_weight.float()
    out = torch.zeros(x.shape, dtype=torch.float32)
    for t, row in enumerate(x.float()):
        for w, e in zip(weights[t].tolist(), ids[t].tolist()):
            g, u = (w13[e] @ row).chunk(2)
            f = adapters.get(slots[t])
            if f is not None:
                g = g + f["w1.b"][e].float() @ (f["w1.a"][e].float() @ row)
                u = u + f["w3.b"][e].float() @ (f["w3.a"][e].float() @ row)
            h = torch.nn.functional.silu(g) * u
            y = w2[e] @ h
            if f is not None:
                y = y + f["w2.b"][e].float() @ (f["w2.a"][e].float() @ h)
            out[t] += w * y
    return scaling * out


@pytest.fixture(scope="module")
def served(harness, tmp_path_factory):
    """A Beam with two adapters in two slots, and the inputs of a batch of six tokens."""
    folder = tmp_path_factory.mktemp("served")
    first = harness.write_adapter(folder / "a", "per_expert")
    second = harness.write_adapter(folder / "b", "flat", seed=7)
    config = harness.engine_config(harness.write_config(folder / "m"))
    with harness.built(config) as (model, manager):
        for number, path in ((1, first), (2, second)):
            manager.add_adapter(harness.request(path, number))
        x = (torch.randn(6, harness.H, generator=torch.Generator().manual_seed(3)) * 0.5).half()
        yield SimpleNamespace(model=model, manager=manager, x=x, routing=harness.routing(6), folder=folder)


def adapters_of(harness, served, layer):
    ids = served.manager._adapter_manager.lora_index_to_id
    return {i: harness.experts_stacks(served.model, layer, i) for i, used in enumerate(ids) if used is not None}


def test_mixed_batch_matches_a_reference(harness, served):
    """Two adapters and bare rows in one batch; the routed scaling is applied once (6.25 would show)."""
    runner = served.model.moe_layers[0]
    slots = [0, -1, 1, 1, -1, 0]
    harness.set_slots(served.manager, slots)
    got = harness.run_experts(runner, served.x, *served.routing)
    want = reference(harness, runner.routed_experts, served.x, *served.routing, slots, adapters_of(harness, served, 2))
    assert_close("routed sum", want, got, LIMIT)
    bare = reference(harness, runner.routed_experts, served.x, *served.routing, [-1] * 6, {})
    assert (want - bare)[[0, 2, 3, 5]].abs().min(1).values.max() > 0, "the adapters must matter to this test"


def test_bare_rows_do_not_change_by_a_bit(harness, served):
    """In a mixed batch, in a batch without adapters, and in an engine without LoRA."""
    runner = served.model.moe_layers[0]
    harness.set_slots(served.manager, [0, -1, 1, 1, -1, 0])
    mixed = harness.run_experts(runner, served.x, *served.routing)
    harness.set_slots(served.manager, [-1] * 6)
    bare = harness.run_experts(runner, served.x, *served.routing)
    assert torch.equal(mixed[[1, 4]], bare[[1, 4]]) and not torch.equal(mixed[0], bare[0])
    config = harness.engine_config(harness.write_config(served.folder / "plain"), lora=False)
    with harness.built(config) as (model, _):
        assert torch.equal(harness.run_experts(model.moe_layers[0], served.x, *served.routing), bare)


def test_stale_ids_are_cleared(harness, served):
    """A map left from a batch before must not reach a kernel that a graph drives by the map alone."""
    meta = served.manager._adapter_manager.punica_wrapper_mapping["language_model"].token_mapping_meta
    harness.set_slots(served.manager, [0, 1, 0, 1])
    harness.set_slots(served.manager, [1, -1])
    assert meta.token_lora_mapping[:4].tolist() == [1, -1, -1, -1]
    harness.set_slots(served.manager, [-1, -1])
    assert int(meta.token_lora_mapping.max()) == -1
    # the mend removed, vLLM keeps the ids of the batch before
    meta.prepare_tensors.__wrapped__(torch.tensor([0, 0]))
    meta.prepare_tensors.__wrapped__(torch.tensor([-1, -1]))
    assert meta.token_lora_mapping[:2].tolist() == [0, 0]
    harness.set_slots(served.manager, [-1, -1])


def test_live_rank_follows_the_slot(harness, served):
    """Slots know the adapter's rank, not max_lora_rank; a slot taken over by a smaller adapter, or emptied, follows."""
    experts = served.model.moe_layers[0].routed_experts.quant_method.moe_kernel.impl.fused_experts
    assert experts.bank.rank == 8 and experts.ranks.tolist() == [4, 4] and experts.bank.enabled.tolist() == [1, 1]
    small = harness.write_adapter(served.folder / "small", "per_expert", rank=2, alpha=4)
    slot = served.manager._adapter_manager.lora_index_to_id.index(2)
    served.manager.add_adapter(harness.request(small, 2, load_inplace=True))
    assert experts.ranks[slot] == 2
    attention_only = harness.write_adapter(served.folder / "attention", "none")
    served.manager.add_adapter(harness.request(attention_only, 2, load_inplace=True))
    assert experts.ranks[slot] == 0 and experts.bank.enabled[slot] == 0
    served.manager.add_adapter(
        harness.request(harness.write_adapter(served.folder / "b2", "flat", seed=7), 2, load_inplace=True)
    )
    assert experts.ranks.tolist() == [4, 4]


def test_large_batches_go_to_vllm(harness, served, monkeypatch):
    """By the number of tokens, with adapters and without; vLLM's path gets the scaling and single rounding of ours."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    runner = served.model.moe_layers[0]
    experts = runner.routed_experts.quant_method.moe_kernel.impl.fused_experts
    seen = []

    def stock(self, output, hidden_states, **kwargs):
        seen.append((hidden_states.shape[0], kwargs["workspace13"].numel()))
        gate_up, once = torch.randn(4, 16).half(), torch.empty(4, 8, dtype=torch.float16)
        self.activation(kwargs["activation"], once, gate_up)
        g, u = gate_up.float().chunk(2, 1)
        assert torch.equal(once, (torch.nn.functional.silu(g) * u).half()), "SwiGLU must be rounded once"
        output.fill_(2.0)

    monkeypatch.setattr(TritonExperts, "apply", stock)
    monkeypatch.setattr(experts, "max_tokens", 5)
    monkeypatch.setattr(experts, "max_lora_tokens", 5)
    for slots in ([-1] * 6, [0] * 6):
        harness.set_slots(served.manager, slots)
        assert torch.equal(harness.run_experts(runner, served.x, *served.routing), torch.full_like(served.x, 5.0))
    assert [n for n, _ in seen] == [6, 6] and min(size for _, size in seen) > 0
    for name, slot in (("max_tokens", -1), ("max_lora_tokens", 0)):  # a batch with adapters has a limit of its own
        monkeypatch.setattr(experts, name, 6)
        for other in (-1, 0):
            harness.set_slots(served.manager, [other] * 6)
            before = len(seen)
            harness.run_experts(runner, served.x, *served.routing)
            assert len(seen) == before + (other != slot)
        monkeypatch.setattr(experts, name, 5)


def test_a_map_of_slots_that_is_not_there_is_not_looked_for(harness, served, monkeypatch):
    """Experts without a bank leave the call to vLLM's, whatever its LoRA wrapper keeps."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    runner = served.model.moe_layers[0]
    experts = runner.routed_experts.quant_method.moe_kernel.impl.fused_experts
    seen = []
    monkeypatch.setattr(TritonExperts, "apply", lambda self, **k: seen.append(len(k["hidden_states"])))
    monkeypatch.setattr(experts, "no_bank", "its wrapper keeps no map from tokens to slots on the device")
    monkeypatch.setattr(experts._lora_context, "punica_wrapper", object())
    harness.run_experts(runner, served.x, *served.routing)
    assert seen == [6]


def test_buffers_of_vllms_are_there_before_they_are_locked(harness, served, monkeypatch):
    """A profiling run has adapters, and so may be ours where the same batch without them is vLLM's."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.v1.worker import workspace

    runner = served.model.moe_layers[0]
    experts = runner.routed_experts.quant_method.moe_kernel.impl.fused_experts
    large = []
    monkeypatch.setattr(TritonExperts, "apply", lambda self, **k: large.append(len(k["hidden_states"])))
    monkeypatch.setattr(experts, "max_tokens", 5)
    monkeypatch.setattr(experts, "max_lora_tokens", 100)
    workspace.reset_workspace_manager()
    try:
        workspace.init_workspace_manager(served.x.device, 1)
        harness.set_slots(served.manager, [0] * 6)
        harness.run_experts(runner, served.x, *served.routing)
        workspace.lock_workspace()
        assert large == []
        harness.set_slots(served.manager, [-1] * 6)
        harness.run_experts(runner, served.x, *served.routing)
        assert large == [6]
    finally:
        workspace.reset_workspace_manager()
        workspace.init_workspace_manager(served.x.device, 1)


def test_batch_invariant_serves_every_size_in_one_order(harness, served, monkeypatch):
    experts = served.model.moe_layers[0].routed_experts.quant_method.moe_kernel.impl.fused_experts
    w1, w2 = torch.empty(256, 640, 5120, device="meta"), torch.empty(256, 5120, 320, device="meta")

    def sums(config):  # what decides the order of sums, and which instruction makes them
        small = config.block_m < 16 or config.up_warps % 4
        return config.splits, config.act_block_i, bool(small), experts.base == "mxfp8" and config.down_whole

    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096)
    assert len({sums(experts._pinned(n, 8, w1, w2)) for n in sizes}) == 1
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert experts.limit(False) == experts.limit(True) == 16384


def conditions(experts_module, **changes):
    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation

    moe = SimpleNamespace(
        is_act_and_mul=True, activation=MoEActivation.SILU, has_bias=False, in_dtype=torch.bfloat16,
        moe_parallel_config=SimpleNamespace(enable_eplb=False),
    )  # fmt: skip
    quant = SimpleNamespace(w1_bias=None, w2_bias=None)
    activation = ApplyMoEActivationConfig()
    for key, value in changes.items():
        if key in ("w1_bias", "w2_bias"):
            setattr(quant, key, value)
        elif key == "enable_eplb":
            moe.moe_parallel_config.enable_eplb = value
        elif hasattr(moe, key):
            setattr(moe, key, value)
        else:
            activation = replace(activation, **{key: value})
    return experts_module.why_not(moe, quant, activation)


@pytest.fixture(scope="module")
def experts_module(fake_hopper):
    from beam_moe.integrations.vllm import experts

    return experts


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"clamp_limit": 7.0}, "clamp limit of 7.0"),
        ({"alpha": 1.7}, "alpha 1.7"),
        ({"beta": 1.0}, "beta 1.0"),
        ({"has_bias": True}, "bias"),
        ({"w1_bias": torch.zeros(1)}, "bias"),
        ({"w2_bias": torch.zeros(1)}, "bias"),
        ({"enable_eplb": True}, "EPLB"),
        ({"is_act_and_mul": False}, "not gated SiLU"),
        ({"in_dtype": torch.float32}, "torch.float32"),
    ],
)
def test_each_condition_on_a_layer(experts_module, change, reason):
    assert conditions(experts_module) is None
    assert reason in conditions(experts_module, **change)


def test_other_activation_is_refused(experts_module):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    assert "gelu" in conditions(experts_module, activation=MoEActivation.GELU)


@pytest.mark.parametrize(
    "change, reason",
    [
        ("on_input", "router weights are applied to its input"),
        ("ids", "torch.int64 ids"),
        ("hook", "reduction is done by a later kernel"),
        ("quant", "quantised"),
        ("sharded", "fully_sharded_loras"),
    ],
)
def test_each_condition_on_a_call(harness, served, monkeypatch, change, reason):
    """A call that ours cannot serve goes to vLLM's experts with the reason counted, or raises under BEAM_MOE_STRICT."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    from beam_moe.integrations.vllm import metrics

    runner = served.model.moe_layers[0]
    experts = runner.routed_experts.quant_method.moe_kernel.impl.fused_experts
    weights, ids = served.routing
    calls = []
    monkeypatch.setattr(TritonExperts, "apply", lambda self, output, **kw: calls.append(kw) or output.zero_())
    if change == "on_input":
        monkeypatch.setattr(runner.routed_experts, "apply_router_weight_on_input", True)
        monkeypatch.setattr(type(experts), "expects_unquantized_inputs", True)
    elif change == "ids":
        ids = ids.long()
    elif change == "hook":
        monkeypatch.setattr(experts, "post_gemm2_hook", lambda *a: None)
    elif change == "quant":
        monkeypatch.setattr(type(experts), "quant_dtype", "mxfp8")
        monkeypatch.setattr(experts, "reason", experts._why_not_weights())
    else:
        monkeypatch.setattr(experts._lora_context, "fully_sharded", True)
        experts.set_lora_context(experts._lora_context)
    try:
        before = metrics.calls.total()
        if change == "on_input":
            kwargs = {"workspace13": torch.empty(0), "workspace2": torch.empty(0), "expert_tokens_meta": None}
            kwargs |= {"a1q_scale": None, "a2_scale": None, "expert_map": None, "global_num_experts": harness.E}
            layer = runner.routed_experts

            def call():
                experts.apply(
                    torch.empty_like(served.x), served.x, layer.w13_weight, layer.w2_weight, weights, ids,
                    layer.activation, apply_router_weight_on_input=True, **kwargs,
                )  # fmt: skip
        else:

            def call():
                harness.run_experts(runner, served.x, weights, ids)

        call()
        assert len(calls) == 1 and metrics.calls.total() == before + 1
        assert any(reason in detail for path, detail in metrics.calls if path == metrics.FALLBACK)
        monkeypatch.setenv("BEAM_MOE_STRICT", "1")
        with pytest.raises(RuntimeError, match="BEAM_MOE_STRICT"):
            call()
    finally:
        monkeypatch.undo()
        experts.set_lora_context(experts._lora_context)


@pytest.mark.parametrize("rank", [256])
def test_rank_above_128(harness, tmp_path, rank):
    """A bank of rank 256 with an adapter of that rank and one of rank 4."""
    config = harness.engine_config(harness.write_config(tmp_path / "m"), max_lora_rank=rank)
    big = harness.write_adapter(tmp_path / "big", "shared", rank=rank, alpha=rank // 16)
    small = harness.write_adapter(tmp_path / "small", "per_expert")
    with harness.built(config) as (model, manager):
        manager.add_adapter(harness.request(big, 1))
        manager.add_adapter(harness.request(small, 2))
        runner = model.moe_layers[0]
        x, slots = (torch.randn(3, harness.H) * 0.5).half(), [0, 1, -1]
        weights, ids = harness.routing(3)
        harness.set_slots(manager, slots)
        got = harness.run_experts(runner, x, weights, ids)
        stacks = {i: harness.experts_stacks(model, 2, i) for i in (0, 1)}
        assert_close("rank 256", reference(harness, runner.routed_experts, x, weights, ids, slots, stacks), got, LIMIT)


def test_shared_outer_bank_reads_one_factor(harness, tmp_path):
    """With enable_moe_shared_loras the stacks keep one outer factor, the bank knows, and the sum is the same."""
    config = harness.engine_config(harness.write_config(tmp_path / "m"), enable_moe_shared_loras=True)
    path = harness.write_adapter(tmp_path / "a", "shared")
    with harness.built(config) as (model, manager):
        manager.add_adapter(harness.request(path))
        runner = model.moe_layers[0]
        bank = runner.routed_experts.quant_method.moe_kernel.impl.fused_experts.bank
        assert bank.shared_a and bank.shared_b
        x, slots = (torch.randn(5, harness.H) * 0.5).half(), [0, -1, 0, 0, -1]
        weights, ids = harness.routing(5)
        harness.set_slots(manager, slots)
        got = harness.run_experts(runner, x, weights, ids)
        stacks = {k: v.expand(harness.E, -1, -1) for k, v in harness.experts_stacks(model, 2, 0).items()}
        want = reference(harness, runner.routed_experts, x, weights, ids, slots, {0: stacks})
        assert_close("shared outer", want, got, LIMIT)


def test_mxfp8_base_with_adapters(harness, tmp_path, monkeypatch):
    """Online MXFP8 weights, an adapter and bare rows, against the dequantised weights."""
    from beam_moe.kernels.mxfp8 import MXFP8Tensor, dequantize_reference

    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS", "HummingMxfp8LinearKernel,MarlinMxfp8LinearKernel,TorchMxFp8LinearKernel"
    )
    path = harness.write_adapter(tmp_path / "a", "per_expert")
    with harness.built(harness.engine_config(harness.write_config(tmp_path / "m"), quantization="mxfp8")) as (
        model,
        manager,
    ):
        manager.add_adapter(harness.request(path))
        runner = model.moe_layers[0]
        layer = runner.routed_experts
        dense = SimpleNamespace(
            **{
                n: dequantize_reference(
                    MXFP8Tensor(getattr(layer, n).data, getattr(layer, f"{n}_scale").data), torch.float32
                )
                for n in ("w13_weight", "w2_weight")
            }
        )
        x, slots = (torch.randn(4, harness.H) * 0.5).half(), [0, -1, 0, -1]
        weights, ids = harness.routing(4)
        harness.set_slots(manager, slots)
        got = harness.run_experts(runner, x, weights, ids)
        stacks = {0: harness.experts_stacks(model, 2, 0)}
        assert_close("MXFP8 experts", reference(harness, dense, x, weights, ids, slots, stacks), got, LIMIT)


def test_other_models_are_served_when_asked(harness, tmp_path, monkeypatch):
    """BEAM_MOE_VLLM=all puts the same experts under Qwen3-MoE; without it vLLM's own stay."""
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.custom_op import op_registry_oot

    from beam_moe.integrations.vllm import other_models

    monkeypatch.setattr(LoRAModelManager, "_create_lora_modules", LoRAModelManager._create_lora_modules)  # taken back
    path = harness.write_config(tmp_path / "q", harness.QWEN)
    with harness.built(harness.engine_config(path)) as (model, _):
        names = {type(m.routed_experts.quant_method.moe_kernel.impl.fused_experts).__name__ for m in runners(model)}
        assert names == {"TritonExperts"}
    monkeypatch.setenv("BEAM_MOE_VLLM", "all")
    other_models.register()
    try:
        with harness.built(harness.engine_config(path)) as (model, manager):
            runner = runners(model)[0]
            experts = runner.routed_experts.quant_method.moe_kernel.impl.fused_experts
            assert type(experts).__name__ == "BeamTritonExperts" and experts.routed_scaling == 1.0
            x, (weights, ids) = (torch.randn(3, harness.H) * 0.5).half(), harness.routing(3)
            harness.set_slots(manager, [-1] * 3)
            got = harness.run_experts(runner, x, weights, ids)
            want = reference(harness, runner.routed_experts, x, weights, ids, [-1] * 3, {}, scaling=1.0)
            assert_close("Qwen3 experts", want, got, LIMIT)
    finally:
        op_registry_oot.pop(other_models.NAME, None)


@pytest.mark.parametrize("asked", ["dense", "beam_mxfp8", "not ours"])
def test_warm_up_of_other_models(harness, tmp_path, monkeypatch, experts_module, asked):
    """By vLLM's own registry, once for all layers: what the same warm-up compiles for Beam, adapters or none."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.warmup import jit_warmup

    from beam_moe.integrations.vllm import other_models

    monkeypatch.setenv("BEAM_MOE_VLLM", "beam" if asked == "not ours" else "Qwen3MoeForCausalLM")
    monkeypatch.setenv("BEAM_MOE_VLLM_TOKENS", "40")
    monkeypatch.setenv("BEAM_MOE_VLLM_LORA_TOKENS", "50")
    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS", "HummingMxfp8LinearKernel,MarlinMxfp8LinearKernel,TorchMxFp8LinearKernel"
    )
    monkeypatch.setitem(op_registry_oot, other_models.NAME, other_models.BeamMoEMethod)
    path = harness.write_config(tmp_path / "q", harness.QWEN, num_hidden_layers=2)
    options = {"quantization": asked} if asked == "beam_mxfp8" else {}
    config = harness.engine_config(path, max_num_batched_tokens=64, **options)
    registry, ours, vllms = jit_warmup.JitWarmupRegistry(config), [], []
    monkeypatch.setattr(
        experts_module, "fused_moe", lambda x, *a, lora, **k: ours.append((len(x), lora is not None, k["lora_ids"]))
    )
    monkeypatch.setattr(experts_module.TritonExperts, "apply", lambda self, **k: vllms.append(len(k["hidden_states"])))
    with registry.activate(), harness.built(config) as (model, manager):
        runner, other = runners(model)
        kernels = [k for k in registry._registrations if isinstance(k, experts_module.ExpertsWarmup)]
        if asked == "not ours":
            assert kernels == []
            return
        assert len(kernels) == len(registry) == 1
        registry.warmup()
        assert kernels[0].runners == [runner, other]
        experts = experts_module.experts_of(runner)
        keys = experts_module.ExpertsWarmup([runner], 64).get_warmup_keys()
        limits = [min(experts.limit(lora), 64) for lora in (False, True)]
        assert limits == ([64, 64] if asked == "beam_mxfp8" else [40, 50])
        assert {n <= limits[lora] for n, lora in keys} == {True, limits == [64, 64]}
        assert [(n, lora) for n, lora, _ in ours] == [(n, lora) for n, lora in keys if n <= limits[lora]]
        assert vllms == [n for n, lora in keys if n > limits[lora]]
        assert {int(ids.max()) for n, lora, ids in ours if lora and n > 1} == {-1}, "the map is back as it was"

        def of(n):
            w1, w2 = runner.routed_experts.w13_weight, runner.routed_experts.w2_weight
            return experts.config(n, harness.TOP_K, w1, w2), (n * harness.TOP_K - 1).bit_length()

        assert {of(n) for n, _, _ in ours} == {of(n) for n in range(1, max(limits) + 1)}


def runners(model):
    from vllm.model_executor.layers.fused_moe import MoERunner

    return [m for m in model.modules() if isinstance(m, MoERunner)]
