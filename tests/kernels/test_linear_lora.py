"""Adapters of a dense layer added in place: values, untouched rows, live ranks, slices without factors, refusals."""

from pathlib import Path

import pytest
import torch

from beam_moe.kernels import linear_lora as module
from beam_moe.kernels.linear_lora import add_lora, add_lora_reference
from beam_moe.testing import assert_close, load_script

CUDA = torch.cuda.is_available()


def operands(device, tokens, hidden, widths, slots, rank, dtype=torch.float16, seed=0):
    g = torch.Generator().manual_seed(seed)

    def new(*shape):
        return torch.randn(shape, generator=g).to(dtype).to(device)

    a = [new(slots, rank, hidden) for _ in widths]
    b = [new(slots, w, rank) for w in widths]
    x = new(tokens, hidden) * hidden**-0.5
    return new(tokens, sum(widths)), x, a, b


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    "tokens, hidden, widths, rank",
    [
        pytest.param(5, 512, (96, 16, 16, 96), 32, id="qkv-gate"),
        pytest.param(17, 200, (130,), 8, id="one-slice-odd-hidden"),
        pytest.param(3, 64, (40, 40), 64, id="two-slices-rank-64"),
        pytest.param(1, 7, (5,), 3, id="tiny"),
        pytest.param(40, 64, (3000,), 16, id="wide-programs"),
        pytest.param(17, 257, (7, 1, 65), 63, id="nothing-even"),
        pytest.param(1024, 5, (3,), 1, id="most-tokens-rank-1"),
        pytest.param(19, 1536, (70, 16, 130), 8, id="shares-of-k"),
        pytest.param(5, 1601, (70, 3), 33, id="odd-shares-of-k"),
        pytest.param(530, 1030, (3, 2, 1, 4), 2, id="more-rows-than-counters"),
    ],
)
def test_mixed_batch(device, tokens, hidden, widths, rank):
    """Two adapters, an empty slot, bare rows, ids out of range; a program's columns and rows run over their ends."""
    out, x, a, b = operands(device, tokens, hidden, widths, 3, rank)
    ids = ints([(0, 2, -1, 1, 3, 0, -7)[t % 7] for t in range(tokens)], device)
    ranks = ints([[rank] * len(widths), [0] * len(widths), [max(rank // 2, 1)] * len(widths)], device)
    want = add_lora_reference(out, x, a, b, ids, ranks)
    before = out.clone()
    add_lora(out, x, a, b, ids, ranks)
    assert_close("out", want, out, 2e-3)
    bare = [t for t in range(tokens) if ids[t] not in (0, 2)]
    assert torch.equal(out[bare], before[bare])
    assert not torch.equal(out[0], before[0])


@pytest.mark.parametrize("hidden", [96, 512], ids=["masked-steps", "whole-steps"])
def test_factors_beyond_a_live_rank_are_not_used(device, hidden):
    """A slot that a smaller adapter took over may hold anything behind it; a slice without factors stays bare."""
    out, x, a, b = operands(device, 4, hidden, (32, 48), 2, 16)
    ids, ranks = ints([0, 1, 0, 1], device), ints([[5, 0], [0, 16]], device)
    for t in a:
        t[0, 5:] = float("nan")
    for t in b:
        t[0, :, 5:] = float("nan")
    a[1][0] = float("nan")
    a[0][1] = float("nan")
    want = add_lora_reference(out, x, a, b, ids, ranks)
    before = out.clone()
    add_lora(out, x, a, b, ids, ranks)
    assert_close("out", want, out, 2e-3)
    assert torch.equal(out[[0, 2], 32:], before[[0, 2], 32:]) and torch.equal(out[[1, 3], :32], before[[1, 3], :32])


def test_ids_and_ranks_of_any_value(device):
    """The extremes of int32; a live rank above the bank is the bank's, one below zero is none."""
    out, x, a, b = operands(device, 6, 40, (24,), 3, 5)
    low, high = -(2**31), 2**31 - 1
    ids, ranks = ints([0, 1, 2, 3, high, low], device), ints([[high], [low], [6]], device)
    want = add_lora_reference(out, x, a, b, ids, ints([[5], [0], [5]], device))
    before = out.clone()
    add_lora(out, x, a, b, ids, ranks)
    assert_close("out", want, out, 2e-3)
    assert torch.equal(out[[1, 3, 4, 5]], before[[1, 3, 4, 5]]) and not torch.equal(out[2], before[2])


def test_a_nan_stays_in_its_row(device):
    out, x, a, b = operands(device, 4, 40, (24,), 2, 5)
    x[1] = float("nan")
    ids, ranks = ints([0, 0, 1, 0], device), ints([[5], [3]], device)
    want = add_lora_reference(out, x, a, b, ids, ranks)
    add_lora(out, x, a, b, ids, ranks)
    assert_close("out", want[[0, 2, 3]], out[[0, 2, 3]], 2e-3)
    assert bool(out[1].isnan().all())


@pytest.mark.parametrize("hidden", [40, 1100])
def test_an_adapter_that_is_not_finite_stays_in_its_rows(device, hidden):
    out, x, a, b = operands(device, 6, hidden, (24,), 3, 8)
    ids, ranks = ints([0, 1, -1, 2, 0, 1], device), ints([[5], [8], [8]], device)
    want = add_lora_reference(out, x, a, b, ids, ranks)
    a[0][1], b[0][1, 3], b[0][1, 4:] = float("inf"), float("nan"), float("-inf")
    add_lora(out, x, a, b, ids, ranks)
    assert_close("out", want[[0, 2, 3, 4]], out[[0, 2, 3, 4]], 2e-3)
    assert not out[[1, 5]].isfinite().any(1).all()


def test_a_row_does_not_depend_on_its_batch(device):
    """Alone, among other adapters and in a larger batch with other programs: the same bits."""
    out, x, a, b = operands(device, 48, 128, (3000,), 2, 8)
    ids, ranks = ints([t % 3 - 1 for t in range(48)], device), ints([[8], [4]], device)
    together = out.clone()
    add_lora(together, x, a, b, ids, ranks)
    assert module.launch_form(48, (3000,)) != module.launch_form(1, (3000,))
    for t in (0, 1, 2, 47):
        alone = out[t : t + 1].clone()
        add_lora(alone, x[t : t + 1], a, b, ids[t : t + 1], ranks)
        assert torch.equal(alone[0], together[t])


def test_shares_made_once_have_the_bits_of_shares_made_by_each(device, monkeypatch):
    """With and without programs that wait for others; the counts of arrivals are zero after every call."""
    out, x, a, b = operands(device, 21, 1600, (200, 40), 3, 8)
    ids, ranks = ints([t % 4 - 1 for t in range(21)], device), ints([[8, 3], [0, 5], [2, 0]], device)
    a[0][0, 7], a[0][2] = float("inf"), 3.0  # what an adapter makes of its own rows stays there
    programs = []
    launch = module._add_lora_kernel

    class Seen:
        def __getitem__(self, grid):
            programs.append(grid[0])
            return launch[grid]

    monkeypatch.setattr(module, "_add_lora_kernel", Seen())
    results = []
    for flag in ("1", "1", "0"):
        monkeypatch.setenv("BEAM_MOE_JOIN", flag)
        results.append(out.clone())
        add_lora(results[-1], x, a, b, ids, ranks)
        assert all(int(counts.abs().max()) == 0 for counts in module._arrivals.sets.values())
    assert programs[0] == programs[1] > programs[2]
    for result in results[1:]:
        assert torch.equal(result.view(torch.int16), results[0].view(torch.int16))
    assert_close("out", add_lora_reference(out, x, a, b, ids, ranks)[2::4], results[0][2::4], 2e-3)


def test_a_slice_without_columns(device):
    """Nobody waits for its shares of A x, so none may be counted: the next launch would take them for its own."""
    out, x, a, b = operands(device, 3, 1536, (16, 0, 8), 1, 4)
    ids = ints([0, 0, -1], device)
    for part in (slice(0, 3), slice(0, 3, 2)):
        ranks, got = ints([[4] * len(a[part])], device), out.clone()
        add_lora(got, x, a[part], b[part], ids, ranks)
        assert_close("out", add_lora_reference(out, x, a[part], b[part], ids, ranks), got, 2e-3)
        assert all(int(counts.abs().max()) == 0 for counts in module._arrivals.sets.values())


def test_launch_form_tells_what_compiles(device, monkeypatch):
    """Of sizes with 64 and with 128 columns a program, and of more rows than have a place to count arrivals."""
    seen = {}

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **constants: seen.setdefault(form, set()).add(tuple(constants.items()))

    monkeypatch.setattr(module, "_add_lora_kernel", Launch())
    out, x, a, b = operands(device, 1024, 1030, (64, 1, 2, 4), 1, 2)
    for tokens in (1, 32, 512, 513, 600, 1024):
        form = module.launch_form(tokens, (64, 1, 2, 4))
        add_lora(out[:tokens], x[:tokens], a, b, ints([0] * tokens, device), ints([[2] * 4], device))
    assert len(seen) == 3 and all(len(constants) == 1 for constants in seen.values())


@pytest.mark.skipif(CUDA, reason="a GPU starts programs as it likes")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_programs_may_end_in_any_order_that_their_waits_allow(device, seed, monkeypatch):
    """Adapters that are live in one row block and not in another; who read what is not yet written would find NaN."""
    out, x, a, b = operands(device, 40, 1100, (130, 8), 3, 4)
    ids = ints([0] * 8 + [-1] * 8 + [1] * 16 + [2, 1] * 4, device)
    ranks = ints([[4, 0], [0, 2], [3, 4]], device)
    in_order, kernel = out.clone(), module._add_lora_kernel
    add_lora(in_order, x, a, b, ids, ranks)
    order = load_script(Path(__file__).parents[1] / "interpreter.py").AnyOrder(kernel, seed)
    monkeypatch.setattr(module, "_add_lora_kernel", order)
    for _ in range(2):
        got = out.clone()
        add_lora(got, x, a, b, ids, ranks)
        assert torch.equal(got, in_order) and order.postponed
    assert all(int(counts.abs().max()) == 0 for counts in module._arrivals.sets.values())


def test_where_no_counts_are_left_each_makes_its_shares(device, monkeypatch):
    """As in a capture on a stream first met there: the same bits."""
    out, x, a, b = operands(device, 3, 1100, (20,), 1, 4)
    ids, ranks, results = ints([0, -1, 0], device), ints([[4]], device), [out.clone(), out.clone()]
    add_lora(results[0], x, a, b, ids, ranks)
    monkeypatch.setattr(module._arrivals, "get", lambda device: None)
    add_lora(results[1], x, a, b, ids, ranks)
    assert torch.equal(*results) and not torch.equal(results[0], out)


def test_a_row_of_many_shares_does_not_depend_on_its_batch(device):
    out, x, a, b = operands(device, 33, 2600, (64,), 2, 8)
    ids, ranks = ints([t % 3 - 1 for t in range(33)], device), ints([[8], [4]], device)
    together = out.clone()
    add_lora(together, x, a, b, ids, ranks)
    for t in (1, 2, 31):
        alone = out[t : t + 1].clone()
        add_lora(alone, x[t : t + 1], a, b, ids[t : t + 1], ranks)
        assert torch.equal(alone[0], together[t])


def test_strided_input_and_output(device):
    wide_out, wide_x, a, b = operands(device, 4, 96, (64,), 1, 8)
    x = torch.full((4, 120), 3.0, device=device).half()
    x[:, :96] = wide_x
    out = torch.full((4, 80), 7.0, device=device).half()
    out[:, :64] = wide_out
    ids, ranks = ints([0] * 4, device), ints([[8]], device)
    want = add_lora_reference(wide_out, wide_x, a, b, ids, ranks)
    add_lora(out[:, :64], x[:, :96], a, b, ids, ranks)
    assert_close("out", want, out[:, :64], 2e-3)
    assert bool((out[:, 64:] == 7).all())


def test_rows_behind_the_batch_stay(device):
    """The first rows of an engine's larger buffers, whose further ids name adapters too."""
    out, x, a, b = operands(device, 6, 96, (24,), 1, 8)
    ids, ranks, before = ints([0] * 6, device), ints([[8]], device), out.clone()
    add_lora(out[:5], x[:5], a, b, ids[:5], ranks)
    assert torch.equal(out[5], before[5]) and not torch.equal(out[4], before[4])


def test_nothing_to_do(device):
    out, x, a, b = operands(device, 0, 32, (16,), 1, 8)
    add_lora(out, x, a, b, ints([], device), ints([[8]], device))
    out, x, a, b = operands(device, 2, 32, (16,), 1, 8)
    before = out.clone()
    add_lora(out, x, a, b, ints([0, 0], device), ints([[0]], device))
    assert torch.equal(out, before)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(2, 32)}, "x must be bfloat16 or float16"),
        ({"x": torch.zeros(2, 64).half()[:, ::2]}, "x must be 2-D of innermost stride 1"),
        ({"x": torch.zeros(1, 32).half().expand(2, 32)}, "its rows apart"),
        ({"out": torch.zeros(2, 20).half()}, r"out must be \(2, 24\)"),
        ({"out": torch.zeros(2, 24)}, r"out must be \(2, 24\)"),
        ({"a": [torch.zeros(2, 8, 32).half()]}, "as many slices"),
        ({"a": [torch.zeros(2, 8, 32).half(), torch.zeros(2, 4, 32).half()]}, r"a\[1\] must be"),
        ({"a": [torch.zeros(2, 128, 32).half()] * 2}, r"R within 1..64"),
        ({"a": [torch.zeros(2, 32, 8).half().mT] * 2}, r"a\[0\] must be contiguous"),
        ({"a": [torch.zeros(2, 8, 32).half()] * 5, "b": [torch.zeros(2, 8, 8).half()] * 5}, r"as many slices, 1\.\.4"),
        ({"x": torch.zeros(2, 0).half(), "a": [torch.zeros(2, 8, 0).half()] * 2}, r"K > 0, got \(2, 0\)"),
        ({"b": [torch.zeros(2, 16, 8), torch.zeros(2, 8, 8).half()]}, r"b\[0\] must be contiguous"),
        ({"b": [torch.zeros(3, 16, 8).half(), torch.zeros(2, 8, 8).half()]}, r"b\[0\] must be \(2, W, 8\)"),
        ({"lora_ids": torch.zeros(2, dtype=torch.int64)}, "lora_ids must be contiguous int32"),
        ({"lora_ids": torch.zeros(3, dtype=torch.int32)}, "lora_ids must be contiguous int32"),
        ({"ranks": torch.zeros(2, dtype=torch.int32)}, "ranks must be contiguous int32"),
        ({"ranks": [0]}, "ranks must be a tensor"),
        ({"x": None}, "x must be a tensor, got NoneType"),
        ({"a": None}, "a must be a tuple or list of tensors, got NoneType"),
        ({"b": torch.zeros(2, 16, 8).half()}, "b must be a tuple or list of tensors, got Tensor"),
        ({"a": [torch.zeros(8).half()] * 2}, r"a\[0\] must be \(L, R, K\)"),
        ({"a": [torch.tensor(0.0).half()] * 2}, r"a\[0\] must be \(L, R, K\)"),
        ({"x": torch.zeros(1025, 32).half()}, r"T up to 1024.*got \(1025, 32\)"),
    ],
)
def test_refusals(device, change, message):
    out, x, a, b = operands(device, 2, 32, (16, 8), 2, 8)
    ids, ranks = ints([0, 1], device), ints([[8, 8], [8, 8]], device)
    arguments = {"out": out, "x": x, "a": a, "b": b, "lora_ids": ids, "ranks": ranks}

    def there(value):
        if isinstance(value, list):
            return [there(v) for v in value]
        if not isinstance(value, torch.Tensor) or value.is_contiguous():
            return value.to(device) if isinstance(value, torch.Tensor) else value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    arguments |= {k: there(v) for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        add_lora(**arguments)


@pytest.mark.parametrize("name", ["out", "lora_ids", "ranks"])
def test_operands_lie_on_one_device(device, name):
    out, x, a, b = operands(device, 2, 32, (16,), 1, 8)
    arguments = {"out": out, "lora_ids": ints([0, 0], device), "ranks": ints([[8]], device)}
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"add_lora: {name} must be on {x.device}, got meta"):
        add_lora(x=x, a=a, b=b, **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_beams_share_of_tp8_in_bf16(device, tokens):
    """Captured once, replayed while a slot is empty and after it was filled."""
    out, x, a, b = operands(device, tokens, 5120, (768, 128, 128, 768), 2, 32, torch.bfloat16)
    ids, ranks = ints([t % 3 - 1 for t in range(tokens)], device), ints([[0] * 4] * 2, device)
    base = out.clone()
    add_lora(out, x, a, b, ids, ranks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_lora(out, x, a, b, ids, ranks)
    graph.replay()
    assert torch.equal(out, base)
    ranks.fill_(32)
    wanted = add_lora_reference(base, x, a, b, ids, ranks)
    for _ in range(20):
        out.copy_(base)
        graph.replay()
        assert_close("out", wanted, out, 8e-3)
    assert torch.equal(out[ids < 0], base[ids < 0])
