"""Output of a run's steps as lines for people: an agent CLI's words, and everything else as it was printed.

Read from the logs on disk, so that a process which did not start the run shows the same, and nothing of a run waits
for whoever watches it. Whatever a terminal could obey is taken out.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from runner.artifacts.run_files import STREAMS, log_tails
from runner.events.record import RunRecord
from runner.report.format import size
from runner.triage.baseline import cleaned

Say = Callable[[str], str | None]

TAIL = 20  # lines
_CHUNK = 1 << 18  # bytes that are looked at as one
_LONGEST = 16 << 20  # bytes of a line of an agent's stream
_SHOWN = 40 << 10  # bytes of a line that is shown
_BEHIND = 1 << 20  # bytes that may wait to be shown: of more, only the end is
_END = 64 << 10
_AT_ONCE = 200  # lines of what came since the last look
_PIECE = 12  # lines of one thing that an agent says or runs


class LogReader:
    """Reader of the complete lines of a file that is being written, and that may not exist yet."""

    def __init__(self, path: Path, longest: int = _CHUNK) -> None:
        self._path = path
        self._longest = longest
        self._file: int | None = None
        self._rest = b""

    def skip(self) -> int:
        """Skip what is too much to show at once, and return how many bytes that was."""
        if (file := self._open()) is None:
            return 0
        at, end = os.lseek(file, 0, os.SEEK_CUR), os.fstat(file).st_size
        if end - at <= _BEHIND:
            return 0
        self._rest = b""
        os.lseek(file, end - _END, os.SEEK_SET)
        return end - _END - at

    def lines(self) -> Iterator[bytes]:
        """Return the new lines."""
        file = self._open()
        while file is not None and (chunk := os.read(file, _CHUNK)):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            yield from whole
            if len(self._rest) > self._longest:
                yield self._rest
                self._rest = b""

    def end(self) -> Iterator[bytes]:
        """Return the rest once nothing is written any more, an incomplete line included."""
        yield from self.lines()
        if self._rest:
            yield self._rest
        self._rest = b""

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int | None:
        if self._file is None:
            with suppress(OSError):
                self._file = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        return self._file


class AgentWords:
    """Readable lines of one stream of an agent's CLI."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._piece = ""

    def hear(self, raw: bytes) -> Iterator[str]:
        """Add text to the last piece that it continues; a piece ends at the start of the next line."""
        text = self._say(raw.decode(errors="replace")) or ""
        lines = text.strip("\n").split("\n")
        if len(lines) > _PIECE:
            text = "\n".join(["", *lines[: _PIECE - 1], f"... {len(lines) - _PIECE + 1} more lines", ""])
        *whole, self._piece = (self._piece + text).split("\n")
        yield from filter(str.strip, whole)

    def end(self) -> Iterator[str]:
        yield from filter(str.strip, [self._piece])
        self._piece = ""


class StepOutput:
    """Output of one step on both streams. ``say`` translates a line of an agent's CLI; without it, lines stay as they
    are.

    Of too many lines at once only the last are returned, unless ``whole``.
    """

    def __init__(self, directory: Path, step: str, say: Say | None, *, whole: bool = False) -> None:
        paths = (directory / "logs" / f"{step}.{stream}" for stream in STREAMS)
        self._logs = [
            (LogReader(path), None) if say is None else (LogReader(path, _LONGEST), AgentWords(say)) for path in paths
        ]
        self._whole = whole

    def lines(self) -> Iterator[str]:
        """Return the new lines."""
        for log, spoken in self._logs:
            yield from self._shown(log, log.lines(), spoken)

    def end(self) -> Iterator[str]:
        """Return the rest once the step has ended."""
        for log, spoken in self._logs:
            yield from self._shown(log, log.end(), spoken)
            yield from spoken.end() if spoken is not None else ()
        self.close()

    def close(self) -> None:
        for log, _ in self._logs:
            log.close()

    def _shown(self, log: LogReader, raws: Iterable[bytes], spoken: AgentWords | None) -> Iterator[str]:
        if spoken is not None:
            yield from (line for raw in raws for line in spoken.hear(raw))
        elif self._whole:
            yield from map(plain, raws)
        else:
            yield from _last(log, raws)


def _last(log: LogReader, raws: Iterable[bytes]) -> Iterator[str]:
    """Return the last lines if there are too many, after a line that says how much is left out."""
    if skipped := log.skip():
        yield f"[{size(skipped)} bytes are not shown]"
    lines = deque[bytes](maxlen=_AT_ONCE)
    count = 0
    for raw in raws:
        lines.append(raw)
        count += 1
    if count > _AT_ONCE:
        yield f"[{count - _AT_ONCE} lines are not shown]"
    yield from map(plain, lines)


def plain(line: bytes) -> str:
    """Return a printed line as a terminal shows it in the end: without colours, and the last of what was redrawn."""
    return cleaned(line.rstrip(b"\r").rpartition(b"\r")[2][:_SHOWN]).expandtabs()


def translator_of(agent: str) -> Say | None:
    """Return what translates a line of an agent's output; ``None`` for an agent whose output is text already."""
    import runner.agents
    from runner.core import plugins
    from runner.ports.agent import ModelAgent

    if not plugins.exists(runner.agents, agent):
        return None
    found = plugins.load(runner.agents, agent).agent
    return found.display if isinstance(found, ModelAgent) else None


def words_of(file: Path, say: Say) -> Iterator[str]:
    """Return all that an agent's CLI has written to a file, in words."""
    log, spoken = LogReader(file, _LONGEST), AgentWords(say)
    try:
        for raw in log.end():
            yield from spoken.hear(raw)
        yield from spoken.end()
    finally:
        log.close()


def tail_of(record: RunRecord, directory: Path, step: str, say: Say | None) -> tuple[str, ...]:
    """Return the last output lines of the command that failed a step, else of the step, shared by both streams."""
    if say is not None:
        return tuple(deque(StepOutput(directory, step, say).end(), maxlen=TAIL))
    out, err = ([plain(line) for line in end.splitlines()] for end in log_tails(record, directory, step))
    share = min(len(err), max(TAIL // 2, TAIL - len(out)))
    return (*out[-(TAIL - share) :], *err[len(err) - share :])
