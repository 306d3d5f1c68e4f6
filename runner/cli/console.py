"""Watching runs: plain lines, a live tree on a terminal, or the events themselves. All are sinks of one stream."""

from __future__ import annotations

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
    """The sink for one apply, in ``form`` text or jsonl; the live tree is gone when the block ends.

    From here on the run outlives who reads of it.
    """
    out.outlive()
    if form == "jsonl":
        yield lambda recorded: out.json(ev.as_json(recorded), indent=None)
    elif out.redraws:
        from rich.console import Console
        from rich.live import Live

        from runner.app.state import now_microseconds

        screen = Console(file=out.stdout, no_color=not out.manners.colour)
        tree = Tree(now_microseconds)
        with Live(
            get_renderable=lambda: tree.render(screen.height), console=screen, refresh_per_second=8, transient=True
        ):
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

    def _lines(  # noqa: C901, PLR0912  # one arm an event type
        self, record: RunRecord, event: ev.Event
    ) -> Iterator[str]:
        match event:
            case ev.RunStarted():
                if record.rehearsal is not None:
                    yield f"a rehearsal: no model is asked, {record.rehearsal} stands for it"
                resumes = f", resumes run {record.resumes}" if record.resumes else ""
                yield f"run {record.id}{resumes}, stops after {duration(record.deadline_seconds)} at the latest"
            case ev.IsolationObserved() | ev.ProviderChosen():
                yield f"isolation {isolation_line(record)}"
            case ev.LogOpened(path=path):
                yield f"log {path}"
            case ev.ProviderRefused(provider=provider, reason=reason):
                yield f"provider {provider} refused: {reason}"
            case ev.FellBack(step=name, provider=provider, reason=reason):
                yield f"falling back from {provider}: {name}: {reason}"
            case ev.Retried(step=name, what=what, reason=reason, pause_seconds=pause):
                yield f"{name}: {what} failed, trying again in {duration(pause)}: {reason}"
            case ev.StepEnded(step=name):
                yield step_line(name, record.steps[name])
                if record.preloaded is not None and record.preloaded.step == name and record.preloaded.headline:
                    yield f"    baseline: {record.preloaded.headline}"
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


_STYLES = {Status.SUCCEEDED: "green", Status.FAILED: "red", Status.RUNNING: "bold", Status.CANCELLED: "yellow"}


class Tree:
    """Every run with its steps, redrawn in place; running steps show how long they have been."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._records: dict[str, RunRecord] = {}

    def __call__(self, recorded: ev.Recorded) -> None:
        fold(self._records.setdefault(recorded.run, RunRecord(recorded.run)), recorded)

    def render(self, height: int = 0) -> Text:
        """At most ``height`` lines, if given: runs that have ended, and steps that do not run, give way."""
        from rich.text import Text

        records = list(self._records.values())
        lines = [line for record in records for line in self._lines(record)]
        if height and len(lines) > height:
            running = [record for record in records if record.ended is None]
            ended = [(_ended_line(record), _STYLES.get(record.status, "")) for record in records if record.ended]
            lines = [line for record in running for line in self._lines(record, brief=True)] + ended
        if height and len(lines) > height:
            lines = [*lines[: height - 1], (f"and {len(lines) - height + 1} more lines", "dim")]
        text = Text(no_wrap=True, overflow="ellipsis")
        for line, style in lines:
            text.append(f"{printable(line, WIDEST)}\n", style)
        return text

    def _lines(self, record: RunRecord, *, brief: bool = False) -> Iterator[tuple[str, str]]:
        """A run and its steps, each line with its style; when ``brief``, only steps that run or went wrong."""
        used = "".join(f"  {line}" for line in usage_lines(record))
        rehearsal = "rehearsal  " if record.rehearsal is not None else ""
        yield f"{rehearsal}{record.name}  run {record.id}  {isolation_line(record)}{used}", "bold"
        for name, step in record.steps.items():
            if not brief or step.status not in (Status.PENDING, Status.SUCCEEDED, Status.SKIPPED):
                yield f"  {step_line(name, step, self._now())}", _STYLES.get(step.status, "dim")


def _ended_line(record: RunRecord) -> str:
    because = record.outcome.message if record.outcome is not None else ""
    return f"{MARKS[record.status]} {record.name}  run {record.id}  {duration(record.seconds)}  {because}".rstrip()
