# Each target sets up what is missing first (scripts/env.sh); a second run takes seconds.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help env demo test test-fast test-server lint format wheel clean

PYTHON := python=$$(scripts/env.sh); "$$python"
# Test processes at the same time. A server takes about 4 GB and, while it starts, a core.
WORKERS ?= 2

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## set up .venv: SGLang, this project, its test tools
	@scripts/env.sh

demo: ## serve the miniature GLM-5.3 here, talk to it, show what served (ARGS="--keep" ...)
	@$(PYTHON) -m sglang_glm53.cli demo $(ARGS)

test: test-fast test-server ## all tests that need no GPU

test-fast: ## tests that start no server
	@$(PYTHON) -m pytest tests -m "not server and not gpu" -n $(WORKERS) --dist worksteal $(ARGS)

test-server: ## tests against the real `sglang serve`
	@$(PYTHON) -m pytest tests -m "server and not gpu" -n $(WORKERS) --dist loadgroup $(ARGS)

lint: ## ruff: rules and format
	@$(PYTHON) -m ruff check . && "$$python" -m ruff format --check .

format: ## ruff: format, and fix what it can
	@$(PYTHON) -m ruff check --fix . && "$$python" -m ruff format .

wheel: ## build the wheel into dist/
	@$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## remove build outputs and caches; environments stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
