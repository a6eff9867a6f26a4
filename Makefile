# Everything happens in .venv; `make clean` undoes it all.
PYTHON ?= python3
BIN := .venv/bin
DEBIAN := .venv/debian
# Driver, data path and kernels; of the rest, what an older runsc could get wrong.
DEBIAN_TESTS := -k "not (isolation or many_kernels or notebooks or crashes or two_servers or test_manager or test_handle or examples \
	or test_archive or test_environment or test_sleep or handoff or hibernation) or capability or read_only or reached or outside or stopped_server"

# Most of a test is waiting for a sandbox, a lease or a server, so they run beside each other.
PYTEST_ALL := $(BIN)/python -m pytest -n 3 --dist loadfile

.PHONY: help setup demo lab test test-slow test-lab test-hub test-debian check bench clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   get gVisor and install the sandboxed kernels (the other targets do it by themselves)"
	@echo "make demo    see a plain and a sandboxed kernel side by side, and one that sleeps and outlives its servers"
	@echo "make lab     open JupyterLab with the sandboxed kernel in the picker"
	@echo "make test    run the tests; test-slow: those that take minutes; test-lab: JupyterLab in Chromium;"
	@echo "             test-hub: JupyterHub with its proxy and culler (needs npm);"
	@echo "             test-debian: the sandbox tests with Debian's runsc"
	@echo "make check   lint and types"
	@echo "make bench   measure, beside a plain kernel, gVisor without our relay, and cat"
	@echo "make clean   remove .venv and everything in it"

$(BIN)/python:
	@sh tools/make-venv $(PYTHON) .venv

# One stamp for each set of dependencies, so that the demo does not wait for the test tools.
.venv/.demo .venv/.lab .venv/.test .venv/.browser .venv/.hub: .venv/.%: pyproject.toml | $(BIN)/python
	@echo "Installing what '$*' needs ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

.venv/.ready: .venv/.demo
	@$(BIN)/jupyter-sandbox setup --sys-prefix
	@touch $@

setup: .venv/.demo
	@$(BIN)/jupyter-sandbox setup --sys-prefix
	@touch .venv/.ready

demo: .venv/.ready
	@$(BIN)/python examples/demo.py

lab: .venv/.lab .venv/.ready
	@mkdir -p notebooks
	@$(BIN)/jupyter lab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB)

test: .venv/.test .venv/.ready
	@$(PYTEST_ALL) -m "not slow and not browser and not hub" $(PYTEST)

test-slow: .venv/.test .venv/.ready
	@$(BIN)/python -m pytest -m slow --timeout=900 $(PYTEST)

test-lab: .venv/.test .venv/.browser .venv/.ready
	@$(BIN)/python -m pytest -m browser $(PYTEST)

$(BIN)/configurable-http-proxy: | $(BIN)/python
	@command -v npm >/dev/null || { echo "The hub's proxy comes from npm, which is not installed: apt-get install npm"; exit 1; }
	@npm install --silent --no-audit --no-fund --global --prefix .venv configurable-http-proxy

test-hub: .venv/.test .venv/.hub $(BIN)/configurable-http-proxy .venv/.ready
	@$(BIN)/python -m pytest -m hub $(PYTEST)

test-debian: .venv/.test
	@JUPYTER_DATA_DIR=$(DEBIAN) $(BIN)/jupyter-sandbox setup --source debian --kernel python3
	@SANDBOX_RUNSC=$(CURDIR)/$(DEBIAN)/sandbox/bin/runsc $(PYTEST_ALL) -m "runsc and not slow" $(DEBIAN_TESTS) $(PYTEST)

check: .venv/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: .venv/.test .venv/.ready
	@$(BIN)/python benchmarks/kernels.py
	@$(BIN)/python benchmarks/persistence.py
	@$(BIN)/python benchmarks/wake.py
	@$(BIN)/python benchmarks/crowd.py

clean:
	rm -rf .venv notebooks .mypy_cache .ruff_cache .pytest_cache
