# Two commands: `make pretrain` (the main job on real text) and `make test`. Each sets up .venv by itself.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
# One process per GPU, on two of them at most, where there are any, else two on the CPU.
PROCESSES ?= $(shell gpus=$$({ nvidia-smi -L 2>/dev/null || true; } | wc -l); [ $$gpus = 0 ] && echo processes=2 || echo gpus=$$((gpus > 2 ? 2 : gpus)))
RUN ?= runs/tiny_sb
SLURM_TESTS ?=
BIN := .venv/bin
STAMP := .venv/installed
export TOKENIZERS_PARALLELISM := false
export OMP_NUM_THREADS ?= 1

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## create .venv with the pinned dependencies

# One resolution for everything: lm-eval installed afterwards would break transformers' huggingface-hub pin.
# torchvision comes with streaming and, beside a CPU build of torch, is a CUDA build that fails on import: taken out.
$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "error: Python 3.11 or 3.12 is needed (apt-get install python3.11)" >&2; exit 2; }
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) lacks the venv module (apt-get install python3-venv)" >&2; exit 2; }
	echo "setup: installing the pinned dependencies into .venv (about 4 minutes)"
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -qq --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip uninstall -qq --yes torchvision
	touch $(STAMP)

pretrain: $(STAMP)  ## the main job: text → tokenizer → shards → training → evaluation → report (about 10 minutes)
	@$(BIN)/python -m data_prep pack --config configs/corpus/stdlib.yaml --out data/stdlib
	$(BIN)/python launch/pretrain.py config=tiny_sb run_dir=$(RUN) $(PROCESSES)
	$(BIN)/python launch/evaluate.py checkpoint=$(RUN) tasks=cloze
	$(BIN)/python launch/report.py $(RUN)

format:  ## rewrite the sources as ruff wants them
	@$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(STAMP)  ## formatting, lint, types, directions of imports
	@$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check  ## check and the CPU tests (about 15 minutes on 2 cores)
	@$(BIN)/python -m pytest

test-slow: $(STAMP)  ## the tests that take minutes
	@$(BIN)/python -m pytest -m slow

test-gpu: $(STAMP)  ## the tests that need a CUDA GPU
	@$(BIN)/python -m pytest -m gpu

test-triton: $(STAMP)  ## every kernel compiled for Hopper by the installed Triton and by 3.6 (downloads it); `make test` has the main ones
	@[ -d .venv/triton36 ] || $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target .venv/triton36 triton==3.6.0
	$(BIN)/python -m pytest tests/kernels -k compiles_for_hopper -m ""
	export PYTHONPATH=$(CURDIR)/.venv/triton36 TRITON_CACHE_DIR=$$(mktemp -d)
	$(BIN)/python -c 'import triton; assert triton.__version__ == "3.6.0", triton.__file__'
	$(BIN)/python -m pytest tests/kernels -k compiles_for_hopper -m ""

test-slurm: $(STAMP)  ## the tests on a real two-node Slurm on this machine (installs Debian's packages; needs root)
	@command -v slurmctld >/dev/null || { [ $$(id -u) = 0 ] && command -v apt-get >/dev/null && timeout 120 apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq slurmctld slurmd slurm-client munge iproute2 >/dev/null; } || \
		echo "test-slurm: Slurm cannot be installed here (it needs root and apt-get): its tests are skipped"
	$(BIN)/python -m pytest tests/slurm -m slurm -k "$(SLURM_TESTS)"

.PHONY: help setup pretrain format check test test-slow test-gpu test-triton test-slurm
