"""Last launch: each token's experts summed in ascending k, in fp32, scaled, and rounded once.

    out[t] = scale * (sum_k w[t, k] * y[t, k]  +  B2 @ v[t])

    y  (P, H)  fp32     v  (T, R)  fp32     topk_weights  (T, K)  fp32     b2  (L, 1, H, R)     out  (T, H)  as x

The second term is there only where one B2 serves all experts (shared-outer adapters), which is then read once for each
block of tokens. A routed pair whose expert is out of range or foreign has no row in y and adds nothing. Routing and the
first adapter's B2 are loaded while the launch before drains.
"""

import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.pipeline import (
    adapter_slot,
    dot_fp32,
    let_next_start,
    live_rank,
    load_ranks,
    local_expert,
    wait_for_previous,
)


@triton.jit
def _add_ranks(
    delta, b_slot, v_rows, mask_n, mine, first_rank, live, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``delta`` (BLOCK_H, BLOCK_T) with the product of B2 and v from ``first_rank`` up to the live rank added."""
    for first in tl.range(first_rank, live, BLOCK_R, num_stages=1):
        r = first + tl.arange(0, BLOCK_R)
        b = load_ranks(b_slot + r[None, :], mask_n, r, live, RANK)
        v = load_ranks(v_rows + r[None, :], mine, r, live, RANK)
        delta = dot_fp32(b, tl.trans(v), delta, INTERPRETED)
    return delta


@triton.jit(do_not_specialize=["T", "SLOTS", "scale"])
def _combine_kernel(
    y_ptr,  # (P, H)
    v_ptr,  # (T, R)
    b2_ptr,  # (L, 1, H, R)
    topk_weights_ptr,  # (T, K)
    out_ptr,  # (T, H)
    topk_ids_ptr,  # (P,)
    expert_map_ptr,  # (E_GLOBAL,)
    lora_ids_ptr,  # (T,)
    ranks_ptr,  # (L,)
    enabled_ptr,  # (L,)
    scale,
    T,
    E_GLOBAL,
    E,
    SLOTS,
    stride_bl,
    stride_bn,
    stride_out,
    H: tl.constexpr,
    RANK: tl.constexpr,  # 0: no shared B2
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MORE: tl.constexpr,  # more than one slot, or a rank above BLOCK_R
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(H / BLOCK_H), ceil(T / BLOCK_T))."""
    offs_t = tl.arange(0, BLOCK_T)
    n = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    token = tl.program_id(1) * BLOCK_T + offs_t
    mask_t = token < T
    mask_n = n < H
    token = tl.where(mask_t, token, 0)
    valid, weights = (), ()
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        here = local_expert(topk_ids_ptr, expert_map_ptr, pair, mask_t, E_GLOBAL, E, HAS_MAP) >= 0
        valid = valid + (here,)
        weights = weights + (tl.load(topk_weights_ptr + pair, mask=here, other=0.0),)
    if RANK > 0:
        slot_t = adapter_slot(lora_ids_ptr, token, mask_t, SLOTS)
        first_slot = tl.max(slot_t, 0)
        live_0 = live_rank(ranks_ptr, enabled_ptr, first_slot, RANK)
        r_0 = tl.arange(0, BLOCK_R)
        b_rows = b2_ptr + n.to(tl.int64)[:, None] * stride_bn
        b_slot = b_rows + tl.maximum(first_slot, 0).to(tl.int64) * stride_bl
        b_0 = load_ranks(b_slot + r_0[None, :], mask_n, r_0, live_0, RANK)

    wait_for_previous(PDL)
    let_next_start(PDL)
    acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for k in tl.static_range(TOP_K):
        y_ptrs = y_ptr + (token * TOP_K + k).to(tl.int64)[:, None] * H + n[None, :]
        y = tl.load(y_ptrs, mask=valid[k][:, None] & mask_n[None, :], other=0.0)
        acc = tl.where(valid[k][:, None], acc + weights[k][:, None] * y, acc)

    if RANK > 0:
        v_rows = v_ptr + token.to(tl.int64)[:, None] * RANK
        if live_0 > 0:
            mine = slot_t == first_slot
            v = load_ranks(v_rows + r_0[None, :], mine, r_0, live_0, RANK)
            delta = dot_fp32(b_0, tl.trans(v), tl.zeros((BLOCK_H, BLOCK_T), tl.float32), INTERPRETED)
            if MORE:
                delta = _add_ranks(delta, b_slot, v_rows, mask_n, mine, BLOCK_R, live_0, RANK, BLOCK_R, INTERPRETED)
            acc = tl.where(mine[:, None], acc + tl.trans(delta), acc)
        if MORE:
            for slot in range(SLOTS):
                live = live_rank(ranks_ptr, enabled_ptr, slot, RANK)
                mine = (slot_t == slot) & (slot != first_slot) & (live > 0)
                if tl.sum(mine.to(tl.int32), 0) > 0:
                    delta = tl.zeros((BLOCK_H, BLOCK_T), tl.float32)
                    b_slot = b_rows + tl.cast(slot, tl.int64) * stride_bl
                    delta = _add_ranks(delta, b_slot, v_rows, mask_n, mine, 0, live, RANK, BLOCK_R, INTERPRETED)
                    acc = tl.where(mine[:, None], acc + tl.trans(delta), acc)

    out = (acc * scale).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + token.to(tl.int64)[:, None] * stride_out + n[None, :], out, mask=mask_t[:, None] & mask_n[None, :]
    )
