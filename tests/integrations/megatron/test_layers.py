"""Beam's layers: packed sequences, LM head, layer spec and the guard rails around it."""

from types import SimpleNamespace

import pytest
import torch

from beam_moe.testing import assert_close, error_ratio


def packed(folder):
    import megatron_ranks as m
    from megatron.core.packed_seq_params import PackedSeqParams

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    _, _, chunks = m.load(path)
    lengths, ids = [9, 24, 3], m.tokens(3)
    flat = torch.cat([row[:n] for row, n in zip(ids, lengths)])[None]
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    bounds = torch.tensor([0, 9, 33, 36], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=24, max_seqlen_kv=24
    )
    with torch.no_grad():
        got = chunks[0](flat, position, None, packed_seq_params=params)[0]
        want = torch.cat([ref(row[None, :n])[0] for row, n in zip(ids, lengths)])
    with pytest.raises(ValueError) as e:
        params.qkv_format = "sbhd"
        core = m.inner(chunks[0]).decoder.layers[0].self_attention.core_attention
        core(*torch.randn(3, 36, 1, 8, 16), None, packed_seq_params=params)
    return want, got, str(e.value)


def test_packed_sequences_start_at_position_zero(ranks):
    ((want, got, message),) = ranks("packed")
    assert_close("logits", want, got, 1e-5)
    assert "sbhd" in message


def masked(folder):
    import megatron_ranks as m

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    _, _, chunks = m.load(path)
    ids = m.tokens()
    position = torch.arange(24)[None].expand_as(ids)
    hidden = torch.triu(torch.ones(1, 1, 24, 24, dtype=torch.bool), 1)
    shut = hidden.clone()
    shut[..., 20:, :4] = True  # the last rows do not see the first tokens
    with torch.no_grad():
        return [chunks[0](ids, position, mask) for mask in (None, hidden, shut)]


def test_an_attention_mask_is_combined_with_the_causal_one(ranks):
    ((plain, causal, shut),) = ranks("masked")
    torch.testing.assert_close(causal, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(shut[:, :20], plain[:, :20], rtol=0, atol=1e-6)
    assert error_ratio(plain[:, 20:], shut[:, 20:]) > 1e-3


def heads(folder):
    import megatron_ranks as m

    path = m.checkpoint(m.reference(), folder / "hf")
    out = []
    for fp32 in (True, False):
        _, _, chunks = m.load(path, dtype=torch.bfloat16, lm_head_fp32=fp32)
        head = m.inner(chunks[0]).output_layer
        hidden = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(2)).bfloat16() * 4
        with torch.no_grad():
            logits, _ = head(hidden)
        z = hidden.float() @ head.weight.float().T
        out.append((logits, 30 * torch.tanh(z / 30)))
    return out


def test_lm_head_caps_logits_and_does_not_round_them(ranks):
    (((exact, want), (rounded, _)),) = ranks("heads")
    assert exact.dtype == torch.float32 and exact.abs().max() < 30
    assert_close("fp32 head", want, exact, 1e-6)
    assert 1e-4 < error_ratio(want, rounded) < 1e-2


CHANGES = {
    "fp8": "e4m3",
    "add_bias_linear": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "bias_activation_fusion": True,
    "use_te_activation_func": False,
    "moe_router_fusion": True,
    "moe_expert_capacity_factor": 1.0,
    "moe_input_jitter_eps": 0.01,
    "moe_router_force_load_balancing": True,
    "moe_shared_expert_overlap": True,
    "context_parallel_size": 2,
    "hybrid_context_parallel": True,
    "gradient_accumulation_fusion": True,
    "expert_tensor_parallel_size": 2,
    "moe_router_group_topk": 1,
    "mtp_num_layers": 1,
}


def guards(folder):
    import megatron_ranks as m

    from beam_moe.integrations.megatron import get_beam_layer_spec

    path = m.checkpoint(m.reference(), folder / "hf")
    _, provider, _ = m.load(path)
    messages = {}
    for name, value in CHANGES.items():
        before = getattr(provider, name)
        setattr(provider, name, value)
        with pytest.raises(ValueError) as e:
            get_beam_layer_spec(provider)
        messages[name] = str(e.value)
        setattr(provider, name, before)
    provider.cross_entropy_loss_fusion, provider.cross_entropy_fusion_impl = True, "linear"
    with pytest.raises(ValueError) as e:
        get_beam_layer_spec(provider)
    messages["cross_entropy_fusion_impl"] = str(e.value)
    provider.cross_entropy_loss_fusion = False
    provider.recompute_granularity, provider.recompute_modules = "selective", ["core_attn", "moe_act"]
    with pytest.raises(ValueError) as e:
        get_beam_layer_spec(provider)
    messages["recompute_modules"] = str(e.value)
    provider.recompute_modules = ["core_attn", "moe"]
    get_beam_layer_spec(provider)
    with pytest.raises(ImportError) as e:
        get_beam_layer_spec(provider, use_transformer_engine=True)
    messages["use_transformer_engine"] = str(e.value)
    yarn = {"sliding_attention": {"rope_type": "yarn", "rope_theta": 1.0}, "full_attention": None}
    for hf in ({"rope_parameters": yarn}, {"norm_topk_prob": False}):
        from beam_moe.integrations.megatron.bridge import BEAM

        config = m.reference().config
        for k, v in hf.items():
            setattr(config, k, v)
        with pytest.raises(ValueError) as e:
            BEAM.provider_fields(config)
        messages[next(iter(hf))] = str(e.value)
    return messages


def test_each_guard_rail_names_its_field(ranks):
    (messages,) = ranks("guards")
    for name, message in messages.items():
        assert name in message or (name == "rope_parameters" and "rope_type" in message), (name, message)
        if name in CHANGES and name != "moe_router_group_topk":
            assert repr(CHANGES[name]) in message, message


def grouped_guards(folder):
    import types

    import megatron_ranks as m

    from beam_moe.integrations.megatron.linears import ColumnParallelGroupedLinear

    path = m.checkpoint(m.reference(), folder / "hf")
    _, provider, chunks = m.load(path)
    groups = next(x for x in chunks[0].modules() if isinstance(x, ColumnParallelGroupedLinear))._pg_collection
    make = lambda **k: ColumnParallelGroupedLinear(  # noqa: E731
        2,
        64,
        64,
        **{"config": provider, "init_method": torch.nn.init.zeros_, "bias": False, "pg_collection": groups, **k},
    )
    make()
    two = types.SimpleNamespace(expt_tp=types.SimpleNamespace(size=lambda: 2), ep=groups.ep, expt_dp=groups.expt_dp)
    messages = []
    for change in ({"bias": True}, {"pg_collection": two}):
        with pytest.raises(ValueError) as e:
            make(**change)
        messages.append(str(e.value))
    return messages


def test_grouped_experts_refuse_what_they_cannot_do(ranks):
    ((bias, etp),) = ranks("grouped_guards")
    assert "bias" in bias and "expert_tensor_parallel_size" in etp


def versions(folder):
    import megatron_ranks  # noqa: F401

    from beam_moe.integrations.megatron import compat

    compat.check_versions()
    compat.SUPPORTED["megatron-core"] = ("0.21", "0.22")
    with pytest.raises(ImportError) as e:
        compat.check_versions()
    return str(e.value)


def test_other_versions_are_refused(ranks):
    (message,) = ranks("versions")
    assert "megatron-core>=0.21,<0.22; found 0.19.2" in message


def views(folder):
    import megatron_ranks as m

    from beam_moe.integrations.megatron.linears import GroupedLinear

    path = m.checkpoint(m.reference(), folder / "hf")
    _, _, chunks = m.load(path)
    layer = next(x for x in chunks[0].modules() if isinstance(x, GroupedLinear))
    stacked = layer.stacked()
    shared = stacked.data_ptr() == layer.weight0.data_ptr()
    seed = torch.randn_like(stacked)
    stacked.backward(seed)
    grads = torch.stack([getattr(layer, f"weight{i}").grad for i in range(layer.num_gemms)])
    layer.weight1.data = layer.weight1.data.clone()  # as DDP's buffer does
    copied = layer.stacked()
    same = torch.equal(stacked, copied) and copied.data_ptr() != layer.weight0.data_ptr()
    return shared, torch.equal(grads, seed), same


def test_expert_weights_are_stacked_without_a_copy_where_they_lie_together(ranks):
    ((shared, grads, copied),) = ranks("views")
    assert shared and grads and copied


def te_names(folder):
    """The module that takes Transformer Engine's place in its spec has its parameter names and its result."""
    import megatron_ranks as m
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    import beam_moe.integrations.megatron.spec as spec_module
    from beam_moe.integrations.megatron.linears import MXFP8ColumnParallelLinear, MXFP8LayerNormColumnParallelLinear

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    original = spec_module.get_moe_layer_spec

    def fused(config, vp_stage=None, **kwargs):
        spec = original(config, vp_stage, **kwargs)
        for layer in spec.layer_specs:
            layer.submodules.input_layernorm = IdentityOp
            attention = layer.submodules.self_attention.submodules
            assert attention.linear_qkv in (ColumnParallelLinear, MXFP8ColumnParallelLinear)
            attention.linear_qkv = MXFP8LayerNormColumnParallelLinear
        return spec

    spec_module.get_moe_layer_spec = fused
    bridge, _, chunks = m.load(path)
    names = {n.split("layers.0.")[1] for n, _ in chunks[0].named_parameters() if "layers.0." in n}
    exported = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
    disk = ref.state_dict()
    with torch.no_grad():
        want = ref(m.tokens())
    equal = all(torch.equal(exported[n], t) for n, t in disk.items())
    return (
        sorted(n for n in names if "linear_qkv" in n or "input_layernorm" in n),
        equal,
        want,
        m.run(chunks, m.tokens()),
    )


def test_norm_and_linear_under_transformer_engines_names(ranks):
    ((names, equal, want, got),) = ranks("te_names")
    assert names == ["self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight"]
    assert equal
    assert_close("logits", want, got, 1e-5)


@pytest.mark.parametrize("tokens", [3, 5])
def test_padding_rows_are_not_counted_as_an_experts_tokens(tokens):
    """Row by row, also where a batch has as many tokens as there are experts; evaluation counts nothing."""
    from beam_moe.integrations.megatron.layers import BeamTopKRouter

    routing = torch.arange(tokens)[:, None] % 3 == 2 - torch.arange(3)
    padding = torch.arange(tokens) == 0
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(3))
    with torch.no_grad():
        BeamTopKRouter._apply_expert_bias(router, routing)
    assert not router.local_tokens_per_expert.any()
    BeamTopKRouter._apply_expert_bias(router, routing)
    BeamTopKRouter._apply_expert_bias(router, routing, padding)
    want = routing.sum(0) + routing[1:].sum(0)
    assert torch.equal(router.local_tokens_per_expert, want.float())


def te_attention(folder):
    """What reaches Transformer Engine's attention, here a stand-in, on a layer with and one without RoPE."""
    import megatron_ranks  # noqa: F401
    from megatron.core.extensions import transformer_engine as te

    import beam_moe.integrations.megatron.spec as spec_module

    class StandIn(torch.nn.Module):
        def __init__(self, config, layer_number):
            super().__init__()
            self.config, self.layer_number = config, layer_number

        def forward(self, *args, packed_seq_params=None, **kwargs):
            return args

    te.TEDotProductAttention = StandIn
    attention, _ = spec_module._te_classes()
    config = SimpleNamespace(no_rope_freq=[0, 1])
    q, k, v = torch.randn(3, 24, 2, 4, 16)
    return q, k, [attention(config, number)(q, k, v.bfloat16(), None) for number in (1, 2)]


def test_transformer_engines_attention_gets_scaled_queries_rounded_once(ranks):
    ((q, k, (windowed, full)),) = ranks("te_attention")
    scale = ((1 + (torch.arange(24) + 1) / 2048) ** 0.1).view(-1, 1, 1, 1)
    for got, want in ((windowed, q), (full, q * scale)):
        assert [t.dtype for t in got[:3]] == [torch.bfloat16] * 3 and got[3] is None
        assert_close("queries", want, got[0], 4e-3)
        assert torch.equal(got[1], k.bfloat16())
