# make demo    see it work          make test    all tests         make lint    style, types, layers
# make bench   ratios to peers      make docs    generated pages   make clean   forget the virtual environment
# make chaos   kill -9, 200 times
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: demo test chaos lint bench docs clean

# The environment is made once, and again when what it is made from changes. The stamp says which extras are in it.
.venv/core: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing shoal into .venv (once, a minute or two)…"
	@$(PIP) torch
	@$(PIP) --editable .
	@touch $@

.venv/dev: .venv/core
	@echo "installing what tests need into .venv (once)…"
	@$(PIP) --editable '.[classroom,deepspeed,hf,privacy,tensorboard,wandb,dev]'
	@touch $@

demo: .venv/core
	@$(BIN)/shoal demo

test: .venv/dev
	@$(BIN)/python -m pytest -n 2 tests

chaos: .venv/dev
	@$(BIN)/python -m pytest -q -s tests/chaos

lint: .venv/dev
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo >.venv/imports.log 2>&1 || { cat .venv/imports.log; exit 1; }

bench: .venv/dev
	@$(BIN)/python benchmarks/run.py $(BENCH)

docs: .venv/dev
	@$(BIN)/python docs/generate.py

clean:
	rm -rf .venv
