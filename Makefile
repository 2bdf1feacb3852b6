# openforge-rl: `make demo` and `make test` need nothing done before.
#   TORCH_INDEX=URL   where pip finds torch (PyTorch's own CPU or CUDA index); empty: pip's default
#   PRESET=name       size of `make demo` (default: `demo`, or `small` where the processor has no bf16 units)
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.openforge-setup
TORCH_INDEX ?=
PRESET ?=
PYTEST_ARGS ?=
NIGHTLY := vllm or conformance or chaos or attacks

.PHONY: setup demo test check up bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt deploy/setup.sh
	@VENV=$(VENV) TORCH_INDEX="$(TORCH_INDEX)" bash deploy/setup.sh
	@touch $(STAMP)

demo: setup
	@$(BIN)/openforge demo $(if $(PRESET),--preset $(PRESET))

test: setup
	@$(BIN)/python -m pytest -m "not ($(NIGHTLY))" $(PYTEST_ARGS)

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
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
