"""Does the engine compute what Beam's reference computes? Tokens that vLLM generates, scored by transformers.

Three steps, since engine and reference cannot share an environment, and only the second needs a GPU:

    python bench/vllm_parity.py make FOLDER                        # a small random Beam and an adapter
    python bench/vllm_parity.py generate FOLDER [--tp 2] [--pp 2]  # vLLM: tokens, log-probabilities, routed experts
    python bench/vllm_parity.py score FOLDER                       # transformers >= 5.22, on the CPU

The reference runs in fp32 with the adapter merged in fp32 and, teacher-forced, through the experts that the engine
chose; without that replay its own choice is compared with the engine's and flips are counted. The engine's head is
asked for in fp32, since a bf16 head rounds logits to steps of 0.125. ``generate --base`` serves the same model without
its adapter: that its log-probabilities lie far from the merged reference shows that the adapter matters.

Make once and carry FOLDER to both machines: random numbers may differ in their last bit between processors, and
``score`` refuses tokens of other weights. ``--out`` keeps what ``generate`` writes elsewhere, for both last steps.
"""

import argparse
import hashlib
import json
import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
H, I, E, TOP_K, RANK, ALPHA, VOCAB, LAYERS, DENSE = 256, 128, 16, 4, 8, 16, 512, 6, 2
HEADS, KV, HEAD, WIDE = 4, 2, 64, 512
PROMPTS, PROMPT, NEW = 16, 48, 48
MEAN_LIMIT, MAX_LIMIT = 0.05, 0.35  # bf16 through six layers
CONFIG = {
    "architectures": ["BeamForCausalLM"], "model_type": "beam", "vocab_size": VOCAB, "hidden_size": H,
    "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": HEAD, "hidden_act": "silu", "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "sliding_window": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "tie_word_embeddings": False,
    "mlp_layer_types": ["dense"] * DENSE + ["sparse"] * (LAYERS - DENSE), "moe_intermediate_size": I,
    "num_experts_per_tok": TOP_K, "num_experts": E, "norm_topk_prob": True, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "final_logit_softcapping": 30.0, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": None},
}  # fmt: skip


def make(folder: Path) -> None:
    """A checkpoint by hub names, bf16 with fp32 routers, and a PEFT adapter on every projection."""
    import torch
    from safetensors.torch import save_file

    g = torch.Generator().manual_seed(0)

    def new(*shape, std=0.05, mean=0.0, dtype=torch.bfloat16):
        return (torch.randn(shape, generator=g) * std + mean).to(dtype).contiguous()

    state, adapter = {}, {}

    def linear(name: str, rows: int, cols: int) -> None:
        state[f"{name}.weight"] = new(rows, cols, std=cols**-0.5)
        adapter[f"base_model.model.{name}.lora_A.weight"] = new(RANK, cols, std=cols**-0.5)
        adapter[f"base_model.model.{name}.lora_B.weight"] = new(rows, RANK, std=0.3)

    state["model.embed_tokens.weight"] = new(VOCAB, H, std=1.0)
    state["lm_head.weight"] = new(VOCAB, H, std=2.0 * H**-0.5)
    state["model.norm.weight"] = new(H, std=0.1, mean=1.0)
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        for norm in ("input", "pre_feedforward", "post_attention", "post_feedforward"):
            state[f"{p}{norm}_layernorm.weight"] = new(H, std=0.1, mean=1.0)
        for name, rows in (("q", HEADS * HEAD), ("k", KV * HEAD), ("v", KV * HEAD), ("gate", HEADS * HEAD)):
            linear(f"{p}self_attn.{name}_proj", rows, H)
        linear(f"{p}self_attn.o_proj", H, HEADS * HEAD)
        state[f"{p}self_attn.q_norm.weight"] = new(HEAD, std=0.1, mean=1.0)
        state[f"{p}self_attn.k_norm.weight"] = new(HEAD, std=0.1, mean=1.0)
        state[f"{p}self_attn.gate_bias"] = new(HEADS, std=0.5)
        blocks = [f"{p}mlp."] if layer < DENSE else [f"{p}mlp.experts.{e}." for e in range(E)]
        for block in blocks:
            width = WIDE if layer < DENSE else I
            linear(f"{block}gate_proj", width, H)
            linear(f"{block}up_proj", width, H)
            linear(f"{block}down_proj", H, width)
        if layer >= DENSE:
            state[f"{p}mlp.gate.weight"] = new(E, H, std=3.0 * H**-0.5, dtype=torch.float32)
            state[f"{p}mlp.gate.e_score_correction_bias"] = new(E, dtype=torch.float32)
    (folder / "adapter").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(adapter, folder / "adapter" / "adapter_model.safetensors")
    peft = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": RANK, "lora_alpha": ALPHA}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({**peft, "target_modules": "all-linear"}))
    print(f"{folder}: {sum(f.stat().st_size for f in folder.rglob('*.safetensors')) / 2**20:.1f} MiB")


def digest(folder: Path) -> str:
    """What identifies the checkpoint and its adapter."""
    found = hashlib.sha256()
    for path in (folder / "model.safetensors", folder / "adapter" / "adapter_model.safetensors"):
        if not path.is_file():
            raise SystemExit(f"{path} is not there: make it first")
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(PROMPT)] for _ in range(PROMPTS)]


def generate(folder: Path, tp: int, pp: int, base: bool, out: Path) -> None:
    """Sampled tokens with their log-probabilities, each step's most likely token and the experts of every layer."""
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process may have begun to use its GPU
    os.environ.setdefault("VLLM_PLUGINS", "beam_moe")
    import vllm_decode

    weights = digest(folder)
    vllm_decode.importable(folder)
    if tp * pp > 1:
        vllm_decode.quiet_multicast()
    os.chdir(folder)  # vLLM's own subprocesses would import a checkout's folders by their bare names
    import harness
    import torch
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=256, max_num_seqs=16,
        max_num_batched_tokens=1024, gpu_memory_utilization=0.3, enable_prefix_caching=True, enable_lora=True,
        max_loras=1, max_lora_rank=RANK, enable_return_routed_experts=True, hf_overrides={"head_dtype": "float32"},
        tensor_parallel_size=tp, pipeline_parallel_size=pp,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    )  # fmt: skip
    params = SamplingParams(temperature=1.0, max_tokens=NEW, seed=1, ignore_eos=True, detokenize=False, logprobs=2)
    request = None if base else LoRARequest("adapter", 1, str(folder / "adapter"))
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False, lora_request=request)
    rows = []
    for o in outs:
        done = o.outputs[0]
        tokens = list(done.token_ids)
        rows.append(
            {
                "tokens": tokens,
                "logprobs": [d[t].logprob for d, t in zip(done.logprobs, tokens)],
                "best": [min(d, key=lambda t: d[t].rank) for d in done.logprobs],
                "routes": done.routed_experts.tolist(),
            }
        )
    result = {
        "tp": tp, "pp": pp, "adapter": not base, "rows": rows, "device": torch.cuda.get_device_name(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__}, "weights": weights,
        "commit": harness.commit(), "date": harness.fingerprint()["date"],
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result))
    print(f"{len(rows)} requests -> {out}")


def reference(folder: Path, merged: bool = True):
    """transformers' Beam in fp32 on the CPU, the adapter merged in fp32."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, BeamForCausalLM

    state = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    if merged:
        for key in adapter:
            if key.endswith(".lora_A.weight"):
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") + ".weight"
                a, b = adapter[key].float(), adapter[key.replace("lora_A", "lora_B")].float()
                state[name] = state[name] + ALPHA / RANK * (b @ a)
    for layer in range(DENSE, LAYERS):
        p = f"model.layers.{layer}.mlp.experts."
        parts = {
            n: torch.stack([state.pop(f"{p}{e}.{n}_proj.weight") for e in range(E)]) for n in ("gate", "up", "down")
        }
        state[f"{p}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        state[f"{p}down_proj"] = parts["down"]
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = BeamForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [m for m in missing if "inv_freq" not in m]
    if missing or unexpected:
        raise SystemExit(f"the reference does not take the checkpoint: missing {missing}, unexpected {unexpected}")
    return model


class Replay:
    """Routers that take given experts, and count how often they would have chosen others."""

    def __init__(self, model, replay: bool = True):
        self.replay, self.routes, self.flips, self.choices = replay, None, 0, 0
        for index in range(DENSE, LAYERS):
            gate = model.model.layers[index].mlp.gate
            gate.forward = self._forward(gate, gate.forward, index)

    def _forward(self, gate, own, index):
        import torch

        def forward(hidden):
            logits, weights, ids = own(hidden)
            given = self.routes[:, index].long()
            same = given.sort(dim=1).values == ids.sort(dim=1).values
            self.flips += int((~same.all(dim=1)).sum())
            self.choices += len(ids)
            if not self.replay:
                return logits, weights, ids
            scores = torch.sigmoid(logits).gather(1, given)
            return logits, scores / (scores.sum(dim=1, keepdim=True) + 1e-20), given

        return forward


def score(folder: Path, given: Path) -> dict:
    """One row: how far the engine's log-probabilities lie from the reference's, with its routes and without."""
    import torch

    result = json.loads(given.read_text())
    if result["weights"] != digest(folder):
        raise SystemExit(f"{given.name} was generated from other weights than those in {folder}")
    row = {
        "case": f"tp{result['tp']}pp{result['pp']}" + ("" if result["adapter"] else "/without the adapter"),
        "tp": result["tp"], "pp": result["pp"], "adapter": result["adapter"], "device": result["device"],
        "versions": result["versions"], "commit": result["commit"], "date": result["date"],
        "tokens": sum(len(r["tokens"]) for r in result["rows"]),
        "mean_limit": MEAN_LIMIT, "max_limit": MAX_LIMIT,
    }  # fmt: skip
    for name, use in (("replayed", True), ("own_routes", False)):
        model = reference(folder)
        replay = Replay(model, use)
        errors, disagree, clear = [], 0, 0
        with torch.no_grad():
            for prompt, r in zip(prompts(), result["rows"]):
                ids = torch.tensor([prompt + r["tokens"][:-1]])
                routes = torch.tensor(r["routes"])
                if routes.shape != (ids.shape[1], LAYERS, TOP_K):
                    raise SystemExit(f"routes {tuple(routes.shape)}, expected {(ids.shape[1], LAYERS, TOP_K)}")
                replay.routes = routes
                logits = model(ids).logits[0, len(prompt) - 1 :].float()
                log = logits.log_softmax(-1)
                tokens = torch.tensor(r["tokens"])
                errors.append((log.gather(1, tokens[:, None])[:, 0] - torch.tensor(r["logprobs"])).abs())
                top = log.topk(2, dim=-1)
                margin = top.values[:, 0] - top.values[:, 1]
                wide = margin > MAX_LIMIT
                clear += int(wide.sum())
                disagree += int((wide & (top.indices[:, 0] != torch.tensor(r["best"]))).sum())
        e = torch.cat(errors)
        row[name] = {
            "mean": round(float(e.mean()), 5), "p99": round(float(e.quantile(0.99)), 5),
            "max": round(float(e.max()), 5),
            "argmax_disagreements": disagree, "clear_steps": clear,
        }  # fmt: skip
        row[name]["flips" if not use else "flips_if_not_replayed"] = f"{replay.flips} of {replay.choices}"
    row["ok"] = (
        row["replayed"]["mean"] <= MEAN_LIMIT
        and row["replayed"]["max"] <= MAX_LIMIT
        and row["replayed"]["argmax_disagreements"] == 0
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", "generate", "score"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--base", action="store_true", help="generate without the adapter")
    parser.add_argument("--out", type=Path, help="folder of the generated files, the model's by default")
    opts = parser.parse_args()
    if str(ROOT / "bench") not in sys.path:
        sys.path.insert(0, str(ROOT / "bench"))
    from engines import need

    needed = {"make": ["safetensors"], "generate": ["vllm"], "score": ["safetensors", "transformers"]}
    need(f"vllm_parity.py {opts.step}", *needed[opts.step])
    opts.folder = opts.folder.resolve()
    out = (opts.out or opts.folder).resolve()
    if opts.step == "make":
        make(opts.folder)
    elif opts.step == "generate":
        name = f"generated_tp{opts.tp}pp{opts.pp}{'_base' if opts.base else ''}.json"
        generate(opts.folder, opts.tp, opts.pp, opts.base, out / name)
    else:
        rows = [score(opts.folder, path) for path in sorted(out.glob("generated_*.json"))]
        for row in rows:
            print(json.dumps(row))
        if not rows:
            raise SystemExit(f"no generated_*.json in {out}")
        device = rows[0]["device"].lower().replace(" ", "_")
        root = Path(os.environ.get("BEAM_MOE_RESULTS") or ROOT / "bench" / "results")
        path = root / device / "vllm_parity.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        merged = {r["case"]: r for r in json.loads(path.read_text())} if path.is_file() else {}
        merged |= {r["case"]: r for r in rows}
        path.write_text("[\n" + ",\n".join(json.dumps(r) for r in merged.values()) + "\n]\n")
        return (
            0
            if all(r["ok"] for r in rows if r["adapter"]) and all(not r["ok"] for r in rows if not r["adapter"])
            else 1
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
