"""Where a verb writes: text for people on a terminal or in CI, one JSON value for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from runner.errors import RunnerError


class Output:
    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.clean: Callable[[str], str] = lambda text: text  # takes secrets out of all that is written here

    @property
    def live(self) -> bool:
        """Whether a person watches: then progress may be redrawn."""
        return self.stdout.isatty()

    def line(self, text: str = "") -> None:
        print(self.clean(text), file=self.stdout, flush=True)

    def json(self, value: object) -> None:
        self.line(json.dumps(value, ensure_ascii=self.live, indent=2))  # a terminal gets no character to obey

    def findings(self, findings: Sequence[RunnerError]) -> None:
        """Errors and warnings, on standard error, so that a plan's JSON stays JSON."""
        if findings:
            from runner.report.diagnostics import render

            self.complain(render(findings, colour=self.stderr.isatty()))

    def complain(self, text: str) -> None:
        print(self.clean(text), file=self.stderr, flush=True)


def standard() -> Output:
    """Standard output and error, made to survive any text: what the terminal cannot show is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    return Output(sys.stdout, sys.stderr)
