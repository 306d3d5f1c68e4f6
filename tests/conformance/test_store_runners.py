"""What every store promises about the processes that work on runs, on each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from runner.core.errors import LeaseHeld
from runner.core.model import CommandHolder
from runner.events import events as ev
from runner.ports.store import RunnerRow, Store
from tests.conformance.conftest import OpenOn

SELF = RunnerRow(id="r1", host="host", boot="boot", home="8:1", pid=7, ticks=70)
STARTED = ev.RunStarted(name="fix", plan="sha256:1", runner="0.1.0", steps={}, deadline_seconds=60.0)
LEASED = ev.LeaseAcquired(workspace="w", lease="w.1", holder=CommandHolder("exec", 7), fence=1, ttl_seconds=60.0)


@dataclass
class Working:
    """A store that a runner has opened, whose time stands still unless a test moves it."""

    store: Store
    clock: list[int]


@pytest.fixture
async def working(open_on: OpenOn) -> AsyncIterator[Working]:
    clock = [1_000]
    async with open_on(lambda: clock[0], SELF) as store:
        yield Working(store, clock)


async def test_a_runner_is_known_from_its_first_run_and_every_row_names_it(working: Working) -> None:
    store = working.store
    await store.append_to_workspace("w", [ev.WarningIssued("x.y", "z")])
    await store.beat()
    assert await store.runners() == [], "it works on nothing yet"

    await store.append("a", [STARTED, LEASED])

    assert await store.runners() == [replace(SELF, started=1_000, heartbeat=1_000)]
    assert (await store.find("a")).runner == (await store.lease("w")).runner == "r1"
    assert [row.runner for row in await store.leases()] == ["r1"]


async def test_a_lease_names_its_runner_until_it_is_released(working: Working) -> None:
    store = working.store
    await store.append_to_workspace("w", [LEASED])
    await store.append_to_workspace("w", [ev.LeaseRefreshed("w", "w.1", 60.0)])
    assert (await store.lease("w")).runner == "r1"

    await store.append_to_workspace("w", [ev.LeaseReleased("w", "w.1")])

    assert (await store.lease("w")).runner is None


async def test_a_heartbeat_moves_with_the_clock_of_the_store(working: Working) -> None:
    await working.store.register()
    working.clock[0] += 10

    await working.store.beat()

    assert await working.store.runners() == [replace(SELF, started=1_000, heartbeat=1_010)]


async def test_a_runner_that_ends_is_forgotten_and_its_run_still_names_it(working: Working) -> None:
    store = working.store
    await store.append("a", [STARTED])

    await store.leave()
    await store.beat()

    assert await store.runners() == []
    assert (await store.find("a")).runner == "r1"


async def test_who_is_refused_is_not_recorded(working: Working) -> None:
    with pytest.raises(LeaseHeld):
        await working.store.append_to_workspace("w", [replace(LEASED, fence=7)])

    assert await working.store.runners() == []


async def test_a_run_is_taken_from_who_has_it_once(working: Working) -> None:
    store = working.store
    await store.append("a", [STARTED])
    await store.leave()

    assert not await store.take_run("a", "another")
    assert not await store.take_run("a", None)
    assert await store.take_run("a", "r1")
    assert not await store.take_run("b", None)
    assert [row.id for row in await store.runners()] == ["r1"]


async def test_nobody_is_named_where_nobody_has_opened_the_store(store: Store) -> None:
    await store.append("a", [STARTED, LEASED])
    await store.register()
    await store.beat()
    await store.leave()

    assert await store.runners() == []
    assert ((await store.find("a")).runner, (await store.lease("w")).runner) == (None, None)
