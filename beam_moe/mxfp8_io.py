"""MXFP8 checkpoints: safetensors in the layouts of compressed-tensors and ModelOpt, read and written.

Both layouts keep a quantised matrix as two tensors and differ only in what ``config.json`` says:

=========================  =================  ========================================================
tensor                     dtype              shape
=========================  =================  ========================================================
``<module>.weight``        float8_e4m3fn      (N, K), or (E, N, K) of fused experts
``<module>.weight_scale``  uint8 (E8M0)       (N, K / 32), or (E, N, K / 32); row-major, never swizzled
=========================  =================  ========================================================

A parameter of another name, such as the fused experts' ``experts.gate_up_proj``, keeps its scales beside it under the
same rule: its own name and ``_scale``. Read, but not written, is ``_scale_inv``: MiniMax's checkpoints call the same
bytes so.

- ``compressed-tensors``: ``quantization_config.quant_method`` is ``"compressed-tensors"``, ``format`` is
  ``"mxfp8-quantized"``, and each config group has ``weights`` of 8-bit ``float``, ``strategy`` ``"group"``,
  ``group_size`` 32, ``scale_dtype`` ``"torch.uint8"``; modules in ``ignore`` are not quantised. Source:
  compressed-tensors 0.17, ``quantization/quant_scheme.py`` (MXFP8, MXFP8A16) and ``compressors/mxfp8``.
- ``modelopt``: ``quantization_config`` has ``quant_method`` ``"modelopt"`` and, directly or under ``quantization``,
  ``quant_algo`` ``"MXFP8"`` and ``exclude_modules``; the same in ``hf_quant_config.json``. Checkpoints that say
  ``quant_method`` ``"mxfp8"`` with ``ignored_layers`` hold the same tensors, their scales as ``_scale_inv``. Source:
  vLLM 0.33, ``quantization/modelopt.py`` (``ModelOptMxFp8Config``) and ``models/minimax_m3``.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from beam_moe.kernels.mxfp8.format import MXFP8Tensor

LAYOUTS = ("compressed-tensors", "modelopt")
SCALE_SUFFIX = "_scale"
SCALE_SUFFIXES = (SCALE_SUFFIX, "_scale_inv")  # those that are read
INDEX = "model.safetensors.index.json"


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def quantization_config(layout: str, ignore: Iterable[str] = (), *, activations: bool = True) -> dict:
    """The ``quantization_config`` section of ``config.json`` for an MXFP8 checkpoint.

    Args:
        layout: ``"compressed-tensors"`` or ``"modelopt"``.
        ignore: names (or the layout's own patterns) of the modules that are not quantised.
        activations: ask the engine to quantise activations too; only compressed-tensors can say no.

    Raises:
        ValueError: an unknown layout, or one that cannot leave activations as they are.
    """
    _require(layout in LAYOUTS, f"quantization_config: layout must be one of {list(LAYOUTS)}, got {layout!r}")
    if layout == "modelopt":
        _require(activations, "quantization_config: the modelopt layout always quantises activations")
        section = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": sorted(ignore)}
        return {"quant_method": "modelopt", "quantization": section}
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": {**weights, "dynamic": True} if activations else None,
        "output_activations": None,
        "format": "mxfp8-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignore),
    }


def checkpoint_layout(config: Mapping) -> str | None:
    """``"compressed-tensors"`` or ``"modelopt"`` for a ``config.json`` of an MXFP8 checkpoint, None if unquantised.

    Raises:
        ValueError: the checkpoint is quantised, but not (or not only) to MXFP8.
    """
    section = config.get("quantization_config")
    if not section:
        return None
    method = str(section.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        groups = list((section.get("config_groups") or {}).values())
        for group in groups:
            weights = group.get("weights") or {}
            found = tuple(weights.get(k) for k in ("num_bits", "type", "strategy", "group_size"))
            _require(
                found == (8, "float", "group", 32) and "uint8" in str(weights.get("scale_dtype", "uint8")),
                f"checkpoint_layout: weights of {group.get('targets')} are not MXFP8: {weights}",
            )
        _require(bool(groups), "checkpoint_layout: the compressed-tensors section has no config_groups")
        return "compressed-tensors"
    algorithm = str((section.get("quantization") or section).get("quant_algo", "")).upper()
    if method == "mxfp8" or (method.startswith("modelopt") and algorithm == "MXFP8"):
        return "modelopt"
    raise ValueError(f"checkpoint_layout: not an MXFP8 checkpoint: quant_method {method!r}, quant_algo {algorithm!r}")


def pack(name: str, t: MXFP8Tensor) -> dict[str, torch.Tensor]:
    """The two tensors of one quantised parameter: ``name`` and ``name + "_scale"``.

    Raises:
        ValueError: ``t`` is not E4M3 with whole blocks along its last axis and row-major scales.
    """
    _require(
        t.axis == -1 and not t.swizzled and t.elem == "e4m3" and t.shape[-1] % 32 == 0,
        f"pack: {name} must be E4M3 with whole blocks along the last axis and row-major scales, got {t}",
    )
    return {name: t.data.contiguous(), name + SCALE_SUFFIX: t.scale.contiguous()}


def _join(name: str, data: torch.Tensor, scale_name: str | None, scale: torch.Tensor | None) -> MXFP8Tensor:
    if scale is None:
        raise ValueError(f"unpack: {name} is {data.dtype} and has no {name + SCALE_SUFFIX} beside it")
    want = (*data.shape[:-1], data.shape[-1] // 32)
    _require(
        data.shape[-1] % 32 == 0 and tuple(scale.shape) == want,
        f"unpack: {scale_name} must have shape {want} for {tuple(data.shape)}, got {tuple(scale.shape)}",
    )
    _require(
        scale.dtype in (torch.uint8, torch.float8_e8m0fnu),
        f"unpack: {scale_name} must hold E8M0 bytes, got {scale.dtype}",
    )
    return MXFP8Tensor(data, scale)


def _scale_of(name: str, names: Mapping) -> str | None:
    """The name of a parameter's scales among ``names``."""
    return next((name + suffix for suffix in SCALE_SUFFIXES if name + suffix in names), None)


def _owner(name: str, names: Mapping) -> str | None:
    """The parameter among ``names`` whose scales ``name`` names."""
    owners = (name.removesuffix(suffix) for suffix in SCALE_SUFFIXES if name.endswith(suffix))
    return next((owner for owner in owners if owner in names), None)


def unpack(tensors: Mapping[str, torch.Tensor]) -> dict[str, MXFP8Tensor | torch.Tensor]:
    """Join each E4M3 tensor with its scales; other tensors pass through. Nothing is copied.

    Raises:
        ValueError: an E4M3 tensor without scales, or with scales of another block size or dtype.
    """
    made: dict[str, MXFP8Tensor | torch.Tensor] = {}
    for name, data in tensors.items():
        if data.dtype == torch.float8_e4m3fn:
            scale_name = _scale_of(name, tensors)
            made[name] = _join(name, data, scale_name, tensors[scale_name] if scale_name else None)
            continue
        owner = _owner(name, tensors)
        if owner is None or tensors[owner].dtype != torch.float8_e4m3fn:
            made[name] = data
    return made


def save_checkpoint(
    tensors: Mapping[str, MXFP8Tensor | torch.Tensor] | Iterable[tuple[str, MXFP8Tensor | torch.Tensor]],
    folder: str | Path,
    *,
    layout: str = "compressed-tensors",
    config: Mapping | None = None,
    ignore: Iterable[str] = (),
    activations: bool = True,
    shard_bytes: int = 5 * 2**30,
) -> Path:
    """Write a checkpoint: safetensors shards, their index, and ``config.json`` with the layout's section.

    Args:
        tensors: by parameter name; may be an iterator, of which only a shard is held at a time.
        folder: made if missing; files of the same names are replaced.
        layout, activations: as in `quantization_config`; ``modelopt`` gets ``hf_quant_config.json`` too.
        config: the model's ``config.json``; its ``quantization_config`` is replaced.
        ignore: modules to name as unquantised besides those whose ``weight`` is dense and has two dimensions or more.
        shard_bytes: largest shard, unless one parameter alone is larger.

    Returns:
        The folder.

    Raises:
        ValueError: nothing to write, a name that would be written twice, or a tensor that `pack` refuses.
    """
    folder = Path(folder)
    quantization_config(layout, activations=activations)
    folder.mkdir(parents=True, exist_ok=True)
    skipped, size = set(ignore), 0
    seen: set[str] = set()
    shards: list[tuple[Path, dict[str, int]]] = []
    shard: dict[str, torch.Tensor] = {}

    def flush():
        path = folder / f"model-{len(shards) + 1:05d}.part.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        shards.append((path, {name: t.nbytes for name, t in shard.items()}))

    for name, t in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if isinstance(t, MXFP8Tensor):
            parts = pack(name, t)
        else:
            parts = {name: t.contiguous()}
            if name.endswith(".weight") and t.ndim >= 2:
                skipped.add(name.removesuffix(".weight"))
        for part in parts:  # a quantised weight writes its scales too, under a name of theirs
            _require(part not in seen, f"save_checkpoint: {part} was given twice")
        seen.update(parts)
        parts_size = sum(p.nbytes for p in parts.values())
        if shard and size + parts_size > shard_bytes:
            flush()
            shard, size = {}, 0
        shard.update(parts)
        size += parts_size
    _require(bool(shard), "save_checkpoint: there are no tensors to write")
    flush()
    weight_map, total = {}, 0
    for i, (path, sizes) in enumerate(shards):
        target = folder / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        path.rename(target)
        weight_map.update(dict.fromkeys(sizes, target.name))
        total += sum(sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    section = quantization_config(layout, skipped, activations=activations)
    (folder / "config.json").write_text(json.dumps({**(config or {}), "quantization_config": section}, indent=2) + "\n")
    if layout == "modelopt":
        (folder / "hf_quant_config.json").write_text(
            json.dumps({"producer": {"name": "modelopt"}, "quantization": section["quantization"]}, indent=2) + "\n"
        )
    return folder


def load_checkpoint(
    folder: str | Path, *, device: str | torch.device = "cpu", select: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, MXFP8Tensor | torch.Tensor]]:
    """Read a checkpoint of either layout (or a dense one), one parameter at a time.

    Args:
        folder: with ``config.json`` and safetensors files, indexed or not.
        device: where tensors are put.
        select: of a parameter's name, whether to read it; scales follow their parameter.

    Yields:
        ``(name, tensor)`` in the order of the files, an `MXFP8Tensor` for each quantised parameter.

    Raises:
        ValueError: the checkpoint is quantised otherwise, holds E4M3 tensors without MXFP8 scales, has no tensors, or
            fewer than its index names.
    """
    folder = Path(folder)
    config_path, separate = folder / "config.json", folder / "hf_quant_config.json"
    config = json.loads(config_path.read_text()) if config_path.is_file() else {}
    if not config.get("quantization_config") and separate.is_file():
        config = {"quantization_config": {"quant_method": "modelopt", **json.loads(separate.read_text())}}
    layout = checkpoint_layout(config)
    files = sorted(folder.glob("*.safetensors"))
    weight_map: dict[str, str] = {}
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        files = [folder / name for name in dict.fromkeys(weight_map.values())]
    _require(bool(files), f"load_checkpoint: no safetensors files in {folder}")
    handles = [safe_open(path, framework="pt", device=str(device)) for path in files]
    where = {name: handle for handle in handles for name in handle.keys()}
    absent = sorted(weight_map.keys() - where.keys())
    _require(not absent, f"load_checkpoint: {folder / INDEX} names tensors that no file has: {', '.join(absent[:4])}")
    for name, handle in where.items():
        if _owner(name, where) is not None or (select is not None and not select(name)):
            continue
        data = handle.get_tensor(name)
        if data.dtype != torch.float8_e4m3fn:
            yield name, data
            for other in (name + suffix for suffix in SCALE_SUFFIXES):
                if other in where:
                    yield other, where[other].get_tensor(other)
            continue
        _require(layout is not None, f"load_checkpoint: {name} is {data.dtype} but config.json names no quantisation")
        scale_name = _scale_of(name, where)
        yield name, _join(name, data, scale_name, where[scale_name].get_tensor(scale_name) if scale_name else None)
