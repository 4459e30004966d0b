"""The fused layer on MXFP8 weights: against its reference and against itself on the dequantised weights."""

import dataclasses

import pytest
import torch

from beam_moe.kernels.moe_lora import ExpertLoRA, MoEConfig, fused_moe, fused_moe_reference, moe_workspace
from beam_moe.kernels.mxfp8 import MXFP8Tensor, dequantize_reference, prepare, quantize_reference
from beam_moe.testing import assert_close

CUDA = torch.cuda.is_available()
LIMIT = {torch.float16: 2e-4, torch.bfloat16: 8e-4 if CUDA else 1e-2}  # as the dense layer's; the interpreter truncates
H, I, E, TOP_K = 96, 96, 4, 2  # 96 is a step of 64 and half a step: every tile has a masked one
SMALL = MoEConfig(
    rows="plan", block_m=16, up_block_n=64, up_block_k=64, up_stages=2, splits=2, act_block_i=32,
    down_block_n=64, down_block_k=64, down_stages=2, down_tiles=2, down_whole=True, combine_block_h=64,
)  # fmt: skip
STEPPED = dataclasses.replace(SMALL, down_whole=False)


def to_fp8(codes):
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def layer(device, tokens=5, dtype=torch.float16, prepared=True, slots=0, rank=8, shared=False):
    """Arguments of `fused_moe` by name. No token chooses the last expert, whose weights are NaN throughout."""
    w13 = quantize_reference(torch.randn(E, 2 * I, H) / H**0.5)
    w2 = quantize_reference(torch.randn(E, H, I) / I**0.5)
    for w in (w13, w2):
        w.data.view(torch.uint8)[-1] = 0x7F
        w.scale[-1] = 255
    w13, w2 = w13.to(device), w2.to(device)
    args = {
        "x": torch.randn(tokens, H).to(dtype).to(device),
        "w13": prepare(w13) if prepared else w13,
        "w2": prepare(w2) if prepared else w2,
        "topk_weights": torch.rand(tokens, TOP_K).add(0.1).to(device),
        "topk_ids": torch.randint(0, E - 1, (tokens, TOP_K), dtype=torch.int32).to(device),
    }
    if slots:
        outer = 1 if shared else E

        def new(*shape):
            return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype).to(device)

        args["lora"] = ExpertLoRA(
            new(slots, outer, 2, rank, H), new(slots, E, 2, I, rank), new(slots, E, rank, I), new(slots, outer, H, rank)
        )
        args["lora_ids"] = (torch.arange(tokens, dtype=torch.int32) % slots).to(device)
    return args


def reference(args):
    return fused_moe_reference(**args)


def check(args, config=SMALL):
    got = fused_moe(**args, config=config)
    assert_close("fused_moe", reference(args), got, LIMIT[args["x"].dtype])
    return got


def changed(args, name, **fields):
    """``args`` with another scale or data of one weight, prepared again if it was."""
    w = args[name]
    new = MXFP8Tensor(fields.get("data", w.data), fields.get("scale", w.scale))
    return args | {name: prepare(new) if w.rows is not None else new}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [SMALL, STEPPED], ids=["whole", "stepped"])
@pytest.mark.parametrize("prepared", [False, True])
def test_equals_the_reference(device, prepared, config, dtype):
    check(layer(device, dtype=dtype, prepared=prepared, slots=2), config)


@pytest.mark.parametrize("rows", ["plan", "search", "direct"])
def test_every_way_to_find_rows(device, rows):
    """bf16: the launch that normalises x stands alone where there is no plan."""
    check(layer(device, dtype=torch.bfloat16, slots=1), dataclasses.replace(SMALL, rows=rows))


def test_equals_the_layer_on_dequantised_weights(device):
    args = layer(device, slots=2, shared=True)
    dense = args | {n: dequantize_reference(args[n]).half() for n in ("w13", "w2")}
    dense_config = dataclasses.replace(SMALL, up_block_k=32, down_block_k=32)
    want = fused_moe(**dense, config=dense_config)
    assert_close("fused_moe", want, fused_moe(**args, config=SMALL), LIMIT[torch.float16])


def test_launch_parameters_of_the_device_and_a_workspace_of_both_bases(device):
    args = layer(device, tokens=7, slots=1)
    shard = type("Shard", (), {"hidden": H, "intermediate": I, "num_experts": E})
    workspace = moe_workspace(7, TOP_K, shard, 8, device)
    out = torch.full_like(args["x"], float("nan"))
    got = fused_moe(**args, out=out, workspace=workspace)
    assert got is out
    assert_close("fused_moe", reference(args), got, LIMIT[torch.float16])
    assert torch.equal(got, fused_moe(**args))


def test_rows_without_an_adapter_keep_their_bits(device):
    args = layer(device, tokens=6, slots=2)
    args["lora_ids"] = torch.tensor([-1, 0, 1, 2, -1, 0], dtype=torch.int32, device=device)
    got = check(args)
    plain = fused_moe(**{k: v for k, v in args.items() if k not in ("lora", "lora_ids")}, config=SMALL)
    bare = [0, 3, 4]
    assert torch.equal(got[bare], plain[bare])
    assert not torch.equal(got[[1, 2, 5]], plain[[1, 2, 5]])


def test_expert_map_and_ids_out_of_range(device):
    args = layer(device, slots=1)
    args["expert_map"] = torch.tensor([-1, 2, -1, 0, 1, -1], dtype=torch.int32, device=device)
    ids = torch.tensor([[0, 1], [3, 4], [5, 2], [-1, 3], [7, 4]], dtype=torch.int32, device=device)
    args["topk_ids"] = ids
    got = check(args)
    assert torch.equal(got[2], torch.zeros_like(got[2]))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_zero_blocks_with_scale_byte_0_beside_large_ones(device, name, prepared):
    args = layer(device, prepared=prepared)
    data, scale = args[name].data.view(torch.uint8).clone(), args[name].scale.clone()
    data[0, ::3, 32:64], scale[0, ::3, 1] = 0, 0
    data[1, 5], scale[1, 5] = 0, 0
    check(changed(args, name, data=to_fp8(data), scale=scale))


@pytest.mark.parametrize("config", [SMALL, STEPPED], ids=["whole", "stepped"])
def test_scale_byte_255_is_nan_in_its_row_alone(device, config):
    args = layer(device)
    args["topk_ids"] = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1], [1, 0]], dtype=torch.int32, device=device)
    scale = args["w2"].scale.clone()
    scale[0, 11, 2] = 255
    got = fused_moe(**changed(args, "w2", scale=scale), config=config)
    want = fused_moe(**args, config=config)
    hit = torch.zeros_like(want, dtype=torch.bool)
    hit[[0, 2, 4], 11] = True
    assert got[hit].isnan().all() and torch.equal(got[~hit], want[~hit])


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_rows_too_wide_for_fp16_are_exact_and_alone(device, name):
    """One row's scales spread over 30 binades: it takes the bf16 form, the other rows keep their bits.

    Its largest block meets zeros, so what fp16 would lose is all there is.
    """
    args = layer(device, prepared=True)
    args["topk_ids"][:, 0] = 0
    args["x"][:, :32] = 0
    data = args["w13"].data.view(torch.uint8).clone()
    data[0, :32] = 0  # h is zero there
    args = changed(args, "w13", data=to_fp8(data))
    scale = args[name].scale.clone()
    scale[0, 50, 0] += 30
    spread = changed(args, name, scale=scale)
    assert int(spread[name].rows[0, 50]) & 256
    got = check(spread)
    if name == "w2":
        others = [n for n in range(H) if n != 50]
        assert torch.equal(got[:, others], fused_moe(**args, config=SMALL)[:, others])


def test_tokens_too_wide_for_fp16_are_exact_and_alone(device):
    """A bf16 row over 2**60 takes the bf16 form; the other rows keep their bits. The large element meets zeros."""
    args = layer(device, dtype=torch.bfloat16, slots=1)
    for a in args["lora"].gate_up_a:
        a[..., 0] = 0
    data = args["w13"].data.view(torch.uint8).clone()
    data[..., 0] = 0
    args = changed(args, "w13", data=to_fp8(data))
    before = fused_moe(**args, config=SMALL)
    x = args["x"].clone()
    x[2, 0] = 2.0**60
    got = check(args | {"x": x})
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], before[others])


def test_intermediates_too_wide_for_fp16_are_exact_and_alone(device):
    """The same for h, which spreads over 2**45 where one gate and up are large; it meets zeros in W2 and A2."""
    args = layer(device, dtype=torch.bfloat16, slots=1)
    args["lora"].w2_a[..., 0] = 0
    data, scale = args["w2"].data.view(torch.uint8).clone(), args["w13"].scale.clone()
    data[..., 0] = 0
    args = changed(args, "w2", data=to_fp8(data))
    args["topk_ids"] = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 2], [2, 1]], dtype=torch.int32, device=device)
    before = fused_moe(**args, config=SMALL)
    scale[0, 0] += 25
    scale[0, I] += 25
    got = check(changed(args, "w13", scale=scale))
    assert torch.equal(got[[1, 3, 4]], before[[1, 3, 4]])


def test_a_token_that_is_not_finite_stays_alone(device):
    args = layer(device, dtype=torch.bfloat16)
    before = fused_moe(**args, config=SMALL)
    x = args["x"].clone()
    x[1, 4], x[3, 5] = float("nan"), float("inf")
    got = fused_moe(**args | {"x": x}, config=SMALL)
    assert got[[1, 3]].isnan().all()
    assert torch.equal(got[[0, 2, 4]], before[[0, 2, 4]])


def test_strided_weights_and_activations(device):
    """Pointer loads where rows are not packed; what lies between them is NaN."""
    args = layer(device)
    want = fused_moe(**args, config=SMALL)

    def apart(t, fill):
        pool = torch.full([n + 3 for n in t.shape[:-1]] + [t.shape[-1] + 64], fill, dtype=torch.uint8, device=device)
        view = pool[tuple(slice(1, n + 1) for n in t.shape[:-1]) + (slice(0, t.shape[-1]),)]
        view.copy_(t.view(torch.uint8))
        return view

    for name in ("w13", "w2"):
        w = args[name]
        args[name] = prepare(MXFP8Tensor(apart(w.data, 0x7F).view(torch.float8_e4m3fn), apart(w.scale, 255)))
    x = torch.full((5, 2 * H), float("nan"), dtype=torch.float16, device=device)
    x[:, :H] = args["x"]
    got = fused_moe(**args | {"x": x[:, :H]}, config=SMALL)
    assert_close("fused_moe", want, got, 1e-6)


def test_no_token_and_no_launch(device):
    assert fused_moe(**layer(device, tokens=0), config=SMALL).shape == (0, H)


def test_refusals(device):
    args = layer(device)
    w13, w2 = args["w13"], args["w2"]

    def refused(match, **change):
        with pytest.raises(ValueError, match=match):
            fused_moe(**args | change, config=SMALL)

    refused("w2 must be MXFP8 where w13 is", w2=dequantize_reference(w2).half())
    refused("w2 must be MXFP8 where w13 is", w13=dequantize_reference(w13).half())
    e5m2 = MXFP8Tensor(w13.data.view(torch.uint8).view(torch.float8_e5m2), w13.scale)
    refused("w13 must be of E4M3 elements, got e5m2", w13=e5m2)
    columns = quantize_reference(torch.randn(E, 2 * I, H), axis=-2).to(device)
    refused("w13 must be of blocks along its last axis", w13=columns)
    short = quantize_reference(torch.randn(E, H, 40)).to(device)
    refused("w2 must be of a last axis that 32 divides", w2=short)
    refused("w13 must be", w13=quantize_reference(torch.randn(E, 2 * I + 2, H)).to(device))
    refused("w2.scale must be of innermost stride 1", w2=MXFP8Tensor(w2.data, w2.scale.mT.contiguous().mT))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "slots", "change"),
    [
        (1, 1, {}),
        (16, 1, {"up_stages": 4, "splits": 2, "down_block_n": 128, "down_tiles": 2}),
        (16, 1, {"up_block_k": 128, "down_block_k": 128, "down_tiles": 8, "down_stages": 2}),
        (40, 3, {"down_whole": False, "rows": "search"}),
        (40, 0, {"up_block_n": 128, "up_warps": 8}),
        (700, 1, {}),
    ],
)
def test_real_tiles(device, tokens, slots, change):
    """Tiles of the real thing: TMA, asynchronous copies, prefetched scales, several stages; I of 5 steps of 64."""
    hidden, inter, experts, top_k, rank = 1024, 320, 16, 4, 32
    g = torch.Generator().manual_seed(tokens)

    def new(*shape, std):
        return (torch.randn(shape, generator=g) * std).to(torch.bfloat16).to(device)

    w13 = quantize_reference(torch.randn(experts, 2 * inter, hidden, generator=g) / hidden**0.5).to(device)
    w2 = quantize_reference(torch.randn(experts, hidden, inter, generator=g) / inter**0.5).to(device)
    args = {
        "x": new(tokens, hidden, std=1.0),
        "topk_weights": torch.rand(tokens, top_k, generator=g).to(device),
        "topk_ids": torch.randint(0, experts - 1, (tokens, top_k), generator=g, dtype=torch.int32).to(device),
    }
    if slots:
        args["lora"] = ExpertLoRA(
            new(slots, experts, 2, rank, hidden, std=hidden**-0.5),
            new(slots, experts, 2, inter, rank, std=0.1),
            new(slots, experts, rank, inter, std=inter**-0.5),
            new(slots, experts, hidden, rank, std=0.1),
        )
        args["lora_ids"] = (torch.arange(tokens, dtype=torch.int32) % (slots + 1) - 1).to(device)
    want = fused_moe_reference(**args, w13=w13, w2=w2)
    ready = {"w13": prepare(w13), "w2": prepare(w2)}
    config = dataclasses.replace(MoEConfig.mxfp8_heuristic(tokens, top_k, experts, hidden, inter), **change)
    got = fused_moe(**args, **ready, config=config)
    assert_close("fp16 form", want, got, LIMIT[torch.bfloat16])
    for _ in range(3):
        assert torch.equal(got, fused_moe(**args, **ready, config=config))
    if not change:
        assert_close("bf16 form", want, fused_moe(**args, w13=w13, w2=w2, config=config), LIMIT[torch.bfloat16])


@pytest.mark.gpu
def test_a_captured_graph_serves_other_weights_in_place(device):
    """Weights re-quantised where they lie, and prepared again, are what the next replay reads."""
    args = layer(device, dtype=torch.bfloat16, slots=1)
    out = torch.empty_like(args["x"])
    fused_moe(**args, out=out, config=SMALL)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_moe(**args, out=out, config=SMALL)
    for name in ("w13", "w2"):
        w, new = args[name], quantize_reference(torch.randn(args[name].shape) * 0.2).to(device)
        w.data.view(torch.uint8).copy_(new.data.view(torch.uint8))
        w.scale.copy_(new.scale)
        prepare(w)
    graph.replay()
    assert_close("replay", reference(args), out, LIMIT[torch.bfloat16])
