# `make train` and `make test` set up what they need; nothing but Python and make is asked for.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help setup train test fast-tests test-slow lint docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: $(READY) ## create .venv with everything the project needs

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[example,plot,test]'
	@touch $@

train: $(READY) ## train the pipelined transformer on real text: two to three minutes
	$(BIN)/python -m examples.pipelined_transformer.main $(ARGS)

test: $(READY) ## what to run before each commit: lint, and beside it the tests that are not slow
	@$(MAKE) --no-print-directory -j 2 lint fast-tests

fast-tests: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-slow: $(READY) ## the long property tests too
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(READY) ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

docs: $(READY) ## regenerate docs/passes.md, docs/hlo_passes.md and docs/flags.md
	$(BIN)/python -m mpmd.tools.docs

clean: ## remove what the targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache out *.egg-info
