"""Options and the two checks over a whole session: claimed scenarios really passed, and nothing was skipped in CI."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.conformance import dockerd
from tests.forked import FORKS

pytest_plugins = ["tests.situations", "tests.egress.kube"]

CLAIMS = Path(__file__).parent / "scenarios.yaml"

_passed: dict[str, set[str]] = defaultdict(set)
_skipped: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def docker_daemon() -> Iterator[None]:
    """It is started by the first test that wants it, in whatever room."""
    yield
    dockerd.leave()


@pytest.fixture(scope="session", autouse=True)
def forked_commands() -> Iterator[None]:
    """Their process is started by the first test that runs one."""
    yield
    FORKS.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-cases", action="store_true", help="rewrite golden files instead of comparing")
    parser.addoption("--check-scenarios", action="store_true", help="fail when a claimed scenario has no passing test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("scenario"):
            item.user_properties.append(("scenario", f"{marker.args[0]}/{part_of(item, marker)}"))


def part_of(item: pytest.Item, marker: pytest.Mark) -> str:
    """The part of a scenario that a test shows; with ``only="provider"``, that of the provider it is given."""
    part = marker.kwargs.get("only", "")
    return item.callspec.params["provider"] if part == "provider" else part  # type: ignore[attr-defined]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)
    if report.when == "call" and report.passed:
        for name, value in report.user_properties:
            if name == "scenario":
                scenario, _, part = str(value).partition("/")
                _passed[scenario].add(part)


def unproved(claims: Mapping[str, str | list[str]], passed: Mapping[str, set[str]]) -> list[str]:
    """Claims without a passing test. ``all`` takes any test of the id; a list takes a test for each part."""
    missing: list[str] = []
    for scenario, parts in claims.items():
        if parts == "all":
            missing += [] if passed.get(scenario) else [scenario]
        else:
            missing += [f"{scenario} ({part})" for part in parts if part not in passed.get(scenario, set())]
    return missing


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or session.config.option.collectonly:
        return
    problems: list[str] = []
    if session.config.option.check_scenarios:
        claims = YAML(typ="safe").load(CLAIMS)
        problems += [f"claimed, but no test of it passed: {claim}" for claim in unproved(claims, _passed)]
    if os.environ.get("CI"):
        problems += [f"skipped in CI: {nodeid}" for nodeid in _skipped]
    if problems:
        print("\n" + "\n".join(problems))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
