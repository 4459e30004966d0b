"""The bench's own arithmetic: a wrong floor, routing or merge would make every published number wrong."""

import contextlib
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from beam_moe.kernels import tuning
from beam_moe.kernels.moe_lora import MoEConfig

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import moe_decode

    return moe_decode


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import harness

    return harness


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import tune

    return tune


@pytest.mark.parametrize("layout", ["per_expert_r4_of_32", "shared_outer_r32", "one_a_r32", "four_slots_r32"])
def test_floor_counts_each_expert_and_each_slots_factor_once(bench, layout):
    tokens = 7
    case, shard = bench.Case("small", 1, "bf16", layout, "zipf", tokens), bench.shard_of("small", 1)
    how = bench.LAYOUTS[layout]
    ids = bench.route("zipf", tokens, shard.num_experts, shard.top_k)
    slots = bench.adapter_ids(how, tokens).tolist()
    experts, outer, inner = set(), set(), set()
    for token, chosen in enumerate(ids.tolist()):
        experts |= set(chosen)
        if slots[token] >= 0:
            inner |= {(slots[token], e) for e in chosen}
            outer |= {(slots[token], 0 if how.shared_outer else e) for e in chosen}
    base = len(experts) * 3 * shard.hidden * shard.intermediate
    a = 1 if how.one_a else 2
    factors = how.rank * (len(outer) * (a + 1) * shard.hidden + len(inner) * 3 * shard.intermediate)
    assert bench.floor_bytes(case, shard, ids) == (2 * (base + factors), 2 * base, len(experts))


def test_routing_is_reproducible_valid_and_as_named(bench):
    uniform, again = (bench.route("uniform", 64, 256, 8) for _ in range(2))
    assert torch.equal(uniform, again) and uniform.dtype == torch.int32
    for routing in ("uniform", "zipf", "hot8"):
        ids = bench.route(routing, 64, 256, 8)
        assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 256 for row in ids.tolist())
    assert bench.route("hot8", 64, 256, 8).unique().numel() == 8
    assert bench.route("zipf", 64, 256, 8).unique().numel() < uniform.unique().numel()
    with pytest.raises(ValueError, match="'unifrom'"):
        bench.route("unifrom", 1, 8, 2)


def test_mixed_batch_uses_every_slot_and_leaves_rows_bare(bench):
    assert bench.adapter_ids(bench.LAYOUTS["four_slots_r32"], 7).tolist() == [0, 1, 2, 3, -1, 0, 1]


def test_a_wrong_or_unwritten_result_gets_no_time(bench, harness, monkeypatch):
    case = bench.Case("small", 1, "bf16", "per_expert_r4", "uniform", 2)
    layers = bench.Layers(case, torch.device("cpu"), torch.float16, 2)
    right = bench.fused_moe_reference

    def scaled(factor):
        def call(*args, out, workspace, config, **kwargs):
            return out.copy_(right(*args, **kwargs) * factor)

        return call

    monkeypatch.setattr(bench, "fused_moe", scaled(1.0))
    row = bench.measure(case, layers, [], rounds=1)
    assert row["error"] == 0 and row["peer_us"] is None and row["share"] >= 0
    for factor in (1.02, float("nan")):
        monkeypatch.setattr(bench, "fused_moe", scaled(factor))
        with pytest.raises(harness.WrongResult, match="small/tp1/bf16/per_expert_r4/uniform/t2"):
            bench.measure(case, layers, [], rounds=1)


def test_tax_is_against_the_faster_run_without_adapters(bench):
    same = {"model": "m", "tp": 8, "base": "bf16", "routing": "uniform", "tokens": 16, "floor_us": 90.0}
    bare = {**same, "rank": 0, "us": 110.0, "peer_us": 100.0}
    with_lora = {**same, "rank": 32, "us": 112.0, "peer_us": 150.0}
    alone = {**same, "rank": 32, "us": 112.0, "peer_us": None, "tokens": 32}
    bench.add_tax([bare, with_lora, alone])
    assert (with_lora["tax"], with_lora["without_us"], with_lora["without_share"]) == (0.12, 100.0, 0.9)
    assert "tax" not in alone
    bench.add_tax([alone], [bare, {**bare, "tokens": 32, "us": 80.0}])
    assert alone["tax"] == 0.4, "against the record, where the run has none"


def test_rows_are_merged_by_case(harness, tmp_path, monkeypatch):
    monkeypatch.setenv("BEAM_MOE_RESULTS", str(tmp_path))
    monkeypatch.setenv("BEAM_MOE_COMMIT", "abc1234")
    harness.commit.cache_clear()
    harness.write_rows("demo", [{"case": "a", "us": 1.0}, {"case": "b", "us": 2.0}])
    path = harness.write_rows("demo", [{"case": "a", "us": 3.0}])
    rows = json.loads(path.read_text())
    harness.commit.cache_clear()
    assert [(r["case"], r["us"], r["bench"], r["commit"]) for r in rows] == [
        ("a", 3.0, "demo", "abc1234"),
        ("b", 2.0, "demo", "abc1234"),
    ]
    assert rows[0]["versions"]["torch"] == torch.__version__
    with pytest.raises(ValueError):
        harness.write_rows("demo", [{"case": "c", "us": float("nan")}])


def test_read_kernel_touches_every_word_once(harness):
    words = torch.randint(-(2**20), 2**20, (6 * 2048,), dtype=torch.int32)
    sink = torch.zeros(4, dtype=torch.int32)
    if torch.cuda.is_available():
        words, sink = words.cuda(), sink.cuda()
    harness.read_kernel[(4,)](words, sink, 6, BLOCK=1024, UNROLL=2)
    assert int(sink.sum()) == int(words.sum())


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures there")
@pytest.mark.parametrize("name", sorted(p.stem for p in BENCH.glob("*.py") if "def run_interpreter" in p.read_text()))
def test_small_cases_are_right_without_a_gpu(monkeypatch, name):
    monkeypatch.syspath_prepend(str(BENCH))
    assert importlib.import_module(name).run_interpreter() == 0


@pytest.mark.parametrize("name", ["plot", "readme_table"])
def test_help_draws_and_rewrites_nothing(monkeypatch, name):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    assert end.value.code == 0


def test_readme_shows_what_the_results_say(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import readme_table

    text = readme_table.README.read_text()
    asked = {match[2] for match in readme_table.SECTION.finditer(text)}
    assert asked, "README.md has no generated table"
    assert readme_table.rewritten(text) == text, "run python bench/readme_table.py"


@pytest.fixture
def scripts(monkeypatch):
    """The other scripts of the folder, as modules by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.mark.parametrize("command", [("megatron_train", "curves"), ("megatron_train", "layer"),
                                     ("vllm_parity", "generate", "folder"), ("vllm_parity", "score", "folder"),
                                     ("vllm_decode", "--full", "--tp", "8")])  # fmt: skip
def test_a_bench_without_its_engine_says_what_to_install(scripts, monkeypatch, capsys, tmp_path, command):
    engines, module = scripts("engines"), scripts(command[0])
    monkeypatch.setattr(engines, "_found", lambda name: False)
    monkeypatch.setattr(module, "importable", lambda *_: None, raising=False)
    monkeypatch.setattr(module.sys, "argv", list(command))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert f"{command[0]}.py" in (said := capsys.readouterr().err) and "pip install" in said


def test_an_engine_that_is_too_old_or_half_there_is_not_found(scripts, monkeypatch):
    engines = scripts("engines")
    assert engines._found("json") and not engines._found("no_such_engine.core")
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: name)
    for version, found in (("5.21.9", False), ("5.22.0", True), ("6.0", True)):
        monkeypatch.setattr(engines.importlib.metadata, "version", lambda name, version=version: version)
        assert engines._found("transformers") == found


@pytest.mark.parametrize("options", ["--tp 0", "--pp 0", "--layers 0", "--ranks 0", "--ranks a", "--batches 8,-1",
                                     "--repeats 0"])  # fmt: skip
def test_sizes_below_one_are_refused_before_a_plan(scripts, monkeypatch, capsys, options):
    """``--pp 0`` once planned no stage at all, which fits everywhere."""
    module = scripts("vllm_decode")
    monkeypatch.setattr(module.sys, "argv", ["vllm_decode.py", "--full", "--plan", *options.split()])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2 and options.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tp", "pp", "rank", "slots", "requests", "tokens_each", "batch_tokens"])
@pytest.mark.parametrize("value", [0, -1, None, 1.0, "8", True])
def test_a_memory_plan_of_no_size_is_refused(scripts, name, value):
    plan = scripts("memory_plan").plan
    model = scripts("vllm_decode").model_config("beam-full", 52)
    options = {"tp": 8, "adapters": "per-expert", "rank": 16}
    assert plan(model, **options)[0].need > 0
    with pytest.raises(ValueError, match=f"plan: {name} must be an integer of at least 1, got {value!r}"):
        plan(model, **{**options, name: value})
    for bad, got in ((None, "NoneType"), ({k: v for k, v in model.items() if k != "vocab_size"}, "vocab_size")):
        with pytest.raises(ValueError, match=f"plan: model must be .* got .*{got}"):
            plan(bad, **options)


@pytest.mark.parametrize(
    ("layouts", "kept"),
    [
        (["per_expert_r32"], {"wide"}),
        (["one_a_r32", "four_slots_r32"], {"wide"}),
        (["none", "shared_outer_r32"], {"lora_wide"}),
        (["none", "per_expert_r32"], set()),
    ],
)
def test_the_tuner_leaves_a_width_that_none_of_its_cases_takes(tune, layouts, kept):
    sweep = tune.Sweep([tune.Case("beam-1.0", 8, "bf16", layout, "uniform", 16) for layout in layouts], None)
    start = MoEConfig(block_m=8, wide=2, lag=16)
    varied = {name for config in sweep.neighbours(start) for name in tune.changed(start, config)}
    assert {"wide", "lora_wide"} - varied == kept and {"block_m", "lag", "registers"} <= varied


def test_the_tuner_writes_no_entry_where_every_configuration_failed(tune, monkeypatch, capsys):
    shard = SimpleNamespace(top_k=8, num_experts=256, hidden=5120, intermediate=320)
    layers = SimpleNamespace(shard=shard)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune.harness, "device", lambda: None)
    monkeypatch.setattr(tune.harness, "compile_pool", contextlib.nullcontext)
    monkeypatch.setattr(tune, "Layers", lambda *args: layers)
    monkeypatch.setattr(tune, "compile_pass", lambda *args: None)
    monkeypatch.setattr(tune, "starts", lambda *args: [MoEConfig()])
    monkeypatch.setattr(tune, "bind", lambda *args: 1 / 0)
    monkeypatch.setattr(tuning, "save", lambda *args: pytest.fail(str(args)))
    tune.main("beam-1.0", 8, "bf16", "3", "none", passes=1, jobs=1, save=True)
    assert "3 tokens: no configuration gave a right result" in capsys.readouterr().err
