"""Watching one run closely: what happens, what its agent says as it says it, and a line that is always of now.

The agent's words are read from the log on disk, so that a process which did not start the run shows the same. A
terminal that has gone takes nothing with it (``Output.outlive``): the run goes on unseen.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from runner import events as ev
from runner.cli.output import Output
from runner.errors import printable
from runner.nurseries import open_services
from runner.record import RunRecord, fold
from runner.report import triage
from runner.report.words import columns

if TYPE_CHECKING:
    from runner.report.triage import Found, Scene
    from runner.settings import Settings

Say = Callable[[str], str | None]

_TICK = 0.1  # seconds between looks at the log
_LINES = 12  # of one thing that the agent says or runs
_CHUNK = 1 << 18  # bytes of the log that are shown at a time
_REPORT = 1 << 24  # bytes of a report that is looked at
_CLEAR = "\r\x1b[2K"


class Log:
    """The lines of a file that is being written, as they come to be whole."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._rest = b""

    def follow(self, path: Path) -> None:
        with suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)

    def lines(self) -> Iterable[bytes]:
        """Those that are new."""
        while self._file is not None and (chunk := os.read(self._file, _CHUNK)):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            yield from whole
            if len(self._rest) > _CHUNK:
                yield self._rest
                self._rest = b""

    def end(self) -> Iterable[bytes]:
        """What is left once nothing is written any more, be it half a line."""
        yield from self.lines()
        yield self._rest
        self._rest = b""

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Screen:
    """A sink for one run, whose directory is below ``runs``."""

    def __init__(
        self,
        out: Output,
        scene: Scene,
        runs: Path,
        *,
        quiet: bool,
        raw: bool,
        now: Callable[[], int],
        clock: Callable[[int], str],
    ) -> None:
        self.record: RunRecord | None = None
        self._out = out
        self._scene = scene
        self._runs = runs
        self._quiet = quiet
        self._say = _as_it_is if raw or not scene.agent else _say_of(scene.agent)
        self._now = now
        self._clock = clock
        self._log = Log()
        self._doing = self._piece = self._drawn = ""

    def __call__(self, recorded: ev.Recorded) -> None:
        if self.record is None or self.record.id != recorded.run:
            self.record = RunRecord(recorded.run)
        fold(self.record, recorded)
        match recorded.event:
            case ev.RunStarted():
                self.lines(triage.opening(self.record, self._scene, self._clock))
            case ev.LogOpened(path=path):
                self._log.follow(Path(path))
                self.lines([f"log        {triage.shown_path(Path(path), Path.cwd())}"])
            case ev.AgentStarted(step=step) if self._scene.incident is None:
                self._log.follow(self._runs / recorded.run / "logs" / f"{step}.stdout")
            case ev.StepEnded(step="agent"):
                self._take(self._log.end())
                self._tell([self._piece])
                self._piece = ""
        self.lines(triage.news(self.record, recorded.event))

    def lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._draw("")
            self._out.line(printable(line, triage.WIDEST))

    def tick(self) -> None:
        """Show what the agent has said since, and what is under way now."""
        self._take(self._log.lines())
        if self._out.redraws and self.record is not None:
            line = triage.live_line(self.record, self._scene, self._now(), self._doing)
            self._draw(_clipped(line, _width(self._out) - 1))

    def _take(self, raws: Iterable[bytes]) -> None:
        for raw in raws:
            if text := self._say(raw.decode(errors="replace")):
                self._hear(text)

    def _hear(self, text: str) -> None:
        """Take in what goes on where the last piece ended; what begins a line begins with its end."""
        lines = text.strip("\n").split("\n")
        if len(lines) > _LINES:
            text = "\n".join(["", *lines[: _LINES - 1], f"... {len(lines) - _LINES + 1} more lines", ""])
        *whole, self._piece = (self._piece + text).split("\n")
        self._tell(whole)

    def _tell(self, lines: Iterable[str]) -> None:
        for line in filter(str.strip, lines):
            self._doing = line.strip()
            if not self._quiet:
                self.lines([f"   | {line}".rstrip()])

    def finish(self, record: RunRecord) -> None:
        """The last block: how it ended."""
        found = found_of(record, self._scene, self._runs / record.id)
        self.lines(["", *triage.closing(record, self._scene, found)])

    def close(self) -> None:
        """Nothing is redrawn any more."""
        self.tick()
        self._draw("")
        self._log.close()

    def _draw(self, line: str) -> None:
        """Make this the line that is of now; an empty one takes it away."""
        if line != self._drawn:
            self._out.stdout.write(_CLEAR + self._out.clean(line))
            self._out.stdout.flush()
        self._drawn = line


@asynccontextmanager
async def open_screen(
    out: Output, scene: Scene, settings: Settings, *, quiet: bool = False, raw: bool = False
) -> AsyncIterator[Screen]:
    """A screen that keeps itself up to date for the length of the block; ``raw`` shows output as it is."""
    from runner.app.state import now_microseconds

    out.outlive()
    screen = Screen(out, scene, settings.home / "runs", quiet=quiet, raw=raw, now=now_microseconds, clock=_clock)

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


def _say_of(agent: str) -> Say:
    """What makes text of a line of an agent's output."""
    import runner.agents
    from runner import plugins

    return plugins.load(runner.agents, agent).agent.say  # type: ignore[no-any-return]


def _as_it_is(line: str) -> str:
    return f"{line}\n"


def found_of(record: RunRecord, scene: Scene, directory: Path) -> Found:
    """The report of a run that has ended, as it was kept, where people find it, and what its agent said last."""
    from runner.app.attempt import last_words
    from runner.beneath import read_beneath

    kept, report, place = directory / "output", None, None
    if scene.report:
        delivered = record.receipt.outputs if record.receipt is not None else ()
        place = next((Path(path) for path in delivered if path.endswith(f"/{scene.report}")), kept / scene.report)
        try:
            report = read_beneath(kept, scene.report, _REPORT).decode(errors="replace")
        except OSError:
            place = place if place.is_file() else None
    return triage.Found(report, place, last_words(scene.agent, directory), Path.cwd())


def _clock(microseconds: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(microseconds / 1e6, UTC).astimezone().strftime("%H:%M:%S")


def _clipped(line: str, room: int) -> str:
    """The beginning of a line, of so many columns at most."""
    line = line[:room]
    while columns(line) > room:
        line = line[:-1]
    return line


def _width(out: Output) -> int:
    try:
        return os.get_terminal_size(out.stdout.fileno()).columns or 80
    except OSError:
        return 80
