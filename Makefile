# Development tasks; `make` lists them. They need Python and make.
# Everything is installed into .venv, which `make clean` removes.

PYTHON ?= python3
# Constraints for pip: LOCK=requirements.lock installs the tested versions, as CI does.
LOCK ?=

VENV = .venv
RUN = $(VENV)/bin/python -m
# For two cores: many tests wait for processes, so there are four workers, and five for the drills,
# which wait most. An idle worker takes over tests of another.
SHARED = --dist worksteal --durations 20
WORKERS = --numprocesses 4
# Stamps, written after a completed installation: for training alone, and for everything.
TRAIN = $(VENV)/.ready-train
READY = $(VENV)/.ready

# Without bytecode files, each of the hundreds of processes of the tests would compile JAX, the package
# and their other modules again: 3.6 s of CPU time until the first step instead of 1.4.
unexport PYTHONDONTWRITEBYTECODE

# With -j, two installations would write to .venv at the same time.
.NOTPARALLEL:
.PHONY: help train test unit integration drill nightly docs fuzz audit bench bench-setup lint format clean

help: ## list the targets
	@echo 'usage: make TARGET [PYTHON=python3.12] [LOCK=requirements.lock] [ARGS="--steps 100"]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' Makefile

train: $(TRAIN) ## train the default experiment; ARGS are its options
	$(RUN) spmdtrain.run --config experiments/digits_mlp.py $(ARGS)

test: lint unit ## lint, types, unit tests, and a quick test of each invariant

unit: $(READY) ## the tests of `make test`, without lint and types
	$(RUN) pytest tests/unit $(WORKERS) $(SHARED) -m 'not slow and not drill and not nightly'

integration: $(READY) ## the shipped experiments and commands, and slow unit tests
	$(RUN) pytest $(WORKERS) $(SHARED) -m 'slow and not drill and not nightly'

drill: $(READY) ## several processes, killed, stopped and restarted
	$(RUN) pytest --numprocesses 5 $(SHARED) -m 'drill and not nightly'

nightly: $(READY) ## further cases and longer runs of what the other tests show
	$(RUN) pytest $(WORKERS) $(SHARED) -m nightly

docs: $(READY) ## the site of the documentation, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build

fuzz: $(READY) ## corrupted and forged input for ten minutes; FUZZ_SECONDS=3600 for longer
	FUZZ_SECONDS=$${FUZZ_SECONDS:-600} FUZZ_SEED=$${FUZZ_SEED:-$$(date +%s)} \
	  $(RUN) pytest tests/drills/test_fuzz.py -m drill -s

audit: ## known vulnerabilities of the versions in requirements.lock; needs a network
	PYTHON=$(PYTHON) .ci/audit

bench: $(READY) ## compare with other frameworks; BENCH_FLAGS=--quick for 3 minutes
	$(VENV)/bin/python benchmarks/bench.py $(BENCH_FLAGS)

bench-setup: ## the environments of the benchmark's other frameworks, in .bench
	$(PYTHON) -m venv .bench/torch
	.bench/torch/bin/python -m pip install --quiet torch lightning numpy pyarrow array_record
	$(PYTHON) -m venv .bench/tensorflow
	.bench/tensorflow/bin/python -m pip install --quiet tensorflow numpy pyarrow array_record

lint: $(READY) ## check style, format and types
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy --num-workers 2
# Apart, because there is a benchmarks/compare.py, too.
	MYPYPATH=tests:tests/integration $(RUN) mypy --scripts-are-modules .ci/compare

format: $(READY) ## apply automatic fixes of style and format
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installs the package with EXTRAS. The stamp is written last, and without a stamp .venv is created
# from scratch, so an interrupted installation is never reused.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'error: "$(PYTHON)" is not Python 3.11 or newer; give one: make PYTHON=python3.12 ...' >&2; \
	  exit 1; }
	@echo 'installing into $(VENV) ...'
	@test -e $(TRAIN) -o -e $(READY) || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(TRAIN) $(READY)
	@$(RUN) pip install --quiet --no-compile --disable-pip-version-check $(addprefix --constraint ,$(LOCK)) --editable '.[$(EXTRAS)]'
endef

$(TRAIN): EXTRAS = examples
$(TRAIN): pyproject.toml Makefile
	$(install)
	@touch $@

# libtpu and Ray (1.1 GB) are only needed here.
$(READY): EXTRAS = dev,examples,tpu,ps
$(READY): pyproject.toml Makefile
	$(install)
	@touch $(TRAIN) $(READY)
