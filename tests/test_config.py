"""BeamMoEConfig: geometry from configurations, shards, bytes and read floors; the table of environment variables."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_moe import env
from beam_moe.config import MODELS, BeamMoEConfig

QWEN = MODELS["qwen3-30b-a3b"]
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
GLM = {
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def test_beam():
    c = BeamMoEConfig.from_hf("beam-1.0")
    assert (c.hidden, c.intermediate, c.num_experts, c.top_k, c.num_layers) == (5120, 2560, 256, 8, 52)
    assert c.sparse == (False,) * 3 + (True,) * 49
    assert (c.scoring, c.n_group, c.topk_group, c.renormalize, c.routed_scaling) == ("sigmoid", 8, 4, True, 2.5)
    assert c.correction_bias and c.dense_intermediate == 20480 and c.shared_experts == 0
    assert c.experts_path.format(layer=7) == "model.layers.7.mlp.experts"


def test_beam_says_which_layers_are_dense_in_words_or_by_default():
    words = {**MODELS["beam-1.0"], "mlp_layer_types": "3 x dense, then 49 x sparse"}
    silent = {k: v for k, v in MODELS["beam-1.0"].items() if k != "mlp_layer_types"}
    reference = BeamMoEConfig.from_hf("beam-1.0")
    assert BeamMoEConfig.from_hf({"name": "x", "config": words}) == reference == BeamMoEConfig.from_hf(silent)


def test_qwen3_moe():
    c = BeamMoEConfig.from_hf(QWEN)
    assert (c.hidden, c.intermediate, c.num_experts, c.top_k) == (2048, 768, 128, 8)
    assert all(c.sparse) and c.scoring == "softmax" and c.renormalize and c.n_group is None and not c.correction_bias
    step = BeamMoEConfig.from_hf({**QWEN, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert step.sparse == (False, True, False, False)


def test_mixtral():
    c = BeamMoEConfig.from_hf(MIXTRAL)
    assert (c.hidden, c.intermediate, c.num_experts, c.top_k) == (4096, 14336, 8, 2)
    assert c.scoring == "softmax" and c.renormalize and all(c.sparse) and c.dense_intermediate is None
    assert c.experts_path == "model.layers.{layer}.block_sparse_moe.experts" and c.projections == ("w1", "w3", "w2")


def test_deepseek_v3():
    c = BeamMoEConfig.from_hf(DEEPSEEK)
    assert (c.num_experts, c.intermediate, c.shared_experts, c.dense_intermediate) == (256, 2048, 1, 18432)
    assert (c.n_group, c.topk_group, c.scoring, c.correction_bias) == (8, 4, "sigmoid", True)
    assert c.sparse.index(True) == 3 and sum(c.sparse) == 58


def test_glm_has_one_group_which_is_none():
    c = BeamMoEConfig.from_hf(GLM)
    assert c.n_group is None and c.topk_group is None and c.scoring == "sigmoid" and c.correction_bias
    assert sum(c.sparse) == 45


def test_a_new_model_needs_only_a_configuration():
    new = {"model_type": "next_year", "hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 12}
    new.update(num_experts_per_token=3, num_hidden_layers=4, moe_layer_freq=[0, 1, 0, 1], scoring_func="sigmoid")
    c = BeamMoEConfig.from_hf(new, correction_bias=True)
    assert c.sparse == (False, True, False, True) and c.scoring == "sigmoid" and c.correction_bias


@pytest.mark.parametrize("wrap", ["folder", "file", "object", "to_dict", "nested", "nested object"])
def test_every_form_of_a_configuration(tmp_path, wrap):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    source = {
        "folder": str(tmp_path),
        "file": tmp_path / "config.json",
        "object": SimpleNamespace(**QWEN),
        "to_dict": type("C", (), {"to_dict": lambda self: dict(QWEN)})(),
        "nested": {"model_type": "qwen3_vl_moe", "text_config": QWEN},
        "nested object": SimpleNamespace(model_type="qwen3_vl_moe", text_config=SimpleNamespace(**QWEN)),
    }[wrap]
    assert BeamMoEConfig.from_hf(source) == BeamMoEConfig.from_hf(QWEN)


def test_gpt_oss_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="'gpt_oss' is not supported: its experts have biases and a clamped"):
        BeamMoEConfig.from_hf({"model_type": "gpt_oss", "hidden_size": 2880, "num_local_experts": 32})


@pytest.mark.parametrize(
    "change,message",
    [
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"swiglu_limit": 7.0}, "swiglu_limit must be unset"),
        ({"num_experts": None}, "config must be sparse"),
        ({"is_moe": False}, "is_moe must be true"),
        ({"hidden_size": None}, "config must be given one of .'hidden_size'"),
        ({"num_experts_per_tok": 129}, "top_k must be at most num_experts 128, got 129"),
        ({"n_group": 7, "topk_group": 2}, "n_group must be a divisor of num_experts 128, got 7"),
        ({"n_group": 64, "topk_group": 2}, "top_k must be at most the experts of topk_group groups"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types must be 48 times"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq must be 48 entries"),
        ({"scoring_func": "tanh"}, "scoring must be 'sigmoid' or 'softmax', got 'tanh'"),
        ({"mlp_only_layers": list(range(48))}, "sparse must be true for at least one layer"),
        ({"moe_intermediate_size": 0}, "intermediate must be a positive integer, got 0"),
    ],
)
def test_a_bad_configuration_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        BeamMoEConfig.from_hf({**QWEN, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 2048.5}, "hidden must be an integer, got 2048.5"),
        ({"hidden_size": [2048]}, r"hidden must be an integer, got \[2048\]"),
        ({"hidden_size": True}, "hidden must be an integer, got True"),
        ({"n_group": "two"}, "n_group must be an integer, got 'two'"),
        ({"mlp_layer_types": 5}, "mlp_layer_types must be 48 times"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers, got 1"),
        ({"moe_layer_freq": "x"}, "moe_layer_freq must be an integer, got 'x'"),
        ({"routed_scaling_factor": "x"}, "routed_scaling_factor must be a number, got 'x'"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling must be a finite number, got nan"),
    ],
)
def test_a_value_of_another_type_is_named_not_rounded(change, message):
    with pytest.raises(ValueError, match=f"BeamMoEConfig(.from_hf)?: {message}"):
        BeamMoEConfig.from_hf({**MODELS["qwen3-30b-a3b"], **change})


def test_the_last_sparse_layer_may_be_minus_one_or_zero():
    """ERNIE's configurations say -1 for the last layer of the model; 0 is the first layer, not a missing value."""
    ernie = {"model_type": "ernie4_5_moe", "hidden_size": 16, "moe_intermediate_size": 8, "intermediate_size": 32}
    ernie |= {"num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2}
    for start, end, sparse in (
        (1, -1, (False, True, True)),
        (0, 0, (True, False, False)),
        (1, None, (False, True, True)),
    ):
        config = BeamMoEConfig.from_hf({**ernie, "moe_layer_start_index": start, "moe_layer_end_index": end})
        assert config.sparse == sparse


@pytest.mark.parametrize(
    "change,expected",
    [
        ({"num_dense_layers": 2}, {"sparse": (False, False, True, True)}),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, {"sparse": (False, True, False, True)}),
        ({"expert_layer_period": 2}, {"sparse": (True, False, True, False)}),
        ({"score_func": "sigmoid", "route_norm": True, "route_scale": 2.8}, ("sigmoid", True, 2.8)),
        ({"moe_router_activation_func": "sigmoid", "moe_renormalize": True}, ("sigmoid", True, 1.0)),
        ({"model_type": "afmoe", "route_norm": False}, ("sigmoid", False, 1.0)),
        ({"model_type": "qwen3_5_moe_text", "router_scaling_factor": 2}, ("softmax", True, 2.0)),
        ({"model_type": "ernie4_5_moe"}, {"scoring": "softmax", "renormalize": True, "correction_bias": True}),
        ({"model_type": "flint", "norm_topk_prob": True}, {"scoring": "sigmoid", "correction_bias": False}),
    ],
)
def test_other_families_names_for_layers_and_routing(change, expected):
    """Passed over, they would make every layer sparse, and any router an unscaled softmax."""
    base = {"hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 4, "num_experts": 4, "top_k_experts": 2}
    c = BeamMoEConfig.from_hf({**base, **change})
    if isinstance(expected, tuple):
        expected = dict(zip(("scoring", "renormalize", "routed_scaling"), expected))
    assert {field: getattr(c, field) for field in expected} == expected


def test_a_routed_scaling_of_zero_is_kept_and_an_unknown_override_named():
    assert BeamMoEConfig.from_hf({**MODELS["qwen3-30b-a3b"], "routed_scaling_factor": 0.0}).routed_scaling == 0.0
    with pytest.raises(ValueError, match=r"from_hf: overrides must be fields of this class, got \['width'\]"):
        BeamMoEConfig.from_hf("qwen3-30b-a3b", width=5)


@pytest.mark.parametrize("text", ["", "{", "null", "[]"])
def test_a_file_that_is_no_json_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="BeamMoEConfig.from_hf: config must be "):
        BeamMoEConfig.from_hf(tmp_path)


def test_sources_that_are_no_configuration(tmp_path):
    with pytest.raises(ValueError, match="config must be a path or one of beam-1.0"):
        BeamMoEConfig.from_hf(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="config must be a mapping, a path or an object"):
        BeamMoEConfig.from_hf(3)


def test_the_share_of_pp2_tp8():
    beam = BeamMoEConfig.from_hf("beam-1.0")
    first, second = (beam.shard(tp=8, tp_rank=3, pp=2, pp_rank=p) for p in (0, 1))
    assert (first.hidden, first.intermediate, first.num_experts) == (5120, 320, 256)
    assert first.intermediate_range == (960, 1280) and first.expert_range == (0, 256) and first.expert_map() is None
    assert first.sparse_layers == tuple(range(3, 26)) and second.sparse_layers == tuple(range(26, 52))
    assert first.expert_bytes() == 9_830_400 and first.layer_bytes() == 2_516_582_400  # 9.83 MB; the published layer
    assert second.rank_bytes() == 26 * 2_516_582_400


def test_bytes_of_adapters_are_the_published_shares():
    s = BeamMoEConfig.from_hf("beam-1.0").shard(tp=8)
    assert s.adapter_bytes(32) == (1_044_480, 0)  # 1.04 MB
    assert s.adapter_bytes(32)[0] / s.expert_bytes() == pytest.approx(0.106, abs=5e-4)
    own, common = s.adapter_bytes(32, "shared_outer")
    assert own / s.expert_bytes() == pytest.approx(0.006, abs=5e-4) and common == 3 * 5120 * 32 * 2
    assert s.adapter_bytes(32, "one_a")[0] == 1_044_480 - 5120 * 32 * 2
    assert s.adapter_layer_bytes(32, "shared_outer") == 256 * own + common
    assert s.adapter_rank_bytes(32) == 49 * 256 * 1_044_480


def test_mxfp8_has_a_scale_byte_for_every_32_weights():
    s = BeamMoEConfig.from_hf("beam-1.0").shard(tp=8)
    assert s.expert_bytes("mxfp8") == 3 * 5120 * 320 * 33 // 32
    whole = BeamMoEConfig.from_hf("beam-1.0").shard().rank_bytes("mxfp8")
    assert 500e9 < whole < 520e9  # most of the model
    with pytest.raises(ValueError, match="intermediate under mxfp8 must be a multiple of 32, got 40"):
        BeamMoEConfig.from_hf("beam-1.0").shard(tp=64).expert_bytes("mxfp8")


def test_floors_are_the_published_ones():
    s = BeamMoEConfig.from_hf("beam-1.0").shard(tp=8)
    assert s.floor_us(16, 4.42, 103) == pytest.approx(229, abs=0.5)
    assert s.floor_us(1, 4.42, rank=32) == pytest.approx(19.7, abs=0.05)  # eight experts with their adapters
    assert s.floor_us(16, 4.42) == pytest.approx(229, rel=0.015)  # 102 experts expected of uniform routing
    bare, lora = (s.floor_bytes(32, 160, rank=r) for r in (None, 32))
    assert lora / bare == pytest.approx(1.10625)
    shared = s.floor_bytes(32, 160, rank=32, layout="shared_outer")
    assert shared - bare == 160 * 3 * 320 * 32 * 2 + 3 * 5120 * 32 * 2
    four = s.floor_bytes(32, 160, rank=32, layout="shared_outer", slots=4, distinct_pairs=200)
    assert four - bare == 200 * 3 * 320 * 32 * 2 + 4 * 3 * 5120 * 32 * 2
    assert s.floor_bytes(32, 160, rank=32, distinct_pairs=0) == bare
    assert s.floor_bytes(0) == 0


def test_expected_experts_is_the_mean_of_draws():
    s = BeamMoEConfig(hidden=32, intermediate=32, num_experts=16, top_k=3, sparse=(True,)).shard()
    draws = torch.rand(4000, 5, 16).topk(3).indices.flatten(1)
    seen = torch.zeros(4000, 16).scatter_(1, draws, 1.0).sum(1).mean()
    assert s.expected_experts(5) == pytest.approx(float(seen), rel=0.01)
    assert s.expected_experts(1) == pytest.approx(3) and s.expected_experts(0) == 0


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
@settings(max_examples=12, deadline=None)
def test_shards_make_the_whole(tp, ep, pp):
    beam = BeamMoEConfig.from_hf("beam-1.0")
    shards = [beam.shard(tp, t, ep, e, pp, p) for t in range(tp) for e in range(ep) for p in range(pp)]
    assert sum(s.rank_bytes() for s in shards) == beam.shard().rank_bytes()
    table = torch.stack([s.expert_map() for s in shards if s.tp_rank == s.pp_rank == 0]) if ep > 1 else None
    if table is not None:  # every expert on exactly one rank, in order
        assert ((table >= 0).sum(0) == 1).all() and table.dtype == torch.int32
        assert torch.equal(table.max(0).values, torch.arange(256, dtype=torch.int32) % (256 // ep))


def test_stages_of_unequal_length_must_be_spelled_out():
    c = BeamMoEConfig.from_hf(DEEPSEEK)
    with pytest.raises(ValueError, match="shard: pp must be a divisor of num_layers 61, or pp_layers given, got 2"):
        c.shard(pp=2)
    s = c.shard(pp=2, pp_rank=1, pp_layers=(31, 30))
    assert s.sparse_layers == tuple(range(31, 61))
    assert c.shard(pp=3, pp_layers=(3, 29, 29)).sparse_layers == ()  # a stage of dense layers only


@pytest.mark.parametrize(
    "kwargs,message",
    [
        ({"tp": 3}, "tp must be a divisor of intermediate 2560, got 3"),
        ({"ep": 3}, "ep must be a divisor of num_experts 256, got 3"),
        ({"pp": 3}, "pp must be a divisor of num_layers 52"),
        ({"tp": 0}, "tp must be a positive integer, got 0"),
        ({"tp": 2.0}, "tp must be a positive integer, got 2.0"),
        ({"tp": 2, "tp_rank": 2}, "tp_rank must be in 0..1, got 2"),
        ({"ep": 2, "ep_rank": -1}, "ep_rank must be in 0..1, got -1"),
        ({"pp": 2, "pp_layers": (52, 0)}, "pp_layers must be 2 positive counts that sum to 52"),
        ({"pp": 2, "pp_layers": (26.0, 26.0)}, "pp_layers must be 2 positive counts that sum to 52"),
        ({"pp": 2, "pp_layers": 26}, "pp_layers must be 2 positive counts that sum to 52, got 26"),
    ],
)
def test_an_impossible_shard_is_named(kwargs, message):
    with pytest.raises(ValueError, match=f"shard: {message}"):
        BeamMoEConfig.from_hf("beam-1.0").shard(**kwargs)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda s: s.floor_bytes(1, 9), "distinct_experts must be in 0..8 for 1 tokens, got 9"),
        (lambda s: s.floor_bytes(4, 8, rank=8, distinct_pairs=9), "distinct_pairs must be at most"),
        (lambda s: s.floor_bytes(-1), "tokens must be an integer of at least 0"),
        (lambda s: s.floor_bytes(1, base="int4"), "base must be one of bf16, fp16, fp32, mxfp8, got 'int4'"),
        (lambda s: s.floor_bytes(1, rank=8, layout="packed"), "layout must be one of per_expert, one_a, shared_outer"),
        (lambda s: s.floor_us(1, 0.0), "read_tb_s must be positive"),
        (lambda s: s.adapter_bytes(-1), "rank must be an integer of at least 0"),
    ],
)
def test_a_bad_floor_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(BeamMoEConfig.from_hf("beam-1.0").shard(tp=8))


def test_with_changes_one_field():
    assert BeamMoEConfig.from_hf("beam-1.0").with_(num_experts=64).shard(ep=2).num_experts == 32


def test_importing_the_package_needs_no_torch_gpu_or_engine():
    heavy = ("torch", "triton", "vllm", "megatron", "transformers")
    code = f"import sys, beam_moe; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_resolve():
    import beam_moe

    assert {"BeamMoEConfig", "load_adapter", "export_adapter", "Adapter", "ExpertLoRA"} <= set(dir(beam_moe))
    assert all(getattr(beam_moe, name) is not None for name in beam_moe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'load_adaptor'"):
        beam_moe.load_adaptor  # noqa: B018


def test_environment_variables(monkeypatch):
    monkeypatch.delenv("BEAM_MOE_CHECK", raising=False)
    assert env.flag("CHECK") is False
    for value, want in (("1", True), ("on", True), ("0", False), ("", False), ("No", False)):
        monkeypatch.setenv("BEAM_MOE_CHECK", value)
        assert env.flag("CHECK") is want
    monkeypatch.setenv("BEAM_MOE_CHECK", "maybe")
    with pytest.raises(ValueError, match="BEAM_MOE_CHECK must be one of"):
        env.flag("CHECK")
    with pytest.raises(ValueError, match="name must be one of"):
        env.text("CHEKC")
