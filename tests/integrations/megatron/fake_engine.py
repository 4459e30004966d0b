"""Stands for the engine's process of ``bench/rl_loop.py``: the same messages, tokens by chance, no vLLM.

``FAKE_ENGINE=dies`` ends it at the second rollout, ``fails`` makes it answer that one with an error.
"""

import json
import os
import random
import sys
from multiprocessing.connection import Client

import numpy as np
from safetensors.torch import load_file

from beam_moe.weight_sync import check_routers, is_router

given = dict(zip(sys.argv[3::2], sys.argv[4::2]))  # rl_loop.py engine --name value ...
model = json.load(open(given["--model"] + "/config.json"))
assert "PYTHONPATH" not in os.environ and "RANK" not in os.environ, "the trainer's own must not reach the engine"
new, layers, top_k = int(given["--new"]), model["num_hidden_layers"], model["num_experts_per_tok"]
rng, routers, names, rollouts = random.Random(0), {}, set(), 0
with Client(given["--socket"], "AF_UNIX") as wire:
    wire.send((True, {"layers": [{"experts": "none"}]}))
    while True:
        what, *message = wire.recv()
        answer = None
        if what == "stop":
            break
        if what in ("weights", "adapter"):
            tensors = load_file(message[0])
            routers.update({n: t for n, t in tensors.items() if is_router(n)})
            if not names:
                names = set(tensors)
            assert set(tensors) == names and all(bool(t.float().isfinite().all()) for t in tensors.values())
        elif what == "routers":
            answer = check_routers(message[0], routers, "in the engine") if routers else list(message[0])
        elif what == "generate":
            rollouts += 1
            if rollouts == 2 and os.environ.get("FAKE_ENGINE") == "dies":
                print("the fake engine has died", flush=True)
                os._exit(3)
            if rollouts == 2 and os.environ.get("FAKE_ENGINE") == "fails":
                wire.send((False, "Traceback of the fake engine"))
                break
            (prompts,) = message
            tokens = [[rng.randrange(8, model["vocab_size"]) for _ in range(new)] for _ in prompts]
            chance = -float(np.log(model["vocab_size"]))
            shape = (len(prompts), len(prompts[0]) + new - 1, layers, 1)
            first = np.random.default_rng(0).integers(0, model["num_experts"], shape)
            routes = (first + np.arange(top_k)) % model["num_experts"]
            answer = tokens, [[chance] * new for _ in prompts], routes.astype(np.uint8)
        wire.send((True, answer))
