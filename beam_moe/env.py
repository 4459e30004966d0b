"""Every ``BEAM_MOE_*`` environment variable, in one table.

Values are read at each call of `flag` or `text`, so a test or a running process may change them.
"""

import os
from typing import NamedTuple

PREFIX = "BEAM_MOE_"


class Variable(NamedTuple):
    """One row: the value when unset, and what the variable does."""

    default: str
    meaning: str


VARIABLES: dict[str, Variable] = {
    "CHECK": Variable("0", "1: also check values that live on the device (ids, ranks); costs a host synchronisation"),
    "STRICT": Variable("0", "1: an integration that would fall back to the engine's own path raises instead"),
    "VLLM": Variable("beam", "which vLLM models get our experts: beam, 0 (none), all, or architectures by comma"),
    "VLLM_TOKENS": Variable(
        "512", "most tokens of a batch without adapters whose bf16 experts are ours in vLLM; larger ones are vLLM's"
    ),
    "VLLM_LORA_TOKENS": Variable(
        "16384", "most tokens of a batch with adapters whose bf16 experts are ours in vLLM; larger ones are vLLM's"
    ),
    "VLLM_ROUTER": Variable(
        "512",
        "most tokens of a batch whose experts our router chooses in vLLM's Beam; larger ones, with 0 all, are vLLM's",
    ),
    "VLLM_LINEAR_LORA": Variable(
        "64",
        "most tokens of a batch whose linear layers' LoRA is ours in vLLM's Beam and in other models whose experts are"
        " ours; larger ones, with 0 all, are vLLM's",
    ),
    "VLLM_MXFP8_LINEAR": Variable(
        "1", "0: MXFP8 linear layers are vLLM's on Hopper too, in every model that BEAM_MOE_VLLM names"
    ),
    "PDL": Variable("1", "0: no launch starts before the one before it is through (programmatic dependent launch)"),
    "JOIN": Variable("1", "0: a layer's products never share a launch, whose programs rely on being started in order"),
    "PROGRESS": Variable("0", "1: show a progress bar while an adapter loads"),
    "RESULTS": Variable("", "benches: the folder that rows are written to, instead of bench/results"),
    "COMMIT": Variable("", "benches: the commit to name where the sources travel without their git directory"),
}

TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def text(name: str) -> str:
    """The value of ``BEAM_MOE_<name>`` or its default; a name outside the table is a ValueError."""
    if name not in VARIABLES:
        raise ValueError(f"env: name must be one of {', '.join(VARIABLES)}, got {name!r}")
    return os.environ.get(PREFIX + name, VARIABLES[name].default)


def flag(name: str) -> bool:
    """``BEAM_MOE_<name>`` as a boolean: 1/true/yes/on or 0/false/no/off/empty; anything else is a ValueError."""
    value = text(name).strip().lower()
    if value in TRUE:
        return True
    if value in FALSE:
        return False
    raise ValueError(f"env: {PREFIX}{name} must be one of {', '.join(TRUE + FALSE[1:])}, got {value!r}")


def number(name: str) -> int:
    """``BEAM_MOE_<name>`` as an integer of at least 0; anything else is a ValueError."""
    value = text(name).strip()
    if not value.isdigit():
        raise ValueError(f"env: {PREFIX}{name} must be an integer of at least 0, got {value!r}")
    return int(value)


BEAM = "BeamForCausalLM"


def vllm_models() -> frozenset[str]:
    """Architectures that ``BEAM_MOE_VLLM`` names, in lower case: ``beam`` written out, ``all`` as it is, 0 and none
    left out."""
    names = {n.strip().lower() for n in text("VLLM").split(",")}
    return frozenset(BEAM.lower() if n == "beam" else n for n in names - {"", "0", "none"})


def serves_in_vllm(architecture: str | None) -> bool:
    """Whether ``BEAM_MOE_VLLM`` asks for our experts under this architecture of vLLM's."""
    return not vllm_models().isdisjoint({"all", (architecture or "").lower()})
