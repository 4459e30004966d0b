"""Small random Beam checkpoints in every quantised format, by hub names, as the tools that make them write them.

``write(folder, config, format)`` writes ``config.json`` and ``model.safetensors``. Attention, dense layers and experts
are quantised; embedding, head and the fp32 router are not.
"""

import json
from pathlib import Path

import torch

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
IGNORED = ["lm_head", "re:.*mlp.gate$"]


def compressed(fmt: str, weights: dict, activations: dict | None) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": fmt, "quantization_status": "compressed", "ignore": IGNORED,
        "config_groups": {"group_0": group}, "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip


def modelopt(algorithm: str, **more) -> dict:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "*.mlp.gate"]}
    return {"quant_method": "modelopt", "quantization": {**quantization, **more}}


def args(bits: int, strategy: str, dynamic: bool | str = False, **more) -> dict:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "dynamic": dynamic, "symmetric": True, **more}


NV = {"group_size": 16}
MX = {"group_size": 32, "scale_dtype": "torch.uint8"}
FORMATS = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
    "ct-fp8": compressed("float-quantized", args(8, "channel"), args(8, "token", True)),
    "modelopt-fp8": modelopt("FP8"),
    "ct-nvfp4": compressed(
        "nvfp4-pack-quantized", args(4, "tensor_group", **NV), args(4, "tensor_group", "local", **NV)
    ),
    "modelopt-nvfp4": modelopt("NVFP4", group_size=16),
    "ct-mxfp8": compressed("mxfp8-quantized", args(8, "group", **MX), args(8, "group", True, **MX)),
    "modelopt-mxfp8": modelopt("MXFP8"),
}
OURS = ("ct-mxfp8", "modelopt-mxfp8")
"""Formats that our experts serve."""


def e4m3(w: torch.Tensor) -> torch.Tensor:
    return w.clamp(-448, 448).to(torch.float8_e4m3fn)


def quantise(w: torch.Tensor, fmt: str) -> dict[str, torch.Tensor]:
    """The tensors of one linear layer, float32 ``w`` (N, K), by their suffixes."""
    n, k = w.shape
    if fmt == "fp8":
        rows, cols = -(-n // 128), -(-k // 128)
        padded = torch.zeros(rows * 128, cols * 128)
        padded[:n, :k] = w
        scale = padded.view(rows, 128, cols, 128).abs().amax((1, 3)).clamp(min=1e-6) / 448
        each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
        return {"weight": e4m3(w / each), "weight_scale_inv": scale}
    if fmt == "ct-fp8":
        scale = w.abs().amax(1, keepdim=True).clamp(min=1e-6) / 448
        return {"weight": e4m3(w / scale), "weight_scale": scale}
    if fmt == "modelopt-fp8":
        scale = w.abs().amax() / 448
        return {"weight": e4m3(w / scale), "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    if fmt in ("ct-nvfp4", "modelopt-nvfp4"):
        top = torch.tensor(8 * k**-0.5 / (6 * 448))  # one for q, k, v and gate, one for gate and up, as the tools do
        blocks = w.view(n, k // 16, 16)
        scale = e4m3(blocks.abs().amax(-1) / 6 / top)
        x = blocks / (scale.float() * top).clamp(min=1e-12)[..., None]
        codes = (x.abs()[..., None] - FP4).abs().argmin(-1) + 8 * (x < 0)
        codes = codes.view(n, k).to(torch.uint8)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        if fmt == "ct-nvfp4":
            return {
                "weight_packed": packed, "weight_scale": scale, "weight_global_scale": (1 / top).view(1),
                "input_global_scale": torch.tensor([64.0]),
            }  # fmt: skip
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": top, "input_scale": torch.tensor(1 / 64)}
    if fmt in OURS:
        blocks = w.view(n, k // 32, 32)
        exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=1e-12) / 448))
        x = blocks / torch.exp2(exponent)[..., None]
        return {"weight": e4m3(x).view(n, k), "weight_scale": (exponent + 127).to(torch.uint8)}
    raise ValueError(fmt)


def write(folder: Path, config: dict, fmt: str, seed: int = 0) -> str:
    """A checkpoint of ``config`` in one of `FORMATS`, or unquantised with ``fmt`` "plain"."""
    from safetensors.torch import save_file

    g = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    state: dict[str, torch.Tensor] = {}

    def new(*shape, std=0.05, mean=0.0):
        return torch.randn(shape, generator=g) * std + mean

    def linear(name: str, rows: int, cols: int) -> None:
        w = new(rows, cols, std=cols**-0.5)
        for suffix, tensor in ({"weight": w.to(dtype)} if fmt == "plain" else quantise(w, fmt)).items():
            state[f"{name}.{suffix}"] = tensor.contiguous()

    h, head = config["hidden_size"], config["head_dim"]
    heads, kv, experts = config["num_attention_heads"], config["num_key_value_heads"], config["num_experts"]
    state["model.embed_tokens.weight"] = new(config["vocab_size"], h, std=1.0).to(dtype)
    state["lm_head.weight"] = new(config["vocab_size"], h, std=2 * h**-0.5).to(dtype)
    state["model.norm.weight"] = torch.ones(h, dtype=dtype)
    for layer, kind in enumerate(config["mlp_layer_types"]):
        p = f"model.layers.{layer}."
        for norm in ("input", "pre_feedforward", "post_attention", "post_feedforward"):
            state[f"{p}{norm}_layernorm.weight"] = torch.ones(h, dtype=dtype)
        for name, rows in (("q", heads), ("k", kv), ("v", kv), ("gate", heads)):
            linear(f"{p}self_attn.{name}_proj", rows * head, h)
        linear(f"{p}self_attn.o_proj", h, heads * head)
        state[f"{p}self_attn.q_norm.weight"] = torch.ones(head, dtype=dtype)
        state[f"{p}self_attn.k_norm.weight"] = torch.ones(head, dtype=dtype)
        state[f"{p}self_attn.gate_bias"] = new(heads, std=0.5).to(dtype)
        width = config["intermediate_size"] if kind == "dense" else config["moe_intermediate_size"]
        for block in [f"{p}mlp."] if kind == "dense" else [f"{p}mlp.experts.{e}." for e in range(experts)]:
            linear(f"{block}gate_proj", width, h)
            linear(f"{block}up_proj", width, h)
            linear(f"{block}down_proj", h, width)
        if kind == "sparse":
            state[f"{p}mlp.gate.weight"] = new(experts, h, std=3 * h**-0.5)
            state[f"{p}mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
    folder.mkdir(parents=True, exist_ok=True)
    more = {} if fmt == "plain" else {"quantization_config": FORMATS[fmt]}
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


DRAFT_LAYERS, STEPS = 2, 3


def write_draft(folder: Path, config: dict, seed: int = 1) -> str:
    """A DFlash2 draft of ``config``'s model: two layers that read two of its layers, a candidate selector."""
    from safetensors.torch import save_file

    g = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    h, head, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    heads, kv, wide, taps, group, rank = config["num_attention_heads"], config["num_key_value_heads"], 2 * h, 3, 64, 32
    # not the target's: vLLM spreads layers of one window over several KV-cache groups, and all of a draft share one
    window = config["sliding_window"] // 2
    draft = {
        "architectures": ["DFlash2BeamDraftModel"], "model_type": "qwen3", "vocab_size": vocab, "hidden_size": h,
        "intermediate_size": wide, "num_hidden_layers": DRAFT_LAYERS, "num_attention_heads": heads, "head_dim": head,
        "num_key_value_heads": kv, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "max_position_embeddings": config["max_position_embeddings"], "torch_dtype": config["torch_dtype"],
        "layer_types": ["sliding_attention"] * DRAFT_LAYERS, "sliding_window": window,
        "use_sliding_window": True, "is_causal": False, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "block_size": 1 + STEPS,
        "num_target_layers": config["num_hidden_layers"],
        "dflash_config": {
            "target_layer_ids": [0, 2], "mask_token_id": 3, "conv_kernel_size": taps, "conv_group_size": group,
            "selector_rank": rank, "selector_top_k": 4, "final_logit_softcapping": 30.0, "causal": False,
        },
    }  # fmt: skip
    state: dict[str, torch.Tensor] = {}

    def new(name: str, *shape, std=0.05, mean=0.0) -> None:
        state[name] = (torch.randn(shape, generator=g) * std + mean).to(dtype)

    new("fc.weight", h, 2 * h, std=(2 * h) ** -0.5)
    new("hidden_norm.weight", h, mean=1.0)
    new("norm.weight", h, mean=1.0)
    new("candidate_selector.predecessor_codebook", vocab, rank)
    new("candidate_selector.successor_codebook", vocab, rank)
    new("candidate_selector.hidden_projection.weight", rank, h)
    for layer in range(DRAFT_LAYERS):
        p = f"layers.{layer}."
        for name, rows in (("q", heads * head), ("k", kv * head), ("v", kv * head)):
            new(f"{p}self_attn.{name}_proj.weight", rows, h, std=h**-0.5)
        new(f"{p}self_attn.o_proj.weight", h, heads * head, std=(heads * head) ** -0.5)
        for name in ("q_norm", "k_norm"):
            new(f"{p}self_attn.{name}.weight", head, mean=1.0)
        for name, rows, cols in (("gate", wide, h), ("up", wide, h), ("down", h, wide)):
            new(f"{p}mlp.{name}_proj.weight", rows, cols, std=cols**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            new(f"{p}{name}.weight", h, mean=1.0)
        for name in ("attention_conv", "mlp_conv"):
            new(f"{p}{name}.base_kernel", 2, taps, h)
            new(f"{p}{name}.kernel_projection.weight", 2 * taps * (h // group), h, std=0.01)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
