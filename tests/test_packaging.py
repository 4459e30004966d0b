"""What is installed: the import map, the wheel's contents, and an import that needs nothing but torch."""

import contextlib
import email
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import beam_moe

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, **options) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, so that no build folder of this checkout is reused."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode or not listed.stdout:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    configs = source / "kernels" / "configs" / "some_device"
    configs.mkdir(parents=True)
    (configs / "some_op.json").write_text("{}")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
        "-w",
        str(out),
        ".",
    ]
    done = subprocess.run(build, capture_output=True, text=True, cwd=source)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_mapped_packages_and_nothing_else(wheel):
    names = [n for n in wheel.namelist() if ".dist-info/" not in n]
    assert {n.split("/")[0] for n in names} == {"beam_moe"}
    for folder, package in (
        ("beam_moe", "beam_moe"),
        ("kernels", "beam_moe/kernels"),
        ("integrations", "beam_moe/integrations"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            assert f"{package}/{path.relative_to(ROOT / folder)}" in names
    assert "beam_moe/py.typed" in names
    assert "beam_moe/kernels/configs/some_device/some_op.json" in names


def test_wheel_metadata(wheel):
    (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    for line in ("Name: beam-moe", f"Version: {beam_moe.__version__}", "License: Apache-2.0"):
        assert line in text
    for extra in ("vllm", "megatron", "bench", "dev"):
        assert f"Provides-Extra: {extra}" in text
    points = wheel.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    assert "[vllm.general_plugins]\nbeam_moe = beam_moe.integrations.vllm:register" in points
    assert any(n.endswith("/LICENSE") for n in wheel.namelist())


def test_a_plain_install_has_all_that_the_library_uses(wheel, tmp_path):
    """With no package but those that ours and theirs ask for, extras left out, an adapter is written, read and run."""
    (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    asked = email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist")
    there, names = {"beam-moe", "setuptools", "pip"}, [r for r in asked if "extra ==" not in r]
    while names:
        name = re.match(r"[\w.-]+", names.pop())[0].lower().replace("_", "-")
        if name not in there:
            there.add(name)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of another platform
                names += [r for r in importlib.metadata.requires(name) or () if "extra ==" not in r]
    code = """
import importlib.metadata, sys
there, owners = set(sys.argv[1].split()), importlib.metadata.packages_distributions()
class Refuse:
    def find_spec(self, name, path=None, target=None):
        of = {d.lower().replace("_", "-") for d in owners.get(name.split(".")[0], ())}
        if of and not of & there:
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Refuse())
import torch
from beam_moe import BeamMoEConfig, export_adapter, load_adapter
from beam_moe.kernels.moe_lora import fused_moe
import beam_moe.cli
config = BeamMoEConfig(hidden=16, intermediate=16, num_experts=2, top_k=1, sparse=(True,))
factors = {f"layers.0.mlp.experts.{e}.{p}_proj.lora_{s}": torch.ones(*((2, 16) if s == "A" else (16, 2)))
           for e in range(2) for p in ("gate", "up", "down") for s in "AB"}
export_adapter(load_adapter(factors, config), sys.argv[2])
bank = load_adapter(sys.argv[2], config, dtype=torch.float16).experts[0]
out = fused_moe(torch.ones(1, 16).half(), torch.zeros(2, 32, 16).half(), torch.zeros(2, 16, 16).half(),
                torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), lora=bank,
                lora_ids=torch.zeros(1, dtype=torch.int32))
print(float(out[0, 0]) > 0)
"""
    run = [sys.executable, "-W", "ignore", "-c", code, " ".join(sorted(there)), str(tmp_path / "adapter")]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr[-3000:]


def test_versions_agree():
    assert importlib.metadata.version("beam-moe") == beam_moe.__version__


def test_every_package_folder_has_its_init():
    """A folder without one vanishes from the editable install."""
    for folder in ("kernels", "integrations", "beam_moe"):
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_no_top_level_kernels(tmp_path):
    """transformers probes for a package `kernels`; ours must not answer, nor may its __init__ import anything."""
    assert importlib.util.find_spec("kernels") is None
    code = "import importlib.util as u; print([n for n in ('kernels', 'integrations', 'bench') if u.find_spec(n)])"
    assert python(code, cwd=tmp_path).strip() == "[]"
    body = (ROOT / "kernels" / "__init__.py").read_text().strip()
    assert body.startswith('"""') and body.endswith('"""') and body.count('"""') == 2


def test_import_needs_only_torch(tmp_path):
    """No GPU library is loaded, no engine looked at, and every public name resolves."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "megatron", "transformers", "transformer_engine", "matplotlib"):
            raise ImportError(f"import of {name}")
sys.meta_path.insert(0, Refuse())
import beam_moe
for name in beam_moe.__all__:
    getattr(beam_moe, name)
import beam_moe.kernels.moe_lora, beam_moe.kernels.mxfp8, beam_moe.kernels.router, beam_moe.integrations
import torch
print(torch.cuda.is_initialized())
"""
    assert python(code, cwd=tmp_path).strip() == "False"


def test_import_is_quick(tmp_path):
    """Ours adds little to torch's own time (3 s together on an idle machine): compared in processor time."""
    code = """
import json, time
start = time.process_time()
import torch
torch_s = time.process_time() - start
start = time.process_time()
import beam_moe
plain_s = time.process_time() - start
start = time.process_time()
for name in beam_moe.__all__:
    getattr(beam_moe, name)
print(json.dumps([torch_s, plain_s, time.process_time() - start]))
"""
    torch_s, plain_s, names_s = min((json.loads(python(code, cwd=tmp_path)) for _ in range(2)), key=sum)
    assert plain_s < 0.5, f"import beam_moe took {plain_s:.2f} s of processor time"
    assert names_s < max(1.5, torch_s), f"the public names took {names_s:.2f} s beyond torch's {torch_s:.2f} s"


def test_plugin_entry_point_is_installed():
    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="beam_moe")
    assert point.value == "beam_moe.integrations.vllm:register"
    assert importlib.util.find_spec("beam_moe.integrations.vllm") is not None
