# `make demo` and `make test` do everything, from a fresh clone on a machine with Python 3.10 or newer.
# Each makes .venv on its first run; `make clean` removes it.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PIP := $(RUN) -m pip --disable-pip-version-check -qq install -c constraints.txt

.PHONY: demo test rest wheel lint types bench faults clean
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	$(RUN) examples/demo.py

# Two processes, one thread each; what shares a trace runs in one of them (tests/conftest.py). Of long grids `test` runs
# a sample, and `rest` the other cases.
# Compiled files are kept, wherever that is switched off: without them the tests are rewritten, and the package compiled,
# by every process anew.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test: $(INSTALLED)
	$(PYTEST) --cases sample

rest: $(INSTALLED)
	$(PYTEST) --cases rest

# what people install: built, installed away from the checkout, and run there
wheel: $(INSTALLED)
	$(RUN) -m tests.wheel_check

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(MAKE) --no-print-directory types

# The package is autoptd/ with passes/ and cost_models/ in it; type checkers look for a folder of that form: links make one.
TYPED := $(VENV)/typed
types: $(INSTALLED)
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/autoptd
	@ln -s $(CURDIR)/autoptd/* $(CURDIR)/passes $(CURDIR)/cost_models $(TYPED)/autoptd/
	cd $(TYPED) && $(CURDIR)/$(RUN) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p autoptd

bench: $(INSTALLED)
	$(RUN) -m benchmarks

# the page of silent faults and the tests that plant them
faults: $(INSTALLED)
	$(RUN) -m tests.faults --write

clean:
	rm -rf $(VENV)

# torch first and alone: the build that this machine's pip prefers is settled before anything else asks for torch.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "autoptd needs Python 3.10 or newer; there is no $(PYTHON) here" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 10) and sys.exit("autoptd needs Python 3.10 or newer; $(PYTHON) is %d.%d: run make PYTHON=python3.x" % v[:2])'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), once (some minutes)"
	@$(PIP) torch
	@$(PIP) -e '.[hf,dev]'
	@touch $@
