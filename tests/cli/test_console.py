"""What is said while a run is being stopped: as plain lines, and in a tree that is redrawn."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest

from runner import events as ev
from runner.cli.console import NEWS, Lines, Tree
from runner.cli.output import Output
from runner.model import Outcome, Rung, Status, StopReason
from runner.ports.sink import Sink

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
