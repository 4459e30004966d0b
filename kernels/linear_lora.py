"""The adapters of a dense linear layer on a decode batch, added to its output in place, in one launch.

    out[t, slice s] += B_s[slot] @ (A_s[slot] @ x[t]),   slot = lora_ids[t]

    x         (T, K)          bf16 or fp16
    a         S x (L, R, K)   the type of x; slot by slot, one tensor for each slice of the output (q, k, v, gate, ...)
    b         S x (L, W_s, R) the type of x; the widths W_s follow one another in out's columns
    out       (T, sum W_s)    the type of x
    lora_ids  (T,)            int32; outside 0..L-1 is no adapter
    ranks     (L, S)          int32: the live rank of each slot in each slice, 0 where it has no factors there

Where K is long, the first programs of the launch make shares of ``A x`` and the others wait for them; where it is
short, each makes it for itself, which is quicker than waiting. Either way its fp32 sums run over the same shares in the
same order, ``A x`` is rounded once, and ``B A x`` is added in fp32 to what is there, so a row's bits depend on its own
adapter alone. Rows without an adapter are neither read nor written. Where no slot has factors in its slice, a program
ends after one load: a graph captured with this launch costs little while no loaded adapter touches the layer.

Those waits rely on programs being started in the order of their ids, as `moe_lora`'s one launch does;
``BEAM_MOE_JOIN=0`` goes without them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from beam_moe import env
from beam_moe.kernels.checks import refuse_gradient, refuse_overlap, require_device
from beam_moe.kernels.launch import ARRIVAL_COUNTERS, ArrivalCounters, shared_memory, supports_pdl
from beam_moe.kernels.moe_lora.pipeline import (
    count_up,
    dot,
    let_next_start,
    load_ranks,
    wait_for_count,
    wait_for_previous,
)

MAX_TOKENS = 1024
MAX_RANK = 64
MAX_SLICES = 4

_BLOCK_M = 16
_BLOCK_K = 256
_SHORT_K, _SHARE_K, _MOST_SHARES = 1024, 512, 16

_arrivals = ArrivalCounters()


@triton.jit
def _shrink(
    x_ptr, a_ptr, t, slot, rank, first_k, SLOTS, stride_xt, K: tl.constexpr, SHARE: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """fp32 (BLOCK_M, BLOCK_R): ``A x`` of the rows ``t``, each by its own slot's A, over one share of K."""
    r = tl.arange(0, BLOCK_R)
    k = first_k + tl.arange(0, BLOCK_K)
    out = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for current in range(SLOTS):
        mine = (slot == current) & (rank > 0)
        live = tl.max(tl.where(mine, rank, 0), 0)
        if live > 0:
            x_ptrs = x_ptr + t.to(tl.int64)[:, None] * stride_xt + k[None, :]
            a_ptrs = a_ptr + (tl.cast(current, tl.int64) * RANK + r)[:, None] * K + k[None, :]
            acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for start in range(0, SHARE, BLOCK_K):
                if K % SHARE == 0 and SHARE % BLOCK_K == 0:
                    x = tl.load(x_ptrs, mask=mine[:, None], other=0.0)
                    a = tl.load(a_ptrs, mask=(r < live)[:, None], other=0.0)
                else:
                    mask_k = start + k < K
                    x = tl.load(x_ptrs, mask=mine[:, None] & mask_k[None, :], other=0.0)
                    a = tl.load(a_ptrs, mask=(r < live)[:, None] & mask_k[None, :], other=0.0)
                acc = dot(x, tl.trans(a), acc, INTERPRETED)
                x_ptrs += BLOCK_K
                a_ptrs += BLOCK_K
            out = tl.where(mine[:, None], acc, out)
    return out


@triton.jit
def _expand(
    shrunk, b_ptr, out_ptr, t, slot, rank, n, width, SLOTS, stride_ot, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add ``B`` times ``shrunk`` (BLOCK_M, BLOCK_R) to the columns ``n`` of one slice, each row by its own slot's B."""
    r = tl.arange(0, BLOCK_R)
    mask_n = n < width
    for current in range(SLOTS):
        mine = (slot == current) & (rank > 0)
        live = tl.max(tl.where(mine, rank, 0), 0)
        if live > 0:
            b_ptrs = b_ptr + (tl.cast(current, tl.int64) * width + n)[:, None] * RANK + r[None, :]
            b = load_ranks(b_ptrs, mask_n, r, live, RANK)
            out_ptrs = out_ptr + t.to(tl.int64)[:, None] * stride_ot + n[None, :]
            mask = mine[:, None] & mask_n[None, :]
            before = tl.load(out_ptrs, mask=mask, other=0.0)
            added = dot(shrunk.to(b.dtype), tl.trans(b), before.to(tl.float32), INTERPRETED)
            tl.store(out_ptrs, added.to(before.dtype), mask=mask)


@triton.jit(do_not_specialize=["T", "SLOTS"])
def _add_lora_kernel(
    x_ptr,  # (T, K)
    out_ptr,  # (T, sum of WIDTHS)
    ids_ptr,  # (T,)
    ranks_ptr,  # (SLOTS, slices)
    a_ptrs,  # for each slice (SLOTS, RANK, K)
    b_ptrs,  # for each slice (SLOTS, WIDTHS[s], RANK)
    part_ptr,  # (row blocks, slices, SHARES, BLOCK_M, BLOCK_R) fp32, EXCHANGE
    counts_ptr,  # (row blocks, slices, 2) int32: shares that are there, programs that have seen them all; left zero
    T,
    SLOTS,
    stride_xt,
    stride_ot,
    WIDTHS: tl.constexpr,
    SLOTS_P2: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    RANK: tl.constexpr,
    EXCHANGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (EXCHANGE: shares of K, slice by slice; then blocks of columns, slice by slice; cdiv(T, BLOCK_M))."""
    SHARES: tl.constexpr = (K + SHARE - 1) // SHARE
    SLICES: tl.constexpr = len(WIDTHS)
    wait_for_previous(PDL)
    let_next_start(PDL)
    offs_m = tl.arange(0, BLOCK_M)
    t = tl.program_id(1) * BLOCK_M + offs_m
    slot = tl.load(ids_ptr + t, mask=t < T, other=-1)
    known = (slot >= 0) & (slot < SLOTS)
    slots = tl.arange(0, SLOTS_P2)
    tile = offs_m[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    first_program = 0
    first_column = 0
    for s in tl.static_range(SLICES):
        if EXCHANGE:
            share = tl.program_id(0) - s * SHARES
            block = tl.program_id(0) - SLICES * SHARES - first_program
        else:
            share = -1
            block = tl.program_id(0) - first_program
        blocks = (WIDTHS[s] + BLOCK_N - 1) // BLOCK_N
        shrinks = (share >= 0) & (share < SHARES) & (blocks > 0)  # nobody would take back the counts of an empty slice
        if shrinks | ((block >= 0) & (block < blocks)):
            # of all slots first: this does not wait for the ids, and is mostly all that is read
            ranks = tl.load(ranks_ptr + slots * SLICES + s, mask=slots < SLOTS, other=0)
            if tl.max(ranks, 0) > 0:
                rank = tl.minimum(tl.load(ranks_ptr + slot * SLICES + s, mask=known, other=0), RANK)
                if tl.max(rank, 0) > 0:
                    if EXCHANGE:
                        at = tl.program_id(1) * SLICES + s
                        parts = part_ptr + tl.cast(at, tl.int64) * (SHARES * BLOCK_M * BLOCK_R) + tile
                        counts = counts_ptr + at * 2
                    if shrinks:
                        shrunk = _shrink(
                            x_ptr, a_ptrs[s], t, slot, rank, share * SHARE, SLOTS, stride_xt,
                            K, SHARE, RANK, BLOCK_M, BLOCK_K, BLOCK_R, INTERPRETED,
                        )  # fmt: skip
                        if EXCHANGE:
                            tl.store(parts + share * (BLOCK_M * BLOCK_R), shrunk)
                            count_up(counts)
                    else:
                        shrunk = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                        if EXCHANGE:
                            wait_for_count(counts, SHARES, INTERPRETED)
                            for i in tl.static_range(SHARES):
                                shrunk += tl.load(parts + i * (BLOCK_M * BLOCK_R))
                            tl.debug_barrier()  # all threads have seen the count before it may become zero
                            if tl.atomic_add(counts + 1, 1, sem="relaxed") == blocks - 1:
                                tl.store(counts, 0)
                                tl.store(counts + 1, 0)
                        else:
                            for i in range(SHARES):
                                shrunk += _shrink(
                                    x_ptr, a_ptrs[s], t, slot, rank, i * SHARE, SLOTS, stride_xt,
                                    K, SHARE, RANK, BLOCK_M, BLOCK_K, BLOCK_R, INTERPRETED,
                                )  # fmt: skip
                        _expand(
                            shrunk, b_ptrs[s], out_ptr + first_column, t, slot, rank,
                            block * BLOCK_N + tl.arange(0, BLOCK_N), WIDTHS[s], SLOTS, stride_ot,
                            RANK, BLOCK_R, INTERPRETED,
                        )  # fmt: skip
        first_program += blocks
        first_column += WIDTHS[s]


def _fail(argument: str, wanted: str, got: object) -> None:
    raise ValueError(f"add_lora: {argument} must be {wanted}, got {got}")


def _check(
    out: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    lora_ids: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    for name, parts in (("a", a), ("b", b)):
        if not isinstance(parts, (tuple, list)):
            _fail(name, "a tuple or list of tensors", type(parts).__name__)
    read = {"x": x, "lora_ids": lora_ids, "ranks": ranks}
    read |= {f"a[{s}]": t for s, t in enumerate(a)} | {f"b[{s}]": t for s, t in enumerate(b)}
    for name, t in {**read, "out": out}.items():
        if not isinstance(t, torch.Tensor):
            _fail(name, "a tensor", type(t).__name__)
        if t.device != x.device:
            _fail(name, f"on {x.device}", t.device)
    require_device("add_lora", "x", x)
    refuse_gradient("add_lora", "torch's own matmul trains a dense layer's adapter", **read, out=out)
    for name, t in (("x", x), ("out", out)):
        if t.dim() != 2 or (t.shape[1] > 1 and t.stride(1) != 1) or (len(t) > 1 and t.stride(0) < t.shape[1]):
            _fail(name, "2-D of innermost stride 1, its rows apart", f"shape {tuple(t.shape)}, strides {t.stride()}")
    tokens, hidden = x.shape
    if x.dtype not in (torch.bfloat16, torch.float16):
        _fail("x", "bfloat16 or float16", x.dtype)
    if not 1 <= len(a) <= MAX_SLICES or len(b) != len(a):
        _fail("a and b", f"as many slices, 1..{MAX_SLICES}", f"{len(a)} and {len(b)}")
    if tokens > MAX_TOKENS or hidden == 0:
        _fail("x", f"(T, K) with T up to {MAX_TOKENS} and K > 0", tuple(x.shape))
    if a[0].dim() != 3 or not 1 <= a[0].shape[1] <= MAX_RANK:
        _fail("a[0]", f"(L, R, K) with R within 1..{MAX_RANK}", tuple(a[0].shape))
    slots, rank = a[0].shape[0], a[0].shape[1]
    for s, (down, up) in enumerate(zip(a, b)):
        if down.shape != (slots, rank, hidden):
            _fail(f"a[{s}]", f"{(slots, rank, hidden)}", tuple(down.shape))
        if up.dim() != 3 or (up.shape[0], up.shape[2]) != (slots, rank):
            _fail(f"b[{s}]", f"({slots}, W, {rank})", tuple(up.shape))
        for name, t in ((f"a[{s}]", down), (f"b[{s}]", up)):
            if t.dtype != x.dtype or not t.is_contiguous():
                _fail(name, f"contiguous {x.dtype}", f"{t.dtype} with strides {t.stride()}")
    if out.shape != (tokens, sum(t.shape[1] for t in b)) or out.dtype != x.dtype:
        _fail("out", f"({tokens}, {sum(t.shape[1] for t in b)}) {x.dtype}", f"{tuple(out.shape)} {out.dtype}")
    for name, t, shape in (("lora_ids", lora_ids, (tokens,)), ("ranks", ranks, (slots, len(a)))):
        if t.shape != shape or t.dtype != torch.int32 or not t.is_contiguous():
            _fail(name, f"contiguous int32 {shape}", f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}")
    refuse_overlap("add_lora", out, **read)


def share_of(hidden: int) -> int:
    """The part of K over which one sum of ``A x`` runs: by K alone, since it orders the sums."""
    if hidden <= _SHORT_K:
        return max(hidden, 1)
    return max(_SHARE_K, triton.cdiv(triton.cdiv(hidden, _MOST_SHARES), _BLOCK_K) * _BLOCK_K)


def launch_form(tokens: int, widths: Sequence[int]) -> tuple[int, bool]:
    """What a call of this size compiles, beyond the layer's shapes: the columns of a program, and whether its row
    blocks have a place to count arrivals."""
    row_blocks = triton.cdiv(tokens, _BLOCK_M)
    narrow = sum(triton.cdiv(w, 64) for w in widths) * row_blocks
    return 64 if narrow <= 132 else 128, row_blocks * len(widths) * 2 <= ARRIVAL_COUNTERS


@functools.cache
def _stages(device: torch.device, block_r: int) -> int:
    """4 steps of K at a time, or 3 where shared memory has no room: sm_120 and sm_89 have 99 KiB for a program."""
    if device.type != "cuda":
        return 4
    return 4 if 3 * (_BLOCK_M + block_r) * _BLOCK_K * 2 <= shared_memory(device) else 3


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    lora_ids: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    """Add each row's adapter to ``out``, in place. See the head of this file.

    For batches as small as decode's.

    Args:
        out: ``(T, sum W_s)``, the base layer's output; innermost stride 1; in no operand's memory.
        x: ``(T, K)`` bf16 or fp16, the layer's input; innermost stride 1; T up to 1024.
        a: 1 to 4 tensors ``(L, R, K)``, contiguous; R up to 64.
        b: as many ``(L, W_s, R)``, contiguous, any scale folded in.
        lora_ids: int32 ``(T,)``.
        ranks: int32 ``(L, S)``, 0..R; factors beyond a live rank are not used.

    Raises:
        ValueError: a shape, dtype, stride or device that does not fit; an ``out`` in the memory of an operand; an
            operand that requires a gradient while gradients are enabled.
    """
    _check(out, x, a, b, lora_ids, ranks)
    tokens, hidden = x.shape
    slots, rank = a[0].shape[0], a[0].shape[1]
    if tokens == 0 or slots == 0:
        return
    widths = tuple(t.shape[1] for t in b)
    (block_n, counted), row_blocks = launch_form(tokens, widths), triton.cdiv(tokens, _BLOCK_M)
    block_r, share = max(16, triton.next_power_of_2(rank)), share_of(hidden)
    shares = triton.cdiv(hidden, share)
    part, counts = x, None
    if shares > 1 and counted and env.flag("JOIN"):
        counts = _arrivals.get(x.device)
    if counts is not None:
        part = torch.empty(row_blocks, len(a), shares, _BLOCK_M, block_r, dtype=torch.float32, device=x.device)
    programs = sum(triton.cdiv(w, block_n) for w in widths) + (0 if counts is None else len(a) * shares)
    pdl = supports_pdl(x.device)
    extra: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    with torch.cuda.device_of(x):
        _add_lora_kernel[(programs, row_blocks)](
            x, out, lora_ids, ranks, tuple(a), tuple(b), part, ranks if counts is None else counts,
            tokens, slots, x.stride(0), out.stride(0),
            WIDTHS=widths, SLOTS_P2=triton.next_power_of_2(slots), K=hidden, SHARE=share, RANK=rank,
            EXCHANGE=counts is not None,
            BLOCK_M=_BLOCK_M, BLOCK_N=block_n, BLOCK_K=_BLOCK_K, BLOCK_R=block_r,
            INTERPRETED=x.device.type == "cpu", PDL=pdl,
            num_warps=4, num_stages=_stages(x.device, block_r), **extra,
        )  # fmt: skip


def add_lora_reference(
    out: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    lora_ids: torch.Tensor,
    ranks: torch.Tensor,
) -> torch.Tensor:
    """`add_lora` in fp32, a row and a slice at a time, without rounding between; returns fp32, ``out`` stays."""
    result = out.float()
    for t, slot in enumerate(lora_ids.tolist()):
        if not 0 <= slot < len(ranks):
            continue
        column = 0
        for s, (down, up) in enumerate(zip(a, b)):
            r = int(ranks[slot, s])
            delta = up[slot, :, :r].float() @ (down[slot, :r].float() @ x[t].float())
            result[t, column : column + len(delta)] += delta
            column += len(delta)
    return result
