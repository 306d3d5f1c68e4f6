# Everything runs from one virtual environment, made once from requirements.lock.
PYTHON ?= python3
UV ?= uv
BIN := .venv/bin
STAMP := .venv/installed
GUEST := runner/guest/build.py $(wildcard runner/guest/*.[ch])  # the installation compiles it
export RUNNER_HOME ?= $(CURDIR)/.runner-state

.PHONY: help venv quickstart test nightly bench lock schemas

help:
	@echo 'make quickstart   triage a recorded incident, and change this repository in a private clone'
	@echo 'make test         everything the CI runs'
	@echo 'make nightly      the tests that take too long for make test'
	@echo 'make bench        measurements'
	@echo 'make schemas      write schemas/ anew from the manifest models'
	@echo 'make lock         write requirements.lock anew from pyproject.toml; needs uv'

venv: $(STAMP)

$(STAMP): pyproject.toml requirements.lock $(GUEST)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

quickstart: venv
	$(BIN)/runner apply manifests/quickstart

test: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n 3 --dist worksteal -m 'not nightly' --check-scenarios

nightly: venv
	$(BIN)/python -m tests.conformance.agent_image
	$(BIN)/pytest -n 2 -m nightly

bench: venv
	set -e; for bench in tests/benchmarks/bench_*.py; do $(BIN)/python "$$bench"; done

schemas: venv
	$(BIN)/python -m runner.manifest.schema

lock: venv
	$(UV) pip compile --quiet --generate-hashes --python-version 3.11 --group dev \
	    --custom-compile-command 'make lock' -o requirements.lock pyproject.toml
