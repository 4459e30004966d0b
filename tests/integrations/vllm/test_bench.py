"""What the decode bench does inside the engine, on a tiny model: a GPU run is too dear to find a typing error."""

import json
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from beam_moe.testing import load_script

FOLDER = Path(__file__).parents[3] / "bench"
ESTIMATES = ("KV cache", "activations (estimate)", "runtime (estimate)")


@pytest.fixture(scope="module")
def bench(fake_hopper):
    return load_script(FOLDER / "vllm_decode.py")


@pytest.fixture(scope="module")
def memory_plan():
    return load_script(FOLDER / "memory_plan.py")


@pytest.mark.parametrize("shared", [False, True])
def test_adapter_fills_every_experts_slot(harness, bench, tmp_path, shared):
    config = harness.engine_config(harness.write_config(tmp_path / "m"), max_loras=1, enable_moe_shared_loras=shared)
    with harness.built(config) as (model, manager):
        assert bench.spread_routing(model) == 2
        assert bench.add_adapter(model, 1, shared, True, 4) == 2 + 2 * harness.LAYERS
        assert manager.add_adapter(harness.request("/in/memory", 1)), "the request must find the adapter already there"
        for layer in (2, 3):
            stacks = harness.experts_stacks(model, layer, 0)
            for name, stack in stacks.items():
                live = stack[:, :4] if name.endswith(".a") else stack[:, :, :4]
                assert live.abs().amin(dim=(1, 2)).shape[0] in (1, harness.E) and bool(
                    (live != 0).any(-1).any(-1).all()
                )
            gate = model.model.layers[layer].self_attn.qkv_gate_proj
            assert all(bool((b[0] != 0).any()) for b in gate.lora_b_stacked)
            assert bool((model.model.layers[layer].self_attn.o_proj.lora_b_stacked[0][0] != 0).any())
        assert bench.kernels_in_use(model) == ["BeamTritonExperts"]


def test_routing_capture(harness, bench, tmp_path):
    config = harness.engine_config(harness.write_config(tmp_path / "m"), lora=False)
    with harness.built(config) as (model, _):
        bench.capture_routing(model, True)
        for runner in model.moe_layers:
            for n in (3, 40, 5):
                runner.router.capture_fn(torch.arange(n * 2).view(n, 2) % 8)
        ids = bench.capture_routing(model, False)
        assert [len(v) for v in ids.values()] == [40, 40] and all(r.router.capture_fn is None for r in model.moe_layers)
    # rows alternate {0,1}, {2,3}, {4,5}, {6,7}: one token always has two experts, all of them have eight
    assert bench.distinct_experts(ids, 1) == 2.0 and bench.distinct_experts(ids, 40) == 8.0


def test_ratios(bench):
    def row(kernels, adapters, us, base="bf16", lora=True):
        r = {"arch": "beam", "base": base, "kernels": kernels, "adapters": adapters, "attention_adapter": False}
        r |= {
            "lora_enabled": lora,
            "target_modules": "all",
            "tp": 1,
            "pp": 1,
            "layers": 12,
            "batch": 16,
            "us_per_layer": us,
        }
        return {**r, "case": bench.case_of(r)}

    rows = [
        row("stock", "none", 300.0, lora=False),
        row("stock", "per-expert", 500.0),
        row("stock", "shared-outer", 450.0),
        row("ours", "none", 250.0, lora=False),
        row("ours", "per-expert", 320.0),
        row("ours", "shared-outer", 300.0),
        row("ours", "per-expert", 250.0, base="mxfp8"),
    ]
    got = {r["case"]: r for r in bench.with_ratios(rows)}
    assert len(got) == len(rows)
    shared = got[bench.case_of(rows[5])]
    assert (shared["ratio_to_stock_lora"], shared["ratio_to_stock_same"], shared["ratio_to_stock_base"]) == (
        1.667,
        1.5,
        1.0,
    )
    bare = got[bench.case_of(rows[3])]
    assert (bare["ratio_to_stock_lora"], bare["ratio_to_stock_same"], bare["ratio_to_stock_base"]) == (2.0, 1.2, 1.2)
    mx = got[bench.case_of(rows[6])]
    assert mx["ratio_to_stock_lora"] == 2.0 and mx["ratio_to_stock_same"] is None
    # without an engine that has no LoRA, one whose requests use none stands for it
    loaded = bench.with_ratios([row("stock", "none", 310.0), *rows[1:]])
    assert next(r for r in loaded if r["case"] == bench.case_of(rows[5]))["ratio_to_stock_base"] == 1.033
    assert round(bench.deployment(86)) == 447, "the published figure is 86 us a layer on this per-rank work"


def test_engine_arguments_are_accepted(harness, bench, tmp_path, fake_hopper):
    """vLLM builds its configuration from the very arguments of a cell."""
    from vllm.engine.arg_utils import EngineArgs

    bench.write_model(tmp_path / "beam", "beam", 2)
    bench.write_model(tmp_path / "qwen3", "qwen3", 2)
    for arch in ("beam", "qwen3"):
        config = EngineArgs(
            model=str(tmp_path / arch), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=4096, enable_prefix_caching=False,
            compilation_config={"cudagraph_capture_sizes": [1, 8, 16]}, kernel_config={"enable_jit_warmup": False},
            enable_lora=arch == "beam", max_loras=1, max_lora_rank=32, max_cpu_loras=1,
        ).create_engine_config()  # fmt: skip
        assert config.compilation_config.cudagraph_capture_sizes == [1, 8, 16]
        assert not config.kernel_config.enable_jit_warmup


def planned(memory_plan, beam: dict, stage: int = 0, **options) -> dict[str, int]:
    parts = memory_plan.plan(beam, **options)[stage].parts
    return {k: v for k, v in parts.items() if v and k not in ESTIMATES}


@pytest.mark.parametrize("base, adapters", [("bf16", "per-expert"), ("bf16", "shared-outer"), ("mxfp8", "per-expert")])
def test_memory_plan_of_one_rank(harness, memory_plan, tmp_path, monkeypatch, base, adapters):
    """The plan's bytes are those of vLLM's own parameters and buffers, part by part."""
    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS", "HummingMxfp8LinearKernel,MarlinMxfp8LinearKernel,TorchMxFp8LinearKernel"
    )
    monkeypatch.setenv("VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "0")
    options = {"quantization": "mxfp8"} if base == "mxfp8" else {}
    config = harness.engine_config(
        harness.write_config(tmp_path / "m"), max_loras=2, max_lora_rank=8,
        enable_moe_shared_loras=adapters == "shared-outer", **options,
    )  # fmt: skip
    with harness.built(config) as (model, _):
        got = harness.memory_parts(model)
    assert got == planned(memory_plan, harness.BEAM, base=base, adapters=adapters, rank=8, slots=2)


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2)])
def test_memory_plan_over_ranks(request, harness, memory_plan, tp, pp):
    """Shards and pure stages too: a stage of dense layers alone has no experts, the last one has the head."""
    for rank, results in enumerate(request.getfixturevalue("tp2" if tp == 2 else "pp2")):
        stage, (result,) = rank // tp, [r for r in results if "parts" in r]
        want = planned(memory_plan, harness.BEAM, stage, tp=tp, pp=pp, adapters="per-expert", rank=8, slots=2)
        assert result["parts"] == want, rank
        first, last = memory_plan.plan(harness.BEAM, tp=tp, pp=pp)[stage].layers
        assert result["layers"] == list(range(first, last))


def test_memory_plan_of_beam(bench, memory_plan):
    """All ranks together hold the 501 billion weights; what does not fit is refused by stage and need."""
    beam = bench.model_config("beam-full", 52)
    weights = ("experts", "attention and norms", "dense layers", "embedding", "head")
    for tp, pp in ((8, 1), (4, 2)):
        plans = memory_plan.plan(beam, tp=tp, pp=pp)
        assert round(tp * sum(p.parts[w] for p in plans for w in weights) / 2e9) == 501
    plans = memory_plan.plan(beam, tp=8, base="mxfp8", adapters="per-expert", rank=32)
    assert plans[0].parts["expert adapters"] == 49 * 256 * 32 * (3 * 5120 + 3 * 320) * 2
    memory_plan.refuse(plans, 129 << 30, "TP 8")
    with pytest.raises(ValueError, match="a rank of stage 0 needs .* GiB and may use 129.0 GiB"):
        memory_plan.refuse(memory_plan.plan(beam, tp=2, base="mxfp8"), 129 << 30, "TP 2")
    for change in ({"tp": 3}, {"pp": 5}, {"base": "fp8"}, {"adapters": "flat"}):
        with pytest.raises(ValueError, match=next(iter(change))):
            memory_plan.plan(beam, **change)
    assert bench.model_config("beam-full", 8)["mlp_layer_types"] == ["sparse"] * 8
    assert bench.model_config("beam-full", 26)["mlp_layer_types"][:3] == ["dense"] * 2 + ["sparse"]


def test_full_size_cells_and_predictions(bench, capsys, monkeypatch):
    """Five engines a side; a plan that does not fit is refused before start; the gap to a single rank's share."""
    options = bench.argparse.Namespace(
        full=True, bases="mxfp8", kernels_list="stock,ours", ranks="16,32", attention_cells=False, only=None,
        tp=2, pp=1, layers=8, batches="64,1", gpu_gib=140.0, together=1,
    )  # fmt: skip
    cells = bench.cells(options)
    assert len(cells) == 10 and sum(c["adapters"] == "none" for c in cells) == 2
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(bench, "gpu_bytes", lambda opts: int(opts.gpu_gib * 2**30))
    assert all(bench.fits(options, c) for c in cells)
    options.together = 2
    assert not any(bench.fits(options, c) for c in cells), "each has a half of the memory"
    options.together, options.layers = 1, 52
    assert not any(bench.fits(options, c) for c in cells) and "REFUSED" in capsys.readouterr().out
    options.only = "beam-full/mxfp8/ours/per-expert/r16;beam-full/mxfp8/stock/none"
    assert [(c["kernels"], c["rank"]) for c in bench.cells(options)] == [("stock", "16"), ("ours", "16")]
    options.only = "beam/mxfp8/ours/none"
    with pytest.raises(SystemExit, match="names no cell"):
        bench.cells(options)

    common = {"base": "mxfp8", "kernels": "ours", "adapters": "per-expert", "rank": 16, "attention_adapter": False}
    common |= {"lora_enabled": True, "target_modules": "all"}
    one = {**common, "arch": "beam", "tp": 1, "pp": 1, "of_tp": 4, "layers": 4, "batch": 16, "us_per_layer": 300.0}
    whole = {**common, "arch": "beam-full", "tp": 4, "pp": 2, "of_tp": 1, "layers": 52, "batch": 32}
    whole |= {"micro_batch": 16, "step_ms": 20.0, "us_per_layer": 384.6}
    rows = [{**r, "case": bench.case_of(r)} for r in (one, {**one, "of_tp": 8, "us_per_layer": 1.0}, whole)]
    assert len({r["case"] for r in rows}) == 3
    spread = bench.case_of({**one, "tp": 2, "of_tp": 4, "rank": 32})
    assert "of-tp" not in spread and "of-tp=4" in rows[0]["case"], "the usual share is one of eight"
    got = bench.with_predictions(rows)[2]
    assert (got["predicted_step_ms"], got["gap"], got["predicted_from"]) == (15.6, 4.4, rows[0]["case"])
    assert bench.with_predictions([{**rows[2], "micro_batch": 32}])[0]["gap"] is None


def test_multicast_stays_off(bench, monkeypatch):
    """Where the machine keeps NVLink multicast off, none of vLLM's users of it is left on."""
    for name in ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.setenv(name, "9")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    bench.quiet_multicast()
    environ = bench.os.environ
    assert environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] == environ["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SystemExit, match="FlashInfer"):
        bench.quiet_multicast()


def test_functions_reach_other_processes_by_value(tmp_path):
    """Workers of several GPUs get the bench's functions pickled: those of a script, closures, with their globals."""
    script = (
        "import sys, types, cloudpickle\n"
        f"source = open({str(FOLDER / 'vllm_decode.py')!r}).read().rsplit('if __name__', 1)[0]\n"
        f"__file__ = {str(FOLDER / 'vllm_decode.py')!r}\n"
        "exec(compile(source, __file__, 'exec'))\n"
        "class Engine:\n"
        "    def collective_rpc(self, method):\n"
        "        sys.stdout.buffer.write(cloudpickle.dumps(method))\n"
        "on_models(Engine(), lambda model, rank: (model, rank, distinct_experts({'a': [[1, 2]]}, 1)), 7)\n"
    )
    sent = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=tmp_path, check=True).stdout
    reader = (
        "import sys, types, pickle\n"
        "function = pickle.loads(sys.stdin.buffer.read())\n"
        "print(function(types.SimpleNamespace(get_model=lambda: 'model')))\n"
    )
    done = subprocess.run([sys.executable, "-c", reader], input=sent, capture_output=True, cwd=tmp_path, check=True)
    assert done.stdout.decode().strip() == "('model', 7, 2.0)"


def test_sampled_tokens_wait_for_the_models_stream(harness, bench, monkeypatch):
    """Without PyNccl vLLM's first `current_stream`, Marlin's, moves the model off the stream that its handler keeps."""
    from vllm.utils import torch_utils
    from vllm.v1.worker.gpu import pp_utils

    class Stream:
        def wait_stream(self, other):
            pass

    now = [Stream()]
    for name, value in (
        ("Stream", lambda *a: Stream()), ("current_stream", lambda *a: now[0]), ("is_available", lambda: True),
        ("set_stream", torch_utils._patched_set_stream), ("synchronize", lambda: None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch_utils, "prev_set_stream", lambda stream: now.__setitem__(0, stream))
    monkeypatch.setattr(torch_utils, "_current_stream_tls", threading.local())
    worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(pp_handler=None), device=torch.device("cpu"))
    assert not bench.on_the_models_stream(worker)
    worker.model_runner.pp_handler = handler = pp_utils.PPHandler(4, 0, worker.device)
    assert not bench.on_the_models_stream(worker) and handler.main_stream is now[0]
    torch_utils.current_stream()
    assert handler.main_stream is not now[0], "vLLM has put it right itself: the bench need not"
    assert bench.on_the_models_stream(worker) and handler.main_stream is now[0]


class Runner:
    """As vLLM's, as far as the bench watches it: requests of two, three and one tokens, then a token each."""

    def __init__(self, first=True, last=True, received=(5, 6, 7), logits=0.0):
        self.is_first_pp_rank, self.last, self.steps = first, last, [[[1, 2], [3, 4, 3], [9]], [[i] for i in received]]
        self.model, self.value = torch.nn.Module(), logits
        self.model.compute_logits = lambda hidden: torch.full((3, 8), self.value)

    def get_model(self):
        return self.model

    def prepare_inputs(self, step):
        starts = np.cumsum([0, *map(len, self.steps[step])])
        ids = torch.tensor([*sum(self.steps[step], []), 77, 77])  # a graph's padding
        return types.SimpleNamespace(req_ids=["a", "b", "c"], query_start_loc_np=starts, input_ids=ids)

    def generate(self, bench):
        worker = types.SimpleNamespace(model_runner=self)
        assert bench.watch_steps(worker, True) is None
        for step in range(2):
            self.prepare_inputs(step)
            if self.last:
                self.model.compute_logits(None)
        found = bench.watch_steps(worker, False)
        assert self.prepare_inputs == types.MethodType(Runner.prepare_inputs, self), "it is watched no longer"
        return found


def test_no_time_of_an_engine_that_computes_nothing(bench):
    """Every logit is finite, every id in the vocabulary, and the first stage reads what the last one has sampled."""
    outputs = [
        types.SimpleNamespace(prompt_token_ids=prompt, outputs=[types.SimpleNamespace(token_ids=ids)])
        for prompt, ids in (([1, 2], [5, 0]), ([3, 4, 3], [6, 0]), ([9], [7, 7]))
    ]
    found = Runner().generate(bench)
    assert found == {"read": [[1, 2, 5], [3, 4, 3, 6], [9, 7]], "logits": 6, "bad": 0}
    assert bench.faults([found], outputs, 10) == []
    stages = [Runner(last=False).generate(bench), Runner(first=False).generate(bench)]
    assert [f["logits"] for f in stages] == [0, 6] and stages[1]["read"] == []
    assert bench.faults(stages, outputs, 10) == []
    for value in (float("nan"), float("inf")):
        said = bench.faults([Runner(logits=value).generate(bench)], outputs, 10)
        assert said == ["48 values of 6 rows of logits are not finite"]
    stale = [Runner(last=False, received=(5, 99, 0)).generate(bench), stages[1]]
    assert bench.faults(stale, outputs, 10) == [
        "of 3 requests the first stage embedded other tokens than were sampled for 2: ids 0 to 99, vocabulary 10"
    ]
    assert bench.faults([stages[1]], outputs, 10) == ["no stage read a token"]
    assert bench.faults([stages[0]], outputs, 10) == ["no stage computed logits"]
    assert bench.faults([found], outputs, 7) == ["sampled ids 0 to 7, vocabulary 7"]
    assert bench.ids_out_of_range([], 7) == ["no token was sampled"]


CELL = """
import json, os, subprocess, sys, time
from pathlib import Path

sys.path.insert(0, {folder!r})
import vllm_decode as bench

opts = bench.parse()
name = opts.rows.stem
adapters = opts.adapters


def log(event):
    line = json.dumps([event, name, os.environ["CUDA_VISIBLE_DEVICES"], time.monotonic(), os.environ["VLLM_PORT"]])
    with open({events!r}, "a") as file:
        file.write(line + chr(10))


log("start")
if opts.base == "mxfp8" and opts.kernels == "stock":
    sys.exit("died while it started") if adapters == "none" else time.sleep(600)
time.sleep(0.2 if adapters == "none" else 0.8)
log("ready")
if opts.ladder:
    bench.wait_for_turn(opts.rows, opts.ladder)
log("turn")
if opts.base == "mxfp8" and adapters == "shared-outer":
    time.sleep(600)
time.sleep(0.5)
row = dict(
    batch=64, arch=opts.arch, base=opts.base, adapters=adapters.split(",")[-1], kernels=opts.kernels, rank=opts.rank,
    attention_adapter=False, lora_enabled=adapters != "none", tp=opts.tp, pp=opts.pp, layers=opts.layers,
    of_tp=opts.of_tp, target_modules="all", us_per_layer=100.0, tokens_per_s=1.0, distinct_experts=1.0, missing=[],
    together=opts.together, micro_batch=64,
)
bench.keep_rows(opts.rows, [dict(row, case=bench.case_of(row))])
if opts.base == "mxfp8":
    sys.exit("died after its rows")
# a worker that outlives its engine: the GPU is free when it has gone
late = "import json, sys, time; time.sleep(0.7); line = json.dumps(['gone', *sys.argv[2:], time.monotonic(), 0]);"
late += "open(sys.argv[1], 'a').write(line + chr(10))"
subprocess.Popen([sys.executable, "-c", late, {events!r}, name, os.environ["CUDA_VISIBLE_DEVICES"]])
"""


@pytest.fixture
def ladder(bench, tmp_path, monkeypatch, capsys):
    """``ladder(*arguments) -> (status, events, merged rows, output)`` of cells that are a script without an engine.

    MXFP8's stock cells die or hang while they start, ours hang in their measurement or die after it.
    """
    events = tmp_path / "events"
    (tmp_path / "cell.py").write_text(CELL.format(folder=str(FOLDER), events=str(events)))
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "cell.py"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("BEAM_MOE_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("BEAM_MOE_COMMIT", "none")
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(*arguments: str):
        status = bench.run_ladder(bench.parse([*arguments, "--work", str(tmp_path / "work"), "--batches", "64"]))
        (path,) = (tmp_path / "results").glob("*/vllm_decode.json")
        found: dict[str, list] = {}
        for event, name, gpus, when, port in map(json.loads, events.read_text().splitlines()):
            found.setdefault(event, []).append((when, name, gpus, port))
        return status, found, json.loads(path.read_text()), capsys.readouterr().out

    return run


def turns_of(events: dict[str, list]) -> list[tuple[float, float, str]]:
    gone = {name: when for when, name, *_ in events["gone"]}
    return sorted((when, gone[name], gpus) for when, name, gpus, _ in events["turn"])


def overlap(turns: list[tuple[float, float, str]]) -> bool:
    turns = sorted(turns)
    return any(after[0] < before[1] for before, after in zip(turns, turns[1:]))


@pytest.mark.parametrize("alone", [False, True], ids=["a set", "the machine"])
def test_waves_measure_when_all_have_started(ladder, alone):
    """Two waves of engines on two GPUs: no turn before all are ready, then one at a time on a GPU or on the machine."""
    status, events, rows, out = ladder("--together", "2", *["--one-at-a-time"] * alone)
    assert status == 0, out
    waves = [events["start"][:4], events["start"][4:]]
    assert len(waves[1]) == 2 and all(len({e[2] for e in wave}) == 2 for wave in waves), "spread over the GPUs"
    assert len({port for *_, port in events["start"]}) == 6
    for first, last in ((0, 4), (4, 6)):
        assert max(e[0] for e in events["ready"][first:last]) < min(e[0] for e in events["turn"][first:last])
    turns = turns_of(events)
    assert max(end for _, end, _ in turns[:4]) < min(e[0] for e in waves[1]), "no engine starts beside a measurement"
    assert overlap(turns) != alone, "the sets measure at once unless told"
    assert not overlap([t for t in turns if t[2] == "0"]) and not overlap([t for t in turns if t[2] == "1"])
    assert len(rows) == 6 and {r["together"] for r in rows} == {2}
    assert all(r["ratio_to_stock_base"] == 1.0 for r in rows), "the rows of all cells are compared"


def test_no_cell_gets_its_turn_while_the_file_exists(ladder, tmp_path):
    """Cells are ready and wait, longer than a cell may take; the wave's first turn comes when the file has gone."""
    hold, events, found = tmp_path / "hold", tmp_path / "events", {}
    hold.touch()

    def release():
        try:
            deadline = time.monotonic() + 60
            while not events.exists() or events.read_text().count('"ready"') < 2:
                assert time.monotonic() < deadline, "cells start while the file exists"
                time.sleep(0.05)
            time.sleep(7)
            found["go"] = list((tmp_path / "work" / "vllm_decode_logs").glob("*.go"))
            found["ready"] = list((tmp_path / "work" / "vllm_decode_logs").glob("*.ready"))
            found["when"] = time.monotonic()
        finally:
            hold.unlink()

    other = threading.Thread(target=release)
    other.start()
    status, seen, rows, out = ladder("--hold", str(hold), "--timeout", "6")
    other.join()
    assert found["go"] == [] and len(found["ready"]) == 2, "a wave of one cell a GPU without --together"
    assert status == 0 and len(rows) == 6, out
    assert found["when"] < min(e[0] for e in seen["turn"])
    assert len([e for e in seen["start"] if e[0] < found["when"]]) == 2


def test_without_waves_a_cell_measures_when_it_has_started(ladder):
    status, events, rows, out = ladder()
    assert status == 0 and len(rows) == 6 and {r["together"] for r in rows} == {1}
    assert "waits for its turn" not in out
    assert min(e[0] for e in events["turn"]) < max(e[0] for e in events["start"]), "the others have yet to start"
    assert not overlap([t for t in turns_of(events) if t[2] == "0"])


def test_cells_that_die_or_hang_hold_up_no_wave(ladder, tmp_path):
    """A cell's time does not run while it waits: here it waits for one that starts for ever, then for its turn."""
    status, events, rows, out = ladder("--bases", "mxfp8,bf16", "--together", "6", "--timeout", "6")
    assert status == 1
    ended = {line.split(":")[0]: line for line in out.splitlines() if line.endswith(" s") and " rows, " in line}
    assert len(ended) == 12 and len(events["start"]) == 12
    states = {n.removesuffix("_32_tp1pp1").removeprefix("beam_"): e.split(": ")[1] for n, e in ended.items()}
    for name, state in states.items():
        base, kernels, adapters = name.split("_")
        if base == "bf16":
            want = "ok, 1 rows"
        elif kernels == "stock":
            want = "FAILED (1), 0 rows" if adapters == "none" else "FAILED (-9), 0 rows"
        else:
            want = "FAILED (-9), 0 rows" if adapters == "shared-outer" else "FAILED (1), 1 rows"
        assert state.startswith(want), (name, state)
    assert "died while it started" in out and "died after its rows" in out
    first = min(e[0] for e in events["turn"])
    assert first - min(e[0] for e in events["start"]) > 5, "the wave waits for the cell that hangs, until it is killed"
    assert len(rows) == 8, "with those of a cell that died after it had written them"
    log = (tmp_path / "work" / "vllm_decode_logs" / "beam_bf16_ours_none_32_tp1pp1.log").read_text()
    assert "its turn, after a wait of" in log


def test_a_failed_cell_tells_the_workers_fault(bench):
    """Not vLLM's warnings with a traceback, which every cell has, and not a batch's dump in the place of all else."""
    warning = "(MainProcess pid=1) WARNING 11-30 21:52:39 [base.py:383] "
    start = f"{warning}Chat template warmup failed\n{warning}Traceback (most recent call last):\n" + "started\n" * 900
    end = "ERROR [dump_input.py:79] " + "NewRequestData " * 900 + "\n" + "in between\n" * 900
    end += "Traceback (most recent call last):\nRuntimeError: cancelled\n"
    worker = "(Worker_PP0 pid=2) ERROR 11-30 21:53:00 [multiproc_executor.py:1183] "
    for fault in (
        "Fatal Python error: Aborted",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "(MainProcess pid=1) ERROR 11-30 21:53:00 [multiproc_executor.py:350] Worker proc died unexpectedly",
        f"{worker}WorkerProc hit an exception.",
        f"{worker}Traceback (most recent call last):",
        "(Worker_PP0 pid=2) CUDA error (flash_fwd_launch_template.h:166): an illegal memory access was encountered",
    ):
        told = bench.why(start + fault + "\n" + end)
        assert fault in told and told.rstrip().endswith("RuntimeError: cancelled") and "warmup" not in told
        assert len(told) < 6500 and "in between" in told
    assert bench.why(start + "its end") == (start + "its end")[-3000:]


def test_cell_leaves_when_its_ladder_has_gone(tmp_path):
    """A waiting engine holds a GPU: it must not wait for a turn that nobody gives."""
    cell = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
        "from pathlib import Path\nimport vllm_decode\n"
        "try:\n    vllm_decode.wait_for_turn(Path('a.json'), int(sys.argv[1]))\n"
        "except SystemExit as end:\n    Path('end').write_text(str(end))\n"
    )
    ladder = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {cell!r}, str(os.getpid())])\n"
        "while not os.path.exists('a.ready'):\n    time.sleep(0.05)\n"
    )
    subprocess.run([sys.executable, "-c", ladder], cwd=tmp_path, check=True, timeout=60)
    deadline = time.monotonic() + 30
    while not (tmp_path / "end").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "the ladder has gone" in (tmp_path / "end").read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--together", "0"), "--together must be at least 1"),
        (("--cell", "--ladder", "1"), "--ladder goes with --rows"),
    ],
)
def test_refused_arguments(bench, capsys, arguments, message):
    with pytest.raises(SystemExit):
        bench.parse(list(arguments))
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, heads",
    [
        ((), 1),
        (("--of-tp", "1"), 8),
        (("--tp", "2"), 1),
        (("--pp", "2"), 1),
        (("--pp", "2", "--layers", "4"), 1),
        (("--layers", "4", "--batches", "256"), 1),
    ],
    ids=["share", "whole", "tp2", "pp2", "pp2 cut", "large batch"],
)
def test_fixed_kv_cache_holds_the_largest_batch(bench, tmp_path, arguments, heads):
    """vLLM's own planner accepts the fixed bytes for ``max_model_len``; every request of the batch has its blocks."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    opts = bench.parse(["--cell", "--together", "3", *arguments])
    bench.write_model(tmp_path / "m", "beam", opts.layers, opts.of_tp, opts.pp)
    memory = bench.memory_options(opts)
    config = EngineArgs(
        model=str(tmp_path / "m"), load_format="dummy", skip_tokenizer_init=True, max_model_len=bench.MODEL_LEN,
        max_num_batched_tokens=4096, max_num_seqs=bench.most_requests(opts), enable_prefix_caching=False, **memory,
    ).create_engine_config()  # fmt: skip
    assert config.cache_config.kv_cache_memory_bytes == memory["kv_cache_memory_bytes"]
    assert config.cache_config.gpu_memory_utilization == bench.USE / 3
    config.cache_config.kv_cache_layout = "LBNHC"  # what the attention backend decides in an engine
    common = {"num_kv_heads": heads, "head_size": 128, "dtype": torch.bfloat16}
    kinds = bench.model_config("beam", opts.layers, opts.of_tp, opts.pp)["layer_types"]
    stage = opts.layers // opts.pp
    for size in (16, 64):
        specs = [
            {
                f"layer.{i}": FullAttentionSpec(block_size=size, **common)
                if kinds[i] == "full_attention"
                else SlidingWindowSpec(block_size=size, sliding_window=512, **common)
                for i in range(first, first + stage)
            }
            for first in range(0, opts.layers, stage)
        ]
        groups = get_global_kv_cache_groups(config, specs)
        planned = get_kv_cache_configs(config, specs, [memory["kv_cache_memory_bytes"]] * opts.pp, groups)
        blocks = len(groups) * -(-(bench.PROMPT + bench.LONG) // size)
        requests = max(map(int, opts.batches.split(",")))
        assert all(p.num_blocks > requests * blocks for p in planned)
        if opts.layers == 4:
            assert all(g.layer_names for p in planned for g in p.kv_cache_groups), "no stage has a group without layers"
    assert "kv_cache_memory_bytes" not in bench.memory_options(bench.parse(["--cell", "--arch", "beam-full"]))


def test_every_stage_has_attention_of_both_kinds(bench):
    """Beam's own kinds, 5 of 6 with a window, where the stages are deep enough for it; never a stage with one kind."""
    own = [(i + 1) % 6 == 0 or i == 51 for i in range(52)]
    for layers, pp in ((52, 1), (52, 2), (52, 8), (16, 1), (16, 2), (6, 1), (4, 1), (26, 4)):
        full = [t == "full_attention" for t in bench.model_config("beam-full", layers, pp=pp)["layer_types"]]
        assert full[:-1] == own[: layers - 1] and full[-1], (layers, pp)
    for layers in range(4, 53):
        for pp in range(2, layers // 2 + 1):
            kinds = bench.model_config("beam-full", layers, pp=pp)["layer_types"]
            # vLLM gives a stage layers // pp layers or one more, wherever it begins
            for first in range(layers - layers // pp + 1):
                assert len(set(kinds[first : first + layers // pp])) == 2, (layers, pp, first)
    assert set(bench.model_config("beam-full", 2, pp=2)["layer_types"]) == {"full_attention"}


def test_time_that_the_host_gave_to_others(bench, tmp_path):
    stat = tmp_path / "stat"
    stat.write_text(f"cpu  1 2 3 4 5 6 7 {3 * os.sysconf('SC_CLK_TCK')} 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    assert bench.stolen_s(str(stat)) == 3.0
    assert bench.stolen_s(str(tmp_path / "none")) == 0.0


def test_cells_run_near_their_gpu(bench, tmp_path, monkeypatch):
    """Where the machine does not say what is near, or names only processors that are not ours, nothing is pinned."""
    own = min(os.sched_getaffinity(0))
    folder, other = tmp_path / "0000:1b:00.0", tmp_path / "0000:2b:00.0"
    folder.mkdir(), other.mkdir()
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda pid: {own, own + 1})

    def bus(query, **kwargs):
        return subprocess.CompletedProcess(query, 0, stdout=f"00000000:{1 + int(query[-1])}B:00.0\n")

    monkeypatch.setattr(bench.subprocess, "run", bus)
    (other / "local_cpulist").write_text(f"{own + 1}")
    for text, near in ((f"{own}", {own}), (f"4000-4100,{own}\n", {own}), ("4000-4100", None), ("", None)):
        (folder / "local_cpulist").write_text(text)
        assert bench.processors_near(["0"], tmp_path) == near
        assert bench.processors_near(["0", "1"], tmp_path) == (near and {own, own + 1}), "near each of them"
    assert bench.processors_near(["0"], tmp_path / "none") is None
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench.processors_near(["0"], tmp_path) is None, "no nvidia-smi"
