# make demo | test | test-full | check | clean.  The first call makes .venv and installs everything (about 5 minutes).
#
# The environment chooses where torch comes from: pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL,
# PIP_FIND_LINKS) are honoured. A plain `torch` on Linux may be the CUDA build (gigabytes): point them at CPU wheels.

SHELL := /bin/sh
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
KERNELS := $(shell find steppe -name '*.c')
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
export MPLCONFIGDIR := $(CURDIR)/build/matplotlib
export PYTHONUNBUFFERED := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-full check static clean install

demo: $(STAMP)
	@$(PY) -m examples.demo --out demo

test: $(STAMP)
	@echo "running the tests (about 15 minutes on 2 cores)"
	@$(PY) -m pytest -m "not slow" --durations=15

test-full: $(STAMP)
	@echo "running the full grids (hours on 2 cores)"
	@$(PY) -m pytest --timeout=3600 --durations=30

check: $(STAMP)
	@tools/check

static: $(STAMP)
	@tools/check --static

install: $(STAMP)

$(STAMP): pyproject.toml $(wildcard setup.py) constraints.txt $(KERNELS)
	@test -n "$(PYTHON)" || { echo "steppe needs Python 3.11 or newer (python3.11, python3.12, ...), and none was found"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) has no venv module (on Debian: apt-get install python3-venv)"; exit 1; }
	@echo "[1/4] making a virtual environment in $(VENV) with $$($(PYTHON) --version) (a few seconds)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] installing torch (1..2 minutes, about 200 MB for the CPU build)"
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy 2>build-pip.log || { cat build-pip.log; exit 1; }
	@echo "[3/4] installing transformers, pyarrow, matplotlib and the development tools (2..4 minutes, about 300 MB)"
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[train,dev]' 2>build-pip.log || { cat build-pip.log; exit 1; }
	@echo "[4/4] installed; first imports take some seconds more"
	@rm -f build-pip.log
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build demo *.egg-info steppe/flatteners/optimizer/*.so
