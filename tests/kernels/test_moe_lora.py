"""The fused layer against its reference: every branch of planning, masking and adapters, and the bugs that users of
such layers have met. On the CPU in Triton's interpreter; a GPU adds graphs, large strides and the memory checker.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from beam_moe.kernels import tuning
from beam_moe.kernels.moe_lora import (
    ExpertLoRA,
    MoEConfig,
    Workspace,
    fused,
    fused_moe,
    fused_moe_reference,
    joined,
    moe_workspace,
    torch_ops,
)
from beam_moe.kernels.moe_lora import config as config_module
from beam_moe.kernels.moe_lora import plan as plan_module
from beam_moe.kernels.moe_lora import workspace as workspace_module
from beam_moe.kernels.moe_lora.workspace import Shape, bytes_needed
from beam_moe.kernels.mxfp8 import prepare, quantize_reference
from beam_moe.testing import assert_close, error_ratio, load_script

interpreter = load_script(Path(__file__).parents[1] / "interpreter.py")

CUDA = torch.cuda.is_available()
DTYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]
# RMS of the roundings that fall the other way after fp32 sums in another order. An intermediate of the adapters rounded
# to 16 bits exceeds each (`test_intermediates_of_the_adapters_keep_fp32`); the interpreter truncates bf16.
LIMIT = {torch.float16: 2e-4, torch.bfloat16: 8e-4 if CUDA else 1e-2}
# H 48 and I 24 divide no tile of these, so each load is masked; `TILED` cuts the same shape into many tiles.
SMALL = MoEConfig(
    rows="plan", block_m=16, up_block_n=64, up_block_k=32, up_stages=2, splits=2, act_block_i=32,
    down_block_n=64, down_block_k=32, down_stages=2, combine_block_h=64, combine_block_t=4,
)  # fmt: skip
TILED = dataclasses.replace(
    SMALL, up_block_n=32, up_block_k=16, act_block_i=16, down_block_n=16, down_block_k=16, down_tiles=2,
    combine_block_h=16, combine_block_t=2,
)  # fmt: skip


def ints(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def factors(slots, experts, rank, hidden, inter, *, device, dtype=torch.float16, shared=False, one_a=False, scale=1.0):
    """w13_a, w13_b, w2_a, w2_b that each change their product about as much as the base does."""
    outer = 1 if shared else experts

    def new(*shape):
        return (torch.randn(shape) * scale / shape[-1] ** 0.5).to(dtype).to(device)

    return (
        new(slots, outer, 1 if one_a else 2, rank, hidden),
        new(slots, experts, 2, inter, rank),
        new(slots, experts, rank, inter),
        new(slots, outer, hidden, rank),
    )


def layer(device, tokens=3, top_k=2, experts=4, hidden=48, inter=24, dtype=torch.float16, **lora):
    """Arguments of `fused_moe` by name. The last expert never has a token; ``rank`` adds a bank of two slots."""
    x = torch.randn(tokens, hidden).to(dtype).to(device)
    w13 = (torch.randn(experts, 2 * inter, hidden) / hidden**0.5).to(dtype).to(device)
    w2 = (torch.randn(experts, hidden, inter) / inter**0.5).to(dtype).to(device)
    weights = torch.rand(tokens, top_k).add(0.1).to(device)
    ids = torch.randint(0, max(experts - 1, 1), (tokens, top_k), dtype=torch.int32).to(device)
    args = {"x": x, "w13": w13, "w2": w2, "topk_weights": weights, "topk_ids": ids}
    if "rank" in lora:
        slots, rank = lora.pop("slots", 2), lora.pop("rank")
        bank = factors(slots, experts, rank, hidden, inter, device=device, dtype=dtype, **lora)
        args["lora"] = ExpertLoRA(*bank)
        args["lora_ids"] = (torch.arange(tokens, dtype=torch.int32) % slots).to(device)
    return args


def bare(args):
    return {k: v for k, v in args.items() if k not in ("lora", "lora_ids")}


def reference(args):
    return fused_moe_reference(**{k: v for k, v in args.items() if k not in ("out", "workspace", "config")})


def check(args, config=SMALL, limit=None):
    """Run the layer and compare with the reference; returns the layer's output."""
    got = fused_moe(**args, config=config)
    assert_close("fused_moe", reference(args), got, limit or LIMIT[args["x"].dtype])
    return got


def poison(t):
    """A copy with t's values and every stride but the innermost widened, cut out of memory that holds NaN."""
    pool = torch.full([n + 3 for n in t.shape[:-1]] + [t.shape[-1] + 8], float("nan"), dtype=t.dtype, device=t.device)
    view = pool[tuple(slice(1, n + 1) for n in t.shape[:-1]) + (slice(0, t.shape[-1]),)]
    view.copy_(t)
    assert not view.is_contiguous()
    return view


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 3, 20, 70])
def test_tokens_with_the_launch_parameters_of_the_device(device, tokens):
    """Few pairs are one block each, more are searched for, many are planned; none is no launch."""
    args = layer(device, tokens, rank=8)
    if tokens == 0:
        assert fused_moe(**args).shape == (0, 48)
    else:
        check(args, None)


@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_top_k(device, top_k):
    """Also above the number of experts: a token may choose one more than once, and each choice counts."""
    check(layer(device, top_k=top_k, rank=8))


def test_bf16(device):
    check(layer(device, rank=8, dtype=torch.bfloat16))


@pytest.mark.parametrize("down_whole", [False, True])
def test_shapes_that_tiles_divide(device, down_whole):
    """No mask on weights then: a branch of its own in each product."""
    args = layer(device, hidden=64, inter=32, rank=8)
    check(args, dataclasses.replace(SMALL, down_whole=down_whole, down_block_n=32, down_tiles=2, down_block_k=16))


@pytest.mark.parametrize("down_whole", [False, True], ids=["stepped", "whole"])
@pytest.mark.parametrize("rows", ["plan", "search", "direct"])
def test_every_way_to_find_rows_with_many_tiles(device, rows, down_whole):
    """Several tiles of W13, A13, I and W2, the last of each past the edge; several planes of t and s."""
    check(layer(device, 3, rank=24), dataclasses.replace(TILED, rows=rows, down_whole=down_whole))


@pytest.mark.parametrize("down_whole", [False, True], ids=["stepped", "whole"])
@pytest.mark.parametrize(("slots", "rank"), [(1, 8), (3, 8), (1, 70)])
@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_adapters_of_several_tiles(device, tiles, slots, rank, down_whole):
    """B2 of a tile is asked for a tile ahead; H fills the last program's tiles in part, and some rows are bare."""
    args = layer(device, 9, rank=rank, slots=slots)
    args["lora_ids"][::4] = -1
    config = dataclasses.replace(SMALL, down_block_n=16, down_block_k=16, down_tiles=tiles, down_whole=down_whole)
    got = check(args, config)
    assert torch.equal(got[::4], fused_moe(**bare(args), config=config)[::4])


@pytest.mark.parametrize(
    ("rank", "factors"), [(8, {}), (8, {"one_a": True}), (70, {"shared": True}), (70, {"one_a": True})]
)
def test_single_pairs_with_adapters(device, rank, factors):
    """Activated without matrix instructions; two rows are bare, one has no expert."""
    args = layer(device, 5, rank=rank, **factors)
    args["lora_ids"][1:3] = -1
    args["topk_ids"][4] = -1
    config = dataclasses.replace(SMALL, rows="direct", splits=3, up_block_k=16, down_block_n=16, down_tiles=2)
    got = check(args, config)
    assert torch.equal(got[1:3], fused_moe(**bare(args), config=config)[1:3]) and not got[4].any()


@pytest.mark.parametrize("slots", [1, 2])
def test_activate_takes_a_part_of_a_block(device, slots):
    """Parts of blocks of 64 rows: full ones, those that a few rows fill, and those that none does."""
    args = layer(device, 40, rank=8, slots=slots)
    config = dataclasses.replace(SMALL, block_m=64)
    whole = check(args, config)
    for rows in (16, 32, 64, 128):
        assert torch.equal(fused_moe(**args, config=dataclasses.replace(config, act_block_m=rows)), whole)


@pytest.mark.parametrize("rank", [8, 40, 129])
def test_a_tile_of_a_is_narrower_than_one_of_the_weights(device, rank):
    """A of gate and up has 16, 80 and 258 rows, which take tiles of 64, 128 and 128."""
    check(layer(device, 5, rank=rank), dataclasses.replace(SMALL, up_block_n=128))


@pytest.mark.parametrize("splits", [1, 5])
def test_splits_of_the_hidden_axis(device, splits):
    """Of five shares of 16, two lie past H = 48 and are zero."""
    check(layer(device, 2, rank=8), dataclasses.replace(SMALL, splits=splits, up_block_k=16))


@pytest.mark.parametrize(("rows", "block_m"), [("plan", 8), ("plan", 16), ("plan", 32), ("search", 8), ("search", 16)])
def test_more_rows_on_one_expert_than_a_block_holds(device, rows, block_m):
    args = layer(device, 40, top_k=1, rank=8)
    args["topk_ids"] = torch.where(torch.arange(40) % 8 == 3, 0, 2).int()[:, None].to(device)
    check(args, dataclasses.replace(SMALL, rows=rows, block_m=block_m, combine_block_t=16))


@pytest.mark.parametrize("experts", [1, 1024])
def test_one_expert_and_the_most(device, experts):
    args = layer(device, experts=experts, hidden=16, inter=16, rank=8, slots=1)
    args["topk_ids"] = ints([0, experts - 1], [experts // 2, 0], [experts - 1, experts // 3], device=device)
    check(args, dataclasses.replace(SMALL, plan_experts=64))


def test_many_pairs_are_counted_by_a_launch_of_their_own(device, monkeypatch):
    """As beyond 4096 pairs, here beyond 16: the counts have room of their own in a workspace that holds no more."""
    args = layer(device, 20, rank=8)
    args["topk_ids"][3:6] = -1
    config = dataclasses.replace(SMALL, lag=1)  # its counts lie right before
    once = check(args, config)
    monkeypatch.setattr(plan_module, "COUNT_FIRST", 16)
    monkeypatch.setattr(plan_module, "AT_ONCE", 16)
    shape = Shape(20, 2, 4, 48, 24, 8)
    memory = torch.full((bytes_needed(shape, config) + 256,), 255, dtype=torch.uint8, device=device)
    args["workspace"] = Workspace(memory[:-256], 20, 2, 8)
    assert torch.equal(fused_moe(**args, config=config), once)
    assert bool((memory[-256:] == 255).all()), "nothing is written past it"
    assert args["workspace"].buffers(shape, config, args["x"].dtype).totals.sum() == 34


@pytest.mark.parametrize("with_workspace", [False, True])
def test_batches_beyond_a_pass(device, monkeypatch, with_workspace):
    """Ten tokens in passes of four, rows strided; the last pass is short."""
    monkeypatch.setattr(fused, "CHUNK", 4)
    monkeypatch.setattr(workspace_module, "CHUNK", 4)
    args = layer(device, 10, rank=8, shared=True)
    args["x"] = poison(args["x"])
    if with_workspace:
        shape = Shape(4, 2, 4, 48, 24, 8)
        memory = torch.empty(bytes_needed(shape, SMALL), dtype=torch.uint8, device=device)
        args["workspace"] = Workspace(memory, 4, 2, 8)
    check(args)


# --- ranks and layouts of the bank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 4, 24, 64, 129, 256])
def test_ranks(device, rank):
    """Ranks below a matrix instruction's 16, between its multiples, and above what one tile of ranks holds."""
    check(layer(device, 2, top_k=1, rank=rank))


@pytest.mark.parametrize("rows", ["plan", "direct"])
@pytest.mark.parametrize(("bank_rank", "live"), [(256, 4), (8, 3), (7, 2), (129, 70)])
def test_a_rank_below_the_banks_reads_nothing_beyond_it(device, bank_rank, live, rows):
    """What lies past a slot's live rank may be anything, NaN here: the last adapter's rows, or memory never written."""
    args = layer(device, 3, top_k=1, rank=bank_rank)
    bank = args["lora"]
    args["lora"] = ExpertLoRA(bank.w13_a, bank.w13_b, bank.w2_a, bank.w2_b, ranks=ints(live, bank_rank, device=device))
    for a in (bank.w13_a, bank.w2_a):
        a[0, ..., live:, :] = float("nan")
    for b in (bank.w13_b, bank.w2_b):
        b[0, ..., live:] = float("nan")
    config, shape = dataclasses.replace(SMALL, rows=rows), Shape(3, 1, 4, 48, 24, bank_rank)
    memory = torch.full((bytes_needed(shape, config),), 255, dtype=torch.uint8, device=device)  # NaN
    check({**args, "workspace": Workspace(memory, 3, 1, bank_rank)}, config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("one_a", [False, True], ids=["two_a", "one_a"])
@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "shared"])
def test_slots_mixed_with_bare_rows(device, shared, one_a, dtype):
    """Rows of two adapters, and rows without any that keep the bits of a call without a bank."""
    args = layer(device, 5, rank=8, shared=shared, one_a=one_a, dtype=dtype)
    args["lora_ids"] = ints(0, -1, 1, 2, 0, device=device)
    got = check(args)
    plain = fused_moe(**bare(args), config=SMALL)
    assert torch.equal(got[[1, 3]], plain[[1, 3]])
    assert error_ratio(got[[0, 2, 4]], plain[[0, 2, 4]]) > 0.2, "the adapters change their rows"


@pytest.mark.parametrize("rows", ["plan", "direct"])
@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "shared"])
def test_disabled_slots_rank_zero_and_ids_out_of_range_leave_the_bare_result(device, shared, rows):
    """Not the rows of slot 0, which a clamped id would give; nor of a bank whose factors are NaN in those slots."""
    args = layer(device, 8, top_k=1, rank=8, slots=5, shared=shared)
    bank = args["lora"]
    parts = [factor[:4] for factor in (bank.w13_a, bank.w13_b, bank.w2_a, bank.w2_b)]  # a fifth slot lies behind
    for factor in parts:
        factor[1:3] = float("nan")
    ranks, enabled = ints(8, 8, 0, 5, 8, device=device)[:4], ints(1, 0, 1, 1, 1, device=device)[:4]
    args["lora"] = ExpertLoRA(*parts, ranks=ranks, enabled=enabled)
    args["lora_ids"] = ints(0, 1, 2, 3, -1, 4, -7, 2**30, device=device)
    config = dataclasses.replace(SMALL, rows=rows)
    got = check(args, config)
    plain = fused_moe(**bare(args), config=config)
    idle = [1, 2, 4, 5, 6, 7]
    assert torch.equal(got[idle], plain[idle])


@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "shared"])
@pytest.mark.parametrize("rows", ["plan", "direct"])
def test_an_adapter_that_is_not_finite_stays_in_its_rows(device, rows, shared):
    """Rows of another adapter and of none stand in its blocks; one slot is taken first, the other in a loop."""
    args = layer(device, 5, rank=8, shared=shared)
    args["topk_ids"][:, 0] = 0
    args["lora_ids"] = ints(0, -1, 1, -1, 0, device=device)
    config = dataclasses.replace(SMALL, rows=rows)
    before = fused_moe(**args, config=config)
    bank = args["lora"]
    for slot, others in ((0, [1, 2, 3]), (1, [0, 1, 3, 4])):
        parts = [f.clone() for f in (bank.w13_a, bank.w13_b, bank.w2_a, bank.w2_b)]
        for factor in parts:
            factor[slot] = float("nan")
        got = fused_moe(**{**args, "lora": ExpertLoRA(*parts)}, config=config)
        assert torch.equal(got[others], before[others])
        assert bool(got[[t for t in range(5) if t not in others]].isnan().all())


def test_a_bank_that_no_row_uses_changes_no_bit(device):
    args = layer(device, 4, rank=8)
    args["lora_ids"] = ints(-1, -1, -1, -1, device=device)
    assert torch.equal(fused_moe(**args, config=SMALL), fused_moe(**bare(args), config=SMALL))


def test_a_rank_above_the_banks_is_the_banks(device):
    args = layer(device, 2, rank=8, slots=1)
    bank = args["lora"]
    parts = (bank.w13_a, bank.w13_b, bank.w2_a, bank.w2_b)
    args["lora"] = ExpertLoRA(*map(poison, parts), ranks=ints(40, device=device))
    assert torch.equal(check(args), fused_moe(**{**args, "lora": bank}, config=SMALL))


@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "shared"])
def test_pairs_of_gate_and_up_as_an_engine_stacks_them(device, shared, up_first):
    """Two allocations, in either order in memory, in place of one with a slice axis."""
    w13_a, w13_b, w2_a, w2_b = factors(2, 4, 8, 48, 24, device=device, shared=shared)
    memory = torch.full((2, *w13_a.shape[:2], 8, 48), float("nan"), dtype=w13_a.dtype, device=device)
    gate_a, up_a = (memory[1], memory[0]) if up_first else (memory[0], memory[1])
    gate_a.copy_(w13_a[:, :, 0])
    up_a.copy_(w13_a[:, :, 1])
    gate_b, up_b = w13_b[:, :, 0].contiguous(), w13_b[:, :, 1].contiguous()
    args = layer(device)
    args["lora"] = ExpertLoRA((gate_a, up_a), (gate_b, up_b), w2_a, w2_b)
    args["lora_ids"] = ints(0, 1, -1, device=device)
    stacked = {**args, "lora": ExpertLoRA(w13_a, w13_b, w2_a, w2_b)}
    assert torch.equal(check(args), fused_moe(**stacked, config=SMALL))


@pytest.mark.parametrize(
    ("rows", "down_whole", "rank"), [("plan", False, 8), ("plan", True, 8), ("direct", False, 8), ("direct", True, 40)]
)
def test_strides_of_every_operand(device, rows, down_whole, rank):
    """x, the weights, the bank and ``out`` cut out of memory that holds NaN, which is neither read nor written."""
    args = layer(device, 3, rank=rank, shared=True)
    config = dataclasses.replace(SMALL, rows=rows, down_whole=down_whole)
    dense = fused_moe(**args, config=config)
    for name in ("x", "w13", "w2"):
        args[name] = poison(args[name])
    bank = args["lora"]
    args["lora"] = ExpertLoRA(*map(poison, (bank.w13_a, bank.w13_b, bank.w2_a, bank.w2_b)))
    frame = torch.full((5, 64), 7.0, dtype=torch.float16, device=device)
    args["out"] = frame[1:4, 8:56]
    got = check(args, config)
    assert got is args["out"] and torch.equal(got, dense)
    got.fill_(7.0)
    assert bool((frame == 7.0).all()), "nothing is written beside out"


def test_gate_and_up_have_an_a_each(device):
    """A gate that used up's A, or an up that used gate's, is off by more than the result."""
    for half in (0, 1):
        args = layer(device, rank=8, slots=1)
        bank = args["lora"]
        bank.w13_b[:, :, 1 - half] = 0  # only this half of B13 lets its A in
        bank.w2_b.zero_()
        got = check(args)
        swapped = ExpertLoRA(bank.w13_a.flip(2), bank.w13_b, bank.w2_a, bank.w2_b)
        assert error_ratio(reference({**args, "lora": swapped}), got) > 0.3


@pytest.mark.parametrize("modules", ["gate", "up", "down"])
def test_an_adapter_on_one_projection_alone(device, modules):
    args = layer(device, 2, rank=8, slots=1)
    bank = args["lora"]
    for i, name in enumerate(("gate", "up")):
        if name != modules:
            bank.w13_b[:, :, i] = 0
    if modules != "down":
        bank.w2_b.zero_()
    got = check(args)
    assert error_ratio(fused_moe(**bare(args), config=SMALL), got) > 0.05


def test_an_adapter_swapped_in_place_is_the_one_used(device):
    """No copy of a slot, packed or cached, outlives `write_slot_`."""
    args = layer(device, 3, rank=8)
    first = check(args)
    args["lora"].write_slot_(1, ExpertLoRA(*factors(1, 4, 3, 48, 24, device=device)))
    second = check(args)
    assert torch.equal(first[[0, 2]], second[[0, 2]])
    assert error_ratio(first[1:2], second[1:2]) > 0.3


# --- routing ----------------------------------------------------------------------------------------------------------


WAYS = {"plan": {}, "search": {"rows": "search"}, "direct": {"rows": "direct"}, "joined": {"lag": 2}}


@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "shared"])
@pytest.mark.parametrize("way", WAYS)
def test_expert_map_of_an_expert_parallel_rank(device, way, shared):
    """Six global experts, three of them here under local ids (and local factors); -1, and ids that nobody has."""
    args = layer(device, 4, experts=4, rank=8, shared=shared)
    config = dataclasses.replace(SMALL, **WAYS[way])
    args["expert_map"] = ints(2, -1, 0, -1, 1, 9, device=device)  # 9: no local expert either
    args["topk_ids"] = ints([0, 1], [2, 4], [6, -1], [5, 4], device=device)
    got = check(args, config)
    assert bool((got[2] == 0).all())
    local = {k: v for k, v in args.items() if k != "expert_map"}
    local["topk_ids"] = ints([2, -1], [0, 1], [-1, -1], [-1, 1], device=device)
    assert torch.equal(got, fused_moe(**local, config=config))


@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "shared"])
@pytest.mark.parametrize("way", WAYS)
def test_ids_at_or_above_the_number_of_experts_add_nothing(device, way, shared):
    """An id equal to E is how engines mark a shared expert or padding; its weight may be anything."""
    args = layer(device, 3, rank=8, shared=shared)
    args["topk_ids"] = ints([4, 1], [-1, 2], [0, 2**30], device=device)
    args["topk_weights"][0, 0] = args["topk_weights"][1, 0] = float("nan")
    ids, weights = args["topk_ids"], args["topk_weights"]
    memory = torch.full((1 << 20,), 255, dtype=torch.uint8, device=device)  # NaN
    workspace = Workspace(memory, 3, 2, 8)
    got = fused_moe(**args, config=dataclasses.replace(SMALL, **WAYS[way]), workspace=workspace)
    args["topk_weights"] = torch.where((ids >= 0) & (ids < 4), weights, 0.0)
    assert_close("fused_moe", reference(args), got, LIMIT[torch.float16])


@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "shared"])
def test_no_valid_id_at_all_gives_zeros(device, shared):
    """Not what ``out`` held, nor NaN from rows that no launch wrote."""
    args = layer(device, 3, rank=8, shared=shared)
    args["topk_ids"].fill_(-1)
    out = torch.full_like(args["x"], float("nan"))
    for config in (SMALL, dataclasses.replace(SMALL, rows="direct")):
        assert bool((fused_moe(**args, out=out.fill_(float("nan")), config=config) == 0).all())


def test_routed_scaling_is_applied_once(device):
    args = layer(device, 3, rank=8, shared=True)
    got = check({**args, "routed_scaling": 2.5})
    once, twice = reference(args).float() * 2.5, reference(args).float() * 6.25
    assert error_ratio(once, got) < 1e-3 < 0.5 < error_ratio(twice, got)
    rounded_before = (fused_moe(**args, config=SMALL).float() * 2.5).to(got.dtype)
    assert not torch.equal(got, rounded_before), "scaled in fp32, then rounded"


def test_choices_are_summed_in_ascending_order(device):
    """Two that cancel, then one that would be lost beside either."""
    args = layer(device, 2, top_k=3)
    args["topk_ids"][:] = args["topk_ids"][:, :1]
    args["topk_weights"][:] = torch.tensor([2.0**30, -(2.0**30), 1.0])
    last = {
        **args,
        "topk_ids": args["topk_ids"][:, 2:].contiguous(),
        "topk_weights": torch.ones_like(args["x"][:, :1]).float(),
    }
    assert torch.equal(fused_moe(**args, config=SMALL), fused_moe(**last, config=SMALL))


def test_weights_of_the_router_are_applied_once_and_in_fp32(device):
    """Weights of 2^-13 with outputs of a few thousand: neither their product's inputs nor its square fit fp16."""
    args = layer(device, 3, rank=8)
    args["w2"] *= 2**11
    args["topk_weights"].fill_(2**-13)
    check(args)


# --- numerics ---------------------------------------------------------------------------------------------------------


def rounded_intermediates(args, dtype):
    """The reference with ``t = A @ x`` and ``s = A2 @ h`` rounded, as kernels do that keep them in 16 bits."""
    lora, (x, w13, w2) = args["lora"], (args[k].float() for k in ("x", "w13", "w2"))
    out = torch.zeros_like(x)
    for t, slot in enumerate(args["lora_ids"].tolist()):
        for k, e in enumerate(args["topk_ids"][t].tolist()):
            (gate_a, up_a), (gate_b, up_b) = ([f[slot, e].float() for f in p] for p in (lora.gate_up_a, lora.gate_up_b))
            gate, up = (w13[e] @ x[t]).chunk(2)
            gate = gate + gate_b @ (gate_a @ x[t]).to(dtype).float()
            up = up + up_b @ (up_a @ x[t]).to(dtype).float()
            h = (torch.nn.functional.silu(gate) * up).to(args["x"].dtype).float()
            s = (lora.w2_a[slot, e].float() @ h).to(dtype).float()
            out[t] += args["topk_weights"][t, k] * (w2[e] @ h + lora.w2_b[slot, e].float() @ s)
    return out.to(args["x"].dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_intermediates_of_the_adapters_keep_fp32(device, dtype):
    """The limit of every test here is one that intermediates rounded to bf16, or to x's dtype, exceed."""
    args = layer(device, 4, rank=8, dtype=dtype, scale=4.0)
    ref = reference(args)
    assert error_ratio(ref, rounded_intermediates(args, torch.float32)) <= LIMIT[dtype]
    for rounded in {torch.bfloat16, dtype}:
        assert error_ratio(ref, rounded_intermediates(args, rounded)) > 1.2 * LIMIT[dtype]
    check(args)


def test_intermediates_may_pass_the_range_of_fp16(device):
    """t, s and an expert's output beyond 65504, with factors and weights that bring them back."""
    args = layer(device, 3, rank=8, slots=1)
    bank = args["lora"]
    bank.w13_a.mul_(2**15)
    bank.w13_b.mul_(2**-13)
    bank.w2_a.mul_(2**15)
    bank.w2_b.mul_(2**-13)
    args["w2"].mul_(2**12)
    args["topk_weights"].mul_(2**-14)
    x, e = args["x"][0].float(), int(args["topk_ids"][0, 0])
    assert float((bank.w13_a[0, e, 0].float() @ x).abs().max()) > 65504
    check(args)


def test_the_same_call_gives_the_same_bits(device):
    args = layer(device, 5, rank=8, shared=True)
    first = fused_moe(**args, config=TILED)
    for _ in range(20 if CUDA else 1):
        assert torch.equal(first, fused_moe(**args, config=TILED))


@pytest.mark.parametrize(
    "config",
    [SMALL, dataclasses.replace(SMALL, rows="search"), dataclasses.replace(SMALL, down_whole=True)],
    ids=["plan", "search", "whole"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "shared"])
def test_bits_of_a_row_do_not_depend_on_the_other_rows(device, config, shared):
    """Another batch of as many tokens: other contents (NaN too), experts, weights and adapters beside the row."""
    args = layer(device, 5, rank=8, shared=shared)
    got = check(args, config)
    row = 3
    keep = torch.arange(5, device=device) == row
    other = layer(device, 5)
    other["x"][[0, row + 1]] = float("nan")  # the latter is what a load past the row's end would meet
    for name in ("x", "topk_weights", "topk_ids"):
        args[name] = torch.where(keep[:, None], args[name], other[name])
    args["lora_ids"] = torch.where(keep, args["lora_ids"], ints(-1, 0, 0, 1, 1, device=device))
    args["topk_ids"][2] = args["topk_ids"][row]  # shares its blocks with a row that comes first
    assert torch.equal(fused_moe(**args, config=config)[row], got[row])


# --- out and workspace ------------------------------------------------------------------------------------------------


def shard(experts=4, hidden=48, inter=24):
    return SimpleNamespace(num_experts=experts, hidden=hidden, intermediate=inter)


def _joined_cases():
    """Keyword arguments of `layer`, and what is changed in them."""
    return {
        "bare": ({"tokens": 20}, {}),
        "adapters": ({"tokens": 20, "rank": 8}, {}),
        "shared": ({"tokens": 37, "rank": 8, "shared": True}, {}),
        "one_a": ({"tokens": 20, "rank": 24, "one_a": True, "slots": 3}, {}),
        "shared_one_a": ({"tokens": 5, "rank": 33, "one_a": True, "shared": True}, {}),
        "two_blocks_an_expert": ({"tokens": 70, "top_k": 1, "experts": 3, "rank": 8}, {}),
        "every_block_in_use": ({"tokens": 33, "top_k": 1, "experts": 1, "rank": 8}, {}),
        "nothing_routed": ({"tokens": 3, "rank": 8, "shared": True}, {"topk_ids": -1}),
    }


@pytest.mark.parametrize("lag", [1, 3, 50])
@pytest.mark.parametrize("tiles", [SMALL, TILED], ids=["small", "tiled"])
@pytest.mark.parametrize("case", _joined_cases())
def test_one_launch_for_the_products_has_the_bits_of_three(device, case, tiles, lag):
    shape, changed = _joined_cases()[case]
    args = layer(device, **shape)
    for name, value in changed.items():
        args[name].fill_(value)
    apart = check(args, tiles)
    for _ in range(2):  # the counts start from zero every time
        assert torch.equal(fused_moe(**args, config=dataclasses.replace(tiles, lag=lag)), apart)
    for tail in (1, 100) if lag == 3 else ():
        narrow = dataclasses.replace(tiles, lag=lag, down_tiles=2, tail=tail, tail_tiles=1)
        assert torch.equal(fused_moe(**args, config=narrow), apart)


# two choices a token, which make blocks of 8 rows of an expert: one, two, four, none; and a row without one
CROWDED = [0] * 3 + [1] * 10 + [2] * 26 + [-1]
BARE_ROWS = slice(6, 11)  # tokens without an adapter: all of the third expert's first block
WIDE_CASES = {
    "bare": {},
    "adapters": {"rank": 8, "slots": 1},
    "two_slots": {"rank": 24, "slots": 2, "one_a": True},
    "shared": {"rank": 8, "slots": 1, "shared": True},
}


def same(got, want):
    """Bit for bit on a GPU; the interpreter's products are numpy's, whose sums depend on the width of a tile."""
    assert torch.equal(got, want) if CUDA else error_ratio(want, got) < 4e-3


def crowded(device, case):
    args = layer(device, len(CROWDED) // 2, experts=4, hidden=40, dtype=torch.bfloat16, **WIDE_CASES[case])
    args["topk_ids"] = ints(*CROWDED, device=device).view(-1, 2)
    if "lora" in args:
        args["lora_ids"][BARE_ROWS] = -1
    return args


@pytest.mark.parametrize(
    ("case", "whole", "splits"),
    [("bare", False, 2), ("adapters", True, 1), ("two_slots", False, 1), ("shared", True, 2)],
)
def test_blocks_of_an_expert_taken_together_give_the_same(device, case, whole, splits):
    """In launches of their own and in one; there down of the last blocks in narrower parts too.

    Bare and shared calls look at one width, the others at the other, whichever is above 1.
    """
    args = crowded(device, case)
    config = dataclasses.replace(SMALL, block_m=8, splits=splits, down_whole=whole, down_block_n=32, down_tiles=2)
    apart = check(args, config)
    for wide, lora_wide, lag in ((4, 2, 0), (1, 4, 4), (2, 1, 2)):
        together = dataclasses.replace(config, wide=wide, lora_wide=lora_wide, lag=lag, tail=3, tail_tiles=1)
        same(fused_moe(**args, config=together), apart)


@pytest.mark.parametrize(
    ("dtype", "case", "wide"),
    [
        (torch.bfloat16, "bare", 4),
        (torch.bfloat16, "shared", 4),
        (torch.bfloat16, "adapters", 2),
        (torch.float16, "bare", 1),
        (torch.float16, "adapters", 1),
        ("mxfp8", "bare", 1),
    ],
)
def test_which_calls_take_blocks_together(device, dtype, case, wide, monkeypatch):
    """fp16 sums, and MXFP8's, have other bits in a tile of another width; adapters have a width of their own."""
    launched = []

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(constants["WIDE"])

    monkeypatch.setattr(fused, "_joined_kernel", Launch())
    args = layer(device, hidden=64, inter=32, dtype=torch.bfloat16 if dtype == "mxfp8" else dtype, **WIDE_CASES[case])
    if dtype == "mxfp8":
        args |= {name: quantize_reference(args[name].float().cpu()).to(device) for name in ("w13", "w2")}
    fused_moe(**args, config=dataclasses.replace(SMALL, wide=4, lora_wide=2, lag=4))
    assert launched == [wide]


def test_blocks_taken_together_need_a_plan_a_lag_of_as_many_and_a_power_of_two(device):
    args = layer(device)
    match = r"fused_moe: config must be .* lora_wide and act_block_m \(or 0\) powers of two, the first two above 1 with"
    with pytest.raises(ValueError, match=match):
        fused_moe(**args, config=dataclasses.replace(SMALL, act_block_m=48))
    for name in ("wide", "lora_wide"):
        for wrong in ({"rows": "search"}, {"lag": 3}, {name: 0}, {name: -1}, {name: 3}):
            with pytest.raises(ValueError, match=match):
                fused_moe(**args, config=dataclasses.replace(SMALL, **{name: 4, **wrong}))


@pytest.mark.parametrize("block_m", [8, 16])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "shared"])
def test_one_launch_on_mxfp8_weights_has_the_bits_of_three(device, shared, prepared, block_m):
    args = layer(device, tokens=20, hidden=64, inter=32, rank=8, shared=shared)
    weights = {name: quantize_reference(args[name].float()) for name in ("w13", "w2")}
    args |= {name: prepare(w) if prepared else w for name, w in weights.items()}
    for whole in (False, True):
        config = dataclasses.replace(SMALL, block_m=block_m, up_block_k=64, down_whole=whole)
        check(args, config)
        apart = fused_moe(**args, config=config)
        for narrow in ({}, {"down_tiles": 2, "tail": 2, "tail_tiles": 1}):
            assert torch.equal(fused_moe(**args, config=dataclasses.replace(config, lag=2, **narrow)), apart)


def test_one_launch_needs_a_plan_and_one_number_of_warps(device):
    args = layer(device)
    tails = ({"down_tiles": 4, "tail_tiles": 3}, {"down_tiles": 2, "tail_tiles": 4}, {"tail_tiles": -1}, {"tail": -1})
    for wrong in ({"rows": "search"}, {"act_warps": 8}, {"lag": -1}, *tails):
        with pytest.raises(ValueError, match="fused_moe: config must be of rows='plan', one number of warps and"):
            fused_moe(**args, config=dataclasses.replace(SMALL, **{"lag": 1, **wrong}))


@pytest.mark.skipif(CUDA, reason="a GPU starts programs as it likes")
@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("case", _joined_cases())
def test_programs_of_one_launch_may_end_in_any_order_that_their_waits_allow(device, case, lag, monkeypatch):
    """Whoever read what is not yet written would find NaN."""
    shape, changed = _joined_cases()[case]
    args = layer(device, **{**shape, "tokens": min(shape["tokens"], 9)})
    for name, value in changed.items():
        args[name].fill_(value)
    config = dataclasses.replace(SMALL, up_block_n=32, act_block_i=16)
    apart = fused_moe(**args, config=config)
    args["workspace"] = Workspace(torch.empty(1 << 20, dtype=torch.uint8, device=device), 9, 2, 40)
    kernel = fused._joined_kernel
    for seed in (0, 1, 2):
        args["workspace"].buffer.fill_(255)
        order = interpreter.AnyOrder(kernel, seed)
        monkeypatch.setattr(fused, "_joined_kernel", order)
        assert torch.equal(fused_moe(**args, config=dataclasses.replace(config, lag=lag)), apart)
        assert order.postponed or case == "nothing_routed"


@pytest.mark.skipif(CUDA, reason="a GPU starts programs as it likes")
@pytest.mark.parametrize("case", ["bare", "adapters"])
def test_blocks_taken_together_wait_for_each_of_them(device, case, monkeypatch):
    args = crowded(device, case)
    config = dataclasses.replace(SMALL, block_m=8)
    apart = fused_moe(**args, config=config)
    args["workspace"] = Workspace(torch.empty(1 << 20, dtype=torch.uint8, device=device), len(CROWDED) // 2, 2, 8)
    kernel = fused._joined_kernel
    for seed in (2, 3):  # where activate of a block would come before the programs that take its rows
        args["workspace"].buffer.fill_(255)
        order = interpreter.AnyOrder(kernel, seed)
        monkeypatch.setattr(fused, "_joined_kernel", order)
        same(fused_moe(**args, config=dataclasses.replace(config, wide=4, lora_wide=4, lag=4)), apart)
        assert order.postponed


@pytest.mark.skipif(CUDA, reason="a GPU would hang")
@pytest.mark.parametrize("times", [0, 2])
def test_a_wait_for_more_or_fewer_parts_than_there_are_is_found_without_a_gpu(device, times, monkeypatch):
    real, seen = joined.count_up_each, []

    def count_up_each(counts_ptr, blocks):
        seen.append(counts_ptr)
        for _ in range(times if len(seen) == 3 else 1):
            real(counts_ptr, blocks)

    monkeypatch.setattr(joined, "count_up_each", count_up_each)
    with pytest.raises(Exception, match="a program waits for others than those before it"):
        fused_moe(**layer(device, rank=8), config=dataclasses.replace(SMALL, lag=2))


def test_a_table_cannot_hold_a_launch_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    pick = config_module._pick.__wrapped__
    form = {"rows": "direct"}, {"down_warps": 8}, {"tail_tiles": -1}
    for wrong in ({"lag": -1}, {"wide": 3}, *({"lag": 2} | f for f in form)):
        with tuning.override("moe_lora", dataclasses.asdict(dataclasses.replace(SMALL, **wrong))):
            with pytest.raises(ValueError, match="MoEConfig.pick: the table of NVIDIA H200 for moe_lora holds"):
                pick("cuda", 0, 3, 2, 4, 48, 24, "dense")
    with tuning.override("moe_lora", {"splits": 3}):  # a table written before a field was there
        assert pick("cuda", 0, 3, 2, 4, 48, 24, "dense") == MoEConfig(splits=3)


@pytest.mark.parametrize("base", ["dense", "mxfp8"])
def test_the_tuner_can_find_the_rows_and_registers_that_its_tables_hold(base):
    start = MoEConfig()
    tried = {(c.block_m, c.wide, c.registers) for c in (start, *start.candidates(base))}
    tried_with_adapters = {c.lora_wide for c in (start, *start.candidates(base))}
    for path in tuning.CONFIGS.glob(f"*/{config_module.OPS[base]}.json"):
        for entry in json.loads(path.read_text())["entries"]:
            config = MoEConfig(**entry["config"])
            assert config.joins and (config.block_m, config.wide, config.registers) in tried, entry
            assert config.lora_wide in tried_with_adapters, entry


@pytest.mark.parametrize("base", ["dense", "mxfp8"])
@pytest.mark.parametrize("hidden", [2304, 3840, 5120])
def test_shares_of_the_hidden_axis_are_cut_alike_where_sums_are_to_agree(base, hidden):
    """2304 in four shares: of 640 in steps of 128, of 576 in steps of 64."""
    rule = MoEConfig.heuristic if base == "dense" else MoEConfig.mxfp8_heuristic
    shares = set()
    for experts, top_k in ((8, 2), (128, 8)):
        pinned = rule(32, top_k, experts, hidden, 768)
        configs = [rule(n, top_k, experts, hidden, 768).summing_as(pinned, base=base) for n in (1, 64, 1024, 4096)]
        steps = {-(-hidden // (c.splits * c.up_block_k)) * c.up_block_k for c in configs if c.splits > 1}
        assert len(steps) <= 1
        shares |= steps
    assert shares or base == "mxfp8"


def test_the_form_of_mxfp8_weights_is_the_one_whose_sums_are_asked_for():
    for whole in (False, True):
        ours, theirs = MoEConfig(down_whole=not whole), MoEConfig(down_whole=whole)
        assert ours.summing_as(theirs, base="mxfp8").down_whole == whole
        assert ours.summing_as(theirs).down_whole != whole, "which changes no sum of dense weights"


def test_with_out_and_workspace_nothing_is_allocated(device, monkeypatch):
    args = layer(device, 3, rank=8)
    ref = reference(args)
    args["workspace"] = moe_workspace(4, 2, shard(), 8, device)
    args["out"] = torch.full_like(args["x"], float("nan"))
    fused_moe(**args)  # compiles on a GPU
    args["out"].fill_(float("nan"))

    def refuse(*a, **k):
        raise AssertionError("allocation in a call that was given out and workspace")

    for name in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided"):
        monkeypatch.setattr(torch, name, refuse)
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"] if CUDA else 0
    got = fused_moe(**args)
    after = torch.cuda.memory_stats(device)["allocation.all.allocated"] if CUDA else 0
    monkeypatch.undo()
    assert after == before and got is args["out"]
    assert_close("fused_moe", ref, got, LIMIT[torch.float16])


def test_a_workspace_serves_smaller_batches_and_bare_rows_after_larger_ones(device):
    """What a larger batch with adapters left in the buffers (routed rows, ids, sums) reaches no later row."""
    workspace = moe_workspace(9, 2, shard(), 8, device)
    workspace.buffer.fill_(255)  # NaN in every floating type
    large = {**layer(device, 9, rank=8), "workspace": workspace}
    fused_moe(**large)
    small = {k: v[:3] if k in ("x", "topk_weights", "topk_ids", "lora_ids") else v for k, v in large.items()}
    small["lora_ids"] = ints(-1, 0, -1, device=device)
    got = check(small, None)
    alone = fused_moe(**{k: v for k, v in bare(small).items() if k != "workspace"})
    assert torch.equal(got[[0, 2]], alone[[0, 2]])


@pytest.mark.parametrize("sizes", [(4, 2, 4, 48, 24, 8), (300, 8, 16, 64, 32, 0), (544, 2, 64, 5120, 64, 32)])
def test_a_workspace_is_large_enough_for_every_batch_up_to_its_size(sizes):
    """Launch parameters change with the batch, so the largest batch is not the one that needs most."""
    tokens, top_k, experts, hidden, inter, rank = sizes
    device = torch.device("cpu")
    workspace = moe_workspace(tokens, top_k, shard(experts, hidden, inter), rank, device)
    for base in config_module.OPS:
        for count in range(1, tokens + 1):
            config = MoEConfig.pick(device, count, top_k, experts, hidden, inter, base=base)
            need = bytes_needed(Shape(count, top_k, experts, hidden, inter, rank), config)
            assert need <= workspace.buffer.numel(), (base, count)


def test_a_workspace_is_cut_anew_for_another_dtype_and_configuration(device):
    workspace, shape = moe_workspace(4, 2, shard(), 8, device), Shape(2, 2, 4, 48, 24, 8)
    for dtype in (torch.float16, torch.bfloat16):
        assert workspace.buffers(shape, SMALL, dtype).h.dtype == dtype
    for lag, counts in ((0, 0), (1, 9)):
        assert len(workspace.buffers(shape, dataclasses.replace(SMALL, lag=lag), torch.float16).counts) == counts


def test_ranks_of_a_step(device):
    """64 in one step for blocks of 8 and lone pairs of dense weights alone: wider tiles of them fail on an H200."""

    def bank(rank, **kind):
        return ExpertLoRA(*factors(1, 4, rank, 48, 24, device=device, **kind))

    eight, lone = (dataclasses.replace(SMALL, **kw) for kw in ({"block_m": 8}, {"rows": "direct", "down_tiles": 1}))
    for config in (eight, lone):
        assert [fused._ranks_of_a_step(bank(r), config, True) for r in (3, 17, 32, 33, 64, 100)] == [
            16,
            32,
            32,
            64,
            64,
            64,
        ]
        assert fused._ranks_of_a_step(bank(64), config, False) == 32
        assert fused._ranks_of_a_step(bank(64, shared=True), config, True) == 32
    for config in (SMALL, dataclasses.replace(lone, down_tiles=2)):
        assert fused._ranks_of_a_step(bank(64), config, True) == 32
    for rank in (64, 100):
        check(layer(device, 20, rank=rank), eight)
        check(layer(device, 3, rank=rank), lone)


@pytest.mark.parametrize(
    ("shape", "changed"),
    [
        pytest.param({"tokens": 32, "top_k": 1, "experts": 33}, {"lag": 1}, id="32-blocks"),  # whose counts fill 260 B
        pytest.param({"tokens": 2, "top_k": 1, "inter": 512, "shared": True, "one_a": True}, {}, id="few-rows-of-a"),
    ],
)
def test_nothing_is_written_past_a_workspace_of_exact_size(device, shape, changed):
    args = layer(device, **{"hidden": 16, "inter": 16, "rank": 64, **shape})
    config = dataclasses.replace(SMALL, **changed)
    tokens, top_k = args["topk_ids"].shape
    need = bytes_needed(Shape(tokens, top_k, len(args["w2"]), 16, args["w2"].shape[2], 64), config)
    memory = torch.full((need + 2**16,), 255, dtype=torch.uint8, device=device)
    args["workspace"] = Workspace(memory[:need], tokens, top_k, 64)
    check(args, config)
    assert bool((memory[need:] == 255).all())


def test_a_workspace_that_is_too_small_is_refused(device):
    args = layer(device, 20, rank=8)
    for workspace in (moe_workspace(1, 2, shard(), 8, device), moe_workspace(20, 2, shard(), 0, device)):
        with pytest.raises(ValueError, match=r"fused_moe: workspace is too small.*max_tokens="):
            fused_moe(**args, workspace=workspace)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"max_tokens": None}, "max_tokens must be an integer of at least 1, got None"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
        ({"max_rank": -1}, "max_rank must be an integer of at least 0, got -1"),
        ({"shard": object()}, "shard needs hidden, intermediate and num_experts"),
        ({"shard": SimpleNamespace(hidden=48, intermediate=None, num_experts=4)}, "shard needs hidden"),
        (
            {"shard": SimpleNamespace(hidden=48, intermediate=0, num_experts=4)},
            "shard's intermediate must be at least 1",
        ),
        ({"max_tokens": True}, "max_tokens must be an integer of at least 1, got True"),
    ],
)
def test_moe_workspace_refuses(changed, message):
    """Every capacity is required: one that a default filled in would be too small one day."""
    args = {"max_tokens": 4, "top_k": 2, "shard": shard(), "max_rank": 8, "device": "cpu", **changed}
    with pytest.raises(ValueError, match=f"moe_workspace: {message}"):
        moe_workspace(**args)
    with pytest.raises(TypeError):
        moe_workspace(4, 2, shard())


# --- what is refused --------------------------------------------------------------------------------------------------


def strided(t):
    return torch.stack([t, t], -1)[..., 0]


def other_bank(**changes):
    sizes = {"slots": 2, "experts": 4, "rank": 8, "hidden": 48, "inter": 24, "device": "cpu", **changes}
    return lambda args: ExpertLoRA(*factors(**sizes))


def split_strides(args):
    """Gate and up of A13 with strides of their own."""
    bank = args["lora"]
    return ExpertLoRA((bank.w13_a[:, :, 0], bank.w13_a[:, :, 1].contiguous()), bank.w13_b, bank.w2_a, bank.w2_b)


REFUSED = {
    "x-type": ("x", lambda a: [1.0], "x must be a tensor, got list"),
    "scaling-nan": ("routed_scaling", lambda a: float("nan"), "routed_scaling must be a finite number, got nan"),
    "scaling-str": ("routed_scaling", lambda a: "2", "routed_scaling must be a finite number, got '2'"),
    "scaling-none": ("routed_scaling", lambda a: None, "routed_scaling must be a finite number, got None"),
    "config-type": ("config", lambda a: "x", "config must be a MoEConfig, got str"),
    "out-one-row": ("out", lambda a: a["x"][:1].expand_as(a["x"]), "out must be of rows that do not overlap"),
    "no-inter": ("w2", lambda a: a["w2"][:, :, :0], "w2 must be of H and I from 1 up"),
    "x-dims": ("x", lambda a: a["x"][0], r"x must be a tensor of 2 dimensions, got shape \(48,\)"),
    "x-fp32": ("x", lambda a: a["x"].float(), "x must be torch.bfloat16 or torch.float16, got torch.float32"),
    "x-fp8": ("x", lambda a: a["x"].to(torch.float8_e4m3fn), "x must be .*, got torch.float8_e4m3fn"),
    "x-stride": ("x", lambda a: strided(a["x"]), r"x must be of innermost stride 1, got strides \(96, 2\)"),
    "w13-dtype": ("w13", lambda a: a["w13"].bfloat16(), "w13 must be torch.float16, got torch.bfloat16"),
    "w13-device": ("w13", lambda a: a["w13"].to("meta"), "w13 must be on x's device .*, got meta"),
    "w13-shape": ("w13", lambda a: a["w13"][:, :40], r"w13 must be \(4, 48, 48\), got \(4, 40, 48\)"),
    "w2-dims": ("w2", lambda a: a["w2"][0], "w2 must be a tensor of 3 dimensions"),
    "w2-hidden": ("w2", lambda a: a["w2"][:, :40], r"w2 must be \(E, H=48, I\) to fit x, got \(4, 40, 24\)"),
    "w2-stride": ("w2", lambda a: strided(a["w2"]), "w2 must be of innermost stride 1"),
    "experts": ("w2", lambda a: a["w2"][:1].expand(1025, -1, -1), "w2 must be of 1 to 1024 experts, got 1025"),
    "ids-dtype": ("topk_ids", lambda a: a["topk_ids"].long(), "topk_ids must be torch.int32, got torch.int64"),
    "ids-rows": ("topk_ids", lambda a: a["topk_ids"][:2], r"topk_ids must be \(3, top_k\), got \(2, 2\)"),
    "ids-empty": ("topk_ids", lambda a: a["topk_ids"][:, :0], r"topk_ids must be \(3, top_k\), got \(3, 0\)"),
    "ids-rows-apart": (
        "topk_ids", lambda a: torch.cat([a["topk_ids"]] * 2, 1)[:, :2],
        r"topk_ids must be contiguous, got strides \(4, 1\)",
    ),
    "weights-dtype": (
        "topk_weights", lambda a: a["topk_weights"].half(), "topk_weights must be torch.float32, got torch.float16"
    ),
    "weights-shape": (
        "topk_weights", lambda a: a["topk_weights"][:, :1], r"topk_weights must be \(3, 2\), got \(3, 1\)"
    ),
    "weights-rows-apart": (
        "topk_weights", lambda a: torch.cat([a["topk_weights"]] * 2, 1)[:, :2], "topk_weights must be contiguous"
    ),
    "map-dtype": ("expert_map", lambda a: torch.arange(4).to(a["x"].device), "expert_map must be torch.int32"),
    "map-dims": ("expert_map", lambda a: a["topk_ids"], "expert_map must be a tensor of 1 dimensions"),
    "out-rows": (
        "out", lambda a: a["x"].as_strided((3, 48), (47, 1)), "out must be of rows that do not overlap .* 48 elements"
    ),
    "out-shape": ("out", lambda a: a["x"][:2], r"out must be \(3, 48\), got \(2, 48\)"),
    "out-dtype": ("out", lambda a: a["x"].float(), "out must be torch.float16, got torch.float32"),
    "lora-ids-shape": ("lora_ids", lambda a: a["lora_ids"][:2], r"lora_ids must be \(3,\), got \(2,\)"),
    "lora-ids-dtype": ("lora_ids", lambda a: a["lora_ids"].long(), "lora_ids must be torch.int32, got torch.int64"),
    "lora-ids-stride": ("lora_ids", lambda a: strided(a["lora_ids"]), "lora_ids must be of innermost stride 1"),
    "no-lora-ids": ("lora_ids", lambda a: None, "lora_ids must be given together with lora"),
    "no-lora": ("lora", lambda a: None, "lora_ids must be given together with lora"),
    "lora-type": ("lora", lambda a: a["x"], "lora must be an ExpertLoRA, got Tensor"),
    "lora-dtype": ("lora", lambda a: a["lora"].to(dtype=torch.bfloat16), "lora must be of x's dtype torch.float16"),
    "lora-device": ("lora", lambda a: a["lora"].to("meta"), "lora must be on x's device .*, got meta"),
    "lora-hidden": ("lora", other_bank(hidden=40), r"lora must be a bank of .* \(4, 48, 24\), got \(4, 40, 24\)"),
    "lora-inter": ("lora", other_bank(inter=8), r"lora must be a bank of .* \(4, 48, 24\), got \(4, 48, 8\)"),
    "lora-experts": ("lora", other_bank(experts=5), r"lora must be a bank of .* \(4, 48, 24\), got \(5, 48, 24\)"),
    "lora-rank": ("lora", other_bank(rank=513), "lora must be of rank at most 512, got 513"),
    "lora-strides": ("lora", split_strides, r"lora.w13_a must be of one stride .* in gate and up"),
    "workspace-type": ("workspace", lambda a: a["x"], "workspace must be a Workspace, got Tensor"),
    "workspace-device": (
        "workspace", lambda a: moe_workspace(4, 2, shard(), 8, "meta"), "workspace must be on x's device .*, got meta"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_launch_with_argument_and_value(device, case, monkeypatch):
    argument, change, message = REFUSED[case]
    args = layer(device, rank=8)
    new = change(args)
    if isinstance(new, ExpertLoRA) and new.device.type == "cpu":
        new = new.to(device)
    args[argument] = new
    monkeypatch.setattr(fused, "_run", lambda *a: pytest.fail("launched"))
    with pytest.raises(ValueError, match=f"^fused_moe: {message}"):
        fused_moe(**args)


def test_a_factor_of_another_rank_is_refused(device):
    """A that something gathered over ranks twice: the product would run over whatever follows B."""
    w13_a, w13_b, w2_a, w2_b = factors(1, 4, 8, 48, 24, device=device)
    with pytest.raises(ValueError, match=r"ExpertLoRA: w13_a must be \(L=1, E=4\|1, 8, 48\)"):
        ExpertLoRA(torch.cat([w13_a, w13_a], 3), w13_b, w2_a, w2_b)


def test_on_the_cpu_the_interpreter_is_required(monkeypatch):
    args = layer(torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="x must be on a GPU"):
        fused_moe(**args)


def test_values_on_the_device_are_checked_where_asked_for(device, monkeypatch):
    monkeypatch.setenv("BEAM_MOE_CHECK", "1")
    monkeypatch.setattr(fused, "_run", lambda *a: None)
    args = layer(device, rank=8)
    args["expert_map"] = ints(0, -1, 3, device=device)
    fused_moe(**args)
    with pytest.raises(ValueError, match="expert_map must be below the 4 local experts, got 4"):
        fused_moe(**{**args, "expert_map": ints(0, 4, device=device)})
    weights = args["topk_weights"].clone()
    weights[1, 1] = float("inf")
    with pytest.raises(ValueError, match="topk_weights must be finite"):
        fused_moe(**{**args, "topk_weights": weights})
    args["lora"].ranks[1] = 9
    with pytest.raises(ValueError, match=r"lora.ranks must be within 0..8, got 8..9"):
        fused_moe(**args)
    args["lora"].ranks[1] = -1
    with pytest.raises(ValueError, match=r"lora.ranks must be within 0..8, got -1..8"):
        fused_moe(**args)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bare", "lora", "mxfp8"])
def test_torch_compile_takes_the_layer_whole(device, kind):
    """One graph, the bits of an eager call, and what a slot holds at the time of the call."""
    args = layer(device, 2, top_k=1, hidden=64, inter=32, rank=8)
    args["expert_map"], args["routed_scaling"] = ints(1, 2, 0, device=device), 2.5
    if kind == "bare":
        args = bare(args)
    if kind == "mxfp8":
        args.update({name: quantize_reference(args[name]) for name in ("w13", "w2")})

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x, out):
        return fused_moe(**{**args, "x": x * 1}), fused_moe(**{**args, "x": x * 1, "out": out})

    for _ in range(2 if kind == "lora" else 1):
        out = torch.full_like(args["x"], float("nan"))
        returned, written = compiled(args["x"], out)
        eager = fused_moe(**args)
        assert all(torch.equal(t, eager) for t in (returned, written, out))
        if kind == "lora":
            args["lora"].write_slot_(1, ExpertLoRA(*factors(1, 4, 3, 64, 32, device=device)))


@pytest.mark.parametrize("out", [False, True])
def test_the_operators_meet_torchs_contract(device, out):
    """Schema, mutation, fake tensors, and ahead-of-time dispatch."""
    args = layer(device, 2, top_k=1, rank=4)
    operands = (args["x"], [args["w13"]], [args["w2"]], args["topk_weights"], args["topk_ids"])
    operands += (torch_ops._factors(args["lora"]), args["lora_ids"], None, 1.0)
    if out:
        torch.library.opcheck(torch_ops.fused_moe_out_op, (*operands, torch.zeros_like(args["x"])))
    else:
        torch.library.opcheck(torch_ops.fused_moe_op, operands)


def test_a_gradient_is_refused(device):
    """The layer has no backward pass: one through it is an error, not a zero."""
    args = layer(device, 2, top_k=1)
    args["x"].requires_grad_()
    with pytest.raises(ValueError, match="^fused_moe: x must be without a gradient"):
        fused_moe(**args)
    compiled = torch.compile(lambda: fused_moe(**args), backend="eager", fullgraph=True)
    with pytest.raises((ValueError, RuntimeError)):
        compiled().sum().backward()
    with torch.no_grad():
        assert torch.equal(fused_moe(**args), compiled())


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def graphed(args, tokens):
    """(graph, static arguments): one captured call with ``out`` and a workspace of its own."""
    device = args["x"].device
    static = {
        **args,
        "out": torch.full_like(args["x"], float("nan")),
        "workspace": moe_workspace(tokens, args["topk_ids"].shape[1], shard(), args["lora"].rank, device),
    }
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fused_moe(**static)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_moe(**static)
    return graph, static


def replay(graph, static):
    static["out"].fill_(float("nan"))
    static["workspace"].buffer.fill_(255)
    graph.replay()
    assert_close("replay", reference(static), static["out"], LIMIT[static["x"].dtype])
    return static["out"].clone()


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "shared"])
@pytest.mark.parametrize("tokens", [3, 20, 80], ids=["direct", "search", "plan"])
def test_a_graph_serves_another_adapter_other_routing_and_a_smaller_batch(device, tokens, shared):
    args = layer(device, tokens, rank=8, shared=shared, dtype=torch.bfloat16)
    args["lora"] = ExpertLoRA.zeros(2, shard(), 8, device=device, shared_outer=shared)  # captured empty
    graph, static = graphed(args, tokens)
    bank = static["lora"]
    plain = fused_moe(**bare(args))
    assert torch.equal(replay(graph, static), plain), "an empty bank leaves the bare result"

    for rank in (8, 3):
        new = factors(1, 4, rank, 48, 24, device=device, dtype=torch.bfloat16, shared=shared)
        bank.write_slot_(1, ExpertLoRA(*new))
        got = replay(graph, static)
        assert torch.equal(got[::2], plain[::2]) and not torch.equal(got[1::2], plain[1::2])

    other = layer(device, tokens, dtype=torch.bfloat16)
    for name in ("x", "topk_weights", "topk_ids"):
        static[name].copy_(other[name])
    static["topk_ids"][0] = 3  # an expert that had no row at capture
    replay(graph, static)

    half = tokens // 2  # a smaller batch: the engine marks the tail as empty, in either of two ways
    static["topk_ids"][half:] = -1
    static["lora_ids"][half:] = -1
    assert bool((replay(graph, static)[half:] == 0).all())
    bank.clear_slot_(1)
    replay(graph, static)


@pytest.mark.gpu
@pytest.mark.parametrize("with_workspace", [False, True])
def test_a_graph_survives_churn_of_the_allocator(device, with_workspace):
    """Nothing that the captured launches use is memory that a later allocation may be given."""
    args = layer(device, 20, rank=8, dtype=torch.bfloat16)
    if with_workspace:
        graph, static = graphed(args, 20)
        out = static["out"]
    else:
        fused_moe(**args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused_moe(**args)
    ref = reference(args)
    for round_ in range(3):
        torch.cuda.empty_cache()
        junk = [torch.full((1 << (8 + i % 14),), float("nan"), device=device) for i in range(200)]
        fused_moe(**layer(device, 70, rank=24, dtype=torch.bfloat16))
        graph.replay()
        assert_close(f"replay {round_}", ref, out, LIMIT[torch.bfloat16])
        del junk


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 20, 80], ids=["direct", "search", "plan"])
def test_no_host_synchronisation(device, tokens):
    args = layer(device, tokens, rank=8, dtype=torch.bfloat16)
    args["expert_map"] = ints(0, 1, 2, 3, device=device)
    args["out"] = torch.empty_like(args["x"])
    args["workspace"] = moe_workspace(tokens, 2, shard(), 8, device)
    fused_moe(**args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_moe(**args)
        args["lora"].write_slot_(0, args["lora"], 1)
        fused_moe(**{k: v for k, v in args.items() if k not in ("out", "workspace")})
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["direct", "plan"])
@pytest.mark.parametrize("shared", [False, True], ids=["per_expert", "shared"])
def test_strides_past_two_to_the_31(device, rows, shared):
    """Slots, experts and rows further apart than 32-bit offsets reach, all cut out of one buffer of NaN."""
    dtype, far = torch.bfloat16, 2**31 + 4096
    args = layer(device, 3, experts=3, rank=8, dtype=dtype, shared=shared)
    args["topk_ids"] = ints([2, 0], [0, 2], [2, 1], device=device)
    bank = args["lora"]
    parts = {"w13_a": bank.w13_a, "w13_b": bank.w13_b, "w2_a": bank.w2_a, "w2_b": bank.w2_b}
    weights = {name: args[name] for name in ("x", "w13", "w2")}
    near = sum(t[0].numel() for t in [*parts.values(), *weights.values()]) + 1024
    buffer = torch.full((2 * far + near,), float("nan"), dtype=dtype, device=device)
    used = 0

    def cut(t, stride):
        nonlocal used
        view = buffer.as_strided(t.shape, (stride, *t[0].contiguous().stride()), used)
        used += (t[0].numel() + 127) // 128 * 128 if t[0].numel() > 128 else 128
        view.copy_(t)
        return view

    moved = {name: cut(t, far) for name, t in [*parts.items(), *weights.items()]}
    for t in moved.values():
        assert t.stride(0) >= 2**31
    args.update({name: moved[name] for name in weights})
    args["lora"] = ExpertLoRA(*(moved[name] for name in parts))
    check(args, dataclasses.replace(SMALL, rows=rows))


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("rank", [33, 64, 100])
def test_ranks_above_a_step_by_every_launch_of_the_table(device, rank, slots):
    """Beam's share of TP 8 with fewer experts: steps of 64 ranks are for some of its launches only."""
    args = layer(device, 256, 8, 32, 5120, 320, torch.bfloat16, rank=rank, slots=slots)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024):
        chosen = torch.arange(tokens) % 256
        part = {k: v[chosen] if k in ("x", "topk_weights", "topk_ids", "lora_ids") else v for k, v in args.items()}
        check(part, MoEConfig.pick(device, tokens, 8, 256, 5120, 320), limit=1e-3)  # a few rows at a time


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bits_of_a_row_do_not_depend_on_the_rows_of_its_tile(device, dtype):
    """Elements of many magnitudes, so that terms cancel and lose bits: another order or width of sums would show.

    bf16 keeps them in every block too, by whichever instruction.
    """
    choices = [0] * 70 + [1] * 20 + [2] * 6
    args = layer(device, tokens=96, top_k=1, hidden=1024, inter=320, dtype=dtype, rank=32, slots=1)
    args["topk_ids"] = ints(*choices, device=device)[:, None]
    spread = torch.randint(-7, 4, args["x"].shape, device=device)
    args["x"] = (args["x"].float() * torch.exp2(spread.float())).to(dtype)
    config = MoEConfig(block_m=8, splits=2, down_block_n=64, down_block_k=64, down_stages=3)
    tiles = [(8, 2, 0), (8, 4, 4), (8, 8, 0)]
    if dtype == torch.bfloat16:
        tiles += [(16, 1, 0), (16, 4, 8), (32, 1, 0), (64, 1, 2)]
    for case in (args, bare(args)):
        want = check(case, config)
        for block_m, wide, lag in tiles:
            tile = dataclasses.replace(config, block_m=block_m, wide=wide, lora_wide=wide, lag=lag)
            assert torch.equal(fused_moe(**case, config=tile), want), (block_m, wide, lag)


SANITIZED = """
import torch
from beam_moe.kernels.moe_lora import ExpertLoRA, MoEConfig, fused_moe
JOINED = MoEConfig(block_m=8, lag=2, up_stages=3, down_block_n=64, down_stages=3, down_tiles=2)
g = torch.Generator().manual_seed(0)
def new(*shape): return torch.randn(shape, generator=g).bfloat16().cuda()
def i32(*v): return torch.tensor(v, dtype=torch.int32).cuda()
E, H, I, R = 4, 136, 72, 8
for outer in (E, 1):
    lora = ExpertLoRA(new(2, outer, 2, R, H), new(2, E, 2, I, R), new(2, E, R, I), new(2, outer, H, R), ranks=i32(3, 8))
    for tokens in (1, 9, 70):
        ids = torch.randint(-1, E + 1, (tokens, 2), generator=g, dtype=torch.int32).cuda()
        slots = torch.randint(-1, 3, (tokens,), generator=g, dtype=torch.int32).cuda()
        args = (new(tokens, H), new(E, 2 * I, H), new(E, H, I), torch.rand(tokens, 2, generator=g).cuda(), ids)
        fused_moe(*args, lora=lora, lora_ids=slots)
        fused_moe(*args, lora=lora, lora_ids=slots, config=JOINED)
        fused_moe(*args, expert_map=i32(0, 1, -1, 3, 2))
torch.cuda.synchronize()
print("ran")
"""


@pytest.mark.gpu
def test_memcheck_finds_nothing_on_the_decode_path(tmp_path):
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(tool):
        pytest.skip("no compute-sanitizer")
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    # an allocation of its own for each tensor, so that a read past one is seen
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # not from a checkout's root, whose bare beam_moe/ would stand for the package
    run = {"env": env, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([*command, sys.executable, "-c", SANITIZED], **run)
    assert done.returncode == 0 and "ran" in done.stdout, (done.stdout + done.stderr)[-4000:]
