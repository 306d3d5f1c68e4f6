"""Options, and the check over a whole session that nothing was skipped in CI. That of claims is in ``claims.py``."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.support import dockerd
from tests.support.forked import FORKS

pytest_plugins = [
    "runner.testing.plugin",
    "tests.support.claims",
    "tests.support.situations",
    "tests.support.kubernetes",
]

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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without looks for garbage, of which there is none: they took two fifths of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != "test_agent_image.py")  # it may build an image, beside all others


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped[_reason(report)].append(report.nodeid)


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


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or session.config.option.collectonly:
        return
    if os.environ.get("CI") and _skipped:
        print("".join(f"\nskipped in CI: {nodeid}" for tests in _skipped.values() for nodeid in tests))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
