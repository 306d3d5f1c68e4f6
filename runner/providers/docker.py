"""Provider ``docker``, class namespaces: one container for each opening, with a guest as its first process.

The daemon only makes and removes containers. Commands go through the guest, which dials a socket of ours, so a
daemon that hangs, restarts or is gone holds up no command, and what it does not end any more we end ourselves.
Everything in a container runs as the workspace's own user, without any capability.
"""

from __future__ import annotations

import json
import platform
import posixpath
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from runner import trees
from runner.errors import CleanUpIncomplete, ProviderFailed, WorkspaceLost
from runner.guest import binary
from runner.model import Feature, Handle, IsolationClass, Limits
from runner.ports.provider import STOP_GRACE, Opening, Probe, Workspace, WorkspaceRequest
from runner.providers import _container, spawn
from runner.providers._directories import Directories
from runner.providers._engine import PATIENCE, Engine
from runner.providers._first import First, open_first
from runner.providers._guest import NO_GUEST, GuestWorkspace, Surroundings, open_reached
from runner.providers._handed import Handed, Namespace, open_handed, remove_handed
from runner.providers._opening import Room, open_room
from runner.providers._protected import open_guards, remove_stand_ins
from runner.providers._shown import ENV, PATHS, show_all, workspace_path, write_system_files
from runner.settings import Settings

_RUNTIME = "runc"
_TMP, _TMP_BYTES = "/tmp", 1 << 30
_VOLUME_BYTES = 1 << 16  # for the places that ours are shown at; nobody inside is root
_DISK = "docker has no disk quota"
_CEILINGS = {Feature.CPU: "CpuCfsQuota", Feature.MEMORY: "MemoryLimit", Feature.PIDS: "PidsLimit"}
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def provider(settings: Settings) -> Docker:
    return Docker(settings.home, settings.docker_host)


class Docker:
    """``host`` and ``patience`` as for ``Engine``, ``grace`` as for ``Local``."""

    name = "docker"

    def __init__(self, home: Path, host: str, *, grace: float = STOP_GRACE, patience: float = PATIENCE) -> None:
        self._directories = Directories(home, self.name, lends=True)
        self._engine = Engine(host, patience)
        self._grace = grace

    async def probe(self) -> Probe:
        missing = {Feature.DISK: _DISK}
        versions: dict[str, str] = {}
        try:
            guest = _program()
            about = await self._engine.about()
            versions = _versions(about, guest)
            missing |= {f: f"the daemon cannot limit {f}" for f, word in _CEILINGS.items() if not about.get(word)}
            _check_daemon(about)
            await trio.to_thread.run_sync(_check_reach, self._engine.socket)
        except ProviderFailed as error:
            return Probe(
                self.name,
                False,
                IsolationClass.NAMESPACES,
                missing,
                versions,
                reason=error.message,
                hint=error.hint,
                needs_image=True,
            )
        return Probe(self.name, True, IsolationClass.NAMESPACES, missing, versions, needs_image=True)

    async def image(self, name: str) -> str:
        return str((await self._engine.image(name))["Id"])

    async def create(self, request: WorkspaceRequest) -> Handle:
        if request.limits.disk_bytes is not None:
            raise ProviderFailed(f"`docker` cannot keep the limits: {_DISK}")
        if request.image is None:
            raise ProviderFailed("`docker` needs an image", hint="name one as `workspace.base_image`")
        image = await self._engine.image(request.image)
        kept = {"image": image["Id"], "volumes": _volumes(image)}

        def fill(private: Path) -> None:
            write_system_files(private, private.stat().st_uid)
            _kept(private).write_text(json.dumps(kept))

        return await trio.to_thread.run_sync(self._directories.create, request, fill)

    @asynccontextmanager
    async def open(self, handle: Handle, opening: Opening) -> AsyncIterator[Workspace]:
        self._directories.check(handle)
        program = _program()
        places = open_handed(self._engine.socket, handle.id, handle.uid, handle.tree if handle.adopted else None)
        async with open_room(handle, opening, places) as room:
            assert isinstance(room.places, Handed)
            with open_guards(room.tree_fd, opening.protected) as guards:
                recipe = _container.Recipe()
                image = self._image(handle)
                for volume in image["volumes"]:  # else the daemon makes a writable one for each
                    recipe.show(room.places.add_memory(_VOLUME_BYTES, 0), volume, writable=True)
                recipe.show(room.places.add_memory(_tmp_bytes(handle.limits), handle.uid), _TMP, writable=True)
                show_all(recipe, handle, opening, room, guards)
                recipe.show(room.add(program.path), _container.GUEST)
                room.places.seal(recipe.read_only)
                container = _container.Container(
                    image["image"],
                    f"{handle.uid}:{handle.uid}",
                    self._labels(handle),
                    handle.limits,
                    ENV,
                    _RUNTIME,
                )
                async with self._inhabit(handle, opening, room, recipe, container) as workspace:
                    yield workspace

    @asynccontextmanager
    async def _inhabit(
        self, handle: Handle, opening: Opening, room: Room, recipe: _container.Recipe, container: _container.Container
    ) -> AsyncIterator[GuestWorkspace]:
        assert isinstance(room.places, Handed)
        what = f"workspace `{handle.id}`"
        listener, channel = room.places.listen(_container.SOCKET)
        recipe.show(channel, _container.CHANNEL)
        with listener:
            _opened(handle.private).touch()
            try:
                await self._engine.remove(self._labels(handle))
                name = f"runner-{handle.id}-{secrets.token_hex(4)}"
                started = await self._engine.start(name, container.config(recipe))
                with open_first(started["State"]["Pid"], started["Id"], listener, what) as first:
                    around = Surroundings(
                        self.name,
                        IsolationClass.NAMESPACES,
                        handle.uid,
                        replace(PATHS, workspace=workspace_path(handle, room)),
                        {**ENV, **opening.env},
                        first.group(handle.limits),
                        self._grace,
                    )
                    async with _reach(first, around, what) as workspace:
                        yield workspace
            finally:
                with trio.CancelScope(shield=True), suppress(ProviderFailed):
                    # Nothing runs in it any more, or will once its guest finds that nobody listens.
                    # What a daemon that is away does not remove, destroying will name.
                    await self._engine.remove(self._labels(handle))

    def _image(self, handle: Handle) -> Mapping[str, Any]:
        """What ``create`` has learned of it. Raises ``WorkspaceLost``."""
        try:
            kept: Mapping[str, Any] = json.loads(_kept(handle.private).read_text())
        except OSError as error:
            raise WorkspaceLost(f"workspace `{handle.id}` is gone: {error}") from error
        return kept

    def _labels(self, handle: Handle) -> dict[str, str]:
        """Of the workspace's containers. Raises ``WorkspaceLost`` when it is gone."""
        owner = self._directories.owner(handle)
        if owner is None:
            raise WorkspaceLost(f"workspace `{handle.id}` is gone")
        run, nonce = owner
        words = {"product": "runner", "provider": self.name, "nonce": nonce, "run": run, "workspace": handle.id}
        return {f"runner.{key}": word for key, word in words.items()}

    async def give(self, handle: Handle) -> None:
        await trio.to_thread.run_sync(self._directories.give, handle)

    async def list_owned(self, nonce: str) -> list[Handle]:
        return await trio.to_thread.run_sync(self._directories.owned, nonce)

    async def evict(self, handle: Handle) -> None:
        self._directories.check(handle)
        await self._end(handle)
        await trio.to_thread.run_sync(remove_stand_ins, handle.tree)

    async def destroy(self, handle: Handle) -> None:
        self._directories.check(handle)
        await self._end(handle)
        await trio.to_thread.run_sync(self._directories.destroy, handle)

    async def _end(self, handle: Handle) -> None:
        """End all that runs in the workspace, with or without the daemon, and remove what it ran in."""
        await spawn.kill_all(lambda pid: self._runs_in(pid, handle), what=f"workspace `{handle.id}`")
        if self._directories.owner(handle) is None or not _opened(handle.private).exists():
            return
        try:
            await trio.to_thread.run_sync(remove_handed, handle.id, self._engine.socket)
            await self._engine.remove(self._labels(handle))
        except ProviderFailed as error:
            raise CleanUpIncomplete(
                f"containers of workspace `{handle.id}` may remain: {error.message}", hint=error.hint
            ) from error

    def _runs_in(self, pid: int, handle: Handle) -> bool:
        if spawn.user(pid) != handle.uid:
            return False
        # A user with more than this workspace runs much else; only a container of it has its inputs mounted.
        mounted = f"/sandboxes/{handle.id}/runner {PATHS.runner} "
        return self._directories.has_own_user(handle) or mounted in spawn.mounts(pid)


@asynccontextmanager
async def _reach(first: First, around: Surroundings, what: str) -> AsyncIterator[GuestWorkspace]:
    """The workspace of a container that has been started, which has ended when the block ends."""
    guest = open_reached(first.connect, around, what=what, kill_sandbox=first.kill)
    try:
        async with AsyncExitStack() as stack:
            try:
                workspace = await stack.enter_async_context(guest)
            except WorkspaceLost as lost:
                raise ProviderFailed(f"the guest of {what} does not start: {lost.message}") from lost
            yield workspace
    finally:
        with trio.CancelScope(shield=True):
            await first.end()


def _program() -> binary.Program:
    program = binary.find()
    if program is None:
        raise ProviderFailed(f"commands in containers are run by a guest, and {NO_GUEST}", hint="apt install gcc")
    return program


def _opened(private: Path) -> Path:
    """There from before the first container is made."""
    return private / "system" / "opened"


def _volumes(image: Mapping[str, Any]) -> list[str]:
    """The places that an image wants to be writable. Raises ``ProviderFailed`` for one inside of ours."""
    found = sorted(posixpath.normpath(place) for place in image["Config"].get("Volumes") or ())
    ours = (PATHS.workspace, PATHS.output, PATHS.runner, PATHS.home, _TMP)
    if within := [place for place in found if any(place.startswith(f"{our}/") for our in ours)]:
        raise ProviderFailed(
            f"image `{image['Id']}` declares a volume at `{within[0]}`, where the workspace's own files are",
            hint="build it without that VOLUME",
        )
    return found


def _tmp_bytes(limits: Limits) -> int:
    """Of memory, so less than its limit: else files alone could use it up, and with no command left the guest dies."""
    return _TMP_BYTES if limits.memory_bytes is None else min(_TMP_BYTES, limits.memory_bytes // 2)


def _kept(private: Path) -> Path:
    """What ``create`` has learned of the image."""
    return private / "system" / "image.json"


def _versions(about: Mapping[str, Any], guest: binary.Program) -> dict[str, str]:
    words = {"docker": "ServerVersion", "storage": "Driver", "cgroup": "CgroupVersion", "kernel": "KernelVersion"}
    found = {name: str(about[word]) for name, word in words.items() if about.get(word)}
    return {**found, "guest": guest.sha256[:12]}


def _check_daemon(about: Mapping[str, Any]) -> None:
    """Raises ``ProviderFailed`` for a daemon whose containers would not be what the others' are."""
    ours = platform.machine()
    if about.get("OSType") != "linux" or about.get("Architecture") not in (ours, _MACHINES.get(ours)):
        raise ProviderFailed(f"the docker daemon runs {about.get('OSType')} on {about.get('Architecture')}")
    for option in about.get("SecurityOptions") or ():
        if "rootless" in option or "userns" in option:
            raise ProviderFailed(
                "the docker daemon gives containers other users than this host has",
                hint="start dockerd as root and without `userns-remap`",
            )
    if _RUNTIME not in about.get("Runtimes", {}):
        raise ProviderFailed(f"the docker daemon has no runtime `{_RUNTIME}`")


def _check_reach(daemon: Path) -> None:
    """Raises ``ProviderFailed`` where directories cannot be handed over."""
    if not trees.can_give():
        raise ProviderFailed(
            "only root can hand directories over to docker so that no path is looked up twice",
            hint="run as root, or use provider `local`",
        )
    try:
        Namespace(daemon).close()
    except OSError as error:
        raise ProviderFailed(f"the docker daemon cannot be shown directories of this host: {error}") from error
