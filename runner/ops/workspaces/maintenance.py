"""Maintenance of workspaces: interrupted changes are completed, expired workspaces are removed.

The clock decides only while it is steady: what it says of ages after a jump is no reason to remove anything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.artifacts.run_lock import is_locked
from runner.core.errors import LeaseError, RunnerError, WorkspaceExpired
from runner.core.home import SANDBOXES, WORKSPACES, run_directory
from runner.core.model import WorkspaceStatus
from runner.core.nurseries import open_services
from runner.events.events import UnsavedWorkDiscarded
from runner.lifecycle.ttl import expired, why_unsteady
from runner.lifecycle.workspace import UNFINISHED
from runner.ops.host.state import see_clock
from runner.ops.pool.handoff import PLACE
from runner.ops.workspaces.workspace_lease import HeldWorkspace, WorkspaceEnv, hold
from runner.ops.workspaces.workspaces import RemovedWorkspace, finish_destroy, finish_stop, tree_of
from runner.ports.store import WorkspaceRow
from runner.safefs import trees

S = WorkspaceStatus

REAPING = 1.0  # seconds


class ReapedWorkspace(Struct, frozen=True, kw_only=True):
    """An expired workspace that was removed, or would be; ``saved`` is where its work is kept, ``left`` why it
    stays.
    """

    workspace: str
    tree: Path
    expired: int
    adopted: bool = False
    saved: Path | None = None
    left: str | None = None
    in_use: bool = False


class CompletedChange(Struct, frozen=True):
    """An interrupted change of a workspace that was completed, or would be; ``left`` says why it was not."""

    workspace: str
    done: str
    saved: Path | None = None
    left: str | None = None


async def unsteady(env: WorkspaceEnv, *, dry_run: bool) -> str | None:
    """Say why the clock, and so any age, is not to be trusted; ``None`` if it is. Later calls compare with this one."""
    store, now = env.store, await env.store.now()
    seen = see_clock(now)
    why = why_unsteady(await store.anchor(), seen, newest=await store.newest(), now=now)
    if not dry_run:
        await store.set_anchor(seen)
    return why


@asynccontextmanager
async def reaping(env: WorkspaceEnv) -> AsyncIterator[None]:
    """Remove expired workspaces beside the block, which starts after at most ``REAPING`` seconds.

    ``advise`` is told of each that is removed or could not be. What the end of the block interrupts is completed the
    next time.
    """

    async def work() -> None:
        await reap_and_tell(env)
        done.set()

    done = trio.Event()
    async with open_services() as services:
        services.start_soon(work)
        with trio.move_on_after(REAPING):
            await done.wait()
        yield


async def reap_and_tell(env: WorkspaceEnv) -> None:
    """Remove expired workspaces, unless the clock has jumped; ``advise`` is told of each."""
    due = await reap(env, dry_run=True)
    if due and (why := await unsteady(env, dry_run=False)):
        message = f"workspace `{due[0].workspace}` and others whose time is over stay for now: {why}"
        env.advise(WorkspaceExpired(message, hint="run it again, or `runner gc`, if the clock is right"))
        return
    for one in due:
        reaped = await _reap(env, await env.store.workspace(one.workspace), one)
        if reaped.left is None:
            saved = f", and its work is saved in `{reaped.saved}`" if reaped.saved else ""
            env.advise(WorkspaceExpired(f"workspace `{reaped.workspace}` is removed: its time was over{saved}"))
        elif not reaped.in_use:
            message = f"the time of workspace `{reaped.workspace}` is over, and it stays: {reaped.left}"
            env.advise(WorkspaceExpired(message))


async def reap(env: WorkspaceEnv, *, dry_run: bool) -> list[ReapedWorkspace]:
    """Save and remove every expired workspace that nobody holds; persistent ones do not expire."""
    found, now = [], await env.store.now()
    for row in await env.store.workspaces():
        if env.has(row) and _is_due(env, row, now):
            reaped = ReapedWorkspace(
                workspace=row.id,
                tree=tree_of(env.settings, row),
                expired=_end(env, row) or 0,
                adopted=row.path is not None,
            )
            found.append(reaped if dry_run else await _reap(env, row, reaped))
    return found


def _is_due(env: WorkspaceEnv, row: WorkspaceRow, now: int) -> bool:
    """Tell whether a workspace has expired; one whose removal was interrupted has."""
    if row.run is not None or row.status in UNFINISHED - {S.DESTROYING}:
        return False
    return expired(_end(env, row), now)


def _end(env: WorkspaceEnv, row: WorkspaceRow) -> int | None:
    """Return when a workspace expires, by its own time and by ``WORKSPACE_MAX_AGE``, even if that was set later."""
    most = env.settings.workspace_max_age
    if row.expires is None or most is None:
        return row.expires
    return min(row.expires, row.created + round(most * 1e6))


async def _reap(env: WorkspaceEnv, row: WorkspaceRow, reaped: ReapedWorkspace) -> ReapedWorkspace:
    try:
        async with hold(env, row, "gc") as held:
            if not _is_due(env, held.row, await env.store.now()):
                return replace(reaped, left="it is in use again", in_use=True)
            removed = await _as_begun(held)
            removed = removed or await finish_destroy(held, discard=False, reason="its time was over")
            return replace(reaped, saved=removed.saved)
    except RunnerError as error:
        left = f"{error.message}; {error.hint}" if error.hint else error.message
        return replace(reaped, left=left, in_use=isinstance(error, LeaseError))


async def complete_changes(env: WorkspaceEnv, unknown: Collection[str] = (), *, dry_run: bool) -> list[CompletedChange]:
    """Complete changes of workspaces that dead processes started, and kill what they left running there.

    Workspaces in ``unknown``, of which the store does not have all events, are left alone.
    """
    found = []
    for row in await env.store.workspaces():
        abandoned = row.status in UNFINISHED or _is_of_gateway(row) or (await env.store.lease(row.id)).id
        ours = row.run is None and row.id not in unknown and env.has(row)
        if ours and abandoned and not is_locked(env.lock(row.id)):
            done = CompletedChange(row.id, f"was left {row.status}")
            found.append(done if dry_run else await _finish(env, row))
    return found


async def _finish(env: WorkspaceEnv, row: WorkspaceRow) -> CompletedChange:
    left = f"was left {row.status}"
    try:
        async with hold(env, row, "recover") as held:
            removed = await _as_begun(held)
        if removed is not None:
            return CompletedChange(row.id, f"{left}, and is gone now", removed.saved)
        return CompletedChange(row.id, f"{left}, and is {(await env.store.workspace(row.id)).status} now")
    except RunnerError as error:
        return CompletedChange(row.id, left, left=error.message)


def _is_of_gateway(row: WorkspaceRow) -> bool:
    """Tell whether a workspace ends with its holder, which has the lease from the beginning to the end."""
    return row.mcp_server is not None and not row.persistent


async def _as_begun(held: HeldWorkspace) -> RemovedWorkspace | None:
    if _is_of_gateway(held.row):
        return await finish_destroy(held, discard=True, reason="its gateway has died")
    match held.row.status:
        case S.CREATING | S.PROVISIONING:
            return await finish_destroy(held, discard=True, reason="whoever made it has died")
        case S.DESTROYING:
            history = await held.env.store.workspace_events(held.row.id)
            discard = any(isinstance(recorded.event, UnsavedWorkDiscarded) for recorded in history)
            return await finish_destroy(held, discard=discard)
        case S.STOPPING:
            await finish_stop(held)
    return None


async def sweep(env: WorkspaceEnv, unknown: Collection[str] = (), *, dry_run: bool) -> list[str]:
    """Remove files of workspaces that are gone, or whose maker died before they were recorded."""
    known = {row.id for row in await env.store.workspaces()}.union(unknown)
    found = []
    for folder in sorted((env.settings.home / WORKSPACES).glob("*")):
        if folder.name not in known and not is_locked(env.lock(folder.name)):
            found.append(str(folder))
            if not dry_run:
                await trio.to_thread.run_sync(trees.remove, folder)
    for part in sorted((env.settings.home / SANDBOXES).glob(".*.part")):
        if not _is_written(env, part.name[1 : -len(".part")]):
            found.append(str(part))
            if not dry_run:
                part.unlink(missing_ok=True)
    return found


def _is_written(env: WorkspaceEnv, id: str) -> bool:
    """Tell whether a living run, keeper or holder may be about to record a workspace."""
    home = env.settings.home
    holders = (env.lock(id), run_directory(home, id.rpartition("-")[0]), home / PLACE)
    return any(holder.is_dir() and is_locked(holder) for holder in holders)
