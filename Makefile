# Every target does its own set-up: a machine needs only Python 3.11 or later, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# The tests start hundreds of processes: write bytecode, so that they need not compile what they import.
COMPILED := env -u PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint bench torture sim docs clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# `--without-pip`: Debian keeps ensurepip in a package of its own, and the pip that is there can install from outside.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fencelock needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv --without-pip --clear $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --editable '.[dev,bench]'
	@touch $(STAMP)

demo:  ## ten seconds: a lock fails, the fence protects the data (needs only Python)
	@PYTHONPATH=src $(PYTHON) demo/story.py

test: $(STAMP)  ## all tests but those marked long, on real engines that they start themselves
	$(COMPILED) $(BIN)/python -m pytest --numprocesses 8 --dist loadgroup $(ARGS)

lint: $(STAMP)  ## ruff and strict mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## speed, compared with bare commands and other packages
	$(BIN)/python -m bench $(ARGS)

sim: $(STAMP)  ## many more seeds in the simulator (ARGS="--primitive multi --seeds 200000")
	$(BIN)/python -m fencelock.sim $(ARGS)

docs: $(STAMP)  ## docs/api.md from the docstrings, and the --help texts in docs/cli.md
	$(BIN)/python -m scripts.api_page
	$(BIN)/python -m scripts.cli_page

torture: $(STAMP)  ## minutes of killed and stopped processes (ARGS="--seconds 600")
	$(BIN)/python -m tests.torture $(ARGS)
	$(BIN)/python -m fencelock.sim --engine redis --seeds 10000
	$(BIN)/python -m fencelock.sim --engine redlock --seeds 10000
	$(BIN)/python -m pytest --numprocesses 4 --dist loadgroup -m long
	FENCELOCK_VARIANTS=1 $(BIN)/python -m pytest --numprocesses 4 --dist loadgroup tests/contract -k 'mysql_innodb or oldest_redis'
	$(BIN)/python -m tests.fences.increments

clean:  ## remove the virtual environment and the unpacked servers
	rm -rf $(VENV) .engines .pytest_cache .mypy_cache .ruff_cache
