"""Exclusive use of a workspace outside of runs: its lease, and the file locks that tell whether the holder lives.

A holder keeps a lock on an empty directory of the workspace for as long as it has the lease. A lease whose lock is free
belongs to a dead process, and is taken over at once, live or expired. One whose lock is held belongs to a living
process, whatever a clock that jumped says, and is only taken by force: a new lock then replaces the old one. An adopted
directory is locked as well, since another store may have adopted it too.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.artifacts.history import FILE, add_events, event_line
from runner.artifacts.layout import write
from runner.artifacts.run_lock import try_lock
from runner.core.errors import LeaseHeld, LeaseLost, LeaseTakenOver, WorkspaceLost, WorkspaceState
from runner.core.home import WORKSPACES
from runner.core.model import CommandHolder, Fence, Handle, Holder, Lease
from runner.core.nurseries import unwrapping_groups
from runner.core.settings import Settings
from runner.events.events import Event, LeaseAcquired, LeaseRefreshed, WarningIssued
from runner.lifecycle.lease import TTL, lease_held
from runner.ops.host.liveness import read_liveness
from runner.ops.host.state import make_home, open_state
from runner.ops.runs.dependencies import Advise, dependencies_of, ignore
from runner.ports.provider import KILL_GRACE, STOP_GRACE, Provider
from runner.ports.store import Store, WorkspaceRow
from runner.runtime.context import RunDependencies
from runner.runtime.lease_holder import LeaseHolder, renew_until_released

BREAK = "break"  # the command that takes a lease by force
PATIENCE = 2.0  # seconds for a holder that is about to come or go
MARGIN = STOP_GRACE + 2 * KILL_GRACE  # seconds before a lease ends in which what runs is ended
_PAUSE = 0.1


class WorkspaceEnv(Struct, frozen=True, kw_only=True):
    """Settings, store and adapters of workspace commands; ``advise`` is told what a person should know."""

    settings: Settings
    store: Store
    deps: RunDependencies
    advise: Advise = ignore
    lease_seconds: float = TTL

    def folder(self, id: str) -> Path:
        """Return the directory of a workspace's repository and lock, which commands never see."""
        return self.settings.home / WORKSPACES / id

    def lock(self, id: str) -> Path:
        return lock_of(self.settings.home, id)

    def repository(self, id: str) -> Path:
        return self.folder(id) / "snapshot.git"

    def has(self, row: WorkspaceRow) -> bool:
        """Tell whether a workspace outside of runs is in this home, which others may share the store with."""
        return self.settings.database_url is None or self.folder(row.id).exists()

    def require(self, row: WorkspaceRow) -> None:
        """Raise ``WorkspaceState`` for a workspace of another home."""
        if not self.has(row):
            raise WorkspaceState(f"workspace `{row.id}` is not in `{self.settings.home}`", hint="use it where it is")

    async def find(self, row: WorkspaceRow) -> tuple[Provider, Handle | None]:
        """Return the provider of a workspace, and its handle if anything of it is left."""
        provider = self.deps.provider(row.provider)
        owned = await provider.list_owned(self.deps.nonce)
        return provider, next((handle for handle in owned if handle.id == row.id), None)


def lock_of(home: Path, id: str) -> Path:
    """Return the directory that a holder outside of runs keeps locked."""
    return home / WORKSPACES / id / "lease"


@asynccontextmanager
async def open_workspace_env(
    settings: Settings, advise: Advise = ignore, *, lease_seconds: float = TTL
) -> AsyncIterator[WorkspaceEnv]:
    """Open the workspaces of a ``RUNNER_HOME``. Raises what opening its store raises."""
    make_home(settings)
    async with open_state(settings) as store:
        deps = dependencies_of(settings, store)
        with unwrapping_groups():
            yield WorkspaceEnv(
                settings=settings,
                store=store,
                deps=replace(deps, provider=cache(deps.provider)),  # of which one may have been given a warm sandbox
                advise=advise,
                lease_seconds=lease_seconds,
            )


class HeldWorkspace:
    """A workspace whose lease this process holds. ``write`` raises ``LeaseLost`` once the lease has moved."""

    def __init__(self, env: WorkspaceEnv, row: WorkspaceRow, command: str) -> None:
        self.env, self.row = env, row
        self.lease_holder = LeaseHolder(
            row.id, CommandHolder(command, os.getpid()), env.store.lease, ttl=env.lease_seconds
        )

    async def write(self, *events: Event) -> None:
        fence = self.lease_holder.fence
        try:
            await self._append(events, fence)
        except LeaseLost:
            if fence is None or trio.current_time() >= self.lease_holder.until:
                raise
            # By the time since boot it is ours still: the clock was set forward.
            await self.lease_holder.regain(fence, lambda *taken: self._append(taken, None))
            others = [event for event in events if not isinstance(event, LeaseRefreshed)]
            await self._append(others, self.lease_holder.fence)

    async def _append(self, events: Sequence[Event], fence: Fence | None) -> None:
        recorded = await self.env.store.append_to_workspace(self.row.id, events, fence=fence)
        folder = self.env.folder(self.row.id)
        if folder.is_dir():  # a run's workspace has none
            await trio.to_thread.run_sync(add_events, folder, recorded)

    async def copy_journal(self) -> None:
        """Write all events of the workspace to its folder: the last holder may have died before writing one."""
        history = await self.env.store.workspace_events(self.row.id)
        folder = self.env.folder(self.row.id)
        await trio.to_thread.run_sync(write, folder / FILE, "\n".join(map(event_line, history)))

    async def end(self, last: Event) -> None:
        """Write the last event of a workspace and release its lease in one append."""
        await self.lease_holder.release(lambda released: self.write(last, released))

    async def handle(self) -> tuple[Provider, Handle]:
        """Return the workspace's provider and handle. Raises ``WorkspaceLost`` when nothing of it is left."""
        require_tree(self.row)
        provider, handle = await self.env.find(self.row)
        if handle is None:
            raise WorkspaceLost(
                f"nothing of workspace `{self.row.id}` is left", hint=f"runner workspace destroy {self.row.id}"
            )
        return provider, handle


@asynccontextmanager
async def hold(
    env: WorkspaceEnv, row: WorkspaceRow, command: str, *, intent: Event | None = None, over: str | None = None
) -> AsyncIterator[HeldWorkspace]:
    """Hold a workspace for the block, which is cancelled in time when the lease cannot be renewed.

    ``intent`` is appended with the lease. After a dead holder, all that still runs in the workspace is killed first,
    and ``advise`` is told; so it is after a living one whose lease is ``over``. Raises ``LeaseHeld``, and ``LeaseLost``
    at the end of a block that was cut short.
    """
    held = HeldWorkspace(env, row, command)
    with ExitStack() as locks:
        before = await _acquire(held, locks, intent, over)
        try:
            held.row = await env.store.workspace(row.id)
            await held.copy_journal()
            if before.id:
                await _take_over(held, before, stubborn=before.id == over)
            with unwrapping_groups():
                async with _kept(held):
                    yield held
        finally:
            with trio.CancelScope(shield=True):
                await held.lease_holder.release(held.write)


async def _acquire(held: HeldWorkspace, locks: ExitStack, intent: Event | None, over: str | None) -> Lease:
    """Take the locks and then the lease; return the lease as it was before."""
    env, id = held.env, held.row.id

    async def emit(*events: Event) -> None:
        await held.write(*((intent,) if intent is not None else ()), *events)

    now = await env.store.lease(id)
    if now.id and (place := (await read_liveness(env.store, env.settings.home)).elsewhere(now.runner)):
        raise lease_held(now, place)
    give_up = trio.current_time() + PATIENCE
    while True:
        lock = await trio.to_thread.run_sync(try_lock, env.lock(id))
        if lock is not None:
            locks.callback(os.close, lock)
            before = await env.store.lease(id)
            _lock_tree(held.row, before.holder or await _broken_holder(held), locks)
            return await held.lease_holder.acquire(emit, forced=bool(before.id))
        before = await env.store.lease(id)
        if before.id and before.id != over:
            raise lease_held(before)
        if before.id:
            _lock_tree(held.row, before.holder, locks)
            before = await held.lease_holder.acquire(emit, forced=True)
            locks.callback(os.close, await trio.to_thread.run_sync(replace_lock, env.lock(id)))
            return before
        if trio.current_time() > give_up:
            raise LeaseHeld(f"workspace `{id}` is in use by a process that has no lease on it", hint="try again")
        await trio.sleep(_PAUSE)


async def _broken_holder(held: HeldWorkspace) -> Holder | None:
    """Return the holder whose lease was broken last: it may live and have its locks, but cannot write."""
    history = await held.env.store.workspace_events(held.row.id)
    holders = [one.event.holder for one in history if isinstance(one.event, LeaseAcquired)]
    broken = [before for before, after in pairwise(holders) if isinstance(after, CommandHolder) and after.name == BREAK]
    return broken[-1] if broken else None


def replace_lock(lock: Path) -> int:
    """Replace a lock that is held by a new one; the old directory stays with its holder, without a name."""
    new = lock.with_name(f"lease-{secrets.token_hex(8)}")
    new.mkdir(mode=0o700)
    descriptor = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(lock)
    return descriptor


def require_tree(row: WorkspaceRow) -> None:
    """Raise ``WorkspaceLost`` when an adopted directory has moved or is gone."""
    if row.path is not None and not _is_at(row.path, row.inode):
        hint = f"put it back, or runner workspace delete {row.id}"
        raise WorkspaceLost(f"`{row.path}` is not the directory that was adopted", hint=hint)


def _is_at(path: str, inode: int | None) -> bool:
    try:
        return os.lstat(path).st_ino == inode
    except (FileNotFoundError, NotADirectoryError):
        return False


def _lock_tree(row: WorkspaceRow, holder: Holder | None, locks: ExitStack) -> None:
    """Lock an adopted directory if it exists, since another store may use it. Raises ``LeaseHeld``.

    ``holder`` may still have that lock.
    """
    if row.path is None or not _is_at(row.path, row.inode):
        return
    tree = os.open(row.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    locks.callback(os.close, tree)
    found = os.fstat(tree)
    try:
        fcntl.flock(tree, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not is_locked_by(found, holder):
            hint = "look for its workspace with `runner workspace list`; it may be of another RUNNER_HOME"
            raise LeaseHeld(f"`{row.path}` is in use by another process", hint=hint) from None


def is_locked_by(directory: os.stat_result, holder: Holder | None) -> bool:
    """Tell whether a directory is locked by the process of a command, and by no other."""
    if not isinstance(holder, CommandHolder):
        return False
    place = f"{os.major(directory.st_dev):02x}:{os.minor(directory.st_dev):02x}:{directory.st_ino}"
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    pids = [words[4] for words in locks if words[1] == "FLOCK" and words[5] == place]
    return bool(pids) and all(pid == str(holder.pid) for pid in pids)


async def _take_over(held: HeldWorkspace, before: Lease, *, stubborn: bool) -> None:
    why = "whose time was over" if not before.live(await held.env.store.now()) else "which is dead"
    if stubborn:
        why = "which did not end when it was asked to"
    advice = LeaseTakenOver(f"the lease of workspace `{held.row.id}` was taken over from `{before.holder}`, {why}")
    await held.write(WarningIssued(advice.code, advice.message))
    provider, handle = await held.env.find(held.row)
    if handle is not None:
        await provider.evict(handle)
    held.env.advise(advice)  # last, for whoever should hear it may have gone


@asynccontextmanager
async def _kept(held: HeldWorkspace) -> AsyncIterator[None]:
    lease_holder = held.lease_holder
    scope = trio.CancelScope()
    why: str | None = None

    async def warn(message: str) -> None:
        await held.write(WarningIssued("lease.refresh-failed", message))

    async def watch() -> None:
        nonlocal why
        margin = min(MARGIN, held.env.lease_seconds / 4)
        why = await renew_until_released(lease_holder, held.write, margin=margin, warn=warn)
        if lease_holder.fence is not None:
            scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        with scope:
            yield
        nursery.cancel_scope.cancel()
    if scope.cancelled_caught:
        because = f": {why}" if why else ""
        raise LeaseLost(f"the lease of workspace `{held.row.id}` could not be kept{because}")
