"""The engines that some benches need beside this package, and how to get them."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

INSTALL = {
    "vllm": "pip install 'beam-moe[vllm]' (vLLM 0.33 or 0.34)",
    "megatron.core": "pip install 'beam-moe[megatron]' (megatron-core 0.19.2, megatron-bridge 0.6.2)",
    "megatron.bridge": "pip install 'beam-moe[megatron]' (megatron-core 0.19.2, megatron-bridge 0.6.2)",
    "transformers": "pip install 'transformers>=5.22', the first release with Beam",
    "safetensors": "pip install safetensors",
}
OLDEST = {"transformers": (5, 22)}


def _found(module: str) -> bool:
    try:
        if importlib.util.find_spec(module) is None:
            return False
        numbers = importlib.metadata.version(module).split(".")[:2] if module in OLDEST else ()
        return tuple(map(int, numbers)) >= OLDEST.get(module, ())
    except ModuleNotFoundError:  # of the package that holds it; a distribution without metadata is one of these too
        return False


def need(what: str, *modules: str) -> None:
    """End with status 2, naming what to install, where one of ``modules`` is not there."""
    missing = [m for m in modules if not _found(m)]
    if missing:
        print(f"{what} needs {', '.join(missing)}:", file=sys.stderr)
        for line in dict.fromkeys(INSTALL[m] for m in missing):
            print(f"  {line}", file=sys.stderr)
        raise SystemExit(2)


def importable(work: Path) -> None:
    """Show this checkout to this process and those it starts, by a folder under ``work``, where it is not installed."""
    if importlib.util.find_spec("beam_moe") is None:
        import vllm_decode

        vllm_decode.importable(work)
