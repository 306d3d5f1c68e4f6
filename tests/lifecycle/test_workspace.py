"""What a workspace may become, and the row that its events add up to."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from msgspec.structs import replace

from runner.core.errors import WorkspaceAttachedElsewhere, WorkspaceLimit, WorkspaceState
from runner.core.model import Limits, SavedWork
from runner.core.model import WorkspaceStatus as S
from runner.events import events as ev
from runner.lifecycle.workspace import NEXT, advance, check_limit, fold, hint, named
from runner.ports.store import WorkspaceRow

DAY = 86_400
SECOND = 1_000_000
REQUESTED = ev.WorkspaceRequested(
    **dict(
        zip(
            ev.WorkspaceRequested.__struct_fields__,
            (
                "local",
                "shop",
                False,
                Limits(pids=5),
                30.0,
                None,
                "/p",
                7,
                "https://h/r",
                "main",
                Limits(cpus=2),
                "sha256:1",
                ("read",),
                "s-1",
                "files",
            ),
            strict=True,
        )
    )
)
LIFE = (S.CREATING, S.PROVISIONING, S.READY, S.STOPPING, S.STOPPED, S.READY, S.DESTROYING, S.DESTROYED)


def row(*events: ev.Event, at: int = 0) -> WorkspaceRow | None:
    found: WorkspaceRow | None = None
    for number, event in enumerate(events):
        found = fold(found, "w", at + number * SECOND, event)
    return found


def test_a_workspace_lives_from_creating_to_destroyed() -> None:
    for before, after in pairwise(LIFE):
        assert advance("w", before, after) is after


@pytest.mark.parametrize(("before", "after"), list(product(S, S)))
def test_a_change_is_in_the_table_or_refused_with_advice(before: S, after: S) -> None:
    if after in NEXT[before]:
        assert advance("w", before, after) is after
        return
    with pytest.raises(WorkspaceState, match=f"`w` is {before}") as refused:
        advance("w", before, after)
    assert refused.value.hint == hint("w", before)


def test_every_status_can_be_left_for_destroyed() -> None:
    """Nothing that goes wrong makes a workspace that cannot be removed."""
    ends = {S.DESTROYED}
    while more := {status for status in S if status not in ends and NEXT[status] & ends}:
        ends |= more
    assert ends == set(S)


def test_a_request_is_the_whole_row() -> None:
    assert row(REQUESTED) == WorkspaceRow(
        id="w",
        provider="local",
        status=S.CREATING,
        created=0,
        used=0,
        expires=30 * SECOND,
        project="shop",
        path="/p",
        inode=7,
        url="https://h/r",
        branch="main",
        limits=Limits(pids=5),
        not_enforced=Limits(cpus=2),
        image="sha256:1",
        session="s-1",
        tools=("read",),
        mcp_server="files",
    )


@pytest.mark.parametrize(
    ("persistent", "most", "expires"),
    [
        pytest.param(False, None, 31 * SECOND, id="a use moves the end"),
        pytest.param(False, 10.0, 10 * SECOND, id="never beyond the greatest age"),
        pytest.param(True, 10.0, None, id="persistent"),
    ],
)
def test_using_a_workspace_moves_its_end(persistent: bool, most: float | None, expires: int | None) -> None:
    requested = ev.WorkspaceRequested(
        provider="local",
        project="default",
        persistent=persistent,
        limits=Limits(),
        ttl_seconds=30.0,
        max_age_seconds=most,
    )

    used = row(requested, ev.WorkspaceUsed(30.0, most))

    assert (used.used, used.expires) == (SECOND, expires)


def test_what_is_known_later_comes_to_the_row() -> None:
    found = row(
        REQUESTED,
        ev.BaseCommitRecorded("b" * 40),
        ev.WorkspaceSaved(SavedWork(commit="c" * 40, patch=None, patch_sha256=None, patch_bytes=0, changed=0)),
    )

    assert (found.base, found.snapshot) == ("b" * 40, "c" * 40)


@pytest.mark.parametrize(
    ("before", "after"), [(None, "s-1"), ("s-1", "s-1"), ("s-1", None)], ids=["attached", "twice", "detached"]
)
def test_one_session_has_a_workspace(before: str | None, after: str | None) -> None:
    alone = row(replace(REQUESTED, session=before))

    assert fold(alone, "w", 0, ev.WorkspaceAttached(after)) == replace(alone, session=after)


def test_a_workspace_of_another_session_is_not_attached() -> None:
    with pytest.raises(WorkspaceAttachedElsewhere, match="`w` is attached to session `s-1`") as refused:
        row(REQUESTED, ev.WorkspaceAttached("s-2"))
    assert refused.value.hint == "wait for its end, or detach it"


def test_a_destroyed_workspace_has_no_row() -> None:
    steps = [ev.WorkspaceStatusChanged(status) for status in (S.PROVISIONING, S.READY, S.DESTROYING, S.DESTROYED)]

    assert row(REQUESTED, *steps) is None
    assert row(REQUESTED, *steps, ev.WorkspaceUsed(1.0)) is None


def test_a_workspace_of_a_run_follows_its_effects() -> None:
    intended, done = (
        ev.ResourceIntended("provision", "workspace", "r-1", "local"),
        ev.ResourceCreated("provision", "workspace", "r-1"),
    )
    found = fold(fold(None, "r", 0, intended), "r", 1, done)
    assert found == WorkspaceRow(id="r-1", provider="local", status=S.READY, created=0, used=1, run="r")
    found = fold(found, "r", 2, ev.ResourceIntended("provision", "workspace", "r-1", "process"))
    assert (found.provider, found.status) == ("process", S.CREATING)
    found = fold(found, "r", 3, ev.ResourceRemovalStarted("teardown", "workspace", "r-1"))
    assert found.status is S.DESTROYING
    assert fold(found, "r", 4, ev.ResourceRemoved("teardown", "workspace", "r-1")) is None


def test_events_about_nothing_that_is_there_change_nothing() -> None:
    assert fold(None, "r", 0, ev.BaseCommitRecorded("b" * 40)) is None
    kept = row(REQUESTED)
    assert fold(kept, "w", 0, ev.StepStarted("agent")) == kept


@pytest.mark.parametrize(
    ("event", "id"),
    [
        (ev.ResourceIntended("p", "workspace", "r-1"), "r-1"),
        (ev.ResourceIntended("p", "checkout", "r-1"), None),
        (ev.ResourceCreated("p", "workspace", "r-1"), "r-1"),
        (ev.ResourceRemovalStarted("p", "workspace", "r-1"), "r-1"),
        (ev.ResourceRemoved("p", "workspace", "r-1"), "r-1"),
        (ev.WorkspaceUsed(1.0), "w"),
        (ev.SlotClaimed("r-1", "slot-1"), "r-1"),
        (ev.BaseCommitRecorded("b"), "w"),
        (ev.StepStarted("agent"), None),
    ],
)
def test_an_event_names_the_workspace_that_it_is_about(event: ev.Event, id: str | None) -> None:
    assert named("w", event) == id


def test_a_change_of_status_and_a_slot_come_to_the_row() -> None:
    found = row(REQUESTED, ev.WorkspaceStatusChanged(S.PROVISIONING), ev.SlotClaimed("w", "slot-1"))

    assert (found.status, found.slot, found.provider) == (S.PROVISIONING, "slot-1", "local")


def test_a_request_without_limits_has_none_and_one_that_lasts_has_no_end() -> None:
    lasting = row(
        ev.WorkspaceRequested(
            provider="local",
            project="default",
            persistent=True,
            limits=Limits(),
            ttl_seconds=30.0,
            max_age_seconds=10.0,
        )
    )
    aged = row(
        ev.WorkspaceRequested(
            provider="local",
            project="default",
            persistent=False,
            limits=Limits(),
            ttl_seconds=30.0,
            max_age_seconds=10.0,
        )
    )

    assert (lasting.limits, lasting.expires, aged.expires) == (None, None, 10 * SECOND)


def test_a_refused_change_names_the_workspace_and_what_to_do() -> None:
    assert hint("w", S.STOPPED) == "make it ready again: runner workspace resume w"
    with pytest.raises(WorkspaceState, match="workspace `w` is creating"):
        row(REQUESTED, ev.WorkspaceStatusChanged(S.STOPPED))


def made(*ids: str, run: str | None = None) -> list[WorkspaceRow]:
    """Newest first; the later in the list the longer idle."""
    return [
        WorkspaceRow(id=id, provider="local", status=S.READY, created=0, used=-number, run=run)
        for number, id in enumerate(ids)
    ]


def test_there_is_room_up_to_the_limit_and_the_first_have_it() -> None:
    check_limit(3, made("b", "a"))
    check_limit(2, made("c", "b", "a"), "b")
    with pytest.raises(WorkspaceLimit):
        check_limit(2, made("c", "b", "a"), "c")


def test_a_reserved_place_is_as_old_as_its_reservation() -> None:
    rows = made("b", "a")
    check_limit(2, rows, "new", {"new": -1})
    with pytest.raises(WorkspaceLimit, match=r"\(sessions 1, others 2\)$"):
        check_limit(3, rows, reserved={"new": -1})
    with pytest.raises(WorkspaceLimit, match=r"\(sessions 2, others 1\)$"):
        check_limit(3, [replace(rows[0], session="s-1"), rows[1]], reserved={"new": -1})
    with pytest.raises(WorkspaceLimit):
        check_limit(2, rows, "b", {"new": -1})


def test_one_workspace_too_many_is_refused_with_those_that_are_idle_for_longest() -> None:
    with pytest.raises(WorkspaceLimit, match=r"beside 4: `WORKSPACE_MAX` is 4 \(others 4\)$") as idle:
        check_limit(4, made("d", "c", "b", "a"))
    with pytest.raises(WorkspaceLimit, match=r"beside 1: `WORKSPACE_MAX` is 1 \(runs 1\)$") as busy:
        check_limit(1, made("r-1", run="r"))

    assert idle.value.hint == "destroy those not in use, longest idle first: a, b, c; or set `WORKSPACE_MAX` higher"
    wait = "wait for runs to end, or run `runner recover` for those whose runner has died"
    assert busy.value.hint == f"{wait}; or set `WORKSPACE_MAX` higher"
