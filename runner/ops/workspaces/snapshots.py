"""Snapshots of workspaces that go on, and where a new workspace finds one. They lie where saved work does."""

from __future__ import annotations

import re
from pathlib import Path

import trio
from msgspec import Struct

from runner.core.errors import UnknownSnapshot, UnsavedWork, WorkspaceLost
from runner.core.sanitize import excerpt
from runner.events.events import BaseCommitRecorded, Event, WorkspaceRequested, WorkspaceSaved
from runner.ops.workspaces.workspace_lease import WorkspaceEnv, hold, require_tree
from runner.ops.workspaces.workspaces import SAVED, SavedSnapshot, own_workspace, save, work_of

_COMMIT = re.compile(r"[0-9a-f]{40}")


class Taken(Struct, frozen=True, kw_only=True):
    """A snapshot that was taken: its commit, how many files differ from the beginning, and how many are ignored."""

    workspace: str
    commit: str
    changed: int
    ignored: int


async def take_snapshot(env: WorkspaceEnv, text: str) -> Taken:
    """Save the files of a workspace, in which nothing may run meanwhile, and leave it as it is.

    Raises ``UnknownWorkspace``, ``LeaseHeld``, and ``UnsavedWork`` for what cannot be saved.
    """
    row = await own_workspace(env, text)
    require_tree(row)
    async with hold(env, row, "snapshot") as held:
        provider, handle = await env.find(held.row)
        if handle is None:
            raise WorkspaceLost(f"nothing of workspace `{row.id}` is left", hint=f"runner workspace destroy {row.id}")
        work = await work_of(held, provider, handle)
        if work.lost:
            raise UnsavedWork(f"workspace `{row.id}` has {work}", hint="remove it, and take the snapshot then")
        await save(held, work, unchanged=True)
    return Taken(workspace=row.id, commit=work.snapshot.commit, changed=work.changed, ignored=work.snapshot.ignored)


async def find_snapshot(env: WorkspaceEnv, commit: str) -> SavedSnapshot:
    """Return the snapshot with that commit, of a workspace that may be gone. Raises ``UnknownSnapshot``."""
    if _COMMIT.fullmatch(commit):
        home = env.settings.home / SAVED
        for repository in await trio.to_thread.run_sync(lambda: sorted(_having(home, commit))):
            history = [one.event for one in await env.store.workspace_events(repository.parent.name)]
            if any(isinstance(event, WorkspaceSaved) and event.saved_work.commit == commit for event in history):
                return _saved(history, repository, commit)
    hint = "take one: `runner workspace snapshot ID`"
    raise UnknownSnapshot(f"there is no snapshot `{excerpt(commit)}`", hint=hint)


def _having(home: Path, commit: str) -> list[Path]:
    return [found.parents[2] for found in home.glob(f"*/snapshot.git/objects/{commit[:2]}/{commit[2:]}")]


def _saved(history: list[Event], repository: Path, commit: str) -> SavedSnapshot:
    [requested] = [event for event in history if isinstance(event, WorkspaceRequested)]
    bases = [event.commit for event in history if isinstance(event, BaseCommitRecorded)]
    return SavedSnapshot(
        commit=commit,
        repository=repository,
        project=requested.project,
        url=requested.url,
        branch=requested.branch,
        base=bases[-1] if bases else None,
        tools=requested.tools,
    )
