"""MXFP8 checkpoints written and read back, in the layouts that engines load."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from beam_moe.kernels.mxfp8 import MXFP8Tensor, dequantize_reference, quantize_reference
from beam_moe.mxfp8_io import (
    LAYOUTS,
    checkpoint_layout,
    load_checkpoint,
    pack,
    quantization_config,
    save_checkpoint,
    unpack,
)


def model() -> dict:
    return {
        "model.layers.0.mlp.experts.0.up_proj.weight": quantize_reference(torch.randn(48, 64)),
        "model.layers.0.mlp.experts.down_proj": quantize_reference(torch.randn(3, 8, 96)),
        "model.layers.0.mlp.gate.weight": torch.randn(4, 64),
        "model.layers.0.norm.weight": torch.randn(64),
        "lm_head.weight": torch.randn(10, 64, dtype=torch.bfloat16),
    }


def equal(a, b) -> bool:
    if isinstance(a, MXFP8Tensor):
        return (
            isinstance(b, MXFP8Tensor)
            and equal(a.scale, b.scale)
            and equal(*(t.data.view(torch.uint8) for t in (a, b)))
        )
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 4000], ids=["one-file", "shards"])
def test_round_trip(layout, shard_bytes, tmp_path):
    tensors = model()
    save_checkpoint(iter(tensors.items()), tmp_path, layout=layout, config={"hidden_size": 64}, shard_bytes=shard_bytes)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes == 4000) and files[-1].endswith(f"-of-{len(files):05d}.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hidden_size"] == 64 and checkpoint_layout(config) == layout
    section = config["quantization_config"]
    ignored = section["ignore"] if layout == "compressed-tensors" else section["quantization"]["exclude_modules"]
    assert ignored == ["lm_head", "model.layers.0.mlp.gate"]  # the norm is no matrix
    got = dict(load_checkpoint(tmp_path))
    assert got.keys() == tensors.keys()
    assert all(equal(tensors[name], got[name]) for name in tensors)
    only = dict(load_checkpoint(tmp_path, select=lambda name: "experts" in name))
    assert sorted(only) == sorted(name for name in tensors if "experts" in name)


def test_the_files_hold_what_engines_expect(tmp_path):
    tensors = model()
    save_checkpoint(tensors, tmp_path)
    raw = load_file(next(tmp_path.glob("*.safetensors")))
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert raw[name].dtype == torch.float8_e4m3fn and raw[name].shape == (48, 64)
    assert raw[name + "_scale"].dtype == torch.uint8 and raw[name + "_scale"].shape == (48, 2)
    assert raw["model.layers.0.mlp.experts.down_proj_scale"].shape == (3, 8, 3)
    joined = unpack(raw)
    assert joined.keys() == tensors.keys() and all(equal(tensors[n], joined[n]) for n in tensors)
    values = dequantize_reference(joined[name])
    exponent = raw[name + "_scale"].int() - 127
    assert torch.equal(values, raw[name].float() * (2.0 ** exponent.float()).repeat_interleave(32, -1))


def test_scales_may_be_in_another_file_and_in_the_e8m0_dtype(tmp_path):
    t = quantize_reference(torch.randn(4, 64))
    save_file({"a.weight": t.data}, tmp_path / "1.safetensors")
    save_file({"a.weight_scale": t.scale.view(torch.float8_e8m0fnu)}, tmp_path / "2.safetensors")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "MXFP8"}}))
    ((name, got),) = load_checkpoint(tmp_path)
    assert name == "a.weight" and equal(t, got)


def test_scales_under_their_other_name(tmp_path):
    """MiniMax's checkpoints say quant_method "mxfp8" and call E8M0 bytes weight_scale_inv, as vLLM's loader knows."""
    t, other = quantize_reference(torch.randn(4, 64)), torch.randn(3)
    raw = {"a.weight": t.data, "a.weight_scale_inv": t.scale, "b": other, "b_scale_inv": other + 1}
    joined = unpack(raw)
    assert joined.keys() == {"a.weight", "b", "b_scale_inv"} and equal(joined["a.weight"], t)
    save_file(raw, tmp_path / "model.safetensors")
    section = {"quant_method": "mxfp8", "ignored_layers": ["b"]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    got = dict(load_checkpoint(tmp_path))
    assert got.keys() == joined.keys() and all(equal(joined[name], got[name]) for name in got)
    assert dict(load_checkpoint(tmp_path, select=lambda name: name == "a.weight")).keys() == {"a.weight"}
    with pytest.raises(ValueError, match=r"unpack: a.weight_scale_inv must have shape \(4, 2\)"):
        unpack({"a.weight": t.data, "a.weight_scale_inv": torch.zeros(1, 1)})  # scales of 128x128 blocks


def test_layouts_of_other_writers():
    assert checkpoint_layout({}) is None
    assert (
        checkpoint_layout({"quantization_config": {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}})
        == "modelopt"
    )
    assert checkpoint_layout({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}) == "modelopt"
    weight_only = quantization_config("compressed-tensors", activations=False)
    assert weight_only["config_groups"]["group_0"]["input_activations"] is None
    assert checkpoint_layout({"quantization_config": weight_only}) == "compressed-tensors"


def group(**change) -> dict:
    section = quantization_config("compressed-tensors")
    section["config_groups"]["group_0"]["weights"].update(change)
    return {"quantization_config": section}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: checkpoint_layout({"quantization_config": {"quant_method": "fp8"}}), "'fp8'"),
        (
            lambda: checkpoint_layout({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}),
            "NVFP4",
        ),
        (lambda: checkpoint_layout(group(group_size=128)), "not MXFP8"),
        (lambda: checkpoint_layout(group(num_bits=4)), "not MXFP8"),
        (lambda: quantization_config("gguf"), "gguf"),
        (lambda: quantization_config("modelopt", activations=False), "activations"),
        (lambda: pack("w", quantize_reference(torch.zeros(32, 64), axis=-2)), "pack: w"),
        (lambda: pack("w", quantize_reference(torch.zeros(32, 64), elem="e5m2")), "pack: w"),
        (lambda: unpack({"w": torch.zeros(4, 64, dtype=torch.float8_e4m3fn)}), "no w_scale"),
        (
            lambda: unpack({"w": torch.zeros(4, 64, dtype=torch.float8_e4m3fn), "w_scale": torch.zeros(1)}),
            r"shape \(4, 2\)",
        ),
        (
            lambda: unpack({"w": torch.zeros(4, 64, dtype=torch.float8_e4m3fn), "w_scale": torch.zeros(4, 2)}),
            "E8M0 bytes",
        ),
        (lambda: save_checkpoint({}, "unused"), "no tensors"),
    ],
)
def test_refuses(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dense_first", [True, False])
def test_a_tensor_cannot_take_the_name_of_another_ones_scales(dense_first, tmp_path):
    tensors = [("a.weight_scale", torch.zeros(4)), ("a.weight", quantize_reference(torch.zeros(4, 64)))]
    with pytest.raises(ValueError, match="save_checkpoint: a.weight_scale was given twice"):
        save_checkpoint(iter(tensors if dense_first else tensors[::-1]), tmp_path)


def test_refuses_an_unnamed_quantisation(tmp_path):
    save_file({"w": torch.zeros(4, 64, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names no quantisation"):
        list(load_checkpoint(tmp_path))


def test_a_file_with_fewer_tensors_than_the_index_says_is_refused(tmp_path):
    save_checkpoint({"a.weight": torch.zeros(2, 4), "b.weight": torch.zeros(2, 4)}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    save_file({"a.weight": torch.zeros(2, 4)}, file)
    with pytest.raises(ValueError, match="no file has: b.weight"):
        list(load_checkpoint(tmp_path))


@pytest.mark.vllm
def test_vllm_reads_both_sections():
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config

    ours = CompressedTensorsConfig.from_config(quantization_config("compressed-tensors", ["lm_head"]))
    scheme = ours.target_scheme_map["Linear"]
    assert ours._is_mxfp8(scheme["weights"]) and ours._is_mxfp8(scheme["input_activations"])
    assert ours.ignore == ["lm_head"]
    section = quantization_config("modelopt", ["lm_head"])
    assert ModelOptMxFp8Config.override_quantization_method(section, None) == "modelopt_mxfp8"
    assert ModelOptMxFp8Config.from_config(section).exclude_modules == ["lm_head"]


@pytest.mark.vllm
def test_compressed_tensors_decompresses_our_tensors():
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    t = quantize_reference(torch.randn(48, 64, dtype=torch.bfloat16))
    group = quantization_config("compressed-tensors")["config_groups"]["group_0"]
    state = MXFP8QuantizationCompressor.decompress(pack("weight", t), QuantizationScheme.model_validate(group))
    assert torch.equal(state["weight"].float(), dequantize_reference(t))
