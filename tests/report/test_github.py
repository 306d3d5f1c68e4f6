"""Workflow commands: what GitHub reads back is what was found."""

from __future__ import annotations

import json

import pytest

from runner.core.errors import BadValue, DefaultsDropped, Place, RunnerError
from runner.core.model import Outcome, Reason, Status
from runner.events import events as ev
from runner.report.github import commands, harmless, listed, notes_of, quoted, violations_of
from tests.support.run_files import account, bad, good


@pytest.mark.parametrize(
    ("finding", "command"),
    [
        pytest.param(
            BadValue("`4X` is not a size", at=Place("a.yaml", 7, 3, 2), hint="for example 4G"),
            "::error file=a.yaml,line=7,col=3,endColumn=5,title=manifest.bad-value"
            "::`4X` is not a size%0Ahint: for example 4G",
            id="error",
        ),
        pytest.param(DefaultsDropped("m"), "::warning title=policy.defaults-dropped::m", id="warning without a place"),
        pytest.param(
            BadValue("100% of a:b,c", at=Place("a,b:c%d.yaml", 1, 1)),
            "::error file=a%2Cb%3Ac%25d.yaml,line=1,col=1,endColumn=2,title=manifest.bad-value::100%25 of a:b,c",
            id="escaped",
        ),
        pytest.param(
            BadValue("a\r\n::error::b"),
            "::error title=manifest.bad-value::a\\r\\n::error::b",
            id="a message cannot smuggle a command in",
        ),
    ],
)
def test_a_finding_is_one_command(finding: RunnerError, command: str) -> None:
    assert list(commands([finding])) == [command]


def test_errors_come_first_and_what_github_would_drop_is_counted() -> None:
    found = [DefaultsDropped(f"w{n}", at=Place("a", n, 1)) for n in range(1, 13)]
    errors = [BadValue(f"e{n}", at=Place("b", n, 1)) for n in range(1, 12)]

    lines = list(commands([*found, *errors]))

    assert [line.split(" ")[0] for line in lines] == ["::error"] * 10 + ["::warning"] * 10 + ["and"]
    assert lines[-1] == "and 3 more: runner validate"


def test_a_failed_run_is_shown_at_the_line_of_its_step_and_a_violation_at_its_file() -> None:
    failed = account(bad(details=("one", "two")))

    lines = list(listed([*violations_of(failed), *notes_of(failed)], "elsewhere"))

    assert lines == [
        "::error file=src/.env,line=1,col=1,endColumn=2,title=policy%3A forbidden%3A**/.env"
        "::src/.env: forbidden:**/.env",
        "::error file=a.runner.yaml,line=5,col=1,endColumn=2,title=run work%3A exit"
        "::agent: exited 3%0Aone%0Atwo%0Arunner runs show r1",
        "::warning title=run work%3A lease.refresh-failed::exited 3",
    ]


def test_a_run_that_succeeded_is_no_annotation() -> None:
    assert [*violations_of(account(good())), *notes_of(account(good()))] == []


def test_a_run_without_a_guilty_step_is_shown_at_its_own_line() -> None:
    stopped = [
        ev.RunEnded(Outcome(status=Status.CANCELLED, reason=Reason.CANCELLED, message="stopped by a signal"), 130)
    ]

    (note,) = notes_of(account(stopped))

    assert (note.severity, str(note.at)) == ("warning", "a.runner.yaml:9:1")


def test_what_an_agent_says_is_one_command_and_no_other() -> None:
    text = "x\r\n::add-mask::y\n##[error]z%0A"
    lines = list(listed(list(notes_of(account(bad(text, (text,))))), "elsewhere"))

    assert len(lines) == 2
    assert all("\r" not in line and "\n" not in line for line in lines)
    assert "%250A" in lines[0]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("::add-mask::x", "\\x3a:add-mask::x"),
        ("  \t::error::x", "  \t\\x3a:error::x"),
        ("say ##[error]x", "say #\\x23[error]x"),
        ("say ##vso[task.setvariable variable=x]y", "say #\\x23vso[task.setvariable variable=x]y"),
        ("###VSO[task.complete]", "##\\x23VSO[task.complete]"),
        ("##teamcity[publishArtifacts '/x']", "#\\x23teamcity[publishArtifacts '/x']"),
        ("##vso task", "##vso task"),
        ("a::b", "a::b"),
        ("## [x]", "## [x]"),
    ],
)
def test_a_line_that_a_ci_would_obey_is_shown_and_not_obeyed(line: str, shown: str) -> None:
    assert harmless(line) == shown


def test_json_says_the_same_when_a_ci_reads_it() -> None:
    value = {"##[error]x": "##[error]###[y] ##vso[task.complete]"}

    text = quoted(json.dumps(value))

    assert json.loads(text) == value
    assert "##[" not in text
    assert "##vso" not in text
