"""What is said while a run is being stopped: as plain lines, and in a tree that is redrawn."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress

import pytest

from runner import events as ev
from runner.cli.console import NEWS, Lines, Tree
from runner.cli.output import Output
from runner.manners import Manners, manners
from runner.model import Outcome, Rung, Status, StopReason
from runner.ports.sink import Sink
from tests.situations import Project

STARTED = (
    ev.RunStarted("work", "sha256:0", "1", {"agent": "agent"}, 60.0),
    ev.StepStarted("agent"),
)
TERM = ev.RungReached("agent", Rung.TERM, StopReason.STEP_DEADLINE, 10.0)
KILL = ev.RungReached("agent", Rung.KILL, StopReason.SECOND_SIGNAL)
SANDBOX = ev.RungReached("agent", Rung.SANDBOX, StopReason.STOP_BUDGET)
LEFT = ev.RungReached("agent", Rung.KILL, StopReason.LEFT_RUNNING)
SECOND = 1_000_000


def feed(sink: Sink, events: Sequence[ev.Event]) -> None:
    """All events happen in the first second."""
    for seq, event in enumerate(events, start=1):
        sink(ev.Recorded("r", seq, SECOND, event))


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (TERM, "work: agent: TERM (step deadline), 10s until KILL"),
        (KILL, "work: agent: KILL (second signal)"),
        (SANDBOX, "work: agent: sandbox killed (stop budget)"),
        (LEFT, "work: agent: KILL (left running)"),
        (ev.OomKilled("agent", 1), "work: warning: agent: out of memory, the kernel killed a process"),
        (ev.OomKilled("agent", 3), "work: warning: agent: out of memory, the kernel killed 3 processes"),
    ],
    ids=["TERM", "KILL", "sandbox", "left running", "a kill for memory", "kills for memory"],
)
def test_each_rung_and_each_kill_for_memory_is_a_line(event: ev.Event, line: str) -> None:
    out = io.StringIO()
    feed(Lines(Output(out, io.StringIO())), [*STARTED, event])

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
    tree = Tree(lambda: SECOND + int(seconds * SECOND))
    feed(tree, [*STARTED, *events])

    assert tree.render().plain.splitlines()[-1].split("s", 1)[1].strip() == message


def test_a_step_that_has_ended_shows_its_outcome() -> None:
    tree = Tree(lambda: 9 * SECOND)
    feed(tree, [*STARTED, TERM, ev.StepEnded("agent", Outcome(Status.FAILED, message="stopped at its deadline"))])

    assert tree.render().plain.splitlines()[-1].endswith("stopped at its deadline")


def fill(tree: Tree, running: int, ended: int) -> None:
    """Some runs of a matrix, of three steps each."""
    steps = {"lease": "lease", "agent": "agent", "save": "save"}
    for number in range(running + ended):
        run = f"r{number}"
        events: list[ev.Event] = [
            ev.RunStarted(f"work.{number}", "sha256:0", "1", steps, 60.0),
            ev.StepStarted("lease"),
            ev.StepEnded("lease", Outcome(Status.SUCCEEDED)),
            ev.StepStarted("agent"),
        ]
        if number >= running:
            events.append(ev.RunEnded(Outcome(Status.FAILED, message="agent: exited 3"), 1))
        for seq, event in enumerate(events, start=1):
            tree(ev.Recorded(run, seq, SECOND, event))


@pytest.mark.parametrize(
    ("height", "first", "last"),
    [
        pytest.param(0, "work.0", "· save", id="as high as it needs"),
        pytest.param(40, "work.0", "· save", id="high enough"),
        pytest.param(9, "work.0", "✗ work.3", id="what has ended gives way"),
        pytest.param(4, "work.0", "and 3 more lines", id="what runs comes first"),
        pytest.param(1, "and 6 more lines", "and 6 more lines", id="one line"),
    ],
)
def test_a_tree_is_no_higher_than_its_terminal(height: int, first: str, last: str) -> None:
    tree = Tree(lambda: 2 * SECOND)
    fill(tree, running=2, ended=2)

    lines = tree.render(height).plain.splitlines()

    assert len(lines) <= (height or 99)
    assert lines[0].strip().startswith(first)
    assert lines[-1].strip().startswith(last)


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
        pytest.param({"TERM": "xterm", "TF_BUILD": "True"}, Manners(redraw=False, obeyed=True), id="Azure Pipelines"),
        pytest.param({"TEAMCITY_VERSION": "1"}, Manners(redraw=False, colour=False, obeyed=True), id="TeamCity"),
        pytest.param({"TERM": "xterm", "CI": "false"}, Manners(), id="no CI"),
        pytest.param(
            {"TERM": "xterm", "GITHUB_ACTIONS": "true"},
            Manners(redraw=False, obeyed=True, annotates=True),
            id="GitHub Actions",
        ),
    ],
)
def test_the_environment_says_how_to_print(env: dict[str, str], expected: Manners) -> None:
    assert manners(env) == expected


SMALL = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}


def on_terminal(project: Project, rows: int, columns: int, *arguments: str) -> str:
    """What the command writes to a terminal of that size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    command = [sys.executable, "-m", "runner", *arguments]
    process = subprocess.Popen(
        command, cwd=project.folder, env=project.variables, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = bytearray()
    with suppress(OSError):  # how Linux says that nobody has the other end any more
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown.decode()
    return shown.decode()


@pytest.mark.scenario("BEY-17", only="TTY progress")
def test_on_a_small_terminal_nothing_is_wider_or_higher_than_it(project: Project) -> None:
    project.script("sleep 0.5")
    project.env = {**SMALL, "NO_COLOR": "1"}

    shown = on_terminal(project, 5, 40, "apply", ".", "--yes")

    *frames, report = re.split(r"(?:\r?\x1b\[2K)?(?:\x1b\[1A\x1b\[2K)+", shown)
    assert len(frames) > 3
    drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).rstrip("\r\n").split("\r\n") for frame in frames]
    assert max(len(lines) for lines in drawn) <= 5
    assert max(len(line.strip("\r")) for lines in drawn for line in lines) <= 40
    assert any("▸ agent" in line for lines in drawn for line in lines)
    assert not re.search(r"\x1b\[(?:\d+;)*[34]\d", shown)
    assert "SUCCEEDED work in" in report
    assert "✓ save" in report


@pytest.mark.scenario("BEY-17", only="plain CI lines")
def test_a_ci_with_a_terminal_gets_plain_lines(project: Project) -> None:
    project.script("true")
    project.env = {**SMALL, "CI": "true"}

    shown = on_terminal(project, 24, 80, "apply", ".")

    assert "\x1b" not in shown
    assert "work: ✓ agent" in shown
