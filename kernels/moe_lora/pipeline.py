"""What the launches of one layer share: the hand-over from one to the next, and how a program finds its rows.

The launches form a chain in which each is started early (programmatic dependent launch, sm_90 and newer): it may run
while the one before it drains, up to its `wait_for_previous`, which returns once that one has finished and its writes
are seen. A kernel lets the next one start only after its own wait. So when a kernel runs its first line, every launch
but the one right before it has finished, and before its wait it may read what those wrote, but nothing newer, and
must write nothing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Block until the launch before this one has finished and its writes can be seen."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next launch to take the processors that this one leaves free."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def count_up(count_ptr):
    """Say that this program's writes are done: they can be seen by whoever finds the count raised."""
    tl.debug_barrier()  # the writes of all threads come before the one thread's release
    tl.atomic_add(count_ptr, 1, sem="release", scope="gpu")


@triton.jit
def count_up_each(counts_ptr, blocks):
    """`count_up` for each of ``blocks``, which may be none."""
    if blocks > 0:
        tl.debug_barrier()
        for block in range(blocks):
            tl.atomic_add(counts_ptr + block, 1, sem="release", scope="gpu")


@triton.jit
def _seen(count_ptr):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [count_ptr.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_count(count_ptr, wanted, INTERPRETED: tl.constexpr):
    """Block until ``wanted`` programs of this launch have counted up; they must have smaller program ids.

    The interpreter runs programs in the order of their ids, so there the count is reached, and not passed, or a GPU
    would hang, or read what is not yet written.
    """
    if INTERPRETED:
        assert tl.load(count_ptr) == wanted, "a program waits for others than those before it"
    else:
        count = _seen(count_ptr)
        while count < wanted:
            count = _seen(count_ptr)


@triton.jit
def wait_for_counts(counts_ptr, wanted, blocks, INTERPRETED: tl.constexpr, AT_ONCE: tl.constexpr = 128):
    """`wait_for_count` for every one of ``blocks``."""
    for first in range(0, blocks, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        used = block < blocks
        ptrs = counts_ptr + tl.where(used, block, 0)
        if INTERPRETED:
            wrong = tl.sum((used & (tl.load(ptrs) != wanted)).to(tl.int32), 0)
            assert wrong == 0, "a program waits for others than those before it"
        else:
            missing = tl.sum((used & (_seen(ptrs) < wanted)).to(tl.int32), 0)
            while missing > 0:
                missing = tl.sum((used & (_seen(ptrs) < wanted)).to(tl.int32), 0)


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """``acc + a @ b`` in fp32; Triton's interpreter would multiply the bits of bf16 as integers."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, acc)


@triton.jit
def thirds(b, INTERPRETED: tl.constexpr):
    """fp32 ``b`` as `dot_thirds` takes it: three bf16 terms whose sum it is (as it is, where casts would be wrong)."""
    if INTERPRETED:
        return (b,)
    else:
        high = b.to(tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        return (high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def dot_thirds(a, b, acc, INTERPRETED: tl.constexpr):
    """``acc + a @ b`` for 16-bit ``a`` and the `thirds` of b; fp16 has three bits more than bf16, so two terms hold it.

    Products of tf32 would do for fp16 too, but the order of their sums depends on whether a loop carries ``a``, and
    Triton 3.6.0 fails on some such loops.
    """
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b[0])
    elif a.dtype == tl.bfloat16:
        return tl.dot(a, b[0], tl.dot(a, b[1], tl.dot(a, b[2], acc)))
    else:
        high = a.to(tl.bfloat16)
        low = a.to(tl.float32) - high.to(tl.float32)
        low = tl.where(low == low, low, 0.0).to(tl.bfloat16)  # infinities are in the first term
        acc = tl.dot(high, b[2], tl.dot(low, b[1], acc))
        return tl.dot(high, b[0], tl.dot(high, b[1], tl.dot(low, b[0], acc)))


@triton.jit
def dot_fp32(a, b, acc, INTERPRETED: tl.constexpr):
    """``acc + a @ b`` for 16-bit ``a`` and fp32 ``b``, keeping b's precision."""
    return dot_thirds(a, thirds(b, INTERPRETED), acc, INTERPRETED)


@triton.jit
def local_expert(topk_ids_ptr, expert_map_ptr, pair, mask, E_GLOBAL, E, HAS_MAP: tl.constexpr):
    """The local expert of each routed pair, or -1 where its id is out of range, foreign to this rank, or masked."""
    expert = tl.load(topk_ids_ptr + pair, mask=mask, other=-1)
    if HAS_MAP:
        known = (expert >= 0) & (expert < E_GLOBAL)
        expert = tl.load(expert_map_ptr + expert, mask=known, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, -1)


@triton.jit
def planned_rows(order_ptr, block_experts_ptr, block, BLOCK_M: tl.constexpr):
    """Expert (-1 where the block is empty), routed pairs and row mask of one block of the plan."""
    expert = tl.load(block_experts_ptr + block)
    pair = tl.load(order_ptr + block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    mask_m = (pair >= 0) & (expert >= 0)  # an empty block's pairs are never written
    return expert, tl.where(mask_m, pair, 0), mask_m


@triton.jit
def part_rows(order_ptr, block_experts_ptr, part, PARTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The same for one of PARTS parts of a block, of BLOCK_M rows each; expert -1 where none is in use."""
    expert = tl.load(block_experts_ptr + part // PARTS)
    pair = tl.load(order_ptr + part.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    mask_m = (pair >= 0) & (expert >= 0)
    return tl.where(tl.max(pair, 0) >= 0, expert, -1), tl.where(mask_m, pair, 0), mask_m


@triton.jit
def wide_rows(order_ptr, block, width, WIDE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Routed pairs and row mask of ``width`` blocks of one expert from ``block`` on, WIDE * BLOCK_M rows in all."""
    row = tl.arange(0, WIDE * BLOCK_M)
    pair = tl.load(order_ptr + block.to(tl.int64) * BLOCK_M + row, mask=row < width * BLOCK_M, other=-1)
    return tl.where(pair >= 0, pair, 0), pair >= 0


@triton.constexpr_function
def adapter_tile(block_n, rows):
    """Rows of A that one tile takes, of ``rows`` in all: as many as of the weights, or fewer where those are not there.

    64 at least where the weights' tile has as many: a row of wgmma's instructions.
    """
    size = 64
    while size < rows:
        size *= 2
    return min(block_n, size)


@triton.constexpr_function
def wide_stages(stages, block_n, block_m, wide):
    """Stages of a tile of ``wide`` blocks in the shared memory of one block's: wgmma keeps one buffer more than mma."""
    buffers = stages if block_m >= 16 else stages - 1
    return max(min(stages, 2), buffers * (block_n + block_m) // (block_n + wide * block_m))


@triton.jit
def single_row(topk_ids_ptr, expert_map_ptr, block, P, E_GLOBAL, E, BLOCK_M: tl.constexpr, HAS_MAP: tl.constexpr):
    """The same where block ``b`` is routed pair ``b`` alone."""
    expert = local_expert(topk_ids_ptr, expert_map_ptr, block, block < P, E_GLOBAL, E, HAS_MAP)
    mask_m = tl.arange(0, BLOCK_M) < tl.where(expert >= 0, 1, 0)
    return expert, tl.where(mask_m, block, 0), mask_m


@triton.jit
def gathered_rows(
    topk_ids_ptr, expert_map_ptr, block, P, E_GLOBAL, E,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """The same for few pairs: block ``b`` is led by routed pair ``b``, unless an earlier pair leads it.

    A pair leads where the number of earlier pairs of its expert is a multiple of BLOCK_M, and takes the
    next BLOCK_M - 1.
    """
    offs_m = tl.arange(0, BLOCK_M)
    offs_p = tl.arange(0, BLOCK_P)
    experts = local_expert(topk_ids_ptr, expert_map_ptr, offs_p, offs_p < P, E_GLOBAL, E, HAS_MAP)
    expert = local_expert(topk_ids_ptr, expert_map_ptr, block, block < P, E_GLOBAL, E, HAS_MAP)
    same = ((experts == expert) & (expert >= 0)).to(tl.int32)
    before = tl.sum(tl.where(offs_p < block, same, 0), 0)
    leads = (expert >= 0) & (before % BLOCK_M == 0)
    rank = tl.where(same > 0, tl.cumsum(same, 0) - 1 - before, -1)
    pair = tl.sum(tl.where(rank[None, :] == offs_m[:, None], offs_p[None, :], 0), 1)
    mask_m = offs_m < tl.where(leads, tl.sum(same, 0) - before, 0)
    return tl.where(leads, expert, -1), pair, mask_m


@triton.jit
def block_rows(
    topk_ids_ptr, expert_map_ptr, order_ptr, block_experts_ptr, block, P, E_GLOBAL, E,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Rows of one block. BLOCK_P 0: from the plan; 1: one pair a block; else a search through all BLOCK_P pairs."""
    if BLOCK_P == 0:
        expert, pair, mask_m = planned_rows(order_ptr, block_experts_ptr, block, BLOCK_M)
    elif BLOCK_P == 1:
        expert, pair, mask_m = single_row(topk_ids_ptr, expert_map_ptr, block, P, E_GLOBAL, E, BLOCK_M, HAS_MAP)
    else:
        expert, pair, mask_m = gathered_rows(
            topk_ids_ptr, expert_map_ptr, block, P, E_GLOBAL, E, BLOCK_M, BLOCK_P, HAS_MAP
        )
    return expert, pair, mask_m


@triton.jit
def adapter_slot(lora_ids_ptr, token, mask, SLOTS):
    """The adapter slot of each row, -1 for none: masked rows and ids outside 0..SLOTS-1."""
    slot = tl.load(lora_ids_ptr + token, mask=mask, other=-1)
    return tl.where((slot >= 0) & (slot < SLOTS), slot, -1)


@triton.jit
def live_rank(ranks_ptr, enabled_ptr, slot, RANK: tl.constexpr):
    """The rank in use of an adapter slot: 0 where it is disabled, empty or -1, never above the bank's."""
    known = slot >= 0
    rank = tl.load(ranks_ptr + slot, mask=known, other=0)
    enabled = tl.load(enabled_ptr + slot, mask=known, other=0)
    return tl.where(enabled != 0, tl.maximum(tl.minimum(rank, RANK), 0), 0)


@triton.jit
def load_ranks(ptrs, mask_rows, r, live, RANK: tl.constexpr):
    """A tile whose last axis is the rank: zero from ``live`` on, whatever memory holds there.

    Loads stop at ``live`` rounded up to 8 where the bank's rank allows it, which keeps them 16 bytes wide.
    """
    if RANK % 8 == 0:
        edge = (live + 7) // 8 * 8
    else:
        edge = live
    tile = tl.load(ptrs, mask=mask_rows[:, None] & (r < edge)[None, :], other=0.0)
    return tl.where((r < live)[None, :], tile, 0.0)
