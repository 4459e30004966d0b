"""Launch configurations measured offline, one JSON file per device and operation: ``configs/<device>/<op>.json``.

    {"device": "NVIDIA H200", "op": "moe_lora", "triton": "3.6.0", "torch": "2.11.0+cu130",
     "entries": [{"shape": {"experts": 256, "hidden": 5120, …}, "rows": 16, "config": {"block_m": 8, …}}]}

A lookup is exact on every key of the shape and bucketed on the rows: the smallest entry with at least as many rows
serves, the largest one beyond the end of the table. Where nothing fits the caller's heuristic decides; nothing is tuned
at run time, so a captured graph, a restart and a second rank all launch the same thing.
"""

import json
import logging
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

CONFIGS = Path(__file__).parent / "configs"

Config = dict[str, Any]
Device = int | str | torch.device | None

_overrides: dict[str, Config] = {}


@cache
def device_name(device: Device = None) -> str:
    """Name of a device as CUDA reports it, or ``cpu`` and the machine's architecture for none of CUDA's."""
    if isinstance(device, str):
        return device
    cpu = isinstance(device, torch.device) and device.type != "cuda"
    return f"cpu {platform.machine()}" if cpu or not torch.cuda.is_available() else torch.cuda.get_device_name(device)


@cache
def device_folder(device: Device = None) -> str:
    """Folder of a device under ``kernels/configs`` and ``bench/results``: ``nvidia_h200`` for an NVIDIA H200.

    ``device`` is a name as CUDA reports it, an index, a `torch.device`, or None for the current device.
    """
    return re.sub(r"[^0-9a-z]+", "_", device_name(device).lower()).strip("_")


@cache
def _table(folder: str, op: str) -> dict[frozenset, tuple[tuple[int, Config], ...]]:
    path = CONFIGS / folder / f"{op}.json"
    if not path.is_file():
        logger.info("%s: no tuned table for %s, launching by heuristic", op, folder)
        return {}
    table: dict[frozenset, list[tuple[int, Config]]] = {}
    for entry in json.loads(path.read_text())["entries"]:
        table.setdefault(frozenset(entry["shape"].items()), []).append((entry["rows"], entry["config"]))
    return {shape: tuple(sorted(rows, key=lambda r: r[0])) for shape, rows in table.items()}


@cache
def _find(folder: str, op: str, rows: int, shape: frozenset) -> Config | None:
    table = _table(folder, op)
    entries = table.get(shape)
    if entries is None:
        if table:
            logger.info("%s: shape %s is not in the table of %s, launching by heuristic", op, dict(shape), folder)
        return None
    return next((config for limit, config in entries if limit >= rows), entries[-1][1])


def lookup(device: Device, op: str, rows: int, **shape: int | str) -> Config | None:
    """Tuned configuration of one launch, or None where the caller's heuristic must decide.

    Args:
        device: as for `device_folder`.
        op: name of the operation and of its file.
        rows: tokens or pairs of this call; the smallest entry with at least as many serves, the largest one beyond.
        shape: every key of the entry's shape, compared exactly.

    Returns:
        A mapping shared between calls: read it, never write to it.
    """
    if op in _overrides:
        return _overrides[op]
    return _find(device_folder(device), op, rows, frozenset(shape.items()))


def of_other_shapes(device: Device, op: str, rows: int, **shape: int | str) -> list[Config]:
    """What the table holds for as many rows of every other shape, each once: where a search for ``shape`` may start."""
    found: list[Config] = []
    for other in _table(device_folder(device), op):
        config = _find(device_folder(device), op, rows, other)
        if other != frozenset(shape.items()) and config is not None and config not in found:
            found.append(config)
    return found


@contextmanager
def override(op: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Within the block every lookup of ``op`` yields ``config``: for tests and for the tuner itself."""
    before = _overrides.get(op)
    _overrides[op] = dict(config)
    try:
        yield
    finally:
        if before is None:
            del _overrides[op]
        else:
            _overrides[op] = before


def save(device: Device, op: str, entries: Sequence[Mapping[str, Any]]) -> Path:
    """Merge measured entries into the table of ``device`` and ``op``; the same shape and rows replace what was there.

    Each entry has ``shape`` (a mapping), ``rows`` and ``config``. Returns the file's path.
    """
    import triton

    for entry in entries:
        if set(entry) != {"shape", "rows", "config"}:
            raise ValueError(f"tuning.save: an entry has exactly shape, rows and config, got {sorted(entry)}")
    folder = device_folder(device)
    path = CONFIGS / folder / f"{op}.json"
    old = json.loads(path.read_text())["entries"] if path.is_file() else []
    merged = {(tuple(sorted(e["shape"].items())), e["rows"]): dict(e) for e in [*old, *entries]}
    head = {"device": device_name(device), "op": op, "triton": triton.__version__, "torch": torch.__version__}
    lines = ",\n".join(
        "    " + json.dumps({"shape": dict(sorted(e["shape"].items())), "rows": e["rows"], "config": e["config"]})
        for _, e in sorted(merged.items(), key=lambda item: (repr(item[0][0]), item[0][1]))
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    head_text = json.dumps(head, indent=2)[:-2]  # one entry a line keeps the file's history readable
    path.write_text(f'{head_text},\n  "entries": [\n{lines}\n  ]\n}}\n')
    _table.cache_clear()
    _find.cache_clear()
    return path
