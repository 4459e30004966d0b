"""Over gloo: adapters in every layout reach each rank's buffers whole, and routed experts reach the last stage."""

import pytest
import torch

from beam_moe.kernels.router import grouped_topk_reference

LIMIT = 2e-3  # fp16 rounding of values around one


def routed(layer: int) -> list:
    """What `ranks.choose_experts` must find on every rank."""
    g = torch.Generator().manual_seed(layer)
    weight, x = torch.randn(8, 64, generator=g), torch.randn(5, 64, generator=g).half()
    return grouped_topk_reference(x, weight, torch.zeros(8), top_k=2, n_group=4, topk_group=2)[1].tolist()


def test_layouts_at_tensor_parallel_2(harness, tp2):
    """Per-expert, flat 3-D without a word in the request, packed, shared-outer; the same under expert parallelism."""
    for rank, results in enumerate(tp2):
        for task, result in zip(harness.TP2, results):
            if task["task"] != "load":
                continue
            assert "error" not in result, (rank, task, result)
            assert result["layers"] == [0, 1, 2, 3]
            assert len(result["differences"]) == 2 and max(result["differences"]) < LIMIT, (rank, task, result)
            assert min(result["attention"]) > 0, "the attention gate's adapter did not arrive"
            assert result["kernels"] == ["BeamTritonExperts"]
            assert result["routed"] == [routed(2), routed(3)]
            assert max(result["linear"]) < LIMIT


def test_pure_pipeline_stages(pp2):
    """A stage of dense layers only and one of sparse layers only load their parts; without the prefixes both refuse."""
    first, second = pp2
    for loaded in (0, 1):
        assert first[loaded]["layers"] == [0, 1] and first[loaded]["differences"] == [], first
        assert second[loaded]["layers"] == [2, 3] and max(second[loaded]["differences"]) < LIMIT, second
        assert max(first[loaded]["linear"] + second[loaded]["linear"]) < LIMIT
        assert first[loaded]["routed"] == [] and second[loaded]["routed"] == [routed(2), routed(3)]
        assert min(first[loaded]["attention"] + second[loaded]["attention"]) > 0
    assert "expected target modules" in first[2]["error"] and "expected target modules" in second[2]["error"]


def test_a_rank_without_a_module_of_an_adapter(tp2, pp2):
    """A stage or an expert-parallel rank takes an adapter of which it has nothing, and requests for it."""
    for some, none in ((tp2[0][7], tp2[1][7]), (pp2[1][5], pp2[0][5])):
        assert some["modules"] > 0 and some["sums"] == [some["sums"][0]] * 3 and some["sums"][0] > 0, some
        assert none["modules"] == 0 and none["sums"] == [0, 0, 0], none
        assert some["taken"] and none["taken"] and some["active"] == none["active"] == [1, 2]


def test_an_expert_that_no_rank_has(tp2):
    """Each rank would take it for another rank's."""
    assert all("no layer takes its model.layers.2.mlp.experts.9.gate_proj" in r[8]["error"] for r in tp2), tp2


def test_routed_experts_of_both_stages(pp2):
    """The last stage holds every layer's ids, also when the first has no router; shapes fit vLLM's static buffers."""
    for task in (3, 4):
        first, second = pp2[0][task], pp2[1][task]
        assert first["keys"] == first["profile"] == ["beam_moe_routed_experts", "hidden_states"]
        assert second["equal"], second
        assert second["shapes"]["beam_moe_routed_experts"] == [[5, 2, 2], "torch.uint8"]
        assert second["received"] == "torch.uint8"


def test_refusal_is_lifted_for_beam_alone(harness, tmp_path):
    """Routed experts at PP 2: Beam passes, another model and context parallelism are refused as before."""
    args = {"pp": 2, "lora": False, "enable_return_routed_experts": True, "enable_prefix_caching": True}
    config = harness.engine_config(harness.write_config(tmp_path / "b"), **args)
    assert config.parallel_config.pipeline_parallel_size == 2
    with pytest.raises(ValueError, match="PP > 1"):
        harness.engine_config(harness.write_config(tmp_path / "q", harness.QWEN, num_hidden_layers=2), **args)
