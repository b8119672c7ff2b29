# Every target works in a fresh clone on a machine with Python 3.10 or newer: the first one that is run creates .venv
# and installs into it; `make clean` removes it.

PYTHON ?= python3
VENV := .venv
PART ?= 0/1
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PIP := $(RUN) -m pip --disable-pip-version-check -qq install -c constraints.txt

.PHONY: demo test rest wheel lint types bench faults docs clean
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	$(RUN) examples/demo.py

# Two processes with one thread each; tests that share a trace run in the same one (tests/conftest.py). `test` runs a
# sample of tests with many cases, `rest` the other cases, or PART=k/n of them. Compiled files are kept even where the
# environment switches that off: without them, every process compiles the package and the rewritten tests again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test: $(INSTALLED)
	$(PYTEST) --cases sample

rest: $(INSTALLED)
	$(PYTEST) --cases rest --part $(PART)

# build the wheel, install it outside the checkout, and run it there
wheel: $(INSTALLED)
	$(RUN) -m tests.wheel_check

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(MAKE) --no-print-directory types

# The installed package has passes/ and cost_models/ inside autoptd/; links give mypy a folder of that layout.
TYPED := $(VENV)/typed
types: $(INSTALLED)
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/autoptd
	@ln -s $(CURDIR)/autoptd/* $(CURDIR)/passes $(CURDIR)/cost_models $(TYPED)/autoptd/
	cd $(TYPED) && $(CURDIR)/$(RUN) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p autoptd

bench: $(INSTALLED)
	$(RUN) -m benchmarks

# run the tests that plant silent faults, and rewrite the page about them
faults: $(INSTALLED)
	$(RUN) -m tests.faults --write

# build the documentation as a site, for which the generator is installed
docs: $(VENV)/.docs
	$(RUN) -m docs.generator site

clean:
	rm -rf $(VENV) site

# torch is installed first and alone, so that pip picks its preferred build before other packages require torch.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "autoptd needs Python 3.10 or newer; there is no $(PYTHON) here" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 10) and sys.exit("autoptd needs Python 3.10 or newer; $(PYTHON) is %d.%d: run make PYTHON=python3.x" % v[:2])'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), once (some minutes)"
	@$(PIP) torch
	@$(PIP) -e '.[hf,dev]'
	@touch $@

$(VENV)/.docs: $(INSTALLED)
	@$(PIP) -e '.[docs]'
	@touch $@
