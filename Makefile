# Everything runs in a virtual environment of its own, .venv, made on first use and again when its inputs change.
# PYTHON chooses the interpreter (3.11 or newer); pip's own settings (cache, index) apply as usual.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt

# Tests wait more than they compute (for programs to start, leases to run out, jobs to come again): several run at a
# time, each process of pytest with servers of its own. The tests of a file stay together, as they share what they start.
# The cells of the fault matrix are many and alike; fewer at a time, as a lease's time is what they hold parts to.
JOBS  ?= 3
CELLS ?= 2
SPLIT := -n $(JOBS) --dist loadfile --no-loadscope-reorder
DEAL  := -n $(CELLS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo up lint unit faults model soak test schemas clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Start a small system, send it requests, show what happened, stop it
	$(BIN)/pdq demo $(ARGS)

up: $(READY) ## Start a system and keep it running until Ctrl-C
	$(BIN)/pdq up $(ARGS)

lint: $(READY) ## Style, types, and which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(READY) ## Tests that need no model
	$(BIN)/pytest $(SPLIT) -m "not model and not gpu and not perf and not faults"

faults: $(READY) ## The fault matrix: every part hurt at every step of a request's life (minutes)
	$(BIN)/pytest $(DEAL) -m faults tests/faults

soak: $(READY) ## Ten minutes of load while every part dies now and then (MINUTES=10)
	$(BIN)/python -m tests.faults.soak --minutes $(or $(MINUTES),10)

model: $(READY) ## Tests with the real default model (93 MB, fetched and converted once)
	$(BIN)/pytest -m "model and not gpu and not perf"

test: lint unit faults model ## All checks, as CI runs them

schemas: $(READY) ## Write schemas/ and docs/states.md anew from the types and rules
	$(BIN)/pdq schemas --write
	$(BIN)/pdq states --write

clean: ## Remove the environment, caches and local state
	rm -rf $(VENV) .pdq build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# PyTorch first and by its exact version: left to a range, pip may take another build of it. The build backends (ours, and that of
# nkeys, which has no wheel) come from the constraints too, instead of from an isolated environment that resolves one of its own.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdq needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)" hatchling editables setuptools
	$(PIP) --no-build-isolation --editable '.[embedded,torch,dev]'
	touch $@
