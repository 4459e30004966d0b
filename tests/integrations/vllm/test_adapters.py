"""Adapters in every layout reach vLLM's buffers whole, on one rank and several, or are refused by name."""

LIMIT = 2e-3  # fp16 rounding of values around one


def test_layouts_at_tensor_parallel_2(ranks):
    """Per-expert, flat 3-D without a word in the request, packed and shared-outer, on both ranks of TP 2."""
    tasks = [{"task": "load", "layout": layout} for layout in ("per_expert", "flat", "packed", "shared")]
    tasks.append({"task": "load", "layout": "shared", "shared": True})
    tasks.append({"task": "load", "layout": "per_expert", "enable_expert_parallel": True})
    tasks.append({"task": "load", "layout": "flat", "enable_expert_parallel": True})
    for rank, results in enumerate(ranks(2, 1, tasks)):
        for task, result in zip(tasks, results):
            assert "error" not in result, (rank, task, result)
            assert result["layers"] == [0, 1, 2, 3]
            assert len(result["differences"]) == 2 and max(result["differences"]) < LIMIT, (rank, task, result)
            assert min(result["attention"]) > 0, "the attention gate's adapter did not arrive"
            assert result["kernels"] == ["BeamTritonExperts"]


def test_pure_pipeline_stages(ranks):
    """A stage of dense layers only and one of sparse layers only load their parts; without the prefixes both refuse."""
    tasks = [
        {"task": "load", "layout": "per_expert"},
        {"task": "load", "layout": "shared", "shared": True},
        {"task": "load", "layout": "per_expert", "fixed": False},
    ]
    first, second = ranks(1, 2, tasks)
    for loaded in (0, 1):
        assert first[loaded]["layers"] == [0, 1] and first[loaded]["differences"] == [], first
        assert second[loaded]["layers"] == [2, 3] and max(second[loaded]["differences"]) < LIMIT, second
        assert min(first[loaded]["attention"] + second[loaded]["attention"]) > 0
    assert "expected target modules" in first[2]["error"] and "expected target modules" in second[2]["error"]
