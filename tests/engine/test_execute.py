from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from runner.engine.execute import execute
from runner.plan.graph import Graph


async def trace(needs: dict[str, list[str]], seconds: dict[str, float]) -> list[tuple[str, float, float]]:
    """When each node began and ended, in the order of ending."""
    ran: list[tuple[str, float, float]] = []
    start = trio.current_time()

    async def step(name: str) -> None:
        began = trio.current_time() - start
        await trio.sleep(seconds.get(name, 1))
        ran.append((name, began, trio.current_time() - start))

    await execute(Graph(needs), step)
    return ran


async def test_a_step_starts_as_soon_as_its_needs_have_ended(autojump_clock: MockClock) -> None:
    needs = {"a": [], "b": [], "c": ["a"], "d": ["a", "b"], "e": ["c", "d"]}

    ran = await trace(needs, {"b": 5})

    assert ran == [("a", 0, 1), ("c", 1, 2), ("b", 0, 5), ("d", 5, 6), ("e", 6, 7)]


async def test_a_step_that_raises_cancels_the_others(autojump_clock: MockClock) -> None:
    stopped: list[str] = []

    async def step(name: str) -> None:
        try:
            await trio.sleep(1 if name == "bad" else 100)
        finally:
            stopped.append(name)
        raise ValueError(name)

    with pytest.RaisesGroup(ValueError):
        await execute(Graph({"bad": [], "slow": []}), step)

    assert sorted(stopped) == ["bad", "slow"]


async def test_cancelling_ends_running_steps_and_starts_none(autojump_clock: MockClock) -> None:
    started: list[str] = []

    async def step(name: str) -> None:
        started.append(name)
        await trio.sleep(10)

    with trio.move_on_after(15):
        await execute(Graph({"a": [], "b": ["a"], "c": ["b"]}), step)

    assert started == ["a", "b"]


@pytest.mark.parametrize("root", [pytest.param([], id="at once"), pytest.param(["first"], id="after another")])
async def test_what_may_begin_at_once_begins_in_the_graph_s_order(root: list[str], autojump_clock: MockClock) -> None:
    """Members of a matrix wait for one place, which the first is to have, and trio starts tasks in any order."""
    began: list[str] = []
    place = trio.CapacityLimiter(1)

    async def step(name: str) -> None:
        async with place:
            began.append(name)
            await trio.sleep(1)

    names = [f"m{number}" for number in range(20)]
    await execute(Graph({**{name: [] for name in root}, **{name: root for name in names}}), step)

    assert began == [*root, *names]
