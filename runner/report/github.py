"""Findings and failed runs as GitHub workflow commands, which become annotations on lines of a pull request.

``harmless`` is for everything else that is printed where GitHub, Azure Pipelines or TeamCity listen, so that nothing an
agent writes is obeyed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from runner.core.errors import Place, RunnerError, in_order
from runner.core.model import Status
from runner.core.sanitize import excerpt
from runner.report.diagnostics import MESSAGE
from runner.report.run_files import Account, blamed

_BEGUN = re.compile(r"##(?=[A-Za-z]*\[)")
SHOWN = 10  # of each severity in one step; GitHub drops the rest without a word


@dataclass(frozen=True)
class Note:
    """One annotation. ``at`` has a file relative to the repository."""

    severity: Literal["error", "warning"]
    title: str
    text: str
    at: Place | None = None


def commands(findings: Sequence[RunnerError]) -> Iterator[str]:
    """Yield one command a line, errors first, then a line that counts those that would not be shown."""
    yield from listed([note_of(finding) for finding in in_order(findings)], "runner validate")


def listed(notes: Sequence[Note], rest: str) -> Iterator[str]:
    """Select as many of each severity as GitHub shows, errors first, and say where the ``rest`` is."""
    hidden = 0
    for severity in ("error", "warning"):
        chosen = [note for note in notes if note.severity == severity]
        hidden += len(chosen[SHOWN:])
        yield from map(_command, chosen[:SHOWN])
    if hidden:
        yield f"and {hidden} more: {rest}"


def note_of(finding: RunnerError) -> Note:
    text = excerpt(finding.message, MESSAGE) + (f"\nhint: {excerpt(finding.hint, MESSAGE)}" if finding.hint else "")
    return Note(finding.severity, finding.code, text, finding.at)


def violations_of(account: Account) -> Iterator[Note]:
    """Return annotations for what broke policy, at the file of the repository."""
    for violation in account.record.violations:
        yield Note("error", f"policy: {violation.rule}", excerpt(str(violation), MESSAGE), Place(violation.path, 1, 1))


def notes_of(account: Account) -> Iterator[Note]:
    """Return annotations for a failed run, at the manifest line of the deciding step, and for each warning."""
    record = account.record
    if record.status not in (Status.SUCCEEDED, Status.SKIPPED):
        outcome = record.outcome
        step = blamed(record)
        reason = outcome.reason.value if outcome is not None and outcome.reason is not None else record.status.value
        lines = [outcome.message if outcome is not None else record.status.value]
        lines += record.steps[step].outcome.details[:20] if step is not None else ()  # type: ignore[union-attr]
        severity: Literal["error", "warning"] = "warning" if record.status is Status.CANCELLED else "error"
        text = "\n".join(excerpt(line, MESSAGE) for line in [*lines, f"runner runs show {record.id}"])
        yield Note(severity, f"run {record.name}: {reason}", text, _place(account, step or ""))
    for code, message in record.warnings:
        yield Note("warning", f"run {record.name}: {code}", excerpt(message, MESSAGE))


def harmless(text: str) -> str:
    """Escape a line so that no CI sees a command (``::``, ``##[``, ``##vso[``, ``##teamcity[``); ``quoted`` for
    JSON.
    """
    head = text[: len(text) - len(text.lstrip())]
    if text.startswith("::", len(head)):
        text = f"{head}\\x3a{text[len(head) + 1 :]}"
    return _BEGUN.sub(r"#\\x23", text)


def quoted(document: str) -> str:
    """Rewrite JSON to an equal text in which no CI sees a command: ``##`` only occurs in strings."""
    return _BEGUN.sub(r"#\\u0023", document)


def _place(account: Account, step: str) -> Place | None:
    """Return the manifest line of a step, else of the run."""
    for name in (step, ""):
        file, _, line = account.origins.get(name, "").rpartition(":")
        if file and line.isdigit():
            return Place(file, int(line), 1)
    return None


def _command(note: Note) -> str:
    properties: dict[str, object] = {}
    if at := note.at:
        properties = {"file": at.file, "line": at.line, "col": at.column, "endColumn": at.column + at.width}
    properties["title"] = note.title
    named = ",".join(f"{name}={_property(str(value))}" for name, value in properties.items())
    return f"::{note.severity} {named}::{_data(note.text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
