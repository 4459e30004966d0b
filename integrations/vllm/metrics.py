"""Which calls our experts served and which fell back to vLLM's own, and why.

A captured graph runs no Python, so a call counts once per eager call and once per capture, never per replay: the counts
say which path a batch size takes, not how often.
"""

from __future__ import annotations

import logging
from collections import Counter

from beam_moe import env

logger = logging.getLogger("vllm.beam_moe")  # vLLM configures handlers for its own name space only

SERVED, PREFILL, FALLBACK = "served", "prefill", "fallback"
calls: Counter[tuple[str, str]] = Counter()
"""Keys ``(path, detail)``: ``served`` by our kernel, ``prefill`` by vLLM's experts because of the batch's size,
``fallback`` by vLLM's experts for the reason in ``detail``."""
_logged: set[str] = set()


def log_once(message: str, level: int = logging.INFO, key: str = "") -> None:
    """Log ``message`` the first time this process meets it, or ``key`` where one is given."""
    if (key or message) not in _logged:
        _logged.add(key or message)
        logger.log(level, message)


def fell_back(what: str, reason: str) -> None:
    """Count and log a call or layer that vLLM's own code serves; with ``BEAM_MOE_STRICT=1`` raise instead."""
    message = f"beam-moe: {what} stays with vLLM's own code: {reason}"
    if env.flag("STRICT"):
        raise RuntimeError(f"{message} (BEAM_MOE_STRICT=1)")
    calls[FALLBACK, reason] += 1
    log_once(message, logging.WARNING, reason)  # a model has dozens of layers, and one reason for all of them


def snapshot() -> list[dict[str, object]]:
    """The counts as rows ``{path, detail, calls}``, most frequent first."""
    return [{"path": path, "detail": detail, "calls": n} for (path, detail), n in calls.most_common()]
