"""load_adapter and export_adapter: every layout, refused adapters, shards, round trips.

The reference never goes through the loader: `dense` multiplies B and A of the tensors as written, projection by
projection, and `deltas` multiplies what a bank holds.
"""

import json
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from beam_moe import adapters
from beam_moe.adapters import export_adapter, load_adapter
from beam_moe.config import BeamMoEConfig
from beam_moe.kernels.moe_lora.bank import ExpertLoRA
from beam_moe.testing import assert_close

H, I, E, R = 24, 8, 4, 3
CONFIG = BeamMoEConfig(hidden=H, intermediate=I, num_experts=E, top_k=2, sparse=(False, True, True))
WIDTHS = {"gate_proj": (H, I), "up_proj": (H, I), "down_proj": (I, H)}
NAMES = tuple(WIDTHS)
P = "base_model.model.model.layers."


def per_expert(layers=(1, 2), names=NAMES, rank=R, config=CONFIG, dtype=torch.float32):
    """A per-expert adapter as PEFT writes it; ``rank`` an int or a function of (layer, expert, name)."""
    widths = {
        "gate_proj": (config.hidden, config.intermediate),
        "up_proj": (config.hidden, config.intermediate),
        "down_proj": (config.intermediate, config.hidden),
    }
    tensors = {}
    for layer in layers:
        for e in range(config.num_experts):
            for name in names:
                r = rank if isinstance(rank, int) else rank(layer, e, name)
                n_in, n_out = widths[name]
                key = f"{P}{layer}.mlp.experts.{e}.{name}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(r, n_in).to(dtype)
                tensors[f"{key}.lora_B.weight"] = torch.randn(n_out, r).to(dtype)
    return tensors


def dense(tensors, layer, scale=lambda e, name: 1.0, config=CONFIG):
    """(E, out, in) of gate, up, down out of per-expert tensors; zeros for what is not there."""
    widths = {"gate_proj": (config.intermediate, config.hidden), "up_proj": (config.intermediate, config.hidden)}
    out = []
    for name in NAMES:
        shape = widths.get(name, (config.hidden, config.intermediate))
        rows = []
        for e in range(config.num_experts):
            key = f"{P}{layer}.mlp.experts.{e}.{name}"
            if f"{key}.lora_A.weight" not in tensors:
                rows.append(torch.zeros(shape, dtype=torch.float64))
                continue
            a, b = (tensors[f"{key}.lora_{s}.weight"].double() for s in "AB")
            rows.append(scale(e, name) * (b @ a))
        out.append(torch.stack(rows))
    return out


def deltas(bank, slot=0):
    """(E, out, in) of gate, up, down that a slot of a bank adds, at its live rank."""
    r = int(bank.ranks[slot])
    pairs = [*zip(bank.gate_up_a, bank.gate_up_b), (bank.w2_a, bank.w2_b)]
    return [b[slot, ..., :r].double() @ a[slot, :, :r].double() for a, b in pairs]


def check(bank, reference, limit=1e-6):
    for name, got, ref in zip(NAMES, deltas(bank), reference):
        if not ref.any():
            assert not got.any(), name
        else:
            assert_close(name, ref, got.expand_as(ref), limit)


def equal_banks(a, b):
    fields = ("slots", "rank", "num_experts", "one_a", "shared_a", "shared_b", "dtype")
    assert [getattr(a, f) for f in fields] == [getattr(b, f) for f in fields]
    assert torch.equal(a.ranks, b.ranks) and torch.equal(a.enabled, b.enabled)
    for (name, x, _), (_, y, _) in zip(a._factors(), b._factors()):
        assert torch.equal(x, y), name


def flat(tensors, layer, swapped=False, config=CONFIG, names=NAMES):
    """The same adapter in PEFT's target_parameters layout: gate and up at twice the rank, B block-diagonal."""
    e, out = config.num_experts, {}

    def get(name, side):
        return torch.stack([tensors[f"{P}{layer}.mlp.experts.{i}.{name}.lora_{side}.weight"] for i in range(e)])

    def put(module, a, b):
        if swapped:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        out[f"{P}{layer}.mlp.{module}.lora_A.weight"] = a.reshape(-1, a.shape[2]).contiguous()
        out[f"{P}{layer}.mlp.{module}.lora_B.weight"] = b.permute(1, 2, 0).reshape(b.shape[1], -1).contiguous()

    if "gate_proj" in names:
        a = torch.cat([get("gate_proj", "A"), get("up_proj", "A")], 1)
        b = torch.stack([torch.block_diag(g, u) for g, u in zip(get("gate_proj", "B"), get("up_proj", "B"))])
        put("experts.base_layer", a, b)
    if "down_proj" in names:
        put("experts", get("down_proj", "A"), get("down_proj", "B"))
    return out


def folder(path, tensors, **config):
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: t.contiguous() for k, t in tensors.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": R, "lora_alpha": R, **config}))
    return path


# -------------------------------------------------------------------------------------------------------- layouts


def test_per_expert_names_with_alpha_over_r(tmp_path):
    t = per_expert()
    got = load_adapter(folder(tmp_path, t, lora_alpha=2 * R), CONFIG)
    assert sorted(got.experts) == [1, 2] and got.rank == R
    for layer, bank in got.experts.items():
        assert (bank.slots, bank.rank, bank.ranks.tolist(), bank.enabled.tolist()) == (1, R, [R], [1])
        check(bank, dense(t, layer, lambda e, name: 2.0))


def test_tensors_in_memory_have_no_scale_unless_told():
    t = per_expert()
    check(load_adapter(t, CONFIG).experts[1], dense(t, 1))
    check(load_adapter(t, CONFIG, peft_config={"r": R, "lora_alpha": 1}).experts[1], dense(t, 1, lambda e, n: 1 / R))


def test_rslora_divides_by_the_root_of_the_rank():
    t = per_expert()
    got = load_adapter(t, CONFIG, peft_config={"r": R, "lora_alpha": 5, "use_rslora": True})
    check(got.experts[2], dense(t, 2, lambda e, name: 5 / R**0.5))


def test_the_scale_is_folded_once_and_never_into_the_callers_tensors():
    t = per_expert()
    before = {k: v.clone() for k, v in t.items()}
    for _ in range(2):
        got = load_adapter(t, CONFIG, peft_config={"r": R, "lora_alpha": 7 * R})
        check(got.experts[1], dense(before, 1, lambda e, name: 7.0))
        got.experts[1].clear_slot_(0)
    assert all(torch.equal(t[k], before[k]) for k in t)


def test_the_product_with_the_scale_is_rounded_once():
    t = per_expert(dtype=torch.bfloat16)
    got = load_adapter(t, CONFIG, peft_config={"r": R, "lora_alpha": 5}).experts[1]
    b = torch.stack([t[f"{P}1.mlp.experts.{e}.down_proj.lora_B.weight"] for e in range(E)])
    assert got.dtype == torch.bfloat16 and torch.equal(got.w2_b[0], (b.float() * (5 / R)).bfloat16())
    wide = {k: v.float() + 1e-4 for k, v in t.items()}
    narrow = load_adapter(wide, CONFIG, dtype=torch.bfloat16, peft_config={"r": R, "lora_alpha": 5}).experts[1]
    assert torch.equal(narrow.w2_b[0], ((b.float() + 1e-4) * (5 / R)).bfloat16())


@pytest.mark.parametrize(
    "names", [("gate_proj",), ("up_proj",), ("down_proj",), ("gate_proj", "up_proj"), ("gate_proj", "down_proj"),
              ("up_proj", "down_proj"), NAMES], ids="+".join,
)  # fmt: skip
def test_any_subset_of_gate_up_down(names, tmp_path):
    """A loader that expects all three drops a gate-only adapter in silence, or fails on a down-only one."""
    t = per_expert(names=names)
    bank = load_adapter(t, CONFIG).experts[1]
    check(bank, dense(t, 1))
    again = load_adapter(export_adapter({1: bank}, tmp_path), CONFIG).experts[1]
    equal_banks(bank, again)
    written = adapters._read(tmp_path)[0]
    assert {re.search(r"(\w+_proj)", k)[1] for k in written} == set(names)
    wide = ExpertLoRA.zeros(1, CONFIG.shard(), R + 1, torch.float32).write_slot_(0, bank)
    check(wide, dense(t, 1))


def test_gate_and_up_have_their_own_a():
    t = per_expert()
    bank = load_adapter(t, CONFIG).experts[1]
    assert not bank.one_a
    for s, name in enumerate(("gate_proj", "up_proj")):
        assert torch.equal(bank.gate_up_a[s][0, 2], t[f"{P}1.mlp.experts.2.{name}.lora_A.weight"])


def test_equal_a_of_gate_and_up_is_stored_once():
    t = per_expert()
    for e in range(E):
        t[f"{P}1.mlp.experts.{e}.up_proj.lora_A.weight"] = t[f"{P}1.mlp.experts.{e}.gate_proj.lora_A.weight"].clone()
    bank = load_adapter(t, CONFIG).experts[1]
    assert bank.one_a and bank.w13_a.shape == (1, E, 1, R, H)
    check(bank, dense(t, 1))
    t[f"{P}1.mlp.experts.{E - 1}.up_proj.lora_A.weight"] += 1  # the last expert alone differs
    bank = load_adapter(t, CONFIG).experts[1]
    assert not bank.one_a
    check(bank, dense(t, 1))


def test_fused_gate_up_per_expert_and_stacked_share_one_a():
    for stacked in (False, True):
        a, b = torch.randn(E, R, H), torch.randn(E, 2 * I, R)
        if stacked:
            t = {f"{P}1.mlp.experts.gate_up_proj.lora_A": a, f"{P}1.mlp.experts.gate_up_proj.lora_B": b}
        else:
            t = {
                f"{P}1.mlp.experts.{e}.gate_up_proj.lora_{s}.weight": x[e]
                for e in range(E)
                for s, x in (("A", a), ("B", b))
            }
        bank = load_adapter(t, CONFIG).experts[1]
        assert bank.one_a and bank.rank == R
        full = b.double() @ a.double()
        check(bank, [full[:, :I], full[:, I:], torch.zeros(E, H, I, dtype=torch.float64)])


@pytest.mark.parametrize("swapped", [False, True])
def test_flat_3d_experts_outermost_in_a_and_innermost_in_b(swapped, tmp_path):
    """Reading B as (out, E, rank), or an [in, out] parameter as [out, in], gives another adapter of the same shape."""
    t = per_expert()
    f = {**flat(t, 1, swapped), **flat(t, 2, swapped)}
    pattern = {"mlp.experts.gate_up_proj": 2 * R}
    path = folder(tmp_path, f, rank_pattern=pattern, alpha_pattern=dict.fromkeys(pattern, 4 * R), lora_alpha=2 * R)
    for layer, bank in load_adapter(path, CONFIG).experts.items():
        check(bank, dense(t, layer, lambda e, name: 2.0))


def test_flat_gate_up_at_twice_the_rank_splits_back_exactly():
    t = per_expert()
    f = flat(t, 1)
    peft = {
        "r": R,
        "lora_alpha": R,
        "rank_pattern": {r".*\.gate_up_proj": 2 * R},
        "alpha_pattern": {r".*\.gate_up_proj": 2 * R},
    }
    equal_banks(load_adapter(f, CONFIG, peft_config=peft).experts[1], load_adapter(t, CONFIG).experts[1])
    equal_banks(load_adapter(f, CONFIG).experts[1], load_adapter(t, CONFIG).experts[1])
    f[f"{P}1.mlp.experts.base_layer.lora_B.weight"][0, -1] = 0.5  # gate now uses the other half of A: nothing to split
    bank = load_adapter(f, CONFIG).experts[1]
    assert bank.rank == 2 * R and bank.one_a
    assert float(bank.gate_up_b[0][0, E - 1, 0, -1]) == 0.5


def test_flat_with_one_pair_is_told_by_its_shapes():
    t = per_expert(layers=(1,))
    for names, present in ((("gate_proj", "up_proj"), 0), (("down_proj",), 2)):
        f = flat(t, 1, names=names)
        f = {k.replace(".base_layer", ""): v for k, v in f.items()}  # PEFT nests nothing around a lone parameter
        check(
            load_adapter(f, CONFIG).experts[1],
            [d if (i < 2) == (present == 0) else 0 * d for i, d in enumerate(dense(t, 1))],
        )


BEAM_LIKE = BeamMoEConfig(hidden=2 * I, intermediate=I, num_experts=E, top_k=2, sparse=(False, True))  # H = 2 I


def test_where_h_is_2i_the_down_pair_settles_how_gate_up_is_laid_out():
    t = per_expert(layers=(1,), config=BEAM_LIKE)
    for swapped in (False, True):
        check(load_adapter(flat(t, 1, swapped, BEAM_LIKE), BEAM_LIKE).experts[1], dense(t, 1, config=BEAM_LIKE))


@pytest.mark.parametrize(
    "version,swapped", [("0.18.0", True), ("0.19.0", True), ("0.19.1", False), ("0.21.2.dev0", False)]
)
def test_where_h_is_2i_a_lone_gate_up_needs_the_version_that_wrote_it(version, swapped):
    t = per_expert(layers=(1,), names=("gate_proj", "up_proj"), config=BEAM_LIKE)
    f = flat(t, 1, swapped, BEAM_LIKE, ("gate_proj",))
    peft = {"r": 2 * R, "lora_alpha": 2 * R, "target_parameters": ["mlp.experts.gate_up_proj"]}
    check(
        load_adapter(f, BEAM_LIKE, peft_config={**peft, "peft_version": version}).experts[1],
        dense(t, 1, config=BEAM_LIKE),
    )
    with pytest.raises(ValueError, match="base_layer.lora_A.weight' reads as .in, out. and as .out, in."):
        load_adapter(f, BEAM_LIKE, peft_config=peft)


@pytest.mark.parametrize("style", ["w names", "mixed", "two dimensions"])
def test_shared_outer_factors(style, tmp_path):
    """vLLM's ``w1, w3, w2`` with an expert axis of 1, and Megatron-Bridge's shared side beside indexed ones."""
    t = per_expert(layers=(1,))
    for e in range(1, E):
        for name, side in (("gate_proj", "A"), ("up_proj", "A"), ("down_proj", "B")):
            t[f"{P}1.mlp.experts.{e}.{name}.lora_{side}.weight"] = t[f"{P}1.mlp.experts.0.{name}.lora_{side}.weight"]
    shared = {}
    for name, w, outer in (("gate_proj", "w1", "A"), ("up_proj", "w3", "A"), ("down_proj", "w2", "B")):
        for side in "AB":
            rows = torch.stack([t[f"{P}1.mlp.experts.{e}.{name}.lora_{side}.weight"] for e in range(E)])
            if side == outer:
                key, value = f"{P}1.mlp.experts.{name}.lora_{side}", rows[:1]
                if style == "w names":
                    key = f"{P}1.mlp.experts.{w}.lora_{side}.weight"
                shared[key] = value[0] if style == "two dimensions" else value
            elif style == "w names":
                shared[f"{P}1.mlp.experts.{w}.lora_{side}.weight"] = rows
            else:
                shared.update({f"{P}1.mlp.experts.{e}.{name}.lora_{side}.weight": rows[e] for e in range(E)})
    bank = load_adapter(shared, CONFIG, peft_config={"r": R, "lora_alpha": 2 * R}).experts[1]
    assert bank.shared_a and bank.shared_b and bank.w13_a.shape == (1, 1, 2, R, H) and bank.w2_b.shape == (1, 1, H, R)
    check(bank, dense(t, 1, lambda e, name: 2.0))
    equal_banks(bank, load_adapter(export_adapter({1: bank}, tmp_path / "s", "shared_outer"), CONFIG).experts[1])
    for layout in ("per_expert", "fused_3d"):  # repeated, and so no longer shared, but the same adapter
        got = load_adapter(export_adapter({1: bank}, tmp_path / layout, layout), CONFIG).experts[1]
        assert not got.shared_a and all(torch.equal(x, y) for x, y in zip(deltas(got), deltas(bank)))


def test_one_shared_factor_beside_separate_ones_is_repeated():
    t = per_expert(layers=(1,), names=("gate_proj", "up_proj"))
    a = torch.randn(1, R, H)
    for e in range(E):
        del t[f"{P}1.mlp.experts.{e}.gate_proj.lora_A.weight"]
    t[f"{P}1.mlp.experts.gate_proj.lora_A"] = a
    bank = load_adapter(t, CONFIG).experts[1]
    whole = dict(t)
    whole.update({f"{P}1.mlp.experts.{e}.gate_proj.lora_A.weight": a[0] for e in range(E)})
    assert not bank.shared_a
    check(bank, dense(whole, 1))


def test_mixtral_names():
    config = BeamMoEConfig.from_hf(
        {
            "model_type": "mixtral",
            "hidden_size": H,
            "intermediate_size": I,
            "num_hidden_layers": 2,
            "num_local_experts": E,
            "num_experts_per_tok": 2,
        }
    )
    t = per_expert(layers=(1,))
    new = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp": "block_sparse_moe"}
    renamed = {re.sub("|".join(new), lambda m: new[m[0]], k): v for k, v in t.items()}
    assert f"{P}1.block_sparse_moe.experts.0.w1.lora_A.weight" in renamed
    check(load_adapter(renamed, config).experts[1], dense(t, 1))


def test_names_from_a_live_peft_model_and_without_prefix():
    t = per_expert(layers=(1,))
    for change in (lambda k: k.replace(".weight", ".default.weight"), lambda k: k.removeprefix("base_model.model."),
                   lambda k: k.replace("model.layers", "model.language_model.layers")):  # fmt: skip
        check(load_adapter({change(k): v for k, v in t.items()}, CONFIG).experts[1], dense(t, 1))
    two = {k.replace(".weight", f".{n}.weight"): v for n in ("default", "other") for k, v in t.items()}
    with pytest.raises(ValueError, match="tensors must be of one adapter"):
        load_adapter(two, CONFIG)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_tensors_on_the_gpu_and_banks_on_the_gpu(fused):
    t = per_expert(dtype=torch.bfloat16)
    t = flat(t, 1) if fused else t
    want = load_adapter(t, CONFIG.shard(tp=2, tp_rank=1, ep=2), max_rank=8).experts[1]
    for source in (t, {k: v.cuda() for k, v in t.items()}):
        got = load_adapter(source, CONFIG.shard(tp=2, tp_rank=1, ep=2), max_rank=8, device="cuda").experts[1]
        assert got.device.type == got.ranks.device.type == "cuda"
        equal_banks(got.to("cpu"), want)


def test_pickled_weights_and_a_file_beside_its_configuration(tmp_path):
    t = per_expert(layers=(1,))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": R, "lora_alpha": R}))
    for zipped in (True, False):  # the format before torch 1.6 is none
        torch.save(t, tmp_path / "adapter_model.bin", _use_new_zipfile_serialization=zipped)
        check(load_adapter(tmp_path, CONFIG).experts[1], dense(t, 1))
    check(load_adapter(str(folder(tmp_path / "f", t) / "adapter_model.safetensors"), CONFIG).experts[1], dense(t, 1))


# ------------------------------------------------------------------------------------------------ ranks and patterns


def test_a_rank_below_the_banks_is_padded_with_zeros():
    t = per_expert()
    bank = load_adapter(t, CONFIG, max_rank=7).experts[1]
    assert bank.rank == 7 and bank.ranks.tolist() == [R]
    check(bank, dense(t, 1))
    for _, f, axis in bank._factors():
        assert not f.narrow(axis, R, 7 - R).any()
    with pytest.raises(ValueError, match="max_rank must be at least the adapter's rank in .*, 3, got 2"):
        load_adapter(t, CONFIG, max_rank=2)


def test_rank_and_alpha_patterns_per_module(tmp_path):
    ranks = {"down_proj": 5, "up_proj": 2}
    rank = lambda layer, e, name: 4 if (layer, e, name) == (2, 1, "gate_proj") else ranks.get(name, R)  # noqa: E731
    t = per_expert(rank=rank)
    peft = {
        "rank_pattern": {r"layers\.2\.mlp\.experts\.1\.gate_proj": 4, "down_proj": 5, r"experts\.\d+\.up_proj": 2},
        "alpha_pattern": {
            "model.layers.1.mlp.experts.0.down_proj": 50.0,
            "up_proj": 8,
            "^model.layers.2.*down_proj": 1,
        },
        "lora_alpha": 6,
    }
    alpha = {(1, 0, "down_proj"): 50.0, **{(2, e, "down_proj"): 1.0 for e in range(E)}}

    for layer, bank in load_adapter(folder(tmp_path, t, **peft), CONFIG).experts.items():
        assert bank.rank == 5 and bank.ranks.tolist() == [5]

        def scale(e, name, layer=layer):
            return alpha.get((layer, e, name), 8.0 if name == "up_proj" else 6.0) / rank(layer, e, name)

        check(bank, dense(t, layer, scale))


def test_the_first_pattern_that_matches_wins_whether_literal_or_not():
    patterns = adapters._Patterns(
        "rank_pattern", {r"experts\.\d+\.up_proj": 2, "up_proj": 3, "1.up_proj": 4, ".*gate": 5}
    )
    assert patterns.get("mlp.experts.1.up_proj", 1) == 2
    assert patterns.get("mlp.up_proj", 1) == 3 and patterns.get("other.1.up_proj", 1) == 3
    assert adapters._Patterns("rank_pattern", {"up_proj": 3, r"\w+_proj": 2}).get("mlp.up_proj", 1) == 3
    assert patterns.get("mlp.gate", 1) == 5 and patterns.get("mlp.cup_proj", 1) == 1
    with pytest.raises(ValueError, match="rank_pattern must hold regular expressions"):
        adapters._Patterns("rank_pattern", {"(": 2})


def test_a_rank_that_the_configuration_does_not_state_is_refused():
    """An all-gather too many once doubled the rank of A, and nothing looked."""
    t = per_expert()
    for config in ({"r": R + 1}, {"r": R, "rank_pattern": {"up_proj": 2}}):
        with pytest.raises(ValueError, match=r"lora_A.weight' must have rank \d by adapter_config, got 3"):
            load_adapter(t, CONFIG, peft_config={"lora_alpha": 1, **config})
    key = f"{P}1.mlp.experts.2.up_proj.lora_B.weight"
    with pytest.raises(ValueError, match=f"{key}' must have the rank of its lora_A, 3, got 6"):
        load_adapter({**t, key: torch.randn(I, 2 * R)}, CONFIG)


# ------------------------------------------------------------------------------------------------------------ shards


def assemble(t, config, tp, ep, rank, **kwargs):
    """Banks of all shards put together: B of gate and up and A of down along I, everything along E."""
    rows = []
    for e in range(ep):
        parts = [load_adapter(t, config.shard(tp, i, ep, e), max_rank=rank, **kwargs).experts for i in range(tp)]
        rows.append({
            n: ExpertLoRA(
                parts[0][n].w13_a,
                torch.cat([p[n].w13_b for p in parts], 3),
                torch.cat([p[n].w2_a for p in parts], 3),
                parts[0][n].w2_b,
                ranks=parts[0][n].ranks,
            )
            for n in parts[0]
        })  # fmt: skip
        for n in parts[0]:  # what is not split is the same on every rank
            assert all(torch.equal(p[n].w13_a, parts[0][n].w13_a) for p in parts)
            assert all(torch.equal(p[n].w2_b, parts[0][n].w2_b) for p in parts)
    return {
        n: ExpertLoRA(
            *(
                torch.cat([getattr(r[n], f) for r in rows], 1)
                if getattr(rows[0][n], f).shape[1] > 1 or ep == 1
                else getattr(rows[0][n], f)
                for f in ("w13_a", "w13_b", "w2_a", "w2_b")
            ),
            ranks=rows[0][n].ranks,
        )
        for n in rows[0]
    }


@pytest.mark.parametrize("rank", [None, 7], ids=["own rank", "rank below the bank's"])
@pytest.mark.parametrize("layout", ["per_expert", "flat", "swapped"])
def test_shards_put_together_equal_the_whole(layout, rank):
    """Sharding A by the adapter's rank once left zeros between the rows when that was below the bank's."""
    t = per_expert()
    if layout != "per_expert":
        t = {**flat(t, 1, layout == "swapped"), **flat(t, 2, layout == "swapped")}
    whole = load_adapter(t, CONFIG, max_rank=rank).experts
    for tp, ep in ((2, 1), (1, 2), (4, 2)):
        got = assemble(t, CONFIG, tp, ep, rank)
        for n in whole:
            equal_banks(got[n], whole[n])


def test_a_rank_and_scale_of_one_expert_follow_it_to_its_shard():
    t = per_expert(rank=lambda layer, e, name: 2 + e)
    patterns = {f"experts.{e}.{name}": 2 + e for e in range(E) for name in NAMES}
    peft = {"r": R, "lora_alpha": 1, "rank_pattern": patterns, "alpha_pattern": {"experts.3.up_proj": 9}}
    whole = load_adapter(t, CONFIG, peft_config=peft).experts[1]
    check(whole, dense(t, 1, lambda e, name: (9 if (e, name) == (3, "up_proj") else 1) / (2 + e)))
    equal_banks(assemble(t, CONFIG, 2, 2, None, peft_config=peft)[1], whole)


def test_pipeline_stages_take_their_own_layers():
    t = per_expert()
    stages = [load_adapter(t, CONFIG.shard(pp=3, pp_rank=p)).experts for p in range(3)]
    assert [sorted(s) for s in stages] == [[], [1], [2]]
    equal_banks(stages[1][1], load_adapter(t, CONFIG).experts[1])


def test_a_shard_validates_experts_that_are_not_its_own():
    t = per_expert()
    del t[f"{P}2.mlp.experts.3.up_proj.lora_B.weight"]
    with pytest.raises(ValueError, match="experts.3.up_proj.lora_B.weight' is missing"):
        load_adapter(t, CONFIG.shard(ep=4, ep_rank=0, pp=3, pp_rank=1))


# ----------------------------------------------------------------------------------------------- what must be refused

FIRST = f"{P}1.mlp.experts.0.gate_proj.lora_A.weight"
STRAY = [
    f"{P}1.mlp.experts.0.gate_proj.lora_C.weight",
    f"{P}1.mlp.experts.{E}.gate_proj.lora_A.weight",
    f"{P}1.mlp.experts.0.gate_prj.lora_A.weight",
    f"{P}1.mlp.experts.0.lora_A.weight",
    f"{P}1.mlp.experts.base_layer.base_layer.lora_A.weight",
    f"{P}0.mlp.experts.0.gate_proj.lora_A.weight",
    f"{P}3.mlp.experts.0.gate_proj.lora_A.weight",
    f"{P}3.self_attn.q_proj.lora_A.weight",
    f"{P}1.self_attn.q_prj.lora_A.weight",
    f"{P}1.mlp.gate_proj.lora_A.weight",
    f"{P}1.mlp.shared_expert.gate_proj.lora_A.weight",
    f"{P}1.mlp.experts.0.gate_proj.weight",
    f"{P.replace('layers', 'mtp.layers')}1.mlp.experts.0.gate_proj.lora_A.weight",
    "base_model.model.mtp.layers.1.mlp.experts.0.gate_proj.lora_A.weight",
    "talker.model.layers.1.mlp.experts.0.gate_proj.lora_A.weight",
    "base_model.model.visual.layers.1.self_attn.q_proj.lora_A.weight",
    "base_model.model.classifier.lora_A.weight",
    "something",
]


@pytest.mark.parametrize("key", STRAY)
def test_a_tensor_that_nothing_consumes_is_refused_by_name(key):
    """Expert tensors that were accepted and ignored once made an RL run sample its base model."""
    with pytest.raises(ValueError, match=re.escape(key)):
        load_adapter({**per_expert(), key: torch.zeros(R, H)}, CONFIG)


def test_layers_under_any_wrapper_of_the_model_and_under_its_own_path_are_its_own():
    wrapped = {k.replace(P, "base_model.model.model.language_model.layers."): v for k, v in per_expert().items()}
    assert sorted(load_adapter(wrapped, CONFIG).experts) == [1, 2]
    own = CONFIG.with_(experts_path="mtp.h.{layer}.mlp.experts")
    assert sorted(load_adapter({k.replace(P, "mtp.h."): v for k, v in per_expert().items()}, own).experts) == [1, 2]


def test_missing_tensors_are_refused_by_name():
    for gone, message in (
        (
            lambda k: ".experts.2.up_proj.lora_A" in k,
            "layers.1.mlp.experts.2.up_proj.lora_A.weight' is missing .3 of 4",
        ),
        (lambda k: "up_proj.lora_B" in k, "up_proj.lora_A.weight' has no lora_B beside it"),
    ):
        with pytest.raises(ValueError, match=message):
            load_adapter({k: v for k, v in per_expert().items() if not gone(k)}, CONFIG)
    attention = {f"{P}0.self_attn.q_proj.lora_A.weight": torch.zeros(R, H)}
    with pytest.raises(ValueError, match="q_proj.lora_A.weight' has no lora_B"):
        load_adapter(attention, CONFIG)
    with pytest.raises(ValueError, match="source must hold tensors, got none"):
        load_adapter({}, CONFIG)


@pytest.mark.parametrize(
    "key,shape,message",
    [
        (FIRST, (R, H + 1), r"must have shape \(r, 24\), got \(3, 25\)"),
        (FIRST, (H, R), r"must have shape \(r, 24\), got \(24, 3\)"),
        (FIRST, (1, R, H), r"must have shape \(r, 24\)"),
        (f"{P}1.mlp.experts.0.down_proj.lora_B.weight", (H - 1, R), r"must have shape \(24, r\), got \(23, 3\)"),
        (FIRST, (0, H), "must have a rank of at least 1"),
    ],
)
def test_a_wrong_shape_is_refused_by_name(key, shape, message):
    with pytest.raises(ValueError, match=re.escape(key) + ".* " + message):
        load_adapter({**per_expert(), key: torch.zeros(shape)}, CONFIG)


def test_wrong_stacked_and_flat_shapes_are_refused_by_name():
    with pytest.raises(
        ValueError, match=r"experts.gate_proj.lora_A' must have shape \(1\|4, r, 24\), got \(3, 3, 24\)"
    ):
        load_adapter(
            {
                f"{P}1.mlp.experts.gate_proj.lora_A": torch.zeros(3, R, H),
                f"{P}1.mlp.experts.gate_proj.lora_B": torch.zeros(4, I, R),
            },
            CONFIG,
        )
    f = flat(per_expert(), 1)
    key = f"{P}1.mlp.experts.lora_B.weight"
    with pytest.raises(ValueError, match=re.escape(key) + ".* must have shapes"):
        load_adapter({**f, key: torch.zeros(H, R * E + 1)}, CONFIG)
    twice = {**f, f"{P}1.mlp.experts.lora_A.weight": f[f"{P}1.mlp.experts.base_layer.lora_A.weight"],
             key: f[f"{P}1.mlp.experts.base_layer.lora_B.weight"]}  # fmt: skip
    with pytest.raises(ValueError, match="one module for gate and up and one for down"):
        load_adapter(twice, CONFIG)


def test_two_layouts_at_once_are_refused():
    t = per_expert()
    with pytest.raises(ValueError, match="layer 1 must have one layout"):
        load_adapter({**t, **flat(t, 1)}, CONFIG)
    fused = {
        f"{P}1.mlp.experts.gate_up_proj.lora_A": torch.zeros(E, R, H),
        f"{P}1.mlp.experts.gate_up_proj.lora_B": torch.zeros(E, 2 * I, R),
    }
    with pytest.raises(ValueError, match="gate and up must come fused or apart"):
        load_adapter({**t, **fused}, CONFIG)
    with pytest.raises(ValueError, match="one layout for one factor"):
        load_adapter({**t, f"{P}1.mlp.experts.gate_proj.lora_A": torch.zeros(1, R, H)}, CONFIG)
    with pytest.raises(ValueError, match="one tensor for one factor"):
        load_adapter({**t, FIRST.replace("gate_proj", "w1"): torch.zeros(R, H)}, CONFIG)


@pytest.mark.parametrize(
    "field,value",
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("alora_invocation_tokens", [1, 2]),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [5]),
        ("use_qalora", True),
        ("use_some_new_method", True),
        ("fan_in_fan_out", True),
        ("bias", "all"),
        ("peft_type", "LOHA"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "some_new_one"),
        ("r", 0),
        ("r", "8"),
        ("lora_alpha", None),
        ("rank_pattern", {"up_proj": -1}),
        ("rank_pattern", [1]),
        ("alpha_pattern", {"up_proj": float("nan")}),
    ],
)
def test_what_two_factors_cannot_express_is_refused_by_field(field, value):
    with pytest.raises(ValueError, match=f"adapter_config field {field}"):
        load_adapter(per_expert(), CONFIG, peft_config={"r": R, "lora_alpha": R, field: value})


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", None])
def test_initialisations_that_keep_the_base_are_taken(init):
    load_adapter(per_expert(), CONFIG, peft_config={"r": R, "lora_alpha": R, "init_lora_weights": init})


@pytest.mark.parametrize(
    "key,field",
    [
        (FIRST.replace("lora_A.weight", "lora_magnitude_vector.weight"), "use_dora"),
        (FIRST.replace("lora_A.weight", "lora_B.bias"), "lora_bias"),
    ],
)
def test_tensors_of_refused_kinds_are_refused_without_a_configuration(key, field):
    with pytest.raises(ValueError, match=f"{field} must be unset.*{re.escape(key)}"):
        load_adapter({**per_expert(), key: torch.zeros(I)}, CONFIG)


def test_types_and_arguments_are_checked():
    t = per_expert()
    with pytest.raises(ValueError, match=re.escape(FIRST) + ".* floating-point"):
        load_adapter({**t, FIRST: t[FIRST].to(torch.float8_e4m3fn)}, CONFIG)
    with pytest.raises(ValueError, match=re.escape(FIRST) + ".* must be a tensor"):
        load_adapter({**t, FIRST: t[FIRST].numpy()}, CONFIG)
    for t_ in (t[FIRST].to("meta"), t[FIRST].to_sparse()):
        with pytest.raises(ValueError, match=re.escape(FIRST) + ".* must be a dense tensor in memory"):
            load_adapter({**t, FIRST: t_}, CONFIG)
    with pytest.raises(ValueError, match="dtype must be one of .* got torch.float64"):
        load_adapter({**t, FIRST: t[FIRST].double()}, CONFIG)
    with pytest.raises(ValueError, match="max_rank must be a positive integer, got 0"):
        load_adapter(t, CONFIG, max_rank=0)
    with pytest.raises(ValueError, match="source must be a path or a mapping"):
        load_adapter(3, CONFIG)


def test_folders_without_weights_or_configuration(tmp_path):
    with pytest.raises(ValueError, match="source must hold adapter_model.safetensors"):
        load_adapter(tmp_path, CONFIG)
    save_file(per_expert(), tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="source must hold adapter_config.json"):
        load_adapter(tmp_path, CONFIG)


# ------------------------------------------------------------------------------------------------------ other modules


def others(rank=R):
    t = {}
    for module, n_in, n_out in (
        (f"{P}0.self_attn.q_proj", H, 16),
        (f"{P}1.self_attn.gate_proj", H, 16),
        (f"{P}0.mlp.down_proj", 40, H),
        (f"{P}2.mlp.gate", H, E),
        ("base_model.model.lm_head", H, 50),
    ):
        t[f"{module}.lora_A.weight"], t[f"{module}.lora_B.weight"] = torch.randn(rank, n_in), torch.randn(n_out, rank)
    t["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.randn(rank, 50)
    t["base_model.model.model.embed_tokens.lora_embedding_B"] = torch.randn(H, rank)
    return t


def test_tensors_of_other_modules_are_handed_back_whole():
    t, more = per_expert(), others()
    for shard in (CONFIG.shard(), CONFIG.shard(tp=2, tp_rank=1, pp=3, pp_rank=2)):
        got = load_adapter({**t, **more}, shard, peft_config={"r": R, "lora_alpha": 6, "alpha_pattern": {"q_proj": 9}})
        assert set(got.other) == set(more) and all(got.other[k] is more[k] for k in more)
        assert got.scaling[f"{P}0.self_attn.q_proj"] == 3.0 and got.scaling["base_model.model.lm_head"] == 2.0
    assert load_adapter(more, CONFIG).experts == {}


def test_shared_experts_belong_to_models_that_have_some():
    t = {f"{P}1.mlp.shared_experts.up_proj.lora_{s}.weight": torch.zeros(R, R) for s in "AB"}
    assert set(load_adapter(t, CONFIG.with_(shared_experts=1)).other) == set(t)


def test_export_keeps_other_modules_and_their_scale(tmp_path):
    peft = {"r": R, "lora_alpha": 6, "rank_pattern": {"lm_head": 5}, "alpha_pattern": {"q_proj": 9}}
    more = others()
    more["base_model.model.lm_head.lora_A.weight"] = torch.randn(5, H)
    more["base_model.model.lm_head.lora_B.weight"] = torch.randn(50, 5)
    got = load_adapter({**per_expert(), **more}, CONFIG, peft_config=peft)
    for layout in ("per_expert", "fused_3d"):
        again = load_adapter(export_adapter(got, tmp_path / layout, layout), CONFIG)
        assert set(again.other) == set(more) and all(torch.equal(again.other[k], more[k]) for k in more)
        assert again.scaling == pytest.approx(got.scaling)
        for n in got.experts:
            equal_banks(again.experts[n], got.experts[n])


# ------------------------------------------------------------------------------------------------------------- export


@given(
    layout=st.sampled_from(["per_expert", "fused_3d"]),
    names=st.sets(st.sampled_from(NAMES), min_size=1),
    ranks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    one_a=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    alpha=st.sampled_from([1, 3, 16]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_export_and_load_are_bit_exact(tmp_path_factory, layout, names, ranks, one_a, dtype, alpha):
    path = tmp_path_factory.mktemp("adapter")
    t = per_expert(names=names, rank=lambda layer, e, name: ranks[layer - 1], dtype=dtype)
    if one_a and {"gate_proj", "up_proj"} <= names:
        t.update({k: t[k.replace("up_proj", "gate_proj")] for k in t if "up_proj.lora_A" in k})
    peft = {"r": ranks[0], "lora_alpha": alpha, "rank_pattern": {"layers.2.*": ranks[1]}}
    first = load_adapter(t, CONFIG, peft_config=peft)
    again = load_adapter(export_adapter(first, path, layout), CONFIG)
    assert sorted(again.experts) == [1, 2]
    for n in first.experts:
        equal_banks(again.experts[n], first.experts[n])
    third = load_adapter(export_adapter(first, path, layout), CONFIG, max_rank=8)  # written over, into wider banks
    for n in first.experts:
        padded = ExpertLoRA.zeros(1, CONFIG.shard(), 8, dtype, one_a=first.experts[n].one_a).write_slot_(
            0, first.experts[n]
        )
        equal_banks(third.experts[n], padded)


def test_export_cuts_to_the_live_rank_of_the_slot_asked_for(tmp_path):
    t = per_expert()
    loaded = load_adapter(t, CONFIG).experts
    engine = {n: ExpertLoRA.zeros(3, CONFIG.shard(), 8, torch.float32).write_slot_(2, b) for n, b in loaded.items()}
    again = load_adapter(export_adapter(engine, tmp_path, slot=2), CONFIG).experts
    for n in loaded:
        equal_banks(again[n], loaded[n])
    with pytest.raises(ValueError, match="export_adapter: slot 0 must hold an adapter"):
        export_adapter(engine, tmp_path, slot=0)


def test_export_keeps_a_fresh_adapter_whose_b_is_zero(tmp_path):
    t = {k: torch.zeros_like(v) if "lora_B" in k else v for k, v in per_expert().items()}
    first = load_adapter(t, CONFIG).experts[1]
    for layout in ("per_expert", "fused_3d"):
        equal_banks(load_adapter(export_adapter({1: first}, tmp_path / layout, layout), CONFIG).experts[1], first)


def test_export_uses_the_models_names_and_checks_that_banks_are_whole(tmp_path):
    mixtral = CONFIG.with_(experts_path="model.layers.{layer}.block_sparse_moe.experts", projections=("w1", "w3", "w2"))
    bank = load_adapter(per_expert(), CONFIG).experts[1]
    keys = adapters._read(export_adapter({1: bank}, tmp_path, config=mixtral))[0]
    assert f"{P}1.block_sparse_moe.experts.3.w2.lora_B.weight" in keys
    part = load_adapter(per_expert(), CONFIG.shard(tp=2)).experts[1]
    with pytest.raises(ValueError, match=r"bank of layer 1 must be whole .*, got \(4, 24, 4\)"):
        export_adapter({1: part}, tmp_path, config=CONFIG)


def test_export_refuses_unknown_layouts_and_separate_factors_for_shared_outer(tmp_path):
    bank = load_adapter(per_expert(), CONFIG).experts[1]
    with pytest.raises(ValueError, match="layout must be one of per_expert, fused_3d, shared_outer, got '3d'"):
        export_adapter({1: bank}, tmp_path, "3d")
    with pytest.raises(ValueError, match="shared_a=False"):
        export_adapter({1: bank}, tmp_path, "shared_outer")


def test_the_written_configuration_is_what_peft_reads(tmp_path):
    bank = load_adapter(per_expert(), CONFIG).experts[1]
    read = lambda: json.loads((tmp_path / "adapter_config.json").read_text())  # noqa: E731
    export_adapter({1: bank}, tmp_path, base_model="some/model")
    c = read()
    assert (c["peft_type"], c["r"], c["lora_alpha"], c["base_model_name_or_path"]) == ("LORA", R, R, "some/model")
    assert c["target_modules"] == sorted(NAMES) and c["rank_pattern"] == {} and not c["use_rslora"]
    export_adapter({1: bank}, tmp_path, "fused_3d")
    c = read()
    assert c["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"] and c["target_modules"] == []
    assert c["rank_pattern"] == c["alpha_pattern"] == {r"mlp\.experts\.gate_up_proj": 2 * R} and c["r"] == R
    keys = set(adapters._read(tmp_path)[0])
    assert keys == {f"{P}1.mlp.experts{m}.lora_{s}.weight" for m in ("", ".base_layer") for s in "AB"}
    gate_up = load_adapter(per_expert(names=("gate_proj", "up_proj")), CONFIG).experts
    keys = set(adapters._read(export_adapter(gate_up, tmp_path, "fused_3d"))[0])
    assert keys == {f"{P}{n}.mlp.experts.lora_{s}.weight" for n in (1, 2) for s in "AB"}  # PEFT nests only two


def test_a_progress_bar_changes_nothing(monkeypatch, capsys):
    t = per_expert()
    monkeypatch.setenv("BEAM_MOE_PROGRESS", "1")
    check(load_adapter(t, CONFIG).experts[2], dense(t, 2))
    assert "adapter layers" in capsys.readouterr().out
    load_adapter(t, CONFIG, progress=False)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("peft", "message"),
    [
        ([1], r"adapter_config must be a mapping, got \[1\]"),
        ({"r": R, "use_rslora": "false"}, "field use_rslora must not be text, got 'false'"),
        ({"r": R, "rank_pattern": {3: 4}}, "field rank_pattern must have text as keys, got 3"),
    ],
)
def test_a_configuration_of_another_type_is_named(peft, message):
    """The text "false" is true: read as a flag it would change the scale of every adapter."""
    with pytest.raises(ValueError, match=f"^load_adapter: .*{message}"):
        load_adapter(per_expert(), CONFIG, peft_config=peft)


def test_arguments_of_another_type_are_named():
    for source, config, message in (
        (per_expert(), None, "config must be a BeamMoEConfig or a Shard, got NoneType"),
        ({3: torch.ones(1)}, CONFIG, "source must have names as keys, got 3"),
        ({f"lm_head.lora_{side}.weight": None for side in "AB"}, CONFIG, "'lm_head.lora_A.weight' must be a tensor"),
    ):
        with pytest.raises(ValueError, match=f"^load_adapter: {message}"):
            load_adapter(source, config)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("adapter_config.json", b"", "adapter_config.json must be JSON"),
        ("adapter_config.json", b"null", "adapter_config.json must be a JSON object, got None"),
        ("adapter_model.safetensors", b"", "source must be safetensors"),
        ("adapter_model.safetensors", b"version https://git-lfs", "source must be safetensors"),
        ("adapter_model.bin", b"", "source must be tensors that torch.save wrote"),
        ("adapter_model.bin", b"junk", "source must be tensors that torch.save wrote"),
        ("adapter_model.bin", b"PK\x03\x04" + b"0" * 64, "source must be tensors that torch.save wrote"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, text, message):
    folder(tmp_path, per_expert(), r=R)
    if name.endswith(".bin"):
        (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=f"^load_adapter: {message}"):
        load_adapter(tmp_path, CONFIG)


def test_an_export_that_could_not_be_loaded_is_refused(tmp_path):
    bank = load_adapter(per_expert(), CONFIG).experts[1]
    for adapter, config, message in (
        (None, None, "adapter must be an Adapter or banks by layer, got NoneType"),
        ({1: 5}, None, "layer 1 must be an ExpertLoRA, got int"),
        ({-1: bank}, None, "sparse layers of the model as keys, got -1"),
        ({"1": bank}, None, "sparse layers of the model as keys, got '1'"),
        ({CONFIG.num_layers: bank}, CONFIG, f"sparse layers of the model as keys, got {CONFIG.num_layers}"),
    ):
        with pytest.raises(ValueError, match=f"^export_adapter: .*{message}"):
            export_adapter(adapter, tmp_path, config=config)
