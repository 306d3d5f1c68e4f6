"""Remove copies of runs from the store of artifacts when the runs are older than ``RUN_RETENTION``.

Any host does so for the runs of its journal. What the journal does not know is another's, and stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio
from msgspec import Struct

from runner.artifacts.run_copy import RUNS, folder_of, remove_run
from runner.artifacts.stores import open_artifacts
from runner.core.errors import RunnerError
from runner.core.settings import Settings
from runner.ports.store import RunRow


class StoredCopy(Struct, frozen=True, kw_only=True):
    """The copy of a run that has become old; ``left`` says why it could not be removed."""

    run: str
    place: str
    age_seconds: float
    bytes: int = 0
    left: str | None = None


async def collect_copies(
    settings: Settings, rows: Sequence[RunRow], now: int, *, dry_run: bool
) -> tuple[list[StoredCopy], str | None]:
    """Remove old copies; return them, and why the store of artifacts could not be looked at."""
    if settings.artifacts is None:
        return [], None
    artifacts = open_artifacts(settings.artifacts)
    ended = {row.id: (now - row.ended) / 1e6 for row in rows if row.ended is not None}

    def work() -> list[StoredCopy]:
        found = []
        for run in list(artifacts.folders(RUNS)):
            if (age := ended.get(run, 0.0)) <= settings.run_retention:
                continue
            copy = StoredCopy(run=run, place=f"{artifacts.url}/{folder_of(run)}", age_seconds=age)
            found.append(copy if dry_run else _removed(copy))
        return found

    def _removed(copy: StoredCopy) -> StoredCopy:
        try:
            size, left = remove_run(artifacts, copy.run), None
        except RunnerError as error:
            size, left = 0, error.message
        return StoredCopy(run=copy.run, place=copy.place, age_seconds=copy.age_seconds, bytes=size, left=left)

    try:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True), None
    except RunnerError as error:
        return [], error.message
