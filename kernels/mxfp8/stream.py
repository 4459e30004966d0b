"""Decode's product on Hopper: codes go from memory straight into the registers that the tensor core reads.

Written in Gluon, because it rests on layouts that Triton does not let a kernel choose. A warp owns 16 outputs, or a
multiple, of 8 tokens and walks K; a thread loads 16 codes of a row at once and decodes them where they lie. Two things
make that possible:

* The tensor core sums over K in any order, so K is permuted: of 16 consecutive codes of a thread, each run of four is
  what the thread owes one instruction. Tokens are read from shared memory in the same order. Each change of layout
  below is checked by the compiler to move nothing.
* Codes stay 32-bit words until they are decoded: as bytes, the compiler takes them apart and puts them together again.

Tokens and scales of a program's share of K lie in shared memory, brought there once, after the first codes have been
requested; 512 codes of each row are under way in registers at any time. More tokens are left to the route ``bf16``:
here every warp reads all of them for its few outputs, and 16 are twice as many bytes as the codes of 16 outputs.

Before a program waits for the launch before its own, it asks for its first step of codes in L2. That asks for memory,
it does not read it, so weights that the launch before is still writing are seen as it leaves them.

Decoding is that of `decode_block.weights_bf16`, bit for bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.6 has the second name

BM = gl.constexpr(8)  # tokens of a tile: the short side of the instruction

# The layouts below say which registers, lanes and warps hold what of a step: BK codes of BN rows. 128 codes of K count
# 2 halves of 4 lanes of 4 words of 2 pairs of 2 codes; the tensor core's order is halves, words, pairs, lanes, codes: 8
# instructions of 16. An instruction takes 16 rows, the warps stand side by side, and where BN is larger each has more.


@gluon.constexpr_function
def _bases(first, last, column, rank):
    """Powers of two from ``first`` below ``last`` in one coordinate."""
    found = []
    while first < last:
        found.append([first if i == column else 0 for i in range(rank)])
        first *= 2
    return found


@gluon.constexpr_function
def _words_layout(bn, bk, warps):
    """(BN, BK/4) words: a thread has four consecutive ones of a row."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]] + _bases(16, bk // 4, 1, 2) + _bases(warps * 16, bn, 0, 2),
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        _bases(16, warps * 16, 0, 2),
        [],
        [bn, bk // 4],
    )


@gluon.constexpr_function
def _units_layout(bn, bk, warps):
    """The same as (BN, BK/16) units of one load."""
    return gl.DistributedLinearLayout(
        [[8, 0]] + _bases(4, bk // 16, 1, 2) + _bases(warps * 16, bn, 0, 2),
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        _bases(16, warps * 16, 0, 2),
        [],
        [bn, bk // 16],
    )


@gluon.constexpr_function
def _blocks_layout(bn, bk, warps):
    """The same as (BN, BK/64, 2, 8): words by blocks of one scale."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [8, 0, 0, 0]] + _bases(1, bk // 64, 1, 4) + _bases(warps * 16, bn, 0, 4),
        [[0, 0, 0, 4], [0, 0, 1, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        _bases(16, warps * 16, 0, 4),
        [],
        [bn, bk // 64, 2, 8],
    )


@gluon.constexpr_function
def _factors_layout(bn, bk, warps):
    """(BN, 2, BK/64) factors of blocks, the even ones first: a thread has one such half of a row."""
    return gl.DistributedLinearLayout(
        _bases(1, bk // 64, 2, 3) + [[8, 0, 0]] + _bases(warps * 16, bn, 0, 3),
        [[0, 0, 0], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        _bases(16, warps * 16, 0, 3),
        [],
        [bn, 2, bk // 64],
    )


@gluon.constexpr_function
def _tokens_layout(bk, warps):
    """(BM, BK) tokens: what a thread needs beside its words, alike in all warps."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]] + _bases(64, bk, 1, 2),
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[0, 0] for _ in _bases(1, warps, 0, 2)],
        [],
        [BM.value, bk],
    )


@gluon.constexpr_function
def _decode_asm(e5m2):
    """Four codes by way of fp16 and fp32, whose upper halves are bf16: elements have no more bits than those hold."""
    kind = "e5m2x2" if e5m2 else "e4m3x2"
    return f"""{{
        .reg .b16 c0, c1, h0, h1, h2, h3;
        .reg .b32 low, high, f0, f1, f2, f3;
        mov.b32 {{c0, c1}}, $4;
        cvt.rn.f16x2.{kind} low, c0;
        cvt.rn.f16x2.{kind} high, c1;
        mov.b32 {{h0, h1}}, low;
        mov.b32 {{h2, h3}}, high;
        cvt.f32.f16 f0, h0;
        cvt.f32.f16 f1, h1;
        cvt.f32.f16 f2, h2;
        cvt.f32.f16 f3, h3;
        prmt.b32 low, f0, f1, 0x7632;
        prmt.b32 high, f2, f3, 0x7632;
        mul.rn.bf16x2 low, low, $5;
        mul.rn.bf16x2 high, high, $5;
        mov.b32 {{$0, $1}}, low;
        mov.b32 {{$2, $3}}, high;
        }}"""


@gluon.constexpr_function
def _ask_asm(size):
    return f"""{{
        .reg .pred wanted;
        setp.ne.b32 wanted, $2, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], {size};
        mov.u32 $0, 0;
        }}"""


@gluon.jit
def _ask(at, wanted, SIZE: gl.constexpr):
    """Ask for SIZE bytes from each pointer in L2, where wanted: a hint, it reads nothing."""
    asm: gl.constexpr = _ask_asm(SIZE)
    args = [at.to(gl.int64), wanted.to(gl.int32)]
    gl.inline_asm_elementwise(asm, "=r,l,r", args, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _words(at, wanted, BN: gl.constexpr, BK: gl.constexpr):
    """int32 (BN, BK/4) from pointers to units of 16, if wanted; neighbours in 256 bytes come as far as L2."""
    load: gl.constexpr = "ld.global.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];"
    if wanted is True:
        a, b, c, d = gl.inline_asm_elementwise(
            load, "=r,=r,=r,=r,l", [at.to(gl.int64)],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            "{ .reg .pred wanted; setp.ne.b32 wanted, $5, 0; @wanted " + load + " }",
            "=r,=r,=r,=r,l,r", [at.to(gl.int64), gl.full(at.shape, wanted.to(gl.int32), gl.int32, at.type.layout)],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    # no memory access crosses this: else the assembler delays the loads until right before the words are needed
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    words = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [BN, BK // 4])
    return gl.convert_layout(words, _words_layout(BN, BK, gl.num_warps()), assert_trivial=True)


@gluon.jit
def _inside(row, rows, EVEN: gl.constexpr):
    """int64 rows, none out of bounds."""
    if EVEN:
        return row.to(gl.int64)
    else:
        return gl.minimum(row, rows - 1).to(gl.int64)


@gluon.jit
def _ordered(t, ROWS: gl.constexpr, BK: gl.constexpr):
    """(ROWS, BK) in the tensor core's order of K, from (ROWS, ...) in memory's."""
    t = gl.reshape(t, [ROWS, BK // 64, 4, 4, 2, 2])
    return gl.reshape(gl.permute(t, [0, 1, 3, 4, 2, 5]), [ROWS, BK])


@gluon.jit
def _times(acc, word, x_shared, f_shared, A: gl.constexpr, B: gl.constexpr, E5M2: gl.constexpr, BK: gl.constexpr):
    """``acc`` (BN, BM) plus one step: words (BN, BK/4) times tokens (BM, BK), with factors (BN, 2, BK/64)."""
    BN: gl.constexpr = acc.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    blocks: gl.constexpr = _blocks_layout(BN, BK, WARPS)
    x = _ordered(x_shared.load(_tokens_layout(BK, WARPS)), BM, BK)
    x = gl.convert_layout(gl.permute(x, [1, 0]), B, assert_trivial=True)
    f = gl.inline_asm_elementwise(  # in both halves of a word
        "prmt.b32 $0, $2, 0, 0x1010; prmt.b32 $1, $2, 0, 0x3232;",
        "=r,=r,r", [f_shared.load(_factors_layout(BN, BK, WARPS))],
        dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip
    f = gl.convert_layout(gl.permute(f, [0, 2, 1]), gl.SliceLayout(3, blocks), assert_trivial=True)
    f = gl.expand_dims(f, 3) + gl.zeros([BN, BK // 64, 2, 8], gl.int32, blocks)
    f = gl.convert_layout(gl.reshape(f, [BN, BK // 4]), word.type.layout, assert_trivial=True)
    asm: gl.constexpr = _decode_asm(E5M2)
    c0, c1, c2, c3 = gl.inline_asm_elementwise(
        asm, "=h,=h,=h,=h,r,r", [word, f],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    w = _ordered(gl.join(gl.join(c0, c2), gl.join(c1, c3)), BN, BK)
    return mma_v2(gl.convert_layout(w, A, assert_trivial=True), x, acc)


@gluon.jit
def _finish(acc, bias_ptr, out_ptr, n, m, M, N, stride_om, BIAS: gl.constexpr):
    """Sums (BN, BM) with the bias to the tile of the result, rounded once."""
    if BIAS:
        acc += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    at = m.to(gl.int64)[None, :] * stride_om + n[:, None]
    gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@gluon.jit(do_not_specialize=["M"])
def _stream_kernel(
    x_ptr,  # (M, K) bf16, rows contiguous and aligned to 16 bytes
    w_ptr,  # (N, K) uint8, likewise
    s_ptr,  # (N, K/32) uint8, rows contiguous, the first one aligned
    part_ptr,  # (SPLIT, N, BM) fp32
    count_ptr,  # (tiles of N,) int32, zero before and after (JOIN)
    bias_ptr,  # (N,)
    out_ptr,  # (M, N)
    M,
    N,
    K,  # a multiple of BK, at least 512
    stride_xm,
    stride_wn,
    stride_sn,
    stride_om,
    BIAS: gl.constexpr,
    E5M2: gl.constexpr,
    EVEN_N: gl.constexpr,
    PDL: gl.constexpr,
    JOIN: gl.constexpr,
    ASK_SCALES: gl.constexpr,  # bytes of a program's part of its tile's scales; 0 where tiles do not lie in one piece
    BN: gl.constexpr,
    BK: gl.constexpr,  # 128 or 256
    SPLIT: gl.constexpr,
    SHARE: gl.constexpr,  # a power of two, no less than the steps of any program
):
    """Grid (cdiv(N, BN), SPLIT): BN outputs of up to BM tokens over equal shares of the steps of K.

    With JOIN the last program of a tile adds the partial sums in the order of K; without, they are left for another.
    """
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = BK // 32
    AHEAD: gl.constexpr = 512 // BK  # steps that are requested while one is multiplied
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    tile, split = gl.program_id(0), gl.program_id(1)
    steps = K // BK
    first = split * steps // SPLIT
    count = (split + 1) * steps // SPLIT - first

    units: gl.constexpr = _units_layout(BN, BK, WARPS)
    n = _inside(tile * BN + gl.arange(0, BN, gl.SliceLayout(1, units)), N, EVEN_N)
    unit = gl.arange(0, BK // 16, gl.SliceLayout(0, units))
    w_at = (w_ptr + n * stride_wn + first * BK)[:, None] + (unit * 16)[None, :]

    if PDL:
        # one thread's request takes the warp as long as any number of bytes: a row each, dealt out to the warps
        lane_layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        thread = gl.arange(0, WARPS * 32, lane_layout)
        row = thread % 32 * WARPS + thread // 32
        _ask(w_ptr + _inside(tile * BN + row, N, EVEN_N) * stride_wn + first * BK, row < BN, BK)
        if ASK_SCALES > 0:  # of a tile that lie in one piece, a part by each of its programs
            at = s_ptr + (gl.cast(tile, gl.int64) * BN * (K // 32) + split * ASK_SCALES) + row * 0
            _ask(at, row == 0, ASK_SCALES)
        gdc_wait()
        gdc_launch_dependents()

    # codes, scales, tokens: what comes from furthest away is asked for first
    words = (_words(w_at, True, BN, BK),)
    for d in gl.static_range(1, AHEAD):
        words = words + (_words(w_at + gl.minimum(count - 1, d) * BK, True, BN, BK),)

    LANES: gl.constexpr = min(SHARE, 32)
    s_layout: gl.constexpr = gl.BlockedLayout([1, 1, BLOCKS], [32 // LANES, LANES, 1], [WARPS, 1, 1], [2, 1, 0])
    s_n = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, gl.SliceLayout(2, s_layout)))
    s_i = gl.arange(0, SHARE, gl.SliceLayout(0, gl.SliceLayout(2, s_layout)))
    s_b = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(1, s_layout)))
    s_row = s_ptr + _inside(s_n, N, EVEN_N) * stride_sn
    s_at = s_row[:, None, None] + ((first + s_i) * BLOCKS)[None, :, None] + s_b[None, None, :]
    s = gl.load(s_at, mask=(s_i < count)[None, :, None], other=127)

    # tokens by AHEAD steps at a time; the first of them need not wait for all
    SOME: gl.constexpr = min(SHARE, AHEAD)
    WP: gl.constexpr = min(WARPS, SOME)
    x_layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // BK, BK // 8], [WP, WARPS // WP, 1], [2, 1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    xs = gl.allocate_shared_memory(gl.bfloat16, [SHARE // SOME, SOME, BM, BK], swizzled)
    x_i = gl.arange(0, SOME, gl.SliceLayout(1, gl.SliceLayout(2, x_layout)))[:, None, None]
    x_m = gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(2, x_layout)))[None, :, None]
    x_k = gl.arange(0, BK, gl.SliceLayout(0, gl.SliceLayout(1, x_layout)))[None, None, :]
    stride_xm = stride_xm // 8 * 8  # as it is, but a compiler that knows no multiple of 16 does not see it
    x_at = x_ptr + x_m.to(gl.int64) * stride_xm + (first * BK + x_i * BK + x_k)
    for j in gl.static_range(SHARE // SOME):
        mask = (x_m < M) & (j * SOME + x_i < count)
        async_copy.async_copy_global_to_shared(xs.index(j), x_at + j * SOME * BK, mask=mask)
        if j == 0:
            async_copy.commit_group()
    async_copy.commit_group()
    xs = xs._reinterpret(gl.bfloat16, [SHARE, BM, BK], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))

    # scales become factors in bf16: bytes 0 and 255 are 2**-127 and NaN
    bits = gl.maximum(s.to(gl.int16) << 7, 0x0040)
    bits = gl.where(s == 255, 0x7FC0, bits).to(gl.int16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    fs = gl.allocate_shared_memory(gl.int16, [SHARE * BN, BLOCKS], plain)
    bits = gl.permute(gl.reshape(bits, [BN, SHARE, BLOCKS // 2, 2]), [1, 0, 3, 2])
    fs.store(gl.reshape(bits, [SHARE * BN, BLOCKS]))
    fs = fs._reinterpret(gl.int16, [SHARE, BN, 2, BLOCKS // 2], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    async_copy.wait_group(1)
    _barrier()

    acc = gl.zeros([BN, BM], gl.float32, mma)
    for i in range(0, count, AHEAD):
        if i == AHEAD:
            async_copy.wait_group(0)
            _barrier()
        for d in gl.static_range(AHEAD):
            if i + d < count:
                acc = _times(acc, words[0], xs.index(i + d), fs.index(i + d), A, B, E5M2, BK)
            later = i + d + AHEAD
            words = words[1:] + (_words(w_at + later * BK, later < count, BN, BK),)
    async_copy.wait_group(0)  # where there were few steps: no copy outlives its program

    m = gl.arange(0, BM, gl.SliceLayout(0, mma))
    n_out = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, mma))
    if SPLIT > 1:
        plane = gl.cast(N, gl.int64) * BM
        at = part_ptr + n_out.to(gl.int64)[:, None] * BM + m[None, :]
        mask = (n_out < N)[:, None]
        gl.store(at + split * plane, acc, mask=mask)
        if JOIN:
            _barrier()  # every thread's stores come before the release of the one that counts
            arrived = gl.atomic_add(count_ptr + tile, 1, sem="acq_rel")
            if arrived == SPLIT - 1:
                gl.store(count_ptr + tile, 0)
                total = gl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
                for j in gl.static_range(1, SPLIT):
                    total += gl.load(at + j * plane, mask=mask, other=0.0, cache_modifier=".cg")
                _finish(total, bias_ptr, out_ptr, n_out, m, M, N, stride_om, BIAS)
    else:
        _finish(acc, bias_ptr, out_ptr, n_out, m, M, N, stride_om, BIAS)
