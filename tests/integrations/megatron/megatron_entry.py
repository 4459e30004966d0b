"""The first thing a rank process of these tests runs. Light, because the test process imports it too."""

import importlib.util
import json
import multiprocessing
import os
import traceback
from datetime import timedelta
from pathlib import Path


def main(file: str, name: str, rank: int, world: int, folder: str, kwargs: str) -> None:
    """Call ``name`` of test file ``file`` as one rank of ``world``; leave its value, or its error, in ``folder``."""
    import torch
    import torch.distributed as dist

    result = Path(folder) / f"rank{rank}.pt"
    try:
        import megatron_ranks
        from megatron.core import parallel_state as mpu

        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        megatron_ranks.cpu_only()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=120),
        )
        arguments = json.loads(kwargs)
        mpu.initialize_model_parallel(
            arguments.get("tp", 1),
            arguments.get("pp", 1),
            expert_model_parallel_size=arguments.get("ep", 1),
            expert_tensor_parallel_size=1,
        )
        spec = importlib.util.spec_from_file_location("rank_body", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        torch.save({"value": getattr(module, name)(folder=Path(folder), **arguments)}, result)
    except BaseException:
        torch.save({"error": traceback.format_exc()}, result)
    finally:
        for child in multiprocessing.active_children():  # the checkpoint writer's queue
            child.terminate()
        os._exit(0)  # a rank that failed must not wait for the others in a destructor
