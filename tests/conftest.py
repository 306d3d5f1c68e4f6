"""Options and the two checks over a whole session: claimed scenarios really passed, and nothing was skipped in CI."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.support import dockerd
from tests.support.forked import FORKS

pytest_plugins = ["tests.support.situations", "tests.support.kubernetes"]

CLAIMS = Path(__file__).parent / "scenarios.yaml"

_proofs: dict[str, set[str]] = defaultdict(set)  # the parts of a scenario whose tests passed, or lack a component
_skipped: dict[str, list[str]] = defaultdict(list)  # node ids by the reason that was given


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
    items.sort(key=lambda item: item.path.name != "test_agent_image.py")  # it may build an image, beside all others
    for item in items:
        for marker in item.iter_markers("scenario"):
            item.user_properties.append(("scenario", f"{marker.args[0]}/{part_of(item, marker)}"))


def part_of(item: pytest.Item, marker: pytest.Mark) -> str:
    """The part of a scenario that a test shows; with ``only="provider"``, that of the provider it is given."""
    part = marker.kwargs.get("only", "")
    return item.callspec.params["provider"] if part == "provider" else part  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Give a skip inside of trio its reason back: pytest-trio raises it anew without."""
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, pytest.skip.Exception) and isinstance(leaf := error.__context__, BaseExceptionGroup):
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        error.msg = str(leaf)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped:
        _skipped[_reason(report)].append(report.nodeid)
    if skipped or (report.when == "call" and report.passed):
        for name, value in report.user_properties:
            if name == "scenario":
                scenario, _, part = str(value).partition("/")
                _proofs[scenario].add(part)


def _reason(report: pytest.TestReport) -> str:
    """The words of a skip: the last of the three that pytest tells of it."""
    text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say once for each component that is missing how many tests wanted it, and what brings it."""
    if not _skipped:
        return
    terminalreporter.section("skipped for want of a component")
    rows = [("tests", "what", "why", "what brings it")]
    for reason, tests in sorted(_skipped.items(), key=lambda item: -len(item[1])):
        what, why, command = reason.split(" | ") if reason.count(" | ") == 2 else ("", reason, "")
        rows.append((str(len(tests)), what, why, command))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, (*widths, 0), strict=True))
        terminalreporter.write_line("  ".join(cells).rstrip())


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
        problems += [f"claimed, but no test of it passed: {claim}" for claim in unproved(claims, _proofs)]
    if os.environ.get("CI"):
        problems += [f"skipped in CI: {nodeid}" for tests in _skipped.values() for nodeid in tests]
    if problems:
        print("\n" + "\n".join(problems))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
