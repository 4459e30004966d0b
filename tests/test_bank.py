"""ExpertLoRA: what it accepts, and writing slots in place."""

import pytest
import torch

from beam_moe.config import BeamMoEConfig
from beam_moe.kernels.moe_lora.bank import ExpertLoRA
from beam_moe.testing import assert_close

L, E, R, H, I = 3, 4, 6, 10, 8
SHARD = BeamMoEConfig(hidden=H, intermediate=I, num_experts=E, top_k=2, sparse=(True,)).shard()


def factors(slots=1, rank=R, shared=False, one_a=False, dtype=torch.float32, experts=E):
    outer = 1 if shared else experts
    return (
        torch.randn(slots, outer, 1 if one_a else 2, rank, H).to(dtype),
        torch.randn(slots, experts, 2, I, rank).to(dtype),
        torch.randn(slots, experts, rank, I).to(dtype),
        torch.randn(slots, outer, H, rank).to(dtype),
    )


def deltas(bank, slot):
    """(E, ., .) of gate, up, down: B @ A at the slot's live rank."""
    r = int(bank.ranks[slot])
    pairs = [*zip(bank.gate_up_a, bank.gate_up_b), (bank.w2_a, bank.w2_b)]
    return [b[slot, ..., :r].double() @ a[slot, :, :r].double() for a, b in pairs]


def same(got, ref):
    return all(torch.equal(g, r.expand_as(g)) for g, r in zip(got, ref))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("one_a", [False, True])
def test_attributes_and_views(shared, one_a):
    w13_a, w13_b, w2_a, w2_b = factors(L, shared=shared, one_a=one_a)
    bank = ExpertLoRA(w13_a, w13_b, w2_a, w2_b)
    assert (bank.slots, bank.num_experts, bank.rank, bank.hidden, bank.intermediate) == (L, E, R, H, I)
    assert (bank.shared_a, bank.shared_b, bank.one_a) == (shared, shared, one_a)
    assert torch.equal(bank.gate_up_a[0], w13_a[:, :, 0]) and torch.equal(bank.gate_up_a[1], w13_a[:, :, -1])
    assert bank.gate_up_b[1].data_ptr() == w13_b[:, :, 1].data_ptr()
    assert bank.ranks.tolist() == [R] * L and bank.enabled.tolist() == [1] * L
    assert bank.ranks.dtype == bank.enabled.dtype == torch.int32


def test_a_pair_of_views_is_kept_by_reference_and_one_memory_twice_is_one_a():
    gate_a, up_a = torch.randn(2, L, E, R, H)
    gate_b, up_b = torch.randn(2, L, E, I, R)
    _, _, w2_a, w2_b = factors(L)
    bank = ExpertLoRA((gate_a, up_a), (gate_b, up_b), w2_a, w2_b)
    assert not bank.one_a and bank.gate_up_a[1] is up_a and bank.gate_up_b[0] is gate_b
    assert ExpertLoRA((gate_a, gate_a.view(L, E, R, H)), (gate_b, up_b), w2_a, w2_b).one_a
    every_second = torch.randn(L, E, 2 * R, H)[:, :, ::2]
    first = every_second.as_strided((L, E, R, H), (E * 2 * R * H, 2 * R * H, H, 1))  # from the same element on
    assert not ExpertLoRA((every_second, first), (gate_b, up_b), w2_a, w2_b).one_a


def test_strided_banks_are_taken_as_they_are():
    big = torch.randn(L, E, 2, R, 2 * H)
    _, w13_b, w2_a, w2_b = factors(L)
    assert ExpertLoRA(big[..., :H], w13_b, w2_a, w2_b).w13_a.stride() == big.stride()
    with pytest.raises(ValueError, match="ExpertLoRA: w13_a must be of innermost stride 1"):
        ExpertLoRA(big[..., ::2], w13_b, w2_a, w2_b)


BAD = {
    "three slices": ("w13_a", lambda f: {0: torch.randn(1, E, 3, R, H)}),
    "no slice": ("w13_a", lambda f: {0: f[0][:, :, :0]}),
    "A of another rank": ("w13_a", lambda f: {0: torch.randn(1, E, 2, R + 1, H)}),
    "B without both halves": ("w13_b", lambda f: {1: f[1][:, :, :1]}),
    "B of another width": ("w13_b", lambda f: {1: torch.randn(1, E, 2, I + 1, R)}),
    "inflated rank": ("w2_b", lambda f: {3: torch.randn(1, E, H, 2 * R)}),
    "experts that are neither one nor E": ("w2_b", lambda f: {3: torch.randn(1, 2, H, R)}),
    "another dtype": ("w2_b", lambda f: {3: f[3].half()}),
    "float64": ("w2_a", lambda f: {i: t.double() for i, t in f.items()}),
    "fp8": ("w2_a", lambda f: {2: f[2].to(torch.float8_e4m3fn)}),
    "too few dimensions": ("w2_a", lambda f: {2: f[2][0]}),
    "a number": ("w2_a", lambda f: {2: 3.0}),
    "pair of different shapes": (r"w13_a\[1\]", lambda f: {0: (f[0][:, :, 0], f[0][:, :1, 1])}),
    "empty": ("w2_a and w2_b", lambda f: {i: t[:0] for i, t in f.items()}),
}


@pytest.mark.parametrize("argument,change", BAD.values(), ids=BAD.keys())
def test_a_bad_factor_is_named(argument, change):
    f = dict(enumerate(factors()))
    f.update(change(f))
    with pytest.raises(ValueError, match=f"ExpertLoRA: {argument} must be"):
        ExpertLoRA(*f.values())


@pytest.mark.parametrize("name", ["ranks", "enabled"])
@pytest.mark.parametrize(
    "value", [torch.ones(L), torch.ones(L + 1, dtype=torch.int32), [1] * L, torch.ones(2 * L, dtype=torch.int32)[::2]]
)
def test_bad_per_slot_values_are_named(name, value):
    with pytest.raises(ValueError, match=f"ExpertLoRA: {name} must be"):
        ExpertLoRA(*factors(L), **{name: value})


@pytest.mark.parametrize("name", ["ranks", "enabled"])
def test_per_slot_values_lie_where_the_bank_does(name):
    with pytest.raises(ValueError, match=f"ExpertLoRA: {name} must be on the bank's device cpu, got meta"):
        ExpertLoRA(*factors(L), **{name: torch.ones(L, dtype=torch.int32, device="meta")})


def test_ranks_out_of_range_are_found_only_when_asked(monkeypatch):
    ranks = torch.tensor([R + 1], dtype=torch.int32)
    ExpertLoRA(*factors(), ranks=ranks)
    monkeypatch.setenv("BEAM_MOE_CHECK", "1")
    with pytest.raises(ValueError, match="ranks must be in 0..6"):
        ExpertLoRA(*factors(), ranks=ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("one_a", [False, True])
def test_write_slot_in_place_and_zero_padded(shared, one_a, dtype):
    bank = ExpertLoRA.zeros(L, SHARD, R, dtype, "cpu", shared_outer=shared, one_a=one_a)
    assert bank.ranks.tolist() == [0] * L and bank.enabled.tolist() == [0] * L
    before = [t.data_ptr() for _, t, _ in bank._factors()] + [bank.ranks.data_ptr()]
    full = ExpertLoRA(*factors(2, shared=shared, one_a=one_a, dtype=dtype))
    small = ExpertLoRA(*factors(1, 2, shared=shared, one_a=one_a, dtype=dtype))
    bank.write_slot_(0, full, 1).write_slot_(1, full).write_slot_(
        1, small
    )  # the second swap must leave nothing of the first
    assert [t.data_ptr() for _, t, _ in bank._factors()] + [bank.ranks.data_ptr()] == before
    assert bank.ranks.tolist() == [R, 2, 0] and bank.enabled.tolist() == [1, 1, 0]
    assert same(deltas(bank, 0), deltas(full, 1)) and same(deltas(bank, 1), deltas(small, 0))
    for _, t, axis in bank._factors():
        assert not t[1].narrow(axis - 1, 2, R - 2).any() and not t[2].any()


def test_write_slot_repeats_shared_factors_into_a_bank_that_has_none():
    bank = ExpertLoRA.zeros(1, SHARD, R, torch.float32)
    small = ExpertLoRA(*factors(1, 3, shared=True, one_a=True))
    bank.write_slot_(0, small)
    assert same(deltas(bank, 0), deltas(small, 0))


def test_write_slot_through_an_engines_pair_of_views():
    gate_a, up_a = torch.zeros(2, L, E, R, H).unbind()
    gate_b, up_b = torch.zeros(2, L, E, I, R).unbind()
    _, _, w2_a, w2_b = factors(L)
    bank = ExpertLoRA((gate_a, up_a), (gate_b, up_b), w2_a, w2_b)
    source = ExpertLoRA(*factors(1, 4))
    bank.write_slot_(2, source)
    assert torch.equal(up_a[2, :, :4], source.w13_a[0, :, 1]) and torch.equal(gate_b[2, ..., :4], source.w13_b[0, :, 0])
    assert not up_a[2, :, 4:].any() and not up_a[:2].any()


def test_write_slot_keeps_a_disabled_source_disabled_and_its_live_rank():
    source = ExpertLoRA(
        *factors(), ranks=torch.tensor([2], dtype=torch.int32), enabled=torch.tensor([0], dtype=torch.int32)
    )
    bank = ExpertLoRA.zeros(2, SHARD, R, torch.float32).write_slot_(1, source)
    assert bank.ranks.tolist() == [0, 2] and bank.enabled.tolist() == [0, 0]


def test_clear_slot_leaves_no_adapter_and_the_neighbours_alone():
    bank = ExpertLoRA(*factors(2))
    kept = [d.clone() for d in deltas(bank, 1)]
    bank.clear_slot_(0)
    assert bank.ranks.tolist() == [0, R] and bank.enabled.tolist() == [0, 1]
    assert not any(t[0].any() for _, t, _ in bank._factors()) and same(deltas(bank, 1), kept)


def test_write_slot_refuses_what_does_not_fit():
    bank = ExpertLoRA.zeros(2, SHARD, R, torch.float32)
    fits = ExpertLoRA(*factors())
    for i in (-1, 2, 0.0, True):
        with pytest.raises(ValueError, match="write_slot_: i must be an integer in 0..1"):
            bank.write_slot_(i, fits)
    with pytest.raises(ValueError, match="src_slot must be an integer in 0..0, got 1"):
        bank.write_slot_(0, fits, 1)
    with pytest.raises(ValueError, match="adapter's rank must be at most the bank's 6, got 7"):
        bank.write_slot_(0, ExpertLoRA(*factors(1, R + 1)))
    with pytest.raises(ValueError, match="adapter's num_experts must be 4, got 2"):
        bank.write_slot_(0, ExpertLoRA(*factors(experts=2)))
    for field, axis in (("hidden", 0), ("intermediate", 1)):
        w13_a, w13_b, w2_a, w2_b = factors()
        narrow = (w13_a[..., :1], w13_b, w2_a, w2_b[:, :, :1]), (w13_a, w13_b[:, :, :, :1], w2_a[..., :1], w2_b)
        with pytest.raises(ValueError, match=f"adapter's {field} must be .*, got 1"):
            bank.write_slot_(0, ExpertLoRA(*narrow[axis]))  # one that copy_ would repeat
    with pytest.raises(ValueError, match="adapter must be an ExpertLoRA, got dict"):
        bank.write_slot_(0, {})
    for kind, field in (({"shared_outer": True}, "shared_a"), ({"one_a": True}, "one_a")):
        with pytest.raises(ValueError, match=f"got {field}=False"):
            ExpertLoRA.zeros(1, SHARD, R, torch.float32, **kind).write_slot_(0, fits)
    shared_b = ExpertLoRA(*factors()[:3], factors(shared=True)[3])
    with pytest.raises(ValueError, match="experts in w2_b, adapter must too, got shared_b=False"):
        shared_b.write_slot_(0, fits)


def test_zeros_wants_a_shard():
    with pytest.raises(ValueError, match="shard needs hidden"):
        ExpertLoRA.zeros(1, object(), 4)
    for slots, rank, message in ((1, 0, "rank .* got 0"), (1.5, 4, "slots .* got 1.5"), (True, 4, "slots .* got True")):
        with pytest.raises(ValueError, match=f"ExpertLoRA.zeros: {message}"):
            ExpertLoRA.zeros(slots, SHARD, rank)


def test_slot_is_a_view_and_to_keeps_one_a():
    bank = ExpertLoRA(*factors(L))
    one = bank.slot(1)
    one.clear_slot_(0)
    assert bank.ranks.tolist() == [R, 0, R] and not bank.w2_a[1].any()
    gate_a = torch.randn(1, E, R, H)
    pair = ExpertLoRA((gate_a, gate_a), *factors()[1:])
    assert pair.to(dtype=torch.bfloat16).one_a and pair.to(dtype=torch.bfloat16).dtype == torch.bfloat16


def test_slot_and_to_keep_live_ranks_and_disabled_slots():
    ranks, enabled = (torch.tensor(v, dtype=torch.int32) for v in ([2, 5, R], [1, 0, 1]))
    bank = ExpertLoRA(*factors(L), ranks=ranks, enabled=enabled)
    half = bank.to(dtype=torch.bfloat16)
    assert half.ranks.tolist() == [2, 5, R] and half.enabled.tolist() == [1, 0, 1]
    assert bank.slot(1).ranks.tolist() == [5] and bank.slot(1).enabled.tolist() == [0]
    bank.slot(2).clear_slot_(0)
    assert bank.enabled.tolist() == [1, 0, 0]


@pytest.mark.gpu
def test_a_captured_graph_reads_the_slot_written_after_capture():
    bank = ExpertLoRA.zeros(2, SHARD, R, torch.bfloat16, "cuda")
    first, second = (ExpertLoRA(*factors(1, r, dtype=torch.bfloat16)).to("cuda") for r in (R, 2))
    bank.write_slot_(1, first)
    out = torch.zeros(E, H, I, dtype=torch.bfloat16, device="cuda")
    seen = torch.zeros(2, dtype=torch.int32, device="cuda")

    def read():
        torch.matmul(bank.w2_b[1], bank.w2_a[1], out=out)
        seen.copy_(bank.ranks)

    read()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bank.write_slot_(1, second)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close("read", second.w2_b[0].float() @ second.w2_a[0].float(), out, 5e-3)
    assert seen.tolist() == [0, 2]
