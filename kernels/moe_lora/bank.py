"""`ExpertLoRA`: one layer's LoRA factors for every local expert, in L slots, as the fused layer reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Union

import torch

from beam_moe import env

if TYPE_CHECKING:
    from collections.abc import Sequence

Factor = Union[torch.Tensor, "tuple[torch.Tensor, torch.Tensor]"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _fail(argument: str, wanted: str, got: object) -> NoReturn:
    raise ValueError(f"ExpertLoRA: {argument} must be {wanted}, got {got}")


def _tensor(name: str, t: object, dims: int) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        _fail(name, "a tensor", type(t).__name__)
    if t.dim() != dims:
        _fail(name, f"a tensor of {dims} dimensions", f"shape {tuple(t.shape)}")
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        _fail(name, "of innermost stride 1", f"strides {t.stride()} for shape {tuple(t.shape)}")
    return t


def _pair(name: str, factor: object) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) views of four dimensions; one tensor twice when the slice axis has one entry."""
    if isinstance(factor, torch.Tensor):
        _tensor(name, factor, 5)
        if factor.shape[2] < 1:
            _fail(name, "of a slice axis (the third) of 1 or 2", tuple(factor.shape))
        return factor[:, :, 0], factor[:, :, factor.shape[2] - 1]
    if not isinstance(factor, (tuple, list)) or len(factor) != 2:
        _fail(name, "a tensor of 5 dimensions or a pair (gate, up) of tensors of 4", type(factor).__name__)
    gate, up = _tensor(f"{name}[0]", factor[0], 4), _tensor(f"{name}[1]", factor[1], 4)
    if gate.shape != up.shape:
        _fail(f"{name}[1]", f"of the gate's shape {tuple(gate.shape)}", tuple(up.shape))
    return gate, up


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    if a.device != b.device or a.shape != b.shape or a.stride() != b.stride() or a.device.type == "meta":
        return False
    return a.data_ptr() == b.data_ptr()


class ExpertLoRA:
    """A bank of L adapter slots over one layer's E local experts: ``y += B @ (A @ x)`` on gate, up and down.

    ``alpha / r`` is folded into the B factors. The tensors are kept by reference, never copied: an engine's own buffers
    can be wrapped, and what is written into them later is what the next launch (or graph replay) reads.

    Args:
        w13_a: ``(L, E|1, 1|2, R, H)``: A of gate (slice 0) and up (slice 1). An expert axis of 1 is one A shared by all
            experts; a slice axis of 1 is one A shared by gate and up. Or a pair ``(gate, up)`` of ``(L, E|1, R, H)``;
            a pair of the same memory twice counts as one A.
        w13_b: ``(L, E, 2, I, R)``, or a pair ``(gate, up)`` of ``(L, E, I, R)``.
        w2_a: ``(L, E, R, I)``.
        w2_b: ``(L, E|1, H, R)``; an expert axis of 1 is one B shared by all experts.
        ranks: int32 ``(L,)`` on the bank's device, the live rank of each slot, 0..R: factors beyond it are not read,
            and rank 0 is no adapter. None: full rank everywhere.
        enabled: int32 ``(L,)`` on the bank's device; a slot with 0 leaves its rows their bare result. None: all
            enabled.

    All factors have one dtype (bfloat16 or float16; float32 for references on the CPU) and one device, and innermost
    stride 1; every other stride is free.

    Attributes:
        slots, num_experts, rank, hidden, intermediate: L, E, R, H, I.
        shared_a, shared_b: whether the expert axis of ``w13_a``, of ``w2_b``, has one entry.
        one_a: whether gate and up read one A.
        gate_up_a, gate_up_b: ``(gate, up)`` views ``(L, E|1, R, H)`` and ``(L, E, I, R)``.
        dtype, device: of the factors.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, naming the argument; with ``BEAM_MOE_CHECK=1``
            also a rank out of range.
    """

    __slots__ = (
        "device",
        "dtype",
        "enabled",
        "gate_up_a",
        "gate_up_b",
        "hidden",
        "intermediate",
        "num_experts",
        "one_a",
        "rank",
        "ranks",
        "shared_a",
        "shared_b",
        "slots",
        "w13_a",
        "w13_b",
        "w2_a",
        "w2_b",
    )

    def __init__(
        self,
        w13_a: Factor | Sequence[torch.Tensor],
        w13_b: Factor | Sequence[torch.Tensor],
        w2_a: torch.Tensor,
        w2_b: torch.Tensor,
        *,
        ranks: torch.Tensor | None = None,
        enabled: torch.Tensor | None = None,
    ) -> None:
        gate_a, up_a = _pair("w13_a", w13_a)
        gate_b, up_b = _pair("w13_b", w13_b)
        _tensor("w2_a", w2_a, 4)
        _tensor("w2_b", w2_b, 4)
        slots, experts, rank, inter = w2_a.shape
        hidden = w2_b.shape[2]
        if min(slots, experts, rank, inter, hidden) < 1:
            _fail("w2_a and w2_b", "without empty axes", f"{tuple(w2_a.shape)} and {tuple(w2_b.shape)}")
        if isinstance(w13_a, torch.Tensor) and w13_a.shape[2] not in (1, 2):
            _fail("w13_a", "of a slice axis (the third) of 1 or 2", tuple(w13_a.shape))
        if isinstance(w13_b, torch.Tensor) and w13_b.shape[2] != 2:
            _fail("w13_b", "of a slice axis (the third) of 2", tuple(w13_b.shape))
        for name, t, wanted in (
            ("w13_a", gate_a, (slots, (experts, 1), rank, hidden)),
            ("w13_b", gate_b, (slots, (experts,), inter, rank)),
            ("w2_b", w2_b, (slots, (experts, 1), hidden, rank)),
        ):
            if t.shape[0] != slots or t.shape[1] not in wanted[1] or tuple(t.shape[2:]) != wanted[2:]:
                form = f"(L={slots}, E={'|'.join(map(str, wanted[1]))}, {wanted[2]}, {wanted[3]})"
                _fail(name, f"{form} a slice to fit w2_a {tuple(w2_a.shape)} and w2_b's H={hidden}", tuple(t.shape))
        if w2_a.dtype not in DTYPES:
            _fail("w2_a", "bfloat16, float16 or float32", w2_a.dtype)
        for name, t in (("w13_a", gate_a), ("w13_a", up_a), ("w13_b", gate_b), ("w13_b", up_b), ("w2_b", w2_b)):
            if t.dtype != w2_a.dtype:
                _fail(name, f"of w2_a's dtype {w2_a.dtype}", t.dtype)
            if t.device != w2_a.device:
                _fail(name, f"on w2_a's device {w2_a.device}", t.device)

        self.slots, self.num_experts, self.rank = int(slots), int(experts), int(rank)
        self.hidden, self.intermediate = int(hidden), int(inter)
        self.w13_a: Factor = w13_a if isinstance(w13_a, torch.Tensor) else (gate_a, up_a)
        self.w13_b: Factor = w13_b if isinstance(w13_b, torch.Tensor) else (gate_b, up_b)
        self.w2_a, self.w2_b = w2_a, w2_b
        self.gate_up_a, self.gate_up_b = (gate_a, up_a), (gate_b, up_b)
        self.shared_a, self.shared_b = gate_a.shape[1] == 1, w2_b.shape[1] == 1
        self.one_a = _same_memory(gate_a, up_a)
        self.dtype, self.device = w2_a.dtype, w2_a.device
        self.ranks = self._per_slot("ranks", ranks, self.rank)
        self.enabled = self._per_slot("enabled", enabled, 1)
        if ranks is not None and env.flag("CHECK") and not bool(((ranks >= 0) & (ranks <= self.rank)).all()):
            _fail("ranks", f"in 0..{self.rank}", ranks.tolist())

    def _per_slot(self, name: str, value: torch.Tensor | None, default: int) -> torch.Tensor:
        if value is None:
            return torch.full((self.slots,), default, dtype=torch.int32, device=self.device)
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int32 or value.shape != (self.slots,):
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            _fail(name, f"int32 of shape ({self.slots},)", got)
        if value.device != self.device:
            _fail(name, f"on the bank's device {self.device}", value.device)
        if self.slots > 1 and value.stride(0) != 1:
            _fail(name, "contiguous", f"stride {value.stride(0)}")
        return value

    @classmethod
    def zeros(
        cls,
        slots: int,
        shard: object,
        rank: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        shared_outer: bool = False,
        one_a: bool = False,
    ) -> ExpertLoRA:
        """An empty bank (ranks and enabled 0) for one layer of a shard, to be filled by `write_slot_`.

        Args:
            slots, rank: L and R, the highest rank that any adapter will have.
            shard: anything with ``hidden``, ``intermediate`` and ``num_experts`` (local), as ``BeamMoEConfig.shard``
                gives.
            shared_outer: one A of w13 and one B of w2 for all experts.
            one_a: one A for gate and up.
        """
        try:
            h, i, e = int(shard.hidden), int(shard.intermediate), int(shard.num_experts)  # type: ignore[attr-defined]
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"ExpertLoRA.zeros: shard needs hidden, intermediate and num_experts, got {shard!r}"
            ) from error
        for name, value in (("slots", slots), ("rank", rank)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"ExpertLoRA.zeros: {name} must be an integer of at least 1, got {value!r}")
        outer = 1 if shared_outer else e

        def new(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            new(slots, outer, 1 if one_a else 2, rank, h),
            new(slots, e, 2, i, rank),
            new(slots, e, rank, i),
            new(slots, outer, h, rank),
            ranks=new(slots, dtype=torch.int32),
            enabled=new(slots, dtype=torch.int32),
        )

    def _slot(self, operation: str, argument: str, i: int) -> int:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < self.slots:
            raise ValueError(f"ExpertLoRA.{operation}: {argument} must be an integer in 0..{self.slots - 1}, got {i!r}")
        return i

    def _factors(self) -> list[tuple[str, torch.Tensor, int]]:
        """Every distinct factor with its name and rank axis; an A that gate and up share comes once, as gate's."""
        (ga, ua), (gb, ub) = self.gate_up_a, self.gate_up_b
        parts = [("w13_a gate", ga, 2), ("w13_a up", ua, 2), ("w13_b gate", gb, 3), ("w13_b up", ub, 3)]
        if self.one_a:
            del parts[1]
        return [*parts, ("w2_a", self.w2_a, 2), ("w2_b", self.w2_b, 3)]

    @torch.no_grad()
    def write_slot_(self, i: int, adapter: ExpertLoRA, src_slot: int = 0) -> ExpertLoRA:
        """Copy slot ``src_slot`` of ``adapter`` into slot ``i``, in place, on the current stream.

        Storage, shapes and strides stay as they are, so a captured graph reads the new adapter at its next replay. A
        rank below the bank's is padded with zeros; live rank and enabled flag are copied on the device (no host
        synchronisation when both banks are on one device). A source that shares an outer factor, or one A for gate
        and up, is repeated into a bank that does not; values are converted to the bank's dtype.

        Raises:
            ValueError: a slot out of range, experts, hidden or intermediate that differ, a rank above the bank's, or a
                source with separate factors where this bank has one shared factor.
        """
        self._slot("write_slot_", "i", i)
        if not isinstance(adapter, ExpertLoRA):
            raise ValueError(f"ExpertLoRA.write_slot_: adapter must be an ExpertLoRA, got {type(adapter).__name__}")
        adapter._slot("write_slot_", "src_slot", src_slot)
        for field in ("num_experts", "hidden", "intermediate"):
            ours, theirs = getattr(self, field), getattr(adapter, field)
            if ours != theirs:
                raise ValueError(f"ExpertLoRA.write_slot_: adapter's {field} must be {ours}, got {theirs}")
        if adapter.rank > self.rank:
            raise ValueError(
                f"ExpertLoRA.write_slot_: adapter's rank must be at most the bank's {self.rank}, got {adapter.rank}"
            )
        for field, over in (
            ("shared_a", "experts in w13_a"),
            ("shared_b", "experts in w2_b"),
            ("one_a", "gate and up"),
        ):
            if getattr(self, field) and not getattr(adapter, field):
                raise ValueError(
                    f"ExpertLoRA.write_slot_: the bank shares one factor over {over}, adapter must too, "
                    f"got {field}={getattr(adapter, field)}"
                )
        source = {name: t for name, t, _ in adapter._factors()}
        for name, into, axis in self._factors():
            slot, t = into[i], source.get(name, source["w13_a gate"])[src_slot]
            slot.narrow(axis - 1, 0, adapter.rank).copy_(t)
            if adapter.rank < self.rank:
                slot.narrow(axis - 1, adapter.rank, self.rank - adapter.rank).zero_()
        self.ranks[i : i + 1].copy_(adapter.ranks[src_slot : src_slot + 1])
        self.enabled[i : i + 1].copy_(adapter.enabled[src_slot : src_slot + 1])
        return self

    @torch.no_grad()
    def clear_slot_(self, i: int) -> ExpertLoRA:
        """Zero slot ``i`` in place: no factor, rank 0, disabled."""
        self._slot("clear_slot_", "i", i)
        for _, t, _ in self._factors():
            t[i].zero_()
        self.ranks[i : i + 1].zero_()
        self.enabled[i : i + 1].zero_()
        return self

    def slot(self, i: int) -> ExpertLoRA:
        """A bank of the one slot ``i``, sharing memory with this one."""
        s = slice(self._slot("slot", "i", i), i + 1)
        a, b = (f[s] if isinstance(f, torch.Tensor) else (f[0][s], f[1][s]) for f in (self.w13_a, self.w13_b))
        return ExpertLoRA(a, b, self.w2_a[s], self.w2_b[s], ranks=self.ranks[s], enabled=self.enabled[s])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> ExpertLoRA:
        """The bank on another device or in another dtype; factors already there are kept by reference."""

        def move(f: Factor) -> Factor:
            if isinstance(f, torch.Tensor):
                return f.to(device=device, dtype=dtype)
            gate = f[0].to(device=device, dtype=dtype)
            return gate, gate if self.one_a else f[1].to(device=device, dtype=dtype)

        w2_a, w2_b = (t.to(device=device, dtype=dtype) for t in (self.w2_a, self.w2_b))
        ranks, enabled = self.ranks.to(w2_a.device), self.enabled.to(w2_a.device)
        return ExpertLoRA(move(self.w13_a), move(self.w13_b), w2_a, w2_b, ranks=ranks, enabled=enabled)

    def __repr__(self) -> str:
        return (
            f"ExpertLoRA(slots={self.slots}, num_experts={self.num_experts}, rank={self.rank}, hidden={self.hidden}, "
            f"intermediate={self.intermediate}, shared_a={self.shared_a}, shared_b={self.shared_b}, "
            f"one_a={self.one_a}, dtype={self.dtype}, device={self.device})"
        )
