# Everything runs in .venv, which the first target that needs it creates. Needed beforehand: make and Python 3.11 or newer.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# One thread for each process: the tests and the notebooks run in parallel, and threads would fight over the cores.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1

# Real data, where they are at hand; every test and experiment also runs without.
ifneq ($(wildcard ../shared/data),)
export PULLBACK_DATA ?= $(realpath ../shared/data)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test lint format models bench docs clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */\1\t/' | expand -t 10

demo: .venv/.installed  ## draw the five toy latent spaces into out/
	$(BIN)/python -m pullback reproduce toy --out out

test: lint  ## lint, then run the test suite
	$(BIN)/python -m pytest -n 2
	@command -v chromium chromium-browser google-chrome >/dev/null || \
		echo "SKIPPED: Chromium is not installed, so the explorer's page was not tested. Install it: apt-get install chromium"

lint: .venv/.installed  ## style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/.installed  ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

models: .venv/.models  ## test with models of pythae, Lightning and diffusers, which it installs
	$(BIN)/python -m pytest tests/test_real_packages.py

bench: .venv/.bench  ## print the comparisons of benchmarks/
	$(BIN)/python benchmarks/appendix.py
	$(BIN)/python benchmarks/metric.py
	$(BIN)/python benchmarks/geodesics.py --problem vae --dims 2
	$(BIN)/python benchmarks/geodesics.py --problem toy --quick
	$(BIN)/python benchmarks/attacks.py

docs: .venv/.installed  ## build the documentation into docs/_build/html, running every snippet
	$(BIN)/python -m sphinx -W -E --keep-going -q -b html docs docs/_build/html

clean:  ## remove everything that make made
	rm -rf .venv out docs/_build docs/jupyter_execute .pytest_cache .ruff_cache .hypothesis

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e '.[dev]'
	touch $@

.venv/.bench: .venv/.installed
	$(PIP) -e '.[bench]'
	touch $@

.venv/.models: .venv/.installed
	$(PIP) -e '.[models]'
	touch $@
