"""Grouped GEMM over experts with MXFP8 weights: one matrix per group of rows, group sizes known on the device only.

Rows are sorted by expert: group e owns rows ``offsets[e] : offsets[e + 1]``, ``offsets[0]`` is 0 and the last offset
may lie below the number of rows. Nothing here reads an offset on the host. Numerics are those of `gemm`; the routes are

===============  =======================================================================================================
``bf16``         One Triton launch that decodes weights in registers and skips experts without rows. The grid is an
                 upper bound on the number of tiles; each program finds its expert from the offsets.
``fp16``         The same with the fp16 form of `decode_block`, for weights that went through `prepare`.
``dequantize``   Experts that have rows to bf16 in memory, then PyTorch's grouped bf16 GEMM (CUTLASS on Hopper).
===============  =======================================================================================================
"""

import torch
import triton
import triton.language as tl

from beam_moe import env
from beam_moe.kernels import tuning
from beam_moe.kernels.checks import refuse_gradient, refuse_overlap, require_device, require_ends
from beam_moe.kernels.launch import supports_pdl
from beam_moe.kernels.mxfp8.decode_block import bits_if_soft, normalize_rows, weights_bf16
from beam_moe.kernels.mxfp8.format import BLOCK, MXFP8Tensor, _require, _require_mxfp8, _require_tensor
from beam_moe.kernels.mxfp8.gemm import (
    DECODE_ROWS,
    OUT_DTYPES,
    ROW_CLASSES,
    GemmConfig,
    _capability,
    _check,
    _check_words,
    _contracting,
    _descriptor,
    _serves,
    _stack_descriptor,
    _values,
    tile_constants,
)
from beam_moe.kernels.mxfp8.quantize import _soft, _store_values, _to_float, dequantize
from beam_moe.kernels.mxfp8.tile import finished_product, rows_within, tile_place

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
DEQUANTIZE_ROWS = 1024  # rows a group on average from which PyTorch's grouped GEMM on a bf16 copy is faster
KEPT_ROWS = 256  # the same where the caller keeps that copy
TRAINS = "mxfp8.grouped_linear trains"


def choose_grouped(
    rows: int,
    groups: int,
    n: int,
    k: int,
    device: torch.device,
    *,
    x_dtype: torch.dtype,
    prepared: bool,
    plain: bool,
    turned: bool,
    kept: bool = False,
) -> GemmConfig:
    """The configuration of a grouped call: tuned if this device's table has the shape, else by the rules below.

    Args:
        rows: of all groups together, bounded by the host; ``rows / groups`` decides the tile.
        plain: no bias and a bf16 result, which the route ``dequantize`` asks for.
        turned: the weights lie with N contiguous, as a dgrad's do.
        kept: the caller has a bf16 copy of the weights.
    """
    per_group = triton.cdiv(rows, groups)
    library = _grouped_mm is not None and _capability(device)[0] >= 9 and n % 8 == 0 and k % 8 == 0
    if plain and library and x_dtype == torch.bfloat16 and per_group >= (KEPT_ROWS if kept else DEQUANTIZE_ROWS):
        return GemmConfig("dequantize")
    route = "fp16" if prepared else "bf16"
    shape = {"groups": groups, "n": n, "k": k, "route": route, "turned": int(turned)}
    tuned = tuning.lookup(device if device.type == "cuda" else None, "mxfp8_grouped", per_group, **shape)
    bm = next((c for c in ROW_CLASSES if per_group <= c), ROW_CLASSES[-1])
    if tuned is not None and _serves(tuned, per_group, x_dtype):
        # an entry for many more rows would leave most of its tile empty
        if tuned["bm"] <= 4 * bm and (tuned["route"] != "dequantize" or (plain and library)):
            return GemmConfig(**tuned)
    if bm <= DECODE_ROWS:
        bn, bk, warps, stages = 64, 256 if bm <= 32 else 128, 4, 3 if bm <= 32 else 4
    else:
        bn, bk, warps, stages = 128, 128, 8, 3
        if _capability(device)[0] == 9:
            # two programs of four warps share an SM, one decodes while the other multiplies; masks along K and the two
            # terms of fp16 activations need more registers than that leaves. Normalising so many tokens for the fp16
            # form costs more than it gains
            route = "bf16" if x_dtype == torch.bfloat16 else route
            bk, stages = 64, 4
            warps = 4 if x_dtype == torch.bfloat16 and k % bk == 0 else 8
    if _soft(device):
        bm, bn, bk, stages = min(bm, 32), 64, 128, 1
    return GemmConfig(route, bm, bn, min(bk, max(BLOCK, triton.next_power_of_2(k))), 1, warps, stages)


@triton.jit
def _group_of_tile(offsets_ptr, tile, groups, rows, BM: tl.constexpr, GROUPS_P2: tl.constexpr):
    """(group, first row, end row) of a tile of BM rows; the rows behind the last offset are group ``groups``."""
    g = tl.arange(0, GROUPS_P2)
    start = tl.load(offsets_ptr + g, mask=g <= groups, other=0)
    stop = tl.load(offsets_ptr + g + 1, mask=g < groups, other=0)
    stop = tl.minimum(tl.where(g < groups, stop, tl.where(g == groups, rows, 0)), rows)
    start = tl.where(g <= groups, start, 0)
    tiles = (tl.maximum(stop - start, 0) + BM - 1) // BM
    upto = tl.cumsum(tiles, axis=0)
    group = tl.sum((upto <= tile).to(tl.int32), axis=0)
    before = tl.max(tl.where(g < group, upto, 0), axis=0)
    first = tl.sum(tl.where(g == group, start, 0), axis=0) + (tile - before) * BM
    end = tl.sum(tl.where(g == group, stop, 0), axis=0)
    return group, first, end


@triton.jit
def _grouped_kernel(
    x,  # (T, K): descriptor or pointer
    w,  # (E, N, K) uint8 codes: descriptor of (E * N, K), or pointer
    s_ptr,  # (E, N, K/32) uint8
    raw_ptr,  # (T, K)
    word_ptr,  # (E, N) int16
    token_ptr,  # (T,) int32
    bias_ptr,  # (E, N)
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
    stride_rm,
    stride_rk,
    stride_we,
    stride_wn,
    stride_wk,
    stride_se,
    stride_sn,
    stride_sk,
    stride_om,
    FP16: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BIAS: tl.constexpr,
    E5M2: tl.constexpr,
    SOFT: tl.constexpr,
    X_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    TURNED: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    AHEAD: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    RUN: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles_m * tiles_n,), tiles_m an upper bound: programs without rows return, those behind write zeros."""
    tile_m, tile_n = tile_place(tl.program_id(0), tiles_m, tiles_n, RUN)
    group, first, end = _group_of_tile(offsets_ptr, tile_m, groups, rows, BM, GROUPS_P2)
    if group > groups:
        return
    m = first + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    at = m.to(tl.int64)[:, None] * stride_om + n[None, :]
    mask = (m < end)[:, None] & (n < N)[None, :]
    if group == groups:
        _store_values(out_ptr + at, tl.zeros((BM, BN), tl.float32), mask, SOFT)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        wide = group.to(tl.int64)
        acc = finished_product(
            x, w if W_TMA else w + wide * stride_we, s_ptr + wide * stride_se, raw_ptr, word_ptr + wide * N, token_ptr,
            first, tl.minimum(m, rows - 1).to(tl.int64),
            tile_n * BN if TURNED else group * N + tile_n * BN, group * K, rows_within(n, N, EVEN_N),
            0, K, K,
            stride_xm, stride_xk, stride_rm, stride_rk, stride_wn, stride_wk, stride_sn, stride_sk,
            FP16, NORMALIZED, E5M2, SOFT, X_TMA, W_TMA, TURNED, EVEN_K, AHEAD, BM, BN, BK, STAGES,
        )  # fmt: skip
        if BIAS:
            acc += tl.load(bias_ptr + wide * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        _store_values(out_ptr + at, acc.T, mask, SOFT)


def _fused(x: torch.Tensor, b: MXFP8Tensor, offsets, bias, out: torch.Tensor, config: GemmConfig) -> None:
    (rows, k), (groups, n, _) = x.shape, b.shape
    soft = _soft(x.device)
    fp16 = config.route == "fp16"
    normalized = fp16 and x.dtype == torch.bfloat16
    pdl = normalized and supports_pdl(x.device)
    xn, tokens = normalize_rows(x, pdl=pdl) if normalized else (x, None)
    codes = b.data.view(torch.uint8)
    x_desc, w_desc = _descriptor(xn, [config.bm, config.bk]), _stack_descriptor(codes, config.bn, config.bk)
    turned = codes.stride(2) != 1
    # every group that has rows adds at most one short tile; rows behind the last offset fit in what that leaves over
    tiles_m = triton.cdiv(rows, config.bm) + min(groups, rows)
    tiles_n = triton.cdiv(n, config.bn)
    _grouped_kernel[(tiles_m * tiles_n,)](
        bits_if_soft(xn, soft) if x_desc is None else x_desc,
        codes if w_desc is None else w_desc,
        b.scale,
        bits_if_soft(x, soft),
        b.rows if fp16 else b.scale,
        tokens if normalized else b.scale,
        b.scale if bias is None else bias,
        offsets,
        bits_if_soft(out, soft),
        rows,
        groups,
        n,
        k,
        tiles_m,
        tiles_n,
        *xn.stride(),
        *x.stride(),
        *codes.stride(),
        *b.scale.stride(),
        out.stride(0),
        NORMALIZED=normalized,
        BIAS=bias is not None,
        SOFT=soft,
        X_TMA=x_desc is not None,
        W_TMA=w_desc is not None,
        TURNED=turned,
        GROUPS_P2=triton.next_power_of_2(groups + 1),
        RUN=max(1, 1024 // config.bm),
        PDL=pdl,
        **tile_constants(b, config),
        **({"launch_pdl": True} if pdl else {}),
    )


@triton.jit
def _dequantize_groups_kernel(
    code_ptr,  # (E, N, K)
    scale_ptr,  # (E, N, K/32)
    offsets_ptr,
    out_ptr,  # (E, N, K)
    N,
    K,
    tiles_k,
    stride_we,
    stride_wn,
    stride_wk,
    stride_se,
    stride_sn,
    stride_sk,
    stride_oe,
    stride_on,
    stride_ok,
    E5M2: tl.constexpr,
    SOFT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Grid (tiles_n * tiles_k, E): one tile of one expert to bf16, if the expert has rows."""
    group = tl.program_id(1)
    if tl.load(offsets_ptr + group + 1) <= tl.load(offsets_ptr + group):
        return
    e = group.to(tl.int64)
    n = (tl.program_id(0) // tiles_k).to(tl.int64) * BN + tl.arange(0, BN)
    k = (tl.program_id(0) % tiles_k).to(tl.int64) * BK + tl.arange(0, BK)
    b = (tl.program_id(0) % tiles_k).to(tl.int64) * (BK // 32) + tl.arange(0, BK // 32)
    mask = (n < N)[:, None] & (k < K)[None, :]
    code = tl.load(code_ptr + e * stride_we + n[:, None] * stride_wn + k[None, :] * stride_wk, mask=mask, other=0)
    at = e * stride_se + n[:, None] * stride_sn + b[None, :] * stride_sk
    s = tl.load(scale_ptr + at, mask=(n < N)[:, None] & (b * 32 < K)[None, :], other=127)
    at = e * stride_oe + n[:, None] * stride_on + k[None, :] * stride_ok
    _store_values(out_ptr + at, weights_bf16(code, s, E5M2, SOFT), mask, SOFT)


def dequantize_groups(b: MXFP8Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """bf16 values of the experts that have rows, (E, N, K) in the order in which b lies; the others stay uninitialised.

    Args:
        b: (E, N, K) with blocks along axis -1. offsets: i32 (E + 1,).
    """
    groups, n, k = b.shape
    turned = b.data.stride(-1) != 1 and b.data.stride(-2) == 1
    shape = (groups, k, n) if turned else (groups, n, k)
    out = torch.empty(shape, dtype=torch.bfloat16, device=b.device)
    out = out.mT if turned else out
    soft = _soft(b.device)
    image = bits_if_soft(out, soft)
    codes = b.data.view(torch.uint8)
    bn, bk = (128, 32) if turned else (16, 256)
    tiles_n, tiles_k = triton.cdiv(n, bn), triton.cdiv(k, bk)
    _dequantize_groups_kernel[(tiles_n * tiles_k, groups)](
        codes,
        b.scale,
        offsets,
        image,
        n,
        k,
        tiles_k,
        *codes.stride(),
        *b.scale.stride(),
        *image.stride(),
        E5M2=b.elem == "e5m2",
        SOFT=soft,
        BN=bn,
        BK=bk,
        num_warps=4,
    )
    return out


@triton.jit
def _zero_tail_kernel(out_ptr, offsets_ptr, rows, groups, N, stride_om, SOFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid (cdiv(rows, 16),): zeros for rows behind the last offset."""
    end = tl.load(offsets_ptr + groups)
    first = tl.program_id(0) * 16
    if first + 16 <= end:
        return
    m = first + tl.arange(0, 16)
    for begin in range(0, N, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        mask = ((m >= end) & (m < rows))[:, None] & (n < N)[None, :]
        at = m.to(tl.int64)[:, None] * stride_om + n[None, :]
        _store_values(out_ptr + at, tl.zeros((16, BLOCK_N), tl.float32), mask, SOFT)


def _zero_tail(out: torch.Tensor, offsets: torch.Tensor) -> None:
    soft = _soft(out.device)
    rows, n = out.shape
    _zero_tail_kernel[(triton.cdiv(rows, 16),)](
        bits_if_soft(out, soft), offsets, rows, offsets.shape[0] - 1, n, out.stride(0), SOFT=soft, BLOCK_N=256
    )


def grouped_matmul_fits(w: torch.Tensor | MXFP8Tensor, x_dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether `grouped_matmul` takes weights of w's shape (E, N, K) on w's device, and results in ``x_dtype``."""
    return (
        _grouped_mm is not None
        and _capability(w.device)[0] >= 9
        and x_dtype == torch.bfloat16
        and w.shape[1] % 8 == 0
        and w.shape[2] % 8 == 0
    )


def _rows_suit_grouped_mm(x: torch.Tensor) -> bool:
    """Whether PyTorch's grouped GEMM takes a matrix where it lies: rows apart, each 16-byte aligned."""
    size = x.element_size()
    rows = x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) * size % 16 == 0
    return rows and x.data_ptr() % 16 == 0


def grouped_matmul(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """PyTorch's grouped GEMM of dense bf16 x (T, K) and w (E, N, K), zeros in rows behind the last offset.

    It wants rows of stride 1, apart and 16-byte aligned: another x is copied first.
    """
    if x.shape[0] == 0:
        return torch.empty(0, w.shape[1], dtype=x.dtype, device=x.device) if out is None else out
    if not _rows_suit_grouped_mm(x):
        x = x.clone(memory_format=torch.contiguous_format)
    y = _grouped_mm(x, w.mT, offs=offsets[1:])
    if out is not None:
        y = out.copy_(y)
    _zero_tail(y, offsets)
    return y


def _check_offsets(op: str, offsets: torch.Tensor, groups: int | None, rows: int, device: torch.device) -> None:
    _require_tensor(op, offsets=offsets)
    _require(
        offsets.dtype == torch.int32 and offsets.ndim == 1 and offsets.shape[0] >= 2 and offsets.is_contiguous(),
        f"{op}: offsets must be contiguous int32 (groups + 1,), got {offsets.dtype} {tuple(offsets.shape)}",
    )
    _require(
        groups is None or offsets.shape[0] == groups + 1,
        f"{op}: offsets must have {groups} + 1 entries for b's {groups} groups, got {offsets.shape[0]}",
    )
    _require(offsets.device == device, f"{op}: offsets are on {offsets.device}, the operands on {device}")
    if env.flag("CHECK"):
        require_ends(op, offsets, rows)


def grouped_gemm(
    a: torch.Tensor | MXFP8Tensor,
    b: MXFP8Tensor,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    b_dense: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """``out[i] = a[i] @ b[e].T + bias[e]`` for the rows i of each group e, in fp32, rounded once.

    Operands count as in `gemm`. Rows behind the last offset are written as zeros.

    Args:
        a: (T, K) bf16 or fp16 with any strides, or `MXFP8Tensor` with blocks along K; rows sorted by group. T may be 0.
        b: (E, N, K) `MXFP8Tensor` with blocks along axis -1, or (E, K, N) with blocks along axis -2; any strides, so
            ``w.mT`` of columnwise quantised weights serves a dgrad. After `prepare` the fp16 form is used, for which
            ``b.rows`` must be contiguous.
        offsets: i32 (E + 1,) on a's device: 0, then the end of each group, never falling, at most T.
        bias: (E, N) bf16, fp16 or fp32, contiguous.
        out: (T, N) bf16, fp16 or fp32, last stride 1, written in full; ``out_dtype`` is then not read.
        b_dense: bf16 (E, N, K), ``dequantize(b)`` kept by the caller: large calls then dequantise nothing.
        config: launch configuration instead of `choose_grouped`'s. The split of K is not used here.

    The route ``dequantize`` holds a bf16 copy of b (2 bytes an element) for the length of the call; the others allocate
    what `gemm`'s do.

    Raises:
        ValueError: an argument does not fit the above, ``out`` lies in an operand's memory, or a gradient is expected.
            With ``BEAM_MOE_CHECK=1`` also offsets that fall or exceed T: kernels trust them.
    """
    op = "grouped_gemm"
    _require_mxfp8(op, b=b)
    if not isinstance(a, MXFP8Tensor):
        _require_tensor(op, a=a)
    _require(
        a.ndim == 2 and b.ndim == 3, f"{op}: a must be (T, K), b (E, N, K), got {tuple(a.shape)}, {tuple(b.shape)}"
    )
    b = _contracting(op, "b", b)
    mx = isinstance(a, MXFP8Tensor)
    if mx:
        a = _contracting(op, "a", a)
    else:
        _require(a.dtype in (torch.bfloat16, torch.float16), f"{op}: a must be bf16, fp16 or MXFP8, got {a.dtype}")
    _check(op, TRAINS, a, b, bias, out, out_dtype, b_dense, config)
    (rows, k), (groups, n, _) = a.shape, b.shape
    _check_offsets(op, offsets, groups, rows, a.device)
    if b_dense is not None:
        _require(
            b_dense.is_contiguous() or b_dense.mT.is_contiguous(),
            f"{op}: b_dense must be contiguous with its last two axes in either order, got strides {b_dense.stride()}",
        )
    target = out_dtype if out is None else out.dtype
    if rows == 0 or n == 0:
        return torch.empty(rows, n, dtype=target, device=a.device) if out is None else out
    x_dtype = torch.bfloat16 if mx else a.dtype
    if config is None:
        config = choose_grouped(
            rows,
            groups,
            n,
            k,
            a.device,
            x_dtype=x_dtype,
            prepared=b.rows is not None,
            plain=bias is None and target == torch.bfloat16,
            turned=b.data.stride(2) != 1,
            kept=b_dense is not None,
        )
    _require(
        config.route in ("bf16", "fp16", "dequantize"),
        f"{op}: config.route must be bf16, fp16 or dequantize, got {config.route!r}",
    )
    _check_words(op, b, config)
    x = dequantize(a) if mx else a
    if config.route == "dequantize":
        _require(
            bias is None and target == x_dtype == torch.bfloat16,
            f"{op}: route dequantize takes bf16 or MXFP8 to bf16 without bias, got {x_dtype} to {target}",
        )
        _require(
            a.device.type != "cuda" or grouped_matmul_fits(b),
            f"{op}: route dequantize needs sm_90 or later and N and K divisible by 8, got N = {n} and K = {k}",
        )
        return grouped_matmul(x, dequantize_groups(b, offsets) if b_dense is None else b_dense, offsets, out)
    if out is None:
        out = torch.empty(rows, n, dtype=target, device=a.device)
    _fused(x, b, offsets, bias, out, config)
    return out


@triton.jit
def _wgrad_kernel(
    dy_ptr,  # (T, N)
    x_ptr,  # (T, K)
    offsets_ptr,
    out_ptr,  # (E, N, K)
    N,
    K,
    tiles_n,
    tiles_k,
    stride_ym,
    stride_yn,
    stride_xm,
    stride_xk,
    stride_oe,
    stride_on,
    SOFT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles_n * tiles_k, E): one tile of one expert's gradient, summed over the expert's rows."""
    tile_n, tile_k = tile_place(tl.program_id(0), tiles_n, tiles_k, 8)
    e = tl.program_id(1).to(tl.int64)
    begin = tl.load(offsets_ptr + e)
    end = tl.load(offsets_ptr + e + 1)
    n = tile_n * BN + tl.arange(0, BN)
    k = tile_k * BK + tl.arange(0, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    for first in tl.range(begin, end, BT, num_stages=STAGES):
        t = first + tl.arange(0, BT)
        row = t.to(tl.int64)[:, None]
        dy = tl.load(
            dy_ptr + row * stride_ym + n.to(tl.int64)[None, :] * stride_yn,
            mask=(t < end)[:, None] & (n < N)[None, :],
            other=0,
        )
        x = tl.load(
            x_ptr + row * stride_xm + k.to(tl.int64)[None, :] * stride_xk,
            mask=(t < end)[:, None] & (k < K)[None, :],
            other=0,
        )
        if SOFT:
            dy = _to_float(dy)
            x = _to_float(x)
        acc = tl.dot(dy.T, x, acc)
    at = e * stride_oe + n.to(tl.int64)[:, None] * stride_on + k[None, :]
    _store_values(out_ptr + at, acc, (n < N)[:, None] & (k < K)[None, :], SOFT)


@triton.jit
def _zero_empty_kernel(out_ptr, offsets_ptr, size, SOFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid (programs, E): zeros for the groups without rows."""
    e = tl.program_id(1).to(tl.int64)
    if tl.load(offsets_ptr + e + 1) > tl.load(offsets_ptr + e):
        return
    for first in range(tl.program_id(0) * BLOCK_N, size, tl.num_programs(0) * BLOCK_N):
        i = first + tl.arange(0, BLOCK_N).to(tl.int64)
        _store_values(out_ptr + e * size + i, tl.zeros((BLOCK_N,), tl.float32), i < size, SOFT)


def grouped_wgrad(
    dy: torch.Tensor | MXFP8Tensor,
    x: torch.Tensor | MXFP8Tensor,
    offsets: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    library: bool | None = None,
) -> torch.Tensor:
    """``out[e] = dy[rows of e].T @ x[rows of e]``, in fp32, rounded once; zeros for groups without rows.

    Args:
        dy: (T, N), x: (T, K): both bf16 or both fp16 with any strides, or `MXFP8Tensor` with blocks along the rows of
            each group (``quantize_both(..., offsets=offsets)``), whose values count as `dequantize` to bf16 gives them.
        offsets: i32 (E + 1,); rows behind the last offset are not read into any sum.
        out: (E, N, K) bf16, fp16 or fp32, contiguous, written in full; ``out_dtype`` is then not read.
        library: whether PyTorch's grouped GEMM computes it (bf16 only) or our Triton kernel; None picks.

    MXFP8 operands are held as bf16 for the length of the call.

    Raises:
        ValueError: as `grouped_gemm`; with ``BEAM_MOE_CHECK=1`` also operands quantised with other offsets.
    """
    op = "grouped_wgrad"
    _require_tensor(op, **{n: t for n, t in (("dy", dy), ("x", x)) if not isinstance(t, MXFP8Tensor)})
    _require(dy.ndim == 2 and x.ndim == 2, f"{op}: dy and x must be matrices, got {tuple(dy.shape)}, {tuple(x.shape)}")
    _require(dy.shape[0] == x.shape[0], f"{op}: dy has {dy.shape[0]} rows, x has {x.shape[0]}")
    _require(dy.device == x.device, f"{op}: dy is on {dy.device}, x on {x.device}")
    require_device(op, "x", _values(x))
    if out is not None:
        _require_tensor(op, out=out)
    refuse_gradient(op, TRAINS, dy=_values(dy), x=_values(x), out=out)
    _check_offsets(op, offsets, None, x.shape[0], x.device)
    if out is not None:
        scales = {f"{name}.scale": t.scale for name, t in (("dy", dy), ("x", x)) if isinstance(t, MXFP8Tensor)}
        refuse_overlap(op, out, dy=_values(dy), x=_values(x), **scales)
    dense = []
    for name, t in (("dy", dy), ("x", x)):
        if isinstance(t, MXFP8Tensor):
            groups = None if t.offsets is None else t.offsets.shape[0] - 1
            _require(
                t.axis == -2 and groups == offsets.shape[0] - 1,
                f"{op}: {name} must have blocks along the rows of {offsets.shape[0] - 1} groups, got {t}",
            )
            if env.flag("CHECK"):
                own, wanted = t.offsets.tolist(), offsets.tolist()
                _require(own == wanted, f"{op}: {name} must have been quantised with offsets {wanted}, got {own}")
            t = dequantize(t)
        _require(t.dtype in (torch.bfloat16, torch.float16), f"{op}: {name} must be bf16, fp16 or MXFP8, got {t.dtype}")
        dense.append(t)
    dy, x = dense
    _require(dy.dtype == x.dtype, f"{op}: dy is {dy.dtype}, x is {x.dtype}")
    groups, n, k = offsets.shape[0] - 1, dy.shape[1], x.shape[1]
    target = out_dtype if out is None else out.dtype
    _require(target in OUT_DTYPES, f"{op}: out_dtype must be bf16, fp16 or fp32, got {target}")
    if out is not None:
        _require(
            out.shape == (groups, n, k) and out.device == x.device and out.is_contiguous(),
            f"{op}: out must be contiguous {(groups, n, k)} on {x.device}, got {tuple(out.shape)} with strides "
            f"{out.stride()} on {out.device}",
        )
    fits = (
        _grouped_mm is not None
        and _capability(x.device)[0] >= 9
        and target == dy.dtype == torch.bfloat16
        and n % 8 == 0
        and k % 8 == 0
        and dy.stride() == (n, 1)
        and x.stride() == (k, 1)
        and dy.data_ptr() % 16 == x.data_ptr() % 16 == 0
        and x.shape[0] > 0
    )
    if library is None:
        library = fits and x.shape[0] >= 64 * groups
    _require(not library or fits, f"{op}: library needs contiguous bf16 operands on sm_90 or later, got {dy.dtype}")
    soft = _soft(x.device)
    if library:
        made = _grouped_mm(dy.T, x, offs=offsets[1:])
        out = made if out is None else out.copy_(made)
        _zero_empty_kernel[(min(64, triton.cdiv(n * k, 4096)), groups)](
            bits_if_soft(out, soft), offsets, n * k, SOFT=soft, BLOCK_N=4096
        )
        return out
    if out is None:
        out = torch.empty(groups, n, k, dtype=target, device=x.device)
    if n * k == 0:
        return out
    bn, bk, bt, warps, stages = (32, 32, 32, 4, 1) if soft else (128, 128, 64, 8, 3)
    tiles_n, tiles_k = triton.cdiv(n, bn), triton.cdiv(k, bk)
    _wgrad_kernel[(tiles_n * tiles_k, groups)](
        bits_if_soft(dy, soft),
        bits_if_soft(x, soft),
        offsets,
        bits_if_soft(out, soft),
        n,
        k,
        tiles_n,
        tiles_k,
        *dy.stride(),
        *x.stride(),
        out.stride(0),
        out.stride(1),
        SOFT=soft,
        BN=bn,
        BK=bk,
        BT=bt,
        STAGES=stages,
        num_warps=warps,
    )
    return out
