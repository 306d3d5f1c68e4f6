"""Live view of runs: what happens, what steps print as they print it, and lines that are redrawn.

Output is read from the logs on disk, so that a process which did not start a run shows the same, and a run never waits
for its reader: unread output is kept back, and of too much only the end is shown. When the terminal goes away, the runs
go on unseen (``Output.outlive``).
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import trio
from msgspec.structs import replace

from runner.artifacts.run_files import read_account
from runner.cli.output import Output
from runner.core.model import Status
from runner.core.nurseries import open_services
from runner.core.sanitize import sanitize
from runner.events import events as ev
from runner.events.record import RunRecord, fold
from runner.ops.runs.history import directory_of
from runner.ops.runs.previous_attempt import result_of
from runner.ops.runs.step_output import Say, StepOutput, tail_of, translator_of
from runner.report import progress, triage
from runner.report.format import columns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.core.settings import Settings
    from runner.report.triage import Header

_TICK = 0.1  # seconds between looks at the logs
_WAITING = 400  # lines that wait for their reader, before no more is read for him
_MOST = 10_000  # lines of what a step prints

_MARK = re.compile(r"^([\w.-]* +)([✓✗!])(?= )")
_COLOURS = {"✓": 32, "✗": 31, "!": 33}


class RunView(Protocol):
    """Renderer of a kind of run: ``runner.report.progress``, or ``runner.report.triage``."""

    def opening(self, record: RunRecord, header: Header, clock: Callable[[int], str]) -> Iterator[str]: ...

    def news(self, record: RunRecord, event: ev.Event) -> Iterator[str]: ...

    def live_line(self, record: RunRecord, header: Header, now: int, doing: str = "") -> str: ...


class WatchedRun:
    """One run: its record so far, and the output of its current step."""

    def __init__(self, run: str, directory: Path, header: Header, say: Say | None) -> None:
        self.record = RunRecord(id=run)
        self.directory = directory
        self.header = header
        self.doing = ""
        self._say = say
        self._step = ""
        self._printed: StepOutput | None = None
        self._count = 0

    def begin(self, step: str) -> None:
        self._printed = StepOutput(self.directory, step, self._say_of(step))
        self._step, self._count, self.doing = step, 0, ""

    def lines(self, *, ended: bool = False) -> Iterator[str]:
        """Return what the step printed since, with its name first; ``ended`` when nothing will follow."""
        if (printed := self._printed) is None:
            return
        if ended:
            self._printed = None
        for line in printed.end() if ended else printed.lines():
            if not self._count:
                yield f"  ▸ {self._step}"
            self._count += 1
            self.doing = line.strip() or self.doing
            if self._count <= _MOST:
                yield f"   | {line}".rstrip()
            elif self._count == _MOST + 1:
                yield f"   | [no more of it is shown here: runner runs logs {self.record.id} {self._step}]"

    def shows_end_of(self, step: str) -> bool:
        """Tell whether the last lines shown are those that made the step fail."""
        failure = self.record.steps[step].failure
        if failure is None:
            return self._count <= _MOST
        paths = (self.directory / "logs" / f"{step}.{stream}" for stream in ("stdout", "stderr"))
        ends = zip((failure.stdout[1], failure.stderr[1]), paths, strict=True)
        return self._count <= _MOST and all(path.is_file() and end >= path.stat().st_size for end, path in ends)

    def tail(self, step: str) -> tuple[str, ...]:
        return tail_of(self.record, self.directory, step, self._say_of(step))

    def close(self) -> None:
        if self._printed is not None:
            self._printed.close()

    def _say_of(self, step: str) -> Say | None:
        return self._say if self.record.steps[step].kind == "agent" else None


class Screen:
    """Sink for runs, whose directories ``place`` knows. ``headers`` has what is known of them, by name."""

    def __init__(
        self,
        out: Output,
        headers: Mapping[str, Header],
        place: Callable[[str], Path],
        *,
        face: RunView,
        quiet: bool,
        raw: bool,
        now: Callable[[], int],
        clock: Callable[[int], str],
    ) -> None:
        self._out = out
        self._scenes = headers
        self._place = place
        self._face = face
        self._quiet = quiet
        self._raw = raw
        self._now = now
        self._clock = clock
        self._watched: dict[str, WatchedRun] = {}
        self._wide = max(map(len, headers)) if len(headers) > 1 else 0
        self._waiting: deque[str] = deque()

    def __call__(self, recorded: ev.Recorded) -> None:
        watched, event = self._watched.get(recorded.run), recorded.event
        if isinstance(event, ev.RunSubmitted | ev.RunStarted) and watched is None:
            header = self._scenes.get(event.name, triage.Header())
            say = None if self._raw else translator_of(header.agent)
            watched = self._watched[recorded.run] = WatchedRun(recorded.run, self._place(recorded.run), header, say)
        assert watched is not None  # a run begins with one of these
        fold(watched.record, recorded)
        match event:
            case ev.RunStarted():
                self._tell(watched, self._face.opening(watched.record, watched.header, self._clock))
            case ev.StepStarted(step=step):
                watched.begin(step)
            case ev.StepEnded():
                self._take(watched, watched.lines(ended=True))
        self._tell(watched, self._face.news(watched.record, event))
        if isinstance(event, ev.StepEnded) and event.outcome.status in (Status.FAILED, Status.UNKNOWN):
            self._explain(watched, event.step)

    def _explain(self, watched: WatchedRun, step: str) -> None:
        """Say why a step failed, unless that stands right above."""
        seen = not self._quiet and not self._wide and watched.shows_end_of(step)
        account = read_account(watched.record, watched.directory)
        if watched.header.incident is not None and self._face is triage:  # its manifest is none that a person wrote
            account = replace(account, origins={})
        self._tell(watched, progress.why(account, step, watched.tail(step), seen=seen))
        self._tell(watched, progress.others(watched.record, step))

    def lines(self, lines: Iterable[str]) -> None:
        self._waiting.extend(lines)
        self._flush()

    def tick(self) -> None:
        """Show what was printed since, and redraw the current lines."""
        for watched in self._watched.values():
            if watched.record.ended is None and len(self._waiting) < _WAITING:
                self._take(watched, watched.lines())
        self._flush()
        if self._out.redraws and not self._waiting and self._out.ready:
            self._out.now(self._live_lines())

    def _live_lines(self) -> Iterator[str]:
        room, high = _size(self._out)
        lines = []
        for watched in self._watched.values():
            line = self._face.live_line(watched.record, watched.header, self._now(), watched.doing)
            if line and watched.record.started and watched.record.ended is None:
                lines.append(self._named(watched, line))
        if len(lines) >= high:
            lines = [*lines[: high - 2], f"  and {len(lines) - high + 2} more"]
        return (_clipped(sanitize(line, triage.WIDEST), room - 1) for line in lines)

    def _take(self, watched: WatchedRun, lines: Iterable[str]) -> None:
        taken = list(lines)
        if not self._quiet:
            self._tell(watched, taken)

    def _tell(self, watched: WatchedRun, lines: Iterable[str]) -> None:
        self.lines(self._named(watched, line) for line in lines)

    def _named(self, watched: WatchedRun, line: str) -> str:
        if not self._wide:
            return line
        name = watched.record.name
        return f"{name:<{self._wide}} {line.removeprefix(f'{name} ')}"

    def _flush(self, *, all: bool = False) -> None:
        """Write what is waiting, as far as the terminal takes it at once."""
        while self._waiting and (all or self._out.ready):
            line = sanitize(self._waiting.popleft(), triage.WIDEST)
            self._out.line(_MARK.sub(_tinted, line) if self._out.redraws and self._out.manners.colour else line)

    def finish(self, record: RunRecord) -> None:
        """Show the last block of a triage: how it ended."""
        header = self._scenes.get(record.name, triage.Header())
        found = result_of(record, header, self._place(record.id))
        self.lines(["", *triage.closing(record, header, found)])
        self._flush(all=True)

    def close(self) -> None:
        """Stop redrawing."""
        self.tick()
        self._flush(all=True)
        self._out.now(())
        for watched in self._watched.values():
            watched.close()


@asynccontextmanager
async def open_screen(
    out: Output,
    headers: Mapping[str, Header],
    settings: Settings,
    *,
    face: RunView = progress,
    quiet: bool = False,
    raw: bool = False,
) -> AsyncIterator[Screen]:
    """Open a screen that updates itself during the block; ``raw`` shows output as it is."""
    from runner.core.clock import now_microseconds

    out.outlive()
    place = partial(directory_of, settings)
    screen = Screen(out, headers, place, face=face, quiet=quiet, raw=raw, now=now_microseconds, clock=_clock)

    async def tick() -> None:
        while True:
            await trio.sleep(_TICK)
            screen.tick()

    try:
        async with open_services() as services:
            services.start_soon(tick)
            yield screen
    finally:
        screen.close()


def _clock(microseconds: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(microseconds / 1e6, UTC).astimezone().strftime("%H:%M:%S")


def _tinted(found: re.Match[str]) -> str:
    return f"{found[1]}\x1b[{_COLOURS[found[2]]}m{found[2]}\x1b[0m"


def _clipped(line: str, room: int) -> str:
    """Cut a line to so many columns."""
    line = line[:room]
    while columns(line) > room:
        line = line[:-1]
    return line


def _size(out: Output) -> tuple[int, int]:
    """Return columns and lines of the terminal."""
    try:
        size = os.get_terminal_size(out.stdout.fileno())
    except OSError:
        return 80, 24
    return size.columns or 80, size.lines or 24
