# openforge-rl: `make demo` and `make test` need nothing done before.
#   TORCH_INDEX=URL   where pip finds torch (PyTorch's own CPU or CUDA index); empty: pip's default
#                     `make vllm-env` needs PyTorch's CPU build: https://download.pytorch.org/whl/cpu
#   WORKERS=n         processes of `make test` (default 2; most tests wait for other processes)
#   PRESET=name       size of `make demo` (default: `demo`, or `small` where the processor has no bf16 units)
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.openforge-setup
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.openforge-setup
TORCH_INDEX ?=
PRESET ?=
PYTEST_ARGS ?=
WORKERS ?= 2
NIGHTLY := vllm or conformance or chaos or attacks

.PHONY: setup vllm-env demo test check up bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt deploy/setup.sh
	@VENV=$(VENV) TORCH_INDEX="$(TORCH_INDEX)" bash deploy/setup.sh
	@touch $(STAMP)

# vLLM never shares an environment with Prefect: their fastapi pins exclude each other. pip also brings torchvision,
# torchaudio and torchcodec for CUDA, which vLLM would load in vain.
vllm-env: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt $(STAMP)
	@$(BIN)/python -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet 'pip>=25.1'
	@$(VLLM)/bin/python -m pip install --quiet -c constraints-vllm.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --group vllm
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM_STAMP)

demo: setup
	@$(BIN)/openforge demo $(if $(PRESET),--preset $(PRESET))

test: setup
	@$(BIN)/python -m pytest -n $(WORKERS) -m "not ($(NIGHTLY))" $(PYTEST_ARGS)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

up: setup
	@$(BIN)/openforge up

bench: setup
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

clean:
	rm -rf $(VENV) $(VLLM) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
