"""Provider ``local``, class namespaces: bubblewrap on this host, nothing else needed.

Each sandbox is one bubblewrap with a guest as its first process, which runs the commands. Started as root,
commands and bubblewrap run as a uid that only this workspace has: bubblewrap is never root.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from msgspec.structs import replace

from runner.core.errors import ProviderFailed
from runner.core.model import Feature, Handle, IsolationClass, Limits
from runner.core.settings import Settings
from runner.guest import binary
from runner.ports.provider import KILL_GRACE, STOP_GRACE, Paths, Probe, SandboxSpec, Workspace, WorkspaceRequest
from runner.safefs.safe_open import open_linkless
from runner.sandbox import bwrap, cgroup, processes
from runner.sandbox.bwrap_process import Shell, open_shell, start_guest_in_bwrap
from runner.sandbox.container import GUEST
from runner.sandbox.directories import WorkspaceDirectories
from runner.sandbox.mounts import MountStage, open_stage
from runner.sandbox.prepared_mounts import prepare_mounts
from runner.sandbox.protected_paths import open_guards, remove_placeholders
from runner.sandbox.sandbox_layout import (
    ENV,
    NO_IMAGE,
    NOT_WARM,
    PATHS,
    mount_all,
    workspace_path,
    write_system_files,
)
from runner.sandbox.volumes import Volume

if TYPE_CHECKING:
    from runner.sandbox.guest_workspace import GuestWorkspace

SHOWS_HOST = True  # commands see programs of this host


def provider(settings: Settings) -> LocalProvider:
    return LocalProvider(settings.home)


class LocalProvider:
    """``grace`` is the time between TERM and KILL, in seconds; ``own_users`` is as for ``WorkspaceDirectories``."""

    name = "local"

    def __init__(self, home: Path, *, grace: float = STOP_GRACE, own_users: bool | None = None) -> None:
        self._directories = WorkspaceDirectories(home, self.name, own_users=own_users, idmaps=True)
        self._own_users = self._directories.own_users
        self._grace = grace

    async def probe(self) -> Probe:
        missing = {**cgroup.missing_limits(), Feature.BASE_IMAGE: NO_IMAGE, Feature.WARM_POOL: NOT_WARM}
        watched: frozenset[Feature] = frozenset()
        if why := self._directories.why_no_disk_limit():
            missing[Feature.DISK] = why
            watched = frozenset({Feature.DISK})
        versions = {"kernel": os.uname().release, "bubblewrap": bwrap.version()}
        try:
            program = self._program()
            versions["guest"] = program.sha256[:12]
            uid = self._directories.handle("probe", Limits()).uid if self._own_users else None
            with open_stage(uid) as stage:
                options = bwrap.BwrapOptions(ENV, [*bwrap.ISOLATION, *bwrap.bare_system()])
                guest = stage.add(open_linkless(program.path))
                options.show(guest, GUEST)
                shell = open_shell(stage, uid, guest)
                paths = replace(PATHS, workspace="/")
                group, no_tree = cgroup.ControlGroups({}), -1
                async with self._start(options, shell, group, paths, "the probe", tree=no_tree):
                    pass  # its guest has answered from inside
        except (OSError, ProviderFailed) as error:
            reason = str(error)
            hint = error.hint if isinstance(error, ProviderFailed) and error.hint else bwrap.hint(reason)
            return Probe(
                provider=self.name,
                available=False,
                isolation=IsolationClass.NAMESPACES,
                missing=missing,
                versions=versions,
                reason=reason,
                hint=hint,
            )
        return Probe(
            provider=self.name,
            available=True,
            isolation=IsolationClass.NAMESPACES,
            missing=missing,
            versions=versions,
            watched=watched,
        )

    async def create(self, request: WorkspaceRequest) -> Handle:
        cgroup.require_limits(request.limits, self.name)
        await self._directories.prepare(request)
        return await trio.to_thread.run_sync(
            self._directories.create, request, partial(write_system_files, uid=bwrap.UID)
        )

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[Workspace]:
        self._directories.check(handle)
        await trio.to_thread.run_sync(self._directories.mount, handle)
        async with prepare_mounts(handle, spec, self._open_stage(handle)) as prepared:
            with open_guards(prepared.tree_fd, spec.pinned_paths) as guards:
                paths = replace(PATHS, workspace=workspace_path(handle, prepared))
                options = bwrap.BwrapOptions({**ENV, **spec.environment})
                options.show(prepared.tmp, "/tmp", writable=True)
                mount_all(options, handle, spec, prepared, guards)
                guest = prepared.add(self._program().path)
                options.show(guest, GUEST)
                shell = open_shell(prepared.stage, handle.uid if self._own_users else None, guest)
                what, volume = f"workspace `{handle.id}`", self._directories.volume(handle)
                async with (
                    cgroup.open_groups(handle.id, handle.limits) as group,
                    self._start(options, shell, group, paths, what, tree=prepared.tree_fd, volume=volume) as workspace,
                ):
                    yield workspace

    def _open_stage(self, handle: Handle) -> AbstractContextManager[MountStage]:
        return open_stage(handle.uid if self._own_users else None, handle.tree if handle.adopted else None)

    def _program(self) -> binary.Program:
        return binary.find()

    @asynccontextmanager
    async def _start(
        self,
        options: bwrap.BwrapOptions,
        shell: Shell,
        group: cgroup.ControlGroups,
        paths: Paths,
        what: str,
        *,
        tree: int,
        volume: Volume | None = None,
    ) -> AsyncIterator[GuestWorkspace]:
        from runner.sandbox.guest_workspace import SandboxContext, open_workspace  # which a probe does without

        sandbox = start_guest_in_bwrap(shell, options, group, GUEST)
        try:
            with trio.move_on_after(KILL_GRACE, shield=True):  # milliseconds, unless the host hangs
                await sandbox.begin()
            if sandbox.init is None:
                await sandbox.child.wait()
                raise ProviderFailed(f"bubblewrap cannot make a sandbox: {sandbox.complaint()}")
            uid = processes.user(sandbox.init)
            context = SandboxContext(
                provider=self.name,
                isolation=IsolationClass.NAMESPACES,
                uid=uid,
                paths=paths,
                tree=tree,
                env=options.env,
                group=group,
                grace=self._grace,
                volume=volume,
            )
            async with open_workspace(
                sandbox.child.stdin, context, what=what, kill_sandbox=sandbox.kill, complaint=sandbox.complaint
            ) as workspace:
                yield workspace
        finally:
            sandbox.kill()
            with trio.CancelScope(shield=True):
                await sandbox.close()

    async def chown_to_workspace_user(self, handle: Handle) -> None:
        await trio.to_thread.run_sync(self._directories.chown_to_workspace_user, handle)

    async def retrieve(self, handle: Handle) -> None:
        await trio.lowlevel.checkpoint()  # they are here

    async def list_owned(self, nonce: str) -> list[Handle]:
        return await trio.to_thread.run_sync(self._directories.list_owned, nonce)

    async def evict(self, handle: Handle) -> None:
        self._directories.check(handle)
        await self._end(handle, cgroup.find_stale_groups(handle.id))
        await trio.to_thread.run_sync(remove_placeholders, handle.tree)

    async def destroy(self, handle: Handle) -> None:
        self._directories.check(handle)
        await self._end(handle, cgroup.find_groups(handle.id))
        await trio.to_thread.run_sync(self._directories.destroy, handle)

    async def _end(self, handle: Handle, group: cgroup.ControlGroups) -> None:
        await group.remove()
        await processes.kill_all(lambda pid: self._runs_in(pid, handle), what=f"workspace `{handle.id}`")

    def _runs_in(self, pid: int, handle: Handle) -> bool:
        if processes.user(pid) != handle.uid:
            return False
        # A user of several workspaces runs other processes too; only those in this one's sandbox have its /tmp.
        mounted = rf"/sandboxes/{re.escape(handle.id)}/tmp (/newroot)?/tmp "
        return self._directories.has_own_user(handle) or re.search(mounted, processes.mounts(pid)) is not None
