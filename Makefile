# Everything runs from one virtual environment: what a checkout needs to run, and for the tests what they need as well.
PYTHON ?= python3
UV ?= $(BIN)/uv
BIN := .venv/bin
GUEST := runner/guest/build.py $(wildcard runner/guest/*.[ch])  # the installation compiles it
export PYTHONDONTWRITEBYTECODE :=  # commands of the tests would be compiled a thousand times
export RUNNER_HOME ?= $(CURDIR)/.runner-state

PIP := $(BIN)/python -m pip --disable-pip-version-check
# What pip says of each package, but for where it has it from.
SHOWN := | sed -un 's/^Collecting \([^ ]*\).*/  \1/p; s/^Building wheel for \([^ ]*\).*/  building \1/p'
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# Without a C compiler here pip gets one for the build, some 100 MB, and removes it again.
HERE = $(shell echo '\#include <linux/futex.h>' | cc -E - >/dev/null 2>&1 && echo --no-build-isolation)
LOCK := $(UV) pip compile --quiet --universal --generate-hashes --no-strip-extras --python-version 3.11 --custom-compile-command 'make lock'
IMAGE := $(addprefix --extra ,server mcp postgres s3 kubernetes otel)  # of the image that serves
UNIT := compiler lifecycle manifest plan policy report spec
SUITE := $(BIN)/pytest --dist worksteal

.PHONY: help quickstart setup unit test nightly mutants mutation bench docs lock schemas wheels

help:
	@echo 'make quickstart   triage a recorded incident, and change this repository in a private clone'
	@echo 'make unit         the tests of pure code, in a minute: no root, network or docker'
	@echo 'make test         what the CI runs; as root, or with sudo, it installs what the tests need first'
	@echo 'make nightly      the tests that take too long for make test, and the measurements that were promised'
	@echo 'make mutants      breaks the product on purpose, and sees that the tests notice; MUTANT=WSM-16 for one'
	@echo 'make mutation     changes the pure rules in every small way, and lists what no test notices; ROOMS=policy'
	@echo 'make bench        measurements'
	@echo 'make docs         write docs/reference/ anew, and build docs/ into docs/_build'
	@echo 'make schemas      write schemas/ anew from the manifest models'
	@echo 'make wheels       what is released into dist/: a wheel for each machine, and the sources'
	@echo 'make lock         write the lock files anew from pyproject.toml'

.venv/product: pyproject.toml requirements.lock $(GUEST)
	$(PYTHON) -m venv .venv
	@echo 'installing what runner needs into .venv'
	@$(PIP) install --require-hashes -r requirements.lock $(SHOWN)
	@echo 'installing this checkout$(if $(HERE),, and for the build a compiler)'
	@$(PIP) install --no-deps $(HERE) -e . $(SHOWN)
	@touch $@

.venv/tests: .venv/product tests/requirements.lock
	@echo 'installing what the tests need into .venv'
	@$(PIP) install --require-hashes -r tests/requirements.lock $(SHOWN)
	@touch $@

.venv/mutation: .venv/tests tests/mutants/requirements.lock
	@echo 'installing what changes the pure rules into .venv'
	@$(PIP) install --require-hashes -r tests/mutants/requirements.lock $(SHOWN)
	@touch $@

.venv/docs: .venv/tests docs/requirements.lock
	@echo 'installing what the documentation is built with into .venv'
	@$(PIP) install --require-hashes -r docs/requirements.lock $(SHOWN)
	@touch $@

quickstart: .venv/product
	$(BIN)/runner apply --yes manifests/quickstart

# Before the environment, which may need it.
setup:
	@$(PYTHON) tests/support/components.py

unit: .venv/tests
	$(SUITE) -n 2 -m 'not nightly and not slow' $(UNIT:%=tests/%)

test: setup
	@$(MAKE) --no-print-directory .venv/tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@# The tests are compiled beside mypy, once; else each of the four workers would.
	$(BIN)/pytest -qq --collect-only -m 'not nightly' >/dev/null & $(BIN)/mypy && wait
	$(SUITE) -n 4 -m 'not nightly' --check-scenarios claims

nightly:
	@$(PYTHON) tests/support/components.py --nightly
	@$(MAKE) --no-print-directory .venv/tests
	$(SUITE) -n 2 -m nightly --timeout 3600 --check-scenarios marks
	@$(MAKE) --no-print-directory mutants mutation

mutants: .venv/tests
	$(BIN)/python tests/mutants/run.py $(MUTANT)

mutation: .venv/mutation
	PYTHONPATH=. $(BIN)/python -m tests.mutants.mutation $(ROOMS)

bench: .venv/tests
	set -e; for bench in tests/benchmarks/bench_*.py; do $(BIN)/python "$$bench"; done

docs: .venv/docs
	$(BIN)/python docs/write_reference.py
	$(BIN)/sphinx-build -W --keep-going -q -c docs . docs/_build

schemas: .venv/tests
	$(BIN)/python -m runner.manifest.schema

lock: .venv/tests
	$(LOCK) --group build -o requirements.lock pyproject.toml
	$(LOCK) --group test -c requirements.lock -o tests/requirements.lock pyproject.toml
	$(LOCK) $(IMAGE) -c requirements.lock -c tests/requirements.lock -o runners/server/requirements.lock pyproject.toml
	$(LOCK) --group mutation -c requirements.lock -c tests/requirements.lock -o tests/mutants/requirements.lock
	$(LOCK) --group docs -c requirements.lock -c tests/requirements.lock -o docs/requirements.lock

wheels: .venv/tests
	rm -rf dist
	$(BIN)/hatchling build -t sdist
	WHEEL_MACHINE=x86_64 $(BIN)/hatchling build -t wheel
	WHEEL_MACHINE=aarch64 $(BIN)/hatchling build -t wheel
