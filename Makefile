# make demo     the first result: what a 4B model needs at 131,072 tokens (a few minutes once, for the installation)
# make check    while you work: the linters, and the tests that take a minute (tests/conftest.py has which)
# make test     everything that CI checks: the same with all tests but those of the night
# make nightly  what make test leaves out: 2,300 adversarial inputs (docs/security.md), long stories, more programs and examples
# make lint     the same without tests;  make format  mends what ruff can
# make docs     regenerates docs/cli.md, and the outputs and figures shown in README.md and docs/
# make site     builds the documentation as a site into build/site
# make accuracy the published figures beside simulated ones, row by row, into docs/accuracy-tables.md (minutes)
# make truth    on a machine with a GPU: records tests/accuracy/cases there, and compares their simulation
# make gpu      on a machine with a GPU: all that ten minutes there can measure, into out/ (tests/gpu); on any other machine
#               GPU_DAY_DEVICE=cpu make gpu tries its logic
# make bench    how fast the simulation and the allocator's replay are
# make mutants  how many one-token changes to PART (ledger, or units.py) its unit tests, TESTS, find; for some minutes
# make matrix   before a release: tests with other releases of torch and transformers, into docs/releases.md (half an hour)
# make clean    removes .venv and caches
#
# PYTHON=python3.12 make demo  uses another interpreter than python3.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A worker that ends within a test (pyproject.toml, faulthandler_timeout) would be given the same test again.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadscope --no-loadscope-reorder --max-worker-restart 0
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The tests start hundreds of processes: without byte code on disk, each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := demo
.PHONY: demo check quick-tests test day-tests nightly lint format docs site accuracy truth gpu bench mutants matrix clean

# Exit code 3 is the verdict "does not fit", which is the true answer here; any other failure is one.
demo: $(VENV)/.stamp
	@$(BIN)/memprof run --gpu rtx-4090 docs/train.py || test $$? -eq 3

# Linters beside the tests: mypy takes half a minute of one processor where it has no cache.
check: $(VENV)/.stamp-dev
	@$(MAKE) --no-print-directory -j2 lint quick-tests

quick-tests: $(VENV)/.stamp-dev
	$(PYTEST) --lane check

test: $(VENV)/.stamp-dev
	@$(MAKE) --no-print-directory -j2 lint day-tests

day-tests: $(VENV)/.stamp-dev
	$(PYTEST)

nightly: $(VENV)/.stamp-nightly
	$(PYTEST) --lane nightly -m "nightly or hypothesis"

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.stamp-dev
	$(BIN)/python -m docs.generate
	$(BIN)/python -m docs.pictures

site: $(VENV)/.stamp-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

accuracy: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.benchmarks.accuracy --write

truth: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.accuracy.truth

# A machine that is lent for this has no network, and torch without an environment: then PYTHON is taken as it is.
gpu:
	@if test -z "$$GPU_DAY_PYTHON" && ! test -x $(BIN)/python && ! $(PYTHON) -c 'import torch, transformers' 2>/dev/null; then \
	  $(MAKE) --no-print-directory $(VENV)/.stamp-dev; \
	fi && \
	if test -x $(BIN)/python; then at_hand=$(BIN)/python; else at_hand=$(PYTHON); fi && \
	exec "$${GPU_DAY_PYTHON:-$$at_hand}" -m tests.gpu

bench: $(VENV)/.stamp
	$(BIN)/python -m tests.benchmarks.commands
	$(BIN)/python -m tests.benchmarks.overhead
	$(BIN)/python -m tests.benchmarks.findings
	$(BIN)/python -m tests.benchmarks.replay
	$(BIN)/python -m tests.benchmarks.growth --repeat 1

PART := ledger
TESTS := tests/unit/$(basename $(PART))

# mutmut changes a copy, and reads its settings from there. It forks, which more threads of torch do not survive.
mutants: $(VENV)/.stamp-dev
	@test -e memprof/$(PART) && test -e $(TESTS) || \
	  { echo "no memprof/$(PART) with tests in $(TESTS): make mutants PART=units.py TESTS=tests/unit/test_units.py" >&2; exit 1; }
	@$(PIP) install -q -c constraints.txt mutmut
	@rm -rf build/mutants && mkdir -p build/mutants
	@cp -r memprof tests docs pyproject.toml README.md CONTRIBUTING.md build/mutants
	@sed -i -e 's|^only_mutate = .*|only_mutate = ["memprof/$(PART)$(if $(filter %.py,$(PART)),,/*)"]|' \
	  -e 's|test_selection = .*|test_selection = ["$(TESTS)"]|' build/mutants/pyproject.toml
	@cd build/mutants && OMP_NUM_THREADS=1 PYTHONPATH=. $(abspath $(BIN))/mutmut run --max-children 2; $(abspath $(BIN))/mutmut results

matrix: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.benchmarks.releases

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up runs once, and again when what is to be installed has changed.
$(VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "memprof needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "no virtual environment could be made: on Debian or Ubuntu, install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@echo "Installing memprof and what it needs, PyTorch among it, into $(VENV): a few minutes, once."
	@$(PIP) install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp
	@echo "Installing what the tests and linters need into $(VENV), once."
	@$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.stamp-nightly: $(VENV)/.stamp-dev
	@echo "Installing what only the tests of the night need into $(VENV), once."
	@$(PIP) install -q -c constraints.txt -e '.[nightly]'
	@touch $@
