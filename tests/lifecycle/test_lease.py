"""What an event makes of a lease's row, and who may write: rules without a store."""

from __future__ import annotations

import pytest

from runner.core.errors import LeaseHeld, LeaseLost, RunnerError
from runner.core.model import Fence, Lease, RunHolder
from runner.events.events import LeaseAcquired, LeaseRefreshed, LeaseReleased
from runner.lifecycle.lease import LeaseEvent, advance, check, free, lease_held

SECOND = 1_000_000
FREE = Lease(workspace="w", fence=4)
HELD = Lease(
    workspace="w",
    fence=5,
    id="w.5",
    holder=RunHolder("a"),
    acquired=10 * SECOND,
    refreshed=20 * SECOND,
    expires=100 * SECOND,
)
END = HELD.expires
REFRESHED = LeaseRefreshed("w", "w.5", 60.0)


def lease(fence: int, run: str, acquired: int, refreshed: int) -> Lease:
    return Lease(
        workspace="w",
        fence=fence,
        id=f"w.{fence}",
        holder=RunHolder(run),
        acquired=acquired,
        refreshed=refreshed,
        expires=refreshed + 60 * SECOND,
    )


def acquired(fence: int, *, forced: bool = False) -> LeaseAcquired:
    return LeaseAcquired(
        workspace="w", lease=f"w.{fence}", holder=RunHolder("b"), fence=fence, ttl_seconds=60.0, forced=forced
    )


@pytest.mark.parametrize(
    ("row", "event", "at", "after"),
    [
        pytest.param(free("w"), acquired(1), 7, lease(1, "b", 7, 7), id="never leased"),
        pytest.param(FREE, acquired(5), 7, lease(5, "b", 7, 7), id="released before"),
        pytest.param(HELD, acquired(6), END, lease(6, "b", END, END), id="taken over"),
        pytest.param(HELD, acquired(6, forced=True), 7, lease(6, "b", 7, 7), id="of a dead holder"),
        pytest.param(HELD, REFRESHED, END - 1, lease(5, "a", 10 * SECOND, END - 1), id="refreshed at the last"),
        pytest.param(HELD, LeaseReleased("w", "w.5"), 7, Lease(workspace="w", fence=5), id="released"),
        pytest.param(
            HELD, LeaseReleased("w", "w.5"), END, Lease(workspace="w", fence=5), id="released late, and nobody came"
        ),
    ],
)
def test_an_event_makes_a_row(row: Lease, event: LeaseEvent, at: int, after: Lease) -> None:
    assert advance(row, event, at) == after


def test_an_acquired_lease_names_the_runner_that_has_it() -> None:
    assert advance(FREE, acquired(5), 7, "runner-1").runner == "runner-1"


@pytest.mark.parametrize(
    ("row", "event", "at", "refusal", "words"),
    [
        pytest.param(HELD, acquired(6), END - 1, LeaseHeld, "is in use by run a", id="second, live to the last"),
        pytest.param(HELD, acquired(5), END, LeaseHeld, "has a new holder", id="second to take over"),
        pytest.param(HELD, acquired(5, forced=True), 7, LeaseHeld, "has a new holder", id="second to force"),
        pytest.param(FREE, acquired(4), 7, LeaseHeld, "has a new holder", id="an old number"),
        pytest.param(FREE, acquired(6), 7, LeaseHeld, "has a new holder", id="a number too high"),
        pytest.param(HELD, REFRESHED, END, LeaseLost, "it has ended", id="refreshed too late"),
        pytest.param(HELD, LeaseRefreshed("w", "w.4", 60.0), 7, LeaseLost, "run a has it now", id="another's refresh"),
        pytest.param(FREE, LeaseRefreshed("w", "w.4", 60.0), 7, LeaseLost, "it has ended", id="refreshed when free"),
        pytest.param(HELD, LeaseReleased("w", "w.4"), 7, LeaseLost, "run a has it now", id="another's release"),
        pytest.param(FREE, LeaseReleased("w", "w.4"), 7, LeaseLost, "it has ended", id="released twice"),
    ],
)
def test_an_event_is_refused(row: Lease, event: LeaseEvent, at: int, refusal: type[RunnerError], words: str) -> None:
    with pytest.raises(refusal, match=words):
        advance(row, event, at)


@pytest.mark.parametrize(
    ("row", "fence", "at", "may"),
    [
        pytest.param(HELD, Fence("w", "w.5", 5), END - 1, True, id="the holder"),
        pytest.param(HELD, Fence("w", "w.5", 5), END, False, id="expired"),
        pytest.param(HELD, Fence("w", "w.4", 4), 7, False, id="an old holder"),
        pytest.param(HELD, Fence("w", "w.5", 4), 7, False, id="an old number"),
        pytest.param(HELD, Fence("w", "w.4", 5), 7, False, id="another lease"),
        pytest.param(FREE, Fence("w", "w.4", 4), 7, False, id="released"),
        pytest.param(FREE, Fence("w", "", 4), 7, False, id="no lease at all"),
    ],
)
def test_only_the_holder_may_write_while_its_lease_lives(row: Lease, fence: Fence, at: int, may: bool) -> None:
    if may:
        check(row, fence, at)
    else:
        with pytest.raises(LeaseLost):
            check(row, fence, at)


def test_nobody_has_a_workspace_that_was_never_leased() -> None:
    assert free("w") == Lease(workspace="w", fence=0)


@pytest.mark.parametrize(
    ("event", "at", "hint"),
    [
        (acquired(6), 7, "wait, or see `runner lease show w`; end what runs in it with `runner lease break w --yes`"),
        (acquired(5), END, "try again"),
    ],
)
def test_who_comes_second_is_told_what_to_do(event: LeaseEvent, at: int, hint: str) -> None:
    with pytest.raises(LeaseHeld) as refused:
        advance(HELD, event, at)
    assert refused.value.hint == hint


@pytest.mark.parametrize(("place", "end"), [((), ""), (("",), ""), (("host `two`",), ": host `two`")])
def test_who_has_a_lease_is_named_with_the_place_where_it_is(place: tuple[str, ...], end: str) -> None:
    assert lease_held(HELD, *place).message == f"workspace `w` is in use by run a{end}"
