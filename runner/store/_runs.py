"""Find the run that a person means, or the one that has a key."""

from __future__ import annotations

from collections.abc import Sequence

from runner.core.errors import RunExists, UnknownRun
from runner.core.sanitize import excerpt
from runner.events.events import RunStarted
from runner.ports.store import RunRow

_CANDIDATES = 8


def find_run(rows: Sequence[RunRow], text: str) -> RunRow:
    """Return the run among ``rows`` (newest first) whose id starts with ``text``, or the first for ``last``.

    Raises ``UnknownRun``, which lists the candidates when there are several.
    """
    found = [row for row in rows if row.id == text] or [row for row in rows if row.id.startswith(text)]
    if text == "last":
        found = list(rows[:1])
    if text and len(found) == 1:
        return found[0]
    if not found:
        raise UnknownRun(f"there is no run `{excerpt(text)}`", hint="`runner runs list` shows all")
    candidates = ", ".join(f"{row.id} ({row.name})" for row in found[:_CANDIDATES])
    more = f", and {len(found) - _CANDIDATES} more" if len(found) > _CANDIDATES else ""
    raise UnknownRun(f"`{excerpt(text)}` may be any of {len(found)} runs", hint=f"one of: {candidates}{more}")


def run_exists_error(run: str, started: RunStarted) -> RunExists:
    return RunExists(f"run `{run}` has the name `{started.name}` and the key `{excerpt(started.key or '')}`", run=run)
