"""The router: exact products, exact ties, groups, and bits that do not depend on the batch."""

import json

import pytest
import torch
import triton
import triton.language as tl

from beam_moe.kernels import router, tuning
from beam_moe.kernels.router import grouped_topk, grouped_topk_reference, route, route_reference
from beam_moe.testing import assert_close

F32_LIMIT = 1e-6  # of fp32 sums; weights rounded to bf16 would give 1e-3, tf32 products 2e-4


def random(*shape, device, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape) * scale).to(dtype).to(device)


def check_choice(logits, bias, weights, ids, **options):
    """Ids equal the reference's one by one; weights to rounding."""
    ref_weights, ref_ids = route_reference(logits, bias, **options)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids, ref_ids)
    assert_close("topk_weights", ref_weights, weights, 1e-6)


@pytest.mark.parametrize(
    ("experts", "top_k", "n_group", "topk_group", "bias", "scoring"),
    [
        pytest.param(256, 8, 8, 4, True, "sigmoid", id="beam"),
        pytest.param(128, 8, None, None, False, "softmax", id="qwen3"),
        pytest.param(5, 2, None, None, False, "sigmoid", id="five-experts"),
        pytest.param(60, 4, 4, 2, True, "sigmoid", id="groups-of-15"),
        pytest.param(60, 6, 3, 1, False, "sigmoid", id="three-groups-no-bias"),
        pytest.param(1024, 16, None, None, True, "sigmoid", id="most-experts-and-top-k"),
        pytest.param(160, 6, 8, 3, False, "softmax", id="softmax-groups"),
        pytest.param(8, 8, 8, 8, True, "sigmoid", id="all-experts-groups-of-one"),
        pytest.param(8, 3, 8, 4, True, "sigmoid", id="groups-of-one"),
        pytest.param(1, 1, None, None, False, "softmax", id="one-expert"),
        pytest.param(120, 16, 40, 9, True, "sigmoid", id="forty-groups-of-three-top-16"),
        pytest.param(66, 7, 33, 4, False, "softmax", id="33-groups-no-bias"),
        pytest.param(96, 16, 6, 2, True, "softmax", id="six-groups-top-16-softmax-bias"),
    ],
)
@pytest.mark.parametrize("renormalize", [True, False])
def test_route(experts, top_k, n_group, topk_group, bias, scoring, renormalize, device):
    logits = random(7, experts, device=device, scale=2.0)
    b = random(experts, device=device, scale=0.2) if bias else None
    options = {
        "top_k": top_k,
        "n_group": n_group,
        "topk_group": topk_group,
        "scoring": scoring,
        "renormalize": renormalize,
    }
    check_choice(logits, b, *route(logits, b, **options), **options)


def test_equal_logits_go_to_the_lowest_ids(device):
    logits = torch.zeros(3, 48, device=device)
    _, ids = route(logits, top_k=5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    _, ids = route(logits, torch.zeros(48, device=device), top_k=5, n_group=6, topk_group=2)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3  # groups tie too
    _, ids = route(torch.zeros(2, 96, device=device), top_k=5, n_group=48, topk_group=3)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_ties_among_few_values(device):
    """Five distinct logits over 96 experts: nearly every place is decided by the id."""
    logits = torch.randint(-2, 3, (6, 96)).float().to(device)
    bias = (torch.randint(0, 3, (96,)) * 0.25).to(device)
    groups = ({"n_group": 8, "topk_group": 3}, {"n_group": 48, "topk_group": 5})
    for options in ({"top_k": 12}, *({"top_k": 6, **g} for g in groups)):
        check_choice(logits, None, *route(logits, top_k=12), top_k=12)
        check_choice(logits, bias, *route(logits, bias, **options), **options)


def test_saturated_scores_tie(device):
    """Sigmoid is 1.0 from 17 on and equal at -0.0 and 0.0: the order is that of scores, not of logits."""
    logits = torch.tensor([[20.0, 30.0, 25.0, -0.0, 0.0, 0.0, -200.0, -300.0]], device=device)
    weights, ids = route(logits, top_k=8, renormalize=False)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert weights.tolist() == [[1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.0, 0.0]]


def test_scores_of_zero_are_renormalised_to_zero(device):
    """Their sum is zero, which the divisor's 1e-20 keeps from making them NaN."""
    weights, ids = route(torch.full((2, 8), -200.0, device=device), top_k=3)
    assert not weights.any() and ids.tolist() == [[0, 1, 2]] * 2


def test_a_group_whose_two_best_are_equal(device):
    """Both count: 2 x 0.5 beats 0.62 + 0.27, and 0.5 + 0.5 ties with 0.5 + 0.5."""
    logits = torch.tensor([[0.5, -1.0, 0.0, 0.0, 0.0, 0.0]], device=device)
    _, ids = route(logits, torch.zeros(6, device=device), top_k=2, n_group=3, topk_group=1)
    assert ids.tolist() == [[2, 3]]


def test_groups_are_judged_by_two_best_only_with_a_bias(device):
    """Group 0 has the single best expert, group 1 the better pair."""
    logits = torch.tensor([[4.0, -4.0, 2.0, 1.5]], device=device)
    assert route(logits, top_k=1, n_group=2, topk_group=1)[1].tolist() == [[0]]
    assert route(logits, torch.zeros(4, device=device), top_k=1, n_group=2, topk_group=1)[1].tolist() == [[2]]


def test_bias_chooses_but_does_not_weigh(device):
    logits = torch.tensor([[1.0, 0.0, -1.0]], device=device)
    weights, ids = route(logits, torch.tensor([0.0, 0.0, 9.0], device=device), top_k=2, renormalize=False)
    assert ids.tolist() == [[2, 0]]
    assert_close("weights", torch.tensor([[-1.0, 1.0]]).sigmoid(), weights.cpu(), 1e-6)


def test_experts_barred_by_the_bias(device):
    """A bias of minus infinity: last within the chosen groups, yet before any other group, and never a doubled id."""
    inf = float("inf")
    bias = torch.zeros(12, device=device)
    bias[[0, 1, 2, 5]] = -inf
    logits = random(6, 12, device=device)
    options = {"top_k": 7, "n_group": 3, "topk_group": 2}
    weights, ids = route(logits, bias, **options)
    check_choice(logits, bias, weights, ids, **options)
    _, ids = route(logits[:1], torch.full((12,), -inf, device=device), top_k=3, n_group=3, topk_group=1)
    assert ids.tolist() == [[0, 1, 2]]


def test_nan_ranks_last_and_is_handed_on(device):
    nan = float("nan")
    logits = torch.tensor([[nan, 1.0, nan, 0.0, -1.0], [nan] * 5], device=device)
    weights, ids = route(logits, top_k=4, renormalize=False)
    assert ids.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]]
    assert weights[0, :3].isfinite().all() and weights[0, 3].isnan() and weights[1].isnan().all()
    _, ids = route(logits, torch.zeros(5, device=device), top_k=5, scoring="softmax")
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_group_of_both_infinities_ranks_last(device):
    """Infinity and minus infinity add to NaN: after a finite group, before nothing; among such groups by lowest id."""
    inf = float("inf")
    bias = torch.tensor([inf, -inf, -1.0, -1.0, inf, -inf], device=device)
    for top in ({"n_group": 3, "topk_group": 1}, {"n_group": 3, "topk_group": 2}):
        options = {"top_k": 2, **top}
        check_choice(
            torch.zeros(2, 6, device=device), bias, *route(torch.zeros(2, 6, device=device), bias, **options), **options
        )
    _, ids = route(torch.zeros(1, 6, device=device), bias, top_k=2, n_group=3, topk_group=1)
    assert ids.tolist() == [[2, 3]]


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_touches_no_other(bad, weight_dtype, device):
    """Its logits are none of them finite, its ids what they demand; the other rows keep their bits."""
    x, weight = random(9, 200, device=device, dtype=torch.bfloat16), random(30, 200, device=device, dtype=weight_dtype)
    want = grouped_topk(x, weight, top_k=4, return_logits=True)
    x[5, 150] = bad
    weights, ids, logits = grouped_topk(x, weight, top_k=4, return_logits=True)
    assert not logits[5].isfinite().any() and (bad == bad or logits[5].isnan().all())
    assert torch.equal(ids[5:6], route_reference(logits[5:6], top_k=4)[1])
    keep = torch.arange(9, device=device) != 5
    assert all(torch.equal(a[keep], b[keep]) for a, b in zip(want, (weights, ids, logits)))


@triton.jit
def _reciprocal_kernel(d_ptr, out_ptr, N: tl.constexpr, LIBDEVICE: tl.constexpr):
    offs = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + offs, router._reciprocal(tl.load(d_ptr + offs), LIBDEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [0, 1, 63, 64, 65, 124])
def test_reciprocal_is_rounded_correctly(exponent, device):
    """Every mantissa; it is what decides near-ties of scores."""
    d = (torch.arange(2**23, dtype=torch.int32, device=device) + ((127 + exponent) << 23)).view(torch.float32)
    got = torch.empty_like(d)
    _reciprocal_kernel[(2**13,)](d, got, 1024, True)
    assert torch.equal(got, (1.0 / d.double()).float())
    edge = torch.tensor([float("inf"), float("nan"), 2.0**127, 1.0], device=device).repeat(256)
    got = torch.empty_like(edge)
    _reciprocal_kernel[(1,)](edge, got, 1024, True)
    assert got[0] == 0 and got[1].isnan() and got[2] == 2.0**-127 and got[3] == 1


def test_strided_logits_of_half_precision(device):
    logits = random(5, 64, device=device, dtype=torch.float16)[:, :30]
    assert not logits.is_contiguous()
    check_choice(logits, None, *route(logits, top_k=4), top_k=4)


BEAM = {"top_k": 8, "n_group": 8, "topk_group": 4}


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "x_dtype", "w_dtype", "options"),
    [
        pytest.param(3, 640, 256, torch.bfloat16, torch.float32, BEAM, id="beam"),
        pytest.param(17, 200, 60, torch.float16, torch.float32, {"top_k": 4}, id="fp16-x-odd-hidden"),
        pytest.param(
            2, 130, 40, torch.float32, torch.float32, {"top_k": 2, "n_group": 4, "topk_group": 2}, id="fp32-x"
        ),
        pytest.param(4, 96, 24, torch.bfloat16, torch.bfloat16, {"top_k": 2, "scoring": "softmax"}, id="bf16-weights"),
        pytest.param(4, 70, 24, torch.float32, torch.float16, {"top_k": 2}, id="fp32-x-fp16-weights"),
        pytest.param(1, 7, 5, torch.bfloat16, torch.float32, {"top_k": 2}, id="tiny"),
    ],
)
def test_grouped_topk(tokens, hidden, experts, x_dtype, w_dtype, options, device):
    x = random(tokens, hidden, device=device, dtype=x_dtype)
    weight = random(experts, hidden, device=device, dtype=w_dtype, scale=hidden**-0.5)
    bias = random(experts, device=device, scale=0.1) if "n_group" in options else None
    weights, ids, logits = grouped_topk(x, weight, bias, **options, return_logits=True)
    assert_close("logits", grouped_topk_reference(x, weight, bias, **options)[2], logits, F32_LIMIT)
    check_choice(logits, bias, weights, ids, **options)


def test_weights_are_not_rounded(device):
    """Experts that differ in the last bit of fp32 alone: bf16, tf32 or two of the three pieces would call it a tie."""
    weight = torch.ones(32, 64, device=device)
    weight[19] = torch.nextafter(weight[19], torch.tensor(2.0, device=device))
    x = torch.zeros(2, 64, dtype=torch.bfloat16, device=device)
    x[:, 5] = 1.0
    logits = grouped_topk(x, weight, top_k=1, return_logits=True)[2]
    assert torch.equal(logits[0], weight[:, 5])


def with_strides(t, device):
    """``t`` on the device by its own strides, which ``to`` may change."""
    if t.device == device:
        return t
    there = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t.detach())
    return there.requires_grad_(t.requires_grad)


@pytest.mark.parametrize("rest", [2**-2, 2**-10, 2**-18])
def test_no_product_of_two_pieces_is_left_out(rest, device):
    """Two terms that cancel but for one piece of a weight: what is left of it meets every piece of x."""
    if device.type == "cuda":
        pytest.skip("sums in fp32 lose what is left beside the terms that cancel")
    x = torch.zeros(1, 16, device=device)
    x[:, :2] = 1.5 + 1.5 * 2**-9 + 1.5 * 2**-17
    weight = torch.zeros(16, 16, device=device)
    weight[:, 0] = -(1.0 if rest > 2**-18 else 1 + 2**-10)
    weight[:, 1] = rest - weight[:, 0]
    logits = grouped_topk(x, weight, top_k=1, return_logits=True)[2]
    assert_close("logits", (x.double() @ weight.double().T).float(), logits, 2e-7)


def launch(block_e=16, block_t=16, abreast=False, split_grid=True, warps=4, stages=2):
    return {
        "block_e": block_e, "block_t": block_t, "abreast": abreast, "split_grid": split_grid, "warps": warps,
        "stages": stages,
    }  # fmt: skip


@triton.jit
def _cut_kernel(v_ptr, pieces_ptr, N: tl.constexpr, MMA: tl.constexpr):
    offs = tl.arange(0, N)
    first, second, third = router._pieces(tl.load(v_ptr + offs), 3, MMA)
    tl.store(pieces_ptr + offs, first.to(tl.float32))
    tl.store(pieces_ptr + N + offs, second.to(tl.float32))
    tl.store(pieces_ptr + 2 * N + offs, third.to(tl.float32))


@pytest.mark.parametrize("mma", [tl.bfloat16, tl.float32], ids=str)
def test_pieces_hold_every_bit(mma, device):
    """Of normal numbers whose last bit is normal too: the tensor core takes and the sum keeps nothing smaller."""
    bits = torch.randint(0, 2**31 - 1, (1024,), dtype=torch.int32)
    bits[::7] |= 0xFFFF  # what rounding would carry upwards
    v = bits.view(torch.float32) * (torch.randint(0, 2, (1024,)) * 2 - 1)
    v = torch.where(v.isfinite() & (v.abs() > 2.0**-100), v, 1.0).to(device)
    pieces = torch.empty(3, 1024, device=device)
    _cut_kernel[(1,)](v, pieces, 1024, mma)
    assert torch.equal(pieces.double().sum(0), v.double())
    assert torch.equal(pieces.bfloat16().float(), pieces)


LAUNCHES = {
    "abreast": launch(block_t=8, abreast=True, stages=6),
    "abreast-32-experts": launch(block_e=32, block_t=16, abreast=True),
    "in-turn": launch(block_t=32),
    "prefill": launch(block_e=32, block_t=64, split_grid=False),
}


CASES = {
    "groups": (35, 300, 48, torch.bfloat16, {"top_k": 4, "n_group": 4, "topk_group": 2}),
    "top-16-of-60": (9, 256, 60, torch.float16, {"top_k": 16, "n_group": 5, "topk_group": 3}),
    "softmax": (17, 140, 40, torch.float32, {"top_k": 5, "scoring": "softmax"}),
}


@pytest.mark.parametrize("case", CASES)
def test_bits_depend_on_neither_launch_nor_batch(case, device):
    """The same row in every launch form, at several token counts and places in the batch; ties are many."""
    tokens, hidden, experts, x_dtype, options = CASES[case]
    x = random(tokens, hidden, device=device, dtype=x_dtype)
    weight, bias = random(experts, hidden, device=device, scale=0.06), random(experts, device=device, scale=0.1)
    if (
        device.type == "cpu"
    ):  # the interpreter's products are BLAS's, in an order of their own: take sums without rounding
        x, weight = torch.randint_like(x, -8, 9), torch.randint_like(weight, -64, 65) / 1024
    x[3], weight[experts // 2] = 0.0, weight[1]
    bias[experts // 2] = bias[1]
    options = {**options, "return_logits": True}
    splits, share = router.shares(experts, hidden)
    assert splits > 1 and splits * share >= hidden
    seen = []
    for config in LAUNCHES.values():
        with tuning.override(router.OP, config):
            seen.append(grouped_topk(x, weight, bias, **options))
            alone = grouped_topk(x[tokens - 3 : tokens - 2], weight, bias, **options)
            assert all(torch.equal(a[0], b[tokens - 3]) for a, b in zip(alone, seen[-1]))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))
    weights, ids, logits = seen[0]
    assert_close("logits", (x.double() @ weight.double().T).float(), logits, F32_LIMIT)
    options.pop("return_logits")
    check_choice(logits, bias, weights, ids, **options)


@pytest.mark.parametrize(
    ("experts", "hidden"), [(256, 5120), (128, 2048), (60, 200), (1, 7), (1024, 5120), (512, 7168)]
)
def test_shares_cover_h(experts, hidden):
    splits, share = router.shares(experts, hidden)
    assert (splits - 1) * share < hidden <= splits * share and share % 128 == 0


@pytest.mark.parametrize("path", sorted(tuning.CONFIGS.glob("*/router.json")), ids=lambda p: p.parent.name)
def test_tables_keep_the_order_of_sums(path):
    for entry in json.loads(path.read_text())["entries"]:
        assert entry["config"].keys() == router.heuristic(1).keys() and entry["config"]["block_e"] in router.BLOCK_E


def test_strided_x_and_weight(device):
    pool = torch.full((6, 200), float("nan"), dtype=torch.bfloat16, device=device)
    pool[:, :130] = random(6, 130, device=device, dtype=torch.bfloat16)
    wide = torch.full((40, 160), float("nan"), device=device)
    wide[:, :130] = random(40, 130, device=device)
    x, weight = pool[::2, :130], wide[:, :130]
    got = grouped_topk(x, weight, top_k=3, return_logits=True)
    want = grouped_topk(x.contiguous(), weight.contiguous(), top_k=3, return_logits=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_no_tokens(device):
    x, weight = torch.zeros(0, 64, device=device), torch.zeros(16, 64, device=device)
    weights, ids, logits = grouped_topk(x, weight, top_k=2, return_logits=True)
    assert weights.shape == ids.shape == (0, 2) and logits.shape == (0, 16)
    weights, ids = route(logits, top_k=2)
    assert weights.shape == ids.shape == (0, 2) and ids.dtype == torch.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 5, "topk_group": 1}, "n_group must divide the 16 experts, got 5"),
        ({"n_group": 4}, "go together"),
        ({"n_group": 4, "topk_group": 5}, "topk_group must be within 1..n_group = 4, got 5"),
        ({"n_group": 4, "topk_group": 1, "top_k": 5}, "top_k must not exceed the 1 x 4 experts"),
        ({"top_k": 0}, r"top_k must be within 1..16, got 0"),
        ({"top_k": 17}, r"top_k must be within 1..16, got 17"),
        ({"scoring": "tanh"}, "scoring must be one of sigmoid, softmax, got 'tanh'"),
        ({"bias": torch.zeros(15)}, r"bias must be contiguous float32 of shape \(16,\)"),
        ({"bias": torch.zeros(16, dtype=torch.float64)}, "bias must be contiguous float32"),
        ({"x": torch.zeros(3, 32, dtype=torch.float64)}, "x must be bfloat16, float16 or float32, got torch.float64"),
        ({"bias": torch.zeros(32)[::2]}, "bias must be contiguous float32"),
        ({"x": torch.zeros(3, 33)}, "gate_weight must be"),
        ({"x": torch.zeros(3, 0), "gate_weight": torch.zeros(16, 0)}, r"with x's H = 0 > 0, got \(16, 0\)"),
        ({"x": torch.zeros(32, 3).T}, "x must have innermost stride 1"),
        ({"x": torch.zeros(32)}, "x must have 2 dimensions"),
        ({"x": torch.zeros(3, 32, requires_grad=True)}, "x must not require a gradient"),
        ({"gate_weight": torch.zeros(1025, 32)}, "within 1..1024, got 1025"),
        ({"x": [[1.0]]}, "grouped_topk: x must be a tensor, got list"),
        ({"bias": [0.0] * 16}, "grouped_topk: bias must be a tensor, got list"),
        ({"top_k": 2.0}, "grouped_topk: top_k must be an integer, got 2.0"),
        ({"top_k": True}, "grouped_topk: top_k must be an integer, got True"),
        ({"top_k": None}, "grouped_topk: top_k must be an integer, got None"),
        ({"n_group": 0, "topk_group": 0}, "grouped_topk: n_group must divide the 16 experts, got 0"),
        ({"n_group": 2.0, "topk_group": 1}, "grouped_topk: n_group must be an integer, got 2.0"),
        ({"renormalize": None}, "grouped_topk: renormalize must be True or False, got None"),
    ],
)
def test_refuses(change, message, device):
    args = {"x": torch.zeros(3, 32), "gate_weight": torch.zeros(16, 32), "bias": None, "top_k": 2}
    args = {k: with_strides(v, device) if isinstance(v, torch.Tensor) else v for k, v in {**args, **change}.items()}
    with pytest.raises(ValueError, match=message):
        grouped_topk(**args)


def test_refuses_logits(device):
    with pytest.raises(ValueError, match="route: dtype must be bfloat16, float16 or float32, got torch.float64"):
        route(torch.zeros(2, 8, dtype=torch.float64, device=device), top_k=1)
    with pytest.raises(ValueError, match="route: bias must be on"):
        route(torch.zeros(2, 8, device=device), torch.zeros(8, device="meta"), top_k=1)


def test_operators(device):
    """The registered forms: what torch.compile traces."""
    x, weight = random(3, 64, device=device, dtype=torch.bfloat16), random(16, 64, device=device)
    bias = random(16, device=device)
    torch.library.opcheck(
        torch.ops.beam_moe.grouped_topk, (x, weight, bias, 2, 4, 2, "sigmoid", True), test_utils="test_faketensor"
    )
    logits = random(3, 16, device=device)
    torch.library.opcheck(torch.ops.beam_moe.route, (logits, None, 2, 1, 1, "softmax", False), test_utils="test_schema")

    def layer(x):
        weights, ids = grouped_topk(x, weight, bias, top_k=2, n_group=4, topk_group=2)
        return weights * 2.5, ids

    got = torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert all(torch.equal(a, b) for a, b in zip(got, layer(x)))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 300, 4096])
def test_beam_router_at_full_size(tokens, device):
    """All token counts: fp32 accuracy, exact choice, and the bits of the row alone."""
    x = random(tokens, 5120, device=device, dtype=torch.bfloat16)
    weight, bias = random(256, 5120, device=device, scale=0.02), random(256, device=device, scale=0.05)
    weights, ids, logits = grouped_topk(x, weight, bias, **BEAM, return_logits=True)
    assert_close("logits", (x.double() @ weight.double().T).float(), logits, 2e-6)
    rows = [0, tokens // 2, tokens - 1]
    ref_weights, ref_ids = route_reference(logits[rows], bias, **BEAM)
    assert torch.equal(ids[rows], ref_ids)
    assert_close("topk_weights", ref_weights, weights[rows], 1e-6)
    for row in rows:
        alone = grouped_topk(x[row : row + 1], weight, bias, **BEAM, return_logits=True)
        for name, one, batch in zip(("weights", "ids", "logits"), alone, (weights, ids, logits)):
            assert torch.equal(one[0], batch[row]), name


@pytest.mark.gpu
def test_graph_replay(device):
    """Captured once, replayed on new tokens, after other work on the same stream, many times over."""
    x = random(16, 5120, device=device, dtype=torch.bfloat16)
    weight, bias = random(256, 5120, device=device, scale=0.02), random(256, device=device, scale=0.05)
    grouped_topk(x, weight, bias, **BEAM)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grouped_topk(x, weight, bias, **BEAM, return_logits=True)
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        got = [t.clone() for t in captured]
        want = grouped_topk(x, weight, bias, **BEAM, return_logits=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_launch_form_tells_what_compiles(device, monkeypatch):
    """Sizes of one form launch the same constants, sizes of two forms do not: a warm-up may run one size of each."""

    class Recorder:
        def __init__(self, seen):
            self.seen = seen

        def __getitem__(self, grid):
            return lambda *args, **constants: self.seen.append(tuple(sorted((k, str(v)) for k, v in constants.items())))

    launched: list = []
    monkeypatch.setattr(router, "_logits_kernel", Recorder(launched))
    monkeypatch.setattr(router, "_route_kernel", Recorder(launched))
    weight, forms = torch.zeros(64, 32, device=device), {}
    for tokens in (1, 2, 8, 9, 16, 17, 64, 65, 512, 513, 1024, 1025, 4097):
        launched.clear()
        grouped_topk(torch.zeros(tokens, 32, device=device), weight, top_k=2, n_group=4, topk_group=2)
        form = router.launch_form(weight.device, tokens, 64, 32)
        forms.setdefault(form, set()).add(tuple(launched))
    assert len(forms) == 4 and all(len(v) == 1 for v in forms.values())
    assert len(set.union(*forms.values())) == len(forms)
