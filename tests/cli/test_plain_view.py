"""What is said while a run is being stopped: as plain lines, and where a terminal is redrawn."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import termios
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

import pytest

from runner.cli.live_view import Screen
from runner.cli.output import Output
from runner.core.model import StopReason, StopStage
from runner.core.output_style import Manners, manners
from runner.events import events as ev
from runner.events.record import RunRecord, fold
from runner.ports.sink import Sink
from runner.report import progress
from runner.report.progress import NEWS
from runner.report.triage import Header
from tests.support.situations import Project
from tests.support.terminal import CODES, on_terminal

STARTED = (
    ev.RunStarted(name="work", plan="sha256:0", runner="1", steps={"agent": "agent"}, deadline_seconds=60.0),
    ev.StepStarted("agent"),
)
TERM = ev.StopStageReached("agent", StopStage.TERM, StopReason.STEP_DEADLINE, 10.0)
KILL = ev.StopStageReached("agent", StopStage.KILL, StopReason.SECOND_SIGNAL)
SANDBOX = ev.StopStageReached("agent", StopStage.SANDBOX, StopReason.STOP_BUDGET)
LEFT = ev.StopStageReached("agent", StopStage.KILL, StopReason.LEFT_RUNNING)
SECOND = 1_000_000


def screen_on(stream: TextIO, moment: float = 1.0, names: Sequence[str] = ("work",)) -> Screen:
    """A screen of runs without directories at a moment, in seconds."""
    out = Output(stream, stream)
    at = int(moment * SECOND)
    return Screen(
        out,
        {name: Header() for name in names},
        Path("nowhere").joinpath,
        face=progress,
        quiet=False,
        raw=False,
        now=lambda: at,
        clock=str,
    )


def feed(sink: Sink, events: Sequence[ev.Event], run: str = "r") -> None:
    """All events happen in the first second."""
    for seq, event in enumerate(events, start=1):
        sink(ev.Recorded(run, seq, SECOND, event))


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (TERM, "  ! agent: TERM (step deadline), 10s until KILL"),
        (KILL, "  ! agent: KILL (second signal)"),
        (SANDBOX, "  ! agent: sandbox killed (stop budget)"),
        (LEFT, "  ! agent: KILL (left running)"),
        (ev.OomKilled("agent", 1), "  ! agent: out of memory, the kernel killed a process"),
        (ev.OomKilled("agent", 3), "  ! agent: out of memory, the kernel killed 3 processes"),
    ],
    ids=["TERM", "KILL", "sandbox", "left running", "a kill for memory", "kills for memory"],
)
def test_each_stop_stage_and_each_kill_for_memory_is_a_line(event: ev.Event, line: str) -> None:
    out = io.StringIO()
    feed(screen_on(out), [*STARTED, event])

    assert out.getvalue().splitlines()[-1] == line


@pytest.mark.parametrize(
    ("events", "seconds", "message"),
    [
        ([], 3, ""),
        ([TERM], 3, "TERM (step deadline), 7s until KILL"),
        ([TERM], 11, "TERM (step deadline)"),
        ([TERM, KILL], 30, "KILL (second signal)"),
        ([LEFT], NEWS - 1, "KILL (left running)"),
        ([LEFT], NEWS, ""),
    ],
    ids=["running", "in its grace", "after it", "killed", "left something", "left something long ago"],
)
def test_a_running_step_shows_how_it_is_being_stopped(events: Sequence[ev.Event], seconds: float, message: str) -> None:
    record = RunRecord(id="r")
    feed(partial(fold, record), [*STARTED, *events])
    line = progress.live_line(record, Header(), SECOND + int(seconds * SECOND))

    assert line.split("s", 1)[1].strip() == message


@pytest.mark.parametrize(
    ("rows", "last"),
    [
        pytest.param(9, "work.3   ▸ agent        1.0s", id="high enough"),
        pytest.param(3, "  and 3 more", id="too many"),
        pytest.param(2, "  and 4 more", id="hardly any"),
    ],
)
def test_what_is_of_now_is_lower_than_the_terminal(rows: int, last: str) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 70, 0, 0))
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        names = [f"work.{number}" for number in range(4)]
        screen = screen_on(stream, 2.0, names)
        for name in names:
            begun = ev.RunStarted(
                name=name, plan="sha256:0", runner="1", steps={"agent": "agent"}, deadline_seconds=60.0
            )
            feed(screen, [begun, STARTED[1]], name)
        screen.tick()
        drawn = b""
        while select.select([ours], [], [], 0.5)[0]:
            drawn += os.read(ours, 1 << 16)
    os.close(ours)

    lines = drawn.decode().rpartition("\r\x1b[2K")[2].split("\r\n")
    assert len(lines) < rows
    assert lines[-1].startswith(last)


def test_what_is_of_now_gives_way_to_what_is_said() -> None:
    stream = io.StringIO()
    out = Output(stream, stream)
    out.now(["one", "two"])
    out.line("said")
    out.now(["one", "two"])
    out.complain("a warning")
    out.now([])

    erased = "\r\x1b[2K\x1b[1A\x1b[2K"
    assert stream.getvalue() == f"\r\x1b[2Kone\ntwo{erased}said\n\r\x1b[2Kone\ntwo{erased}a warning\n"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({"TERM": "xterm"}, Manners(), id="a terminal"),
        pytest.param({"TERM": "xterm", "NO_COLOR": "1"}, Manners(colour=False), id="no colours"),
        pytest.param({"TERM": "xterm", "NO_COLOR": ""}, Manners(), id="an empty wish is none"),
        pytest.param({"TERM": "dumb"}, Manners(redraw=False, colour=False), id="a terminal that can nothing"),
        pytest.param({}, Manners(redraw=False, colour=False), id="a terminal that nobody knows"),
        pytest.param({"TERM": "xterm", "CI": "true"}, Manners(redraw=False), id="a CI"),
        pytest.param({"TERM": "xterm", "BUILDKITE": "true"}, Manners(redraw=False), id="a CI that does not set CI"),
        pytest.param(
            {"TERM": "xterm", "TF_BUILD": "True"}, Manners(redraw=False, ci_commands=True), id="Azure Pipelines"
        ),
        pytest.param({"TEAMCITY_VERSION": "1"}, Manners(redraw=False, colour=False, ci_commands=True), id="TeamCity"),
        pytest.param({"TERM": "xterm", "CI": "false"}, Manners(), id="no CI"),
        pytest.param(
            {"TERM": "xterm", "GITHUB_ACTIONS": "true"},
            Manners(redraw=False, ci_commands=True, annotates=True),
            id="GitHub Actions",
        ),
    ],
)
def test_the_environment_says_how_to_print(env: dict[str, str], expected: Manners) -> None:
    assert manners(env) == expected


@pytest.mark.scenario("BEY-17", only="TTY progress")
def test_on_a_small_terminal_nothing_that_is_redrawn_is_wider_than_it(project: Project) -> None:
    project.script("for n in 1 2 3; do echo line $n; sleep 0.3; done")
    project.env = {"NO_COLOR": "1"}
    with on_terminal(project, "apply", ".", "--yes", rows=5, columns=40) as terminal:
        shown = terminal.rest()

    drawn = re.findall(r"\r\x1b\[2K([^\r\x1b]+)(?=\r\x1b)", shown)
    assert max(map(len, drawn)) < 40
    assert any("▸ agent" in text for text in drawn)
    assert CODES.sub("", shown).count("   | line 2\r\n") == 1
    assert not re.search(r"\x1b\[(?:\d+;)*[34]\d", shown)
    assert "SUCCEEDED work in" in shown


def test_marks_have_colours_where_they_are_wanted(project: Project) -> None:
    project.script("echo ✓ mine; exit 3")
    with on_terminal(project, "apply", ".") as terminal:
        shown = terminal.rest()

    assert "  \x1b[31m✗\x1b[0m agent" in shown
    assert "   | ✓ mine\r\n" in shown


@pytest.mark.scenario("BEY-17", only="plain CI lines")
def test_a_ci_with_a_terminal_gets_plain_lines(project: Project) -> None:
    project.script("true")
    project.env = {"CI": "true"}
    with on_terminal(project, "apply", ".", "--yes", rows=24, columns=80) as terminal:
        shown = terminal.rest()

    assert "\x1b" not in shown
    assert "  ✓ agent" in shown
