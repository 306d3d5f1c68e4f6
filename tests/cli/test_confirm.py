"""``runner apply`` at a terminal: what a person is asked before anything is started, and who is not asked."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests.support.situations import Project

TERMINAL = {"TERM": "dumb", "LANG": "C.UTF-8", "PYTHONUTF8": "1", "COLUMNS": "200"}
QUESTION = "Start? [y/N] "


@pytest.fixture
def ready(project: Project) -> Project:
    project.script("echo worked", provider="process")
    project.env = dict(TERMINAL)
    return project


def at_terminal(project: Project, *arguments: str, answer: bytes | int) -> tuple[int, str]:
    """Exit status and output of the command at a terminal where a person types once asked, or sends a signal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        # Ctrl-C reaches it also where whoever runs the tests ignores it.
        ["setsid", "--ctty", "--wait", "env", "--default-signal=INT", sys.executable, "-m", "runner", *arguments],
        cwd=project.folder,
        env=project.variables,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown, asked = "", False
    with suppress(OSError):  # how Linux says that nobody has the other end any more
        while chunk := os.read(ours, 1 << 16):
            shown += chunk.decode()
            if QUESTION in shown and not asked:
                asked = True
                os.write(ours, b"\x03" if answer == signal.SIGINT else bytes(answer))
    os.close(ours)
    return process.wait(timeout=60), shown.replace("\r\n", "\n")


def started(project: Project) -> bool:
    return (project.home / "state" / "runs").exists()


@pytest.mark.parametrize("answer", [b"y\n", b"YES\n"], ids=["y", "yes"])
def test_at_a_terminal_a_person_sees_what_would_be_started_and_says_yes(ready: Project, answer: bytes) -> None:
    code, shown = at_terminal(ready, "apply", ".", answer=answer)

    before, _, after = shown.partition(QUESTION)
    assert (code, "SUCCEEDED work" in after) == (0, True), shown
    assert "work   script: agent.sh   never carried out before\nin process\n" in before
    assert "\n  disk 10G: not enforced by process; network none: not enforced by process\n" in before
    assert re.search(r"^1 run, over after [\dm]+s at the latest\.\n", before, re.MULTILINE)


@pytest.mark.parametrize(
    "answer", [b"n\n", b"\n", b"yesterday\n", b"\x04", signal.SIGINT], ids=["n", "nothing", "else", "end", "ctrl-c"]
)
def test_anything_but_a_yes_starts_nothing(ready: Project, answer: bytes | int) -> None:
    code, shown = at_terminal(ready, "apply", ".", answer=answer)

    assert (code, "Nothing started." in shown) == (130, True), shown
    assert "Traceback" not in shown
    assert not started(ready)


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        pytest.param(["apply", ".", "--yes"], {}, id="who has said yes"),
        pytest.param(["apply", "."], {"CI": "true"}, id="a CI"),
        pytest.param(["apply", ".", "--output", "jsonl"], {}, id="a program"),
        pytest.param(["apply", "plan.json"], {}, id="who has looked at a saved plan"),
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
    path = ready.folder / "all.runner.yaml"
    path.write_text(path.read_text().replace("agent_type: worker\n", "agent_type: worker\n  timeout: 5m\n", 1))

    _, shown = at_terminal(ready, "apply", ".", answer=b"n\n")

    assert "~ work.deadline_seconds 30m -> 5m" in shown, shown


def test_a_person_who_goes_away_leaves_nothing(ready: Project) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", sys.executable, "-m", "runner", "apply", "."],
        cwd=ready.folder, env=ready.variables, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown, end = "", time.monotonic() + 60
    while QUESTION not in shown and time.monotonic() < end:
        shown += os.read(ours, 1 << 16).decode()
    os.close(ours)  # which hangs it up

    assert process.wait(60) != 0
    assert not started(ready)
