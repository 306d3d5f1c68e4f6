"""The check that the project claims no scenario without proof: ids, parts, marks, and which of them a session showed.

``requirements.yaml`` lists the scenarios, ``scenarios.yaml`` what is claimed of them, and
``@pytest.mark.scenario(ID, only=PART)`` is what a test shows. The rules:

* A mark stands on a test of the real component. Tests of pure rooms, which only look at tables, carry none; a marked
  test makes no ``FakeProvider``, nor a store in memory when the scenario is about what is stored (``STORED``), and a
  parameter that names one of them carries no mark.
* A mark's id is claimed, and its part is one that the claim names. ``only="provider"`` is the provider that the test is
  given, ``only="elsewhere"`` the daemon; a variation of one, as by an ordinary user, shows no part. What is expected to
  fail carries no mark.
* A claim of parts needs a passing test for each. ``all`` needs one for each part that any mark of the id names, a mark
  without a part included. Nightly tests show nothing of a claim, and what is skipped shows nothing in the CI.

``pytest --collect-only -m 'not nightly' --check-scenarios=claims`` finds in half a minute what no run can make good.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ruamel.yaml import YAML

from runner.store.memory import MemoryStore
from tests.support.fake_provider import FakeProvider

FOLDER = Path(__file__).parents[1]
PROVIDERS = {"local", "docker", "docker-user", "docker-remote", "gvisor"}
PURE = {"compiler", "core", "lifecycle", "manifest", "plan", "policy", "report", "spec", "triage"}
STAND_INS = {"fake", "memory"}  # as parameters
STORED = {"BEY-09", "BEY-10", "LIF-04", "WSM-06", *(f"WSM-{number:02}" for number in range(8, 14))}  # of the store

Claims = Mapping[str, str | list[str]]


class Mark(NamedTuple):
    scenario: str
    part: str
    test: str


class Session:
    """The proofs of a session. A worker of xdist sends its marks to the controller, which has the reports."""

    def __init__(self) -> None:
        self.marks: set[Mark] = set()
        self.chosen: set[Mark] = set()
        self.shown: dict[str, set[str]] = defaultdict(set)
        self.problems: set[str] = set()


_session = Session()
_made: list[str] = []  # stand-ins that the running test made


def listed(path: Path = FOLDER / "requirements.yaml") -> Mapping[str, str]:
    found: Mapping[str, str] = YAML(typ="safe").load(path)
    return found


@cache
def claimed(path: Path = FOLDER / "scenarios.yaml") -> Claims:
    found: Claims = YAML(typ="safe").load(path)
    return found


def wrong_claims(titles: Mapping[str, str], claims: Claims) -> list[str]:
    return [f"{scenario}: claimed, but no scenario of the list" for scenario in claims if scenario not in titles] + [
        f"{scenario}: claimed without a part, and not as `all`"
        for scenario, parts in claims.items()
        if not parts or (isinstance(parts, str) and parts != "all")
    ]


def wrong_marks(titles: Mapping[str, str], claims: Claims, marks: Iterable[Mark]) -> list[str]:
    """Marks that show nothing: of an unknown id, an unclaimed one, or another part than is claimed."""
    wrong = []
    for scenario, part, test in sorted(marks):
        parts = claims.get(scenario)
        if scenario not in titles:
            wrong.append(f"{test}: `{scenario}` is no scenario of the list")
        elif parts is None:
            wrong.append(f"{test}: {scenario} is not claimed")
        elif parts != "all" and part not in parts:
            wrong.append(f"{test}: {scenario} is claimed for {', '.join(parts)}, not for {part or 'the whole'}")
        elif PURE & {*Path(test).parts[:2]}:
            wrong.append(f"{test}: {scenario} is marked on a test of a pure room")
    return wrong


def unproved(claims: Claims, marks: Iterable[Mark], shown: Mapping[str, set[str]]) -> list[str]:
    """The claims, and the parts of them, that no test showed."""
    named: dict[str, set[str]] = defaultdict(set)
    for mark in marks:
        named[mark.scenario].add(mark.part)
    return [
        f"{scenario} ({part})" if part else scenario
        for scenario, parts in claims.items()
        for part in (sorted(named[scenario] or {""}) if parts == "all" else parts)
        if part not in shown.get(scenario, set())
    ]


def part_of(mark: pytest.Mark, params: Mapping[str, Any]) -> str | None:
    """The part of a scenario that a test shows with these parameters; ``None``: the mark is not for them."""
    if any(isinstance(value, str) and value in STAND_INS for value in params.values()):
        return None
    part: str = mark.kwargs.get("only", "")
    if part not in ("provider", "elsewhere"):
        return part
    return params[part] if params[part] in PROVIDERS else None


def _marks(item: pytest.Item) -> Iterator[Mark]:
    if item.get_closest_marker("xfail"):
        return
    params = item.callspec.params if hasattr(item, "callspec") else {}
    test = item.nodeid.partition("[")[0]
    for mark in item.iter_markers("scenario"):
        part = part_of(mark, params)
        if part is not None:
            yield Mark(mark.args[0], part, test)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--check-scenarios",
        choices=["claims", "marks"],
        help="fail when a claim has no passing test, or when one of these tests does not show what it is marked with",
    )
    parser.addoption("--scenario", help="only the tests that are marked with this id")


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    for stand_in in (FakeProvider, MemoryStore):
        stand_in.__init__ = _telling(stand_in.__init__, stand_in.__name__)  # type: ignore[method-assign,misc]


def _telling(make: Callable[..., None], name: str) -> Callable[..., None]:
    def init(*args: Any, **options: Any) -> None:
        _made.append(name)
        make(*args, **options)

    return init


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marks = [*_marks(item)]
        _session.marks.update(marks)
        item.user_properties += [("scenario", f"{mark.scenario}/{mark.part}") for mark in marks]
    if wanted := config.option.scenario:
        wants = [any(mark.scenario == wanted for mark in _marks(item)) for item in items]
        config.hook.pytest_deselected(items=[i for i, want in zip(items, wants, strict=True) if not want])
        items[:] = [i for i, want in zip(items, wants, strict=True) if want]


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        _session.chosen.update(_marks(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _made.clear()
    return (yield)  # type: ignore[return-value]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "call":
        item.user_properties += [("stand-in", name) for name in sorted({*_made})]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    found = [str(value) for name, value in report.user_properties if name == "scenario"]
    stand_ins = [str(value) for name, value in report.user_properties if name == "stand-in"]
    skipped = report.skipped and not hasattr(report, "wasxfail") and not os.environ.get("CI")
    if FakeProvider.__name__ not in stand_ins:
        stand_ins = stand_ins if STORED & {value.partition("/")[0] for value in found} else []
    if found and report.when == "call" and stand_ins:
        _session.problems.add(f"{report.nodeid} is marked {', '.join(found)} and runs on a {', '.join(stand_ins)}")
    elif skipped or (report.when == "call" and report.passed):
        for value in found:
            scenario, _, part = value.partition("/")
            _session.shown[scenario].add(part)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    sent = getattr(node, "workeroutput", {})
    _session.marks.update(Mark(*each) for each in sent.get("marks", ()))
    _session.chosen.update(Mark(*each) for each in sent.get("chosen", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["marks"] = [*map(list, _session.marks)]
        session.config.workeroutput["chosen"] = [*map(list, _session.chosen)]
        return
    if not (wanted := session.config.option.check_scenarios):
        return
    if session.config.option.collectonly:
        for mark in _session.chosen:
            _session.shown[mark.scenario].add(mark.part)
    titles, claims = listed(), claimed()
    problems = sorted(_session.problems) + wrong_claims(titles, claims) + wrong_marks(titles, claims, _session.marks)
    if wanted == "claims":
        problems += [f"claimed, but not shown: {claim}" for claim in unproved(claims, _session.marks, _session.shown)]
    else:
        night = {mark.scenario: "all" for mark in _session.chosen}
        problems += [f"marked, but not shown: {claim}" for claim in unproved(night, _session.chosen, _session.shown)]
    if problems:
        print("\n" + "\n".join(problems))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
