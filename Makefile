# make test     everything that needs no GPU: lint, the kernels in Triton's interpreter, the integrations against the real engines
# make bench    the decode benchmark; without a GPU a small layer in the interpreter, checked, beside the H200's floors
# make test-gpu everything marked gpu, with a report under bench/results/<device>/
# Each sets up what it needs. PYTHON= names the interpreter to build on, ARGS= is passed on.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?=
ARGS ?=
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? n : 8)))
GPU_JOBS ?= 8
PIP := -m pip install -q --disable-pip-version-check
TRITON_FLOOR := 3.6.0
export PYTHON

.PHONY: help test bench test-gpu lint format venv venv-vllm venv-megatron venv-triton clean distclean

help:
	@sed -n '1,/^SHELL/s/^# //p' Makefile

# --- environments -----------------------------------------------------------------------------------------------------

venv: .venv/.stamp
venv-vllm: .venv-vllm/.stamp
venv-megatron: .venv-megatron/.stamp
venv-triton: .venv-triton/.stamp

.venv/.stamp: setup.py pyproject.toml requirements/core.txt
	@python=$$(.ci/find-python)
	echo "== .venv, on $$python"
	"$$python" -m venv .venv
	.venv/bin/python $(PIP) -c requirements/core.txt -e '.[dev,bench]'
	touch $@

# vLLM and Megatron-Bridge pin packages that clash with each other, never torch: each gets a folder over .venv's.
.venv-vllm/.stamp .venv-megatron/.stamp: .venv-%/.stamp: requirements/%.txt | .venv/.stamp
	@echo "== .venv-$*"
	.ci/make-venv .venv-$* .venv/bin/python
	.venv-$*/bin/python $(PIP) --no-deps -r requirements/$*.txt
	touch $@

# The oldest Triton that the kernels must compile with, as a folder for PYTHONPATH.
.venv-triton/.stamp: | .venv/.stamp
	@echo "== Triton $(TRITON_FLOOR)"
	rm -rf .venv-triton
	.venv/bin/python $(PIP) --no-deps --no-compile --target .venv-triton triton==$(TRITON_FLOOR)
	touch $@

# A machine whose own Python already has a torch that sees a GPU is used as it is, network or not; else .venv.
.PHONY: gpu-python
gpu-python:
	@if python=$$(.ci/find-python --cuda); then
	  if [ ! -e .venv-gpu/.stamp ]; then
	    echo "== .venv-gpu, on $$python"
	    .ci/make-venv .venv-gpu "$$python"
	    .venv-gpu/bin/python $(PIP) --no-deps --no-index --no-build-isolation -e .
	    missing=$$(.venv-gpu/bin/python -c 'import importlib.util as u; print(*(m for m in "typer rich safetensors pytest hypothesis matplotlib numpy".split() if not u.find_spec(m)))')
	    if [ -n "$$missing" ]; then
	      .venv-gpu/bin/python $(PIP) --retries 0 --timeout 10 $$missing || echo "not there and not installable: $$missing"
	    fi
	    touch .venv-gpu/.stamp
	  fi
	else
	  $(MAKE) -s --no-print-directory .venv/.stamp
	fi

GPU_PYTHON = $$([ -e .venv-gpu/.stamp ] && echo .venv-gpu/bin/python || echo .venv/bin/python)

# --- checks -----------------------------------------------------------------------------------------------------------

test: .venv/.stamp .venv-vllm/.stamp .venv-megatron/.stamp .venv-triton/.stamp
	@JOBS=$(JOBS) .ci/test $(ARGS)

lint: .venv/.stamp
	@.ci/test --lint

format: .venv/.stamp
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

test-gpu: gpu-python
	@python=$(GPU_PYTHON)
	"$$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make test-gpu: torch sees no GPU")'
	report=bench/results/$$("$$python" -c 'from beam_moe.kernels.tuning import device_folder; print(device_folder())')/test_gpu.txt
	mkdir -p "$$(dirname "$$report")"
	"$$python" -c 'import platform, torch, triton; print(torch.cuda.get_device_name(), "python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)' | tee "$$report"
	jobs=$$("$$python" -c 'import importlib.util as u; print("-n $(GPU_JOBS)" if u.find_spec("xdist") else "")')
	PYTHONUNBUFFERED=1 "$$python" -m pytest tests -m gpu $$jobs --no-header -q --durations=10 $(ARGS) 2>&1 | tee -a "$$report"

bench: gpu-python
	@$(GPU_PYTHON) bench/moe_decode.py $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-vllm .venv-megatron .venv-triton .venv-gpu
