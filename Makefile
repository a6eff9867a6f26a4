# Everything happens in .venv; `make clean` undoes it all.
PYTHON ?= python3
BIN := .venv/bin
DEBIAN := .venv/debian
# Not in the usual run: `make test-slow`, `make test-lab`, `make test-hub`, `make test-kernels` run them.
APART := not slow and not browser and not hub and not kernels

# Most of a test is waiting for a sandbox, a lease or a server, so they run beside each other.
PYTEST_ALL := $(BIN)/python -m pytest -n 3 --dist worksteal

.PHONY: help setup demo lab test test-slow test-fuzz test-lab test-hub test-kernels test-debian test-templates test-user check docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo            compare a plain and a sandboxed kernel; hibernate, wake, restart the server"
	@echo "make lab             open JupyterLab with the sandboxed kernel"
	@echo "make setup           install gVisor and the sandboxed kernels (other targets do this automatically)"
	@echo "make check           lint, types, import layers, lengths"
	@echo "make test            run the tests, except for those below"
	@echo "make test-slow       tests that take minutes"
	@echo "make test-fuzz       100,000 random requests to the REST API"
	@echo "make test-lab        JupyterLab in Chromium (needs Debian's package chromium)"
	@echo "make test-hub        JupyterHub with its proxy and culler (needs npm)"
	@echo "make test-kernels    kernels of many languages; makes docs/kernels.md (needs npm; Debian's r-cran-irkernel, octave, ...)"
	@echo "make test-templates  the kernel tests, with all kernels started from templates"
	@echo "make test-debian     the sandbox tests, with Debian's runsc"
	@echo "make test-user       the tests that depend on who runs them; run it as an ordinary user"
	@echo "make bench           benchmarks; with BENCH=--quick, only check that they work"
	@echo "make docs            build docs/_build/html/index.html; warnings are errors"
	@echo "make clean           remove .venv and all generated files"

$(BIN)/python:
	@sh tools/make-venv $(PYTHON) .venv

# One stamp for each set of dependencies, so that the demo does not wait for the test tools.
.venv/.demo .venv/.lab .venv/.test .venv/.browser .venv/.hub .venv/.kernels .venv/.docs: .venv/.%: pyproject.toml | $(BIN)/python
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
	@$(PYTEST_ALL) -m "$(APART)" $(PYTEST)

test-slow: .venv/.test .venv/.ready
	@$(BIN)/python -m pytest -m slow --timeout=900 --ignore=tests/integration/test_schemathesis.py $(PYTEST)

test-fuzz: .venv/.test .venv/.ready
	@$(BIN)/python -m pytest -n 2 -m slow tests/integration/test_schemathesis.py $(PYTEST)

test-lab: .venv/.test .venv/.browser .venv/.ready
	@$(BIN)/python -m pytest -m browser $(PYTEST)

$(BIN)/configurable-http-proxy: | $(BIN)/python
	@command -v npm >/dev/null || { echo "The hub's proxy comes from npm, which is not installed: apt-get install npm"; exit 1; }
	@npm install --silent --no-audit --no-fund --global --prefix .venv configurable-http-proxy

test-hub: .venv/.test .venv/.hub $(BIN)/configurable-http-proxy .venv/.ready
	@$(BIN)/python -m pytest -m hub $(PYTEST)

.venv/.installed-kernels: .venv/.kernels tools/install-kernels
	@sh tools/install-kernels .venv
	@touch $@

test-kernels: .venv/.test .venv/.installed-kernels .venv/.ready
	@KERNELS_TABLE=docs/kernels.md $(BIN)/python -m pytest -m kernels tests/kernels $(PYTEST)

test-templates: .venv/.test .venv/.ready
	@$(PYTEST_ALL) -m "template_copies and runsc and not cold_start and $(APART)" --templates $(PYTEST)

test-user: .venv/.test .venv/.ready
	@$(PYTEST_ALL) -m "user and not resource_use and $(APART)" $(PYTEST)

test-debian: .venv/.test
	@JUPYTER_DATA_DIR=$(DEBIAN) $(BIN)/jupyter-sandbox setup --source debian --kernel python3
	@SANDBOX_RUNSC=$(CURDIR)/$(DEBIAN)/sandbox/bin/runsc $(PYTEST_ALL) -m "debian and $(APART)" $(PYTEST)

check: .venv/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/deptry sandbox_provisioner
	@$(BIN)/python tools/unasync.py --check
	@$(BIN)/python tools/check_sizes.py

docs: .venv/.docs
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "The documentation is in docs/_build/html/index.html"

bench: .venv/.test .venv/.ready
	@$(BIN)/python benchmarks/kernels.py $(BENCH)
	@$(BIN)/python benchmarks/start.py $(BENCH)
	@$(BIN)/python benchmarks/import_time.py $(BENCH)
	@$(BIN)/python benchmarks/cost.py $(BENCH)
	@$(BIN)/python benchmarks/persistence.py $(BENCH)
	@$(BIN)/python benchmarks/wake.py $(BENCH)
	@$(BIN)/python benchmarks/many_kernels.py $(BENCH)
	@$(BIN)/python benchmarks/listing.py $(BENCH)

clean:
	rm -rf .venv docs/_build docs/generated .mypy_cache .ruff_cache .pytest_cache
