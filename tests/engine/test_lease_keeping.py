"""A lease is refreshed while its holder works, and the work is over before another can have it. At exact times."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, cast

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from runner.core.errors import LeaseHeld, LeaseLost, RunnerError, StoreBusy, StoreFailed
from runner.core.model import Fence, Handle, RunHolder
from runner.events import events as ev
from runner.events.record import RunRecord, replay
from runner.lifecycle.lease import REFRESH, TTL
from runner.ports.provider import KILL_GRACE
from runner.runtime.context import RunDependencies
from runner.runtime.lease_holder import LeaseHolder, renew_until_released
from runner.store.memory import MemoryStore
from tests.support.simulated_world import HOUR, STEPS, STOP_BUDGET, Place, Process, World

ME = RunHolder("me")
MARGIN = 35.0  # seconds, where a test has no stop budget


class Store(MemoryStore):
    """On trio's clock. From ``down`` to ``up`` it refuses everything with ``fault``; ``asked`` is when it was tried."""

    def __init__(self, down: float = math.inf, up: float = math.inf, fault: type[RunnerError] = StoreFailed) -> None:
        super().__init__(lambda: round(trio.current_time() * 1e6))
        self.down, self.up, self.fault = down, up, fault
        self.asked: list[float] = []

    async def emit(self, *events: ev.Event) -> None:
        self.asked.append(trio.current_time())
        if self.down <= trio.current_time() < self.up:
            raise self.fault("not now")
        await self.append_to_workspace("w", events)


async def hold(store: Store, seconds: float = math.inf) -> tuple[LeaseHolder, list[tuple[float, str]], float]:
    """Keep a lease for as long, or until it cannot be kept: the tenure, what was warned of and when, and the end."""
    lease_holder, warnings = LeaseHolder("w", ME, store.lease), []

    async def warn(message: str) -> None:
        warnings.append((trio.current_time(), message))
        await store.emit(ev.WarningIssued("lease.refresh-failed", message))

    with trio.move_on_after(seconds):
        await lease_holder.acquire(store.emit)
        await renew_until_released(lease_holder, store.emit, margin=MARGIN, warn=warn)
    return lease_holder, warnings, trio.current_time()


async def test_a_lease_is_refreshed_every_five_minutes(autojump_clock: MockClock) -> None:
    store = Store()

    lease_holder, warnings, _ = await hold(store, 2 * HOUR + 1)

    assert store.asked == [REFRESH * n for n in range(25)]
    assert lease_holder.until == 2 * HOUR + TTL
    assert warnings == []


@pytest.mark.parametrize("fault", [StoreFailed, StoreBusy])
async def test_a_refresh_that_fails_is_said_and_tried_again_and_said_once_it_works(
    autojump_clock: MockClock, fault: type[RunnerError]
) -> None:
    store = Store(down=300.0, up=500.0, fault=fault)

    lease_holder, warnings, _ = await hold(store, 1_000.0)

    assert store.asked == [0, 300, 300, 305, 315, 335, 375, 435, 495, 555, 555, 855]
    assert warnings == [
        (300.0, "refreshing the lease failed, and is tried again: not now"),
        (555.0, "refreshing the lease failed 7 times, last: not now"),
    ]
    assert lease_holder.until == 855 + TTL


async def test_what_could_not_be_said_of_failures_is_said_at_the_next_refresh(autojump_clock: MockClock) -> None:
    store = Store(down=300.0, up=301.0)
    told: list[str] = []

    async def warn(message: str) -> None:
        told.append(message)
        if len(told) < 3:
            raise StoreBusy("not yet")

    lease_holder = LeaseHolder("w", ME, store.lease)
    with trio.move_on_after(400):
        await lease_holder.acquire(store.emit)
        await renew_until_released(lease_holder, store.emit, margin=MARGIN, warn=warn)

    assert told == [
        "refreshing the lease failed, and is tried again: not now",
        "refreshing the lease failed 1 times, last: not now",
        "refreshing the lease failed 2 times, last: not yet",
    ]


async def test_keeping_ends_before_a_lease_that_cannot_be_refreshed_and_says_why(autojump_clock: MockClock) -> None:
    lease_holder, warnings, ended = await hold(Store(down=1.0))

    assert (ended, lease_holder.until) == (TTL - MARGIN, TTL)
    assert warnings == [
        (REFRESH, "refreshing the lease failed, and is tried again: not now"),
        (TTL - MARGIN, "refreshing the lease failed 58 times, last: not now"),
    ]
    lease_holder.require()
    await trio.sleep(MARGIN)
    with pytest.raises(LeaseLost):
        lease_holder.require()


async def test_keeping_ends_when_another_has_the_lease(autojump_clock: MockClock) -> None:
    store = Store()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, store)
        await trio.sleep(450)
        other = LeaseHolder("w", RunHolder("other"), store.lease)
        with pytest.raises(LeaseHeld):
            await other.acquire(store.emit)
        await other.acquire(store.emit, forced=True)

    assert trio.current_time() == 600


async def test_of_tasks_that_are_refused_at_once_one_takes_the_lease_again(autojump_clock: MockClock) -> None:
    store, had = Store(), []
    lease_holder = LeaseHolder("w", ME, store.lease)
    await lease_holder.acquire(store.emit)
    old = lease_holder.fence
    assert old is not None
    await trio.sleep(TTL)

    async def regain() -> None:
        had.append(await lease_holder.regain(old, store.emit))
        assert lease_holder.fence == Fence("w", "w.2", 2)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(regain)

    assert sorted(had) == [False, False, True]
    assert (await store.lease("w")).fence == 2


async def test_a_holder_that_cannot_take_its_lease_again_keeps_its_old_number(autojump_clock: MockClock) -> None:
    """Without one it would write past every check."""
    store = Store(down=TTL, up=2 * TTL)
    lease_holder = LeaseHolder("w", ME, store.lease)
    await lease_holder.acquire(store.emit)
    old = lease_holder.fence
    assert old is not None
    await trio.sleep(TTL)

    with pytest.raises(StoreFailed):
        await lease_holder.regain(old, store.emit)

    assert lease_holder.fence == old


# --- a run ----------------------------------------------------------------------------------------


class Quiet(World):
    """Nothing happens, but that the store refuses refreshes from ``deaf`` on. Each piece of work takes three hours."""

    def __init__(self, deaf: float) -> None:
        super().__init__(seed=1)
        self.calm, self.deaf = True, deaf
        self.ended: list[float] = []

    def refuses(self, process: Process, events: Sequence[ev.Event]) -> bool:
        return trio.current_time() > self.deaf and isinstance(events[0], ev.LeaseRefreshed)

    async def work(self, process: Process) -> None:
        try:
            await trio.sleep(3 * HOUR)
        finally:
            self.ended.append(trio.current_time())

    async def carry_out(self) -> tuple[RunRecord, list[ev.Recorded]]:
        await self.live(Process("run"), lambda process: self.run(process, "r0"))
        history = await self.store.events("r0")
        return replay("r0", history), history


@pytest.fixture
def _steps_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in STEPS.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("_steps_of_the_world")
async def test_a_long_run_refreshes_its_lease_by_itself(autojump_clock: MockClock) -> None:
    record, history = await Quiet(deaf=math.inf).carry_out()

    (acquired,) = [r.at for r in history if isinstance(r.event, ev.LeaseAcquired)]
    refreshed = [(r.at - acquired) / 1e6 for r in history if isinstance(r.event, ev.LeaseRefreshed)]
    assert record.exit_code == 0
    assert refreshed == [REFRESH * n for n in range(1, len(refreshed) + 1)]
    assert len(refreshed) == pytest.approx(record.seconds / REFRESH, abs=1)


@pytest.mark.usefixtures("_steps_of_the_world")
async def test_a_run_whose_lease_cannot_be_refreshed_has_ended_before_it_does(autojump_clock: MockClock) -> None:
    world = Quiet(deaf=REFRESH * 2 + 1)

    record, history = await world.carry_out()

    until = REFRESH * 2 + TTL
    assert world.ended == [until - STOP_BUDGET - KILL_GRACE]
    assert record.cancelled_by == "lease"
    assert (record.outcome.reason, record.exit_code, record.resources) == ("lease", 5, {})
    why = [message for code, message in record.warnings if code == "lease.refresh-failed"]
    assert [message.partition(" failed")[2] for message in why] == [
        ", and is tried again: another process keeps the store locked",
        " 58 times, last: another process keeps the store locked",
    ]
    assert record.outcome.message == f"the lease of its workspace could not be kept: {why[-1]}"
    first, last = [r.at / 1e6 for r in history if getattr(r.event, "code", "") == "lease.refresh-failed"]
    (began,) = [r.at / 1e6 for r in history if isinstance(r.event, ev.LeaseAcquired)]
    assert (first - began, last - began) == (REFRESH * 3, until - STOP_BUDGET - KILL_GRACE)
    assert history[-1].at <= round((10 * HOUR + until) * 1e6)
    assert await world.flaws() == []


class Slow(Place):
    async def evict(self, handle: Handle) -> None:
        await trio.sleep(2 * HOUR)
        await super().evict(handle)


class Sluggish(Quiet):
    """Whoever recovers here takes longer than a lease lasts."""

    def deps(self, process: Process) -> RunDependencies:
        deps = super().deps(process)
        return replace(deps, provider=lambda name: cast(Any, Slow(self, process))) if process.name == "last" else deps


@pytest.mark.usefixtures("_steps_of_the_world")
async def test_a_recovery_that_takes_long_refreshes_its_lease(autojump_clock: MockClock) -> None:
    world, process = Sluggish(deaf=math.inf), Process("run")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.live, process, lambda process: world.run(process, "r0"))
        await trio.sleep(HOUR)
        process.die()
    await world.live(Process("last"), lambda process: world.recover(process, "r0"))

    history = await world.store.events("r0")
    record = replay("r0", history)
    assert (record.exit_code, record.resources) == (4, {})
    recovery = RunHolder("r0", recovering=True)
    (since,) = [r.at for r in history if isinstance(r.event, ev.LeaseAcquired) and r.event.holder == recovery]
    refreshed = [(r.at - since) / 1e6 for r in history if isinstance(r.event, ev.LeaseRefreshed) and r.at > since]
    assert refreshed == [REFRESH * n for n in range(1, len(refreshed) + 1)]
    assert refreshed[-1] >= 2 * HOUR - REFRESH
    assert await world.flaws() == []
