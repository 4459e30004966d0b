"""Expert LoRA: what Megatron trains is what PEFT, transformers and our loader read; gradients at every layout."""

import pytest
import torch

from beam_moe.testing import assert_close, error_ratio

KINDS = {
    "per_expert": {"share_expert_adapters": False},
    "shared_outer": {"experts_shared_outer_loras": True},
}


def _lora(kind, **changes):
    """A pre-wrap hook with Bridge's LoRA on every linear, B not zero; the same values at every layout."""
    from megatron.bridge.peft.lora import LoRA

    lora = LoRA(dim=8, alpha=16, **{**KINDS[kind], **changes})

    def hook(chunks):
        chunks = lora(chunks, training=True)
        lora.set_params_to_save(chunks)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, p in chunks[0].named_parameters():
                if "linear_out" not in name:
                    continue
                if "experts" in name:  # initialisers of experts do not depend on the layout
                    p.copy_(_fill(p, chunks[0], name))
                else:
                    from megatron.core import parallel_state as mpu

                    tp = mpu.get_tensor_model_parallel_world_size()
                    sharded = p.shape[0] * tp
                    whole = torch.randn(sharded, p.shape[1], generator=generator) * 0.05
                    p.copy_(whole.chunk(tp)[mpu.get_tensor_model_parallel_rank()])
        return chunks

    return hook


def _fill(p, model, name):
    from megatron.core import parallel_state as mpu

    first = mpu.get_expert_model_parallel_rank() * (p.shape[0] if p.dim() == 3 else 0)
    number = int(name.split("layers.")[1].split(".")[0]) * 100 + ("fc2" in name) * 50
    out = []
    for e in range(p.shape[0]) if p.dim() == 3 else [0]:
        g = torch.Generator().manual_seed(1000 * number + first + e)
        out.append(torch.randn(p.shape[-2:], generator=g) * 0.05)
    return torch.stack(out) if p.dim() == 3 else out[0]


def adapted(folder, kind, tp=1, ep=1):
    import megatron_ranks as m
    from peft import PeftModel
    from safetensors.torch import load_file

    from beam_moe import BeamMoEConfig, load_adapter
    from beam_moe.integrations.megatron import save_adapter

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    bridge, provider, chunks = m.load(path, tp=tp, ep=ep, hooks=[_lora(kind)])
    chunks[0].eval()
    ids = m.tokens()
    got = m.run(chunks, ids)
    out = {"got": got}
    with torch.no_grad():
        out["bare"] = ref(ids)
    save_adapter(bridge, chunks, folder / "peft")
    for layout in {"per_expert": ["fused_3d"], "shared_outer": ["fused_3d", "shared_outer"]}[kind]:
        save_adapter(bridge, chunks, folder / layout, layout=layout)
    merged = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
    if torch.distributed.get_rank():
        return out
    config = BeamMoEConfig.from_hf(ref.config)
    banks = {n: load_adapter(folder / n, config).experts for n in ("peft", "fused_3d")}
    for layer, bank in banks["peft"].items():
        other = banks["fused_3d"][layer]
        for name in ("w2_a", "w2_b"):
            a, b = (getattr(x, name) for x in (bank, other))
            torch.testing.assert_close(a.expand_as(b) if a.shape[1] == 1 else a, b, rtol=0, atol=0)
    out["layers"] = sorted(banks["peft"])
    with torch.no_grad():
        ref2 = m.reference()
        ref2.load_state_dict(merged)
        out["merged"] = ref2(ids)
        stock = PeftModel.from_pretrained(m.reference(), str(folder / "peft"))
        out["stock"] = stock.merge_and_unload()(ids)
    out["keys"] = len(load_file(folder / "peft" / "adapter_model.safetensors"))
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout, world", [({}, 1), ({"ep": 2}, 2), ({"tp": 2}, 2)], ids=["one", "ep2", "tp2"])
def test_adapter_reaches_peft_and_transformers(ranks, kind, layout, world):
    first, *_ = ranks("adapted", world, kind=kind, **layout)
    assert first["layers"] == [1, 2, 3]
    # 4 layers x (q, k, v, gate, o), one dense MLP, 3 x 16 experts x 3 projections, A and B of each
    assert first["keys"] == 2 * (4 * 5 + 3 + 3 * 16 * 3)
    effect = (first["bare"] - first["got"]).pow(2).mean().sqrt() / first["bare"].pow(2).mean().sqrt()
    assert effect > 1e-2, "the adapter does next to nothing"
    assert_close("merged by Bridge", first["merged"], first["got"], 1e-5)
    assert_close("merged by PEFT", first["stock"], first["got"], 1e-5)


def gradients(folder, kind, parts, ep=1):
    """Adapter gradients after DDP's reduction, whole, by name; ``parts`` batches shared out over the ranks."""
    import megatron_ranks as m
    import torch.distributed as dist
    from megatron.core.distributed import DistributedDataParallelConfig

    path = m.checkpoint(m.reference(), folder / "hf")
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    _, _, chunks = m.load(path, ep=ep, hooks=[_lora(kind)], ddp=ddp)
    ids = m.tokens(batch=4)
    world, rank = dist.get_world_size(), dist.get_rank()
    chunks[0].zero_grad_buffer()
    m.run(chunks, ids.chunk(world)[rank], backward=True)
    chunks[0].finish_grad_sync()
    out = {}
    for name, p in chunks[0].named_parameters():
        if not p.requires_grad:
            continue
        grad = p.main_grad.clone().float()
        if ep > 1 and p.dim() == 3:
            whole = [torch.empty_like(grad) for _ in range(ep)]
            dist.all_gather(whole, grad)
            grad = torch.cat(whole)
        out[name] = grad
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_depend_on_the_layout(ranks, kind):
    """The shared-outer factor's gradient in particular: once per token, however many replicas there are."""
    (want,) = ranks("gradients", 1, kind=kind, parts=1)
    assert any("experts" in n for n in want)
    for ep in (1, 2):
        for got in ranks("gradients", 2, kind=kind, parts=2, ep=ep):
            assert got.keys() == want.keys()
            for name, g in want.items():
                assert_close(f"ep={ep} {name}", g, got[name], 1e-4)


def guards(folder):
    import megatron_ranks as m
    from megatron.bridge.peft.lora import LoRA

    path = m.checkpoint(m.reference(), folder / "hf")
    messages = {}
    for name, kind, changes, fields in (
        ("share", "per_expert", {"share_expert_adapters": True}, {}),
        ("dtype", "per_expert", {"lora_dtype": torch.bfloat16}, {}),
    ):
        with pytest.raises(ValueError) as e:
            m.load(path, hooks=[_lora(kind, **changes)], **fields)
        messages[name] = str(e.value)
    with pytest.raises(ValueError) as e:
        m.load(path, hooks=[LoRA(target_modules=["output_layer"])])
    messages["head"] = str(e.value)
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA

    with pytest.raises(ValueError) as e:
        m.load(path, hooks=[lambda c: CanonicalLoRA(target_modules=["linear_q", "linear_k", "linear_v"])(c)])
    messages["canonical"] = str(e.value)
    return messages


def test_what_bridge_gets_wrong_is_refused(ranks):
    (messages,) = ranks("guards")
    assert "share_expert_adapters" in messages["share"]
    assert "lora_dtype" in messages["dtype"]
    assert "attention_output_gate" in messages["canonical"]
    assert "output_layer" in messages["head"] and "capped" in messages["head"]


def sequential(folder, ep=1):
    """Names of one layer's expert factors, exported from megatron-core's sequential experts."""
    import megatron_ranks as m

    from beam_moe.integrations.megatron import AdapterSource

    path = m.checkpoint(m.reference(), folder / "hf")
    if ep > 1:
        with pytest.raises(ValueError) as e:
            m.load(path, ep=ep, hooks=[_lora("per_expert")], moe_grouped_gemm=False)
        return str(e.value)
    bridge, _, chunks = m.load(path, hooks=[_lora("per_expert")], moe_grouped_gemm=False)
    return sum(".layers.1.mlp.experts." in n for n in dict(AdapterSource(bridge, chunks)))


def test_sequential_experts_are_exported_whole_or_refused(ranks):
    assert ranks("sequential") == [2 * 3 * 16]
    for message in ranks("sequential", 2, ep=2):
        assert "moe_grouped_gemm" in message and "local_experts.0.linear_fc" in message


def unwritten(folder, ep=1):
    """What every rank says where rank 0 cannot write."""
    import megatron_ranks as m

    from beam_moe.integrations.megatron import save_adapter

    bridge, _, chunks = m.load(m.checkpoint(m.reference(), folder / "hf"), ep=ep, hooks=[_lora("per_expert")])
    (folder / "file").touch()
    said = []
    for where, layout, kind in ((folder / "a", "shared_outer", ValueError), (folder / "file", "per_expert", Exception)):
        with pytest.raises(kind) as e:
            save_adapter(bridge, chunks, where, layout=layout)
        said.append(str(e.value))
    return said


def test_no_rank_waits_for_a_file_that_cannot_be_written(ranks):
    for outer, file in ranks("unwritten", 2, ep=2):
        assert "shared outer factors" in outer and "exists" in file.lower()


def renamed(folder):
    from beam_moe.integrations.megatron.lora import _indexed, stacked_outer

    head = "model.layers.0.block_sparse_moe.experts."
    factors = {f"{head}w1.lora_A.weight": torch.ones(1, 2, 4), "model.layers.0.self_attn.q_proj.lora_A.weight": 0}
    factors = {n: torch.as_tensor(t) for n, t in factors.items()}
    factors |= {f"{head}{e}.w1.lora_B.weight": torch.full((6, 2), float(e)) for e in (2, 0, 1)}
    return _indexed(factors), stacked_outer(factors)


def test_shared_factors_of_a_model_that_names_its_experts_otherwise(ranks):
    """``w1`` below ``block_sparse_moe``, and a configuration without ``num_experts``."""
    ((indexed, stacked),) = ranks("renamed")
    head = "model.layers.0.block_sparse_moe.experts."
    names = {f"{head}{e}.w1.lora_{side}.weight" for e in range(3) for side in "AB"}
    assert indexed.keys() - names == stacked.keys() - {f"{head}w1.lora_A.weight", f"{head}w1.lora_B.weight"}
    assert indexed.keys() >= names
    assert stacked[f"{head}w1.lora_B.weight"][:, 0, 0].tolist() == [0, 1, 2]


def fp32_factors(folder):
    import megatron_ranks as m

    path = m.checkpoint(m.reference(), folder / "hf")
    lora = _lora("per_expert", lora_dtype=torch.float32, target_modules=["linear_fc1", "linear_fc2"])
    with pytest.raises(ValueError, match="lora_dtype"):  # the dense layer's linears
        m.load(path, dtype=torch.bfloat16, hooks=[lora])
    names = ["*.experts.linear_fc1", "*.experts.linear_fc2"]
    lora = _lora("per_expert", lora_dtype=torch.float32, target_modules=names)
    _, _, chunks = m.load(path, dtype=torch.bfloat16, hooks=[lora])
    m.run(chunks, m.tokens(), backward=True)
    trained = [(p.dtype, p.grad) for p in chunks[0].parameters() if p.requires_grad]
    return {d for d, _ in trained}, sum(bool(g is not None and g.abs().sum() > 0) for _, g in trained), len(trained)


def test_lora_dtype_is_kept_under_a_bf16_model(ranks):
    ((dtypes, moved, count),) = ranks("fp32_factors")
    assert dtypes == {torch.float32}
    assert moved == count > 0


def _plain(x, w, a, b, scale, splits):
    pieces = []
    for e, rows in enumerate(x.split(splits)):
        fa, fb = a[min(e, len(a) - 1)], b[min(e, len(b) - 1)]
        pieces.append(rows @ w[e].T + scale * (rows @ fa.T) @ fb.T)
    return torch.cat(pieces)


def fused_node(folder, shared_a, shared_b):
    import megatron_ranks  # noqa: F401

    from beam_moe.integrations.megatron.lora import _GroupedLoRA

    splits = [5, 0, 7, 4]
    e, n, k, r = 4, 24, 16, 8
    shapes = [(16, k), (e, n, k), (1 if shared_a else e, r, k), (1 if shared_b else e, n, r)]
    ours = [torch.randn(s, requires_grad=True) for s in shapes]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    y = _GroupedLoRA.apply(*ours, 0.5, splits)
    want = _plain(*theirs, 0.5, splits)
    seed = torch.randn_like(y)
    y.backward(seed)
    want.backward(seed)
    return [(want, y), *((t.grad, o.grad) for t, o in zip(theirs, ours))]


@pytest.mark.parametrize("shared_a, shared_b", [(False, False), (True, False), (False, True)])
def test_fused_node_against_autograd(ranks, shared_a, shared_b):
    (pairs,) = ranks("fused_node", shared_a=shared_a, shared_b=shared_b)
    for name, (want, got) in zip(("y", "dx", "dw", "da", "db"), pairs):
        assert_close(name, want.detach(), got.detach(), 1e-6)


def fused_kernels(folder, kind):
    """Logits and adapter gradients of a model whose grouped experts run in our kernels, and of one whose do not."""
    import megatron_ranks as m

    from beam_moe.integrations.megatron import lora
    from beam_moe.kernels import moe_lora

    path = m.checkpoint(m.reference(), folder / "hf")
    hook = _lora(kind, target_modules=["*.experts.linear_fc1", "*.experts.linear_fc2"])
    calls, kernel = [], moe_lora.grouped_linear_lora
    moe_lora.grouped_linear_lora = lambda *args, **kwargs: calls.append(kwargs) or kernel(*args, **kwargs)
    out = []
    for fused in (False, True):
        lora._fuses = lambda x, fused=fused: fused
        _, _, chunks = m.load(path, hooks=[hook])
        logits = m.run(chunks, m.tokens(batch=1, length=12), backward=True)
        grads = {n: p.grad for n, p in chunks[0].named_parameters() if p.requires_grad}
        out.append((logits, grads, len(calls)))
    module = next(x for x in chunks[0].modules() if isinstance(x, lora.GroupedLoRALinear))
    module.to_wrap.mxfp8 = True
    rows = torch.randn(9, module.to_wrap.in_features)
    splits = [4, 0, 5] + [0] * (module.to_wrap.num_gemms - 3)
    seed = torch.randn(9, module.to_wrap.out_features)
    quantised = []
    for fused in (False, True):
        lora._fuses = lambda x, fused=fused: fused
        x = rows.clone().requires_grad_()
        y, _ = module(x, splits)
        factors = (module.adapter.linear_in.weight, module.adapter.linear_out.weight)
        quantised.append([y.detach(), *torch.autograd.grad(y, (x, *factors), seed)])
    return *out, (*quantised, len(calls))


@pytest.mark.parametrize("kind", KINDS)
def test_our_kernels_give_the_same_gradients(ranks, kind):
    (((plain, want, none), (fused, got, calls), (apart, together, last)),) = ranks("fused_kernels", kind=kind)
    assert (none, calls) == (0, 6)  # two projections of three MoE layers
    assert_close("logits", plain, fused, 1e-6)
    assert sum("experts" in n for n in want) == 12 and got.keys() == want.keys()
    for name, g in want.items():
        assert_close(name, g, got[name], 1e-5)
    assert last == 7
    for name, one, other in zip(("y", "dx", "da", "db"), apart, together):
        assert_close(f"MXFP8 base, {name}", one, other, 1e-5)


def checkpointed(folder, kind, where, ep=1, save=False):
    """Write the adapters' factors to a distributed checkpoint, or read them into adapters of other values."""
    import megatron_ranks as m
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    path = m.checkpoint(m.reference(), folder / "hf")
    _, _, chunks = m.load(path, ep=ep, hooks=[_lora(kind)])
    state = m.inner(chunks[0]).sharded_state_dict()
    state = {k: v for k, v in state.items() if ".adapter." in k and ".experts." in k}
    factors = {n: p for n, p in m.inner(chunks[0]).named_parameters() if ".adapter." in n and ".experts." in n}
    assert state.keys() == factors.keys()
    if save:
        dist_checkpointing.save(state, where)
    else:
        for p in factors.values():
            p.data.fill_(7.0)
        for name, loaded in dist_checkpointing.load(state, where).items():
            factors[name].data.copy_(loaded)
    whole = {}
    for name, p in factors.items():
        parts = [p.detach().clone()]
        if ep > 1 and p.dim() == 3:
            parts = [torch.empty_like(parts[0]) for _ in range(ep)]
            dist.all_gather(parts, p.detach().contiguous())
        whole[name] = torch.cat(parts)
    return whole


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_checkpoint_from_ep2_to_one_rank(ranks, kind, tmp_path):
    where = tmp_path / "distributed"
    where.mkdir()
    saved, again = ranks("checkpointed", 2, kind=kind, where=str(where), ep=2, save=True)
    (loaded,) = ranks("checkpointed", 1, kind=kind, where=str(where))
    assert saved.keys() == loaded.keys() and len(saved) == 2 * 2 * 3
    for name, t in saved.items():
        assert torch.equal(t, again[name]) and torch.equal(t, loaded[name]), name


ONE_SPARSE = {"mlp_layer_types": ["dense"] * 3 + ["sparse"]}
EXPERTS = ["*.experts.linear_fc1", "*.experts.linear_fc2"]


def written(folder, kind, pp=1, ep=1, **changes):
    """Logits through the adapter and through stock PEFT's merge of the folder; what `AdapterSource` says of it."""
    import megatron_ranks as m
    from peft import PeftModel

    from beam_moe import BeamMoEConfig, load_adapter
    from beam_moe.integrations.megatron import AdapterSource, save_adapter

    ref = m.reference(**ONE_SPARSE)
    path = m.checkpoint(ref, folder / "hf")
    bridge, _, chunks = m.load(path, pp=pp, ep=ep, hooks=[_lora(kind, **changes)])
    got = m.run(chunks, m.tokens())
    save_adapter(bridge, chunks, folder / "peft")
    if kind == "shared_outer":
        save_adapter(bridge, chunks, folder / "outer", layout="shared_outer")
    source = AdapterSource(bridge, chunks)
    config = BeamMoEConfig.from_hf(ref.config)
    banks = [load_adapter(dict(source), config, peft_config=source.peft_config)]
    banks += [load_adapter(folder / n, config) for n in ("peft", "outer") if (folder / n).exists()]
    factors = [[getattr(b.experts[3], n) for n in ("w13_a", "w13_b", "w2_a", "w2_b")] for b in banks]
    with torch.no_grad():
        stock = PeftModel.from_pretrained(m.reference(**ONE_SPARSE), str(folder / "peft")).merge_and_unload()
        return got, stock(m.tokens()), ref(m.tokens()), source.peft_config, factors


WRITTEN = [
    pytest.param({"kind": "per_expert", "pp": 2, "target_modules": EXPERTS}, 2, id="experts-only-pp2"),
    pytest.param({"kind": "shared_outer", "pp": 2, "ep": 2}, 4, id="shared-outer-pp2-ep2"),
    pytest.param({"kind": "per_expert", "pp": 2, "normalize_moe_lora": True}, 2, id="rank-by-module-pp2"),
    pytest.param({"kind": "shared_outer", "normalize_moe_lora": True}, 1, id="rank-by-module-shared-outer"),
]


@pytest.mark.parametrize("case, world", WRITTEN)
def test_adapters_of_one_sparse_layer(ranks, case, world):
    """The first pipeline stage has no expert, so perhaps no adapter; a rank of experts below that of attention."""
    for got, stock, bare, config, (memory, *files) in ranks("written", world, **case):
        assert config["lora_alpha"] == 16 and ("rank_pattern" in config) == ("normalize_moe_lora" in case)
        for other in files:
            for a, b in zip(memory, other):
                shape = torch.broadcast_shapes(a.shape, b.shape)
                assert torch.equal(a.expand(shape), b.expand(shape))
        if got is not None:
            assert error_ratio(bare, got) > 1e-3
            assert_close("merged by PEFT", stock, got, 1e-5)


def no_adapter(folder, pp=1):
    import megatron_ranks as m

    from beam_moe.integrations.megatron import AdapterSource

    bridge, _, chunks = m.load(m.checkpoint(m.reference(), folder / "hf"), pp=pp)
    with pytest.raises(ValueError) as e:
        AdapterSource(bridge, chunks)
    return str(e.value)


def test_a_model_without_adapters_is_refused_on_every_stage(ranks):
    assert all("adapters of one alpha" in message for message in ranks("no_adapter", 2, pp=2))
