"""What the decode bench does inside the engine, on a tiny model: a GPU run is too dear to find a typing error."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "bench"
ESTIMATES = ("KV cache", "activations (estimate)", "runtime (estimate)")


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench(fake_hopper):
    return load("vllm_decode")


@pytest.fixture(scope="module")
def memory_plan():
    return load("memory_plan")


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
def test_memory_plan_over_ranks(ranks, harness, memory_plan, tp, pp):
    """Shards and pure stages too: a stage of dense layers alone has no experts, the last one has the head."""
    for rank, (result,) in enumerate(ranks(tp, pp, [{"task": "memory", "rank": 8}])):
        stage = rank // tp
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
        tp=2, pp=1, layers=8, batches="64,1", gpu_gib=140.0,
    )  # fmt: skip
    cells = bench.cells(options)
    assert len(cells) == 10 and sum(c["adapters"] == "none" for c in cells) == 2
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(bench, "gpu_bytes", lambda opts: int(opts.gpu_gib * 2**30))
    assert all(bench.fits(options, c) for c in cells)
    options.layers = 52
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
