"""Tables of launch configurations: exact on shape, bucketed on rows, silent where they know nothing."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from beam_moe.kernels import tuning
from beam_moe.kernels.moe_lora import MoEConfig, config
from beam_moe.kernels.moe_lora.config import OPS


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "CONFIGS", tmp_path)
    for cache in (tuning._table, tuning._find):
        cache.cache_clear()
    yield tmp_path
    for cache in (tuning._table, tuning._find):
        cache.cache_clear()


def entry(rows, block, **shape):
    return {"shape": shape, "rows": rows, "config": {"block_n": block}}


def test_folder_of_a_device():
    assert tuning.device_folder("NVIDIA H200") == "nvidia_h200"
    assert tuning.device_folder("NVIDIA GeForce RTX 4090") == "nvidia_geforce_rtx_4090"
    assert tuning.device_folder("NVIDIA H100-80GB") == "nvidia_h100_80gb"


def test_the_cpu_of_a_machine_with_a_gpu_is_no_gpu(monkeypatch):
    """The interpreter runs there too, and CUDA has no name for a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {torch.device(device).index}")
    tuning.device_name.cache_clear()
    assert tuning.device_name(torch.device("cpu")).startswith("cpu ")
    assert tuning.device_name(torch.device("cuda:1")) == tuning.device_name(1) == "GPU 1"
    tuning.device_name.cache_clear()


@pytest.mark.parametrize(
    ("rows", "block"), [(1, 16), (4, 16), (5, 32), (16, 32), (17, 64), (64, 64), (65, 64), (9999, 64)]
)
def test_rows_take_the_smallest_bucket_that_holds_them(tables, rows, block):
    tuning.save("NVIDIA H200", "op", [entry(64, 64, k=8, n=4), entry(4, 16, k=8, n=4), entry(16, 32, n=4, k=8)])
    assert tuning.lookup("NVIDIA H200", "op", rows, n=4, k=8) == {"block_n": block}


def test_shape_is_exact(tables, caplog):
    tuning.save("NVIDIA H200", "op", [entry(16, 32, k=64)])
    with caplog.at_level(logging.INFO):
        assert tuning.lookup("NVIDIA H200", "op", 16, k=256) is None
        assert tuning.lookup("NVIDIA H200", "op", 16, k=64, n=1) is None
        assert tuning.lookup("NVIDIA H100", "op", 16, k=64) is None
        once = len(caplog.records)
        assert once == 3 and "heuristic" in caplog.text
        assert tuning.lookup("NVIDIA H200", "op", 16, k=256) is None
        assert tuning.lookup("NVIDIA H100", "op", 16, k=64) is None
    assert len(caplog.records) == once  # a decode step asks thousands of times


def test_save_merges_by_shape_and_rows(tables):
    tuning.save("NVIDIA H200", "op", [entry(4, 16, k=8), entry(16, 32, k=8)])
    assert tuning.lookup("NVIDIA H200", "op", 4, k=8) == {"block_n": 16}
    path = tuning.save("NVIDIA H200", "op", [entry(4, 128, k=8), entry(4, 64, k=16)])
    table = json.loads(path.read_text())
    assert path == tables / "nvidia_h200" / "op.json"
    assert table["device"] == "NVIDIA H200" and table["op"] == "op" and table["triton"] and table["torch"]
    assert {(e["shape"]["k"], e["rows"]): e["config"]["block_n"] for e in table["entries"]} == {
        (8, 4): 128,
        (8, 16): 32,
        (16, 4): 64,
    }
    assert tuning.lookup("NVIDIA H200", "op", 4, k=8) == {"block_n": 128}  # not what was cached before


def test_save_refuses_unknown_fields(tables):
    with pytest.raises(ValueError, match="shape, rows and config"):
        tuning.save("NVIDIA H200", "op", [{"shape": {}, "rows": 1, "config": {}, "us": 3}])


def test_override_nests_and_ends(tables):
    with tuning.override("op", {"block_n": 1}):
        with tuning.override("op", {"block_n": 2}):
            assert tuning.lookup("x", "op", 7) == {"block_n": 2}
        assert tuning.lookup("x", "op", 7) == {"block_n": 1}
        assert tuning.lookup("x", "other", 7) is None
    assert tuning.lookup("x", "op", 7) is None


def test_a_search_may_start_where_other_shapes_are(tables):
    for k, rows, block_n in ((8, 4, 32), (8, 16, 64), (16, 4, 128), (32, 4, 128), (64, 8, 32)):
        tuning.save("NVIDIA H200", "op", [{"shape": {"k": k}, "rows": rows, "config": {"block_n": block_n}}])

    def found(device, rows, k):
        return sorted(config["block_n"] for config in tuning.of_other_shapes(device, "op", rows, k=k))

    assert found("NVIDIA H200", 4, 16) == [32, 128]  # each once, the shape's own left out
    assert found("NVIDIA H200", 5, 9) == [32, 64, 128]
    assert found("x", 4, 16) == []


def test_shipped_tables_are_well_formed():
    for path in tuning.CONFIGS.glob("*/*.json"):
        table = json.loads(path.read_text())
        assert tuning.device_folder(table["device"]) == path.parent.name and table["op"] == path.stem
        keys = [(tuple(sorted(e["shape"].items())), e["rows"]) for e in table["entries"]]
        assert keys and len(set(keys)) == len(keys)
        assert all(e["config"] for e in table["entries"])


@pytest.mark.parametrize("base", ["dense", "mxfp8"])
def test_every_size_can_sum_in_the_order_of_one(base):
    """The H200's table mixes splits, tiles and instructions from size to size; batch invariance needs one order."""

    def sums(config):
        small = config.block_m < 16 or config.up_warps % 4 != 0
        return config.splits, config.act_block_i, small, config.rows == "direct", base == "mxfp8" and config.down_whole

    shape = {"top_k": 8, "experts": 256, "hidden": 5120, "intermediate": 320}
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    tuned = [MoEConfig(**tuning.lookup("NVIDIA H200", OPS[base], n, **shape)) for n in sizes]
    assert len({sums(c) for c in tuned}) > 1
    for pinned in (tuned[0], tuned[5]):  # of single pairs in the table of dense weights, and of blocks
        assert len({sums(c.summing_as(pinned, base=base)) for c in tuned}) == 1
        assert all(c.summing_as(pinned, base=base).joins for c in tuned)


def test_one_launch_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H200")
    shape = (torch.device("cuda", 0), 16, 8, 256, 5120, 320)
    joined = MoEConfig.pick(*shape)
    monkeypatch.setenv("BEAM_MOE_JOIN", "0")
    assert joined.lag > 0 and MoEConfig.pick(*shape) == replace(joined, lag=0)


@pytest.mark.parametrize(("kib", "stages"), [(99, 2), (227, 4)])
def test_the_rule_for_large_blocks_fits_in_the_shared_memory_of_the_device(kib, stages, monkeypatch):
    properties = SimpleNamespace(shared_memory_per_block_optin=kib << 10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "a GPU without a table")
    pick = config._pick.__wrapped__
    large, small = (pick("cuda", 0, tokens, 8, 32, 5120, 1280, "dense") for tokens in (4096, 16))
    assert (large.block_m, large.down_stages, small.down_stages) == (128, stages, 3)


@pytest.mark.parametrize(("tokens", "block_m"), [(128, 8), (256, 16), (512, 16), (1024, 32), (4096, 64)])
def test_past_a_tables_end_blocks_grow(tokens, block_m, monkeypatch):
    """Of 256 experts with top-8; the table of MXFP8 weights ends at 256 tokens."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H200")
    picked = MoEConfig.pick(torch.device("cuda", 0), tokens, 8, 256, 5120, 320, base="mxfp8")
    assert picked.block_m == block_m and (picked.lag > 0) == (tokens <= 512)
