"""Findings as GitHub workflow commands, which become annotations on the lines of a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.errors import RunnerError, in_order, shown
from runner.report.diagnostics import MESSAGE

SHOWN = 10  # of each severity in one step; GitHub drops the rest without a word


def commands(findings: Sequence[RunnerError]) -> Iterator[str]:
    """One command a line, errors first, then a line that counts those that would not be shown."""
    ordered = in_order(findings)
    hidden = 0
    for severity in ("error", "warning"):
        chosen = [finding for finding in ordered if finding.severity == severity]
        hidden += len(chosen[SHOWN:])
        yield from map(_command, chosen[:SHOWN])
    if hidden:
        yield f"and {hidden} more: runner validate"


def _command(finding: RunnerError) -> str:
    properties: dict[str, object] = {}
    if at := finding.at:
        properties = {"file": at.file, "line": at.line, "col": at.column, "endColumn": at.column + at.width}
    properties["title"] = finding.code
    listed = ",".join(f"{name}={_property(str(value))}" for name, value in properties.items())
    text = shown(finding.message, MESSAGE) + (f"\nhint: {shown(finding.hint, MESSAGE)}" if finding.hint else "")
    return f"::{finding.severity} {listed}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
