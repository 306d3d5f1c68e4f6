"""Following a run that another process executes."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from runner.core.errors import RunUnfinished
from runner.core.model import succeeded
from runner.engine.stopping import RunCancellation
from runner.events import events as ev
from runner.ops.runs.attach import follow
from runner.store.memory import MemoryStore

STARTED = ev.RunStarted(name="fix", plan="sha256:1", runner="0.1.0", steps={"agent": "agent"}, deadline_seconds=60.0)
ENDED = ev.RunEnded(succeeded("done"), 0)


def now() -> int:
    return round((1 + trio.current_time()) * 1e6)


class Elsewhere:
    """A run of another process, which writes ``events`` one after the other, and then has ``died`` or not."""

    def __init__(self, *events: ev.Event, died: bool = False) -> None:
        self.store, self.locked, self._events, self._died = MemoryStore(now), True, events, died
        self.seen: list[ev.Event] = []

    async def write(self) -> None:
        for event in self._events:
            await self.store.append("a", [event])
            await trio.sleep(1)
        self.locked = not self._died

    async def is_lost(self) -> bool:
        return not self.locked

    async def followed(self, control: RunCancellation) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.write)
            sinks = [lambda recorded: self.seen.append(recorded.event)]
            try:
                record = await follow("a", self.store, sinks, control, is_lost=self.is_lost)
                return record.status.value
            except RunUnfinished as error:
                return error.message


@pytest.mark.parametrize(
    ("run", "seconds", "said"),
    [
        pytest.param(Elsewhere(STARTED, ENDED), 2, "succeeded", id="ends"),
        pytest.param(Elsewhere(STARTED, died=True), 2, "run `a` has lost its runner", id="dies"),
        pytest.param(Elsewhere(STARTED), 65, "run `a` has not ended", id="too late"),
    ],
)
async def test_a_run_is_followed_until_it_ends_or_cannot(
    run: Elsewhere, seconds: int, said: str, autojump_clock: MockClock
) -> None:
    assert await run.followed(RunCancellation(stop_budget_seconds=5.0)) == said

    assert run.seen == [*run._events]
    assert trio.current_time() == pytest.approx(seconds, abs=1)


async def test_an_end_that_was_written_before_the_lock_was_let_go_counts(autojump_clock: MockClock) -> None:
    class LateJournal(MemoryStore):
        async def watch(self, run: str, *, after: int = 0):  # type: ignore[no-untyped-def]
            await trio.sleep_forever()
            yield

    async def lost() -> bool:
        return True

    store = LateJournal(now)
    await store.append("a", [STARTED, ENDED])

    record = await follow("a", store, [], RunCancellation(stop_budget_seconds=5.0), is_lost=lost)

    assert record.status == "succeeded"


async def test_who_is_told_to_stop_stops_following(autojump_clock: MockClock) -> None:
    run, control = Elsewhere(STARTED), RunCancellation(stop_budget_seconds=5.0)
    control.work.cancel()

    assert await run.followed(control) == "run `a` has not ended"
