"""Weights on their way to the engine: per-name types, router bit for bit, MXFP8 ready made, adapters alone."""

import pytest
import torch

from beam_moe.testing import error_ratio


def sent(folder, tp=1, pp=1, ep=1):
    import megatron_ranks as m

    from beam_moe.integrations.megatron.sync import WeightSource
    from beam_moe.weight_sync import check_routers, declare_routers

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    bridge, _, chunks = m.load(path, tp=tp, pp=pp, ep=ep, dtype=torch.bfloat16)
    source = WeightSource(bridge, chunks, mxfp8=["*.experts.*.down_proj.weight"])
    tensors = [(n, t.clone()) for n, t in source]
    meta = source.metadata()
    assert [(n, t.dtype, tuple(t.shape)) for n, t in tensors] == [tuple(x) for x in meta]
    disk = ref.state_dict()
    return {
        "tensors": dict(tensors),
        "disk": disk,
        "compared": check_routers(declare_routers(tensors), disk, "in the engine"),
    }


@pytest.mark.parametrize("layout, world", [({}, 1), ({"pp": 2}, 2), ({"ep": 2}, 2)], ids=["one", "pp2", "ep2"])
def test_each_tensor_keeps_its_type(ranks, layout, world):
    for r in ranks("sent", world, **layout):
        ours, disk = r["tensors"], r["disk"]
        assert len(r["compared"]) == 2 * 3
        quantized = {n.removesuffix("_scale") for n in ours if n.endswith("_scale")}
        assert quantized == {n for n in disk if ".experts." in n and "down_proj" in n}
        assert ours.keys() - {n + "_scale" for n in quantized} == disk.keys()
        for name, t in disk.items():
            if ".mlp.gate." in name:
                assert torch.equal(ours[name], t) and ours[name].dtype == torch.float32
            elif name in quantized:
                assert ours[name].dtype == torch.float8_e4m3fn and ours[name + "_scale"].dtype == torch.uint8
                scale = (ours[name + "_scale"].float() - 127).exp2().repeat_interleave(32, -1)
                assert 1e-3 < error_ratio(t, ours[name].float() * scale) < 0.06
            else:
                assert torch.equal(ours[name], t.bfloat16())


def refused(folder):
    import megatron_ranks as m

    from beam_moe.integrations.megatron.sync import WeightSource

    path = m.checkpoint(m.reference(), folder / "hf")
    bridge, _, chunks = m.load(path, dtype=torch.bfloat16)
    messages = []
    for patterns in (["*.nothing"], ["*.mlp.gate.weight"], ["model.norm.weight"]):
        with pytest.raises(ValueError) as e:
            list(WeightSource(bridge, chunks, mxfp8=patterns))
        messages.append(str(e.value))
    router = next(x for x in m.inner(chunks[0]).modules() if type(x).__name__ == "BeamTopKRouter")
    router.weight.data = router.weight.data.bfloat16()
    with pytest.raises(ValueError) as e:
        list(WeightSource(bridge, chunks))
    return [*messages, str(e.value)]


def test_a_rounded_router_is_not_sent(ranks):
    ((unused, quantized, vector, rounded),) = ranks("refused")
    assert "*.nothing" in unused
    assert "mlp.gate.weight" in quantized
    assert "model.norm.weight" in vector
    assert "bfloat16" in rounded and "mlp.gate.weight" in rounded


def adapters(folder, kind, ep=1):
    import megatron_ranks as m
    from megatron.bridge.peft.lora import LoRA

    from beam_moe import BeamMoEConfig, load_adapter
    from beam_moe.integrations.megatron.sync import AdapterSource, WeightSource

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    lora = LoRA(dim=8, alpha=32, **{kind: kind == "experts_shared_outer_loras"})
    bridge, _, chunks = m.load(path, ep=ep, dtype=torch.bfloat16, hooks=[lambda c: lora(c, training=True)])
    source = AdapterSource(bridge, chunks)
    tensors = dict(source)
    assert [tuple(x) for x in source.metadata()] == [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]
    banks = load_adapter(tensors, BeamMoEConfig.from_hf(ref.config), peft_config=source.peft_config).experts
    base = dict(WeightSource(bridge, chunks, merge_adapters=False))
    same = all(torch.equal(base[n], t if ".mlp.gate." in n else t.bfloat16()) for n, t in ref.state_dict().items())
    experts = {n.split(".experts.")[1]: tuple(t.shape) for n, t in tensors.items() if ".layers.2.mlp.experts." in n}
    return sorted(banks), {t.dtype for t in tensors.values()}, source.peft_config, same, experts


@pytest.mark.parametrize("kind", ["share_expert_adapters", "experts_shared_outer_loras"])
def test_adapter_alone(ranks, kind):
    for layers, dtypes, config, same, experts in ranks("adapters", 2, kind=kind, ep=2):
        assert layers == [1, 2, 3] and dtypes == {torch.bfloat16}
        assert (config["r"], config["lora_alpha"]) == (8, 32.0)
        assert same
        if kind == "share_expert_adapters":  # False
            assert len(experts) == 16 * 3 * 2 and experts["3.gate_proj.lora_A.weight"] == (8, 64)
        else:  # the names by which vLLM loads shared factors
            gate = {"lora_A.weight": (1, 8, 64), "lora_B.weight": (16, 32, 8)}
            down = {"lora_A.weight": (16, 8, 32), "lora_B.weight": (1, 64, 8)}
            want = {"w1": gate, "w3": gate, "w2": down}
            assert experts == {f"{n}.{side}": shape for n, of in want.items() for side, shape in of.items()}
