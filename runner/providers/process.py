"""Provider ``process``, class none: commands run directly on this host, with a user and a session of their own at most.

For hosts where no sandbox works; never chosen unless named. Started as root, commands run as a uid that only this
workspace has; otherwise as the runner's own user, with all its rights. It does promise that everything ends: a guest
runs the commands and adopts orphans, and Landlock, where the kernel has it, keeps commands from killing the guest.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from runner.core.errors import ProviderFailed
from runner.core.model import Feature, Handle, IsolationClass
from runner.core.settings import Settings
from runner.guest import binary
from runner.ports.provider import KILL_GRACE, STOP_GRACE, Probe, SandboxSpec, Workspace, WorkspaceRequest
from runner.safefs import trees
from runner.sandbox import cgroup, child_process, processes
from runner.sandbox.directories import WorkspaceDirectories
from runner.sandbox.escapes import ESCAPES, FILTERED
from runner.sandbox.guest_workspace import GuestWorkspace, SandboxContext, open_workspace
from runner.sandbox.mounts import can_stage, open_stage
from runner.sandbox.prepared_mounts import PreparedMounts, paths_on_host, prepare_mounts
from runner.sandbox.sandbox_layout import NO_IMAGE, NOT_WARM

SHOWS_HOST = True  # commands see programs of this host

_HELD = ("descriptors", "environment", *FILTERED)
_NOTHING = "process gives commands at most a user of their own"
GAPS = {escape.name: _NOTHING for escape in ESCAPES if escape.name not in _HELD}  # known ways out, with the reason

_NO_NAMESPACES = "process runs commands directly on this host"
_NO_QUOTA = "process has no disk quota"  # commands can write outside a volume


def provider(settings: Settings) -> ProcessProvider:
    return ProcessProvider(settings.home)


class ProcessProvider:
    """``grace`` is the time between TERM and KILL, in seconds."""

    name = "process"

    def __init__(self, home: Path, *, grace: float = STOP_GRACE) -> None:
        self._directories = WorkspaceDirectories(home, self.name)
        self._grace = grace
        self._root = trees.can_chown()

    async def probe(self) -> Probe:
        missing = {
            **cgroup.missing_limits(),
            Feature.DISK: _NO_QUOTA,
            Feature.BASE_IMAGE: NO_IMAGE,
            Feature.WARM_POOL: NOT_WARM,
            Feature.NETWORK_NONE: _NO_NAMESPACES,
            Feature.PROTECTED_PATHS: _NO_NAMESPACES,
            Feature.DEPENDENCIES: _NO_NAMESPACES,
            Feature.DEPENDENCY_COMMANDS: _NO_NAMESPACES,
            Feature.SECRET_FILES: _NO_NAMESPACES,
        }
        versions = {"kernel": os.uname().release}
        try:
            versions["guest"] = binary.find().sha256[:12]
        except ProviderFailed as error:
            return Probe(
                provider=self.name,
                available=False,
                isolation=IsolationClass.NONE,
                missing=missing,
                versions=versions,
                reason=error.message,
                hint=error.hint,
            )
        if self._root and not can_stage() and (closed := _closed_to_others(self._directories.home)):
            reason = f"other users cannot enter `{closed}`, and commands do not run as root"
            hint = "set RUNNER_HOME to a place such as /var/lib/runner"
            return Probe(
                provider=self.name,
                available=False,
                isolation=IsolationClass.NONE,
                missing=missing,
                versions=versions,
                reason=reason,
                hint=hint,
            )
        return Probe(
            provider=self.name, available=True, isolation=IsolationClass.NONE, missing=missing, versions=versions
        )

    async def create(self, request: WorkspaceRequest) -> Handle:
        cgroup.require_limits(request.limits, self.name)
        if request.limits.disk_bytes is not None:
            raise ProviderFailed(f"`{self.name}` cannot limit the disk of workspace `{request.id}`: {_NO_QUOTA}")
        return await trio.to_thread.run_sync(self._directories.create, request)

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[Workspace]:
        self._directories.check(handle)
        if spec.pinned_paths:
            raise ProviderFailed("`process` cannot protect paths", hint="use provider `local`")
        async with (
            prepare_mounts(handle, spec, open_stage(handle.uid if self._root and can_stage() else None)) as prepared,
            cgroup.open_groups(handle.id, handle.limits) as group,
        ):
            context = self._context(handle, spec, prepared, group)
            try:
                async with self._open_guest(handle, context, group) as workspace:
                    yield workspace
            finally:
                with trio.CancelScope(shield=True):
                    await self._kill_left(handle)

    def _context(
        self, handle: Handle, spec: SandboxSpec, prepared: PreparedMounts, group: cgroup.ControlGroups
    ) -> SandboxContext:
        paths = paths_on_host(prepared, spec)
        env = {"LANG": "C.UTF-8", "HOME": prepared.home.path, "TMPDIR": prepared.tmp.path, **spec.environment}
        if not self._directories.has_own_user(handle):
            env["RUNNER_PRIVATE"] = f"{handle.private}/"  # tells its processes from others of the same user
        uid = handle.uid if self._root else os.geteuid()
        return SandboxContext(
            provider=self.name,
            isolation=IsolationClass.NONE,
            uid=uid,
            paths=paths,
            tree=prepared.tree_fd,
            env=env,
            group=group,
            grace=self._grace,
        )

    @asynccontextmanager
    async def _open_guest(
        self, handle: Handle, context: SandboxContext, group: cgroup.ControlGroups
    ) -> AsyncIterator[GuestWorkspace]:
        what = f"workspace `{handle.id}`"
        file = os.open(binary.find().path, os.O_RDONLY)  # its user may not be able to walk there
        try:
            uid = context.uid if self._root else None
            child = child_process.start([f"/proc/self/fd/{file}"], env={}, cwd="/", uid=uid, pass_fds=[file])
        except OSError as error:
            raise ProviderFailed(f"the guest of {what} cannot be started: {error}") from error
        finally:
            os.close(file)
        try:
            group.join(child.pid)
            async with open_workspace(child.stdin, context, what=what, kill_sandbox=child.kill) as workspace:
                yield workspace
        finally:
            with trio.CancelScope(shield=True):
                # A guest that ends by itself lets its supervisors end their trees; survivors are killed later.
                with trio.move_on_after(KILL_GRACE):
                    await child.wait()
                child.kill()
                await child.aclose()

    async def chown_to_workspace_user(self, handle: Handle) -> None:
        await trio.to_thread.run_sync(self._directories.chown_to_workspace_user, handle)

    async def retrieve(self, handle: Handle) -> None:
        await trio.lowlevel.checkpoint()  # they are here

    async def list_owned(self, nonce: str) -> list[Handle]:
        return await trio.to_thread.run_sync(self._directories.list_owned, nonce)

    async def evict(self, handle: Handle) -> None:
        self._directories.check(handle)
        await cgroup.find_stale_groups(handle.id).remove()
        await self._kill_left(handle)

    async def destroy(self, handle: Handle) -> None:
        self._directories.check(handle)
        await cgroup.find_groups(handle.id).remove()
        await self._kill_left(handle)
        await trio.to_thread.run_sync(self._directories.destroy, handle)

    async def _kill_left(self, handle: Handle) -> None:
        """Kill surviving processes: all of the workspace's own user, else those with a home in the workspace."""
        home = f"={handle.private}/".encode()

        def belongs(pid: int) -> bool:
            if self._directories.has_own_user(handle):
                return processes.user(pid) == handle.uid
            return processes.owner(pid) == handle.uid and home in processes.environment(pid)

        await processes.kill_all(belongs, what=f"workspace `{handle.id}`")


def _closed_to_others(path: Path) -> Path | None:
    """Return the first directory on the way to ``path`` that other users cannot enter."""
    way = [*reversed(path.parents), path]
    return next((place for place in way if place.exists() and not place.stat().st_mode & 0o001), None)
