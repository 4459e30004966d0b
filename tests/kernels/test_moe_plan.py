"""How the fused layer's programs find their rows: the plan built on the device, and the search without one."""

import pytest
import torch
import triton
import triton.language as tl

from beam_moe.kernels.moe_lora import MoEConfig
from beam_moe.kernels.moe_lora import plan as plan_module
from beam_moe.kernels.moe_lora.pipeline import block_rows, wait_for_counts
from beam_moe.kernels.moe_lora.plan import build_plan, totals_needed

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st

EMPTY = -7  # what the tables hold before


def local(ids, expert_map, experts):
    """Local expert of each routed pair, -1 for none."""
    if expert_map is not None:
        ids = [expert_map[i] if 0 <= i < len(expert_map) else -1 for i in ids]
    return [e if 0 <= e < experts else -1 for e in ids]


def expected(ids, expert_map, experts, block_m):
    """[(expert, pairs)] of each block in order, by hand."""
    chosen = local(ids, expert_map, experts)
    blocks = []
    for e in range(experts):
        pairs = [p for p, c in enumerate(chosen) if c == e]
        blocks += [(e, pairs[i : i + block_m]) for i in range(0, len(pairs), block_m)]
    return blocks


def cut(values, behind, device):
    """``values`` as int32, before ``behind`` in memory: what a load past their end would find."""
    memory = torch.tensor([*values, behind], dtype=torch.int32, device=device)
    return memory[:-1]


def plan(ids, expert_map, experts, block_m, device, experts_per_program=1, wide=1):
    """(order, block_experts, widths) of one launch, as lists; ids (T, K)."""
    ids = cut(ids, [0] * len(ids[0]), device)
    emap = None if expert_map is None else cut(expert_map, 0, device)
    blocks = MoEConfig(block_m=block_m).blocks(ids.numel(), experts)
    order = torch.full((blocks * block_m,), EMPTY, dtype=torch.int32, device=device)
    table = torch.full((blocks,), EMPTY, dtype=torch.int32, device=device)
    counts = torch.full((2 * blocks + 1,), EMPTY, dtype=torch.int32, device=device)
    widths = torch.full((blocks,), EMPTY, dtype=torch.int32, device=device)
    totals = torch.full((totals_needed(ids.numel(), experts),), EMPTY, dtype=torch.int32, device=device)
    build_plan(
        ids, emap, experts, block_m, order, table, widths, counts, totals, wide=wide, num_warps=4,
        experts_per_program=experts_per_program, pdl=False,
    )  # fmt: skip
    assert not counts.any(), "the joined launch counts from zero"
    return order.view(blocks, block_m).tolist(), table.tolist(), widths.tolist()


def check(ids, expert_map, experts, block_m, device, wide=1, **options):
    order, table, widths = plan(ids, expert_map, experts, block_m, device, wide=wide, **options)
    want = expected([i for row in ids for i in row], expert_map, experts, block_m)
    assert len(want) <= len(table), "MoEConfig.blocks bounds the blocks of any routing"
    assert table == [e for e, _ in want] + [-1] * (len(table) - len(want))
    for got, (_, pairs) in zip(order, want):
        assert got == pairs + [-1] * (block_m - len(pairs))
    if wide > 1:
        taken = []
        for e in sorted({e for e, _ in want}):
            blocks = sum(e == other for other, _ in want)
            for first in range(0, blocks, wide):
                group = min(wide, blocks - first)
                taken += [group] + [0] * (group - 1)
        assert widths == taken + [0] * (len(table) - len(want))
    for rest in order[len(want) :]:
        assert rest == [EMPTY] * block_m, "blocks past the last are not written, so nobody may read them"


few = hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


@few
@hypothesis.given(st.data())
def test_any_routing(device, data):
    experts = data.draw(st.sampled_from([1, 3, 8]), "experts")
    top_k = data.draw(st.sampled_from([1, 2]), "top_k")
    id_ = st.integers(-2, experts + 1)
    ids = data.draw(st.lists(st.lists(id_, min_size=top_k, max_size=top_k), min_size=1, max_size=40), "topk_ids")
    expert_map = data.draw(st.none() | st.lists(st.integers(-1, experts), min_size=1, max_size=6), "expert_map")
    block_m = data.draw(st.sampled_from([16, 32]), "block_m")
    programs, wide = data.draw(st.sampled_from([1, 3]), "programs"), data.draw(st.sampled_from([1, 2, 4]), "wide")
    check(ids, expert_map, experts, block_m, device, wide=wide, experts_per_program=programs)


def test_one_expert_fills_more_blocks_than_there_are_bins(device):
    """All pairs on the only expert: its blocks are more than the bins that count experts."""
    for wide in (1, 4):
        check([[0]] * 100, None, 1, 16, device, wide=wide)


def test_more_blocks_are_empty_than_there_are_bins(device):
    check([[-1, 5]] * 40, None, 1, 16, device)


def test_more_pairs_than_a_program_takes_at_once(device):
    """4200 pairs in steps of 4096: positions within an expert run on over the steps."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 3, (2100, 2), generator=generator)
    ids[2040:2060] = 1
    check(ids.tolist(), None, 3, 32, device, experts_per_program=2)
    check(ids.tolist(), [2, -1, 0], 3, 32, device, wide=2)
    ids[:2048] = 2  # the first step holds pairs of one expert alone, the second one the first of the others
    check(ids.tolist(), None, 3, 32, device)
    check([[-1]] * 4200, None, 3, 32, device)


def test_the_most_experts_of_which_few_are_chosen(device):
    check([[1023, 0], [512, 1023], [-1, 1024]], None, 1024, 16, device, experts_per_program=128)


def test_every_pair_of_one_expert_each_needs_the_most_blocks(device):
    """As many blocks as `MoEConfig.blocks` allows: one row more in every expert than full blocks hold."""
    ids = [[e] for e in range(3) for _ in range(17)]
    _, table, _ = plan(ids, None, 3, 16, device)
    assert table == [0, 0, 1, 1, 2, 2]
    check(ids, None, 3, 16, device)


def test_full_blocks_leave_none_between_them_empty(device):
    check([[0]] * 32 + [[1]] * 16 + [[2]], None, 3, 16, device)


def test_the_most_pairs_that_the_plan_counts_itself_need_no_totals(device, monkeypatch):
    monkeypatch.setattr(plan_module, "_count_kernel", None)
    assert totals_needed(4096, 3) == 0 < totals_needed(4097, 3)
    check([[0, 2]] * 2048, None, 3, 32, device)


@triton.jit
def _rows_kernel(
    topk_ids_ptr, expert_map_ptr, order_ptr, table_ptr, P, E_GLOBAL, E,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert, pair, mask_m = block_rows(
        topk_ids_ptr, expert_map_ptr, order_ptr, table_ptr, block, P, E_GLOBAL, E, BLOCK_M, BLOCK_P, HAS_MAP
    )
    tl.store(table_ptr + block, expert)
    tl.store(order_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M), tl.where(mask_m, pair, -1))


def rows_without_a_plan(ids, expert_map, experts, block_m, block_p, device):
    """[(expert, pairs)] of every block, -1 for none, as `block_rows` finds them."""
    ids = cut(ids, 0, device)
    emap = ids if expert_map is None else cut(expert_map, 0, device)
    pairs = ids.numel()
    order = torch.full((pairs, block_m), EMPTY, dtype=torch.int32, device=device)
    table = torch.full((pairs,), EMPTY, dtype=torch.int32, device=device)
    _rows_kernel[(pairs,)](
        ids, emap, order, table, pairs, 0 if expert_map is None else len(expert_map), experts,
        BLOCK_M=block_m, BLOCK_P=block_p, HAS_MAP=expert_map is not None,
    )  # fmt: skip
    return [(e, [p for p in row if p != -1]) for e, row in zip(table.tolist(), order.tolist())]


@few
@hypothesis.given(st.data())
def test_search_finds_the_plans_blocks(device, data):
    """The same blocks, each at its first pair; every other block is empty."""
    experts = data.draw(st.sampled_from([1, 4]), "experts")
    ids = data.draw(st.lists(st.integers(-1, experts), min_size=1, max_size=60), "topk_ids")
    expert_map = data.draw(st.none() | st.lists(st.integers(-1, experts), min_size=1, max_size=4), "expert_map")
    got = rows_without_a_plan(ids, expert_map, experts, 16, 64, device)
    want = {pairs[0]: (e, pairs) for e, pairs in expected(ids, expert_map, experts, 16)}
    assert got == [want.get(p, (-1, [])) for p in range(len(ids))]


def test_direct_takes_each_valid_pair_alone(device):
    ids = [2, -1, 0, 4, 2, 9]
    got = rows_without_a_plan(ids, None, 4, 16, 1, device)
    assert got == [(e, [p]) if e >= 0 else (-1, []) for p, e in enumerate(local(ids, None, 4))]
    expert_map = [3, -1, 1]
    got = rows_without_a_plan(ids, expert_map, 4, 16, 1, device)
    assert got == [(e, [p]) if e >= 0 else (-1, []) for p, e in enumerate(local(ids, expert_map, 4))]


def test_search_goes_on_to_the_further_blocks_of_an_expert(device):
    ids = [0] * 40 + [1]
    got = rows_without_a_plan(ids, None, 2, 16, 64, device)
    led = {0: (0, [*range(16)]), 16: (0, [*range(16, 32)]), 32: (0, [*range(32, 40)]), 40: (1, [40])}
    assert got == [led.get(p, (-1, [])) for p in range(41)]


@triton.jit
def _wait_kernel(counts_ptr, wanted, blocks):
    wait_for_counts(counts_ptr, wanted, blocks, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would hang")
def test_every_count_is_waited_for_and_no_further_one(device):
    """300 of them, more than one step looks at; the one behind is never raised."""
    counts = torch.full((301,), 2, dtype=torch.int32, device=device)
    counts[300] = 0
    _wait_kernel[(1,)](counts, 2, 300)
    for missing in (0, 127, 128, 299):
        short = counts.clone()
        short[missing] = 1
        with pytest.raises(Exception, match="a program waits for others than those before it"):
            _wait_kernel[(1,)](short, 2, 300)
