"""An adapter replaced in place must not be served from KV blocks of its old weights.

vLLM's block hashes know an adapter's name and path. ``load_inplace`` keeps both and replaces the weights, and a file
may change between two loads of one path, so with prefix caching a prompt seen before would be answered from the old
adapter's KV. Here the hash also knows the adapter's number and how often what has that number was replaced, in the
engine's own process, whatever client asked for it: a load in place, a removal, and an adapter sent by `weight_sync`.
vLLM's server unloads an adapter by forgetting its number, which the engine does not hear of: the next has another.
Requests that wait meanwhile are hashed again; those that run keep the blocks they have.
"""

from __future__ import annotations

from collections import Counter
from functools import wraps
from typing import Any

generations: Counter[int] = Counter()
"""Replacements so far, by ``lora_int_id``."""
REPLACES = ("beam_moe_load_adapter", "beam_moe_restore_adapter")
"""Methods of `weight_sync.WeightSync` that replace an adapter, called by themselves or by its ``beam_moe_attempt``."""
NOTED = "_beam_moe_generation"
"""On a request: the generation that the first of its block hashes is of."""


def rehash(request: Any) -> None:
    """Compute the block hashes of a request that holds no blocks yet again, where its adapter has been replaced."""
    lora = request.lora_request
    stale = lora is not None and getattr(request, NOTED, 0) != generations[lora.lora_int_id]
    if stale and request.num_computed_tokens == 0 and request.block_hashes:
        request.block_hashes.clear()
        vars(request).pop(NOTED, None)
        request.update_block_hashes()


def replaced(core: Any, number: int) -> None:
    """Adapter ``number`` of an ``EngineCore`` has other weights from here on."""
    generations[number] += 1
    for request in getattr(core.scheduler, "requests", {}).values():
        rehash(request)


def tell_generations_apart() -> None:
    """Wrap the engine's ways to replace an adapter, its taking of requests and its hashing of blocks. Re-entrant."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    add_lora, remove_lora, rpc = EngineCore.add_lora, EngineCore.remove_lora, EngineCore.collective_rpc
    add_request, hash_keys = EngineCore.add_request, kv_cache_utils._gen_lora_extra_hash_keys
    if getattr(hash_keys, "__beam_moe__", False):
        return

    @wraps(add_lora)
    def adding(self: Any, lora_request: Any) -> bool:
        try:
            return add_lora(self, lora_request)
        finally:  # also after an error: some workers may have done it
            if lora_request.load_inplace:
                replaced(self, lora_request.lora_int_id)

    @wraps(remove_lora)
    def removing(self: Any, lora_id: int) -> bool:
        try:
            return remove_lora(self, lora_id)
        finally:
            replaced(self, lora_id)

    @wraps(rpc)
    def calling(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        called, *given = args if method == "beam_moe_attempt" and args else (method, *args)
        try:
            return rpc(self, method, timeout, args, kwargs)
        finally:  # also after an error: some workers may have done it
            number = given[1] if len(given) > 1 else (kwargs or {}).get("number")
            if called in REPLACES and number is not None:
                replaced(self, number)

    @wraps(add_request)
    def taking(self: Any, request: Any, request_wave: int = 0) -> None:
        rehash(request)  # hashed by another thread, maybe before the adapter was replaced
        add_request(self, request, request_wave)

    @wraps(hash_keys)
    def keys(request: Any) -> list[tuple[str, str, str]]:
        lora = request.lora_request
        if lora is None:
            return hash_keys(request)
        number = lora.lora_int_id
        if not hasattr(request, NOTED):  # the adapter may be replaced while another thread hashes block after block
            setattr(request, NOTED, generations[number])
        # a request that itself loads in place may bring other weights every time: it shares blocks with no other
        version = request.request_id if lora.load_inplace else generations[number]
        return [(kind, name, f"{path}#{number}#{version}") for kind, name, path in hash_keys(request)]

    keys.__beam_moe__ = True  # type: ignore[attr-defined]
    EngineCore.add_lora, EngineCore.remove_lora = adding, removing  # type: ignore[method-assign]
    EngineCore.collective_rpc, EngineCore.add_request = calling, taking  # type: ignore[method-assign]
    kv_cache_utils._gen_lora_extra_hash_keys = keys
