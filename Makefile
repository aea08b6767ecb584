# make demo   sets up what is missing, builds, and runs the main job
# make test   the same set-up, then every test
#
# Uses the active virtual environment, else a python that already has torch, else makes .venv.

SHELL := /bin/bash
VENV := $(CURDIR)/.venv
TORCH ?= torch==2.13.0
SYSTEM_PYTHON := $(shell command -v python3)
HAS_TORCH := $(shell $(SYSTEM_PYTHON) -c 'import torch' 2>/dev/null && echo yes)
PYTHON := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python,$(VENV)/bin/python)
APT_PACKAGES := g++ make python3-dev python3-venv liburing-dev doctest-dev
SUDO := $(if $(filter 0,$(shell id -u)),,$(shell sudo -n true 2>/dev/null && echo sudo))
MAY_INSTALL := $(if $(filter 0,$(shell id -u)),yes,$(SUDO))
export MAX_JOBS ?= $(shell nproc)

STAMPS := $(CURDIR)/build/stamps
SOURCES := setup.py pyproject.toml $(shell find csrc -name '*.cpp' -o -name '*.h')

.PHONY: demo test setup native native-asan native-tsan lint dist clean

demo: $(STAMPS)/built
	$(PYTHON) -m locked_tensor demo

test: setup native
	LOCKED_TENSOR_MUST_HAVE=$(MAY_INSTALL) $(PYTHON) -m pytest tests

setup: $(STAMPS)/built $(STAMPS)/test-packages

# System packages, where we may install them; what is left out otherwise.
$(STAMPS)/system:
	@mkdir -p $(@D)
	@if [ -z "$(MAY_INSTALL)" ]; then \
	  echo "not root: left out, if missing: $(APT_PACKAGES)" \
	       "(without liburing-dev the package builds on the other engines)"; \
	elif ! command -v apt-get >/dev/null; then \
	  echo "no apt-get: install a C++ compiler, liburing's and doctest's headers with your package manager"; \
	elif ! dpkg -s $(APT_PACKAGES) >/dev/null 2>&1; then \
	  $(SUDO) apt-get update -q && \
	  DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -q -y --no-install-recommends $(APT_PACKAGES); \
	fi
	@touch $@

# The interpreter: an active environment is used as it is.
$(STAMPS)/python: $(STAMPS)/system
	$(if $(VIRTUAL_ENV),,test -x $(PYTHON) || $(SYSTEM_PYTHON) -m venv $(if $(HAS_TORCH),--system-site-packages) $(VENV))
	$(PYTHON) -c 'import torch' 2>/dev/null || $(PYTHON) -m pip install -q $(TORCH)
	$(PYTHON) -m pip install -q 'setuptools>=68' wheel pybind11 ninja numpy
	@touch $@

$(STAMPS)/built: $(STAMPS)/python $(SOURCES)
	$(PYTHON) -m pip install -q --no-build-isolation -e .
	@touch $@

$(STAMPS)/test-packages: $(STAMPS)/python pyproject.toml
	$(PYTHON) -m pip install -q pytest expecttest hypothesis nbclient nbformat ipykernel
	@touch $@

native: native-asan native-tsan

native-asan native-tsan: native-%: $(STAMPS)/system
	$(MAKE) --no-print-directory -C tests/cpp -j$(MAX_JOBS) $*

lint: setup
	clang-format --dry-run -Werror $$(find csrc tests/cpp -name '*.cpp' -o -name '*.h')

dist: setup
	$(PYTHON) -m pip install -q build
	$(PYTHON) -m build --no-isolation

clean:
	rm -rf build dist *.egg-info locked_tensor/_C.*.so
