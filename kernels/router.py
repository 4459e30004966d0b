"""The router of a sparse MoE: logits in true fp32, grouped sigmoid or softmax scores, exact top-k.

    logits[t, e] = sum_h x[t, h] * gate_weight[e, h]
    score        = sigmoid(logits), or softmax over all experts
    choice       = score + bias                                    (the bias only steers the choice)
    groups       = the topk_group best of n_group runs of experts; a group's score is the sum of its two best choices
                   where there is a bias, else its best one
    ids[t]       = the top_k best choices of those groups, best first; equal ones by lowest id, groups too
    weights[t]   = score[ids[t]], divided by (their sum + 1e-20) if renormalised

Tensor cores multiply bf16, yet no bit of the weights is dropped: each fp32 weight is cut into three bf16 pieces of 8
bits, whose products with a bf16 activation are exact, and all of them are summed in fp32 (fp16 activations have two
pieces, fp32 three). H is cut into shares and each share into four quarters (`shares`); a quarter is summed in order,
its quarters make a share and the shares make the logit, in order too. That order depends on E and H alone: a row's
logits are the same bits at every token count and whatever rows share its batch, so that prefill, decode and a trainer's
recomputation choose alike.

A few tokens are bound by latency, not by bytes: every program takes one share, a warp each of its quarters, and a
second launch of one warp a token adds the shares and chooses. Both start early (programmatic dependent launch) and read
nothing before their wait, so weights that the launch before has just written are read as written.

Non-finite input: a NaN in ``x`` or ``gate_weight`` makes the logits it meets NaN, an infinity NaN or infinite. A NaN
choice ranks as minus infinity, and so does a group whose two best add to NaN; ids stay distinct and in range, and a NaN
weight is handed on. A choice of minus infinity comes last within the chosen groups; an expert of another group is never
chosen.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.interpreter import InterpretedFunction

from beam_moe.kernels import tuning
from beam_moe.kernels.checks import refuse_gradient, require_device
from beam_moe.kernels.launch import supports_pdl

OP = "router"
MAX_EXPERTS = 1024
MAX_TOP_K = 16
PIECES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # bf16 pieces that hold every bit of a value
SCORING = ("sigmoid", "softmax")
EPS = 1e-20

BLOCK_E = (16, 32)  # what a table may say: 64 would select another matrix instruction and another order of sums
PROGRAMS = 128  # of 16 experts and one share of H each, at one block of tokens; orders the sums
_BLOCK_K = 32
_QUARTERS = 4  # of a share


@triton.jit
def _cut(v, MMA: tl.constexpr):
    """The leading 8 bits of fp32 ``v``, a bf16, and the rest."""
    # cut, not rounded: both are exact
    bits = v.to(tl.int32, bitcast=True)
    first = (bits & -65536).to(tl.float32, bitcast=True)
    if MMA == tl.bfloat16:
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), v - first
    else:
        return first, v - first


@triton.jit
def _pieces(v, COUNT: tl.constexpr, MMA: tl.constexpr):
    """``v`` as a sum of three bf16 values of falling size, exact; the last ones are zero where COUNT is below three."""
    if COUNT == 1:
        zero = tl.zeros_like(v)
        return v.to(MMA), zero.to(MMA), zero.to(MMA)
    first, rest = _cut(v.to(tl.float32), MMA)
    second, rest = _cut(rest, MMA)
    third, _ = _cut(rest, MMA)
    return first, second, third


@triton.jit
def _add_products(w, x, large, middle, small, W_PIECES: tl.constexpr, X_PIECES: tl.constexpr, MMA: tl.constexpr):
    """Add ``w`` (…, E, K) times ``x`` (…, K, T): products of leading pieces to ``large``, then by falling size.

    Three sums, for the tensor core truncates each addition to the size of what is there, and none waits for another.
    """
    w0, w1, w2 = _pieces(w, W_PIECES, MMA)
    x0, x1, x2 = _pieces(x, X_PIECES, MMA)
    large = tl.dot(w0, x0, large, input_precision="ieee")
    if W_PIECES >= 2:
        middle = tl.dot(w1, x0, middle, input_precision="ieee")
    if X_PIECES >= 2:
        middle = tl.dot(w0, x1, middle, input_precision="ieee")
    if W_PIECES == 3:
        small = tl.dot(w2, x0, small, input_precision="ieee")
    if X_PIECES == 3:
        small = tl.dot(w0, x2, small, input_precision="ieee")
    if W_PIECES >= 2 and X_PIECES >= 2:
        small = tl.dot(w1, x1, small, input_precision="ieee")
    if W_PIECES == 3 and X_PIECES >= 2:
        small = tl.dot(w2, x1, small, input_precision="ieee")
    if W_PIECES >= 2 and X_PIECES == 3:
        small = tl.dot(w1, x2, small, input_precision="ieee")
    if W_PIECES == 3 and X_PIECES == 3:
        small = tl.dot(w2, x2, small, input_precision="ieee")
    return large, middle, small


@triton.jit
def _share_abreast(
    x_ptr, w_ptr, e, mask_e, t, mask_t, first, H, stride_xt, stride_we, SHARE: tl.constexpr, QUARTER: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    X_PIECES: tl.constexpr, W_PIECES: tl.constexpr, EVEN_K: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """fp32 (BLOCK_E, BLOCK_T): one share of H, from ``first`` on, its quarters side by side: of four warps one each."""
    QUARTERS: tl.constexpr = SHARE // QUARTER
    k = first + tl.arange(0, QUARTERS)[:, None] * QUARTER + tl.arange(0, BLOCK_K)[None, :]
    w_ptrs = w_ptr + e.to(tl.int64)[None, :, None] * stride_we + k[:, None, :]  # (4, BLOCK_E, BLOCK_K)
    x_ptrs = x_ptr + t.to(tl.int64)[None, :, None] * stride_xt + k[:, None, :]  # (4, BLOCK_T, BLOCK_K)
    large = tl.zeros((QUARTERS, BLOCK_E, BLOCK_T), tl.float32)
    middle = tl.zeros((QUARTERS, BLOCK_E, BLOCK_T), tl.float32)
    small = tl.zeros((QUARTERS, BLOCK_E, BLOCK_T), tl.float32)
    for start in range(0, QUARTER, BLOCK_K):
        if EVEN_K:
            w = tl.load(w_ptrs, mask=mask_e[None, :, None], other=0.0)
            x = tl.load(x_ptrs, mask=mask_t[None, :, None], other=0.0)
        else:
            mask_k = (k + start < H)[:, None, :]
            w = tl.load(w_ptrs, mask=mask_e[None, :, None] & mask_k, other=0.0)
            x = tl.load(x_ptrs, mask=mask_t[None, :, None] & mask_k, other=0.0)
        x = tl.permute(x, (0, 2, 1))
        large, middle, small = _add_products(w, x, large, middle, small, W_PIECES, X_PIECES, MMA)
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    quarters = tl.permute(large + (middle + small), (1, 2, 0))
    even, odd = tl.split(tl.reshape(quarters, (BLOCK_E, BLOCK_T, 2, 2)))
    first_quarter, third_quarter = tl.split(even)
    second_quarter, fourth_quarter = tl.split(odd)
    return ((first_quarter + second_quarter) + third_quarter) + fourth_quarter


@triton.jit
def _shares_in_turn(
    x_ptr, w_ptr, e, mask_e, t, mask_t, first, H, stride_xt, stride_we, SHARES: tl.constexpr,
    SHARE: tl.constexpr, QUARTER: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    X_PIECES: tl.constexpr, W_PIECES: tl.constexpr, EVEN_K: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """fp32 (BLOCK_E, BLOCK_T): the sum of SHARES shares of H from ``first`` on, each as `_share_abreast` adds it."""
    STEPS: tl.constexpr = QUARTER // BLOCK_K
    SHARE_STEPS: tl.constexpr = SHARE // BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + e.to(tl.int64)[:, None] * stride_we + k[None, :]
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * stride_xt + k[None, :]
    large = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    middle = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    small = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    share = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    total = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    for step in range(1, SHARES * SHARE_STEPS + 1):  # one loop over all of H keeps its loads coming
        if EVEN_K:
            w = tl.load(w_ptrs, mask=mask_e[:, None], other=0.0)
            x = tl.load(x_ptrs, mask=mask_t[:, None], other=0.0)
        else:
            mask_k = first + (step - 1) * BLOCK_K + tl.arange(0, BLOCK_K) < H
            w = tl.load(w_ptrs, mask=mask_e[:, None] & mask_k[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=mask_t[:, None] & mask_k[None, :], other=0.0)
        large, middle, small = _add_products(w, tl.trans(x), large, middle, small, W_PIECES, X_PIECES, MMA)
        if step % STEPS == 0:
            quarter = large + (middle + small)
            share = tl.where(step % SHARE_STEPS == STEPS, quarter, share + quarter)
            if step % SHARE_STEPS == 0:
                total = tl.where(step == SHARE_STEPS, share, total + share)
            large = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
            middle = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
            small = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    return total


@triton.jit
def _exp(x, LIBDEVICE: tl.constexpr):
    """Within one unit in the last place, as the host's and torch's; the hardware's own is not monotone."""
    if LIBDEVICE:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def _reciprocal(d, LIBDEVICE: tl.constexpr):
    """1 / ``d``, correctly rounded where that is a normal number, of ``d`` from 1 to infinity: without the branch of a
    division, behind which the next element of a thread would wait."""
    if LIBDEVICE:
        scale = tl.where(d > 2.0**64, 2.0**-64, 1.0)
        near = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [d * scale], dtype=tl.float32, is_pure=True, pack=1
        )
        exact = tl.fma(near, tl.fma(-(d * scale), near, 1.0), near)
        return tl.where(d == float("inf"), 0.0, exact * scale)
    else:
        return tl.div_rn(tl.zeros_like(d) + 1.0, d)


@triton.jit
def _divide(n, d, reciprocal):
    """``n / d``, given 1 / ``d``."""
    quotient = n * reciprocal
    return tl.fma(tl.fma(-d, quotient, n), reciprocal, quotient)


@triton.jit
def _score(logits, row_max, row_sum, SOFTMAX: tl.constexpr, LIBDEVICE: tl.constexpr):
    if SOFTMAX:
        return _divide(_exp(logits - row_max, LIBDEVICE), row_sum, _reciprocal(row_sum, LIBDEVICE))
    else:
        return _reciprocal(1.0 + _exp(-logits, LIBDEVICE), LIBDEVICE)


@triton.jit
def _order_key(v):
    """int32 that sorts as ``v`` without NaN does; above ``NEVER`` even for minus infinity."""
    v = tl.where(v == 0.0, 0.0, v)  # -0.0 equals 0.0
    bits = v.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _two_best(best, second, other_best, other_second):
    return tl.maximum(best, other_best), tl.maximum(tl.minimum(best, other_best), tl.maximum(second, other_second))


@triton.jit
def _best_groups(
    choice, N_GROUP: tl.constexpr, GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, GROUPS_P2: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """bool (GROUPS_P2,): the TOPK_GROUP best groups of ``choice`` (GROUPS_P2, GROUP_P2), minus infinity where there is
    no expert."""
    group = tl.arange(0, GROUPS_P2)
    if HAS_BIAS and GROUP > 1:
        best, second = tl.reduce((choice, tl.full(choice.shape, -float("inf"), tl.float32)), 1, _two_best)
        total = best + second
        total = tl.where(total == total, total, -float("inf"))
    else:
        total = tl.max(choice, 1)
    if GROUPS_P2 <= 32:  # all places at once: how many are better
        other, own = total[None, :], total[:, None]
        better = (other > own) | ((other == own) & (group[None, :] < group[:, None]))
        place = tl.sum(better.to(tl.int32), 1)  # groups that are not there come after those that are, as the last do
        return (place < TOPK_GROUP) & (group < N_GROUP)
    else:
        NEVER: tl.constexpr = -(2**31)
        key = tl.where(group < N_GROUP, _order_key(total), NEVER)
        kept = tl.zeros((GROUPS_P2,), tl.int32)
        for _ in tl.static_range(TOPK_GROUP):
            first = tl.min(tl.where(key == tl.max(key, 0), group, GROUPS_P2), 0)
            kept = tl.where(group == first, 1, kept)
            key = tl.where(group == first, NEVER, key)
        return kept != 0


@triton.jit
def _add_planes(ptrs, plane, mask, other, PLANES: tl.constexpr):
    """fp32 sum of PLANES partial sums ``plane`` elements apart, in their order."""
    # .cg: each is read once
    total = tl.load(ptrs, mask=mask, other=other, cache_modifier=".cg").to(tl.float32)
    for i in tl.static_range(1, PLANES):
        total += tl.load(ptrs + i * plane, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["T"])
def _logits_kernel(
    x_ptr,  # (T, H)
    w_ptr,  # (E, H)
    planes_ptr,  # (SPLITS or 1, T, E)
    T,
    H,
    E,
    stride_xt,
    stride_we,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,  # of H
    QUARTER: tl.constexpr,  # of a share, a multiple of BLOCK_K
    SPLIT_GRID: tl.constexpr,  # the shares are programs of their own, each with a plane of results
    ABREAST: tl.constexpr,  # a share's quarters side by side
    X_PIECES: tl.constexpr,
    W_PIECES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    MMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (expert blocks, token blocks, SPLITS or 1)."""
    if PDL:
        gdc_launch_dependents()  # `_route_kernel` waits for this one's end, and thus for what this one waits for
        gdc_wait()
    block_e = tl.program_id(0)
    block_t = tl.program_id(1)
    e = block_e * BLOCK_E + tl.arange(0, BLOCK_E)
    t = block_t * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_e = e < E
    mask_t = t < T
    mask = mask_e[:, None] & mask_t[None, :]
    offs = t.to(tl.int64)[None, :] * E + e[:, None]

    plane = tl.cast(T, tl.int64) * E
    if SPLIT_GRID:
        split = tl.program_id(2)
        if ABREAST:
            part = _share_abreast(
                x_ptr, w_ptr, e, mask_e, t, mask_t, split * SHARE, H, stride_xt, stride_we, SHARE, QUARTER,
                BLOCK_E, BLOCK_T, BLOCK_K, X_PIECES, W_PIECES, EVEN_K, MMA,
            )  # fmt: skip
        else:
            part = _shares_in_turn(
                x_ptr, w_ptr, e, mask_e, t, mask_t, split * SHARE, H, stride_xt, stride_we, 1, SHARE, QUARTER,
                BLOCK_E, BLOCK_T, BLOCK_K, X_PIECES, W_PIECES, EVEN_K, MMA,
            )  # fmt: skip
        tl.store(planes_ptr + split * plane + offs, part, mask=mask)
    else:
        total = _shares_in_turn(
            x_ptr, w_ptr, e, mask_e, t, mask_t, 0, H, stride_xt, stride_we, SPLITS, SHARE, QUARTER,
            BLOCK_E, BLOCK_T, BLOCK_K, X_PIECES, W_PIECES, EVEN_K, MMA,
        )  # fmt: skip
        tl.store(planes_ptr + offs, total, mask=mask)


@triton.jit(do_not_specialize=["T"])
def _route_kernel(
    planes_ptr,  # (PLANES, T, E)
    logits_ptr,  # (T, E), written where there are several planes
    bias_ptr,  # (E,)
    weights_ptr,  # (T, TOP_K)
    ids_ptr,  # (T, TOP_K)
    T,
    E,
    stride_pt,
    PLANES: tl.constexpr,
    TOP_K: tl.constexpr,
    N_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    GROUP_P2: tl.constexpr,
    TOP_K_P2: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    PDL: tl.constexpr,  # started while the logits are still being made
):
    """Grid (T,): score and choose one row of logits, given as PLANES partial sums; of several the sum is written too.

    Slot ``g * GROUP_P2 + j`` is expert ``g * GROUP + j``. Each step takes the largest 32-bit key and the lowest slot
    that has it: where one warp holds a row each is one instruction, unlike that of a 64-bit key.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # few programs run here: the next launch finds its place beside them
    row = tl.program_id(0).to(tl.int64)
    SLOTS: tl.constexpr = GROUPS_P2 * GROUP_P2
    NEVER: tl.constexpr = -(2**31)
    group = tl.arange(0, GROUPS_P2)
    within = tl.arange(0, GROUP_P2)
    expert = group[:, None] * GROUP + within[None, :]  # (GROUPS_P2, GROUP_P2)
    real = (group[:, None] < N_GROUP) & (within[None, :] < GROUP)
    if HAS_BIAS:  # on its way together with the logits
        bias = tl.load(bias_ptr + expert, mask=real, other=0.0)
    logits = _add_planes(planes_ptr + row * stride_pt + expert, tl.cast(T, tl.int64) * E, real, -float("inf"), PLANES)
    if PLANES > 1:
        tl.store(logits_ptr + row * E + expert, logits, mask=real)
    row_max = 0.0
    row_sum = 1.0
    if SOFTMAX:
        row_max = tl.max(logits)
        row_max = tl.where(row_max > -float("inf"), row_max, 0.0)
        powers = tl.where(real, _exp(logits - row_max, LIBDEVICE), 0.0)
        # whole numbers of 2^-40: their sum is exact, whatever the order in which a launch's threads add
        known = powers == powers
        whole = (tl.where(known, powers, 0.0) * 2.0**40).to(tl.int64)
        row_sum = tl.sum(whole).to(tl.float32) * 2.0**-40
        row_sum = tl.where(tl.min(known.to(tl.int32)) != 0, row_sum, float("nan"))
    score = _score(logits, row_max, row_sum, SOFTMAX, LIBDEVICE)
    choice = score
    if HAS_BIAS:
        choice += bias
    choice = tl.where(real & (choice == choice), choice, -float("inf"))
    eligible = real
    if TOPK_GROUP < N_GROUP:
        eligible = eligible & _best_groups(choice, N_GROUP, GROUP, TOPK_GROUP, GROUPS_P2, HAS_BIAS)[:, None]

    key = tl.reshape(tl.where(eligible, _order_key(choice), NEVER), (SLOTS,))
    score_bits = tl.reshape(score.to(tl.int32, bitcast=True), (SLOTS,))
    slot = tl.arange(0, SLOTS)
    k = tl.arange(0, TOP_K_P2)
    ids = tl.zeros((TOP_K_P2,), tl.int32)
    weights = tl.zeros((TOP_K_P2,), tl.float32)
    total = 0.0
    for i in tl.static_range(TOP_K):
        best_slot = tl.min(tl.where(key == tl.max(key, 0), slot, SLOTS), 0)
        taken = slot == best_slot
        key = tl.where(taken, NEVER, key)
        weight = tl.max(tl.where(taken, score_bits, NEVER), 0).to(tl.float32, bitcast=True)
        total += weight
        ids = tl.where(k == i, (best_slot // GROUP_P2) * GROUP + best_slot % GROUP_P2, ids)
        weights = tl.where(k == i, weight, weights)
    if RENORMALIZE:
        total += EPS
        weights = _divide(weights, total, tl.div_rn(1.0, total))
    tl.store(weights_ptr + row * TOP_K + k, weights, mask=k < TOP_K)
    tl.store(ids_ptr + row * TOP_K + k, ids, mask=k < TOP_K)


_INTERPRETED = isinstance(_route_kernel, InterpretedFunction)
# no contraction to fused multiply-adds, which the compiler may decide differently in each kernel
_SAME_BITS = {"enable_fp_fusion": False}


def _check(op, experts, dtype, bias, top_k, n_group, topk_group, scoring, renormalize) -> tuple[int, int]:
    """Validated (n_group, topk_group); without groups (1, 1)."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{op}: the number of experts must be within 1..{MAX_EXPERTS}, got {experts}")
    if dtype not in PIECES:
        raise ValueError(f"{op}: dtype must be bfloat16, float16 or float32, got {dtype}")
    if scoring not in SCORING:
        raise ValueError(f"{op}: scoring must be one of {', '.join(SCORING)}, got {scoring!r}")
    if not isinstance(renormalize, bool):
        raise ValueError(f"{op}: renormalize must be True or False, got {renormalize!r}")
    if (n_group is None) != (topk_group is None):
        raise ValueError(f"{op}: n_group and topk_group go together, got {n_group} and {topk_group}")
    n_group, topk_group = (1, 1) if n_group is None else (n_group, topk_group)
    for name, value in (("top_k", top_k), ("n_group", n_group), ("topk_group", topk_group)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{op}: {name} must be an integer, got {value!r}")
    if n_group < 1 or experts % n_group:
        raise ValueError(f"{op}: n_group must divide the {experts} experts, got {n_group}")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"{op}: topk_group must be within 1..n_group = {n_group}, got {topk_group}")
    if not 1 <= top_k <= min(MAX_TOP_K, experts):
        raise ValueError(f"{op}: top_k must be within 1..{min(MAX_TOP_K, experts)}, got {top_k}")
    if top_k > topk_group * (experts // n_group):
        raise ValueError(
            f"{op}: top_k must not exceed the {topk_group} x {experts // n_group} experts of the chosen groups, "
            f"got {top_k}"
        )
    if bias is not None:
        if bias.shape != (experts,) or bias.dtype != torch.float32 or bias.stride(0) != 1:
            raise ValueError(
                f"{op}: bias must be contiguous float32 of shape ({experts},), "
                f"got {bias.dtype} {tuple(bias.shape)} with strides {bias.stride()}"
            )
    return n_group, topk_group


def _check_matrix(op: str, name: str, t: torch.Tensor) -> None:
    if not isinstance(t, torch.Tensor):
        raise ValueError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    require_device(op, name, t)
    if t.dim() != 2:
        raise ValueError(f"{op}: {name} must have 2 dimensions, got shape {tuple(t.shape)}")
    if t.shape[1] > 1 and t.stride(1) != 1:
        raise ValueError(f"{op}: {name} must have innermost stride 1, got strides {t.stride()}")
    refuse_gradient(op, "a trainer's own matmul and top-k train a router", **{name: t})


def _check_device(op: str, like: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, t in others.items():
        if t is not None and not isinstance(t, torch.Tensor):
            raise ValueError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t is not None and t.device != like.device:
            raise ValueError(f"{op}: {name} must be on {like.device}, got {t.device}")


def _choice_constants(experts, bias, top_k, n_group, topk_group, scoring, renormalize) -> dict:
    group = experts // n_group
    return {
        "TOP_K": top_k,
        "N_GROUP": n_group,
        "GROUP": group,
        "TOPK_GROUP": topk_group,
        "HAS_BIAS": bias is not None,
        "SOFTMAX": scoring == "softmax",
        "RENORMALIZE": renormalize,
        "EPS": EPS,
        "GROUPS_P2": triton.next_power_of_2(n_group),
        "GROUP_P2": triton.next_power_of_2(group),
        "TOP_K_P2": triton.next_power_of_2(top_k),
        "LIBDEVICE": not _INTERPRETED,
    }


@functools.cache
def shares(experts: int, hidden: int) -> tuple[int, int]:
    """How the sum over H is cut: (number of shares, length of one). From the shape alone, for it orders the sum."""
    step = _QUARTERS * _BLOCK_K
    steps = max(triton.cdiv(hidden, step), 1)
    count = max(1, min(16, PROGRAMS // triton.cdiv(experts, 16), steps))
    share = triton.cdiv(steps, count)
    return triton.cdiv(steps, share), share * step


def heuristic(tokens: int) -> dict:
    """Launch parameters without a table; none of them changes a bit of the result.

    ``block_e`` experts and ``block_t`` tokens of one program; ``split_grid``: it takes one share of H, whose quarters
    go ``abreast``; ``warps``, ``stages``: Triton's.
    """
    if tokens <= 64:
        block_t = 8 if tokens <= 8 else 16
        return {"block_e": 16, "block_t": block_t, "abreast": True, "split_grid": True, "warps": 4, "stages": 6}
    few = tokens <= 1024
    return {
        "block_e": 16 if few else 32, "block_t": 64 if few else 128, "abreast": False, "split_grid": few,
        "warps": 4, "stages": 4,
    }  # fmt: skip


def _launch_config(device: torch.device, tokens: int, experts: int, hidden: int) -> dict:
    return tuning.lookup(device, OP, tokens, experts=experts, hidden=hidden) or heuristic(tokens)


def launch_form(device: torch.device, tokens: int, experts: int, hidden: int) -> tuple:
    """What a `grouped_topk` call of this size compiles: equal for two sizes that launch the same kernels."""
    return tuple(sorted(_launch_config(device, tokens, experts, hidden).items()))


def _launch_route(planes, logits, bias, constants, weights, ids, pdl=False) -> None:
    """``planes`` (PLANES, T, E) with innermost stride 1; ``constants`` as `_choice_constants` gives them."""
    count, tokens, experts = planes.shape
    slots = constants["GROUPS_P2"] * constants["GROUP_P2"]
    _route_kernel[(tokens,)](
        planes, logits, bias, weights, ids, tokens, experts, planes.stride(1), PLANES=count,
        **constants, PDL=pdl, num_warps=1 if slots <= 512 else 4, **_SAME_BITS,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _grouped_topk(x, gate_weight, bias, top_k, n_group, topk_group, scoring, renormalize):
    """(topk_weights, topk_ids, logits) of checked arguments."""
    tokens, hidden = x.shape
    experts = gate_weight.shape[0]
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    if tokens == 0:
        return weights, ids, logits
    config = _launch_config(x.device, tokens, experts, hidden)
    block_e, block_t, split_grid = config["block_e"], config["block_t"], config["split_grid"]
    splits, share = shares(experts, hidden)
    planes = logits.unsqueeze(0)
    if split_grid and splits > 1:
        planes = torch.empty((splits, tokens, experts), dtype=torch.float32, device=x.device)
    constants = _choice_constants(experts, bias, top_k, n_group, topk_group, scoring, renormalize)
    pdl = supports_pdl(x.device)
    with torch.cuda.device_of(x):
        _logits_kernel[(triton.cdiv(experts, block_e), triton.cdiv(tokens, block_t), len(planes))](
            x, gate_weight, planes, tokens, hidden, experts, x.stride(0), gate_weight.stride(0),
            SPLITS=splits, SHARE=share, QUARTER=share // _QUARTERS,
            SPLIT_GRID=split_grid, ABREAST=split_grid and config["abreast"],
            X_PIECES=PIECES[x.dtype], W_PIECES=PIECES[gate_weight.dtype],
            BLOCK_E=block_e, BLOCK_T=block_t, BLOCK_K=_BLOCK_K, EVEN_K=hidden == splits * share,
            MMA=tl.float32 if _INTERPRETED else tl.bfloat16,  # the interpreter multiplies the bit patterns of bf16
            PDL=pdl, num_warps=config["warps"], num_stages=config["stages"], **_SAME_BITS,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
        _launch_route(planes, logits, bias, constants, weights, ids, pdl)
    return weights, ids, logits


@torch.library.custom_op("beam_moe::grouped_topk", mutates_args=())
def _grouped_topk_op(
    x: torch.Tensor, gate_weight: torch.Tensor, bias: torch.Tensor | None,
    top_k: int, n_group: int, topk_group: int, scoring: str, renormalize: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _grouped_topk(x, gate_weight, bias, top_k, n_group, topk_group, scoring, renormalize)


@_grouped_topk_op.register_fake
def _(x, gate_weight, bias, top_k, n_group, topk_group, scoring, renormalize):
    tokens, experts = x.shape[0], gate_weight.shape[0]
    return (
        x.new_empty((tokens, top_k), dtype=torch.float32),
        x.new_empty((tokens, top_k), dtype=torch.int32),
        x.new_empty((tokens, experts), dtype=torch.float32),
    )


def _route(logits, bias, top_k, n_group, topk_group, scoring, renormalize):
    tokens = logits.shape[0]
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens:
        with torch.cuda.device_of(logits):
            constants = _choice_constants(logits.shape[1], bias, top_k, n_group, topk_group, scoring, renormalize)
            _launch_route(logits.unsqueeze(0), logits, bias, constants, weights, ids)
    return weights, ids


@torch.library.custom_op("beam_moe::route", mutates_args=())
def _route_op(
    logits: torch.Tensor, bias: torch.Tensor | None,
    top_k: int, n_group: int, topk_group: int, scoring: str, renormalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _route(logits, bias, top_k, n_group, topk_group, scoring, renormalize)


@_route_op.register_fake
def _(logits, bias, top_k, n_group, topk_group, scoring, renormalize):
    tokens = logits.shape[0]
    return logits.new_empty((tokens, top_k), dtype=torch.float32), logits.new_empty((tokens, top_k), dtype=torch.int32)


def grouped_topk(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    n_group: int | None = None,
    topk_group: int | None = None,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    return_logits: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Router of one layer: logits in fp32, scores, and the experts of each token. See the head of this file.

    Two launches. Nothing is copied, and nothing allocated but results and partial sums.

    Args:
        x: ``(T, H)`` bf16, fp16 or fp32, innermost stride 1; T may be 0.
        gate_weight: ``(E, H)`` fp32, bf16 or fp16, innermost stride 1; E up to 1024.
        bias: ``(E,)`` fp32, added to the scores for the choice only (``e_score_correction_bias``).
        top_k: experts of a token, up to 16.
        n_group, topk_group: the experts form ``n_group`` equal runs, of which the ``topk_group`` best are eligible.
        scoring: ``sigmoid`` or ``softmax``.
        renormalize: divide the weights by their sum + 1e-20.
        return_logits: also return the logits.

    Returns:
        ``topk_weights`` fp32 ``(T, top_k)``, ``topk_ids`` int32 ``(T, top_k)``, and with ``return_logits`` the
        ``logits`` fp32 ``(T, E)``.

    Raises:
        ValueError: a shape, dtype, stride, device or argument that does not fit, or an input that requires grad.
    """
    _check_matrix("grouped_topk", "x", x)
    _check_matrix("grouped_topk", "gate_weight", gate_weight)
    _check_device("grouped_topk", x, gate_weight=gate_weight, bias=bias)
    if gate_weight.shape[1] != x.shape[1] or x.shape[1] == 0:
        raise ValueError(
            f"grouped_topk: gate_weight must be (E, H) with x's H = {x.shape[1]} > 0, got {tuple(gate_weight.shape)}"
        )
    if x.dtype not in PIECES:
        raise ValueError(f"grouped_topk: x must be bfloat16, float16 or float32, got {x.dtype}")
    n_group, topk_group = _check(
        "grouped_topk", gate_weight.shape[0], gate_weight.dtype, bias, top_k, n_group, topk_group, scoring, renormalize
    )
    run = _grouped_topk_op if torch.compiler.is_compiling() else _grouped_topk
    weights, ids, logits = run(x, gate_weight, bias, top_k, n_group, topk_group, scoring, renormalize)
    return (weights, ids, logits) if return_logits else (weights, ids)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    n_group: int | None = None,
    topk_group: int | None = None,
    scoring: str = "sigmoid",
    renormalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choice of `grouped_topk` from given logits ``(T, E)`` (fp32, bf16 or fp16), in one launch.

    Arguments, results and errors are those of `grouped_topk`.
    """
    _check_matrix("route", "logits", logits)
    _check_device("route", logits, bias=bias)
    n_group, topk_group = _check(
        "route", logits.shape[1], logits.dtype, bias, top_k, n_group, topk_group, scoring, renormalize
    )
    run = _route_op if torch.compiler.is_compiling() else _route
    return run(logits, bias, top_k, n_group, topk_group, scoring, renormalize)


def route_reference(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    n_group: int | None = None,
    topk_group: int | None = None,
    scoring: str = "sigmoid",
    renormalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route`, a row at a time in torch."""
    experts = logits.shape[1]
    groups, keep = n_group or 1, topk_group or 1
    size = experts // groups
    weights = torch.zeros((len(logits), top_k), dtype=torch.float32)
    ids = torch.zeros((len(logits), top_k), dtype=torch.int32)
    for row, row_logits in enumerate(logits.float().cpu()):
        score = row_logits.sigmoid() if scoring == "sigmoid" else row_logits.softmax(0)
        choice = score if bias is None else score + bias.cpu()
        choice = choice.nan_to_num(nan=-float("inf"), posinf=float("inf"), neginf=-float("inf"))
        best_two = choice.view(groups, size).sort(1, descending=True).values[:, : 1 if bias is None else 2]
        total = best_two.sum(1)
        kept = total.where(~total.isnan(), -float("inf")).argsort(descending=True, stable=True)[:keep]
        eligible = torch.cat([torch.arange(g * size, (g + 1) * size) for g in sorted(kept.tolist())])
        chosen = eligible[choice[eligible].argsort(descending=True, stable=True)[:top_k]]
        ids[row] = chosen
        weights[row] = score[chosen]
        if renormalize:
            weights[row] /= weights[row].sum() + EPS
    return weights.to(logits.device), ids.to(logits.device)


def grouped_topk_reference(x: torch.Tensor, gate_weight: torch.Tensor, bias: torch.Tensor | None = None, **options):
    """`grouped_topk` with logits in fp64, rounded once: (topk_weights, topk_ids, logits)."""
    logits = (x.double() @ gate_weight.double().T).float()
    return *route_reference(logits, bias, **options), logits
