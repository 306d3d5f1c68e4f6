"""Find the run that a person means, or the one that has a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.core.errors import NotFoundError, RunExists, UnknownRun
from runner.core.sanitize import excerpt
from runner.events.events import RunStarted
from runner.ports.store import RunRow

_CANDIDATES = 8


def find_run(rows: Sequence[RunRow], text: str) -> RunRow:
    """Return the run among ``rows`` (newest first) whose id starts with ``text``, or the first for ``last``.

    Raises ``UnknownRun``, which lists the candidates when there are several.
    """
    if text == "last" and rows:
        return rows[0]
    names = {row.id: f"{row.id} ({row.name})" for row in rows}
    id = match_id(names, text, UnknownRun, "run", "runner runs list")
    return next(row for row in rows if row.id == id)


def match_id(names: Mapping[str, str], text: str, error: type[NotFoundError], kind: str, lists: str) -> str:
    """Return the one id that is ``text``, or starts with it; ``names`` are what an error calls each."""
    if not text:
        raise error(f"the id of the {kind} is empty", hint="look at the variable that it comes from")
    found = [text] if text in names else [id for id in names if id.startswith(text)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise error(f"there is no {kind} `{excerpt(text)}`", hint=f"`{lists}` shows all")
    more = f", and {len(found) - _CANDIDATES} more" if len(found) > _CANDIDATES else ""
    hint = f"name one of: {', '.join(names[id] for id in found[:_CANDIDATES])}{more}"
    raise error(f"`{excerpt(text)}` may be any of {len(found)} {kind}s", hint=hint)


def run_exists_error(run: str, started: RunStarted) -> RunExists:
    return RunExists(f"run `{run}` has the name `{started.name}` and the key `{excerpt(started.key or '')}`", run=run)
