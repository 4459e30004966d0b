"""What a trainer states about its router tensors, and what an engine checks after a weight sync.

A router in fp32 is worth nothing if a cast on the way rounds it: an engine that copies bf16 values into an fp32
parameter says nothing. So the sender declares each router tensor's dtype and a checksum of its fp32 bits, and the
receiver compares.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)

ROUTERS = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias", ".e_score_correction_bias")
"""Ends of the names of router tensors in Beam's checkpoints and in engines."""


def is_router(name: str) -> bool:
    """Whether ``name`` is a router's weight or its selection bias."""
    return name.endswith(ROUTERS)


def checksum(tensor: torch.Tensor) -> str:
    """16 hex digits of a hash over the shape and the bits of ``tensor`` as contiguous float32, on any device."""
    values = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()
    digest = hashlib.blake2b(str(tuple(values.shape)).encode(), digest_size=8)
    digest.update(values.view(torch.uint8).numpy() if values.numel() else b"")
    return digest.hexdigest()


def declare_routers(
    tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
) -> dict[str, dict[str, Any]]:
    """``{name: {"dtype", "checksum"}}`` for every router among the trainer's named tensors, before any cast."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {
        n: {"dtype": str(t.dtype).removeprefix("torch."), "checksum": checksum(t)} for n, t in items if is_router(n)
    }


def rounded_to_bf16(tensor: torch.Tensor) -> bool:
    """Whether every value is one that bfloat16 represents: likely, though not surely, rounded on the way."""
    values = tensor.detach().float()
    return bool(torch.equal(values, values.bfloat16().float()))


def check_routers(
    declared: Mapping[str, Mapping[str, Any]], found: Mapping[str, torch.Tensor], where: str
) -> list[str]:
    """Compare the routers in ``found`` with what the sender declared; the names that were compared.

    Args:
        declared: from `declare_routers` of the sender.
        found: tensors by the same names; declared ones that are absent are skipped (another rank has them).
        where: said in errors: ``"arrived"``, ``"in the engine"``.

    Raises:
        ValueError: naming every router that was declared other than float32, is not float32 here, or has other bits.
    """
    wrong = [f"{n} was declared {d['dtype']}" for n, d in declared.items() if d["dtype"] != "float32"]
    compared = []
    for name, tensor in found.items():
        stated = declared.get(name)
        if stated is None:
            continue
        compared.append(name)
        if tensor.dtype != torch.float32:
            wrong.append(f"{name} {where} is {tensor.dtype}")
        elif checksum(tensor) != stated["checksum"]:
            wrong.append(f"{name} {where} has checksum {checksum(tensor)}, declared {stated['checksum']}")
        elif name.endswith(".weight") and rounded_to_bf16(tensor):
            logger.warning("%s: every value is a bfloat16 value; was the trainer's router rounded?", name)
    if wrong:
        raise ValueError("router sync: " + "; ".join(wrong))
    return compared
