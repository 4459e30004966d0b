"""Quantised checkpoints of Beam with LoRA on: served by our experts, or by vLLM's with the reason said once."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from beam_moe.testing import assert_close, load_script

LIMIT = 4e-3
HERE = Path(__file__).parent
STOCK = {
    "fp8": ("TritonExperts", "Fp8MoEMethod"),
    "ct-fp8": ("TritonExperts", "CompressedTensorsW8A8Fp8MoEMethod"),
    "modelopt-fp8": ("TritonExperts", "ModelOptFp8MoEMethod"),
    "ct-nvfp4": ("MarlinExperts", "CompressedTensorsW4A4Nvfp4MoEMethod"),
    "modelopt-nvfp4": ("MarlinExperts", "ModelOptNvFp4FusedMoE"),
}


@pytest.fixture(scope="module")
def checkpoints():
    return load_script(HERE / "checkpoints.py")


@pytest.fixture
def model_config(harness, monkeypatch):
    """A Beam wide enough for every format's blocks; linear kernels that a machine without a GPU has."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config

    kernels = "HummingMxfp8LinearKernel,MarlinMxfp8LinearKernel,TorchMxFp8LinearKernel,MarlinNvFp4LinearKernel"
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", f"{kernels},MarlinFP8ScaledMMLinearKernel")
    # bf16 is all it asks for, and the interpreter has no bf16 casts
    monkeypatch.setattr(ModelOptMxFp8Config, "get_supported_act_dtypes", lambda self: [torch.float16])
    return {**harness.BEAM, "hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256, "head_dim": 32}


def adapter(checkpoints, config: dict, folder: Path, seed: int = 5) -> str:
    """A PEFT folder with an adapter of rank 4 on every expert."""
    from safetensors.torch import save_file

    g = torch.Generator().manual_seed(seed)
    h, i, tensors = config["hidden_size"], config["moe_intermediate_size"], {}
    for layer, kind in enumerate(config["mlp_layer_types"]):
        for e in range(config["num_experts"]) if kind == "sparse" else ():
            name = f"base_model.model.model.layers.{layer}.mlp.experts.{e}."
            for projection, rows, cols in (("gate", i, h), ("up", i, h), ("down", h, i)):
                tensors[f"{name}{projection}_proj.lora_A.weight"] = torch.randn(4, cols, generator=g) * cols**-0.5
                tensors[f"{name}{projection}_proj.lora_B.weight"] = torch.randn(rows, 4, generator=g) * 0.5
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    peft = '{"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": 4, "lora_alpha": 4, '
    (folder / "adapter_config.json").write_text(peft + '"target_modules": "all-linear"}')
    return str(folder)


@pytest.mark.parametrize("fmt", ["ct-mxfp8", "modelopt-mxfp8"])
def test_mxfp8_checkpoints_run_on_ours(harness, checkpoints, model_config, tmp_path, fmt):
    """The checkpoint's very elements and scales reach the kernel, with an adapter, and again after a reload."""
    from safetensors.torch import load_file

    from beam_moe.kernels.mxfp8 import MXFP8Tensor, dequantize_reference

    folder = checkpoints.write(tmp_path / "m", model_config, fmt)
    path = adapter(checkpoints, model_config, tmp_path / "a")
    with harness.built(harness.engine_config(folder), checkpoint=folder) as (model, manager):
        manager.add_adapter(harness.request(path))
        runner = model.moe_layers[0]
        layer, state = runner.routed_experts, load_file(Path(folder) / "model.safetensors")
        experts = layer.quant_method.moe_kernel.impl.fused_experts
        assert type(experts).__name__ == "BeamMxfp8Experts" and experts.reason is None and experts.no_bank is None
        for e in (0, harness.E - 1):
            name = f"model.layers.2.mlp.experts.{e}."
            want = torch.cat([state[f"{name}{p}_proj.weight"] for p in ("gate", "up")]).view(torch.uint8)
            assert torch.equal(layer.w13_weight.data[e].view(torch.uint8), want)
            assert torch.equal(layer.w2_weight_scale.data[e], state[f"{name}down_proj.weight_scale"])

        def check(seed):
            dense = SimpleNamespace(
                **{
                    n: dequantize_reference(
                        MXFP8Tensor(getattr(layer, n).data, getattr(layer, f"{n}_scale").data), torch.float32
                    )
                    for n in ("w13_weight", "w2_weight")
                }
            )
            x = (torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)) * 0.5).half()
            weights, ids = harness.routing(4, seed)
            stacks = {0: harness.experts_stacks(model, 2, 0)}
            harness.set_slots(manager, [0, -1, 0, -1])
            got = harness.run_experts(runner, x, weights, ids)
            reference = load_script(HERE / "test_experts.py").reference
            assert_close(fmt, reference(harness, dense, x, weights, ids, [0, -1, 0, -1], stacks), got, LIMIT)
            harness.set_slots(manager, [-1] * 4)
            bare = harness.run_experts(runner, x, weights, ids)
            assert torch.equal(got[[1, 3]], bare[[1, 3]]) and not torch.equal(got[0], bare[0])

        check(1)
        words, largest = experts.words[1], experts.words[1].clone()
        layer.w2_weight_scale.data.add_(9)  # other weights at the old place, as a reload leaves them
        layer._already_called_process_weights_after_loading = False
        layer.quant_method.process_weights_after_loading(layer)
        experts = layer.quant_method.moe_kernel.impl.fused_experts
        assert experts.words[1].data_ptr() == words.data_ptr(), "a captured graph reads the old words"
        assert torch.equal(experts.words[1], largest + 9)
        check(2)


@pytest.mark.parametrize("fmt", list(STOCK))
def test_other_formats_stay_with_vllm(harness, checkpoints, model_config, tmp_path, monkeypatch, fmt):
    """Every tensor finds its place, vLLM's experts take the adapter, one line says why, the scaling stays vLLM's."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    from beam_moe.integrations.vllm import metrics

    # repacking for Marlin is a compiled operator; where the weights go before that is what this test is about
    monkeypatch.setattr(marlin_utils_fp4, "_repack_marlin_experts", lambda weight, *a: weight.view(torch.int32))
    monkeypatch.setattr(metrics, "_logged", set())
    lines: list[str] = []
    monkeypatch.setattr(metrics.logger, "log", lambda level, message: lines.append(message))
    folder = checkpoints.write(tmp_path / "m", model_config, fmt)
    path = adapter(checkpoints, model_config, tmp_path / "a")
    with harness.built(harness.engine_config(folder), checkpoint=folder) as (model, manager):
        manager.add_adapter(harness.request(path))
        runner = model.moe_layers[0]
        experts = runner.routed_experts.quant_method.moe_kernel.impl.fused_experts
        chosen, method = STOCK[fmt]
        assert type(experts).__name__ == chosen and runner.routed_scaling_factor == 2.5
        assert experts._lora_context is not None and float(harness.experts_stacks(model, 2, 0)["w2.b"].std()) > 0
    lines = [line for line in lines if "stays with vLLM's own code" in line]
    assert len(model.moe_layers) == 2 and len(lines) == 1 and f"vLLM chose {chosen} ({method})" in lines[0]
    assert metrics.calls[metrics.FALLBACK, f"vLLM chose {chosen} ({method})"] >= 2
    monkeypatch.setenv("BEAM_MOE_STRICT", "1")
    with pytest.raises(RuntimeError, match="BEAM_MOE_STRICT"), harness.built(harness.engine_config(folder)):
        pass


def test_draft_model_loads_beside_adapters(harness, checkpoints, tmp_path):
    """A DFlash2 draft finds the states it reads in our target, shares its embedding and head, and takes no adapter."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import get_target_lm_head, maybe_share_target_embed

    beam = {**harness.BEAM, "torch_dtype": "bfloat16"}
    target, draft = checkpoints.write(tmp_path / "m", beam, "plain"), checkpoints.write_draft(tmp_path / "d", beam)
    config = harness.engine_config(
        target, dtype="bfloat16",
        speculative_config={"method": "dflash", "model": draft, "num_speculative_tokens": checkpoints.STEPS},
    )  # fmt: skip
    assert config.speculative_config.draft_model_config.architectures == ["DFlash2BeamDraftModel"]
    with harness.built(config, checkpoint=target) as (model, manager):
        assert supports_eagle3(model) and manager is not None
        model.set_aux_hidden_state_layers((1, 3))
        assert model.model.aux_hidden_state_layers == (1, 3)
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            small = initialize_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
        loaded = small.load_weights(load_file(Path(draft) / "model.safetensors").items())
        assert {n for n, _ in small.named_parameters()} <= loaded
        maybe_share_target_embed(small, small.model, model.model)
        assert small.model.embed_tokens is model.model.embed_tokens
        assert get_target_lm_head(model, model) is model.lm_head
        assert not any("lora" in n for n, _ in small.named_modules())


def test_draft_layers_share_a_kv_cache_group(harness, checkpoints, tmp_path):
    """The GPU scenario's model and draft: vLLM's DFlash2 stores the context of all draft layers by one slot mapping."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups

    beam = load_script(HERE / "engine.py").BEAM
    target, draft = checkpoints.write(tmp_path / "m", beam, "plain"), checkpoints.write_draft(tmp_path / "d", beam)
    config = harness.engine_config(
        target, lora=False, dtype="bfloat16",
        speculative_config={"method": "dflash", "model": draft, "num_speculative_tokens": checkpoints.STEPS},
    )  # fmt: skip
    config.cache_config.kv_cache_layout = "LBNHC"  # what the attention backend decides in an engine
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        initialize_model(config)
        small = initialize_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    layers = config.compilation_config.static_forward_context
    specs = {n: x.get_kv_cache_spec(config) for n, x in layers.items() if isinstance(x, Attention)}
    groups = get_global_kv_cache_groups(config, [specs])
    drafted = set(small.get_draft_kv_cache_layer_names())
    assert (
        len(specs) == len(beam["layer_types"]) + checkpoints.DRAFT_LAYERS
        and len(drafted) == checkpoints.DRAFT_LAYERS > 1
    )
    assert len([g for g in groups if drafted & set(g.layer_names)]) == 1, [g.layer_names for g in groups]
