"""``runner apply`` at a terminal: what a person is asked before anything is started, and who is not asked."""

from __future__ import annotations

import re

import pytest

from tests.support.situations import Project
from tests.support.terminal import on_terminal

TERMINAL = {"TERM": "dumb", "LANG": "C.UTF-8", "PYTHONUTF8": "1", "COLUMNS": "200"}
QUESTION = "Start? [y/N] "


@pytest.fixture
def ready(project: Project) -> Project:
    project.script("echo worked", provider="process")
    project.env = dict(TERMINAL)
    return project


def at_terminal(project: Project, *arguments: str, answer: bytes) -> tuple[int, str]:
    """Exit status and output of the command at a terminal where a person types once asked."""
    with on_terminal(project, *arguments, own=True) as terminal:
        if terminal.until(QUESTION):
            terminal.type(answer)
        shown = terminal.rest()
    return terminal.process.wait(), shown.replace("\r\n", "\n")


def has_runs(project: Project) -> bool:
    return (project.home / "state" / "runs").exists()


@pytest.mark.parametrize("answer", [b"y\n", b"YES\n"], ids=["y", "yes"])
def test_at_a_terminal_a_person_sees_what_would_be_started_and_says_yes(ready: Project, answer: bytes) -> None:
    code, shown = at_terminal(ready, "apply", ".", answer=answer)

    before, _, after = shown.partition(QUESTION)
    assert (code, "SUCCEEDED work" in after) == (0, True), shown
    assert "work   script: agent.sh   never carried out before\nin process\n" in before
    assert re.search(r"^  .*disk 10G: not enforced by process; .*network none: not enforced by process$", before, re.M)
    assert re.search(r"^1 run, over after [\dm]+s at the latest\.\n", before, re.MULTILINE)


@pytest.mark.parametrize(
    "answer", [b"n\n", b"\n", b"yesterday\n", b"\x04", b"\x03"], ids=["n", "nothing", "else", "end", "ctrl-c"]
)
def test_anything_but_a_yes_starts_nothing(ready: Project, answer: bytes) -> None:
    code, shown = at_terminal(ready, "apply", ".", answer=answer)

    assert (code, "Nothing started." in shown) == (130, True), shown
    assert "Traceback" not in shown
    assert not has_runs(ready)


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        pytest.param(["apply", ".", "--yes"], {}, id="who has said yes"),
        pytest.param(["apply", "."], {"CI": "true"}, id="a CI"),
        pytest.param(["apply", ".", "--output", "jsonl"], {}, id="a program", marks=pytest.mark.nightly),
        pytest.param(["apply", "plan.json", "-y"], {}, id="who has said yes to a saved plan"),
    ],
)
def test_nobody_else_is_asked(ready: Project, arguments: list[str], env: dict[str, str]) -> None:
    assert ready.runner("plan", ".", "--save", "plan.json").code == 0
    ready.env |= env

    code, shown = at_terminal(ready, *arguments, answer=b"n\n")

    assert (code, QUESTION in shown) == (0, False), shown


def test_without_a_terminal_nobody_is_asked(ready: Project) -> None:
    assert ready.runner("apply", ".").code == 0


def test_what_would_be_refused_is_not_asked_about(ready: Project) -> None:
    ready.env["DOCKER_HOST"] = "unix:///opt/no-such.sock"
    ready.script("true", provider="docker", workspace="base_image: x")

    code, shown = at_terminal(ready, "apply", ".", answer=b"y\n")

    assert (code, QUESTION in shown) == (4, False), shown
    assert "error[provider.unavailable]" in shown


def test_the_question_says_what_has_changed_since_the_last_run(ready: Project) -> None:
    assert ready.runner("apply", ".").code == 0
    ready.edit("agent_type: worker\n", "agent_type: worker\n  timeout: 5m\n")

    _, shown = at_terminal(ready, "apply", ".", answer=b"n\n")

    assert "~ work.deadline_seconds 30m -> 5m" in shown, shown


def test_a_person_who_goes_away_leaves_nothing(ready: Project) -> None:
    with on_terminal(ready, "apply", ".", own=True) as terminal:
        assert terminal.until(QUESTION)
        terminal.hang_up()

        assert terminal.process.wait(60) != 0
    assert not has_runs(ready)
