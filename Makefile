# make demo    see it work          make test    all tests         make quick   units and properties: tests that start no process
# make bench   ratios to peers      make docs    pages and site    make lint    style, types, layers
# make chaos   kill -9, 1,200 times make dist    wheel and sdist   make clean   forget the virtual environment
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

# Tests start hundreds of processes. Each would compile all of Shoal again where the machine forbids Python to keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick chaos lint bench docs dist clean

# The environment is made once, and again when what it is made from changes. The stamp says which extras are in it.
.venv/core: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing shoal into .venv (once, a minute or two)…"
	@$(PIP) torch
	@$(PIP) --editable .
	@touch $@

.venv/dev: .venv/core
	@echo "installing what tests need into .venv (once)…"
	@$(PIP) --editable '.[classroom,deepspeed,discovery,hf,privacy,rlhf,serve,tensorboard,wandb,dev]'
	@touch $@

demo: .venv/core
	@$(BIN)/shoal demo

test: .venv/dev
	@$(BIN)/python -m pytest -n 4 --dist worksteal -m "not long" tests  # more than two cores: a third of the time they wait for processes

quick: .venv/dev
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not whole and not long" tests

chaos: .venv/dev
	@$(BIN)/python -m pytest -q -m long tests
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
	@$(BIN)/python docs/site.py

# A wheel and a source distribution, which install in an empty environment and run the demo.
dist: .venv/core
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt build
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist . >.venv/dist.log 2>&1 || { cat .venv/dist.log; exit 1; }
	@ls dist

clean:
	rm -rf .venv
