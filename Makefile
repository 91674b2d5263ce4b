# make demo   install into .venv and compare dense with compressed training on this machine
# make test   install into .venv and run every check that CI runs
# make docs   install into .venv and build the documentation: build/site/index.html
# Needs python3 (3.10 or newer) with pip, nothing else. Another interpreter: make test PYTHON=...

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n auto --dist worksteal
COMPARE_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-cli
	$(BIN)/bitsparse compare $(COMPARE_ARGS)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Some distributions ship venv without ensurepip: there, the interpreter's own pip installs pip.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "bitsparse needs Python 3.10 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV) || { \
	    $(PYTHON) -m venv --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install pip; }
	@touch $@

# PyTorch first and alone, so that the build for this machine (CPU or CUDA) is chosen once.
$(VENV)/.installed-torch: $(VENV)/.created constraints.txt
	$(PIP) install -c constraints.txt torch
	@touch $@

$(VENV)/.installed-cli: $(VENV)/.installed-torch pyproject.toml
	$(PIP) install -c constraints.txt -e ".[cli]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-torch pyproject.toml
	$(PIP) install -c constraints.txt -e ".[docs]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-torch pyproject.toml
	$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@
