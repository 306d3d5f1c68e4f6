"""What every store promises about warm pools and their slots, on each of them."""

from __future__ import annotations

import pytest
import trio

from runner.core.model import Limits, PoolMissReason, SlotKey, SlotState
from runner.events import events as ev
from runner.lifecycle.pool import name_of
from runner.ports.store import PoolRow, SlotRow, Store

KEY = SlotKey(provider="docker", image="sha256:1", limits=Limits(2.0, 1 << 30, None, 512), toolchains=("/opt/node",))
POOL = PoolRow(name_of(KEY), KEY, 3)
SLOT = SlotRow(id="slot-1", pool=POOL.name, state=SlotState.WARMING, keeper="keeper 7")
S = SlotState


async def test_pools_are_replaced_together_and_resized_by_name(store: Store) -> None:
    other = PoolRow("other", SlotKey(provider="docker", image=None, limits=Limits()), 1)
    await store.put_pools([POOL, other])
    await store.resize_pools({POOL.name: 0, "unknown": 5})

    assert {pool.name: (pool.key, pool.size) for pool in await store.pools()} == {
        POOL.name: (KEY, 0),
        "other": (other.key, 1),
    }
    await store.put_pools([POOL])
    assert await store.pools() == [POOL]


async def test_a_slot_comes_back_with_the_time_at_which_it_was_made(store: Store) -> None:
    made = await store.put_slot(SLOT)

    assert made.created > 0
    assert await store.slots() == [made]
    await store.remove_slot(SLOT.id)
    await store.remove_slot(SLOT.id)
    assert await store.slots() == []


async def test_a_slot_changes_only_from_what_it_is(store: Store) -> None:
    await store.put_slot(SLOT)

    assert not await store.move_slot(SLOT.id, S.READY, S.CLAIMED, "w")
    assert not await store.move_slot("slot-2", S.WARMING, S.READY)
    assert await store.move_slot(SLOT.id, S.WARMING, S.READY)
    assert await store.move_slot(SLOT.id, S.READY, S.CLAIMED, "w")
    (slot,) = await store.slots()
    assert (slot.state, slot.workspace) == (S.CLAIMED, "w")


async def test_of_many_claims_at_once_one_succeeds(store: Store) -> None:
    await store.put_slot(SLOT)
    await store.move_slot(SLOT.id, S.WARMING, S.READY)
    won = []

    async def claim(workspace: str) -> None:
        if await store.move_slot(SLOT.id, S.READY, S.CLAIMED, workspace):
            won.append(workspace)

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(claim, f"w{number}")

    assert [slot.workspace for slot in await store.slots()] == won
    assert len(won) == 1


@pytest.mark.scenario("LIF-04")
async def test_hits_and_misses_of_all_journals_are_counted_by_reason(store: Store) -> None:
    assert await store.pool_counts() == {}
    await store.append(
        "r",
        [
            ev.RunStarted(name="r", plan="p", runner="0", steps={}, deadline_seconds=60.0),
            ev.PoolMissed("r-1", PoolMissReason.EMPTY),
        ],
    )
    await store.append("r", [ev.PoolMissed("r-2", PoolMissReason.EMPTY), ev.PoolMissed("r-3", PoolMissReason.LIMITS)])
    await store.append_to_workspace("w", [ev.SlotClaimed("w", "slot-1")])

    assert await store.pool_counts() == {"empty": 2, "hit": 1, "limits": 1}


async def test_the_row_of_a_workspace_that_was_a_slot_names_it(store: Store) -> None:
    await store.append("r", [ev.RunStarted(name="r", plan="p", runner="0", steps={}, deadline_seconds=60.0)])
    await store.append("r", [ev.ResourceIntended("p", "workspace", "r-1", "fake")])
    await store.append("r", [ev.SlotClaimed("r-1", "slot-1"), ev.ResourceCreated("p", "workspace", "r-1")])

    assert (await store.workspace("r-1")).slot == "slot-1"
