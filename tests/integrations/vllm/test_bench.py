"""What the decode bench does inside the engine, on a tiny model: a GPU run is too dear to find a typing error."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[3] / "bench" / "vllm_decode.py"


@pytest.fixture(scope="module")
def bench(fake_hopper):
    spec = importlib.util.spec_from_file_location("bench_vllm_decode", BENCH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("shared", [False, True])
def test_adapter_fills_every_experts_slot(harness, bench, tmp_path, monkeypatch, shared):
    monkeypatch.setattr(bench, "RANK", 4)
    config = harness.engine_config(harness.write_config(tmp_path / "m"), max_loras=1, enable_moe_shared_loras=shared)
    with harness.built(config) as (model, manager):
        assert bench.spread_routing(model) == 2
        assert bench.add_adapter(model, 1, shared, attention=True) == 2 + 2 * harness.LAYERS
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
