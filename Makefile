# `make demo` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test lint fmt bench demo-model clean
setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $(STAMP)

demo: setup
	$(BIN)/kvreclaim demo --json demo_out/demo.json

test: setup
	$(BIN)/pytest -n auto

lint: setup
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup
	$(BIN)/ruff check --fix src tests scripts
	$(BIN)/ruff format src tests scripts

bench: setup
	$(BIN)/kvreclaim bench blocks

demo-model: setup
	$(BIN)/python scripts/train_demo_model.py
	$(BIN)/python scripts/calibrate_demo_model.py

clean:
	rm -rf .venv build demo_out src/*.egg-info
