"""The fp32 router through bf16 wrapping, the distributed optimizer, its checkpoint, and export."""

import pytest
import torch

from beam_moe.testing import assert_close

ROUTER = ("router.weight", "router.expert_bias")


def _routers(m, chunk):
    return {n: t.detach().clone() for n, t in m.inner(chunk).state_dict().items() if n.endswith(ROUTER)}


def _optimizer(chunks):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=1.0
    )
    return get_megatron_optimizer(config, chunks)


def _step(m, chunks, optimizer, ids):
    from megatron.core.distributed import finalize_model_grads

    for c in chunks:
        c.zero_grad_buffer()
    optimizer.zero_grad()
    m.run(chunks, ids, backward=True)
    finalize_model_grads(chunks)
    ok, norm, _ = optimizer.step()
    assert ok
    return float(norm)


def _masters(optimizer):
    """Every main parameter and its moments, by the shape and order of the model's parameters."""
    out = []
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in one.optimizer.param_groups:
            for p in group["params"]:
                state = one.optimizer.state[p]
                out.append((p.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()))
    return out


def trained(folder, ep=1):
    import megatron_ranks as m
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallelConfig
    from safetensors.torch import load_file

    path = m.checkpoint(m.reference(), folder / "hf")
    make = lambda: m.load(  # noqa: E731
        path,
        ep=ep,
        dtype=torch.bfloat16,
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
    )
    bridge, _, chunks = make()
    disk = load_file(f"{path}/model.safetensors")
    read = _routers(m, chunks[0])
    optimizer = _optimizer(chunks)
    halves = m.tokens(4).chunk(dist.get_world_size())
    ids = halves[dist.get_rank()] if dist.get_world_size() > 1 else halves[0]
    for _ in range(2):
        _step(m, chunks, optimizer, ids)
    trained = _routers(m, chunks[0])
    exported = {n: t.clone() for n, t in bridge.export_hf_weights(chunks, cpu=True, show_progress=False)}

    where = folder / "distributed"
    where.mkdir(exist_ok=True)
    dist.barrier()
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    model_state = m.inner(chunks[0]).sharded_state_dict(metadata=metadata)
    state = {"model": model_state, "optimizer": optimizer.sharded_state_dict(model_state, metadata=metadata)}
    dist_checkpointing.save(state, str(where))
    before = _masters(optimizer)
    again, _, copies = make()
    other = _optimizer(copies)
    _step(m, copies, other, ids.flip(1))  # other states than those it loads; torch's Adam has none before a step
    model_state = m.inner(copies[0]).sharded_state_dict(metadata=metadata)
    state = {
        "model": model_state,
        "optimizer": other.sharded_state_dict(model_state, is_loading=True, metadata=metadata),
    }
    state = dist_checkpointing.load(state, str(where))
    m.inner(copies[0]).load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    after = _masters(other)
    norms = [_step(m, c, o, ids) for c, o in ((chunks, optimizer), (copies, other))]
    return {
        "disk": {n: t for n, t in disk.items() if ".mlp.gate." in n},
        "read": read,
        "trained": trained,
        "exported": {n: t for n, t in exported.items() if ".mlp.gate." in n},
        "dtypes": {n: t.dtype for n, t in exported.items()},
        "same": all(torch.equal(x, y) for a, b in zip(before, after) for x, y in zip(a, b))
        and len(before) == len(after),
        "count": len(before),
        "norms": norms,
        "next": (_routers(m, chunks[0]), _routers(m, copies[0])),
    }


@pytest.mark.parametrize("layout, world", [({}, 1), ({}, 2), ({"ep": 2}, 2)], ids=["one", "dp2", "ep2"])
def test_router_stays_fp32_from_checkpoint_to_checkpoint(ranks, layout, world):
    results = ranks("trained", world, **layout)
    for r in results:
        for name, t in r["disk"].items():  # read exactly, and the values are not bf16's
            layer, kind = name.split(".")[2], "weight" if name.endswith("weight") else "expert_bias"
            key = f"decoder.layers.{layer}.mlp.router.{kind}"
            assert torch.equal(r["read"][key], t) and not torch.equal(t, t.bfloat16().float())
            assert r["trained"][key].dtype == torch.float32
            assert torch.equal(r["exported"][name], r["trained"][key]), name
            if kind == "weight":
                moved = r["trained"][key] - t
                assert moved.any() and not torch.equal(r["trained"][key], r["trained"][key].bfloat16().float())
        kinds = {d for n, d in r["dtypes"].items() if ".mlp.gate." not in n}
        assert kinds == {torch.bfloat16}
        assert {d for n, d in r["dtypes"].items() if ".mlp.gate." in n} == {torch.float32}
        assert r["same"] and r["count"] > 10, "the checkpoint gave back other states"
        a, b = r["next"]
        assert all(torch.equal(a[k], b[k]) for k in a) and r["norms"][0] == r["norms"][1]


def adapters_resumed(folder, kind, sharding, tp=1, pp=1, ep=1, experts_only=False, layers=None):
    """Two steps on adapters, a checkpoint into a copy with other values and states, one step of both."""
    import megatron_ranks as m
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallelConfig
    from test_lora import EXPERTS, _lora

    path = m.checkpoint(m.reference(**layers or {}), folder / "hf")
    changes = {"lora_dtype": torch.float32, "target_modules": EXPERTS} if experts_only else {}
    metadata = {"distrib_optim_sharding_type": sharding}

    def make():
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        hooks = [_lora(kind, **changes)]
        _, _, chunks = m.load(path, tp=tp, pp=pp, ep=ep, dtype=torch.bfloat16, hooks=hooks, ddp=ddp)
        return chunks, _optimizer(chunks)

    def state(chunks, optimizer, loading=False):
        model = m.inner(chunks[0]).sharded_state_dict(metadata=metadata)
        model = {n: t for n, t in model.items() if ".adapter." in n}
        return {"model": model, "optimizer": optimizer.sharded_state_dict(model, loading, metadata=metadata)}

    ids = m.tokens(4) if tp * pp > 1 else m.tokens(4).chunk(dist.get_world_size())[dist.get_rank()]
    chunks, optimizer = make()
    for _ in range(2):
        _step(m, chunks, optimizer, ids)
    where = folder / "distributed"
    where.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state(chunks, optimizer), str(where))
    copies, other = make()
    _step(m, copies, other, ids.flip(1))
    loaded = dist_checkpointing.load(state(copies, other, True), str(where))
    m.inner(copies[0]).load_state_dict(loaded["model"], strict=False)
    other.load_state_dict(loaded["optimizer"])
    norms = [_step(m, c, o, ids) for c, o in ((chunks, optimizer), (copies, other))]
    ours, theirs = ({n: p for n, p in c[0].named_parameters() if p.requires_grad} for c in (chunks, copies))
    return norms, [n for n in ours if not torch.equal(ours[n], theirs[n])], {p.dtype for p in ours.values()}


@pytest.mark.parametrize("sharding", ["dp_reshardable", "fully_reshardable"])
@pytest.mark.parametrize(
    "case, dtype",
    [
        pytest.param({"kind": "per_expert", "ep": 2, "experts_only": True}, torch.float32, id="fp32-experts-only-ep2"),
        pytest.param({"kind": "shared_outer", "tp": 2, "ep": 2}, torch.bfloat16, id="shared-outer-tp2-ep2"),
    ],
)
def test_adapters_go_on_from_a_checkpoint(ranks, case, dtype, sharding):
    for (on, again), different, dtypes in ranks("adapters_resumed", 2, sharding=sharding, **case):
        assert on == again and not different and dtypes == {dtype}


def test_a_stage_without_adapters_goes_on_from_a_checkpoint(ranks):
    case = {"kind": "per_expert", "experts_only": True, "layers": {"mlp_layer_types": ["dense"] * 3 + ["sparse"]}}
    results = ranks("adapters_resumed", 2, pp=2, sharding="dp_reshardable", **case)
    assert [dtypes for *_, dtypes in results] == [set(), {torch.float32}]
    assert all(on == again and not different for (on, again), different, _ in results)


def slots(folder):
    import megatron_ranks as m
    from megatron.core.distributed import DistributedDataParallelConfig

    from beam_moe.integrations.megatron.optimizer import DistributedOptimizer, repair_group_map

    path = m.checkpoint(m.reference(), folder / "hf")
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    import beam_moe.integrations.megatron as integration

    integration.register()
    out = []
    patched = DistributedOptimizer.__init__
    for init in (patched, patched.__wrapped__):
        _, _, chunks = m.load(path, dtype=torch.bfloat16, ddp=ddp)
        DistributedOptimizer.__init__ = init
        optimizer = _optimizer(chunks)
        DistributedOptimizer.__init__ = patched
        out.append(sum(repair_group_map(o) for o in getattr(optimizer, "chained_optimizers", [optimizer])))
    return out


def test_the_slot_map_needs_the_repair(ranks):
    """Fails when megatron-core no longer needs it: then the patch can go."""
    ((patched, stock),) = ranks("slots")
    assert patched == 0
    assert stock > 0


def casts(folder):
    import megatron_ranks as m
    from megatron.core.transformer.module import Float16Module

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    _, provider, chunks = m.load(path)
    want = _routers(m, chunks[0])
    provider.bf16, provider.fp16 = True, False
    wrapped = Float16Module(provider, chunks[0])
    out = [all(torch.equal(want[k], v) for k, v in _routers(m, wrapped).items())]
    wrapped.half().float().to(torch.bfloat16)
    out.append(all(torch.equal(want[k], v) for k, v in _routers(m, wrapped).items()))
    return out, {p.dtype for n, p in wrapped.named_parameters() if "router" not in n}


def test_router_survives_every_cast(ranks):
    ((equal, others),) = ranks("casts")
    assert equal == [True, True] and others == {torch.bfloat16}


def gemm(folder):
    import megatron_ranks  # noqa: F401

    from beam_moe.integrations.megatron.layers import _Fp32Linear, _full_fp32

    matmul = torch.backends.cuda.matmul
    modes = []
    for name, allowed, refused in (("allow_tf32", True, False), ("fp32_precision", "tf32", "ieee")):
        setattr(matmul, name, allowed)
        with _full_fp32():
            inside = getattr(matmul, name)
        modes.append((inside, getattr(matmul, name)))
        setattr(matmul, name, refused)
    x = torch.randn(5, 2, 64).bfloat16().requires_grad_()
    w = torch.randn(16, 64, requires_grad=True)
    y = _Fp32Linear.apply(x, w)
    x2, w2 = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    want = x2.float() @ w2.T
    seed = torch.randn_like(want)
    y.backward(seed)
    want.backward(seed)
    return modes, y.dtype, [(want.detach(), y.detach()), (x2.grad, x.grad), (w2.grad, w.grad)]


def test_router_gemm_is_fp32_even_where_tf32_is_allowed(ranks):
    ((modes, dtype, pairs),) = ranks("gemm")
    assert modes == [(False, True), ("ieee", "tf32")] and dtype == torch.float32
    for want, got in pairs:
        assert_close("gemm", want, got, 1e-6)
