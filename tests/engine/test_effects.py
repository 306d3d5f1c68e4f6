"""A runner that is killed right before any of its effects on the host is recovered whole, by a look from outside.

An effect is a call of the kernel by which it, or what it has started, makes, moves or removes a name, mounts, takes a
loop device, reaches a daemon or becomes another program: see ``effects``.
"""

from __future__ import annotations

import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.test_crash_points import (
    KILLED,
    Crashing,
    assert_nothing_of_docker,
    assert_whole,
    crashing,
    quick,
)
from tests.support import effects

__all__ = ["crashing", "quick"]  # fixtures

pytestmark = [
    pytest.mark.slow,
    effects.WATCHER.mark,
]


def calls_of(crashing: Crashing) -> list[str]:
    """The effects of an undisturbed run, in their order; another run may have a few more or less."""
    home = crashing.home()
    assert crashing.ask("apply", home, call=0)[0] == 0
    calls = crashing.calls
    assert_nothing_left(crashing, home)
    return calls


def kill_at(crashing: Crashing, number: int, *recoveries: int) -> bool:
    """Whether a run was killed at an effect, and each recovery as well; then all is recovered and looked at."""
    home = crashing.home()
    killed = crashing.ask("apply", home, call=number)[0] == KILLED
    for inner in recoveries:
        killed &= crashing.ask("recover", home, call=inner)[0] == KILLED
    if not (home / "state" / "state.db").exists():
        return killed
    assert crashing.ask("recover", home)[0] == 0
    assert_nothing_left(crashing, home)
    return killed


def assert_nothing_left(crashing: Crashing, home: Path) -> None:
    assert_whole(home, 0)
    half = [path for path in (home / "state").rglob("*") if path.name.startswith(".") or path.name.endswith(".part")]
    assert half == []
    if crashing.daemon:
        assert_nothing_of_docker(home, crashing.daemon)
    shutil.rmtree(home)


def behind(calls: list[str], *names: str) -> list[int]:
    """The effects that come right after a series of those with one of these names."""
    return [n for n, (before, now) in enumerate(pairwise(calls), start=2) if before in names and now not in names]


@pytest.mark.nightly
@pytest.mark.parametrize("crashing", ["fake", "local"], indirect=True)
def test_a_run_that_is_killed_at_some_effects_is_recovered_whole(crashing: Crashing) -> None:
    total = len(calls_of(crashing))
    for number in range(5, total, total // 4):
        assert kill_at(crashing, number), number


@pytest.mark.nightly
@pytest.mark.parametrize("crashing", ["docker"], indirect=True)
def test_what_was_handed_over_to_a_daemon_is_taken_back_whenever_the_runner_dies(crashing: Crashing) -> None:
    """Between the mounts and the container, of which nothing said that they were there."""
    calls = calls_of(crashing)
    for number in behind(calls, "move_mount", "mount_setattr")[1::24]:
        assert kill_at(crashing, number), (number, calls[number - 2 : number])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("crashing", "kills"),
    [("fake", 250), ("local", 450), ("docker", 200), ("gvisor", 100)],
    indirect=["crashing"],
    ids=["fake", "local", "docker", "gvisor"],
)
def test_a_thousand_kills_at_effects_leave_nothing(crashing: Crashing, kills: int) -> None:
    seeded = random.Random(f"effects of {crashing.provider}")
    total = len(calls_of(crashing))
    killed = 0
    for _ in range(kills):
        recoveries = [seeded.randint(1, 40) for _ in range(seeded.choice((0, 0, 1, 2)))]
        killed += kill_at(crashing, seeded.randint(1, total), *recoveries)
    assert killed > kills / 2
