# Two commands: `make pretrain` (the main job on real text) and `make test`. Each sets up .venv by itself.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
PROCESSES ?= 2
BIN := .venv/bin
STAMP := .venv/installed

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## create .venv with the pinned dependencies

# One resolution for everything: lm-eval installed afterwards would break transformers' huggingface-hub pin.
# torchvision comes with streaming and, beside a CPU build of torch, is a CUDA build that fails on import: taken out.
$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "error: Python 3.11 or 3.12 is needed (apt-get install python3.11)" >&2; exit 2; }
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) lacks the venv module (apt-get install python3-venv)" >&2; exit 2; }
	command -v c++ >/dev/null || { echo "error: a C++ compiler is needed: DeepSpeed builds its gloo helper at the first start (apt-get install g++)" >&2; exit 2; }
	[ -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || { echo "error: Python.h is missing: DeepSpeed builds its gloo helper at the first start (apt-get install python3-dev)" >&2; exit 2; }
	echo "setup: installing the pinned dependencies into .venv (about 4 minutes)"
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -qq --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip uninstall -qq --yes torchvision
	touch $(STAMP)

.PHONY: help setup
