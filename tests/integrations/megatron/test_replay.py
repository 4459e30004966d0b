"""Router replay: the engine's routes at PP 1 and 2, forward, recomputed and backward, for dense-first models."""

import os
import types

import pytest
import torch

from beam_moe.testing import assert_close, error_ratio


def _routes(ref, ids, unknown=()):
    """Random distinct experts for every token and MoE layer, ``(B, S, all layers, K)``; -1 in ``unknown`` tokens."""
    c = ref.config
    g = torch.Generator().manual_seed(7)
    shape = (*ids.shape, c.num_hidden_layers, c.num_experts)
    routes = torch.rand(shape, generator=g).topk(c.num_experts_per_tok, -1)[1]
    for t in unknown:
        routes[:, t] = -1
    return routes


def _reference(ref, ids, routes):
    """Loss, logits and gradients of the plain model under these routes."""
    for i, layer in enumerate(ref.model.layers):
        if ref.config.mlp_layer_types[i] == "sparse":
            layer.mlp.replay = routes[:, :, i].flatten(0, 1)
    logits = ref(ids)
    logits.logsumexp(-1).mean().backward()
    return logits.detach(), {n: p.grad for n, p in ref.named_parameters() if p.grad is not None}


def replayed(folder, tp=1, pp=1, recompute=False, columns="all", small=False):
    import megatron_ranks as m
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from beam_moe.integrations.megatron import replay

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    fields = {"moe_enable_routing_replay": True}
    if recompute:
        fields.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    bridge, _, chunks = m.load(path, tp=tp, pp=pp, **fields)
    batches = [m.tokens(), m.tokens().flip(1)]
    routes = [_routes(ref, batches[0]), _routes(ref, batches[1]).flip(1)]
    want = _reference(ref, batches[0], routes[0])[0], _reference(ref, batches[1], routes[1])[0]
    sent = [r[:, :, 1:] if columns == "moe" else r for r in routes]
    sent = [s.to(torch.uint8) for s in sent] if small else sent
    got, step_number = [], [0]

    def step(_, model):
        i = step_number[0]
        step_number[0] += 1
        ids = batches[i]
        position = torch.arange(ids.shape[1])[None].expand_as(ids)
        out = replay.forward(model, sent[i], ids, position, None)

        def loss(y):
            got.append(y.detach())
            return y.float().logsumexp(-1).mean(), {}

        return out, loss

    with replay.replaying(chunks):
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=chunks,
            num_microbatches=2,
            seq_length=24,
            micro_batch_size=2,
            forward_only=False,
        )
    layers = [layer for layer, _ in replay.stage_routers(chunks[0])]
    grads = {}
    for name, p in m.inner(chunks[0]).named_parameters():
        if "router.weight" in name and p.grad is not None:
            grads[layers[sum("router.weight" in n for n in grads)], "router.weight"] = p.grad * 2  # mean of two
    reference_grads = {
        i: layer.mlp.gate.weight.grad for i, layer in enumerate(ref.model.layers) if hasattr(layer.mlp, "gate")
    }
    left = [r.router_replay.target_topk_idx for _, r in replay.stage_routers(chunks[0])]
    return {"want": want, "got": got, "layers": layers, "grads": grads, "ref": reference_grads, "left": left}


CASES = [
    pytest.param({}, 1, id="pp1"),
    pytest.param({"recompute": True}, 1, id="pp1-recompute"),
    pytest.param({"pp": 2}, 2, id="pp2"),
    pytest.param({"pp": 2, "recompute": True, "columns": "moe", "small": True}, 2, id="pp2-recompute-moe-layers-uint8"),
]


@pytest.mark.parametrize("case, world", CASES)
def test_engine_routes_are_used(ranks, case, world):
    results = ranks("replayed", world, **case)
    assert [layer for r in results for layer in r["layers"]] == [1, 2, 3]  # layer 0 is dense
    last = results[-1]
    for want, got in zip(last["want"], last["got"]):
        assert_close("logits", want, got, 1e-5)
    for r in results:
        assert r["grads"] and all(t is None for t in r["left"])
        for (layer, name), g in r["grads"].items():
            assert_close(f"layer {layer} {name}", r["ref"][layer], g, 1e-4)


def unknown_rows(folder, tp=1):
    import megatron_ranks as m

    from beam_moe.integrations.megatron import replay

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    _, _, chunks = m.load(path, tp=tp, moe_enable_routing_replay=True)
    ids = m.tokens()
    position = torch.arange(ids.shape[1])[None].expand_as(ids)
    outs = []
    for routes in (None, torch.full((2, 24, 4, 4), -1), _routes(ref, ids, unknown=range(12, 24))):
        with torch.no_grad(), replay.replaying(chunks):
            outs.append(replay.forward(chunks[0], routes, ids, position, None))
    with torch.no_grad(), replay.recording(chunks) as chosen:
        chunks[0](ids, position, None)
    reference = ref(ids).detach()
    live = {
        i: layer.mlp.ids.view(2, 24, 4).transpose(0, 1).flatten(0, 1).sort(-1)[0]
        for i, layer in enumerate(ref.model.layers)
        if hasattr(layer.mlp, "ids")
    }
    return outs, reference, {k: v.sort(-1)[0] for k, v in chosen.items()}, live


def test_rows_without_a_route_are_routed_live(ranks):
    ((outs, reference, chosen, live),) = ranks("unknown_rows")
    free, all_unknown, half = outs
    torch.testing.assert_close(all_unknown, free, rtol=0, atol=0)
    assert error_ratio(free[:, :12], half[:, :12]) > 1e-2
    assert_close("free", reference, free, 1e-5)
    assert chosen.keys() == live.keys()
    assert all(torch.equal(chosen[k], live[k]) for k in live)


def sequence_parallel(folder, tp=1):
    import megatron_ranks as m

    from beam_moe.integrations.megatron import replay

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    _, _, chunks = m.load(path, tp=tp, moe_enable_routing_replay=True)
    ids = m.tokens()
    routes = _routes(ref, ids)
    replay.set_routes(chunks[0], routes)
    return m.run(chunks, ids), _reference(ref, ids, routes)[0]


def test_each_rank_takes_its_rows_under_sequence_parallelism(ranks):
    for got, want in ranks("sequence_parallel", 2, tp=2):
        assert_close("logits", want, got, 1e-5)


def guards(folder):
    import megatron_ranks as m

    from beam_moe.integrations.megatron import replay

    path = m.checkpoint(m.reference(), folder / "hf")
    _, _, chunks = m.load(path)
    messages = []
    with pytest.raises(ValueError) as e:
        replay.stage_routers(chunks[0])
    messages.append(str(e.value))
    _, _, chunks = m.load(path, moe_enable_routing_replay=True)
    for routes in (torch.zeros(2, 24, 5, 4, dtype=torch.int64), torch.zeros(2, 24, 4, 3, dtype=torch.int64)):
        with pytest.raises(ValueError) as e:
            replay.set_routes(chunks[0], routes)
        messages.append(str(e.value))
    few = torch.arange(4).expand(2, 12, 4, 4).clone()
    replay.set_routes(chunks[0], few)
    with pytest.raises(ValueError) as e:
        m.run(chunks, m.tokens())
    messages.append(str(e.value))
    os.environ["BEAM_MOE_CHECK"] = "1"
    few[:, :, 0], few[0, 3] = 0, -1  # what a dense layer's column holds is not looked at
    replay.set_routes(chunks[0], few)
    for row in ([0, 0, 0, 0], [5, 2, 5, 1], [-1, 3, 2, 1], [1, 2, 3, 16]):
        routes = few.clone()
        routes[1, 7, 2] = torch.tensor(row)
        with pytest.raises(ValueError) as e:
            replay.set_routes(chunks[0], routes)
        assert str(row) in str(e.value) and "row 15 of layer 2" in str(e.value) or row[3] == 16
        messages.append(str(e.value))
    return messages


def test_misfits_are_refused(ranks):
    ((unbuilt, layers, top_k, rows, *doubled, strange),) = ranks("guards")
    assert "moe_enable_routing_replay" in unbuilt
    assert "layers" in layers and "5" in layers
    assert "(2, 24, 4, 3)" in top_k
    assert "48 rows" in rows
    assert all("different experts" in message for message in doubled) and "-1..16" in strange


def with_and_without(folder, pp=1, recompute=False):
    """Four micro-batches, every other one without routes; logits and the routers' gradients."""
    import megatron_ranks as m
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from beam_moe.integrations.megatron import replay

    ref = m.reference()
    fields = {"moe_enable_routing_replay": True}
    if recompute:
        fields.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    _, _, chunks = m.load(m.checkpoint(ref, folder / "hf"), pp=pp, **fields)
    ids, got = m.tokens(), []
    position = torch.arange(ids.shape[1])[None].expand_as(ids)
    given = iter([_routes(ref, ids), None] * 2)

    def step(_, model):
        def loss(y):
            got.append(y.detach())
            return y.float().logsumexp(-1).mean(), {}

        return replay.forward(model, next(given), ids, position, None), loss

    with replay.replaying(chunks):
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=chunks,
            num_microbatches=4,
            seq_length=24,
            micro_batch_size=2,
            forward_only=False,
        )
    grads = {layer: router.weight.grad for layer, router in replay.stage_routers(chunks[0])}
    free = ref(ids)
    free.logsumexp(-1).mean().backward()
    _reference(ref, ids, _routes(ref, ids))  # adds to the gradients
    want = {i: x.mlp.gate.weight.grad / 2 for i, x in enumerate(ref.model.layers) if hasattr(x.mlp, "gate")}
    return got, free.detach(), grads, want


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_micro_batches_without_routes_between_others(ranks, pp, recompute):
    """Their routers choose: no route of the micro-batch before, forward or in the recomputation."""
    for got, free, grads, want in ranks("with_and_without", pp, pp=pp, recompute=recompute):
        for i, logits in enumerate(got):
            if i % 2:
                assert_close("without routes", free, logits, 1e-5)
            else:
                assert error_ratio(free, logits) > 1e-2
        for layer, g in grads.items():
            assert_close(f"router of layer {layer}", want[layer], g, 1e-4)


def lengths(folder, recompute, pp=1, lora=False):
    """Logits and gradients of micro-batches of several lengths, stored and recomputed, through the same routes."""
    import megatron_ranks as m
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from test_lora import _lora

    from beam_moe.integrations.megatron import replay

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    batches = [m.tokens(length=n) for n in (24, 16, 24, 8)]
    results = []
    for fields in ({}, recompute):
        torch.manual_seed(0)  # of A
        hooks = [_lora("per_expert")] if lora else []
        fields = {"moe_enable_routing_replay": True, "variable_seq_lengths": True, **fields}
        _, _, chunks = m.load(path, pp=pp, hooks=hooks, **fields)
        left, got = iter(batches), []

        def step(_, model, left=left, got=got):
            ids = next(left)
            position = torch.arange(ids.shape[1])[None].expand_as(ids)

            def loss(y):
                got.append(y.detach())
                return y.float().logsumexp(-1).mean(), {}

            return replay.forward(model, _routes(ref, ids), ids, position, None), loss

        with replay.replaying(chunks):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=None,
                model=chunks,
                num_microbatches=len(batches),
                seq_length=24,
                micro_batch_size=2,
                forward_only=False,
            )
        results.append((got, {n: p.grad for n, p in chunks[0].named_parameters() if p.requires_grad}))
    (stored, want), (again, grads) = results
    live = [_reference(ref, ids, _routes(ref, ids))[0] for ids in batches] if stored and not lora else []
    return list(zip(stored, again)), list(zip(live, stored)), want, grads


@pytest.mark.parametrize(
    "case",
    [
        {"recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]}, "pp": 2},
        {"recompute": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}},
        {
            "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            "pp": 2,
            "lora": True,
        },
    ],
    ids=["selective-pp2", "some-layers", "adapters-pp2"],
)
def test_micro_batches_of_several_lengths_recomputed(ranks, case):
    for same, live, want, grads in ranks("lengths", case.get("pp", 1), **case):
        for stored, again in same:
            torch.testing.assert_close(again, stored, rtol=0, atol=0)
        for reference, stored in live:
            assert_close("logits", reference, stored, 1e-5)
        assert grads.keys() == want.keys() and any(g is not None and g.any() for g in want.values())
        for name, g in want.items():
            assert (g is None) == (grads[name] is None), name
            if g is not None and g.any():
                assert_close(name, g, grads[name], 1e-5)


def hybrid_numbers(folder):
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.moe.router import TopKRouter

    from beam_moe.integrations.megatron import replay

    model = HybridModel.__new__(HybridModel)
    torch.nn.Module.__init__(model)
    for number in (4, 6, 8):  # a dense layer first, then MoE layers 1, 2, 3 of the model
        router = TopKRouter.__new__(TopKRouter)
        torch.nn.Module.__init__(router)
        router.layer_number, router.router_replay = number, types.SimpleNamespace()
        model.add_module(f"m{number}", router)
    return [layer for layer, _ in replay.stage_routers(model)]


def test_hybrid_numbering(ranks):
    (layers,) = ranks("hybrid_numbers")
    assert layers == [1, 2, 3]
