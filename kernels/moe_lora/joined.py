"""gate_up, activate and down in one launch, which drains once instead of three times: `MoEConfig.lag` above 0.

A program works on one part of one block, as in the launches of its own. Blocks follow each other like this, with a
program id growing from left to right and from top to bottom:

    block 0: gate_up parts
    ...
    block L: gate_up parts | block 0: activate parts
    ...
    block 2L: gate_up parts | block L: activate parts | block 0: down parts
    ...

Weights of both products are read side by side, and only the last ``2 * L`` blocks (``L`` is the lag) run without the
first product. With `MoEConfig.wide` the parts of gate_up and down of an expert's first block also take its next ones,
whose own are empty; past ``wide`` blocks the next one leads in the same way. A part waits for the count of those it
depends on. They have smaller program ids, so they have been started and end whatever the others do, as long as programs
are started in the order of their ids; that is what NVIDIA GPUs do, and what the locks of split products in other
libraries rest on. ``BEAM_MOE_JOIN=0`` does without. The plan sets the counts to zero.

In the last blocks in use a program of down takes fewer tiles (`MoEConfig.tail`). There are programs for that in every
block; those that are not needed end at once, as do all of blocks that no pair fell in.
"""

from typing import Any

import triton
import triton.language as tl

from beam_moe.kernels.moe_lora.activate import activate_unit
from beam_moe.kernels.moe_lora.down import TOKENS, down_unit, sum_experts
from beam_moe.kernels.moe_lora.gate_up import gate_up_unit
from beam_moe.kernels.moe_lora.pipeline import (
    adapter_tile,
    count_up_each,
    let_next_start,
    wait_for_count,
    wait_for_counts,
    wait_for_previous,
)


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
    counts_ptr,  # (2 * MAX_BLOCKS + 1,): parts done of each block's gate_up and activate; of the tokens' shared A
    topk_weights_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    order_ptr,
    block_experts_ptr,
    widths_ptr,
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
    TAIL: tl.constexpr,
    TAIL_TILES: tl.constexpr,
    WIDE: tl.constexpr,
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
    """Grid (HEAD + (MAX_BLOCKS + 2 * LAG) * STEP,), see `joined_grid`."""
    A_N: tl.constexpr = adapter_tile(UP_N, NA * RANK)
    A_TILES: tl.constexpr = (NA * RANK + A_N - 1) // A_N
    UP_PARTS: tl.constexpr = ((2 * I + UP_N - 1) // UP_N + (0 if SHARED_A else A_TILES)) * SPLITS
    ACT_PARTS: tl.constexpr = (I + BLOCK_I - 1) // BLOCK_I
    # programs of a block's down: units of the last blocks are TAIL_TILES wide, of the others DOWN_TILES
    DOWN_PARTS: tl.constexpr = (H + DOWN_N * TAIL_TILES - 1) // (DOWN_N * TAIL_TILES)
    STEP: tl.constexpr = UP_PARTS + ACT_PARTS + DOWN_PARTS
    wait_for_previous(PDL)
    let_next_start(PDL)
    program = tl.program_id(0)
    token_blocks, head = 0, 0
    in_head = program < 0
    if SHARED_A:
        token_blocks = tl.cdiv(T, BLOCK_M)
        head = token_blocks * (A_TILES * SPLITS)
        in_head = program < head
    place = tl.maximum(program - head, 0)
    step = place // STEP
    part = place - step * STEP
    if in_head | ((part < UP_PARTS) & (step < MAX_BLOCKS)):
        unit, block, count = part, step + token_blocks, step
        if SHARED_A:
            unit = tl.where(in_head, program % (A_TILES * SPLITS), part)
            block = tl.where(in_head, program // (A_TILES * SPLITS), block)
            count = tl.where(in_head, 2 * MAX_BLOCKS, step)
        done = gate_up_unit(
            unit, block, x_ptr=x_ptr, w13_ptr=w13_ptr, a_ptr=a_ptr, gu_ptr=gu_ptr, t_ptr=t_ptr,
            topk_ids_ptr=topk_ids_ptr, expert_map_ptr=expert_map_ptr, order_ptr=order_ptr,
            block_experts_ptr=block_experts_ptr, widths_ptr=widths_ptr, lora_ids_ptr=lora_ids_ptr, ranks_ptr=ranks_ptr,
            enabled_ptr=enabled_ptr, T=T, E_GLOBAL=E_GLOBAL, E=E, SLOTS=SLOTS, up_a_offset=up_a_offset,
            stride_xt=stride_xt, stride_we=stride_w13e, stride_wn=stride_w13n, stride_al=stride_al, stride_ae=stride_ae,
            stride_ar=stride_ar, H=H, N=2 * I, RANK=RANK, NA=NA, TOP_K=TOP_K, SPLITS=SPLITS, SHARED_A=SHARED_A,
            HAS_MAP=HAS_MAP, BLOCK_P=0, BLOCK_M=BLOCK_M, BLOCK_N=UP_N, BLOCK_K=UP_K, INTERPRETED=INTERPRETED,
            W_TMA=UP_TMA, xn_ptr=xn_ptr, x_words_ptr=x_words_ptr, scales_ptr=scales13_ptr, words_ptr=words13_ptr,
            stride_se=stride_s13e, stride_sn=stride_s13n, BASE=BASE, FP16=UP_FP16, NORMALIZED=UP_NORMALIZED, SOFT=SOFT,
            AHEAD=AHEAD, STAGES=UP_STAGES, WIDE=WIDE,
        )  # fmt: skip
        count_up_each(counts_ptr + count, done)
    elif step < MAX_BLOCKS + 2 * LAG:
        if (part >= UP_PARTS) & (part < UP_PARTS + ACT_PARTS):
            block = step - LAG
            if (block >= 0) & (block < MAX_BLOCKS):
                activate_unit(
                    part - UP_PARTS, block, gu_ptr=gu_ptr, t_ptr=t_ptr, b_ptr=b_ptr, a2_ptr=a2_ptr, h_ptr=h_ptr,
                    s_ptr=s_ptr, topk_ids_ptr=topk_ids_ptr, expert_map_ptr=expert_map_ptr, order_ptr=order_ptr,
                    block_experts_ptr=block_experts_ptr, lora_ids_ptr=lora_ids_ptr, ranks_ptr=ranks_ptr,
                    enabled_ptr=enabled_ptr, T=T, E_GLOBAL=E_GLOBAL, E=E, SLOTS=SLOTS, up_b_offset=up_b_offset,
                    stride_bl=stride_bl, stride_be=stride_be, stride_bi=stride_bi, stride_al=stride_a2l,
                    stride_ae=stride_a2e, stride_ar=stride_a2r, I=I, RANK=RANK, NA=NA, TOP_K=TOP_K, SPLITS=SPLITS,
                    SHARED_A=SHARED_A, MORE=MORE, HAS_MAP=HAS_MAP, BLOCK_P=0, BLOCK_M=BLOCK_M, BLOCK_I=BLOCK_I,
                    BLOCK_R=BLOCK_R, INTERPRETED=INTERPRETED, PDL=PDL, counts_ptr=counts_ptr, wanted=UP_PARTS,
                    wanted_shared=head, MAX_BLOCKS=MAX_BLOCKS, JOINED=True, PARTS=1,
                )  # fmt: skip
            if SHARED_B:
                # behind the last block in use stand parts without a block, which sum up while down still works
                here = tl.load(block_experts_ptr + block, mask=(block >= 0) & (block < MAX_BLOCKS), other=-1)
                before = tl.load(block_experts_ptr + block - 1, mask=(block >= 1) & (block <= MAX_BLOCKS), other=0)
                if (block >= 0) & (block <= MAX_BLOCKS) & (here < 0) & (before >= 0):
                    wait_for_counts(counts_ptr + MAX_BLOCKS, ACT_PARTS, block, INTERPRETED)
                    if SHARED_A:
                        # v takes the place of t: what writes that is through, even where no block has waited for it
                        wait_for_count(counts_ptr + 2 * MAX_BLOCKS, head, INTERPRETED)
                    for first in range((part - UP_PARTS) * TOKENS, T, ACT_PARTS * TOKENS):
                        sum_experts(
                            s_ptr, t_ptr, topk_weights_ptr, topk_ids_ptr, expert_map_ptr, lora_ids_ptr, ranks_ptr,
                            enabled_ptr, first, T, E_GLOBAL, E, SLOTS, tl.cast(T * TOP_K, tl.int64),
                            RANK, ACT_PARTS, TOP_K, HAS_MAP, TOKENS, BLOCK_R,
                        )  # fmt: skip
        elif part >= UP_PARTS + ACT_PARTS:
            block = step - 2 * LAG
            down_part = part - (UP_PARTS + ACT_PARTS)
            tiles = DOWN_TILES
            if TAIL_TILES < DOWN_TILES:
                ahead = block + TAIL
                known = (ahead >= 0) & (ahead < MAX_BLOCKS)
                last = tl.load(block_experts_ptr + ahead, mask=known, other=-1) < 0
                tiles = tl.where(last, TAIL_TILES, tl.where(down_part % (DOWN_TILES // TAIL_TILES) == 0, DOWN_TILES, 0))
            if (block >= 0) & (block < MAX_BLOCKS) & (tiles > 0):
                down_unit(
                    down_part * TAIL_TILES, tiles, block, h_ptr=h_ptr, w2_ptr=w2_ptr, s_ptr=s_ptr, b2_ptr=b2_ptr,
                    y_ptr=y_ptr, topk_ids_ptr=topk_ids_ptr, expert_map_ptr=expert_map_ptr, order_ptr=order_ptr,
                    block_experts_ptr=block_experts_ptr, widths_ptr=widths_ptr, lora_ids_ptr=lora_ids_ptr,
                    ranks_ptr=ranks_ptr, enabled_ptr=enabled_ptr, T=T, E_GLOBAL=E_GLOBAL, E=E, SLOTS=SLOTS,
                    stride_we=stride_w2e, stride_wn=stride_w2n, stride_bl=stride_b2l, stride_be=stride_b2e,
                    stride_bn=stride_b2n,
                    H=H, I=I,
                    RANK=RANK, SHARED_B=SHARED_B, TILES=ACT_PARTS, TOP_K=TOP_K, MORE=MORE, HAS_MAP=HAS_MAP,
                    WHOLE=DOWN_WHOLE, DIRECT=False, EVEN_N=H % (DOWN_N * DOWN_TILES) == 0, BLOCK_M=BLOCK_M,
                    BLOCK_N=DOWN_N, BLOCK_K=DOWN_K, BLOCK_R=BLOCK_R, INTERPRETED=INTERPRETED, PDL=PDL,
                    scales_ptr=scales2_ptr, words_ptr=words2_ptr, stride_se=stride_s2e, stride_sn=stride_s2n, BASE=BASE,
                    FP16=DOWN_FP16, NORMALIZED=DOWN_NORMALIZED, SOFT=SOFT, W_TMA=DOWN_TMA, STAGES=DOWN_STAGES,
                    counts_ptr=counts_ptr, wanted=ACT_PARTS, MAX_BLOCKS=MAX_BLOCKS, JOINED=True, WIDE=WIDE,
                )  # fmt: skip


def joined_grid(
    *, tokens: int, hidden: int, inter: int, blocks: int, a_rows: int, shared_a: bool, config
) -> tuple[int]:
    """Programs of the launch; ``a_rows`` is the rows of A13 of one expert, 0 without adapters."""
    a_tiles = triton.cdiv(a_rows, adapter_tile(config.up_block_n, a_rows))
    up = (triton.cdiv(2 * inter, config.up_block_n) + (0 if shared_a else a_tiles)) * config.splits
    act = triton.cdiv(inter, config.act_block_i)
    down = triton.cdiv(hidden, config.down_block_n * (config.tail_tiles or config.down_tiles))
    head = triton.cdiv(tokens, config.block_m) * a_tiles * config.splits if shared_a else 0
    return (head + (blocks + 2 * config.lag) * (up + act + down),)


def joined_constants(up: dict[str, Any], down: dict[str, Any]) -> dict[str, Any]:
    """What a base adds to the launches of gate_up and down, under the names of this one."""
    both = ("BASE", "SOFT", "AHEAD", "maxnreg", "xn_ptr", "x_words_ptr")
    out = {name: value for name, value in up.items() if name in both}
    for constants, letter, number in ((up, "UP", "13"), (down, "DOWN", "2")):
        names = {"W_TMA": f"{letter}_TMA", "FP16": f"{letter}_FP16", "NORMALIZED": f"{letter}_NORMALIZED"}
        names |= {"scales_ptr": f"scales{number}_ptr", "words_ptr": f"words{number}_ptr"}
        names |= {"stride_se": f"stride_s{number}e", "stride_sn": f"stride_s{number}n"}
        out |= {names[name]: value for name, value in constants.items() if name in names}
    return out
