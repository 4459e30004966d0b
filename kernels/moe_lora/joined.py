"""gate_up, activate and down in one launch, which drains once instead of three times: `MoEConfig.lag` above 0.

The launch works through units: a unit is one part of one block, as a program of the launches apart is. Units are in
this order, from left to right and from top to bottom:

    block 0: gate_up parts
    ...
    block L: gate_up parts | block 0: activate parts
    ...
    block 2L: gate_up parts | block L: activate parts | block 0: down parts
    ...

Weights of both products are read side by side, and only the last ``2 * L`` blocks (``L`` is the lag, or the number of
blocks in use where that is less) run without the first product. A unit waits for the count of those it depends on, all
of which come before it.

As many programs as the machine holds at once take units, the next one each time, by drawing a ticket. So a unit is
under way before any later one is, and those that it waits for end whatever order programs were started in. Blocks that
no pair fell in cost nothing: the plan counts those in use, and sets the counts and the ticket to zero.

Without a plan, for one or two tokens, gate_up is a launch of its own, which does that, and the other two are this one.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.activate import activate_unit
from beam_moe.kernels.moe_lora.down import TOKENS, down_unit, sum_experts
from beam_moe.kernels.moe_lora.gate_up import gate_up_unit
from beam_moe.kernels.moe_lora.pipeline import (
    FIRST_COUNT,
    SHARED_COUNT,
    TICKET,
    USED,
    count_up,
    draw,
    let_next_start,
    wait_for_count,
    wait_for_counts,
    wait_for_previous,
)


@triton.jit
def _locate(place, used, LAG: tl.constexpr, UP: tl.constexpr, ACT: tl.constexpr, DOWN: tl.constexpr):
    """Step and part of the unit at ``place`` of the order above; parts of a step: gate_up's, activate's, down's.

    Steps fall into stretches of one number of parts: gate_up alone, with activate, with both (or, with few blocks,
    activate alone), activate and down, down alone.
    """
    lag = tl.minimum(used, LAG)
    few = used < 2 * lag
    step_2 = tl.where(few, used, 2 * lag)
    step_3 = tl.where(few, 2 * lag, used)
    middle = tl.where(few, ACT, UP + ACT + DOWN)
    place_1 = lag * UP
    place_2 = place_1 + (step_2 - lag) * (UP + ACT)
    place_3 = place_2 + (step_3 - step_2) * middle
    place_4 = place_3 + (used + lag - step_3) * (ACT + DOWN)
    first = tl.where(place < place_1, 0, lag)
    begin = tl.where(place < place_1, 0, place_1)
    parts = tl.where(place < place_1, UP, UP + ACT)
    in_third, in_fourth, in_fifth = place >= place_2, place >= place_3, place >= place_4
    first = tl.where(in_third, step_2, first)
    begin = tl.where(in_third, place_2, begin)
    parts = tl.where(in_third, middle, parts)
    skipped = tl.where(in_third & few, UP, 0)
    first = tl.where(in_fourth, step_3, first)
    begin = tl.where(in_fourth, place_3, begin)
    parts = tl.where(in_fourth, ACT + DOWN, parts)
    skipped = tl.where(in_fourth, UP, skipped)
    first = tl.where(in_fifth, used + lag, first)
    begin = tl.where(in_fifth, place_4, begin)
    parts = tl.where(in_fifth, DOWN, parts)
    skipped = tl.where(in_fifth, UP + ACT, skipped)
    behind = (place - begin) // parts
    return lag, first + behind, place - begin - behind * parts + skipped


@triton.jit(do_not_specialize=["T", "SLOTS", "MAX_BLOCKS"])
def _joined_kernel(
    x_ptr,  # the operands are described in gate_up.py, activate.py and down.py
    w13_ptr,
    w2_ptr,
    a_ptr,
    b_ptr,
    a2_ptr,
    b2_ptr,
    gu_ptr,
    t_ptr,
    h_ptr,
    s_ptr,
    y_ptr,
    counts_ptr,  # (FIRST_COUNT + 2 * MAX_BLOCKS,), see pipeline.py
    topk_weights_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    order_ptr,
    block_experts_ptr,
    lora_ids_ptr,
    ranks_ptr,
    enabled_ptr,
    T,
    E_GLOBAL,
    E,
    SLOTS,
    MAX_BLOCKS,
    up_a_offset,
    up_b_offset,
    stride_xt,
    stride_w13e,
    stride_w13n,
    stride_w2e,
    stride_w2n,
    stride_al,
    stride_ae,
    stride_ar,
    stride_bl,
    stride_be,
    stride_bi,
    stride_a2l,
    stride_a2e,
    stride_a2r,
    stride_b2l,
    stride_b2e,
    stride_b2n,
    H: tl.constexpr,
    I: tl.constexpr,
    RANK: tl.constexpr,
    NA: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED_A: tl.constexpr,
    SHARED_B: tl.constexpr,
    MORE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    ROWS: tl.constexpr,  # of `MoEConfig`: without a plan gate_up is through
    LAG: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UP_N: tl.constexpr,
    UP_K: tl.constexpr,
    UP_STAGES: tl.constexpr,
    BLOCK_I: tl.constexpr,
    DOWN_N: tl.constexpr,
    DOWN_K: tl.constexpr,
    DOWN_STAGES: tl.constexpr,
    DOWN_WHOLE: tl.constexpr,
    DOWN_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
    UP_TMA: tl.constexpr = False,
    DOWN_TMA: tl.constexpr = False,
    xn_ptr=None,
    x_words_ptr=None,
    scales13_ptr=None,
    words13_ptr=None,
    stride_s13e=0,
    stride_s13n=0,
    scales2_ptr=None,
    words2_ptr=None,
    stride_s2e=0,
    stride_s2n=0,
    BASE: tl.constexpr = "dense",
    UP_FP16: tl.constexpr = False,
    DOWN_FP16: tl.constexpr = False,
    UP_NORMALIZED: tl.constexpr = False,
    DOWN_NORMALIZED: tl.constexpr = False,
    SOFT: tl.constexpr = False,
    AHEAD: tl.constexpr = False,
):
    """Grid (programs,), of at most `joined_units`."""
    WITH_UP: tl.constexpr = ROWS == "plan"
    BLOCK_P: tl.constexpr = 1 if ROWS == "direct" else 0  # gate_up has written the tables of a search
    HEADED: tl.constexpr = WITH_UP and SHARED_A
    A_TILES: tl.constexpr = (NA * RANK + UP_N - 1) // UP_N
    UP_PARTS: tl.constexpr = (((2 * I + UP_N - 1) // UP_N + (0 if SHARED_A else A_TILES)) * SPLITS) if WITH_UP else 0
    ACT_PARTS: tl.constexpr = (I + BLOCK_I - 1) // BLOCK_I
    DOWN_PARTS: tl.constexpr = (H + DOWN_N * DOWN_TILES - 1) // (DOWN_N * DOWN_TILES)
    wait_for_previous(PDL)
    let_next_start(PDL)
    used = tl.load(counts_ptr + USED)
    head = 0
    if HEADED:
        head = tl.cdiv(T, BLOCK_M) * (A_TILES * SPLITS)
    tail = head + used * (UP_PARTS + ACT_PARTS + DOWN_PARTS)
    units = tail
    if SHARED_B:
        units = tail + tl.cdiv(T, TOKENS)
    up_counts, act_counts = counts_ptr + FIRST_COUNT, counts_ptr + FIRST_COUNT + MAX_BLOCKS
    place = draw(counts_ptr + TICKET)
    while place < units:
        lag, step, part = _locate(tl.maximum(place - head, 0), used, LAG, UP_PARTS, ACT_PARTS, DOWN_PARTS)
        if (place < head) | ((place < tail) & (part < UP_PARTS)):
            if WITH_UP:
                unit, block, count_ptr = part, step, up_counts + step
                if HEADED:
                    in_head = place < head
                    unit = tl.where(in_head, place % (A_TILES * SPLITS), unit)
                    block = tl.where(in_head, place // (A_TILES * SPLITS), block + tl.cdiv(T, BLOCK_M))
                    count_ptr = tl.where(in_head, counts_ptr + SHARED_COUNT, count_ptr)
                gate_up_unit(
                    unit, block, x_ptr=x_ptr, w13_ptr=w13_ptr, a_ptr=a_ptr, gu_ptr=gu_ptr, t_ptr=t_ptr,
                    topk_ids_ptr=topk_ids_ptr, expert_map_ptr=expert_map_ptr, order_ptr=order_ptr,
                    block_experts_ptr=block_experts_ptr, lora_ids_ptr=lora_ids_ptr, ranks_ptr=ranks_ptr,
                    enabled_ptr=enabled_ptr, T=T, E_GLOBAL=E_GLOBAL, E=E, SLOTS=SLOTS, up_a_offset=up_a_offset,
                    stride_xt=stride_xt, stride_we=stride_w13e, stride_wn=stride_w13n, stride_al=stride_al,
                    stride_ae=stride_ae, stride_ar=stride_ar, H=H, N=2 * I, RANK=RANK, NA=NA, TOP_K=TOP_K,
                    SPLITS=SPLITS, SHARED_A=SHARED_A, HAS_MAP=HAS_MAP, BLOCK_P=0, BLOCK_M=BLOCK_M, BLOCK_N=UP_N,
                    BLOCK_K=UP_K, INTERPRETED=INTERPRETED, W_TMA=UP_TMA, xn_ptr=xn_ptr, x_words_ptr=x_words_ptr,
                    scales_ptr=scales13_ptr, words_ptr=words13_ptr, stride_se=stride_s13e, stride_sn=stride_s13n,
                    BASE=BASE, FP16=UP_FP16, NORMALIZED=UP_NORMALIZED, SOFT=SOFT, AHEAD=AHEAD, STAGES=UP_STAGES,
                )  # fmt: skip
                count_up(count_ptr)
        elif (place < tail) & (part < UP_PARTS + ACT_PARTS):
            block = step - lag
            activate_unit(
                part - UP_PARTS, block, gu_ptr=gu_ptr, t_ptr=t_ptr, b_ptr=b_ptr, a2_ptr=a2_ptr, h_ptr=h_ptr,
                s_ptr=s_ptr, topk_ids_ptr=topk_ids_ptr, expert_map_ptr=expert_map_ptr, order_ptr=order_ptr,
                block_experts_ptr=block_experts_ptr, lora_ids_ptr=lora_ids_ptr, ranks_ptr=ranks_ptr,
                enabled_ptr=enabled_ptr, T=T, E_GLOBAL=E_GLOBAL, E=E, SLOTS=SLOTS, up_b_offset=up_b_offset,
                stride_bl=stride_bl, stride_be=stride_be, stride_bi=stride_bi, stride_al=stride_a2l,
                stride_ae=stride_a2e, stride_ar=stride_a2r, I=I, RANK=RANK, NA=NA, TOP_K=TOP_K, SPLITS=SPLITS,
                SHARED_A=SHARED_A, MORE=MORE, HAS_MAP=HAS_MAP, BLOCK_P=BLOCK_P, BLOCK_M=BLOCK_M, BLOCK_I=BLOCK_I,
                BLOCK_R=BLOCK_R, INTERPRETED=INTERPRETED, PDL=PDL, JOINED=True, count_ptr=up_counts + block,
                WANTED=UP_PARTS, shared_count_ptr=counts_ptr + SHARED_COUNT, wanted_shared=head, HEADED=HEADED,
            )  # fmt: skip
            count_up(act_counts + block)
        elif place < tail:
            block = step - 2 * lag
            down_unit(
                part - (UP_PARTS + ACT_PARTS), block, h_ptr=h_ptr, w2_ptr=w2_ptr, s_ptr=s_ptr, b2_ptr=b2_ptr,
                y_ptr=y_ptr, topk_ids_ptr=topk_ids_ptr, expert_map_ptr=expert_map_ptr, order_ptr=order_ptr,
                block_experts_ptr=block_experts_ptr, lora_ids_ptr=lora_ids_ptr, ranks_ptr=ranks_ptr,
                enabled_ptr=enabled_ptr, T=T, E_GLOBAL=E_GLOBAL, E=E, SLOTS=SLOTS, stride_we=stride_w2e,
                stride_wn=stride_w2n, stride_bl=stride_b2l, stride_be=stride_b2e, stride_bn=stride_b2n, H=H, I=I,
                RANK=RANK, SHARED_B=SHARED_B, TILES=ACT_PARTS, TOP_K=TOP_K, MORE=MORE, HAS_MAP=HAS_MAP,
                WHOLE=DOWN_WHOLE, DIRECT=BLOCK_P == 1, TILES_PER_PROGRAM=DOWN_TILES, BLOCK_M=BLOCK_M, BLOCK_N=DOWN_N,
                BLOCK_K=DOWN_K, BLOCK_R=BLOCK_R, INTERPRETED=INTERPRETED, PDL=PDL, scales_ptr=scales2_ptr,
                words_ptr=words2_ptr, stride_se=stride_s2e, stride_sn=stride_s2n, BASE=BASE, FP16=DOWN_FP16,
                NORMALIZED=DOWN_NORMALIZED, SOFT=SOFT, W_TMA=DOWN_TMA, STAGES=DOWN_STAGES, JOINED=True,
                count_ptr=act_counts + block, WANTED=ACT_PARTS,
            )  # fmt: skip
        elif SHARED_B:
            wait_for_counts(act_counts, used, ACT_PARTS, INTERPRETED)
            if HEADED:
                # v takes the place of t: what writes that is through, even where no block has an expert to wait for it
                wait_for_count(counts_ptr + SHARED_COUNT, head, INTERPRETED)
            sum_experts(
                s_ptr, t_ptr, topk_weights_ptr, topk_ids_ptr, expert_map_ptr, lora_ids_ptr, ranks_ptr, enabled_ptr,
                (place - tail) * TOKENS, T, E_GLOBAL, E, SLOTS, tl.cast(T * TOP_K, tl.int64),
                RANK, ACT_PARTS, TOP_K, HAS_MAP, TOKENS, BLOCK_R,
            )  # fmt: skip
        place = draw(counts_ptr + TICKET)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def joined_units(
    *, tokens: int, hidden: int, inter: int, blocks: int, a_rows: int, shared_a: bool, shared_b: bool, config
) -> int:
    """The most units of a launch; ``a_rows`` is the rows of A13 of one expert, 0 without adapters."""
    a_tiles = triton.cdiv(a_rows, config.up_block_n)
    up = (triton.cdiv(2 * inter, config.up_block_n) + (0 if shared_a else a_tiles)) * config.splits
    act = triton.cdiv(inter, config.act_block_i)
    down = triton.cdiv(hidden, config.down_block_n * config.down_tiles)
    head = triton.cdiv(tokens, config.block_m) * a_tiles * config.splits if shared_a else 0
    tail = triton.cdiv(tokens, TOKENS.value) if shared_b else 0
    if config.rows != "plan":
        up = head = 0
    return head + blocks * (up + act + down) + tail


def joined_registers(config) -> int | None:
    """Registers of a thread that let a multiprocessor hold ``config.resident`` programs; None where any number does.

    Addresses that do not change from unit to unit would take more. What is too much stays in local memory between
    units.
    """
    registers = 65536 // (32 * config.down_warps * config.resident) // 8 * 8
    return registers if registers < 248 else None


def joined_grid(device: torch.device, units: int, config) -> tuple[int]:
    """Programs of a launch of at most ``units`` units."""
    return (max(1, min(units, config.resident * _multiprocessors(device))),)


def joined_constants(up: dict[str, Any], down: dict[str, Any]) -> dict[str, Any]:
    """What a base adds to the launches of gate_up and down, under the names of this one."""
    both = ("BASE", "SOFT", "AHEAD", "xn_ptr", "x_words_ptr")
    out = {name: value for name, value in up.items() if name in both}
    for constants, letter, number in ((up, "UP", "13"), (down, "DOWN", "2")):
        names = {"W_TMA": f"{letter}_TMA", "FP16": f"{letter}_FP16", "NORMALIZED": f"{letter}_NORMALIZED"}
        names |= {"scales_ptr": f"scales{number}_ptr", "words_ptr": f"words{number}_ptr"}
        names |= {"stride_se": f"stride_s{number}e", "stride_sn": f"stride_s{number}n"}
        out |= {names[name]: value for name, value in constants.items() if name in names}
    return out
