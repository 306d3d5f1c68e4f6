"""A store that forgets everything when the process ends; engine tests run on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from runner.errors import RunOver, StoreFailed
from runner.events import Event, Recorded, RunEnded, RunStarted, decode, encode
from runner.model import Status
from runner.ports.store import RunRow
from runner.store._runs import find_run, run_exists


class MemoryStore:
    nonce = "memory"

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._journal: dict[str, list[Recorded]] = {}
        self._rows: dict[str, RunRow] = {}
        self._keys: dict[tuple[str, str], str] = {}

    async def append(self, run: str, events: Sequence[Event]) -> list[Recorded]:
        at, rows = self._now(), dict(self._rows)
        for event in events:
            _project(rows, run, at, event)
        keyed = [event for event in events if isinstance(event, RunStarted) and event.key is not None]
        for started in keyed:
            holder = self._keys.get((str(started.key), started.name), run)
            if holder != run:
                raise run_exists(holder, started)
        history = self._journal.setdefault(run, [])
        stored = [decode(*encode(event)) for event in events]  # what a file would give back, or fail on
        recorded = [Recorded(run, seq, at, event) for seq, event in zip(count(len(history) + 1), stored, strict=False)]
        self._rows = rows
        self._keys |= {(str(started.key), started.name): run for started in keyed}
        history += recorded
        return recorded

    async def events(self, run: str, *, after: int = 0) -> list[Recorded]:
        return self._journal.get(run, [])[after:]

    async def runs(self) -> list[RunRow]:
        return sorted(reversed(self._rows.values()), key=lambda row: -row.created)

    async def find(self, run: str) -> RunRow:
        return find_run(await self.runs(), run)


def _project(rows: dict[str, RunRow], run: str, at: int, event: Event) -> None:
    if isinstance(event, RunStarted) and run not in rows:
        rows[run] = RunRow(run, event.name, Status.RUNNING, None, event.plan, at, None)
    if run not in rows:
        raise StoreFailed(f"run `{run}` has not started")
    if isinstance(event, RunEnded):
        if rows[run].ended is not None:
            raise RunOver(f"run `{run}` has ended already")
        rows[run] = replace(rows[run], status=event.outcome.status, exit_code=event.exit_code, ended=at)
