# neo-lite: every target does its own set-up and writes nothing outside this folder.
#   make reproduce   every notebook, headless, on the bundled model -> out/     make lab      JupyterLab on the first one
#   make test        linter, types, the whole test suite                        make publish  refresh committed outputs
# Variables: PYTHON=python3.12 (which Python)   TORCH=system (this machine's own CUDA torch)   FAST=1 (fast tests only)
#            TORCH_INDEX=url (where torch comes from)   NOTEBOOKS="00 03" (only these)
SHELL := /bin/sh
ifneq ($(NOTEBOOK),)
$(error NOTEBOOK=$(NOTEBOOK) is unknown: say NOTEBOOKS=$(NOTEBOOK))
endif
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help reproduce publish test lab lint format clean known-notebooks venv-lab venv-test
PYTHON ?=
TORCH ?= pinned
TORCH_INDEX ?=
FAST ?=
NOTEBOOKS ?=

ifeq ($(filter $(TORCH),pinned system),)
$(error TORCH=$(TORCH) is unknown: leave it out for the pinned torch, or say TORCH=system for this machine's own)
endif
VENV := $(if $(filter system,$(TORCH)),.venv-system,.venv)
CACHE := $(CURDIR)/.cache
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/python
SETUP := PYTHON="$(PYTHON)" TORCH="$(TORCH)" sh tools/setup.sh --venv $(VENV) --torch $(TORCH) --torch-index "$(TORCH_INDEX)"

# Whatever would be written to a home folder is written to .cache/ here; a value of your own wins.
export NEO_LITE_CACHE ?= $(CACHE)/neo_lite
export NEO_LITE_FIGURES ?= $(CURDIR)/out/figures
# A folder that already holds the real workload files; empty: the fits, or a download on request.
export NEO_LITE_DATA ?=
export PIP_CACHE_DIR ?= $(CACHE)/pip
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
export PIP_ROOT_USER_ACTION ?= ignore
export HF_HOME ?= $(CACHE)/huggingface
export MPLCONFIGDIR ?= $(CACHE)/matplotlib
export IPYTHONDIR ?= $(CACHE)/ipython
export JUPYTER_CONFIG_DIR ?= $(CACHE)/jupyter/config
export JUPYTER_DATA_DIR ?= $(CACHE)/jupyter/data
export JUPYTER_RUNTIME_DIR ?= $(CACHE)/jupyter/runtime
export TRITON_CACHE_DIR ?= $(CACHE)/triton
export TORCHINDUCTOR_CACHE_DIR ?= $(CACHE)/inductor
export TORCH_EXTENSIONS_DIR ?= $(CACHE)/torch_extensions
# pip asks rustc for its version, and rustup's stand-in for rustc makes a folder in the home of whoever asks.
export RUSTUP_HOME ?= $(CACHE)/rustup
export HYPOTHESIS_STORAGE_DIRECTORY ?= $(CACHE)/hypothesis

help:
	@sed -n '1,5s/^# \{0,1\}//p' Makefile

venv-lab:
	@$(SETUP) --extras lab

venv-test:
	@$(SETUP) --extras lab,test

# before minutes of set-up; the scripts say more
known-notebooks:
	@for name in $(NOTEBOOKS); do ls notebooks/$$name*.py >/dev/null 2>&1 || \
		{ echo "NOTEBOOKS: no file in notebooks/ begins with $$name"; exit 1; }; done

reproduce: known-notebooks venv-lab
	@$(RUN) tools/run_notebooks.py --out out $(NOTEBOOKS)

publish: known-notebooks venv-lab
	@$(RUN) tools/run_notebooks.py --out out $(NOTEBOOKS)
	@$(RUN) tools/publish_notebooks.py --out out

lint: venv-test
	@echo "lint: ruff check"; $(RUN) -m ruff check .
	@echo "lint: ruff format --check"; $(RUN) -m ruff format --check .
	@echo "lint: mypy"; $(RUN) -m mypy

format: venv-test
	@$(RUN) -m ruff check --fix .; $(RUN) -m ruff format .

# Two workers of one thread: two default torch processes on two cores slow each other many times over.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2
test: lint
	@echo "test: fast tier"; $(PYTEST) -m "not slow"
ifeq ($(FAST),)
	@echo "test: slow tier (real weights, compilers, notebooks)"; $(PYTEST) --dist worksteal --durations=10 -m slow
endif

lab: venv-lab
	@$(RUN) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/00_tour.ipynb

clean:
	rm -rf .venv .venv-system .cache out build neo_lite.egg-info
	find neo_lite tests tools notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
