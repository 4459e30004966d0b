"""Training: one projection of every expert with its LoRA adapter, forward and backward.

    y[i]  = x[i] @ w[e].T + t[i] @ b[e].T           t = scale * x @ a[e].T         for the rows i of expert e
    dx[i] = dy[i] @ w[e]  + u[i] @ a[e]             u = scale * dy @ b[e]
    da[e] = u[rows of e].T @ x[rows of e]           db[e] = dy[rows of e].T @ t[rows of e]

    launch        makes            reads                     kernel
    shrink        t (or u)         x (or dy), a (or b)       `_shrink_kernel`, bound by reading the rows once
    project       y (or dx)        x (or dy), w, t, b        `_project_kernel`, the grouped GEMM; t @ b.T joins its sums
    factor grad   da, db           u and x, dy and t         `_factor_grad_kernel`, one launch each

So no product of the adapter with as many columns as the layer is ever stored, and base plus adapter is rounded once. t
is kept for the backward pass in fp32, ``4 * T * R`` bytes; u lives for that pass only. The low-rank products multiply
fp32 by 16-bit operands without rounding the former: beside bf16 as two bf16 terms (16 bits of mantissa), else by three
TF32 products. Group sizes stay on the device; nothing here synchronises. Every sum has an order given by the shapes and
the offsets, so results are the same bits each time. A factor that all experts share has its gradient summed over runs
of rows, then over the runs in ascending order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from beam_moe import env
from beam_moe.kernels import tuning
from beam_moe.kernels.checks import require_device, require_ends
from beam_moe.kernels.moe_lora.fused import _on_device
from beam_moe.kernels.mxfp8.decode_block import settled
from beam_moe.kernels.mxfp8.format import BLOCK, MXFP8Tensor
from beam_moe.kernels.mxfp8.gemm import _descriptor, _stack_descriptor
from beam_moe.kernels.mxfp8.grouped import _group_of_tile, dequantize_groups, grouped_wgrad
from beam_moe.kernels.mxfp8.quantize import fake_quantize
from beam_moe.kernels.mxfp8.tile import rows_within, tile_place

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_EXPERTS, MAX_RANK = 1024, 512
RUN_ROWS, MOST_RUNS = 512, 32  # rows of one partial sum of a shared factor's gradient, and how many of those at most

Weight = torch.Tensor | tuple[MXFP8Tensor, MXFP8Tensor]


@dataclass(frozen=True)
class GroupedLoRAConfig:
    """Tile of the grouped GEMM: ``bm`` rows, ``bn`` output columns, steps of ``bk``; warps and pipeline stages."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int

    @classmethod
    def pick(
        cls, rows: int, groups: int, n: int, k: int, *, turned: bool, wide: bool, device: torch.device
    ) -> GroupedLoRAConfig:
        """From this device's table if it has the shape, else by rule.

        Args:
            rows: of all groups together; ``rows / groups`` decides.
            turned: w lies with N contiguous, as in a dgrad.
            wide: an operand of the base product is fp32.
        """
        if device.type != "cuda":
            return cls(16, 64, 64, 4, 1)
        if wide:
            return cls(64, 64, 32, 4, 2)
        per_group = triton.cdiv(rows, groups)
        tuned = tuning.lookup(device, "grouped_lora", per_group, groups=groups, n=n, k=k, turned=int(turned))
        if tuned is not None:
            return cls(**tuned)
        if per_group >= 1024:
            return cls(128, 256, 64, 8, 3)
        return cls(128, 128, 64, 8, 3) if per_group > 128 else cls(64, 128, 64, 4, 4)


@triton.jit
def _dot(a, b, acc, INTERPRETED: tl.constexpr):
    """``acc + a @ b`` in fp32, for bf16, fp16 or fp32 on either side; an fp32 operand keeps at least 16 bits.

    Converted operands may lie in registers, which a loop's next step must not write before the products are through.
    """
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif a.dtype == b.dtype and a.dtype != tl.float32:
        return tl.dot(a, b, acc)
    elif a.dtype == tl.bfloat16 and b.dtype == tl.float32:
        high = b.to(tl.bfloat16)
        low = (b - high.to(tl.float32)).to(tl.bfloat16)
        return settled(tl.dot(a, high, tl.dot(a, low, acc)), False)
    elif a.dtype == tl.float32 and b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        return settled(tl.dot(high, b, tl.dot(low, b, acc)), False)
    else:
        return settled(tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3"), False)


@triton.jit(do_not_specialize=["rows", "tiles_m"])
def _shrink_kernel(
    x_ptr,  # (T, K)
    a_ptr,  # (E|1, R, K)
    offsets_ptr,  # (E + 1,) int32
    t_ptr,  # (T, R) fp32
    rows,
    groups,
    K,
    scale,
    tiles_m,
    stride_xm,
    stride_xk,
    stride_ae,
    stride_ar,
    stride_ak,
    R: tl.constexpr,
    TURNED: tl.constexpr,  # a lies with R contiguous
    GROUPS_P2: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (tiles_m, tiles of R): ``scale * x @ a[e].T``; rows of no group stay unwritten."""
    group, first, end = _group_of_tile(offsets_ptr, tl.program_id(0), groups, rows, BM, GROUPS_P2)
    if group >= groups:
        return
    m = first + tl.arange(0, BM)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    lane = tl.arange(0, BK)
    x_row = x_ptr + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * stride_xm
    a_row = a_ptr + group.to(tl.int64) * stride_ae + rows_within(r, R, R % BR == 0) * stride_ar
    acc = tl.zeros((BM, BR), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        at = (k + lane).to(tl.int64)
        inside = k + lane < K
        if EVEN_K:
            x = tl.load(x_row + at[None, :] * stride_xk)
        else:
            x = tl.load(x_row + at[None, :] * stride_xk, mask=inside[None, :], other=0.0)
        if TURNED:
            if EVEN_K:
                a = tl.load(a_row[None, :] + at[:, None] * stride_ak)
            else:
                a = tl.load(a_row[None, :] + at[:, None] * stride_ak, mask=inside[:, None], other=0.0)
            acc = _dot(x, a, acc, INTERPRETED)
        else:
            if EVEN_K:
                a = tl.load(a_row[:, None] + at[None, :] * stride_ak)
            else:
                a = tl.load(a_row[:, None] + at[None, :] * stride_ak, mask=inside[None, :], other=0.0)
            acc = _dot(x, tl.trans(a), acc, INTERPRETED)
    out = t_ptr + m.to(tl.int64)[:, None] * R + r[None, :]
    tl.store(out, acc * scale, mask=(m < end)[:, None] & (r < R)[None, :])


@triton.jit(do_not_specialize=["rows", "tiles_m"])
def _project_kernel(
    x,  # (T, K): descriptor or pointer
    w,  # (E, N, K): descriptor of (E * N, K), of (E * K, N) if TURNED, or pointer
    t_ptr,  # (T, R) fp32
    b_ptr,  # (E|1, N, R)
    offsets_ptr,  # (E + 1,) int32
    out_ptr,  # (T, N)
    rows,
    groups,
    N,
    K,
    tiles_m,
    tiles_n,
    stride_xm,
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    stride_bn,
    stride_br,
    stride_om,
    R: tl.constexpr,
    X_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    TURNED: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    RUN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (tiles_m * tiles_n,), tiles_m an upper bound: ``x @ w[e].T + t @ b[e].T``, zeros behind the last offset."""
    tile_m, tile_n = tile_place(tl.program_id(0), tiles_m, tiles_n, RUN)
    group, first, end = _group_of_tile(offsets_ptr, tile_m, groups, rows, BM, GROUPS_P2)
    if group > groups:
        return
    m = first + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    out = out_ptr + m.to(tl.int64)[:, None] * stride_om + n[None, :]
    mask = (m < end)[:, None] & (n < N)[None, :]
    if group == groups:
        tl.store(out, tl.zeros((BM, BN), out_ptr.dtype.element_ty), mask=mask)
    else:
        lane = tl.arange(0, BK)
        e = group.to(tl.int64)
        n_in = rows_within(n, N, EVEN_N)
        if not X_TMA:
            x_row = x + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * stride_xm
        if not W_TMA:
            w_row = w + e * stride_we + n_in[:, None] * stride_wn
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            at = (k + lane).to(tl.int64)[None, :]
            inside = (k + lane < K)[None, :]
            if X_TMA:
                xt = x.load([first, k])
            elif EVEN_K:
                xt = tl.load(x_row + at * stride_xk)
            else:
                xt = tl.load(x_row + at * stride_xk, mask=inside, other=0.0)
            if W_TMA and TURNED:
                wt = w.load([group * K + k, tile_n * BN])
            elif W_TMA:
                wt = w.load([group * N + tile_n * BN, k]).T
            elif EVEN_K:
                wt = tl.load(w_row + at * stride_wk).T
            else:
                wt = tl.load(w_row + at * stride_wk, mask=inside, other=0.0).T
            acc = _dot(xt, wt, acc, INTERPRETED)
        t_row = t_ptr + m.to(tl.int64)[:, None] * R
        b_row = b_ptr + e * stride_be + n_in[:, None] * stride_bn
        for r0 in tl.range(0, R, BR, num_stages=1):
            r = r0 + tl.arange(0, BR)
            ranks = (r < R)[None, :]
            t = tl.load(t_row + r[None, :], mask=(m < end)[:, None] & ranks, other=0.0)
            b = tl.load(b_row + r.to(tl.int64)[None, :] * stride_br, mask=ranks, other=0.0)
            acc = _dot(t, tl.trans(b), acc, INTERPRETED)
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "run"])
def _factor_grad_kernel(
    p_ptr,  # (T, P)
    q_ptr,  # (T, Q)
    offsets_ptr,  # (E + 1,) int32
    out_ptr,  # (planes, P, Q)
    rows,
    groups,
    run,  # rows of one plane (SHARED)
    P,
    Q,
    tiles_q,
    stride_pm,
    stride_pc,
    stride_qm,
    stride_qc,
    SHARED: tl.constexpr,
    BP: tl.constexpr,
    BQ: tl.constexpr,
    BT: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (tiles of P times tiles_q, planes): ``p.T @ q`` over the rows of one expert, or of one run of all rows."""
    plane = tl.program_id(1).to(tl.int64)
    if SHARED:
        begin = (plane * run).to(tl.int32)
        end = tl.minimum(begin + run, tl.minimum(tl.load(offsets_ptr + groups), rows))
    else:
        begin = tl.load(offsets_ptr + plane)
        end = tl.minimum(tl.load(offsets_ptr + plane + 1), rows)
    i = (tl.program_id(0) // tiles_q) * BP + tl.arange(0, BP)
    j = (tl.program_id(0) % tiles_q) * BQ + tl.arange(0, BQ)
    p_col = p_ptr + i.to(tl.int64)[None, :] * stride_pc
    q_col = q_ptr + j.to(tl.int64)[None, :] * stride_qc
    acc = tl.zeros((BP, BQ), tl.float32)
    for first in tl.range(begin, end, BT, num_stages=STAGES):
        row = first + tl.arange(0, BT)
        at = row.to(tl.int64)[:, None]
        inside = (row < end)[:, None]
        p = tl.load(p_col + at * stride_pm, mask=inside & (i < P)[None, :], other=0.0)
        q = tl.load(q_col + at * stride_qm, mask=inside & (j < Q)[None, :], other=0.0)
        acc = _dot(tl.trans(p), q, acc, INTERPRETED)
    out = out_ptr + (plane * P + i.to(tl.int64)[:, None]) * Q + j[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(i < P)[:, None] & (j < Q)[None, :])


def _rank_tile(rank: int, most: int) -> int:
    return min(max(16, triton.next_power_of_2(rank)), most)


def _tiles(rows: int, groups: int, bm: int) -> int:
    """Every group that has rows adds at most one short tile; rows behind the last offset fit in what that leaves."""
    return triton.cdiv(rows, bm) + min(groups, rows)


def _per_expert(factor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of a factor, that of the experts 0 where they share it."""
    return (0 if factor.shape[0] == 1 else factor.stride(0), factor.stride(1), factor.stride(2))


def _shrink(x: torch.Tensor, a: torch.Tensor, offsets: torch.Tensor, scale: float) -> torch.Tensor:
    """``scale * x @ a[e].T``, fp32 (T, R), from x (T, K) and a (E|1, R, K); rows of no group are not initialised."""
    (rows, k), groups, rank = x.shape, offsets.shape[0] - 1, a.shape[1]
    interpreted = x.device.type != "cuda"
    br = _rank_tile(rank, 128)
    if interpreted:
        bm, br, bk, stages = 16, min(br, 32), 64, 1
    elif x.dtype == torch.float32 or a.dtype == torch.float32:
        bm, br, bk, stages = 32, min(br, 64), 64, 3
    else:
        bm, bk, stages = (32, 128, 4) if br <= 64 else (64, 64, 4)
    t = torch.empty(rows, rank, dtype=torch.float32, device=x.device)
    if rows == 0:
        return t
    tiles_m = _tiles(rows, groups, bm)
    _shrink_kernel[(tiles_m, triton.cdiv(rank, br))](
        x,
        a,
        offsets,
        t,
        rows,
        groups,
        k,
        scale,
        tiles_m,
        *x.stride(),
        *_per_expert(a),
        R=rank,
        TURNED=a.stride(2) != 1 and a.stride(1) == 1,
        GROUPS_P2=triton.next_power_of_2(groups + 1),
        EVEN_K=k % bk == 0,
        BM=bm,
        BR=br,
        BK=bk,
        STAGES=stages,
        INTERPRETED=interpreted,
        num_warps=4,
    )
    return t


def _project(
    x: torch.Tensor,
    w: torch.Tensor,
    t: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype,
    config: GroupedLoRAConfig | None = None,
) -> torch.Tensor:
    """``x @ w[e].T + t @ b[e].T`` rounded once, (T, N), from x (T, K), w (E, N, K), t fp32 (T, R) and b (E|1, N, R)."""
    (rows, k), (groups, n, _), rank = x.shape, w.shape, t.shape[1]
    turned = w.stride(2) != 1 and w.stride(1) == 1
    if config is None:
        wide = torch.float32 in (x.dtype, w.dtype) or x.dtype != w.dtype
        config = GroupedLoRAConfig.pick(rows, groups, n, k, turned=turned, wide=wide, device=x.device)
    x_desc, w_desc = _descriptor(x, [config.bm, config.bk]), _stack_descriptor(w, config.bn, config.bk)
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    if rows == 0:
        return out
    tiles_m, tiles_n = _tiles(rows, groups, config.bm), triton.cdiv(n, config.bn)
    _project_kernel[(tiles_m * tiles_n,)](
        x if x_desc is None else x_desc,
        w if w_desc is None else w_desc,
        t,
        b,
        offsets,
        out,
        rows,
        groups,
        n,
        k,
        tiles_m,
        tiles_n,
        *x.stride(),
        *w.stride(),
        *_per_expert(b),
        out.stride(0),
        R=rank,
        X_TMA=x_desc is not None,
        W_TMA=w_desc is not None,
        TURNED=turned,
        EVEN_K=k % config.bk == 0,
        EVEN_N=n % config.bn == 0,
        GROUPS_P2=triton.next_power_of_2(groups + 1),
        RUN=max(1, 1024 // config.bm),
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        BR=_rank_tile(rank, 32 if torch.float32 in (x.dtype, b.dtype) else 64),
        STAGES=config.stages,
        INTERPRETED=x.device.type != "cuda",
        num_warps=config.warps,
    )
    return out


def _factor_grad(
    p: torch.Tensor, q: torch.Tensor, offsets: torch.Tensor, shared: bool, dtype: torch.dtype
) -> torch.Tensor:
    """``p.T @ q`` over the rows of each expert, (E, P, Q), or over all rows of any expert, (1, P, Q)."""
    rows, groups = p.shape[0], offsets.shape[0] - 1
    rows_of_run = max(RUN_ROWS, triton.cdiv(rows, MOST_RUNS))
    planes = max(1, triton.cdiv(rows, rows_of_run)) if shared else groups
    size_p, size_q = p.shape[1], q.shape[1]
    interpreted = p.device.type != "cuda"
    if interpreted:
        bp, bq, bt, warps, stages = 64, 64, 16, 4, 1
    elif p.dtype == q.dtype == torch.float32:
        bp, bq, bt, warps, stages = _rank_tile(size_p, 64), _rank_tile(size_q, 64), 32, 4, 2
    else:
        bp, bq, bt, stages = _rank_tile(size_p, 128), _rank_tile(size_q, 128), 64, 3
        warps = 8 if bp == bq == 128 else 4
    out = torch.empty(planes, size_p, size_q, dtype=torch.float32 if shared and planes > 1 else dtype, device=p.device)
    tiles_p, tiles_q = triton.cdiv(size_p, bp), triton.cdiv(size_q, bq)
    _factor_grad_kernel[(tiles_p * tiles_q, planes)](
        p,
        q,
        offsets,
        out,
        rows,
        groups,
        rows_of_run,
        size_p,
        size_q,
        tiles_q,
        *p.stride(),
        *q.stride(),
        SHARED=shared,
        BP=bp,
        BQ=bq,
        BT=bt,
        STAGES=stages,
        INTERPRETED=interpreted,
        num_warps=warps,
    )
    return out.sum(0, keepdim=True).to(dtype) if shared and planes > 1 else out


class _GroupedLinearLoRA(torch.autograd.Function):
    """``pair`` is the weight where ``w`` is None; ``mxfp8`` quantises the operands of w's products."""

    @staticmethod
    def forward(ctx, x, w, offsets, a, b, scale, pair, mxfp8, dtype):
        with _on_device(x.device):
            t = _shrink(x, a, offsets, scale)
            rows, weight = x, w
            if mxfp8:
                rows = fake_quantize(x)
                weight = fake_quantize(w) if pair is None else dequantize_groups(pair[0], offsets)
            y = _project(rows, weight, t, b, offsets, dtype)
        ctx.save_for_backward(x, w, offsets, a, b, t if ctx.needs_input_grad[4] else None)
        ctx.scale, ctx.pair, ctx.mxfp8 = scale, pair, mxfp8
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w, offsets, a, b, t = ctx.saved_tensors
        need_x, need_w, _, need_a, need_b = ctx.needs_input_grad[:5]
        dx = dw = da = db = None
        with _on_device(x.device):
            if need_x or need_a:
                u = _shrink(dy, b.mT, offsets, ctx.scale)
            if need_x:
                rows, weight = dy, w
                if ctx.mxfp8:
                    rows = fake_quantize(dy.contiguous())
                    weight = dequantize_groups(ctx.pair[1].mT, offsets).mT if ctx.pair else fake_quantize(w, axis=-2)
                dx = _project(rows, weight.mT, u, a.mT, offsets, x.dtype)
            if need_a:
                da = _factor_grad(u, x, offsets, a.shape[0] == 1, a.dtype)
            if need_b:
                db = _factor_grad(dy, t, offsets, b.shape[0] == 1, b.dtype)
            if need_w and ctx.mxfp8:
                columns = (fake_quantize(v, axis=-2, offsets=offsets) for v in (dy.contiguous(), x))
                dw = grouped_wgrad(*columns, offsets, out_dtype=w.dtype)
            elif need_w and dy.dtype == x.dtype and x.dtype != torch.float32:
                dw = grouped_wgrad(dy, x, offsets, out_dtype=w.dtype)
            elif need_w:
                dw = _factor_grad(dy, x, offsets, False, w.dtype)
        return dx, dw, None, da, db, None, None, None, None


def _require(ok: bool, argument: str, wanted: str, got: object) -> None:
    if not ok:
        raise ValueError(f"grouped_linear_lora: {argument} must be {wanted}, got {got}")


def _matrices(name: str, t: object, dims: int, shape: str, device: torch.device) -> None:
    _require(isinstance(t, torch.Tensor), name, "a tensor", type(t).__name__)
    assert isinstance(t, torch.Tensor)
    _require(t.dim() == dims, name, shape, f"shape {tuple(t.shape)}")
    _require(t.dtype in DTYPES, name, "bf16, fp16 or fp32", t.dtype)
    _require(t.device == device, name, f"on x's device {device}", t.device)


def _check(x, w, offsets, a, b, scale, mxfp8, out_dtype) -> None:
    _require(isinstance(x, torch.Tensor), "x", "a tensor", type(x).__name__)
    device = x.device
    _matrices("x", x, 2, "(T, K)", device)
    if isinstance(w, tuple):
        pair = len(w) == 2 and all(isinstance(t, MXFP8Tensor) and t.ndim == 3 for t in w)
        _require(pair, "w", "a tensor or a pair (row, col) of MXFP8Tensor (E, N, K)", tuple(map(type, w)))
        row, col = w
        plain = row.offsets is None and col.offsets is None and not row.swizzled and not col.swizzled
        fits = row.axis == -1 and col.axis == -2 and row.shape == col.shape and plain
        _require(fits, "w", "(row, col) of one shape with blocks along axis -1 and -2, not swizzled", f"{row}, {col}")
        _require(row.device == col.device == device, "w", f"on x's device {device}", f"{row.device}, {col.device}")
        shape = row.shape
    else:
        _matrices("w", w, 3, "(E, N, K)", device)
        shape = w.shape
    experts, n, k = shape
    _require(1 <= experts <= MAX_EXPERTS, "w", f"of 1 to {MAX_EXPERTS} experts", experts)
    _require(n >= 1 and k >= 1, "w", "of N and K from 1 up", tuple(shape))
    if mxfp8 or isinstance(w, tuple):
        _require(n % BLOCK == k % BLOCK == 0, "w", f"of N and K divisible by {BLOCK} in MXFP8", tuple(shape))
    _require(x.shape[1] == k, "x", f"(T, K={k}) to fit w", tuple(x.shape))
    _matrices("a", a, 3, "(E, R, K) or (1, R, K)", device)
    rank = a.shape[1]
    _require(1 <= rank <= MAX_RANK, "a", f"of rank 1 to {MAX_RANK}", rank)
    _require(a.shape[0] in (1, experts) and a.shape[2] == k, "a", f"({experts} or 1, R, {k})", tuple(a.shape))
    _matrices("b", b, 3, "(E, N, R) or (1, N, R)", device)
    _require(
        b.shape[0] in (1, experts) and tuple(b.shape[1:]) == (n, rank),
        "b",
        f"({experts} or 1, {n}, {rank})",
        tuple(b.shape),
    )
    _require(isinstance(offsets, torch.Tensor), "offsets", "a tensor", type(offsets).__name__)
    _require(
        offsets.dtype == torch.int32 and tuple(offsets.shape) == (experts + 1,) and offsets.is_contiguous(),
        "offsets",
        f"contiguous int32 ({experts + 1},)",
        f"{offsets.dtype} {tuple(offsets.shape)} of strides {offsets.stride()}",
    )
    _require(offsets.device == device, "offsets", f"on x's device {device}", offsets.device)
    _require(isinstance(scale, (int, float)) and math.isfinite(scale), "scale", "a finite number", scale)
    _require(out_dtype in DTYPES, "out_dtype", "bf16, fp16 or fp32", out_dtype)
    require_device("grouped_linear_lora", "x", x)
    if env.flag("CHECK"):
        require_ends("grouped_linear_lora", offsets, x.shape[0])


def grouped_linear_lora(
    x: torch.Tensor,
    w: Weight,
    offsets: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale: float = 1.0,
    mxfp8: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x @ w[e].T + scale * (x @ a[e].T) @ b[e].T`` for the rows of each expert e, with gradients.

    Args:
        x: (T, K) bf16, fp16 or fp32 of any strides, rows sorted by expert; T may be 0. dx has its dtype.
        w: (E, N, K) bf16, fp16 or fp32 of any strides; dw, formed only where w requires a gradient, has its dtype. Or a
            pair ``(row, col)`` of `MXFP8Tensor`, ``quantize_both(w)``: MXFP8 with frozen weights.
        offsets: int32 (E + 1,), contiguous, on x's device: 0, then the end of each expert's rows, never falling, at
            most T. Experts may have no row; their gradients are zeros. Rows behind the last offset give zeros, get
            zeros as dx, and are in no other gradient.
        a: (E, R, K), or (1, R, K) shared by all experts, R from 1 to 512; bf16, fp16 or fp32 of any strides.
        b: (E, N, R), or (1, N, R) shared by all experts, likewise.
        scale: of the adapter, such as alpha / R.
        mxfp8: the products with a dense w are in MXFP8, as those of `mxfp8.grouped_linear`: x, w and dy are quantised
            along the axis that each product sums over. N and K must be divisible by 32. The adapter's products never
            are. bf16 values of one quantised w (2 bytes an element) live for the length of a pass, with a pair too.
        out_dtype: of the result; x's by default.

    Returns:
        (T, N), summed in fp32 and rounded once.

    16-bit operands of one dtype go to the tensor cores as they are; an fp32 one beside bf16 as two bf16 terms; any
    other pair of dtypes through TF32 in three products.

    Raises:
        ValueError: an argument does not fit the above. With ``BEAM_MOE_CHECK=1`` also offsets that fall or exceed T.
    """
    out_dtype = x.dtype if out_dtype is None and isinstance(x, torch.Tensor) else out_dtype
    _check(x, w, offsets, a, b, scale, mxfp8, out_dtype)
    dense, pair = (None, w) if isinstance(w, tuple) else (w, None)
    return _GroupedLinearLoRA.apply(x, dense, offsets, a, b, float(scale), pair, mxfp8 or pair is not None, out_dtype)
