"""The fused layer in transformers' experts registry, under the models' real classes."""

import dis
import json
import logging
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from beam_moe.integrations import transformers as ours
from beam_moe.testing import assert_close, error_ratio

CUDA = torch.cuda.is_available()
LIMIT = 2e-3  # transformers rounds gate, up, and each expert's output to the model's dtype; ours once


def config(model_type, **changes):
    fields = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "max_position_embeddings": 64, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_local_experts": 4, "mlp_layer_types": ["sparse"], "n_group": 2, "topk_group": 1, **changes,
    }  # fmt: skip
    return transformers.AutoConfig.for_model(model_type, **fields)


def model(model_type, device, dtype=torch.float16, **changes):
    m = transformers.AutoModelForCausalLM.from_config(config(model_type, **changes), dtype=dtype)
    with torch.no_grad():
        for p in m.parameters():
            p.normal_(0, 0.3) if p.dim() > 1 else p.fill_(1.0)
    return m.to(device).eval()


@pytest.fixture
def calls(monkeypatch):
    """Layers that our kernels served."""
    from beam_moe.kernels import moe_lora

    served, real = [], moe_lora.fused_moe
    monkeypatch.setattr(moe_lora, "fused_moe", lambda *a, **k: served.append(a[0].shape[0]) or real(*a, **k))
    monkeypatch.setattr(ours, "_logged", set())
    return served


def logits(m, implementation, tokens):
    m.set_experts_implementation(implementation)
    with torch.no_grad():
        return m(tokens).logits.float()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "beam"])
def test_a_model_served_by_the_fused_layer(device, calls, caplog, model_type):
    """Beam's experts have a gating of their own (SwiGLU rounded once), and a factor of 2.5 that its layer applies."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    assert ours.register() == "beam_moe"
    m, tokens = model(model_type, device), torch.arange(3, device=device)[None]
    ref = logits(m, "eager", tokens)
    with caplog.at_level(logging.WARNING, "beam_moe"):
        got = logits(m, "beam_moe", tokens)
    assert calls == [3] and not caplog.records
    assert_close("logits", ref, got, 4 * LIMIT)
    default = logits(m, "grouped_mm", tokens)
    assert error_ratio(ref, got) < 2 * error_ratio(ref, default) + LIMIT


def experts(device, dtype=torch.float16, **changes):
    """One layer's experts alone, of the class that a Qwen3-MoE model uses, with the registry's dispatch."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    ours.register()
    c = config("qwen3_moe", **changes)
    c._experts_implementation = "beam_moe"
    layer = Qwen3MoeExperts(c).to(dtype).to(device).requires_grad_(False)
    for p in layer.parameters():
        p.normal_(0, 0.3)
    x = torch.randn(3, 32).to(dtype).to(device)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2]], device=device)  # int64, as torch.topk gives them
    weights = torch.rand(3, 2).to(dtype).to(device)
    return layer, (x, ids, weights)


def default(layer, args):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](layer, *args)


def test_ids_of_other_ranks_experts_add_nothing(device, calls):
    """Expert parallelism marks them with the number of local experts."""
    layer, (x, ids, weights) = experts(device)
    layer._is_expert_parallel = True
    ids = torch.where(ids == 2, 4, ids)
    weights = torch.where(ids == 4, 0.0, weights)
    assert_close("experts", default(layer, (x, ids, weights)), layer(x, ids, weights), LIMIT)
    assert calls == [3]


def clamped(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(max=100.0)) * up


def turned(layer, args):
    layer.down_proj.data = layer.down_proj.data.mT.contiguous().mT


REASONS = {
    "view": (turned, "transposed views"),
    "bias": (lambda layer, args: setattr(layer, "has_bias", True), "they have biases"),
    "interleaved": (lambda layer, args: setattr(layer, "is_concatenated", False), "interleaved"),
    "transposed": (lambda layer, args: setattr(layer, "is_transposed", True), "stored transposed"),
    "norm": (lambda layer, args: setattr(layer, "has_post_expert_norm", True), "a norm follows"),
    "no gate": (lambda layer, args: setattr(layer, "has_gate", False), "no gate"),
    "gelu": (lambda layer, args: setattr(layer, "act_fn", torch.nn.GELU()), "not silu"),
    "clamp": (lambda layer, args: setattr(layer, "_apply_gate", clamped), "not silu"),
    "gradient": (lambda layer, args: args[0].requires_grad_(), "a gradient is wanted"),
    "fp32": (lambda layer, args: layer.float(), "not all bf16 or all fp16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS)
def test_what_the_layer_does_not_do_goes_transformers_way(device, calls, caplog, monkeypatch, case):
    change, reason = REASONS[case]
    layer, args = experts(device)
    change(layer, args)
    went = []
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "grouped_mm", lambda *a: went.append(a[0]) or a[1])
    with caplog.at_level(logging.WARNING, "beam_moe"):
        for _ in range(2):
            layer(*args)
    assert went == [layer, layer] and not calls
    assert [reason in r.message for r in caplog.records] == [True], "once, with the reason"
    monkeypatch.setenv("BEAM_MOE_STRICT", "1")
    with pytest.raises(RuntimeError, match=reason):
        layer(*args)


def test_a_gradient_flows_where_transformers_serves(device, calls):
    layer, (x, ids, weights) = experts(device, torch.bfloat16)
    x.requires_grad_()
    layer(x, ids, weights).float().sum().backward()
    assert x.grad is not None and float(x.grad.abs().sum()) > 0 and not calls


def test_torch_compile_takes_the_layer_whole(device, calls):
    layer, args = experts(device)
    with torch.no_grad():
        eager = layer(*args)
        assert calls == [3]
        compiled = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(*args), eager)


@pytest.mark.parametrize("function", [ours.experts_forward, ours._reason, ours._plain_silu])
def test_what_is_traced_imports_nothing_of_transformers(function):
    """The Dynamo of torch 2.11 refuses an import that ends at one of transformers' lazy modules."""
    imported = [i.argval for i in dis.get_instructions(function) if i.opname == "IMPORT_NAME"]
    assert not [name for name in imported if name.startswith("transformers")]


FAMILIES = (
    "afmoe axk1 beam deepseek_v3 ernie4_5_moe exaone_moe flint glm4_moe granitemoe jamba kimi_linear mimo_v2_flash "
    "minimax_m2 mixtral olmoe qwen2_moe qwen3_5_moe qwen3_moe solar_open"
).split()


def test_configurations_read_as_the_models_are_built():
    """Sparse layers, the experts' sizes and a bias of the choice, against the modules that transformers makes of them.

    In a process of its own: torch's meta device takes a `torch.empty` that conftest has replaced for another's.
    """
    code = """
import json, sys, torch, transformers
from beam_moe import BeamMoEConfig
read, built = {}, {}
for name in sys.argv[1].split():
    if name not in transformers.CONFIG_MAPPING:
        continue
    given = transformers.CONFIG_MAPPING[name]()
    c = BeamMoEConfig.from_hf(given)
    read[name] = [[i for i, s in enumerate(c.sparse) if s], c.num_layers,
                  [c.num_experts, 2 * c.intermediate, c.hidden], c.correction_bias]
    with torch.device("meta"):
        m = transformers.AutoModelForCausalLM.from_config(given)
    experts = {int(n.split(".layers.")[1].split(".")[0]): list(p.shape) for n, p in m.named_parameters()
               if n.endswith("experts.gate_up_proj")}
    names = [n for n, _ in (*m.named_parameters(), *m.named_buffers())]
    built[name] = [sorted(experts), len(m.model.layers), next(iter(experts.values())),
                   any(n.endswith(("correction_bias", "expert_bias")) for n in names)]
print(json.dumps([read, built]))
"""
    done = subprocess.run([sys.executable, "-c", code, " ".join(FAMILIES)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    read, built = json.loads(done.stdout.splitlines()[-1])
    assert read == built and {"mixtral", "qwen3_moe"} <= set(read)
