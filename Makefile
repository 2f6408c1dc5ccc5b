# `make demo` and `make test` need Python 3.11 or later and nothing else: each sets up its own environment in .venv.
# `make test-all` has a larger one, with all packages that any test needs, in .venv-all.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt -e

.PHONY: demo test test-all test-families lint docs clean

demo: .venv/installed
	$(BIN)/carryforward demo

test: .venv/installed
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: .venv-all/installed  # all but the GPU; writes docs/test-all.json
	.venv-all/bin/python tests/run_all.py $(TESTS)

test-families: .venv/installed  # all model types: docs/models.md
	PYTHONPATH=tests $(BIN)/python tests/families/all_types.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed  # the site in build/site; a broken link ends the build
	$(BIN)/python docs/anchors.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/installed: EXTRA = dev
.venv-all/installed: EXTRA = test-all
.venv/installed .venv-all/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed; try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) ".[$(EXTRA)]"
	@touch $@

clean:
	rm -rf .venv .venv-all
