"""``beam-moe doctor`` on a machine without engines, for a checkpoint, and against a server."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from beam_moe import cli, env

CONFIG = {
    "architectures": ["BeamForCausalLM"], "model_type": "beam", "hidden_size": 5120, "intermediate_size": 20480,
    "num_hidden_layers": 52, "moe_intermediate_size": 2560, "num_experts": 256, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "hidden_act": "silu",
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 49, "vocab_size": 151936, "num_attention_heads": 48,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


def run(*args: str) -> str:
    result = CliRunner().invoke(cli.app, ["doctor", *args], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_doctor_without_arguments():
    """Versions, settings and the state of the plugin, whatever is installed."""
    out = run()
    assert "torch" in out and "BEAM_MOE_STRICT" in out
    assert "not installed" in out or "seams in use" in out


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised (fp8)"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "does not name Qwen3MoeForCausalLM"),
    ],
)
def test_which_kernel_serves_a_checkpoint(tmp_path, change, reason):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    dense, sparse = cli.kernels(str(tmp_path), 8, 1, "no such device")
    assert (
        dense[0] == "linear layers: attention, 3 dense" and "49 sparse: 256 experts, H 5120, I 320, top-8" in sparse[0]
    )
    if reason is None:
        assert sparse[1] == "beam_moe.kernels.moe_lora" and "heuristic" in sparse[2]
    else:
        assert sparse[1] == "vLLM's experts" and reason in sparse[2]
    assert "49 sparse" in run("--model", str(tmp_path), "--tp", "8")


@pytest.mark.parametrize(
    "change, reason", [({"hidden_act": "gelu"}, "hidden_act"), ({"swiglu_limit": 7.0}, "swiglu_limit")]
)
def test_layers_the_kernel_has_no_term_for(tmp_path, change, reason):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    [[_, served, why]] = cli.kernels(str(tmp_path), 8, 1, None)
    assert served == "vLLM's experts" and reason in why


@pytest.mark.parametrize(
    "asked, few, quantised, adapters, mxfp8",
    [
        ("beam", "64", None, False, False),
        ("all", "64", None, True, True),
        ("Qwen3MoeForCausalLM", "16", None, True, True),
        ("all", "0", None, False, True),
        ("all", "64", "mxfp8", False, True),  # its experts are vLLM's
        ("all", "64", "fp8", False, False),
    ],
)
@pytest.mark.parametrize("dense", [0, 3])
def test_linear_layers_of_other_models(tmp_path, monkeypatch, asked, few, quantised, adapters, mxfp8, dense):
    """Their adapters are ours where their experts are, MXFP8 ones where they are named."""
    monkeypatch.setenv("BEAM_MOE_VLLM", asked)
    monkeypatch.setenv("BEAM_MOE_VLLM_LINEAR_LORA", few)
    change = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (52 - dense),
    }
    if quantised:
        change["quantization_config"] = {"quant_method": quantised} if quantised != "mxfp8" else MXFP8[0]
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    [what, served, _], sparse = cli.kernels(str(tmp_path), 8, 1, "no such device")
    assert ("3 dense" in what) is (dense == 3) and sparse[0].startswith(f"{52 - dense} sparse")
    assert (f"ours up to {few} tokens" in served) is adapters
    assert ("MXFP8 on Hopper beam_moe.kernels.mxfp8" in served) is mxfp8
    monkeypatch.setenv("BEAM_MOE_VLLM_MXFP8_LINEAR", "0")
    assert "MXFP8" not in cli.kernels(str(tmp_path), 8, 1, "no such device")[0][1]


def test_linear_layers_of_beam(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}))
    assert (
        cli.kernels(str(tmp_path), 8, 1, None)[0][1] == "vLLM's; adapters' kernels ours up to 64 tokens, vLLM's above"
    )
    monkeypatch.setenv("BEAM_MOE_VLLM", "0")
    assert cli.kernels(str(tmp_path), 8, 1, None)[0][1] == "vLLM's; adapters' kernels vLLM's"


def test_environment_decides_for_other_models(monkeypatch):
    monkeypatch.setenv("BEAM_MOE_VLLM", "all")
    assert cli.why_not("Qwen3MoeForCausalLM", {}) is None
    monkeypatch.setenv("BEAM_MOE_VLLM", "0")
    assert "does not name" in cli.why_not("BeamForCausalLM", {})


@pytest.mark.parametrize("value", ["beam", "BEAM", "BeamForCausalLM", "beamforcausallm", "beam,all", " Beam , x "])
def test_every_way_to_name_beam(monkeypatch, value):
    """The doctor and the plugin read one list."""
    monkeypatch.setenv("BEAM_MOE_VLLM", value)
    assert env.serves_in_vllm("BeamForCausalLM") and cli.why_not("BeamForCausalLM", {}) is None
    assert env.serves_in_vllm("Qwen3MoeForCausalLM") is ("all" in value.split(","))


@pytest.mark.parametrize("value", ["", "0", "none", "None", "0,none", "Beam2", "qwen3moeforcausallm"])
def test_beam_is_left_out(monkeypatch, value):
    monkeypatch.setenv("BEAM_MOE_VLLM", value)
    assert not env.serves_in_vllm("BeamForCausalLM") and "does not name" in cli.why_not("BeamForCausalLM", {})
    assert env.serves_in_vllm("Qwen3MoeForCausalLM") is ("qwen3" in value)


MXFP8 = [
    {"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8"}},
    {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": 32}}},
    },
]


@pytest.mark.parametrize("stored", MXFP8)
def test_stored_mxfp8_is_ours_in_beam_alone(monkeypatch, stored):
    assert cli.why_not("BeamForCausalLM", {"quantization_config": stored}) is None
    monkeypatch.setenv("BEAM_MOE_VLLM", "all")
    assert "quantised (mxfp8)" in cli.why_not("Qwen3MoeForCausalLM", {"quantization_config": stored})
    assert "quantised (compressed-tensors)" in cli.why_not(
        "BeamForCausalLM",
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            }
        },
    )


def test_a_plugin_that_vllm_leaves_out(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another,beam_moe")
    assert cli.filtered() is None
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert "seams in use" not in run() and "VLLM_PLUGINS=another leaves out beam_moe" in run()


@contextmanager
def server(do_post):
    """The address of an HTTP server whose handler answers POST by ``do_post``."""
    handler = type("Handler", (BaseHTTPRequestHandler,), {"do_POST": do_post, "log_message": lambda *args: None})
    listening = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()


def test_report_of_a_running_server():
    row = {"layer": "model.layers.3.mlp.experts", "experts": "TritonExperts", "ours_up_to_tokens": 0, "lora": False}
    report = {
        "layers": [{**row, "reason": "EPLB moves its experts"}],
        "mxfp8_linears": {"BeamMxfp8LinearKernel": 104},
        "calls": [{"path": "fallback", "detail": "EPLB", "calls": 4}],
    }
    asked = []

    def answer(self):
        asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"results": [report]}).encode())

    with server(answer) as url:
        out = run("--url", f"{url}/")
    assert asked == [("/collective_rpc", {"method": "beam_moe_report"})]
    assert "model.layers.3.mlp.experts" in out and "EPLB moves its experts" in out and "fallback" in out
    assert "BeamMxfp8LinearKernel" in out and "104" in out


def test_a_server_without_the_endpoint_is_told_from_none():
    with server(lambda self: self.send_error(404)) as url:
        result = CliRunner().invoke(cli.app, ["doctor", "--url", url], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "answered 404: is VLLM_SERVER_DEV_MODE=1 set" in result.output, result.output


@pytest.mark.parametrize(
    "args, named",
    [
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ],
)
def test_doctor_names_what_it_cannot_read(args, named):
    """A usage error that names the value, not a traceback."""
    result = CliRunner().invoke(cli.app, ["doctor", *args], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and named in result.output, result.output


@pytest.mark.parametrize("text, wanted", [("{", "must be JSON, got"), ("[]", "must be a JSON object, got")])
def test_doctor_names_a_configuration_that_is_none(tmp_path, text, wanted):
    (tmp_path / "config.json").write_text(text)
    result = CliRunner().invoke(cli.app, ["doctor", "--model", str(tmp_path)], env={"COLUMNS": "400"})
    assert result.exit_code == 2 and wanted in result.output, result.output
