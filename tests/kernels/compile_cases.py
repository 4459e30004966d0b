"""Compiles the kernels that public calls launch, for a GPU that need not be there, and prints one JSON line a kernel.

    python tests/kernels/compile_cases.py 90 router moe_lora      # architecture, groups (none: all but rules)

The calls below run as they are, on tensors that live on the host but say they are on an H200: every launch is compiled
with the very signature, specialisation, constants and options that it would have there, and nothing is executed. To
cover a kernel, add a call to the group of its file.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

CUDA = torch.device("cuda", 0)
NAMES = {90: "NVIDIA H200", 100: "NVIDIA B200", 120: "NVIDIA RTX PRO 6000 Blackwell"}
SHARED = {90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # bytes that a program may have


class OnCuda(torch.Tensor):
    """A host tensor that says it is on the GPU."""

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)


def _host(value):
    if isinstance(value, torch.device | str) and str(value).startswith("cuda"):
        return torch.device("cpu")
    return value


class CudaOnHost(TorchFunctionMode):
    """Makes on the host what a call asks for on the GPU, and keeps what comes of it marked."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        asked = "device" in kwargs and str(kwargs["device"]).startswith("cuda")
        moved = func is torch.Tensor.cuda or any(
            isinstance(a, torch.device | str) and str(a).startswith("cuda") for a in args[1:]
        )
        kwargs = {k: _host(v) for k, v in kwargs.items()}
        if func is torch.Tensor.cuda:
            return args[0].as_subclass(OnCuda)
        out = func(*map(_host, args), **kwargs)
        return out.as_subclass(OnCuda) if (asked or moved) and isinstance(out, torch.Tensor) else out


class Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return CUDA


@contextlib.contextmanager
def pretend(arch: int):
    """Inside, torch describes the GPU of ``arch`` and a launch only compiles; yields the list of what was compiled."""
    compiled = []
    run = JITFunction.run
    properties = SimpleNamespace(
        name=NAMES[arch], major=arch // 10, minor=arch % 10, multi_processor_count=132, L2_cache_size=60 << 20,
        total_memory=140 << 30, shared_memory_per_block_optin=SHARED[arch], warp_size=32,
    )  # fmt: skip

    def compile_only(self, *args, grid, warmup, **kwargs):
        start = time.time()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((f"{self.__module__}.{self.__name__}", kernel, time.time() - start))
        return kernel

    fakes = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: NAMES[arch],
        "get_device_capability": lambda device=None: (arch // 10, arch % 10),
        "get_device_properties": lambda device=None: properties,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0, synchronize=lambda: None),
        "is_current_stream_capturing": lambda: False,
    }
    before = {name: getattr(torch.cuda, name) for name in fakes}
    triton.runtime.driver.set_active(Driver(arch))
    JITFunction.run = compile_only
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    try:
        with CudaOnHost(), torch.no_grad():
            yield compiled
    finally:
        JITFunction.run = run
        for name, real in before.items():
            setattr(torch.cuda, name, real)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=CUDA)


def router():
    from beam_moe.kernels import router as module

    f32 = torch.float32
    beam = {"top_k": 8, "n_group": 8, "topk_group": 4}
    weight, bias = empty(256, 5120, dtype=f32), empty(256, dtype=f32)
    for tokens in (1, 64, 4096):
        module.grouped_topk(empty(tokens, 5120), weight, bias, **beam)
    module.grouped_topk(empty(3, 200, dtype=torch.float16), empty(60, 200), top_k=4, scoring="softmax")
    module.grouped_topk(empty(3, 2048, dtype=f32), empty(1000, 2048, dtype=f32), top_k=16, n_group=8, topk_group=3)
    module.route(empty(2000, 128, dtype=f32), top_k=8, scoring="softmax")


def moe_lora():
    """Every launch form of the fused layer at Beam's share of TP 8, and shapes that no table knows."""
    from beam_moe.kernels import mxfp8 as q
    from beam_moe.kernels.moe_lora import ExpertLoRA, MoEConfig, fused_moe
    from beam_moe.kernels.mxfp8.decode_block import prepare

    def bank(slots, experts, rank, hidden, inter, shared=False, one_a=False, dtype=torch.bfloat16):
        outer = 1 if shared else experts
        return ExpertLoRA(
            empty(slots, outer, 1 if one_a else 2, rank, hidden, dtype=dtype),
            empty(slots, experts, 2, inter, rank, dtype=dtype),
            empty(slots, experts, rank, inter, dtype=dtype),
            empty(slots, outer, hidden, rank, dtype=dtype),
            ranks=torch.full((slots,), rank, dtype=torch.int32, device=CUDA),
            enabled=torch.ones(slots, dtype=torch.int32, device=CUDA),
        )

    def mxfp8_weight(experts, rows, cols):
        return prepare(
            q.MXFP8Tensor(
                empty(experts, rows, cols, dtype=torch.uint8).view(torch.float8_e4m3fn),
                empty(experts, rows, cols // 32, dtype=torch.uint8),
                -1,
            )
        )

    def layer(
        tokens, experts, top_k, hidden, inter, lora=None, emap=False, base=None, dtype=torch.bfloat16, config=None
    ):  # fmt: skip
        w13, w2 = base or (empty(experts, 2 * inter, hidden, dtype=dtype), empty(experts, hidden, inter, dtype=dtype))
        fused_moe(
            empty(tokens, hidden, dtype=dtype),
            w13,
            w2,
            empty(tokens, top_k, dtype=torch.float32),
            empty(tokens, top_k, dtype=torch.int32),
            lora=lora,
            lora_ids=None if lora is None else empty(tokens, dtype=torch.int32),
            expert_map=empty(4 * experts, dtype=torch.int32) if emap else None,
            config=config,
        )

    beam = (256, 8, 5120, 320)
    base = mxfp8_weight(256, 640, 5120), mxfp8_weight(256, 5120, 320)
    for tokens in (1, 16, 64, 256, 4096):
        layer(tokens, *beam)
        layer(tokens, *beam, lora=bank(4, 256, 32, 5120, 320))
        layer(tokens, *beam, lora=bank(1, 256, 64, 5120, 320))
    for tokens in (1, 4096):  # 16 in `moe_lora_mxfp8`
        layer(tokens, *beam, lora=bank(1, 256, 32, 5120, 320), base=base)
    for tokens in (16, 256):
        layer(tokens, *beam, lora=bank(1, 256, 32, 5120, 320, shared=True))
        layer(tokens, *beam, lora=bank(1, 256, 32, 5120, 320, one_a=True), emap=True)
    joined = MoEConfig(rows="plan", lag=8, splits=2, up_stages=3, down_block_n=64, down_stages=3)
    whole = replace(joined, down_whole=True, down_stages=2, down_tiles=4)
    narrow = replace(joined, block_m=8, wide=4, lora_wide=2, lag=0), replace(joined, block_m=8, wide=2, down_whole=True)
    for config in (joined, whole, *narrow):
        layer(16, *beam, config=config)
        layer(16, *beam, lora=bank(1, 256, 32, 5120, 320), config=config)
    layer(16, *beam, lora=bank(4, 256, 32, 5120, 320, shared=True), emap=True, config=whole)
    layer(16, 7, 3, 200, 72, lora=bank(2, 7, 5, 200, 72, dtype=torch.float16), dtype=torch.float16)
    layer(16, 16, 2, 512, 128, lora=bank(1, 16, 512, 512, 128))
    layer(4096, *beam, lora=bank(2, 256, 128, 5120, 320, shared=True))
    half = torch.float16  # several slots and tiles: a loop that carries B2
    layer(4096, 128, 8, 2048, 768, lora=bank(4, 128, 32, 2048, 768, dtype=half), dtype=half)


def mxfp8_layer(
    tokens, experts, top_k, hidden, inter, prepared=True, slots=0, rank=32, shared=False, dtype=torch.bfloat16,
    config=None,
):  # fmt: skip
    """One call of the fused layer on MXFP8 weights."""
    from beam_moe.kernels.moe_lora import ExpertLoRA, fused_moe
    from beam_moe.kernels.mxfp8 import MXFP8Tensor

    def weight(rows, cols):
        data = empty(experts, rows, cols, dtype=torch.float8_e4m3fn)
        words = empty(experts, rows, dtype=torch.int16) if prepared else None
        return MXFP8Tensor(data, empty(experts, rows, cols // 32, dtype=torch.uint8), rows=words)

    lora, outer = None, 1 if shared else experts
    if slots:
        lora = ExpertLoRA(
            empty(slots, outer, 2, rank, hidden, dtype=dtype),
            empty(slots, experts, 2, inter, rank, dtype=dtype),
            empty(slots, experts, rank, inter, dtype=dtype),
            empty(slots, outer, hidden, rank, dtype=dtype),
            ranks=torch.full((slots,), rank, dtype=torch.int32, device=CUDA),
            enabled=torch.ones(slots, dtype=torch.int32, device=CUDA),
        )
    fused_moe(
        empty(tokens, hidden, dtype=dtype),
        weight(2 * inter, hidden),
        weight(hidden, inter),
        empty(tokens, top_k, dtype=torch.float32),
        empty(tokens, top_k, dtype=torch.int32),
        lora=lora,
        lora_ids=None if lora is None else empty(tokens, dtype=torch.int32),
        config=config,
    )


def moe_lora_mxfp8():
    """The fused layer on MXFP8 weights: both forms, with and without adapters, at decode and beyond a block."""
    from beam_moe.kernels.moe_lora import MoEConfig

    layer = mxfp8_layer
    pinned, rule = MoEConfig.mxfp8_heuristic(16, 8, 64, 2048, 1024), MoEConfig.mxfp8_heuristic(8192, 8, 64, 2048, 1024)
    for config in (rule, rule.summing_as(pinned, base="mxfp8")):
        layer(8192, 64, 8, 2048, 1024, slots=1, config=config)
    layer(16, 256, 8, 5120, 320, slots=1)
    layer(16, 256, 8, 5120, 320, slots=4, shared=True)
    layer(16, 256, 8, 5120, 320, slots=1, rank=64)
    layer(16, 256, 8, 5120, 320)
    layer(1024, 256, 8, 5120, 320, slots=1)
    layer(16, 256, 8, 5120, 320, prepared=False)
    layer(16, 32, 8, 5120, 2560, slots=1)
    layer(5, 4, 2, 96, 96, dtype=torch.float16)
    layer(5, 4, 2, 96, 96, prepared=False, dtype=torch.float16)


def moe_lora_rules():
    """Launches that a device without a table gets, the largest of each kind."""
    from beam_moe.kernels.moe_lora import MoEConfig, fused_moe

    for tokens, inter in ((16, 768), (8192, 768), (8192, 320)):
        mxfp8_layer(tokens, 128, 8, 2048, inter, slots=1)
        mxfp8_layer(tokens, 128, 8, 2048, inter, slots=2, rank=128)
    few, many = (MoEConfig.pick(CUDA, tokens, 8, 128, 2048, 320, base="mxfp8") for tokens in (16, 8192))
    pinned = many.summing_as(few, base="mxfp8")
    for slots in (0, 1):
        mxfp8_layer(8192, 128, 8, 2048, 320, slots=slots, config=pinned)
    for tokens in (64, 8192):
        mxfp8_layer(tokens, 128, 8, 2048, 320, prepared=False, dtype=torch.float16)
    x, w13, w2 = empty(8192, 2048), empty(128, 1536, 2048), empty(128, 2048, 768)
    fused_moe(x, w13, w2, empty(8192, 8, dtype=torch.float32), empty(8192, 8, dtype=torch.int32))


def mxfp8():
    """Quantisation in each direction, and products at decode, in between and at training size."""
    from beam_moe.kernels import mxfp8 as q
    from beam_moe.kernels.mxfp8.decode_block import prepare
    from beam_moe.kernels.mxfp8.gemm import GemmConfig, gemm
    from beam_moe.kernels.mxfp8.grouped import grouped_gemm, grouped_wgrad

    def i32(*values):
        return torch.tensor(values, dtype=torch.int32).as_subclass(OnCuda)

    groups = i32(0, 100, 100, 256)
    x, w = empty(256, 512), empty(384, 512)
    for options in ({}, {"axis": -2}, {"elem": "e5m2", "rounding": "floor"}, {"swizzle": True}):
        q.dequantize(q.quantize(x, **options)) if "swizzle" not in options else q.quantize(x, **options)
    q.quantize_both(x)
    q.quantize_both(x, offsets=groups)
    q.silu_mul_quantize(x)
    row, col = q.quantize(w), q.quantize(w, axis=-2)
    ready = prepare(q.quantize(w))
    for rows in (1, 16, 64, 300):
        for a in (empty(rows, 512), q.quantize(empty(rows, 512))):
            gemm(a, row)
            gemm(a, ready)
            if rows <= 64:
                gemm(a, ready, config=GemmConfig("fp16", max(16, rows), 64, 256 if rows < 64 else 128, 2, 4, 3))
                gemm(a, ready, config=GemmConfig("fp16", max(8, rows), 32, 256, 2, 2, 3))
        gemm(empty(rows, 384), col.mT)
    gemm(empty(5, 512, dtype=torch.float16), ready, bias=empty(384))
    for split, bk in ((1, 128), (2, 256)):
        gemm(empty(8, 512), row, config=GemmConfig("stream", 8, 64, bk, split, 4, 2, True))
    experts, experts_ready = q.quantize(empty(3, 384, 512)), prepare(q.quantize(empty(3, 384, 512)))
    for rows in (8, 256):
        for weights in (experts, experts_ready):
            grouped_gemm(empty(rows, 512), weights, groups)
        grouped_wgrad(empty(rows, 384), empty(rows, 512), groups)
    grouped_gemm(empty(256, 512), experts, groups, config=GemmConfig("dequantize"))
    turned = q.quantize(empty(3, 384, 512), axis=-2).mT
    grouped_gemm(empty(256, 384), turned, groups)
    for tile in ((128, 64, 128, 1, 4, 3), (256, 64, 64, 1, 4, 3)):
        grouped_gemm(empty(256, 512), experts, groups, config=GemmConfig("bf16", *tile))
        grouped_gemm(empty(256, 384), turned, groups, config=GemmConfig("bf16", *tile))
    grouped_wgrad(q.quantize(empty(256, 384), axis=-2, offsets=groups), q.quantize(x, axis=-2, offsets=groups), groups)


def mxfp8_native():
    """Products of two MXFP8 operands, for GPUs that scale blocks themselves (architecture 100)."""
    from beam_moe.kernels import mxfp8 as q
    from beam_moe.kernels.mxfp8.autograd import linear_gradients
    from beam_moe.kernels.mxfp8.gemm import gemm

    for rows in (16, 256):
        gemm(q.quantize(empty(rows, 512)), q.quantize(empty(384, 512)))
    if torch.cuda.get_device_capability()[0] >= 10:  # elsewhere swizzled scales are refused
        for rows in (16, 128, 256):
            gemm(q.quantize(empty(rows, 512), swizzle=True), q.quantize(empty(384, 512), swizzle=True))
        for rows in (16, 300):
            x, w = empty(rows, 512), empty(384, 512)
            dy = q.linear(x, w)
            linear_gradients(dy, x, w, None, None, False, x.dtype, torch.float32, None)


def grouped_lora():
    """Training: forward and backward at Beam's shapes, and what makes each operand leave its fast path."""
    from beam_moe.kernels import mxfp8 as q
    from beam_moe.kernels.moe_lora.grouped_linear import _GroupedLinearLoRA

    def step(rows, experts, n, k, rank, shared=False, dtype=torch.bfloat16, factors=None, mx=False):
        factors = factors or dtype
        x, w = empty(rows, k, dtype=dtype), empty(experts, n, k, dtype=dtype)
        a = empty(1 if shared else experts, rank, k, dtype=factors)
        b = empty(1 if shared else experts, n, rank, dtype=factors)
        offsets = torch.zeros(experts + 1, dtype=torch.int32, device=CUDA)
        pair, w = (q.quantize_both(w), None) if mx else (None, w)
        # the engine runs a backward pass outside the mode that marks tensors, so it is called as a function
        saved = SimpleNamespace(needs_input_grad=(True, not mx, False, True, True))
        saved.save_for_backward = lambda *tensors: setattr(saved, "saved_tensors", tensors)
        y = _GroupedLinearLoRA.forward(saved, x, w, offsets, a, b, 0.5, pair, mx, dtype)
        _GroupedLinearLoRA.backward(saved, y)

    step(8192, 32, 2560, 5120, 32)
    step(8192, 4, 2560, 5120, 32, shared=True)
    step(256, 32, 2560, 5120, 24, factors=torch.float32)
    step(256, 3, 200, 72, 5, dtype=torch.float16)
    step(256, 3, 200, 72, 1, dtype=torch.float32)
    step(1024, 3, 384, 512, 512, mx=True)


def linear_lora():
    """The dense layers of Beam's share of TP 8, and shapes that fill no block."""
    from beam_moe.kernels.linear_lora import add_lora

    i32 = torch.int32

    def layer(tokens, hidden, widths, slots, rank, dtype=torch.bfloat16):
        x, out = empty(tokens, hidden, dtype=dtype), empty(tokens, sum(widths), dtype=dtype)
        a = [empty(slots, rank, hidden, dtype=dtype) for _ in widths]
        b = [empty(slots, w, rank, dtype=dtype) for w in widths]
        add_lora(out, x, a, b, empty(tokens, dtype=i32), empty(slots, len(widths), dtype=i32))

    layer(16, 5120, (768, 128, 128, 768), 1, 32)
    layer(64, 768, (5120,), 4, 64)
    layer(3, 200, (40, 40), 2, 5, dtype=torch.float16)
    layer(64, 1601, (40, 40), 2, 33)


def elementwise():
    from beam_moe.kernels.silu_mul import silu_mul

    silu_mul(empty(300, 640))
    silu_mul(empty(3, 34, dtype=torch.float32))


GROUPS = {
    f.__name__: f
    for f in (
        router,
        moe_lora,
        moe_lora_mxfp8,
        moe_lora_rules,
        grouped_lora,
        mxfp8,
        mxfp8_native,
        linear_lora,
        elementwise,
    )
}


def kernels() -> list[str]:
    """Every kernel of the package: a jit function named ``_..._kernel``, by module and name."""
    import beam_moe.kernels

    found = set()
    for info in pkgutil.walk_packages(beam_moe.kernels.__path__, "beam_moe.kernels."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                found.add(f"{value.__module__}.{name}")
    return sorted(found)


def running_on(ttgir: str) -> int:
    """Matrix instructions that read a register operand and may still run when the next step overwrites it.

    Each such ``warp_group_dot`` has its wait behind it; a wait for all but a few lets them run on.
    """
    found, reads_registers = 0, False
    for line in ttgir.splitlines():
        if "warp_group_dot %" in line:
            reads_registers = re.search(r": tensor<[^>]*dot_op", line) is not None
        elif "warp_group_dot_wait" in line:
            pending = re.search(r"pendings = (\d+)", line)
            found += reads_registers and pending is not None and int(pending[1]) > 0
            reads_registers = False
    return found


def main() -> int:
    arch, groups = int(sys.argv[1]), sys.argv[2:] or [name for name in GROUPS if name != "moe_lora_rules"]
    failed = 0
    for group in groups:
        with pretend(arch) as compiled:
            try:
                GROUPS[group]()
            except Exception as error:  # one group's failure is a line of its own; the others are still compiled
                failed = 1
                import traceback

                traceback.print_exc()
                print(json.dumps({"group": group, "error": f"{type(error).__name__}: {error}"[:2000]}))
        for name, kernel, seconds in compiled:
            ptx = kernel.asm["ptx"]
            target = next(line.split()[1] for line in ptx.splitlines() if line.startswith(".target"))
            products = sorted(set(re.findall(r"tcgen05\.mma[\w.:]*|wgmma\.mma_async|mma\.sync", ptx)))
            row = {"group": group, "kernel": name, "target": target, "shared": kernel.metadata.shared, "mma": products}
            row["running_on"] = running_on(kernel.asm["ttgir"])
            if arch >= 100:
                row["trap"] = re.search(r"\btrap;", ptx) is not None  # all that is left of a kernel that needs too much
                row["tmem"] = kernel.metadata.tmem_size
                row["tmem_copies"] = len(re.findall(r"tcgen05\.cp\.\S*warpx4", ptx))
                row["tmem_stores"] = sum(map(int, re.findall(r"tcgen05\.st\.\S*\.x(\d+)\.b32", ptx)))  # words a lane
            print(json.dumps({**row, "seconds": round(seconds, 2)}))
    print(json.dumps({"triton": triton.__version__, "kernels": kernels()}))
    return failed


if __name__ == "__main__":
    sys.exit(main())
