"""The one place with name, version, dependencies and entry points."""

from setuptools import find_packages, setup

# Import name -> folder. An editable install in mode `compat` does not honour this map: never use it.
SOURCES = {"beam_moe": "beam_moe", "beam_moe.kernels": "kernels", "beam_moe.integrations": "integrations"}

BENCH = ["matplotlib>=3.8"]
DEV = [
    "hypothesis>=6.100",
    "mypy>=1.11",
    "pre-commit>=3.8",
    "pre-commit-hooks>=5.0",
    "pytest>=8.2",
    "pytest-benchmark>=4.0",
    "pytest-xdist>=3.6",
    "ruff>=0.8",
]

setup(
    name="beam-moe",
    version="0.1.0",
    description="Fast, numerically honest kernels for reinforcement learning on sparse mixture-of-experts models",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    package_dir=SOURCES,
    packages=[p for name, folder in SOURCES.items() for p in (name, *(f"{name}.{s}" for s in find_packages(folder)))],
    package_data={"beam_moe": ["py.typed"], "beam_moe.kernels": ["configs/*/*.json"]},
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; platform_system == 'Linux'",
        "numpy>=1.26",  # of Triton's interpreter and of safetensors' writing, neither of which asks for it
        "safetensors>=0.4.3",
        "rich>=13",
        "typer>=0.12",
    ],
    extras_require={
        "vllm": ["vllm>=0.33,<0.35"],
        "megatron": ["megatron-core>=0.19.2,<0.20", "megatron-bridge>=0.6.2,<0.7"],
        "bench": BENCH,
        "dev": DEV + BENCH,
    },
    entry_points={
        "console_scripts": ["beam-moe = beam_moe.cli:app"],
        "vllm.general_plugins": ["beam_moe = beam_moe.integrations.vllm:register"],
    },
)
