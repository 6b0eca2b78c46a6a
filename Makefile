# `make train` and `make test` set up what they need; nothing but Python and make is asked for.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help setup train test fast-tests test-slow test-gpu coverage lint docs bench wheel try-wheel check-release clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: $(READY) ## create .venv with everything the project needs

# JAX=VERSION tests another one than pip chooses; `lowest` takes the lowest of everything that pyproject.toml allows.
JAX     ?=
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --constraint constraints.txt -e '.[example,plot,test]' $(if $(filter-out lowest newest,$(JAX)),'jax==$(JAX)')
	$(if $(filter lowest,$(JAX)),$(INSTALL) $$($(BIN)/python -m tests.support.lowest_versions))
	@touch $@

train: $(READY) ## train the pipelined transformer on real text: two to three minutes
	$(BIN)/python -m examples.pipelined_transformer.main $(ARGS)

test: $(READY) ## what to run before each commit: lint, and beside it the tests that are not slow
	@$(MAKE) --no-print-directory -j 2 lint fast-tests

fast-tests: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-slow: $(READY) ## the long property tests too
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# Triton is kept beside the environment, where only these tests find it.
TRITON := $(VENV)/triton
CHECKED := tests/unit/compile/backends tests/unit/compile/kernels tests/property/test_native_hlo.py \
	tests/property/test_reference_hlo.py tests/differential/test_reference.py

test-gpu: $(READY) $(TRITON)/.ready ## what can be tested of the GPU target on a CPU: 300 MB to download, a few minutes
	PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -n 2 tests/unit/compile/backends/native_gpu \
		tests/differential/test_gpu_launches.py tests/differential/test_gpu_meshes.py \
		tests/property/test_gpu_hlo.py tests/benchmarks/gpu $(ARGS)
	PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -m "not slow" -p tests.support.every_plan_in_triton $(CHECKED) $(ARGS)

$(TRITON)/.ready: pyproject.toml
	$(INSTALL) --no-deps --upgrade --target $(TRITON) 'triton>=3.6,<3.10'
	@touch $@

coverage: $(READY) ## which lines the fast tests run, in out/coverage
	$(INSTALL) --constraint constraints.txt pytest-cov
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --cov --cov-report=html --cov-report=term $(ARGS)

lint: $(READY) ## style, types, layers; what `pre-commit` runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/lint-imports
	$(BIN)/mypy

docs: $(VENV)/.docs-ready ## the site in out/site, whose notebooks run; the pages that are made from docstrings
	$(BIN)/python -m mpmd.tools.docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs out/site

$(VENV)/.docs-ready: $(READY)
	$(INSTALL) --constraint constraints.txt -e '.[docs]'
	@touch $@

bench: $(READY) ## all benchmarks, in a new file of benchmarks/results: at most 15 minutes on two idle cores
	$(BIN)/python benchmarks/suite.py $(ARGS)

wheel: $(READY) ## what is uploaded, in out/dist
	$(BIN)/python -m build --outdir out/dist
	$(BIN)/python -m twine check --strict out/dist/*

CLEAN := out/clean

try-wheel: wheel ## the wheel in a clean environment: imported, its commands, the program of README
	rm -rf $(CLEAN) && $(PYTHON) -m venv $(CLEAN)
	$(CLEAN)/bin/python -m pip install --quiet --disable-pip-version-check out/dist/*.whl
	awk '/^```python/ {on = 1; next} /^```/ {on = 0} on' README.md > $(CLEAN)/readme.py
	cd $(CLEAN) && bin/python readme.py && bin/mpmd-run --help > help.txt && bin/mpmd-schedule --version

TAG ?=

check-release: $(READY) ## whether version, changelog and citation are those of TAG=v1.2.3
	$(BIN)/python -m tests.support.release $(TAG)

clean: ## remove what the targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache out *.egg-info
