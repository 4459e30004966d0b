"""MXFP8 linear layers on our GEMM: for whom, what they compute, and that nothing is left to compile."""

import importlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from beam_moe.testing import assert_close, load_script

LIMIT = 4e-3
OURS = "BeamMxfp8LinearKernel"
PORTABLE = "HummingMxfp8LinearKernel,MarlinMxfp8LinearKernel,TorchMxFp8LinearKernel"
OTHER = "EmulationMxfp8LinearKernel"


@pytest.fixture(scope="module")
def ours(fake_hopper):
    from beam_moe.integrations.vllm import mxfp8_linear

    return mxfp8_linear


@pytest.fixture(autouse=True)
def afresh(ours, monkeypatch):
    """vLLM's list as vLLM has it, without kernels whose repacking is compiled code; no call counted, nothing logged."""
    monkeypatch.setattr(ours.metrics, "calls", Counter())
    monkeypatch.setattr(ours.metrics, "_logged", set())
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", PORTABLE)
    lists = ours._POSSIBLE_MXFP8_KERNELS
    stock = [k for k in lists[ours.PlatformEnum.CUDA] if k.__name__ != OURS]
    monkeypatch.setitem(lists, ours.PlatformEnum.CUDA, stock)


def kernel_of(layer):
    return getattr(getattr(layer, "quant_method", None), "kernel", None)


def chosen(model) -> set[str]:
    """Names of the kernels of a model's MXFP8 linears."""
    from beam_moe.integrations.vllm.report import mxfp8_linears

    return set(mxfp8_linears(model))


def beam(harness, folder, **options):
    path = harness.write_config(folder / "m")
    return harness.engine_config(path, **{"dtype": "bfloat16", "quantization": "mxfp8", "lora": False, **options})


def dense(weight, scale) -> torch.Tensor:
    """float32 values of an MXFP8 weight."""
    from beam_moe.kernels.mxfp8 import MXFP8Tensor, dequantize_reference

    return dequantize_reference(MXFP8Tensor(weight.data, scale.data), torch.float32)


def product(layer, x, bias=None) -> torch.Tensor:
    out = x.float() @ dense(layer.weight, layer.weight_scale).T
    return out if bias is None else out + bias.float()


# --- who is served


@pytest.mark.parametrize("quantization", ["mxfp8", "beam_mxfp8"])
def test_beam(harness, tmp_path, quantization):
    """Every quantised linear of a bf16 Beam, before vLLM's own."""
    with harness.built(beam(harness, tmp_path, quantization=quantization)) as (model, _):
        assert chosen(model) == {OURS}
        layer = model.model.layers[0].self_attn.qkv_gate_proj
        n, k = layer.output_size_per_partition, layer.input_size_per_partition
        assert layer.weight.shape == (n, k) and layer.weight.dtype == torch.float8_e4m3fn
        assert layer.weight_scale.shape == (n, k // 32) and layer.weight_scale.dtype == torch.uint8


CONDITIONS = {
    "switched off": ({"BEAM_MOE_VLLM_MXFP8_LINEAR": "0"}, {}),
    "experts are not asked for": ({"BEAM_MOE_VLLM": "0"}, {}),
    "batch invariance": ({"VLLM_BATCH_INVARIANT": "1"}, {}),
    "fp16": ({}, {"dtype": "float16"}),
    "disabled": ({"VLLM_DISABLED_KERNELS": f"{PORTABLE},{OURS}"}, {}),
    "another backend": ({}, {"linear_backend": "emulation"}),
}


def choice(config) -> set[str]:
    """The kernels that a model gets when it is built, before it has weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        return chosen(initialize_model(config))


def marked(config) -> bool:
    """Whether vLLM keeps what it compiles of the model under another name for our operator."""
    from beam_moe.integrations.vllm.mxfp8_linear import OPERATOR

    name, marks = config.compute_hash(), list(config.compilation_config.custom_ops)
    config.compilation_config.custom_ops = [m for m in marks if OPERATOR not in m]
    try:
        return config.compute_hash() != name
    finally:
        config.compilation_config.custom_ops = marks


@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions(harness, ours, tmp_path, monkeypatch, condition):
    """What leaves a Beam's linears to vLLM, and what the log says of it."""
    variables, options = CONDITIONS[condition]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = beam(harness, tmp_path, **options)
    assert choice(config) == {OTHER} and not marked(config)
    said = [m for m in ours.metrics._logged if m.startswith("MXFP8 linears: ")]
    words = {"batch invariance": "VLLM_BATCH_INVARIANT", "fp16": "torch.float16"}.get(condition)
    assert (len(said) == 1 and words in said[0]) if words else not said


def test_capability(harness, ours, monkeypatch):
    """Hopper's, in either form that vLLM asks in, where our kernels run."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    kernel = ours.BeamMxfp8LinearKernel
    assert kernel.is_supported() == kernel.is_supported(90) == (True, None)
    assert not kernel.is_supported(100)[0] and not kernel.is_supported(89)[0] and not kernel.is_supported(120)[0]
    with monkeypatch.context() as patch:
        patch.setattr(type(current_platform), "get_device_capability", lambda *a: DeviceCapability(10, 0))
        assert not kernel.is_supported()[0]
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        assert not kernel.is_supported()[0]


@pytest.mark.parametrize("shape, batch", [((64, 48), None), ((0, 64), None), ((64, 64), 2)])
def test_shapes(harness, ours, tmp_path, shape, batch):
    """Whole blocks along K, and no batch of products."""
    from vllm.config import set_current_vllm_config

    def asked(shape, batch):
        return ours.BeamMxfp8LinearKernel.can_implement(ours.Mxfp8LinearLayerConfig(shape, batch))

    with set_current_vllm_config(beam(harness, tmp_path)):
        assert asked((64, 64), None) == (True, None)
        refused, reason = asked(shape, batch)
        assert not refused and reason
    assert not asked((64, 64), None)[0], "no model is being built"


def as_registered(monkeypatch) -> None:
    """vLLM as the entry point leaves it, in two plugin loads, where other models than Beam are named."""
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.custom_op import op_registry_oot

    from beam_moe.integrations.vllm import other_models

    monkeypatch.setattr(LoRAModelManager, "_create_lora_modules", LoRAModelManager._create_lora_modules)
    monkeypatch.setitem(op_registry_oot, other_models.NAME, None)  # taken out again after the test
    del op_registry_oot[other_models.NAME]
    other_models.register()
    other_models.register()


@pytest.mark.parametrize(
    "asked, quantization, is_ours",
    [
        ("Qwen3MoeForCausalLM", "mxfp8", True),
        ("Qwen3MoeForCausalLM", "beam_mxfp8", True),
        ("all", "mxfp8", True),
        ("beam", "mxfp8", False),
        ("MixtralForCausalLM", "mxfp8", False),
    ],
)
def test_other_models(harness, ours, tmp_path, monkeypatch, asked, quantization, is_ours):
    """Those that ``BEAM_MOE_VLLM`` names, marked for vLLM's cache of compiled models; nobody else."""
    monkeypatch.setenv("BEAM_MOE_VLLM", asked)
    as_registered(monkeypatch)
    assert [k.__name__ for k in ours._POSSIBLE_MXFP8_KERNELS[ours.PlatformEnum.CUDA]].count(OURS) == 1
    path = harness.write_config(tmp_path / "q", harness.QWEN)
    config = harness.engine_config(path, dtype="bfloat16", quantization=quantization, lora=False)
    assert choice(config) == ({OURS} if is_ours else {OTHER})
    assert marked(config) is is_ours


def test_all_is_all_models_with_experts(harness, ours, tmp_path, monkeypatch):
    """A dense model is not ours under ``BEAM_MOE_VLLM=all``."""
    monkeypatch.setenv("BEAM_MOE_VLLM", "all")
    as_registered(monkeypatch)
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    moe = ("moe_", "num_experts", "norm_topk", "decoder_sparse", "mlp_only")
    path = harness.write_config(
        tmp_path / "d", {k: v for k, v in harness.QWEN.items() if not k.startswith(moe)}, **dense
    )
    assert choice(harness.engine_config(path, dtype="bfloat16", quantization="mxfp8", lora=False)) == {OTHER}


# --- what is computed


@pytest.fixture(scope="module")
def served(harness, ours, tmp_path_factory):
    """A bf16 Beam with adapters in two slots, its layers' kernels ours."""
    folder, registered = tmp_path_factory.mktemp("served"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DISABLED_KERNELS", PORTABLE)
        patch.setattr(ours.VllmJitKernel, "register_warmup", lambda self, *a, **k: registered.append(self))
        with harness.built(beam(harness, folder, lora=True)) as (model, manager):
            adapter = harness.write_adapter(folder / "a", "per_expert")
            manager.add_adapter(harness.request(adapter))
            warmups = [k for k in registered if isinstance(k, ours.LinearWarmup)]
            yield SimpleNamespace(model=model, manager=manager, warmups=warmups)


def served_layer(served):
    return served.model.model.layers[0].self_attn.o_proj.base_layer


def rows_of(layer, *shape, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, layer.input_size_per_partition, generator=g).to(dtype)


@pytest.mark.parametrize("shape", [(1,), (5,), (40,), (530,), (2, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_product(ours, served, shape, bias):
    """Of every route by size, 2-D and 3-D, as a dequantised product gives it."""
    layer = served_layer(served)
    x = rows_of(layer, *shape)
    b = torch.randn(layer.output_size_per_partition).bfloat16() if bias else None
    got = layer.quant_method.apply(layer, x, b)
    assert got.dtype == torch.bfloat16
    assert_close("product", product(layer, x, b), got, LIMIT)
    assert ours.metrics.calls == {(ours.metrics.SERVED, "MXFP8 linear"): 1}


def test_views(ours, served):
    """Columns of a wider matrix, rows that start anywhere, every other row, a transpose, a row with a stray stride."""
    layer = served_layer(served)
    k = layer.input_size_per_partition
    wide = torch.randn(8, 4 * k + 7).bfloat16()
    turned = torch.randn(k, 4).bfloat16().T
    views = [
        wide[:, k : 2 * k],
        wide[:, 3 : k + 3],
        wide[::2, :k],
        turned,
        wide[2:3, :k],
        wide[:1, 1 : k + 1],
        wide[:1, :k].expand(4, k),
    ]
    for x in [*views, wide[:6, :k].unflatten(0, (2, 3))]:
        assert_close("view", product(layer, x), layer.quant_method.apply(layer, x, None), LIMIT)
        form = ours._in_one_form(x.reshape(-1, k))
        assert form.stride(1) == 1 and form.stride(0) >= k and form.stride(0) % 16 == 0 and form.data_ptr() % 16 == 0
    for aligned in (torch.randn(4, 2 * k).bfloat16()[:, :k], wide[:1, :k]):
        assert ours._in_one_form(aligned).data_ptr() == aligned.data_ptr(), "no copy where none is needed"


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_no_rows(served, shape):
    layer = served_layer(served)
    got = layer.quant_method.apply(layer, rows_of(layer, *shape), None)
    assert got.shape == (*shape, layer.output_size_per_partition) and got.dtype == torch.bfloat16


def test_calls_that_the_kernel_does_not_take(ours, served, monkeypatch):
    """Served all the same, from dequantised weights, and said once."""
    layer = served_layer(served)
    strided = torch.randn(2 * layer.output_size_per_partition).bfloat16()[::2]
    double = strided.double().contiguous()
    for dtype, bias in (
        (torch.float32, None), (torch.float16, None), (torch.bfloat16, strided), (torch.bfloat16, double),
    ):  # fmt: skip
        x = rows_of(layer, 3, dtype=dtype)
        got = layer.quant_method.apply(layer, x, bias)
        assert got.dtype == dtype
        assert_close(str(dtype), product(layer, x, bias), got, LIMIT)
    layer.quant_method.apply(layer, rows_of(layer, 2, dtype=torch.float32), None)
    reasons = {d: n for (path, d), n in ours.metrics.calls.items() if path == ours.metrics.FALLBACK}
    assert len(reasons) == 4 and reasons["its input is torch.float32"] == 2
    monkeypatch.setenv("BEAM_MOE_STRICT", "1")
    with pytest.raises(RuntimeError, match="an MXFP8 linear"):
        layer.quant_method.apply(layer, rows_of(layer, 3, dtype=torch.float32), None)


def test_adapters(harness, served):
    """vLLM's wrapper over a layer of ours: an adapter's row and a bare one."""
    slot = served.manager._adapter_manager.lora_index_to_id.index(1)
    harness.set_slots(served.manager, [slot, -1])
    for name in ("qkv_gate_proj", "o_proj"):
        module = getattr(served.model.model.layers[0].self_attn, name)
        x = rows_of(module.base_layer, 2)
        base, got = product(module.base_layer, x), module.apply(x, None)
        pairs = zip(module.lora_a_stacked, module.lora_b_stacked)
        delta = torch.cat([b[slot, 0].float() @ (a[slot, 0].float() @ x[0].float()) for a, b in pairs])
        assert_close("bare", base[1], got[1], LIMIT)
        assert_close("with an adapter", base[0] + delta, got[0], 1e-2)
        assert float(delta.norm()) > 0.1 * float(base[0].norm())


def test_one_traced_graph_serves_every_size(ours, served):
    """In one graph without a break, as one operator."""
    layer, graphs = served_layer(served), []

    def backend(graph, example_inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    traced = torch.compile(
        lambda x: layer.quant_method.apply(layer, x, None), fullgraph=True, dynamic=True, backend=backend
    )
    with torch.no_grad():
        for tokens in (5, 6, 70):
            x = rows_of(layer, tokens)
            assert_close("traced", product(layer, x), traced(x), LIMIT)
    assert len(graphs) == 1 and any(f"beam_moe.{ours.OPERATOR}" in node for node in graphs[0]), graphs
    assert ours.metrics.calls == {(ours.metrics.SERVED, "MXFP8 linear"): 3}
    torch._dynamo.reset()


def test_operator(served):
    """Its shapes without running it are those of a run."""
    layer = served_layer(served)
    operator = torch.ops.beam_moe.vllm_mxfp8_linear
    for x in (rows_of(layer, 3), rows_of(layer, 2, 3), rows_of(layer, 0)):
        args = (x, layer.weight, layer.weight_scale, None)
        torch.library.opcheck(operator.default, args, test_utils="test_faketensor")


# --- where weights come from


def test_reload_in_place(harness, ours, tmp_path):
    """vLLM's own, as after a sleep of level 2: other values at the places that a captured graph reads."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    config, device = beam(harness, tmp_path), torch.device("cpu")
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(config)
        layer = model.model.layers[1].self_attn.o_proj
        kernel, x, seen = kernel_of(layer), rows_of(layer, 3), []
        for seed in (7, 8):
            state = harness.checkpoint(seed)
            if seed == 7:  # as vLLM's loader does it
                model.load_weights(iter(state.items()))
                finalize_layerwise_processing(model, config.model_config)
                process_weights_after_loading(model, config.model_config, device)
            else:
                reload_weights(config, model, iter(state.items()), None, True)
            want = state["model.layers.1.self_attn.o_proj.weight"].float()
            assert_close("quantised", want, dense(layer.weight, layer.weight_scale), 0.04)
            got = layer.quant_method.apply(layer, x, None)
            assert_close("product", product(layer, x), got, LIMIT)
            assert kernel_of(layer) is kernel and type(kernel).__name__ == OURS
            seen.append((layer.weight.data_ptr(), layer.weight_scale.data_ptr(), got.norm()))
    assert seen[0][:2] == seen[1][:2] and seen[0][2] != seen[1][2]


@pytest.mark.parametrize("fmt", ["ct-mxfp8", "modelopt-mxfp8"])
def test_stored_weights(harness, ours, tmp_path, fmt):
    """The checkpoint's very bytes, from either tool."""
    from safetensors.torch import load_file

    checkpoints = load_script(Path(__file__).parent / "checkpoints.py")
    wide = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256, "head_dim": 32}
    folder = checkpoints.write(tmp_path / "m", {**harness.BEAM, **wide}, fmt)
    config = harness.engine_config(folder, dtype="bfloat16", lora=False)
    with harness.built(config, checkpoint=folder) as (model, _):
        assert chosen(model) == {OURS}
        layer, state = model.model.layers[0].self_attn.o_proj, load_file(Path(folder) / "model.safetensors")
        name = "model.layers.0.self_attn.o_proj.weight"
        assert torch.equal(layer.weight.view(torch.uint8), state[name].view(torch.uint8))
        assert torch.equal(layer.weight_scale, state[f"{name}_scale"])
        x = rows_of(layer, 3)
        assert_close(fmt, product(layer, x), layer(x)[0], LIMIT)


@pytest.mark.parametrize(
    "name, what", [("weight", torch.zeros(64, 64).bfloat16()), ("weight_scale", torch.zeros(128).byte())]
)
def test_another_layout(harness, ours, tmp_path, name, what):
    """What another kernel's quantisation would leave is an error when it is loaded."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(beam(harness, tmp_path)):
        kernel = ours.BeamMxfp8LinearKernel(ours.Mxfp8LinearLayerConfig((64, 64)))
    right = {"weight": torch.zeros(64, 64).to(torch.float8_e4m3fn), "weight_scale": torch.zeros(64, 2).byte()}
    layer = torch.nn.Module()
    for key, value in {**right, name: what}.items():
        layer.register_parameter(key, torch.nn.Parameter(value, requires_grad=False))
    with pytest.raises(ValueError, match=f"BeamMxfp8LinearKernel: {name} must be"):
        kernel.process_weights_after_loading(layer)


def test_scales_of_another_type_and_with_padding(harness, ours, tmp_path):
    """Bytes that a checkpoint calls e8m0, behind which rows and blocks of a larger tile lie."""
    from vllm.config import set_current_vllm_config

    config = beam(harness, tmp_path)
    with set_current_vllm_config(config):
        kernels = [ours.BeamMxfp8LinearKernel(ours.Mxfp8LinearLayerConfig((64, 64))) for _ in range(2)]
    compilation = config.compilation_config
    assert compilation.custom_ops.count(f"+{ours.OPERATOR}") == 1 and compilation.enabled_custom_ops[ours.OPERATOR]
    layer, scales = torch.nn.Module(), torch.arange(128 * 4, dtype=torch.int32).remainder(7).byte().view(128, 4) + 120
    values = {"weight": torch.randn(64, 64).to(torch.float8_e4m3fn), "weight_scale": scales.view(torch.float8_e8m0fnu)}
    for key, value in values.items():
        layer.register_parameter(key, torch.nn.Parameter(value, requires_grad=False))
    kernels[0].process_weights_after_loading(layer)
    assert layer.weight_scale.dtype == torch.uint8 and torch.equal(layer.weight_scale, scales[:64, :2])
    x = torch.randn(3, 64).bfloat16()
    assert_close("product", product(layer, x), kernels[0].apply_weights(layer, x), LIMIT)


# --- warm-up


def test_layers_of_one_shape_share_a_warmup_unless_their_biases_differ(ours):
    def warmup(bias):
        layer = torch.nn.Module()
        layer.weight, layer.weight_scale, layer.bias = torch.zeros(32, 64), torch.zeros(32, 2), bias
        return ours.LinearWarmup(layer)

    biases = (None, None, torch.zeros(32).bfloat16(), torch.zeros(32).bfloat16(), torch.zeros(32))
    assert len(set(map(warmup, biases))) == 3


def test_warmup(ours, served):
    """One per shape, of sizes up to the engine's; each runs as a call does."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64))
    shapes = {(m.weight.shape, None) for m in served.model.modules() if type(kernel_of(m)).__name__ == OURS}
    assert {(w.layer.weight.shape, w.layer.bias) for w in set(served.warmups)} == shapes and len(shapes) > 2
    for warmup in set(served.warmups):
        keys = warmup.get_warmup_keys(config)
        assert (1, False) in keys and max(keys)[0] <= 64 and len(keys) == len(set(keys))
        warmup.compile(keys[0])


class Launches:
    """Stands for a kernel and notes, of each launch, what Triton compiles anew for another value of it."""

    def __init__(self, name: str, seen: set) -> None:
        self.name, self.seen = name, seen

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **constants) -> None:
        self.seen.add((self.name, tuple(map(self.kind, args)), tuple(sorted(constants.items()))))

    def kind(self, arg):
        if isinstance(arg, torch.Tensor):
            return arg.dtype, arg.data_ptr() % 16 == 0
        if isinstance(arg, int):
            return "1" if arg == 1 else "16" if arg % 16 == 0 else "i"
        return type(arg).__name__, tuple(getattr(arg, "block_shape", ()))


@pytest.fixture
def launches(ours, monkeypatch):
    """Launches of our GEMM as an H200 makes them, of which nothing runs."""
    from beam_moe.kernels import tuning

    package, seen = "beam_moe.kernels.mxfp8", set()  # which has functions by the names of its modules
    gemm, stream, quantize = (importlib.import_module(f"{package}.{n}") for n in ("gemm", "stream", "quantize"))
    places = (
        (gemm, "_gemm_kernel"),
        (gemm, "_sum_kernel"),
        (stream, "_stream_kernel"),
        (quantize, "_dequantize_kernel"),
    )
    for module, name in places:
        monkeypatch.setattr(module, name, Launches(name, seen))
    monkeypatch.setattr(gemm, "dense_matmul", lambda *args: None)
    monkeypatch.setattr(gemm, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(gemm, "_sms", lambda device: 132)
    monkeypatch.setattr(gemm, "supports_pdl", lambda device: True)
    for module in (gemm, quantize):
        monkeypatch.setattr(module, "_soft", lambda device: False)
    monkeypatch.setattr(tuning, "device_folder", lambda device: "nvidia_h200")
    return seen


@pytest.mark.parametrize("most", [100, 4096])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n, k", [(1792, 5120), (5120, 768), (5120, 2560), (200, 352), (24, 96)])
def test_warmup_covers_every_size(ours, launches, n, k, bias, most):
    """Whatever a batch of 1 to 4096 rows launches, the warm-up has launched: also where the engine takes fewer."""
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale = torch.zeros(n, k).to(torch.float8_e4m3fn), torch.full((n, k // 32), 127).byte()
    layer.bias = torch.zeros(n).bfloat16() if bias else None
    warmup = ours.LinearWarmup(layer)
    keys = warmup.get_warmup_keys(SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=most)))
    assert {b for _, b in keys} == set(warmup.biases) and max(rows for rows, _ in keys) <= most
    for key in keys:
        warmup.compile(key)
    compiled = set(launches)
    launches.clear()
    x = torch.zeros(4096, k).bfloat16()
    for rows in range(1, min(most, 600) + 1):
        for b in {None, layer.bias}:
            ours.linear(x[:rows], layer.weight, layer.weight_scale, b)
    for rows in range(640, most + 1, 432):
        ours.linear(x[:rows], layer.weight, layer.weight_scale, layer.bias)
    assert launches == compiled, "of these nothing is missing, and nothing compiled in vain"
