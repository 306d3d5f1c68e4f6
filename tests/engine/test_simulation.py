"""Whatever happens to runners that share workspaces: one at a time has each, and in the end nothing is left.

A seed decides everything, so that a failure can be had again: ``simulate(seed)`` gives the same trace each time.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import trio
from trio.testing import MockClock

from tests.support.simulated_world import STEPS, World

SEEDS = range(1_000, 1_120)  # by day
EVERYTHING = (
    *("expired", "forced", "regained", "lease.held", "lease.lost", "store.run-over"),
    *("run succeeded", "run lease", "run unknown"),
)


@pytest.fixture(autouse=True)
def _steps_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in STEPS.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(autouse=True)
def _tasks_in_an_order_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)


def simulate(seed: int) -> tuple[World, list[str]]:
    """A world of this seed at its end, and what is wrong with it."""
    trio._core._run._r.seed(seed)
    world = World(seed)

    async def unfold() -> list[str]:
        await world.unfold()
        return await world.flaws()

    try:
        flaws = trio.run(unfold, clock=MockClock(autojump_threshold=0))
    except BaseException as error:
        error.add_note("\n".join([f"seed {seed}", *world.trace]))
        raise
    return world, flaws


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(10_500), marks=pytest.mark.nightly)])
def test_one_at_a_time_has_a_workspace_whatever_happens(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        world, flaws = simulate(seed)
        assert flaws == [], "\n".join([f"seed {seed}", *world.trace, *flaws])
        seen.update(world.watcher.seen)

    assert all(seen[what] > len(seeds) / 20 for what in EVERYTHING), f"hardly anything happened: {seen}"


def test_a_seed_tells_the_same_story_each_time() -> None:
    assert simulate(7)[0].trace == simulate(7)[0].trace
