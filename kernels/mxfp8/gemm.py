"""Dense GEMM with MXFP8 weights: decode (memory bound), training (compute bound) and the sizes between.

``gemm(a, b)`` is ``dequantize(a, bf16) @ dequantize(b, bf16).T`` with fp32 accumulation, whatever the route:

===============  =======================================================================================================
``bf16``         One Triton kernel that decodes weights to bf16 in registers. No preconditions.
``fp16``         The same kernel with the fp16 form of `decode_block`: a third fewer instructions, for weights that went
                 through `prepare`. bf16 activations are normalised by a small launch before it. Rows and tokens that
                 do not fit in fp16 are found on the device and take the bf16 form inside the same launch.
``dequantize``   Weights (and MXFP8 activations) to bf16 in memory, then cuBLAS. The copy of the weights lives for the
                 length of the call unless the caller keeps one and passes it as ``b_dense``.
``stream``       The bf16 form for up to 8 tokens on Hopper, in Gluon: codes go from memory to registers with no
                 shared memory between (`stream`). Operands with contiguous, aligned rows, of a shape for which the
                 launch table says so or has no entry.
``native``       Blackwell: block-scaled tensor core instructions on two MXFP8 operands (`tl.dot_scaled`). No other
                 route takes scales in the 128x4 layout of `swizzle_scales`. On sm_100 those of a tile of at
                 least 128 rows are copied to tensor memory; all others get there through registers.
===============  =======================================================================================================

`choose` is the one place that picks. Hopper has no block-scaled instruction: there MXFP8 halves what decode reads, and
training on it emulates, at best at bf16's speed.

Decode reads the weights once and is bound by memory; what it takes beyond a plain read of the same bytes, which
bench/mxfp8_gemm.py times beside it, goes to the start (tokens and scales must be there before the first product) and
the end (decoding the last step, adding partial sums). Launches overlap (programmatic dependent launch): a program may
ask for its first weights in L2 before it waits for the launch before its own.

Sums over K may be split between programs; partial sums go to memory and a second launch, or the last program of a tile,
adds them in a fixed order. The split depends on the shape of ``b`` and on the class of row counts (those that share an
entry of the launch table; without one up to 8 if ``stream`` takes them, 16, 32, 64, 128, and above that the number of
rows), never on values: results repeat bit for bit, and no row's result depends on the other rows of its class.
"""

import functools
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from beam_moe.kernels import tuning
from beam_moe.kernels.checks import refuse_gradient, refuse_overlap, require_device
from beam_moe.kernels.launch import ARRIVAL_COUNTERS, ArrivalCounters, supports_pdl
from beam_moe.kernels.mxfp8.decode_block import bits_if_soft, normalize_rows
from beam_moe.kernels.mxfp8.format import (
    BLOCK,
    MXFP8Tensor,
    _require,
    _require_mxfp8,
    _require_rows_apart,
    _require_tensor,
)
from beam_moe.kernels.mxfp8.quantize import _soft, _store_values, _swizzled, dequantize
from beam_moe.kernels.mxfp8.tile import ask_for_rows, finished_product, rows_within, tile_place

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUTES = ("bf16", "fp16", "stream", "dequantize", "native")
ROW_CLASSES = (16, 32, 64, 128)
STREAM_ROWS = 8
DECODE_ROWS = 64
DEQUANTIZE_ROWS = 512  # from here on a dequantised copy and cuBLAS beat decoding in registers


@dataclass(frozen=True)
class GemmConfig:
    """How one call runs: a route and, for the Triton kernels, a tile.

    A program makes ``bn`` outputs for ``bm`` tokens in steps of ``bk``, over one of ``split`` parts of K. For 8 tokens,
    or with fewer than 4 warps, Triton takes mma.sync and not wgmma: codes then come to registers four and more at a
    time. ``join``: the last program of a tile adds its partial sums, and not a second launch.

    Route ``stream``: ``bn`` is 16 outputs for each warp, times a power of two, and ``bk`` 128 or 256, a divisor of K.
    The rest is no choice: ``bm`` 8, ``stages`` 2 (one step is asked for before a program waits for the launch before
    its own) and ``join``.
    """

    route: str
    bm: int = 16
    bn: int = 64
    bk: int = 256
    split: int = 1
    warps: int = 4
    stages: int = 3
    join: bool = False


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _serves(tuned: dict, rows: int, x_dtype: torch.dtype, stream: bool) -> bool:
    """Whether a tuned entry suits a call: lookups also answer with the largest entry below ``rows``."""
    if tuned["route"] == "stream":
        return stream
    if x_dtype != torch.bfloat16 and tuned["route"] != "fp16":
        return False
    return tuned["route"] == "dequantize" or rows <= DECODE_ROWS or tuned["bm"] >= DECODE_ROWS


def _native_rows(rows: int) -> int:
    """Rows of ``a`` in a tile of the route ``native``; of ``b`` a tile has 128."""
    return next((c for c in (*ROW_CLASSES, 256) if rows <= c), 256)


def takes_swizzled(rows: int) -> bool:
    """Whether the route ``native`` copies swizzled scales of such an ``a`` to tensor memory; those of ``b`` always."""
    return _native_rows(rows) % 128 == 0


def choose(
    rows: int, n: int, k: int, device: torch.device, *, x_dtype: torch.dtype, prepared: bool, both: bool, stream: bool
) -> GemmConfig:
    """The configuration of a call: tuned if this device's table has the shape, else by the rules below.

    Args:
        rows, n, k: sizes of the product. x_dtype: of dense activations (bf16 for MXFP8 ones).
        prepared: the weights went through `prepare`. both: both operands are MXFP8 with E4M3 or E5M2 elements.
        stream: the operands suit the route ``stream`` (`streams`).
    """
    capability = _capability(device)
    if both and capability[0] >= 10:
        bm = _native_rows(rows)
        if capability[0] >= 12:  # sums are in registers there, and a program has 99 KiB of shared memory
            bm = min(bm, 128)
        return GemmConfig("native", bm=bm, bn=128, bk=128, warps=4, stages=4 if bm <= 64 else 3)
    # fp16 activations do not fit a bf16 product: they keep to the kernels that hold them exactly
    if rows > DEQUANTIZE_ROWS and x_dtype == torch.bfloat16:
        return GemmConfig("dequantize")
    route = "fp16" if prepared else "bf16"
    tuned = tuning.lookup(device if device.type == "cuda" else None, "mxfp8_gemm", rows, n=n, k=k, route=route)
    if tuned is not None and _serves(tuned, rows, x_dtype, stream):
        return GemmConfig(**tuned)
    if stream and (streamed := stream_config(n, k, 128, device)) is not None:
        return streamed
    if x_dtype == torch.bfloat16:
        route = "bf16"  # at every size tuned so far, normalising the rows costs more than the fp16 form saves
    bm = next((c for c in ROW_CLASSES if rows <= c), ROW_CLASSES[-1])
    if bm <= DECODE_ROWS:
        bn, bk, warps, stages, per_sm = 64, 256 if bm <= 32 else 128, 4, 3 if bm <= 32 else 4, 3
    else:
        bn, bk, warps, stages, per_sm = 128, 64, 8, 4, 1
    if _soft(device):
        bn, bk, stages = 64, 128, 1
    bk = min(bk, max(BLOCK, triton.next_power_of_2(k)))
    tiles = triton.cdiv(n, bn) * (triton.cdiv(rows, bm) if bm > DECODE_ROWS else 1)
    steps = max(1, triton.cdiv(k, bk))
    split = max(1, min(per_sm * _sms(device) // max(tiles, 1), steps, 16))
    return GemmConfig(route, bm, bn, bk, split, warps, stages, join=bm <= DECODE_ROWS)


def stream_config(n: int, k: int, bn: int, device: torch.device) -> GemmConfig | None:
    """Route ``stream`` by tiles of ``bn`` outputs, 16 warps a multiprocessor, most of them busy in one wave; None where
    no split of K fits: a program keeps its share of the tokens and the weights' factors in shared memory."""
    bk, warps, sms = 256 if k % 256 == 0 else 128, bn // 16, _sms(device)
    steps, tiles, per_sm = k // bk, triton.cdiv(n, bn), 16 // warps
    fits = []
    for split in range(1, min(steps, 16) + 1):
        each = triton.cdiv(steps, split)
        shared = triton.next_power_of_2(each) * bk * (2 * STREAM_ROWS + bn // 16) + 1024
        if tiles * split <= sms * per_sm and shared * per_sm <= 227 << 10:
            fits.append((tiles * steps / each, -split))
    return GemmConfig("stream", STREAM_ROWS, bn, bk, -max(fits)[1], warps, 2, join=True) if fits else None


@triton.jit
def _finish(acc, bias_ptr, out_ptr, n, m, M, N, stride_om, BIAS: tl.constexpr, SOFT: tl.constexpr):
    """Sums (BN, BM) with the bias to the tile of the result, rounded once."""
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = m.to(tl.int64)[:, None] * stride_om + n[None, :]
    _store_values(out_ptr + at, acc.T, (m < M)[:, None] & (n < N)[None, :], SOFT)


@triton.jit
def _gemm_kernel(
    x,  # (M, K) activations of the product: descriptor or pointer
    w,  # (N, K) uint8 codes: descriptor or pointer
    code_ptr,  # the same codes
    s_ptr,  # (N, K/32) uint8
    raw_ptr,  # (M, K) activations as given
    word_ptr,  # (N,) int16
    token_ptr,  # (M,) int32
    bias_ptr,  # (N,)
    out_ptr,  # (M, N)
    part_ptr,  # (parts, N, tiles_m * BM) fp32 (PARTIAL)
    count_ptr,  # (tiles_m * tiles_n,) int32, zero before and after (JOIN)
    M,
    N,
    K,
    steps,  # of BK, in one part of K
    tiles_m,
    tiles_n,
    stride_xm,
    stride_xk,
    stride_rm,
    stride_rk,
    stride_wn,
    stride_wk,
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
    PARTIAL: tl.constexpr,
    JOIN: tl.constexpr,
    PDL: tl.constexpr,
    ASK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles_m * tiles_n, parts of K); PARTIAL if there are several.

    With JOIN the last program of a tile adds the partial sums in the order of K; without, `_sum_kernel` does.
    ASK asks for the first weights while the launch before this one drains.
    """
    tile_m, tile_n = tile_place(tl.program_id(0), tiles_m, tiles_n, 8)
    split = tl.program_id(1)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    begin = split * steps * BK
    end = tl.minimum(begin + steps * BK, K)
    row = rows_within(n, N, EVEN_N)
    if ASK:
        ask_for_rows(code_ptr, s_ptr, row, begin, K, stride_wn, stride_sn)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = finished_product(
        x, w, s_ptr, raw_ptr, word_ptr, token_ptr,
        tile_m * BM, tl.minimum(m, M - 1).to(tl.int64), tile_n * BN, 0, row,
        begin, end, K,
        stride_xm, stride_xk, stride_rm, stride_rk, stride_wn, stride_wk, stride_sn, stride_sk,
        FP16, NORMALIZED, E5M2, SOFT, X_TMA, W_TMA, TURNED, EVEN_K, AHEAD, BM, BN, BK, STAGES,
    )  # fmt: skip
    if PARTIAL:
        width = tl.cast(tiles_m, tl.int64) * BM
        at = part_ptr + n.to(tl.int64)[:, None] * width + m[None, :]
        plane = tl.cast(N, tl.int64) * width
        mask = (n < N)[:, None] & (m < M)[None, :]
        tl.store(at + split * plane, acc, mask=mask)
        if JOIN:
            tl.debug_barrier()  # every thread's stores come before the release of the one that counts
            count = count_ptr + tl.program_id(0)
            if tl.atomic_add(count, 1, sem="acq_rel") == tl.num_programs(1) - 1:
                tl.store(count, 0)
                total = tl.zeros((BN, BM), tl.float32)
                for part in range(tl.num_programs(1)):
                    total += tl.load(at + part * plane, mask=mask, other=0.0, cache_modifier=".cg")
                _finish(total, bias_ptr, out_ptr, n, m, M, N, stride_om, BIAS, SOFT)
    else:
        _finish(acc, bias_ptr, out_ptr, n, m, M, N, stride_om, BIAS, SOFT)


@triton.jit
def _sum_kernel(
    part_ptr,  # (SPLIT, N, width) fp32
    bias_ptr,
    out_ptr,
    M,
    N,
    width,
    stride_om,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Grid (cdiv(N, BN), width / BM): partial sums added in the order of K, bias, one rounding."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    mask = (n < N)[:, None] & (m < M)[None, :]
    at = n.to(tl.int64)[:, None] * width + m[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros((BN, BM), tl.float32)
    for split in tl.static_range(SPLIT):
        acc += tl.load(part_ptr + tl.cast(N, tl.int64) * width * split + at, mask=mask, other=0.0)
    _finish(acc, bias_ptr, out_ptr, n, m, M, N, stride_om, BIAS, SOFT)


def _descriptor(t: torch.Tensor, block: list[int]):
    """TMA descriptor of a matrix in blocks, or None where it cannot have one."""
    usable = (
        _capability(t.device)[0] >= 9
        and t.numel() > 0
        and t.stride(1) == 1
        and t.stride(0) >= t.shape[1]  # rows that lie in one place, an expanded gradient's, have none
        and t.stride(0) * t.element_size() % 16 == 0
        and t.data_ptr() % 16 == 0
    )
    if not usable:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), list(t.stride()), block)


def _stack_descriptor(w: torch.Tensor, bn: int, bk: int):
    """TMA descriptor of the matrices ``w`` (E, N, K) as one, or None where it cannot have one.

    In blocks of (bn, bk); of (bk, bn) where N is the innermost axis.
    """
    experts, n, k = w.shape
    if w.stride(2) == 1:
        if w.stride(0) != n * w.stride(1):
            return None
        return _descriptor(w.as_strided((experts * n, k), (w.stride(1), 1)), [bn, bk])
    # whole steps only: what lies behind the last row of an expert is the next expert, which no bound cuts off
    if k % bk or w.stride(0) != k * w.stride(2):
        return None
    return _descriptor(w.as_strided((experts * k, n), (w.stride(2), w.stride(1))), [bk, bn])


def scales_ahead(scale: torch.Tensor, bn: int, bk: int, warps: int) -> bool:
    """Whether a thread's share of a tile's scales cannot be copied asynchronously (`tile.product`)."""
    aligned = scale.stride(-1) == 1 and scale.stride(-2) % 16 == 0 and scale.data_ptr() % 16 == 0
    return not aligned or bn * bk // BLOCK < warps * 32 * 4


def tile_constants(b: MXFP8Tensor, config: GemmConfig) -> dict[str, bool | int]:
    """What `tile.product`'s callers compile for weights ``b`` (…, N, K) and a tile: constants and number of warps."""
    n, k = b.shape[-2:]
    return {
        "FP16": config.route == "fp16",
        "E5M2": b.elem == "e5m2",
        "EVEN_K": k % config.bk == 0,
        "EVEN_N": n % config.bn == 0,
        "AHEAD": scales_ahead(b.scale, config.bn, config.bk, config.warps),
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "STAGES": config.stages,
        "num_warps": config.warps,
    }


_arrivals = ArrivalCounters()


def _between(
    split: int, n: int, width: int, tiles: int, join: bool, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Memory for partial sums, and the arrival counts of tiles that join theirs: None for what is not needed.

    There are no counts where the first call on a device is being captured, nor for very many tiles: then a second
    launch adds the same sums in the same order.
    """
    if split == 1:
        return None, None
    counts = _arrivals.get(device) if join and tiles <= ARRIVAL_COUNTERS else None
    return torch.empty(split, n, width, dtype=torch.float32, device=device), counts


def _sum(part: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, bm: int) -> None:
    """``out`` (M, N) from partial sums (parts, N, width): a launch of its own."""
    (split, n, width), rows = part.shape, out.shape[0]
    pdl, soft = supports_pdl(out.device), _soft(out.device)
    bm = min(bm, 64)
    _sum_kernel[(triton.cdiv(n, 32), width // bm)](
        part,
        part if bias is None else bias,
        bits_if_soft(out, soft),
        rows,
        n,
        width,
        out.stride(0),
        BIAS=bias is not None,
        SOFT=soft,
        SPLIT=split,
        PDL=pdl,
        BM=bm,
        BN=32,
        num_warps=2,
        **({"launch_pdl": True} if pdl else {}),
    )


def streams(a: torch.Tensor | MXFP8Tensor, b: MXFP8Tensor) -> bool:
    """Whether the route ``stream`` takes operands (M, K) and (N, K): what `stream._stream_kernel` says of them."""
    k = b.shape[1]

    def aligned(t: torch.Tensor) -> bool:
        return t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0

    return (
        isinstance(a, torch.Tensor)
        and a.dtype == torch.bfloat16
        and a.shape[0] <= STREAM_ROWS
        and _capability(a.device)[0] == 9
        and k >= 512
        and k % 128 == 0
        and aligned(a)
        and aligned(b.data)
        and b.scale.stride(1) == 1
        and b.scale.data_ptr() % 16 == 0
    )


def _stream(x: torch.Tensor, b: MXFP8Tensor, bias, out: torch.Tensor, config: GemmConfig) -> None:
    from beam_moe.kernels.mxfp8.stream import _stream_kernel  # Gluon is not for every platform

    (rows, k), n = x.shape, b.shape[0]
    steps = k // config.bk
    split = min(config.split, steps)
    tiles = triton.cdiv(n, config.bn)
    pdl = supports_pdl(x.device)
    part, counts = _between(split, n, config.bm, tiles, config.join, x.device)
    in_one_piece = n % config.bn == 0 and b.scale.stride(0) == k // BLOCK
    scales = config.bn * k // BLOCK if in_one_piece else 0
    _stream_kernel[(tiles, split)](
        x,
        b.data.view(torch.uint8),
        b.scale,
        b.scale if part is None else part,
        b.scale if counts is None else counts,
        b.scale if bias is None else bias,
        out,
        rows,
        n,
        k,
        x.stride(0),
        b.data.stride(0),
        b.scale.stride(0),
        out.stride(0),
        BIAS=bias is not None,
        E5M2=b.elem == "e5m2",
        EVEN_N=n % config.bn == 0,
        PDL=pdl,
        JOIN=counts is not None,
        ASK_SCALES=scales // split // 16 * 16,
        BN=config.bn,
        BK=config.bk,
        SPLIT=split,
        SHARE=triton.next_power_of_2(triton.cdiv(steps, split)),
        num_warps=config.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    if part is not None and counts is None:
        _sum(part, bias, out, config.bm)


def _fused(x: torch.Tensor, b: MXFP8Tensor, bias, out: torch.Tensor, config: GemmConfig) -> None:
    (rows, k), n = x.shape, b.shape[0]
    soft = _soft(x.device)
    fp16 = config.route == "fp16"
    normalized = fp16 and x.dtype == torch.bfloat16
    pdl = supports_pdl(x.device)
    xn, tokens = normalize_rows(x, pdl=pdl) if normalized else (x, None)
    codes = b.data.view(torch.uint8)
    turned = codes.stride(1) != 1
    x_desc = _descriptor(xn, [config.bm, config.bk])
    w_desc = _descriptor(codes.mT, [config.bk, config.bn]) if turned else _descriptor(codes, [config.bn, config.bk])
    steps = triton.cdiv(triton.cdiv(k, config.bk), config.split)
    split = max(1, triton.cdiv(triton.cdiv(k, config.bk), max(steps, 1)))
    tiles_m, tiles_n = triton.cdiv(rows, config.bm), triton.cdiv(n, config.bn)
    raw, image = bits_if_soft(x, soft), bits_if_soft(out, soft)
    part, counts = _between(split, n, tiles_m * config.bm, tiles_m * tiles_n, config.join, x.device)
    _gemm_kernel[(tiles_m * tiles_n, split)](
        bits_if_soft(xn, soft) if x_desc is None else x_desc,
        codes if w_desc is None else w_desc,
        codes,
        b.scale,
        raw,
        b.rows if fp16 else b.scale,
        tokens if normalized else b.scale,
        b.scale if bias is None else bias,
        image,
        b.scale if part is None else part,
        b.scale if counts is None else counts,
        rows,
        n,
        k,
        steps,
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
        PARTIAL=split > 1,
        JOIN=counts is not None,
        PDL=pdl,
        # a descriptor vouches for aligned rows; with more tokens most programs are not in the first wave
        ASK=pdl and w_desc is not None and not turned and b.scale.stride(1) == 1 and k >= 512 and rows <= DECODE_ROWS,
        **tile_constants(b, config),
        **({"launch_pdl": True} if pdl else {}),
    )
    if part is not None and counts is None:
        _sum(part, bias, out, config.bm)


_reduction = threading.RLock()


@contextmanager
def fp32_reduction():
    """cuBLAS may add partial sums in bf16 unless told otherwise; inside this it does not.

    The switch is the process's: threads, such as those of backward passes, take turns, or one would put it back under
    another and leave it as it found it there.
    """
    flags = torch.backends.cuda.matmul
    with _reduction:
        before = flags.allow_bf16_reduced_precision_reduction
        flags.allow_bf16_reduced_precision_reduction = False
        try:
            yield
        finally:
            flags.allow_bf16_reduced_precision_reduction = before


def dense_matmul(x: torch.Tensor, w: torch.Tensor, bias, out: torch.Tensor) -> None:
    """bf16 (M, K) times bf16 (N, K) transposed into ``out``: cuBLAS, fp32 sums, bias in fp32, one rounding.

    fp16 results, and biases of another dtype, pass through an fp32 buffer of out's shape.
    """
    if x.device.type != "cuda":
        full = x.float() @ w.float().T
        out.copy_(full if bias is None else full + bias.float())
        return
    with fp32_reduction():
        if out.dtype == torch.bfloat16 and bias is None:
            torch.mm(x, w.T, out=out)
        elif out.dtype == torch.bfloat16 and bias.dtype == torch.bfloat16:
            torch.addmm(bias, x, w.T, out=out)
        else:
            full = torch.mm(x, w.T, out_dtype=torch.float32)
            out.copy_(full if bias is None else full.add_(bias.float()))


@triton.jit
def _native_scales(
    s,
    first,
    row,
    k,
    K,
    stride_r,
    stride_k,
    LAYOUT: tl.constexpr,
    EVEN_K: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
):
    """(R, BK/32) scale bytes of a tile: rows ``row`` (``first`` the first), blocks from ``k``; past K they scale zeros.

    What a descriptor reads goes to tensor memory as it is (tcgen05.cp) if Triton finds just this chain of reshapes.
    """
    if LAYOUT == "tma":
        tiles = s.load([0, first // 128, k // 128, 0, 0]).reshape(R // 128, BK // 128, 32, 4, 4)
        return tiles.trans(0, 3, 2, 1, 4).reshape(R, BK // 32)
    else:
        block = (k // 32 + tl.arange(0, BK // 32))[None, :]
        if LAYOUT == "swizzled":
            at = s + _swizzled(row[:, None], block, tl.cdiv(K, 32)) * stride_k
        else:
            at = s + row[:, None] * stride_r + block.to(tl.int64) * stride_k
        if EVEN_K:
            return tl.load(at)
        else:
            return tl.load(at, mask=block * 32 < K, other=127)


@triton.jit
def _native_kernel(
    x,  # (M, K) elements: descriptor or pointer
    w,  # (N, K) elements: descriptor or pointer
    xs,  # (M, K/32) uint8, in the layout of XS: pointer, or descriptor of (1, M/128, K/128, 2, 256)
    ws,  # (N, K/32) uint8, in that of WS
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    tiles_m,
    tiles_n,
    stride_xm,
    stride_xk,
    stride_xsm,
    stride_xsk,
    stride_wn,
    stride_wk,
    stride_wsn,
    stride_wsk,
    stride_om,
    X_ELEM: tl.constexpr,
    W_ELEM: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    X_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    XS: tl.constexpr,
    WS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles_m * tiles_n,): weights are the 128-row side, which the instruction demands, tokens the other."""
    tile_m, tile_n = tile_place(tl.program_id(0), tiles_m, tiles_n, 8)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    m_in, n_in = tl.minimum(m, M - 1).to(tl.int64), tl.minimum(n, N - 1).to(tl.int64)
    lane = tl.arange(0, BK)
    acc = tl.zeros((BN, BM), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        if X_TMA:
            xt = x.load([tile_m * BM, k])
        else:
            at = x + m_in[:, None] * stride_xm + (k + lane).to(tl.int64)[None, :] * stride_xk
            xt = tl.load(at, mask=(k + lane < K)[None, :], other=0.0)
        if W_TMA:
            wt = w.load([tile_n * BN, k])
        else:
            at = w + n_in[:, None] * stride_wn + (k + lane).to(tl.int64)[None, :] * stride_wk
            wt = tl.load(at, mask=(k + lane < K)[None, :], other=0.0)
        x_scale = _native_scales(xs, tile_m * BM, m_in, k, K, stride_xsm, stride_xsk, XS, EVEN_K, BM, BK)
        w_scale = _native_scales(ws, tile_n * BN, n_in, k, K, stride_wsn, stride_wsk, WS, EVEN_K, BN, BK)
        acc = tl.dot_scaled(wt, w_scale, W_ELEM, xt.T, x_scale, X_ELEM, acc)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = m.to(tl.int64)[:, None] * stride_om + n[None, :]
    _store_values(out_ptr + at, acc.T, (m < M)[:, None] & (n < N)[None, :], SOFT)


def _native_layout(t: MXFP8Tensor, block_rows: int, bk: int):
    """How `_native_kernel` reads the scales of ``t``, blocks along K: (layout, pointer or descriptor, strides)."""
    scale = t.scale
    if not t.swizzled:
        return "rows", scale, scale.stride()
    tma = _capability(t.device)[0] >= 9 and block_rows % 128 == 0 and bk % 128 == 0
    if not (tma and scale.stride(0) == 1 and scale.data_ptr() % 16 == 0):
        return "swizzled", scale, (0, scale.stride(0))
    from triton.tools.tensor_descriptor import TensorDescriptor

    # tiles of 128 rows and 4 scales are 512 contiguous bytes; no side of a block may have more than 256 elements
    tiles = scale.view(1, triton.cdiv(t.shape[0], 128), -1, 2, 256)
    block = [1, block_rows // 128, bk // 128, 2, 256]
    return "tma", TensorDescriptor(tiles, list(tiles.shape), list(tiles.stride()), block), (0, 0)


def _native(a: MXFP8Tensor, b: MXFP8Tensor, bias, out: torch.Tensor, config: GemmConfig) -> None:
    (rows, k), n = a.shape, b.shape[0]
    x, w = a.data, b.data  # not their bytes: after a cast, weights would reach the tensor cores through registers
    x_desc, w_desc = _descriptor(x, [config.bm, config.bk]), _descriptor(w, [config.bn, config.bk])
    x_layout, x_scale, x_strides = _native_layout(a, config.bm, config.bk)
    w_layout, w_scale, w_strides = _native_layout(b, config.bn, config.bk)
    tiles_m, tiles_n = triton.cdiv(rows, config.bm), triton.cdiv(n, config.bn)
    soft = _soft(out.device)
    _native_kernel[(tiles_m * tiles_n,)](
        x if x_desc is None else x_desc,
        w if w_desc is None else w_desc,
        x_scale,
        w_scale,
        a.scale if bias is None else bias,
        bits_if_soft(out, soft),
        rows,
        n,
        k,
        tiles_m,
        tiles_n,
        *x.stride(),
        *x_strides,
        *w.stride(),
        *w_strides,
        out.stride(0),
        X_ELEM=a.elem,
        W_ELEM=b.elem,
        BIAS=bias is not None,
        SOFT=soft,
        X_TMA=x_desc is not None,
        W_TMA=w_desc is not None,
        XS=x_layout,
        WS=w_layout,
        EVEN_K=k % config.bk == 0,
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        STAGES=config.stages,
        num_warps=config.warps,
    )


def _row_major(op: str, name: str, t: torch.Tensor | MXFP8Tensor) -> None:
    swizzled = isinstance(t, MXFP8Tensor) and t.swizzled
    _require(not swizzled, f"{op}: {name} has swizzled scales; pass row-major ones (unswizzle_scales)")


def _contracting(op: str, name: str, t: MXFP8Tensor, swizzled: bool = False) -> MXFP8Tensor:
    """``t`` with its block axis last; ``swizzled`` scales are refused unless allowed."""
    _require(t.offsets is None, f"{op}: {name} has blocks that restart at groups of rows; use grouped_wgrad")
    if not swizzled:
        _row_major(op, name, t)
    return t if t.axis == -1 else t.mT


def _check_config(op: str, config: GemmConfig | None) -> None:
    """What a caller's configuration must be for a kernel to compile."""
    if config is None:
        return
    _require(isinstance(config, GemmConfig), f"{op}: config must be a GemmConfig, got {type(config).__name__}")
    _require(config.route in ROUTES, f"{op}: config.route must be one of {ROUTES}, got {config.route!r}")
    for name, least, power in (
        ("bm", 8, True),
        ("bn", 16, True),
        ("bk", BLOCK, True),
        ("warps", 1, True),
        ("split", 1, False),
        ("stages", 1, False),
    ):
        value = getattr(config, name)
        fits = isinstance(value, int) and value >= least and not (power and value & (value - 1))
        what = "a power of two" if power else "an integer"
        _require(fits, f"{op}: config.{name} must be {what} of at least {least}, got {value!r}")


def _check_words(op: str, b: MXFP8Tensor, config: GemmConfig) -> None:
    """``b.rows`` as the kernels of route fp16 read them."""
    if config.route != "fp16":
        return
    _require(b.rows is not None, f"{op}: route fp16 needs b to have gone through prepare, got {b}")
    assert b.rows is not None
    _require(
        b.rows.is_contiguous() and b.rows.device == b.device,
        f"{op}: b.rows must be contiguous on {b.device}, got strides {b.rows.stride()} for shape "
        f"{tuple(b.rows.shape)} on {b.rows.device}",
    )


def _values(t: torch.Tensor | MXFP8Tensor | None) -> torch.Tensor | None:
    """The elements of an operand."""
    return t.data if isinstance(t, MXFP8Tensor) else t


def _check(op: str, trains: str, a, b: MXFP8Tensor, bias, out, out_dtype, b_dense, config) -> None:
    """``a`` (rows, K), ``b`` (N, K) and bias (N,), or of groups b (E, N, K) and bias (E, N)."""
    (rows, k), (*groups, n, kb) = a.shape, b.shape
    _require(kb == k, f"{op}: a contracts over {k} elements, b over {kb}")
    _require(b.device == a.device, f"{op}: a is on {a.device}, b on {b.device}")
    require_device(op, "a", _values(a))
    _check_config(op, config)
    _require(out_dtype in OUT_DTYPES, f"{op}: out_dtype must be bf16, fp16 or fp32, got {out_dtype}")
    if b_dense is not None:
        _require_tensor(op, b_dense=b_dense)
    if bias is not None:
        _require_tensor(op, bias=bias)
        _require(
            bias.shape == (*groups, n)
            and bias.dtype in OUT_DTYPES
            and bias.is_contiguous()
            and bias.device == a.device,
            f"{op}: bias must be contiguous bf16, fp16 or fp32 {(*groups, n)} on {a.device}, got {bias.dtype} "
            f"{tuple(bias.shape)} with strides {bias.stride()} on {bias.device}",
        )
    if out is not None:
        _require_tensor(op, out=out)
        _require(
            out.shape == (rows, n) and out.dtype in OUT_DTYPES and out.device == a.device,
            f"{op}: out must be bf16, fp16 or fp32 {(rows, n)} on {a.device}, got {out.dtype} {tuple(out.shape)} on "
            f"{out.device}",
        )
        _require(n <= 1 or out.stride(1) == 1, f"{op}: out must have last stride 1, got strides {out.stride()}")
        _require_rows_apart(op, out)
        scales = {f"{name}.scale": t.scale for name, t in (("a", a), ("b", b)) if isinstance(t, MXFP8Tensor)}
        refuse_overlap(op, out, a=_values(a), b=b.data, bias=bias, b_dense=b_dense, **scales, **{"b.rows": b.rows})
    if b_dense is not None:
        _require(
            b_dense.shape == b.shape and b_dense.dtype == torch.bfloat16 and b_dense.device == a.device,
            f"{op}: b_dense must be bf16 {tuple(b.shape)} on {a.device}, got {b_dense.dtype} {tuple(b_dense.shape)} on "
            f"{b_dense.device}",
        )
    refuse_gradient(op, trains, a=_values(a), b=b.data, bias=bias, out=out, b_dense=b_dense)


def gemm(
    a: torch.Tensor | MXFP8Tensor,
    b: MXFP8Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    b_dense: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """``a @ b.T + bias`` over the axis along which b's blocks run, in fp32, rounded once.

    Operands count as `dequantize` to bf16 gives them: exact for E4M3 with scale bytes 3 to 246. NaN, infinities, zero
    blocks and scale bytes 0 and 255 follow from that. One exception: fp16 activations are taken exactly.

    Args:
        a: (M, K) bf16 or fp16 with any strides, or `MXFP8Tensor` with blocks along K. M may be 0.
        b: (N, K) `MXFP8Tensor` with blocks along axis -1, or (K, N) with blocks along axis -2; any strides, so ``w.mT``
            of a columnwise quantised weight serves a dgrad. The fp16 route needs `prepare` and contiguous ``b.rows``.
            Swizzled scales, of either operand, are for products of two MXFP8 operands on Blackwell, which run as
            ``native``.
        bias: (N,) bf16, fp16 or fp32, added in fp32.
        out: (M, N) bf16, fp16 or fp32, last stride 1, written in full; ``out_dtype`` is then not read.
        b_dense: bf16 (N, K), ``dequantize(b)`` kept by the caller, which saves the dequantisation of every call with
            many rows at the cost of 2 bytes an element.
        config: launch configuration instead of `choose`'s.

    Nothing is allocated for the route ``bf16`` without a split; a split needs ``split * N * M`` fp32, the route
    ``fp16`` an fp16 copy of bf16 activations, ``dequantize`` a bf16 copy of every MXFP8 operand.

    Raises:
        ValueError: an argument does not fit the above, ``out`` lies in an operand's memory, or a gradient is expected.
    """
    op = "gemm"
    _require_mxfp8(op, b=b)
    if not isinstance(a, MXFP8Tensor):
        _require_tensor(op, a=a)
    _require(a.ndim == 2 and b.ndim == 2, f"{op}: a and b must be matrices, got {tuple(a.shape)} and {tuple(b.shape)}")
    mx = isinstance(a, MXFP8Tensor)
    may_swizzle = mx and not 0 < _capability(a.device)[0] < 10  # Blackwell, and the interpreter if told so
    b = _contracting(op, "b", b, may_swizzle)
    if mx:
        a = _contracting(op, "a", a, may_swizzle)
    else:
        _require(a.dtype in (torch.bfloat16, torch.float16), f"{op}: a must be bf16, fp16 or MXFP8, got {a.dtype}")
    _check(op, "mxfp8.linear trains", a, b, bias, out, out_dtype, b_dense, config)
    (rows, k), n = a.shape, b.shape[0]
    if out is None:
        out = torch.empty(rows, n, dtype=out_dtype, device=a.device)
    if rows == 0 or n == 0:
        return out
    if k == 0:
        return out.copy_(bias.expand_as(out)) if bias is not None else out.zero_()
    x_dtype = torch.bfloat16 if mx else a.dtype
    if config is None:
        config = choose(
            rows, n, k, a.device, x_dtype=x_dtype, prepared=b.rows is not None, both=mx, stream=streams(a, b)
        )
    _check_words(op, b, config)
    if config.route == "native":
        _require(mx, f"{op}: route native needs MXFP8 activations, got {x_dtype}")
        _native(a, b, bias, out, config)
        return out
    _row_major(op, "a", a)
    _row_major(op, "b", b)
    if config.route == "stream":
        fixed = config.bm == STREAM_ROWS and config.stages == 2 and config.join
        _require(
            fixed and config.bn % (16 * config.warps) == 0 and config.bk in (128, 256),
            f"{op}: route stream needs bm {STREAM_ROWS}, bn a multiple of 16 * warps, bk 128 or 256, stages 2, join, "
            f"got {config}",
        )
        fits = streams(a, b) and k % config.bk == 0
        _require(fits, f"{op}: route stream does not take a {x_dtype} {tuple(a.shape)}, b {b} in steps of {config.bk}")
        _stream(a, b, bias, out, config)
        return out
    x = dequantize(a) if mx else a
    if config.route == "dequantize":
        _require(x_dtype == torch.bfloat16, f"{op}: route dequantize needs bf16 or MXFP8 activations, got {x_dtype}")
        dense_matmul(x, dequantize(b) if b_dense is None else b_dense, bias, out)
    else:
        _fused(x, b, bias, out, config)
    return out
