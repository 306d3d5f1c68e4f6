"""Where a verb writes: text for people on a terminal or in CI, one JSON value for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from runner.settings import Manners, manners

if TYPE_CHECKING:
    from runner.errors import RunnerError


class Output:
    def __init__(self, stdout: TextIO, stderr: TextIO, manners: Manners = Manners()) -> None:  # noqa: B008  # frozen
        self.stdout = stdout
        self.stderr = stderr
        self.manners = manners
        self.clean: Callable[[str], str] = lambda text: text  # takes secrets out of all that is written here

    @property
    def live(self) -> bool:
        """Whether standard output is a terminal."""
        return self.stdout.isatty()

    @property
    def redraws(self) -> bool:
        """Whether a person watches: then progress may be redrawn."""
        return self.live and self.manners.redraw

    def line(self, text: str = "") -> None:
        print(self._harmless(self.clean(text)), file=self.stdout, flush=True)

    def json(self, value: object, *, indent: int | None = 2) -> None:
        """A terminal gets no character to obey, a program one value: on one line without ``indent``."""
        text = self.clean(json.dumps(value, ensure_ascii=self.live, indent=indent))
        if self.manners.obeyed:
            from runner.report.github import quoted

            text = quoted(text)
        print(text, file=self.stdout, flush=True)

    def commands(self, commands: Iterable[str], *, aside: bool = False) -> None:
        """Workflow commands; ``aside`` on standard error, where GitHub reads them as well."""
        for command in commands:
            print(self.clean(command), file=self.stderr if aside else self.stdout, flush=True)

    def findings(self, findings: Sequence[RunnerError]) -> None:
        """Errors and warnings, on standard error, so that a plan's JSON stays JSON."""
        if findings:
            from runner.report.diagnostics import render

            self.complain(render(findings, colour=self.stderr.isatty() and self.manners.colour))

    def complain(self, text: str) -> None:
        print(self._harmless(self.clean(text)), file=self.stderr, flush=True)

    def _harmless(self, text: str) -> str:
        if not self.manners.obeyed:
            return text
        from runner.report.github import harmless

        return "\n".join(map(harmless, text.split("\n")))


def standard() -> Output:
    """Standard output and error, made to survive any text: what the terminal cannot show is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    return Output(sys.stdout, sys.stderr, manners())
