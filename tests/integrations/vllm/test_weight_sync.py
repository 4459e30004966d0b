"""Weights from memory into a running engine: adapters in place, routers checked, KV of old weights never reused."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from beam_moe.weight_sync import check_routers, checksum, declare_routers, rounded_to_bf16

LIMIT = 2e-3
CONFIG = {"r": 4, "lora_alpha": 8}


class Engine:
    """`LLM` and `AsyncLLM` as far as a trainer uses them: calls every worker, resets the prefix cache."""

    def __init__(self, *workers):
        self.workers, self.resets, self.resettable = workers, 0, True

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [getattr(w, method)(*args, **(kwargs or {})) for w in self.workers]

    def reset_prefix_cache(self):
        self.resets += 1
        return self.resettable


class AsyncEngine(Engine):
    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return super().collective_rpc(method, timeout, args, kwargs)

    async def reset_prefix_cache(self):
        return super().reset_prefix_cache()


@pytest.fixture
def engine(harness, tmp_path):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from beam_moe.integrations.vllm.weight_sync import WeightSync

    config = harness.engine_config(harness.write_config(tmp_path / "m"))
    with harness.built(config) as (model, manager):

        class Worker(WeightSync):
            """The runner's part of `reload_weights`, on vLLM's real in-place reload."""

            model_runner = SimpleNamespace(lora_manager=manager, get_model=lambda: model)

            def reload_weights(self, weights_iterator):
                with set_current_vllm_config(config):
                    reload_weights(config, model, weights_iterator, None, True)
                manager.remove_all_adapters()

        yield SimpleNamespace(llm=Engine(Worker()), asynchronous=AsyncEngine(Worker()), model=model, manager=manager)


def difference(harness, engine, seed, shared=False):
    slot = engine.manager._adapter_manager.lora_index_to_id.index(1)
    want = harness.expected_stacks(2, 1, 0, shared, seed=seed)
    return harness.largest_difference(harness.experts_stacks(engine.model, 2, slot), want)


def test_adapter_from_memory_in_place(harness, engine):
    """Three versions, two layouts; buffers keep their storage, the caller's tensors their bits."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    sync = AdapterSync("policy", 1)
    with pytest.raises(ValueError, match="has not been sent"):
        _ = sync.request
    storage = {k: v.data_ptr() for k, v in harness.experts_stacks(engine.model, 2, 0).items()}
    paths = set()
    for seed, layout in ((0, "per_expert"), (5, "flat"), (9, "per_expert")):
        tensors = harness.adapter_tensors(layout, seed=seed)
        before = {k: v.clone() for k, v in tensors.items()}
        request = sync.update(engine.llm, tensors, CONFIG)
        assert all(torch.equal(before[k], v) for k, v in tensors.items()), "alpha / r was folded into live tensors"
        paths.add(request.lora_path)
        assert engine.manager.add_adapter(request), "a request must find the adapter, not look for a file"
        assert difference(harness, engine, seed) < LIMIT
    assert len(paths) == 3, "vLLM's block hashes know a version by its path alone"
    assert storage == {k: v.data_ptr() for k, v in harness.experts_stacks(engine.model, 2, 0).items()}


def test_async_engine(harness, engine):
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    sync = AdapterSync("policy", 1)
    request = asyncio.run(sync.update_async(engine.asynchronous, harness.adapter_tensors("shared", seed=3), CONFIG))
    assert request.lora_path.endswith("/policy/1") and difference(harness, engine, 3, shared=True) < LIMIT


def test_block_hashes_tell_versions_apart(harness, engine):
    """vLLM's own hash of a request: equal within a version, other after an update."""
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    sync, keys = AdapterSync("policy", 1), []
    for seed in (0, 1):
        sync.update(engine.llm, harness.adapter_tensors("per_expert", seed=seed), CONFIG)
        keys += [_gen_lora_extra_hash_keys(SimpleNamespace(lora_request=sync.request)) for _ in range(2)]
    assert keys[0] == keys[1] != keys[2] == keys[3]


@pytest.mark.parametrize(
    "broken, message", [("router", "is a router"), ("unknown", "no layer takes"), ("rank", "max_lora_rank")]
)
def test_a_bad_adapter_leaves_the_loaded_one(harness, engine, broken, message):
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    sync = AdapterSync("policy", 1)
    sync.update(engine.llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
    tensors = harness.adapter_tensors("per_expert", seed=1, router=broken == "router")
    if broken == "unknown":
        tensors["base_model.model.model.layers.0.mlp.other_proj.lora_A.weight"] = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=message):
        sync.update(engine.llm, tensors, {"r": 64, "lora_alpha": 64} if broken == "rank" else CONFIG)
    assert difference(harness, engine, 0) < LIMIT and sync.generation == 1


def test_large_adapters_come_in_pieces(harness):
    from safetensors.torch import load

    from beam_moe.integrations.vllm.weight_sync import pieces

    tensors = {f"t{i}": torch.full((8, 8), float(i)) for i in range(5)}
    parts = [load(p) for p in pieces(tensors, limit=600)]
    assert [sorted(p) for p in parts] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    shared = torch.arange(8.0)
    both = load(next(pieces({"a": shared, "b": shared[4:]})))
    assert torch.equal(both["b"], shared[4:])


# --- base weights


def checkpoint(harness, seed=0) -> dict[str, torch.Tensor]:
    """Every weight of the tiny Beam by checkpoint name; routers in float32."""
    h, i, d, e = harness.H, harness.I, harness.D, harness.E
    q, kv = harness.HEADS * harness.HEAD, harness.KV * harness.HEAD
    g = torch.Generator().manual_seed(seed)

    def new(*shape, dtype=torch.float16):
        return (torch.randn(shape, generator=g) * 0.1).to(dtype)

    out = {"model.embed_tokens.weight": new(256, h), "lm_head.weight": new(256, h), "model.norm.weight": new(h)}
    for layer in range(harness.LAYERS):
        p = f"model.layers.{layer}."
        for name in ("input", "pre_feedforward", "post_attention", "post_feedforward"):
            out[f"{p}{name}_layernorm.weight"] = new(h)
        for name, rows, cols in (("q", q, h), ("k", kv, h), ("v", kv, h), ("gate", q, h), ("o", h, q)):
            out[f"{p}self_attn.{name}_proj.weight"] = new(rows, cols)
        out[f"{p}self_attn.q_norm.weight"], out[f"{p}self_attn.k_norm.weight"] = new(harness.HEAD), new(harness.HEAD)
        out[f"{p}self_attn.gate_bias"] = new(harness.HEADS)
        if layer < harness.DENSE:
            out[f"{p}mlp.gate_proj.weight"], out[f"{p}mlp.up_proj.weight"] = new(d, h), new(d, h)
            out[f"{p}mlp.down_proj.weight"] = new(h, d)
            continue
        out[f"{p}mlp.gate.weight"] = new(e, h, dtype=torch.float32)
        out[f"{p}mlp.gate.e_score_correction_bias"] = new(e, dtype=torch.float32)
        for x in range(e):
            out[f"{p}mlp.experts.{x}.gate_proj.weight"] = new(i, h)
            out[f"{p}mlp.experts.{x}.up_proj.weight"] = new(i, h)
            out[f"{p}mlp.experts.{x}.down_proj.weight"] = new(h, i)
    return out


def test_full_reload_keeps_fp32_routers_and_adapters(harness, engine):
    """Real in-place reload under LoRA: router bits arrive, experts are the new ones, the adapter is still there."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync, sync_weights

    sync = AdapterSync("policy", 1)
    sync.update(engine.llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
    state = checkpoint(harness)
    w13 = engine.model.moe_layers[0].routed_experts.w13_weight
    address = w13.data_ptr()
    sync_weights(engine.llm, state, declare_routers(state))
    assert engine.llm.resets == 1
    block = engine.model.model.layers[2].mlp
    assert torch.equal(block.gate.base_layer.weight, state["model.layers.2.mlp.gate.weight"])
    bias = block.gate.base_layer.e_score_correction_bias
    assert bias.dtype == torch.float32 and torch.equal(bias, state["model.layers.2.mlp.gate.e_score_correction_bias"])
    layer = engine.model.moe_layers[0].routed_experts
    assert layer.w13_weight.data_ptr() == address, "a captured graph reads the old address"
    assert torch.equal(layer.w13_weight[3, : harness.I], state["model.layers.2.mlp.experts.3.gate_proj.weight"])
    assert torch.equal(layer.w13_weight[3, harness.I :], state["model.layers.2.mlp.experts.3.up_proj.weight"])
    assert difference(harness, engine, 0) < LIMIT
    experts = layer.quant_method.moe_kernel.impl.fused_experts
    slot = engine.manager._adapter_manager.lora_index_to_id.index(1)
    assert experts.ranks[slot] == 4 and experts.bank.enabled[slot] == 1


def test_weights_that_do_not_arrive_are_an_error(harness, engine):
    """vLLM only warns; an expert under a name its loader does not know would leave the engine on old weights."""
    from beam_moe.integrations.vllm.weight_sync import sync_weights

    state = checkpoint(harness)
    lost = {k: v for k, v in state.items() if "layers.2.mlp.experts" not in k}
    with pytest.raises(ValueError, match=r"kept old weights.*layers\.2\.mlp\.experts"):
        sync_weights(engine.llm, lost, declare_routers(lost))
    peft = {k.replace("_proj.weight", "_proj.base_layer.weight"): v for k, v in state.items()}
    sync_weights(
        engine.llm, {f"base_model.model.{k}": v for k, v in peft.items() if "mlp.gate." not in k} | routers(state)
    )
    layer = engine.model.moe_layers[0].routed_experts
    assert torch.equal(layer.w2_weight[5], state["model.layers.2.mlp.experts.5.down_proj.weight"])


def routers(state):
    return {k: v for k, v in state.items() if "mlp.gate." in k}


def test_rounded_routers_are_refused_by_name(harness, engine):
    from beam_moe.integrations.vllm.weight_sync import sync_weights

    state = checkpoint(harness)
    declared = declare_routers(state)
    assert len(declared) == 4
    before = engine.model.model.layers[2].mlp.gate.base_layer.weight.clone()
    name = "model.layers.2.mlp.gate.weight"
    with pytest.raises(ValueError, match=rf"{name} arrived is torch.bfloat16"):
        sync_weights(engine.llm, {**state, name: state[name].bfloat16()}, declared)
    with pytest.raises(ValueError, match=rf"{name} arrived has checksum"):
        sync_weights(engine.llm, {**state, name: state[name].bfloat16().float()}, declared)
    with pytest.raises(ValueError, match=rf"{name} was declared bfloat16"):
        sync_weights(engine.llm, state, declare_routers({**state, name: state[name].bfloat16()}))
    with pytest.raises(ValueError, match=rf"{name} came without a declaration"):
        sync_weights(engine.llm, state, {k: v for k, v in declared.items() if k != name})
    assert torch.equal(before, engine.model.model.layers[2].mlp.gate.base_layer.weight), (
        "refused before anything is loaded"
    )
    engine.llm.resettable = False
    with pytest.raises(ValueError, match="prefix cache"):
        sync_weights(engine.llm, state, declared)


def test_a_router_that_no_rank_has(harness, engine):
    from beam_moe.integrations.vllm.weight_sync import sync_weights

    state = checkpoint(harness)
    declared = declare_routers(state)
    declared["model.layers.9.mlp.gate.weight"] = declared["model.layers.2.mlp.gate.weight"]
    with pytest.raises(ValueError, match=r"no rank has model\.layers\.9\.mlp\.gate\.weight"):
        sync_weights(engine.llm, state, declared)


def test_checksums():
    """Bits, not values: a rounded, negated-zero or reshaped tensor differs; a copy on another dtype's path does not."""
    t = torch.randn(3, 4)
    assert checksum(t) == checksum(t.clone().t().contiguous().t())
    assert checksum(t) != checksum(t.bfloat16()) and checksum(t) != checksum(t.reshape(4, 3))
    assert checksum(torch.zeros(2)) != checksum(-torch.zeros(2))
    assert rounded_to_bf16(t.bfloat16()) and not rounded_to_bf16(t)
    assert check_routers({}, {"model.layers.0.mlp.gate.weight": t}, "here") == []


def test_values_that_bf16_represents_only_warn(caplog):
    import logging

    name = "model.layers.0.mlp.gate.weight"
    t = torch.ones(2, 2)
    with caplog.at_level(logging.WARNING):
        assert check_routers(declare_routers({name: t}), {name: t}, "here") == [name]
    assert name in caplog.text


def test_report_names_the_kernel_of_each_layer(engine):
    [report] = engine.llm.collective_rpc("beam_moe_report")
    assert [r["layer"] for r in report["layers"]] == ["model.layers.2.mlp.experts", "model.layers.3.mlp.experts"]
    assert all(
        r["experts"] == "BeamTritonExperts" and r["ours_up_to_tokens"] == 512 and r["lora"] for r in report["layers"]
    )
    assert all(r["reason"] is None for r in report["layers"]) and isinstance(report["calls"], list)
