"""Leases of workspaces: list them, release those of dead holders, and break those of living ones."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import trio
from msgspec import Struct

from runner.artifacts.run_lock import is_locked
from runner.core.errors import LeaseHeld, LeaseTakenOver, UsageError, WorkspaceState
from runner.core.home import run_directory
from runner.core.model import CommandHolder, Lease, RunHolder
from runner.core.settings import Settings
from runner.events.events import WarningIssued
from runner.lifecycle.lease import lease_held
from runner.ops.host.liveness import Liveness, read_liveness
from runner.ops.workspaces.workspace_lease import (
    BREAK,
    HeldWorkspace,
    WorkspaceEnv,
    hold,
    is_locked_by,
    lock_of,
    replace_lock,
)
from runner.ports.provider import KILL_GRACE, STOP_GRACE
from runner.ports.store import Reader, WorkspaceRow

EXEC = "exec"  # the command that can be asked to end


class LeaseState(Struct, frozen=True, kw_only=True):
    """A lease in a listing; ``state`` is ``live``, ``expired``, or ``dead`` when its holder is."""

    id: str
    workspace: str
    holder: str
    state: str
    acquired: int
    refreshed: int
    expires: int
    fence: int


async def list_leases(env: WorkspaceEnv) -> list[LeaseState]:
    """List every lease, the oldest first, those of dead holders as well."""
    return await read_states(env.store, env.settings)


async def lease_of(env: WorkspaceEnv, id: str) -> LeaseState | None:
    """Return the lease of a workspace, ``None`` for a free one."""
    lease = await env.store.lease(id)
    return _state(lease, env.settings.home, await read_liveness(env.store, env.settings.home)) if lease.id else None


async def read_states(store: Reader, settings: Settings) -> list[LeaseState]:
    liveness = await read_liveness(store, settings.home)
    return [_state(lease, settings.home, liveness) for lease in await store.leases()]


async def release(env: WorkspaceEnv, text: str) -> str:
    """End the lease of a dead holder, and what it left running. Returns a sentence that says what was done.

    Raises ``LeaseHeld`` when the holder lives.
    """
    row = await env.store.workspace(text)
    lease = await env.store.lease(row.id)
    if not lease.id:
        return f"workspace {row.id} is free"
    if row.run is not None:
        hint = f"runner recover {row.run}"
        liveness = await read_liveness(env.store, env.settings.home)
        if not liveness.is_dead(lease.runner, locked=is_locked(run_directory(env.settings.home, row.run))):
            hint = f"wait, or `runner lease break {row.id} --yes`"
        raise LeaseHeld(f"workspace `{row.id}` is in use by {lease.holder}", hint=hint)
    env.require(row)
    async with hold(env, row, "release"):
        pass
    return f"workspace {row.id} is free; `{lease.holder}` had it"


async def break_lease(env: WorkspaceEnv, text: str, *, sure: bool) -> str:
    """Take a workspace from a holder that may live, kill what runs in it, and free it. Returns a sentence that says so.

    From the first moment the holder's writes are refused; a run ends at its next one. Raises ``UsageError`` unless
    ``sure``, and ``WorkspaceState`` for a free workspace.
    """
    row = await env.store.workspace(text)
    lease = await env.store.lease(row.id)
    if not lease.id:
        raise WorkspaceState(f"workspace `{row.id}` is free, there is nothing to break")
    if place := (await read_liveness(env.store, env.settings.home)).elsewhere(lease.runner):
        raise lease_held(lease, place)  # what runs in it cannot be killed from here
    if row.run is None:
        env.require(row)
    if not sure:
        message = f"breaking the lease of workspace `{row.id}` kills all that `{lease.holder}` runs in it"
        raise UsageError(message, hint=f"runner lease break {row.id} --yes")
    held = HeldWorkspace(env, row, BREAK)
    with trio.CancelScope(shield=True):
        await held.lease_holder.acquire(held.write, forced=True)
        advice = LeaseTakenOver(f"the lease of workspace `{row.id}` was broken, which `{lease.holder}` had")
        await held.write(WarningIssued(advice.code, advice.message))
        provider, handle = await env.find(row)
        if handle is not None:
            await provider.evict(handle)
        if row.run is None:
            os.close(await trio.to_thread.run_sync(replace_lock, env.lock(row.id)))
        await held.lease_holder.release(held.write)
    return f"workspace {row.id} is free; `{lease.holder}` had it" + (
        f", and ends at its next write; `runner recover {row.run}` cleans up after it" if row.run is not None else ""
    )


async def ask_to_end(env: WorkspaceEnv, row: WorkspaceRow) -> str | None:
    """Terminate the command that runs in a workspace and wait for its end, at most the grace periods.

    Returns the lease of a holder that still lives. Raises ``LeaseHeld`` for a holder that is not a command, or no
    longer the process that took the lease.
    """
    lease = await env.store.lease(row.id)
    lock = env.lock(row.id)
    if not lease.id or not is_locked(lock):
        return None
    holder = lease.holder
    if not isinstance(holder, CommandHolder) or holder.name != EXEC or holder.pid == os.getpid():
        raise lease_held(lease)
    try:
        return None if await _end(holder.pid, lease, lock) else lease.id
    except (ProcessLookupError, FileNotFoundError):  # it has ended by itself, or all of the workspace is gone
        return None


async def _end(pid: int, lease: Lease, lock: Path) -> bool:
    process = os.pidfd_open(pid)
    try:
        if not is_locked_by(os.stat(lock), lease.holder):  # the number may be another's by now
            raise lease_held(lease)
        signal.pidfd_send_signal(process, signal.SIGTERM)
        with trio.move_on_after(STOP_GRACE + KILL_GRACE) as waiting:
            await trio.lowlevel.wait_readable(process)
        return not waiting.cancelled_caught
    finally:
        os.close(process)


def _state(lease: Lease, home: Path, liveness: Liveness) -> LeaseState:
    state = "live"
    if not lease.live(liveness.now):
        state = "expired"
    elif liveness.is_dead(lease.runner, locked=is_locked(_lock(lease, home))):
        state = "dead"
    return LeaseState(
        id=lease.id,
        workspace=lease.workspace,
        holder=str(lease.holder),
        state=state,
        acquired=lease.acquired,
        refreshed=lease.refreshed,
        expires=lease.expires,
        fence=lease.fence,
    )


def _lock(lease: Lease, home: Path) -> Path:
    """Return what the holder keeps locked: a run, or whoever recovers it, the run's directory."""
    if isinstance(lease.holder, RunHolder):
        return run_directory(home, lease.holder.run)
    return lock_of(home, lease.workspace)
