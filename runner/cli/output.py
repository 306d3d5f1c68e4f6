"""Output of a verb: text for people on a terminal or in CI, one JSON value for programs."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING, TextIO

from runner.core.errors import HostRefused, RunnerError
from runner.core.output_style import Manners, manners

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Output:
    def __init__(self, stdout: TextIO, stderr: TextIO, manners: Manners = Manners()) -> None:  # noqa: B008  # frozen
        self.stdout = stdout
        self.stderr = stderr
        self.manners = manners
        self.clean: Callable[[str], str] = lambda text: text  # takes secrets out of all that is written here
        self._drawn: tuple[str, ...] = ()  # what stands below all that was said, on a terminal

    @property
    def live(self) -> bool:
        """Tell whether standard output is a terminal."""
        return self.stdout.isatty()

    @property
    def redraws(self) -> bool:
        """Tell whether progress may be redrawn, since a person watches."""
        return self.live and self.manners.redraw

    @property
    def ready(self) -> bool:
        """Tell whether a line can be written without waiting for the reader."""
        try:
            return bool(select.select([], [self.stdout], [], 0)[1])
        except (OSError, ValueError):  # text in memory is always taken
            return True

    def now(self, lines: Iterable[str]) -> None:
        """Keep these lines, each narrower than the terminal, below everything else; none removes them."""
        drawn = tuple(map(self.clean, lines))
        if drawn != self._drawn:
            self.stdout.write(self._erasing() + "\n".join(drawn))
            self.stdout.flush()
            self._drawn = drawn

    def _erase(self) -> None:
        if self._drawn:
            self.stdout.write(self._erasing())
            self.stdout.flush()
            self._drawn = ()

    def _erasing(self) -> str:
        return "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (len(self._drawn) - 1)

    def outlive(self) -> None:
        """Ignore from now on streams that cannot be written, when a reader has gone or a disk is full.

        What is written there is lost. Whoever opened the streams keeps them open.
        """
        self.stdout, self.stderr = _lasting(self.stdout), _lasting(self.stderr)

    def line(self, text: str = "") -> None:
        self._tell(self._harmless(self.clean(text)))

    def json(self, value: object, *, indent: int | None = 2) -> None:
        """Print JSON: escaped on a terminal, one value for programs; on one line without ``indent``."""
        text = self.clean(json.dumps(value, ensure_ascii=self.live, indent=indent))
        if self.manners.ci_commands:
            from runner.report.github import quoted

            text = quoted(text)
        self._tell(text)

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]], *, nothing: str) -> None:
        """Print rows below the heads of their columns, or say that there is ``nothing``.

        What others chose is escaped, and a row is cut to the width of a terminal.
        """
        from shutil import get_terminal_size

        from runner.core.sanitize import sanitize
        from runner.report.text import WIDEST

        room = get_terminal_size().columns if self.live else WIDEST
        shown = [heads, *rows] if rows else [(nothing,)]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        for row in shown:
            cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            self.line(sanitize("  ".join(cells).rstrip(), room))

    def commands(self, commands: Iterable[str], *, aside: bool = False) -> None:
        """Print workflow commands; ``aside`` on standard error, where GitHub reads them as well."""
        for command in commands:
            print(self.clean(command), file=self.stderr if aside else self.stdout, flush=True)

    def findings(self, findings: Sequence[RunnerError]) -> None:
        """Print errors and warnings on standard error, so that JSON on standard output stays JSON."""
        if findings:
            from runner.report.diagnostics import render

            self.complain(render(findings, colour=self.stderr.isatty() and self.manners.colour))

    def raw(self, content: bytes) -> None:
        """Write bytes as they are, for a file or a pipe."""
        with self._writing():
            self.stdout.flush()
            self.stdout.buffer.write(content)
            self.stdout.buffer.flush()

    def verbatim(self, text: str) -> None:
        """Print text with its own line breaks, which contains nothing to hide."""
        self._tell(text, end="")

    def _tell(self, text: str, *, end: str = "\n") -> None:
        with self._writing():
            self._erase()
            print(text, end=end, file=self.stdout, flush=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise  # the reader has gone, and knows it
        except OSError as error:
            to_nowhere(self.stdout)
            raise HostRefused(f"standard output cannot be written: {error.strerror}") from error

    def complain(self, text: str) -> None:
        self._erase()
        print(self._harmless(self.clean(text)), file=self.stderr, flush=True)

    def _harmless(self, text: str) -> str:
        if not self.manners.ci_commands:
            return text
        from runner.report.github import harmless

        return "\n".join(map(harmless, text.split("\n")))


def to_nowhere(stream: TextIO | FileIO) -> None:
    """Point the stream to nowhere, so that buffered text does not raise again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Lasting(FileIO):
    """Stream that survives: one that cannot be written is dropped, and one that is full is waited for."""

    def write(self, content: ReadableBuffer, /) -> int:
        try:
            while (written := super().write(content)) is None:
                select.select([], [self], [])
        except OSError:
            to_nowhere(self)
            return memoryview(content).nbytes
        return written


def _lasting(stream: TextIO) -> TextIO:
    if not isinstance(stream, TextIOWrapper):  # text in memory is always taken
        return stream
    end = _Lasting(stream.fileno(), "w", closefd=False)
    return TextIOWrapper(BufferedWriter(end), encoding=stream.encoding, errors=stream.errors)


def standard() -> Output:
    """Open standard output and error for any text: what the terminal cannot show is escaped.

    A stream that was closed before the start goes nowhere.
    """
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()  # held there: they stay open
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    return Output(sys.stdout, _lasting(sys.stderr), manners())


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")
