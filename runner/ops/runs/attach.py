"""Follow a run that another process executes, for an ``apply`` whose key that run has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

import trio

from runner.core.errors import RunUnfinished
from runner.core.nurseries import open_services
from runner.engine.stopping import RunCancellation
from runner.events.events import Recorded
from runner.events.record import RunRecord, fold
from runner.ports.sink import Sink
from runner.ports.store import Reader

LOOK = 0.2  # seconds between looks at the runner and the clock


async def follow(
    run: str,
    store: Reader,
    sinks: Sequence[Sink],
    control: RunCancellation,
    *,
    is_lost: Callable[[], Awaitable[bool]],
    arrive: Callable[[Recorded], Awaitable[None]] | None = None,
    look: float = LOOK,
) -> RunRecord:
    """Pass every event of a run to the sinks, from first to last, and return its record.

    ``arrive`` waits, before an event is passed on, for what belongs to it. ``look`` are the seconds between looks at
    the runner and the clock.

    Raises ``RunUnfinished`` when the run has lost its runner, as ``is_lost`` says, when it has not ended by its
    deadline and stop budget, or when ``control`` stops the wait. The run itself goes on.
    """
    record, seen, lost = RunRecord(id=run), 0, False

    def tell(recorded: Recorded) -> None:
        nonlocal seen
        fold(record, recorded)
        seen = recorded.seq
        for sink in sinks:
            sink(recorded)

    async def look_on() -> None:
        """Stop the watching when nobody is left to write the end, or when its time is over."""
        nonlocal lost
        while not lost and not (record.started and await store.now() > _latest(record, control)):
            await trio.sleep(look)
            lost = await is_lost()
        watching.cancel()

    with control.work:
        with trio.CancelScope() as watching:
            async with open_services() as services, aclosing(store.watch(run)) as events:
                services.start_soon(look_on)
                async for recorded in events:
                    if arrive is not None:
                        await arrive(recorded)
                    tell(recorded)
                    if record.ended is not None:
                        return record
        for recorded in await store.events(run, after=seen) if lost else ():  # who has let go has written the end
            tell(recorded)
    if record.ended is not None:
        return record
    if lost:
        raise RunUnfinished(f"run `{run}` has lost its runner", hint=f"run `runner recover {run}`")
    raise RunUnfinished(
        f"run `{run}` has not ended", hint=f"runner runs show {run}; or start a new run with another --run-key"
    )


def _latest(record: RunRecord, control: RunCancellation) -> float:
    """Return the moment by which a run must have ended."""
    return record.started + (record.deadline_seconds + control.stop_budget_seconds + LOOK) * 1e6
