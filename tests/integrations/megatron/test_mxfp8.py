"""MXFP8 modules: chosen by the quantisation recipe, forward and backward through our kernels, weights unchanged."""

import pytest
import torch

from beam_moe.testing import assert_close, error_ratio

# Two layers and eight experts: every product runs in the interpreter
SMALL = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_attention_heads": 4,
    "num_experts": 8,
    "intermediate_size": 64,
}


def _swapped(chunks):
    from beam_moe.integrations.megatron.linears import GroupedLinear, _MXFP8Linear

    return {n: m.mxfp8 for n, m in chunks[0].named_modules() if isinstance(m, (GroupedLinear, _MXFP8Linear))}


def trained(folder, recipe, tp=1, ep=1, keep=()):
    """Logits, gradients by name, formats by module name and what the export gives back."""
    import megatron_ranks as m
    from safetensors.torch import load_file

    from beam_moe.integrations.megatron import mxfp8_recipe, replay

    path = m.checkpoint(m.reference(**SMALL), folder / "hf")
    fields = {"quant_recipe": mxfp8_recipe(recipe, keep=keep)} if recipe else {}
    bridge, _, chunks = m.load(path, tp=tp, ep=ep, moe_enable_routing_replay=True, **fields)
    # the same experts whatever the rounding: a near tie that falls the other way is no small difference
    replay.set_routes(chunks[0], torch.rand(1, 16, 2, 8).topk(4, -1)[1])
    logits = m.run(chunks, m.tokens(1, 16), backward=True)
    disk = load_file(f"{path}/model.safetensors")
    exported = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
    return {
        "logits": logits,
        "grads": {n: p.grad for n, p in chunks[0].named_parameters()},
        "formats": _swapped(chunks),
        "wrong": [n for n in disk if not torch.equal(disk[n], exported[n])],
    }


def test_recipe_chooses_modules_and_gradients_follow(ranks):
    (dense,) = ranks("trained", recipe=[])
    (mx,) = ranks("trained", recipe=["*"], keep=["*layers.0.*"])
    assert not mx["wrong"]
    on = {n for n, f in mx["formats"].items() if f}
    off = mx["formats"].keys() - on
    assert off and all(".layers.0." in n for n in off)
    for part in ("linear_qkv", "linear_proj", "experts.linear_fc1", "experts.linear_fc2"):
        assert any(n.endswith(part) for n in on), part
    assert not any(part in n for n in mx["formats"] for part in ("router", "embedding", "output_layer", "norm"))
    assert not any(dense["formats"].values())
    assert 1e-3 < error_ratio(dense["logits"], mx["logits"]) < 0.1
    for name, g in dense["grads"].items():
        if g is None or not g.any():
            assert mx["grads"][name] is None or not mx["grads"][name].any(), name
            continue
        ratio = error_ratio(g, mx["grads"][name])
        assert 1e-4 < ratio < 0.4, (name, ratio)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"ep": 2}], ids=["tp2", "ep2"])
def test_blocks_do_not_depend_on_the_layout(ranks, layout):
    """Shards are cut at whole blocks, so a sharded product sums the same quantised numbers."""
    recipe = ["*self_attention*", "*experts*"]
    (want,) = ranks("trained", recipe=recipe)
    for got in ranks("trained", 2, recipe=recipe, **layout):
        assert not got["wrong"]
        assert_close("logits", want["logits"], got["logits"], 1e-5)


def refused(folder, tp=1):
    import megatron_ranks as m
    from megatron.core.quantization.quant_config import GlobMatcher, RecipeConfig

    from beam_moe.integrations.megatron import mxfp8_recipe

    path = m.checkpoint(m.reference(**SMALL, moe_intermediate_size=48), folder / "hf")
    messages = []
    for recipe in (mxfp8_recipe(), RecipeConfig([GlobMatcher("*", "x")], {"x": {"format": "nvfp4"}})):
        with pytest.raises(ValueError) as e:
            m.load(path, quant_recipe=recipe)
        messages.append(str(e.value))
    return messages


def test_dimensions_and_formats_are_checked(ranks):
    ((dimension, unknown),) = ranks("refused")
    assert "32" in dimension and "48" in dimension and "experts.linear_fc2" in dimension
    assert "nvfp4" in unknown


def misspelt(folder, pp=1):
    import megatron_ranks as m

    from beam_moe.integrations.megatron import mxfp8_recipe

    path = m.checkpoint(m.reference(), folder / "hf")
    messages = []
    for recipe in (mxfp8_recipe(["*.exprts.*"]), mxfp8_recipe(["*experts*"], keep=["*layer.0*", "*layers.0.*"])):
        with pytest.raises(ValueError) as e:
            m.load(path, pp=pp, quant_recipe=recipe)
        messages.append(str(e.value))
    # `dense` is a layer of the first stage only; all of its modules match the pattern before it
    m.load(path, pp=pp, quant_recipe=mxfp8_recipe(["*.mlp.linear_fc1"], keep=["*"]))
    return messages


@pytest.mark.parametrize("pp", [1, 2])
def test_a_pattern_that_matches_nothing_is_refused(ranks, pp):
    for pattern, keep in ranks("misspelt", pp, pp=pp):
        assert "quant_recipe" in pattern and "['*.exprts.*']" in pattern
        assert "['*layer.0*']" in keep


def unvisited(folder, kind, mxfp8, ep=1):
    """Gradients where no token of a batch goes to an expert of the second expert parallel rank."""
    import megatron_ranks as m
    from megatron.bridge.peft.lora import LoRA

    from beam_moe.integrations.megatron import mxfp8_recipe, replay

    fields = {"quant_recipe": mxfp8_recipe(["*experts*"])} if mxfp8 else {}
    hooks = []
    if kind:
        lora = LoRA(dim=8, share_expert_adapters=False, experts_shared_outer_loras=kind == "shared_outer")
        hooks.append(lambda chunks: lora(chunks, training=True))
    path = m.checkpoint(m.reference(**SMALL), folder / "hf")
    _, _, chunks = m.load(path, ep=ep, hooks=hooks, moe_enable_routing_replay=True, **fields)
    replay.set_routes(chunks[0], torch.rand(1, 8, 2, 4).topk(4, -1)[1])  # experts 0..3 of 8
    logits = m.run(chunks, m.tokens(1, 8), backward=True)
    experts = {n: p.grad for n, p in chunks[0].named_parameters() if p.requires_grad and ".experts." in n}
    return logits, experts


@pytest.mark.parametrize("kind", ["", "per_expert", "shared_outer"])
@pytest.mark.parametrize("mxfp8", [False, True], ids=["bf16", "mxfp8"])
def test_a_rank_without_tokens_has_zeros_for_gradients(ranks, kind, mxfp8):
    first, second = ranks("unvisited", 2, kind=kind, mxfp8=mxfp8, ep=2)
    assert first[1] and torch.equal(first[0], second[0]) and bool(first[0].isfinite().all())
    assert any(g.any() for g in first[1].values())
    for name, g in second[1].items():
        assert g is not None and not g.any(), name


def adapted(folder):
    """LoRA on an MXFP8 base: the base's product is quantised, the adapter's is not."""
    import megatron_ranks as m
    from megatron.bridge.peft.lora import LoRA

    from beam_moe.integrations.megatron import mxfp8_recipe, replay

    path = m.checkpoint(m.reference(**SMALL), folder / "hf")
    routes = torch.rand(1, 16, 2, 8).topk(4, -1)[1]
    out = []
    for recipe in (None, mxfp8_recipe(["*experts*"])):
        lora = LoRA(target_modules=["*.experts.linear_fc1", "*.experts.linear_fc2"], dim=8, share_expert_adapters=False)

        def hook(chunks, lora=lora):
            chunks = lora(chunks, training=True)
            generator = torch.Generator().manual_seed(3)
            for n, p in chunks[0].named_parameters():
                if "linear_out" in n:
                    p.data.normal_(0, 0.05, generator=generator)
            return chunks

        _, _, chunks = m.load(path, hooks=[hook], quant_recipe=recipe, moe_enable_routing_replay=True)
        replay.set_routes(chunks[0], routes)
        logits = m.run(chunks, m.tokens(1, 16), backward=True)
        out.append((logits, {n: p.grad for n, p in chunks[0].named_parameters() if p.requires_grad}))
    return out


def test_lora_on_an_mxfp8_base(ranks):
    (((want, dense), (got, mx)),) = ranks("adapted")
    assert 1e-3 < error_ratio(want, got) < 0.1
    assert dense.keys() == mx.keys()
    for name, g in dense.items():
        assert error_ratio(g, mx[name]) < 0.3, name
