"""An adapter replaced in place must not be served from KV blocks of its old weights.

vLLM's block hashes know an adapter's name and path. ``load_inplace`` keeps both and replaces the weights, so with
prefix caching a prompt seen before would be answered from the old adapter's KV. Here each load in place gives the
adapter a new generation in the hash, in the engine's own process, whatever client asked for it.
"""

from __future__ import annotations

from collections import Counter
from functools import wraps
from typing import Any

generations: Counter[int] = Counter()
"""Loads in place so far, by ``lora_int_id``."""


def tell_generations_apart() -> None:
    """Wrap the engine's loading of adapters and its hashing of blocks. Re-entrant."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    add_lora, hash_keys = EngineCore.add_lora, kv_cache_utils._gen_lora_extra_hash_keys
    if getattr(hash_keys, "__beam_moe__", False):
        return

    @wraps(add_lora)
    def counted(self: Any, lora_request: Any) -> bool:
        result = add_lora(self, lora_request)
        if lora_request.load_inplace:
            generations[lora_request.lora_int_id] += 1
        return result

    @wraps(hash_keys)
    def keys(request: Any) -> list[tuple[str, str, str]]:
        lora = request.lora_request
        if lora is None:
            return hash_keys(request)
        # a request that itself loads in place may bring other weights every time: it shares blocks with no other
        version = request.request_id if lora.load_inplace else generations[lora.lora_int_id]
        return [(kind, name, f"{path}#{version}" if version else path) for kind, name, path in hash_keys(request)]

    keys.__beam_moe__ = True  # type: ignore[attr-defined]
    EngineCore.add_lora = counted  # type: ignore[method-assign]
    kv_cache_utils._gen_lora_extra_hash_keys = keys
