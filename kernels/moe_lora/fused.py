"""`fused_moe`: the routed experts of one MoE layer with a LoRA adapter on every expert, in three to five launches.

    out[t] = scale * sum_k w[t, k] * (W2[e] @ h + B2[l, e] @ (A2[l, e] @ h))
    h      = silu(g) * u, (g | u) = W13[e] @ x[t] + B13[l, e] @ (A13[l, e] @ x[t]),  e = topk_ids[t, k], l = lora_ids[t]

    launch    reads                         writes                  file
    plan      topk_ids [, x]                blocks of rows          plan.py      (none for few tokens, two for many)
    gate_up   W13, A13, x                   g | u, t                gate_up.py
    activate  g | u, t, B13, A2             h, s                    activate.py
    down      W2, B2, h, s                  y [, v]                 down.py
    combine   y, topk_weights [, B2, v]     out                     combine.py

With `MoEConfig.lag` the three in the middle are one launch (joined.py).

At decode the layer is bound by reading weights, so each expert's weights and factors are read once for all the rows
that chose it, and each launch starts while the one before drains. Weights in MXFP8 are decoded on their way
(`mxfp8.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from beam_moe import env
from beam_moe.kernels.checks import require_device
from beam_moe.kernels.launch import supports_pdl
from beam_moe.kernels.moe_lora.activate import _activate_kernel
from beam_moe.kernels.moe_lora.bank import ExpertLoRA
from beam_moe.kernels.moe_lora.combine import _combine_kernel
from beam_moe.kernels.moe_lora.config import MoEConfig
from beam_moe.kernels.moe_lora.down import TOKENS, _down_kernel
from beam_moe.kernels.moe_lora.gate_up import _gate_up_kernel
from beam_moe.kernels.moe_lora.joined import _joined_kernel, joined_constants, joined_grid
from beam_moe.kernels.moe_lora.mxfp8 import operand
from beam_moe.kernels.moe_lora.pipeline import adapter_tile
from beam_moe.kernels.moe_lora.plan import build_plan
from beam_moe.kernels.moe_lora.workspace import CHUNK, Buffers, Shape, Workspace, bytes_needed, carve
from beam_moe.kernels.mxfp8.format import BLOCK, MXFP8Tensor
from beam_moe.kernels.mxfp8.gemm import scales_ahead

DTYPES = (torch.bfloat16, torch.float16)
MAX_EXPERTS, MAX_RANK = 1024, 512
MAX_BLOCK_R = 32  # ranks of one step, MAX_BLOCK_R_OF_8 where `_ranks_of_a_step` says so
MAX_BLOCK_R_OF_8 = 64


def _require(ok: bool, argument: str, wanted: str, got: object) -> None:
    if not ok:
        raise ValueError(f"fused_moe: {argument} must be {wanted}, got {got}")


def _tensor(name: str, t: object, dims: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    _require(isinstance(t, torch.Tensor), name, "a tensor", type(t).__name__)
    assert isinstance(t, torch.Tensor)
    _require(t.dim() == dims, name, f"a tensor of {dims} dimensions", f"shape {tuple(t.shape)}")
    _require(t.dtype in dtypes, name, " or ".join(map(str, dtypes)), t.dtype)
    _require(t.device == device, name, f"on x's device {device}", t.device)
    inner = t.shape[-1] <= 1 or t.stride(-1) == 1
    _require(inner, name, "of innermost stride 1", f"strides {t.stride()} for shape {tuple(t.shape)}")


def _mxfp8(name: str, w: MXFP8Tensor, device: torch.device) -> None:
    _require(w.ndim == 3, name, "a tensor of 3 dimensions", f"shape {tuple(w.shape)}")
    _require(w.elem == "e4m3", name, "of E4M3 elements", w.elem)
    _require(w.axis == -1, name, "of blocks along its last axis (-1)", f"axis {w.axis}")
    _require(not w.swizzled, name, "of row-major scales", "swizzled ones")
    _require(w.shape[-1] % BLOCK == 0, name, f"of a last axis that {BLOCK} divides", tuple(w.shape))
    _tensor(name, w.data, 3, (torch.float8_e4m3fn,), device)
    _tensor(f"{name}.scale", w.scale, 3, (torch.uint8,), device)
    if w.rows is not None:
        _require(w.rows.is_contiguous(), f"{name}.rows", "contiguous", f"strides {w.rows.stride()}")
        _require(w.rows.device == device, f"{name}.rows", f"on x's device {device}", w.rows.device)


def _check(x, w13, w2, topk_weights, topk_ids, lora, lora_ids, expert_map, routed_scaling, out, config) -> None:
    _require(isinstance(x, torch.Tensor), "x", "a tensor", type(x).__name__)
    device = x.device
    _tensor("x", x, 2, DTYPES, device)
    mx = isinstance(w13, MXFP8Tensor)
    _require(isinstance(w2, MXFP8Tensor) == mx, "w2", "MXFP8 where w13 is, dense where it is", type(w2).__name__)
    for name, w in (("w13", w13), ("w2", w2)):
        if mx:
            _mxfp8(name, w, device)
        else:
            _tensor(name, w, 3, (x.dtype,), device)
    tokens, hidden = x.shape
    experts, inter = w2.shape[0], w2.shape[2]
    _require(1 <= experts <= MAX_EXPERTS, "w2", f"of 1 to {MAX_EXPERTS} experts", experts)
    _require(hidden >= 1 and inter >= 1, "w2", "of H and I from 1 up", tuple(w2.shape))
    _require(w2.shape[1] == hidden, "w2", f"(E, H={hidden}, I) to fit x", tuple(w2.shape))
    _require(
        tuple(w13.shape) == (experts, 2 * inter, hidden), "w13", f"{(experts, 2 * inter, hidden)}", tuple(w13.shape)
    )
    _tensor("topk_ids", topk_ids, 2, (torch.int32,), device)
    _tensor("topk_weights", topk_weights, 2, (torch.float32,), device)
    _require(
        topk_ids.shape[0] == tokens and topk_ids.shape[1] >= 1, "topk_ids", f"({tokens}, top_k)", tuple(topk_ids.shape)
    )
    _require(
        topk_weights.shape == topk_ids.shape, "topk_weights", f"{tuple(topk_ids.shape)}", tuple(topk_weights.shape)
    )
    for name, t in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        _require(t.is_contiguous(), name, "contiguous", f"strides {t.stride()}")
    if expert_map is not None:
        _tensor("expert_map", expert_map, 1, (torch.int32,), device)
    if out is not None:
        _tensor("out", out, 2, (x.dtype,), device)
        _require(out.shape == x.shape, "out", f"{tuple(x.shape)}", tuple(out.shape))
        apart = tokens <= 1 or out.stride(0) >= hidden
        _require(apart, "out", f"of rows that do not overlap (a row has {hidden} elements)", f"strides {out.stride()}")
    number = isinstance(routed_scaling, (int, float)) and math.isfinite(routed_scaling)
    _require(number, "routed_scaling", "a finite number", repr(routed_scaling))
    if config is not None:
        _require(isinstance(config, MoEConfig), "config", "a MoEConfig", type(config).__name__)
        _require(
            config.joins,
            "config",
            "of rows='plan', one number of warps and tail_tiles dividing down_tiles where lag is not 0, none below 0; "
            "of wide, lora_wide and act_block_m (or 0) powers of two, the first two above 1 with rows='plan' and no "
            "lag or one of at least as many",
            config,
        )
    if lora_ids is not None:
        _tensor("lora_ids", lora_ids, 1, (torch.int32,), device)
        _require(lora_ids.shape[0] == tokens, "lora_ids", f"({tokens},)", tuple(lora_ids.shape))
    _require((lora is None) == (lora_ids is None), "lora_ids", "given together with lora", "only one of them")
    if lora is not None:
        _require(isinstance(lora, ExpertLoRA), "lora", "an ExpertLoRA", type(lora).__name__)
        _require(lora.dtype == x.dtype, "lora", f"of x's dtype {x.dtype}", lora.dtype)
        _require(lora.device == device, "lora", f"on x's device {device}", lora.device)
        _require(lora.rank <= MAX_RANK, "lora", f"of rank at most {MAX_RANK}", lora.rank)
        ours, theirs = (experts, hidden, inter), (lora.num_experts, lora.hidden, lora.intermediate)
        _require(theirs == ours, "lora", f"a bank of (experts, hidden, intermediate) = {ours}", theirs)
        for name, (gate, up) in (("w13_a", lora.gate_up_a), ("w13_b", lora.gate_up_b)):
            _require(
                gate.stride() == up.stride(),
                f"lora.{name}",
                f"of one stride {gate.stride()} in gate and up",
                up.stride(),
            )
    if torch.is_grad_enabled():
        _refuse_gradient(x, w13, w2, topk_weights, lora, out)
    require_device("fused_moe", "x", x)


def _refuse_gradient(x, w13, w2, topk_weights, lora, out) -> None:
    operands = {"x": x, "w13": w13, "w2": w2, "topk_weights": topk_weights, "out": out}
    if lora is not None:
        (gate_a, up_a), (gate_b, up_b) = lora.gate_up_a, lora.gate_up_b
        operands |= {"lora.w13_a": gate_a, "lora.w13_a's up": up_a, "lora.w13_b": gate_b, "lora.w13_b's up": up_b}
        operands |= {"lora.w2_a": lora.w2_a, "lora.w2_b": lora.w2_b}
    for name, t in operands.items():
        t = t.data if isinstance(t, MXFP8Tensor) else t
        wanted = "without a gradient (there is no backward pass: grouped_linear_lora trains)"
        _require(t is None or not t.requires_grad, name, wanted, "one")


def _check_values(topk_weights, experts, lora, expert_map) -> None:
    """What only the device knows; synchronises, hence only with ``BEAM_MOE_CHECK=1``."""
    _require(bool(torch.isfinite(topk_weights).all()), "topk_weights", "finite", "NaN or infinity")
    if expert_map is not None and expert_map.numel():
        top = int(expert_map.max())
        _require(top < experts, "expert_map", f"below the {experts} local experts", top)
    if lora is not None:
        low, high = int(lora.ranks.min()), int(lora.ranks.max())
        _require(0 <= low and high <= lora.rank, "lora.ranks", f"within 0..{lora.rank}", f"{low}..{high}")


def _offset(base: torch.Tensor, other: torch.Tensor) -> int:
    return (other.data_ptr() - base.data_ptr()) // base.element_size()


def _ranks_of_a_step(lora: ExpertLoRA, cfg: MoEConfig, dense: bool) -> int:
    """64 save a rank of 64 its second step, but with blocks of 16 rows and more they read out of bounds on an H200
    (Triton 3.6.0, Beam at 256 tokens; the cause was not found): only blocks of 8 and single pairs take them."""
    small = cfg.block_m < 16 or (cfg.rows == "direct" and cfg.down_tiles == 1)
    most = MAX_BLOCK_R_OF_8 if dense and small and not lora.shared_b else MAX_BLOCK_R
    return min(most, max(16, triton.next_power_of_2(lora.rank)))


def _run(
    x: torch.Tensor,
    w13: torch.Tensor | MXFP8Tensor,
    w2: torch.Tensor | MXFP8Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    lora: ExpertLoRA | None,
    lora_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    buffers: Buffers,
    cfg: MoEConfig,
) -> None:
    """The launches of one pass."""
    (tokens, hidden), top_k = x.shape, topk_ids.shape[1]
    experts, inter = w2.shape[0], w2.shape[2]
    pairs = tokens * top_k
    pdl = supports_pdl(x.device)
    extra: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    blocks = cfg.blocks(pairs, experts)
    block_p = {"plan": 0, "direct": 1, "search": max(16, triton.next_power_of_2(pairs))}[cfg.rows]
    order, table = buffers.order, buffers.block_experts
    emap = topk_ids if expert_map is None else expert_map
    e_global = 0 if expert_map is None else expert_map.numel()
    has_map = expert_map is not None
    common: dict[str, Any] = dict(TOP_K=top_k, INTERPRETED=x.device.type == "cpu", PDL=pdl, **extra)

    wide = cfg.wide if lora is None or lora.shared_b else cfg.lora_wide
    if x.dtype != torch.bfloat16 or isinstance(w13, MXFP8Tensor):
        wide = 1  # sums of fp16 do not keep their bits in a tile of another width, nor do those of MXFP8's fp16 form
    up_w, down_w, images = w13, w2, {}
    up_strides = down_strides = (0, 0)
    up_base: dict[str, Any] = {}
    down_base: dict[str, Any] = {}
    if isinstance(w13, MXFP8Tensor):
        up, down = operand(w13, cfg.up_block_n, cfg.up_block_k), operand(w2, cfg.down_block_n, cfg.down_block_k)
        bf16 = x.dtype == torch.bfloat16
        if bf16 and up.constants["FP16"]:
            images = {"x": x, "xn": buffers.xn, "words": buffers.words}
        up_w, up_strides, down_w, down_strides = up.codes, up.strides, down.codes, down.strides
        ahead = scales_ahead(w13.scale, cfg.up_block_n, cfg.up_block_k, cfg.up_warps)
        up_base = up.constants | {"NORMALIZED": bool(images), "AHEAD": ahead}
        up_base |= {"xn_ptr": buffers.xn if images else x, "x_words_ptr": buffers.words}
        if registers := cfg.registers or (168 if cfg.block_m <= 16 and cfg.up_warps == 4 else 0):
            up_base["maxnreg"] = registers  # 168: three programs a multiprocessor; the compiler would stop a few above
        down_base = down.constants | {"NORMALIZED": bf16}
    else:
        up_strides, down_strides = w13.stride()[:2], w2.stride()[:2]
        if cfg.registers:
            up_base["maxnreg"] = cfg.registers

    if lora is None:
        rank, na, shared_a, shared_b, slots, tiles, block_r, more = 0, 1, False, False, 0, 1, 16, False
        gate_a = gate_b = w2_a = w2_b = x
        ids = ranks = enabled = topk_ids
        t, s = buffers.gu, buffers.y
        a_strides = b_strides = a2_strides = b2_strides = (0, 0, 0, 0)
        up_a_offset = up_b_offset = 0
    else:
        rank, na, slots = lora.rank, 1 if lora.one_a else 2, lora.slots
        shared_a, shared_b = lora.shared_a, lora.shared_b
        tiles = triton.cdiv(inter, cfg.act_block_i)
        block_r = _ranks_of_a_step(lora, cfg, dense=isinstance(w13, torch.Tensor))
        more = slots > 1 or rank > block_r
        (gate_a, up_a), (gate_b, up_b) = lora.gate_up_a, lora.gate_up_b
        w2_a, w2_b = lora.w2_a, lora.w2_b
        ids, ranks, enabled = lora_ids, lora.ranks, lora.enabled
        t, s = buffers.t, buffers.s
        a_strides, b_strides, a2_strides, b2_strides = gate_a.stride(), gate_b.stride(), w2_a.stride(), w2_b.stride()
        up_a_offset, up_b_offset = _offset(gate_a, up_a), _offset(gate_b, up_b)

    if cfg.rows == "plan" or images:
        build_plan(
            topk_ids, expert_map, experts, cfg.block_m, order, table, buffers.widths, buffers.counts, buffers.totals,
            wide=wide, num_warps=cfg.plan_warps, experts_per_program=cfg.plan_experts, pdl=pdl,
            planned=cfg.rows == "plan", **images,
        )  # fmt: skip

    if cfg.lag:
        grid = joined_grid(
            tokens=tokens, hidden=hidden, inter=inter, blocks=blocks, a_rows=na * rank, shared_a=shared_a, config=cfg
        )  # fmt: skip
        _joined_kernel[grid](
            x, up_w, down_w, gate_a, gate_b, w2_a, w2_b, buffers.gu, t, buffers.h, s, buffers.y, buffers.counts,
            topk_weights, topk_ids, emap, order, table, buffers.widths, ids, ranks, enabled,
            tokens, e_global, experts, slots, blocks, up_a_offset, up_b_offset,
            x.stride(0), *up_strides, *down_strides, a_strides[0], a_strides[1], a_strides[2],
            b_strides[0], b_strides[1], b_strides[2], a2_strides[0], a2_strides[1], a2_strides[2],
            b2_strides[0], b2_strides[1], b2_strides[2],
            H=hidden, I=inter, RANK=rank, NA=na, SPLITS=cfg.splits, SHARED_A=shared_a, SHARED_B=shared_b, MORE=more,
            LAG=cfg.lag, BLOCK_M=cfg.block_m, UP_N=cfg.up_block_n, UP_K=cfg.up_block_k, UP_STAGES=cfg.up_stages,
            BLOCK_I=cfg.act_block_i, DOWN_N=cfg.down_block_n, DOWN_K=cfg.down_block_k, DOWN_STAGES=cfg.down_stages,
            DOWN_WHOLE=cfg.down_whole, DOWN_TILES=cfg.down_tiles, TAIL=cfg.tail,
            TAIL_TILES=cfg.tail_tiles or cfg.down_tiles, BLOCK_R=block_r,
            WIDE=wide, HAS_MAP=has_map, num_warps=cfg.up_warps, **common, **joined_constants(up_base, down_base),
        )  # fmt: skip
    else:
        w_tiles = triton.cdiv(2 * inter, cfg.up_block_n)
        a_tiles = triton.cdiv(na * rank, adapter_tile(cfg.up_block_n, na * rank))
        up_parts, token_blocks = (w_tiles + a_tiles) * cfg.splits, 0
        if shared_a:
            up_parts, token_blocks = max(w_tiles, a_tiles) * cfg.splits, triton.cdiv(tokens, cfg.block_m)
        _gate_up_kernel[(up_parts, token_blocks + blocks)](
            x, up_w, gate_a, buffers.gu, t, topk_ids, emap, order, table, buffers.widths, ids, ranks, enabled,
            tokens, e_global, experts, slots, up_a_offset,
            x.stride(0), *up_strides, a_strides[0], a_strides[1], a_strides[2],
            H=hidden, N=2 * inter, RANK=rank, NA=na, SPLITS=cfg.splits, SHARED_A=shared_a, BLOCK_P=block_p,
            BLOCK_M=cfg.block_m, BLOCK_N=cfg.up_block_n, BLOCK_K=cfg.up_block_k,
            num_warps=cfg.up_warps, HAS_MAP=has_map, STAGES=cfg.up_stages, WIDE=wide, **common, **up_base,
        )  # fmt: skip
        _activate_kernel[(triton.cdiv(inter, cfg.act_block_i), blocks * (cfg.block_m // cfg.act_rows))](
            buffers.gu, t, gate_b, w2_a, buffers.h, s, topk_ids, emap, order, table, ids, ranks, enabled,
            tokens, e_global, experts, slots, up_b_offset,
            b_strides[0], b_strides[1], b_strides[2], a2_strides[0], a2_strides[1], a2_strides[2],
            I=inter, RANK=rank, NA=na, SPLITS=cfg.splits, SHARED_A=shared_a, MORE=more, BLOCK_P=block_p,
            BLOCK_M=cfg.act_rows, PARTS=cfg.block_m // cfg.act_rows, BLOCK_I=cfg.act_block_i, BLOCK_R=block_r,
            HAS_MAP=has_map, num_warps=cfg.act_warps, num_stages=2, **common,
        )  # fmt: skip
        token_blocks = triton.cdiv(tokens, TOKENS.value) if shared_b else 0
        _down_kernel[(triton.cdiv(hidden, cfg.down_block_n * cfg.down_tiles), token_blocks + blocks)](
            buffers.h, down_w, s, w2_b, buffers.y, t, topk_weights, topk_ids, emap, order, table, buffers.widths, ids,
            ranks, enabled,
            tokens, e_global, experts, slots,
            *down_strides, b2_strides[0], b2_strides[1], b2_strides[2],
            H=hidden, I=inter, RANK=rank, SHARED_B=shared_b, TILES=tiles, MORE=more, HAS_MAP=has_map,
            WHOLE=cfg.down_whole, DIRECT=cfg.rows == "direct", TILES_PER_PROGRAM=cfg.down_tiles,
            BLOCK_M=cfg.block_m, BLOCK_N=cfg.down_block_n, BLOCK_K=cfg.down_block_k, BLOCK_R=block_r,
            num_warps=cfg.down_warps, STAGES=cfg.down_stages, WIDE=wide, **common, **down_base,
        )  # fmt: skip
    block_t = max(16, cfg.combine_block_t) if shared_b else cfg.combine_block_t
    block_h = min(64, cfg.combine_block_h) if shared_b else cfg.combine_block_h
    _combine_kernel[(triton.cdiv(hidden, block_h), triton.cdiv(tokens, block_t))](
        buffers.y, t, w2_b, topk_weights, out, topk_ids, emap, ids, ranks, enabled,
        scale, tokens, e_global, experts, slots, b2_strides[0], b2_strides[2], out.stride(0),
        H=hidden, RANK=rank if shared_b else 0,
        BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_R=block_r, MORE=more, HAS_MAP=has_map,
        num_warps=cfg.combine_warps, **common,
    )  # fmt: skip


def fused_moe(
    x: torch.Tensor,
    w13: torch.Tensor | MXFP8Tensor,
    w2: torch.Tensor | MXFP8Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    lora: ExpertLoRA | None = None,
    lora_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    routed_scaling: float = 1.0,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: MoEConfig | None = None,
) -> torch.Tensor:
    """The routed experts of one MoE layer, SwiGLU with SiLU on the gate and no bias, with LoRA adapters.

    Args:
        x: (T, H) bf16 or fp16 activations, T from 0 up; rows may be strided.
        w13: (E, 2I, H) as x: the local experts' gate rows, then their up rows.
        w2: (E, H, I) as x. Both may be strided views of innermost stride 1. Or both are `MXFP8Tensor` of E4M3 elements
            in blocks along the last axis: the result is that for `dequantize` of them to accumulation order. After
            `prepare` of both they take the faster fp16 form where it is exact, row by row.
        topk_weights: (T, K) float32, contiguous.
        topk_ids: (T, K) int32, contiguous. Ids outside 0..E-1 (of ``expert_map``'s length where given) add nothing.
        lora: the bank of adapter slots, as `ExpertLoRA`; needs ``lora_ids``.
        lora_ids: (T,) int32, the slot of each token; one outside 0..L-1, disabled or of rank 0 leaves the row its bare
            result, bit for bit that of a call without ``lora``.
        expert_map: (E_global,) int32, global expert to local one, -1 for another rank's.
        routed_scaling: factor on the sum over experts, a finite number.
        out: (T, H) as x, written in full (zeros where no id is valid); made if absent. Its rows must not overlap.
        workspace: see `moe_workspace`; with ``out`` and it nothing is allocated. Without, the intermediates are
            `torch.empty` of this call, as they always are under ``torch.compile`` (`torch_ops.py`).
        config: launch parameters; by default `MoEConfig.pick`, which looks at the shape alone, as it does always under
            ``torch.compile``.

    Returns:
        ``out``: sums over k ascending in fp32, scaled, rounded once. Under tensor parallelism this rank's partial sum.

    The same call gives the same bits every time. A row's bits depend on the batch only through the number of tokens,
    by which `MoEConfig` chooses ``splits`` and tiles (`MoEConfig.summing_as` pins them); not on what the other rows
    hold, which experts they chose or which adapters they use. The call never synchronises and can be captured in a CUDA
    graph, which then serves whatever the bank, ``lora_ids`` and the routing hold at replay.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, naming the argument; a workspace that is too
            small. With ``BEAM_MOE_CHECK=1`` also non-finite weights and values of ``expert_map`` or ``lora.ranks`` out
            of range.
    """
    if not torch.compiler.is_compiling():
        return _fused_moe(
            x, w13, w2, topk_weights, topk_ids, lora, lora_ids, expert_map, routed_scaling, out, workspace, config
        )
    from beam_moe.kernels.moe_lora import torch_ops

    return torch_ops.call(x, w13, w2, topk_weights, topk_ids, lora, lora_ids, expert_map, routed_scaling, out)


def _fused_moe(
    x, w13, w2, topk_weights, topk_ids, lora, lora_ids, expert_map, routed_scaling, out, workspace, config
) -> torch.Tensor:
    _check(x, w13, w2, topk_weights, topk_ids, lora, lora_ids, expert_map, routed_scaling, out, config)
    if workspace is not None:
        _require(isinstance(workspace, Workspace), "workspace", "a Workspace", type(workspace).__name__)
        where = workspace.buffer.device
        _require(where == x.device, "workspace", f"on x's device {x.device}", where)
    if env.flag("CHECK"):
        _check_values(topk_weights, w2.shape[0], lora, expert_map)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, top_k = topk_ids.shape
    experts, hidden, inter = w2.shape
    base = "mxfp8" if isinstance(w13, MXFP8Tensor) else "dense"
    rank = 0 if lora is None else lora.rank
    scale = float(routed_scaling)
    for first in range(0, tokens, CHUNK):
        rows = slice(first, min(first + CHUNK, tokens))
        count = rows.stop - first
        shape = Shape(count, top_k, experts, hidden, inter, rank)
        cfg = config or MoEConfig.pick(x.device, count, top_k, experts, hidden, inter, base=base)
        if workspace is None:
            memory = torch.empty(bytes_needed(shape, cfg), dtype=torch.uint8, device=x.device)
            buffers = carve(memory, shape, cfg, x.dtype)
        else:
            buffers = workspace.buffers(shape, cfg, x.dtype)
        whole = count == tokens
        args = (x, topk_weights, topk_ids, lora_ids, out)
        xs, ws, ids, slots, o = args if whole else (a if a is None else a[rows] for a in args)
        with _on_device(x.device):
            _run(xs, w13, w2, ws, ids, lora, slots, expert_map, scale, o, buffers, cfg)
    return out


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


def _on_device(device: torch.device) -> Any:
    """Triton launches on the current device: make it x's where it is another."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _Nothing()
    return torch.cuda.device(device)
