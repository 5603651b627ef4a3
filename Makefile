# From a clean clone: `make serve` runs the server, `make test` checks everything.
#
#   make serve ARGS="--port 9000"     flags for adaflash serve
#   make setup PYTHON=python3.12      another interpreter (3.11 or newer)

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# The rooms must not be importable by their bare names (docs/decisions/001).
export PYTHONSAFEPATH := 1

.PHONY: help serve setup test check bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s%s\n", $$1, $$2}' Makefile

serve: setup  ## set up, fetch the default model and serve it on 127.0.0.1:8000
	$(BIN)/adaflash serve $(ARGS)

setup: $(VENV)/.installed  ## make .venv with the server and its pinned dependencies

test: check  ## lint, type-check and test
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed-dev  ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## measure step times and tokens per second on this machine
	$(BIN)/python bench/step_time.py
	$(BIN)/python bench/concurrency.py

clean:  ## remove the environment, caches and build outputs
	rm -rf $(VENV) build dist src/adaflash.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .schemathesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are as new as the pyproject.toml and constraints.txt the environment was made from.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing AdaFlash into $(VENV) (the first time takes a minute or two)"
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing AdaFlash and its tools into $(VENV)"
	$(INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "AdaFlash needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
