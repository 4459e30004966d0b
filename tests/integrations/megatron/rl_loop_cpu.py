"""``bench/rl_loop.py`` without a GPU: megatron-core's shims, and a tiny model in place of the bench's."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "bench")]

import megatron_ranks
import rl_loop

rl_loop.MODEL.update(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, sliding_window=8, moe_intermediate_size=32, num_experts=8,
    layer_types=["sliding_attention", "full_attention"] * 2, mlp_layer_types=["dense"] + ["sparse"] * 3,
)  # fmt: skip

if __name__ == "__main__":
    megatron_ranks.cpu_only()
    rl_loop.main()
