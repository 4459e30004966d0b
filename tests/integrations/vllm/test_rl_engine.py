"""The engine's half of the RL loop: vLLM's whole engine on the CPU, driven by the bench's own messages."""

import argparse
import os
import sys
from pathlib import Path

import pytest
import torch

from beam_moe.testing import load_script
from beam_moe.weight_sync import declare_routers

HERE = Path(__file__).parent
BENCH = HERE.parents[2] / "bench" / "rl_loop.py"
SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 8, "moe_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "layer_types": ["sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
RANK, NEW = 8, 3


@pytest.fixture(scope="module")
def rl_loop():
    module = load_script(BENCH)
    module.MODEL = {**module.MODEL, **SHAPE}
    return module


@pytest.fixture(scope="module")
def engine(rl_loop, tmp_path_factory):
    """A running engine of the loop's LoRA mode."""
    site = tmp_path_factory.mktemp("cpu_hopper")
    info = site / "cpu_hopper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-hopper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\ncpu_hopper = cpu_hopper:plugin\n")
    for name in ("fake_hopper.py", "cpu_hopper.py"):
        (site / name).symlink_to(HERE / name)
    folder = tmp_path_factory.mktemp("loop")
    args = argparse.Namespace(
        mode="lora", rank=RANK, new=NEW, wire="bf16", rollout_tp=1, engine_memory=0.1, engine_log=None,
        engine_python=sys.executable, engine_path=str(site), engine_preload=None, engine_devices=None,
    )  # fmt: skip
    env = {
        "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "VLLM_TARGET_DEVICE": "cuda", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "VLLM_PLUGINS": "beam_moe,cpu_hopper", "RANK": "7",
        "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache")),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        running = rl_loop.Engine(args, folder, rl_loop.write_checkpoints(folder)[0])
    try:
        running.report = running.ready(300)
        yield running
    finally:
        running.stop()


def adapter(scale: float) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    out, h = {}, SHAPE["hidden_size"]

    def pair(name, fan_in, fan_out):
        out[f"{name}.lora_A.weight"] = torch.randn(RANK, fan_in, generator=g) * fan_in**-0.5
        out[f"{name}.lora_B.weight"] = torch.randn(fan_out, RANK, generator=g) * scale

    for layer in range(2):
        p = f"base_model.model.model.layers.{layer}."
        for name, rows in (("q", 64), ("k", 32), ("v", 32), ("gate", 64), ("o", h)):
            pair(f"{p}self_attn.{name}_proj", 64, rows)
        for x in [""] if layer == 0 else [f"experts.{e}." for e in range(4)]:
            for name, fan_in, rows in (("gate", h, 32), ("up", h, 32), ("down", 32, h)):
                pair(f"{p}mlp.{x}{name}_proj", fan_in, rows)
    return out


def test_rollouts_and_both_kinds_of_sync(rl_loop, engine):
    """Tokens, log-probabilities and every token's experts; new weights and a new adapter change what is sampled."""
    assert {row["experts"] for row in engine.report["layers"]} == {"BeamTritonExperts"}
    prompts, _ = rl_loop.new_prompts(4)

    def rollout():
        tokens, logprobs, routes = engine.ask("generate", prompts)
        assert [len(t) for t in tokens] == [len(p) for p in logprobs] == [NEW] * 4
        assert all(p <= 0 for row in logprobs for p in row)
        assert routes.shape == (4, rl_loop.PROMPT + NEW - 1, 2, 2)
        sparse = routes[:, :, 1]
        assert (sparse[..., 0] != sparse[..., 1]).all() and (sparse // 2 == sparse[..., :1] // 2).all(), "one group"
        return tokens

    assert len({t for row in rollout() for t in row}) > 4, "random weights: tokens by chance"
    # a head that leaves one of two tokens hardly any choice: what is sampled tells which weights are served
    tensors = dict(rl_loop.random_weights(rl_loop.MODEL, seed=3))
    head = torch.zeros_like(tensors["lm_head.weight"])
    head[7] = torch.linspace(-8, 8, 64)
    head[9] = -head[7]
    tensors["lm_head.weight"] = head
    declared = declare_routers(tensors)
    engine.send("weights", tensors.items(), declared)
    assert set(engine.ask("routers", declared)) == set(declared)
    base = rollout()
    assert {t for row in base for t in row} <= {7, 9}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
    engine.send("adapter", adapter(0.0).items(), config)
    assert rollout() == base
    engine.send("adapter", adapter(0.5).items(), config)
    assert rollout() != base


def test_an_error_comes_with_the_engines_traceback(engine):
    """After the test above: the engine ends itself, and says so."""
    with pytest.raises(RuntimeError, match=r"engine: weights: Traceback[\s\S]*no\.safetensors"):
        engine.ask("weights", "/nowhere/no.safetensors", {})
    assert engine.process.wait(60) != 0
    with pytest.raises(RuntimeError, match=r"ended during generate with [\s\S]*no\.safetensors"):
        engine.ask("generate", [[1]])
    assert os.path.exists(engine.log)
