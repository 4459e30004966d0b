"""The patch for SkyRL, on its real classes; only vLLM's trainer-side contract, which they import, is stood in for."""

import importlib.util
import sys
import types
from typing import NamedTuple

import pytest
import torch


def _import_skyrl():
    class ParamMeta(NamedTuple):
        name: str
        dtype: torch.dtype
        shape: tuple

    base = types.ModuleType("vllm.distributed.weight_transfer.base")
    base.ParamMeta, base.WeightSource, base.materialize_full_tensor = ParamMeta, object, lambda t: t
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[base.__name__] = base
    from skyrl.backends.skyrl_train.weight_sync import sources

    return sources


def synced(folder):
    import megatron_ranks as m

    import beam_moe.integrations.megatron as integration
    from beam_moe.weight_sync import is_router

    ref = m.reference()
    path = m.checkpoint(ref, folder / "hf")
    bridge, _, chunks = m.load(path, dtype=torch.bfloat16)
    sources = _import_skyrl()
    disk = ref.state_dict()

    def send():
        source = sources.MegatronWeightSource(bridge, chunks, torch.bfloat16)
        sent, meta = dict(source), source.metadata()
        agree = [(n, t.dtype, tuple(t.shape)) for n, t in sent.items()] == [tuple(x) for x in meta]
        router = {n: t for n, t in sent.items() if is_router(n)}
        exact = all(torch.equal(t, disk[n]) for n, t in router.items())
        return agree, exact, len(router), {t.dtype for n, t in sent.items() if n not in router}

    stock = send()
    integration.patch_skyrl()
    integration.patch_skyrl()
    patched = send()
    from megatron.bridge.peft import utils
    from skyrl.backends.skyrl_train.distributed.megatron import fused_lm_head

    with pytest.raises(ValueError) as e:
        fused_lm_head.call_model_with_fused_lm_head(chunks[0], output_processor=None, output_processor_context={})
    utils.enable_expert_parallel_grad_sync_in_finalize(chunks)
    return stock, patched, str(e.value)


@pytest.mark.skipif(importlib.util.find_spec("skyrl") is None, reason="needs SkyRL")
def test_router_is_exact_through_skyrls_own_source(ranks):
    ((stock, patched, message),) = ranks("synced")
    assert stock == (True, False, 6, {torch.bfloat16}), "SkyRL no longer rounds the router: the patch can go"
    assert patched == (True, True, 6, {torch.bfloat16})
    assert "fused_lm_head_logprob" in message and "30" in message


def other_version(folder):
    import megatron_ranks  # noqa: F401

    import beam_moe.integrations.megatron.skyrl as ours

    ours.version = lambda name: "0.5.0"
    with pytest.raises(ImportError) as e:
        ours.patch_skyrl()
    return str(e.value)


def test_other_versions_are_refused(ranks):
    (message,) = ranks("other_version")
    assert "0.4.0" in message and "0.5.0" in message
