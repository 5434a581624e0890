# `make demo` and `make test` are all the set-up there is: each builds .venv if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

$(VENV)/.ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: $(VENV)/.ready
	PATH="$(CURDIR)/$(BIN):$$PATH" sh fixtures/demo.sh

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest

bench: $(VENV)/.ready
	for bench in benchmarks/bench_*.py; do echo "== $$bench" && $(BIN)/python "$$bench" || exit 1; done

clean:
	rm -rf $(VENV) .demo
