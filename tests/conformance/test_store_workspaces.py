"""What every store promises about the rows of workspaces, on each of them."""

from __future__ import annotations

import pytest

from runner.core.errors import UnknownWorkspace, WorkspaceAttachedElsewhere, WorkspaceState
from runner.core.model import ClockReference, Limits
from runner.core.model import WorkspaceStatus as S
from runner.events import events as ev
from runner.ports.store import Store, WorkspaceRow

REQUESTED = ev.WorkspaceRequested(
    provider="local",
    project="shop",
    persistent=False,
    limits=Limits(cpus=2.0),
    ttl_seconds=1.0,
    max_age_seconds=None,
    path="/p/\udcff",
    inode=7,
    url="https://h",
    branch="b",
)
SECOND = 1_000_000


async def test_a_row_comes_back_as_its_events_say(store: Store) -> None:
    await store.append_to_workspace(
        "w", [REQUESTED, ev.BaseCommitRecorded("b" * 40), ev.WorkspaceStatusChanged(S.PROVISIONING)]
    )
    await store.append_to_workspace("w", [ev.WorkspaceUsed(2.0)])

    assert await store.workspaces() == [
        WorkspaceRow(
            id="w",
            provider="local",
            status=S.PROVISIONING,
            created=1_000,
            used=1_001,
            expires=1_001 + 2 * SECOND,
            project="shop",
            path="/p/\udcff",
            inode=7,
            url="https://h",
            branch="b",
            base="b" * 40,
            limits=Limits(cpus=2.0),
        )
    ]


async def test_workspaces_of_runs_are_listed_as_well_and_the_newest_first(store: Store) -> None:
    await store.append_to_workspace("w", [REQUESTED])
    started = ev.RunStarted(name="fix", plan="sha256:1", runner="0.1.0", steps={}, deadline_seconds=60.0)
    intended, done = ev.ResourceIntended("p", "workspace", "a-1", "local"), ev.ResourceCreated("p", "workspace", "a-1")
    await store.append("a", [started, intended, done])

    assert [(row.id, row.run, row.status) for row in await store.workspaces()] == [
        ("a-1", "a", S.READY),
        ("w", None, S.CREATING),
    ]


async def test_a_change_that_there_is_not_is_refused_with_all_that_came_with_it(store: Store) -> None:
    await store.append_to_workspace("w", [REQUESTED])

    with pytest.raises(WorkspaceState, match="is creating, and cannot become stopped"):
        await store.append_to_workspace("w", [ev.WarningIssued("x.y", "z"), ev.WorkspaceStatusChanged(S.STOPPED)])

    assert len(await store.workspace_events("w")) == 1
    assert (await store.workspace("w")).status is S.CREATING


async def test_a_workspace_is_attached_to_one_session_at_a_time(store: Store) -> None:
    await store.append_to_workspace("w", [REQUESTED])
    for _ in range(2):
        await store.append_to_workspace("w", [ev.WorkspaceAttached("one")])
    with pytest.raises(WorkspaceAttachedElsewhere, match="session `one`"):
        await store.append_to_workspace("w", [ev.WorkspaceAttached("two")])
    assert [row.session for row in await store.workspaces()] == ["one"]

    await store.append_to_workspace("w", [ev.WorkspaceAttached(None), ev.WorkspaceAttached("two")])
    assert (await store.workspace("w")).session == "two"


async def test_a_destroyed_workspace_keeps_its_journal_and_no_row(store: Store) -> None:
    await store.append_to_workspace(
        "w", [REQUESTED, ev.WorkspaceStatusChanged(S.DESTROYING), ev.WorkspaceStatusChanged(S.DESTROYED)]
    )

    assert await store.workspaces() == []
    assert len(await store.workspace_events("w")) == 3


async def test_a_workspace_is_found_by_a_prefix_that_only_it_has(store: Store) -> None:
    for id in ("abc", "abcd", "abd1"):
        await store.append_to_workspace(id, [REQUESTED])

    assert (await store.workspace("abc")).id == "abc"
    assert (await store.workspace("abd")).id == "abd1"
    with pytest.raises(UnknownWorkspace, match="may be any of 3") as several:
        await store.workspace("ab")
    assert several.value.hint == "name one of: abd1, abcd, abc"
    with pytest.raises(UnknownWorkspace, match="there is no workspace"):
        await store.workspace("x")
    with pytest.raises(UnknownWorkspace, match="id of the workspace is empty"):
        await store.workspace("")


async def test_workspaces_are_listed_by_status_and_page(store: Store) -> None:
    for id in "abc":
        await store.append_to_workspace(id, [REQUESTED])
    await store.append_to_workspace("a", [ev.WorkspaceStatusChanged(S.PROVISIONING)])

    assert [row.id for row in await store.workspaces(status="creating")] == ["c", "b"]
    assert [row.id for row in await store.workspaces(limit=2)] == ["c", "b"]
    assert [row.id for row in await store.workspaces(before=(1_001, "b"), limit=2)] == ["a"]


async def test_the_clock_is_remembered_as_it_was_seen_last(store: Store) -> None:
    assert (await store.anchor(), await store.newest()) == (None, 0)
    for offset in (1, 2):
        await store.set_anchor(ClockReference("boot", offset))
    await store.append_to_workspace("w", [REQUESTED])

    assert (await store.anchor(), await store.newest()) == (ClockReference("boot", 2), 1_000)
