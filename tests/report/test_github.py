"""Workflow commands: what GitHub reads back is what was found."""

from __future__ import annotations

import pytest

from runner.errors import BadValue, DefaultsDropped, Place, RunnerError
from runner.report.github import commands


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
