"""Provider ``docker``, class namespaces: one container for each opening, with a guest as its first process.

The daemon only makes and removes containers. Commands go through the guest, which dials a socket of ours, so a
daemon that hangs, restarts or is gone holds up no command, and what it does not end any more we end ourselves.
Everything in a container runs as the workspace's own user, without any capability. What is different with another
runtime is a ``Flavour``.
"""

from __future__ import annotations

import json
import os
import platform
import posixpath
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import trio

from runner.core.errors import CleanUpIncomplete, ProviderFailed, WorkspaceLost
from runner.core.model import Feature, Handle, IsolationClass, Limits
from runner.core.settings import Settings
from runner.guest import binary
from runner.guest.client import open_guest
from runner.guest.framing import NONCE_BYTES
from runner.ports.provider import STOP_GRACE, Probe, SandboxHandoff, SandboxSpec, Workspace, WorkspaceRequest
from runner.safefs import trees
from runner.sandbox import processes
from runner.sandbox.cgroup import Group
from runner.sandbox.container import GUEST, Container, Recipe
from runner.sandbox.container_init import First, membership, open_first
from runner.sandbox.directories import Directories
from runner.sandbox.docker_api import PATIENCE, Engine
from runner.sandbox.docker_mounts import (
    Cover,
    DaemonStage,
    Namespace,
    open_daemon_stage,
    remove_stale_stage,
    reopen_daemon_stage,
)
from runner.sandbox.guest_workspace import NO_GUEST, GuestWorkspace, Surroundings, open_reached
from runner.sandbox.prepared_mounts import Room, open_room
from runner.sandbox.protected_paths import open_guards, remove_stand_ins
from runner.sandbox.sandbox_layout import ENV, PATHS, show_all, workspace_path, write_system_files
from runner.sandbox.socket_channel import Dialled, open_dialled
from runner.sandbox.warm_containers import Idle, Seat, Stay, covers, mounts_of, open_tree, seat_of

_TMP, _TMP_BYTES = "/tmp", 1 << 30
_ROOT = "/root"
_STARTING = 5.0  # seconds for a runtime to say its version
_VOLUME_BYTES = 1 << 16  # for the places that ours are shown at; nobody inside is root
_CEILINGS = {Feature.CPU: "CpuCfsQuota", Feature.MEMORY: "MemoryLimit", Feature.PIDS: "PidsLimit"}
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class Channel(Protocol):
    """How the guest of one container is reached."""

    @property
    def config(self) -> Mapping[str, Any]:
        """What the container is made with for its sake."""

    async def prepare(self, container: str) -> None:
        """Called once it is made, before it starts. Raises ``ProviderFailed``."""

    async def connect(self, first: First) -> trio.abc.Stream:
        """The guest's next connection. Raises ``WorkspaceLost`` when there will be none."""


@dataclass(frozen=True)
class Flavour:
    """What tells the containers of one runtime from those of another.

    ``hint`` is how a daemon gets the runtime; ``capabilities`` as for ``Container``, ``lends`` as for ``Directories``.
    Where a container's first process ``ends_last``, nothing of it runs any more once that has ended.
    Of the limits, ``outside`` are those that the daemon keeps a container within, ``inside`` those that its guest
    holds commands to. ``not_warm``
    is why none of its containers can be started before it is known for whom, if so.
    """

    name: str
    isolation: IsolationClass
    runtime: str
    hint: str | None
    open_channel: Callable[[Engine, DaemonStage, Recipe, str], AbstractContextManager[Channel]]
    capabilities: tuple[str, ...] = ()
    lends: bool = True
    ends_last: bool = False
    outside: Callable[[Limits], Limits] = lambda limits: limits
    inside: Callable[[Limits], Limits] = lambda _limits: Limits()
    not_warm: str | None = None


@dataclass(frozen=True)
class _Started:
    room: Room
    channel: Channel
    first: First
    container: str
    bare: bool  # of stand-ins in its tree

    async def connect(self) -> trio.abc.Stream:
        return await self.channel.connect(self.first)


RUNC = Flavour("docker", IsolationClass.NAMESPACES, "runc", None, open_dialled, ends_last=True)


def provider(settings: Settings) -> Docker:
    return Docker(settings.home, settings.docker_host)


class Docker:
    """``host`` and ``patience`` as for ``Engine``, ``grace`` as for ``Local``."""

    def __init__(
        self,
        home: Path,
        host: str,
        *,
        grace: float = STOP_GRACE,
        patience: float = PATIENCE,
        flavour: Flavour = RUNC,
    ) -> None:
        self.name = flavour.name
        self._flavour = flavour
        self._directories = Directories(home, self.name, lends=flavour.lends)
        self._engine = Engine(host, patience)
        self._grace = grace
        self._seats: dict[str, Seat] = {}

    async def probe(self) -> Probe:
        why = self._directories.why_unbounded()
        missing = {Feature.DISK: why} if why else {}
        missing |= {Feature.WARM_POOL: self._flavour.not_warm} if self._flavour.not_warm else {}
        versions: dict[str, str] = {}
        try:
            _check_user(self.name)
            guest = _program()
            about = await self._engine.about()
            versions = _versions(about, guest)
            missing |= {f: f"the daemon cannot limit {f}" for f, word in _CEILINGS.items() if not about.get(word)}
            _check_daemon(about, self._flavour)
            await check_runtime(about, self._flavour.runtime)
            await trio.to_thread.run_sync(_check_reach, self._engine.socket)
        except ProviderFailed as error:
            return Probe(
                self.name,
                False,
                self._flavour.isolation,
                missing,
                versions,
                reason=error.message,
                hint=error.hint,
                needs_image=True,
            )
        return Probe(self.name, True, self._flavour.isolation, missing, versions, needs_image=True)

    async def image(self, name: str) -> str:
        return str((await self._engine.image(name))["Id"])

    async def labels(self, image: str) -> Mapping[str, str]:
        labels: Mapping[str, str] | None = (await self._engine.image(image))["Config"].get("Labels")
        return labels or {}

    async def create(self, request: WorkspaceRequest) -> Handle:
        if request.image is None:
            raise ProviderFailed(f"`{self.name}` needs an image", hint="name one as `workspace.base_image`")
        image = await self._engine.image(request.image)
        kept = {"image": image["Id"], "volumes": _volumes(image)}

        def fill(private: Path) -> None:
            write_system_files(private, private.stat().st_uid)
            _kept(private).write_text(json.dumps(kept))

        await self._directories.prepare(request)
        return await trio.to_thread.run_sync(self._directories.create, request, fill)

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[Workspace]:
        self._directories.check(handle)
        async with AsyncExitStack() as stack:
            workspace: Workspace | None = await self._find_seat(stack, handle, spec)
            if workspace is None:
                workspace = await stack.enter_async_context(self._open(handle, spec))
            yield workspace

    @asynccontextmanager
    async def _open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[GuestWorkspace]:
        """``open`` with a container of its own."""
        async with self._started(handle, spec, Stay()) as started:
            path, tree = workspace_path(handle, started.room), started.room.tree_fd
            around = self._around(handle, spec, self._group(handle, started.first), path, tree)
            reached = self._reach(started.connect, started.first, around, _what(handle), bare=started.bare)
            async with reached as workspace:
                yield workspace

    @asynccontextmanager
    async def open_slot(self, handle: Handle, toolchains: Sequence[str]) -> AsyncIterator[Idle]:
        self._directories.check(handle)
        mounts = mounts_of(handle)
        for mount in mounts:
            mount.source.mkdir(mode=0o700)
            trees.chown(mount.source, handle.uid)
        stay, nonce = Stay(late=True), os.urandom(NONCE_BYTES)
        async with self._started(handle, SandboxSpec(mounts, toolchains=tuple(toolchains)), stay) as started:
            first, channel, places = started.first, started.channel, started.room.places
            assert isinstance(channel, Dialled)
            assert isinstance(places, DaemonStage)
            words = {
                "container": started.container,
                "pid": first.pid,
                "tree": started.room.tree.path,
                "nonce": nonce.hex(),
                "groups": self._group(handle, first).words,
                "toolchains": list(toolchains),
                "shown": [mount.target for mount in mounts],
            }
            try:
                async with open_guest(
                    started.connect, what=_what(handle), kill_sandbox=first.kill, nonce=nonce
                ) as guest:
                    yield Idle(stay, guest, first, channel.listener, words)
            finally:
                places.detached = stay.stays
                if not stay.stays:
                    with trio.CancelScope(shield=True):
                        await first.end()

    async def assign(self, handle: Handle, request: WorkspaceRequest) -> Handle:
        return await trio.to_thread.run_sync(self._directories.assign, handle, request)

    def receive(self, handle: Handle, handoff: SandboxHandoff) -> None:
        self._seats[handle.id] = seat_of(handoff)

    async def _find_seat(self, stack: AsyncExitStack, handle: Handle, spec: SandboxSpec) -> GuestWorkspace | None:
        """The container that was handed over for a workspace, if there is one that fits; any other is ended."""
        seat = self._seats.pop(handle.id, None)
        if seat is None:
            return None
        listener = socket.socket(fileno=seat.descriptor)
        if seat.fits(handle, spec):
            with suppress(ProviderFailed, WorkspaceLost):  # it has died meanwhile
                return await stack.enter_async_context(self._sit(handle, spec, seat, listener))
        listener.close()
        await self._end(handle)
        return None

    @asynccontextmanager
    async def _sit(
        self, handle: Handle, spec: SandboxSpec, seat: Seat, listener: socket.socket
    ) -> AsyncIterator[GuestWorkspace]:
        """The workspace of a container that was handed over, which has ended when the block ends."""
        with (
            listener,
            open_first(seat.pid, seat.container, _what(handle)) as first,
            reopen_daemon_stage(self._engine, handle.private.name, handle.uid) as places,
            open_tree(places, seat) as tree,
            open_guards(tree, spec.protected) as guards,
        ):
            try:
                _cover(places, tree, covers(handle.private, guards))
                around = self._around(handle, spec, seat.group, PATHS.workspace, tree)
                connect = partial(Dialled(listener, _what(handle)).connect, first)
                bare = not any(guard.is_stand_in for guard in guards)
                async with self._reach(connect, first, around, _what(handle), seat.nonce, bare=bare) as workspace:
                    await workspace.ping()  # what it said when it was handed over is no proof that it lives
                    yield workspace
            finally:
                with trio.CancelScope(shield=True), suppress(ProviderFailed):
                    await first.end()
                    places.close()  # stand-ins that something is mounted over could not be removed
                    await self._remove(handle)
                    _containers(handle.private).unlink(missing_ok=True)

    @asynccontextmanager
    async def _reach(
        self,
        connect: Callable[[], Awaitable[trio.abc.Stream]],
        first: First,
        around: Surroundings,
        what: str,
        nonce: bytes | None = None,
        *,
        bare: bool,
    ) -> AsyncIterator[GuestWorkspace]:
        """The workspace of a container that has been started, which has ended when the block ends.

        One whose tree is not ``bare`` of stand-ins is still only when those are gone, or a scan would find them.
        """
        guest = open_reached(connect, around, what=what, kill_sandbox=first.kill, nonce=nonce)
        workspace: GuestWorkspace | None = None
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
            if workspace is not None and self._flavour.ends_last and bare:
                workspace.terminated.set()

    @asynccontextmanager
    async def _started(self, handle: Handle, spec: SandboxSpec, stay: Stay) -> AsyncIterator[_Started]:
        """A container of a workspace; with the block go it and what is shown in it, unless it is to stay."""
        await trio.to_thread.run_sync(self._directories.mount, handle)
        program = _program()
        _containers(handle.private).touch()
        lent = handle.tree if handle.adopted else None
        places = open_daemon_stage(self._engine, handle.private.name, handle.uid, lent)
        async with open_room(handle, spec, places) as room:
            assert isinstance(room.places, DaemonStage)
            with open_guards(room.tree_fd, spec.pinned_paths) as guards:
                recipe = Recipe()
                image = self._image(handle)
                for volume in image["volumes"]:  # else the daemon makes a writable one for each
                    recipe.show(room.places.add_tmpfs(_VOLUME_BYTES, 0), volume, writable=True)
                if any(mount.target == PATHS.kube for mount in spec.mounts):
                    # What an image has there is root's own, and would keep others from what is shown below it.
                    recipe.show(room.places.add_tmpfs(_VOLUME_BYTES, 0), _ROOT, writable=True)
                recipe.show(room.places.add_tmpfs(_tmp_bytes(handle.limits), handle.uid), _TMP, writable=True)
                show_all(recipe, handle, spec, room, guards)
                recipe.show(room.add(program.path), GUEST)
                if stay.late:
                    room.places.share(room.tree)
                    recipe.follow.add(PATHS.workspace)
                room.places.seal(recipe.read_only)
                container = Container(
                    image["image"],
                    handle.uid,
                    self._labels(handle),
                    self._flavour.outside(handle.limits),
                    ENV,
                    self._flavour.runtime,
                    self._flavour.capabilities,
                )
                with self._flavour.open_channel(self._engine, room.places, recipe, _what(handle)) as channel:
                    try:
                        made = await self._make(handle, {**container.config(recipe), **channel.config})
                        await channel.prepare(made)
                        started = await self._engine.start(made)
                        with open_first(started["State"]["Pid"], made, _what(handle)) as first:
                            bare = not any(guard.is_stand_in for guard in guards)
                            yield _Started(room, channel, first, made, bare)
                    finally:
                        with trio.CancelScope(shield=True), suppress(ProviderFailed):
                            # Nothing runs in it any more, or will once its guest finds that nobody listens.
                            # What a daemon that is away does not remove, destroying will name.
                            if not stay.stays:
                                await self._remove(handle)

    async def _make(self, handle: Handle, config: Mapping[str, Any]) -> str:
        """Make a container, of which it is durable whose it is before it starts; its id."""
        await self._remove(handle)
        made = await self._engine.make(f"runner-{handle.id}-{secrets.token_hex(4)}", config)
        _containers(handle.private).write_text(f"{made}\n")
        return made

    def _group(self, handle: Handle, first: First) -> Group:
        return first.group(self._flavour.outside(handle.limits))

    def _around(self, handle: Handle, spec: SandboxSpec, group: Group, workspace: str, tree: int) -> Surroundings:
        return Surroundings(
            self.name,
            self._flavour.isolation,
            handle.uid,
            replace(PATHS, workspace=workspace),
            tree,
            {**ENV, **spec.environment},
            group,
            self._grace,
            user=handle.uid if self._flavour.capabilities else None,
            inside=self._flavour.inside(handle.limits),
            volume=self._directories.volume(handle),
        )

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
        name = handle.slot or handle.id
        words = {"product": "runner", "provider": self.name, "nonce": nonce, "run": run, "workspace": name}
        return {f"runner.{key}": word for key, word in words.items()}

    async def _remove(self, handle: Handle) -> None:
        """Remove the workspace's containers, also those from before it was this one."""
        labels = self._labels(handle)
        await self._engine.remove({name: word for name, word in labels.items() if name != "runner.run"})

    async def chown_to_workspace_user(self, handle: Handle) -> None:
        await trio.to_thread.run_sync(self._directories.chown_to_workspace_user, handle)

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
        if seat := self._seats.pop(handle.id, None):
            os.close(seat.descriptor)
        if self._directories.owner(handle) is None or not _containers(handle.private).exists():
            return
        containers = _containers(handle.private).read_text().split()
        await processes.kill_all(lambda pid: _runs_in(pid, containers), what=f"workspace `{handle.id}`")
        try:
            await trio.to_thread.run_sync(remove_stale_stage, handle.private.name, self._engine.socket)
            await self._remove(handle)
        except ProviderFailed as error:
            raise CleanUpIncomplete(
                f"containers of workspace `{handle.id}` may remain: {error.message}", hint=error.hint
            ) from error


def _runs_in(pid: int, containers: Sequence[str]) -> bool:
    groups = membership(pid)
    return any(container in groups for container in containers)


def _cover(places: DaemonStage, tree: int, wanted: Sequence[Cover]) -> None:
    try:
        places.cover(tree, wanted)
    except OSError as error:
        raise ProviderFailed(f"a container cannot be shown more: {error}") from error


def _what(handle: Handle) -> str:
    return f"workspace `{handle.id}`"


def _program() -> binary.Program:
    program = binary.find()
    if program is None:
        raise ProviderFailed(f"commands in containers are run by a guest, and {NO_GUEST}", hint="apt install gcc")
    return program


def _containers(private: Path) -> Path:
    """The id of the workspace's container, before that starts; there, and empty, before anything is handed over."""
    return private / "system" / "containers"


def _volumes(image: Mapping[str, Any]) -> list[str]:
    """The places that an image wants to be writable. Raises ``ProviderFailed`` for one inside of ours."""
    found = sorted(posixpath.normpath(place) for place in image["Config"].get("Volumes") or ())
    ours = (PATHS.workspace, PATHS.output, PATHS.runner, PATHS.home, PATHS.skills, PATHS.kube, _TMP)
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


def _check_daemon(about: Mapping[str, Any], flavour: Flavour) -> None:
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
    if flavour.runtime not in about.get("Runtimes", {}):
        raise ProviderFailed(f"the docker daemon has no runtime `{flavour.runtime}`", hint=flavour.hint)


async def check_runtime(about: Mapping[str, Any], runtime: str) -> None:
    """Raises ``ProviderFailed`` for a runtime that is more than a name for the daemon, and whose program does not start
    here; the daemon itself never looks."""
    path = about["Runtimes"][runtime].get("path")
    if path is None or not os.path.isabs(path):
        return
    why = f"it has not answered within {_STARTING:.0f}s"
    with trio.move_on_after(_STARTING):
        try:
            tried = await trio.run_process(
                [path, "--version"], env={}, capture_stdout=True, capture_stderr=True, check=False
            )
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if tried.returncode == 0:
                return
            why = tried.stderr.decode(errors="replace").strip()[-200:] or f"it exits {tried.returncode}"
    raise ProviderFailed(
        f"the runtime `{runtime}` of the docker daemon, `{path}`, does not start: {why}", hint=f"{path} --version"
    )


def _check_user(provider: str) -> None:
    """Raises ``ProviderFailed`` for whom no change of the daemon or of a group would help."""
    if not trees.can_chown():
        raise ProviderFailed(
            f"{provider} needs root here, and to be in the group docker is not enough: "
            "only root can hand directories over so that no path is looked up twice",
            hint="run as root, or use provider `local`",
        )


def _check_reach(daemon: Path) -> None:
    """Raises ``ProviderFailed`` where directories cannot be handed over."""
    try:
        Namespace(daemon).close()
    except OSError as error:
        raise ProviderFailed(f"the docker daemon cannot be shown directories of this host: {error}") from error
