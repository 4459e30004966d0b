"""``beam-moe``: what this installation can do, and what a running engine does with it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table

from beam_moe import env

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode=None)

PACKAGES = ("beam-moe", "torch", "triton", "vllm", "megatron-core", "megatron-bridge", "transformers")

LAYER_COLUMNS = {
    "layer": "layer",
    "experts": "experts",
    "ours up to": "ours_up_to_tokens",
    "with adapters": "with_adapters_up_to_tokens",
    "LoRA": "lora",
    "router up to": "router_up_to_tokens",
    "why not": "reason",
}
"""Columns of `doctor` for the layers of a worker, with the keys of its report."""


@app.callback()
def main() -> None:
    """Commands of beam-moe."""


def _table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    console = Console()
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    console.print(table)


def machine() -> list[tuple[str, str]]:
    """GPUs and versions, as rows of name and value."""
    rows = [("python", platform.python_version())]
    for name in PACKAGES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    if importlib.util.find_spec("torch") is None:
        return rows
    import torch

    if not torch.cuda.is_available():
        return [*rows, ("GPU", "none: kernels run in Triton's interpreter (TRITON_INTERPRET=1) only")]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        rows.append((f"GPU {i}", f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB"))
    return rows


def kernels(model: str, tp: int, ep: int, device: str | None) -> list[list[Any]]:
    """Per kind of layer of a checkpoint's configuration on one rank: what serves it, and how its launch is chosen.

    Args:
        model: a folder with ``config.json``, or the file.
        tp, ep: the engine's parallelism.
        device: a device name as CUDA reports it, for the tuned table; None for the current one.
    """
    from beam_moe.config import BeamMoEConfig
    from beam_moe.kernels.tuning import lookup

    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        raise ValueError(f"doctor: model must be a folder with config.json, or the file, got {model!r}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"doctor: model's configuration must be JSON, got {str(path)!r} ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"doctor: model's configuration must be a JSON object, got {str(path)!r}")
    try:
        config = BeamMoEConfig.from_hf(raw)
    except ValueError as error:
        return [["MoE layers", "vLLM's experts", str(error)]]
    shard = config.shard(tp=tp, ep=ep)
    sparse = sum(config.sparse)
    architecture = (raw.get("architectures") or ["?"])[0]
    rows: list[list[Any]] = [[_linear_layers(config.num_layers - sparse), linears(architecture, raw), None]]
    what = f"{sparse} sparse: {shard.num_experts} experts, H {shard.hidden}, I {shard.intermediate}, top-{shard.top_k}"
    reason = why_not(architecture, raw)
    if reason is not None:
        return [*rows, [what, "vLLM's experts", reason]]
    shape = {
        "top_k": shard.top_k,
        "experts": shard.num_experts,
        "hidden": shard.hidden,
        "intermediate": shard.intermediate,
    }
    table = "moe_lora_mxfp8" if stored_as(raw) == "mxfp8" else "moe_lora"
    tuned = lookup(device, table, 16, **shape) is not None
    return [
        *rows,
        [what, "beam_moe.kernels.moe_lora", "tuned table" if tuned else "launched by heuristic: no tuned entry"],
    ]


def _linear_layers(dense: int) -> str:
    return f"linear layers: attention, {dense} dense" if dense else "linear layers: attention"


def linears(architecture: str, raw: dict[str, Any]) -> str:
    """What serves the linear layers of a model in vLLM, and their adapters."""
    few, named = env.number("VLLM_LINEAR_LORA"), env.serves_in_vllm(architecture)
    # vLLM's own classes give their linears' adapters to us where the experts are ours; Beam's, which is ours, always
    ours = few > 0 and named and (architecture == env.BEAM or why_not(architecture, raw) is None)
    adapters = f"ours up to {few} tokens, vLLM's above" if ours else "vLLM's"
    mxfp8 = named and env.flag("VLLM_MXFP8_LINEAR") and stored_as(raw) in (None, "mxfp8")
    kernels = "vLLM's, in MXFP8 on Hopper beam_moe.kernels.mxfp8" if mxfp8 else "vLLM's"
    return f"{kernels}; adapters' kernels {adapters}"


def stored_as(raw: dict[str, Any]) -> str | None:
    """How a checkpoint's experts are quantised, from its configuration: ``mxfp8`` in either of the tools' forms that
    our kernel reads, else the tool's own name; None for plain weights."""
    stored = raw.get("quantization_config") or {}
    method = stored.get("quant_method")
    inner = stored.get("quantization") or {}
    algorithm = str(stored.get("quant_algo") or inner.get("quant_algo") or "").upper()
    groups = [g.get("weights") or {} for g in (stored.get("config_groups") or {}).values()]
    form = {"num_bits": 8, "type": "float", "group_size": 32}
    packed = bool(groups) and all(all(w.get(k) == v for k, v in form.items()) for w in groups)
    if algorithm == "MXFP8" or (method == "compressed-tensors" and packed):
        return "mxfp8"
    return method


def why_not(architecture: str, raw: dict[str, Any]) -> str | None:
    """Why vLLM's experts keep a model, from ``BEAM_MOE_VLLM`` and its configuration; None when ours take it."""
    if not env.serves_in_vllm(architecture):
        return f"BEAM_MOE_VLLM={env.text('VLLM').strip()} does not name {architecture}"
    quantised = stored_as(raw)
    if quantised is None or (quantised == "mxfp8" and architecture == env.BEAM):
        return None
    return f"its checkpoint is quantised ({quantised})"


def filtered() -> str | None:
    """Why vLLM does not load the plugin at all, None when it does."""
    names = os.environ.get("VLLM_PLUGINS")
    if names is None or "beam_moe" in names.split(","):
        return None
    return f"VLLM_PLUGINS={names} leaves out beam_moe"


def ask(url: str) -> list[dict[str, Any]]:
    """The report of every worker of a running server (vLLM's development mode, with our worker extension)."""
    body = json.dumps({"method": "beam_moe_report"}).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/collective_rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        results = json.load(reply)["results"]
    return [r if isinstance(r, dict) else json.loads(r) for r in results]


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="folder or config.json of a checkpoint: what would serve it")
    ] = None,
    tp: Annotated[int, typer.Option(help="tensor parallel size")] = 1,
    ep: Annotated[int, typer.Option(help="expert parallel size")] = 1,
    device: Annotated[Optional[str], typer.Option(help="device name, for its tuned table")] = None,  # noqa: UP045
    url: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="a running vLLM server: VLLM_SERVER_DEV_MODE=1 and our --worker-extension-cls"),
    ] = None,
) -> None:
    """GPU and versions, which seams into vLLM are active, which kernel serves which layer and why not."""
    _table("Machine", ["what", "value"], [list(row) for row in machine()])
    settings = [[f"BEAM_MOE_{name}", env.text(name), variable.meaning] for name, variable in env.VARIABLES.items()]
    _table("Settings", ["variable", "value", "meaning"], settings)

    from beam_moe.integrations.vllm import seams

    left_out = filtered()
    problems = seams.check() if left_out is None else [left_out]
    if problems:
        _table("vLLM plugin: inactive, vLLM keeps its own behaviour", ["why"], [[p] for p in problems])
    else:
        rows = [[s.symbol, s.kind, s.why, s.until] for s in seams.SEAMS]
        _table(f"vLLM {seams.installed_version()}: seams in use", ["symbol", "kind", "why", "can go when"], rows)
    if model is not None:
        try:
            rows = kernels(model, tp, ep, device)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        _table(f"Kernels for {model}", ["layers of a rank", "served by", "why"], rows)
    if url is not None:
        try:
            workers = ask(url)
        except urllib.error.HTTPError as error:
            asked = "is VLLM_SERVER_DEV_MODE=1 set there, and our --worker-extension-cls given?"
            raise typer.BadParameter(f"doctor: {url!r} answered {error.code}: {asked}") from error
        except OSError as error:
            raise typer.BadParameter(f"doctor: no answer from {url!r}: {error}") from error
        for rank, worker in enumerate(workers):
            rows = [[layer.get(key) for key in LAYER_COLUMNS.values()] for layer in worker["layers"]]
            _table(f"Worker {rank}", list(LAYER_COLUMNS), rows)
            if worker.get("mxfp8_linears"):
                _table("MXFP8 linears", ["kernel", "layers"], [list(row) for row in worker["mxfp8_linears"].items()])
            _table(
                "calls", ["path", "detail", "calls"], [[c["path"], c["detail"], c["calls"]] for c in worker["calls"]]
            )


if __name__ == "__main__":
    app()
