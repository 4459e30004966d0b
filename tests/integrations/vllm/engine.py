"""Scenarios on the real engine of a small random Beam; ``engine.py SCENARIO FOLDER`` writes FOLDER/SCENARIO.json.

Each scenario is a process of its own, of seeded weights: two processes, and the ranks of one, hold the same model.
"""

import json
import os
import sys
import time
from pathlib import Path

H, I, E, TOP_K, LAYERS, VOCAB, RANK = 512, 128, 16, 4, 4, 1024, 8
HEADS, KV, HEAD = 4, 2, 128
BEAM = {
    "architectures": ["BeamForCausalLM"],
    "model_type": "beam",
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "moe_intermediate_size": I,
    "num_experts_per_tok": TOP_K,
    "num_experts": E,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "final_logit_softcapping": 30.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": None},
}
PREFIX = "base_model.model.model.layers."
CONFIG = {"r": RANK, "lora_alpha": RANK}
PROMPTS = [[(7 * i + 13 * j) % (VOCAB - 10) + 5 for j in range(40 + 11 * i)] for i in range(4)]


def adapter(seed: int, scale: float = 0.15):
    """Every projection of every layer, experts included, as PEFT names them."""
    import torch

    g = torch.Generator().manual_seed(seed)
    out = {}

    def pair(name, fan_in, fan_out):
        out[f"{name}.lora_A.weight"] = (torch.randn(RANK, fan_in, generator=g) * scale).bfloat16()
        out[f"{name}.lora_B.weight"] = (torch.randn(fan_out, RANK, generator=g) * scale).bfloat16()

    for layer in range(LAYERS):
        p = f"{PREFIX}{layer}."
        for name, rows in (("q", HEADS * HEAD), ("k", KV * HEAD), ("v", KV * HEAD), ("gate", HEADS * HEAD)):
            pair(f"{p}self_attn.{name}_proj", H, rows)
        pair(f"{p}self_attn.o_proj", HEADS * HEAD, H)
        experts = [""] if layer == 0 else [f"experts.{e}." for e in range(E)]
        width = 1024 if layer == 0 else I
        for x in experts:
            pair(f"{p}mlp.{x}gate_proj", H, width)
            pair(f"{p}mlp.{x}up_proj", H, width)
            pair(f"{p}mlp.{x}down_proj", width, H)
    return out


def start(folder: Path, lora: bool, checkpoint: str = "plain", **options):
    """An engine in this process, of a small checkpoint in the format ``checkpoint``."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.update(VLLM_USE_FLASHINFER_SAMPLER="0")
    os.environ.setdefault("VLLM_PLUGINS", "beam_moe")
    import checkpoints

    checkpoints.write(folder, BEAM, checkpoint)
    from vllm import LLM

    if lora:
        options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 4, **options}
    # a fixed KV cache: vLLM measures none then, and does not mind who else takes or frees memory of the GPU meanwhile
    options = {"kv_cache_memory_bytes": 512 << 20, **options}
    return LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16",
        seed=0, max_model_len=512, max_num_seqs=16, max_num_batched_tokens=1024, gpu_memory_utilization=0.08, **options,
        worker_extension_cls="beam_moe.integrations.vllm.weight_sync.WeightSync",
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    )  # fmt: skip


def reproducible():
    """Adapter rows the same at every run: vLLM's kernel for the dense layers of a larger batch adds in any order."""
    os.environ["BEAM_MOE_VLLM_LINEAR_LORA"] = "1024"


def generate(llm, prompts, requests, tokens: int = 12):
    """Greedy tokens and the log-probability of each, per prompt."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    inputs = [{"prompt_token_ids": p} for p in prompts]
    outs = llm.generate(inputs, params, use_tqdm=False, lora_request=requests)
    return [
        [list(o.outputs[0].token_ids), [d[t].logprob for d, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids)]]
        for o in outs
    ]


def compiles(record: list):
    """Note every Triton compilation from here on."""
    import triton

    def hook(*, fn, **kwargs):
        record.append(f"{fn.module}.{fn.name}")

    triton.knobs.runtime.jit_post_compile_hook = hook


def many_sizes(llm) -> None:
    """Batches and prompts of sizes that no graph has."""
    for n in (1, 3, 5, 8, 13, 16):
        generate(llm, [PROMPTS[0][: 20 + n]] * n, None, tokens=4)
    for length in (33, 257, 500):
        generate(llm, [[(5 * j) % 900 + 5 for j in range(length)]], None, tokens=2)


def plain(folder: Path) -> dict:
    """Without LoRA: eight rows, the reference of bare ones."""
    llm = start(folder, lora=False, enable_prefix_caching=False)
    report = llm.collective_rpc("beam_moe_report")[0]
    return {"bare": generate(llm, PROMPTS * 2, None), "report": report}


def lora(folder: Path) -> dict:
    """Adapters loaded, mixed with bare rows, swapped, removed, over captured graphs; nothing compiles once ready."""
    import torch

    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    reproducible()
    llm = start(folder, lora=True, enable_prefix_caching=False)
    record: list[str] = []
    compiles(record)
    first, second = AdapterSync("first", 1), AdapterSync("second", 2)
    out = {"bare": generate(llm, PROMPTS * 2, None)}
    a, b = adapter(1), adapter(2)
    half = [None] * 4
    one = first.update(llm, a, CONFIG)
    out["mixed_a"] = generate(llm, PROMPTS * 2, half + [one] * 4)
    two = second.update(llm, b, CONFIG)
    out["mixed_ab"] = generate(llm, PROMPTS * 2, half + [one, two, one, two])
    one = first.update(llm, b, CONFIG)
    out["mixed_b"] = generate(llm, PROMPTS * 2, half + [one] * 4)
    llm.llm_engine.remove_lora(1)
    llm.llm_engine.remove_lora(2)
    out["after_removal"] = generate(llm, PROMPTS * 2, None)
    many_sizes(llm)
    out["compiled"] = list(record)
    swaps, memory, drift = int(os.environ.get("BEAM_MOE_TEST_SWAPS", "200")), [], 0
    known = {1: out["mixed_a"], 2: out["mixed_b"]}
    for swap in range(swaps):
        which = 1 + swap % 2
        request = first.update(llm, a if which == 1 else b, CONFIG)
        got = generate(llm, PROMPTS * 2, half + [request] * 4)
        drift += got != known[which]
        memory.append(torch.cuda.memory_allocated())
    out |= {"swaps": swaps, "drift": drift, "memory": memory[:: max(1, swaps // 20)] + memory[-1:]}
    out["report"] = llm.collective_rpc("beam_moe_report")[0]
    return out


def caching(folder: Path) -> dict:
    """Prefix caching on: a swap never reads KV of the version before."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    reproducible()
    llm = start(folder, lora=True, enable_prefix_caching=True)
    sync = AdapterSync("policy", 1)
    prompts = [p * 2 for p in PROMPTS]  # blocks to reuse, in a batch small enough for our experts
    request = sync.update(llm, adapter(1), CONFIG)
    out = {"a": generate(llm, prompts, request)}
    request = sync.update(llm, adapter(2), CONFIG)
    out["b"] = generate(llm, prompts, request)
    llm.reset_prefix_cache()
    out["b_fresh"] = generate(llm, prompts, request)
    return out


def sleeping(folder: Path) -> dict:
    """Sleep and wake, levels 1 and 2, with an adapter loaded; level 2 forgets all weights, a sync brings them back."""
    from safetensors.torch import load_file

    from beam_moe.integrations.vllm.weight_sync import AdapterSync, sync_weights

    reproducible()
    # vLLM asserts that the GPU has more free memory after falling asleep: what it gives back must outweigh whatever
    # other engines take meanwhile
    llm = start(
        folder, lora=True, enable_prefix_caching=False, enable_sleep_mode=True, kv_cache_memory_bytes=8 << 30
    )  # fmt: skip
    request = AdapterSync("policy", 1).update(llm, adapter(1), CONFIG)
    out = {"bare": generate(llm, PROMPTS, None), "before": generate(llm, PROMPTS, request)}
    llm.sleep(level=1)
    llm.wake_up()
    out["level1"] = generate(llm, PROMPTS, request)
    llm.sleep(level=2)
    llm.wake_up()
    sync_weights(llm, load_file(folder / "model.safetensors"))
    out["level2"] = generate(llm, PROMPTS, request)
    return out


def invariant(folder: Path) -> dict:
    """VLLM_BATCH_INVARIANT: a request alone and in a batch."""
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    llm = start(folder, lora=True, enable_prefix_caching=False)
    request = AdapterSync("policy", 1).update(llm, adapter(1), CONFIG)
    together = generate(llm, PROMPTS, [request, None, request, None])
    alone = [generate(llm, [p], [r])[0] for p, r in zip(PROMPTS, [request, None, request, None])]
    return {"together": together, "alone": alone}


def quantised(folder: Path) -> dict:
    """Online fp8 or MXFP8 weights (BEAM_MOE_TEST_BASE) with adapters: bare and adapter rows, and what served them."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    base = os.environ["BEAM_MOE_TEST_BASE"]
    llm = start(folder, lora=True, enable_prefix_caching=False, quantization=base)
    record: list[str] = []
    compiles(record)
    out = {"bare": generate(llm, PROMPTS * 2, None)}
    request = AdapterSync("policy", 1).update(llm, adapter(1), CONFIG)
    out["mixed"] = generate(llm, PROMPTS * 2, [None] * 4 + [request] * 4)
    many_sizes(llm)
    generate(
        llm, [[(5 * j + i) % 900 + 5 for j in range(400)] for i in range(2)], None, tokens=2
    )  # one prefill of both
    return {**out, "compiled": record, "report": llm.collective_rpc("beam_moe_report")[0]}


def stored(folder: Path) -> dict:
    """A checkpoint in the format BEAM_MOE_TEST_BASE with adapters: bare and adapter rows, and what served them."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    llm = start(folder, lora=True, checkpoint=os.environ["BEAM_MOE_TEST_BASE"], enable_prefix_caching=False)
    out = {"bare": generate(llm, PROMPTS * 2, None)}
    request = AdapterSync("policy", 1).update(llm, adapter(1), CONFIG)
    out["mixed"] = generate(llm, PROMPTS * 2, [None] * 4 + [request] * 4)
    return {**out, "report": llm.collective_rpc("beam_moe_report")[0]}


def draft(folder: Path) -> dict:
    """A DFlash2 draft model with adapters loaded: bare and adapter rows, and how many drafted tokens were taken."""
    import checkpoints

    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    path = checkpoints.write_draft(folder / "draft", BEAM)
    spec = {"method": "dflash", "model": path, "num_speculative_tokens": checkpoints.STEPS}
    llm = start(
        folder, lora=True, checkpoint="plain", enable_prefix_caching=False, speculative_config=spec,
        disable_log_stats=False,
    )  # fmt: skip
    out = {"bare": generate(llm, PROMPTS * 2, None)}
    request = AdapterSync("policy", 1).update(llm, adapter(1), CONFIG)
    out["mixed"] = generate(llm, PROMPTS * 2, [None] * 4 + [request] * 4)
    drafted = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    return {**out, "drafted": drafted, "report": llm.collective_rpc("beam_moe_report")[0]}


def replay(folder: Path) -> dict:
    """Routed experts returned with each request, at the pipeline size of BEAM_MOE_TEST_PP and tensor size of _TP."""
    from vllm import SamplingParams

    pp, tp = int(os.environ.get("BEAM_MOE_TEST_PP", "1")), int(os.environ.get("BEAM_MOE_TEST_TP", "1"))
    llm = start(
        folder, lora=False, enable_prefix_caching=True, enable_return_routed_experts=True, pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    outs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    return {
        "ids": [o.outputs[0].routed_experts.tolist() for o in outs],
        "tokens": [list(o.outputs[0].token_ids) for o in outs],
        "prompts": [len(p) for p in PROMPTS],
    }


def main() -> None:
    name, folder, start_time = sys.argv[1], Path(sys.argv[2]), time.monotonic()
    sys.path.insert(0, str(Path(__file__).parent))  # -P leaves it out: checkpoints.py lies beside this file
    scenarios = (plain, lora, caching, sleeping, invariant, quantised, stored, draft, replay)
    result = {f.__name__: f for f in scenarios}[name](folder / f"model_{name}")
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result))
    print(f"RESULT {path}, {time.monotonic() - start_time:.0f} s", flush=True)


if __name__ == "__main__":
    main()
