# Every command builds .venv first if it is missing or older than what it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
SEED ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-cluster test test-all test-hosts coverage soak check format docs bench clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rayvec needs Python 3.11 or newer; pass another one: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

.venv: $(STAMP) ## Build the virtual environment from the tested versions
	@:

demo: $(STAMP) ## Train PPO on CartPole-v1 from nothing to a judged agent (SEED=1)
	$(BIN)/rayvec train ppo --env-id CartPole-v1 --seed $(SEED)

demo-cluster: $(STAMP) ## The same on two simulated nodes of Ray, decentralized
	$(BIN)/python examples/cluster_cartpole.py

test: $(STAMP) ## Run the tests, in minutes, in two processes
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(STAMP) ## Run the slow tests too, before a release, in two processes
	$(BIN)/python -m pytest --all -n 2 --dist loadfile

test-hosts: $(STAMP) ## Run the tests on a cluster of hosts in network namespaces (needs root)
	RAYVEC_TEST_HOSTS=all $(BIN)/python -m pytest --all -rsP tests/hosts -n 2 --dist loadfile

coverage: $(STAMP) ## Run the tests and print which lines they reach, in workers too
	rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m pytest -n 2 --dist loadfile
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --skip-covered

soak: $(STAMP) ## Ten minutes of random faults, every transition checked (MINUTES=10)
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(or $(MINUTES),10)

check: $(DOCS_STAMP) ## Lint, formatting, types, layout, the examples in docstrings, and the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict rayvec
	$(BIN)/python -m pytest --doctest-modules rayvec tests/test_layout.py
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

format: $(STAMP) ## Put the code into the form that check asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_STAMP) ## Build the documentation into docs/_build
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo "open docs/_build/index.html"

bench: $(STAMP) ## Run the benchmark suites, with figures in runs/bench-pieces.json
	@mkdir -p runs
	$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-only --benchmark-json=runs/bench-pieces.json

clean: ## Remove the virtual environment, builds and caches, never runs/
	rm -rf $(VENV) build dist docs/_build docs/generated *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
