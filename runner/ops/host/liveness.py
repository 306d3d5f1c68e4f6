"""Runner processes of a store, as seen from one ``RUNNER_HOME``: which of them may live."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from runner.artifacts.run_lock import is_locked
from runner.core.home import run_directory
from runner.core.model import Status
from runner.events.events import RunPlaced
from runner.lifecycle.liveness import is_dead, is_local, is_silent, place
from runner.ops.host.state import this_runner
from runner.ports.store import Reader, RunnerRow, RunRow


class Liveness(Struct, frozen=True):
    """The runners of a store at the moment ``now`` of its clock; ``here`` is this process in its home."""

    here: RunnerRow
    runners: Mapping[str, RunnerRow]
    now: int

    def is_dead(self, runner: str | None, *, locked: bool) -> bool:
        """Tell whether a runner is known to be dead; ``locked`` tells whether anybody has the lock in this home."""
        return is_dead(self.runners.get(runner or ""), self.here, self.now, locked=locked)

    def elsewhere(self, runner: str | None) -> str | None:
        """Say where a runner is whose locks are not seen here, unless it is known to be dead."""
        row = self.runners.get(runner or "")
        if row is None or is_local(row, self.here) or is_dead(row, self.here, self.now, locked=False):
            return None
        return place(row, self.now)

    def host(self, runner: str | None) -> str | None:
        """Return the host of a runner whose home is not this one, alive or dead."""
        row = self.runners.get(runner or "")
        return None if row is None or is_local(row, self.here) else f"`{row.host}`"


async def read_liveness(store: Reader, home: Path) -> Liveness:
    return Liveness(this_runner(home), {row.id: row for row in await store.runners()}, await store.now())


async def is_lost(store: Reader, home: Path, row: RunRow) -> bool:
    """Tell whether a run without an end has lost its runner.

    A pending one goes on without, once somebody may have made its Job.
    """
    if row.status == Status.PENDING.value:
        runners = {one.id: one for one in await store.runners()}
        if not is_silent(runners.get(row.runner or ""), await store.now()):
            return False
        return not any(isinstance(one.event, RunPlaced) for one in await store.events(row.id))
    if is_locked(run_directory(home, row.id)):
        return False
    return (await read_liveness(store, home)).is_dead(row.runner, locked=False)


async def is_run_lost(store: Reader, home: Path, run: str) -> bool:
    """Tell the same of a run by its id, which may have ended since its events were read."""
    if is_locked(run_directory(home, run)):
        return False
    row = await store.find(run)
    return row.ended is None and await is_lost(store, home, row)
