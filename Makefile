# What a clone needs, with nothing but Python and make: `make` lists it.
# Everything is installed into .venv, which `make clean` removes.

PYTHON ?= python3

VENV = .venv
RUN = $(VENV)/bin/python -m
# Two workers that take whole files, in the order of tests/conftest.py.
SHARED = --numprocesses 2 --dist loadfile --no-loadscope-reorder
# Written last: where it is missing, a set-up was interrupted, and the next begins anew.
READY = $(VENV)/.ready

.PHONY: help train test drill fuzz audit bench bench-setup lint format clean

help: ## list the targets
	@echo 'usage: make TARGET [PYTHON=python3.12] [ARGS="--steps 100"]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' Makefile

train: $(READY) ## train the default experiment; ARGS are its options
	$(RUN) spmdtrain.run --config experiments/digits_mlp.py $(ARGS)

test: lint ## lint, types and tests
	$(RUN) pytest $(SHARED) -m 'not slow and not drill'

drill: $(READY) ## longer matrices, and what happens when processes fail
	$(RUN) pytest $(SHARED) -m 'slow and not drill'
	$(RUN) pytest -m drill

fuzz: $(READY) ## damaged and forged input for ten minutes; FUZZ_SECONDS=3600 for longer
	FUZZ_SECONDS=$${FUZZ_SECONDS:-600} FUZZ_SEED=$${FUZZ_SEED:-$$(date +%s)} \
	  $(RUN) pytest tests/test_fuzz.py -m drill -s

audit: ## known vulnerabilities of the versions in requirements.lock; needs a network
	PYTHON=$(PYTHON) .ci/audit

bench: $(READY) ## compare with what else one could take; BENCH_FLAGS=--quick for 3 minutes
	$(VENV)/bin/python benchmarks/bench.py $(BENCH_FLAGS)

bench-setup: ## the environments of the benchmark's other frameworks, in .bench
	$(PYTHON) -m venv .bench/torch
	.bench/torch/bin/python -m pip install --quiet torch lightning numpy
	$(PYTHON) -m venv .bench/tensorflow
	.bench/tensorflow/bin/python -m pip install --quiet tensorflow numpy

lint: $(READY) ## check style, format and types
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: $(READY) ## mend style and format where that can be done safely
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'error: "$(PYTHON)" is not Python 3.11 or newer; name one that is: make PYTHON=python3.12 ...' >&2; \
	  exit 1; }
	@echo 'installing into $(VENV) ...'
	@test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	@$(RUN) pip install --quiet --disable-pip-version-check --editable '.[dev,examples,tpu,ps]'
	@touch $@
