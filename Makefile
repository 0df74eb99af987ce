# make install | serve | bench | test | search | soak | mutants | chaos | chaos-matrix | chaos-short | lint | docs | tidy | clean
#
# serve takes options of `baton up`:   make serve ARGS="--prefill 1 --decode 2"
# test takes options of pytest:        make test ARGS="-k lease"
# soak takes a number of seeds:        make soak SEEDS=20000
# mutants takes names of guards:       make mutants ARGS="emit-*" JOBS=2
# chaos takes minutes:                 make chaos MINUTES=30

PYTHON ?= python3
ARGS ?=
SEEDS ?= 2000
MINUTES ?= 5
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
TESTABLE := $(VENV)/.testable
PIP := $(PY) -m pip --disable-pip-version-check
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# A tree that was moved or copied has a .venv that points elsewhere: make it anew.
ifneq ($(wildcard $(VENV)),)
ifneq ($(shell cat $(VENV)/.where 2>/dev/null),$(CURDIR))
.PHONY: $(VENV)/.where
endif
endif

.PHONY: help install install-test serve bench test search soak mutants chaos chaos-matrix chaos-short lint docs tidy clean

help:
	@sed -n '1,7p' Makefile | sed 's/^# \{0,1\}//'

install: $(INSTALLED)
install-test: $(TESTABLE)

$(VENV)/.where:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "baton: Python 3.11 or newer is needed, and '$(PYTHON)' is not that: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "baton: '$(PYTHON)' cannot make virtual environments: install its venv package (Debian: python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null || { \
	  echo "baton: Paddle needs libgomp.so.1: install that library (Debian: libgomp1)" >&2; exit 1; }
	@echo "==> $(VENV): a virtual environment of $$($(PYTHON) --version)"
	@[ ! -e $@ ] || rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@echo '$(CURDIR)' > $@

$(INSTALLED): $(VENV)/.where pyproject.toml constraints.txt
	@echo "==> Installing Baton and Paddle for CPUs into $(VENV) (the first time: about 300 MB to download)"
	@$(PIP) install --progress-bar on -e '.[cpu]' -c constraints.txt
	@touch $@

$(TESTABLE): $(INSTALLED)
	@echo "==> Installing what the tests need"
	@$(PIP) install --quiet --progress-bar on -e '.[cpu,test]' -c constraints.txt
	@touch $@

serve: $(INSTALLED)
	@exec $(VENV)/bin/baton up $(ARGS)

# Two pytests: one drives real processes, the other computes beside it in what that leaves over. ARGS goes to both; with
# paths in ARGS it is one.
test: $(TESTABLE) lint
	@echo "==> Tests"
	@$(PY) -m tests.side_by_side -m "not matrix" $(ARGS)

# The larger searches: about three minutes. Ends with an error if one finds a violation or does not come to its end.
search: $(TESTABLE)
	@echo "==> Every interleaving of small clusters"
	@$(PY) -m tests.search $(ARGS)

# One process per core, or JOBS. Ends with an error if any seed breaks a promise; says how to replay it.
soak: $(TESTABLE)
	@echo "==> $(SEEDS) simulated clusters"
	@$(PY) -m tests.sim.soak --seeds $(SEEDS) --jobs $(or $(JOBS),0) $(ARGS)

mutants: $(TESTABLE)
	@echo "==> Guards taken away, one at a time"
	@$(PY) -m tests.mutants $(ARGS)

# Real processes, killed, frozen or cut off at random; ends with an error if a promise was broken.
chaos: $(TESTABLE)
	@echo "==> $(MINUTES) minutes of random faults"
	@$(PY) -m tests.chaos.soak --minutes $(MINUTES) $(ARGS)

chaos-matrix: $(TESTABLE)
	@echo "==> Each fault at each step"
	@$(PY) -m pytest tests/chaos tests/integration -m matrix $(ARGS)

chaos-short: $(TESTABLE)
	@echo "==> Some faults at some steps"
	@$(PY) -m pytest tests/chaos tests/integration -m short $(ARGS)

# Half an hour with all peers installed (see tests/bench/peers); without them their columns are left out, by name.
BENCHES := against_peers pipeline overhead handoff single_loop servers memory ledger
bench: $(TESTABLE)
	@for each in $(or $(ARGS),$(BENCHES)); do echo "==> $$each"; $(PY) -m tests.bench.$$each || exit 1; done

lint: $(TESTABLE)
	@echo "==> ruff, mypy, import rules, generated documentation"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports
	@$(PY) -m app.docs --check

docs: $(INSTALLED)
	@$(PY) -m app.docs

# What is installed works without all this.
tidy:
	@rm -rf *.egg-info build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis __pycache__
	@find app web workers tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean: tidy
	@rm -rf $(VENV)
