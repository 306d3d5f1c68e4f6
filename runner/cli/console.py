"""Watching runs: plain lines, a live tree on a terminal, or the events themselves. All are sinks of one stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runner import events as ev
from runner.cli.output import Output
from runner.errors import printable
from runner.model import Status, StopReason
from runner.ports.sink import Sink
from runner.record import RunRecord, StepRecord, fold
from runner.report.text import WIDEST, isolation_line, usage_lines
from runner.report.words import MARKS, duration, rung

if TYPE_CHECKING:
    from rich.text import Text

NEWS = 5.0  # seconds that a live tree shows what was done to a command whose step goes on


@contextmanager
def open_console(out: Output, form: str) -> Iterator[Sink]:
    """The sink for one apply, in ``form`` text or jsonl; the live tree is gone when the block ends."""
    if form == "jsonl":
        yield lambda recorded: out.line(json.dumps(ev.as_json(recorded), ensure_ascii=out.live))
    elif out.live:
        from rich.console import Console
        from rich.live import Live

        from runner.app.apply import now_microseconds

        tree = Tree(now_microseconds)
        with Live(get_renderable=tree.render, console=Console(file=out.stdout), refresh_per_second=8, transient=True):
            yield tree
    else:
        yield Lines(out)


class Lines:
    """One line when a step has ended, one when isolation is known, one a warning; nothing is said twice."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._records: dict[str, RunRecord] = {}

    def __call__(self, recorded: ev.Recorded) -> None:
        record = self._records.setdefault(recorded.run, RunRecord(recorded.run))
        fold(record, recorded)
        for line in self._lines(record, recorded.event):
            self._out.line(printable(f"{record.name}: {line}", WIDEST))

    def _lines(self, record: RunRecord, event: ev.Event) -> Iterator[str]:
        match event:
            case ev.RunStarted():
                if record.rehearsal is not None:
                    yield f"a rehearsal: no model is asked, {record.rehearsal} stands for it"
                resumes = f", resumes run {record.resumes}" if record.resumes else ""
                yield f"run {record.id}{resumes}, stops after {duration(record.deadline_seconds)} at the latest"
            case ev.IsolationObserved() | ev.ProviderChosen():
                yield f"isolation {isolation_line(record)}"
            case ev.ProviderRefused(provider=provider, reason=reason):
                yield f"provider {provider} refused: {reason}"
            case ev.FellBack(step=name, provider=provider, reason=reason):
                yield f"falling back from {provider}: {name}: {reason}"
            case ev.Retried(step=name, what=what, reason=reason, pause_seconds=pause):
                yield f"{name}: {what} failed, trying again in {duration(pause)}: {reason}"
            case ev.StepEnded(step=name):
                yield step_line(name, record.steps[name])
                yield from (f"  warning: {text}" for text in event.outcome.warnings)
            case ev.Warned(message=message):
                yield f"warning: {message}"
            case ev.RungReached(step=name):
                yield f"{name}: {rung(event, event.grace_seconds)}"
            case ev.OomKilled():
                yield f"warning: {record.warnings[-1][1]}"
            case ev.CancelRequested(reason=reason):
                yield f"stopping: {reason}; saving and cleaning up, a second Ctrl-C gives that up"
            case _:
                pass


def step_line(name: str, step: StepRecord, now: int | None = None) -> str:
    """One step; a running one has been running, or is being stopped, until ``now`` (microseconds since the epoch)."""
    message = step.outcome.message if step.outcome else ""
    seconds = step.seconds
    if step.status is Status.RUNNING and step.started is not None and now is not None:
        seconds = (now - step.started) / 1e6
        message = _stopping(step, now)
    return f"{MARKS[step.status]} {name:<10} {duration(seconds):>6}  {message}".rstrip()


def _stopping(step: StepRecord, now: int) -> str:
    """What is being done to end a running step's command. When only a command was ended, the step goes on."""
    if not step.rungs:
        return ""
    at, reached = step.rungs[-1]
    since = (now - at) / 1e6
    if reached.reason not in (StopReason.COMMAND_DEADLINE, StopReason.LEFT_RUNNING):
        return rung(reached, reached.grace_seconds - since)
    return rung(reached) if since < NEWS else ""


class Tree:
    """Every run with its steps, redrawn in place; running steps show how long they have been."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._records: dict[str, RunRecord] = {}

    def __call__(self, recorded: ev.Recorded) -> None:
        fold(self._records.setdefault(recorded.run, RunRecord(recorded.run)), recorded)

    def render(self) -> Text:
        from rich.text import Text

        styles = {Status.SUCCEEDED: "green", Status.FAILED: "red", Status.RUNNING: "bold", Status.CANCELLED: "yellow"}
        text = Text(no_wrap=True, overflow="ellipsis")
        for record in list(self._records.values()):
            used = "".join(f"  {line}" for line in usage_lines(record))
            text.append("rehearsal  " if record.rehearsal is not None else "", "bold yellow")
            text.append(f"{record.name}  run {record.id}  {isolation_line(record)}{printable(used, WIDEST)}\n", "bold")
            for name, step in record.steps.items():
                text.append(
                    f"  {printable(step_line(name, step, self._now()), WIDEST)}\n", styles.get(step.status, "dim")
                )
        return text
