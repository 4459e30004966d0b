"""Beam on megatron-bridge: parity with a plain fp32 model, and export bit for bit, at every parallel layout."""

import importlib.util

import pytest
import torch

from beam_moe.testing import assert_close, error_ratio

LAYOUTS = [
    pytest.param({"tp": 1}, 1, id="tp1"),
    pytest.param({"tp": 2}, 2, id="tp2"),
    pytest.param({"pp": 2}, 2, id="pp2"),
    pytest.param({"ep": 2}, 2, id="ep2"),
]


def parity(folder, tp=1, pp=1, ep=1):
    import megatron_ranks as m
    from safetensors.torch import load_file

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    bridge, _, chunks = m.load(path, tp=tp, pp=pp, ep=ep)
    chunks[0].eval()
    ids = m.tokens()
    logits = m.run(chunks, ids)
    with torch.no_grad():
        want = ref(ids)
    disk = load_file(f"{path}/model.safetensors")
    exported = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
    wrong = [n for n in disk if n not in exported or not torch.equal(disk[n], exported[n])]
    return {"logits": logits, "want": want, "wrong": wrong, "extra": sorted(exported.keys() - disk.keys())}


@pytest.mark.parametrize("layout, world", LAYOUTS)
def test_matches_reference_and_exports_what_it_read(ranks, layout, world):
    results = ranks("parity", world, **layout)
    logits = [r for r in results if r["logits"] is not None]
    assert logits, "no rank is the last stage"
    for r in logits:
        assert_close("logits", r["want"], r["logits"], 1e-5)
    for r in results:
        assert not r["wrong"] and not r["extra"], (r["wrong"][:4], r["extra"][:4])


def gradients(folder, tp=1, pp=1, ep=1, model=None):
    """Names whose gradient, reduced as a trainer does it and exported, is not the plain model's."""
    import megatron_ranks as m
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    ref, ids = m.reference(**model or {}), m.tokens(4)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    bridge, _, chunks = m.load(m.checkpoint(ref, folder / "hf"), tp=tp, pp=pp, ep=ep, ddp=ddp)
    chunks[0].zero_grad_buffer()
    mine = ids.chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
    whole = gather_from_tensor_model_parallel_region if tp > 1 else lambda y: y
    m.run(chunks, mine, backward=True, loss=lambda y: whole(y).logsumexp(-1).mean())
    finalize_model_grads(chunks)
    for p in chunks[0].parameters():
        p.data = p.main_grad.clone()
    got = {n: t.clone() for n, t in bridge.export_hf_weights(chunks, cpu=True, show_progress=False)}
    ref(ids).logsumexp(-1).mean().backward()
    wrong = {}
    for name, p in ref.named_parameters():
        ratio = error_ratio(p.grad, got[name]) if p.grad is not None and p.grad.any() else got[name].abs().max()
        if ratio > 1e-4:
            wrong[name] = float(ratio)
    return wrong


@pytest.mark.parametrize(
    "layout, world",
    [
        pytest.param({"tp": 2}, 2, id="tp2"),
        pytest.param({"tp": 2, "ep": 2}, 2, id="tp2-ep2"),
        pytest.param({"ep": 2}, 2, id="ep2"),
        pytest.param({"pp": 2, "model": {"mlp_layer_types": ["dense"] * 3 + ["sparse"]}}, 2, id="pp2-dense-stage"),
    ],
)
def test_every_gradient_is_the_references(ranks, layout, world):
    for wrong in ranks("gradients", world, **layout):
        assert not wrong, wrong


def resharded(folder, where, save, tp=1, pp=1, ep=1, mxfp8=False):
    """Save a model's distributed checkpoint, or read it into one of other weights; names that come out different."""
    import megatron_ranks as m
    from megatron.core import dist_checkpointing

    from beam_moe.integrations.megatron import mxfp8_recipe

    ref = m.reference()
    path = m.checkpoint(ref if save else m.reference(seed=9), folder / "hf")
    fields = {"quant_recipe": mxfp8_recipe(["*.experts.*"])} if mxfp8 else {}
    bridge, _, chunks = m.load(path, tp=tp, pp=pp, ep=ep, **fields)
    state = m.inner(chunks[0]).sharded_state_dict()
    if save:
        dist_checkpointing.save(state, where)
    else:
        m.inner(chunks[0]).load_state_dict(dist_checkpointing.load(state, where))
    exported = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
    return [n for n, t in ref.state_dict().items() if not torch.equal(exported[n], t)]


@pytest.mark.parametrize(
    "saved, loaded",
    [
        pytest.param({"pp": 2}, {"ep": 2, "mxfp8": True}, id="bf16-pp2-to-mxfp8-ep2"),
        pytest.param({"tp": 2, "mxfp8": True}, {"pp": 2}, id="mxfp8-tp2-to-bf16-pp2"),
    ],
)
def test_a_checkpoint_of_one_mode_loads_in_another(ranks, tmp_path, saved, loaded):
    where = tmp_path / "distributed"
    where.mkdir()
    for wrong in ranks("resharded", 2, where=str(where), save=True, **saved):
        assert not wrong
    for wrong in ranks("resharded", 2, where=str(where), save=False, **loaded):
        assert not wrong, wrong[:4]


def transformers_beam(folder):
    import megatron_ranks as m
    from transformers import BeamForCausalLM

    ref = m.reference()
    model = BeamForCausalLM.from_pretrained(m.checkpoint(ref, folder / "hf"), dtype=torch.float32)
    with torch.no_grad():
        return ref(m.tokens()), model.eval()(m.tokens()).logits


def test_reference_is_transformers_beam(ranks):
    if importlib.util.find_spec("transformers.models.beam") is None:
        pytest.skip("this transformers has no Beam")
    ((ours, theirs),) = ranks("transformers_beam")
    assert_close("logits", theirs, ours, 1e-5)


def bf16(folder):
    """Mean |log p| error in bf16 of Megatron and of transformers, both through the fp32 reference's experts."""
    import megatron_ranks as m
    from transformers import BeamForCausalLM
    from transformers.models.beam.modeling_beam import BeamTopKRouter

    from beam_moe.integrations.megatron import replay

    ref = m.reference(sliding_window=64)
    path = m.checkpoint(ref, folder / "hf")
    with torch.no_grad():
        for name, p in ref.named_parameters():
            if ".mlp.gate." not in name:
                p.copy_(p.bfloat16())
        ids = m.tokens(2, 64)
        want = ref(ids).log_softmax(-1)
    sparse = [i for i, layer in enumerate(ref.model.layers) if hasattr(layer.mlp, "ids")]
    routes = torch.zeros(2, 64, 4, 4, dtype=torch.long)
    for i in sparse:
        routes[:, :, i] = ref.model.layers[i].mlp.ids.view(2, 64, 4)
    _, _, chunks = m.load(path, dtype=torch.bfloat16, moe_enable_routing_replay=True, seq_length=64)
    replay.set_routes(chunks[0], routes)
    ours = m.run(chunks, ids).float().log_softmax(-1)
    theirs = BeamForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    gates = [x for x in theirs.modules() if isinstance(x, BeamTopKRouter)]
    for i, gate in zip(sparse, gates):
        chosen = routes[:, :, i].flatten(0, 1)

        def forward(hidden, own=gate.forward, given=chosen):
            logits, _, _ = own(hidden)
            scores = logits.sigmoid().gather(1, given)
            return logits, scores / (scores.sum(-1, keepdim=True) + 1e-20), given

        gate.forward = forward
    with torch.no_grad():
        other = theirs(ids).logits.float().log_softmax(-1)
    return [float((y - want).abs().mean()) for y in (ours, other)]


def test_bf16_rounds_no_more_than_transformers(ranks):
    if importlib.util.find_spec("transformers.models.beam") is None:
        pytest.skip("this transformers has no Beam")
    ((ours, theirs),) = ranks("bf16")
    assert 1e-4 < ours < 1.15 * theirs, (ours, theirs)
