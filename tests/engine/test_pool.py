"""The keeper of warm pools, on the fake provider: it fills, refills, resizes, gives each slot once, leaves nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from runner.core.errors import ProviderFailed, RunnerError, WorkspaceLost
from runner.core.model import Handle, Limits, PoolMissReason, SlotKey, SlotState
from runner.engine.pool import LOOK, Keeper, clear
from runner.lifecycle.pool import BACK_OFF, MAX_AGE, name_of
from runner.ports.provider import SandboxHandoff, SandboxSpec, WorkspaceRequest
from runner.ports.store import PoolRow, SlotRow
from runner.store.memory import MemoryStore
from tests.support.fake_provider import FakeProvider, FakeSlot

KEY = SlotKey(provider="fake", image=None, limits=Limits())
NAME = name_of(KEY)


def now() -> int:
    return round(trio.current_time() * 1e6)


@dataclass
class Scene:
    """A keeper at work; ``arrived`` are the workspaces that its claimers have got."""

    home: Path
    look: float = LOOK
    faults: dict[str, RunnerError] = field(default_factory=dict)
    store: MemoryStore = field(default_factory=lambda: MemoryStore(now))
    told: list[str] = field(default_factory=list)
    arrived: list[Handle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.provider = FakeProvider(self.home, faults=self.faults)
        numbers = count(1)
        self.keeper = Keeper(
            self.store,
            lambda name: self.provider,
            name="keeper",
            new_id=lambda: str(next(numbers)),
            tell=lambda error: self.told.append(error.message),
            look=self.look,
        )

    @asynccontextmanager
    async def kept(self, size: int) -> AsyncIterator[None]:
        await self.store.put_pools([PoolRow(NAME, KEY, size)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.keeper.run)
            await trio.sleep(1)
            yield
            nursery.cancel_scope.cancel()

    async def claim(self, workspace: str, key: SlotKey = KEY) -> PoolMissReason | None:
        async def deliver(handle: Handle, handoff: SandboxHandoff) -> bool:
            self.provider.receive(handle, handoff)
            self.arrived.append(handle)
            return True

        return await self.keeper.claim(key, self.request(workspace), deliver)

    def request(self, workspace: str) -> WorkspaceRequest:
        return WorkspaceRequest(id=workspace, run="run", nonce=self.store.nonce)

    async def states(self) -> list[str]:
        return [slot.state.value for slot in await self.store.slots()]


async def raising(error: RunnerError) -> None:
    raise error


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_pool_is_filled_and_at_the_end_nothing_of_it_is_left(scene: Scene, autojump_clock: MockClock) -> None:
    async with scene.kept(3):
        assert await scene.states() == ["ready"] * 3
        assert len(scene.provider.running) == 3

    assert await scene.states() == []
    assert scene.provider.running == set()
    assert await scene.provider.list_owned(scene.store.nonce) == []
    assert scene.told == []


async def test_a_hit_starts_nothing_and_is_the_workspace_that_was_asked_for(
    scene: Scene, autojump_clock: MockClock
) -> None:
    async with scene.kept(1):
        started = list(scene.provider.started)
        assert await scene.claim("run-1") is None
        (handle,) = scene.arrived
        (owned,) = [found for found in await scene.provider.list_owned(scene.store.nonce) if found.id == "run-1"]
        async with scene.provider.open(handle, SandboxSpec()) as workspace:
            assert (await workspace.run(["true"])).exit.ok

        assert owned == handle
        assert handle.slot == started[0]
        assert scene.provider.started[: len(started)] == started
        assert handle.slot not in scene.provider.started[len(started) :]


async def test_a_slot_that_was_given_away_is_replaced(scene: Scene, autojump_clock: MockClock) -> None:
    async with scene.kept(2):
        assert await scene.claim("run-1") is None
        await trio.sleep(1)

        assert await scene.states() == ["ready", "ready"]
    assert scene.provider.running == {"slot-1"}
    assert [handle.id for handle in await scene.provider.list_owned(scene.store.nonce)] == ["run-1"]


async def test_of_twenty_at_once_three_get_a_slot_and_none_the_same(scene: Scene, autojump_clock: MockClock) -> None:
    results: list[PoolMissReason | None] = []

    async def one(workspace: str) -> None:
        results.append(await scene.claim(workspace))

    async with scene.kept(3), trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(one, f"run-{number}")

    assert sorted(results, key=str) == [None] * 3 + [PoolMissReason.EMPTY] * 17
    assert len({handle.slot for handle in scene.arrived}) == 3


async def test_a_change_of_size_takes_effect_within_a_minute_and_leaves_what_is_in_use(
    scene: Scene, autojump_clock: MockClock
) -> None:
    async with scene.kept(10):
        for number in range(3):
            assert await scene.claim(f"run-{number}") is None
        for size in (0, 5, 2, 7):
            await scene.store.resize_pools({NAME: size})
            with trio.fail_after(60):
                while await scene.states() != ["ready"] * size:
                    await trio.sleep(1)

        assert {handle.slot for handle in scene.arrived} <= scene.provider.running


@pytest.mark.parametrize(
    ("ping", "told"),
    [
        pytest.param(partial(raising, ProviderFailed("it is dead")), "it is dead", id="an error"),
        pytest.param(trio.sleep_forever, "the warm workspace `slot-1` did not answer in 2 s", id="nothing"),
    ],
)
async def test_a_slot_that_does_not_answer_is_told_of_and_replaced(
    scene: Scene, autojump_clock: MockClock, ping: Callable[[], Awaitable[None]], told: str
) -> None:
    opened = scene.provider.open_slot

    @asynccontextmanager
    async def open_slot(*words: Any) -> AsyncIterator[FakeSlot]:
        async with opened(*words) as slot:
            if words[0].id == "slot-1":
                slot.ping = ping
            yield slot

    scene.provider.open_slot = open_slot  # type: ignore[method-assign, assignment]
    async with scene.kept(1):
        while miss := await scene.claim("run-1"):
            assert miss is PoolMissReason.DEAD
            await trio.sleep(LOOK)

    assert [handle.slot for handle in scene.arrived] != ["slot-1"]
    assert scene.told == [told]


async def test_a_slot_is_replaced_when_it_is_old(tmp_path: Path, autojump_clock: MockClock) -> None:
    scene = Scene(tmp_path, look=MAX_AGE / 10)
    async with scene.kept(1):
        await trio.sleep(MAX_AGE + 1)

        assert [slot.id for slot in await scene.store.slots()] == ["slot-2"]
    assert scene.provider.running == set()


async def test_filling_that_fails_is_tried_again_later_and_later(scene: Scene, autojump_clock: MockClock) -> None:
    scene.faults["open_slot"] = ProviderFailed("no room")
    async with scene.kept(1):
        await trio.sleep(sum(BACK_OFF) + 2 * BACK_OFF[-1])
        tries = len(scene.told)
        del scene.faults["open_slot"]
        await trio.sleep(BACK_OFF[-1] + LOOK)

        assert len(BACK_OFF) <= tries <= len(BACK_OFF) + 4
        assert await scene.states() == ["ready"]
    assert await scene.provider.list_owned(scene.store.nonce) == []


@pytest.mark.parametrize("how", ["refused", "cancelled"])
async def test_what_does_not_arrive_is_removed(scene: Scene, autojump_clock: MockClock, how: str) -> None:
    async def deliver(handle: Handle, handoff: SandboxHandoff) -> bool:
        if how == "cancelled":
            await trio.sleep_forever()
        return False

    async with scene.kept(1):
        with trio.move_on_after(1):
            assert await scene.keeper.claim(KEY, scene.request("run-1"), deliver) is None
        await trio.sleep(LOOK)

        assert [handle.id for handle in await scene.provider.list_owned(scene.store.nonce)] == ["slot-2"]
        assert scene.provider.running == {"slot-2"}


async def test_a_workspace_that_is_there_already_is_not_taken_over(scene: Scene, autojump_clock: MockClock) -> None:
    other = await scene.provider.create(scene.request("run-1"))
    async with scene.kept(1):
        assert await scene.claim("run-1") is PoolMissReason.DEAD

        assert other in await scene.provider.list_owned(scene.store.nonce)
    assert await scene.provider.list_owned(scene.store.nonce) == [other]


async def test_a_slot_of_another_kind_is_given_to_nobody(scene: Scene, autojump_clock: MockClock) -> None:
    async with scene.kept(1):
        assert (
            await scene.claim("run-1", SlotKey(provider="fake", image=None, limits=Limits(pids=7)))
            is PoolMissReason.LIMITS
        )
        assert (
            await scene.claim("run-1", SlotKey(provider="fake", image=None, limits=Limits(), policy="strict"))
            is PoolMissReason.POLICY
        )

        assert await scene.states() == ["ready"]


async def test_what_a_dead_keeper_left_is_cleared_and_what_became_a_workspace_stays(
    scene: Scene, autojump_clock: MockClock
) -> None:
    provider, store = scene.provider, scene.store
    async with scene.kept(1):
        assert await scene.claim("run-1") is None
    for state, number in ((SlotState.WARMING, 7), (SlotState.READY, 8)):
        handle = await provider.create(scene.request(f"slot-{number}"))
        await store.put_slot(SlotRow(id=handle.id, pool=NAME, state=state, keeper="dead"))

    assert await clear(store, [provider], dry_run=True) == {"slot-7": None, "slot-8": None}
    assert await clear(store, [provider]) == {"slot-7": None, "slot-8": None}
    assert await store.slots() == []
    assert [handle.id for handle in await provider.list_owned(store.nonce)] == ["run-1"]


async def test_a_slot_that_can_not_be_removed_is_told_and_found_again(scene: Scene, autojump_clock: MockClock) -> None:
    async with scene.kept(1):
        scene.faults["destroy"] = ProviderFailed("the daemon is away")

    assert scene.told == ["the daemon is away"]
    assert await clear(scene.store, [scene.provider]) == {"slot-1": "the daemon is away"}
    assert len(await scene.store.slots()) == 1
    del scene.faults["destroy"]
    assert await clear(scene.store, [scene.provider]) == {"slot-1": None}
    assert await scene.store.slots() == []


@dataclass
class Mortal:
    """The slots of a provider, all of which die together, loudly or not."""

    scene: Scene
    loud: bool = False
    dead: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        opened, ended = self.scene.provider.open_slot, self.ended

        @asynccontextmanager
        async def open_slot(
            handle: Handle, toolchains: Sequence[str], protected: Sequence[str]
        ) -> AsyncIterator[FakeSlot]:
            async with opened(handle, toolchains, protected) as idle:
                idle.wait_ended = ended  # type: ignore[method-assign]
                yield idle

        self.scene.provider.open_slot = open_slot  # type: ignore[method-assign, assignment]

    async def ended(self) -> None:
        await self.dead.wait()
        if self.loud:
            raise WorkspaceLost("the guest is gone")


async def test_slots_that_die_while_others_are_ended_are_replaced(scene: Scene, autojump_clock: MockClock) -> None:
    """The row of the first is changed while the rest die, as when a host is out of memory."""
    mortal, moved = Mortal(scene), scene.store.move_slot

    async def slowly(id: str, before: SlotState, after: SlotState, *more: str) -> bool:
        if after is SlotState.DRAINING and not mortal.dead.is_set():
            mortal.dead.set()
            await trio.sleep(1)
            mortal.dead = trio.Event()
        return await moved(id, before, after, *more)

    scene.store.move_slot = slowly  # type: ignore[method-assign, assignment]
    async with scene.kept(4):
        await scene.store.resize_pools({NAME: 1})
        await trio.sleep(LOOK * 2)
        await scene.store.resize_pools({NAME: 2})
        await trio.sleep(BACK_OFF[-1])
        assert await scene.states() == ["ready"] * 2

    assert await scene.states() == []


async def test_what_the_tasks_of_a_dying_slot_raise_is_told(scene: Scene, autojump_clock: MockClock) -> None:
    mortal = Mortal(scene, loud=True)
    async with scene.kept(2):
        mortal.dead.set()
        await trio.sleep(0.1)
        mortal.dead = trio.Event()
        await trio.sleep(BACK_OFF[-1])
        assert await scene.states() == ["ready"] * 2

    assert scene.told[:2] == ["the guest is gone"] * 2
