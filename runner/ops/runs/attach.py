"""Follow a run that another process executes, for an ``apply`` whose key that run has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from runner.core.errors import RunUnfinished
from runner.engine.run import RunCancellation
from runner.events.events import Recorded
from runner.events.record import RunRecord, fold
from runner.ports.sink import Sink

POLL = 0.2  # seconds between looks at the journal


class Journal(Protocol):
    """A store, or a reader of one."""

    async def events(self, run: str, *, after: int = 0) -> Sequence[Recorded]: ...


async def follow(
    run: str,
    store: Journal,
    sinks: Sequence[Sink],
    control: RunCancellation,
    *,
    now: Callable[[], int],
    is_locked: Callable[[], bool],
) -> RunRecord:
    """Pass every event of a run to the sinks, from first to last, and return its record.

    Raises ``RunUnfinished`` when the run has lost its runner, as ``is_held`` says, when it has not ended by its
    deadline and stop budget, or when ``control`` stops the wait. The run itself goes on.
    """
    record, seen = RunRecord(run), 0
    with control.work:
        while True:
            lives = is_locked()  # asked before the journal: who has let go has written the end
            for recorded in await store.events(run, after=seen):
                fold(record, recorded)
                seen = recorded.seq
                for sink in sinks:
                    sink(recorded)
            if record.ended is not None:
                return record
            if not lives:
                raise RunUnfinished(f"run `{run}` has lost its runner", hint=f"run `runner recover {run}`")
            if now() > record.started + (record.deadline_seconds + control.stop_budget_seconds + POLL) * 1e6:
                break
            await trio.sleep(POLL)
    raise RunUnfinished(
        f"run `{run}` has not ended", hint=f"runner runs show {run}; or start a new run with another --run-key"
    )
