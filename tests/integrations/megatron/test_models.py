"""Registration beside upstream's bridges, and another model by description alone."""

import pytest
import torch

from beam_moe.testing import assert_close


def qwen(folder, ep=1, tp=1):
    import megatron_ranks as m
    import torch.distributed as dist
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from beam_moe.integrations.megatron import QWEN3_MOE, mxfp8_recipe, register, register_model
    from beam_moe.integrations.megatron.linears import GroupedLinear

    register()
    stepped_aside = not register_model(QWEN3_MOE)
    assert register_model(QWEN3_MOE, replace_upstream=True)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=64,
    )
    hf = Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for n, p in hf.named_parameters():
            p.copy_(1 + 0.1 * torch.randn(p.shape) if "norm" in n else torch.randn(p.shape) * 0.08)
    path = str(folder / "hf")
    if dist.get_rank() == 0:
        hf.save_pretrained(path)
    dist.barrier()
    bridge, _, chunks = m.load(path, ep=ep, tp=tp, quant_recipe=mxfp8_recipe(["*layers.1.mlp.experts*"]))
    experts = {n: x for n, x in chunks[0].named_modules() if isinstance(x, GroupedLinear)}
    formats = {n: x.mxfp8 for n, x in experts.items()}
    for x in experts.values():
        x.mxfp8 = False
    disk = load_file(f"{path}/model.safetensors")
    exported = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
    wrong = [n for n in disk if n not in exported or not torch.equal(disk[n], exported[n])]
    with torch.no_grad():
        want = hf(m.tokens()).logits
    return stepped_aside, formats, wrong, want, m.run(chunks, m.tokens())


@pytest.mark.parametrize("layout, world", [({}, 1), ({"ep": 2}, 2)], ids=["one", "ep2"])
def test_qwen3_moe_by_description(ranks, layout, world):
    for stepped_aside, formats, wrong, want, got in ranks("qwen", world, **layout):
        assert stepped_aside, "megatron-bridge has a bridge for it"
        assert len(formats) == 4 and all(on == (".layers.1." in n) for n, on in formats.items())
        assert not wrong
        assert_close("logits", want, got, 1e-5)


def upstream(folder):
    from megatron.bridge.models.conversion import model_bridge
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.core.models.gpt.gpt_model import GPTModel

    import beam_moe.integrations.megatron as integration

    class Theirs(MegatronModelBridge):
        def mapping_registry(self):
            raise NotImplementedError

    MegatronModelBridge.register_bridge(source="BeamForCausalLM", target=GPTModel, model_type="beam")(Theirs)
    ours = integration.register()
    return ours, type(model_bridge.get_model_bridge._exact_types["BeamForCausalLM"](None)).__name__


def test_steps_aside_for_an_upstream_beam(ranks):
    ((ours, bridge),) = ranks("upstream")
    assert not ours and bridge == "Theirs"


def our_config(folder):
    from transformers import AutoConfig

    from beam_moe.integrations.megatron.config import BeamConfig, register_config

    register_config()
    ours = BeamConfig(num_hidden_layers=7, sliding_window=64)
    ours.save_pretrained(folder / "hf")
    again = AutoConfig.from_pretrained(folder / "hf")
    messages = []
    for bad in ({"num_attention_heads": 7}, {"layer_types": ["full_attention"]}):
        with pytest.raises(ValueError) as e:
            BeamConfig(**bad)
        messages.append(str(e.value))
    try:
        from transformers import BeamConfig as Theirs
    except ImportError:
        return None, None, None, messages
    theirs = Theirs(num_hidden_layers=7, sliding_window=64)
    keys = set(vars(theirs)) & set(vars(ours)) - {"transformers_version", "architectures", "dtype"}
    different = {k: (getattr(ours, k), getattr(theirs, k)) for k in keys if getattr(ours, k) != getattr(theirs, k)}
    fields = {k for k in theirs.to_dict() if not hasattr(ours, k)}
    return different, fields, again.to_dict() == theirs.to_dict(), messages


def test_our_config_is_transformers_beam_config(ranks):
    ((different, missing, same, messages),) = ranks("our_config")
    assert "num_attention_heads=7" in messages[0] and "layer_types" in messages[1]
    if different is None:
        pytest.skip("this transformers has no Beam")
    assert not different and not missing
