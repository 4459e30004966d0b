"""Runs a test's body in rank processes, forked from a server that has imported Megatron once."""

import importlib.util
import json
import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
HAVE_MEGATRON = all(importlib.util.find_spec(n) is not None for n in ("megatron", "transformers"))


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.megatron)
            if not HAVE_MEGATRON:
                item.add_marker(pytest.mark.skip(reason="needs megatron-core and megatron-bridge"))


@pytest.fixture(scope="session")
def fork_server():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))  # megatron_entry here and in the children
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)  # megatron_ranks in the server, as it starts
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megatron_ranks"])
        forkserver.ensure_running()
        yield context


@pytest.fixture
def ranks(fork_server, request, tmp_path):
    """``ranks("body", world=2, **kwargs)`` calls ``body(folder=..., **kwargs)`` of the test's file in every rank.

    ``tp``, ``pp`` and ``ep`` among the arguments also lay out the process groups. Returns the ranks' return values; an
    error in any rank fails the test with that rank's traceback. All ranks see the same empty folder.
    """
    calls = []

    def call(name: str, world: int = 1, **kwargs):
        from megatron_entry import main

        folder = tmp_path / f"call{len(calls)}"
        folder.mkdir()
        calls.append(name)
        body = (str(request.path), name)
        processes = [
            fork_server.Process(target=main, args=(*body, rank, world, str(folder), json.dumps(kwargs)))
            for rank in range(world)
        ]
        for p in processes:
            p.start()
        for p in processes:
            p.join(240)
        for p in processes:
            if p.is_alive():
                p.kill()
        results = []
        for rank in range(world):
            path = folder / f"rank{rank}.pt"
            results.append(torch.load(path, weights_only=False) if path.exists() else {"error": "no result"})
        errors = [f"rank {i}: {r['error']}" for i, r in enumerate(results) if "error" in r]
        assert not errors, "\n".join(errors)
        return [r["value"] for r in results]

    return call
