PYTHON_RUN := .venv/bin/python
PYTEST := OMP_NUM_THREADS=1 $(PYTHON_RUN) -m pytest
# Of the cores that this process may use; `auto` would count all of the machine's.
WORKERS := $(shell cores=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$((cores < 8 ? cores : 8)))
# A file's tests share what they set up. The distributed tests use several processes by themselves.
UNIT := $(PYTEST) tests/unit -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick test-full test-versions test-engine lint format support-table clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: ## build .venv with pinned versions (PYTHON=... chooses the interpreter)
	@PYTHON="$(PYTHON)" tools/setup.sh

demo: setup ## train a small GPT on this machine's CPUs under several schedules
	$(PYTHON_RUN) tools/demo.py

test: setup ## unit tests, and the pairwise part of the distributed tests
	$(UNIT) -m "not slow"
	$(PYTEST) -m "not slow" --durations 15 --ignore tests/unit

test-quick: setup ## unit tests only
	$(UNIT) -m "not slow"

test-full: setup ## every test
	$(UNIT)
	$(PYTEST) --ignore tests/unit

test-versions: setup ## what touches Megatron, against each supported version of it
	$(PYTHON_RUN) tools/test_versions.py

test-engine: setup ## layers of Transformer Engine over its real Python, from PyPI, on CPUs
	$(PYTHON_RUN) tools/test_transformer_engine.py

lint: setup ## formatting, lint, types; shell scripts and Dockerfile
	$(PYTHON_RUN) -m ruff format --check .
	$(PYTHON_RUN) -m ruff check .
	$(PYTHON_RUN) -m mypy
	$(PYTHON_RUN) tools/support_table.py --check
	.venv/bin/shellcheck --external-sources .ci/run tools/*.sh examples/*/*.sh
	.venv/bin/hadolint --failure-threshold style Dockerfile

support-table: setup ## write docs/support.md, from the tests' registry
	$(PYTHON_RUN) tools/support_table.py

format: setup ## reformat, and mend what lint can mend
	$(PYTHON_RUN) -m ruff format .
	$(PYTHON_RUN) -m ruff check --fix .

clean: ## remove caches and outputs (not .venv)
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
