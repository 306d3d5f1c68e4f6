"""Provider ``docker``, class namespaces: each sandbox is a container with a guest as its first process.

The daemon only makes and removes containers. Commands go through the guest, which dials a socket of the runner, so a
daemon that hangs, restarts or is gone delays no command, and what it fails to end the runner ends itself. Everything in
a container runs as the workspace's own user, without any capability. ``ContainerRuntime`` has what differs between
runtimes.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import CleanUpIncomplete, ProviderFailed, WorkspaceLost
from runner.core.model import Feature, Handle, IsolationClass, Limits
from runner.core.settings import Settings
from runner.guest import binary
from runner.guest.client import open_guest
from runner.guest.framing import NONCE_BYTES
from runner.ports.provider import STOP_GRACE, Probe, SandboxHandoff, SandboxSpec, Workspace, WorkspaceRequest
from runner.safefs import trees
from runner.sandbox import processes
from runner.sandbox.cgroup import ControlGroups
from runner.sandbox.container import GUEST, Container, ContainerMounts
from runner.sandbox.container_init import InitProcess, membership, open_init_process
from runner.sandbox.daemon_images import DaemonImages
from runner.sandbox.directories import WorkspaceDirectories
from runner.sandbox.docker_api import Engine
from runner.sandbox.docker_facts import (
    TMP,
    check_machine,
    image_facts,
    image_file,
    missing_limits,
    read_image,
    tmp_bytes,
    versions_of,
)
from runner.sandbox.docker_mounts import (
    Cover,
    DaemonStage,
    Namespace,
    open_daemon_stage,
    peer_of,
    remove_stale_stage,
    reopen_daemon_stage,
)
from runner.sandbox.guest_workspace import GuestWorkspace, SandboxContext, open_dialling_guest
from runner.sandbox.prepared_mounts import PreparedMounts, prepare_mounts
from runner.sandbox.protected_paths import open_guards, remove_placeholders
from runner.sandbox.sandbox_layout import ENV, PATHS, mount_all, workspace_path, write_system_files
from runner.sandbox.socket_channel import SocketChannel, open_socket_channel
from runner.sandbox.volume_docker import VolumeDocker
from runner.sandbox.warm_containers import (
    DetachState,
    HandedOffContainer,
    WarmContainer,
    covers,
    open_tree,
    read_handoff,
    slot_mounts,
)

USES_IMAGES = True  # workspaces are made of images

_ROOT = "/root"
_VERSION_TIMEOUT = 5.0  # seconds for a runtime to print its version
_VOLUME_BYTES = 1 << 16  # for mount points; nobody inside can write there


class Channel(Protocol):
    """Connections to the guest of one container."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the channel's part of the body of the call that creates the container."""

    async def prepare(self, container: str) -> None:
        """Prepare to connect to a container that is made and not started. Raises ``ProviderFailed``."""

    async def connect(self, init: InitProcess) -> trio.abc.Stream:
        """Wait for the guest's next connection. Raises ``WorkspaceLost`` when there will be none."""


class ContainerRuntime(Struct, frozen=True, kw_only=True):
    """Settings that differ between container runtimes (runc, runsc). ``name`` is the provider's.

    ``program`` is the runtime's name in the daemon, ``hint`` says how to install it. ``capabilities`` is as for
    ``Container``, ``idmaps`` as for ``WorkspaceDirectories``. With ``init_ends_last`` nothing in a container runs any
    more once its first process has ended. The daemon enforces ``container_limits``, the guest ``command_limits``.
    ``why_not_warm`` says why its containers cannot be kept in a warm pool, if so. ``escapes`` and
    ``ends_whole`` are as for ``Probe``.
    """

    name: str
    isolation: IsolationClass
    program: str
    hint: str | None
    open_channel: Callable[[Engine, DaemonStage, ContainerMounts, str], AbstractContextManager[Channel]]
    capabilities: tuple[str, ...] = ()
    idmaps: bool = True
    init_ends_last: bool = False
    container_limits: Callable[[Limits], Limits] = lambda limits: limits
    command_limits: Callable[[Limits], Limits] = lambda _limits: Limits()
    why_not_warm: str | None = None
    escapes: Mapping[str, str] = {}
    ends_whole: bool = False


class _Started(Struct, frozen=True, kw_only=True):
    prepared: PreparedMounts
    channel: Channel
    init: InitProcess
    container: str
    has_placeholders: bool  # in its tree

    async def connect(self) -> trio.abc.Stream:
        return await self.channel.connect(self.init)


RUNC = ContainerRuntime(
    name="docker",
    isolation=IsolationClass.NAMESPACES,
    program="runc",
    hint=None,
    open_channel=open_socket_channel,
    init_ends_last=True,
)


def provider(settings: Settings) -> DockerProvider | VolumeDocker:
    """Mount directories of this host where root and its own daemon can; send them anywhere else."""
    if mounts_from_here(settings.docker_host):
        return DockerProvider(settings.home, Engine.of(settings))
    return VolumeDocker(settings.home, Engine.of(settings))


def mounts_from_here(host: str) -> bool:
    """Tell whether a daemon can be shown directories of this host: this is root, and so is the daemon, on a socket."""
    if not trees.can_chown() or not host.startswith("unix://"):
        return False
    try:
        return peer_of(Path(host.removeprefix("unix://")))[1] == 0
    except OSError:
        return True  # whose error says more


class DockerProvider(DaemonImages):
    """``grace`` as for ``LocalProvider``."""

    def __init__(
        self,
        home: Path,
        engine: Engine,
        *,
        grace: float = STOP_GRACE,
        runtime: ContainerRuntime = RUNC,
    ) -> None:
        self.name = runtime.name
        self._runtime = runtime
        self._directories = WorkspaceDirectories(home, self.name, idmaps=runtime.idmaps)
        self._engine = engine
        self._grace = grace
        self._handed_off: dict[str, HandedOffContainer] = {}

    async def probe(self) -> Probe:
        why = self._directories.why_no_disk_limit()
        missing = {Feature.DISK: why} if why else {}
        missing |= {Feature.WARM_POOL: self._runtime.why_not_warm} if self._runtime.why_not_warm else {}
        versions: dict[str, str] = {}
        try:
            _check_user(self.name)
            daemon = self._engine.socket
            guest = binary.find()
            about = await self._engine.about()
            versions = versions_of(about, guest)
            missing |= missing_limits(about)
            _check_daemon(about, self._runtime)
            await check_runtime(about, self._runtime.program)
            await trio.to_thread.run_sync(_check_reach, daemon)
        except ProviderFailed as error:
            return Probe(
                provider=self.name,
                available=False,
                isolation=self._runtime.isolation,
                missing=missing,
                versions=versions,
                reason=error.message,
                hint=error.hint,
                needs_image=True,
            )
        return Probe(
            provider=self.name,
            available=True,
            isolation=self._runtime.isolation,
            missing=missing,
            versions=versions,
            needs_image=True,
            escapes=self._runtime.escapes,
            ends_whole=self._runtime.ends_whole,
        )

    async def create(self, request: WorkspaceRequest) -> Handle:
        if request.image is None:
            raise ProviderFailed(f"`{self.name}` needs an image", hint="name one as `workspace.base_image`")
        image = await self._engine.image(request.image)
        found = image_facts(image, str(image["Id"]))

        def fill(private: Path) -> None:
            write_system_files(private, private.stat().st_uid)
            image_file(private).write_text(found)

        await self._directories.prepare(request)
        return await trio.to_thread.run_sync(self._directories.create, request, fill)

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[Workspace]:
        self._directories.check(handle)
        async with AsyncExitStack() as stack:
            workspace: Workspace | None = await self._find_handed_off(stack, handle, spec)
            if workspace is None:
                workspace = await stack.enter_async_context(self._open(handle, spec))
            yield workspace

    @asynccontextmanager
    async def _open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[GuestWorkspace]:
        """Open the workspace in a new container."""
        async with self._started(handle, spec, DetachState()) as started:
            path, tree = workspace_path(handle, started.prepared), started.prepared.tree_fd
            context = self._context(handle, spec, self._group(handle, started.init), path, tree)
            reached = self._reach(
                started.connect, started.init, context, _what(handle), has_placeholders=started.has_placeholders
            )
            async with reached as workspace:
                yield workspace

    @asynccontextmanager
    async def open_slot(
        self, handle: Handle, toolchains: Sequence[str], protected: Sequence[str]
    ) -> AsyncIterator[WarmContainer]:
        self._directories.check(handle)  # protected paths are mounted when they are known, see ``_cover``
        mounts = slot_mounts(handle)
        for mount in mounts:
            mount.source.mkdir(mode=0o700)
            trees.chown(mount.source, handle.uid)
        state, nonce = DetachState(extensible=True), os.urandom(NONCE_BYTES)
        async with self._started(handle, SandboxSpec(mounts=mounts, toolchains=tuple(toolchains)), state) as started:
            init, channel, stage = started.init, started.channel, started.prepared.stage
            assert isinstance(channel, SocketChannel)
            assert isinstance(stage, DaemonStage)
            fields = {
                "container": started.container,
                "pid": init.pid,
                "tree": started.prepared.tree.path,
                "nonce": nonce.hex(),
                "groups": self._group(handle, init).paths,
                "toolchains": list(toolchains),
                "mounted": [mount.target for mount in mounts],
            }
            try:
                async with open_guest(
                    started.connect, what=_what(handle), kill_sandbox=init.kill, nonce=nonce
                ) as guest:
                    yield WarmContainer(state, guest, init, listener=channel.listener, fields=fields)
            finally:
                stage.detached = state.detached
                if not state.detached:
                    with trio.CancelScope(shield=True):
                        await init.end()

    async def assign(self, handle: Handle, request: WorkspaceRequest) -> Handle:
        return await trio.to_thread.run_sync(self._directories.assign, handle, request)

    def receive(self, handle: Handle, handoff: SandboxHandoff) -> None:
        self._handed_off[handle.id] = read_handoff(handoff)

    async def _find_handed_off(self, stack: AsyncExitStack, handle: Handle, spec: SandboxSpec) -> GuestWorkspace | None:
        """Open the container that was handed over for a workspace, if it fits; end it otherwise."""
        handed_off = self._handed_off.pop(handle.id, None)
        if handed_off is None:
            return None
        listener = socket.socket(fileno=handed_off.descriptor)
        if handed_off.fits(handle, spec):
            with suppress(ProviderFailed, WorkspaceLost):  # it has died meanwhile
                return await stack.enter_async_context(self._open_handed_off(handle, spec, handed_off, listener))
        listener.close()
        await self._end(handle)
        return None

    @asynccontextmanager
    async def _open_handed_off(
        self, handle: Handle, spec: SandboxSpec, handed_off: HandedOffContainer, listener: socket.socket
    ) -> AsyncIterator[GuestWorkspace]:
        """Open the workspace in a container that was handed over, which ends with the block."""
        with (
            listener,
            open_init_process(handed_off.pid, handed_off.container, _what(handle)) as init,
            reopen_daemon_stage(self._engine, handle.private.name, handle.uid) as stage,
            open_tree(stage, handed_off) as tree,
            open_guards(tree, spec.protected) as guards,
        ):
            try:
                _cover(stage, tree, covers(handle.private, guards))
                context = self._context(handle, spec, handed_off.group, PATHS.workspace, tree)
                connect = partial(SocketChannel(listener, _what(handle)).connect, init)
                has_placeholders = any(guard.is_placeholder for guard in guards)
                async with self._reach(
                    connect, init, context, _what(handle), handed_off.nonce, has_placeholders=has_placeholders
                ) as workspace:
                    await workspace.ping()  # it may have died since it was handed over
                    yield workspace
            finally:
                with trio.CancelScope(shield=True), suppress(ProviderFailed):
                    await init.end()
                    stage.close()  # placeholders that are mounted over cannot be removed
                    await self._remove(handle)
                    _containers(handle.private).unlink(missing_ok=True)

    @asynccontextmanager
    async def _reach(
        self,
        connect: Callable[[], Awaitable[trio.abc.Stream]],
        init: InitProcess,
        context: SandboxContext,
        what: str,
        nonce: bytes | None = None,
        *,
        has_placeholders: bool,
    ) -> AsyncIterator[GuestWorkspace]:
        """Open the workspace in a started container, which ends with the block.

        With placeholders in the tree ``terminated`` is not set: a scan would find them before they are removed.
        """
        guest = open_dialling_guest(
            connect,
            context,
            what=what,
            kill_sandbox=init.kill,
            nonce=nonce,
            hands_over=context.isolation < IsolationClass.KERNEL,
        )
        workspace: GuestWorkspace | None = None
        try:
            async with guest as workspace:
                yield workspace
        finally:
            with trio.CancelScope(shield=True):
                await init.end()
            if workspace is not None and self._runtime.init_ends_last and not has_placeholders:
                workspace.terminated.set()

    @asynccontextmanager
    async def _started(self, handle: Handle, spec: SandboxSpec, state: DetachState) -> AsyncIterator[_Started]:
        """Start a container; remove it and its mounts when the block ends, unless it was detached."""
        await trio.to_thread.run_sync(self._directories.mount, handle)
        program = binary.find()
        _containers(handle.private).touch()
        idmapped = handle.tree if handle.adopted else None
        stage = open_daemon_stage(self._engine, handle.private.name, handle.uid, idmapped)
        async with prepare_mounts(handle, spec, stage) as prepared:
            assert isinstance(prepared.stage, DaemonStage)
            with open_guards(prepared.tree_fd, spec.pinned_paths) as guards:
                mounts = ContainerMounts()
                image = read_image(handle)
                for volume in image["volumes"]:  # else the daemon makes a writable one for each
                    mounts.show(prepared.stage.add_tmpfs(_VOLUME_BYTES, 0), volume, writable=True)
                if any(mount.target == PATHS.kube for mount in spec.mounts):
                    # The image's own /root may keep other users out.
                    mounts.show(prepared.stage.add_tmpfs(_VOLUME_BYTES, 0), _ROOT, writable=True)
                mounts.show(prepared.stage.add_tmpfs(tmp_bytes(handle.limits), handle.uid), TMP, writable=True)
                mount_all(mounts, handle, spec, prepared, guards)
                mounts.show(prepared.add(program.path), GUEST)
                if state.extensible:
                    prepared.stage.share(prepared.tree)
                    mounts.following.add(PATHS.workspace)
                prepared.stage.seal(mounts.read_only)
                container = Container(
                    image=image["image"],
                    uid=handle.uid,
                    labels=self._labels(handle),
                    limits=self._runtime.container_limits(handle.limits),
                    env=ENV,
                    runtime=self._runtime.program,
                    capabilities=self._runtime.capabilities,
                    has_health_check=image["health"],
                )
                with self._runtime.open_channel(self._engine, prepared.stage, mounts, _what(handle)) as channel:
                    try:
                        made = await self._make(handle, {**container.config(mounts), **channel.config})
                        await channel.prepare(made)
                        started = await self._engine.start(made)
                        with open_init_process(started["State"]["Pid"], made, _what(handle)) as init:
                            has_placeholders = any(guard.is_placeholder for guard in guards)
                            yield _Started(
                                prepared=prepared,
                                channel=channel,
                                init=init,
                                container=made,
                                has_placeholders=has_placeholders,
                            )
                    finally:
                        with trio.CancelScope(shield=True), suppress(ProviderFailed):
                            # Nothing runs in it any more, or only until its guest finds that nobody listens.
                            # If the daemon is away, destroying the workspace names what it did not remove.
                            if not state.detached:
                                await self._remove(handle)

    async def _make(self, handle: Handle, config: Mapping[str, Any]) -> str:
        """Make a container and return its id, which is on the disk before it starts."""
        await self._remove(handle)
        made = await self._engine.make(f"runner-{handle.id}-{secrets.token_hex(4)}", config)
        _containers(handle.private).write_text(f"{made}\n")
        return made

    def _group(self, handle: Handle, init: InitProcess) -> ControlGroups:
        return init.group(self._runtime.container_limits(handle.limits))

    def _context(
        self, handle: Handle, spec: SandboxSpec, group: ControlGroups, workspace: str, tree: int
    ) -> SandboxContext:
        return SandboxContext(
            provider=self.name,
            isolation=self._runtime.isolation,
            uid=handle.uid,
            paths=replace(PATHS, workspace=workspace),
            tree=tree,
            env={**ENV, **spec.environment},
            group=group,
            grace=self._grace,
            user=handle.uid if self._runtime.capabilities else None,
            command_limits=self._runtime.command_limits(handle.limits),
            volume=self._directories.volume(handle),
        )

    def _labels(self, handle: Handle) -> dict[str, str]:
        """Return the labels of the workspace's containers. Raises ``WorkspaceLost`` when it is gone."""
        owner = self._directories.owner(handle)
        if owner is None:
            raise WorkspaceLost(f"workspace `{handle.id}` is gone")
        run, nonce = owner
        name = handle.slot or handle.id
        words = {"product": "runner", "provider": self.name, "nonce": nonce, "run": run, "workspace": name}
        return {f"runner.{key}": word for key, word in words.items()}

    async def _remove(self, handle: Handle) -> None:
        """Remove the workspace's containers, also those of the slot that it was."""
        labels = self._labels(handle)
        await self._engine.remove({name: word for name, word in labels.items() if name != "runner.run"})

    async def chown_to_workspace_user(self, handle: Handle) -> None:
        await trio.to_thread.run_sync(self._directories.chown_to_workspace_user, handle)

    async def retrieve(self, handle: Handle) -> None:
        await trio.lowlevel.checkpoint()  # they are here

    async def list_owned(self, nonce: str) -> list[Handle]:
        return await trio.to_thread.run_sync(self._directories.list_owned, nonce)

    async def evict(self, handle: Handle) -> None:
        self._directories.check(handle)
        await self._end(handle)
        await trio.to_thread.run_sync(remove_placeholders, handle.tree)

    async def destroy(self, handle: Handle) -> None:
        self._directories.check(handle)
        await self._end(handle)
        await trio.to_thread.run_sync(self._directories.destroy, handle)

    async def _end(self, handle: Handle) -> None:
        """End all that runs in the workspace, with or without the daemon, and remove its containers."""
        if handed_off := self._handed_off.pop(handle.id, None):
            os.close(handed_off.descriptor)
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


def _cover(stage: DaemonStage, tree: int, wanted: Sequence[Cover]) -> None:
    try:
        stage.cover(tree, wanted)
    except OSError as error:
        raise ProviderFailed(f"mounts cannot be added to a running container: {error}") from error


def _what(handle: Handle) -> str:
    return f"workspace `{handle.id}`"


def _containers(private: Path) -> Path:
    """Return the file with the id of the workspace's container; it exists, empty, before any mount is made."""
    return private / "system" / "containers"


def _check_daemon(about: Mapping[str, Any], runtime: ContainerRuntime) -> None:
    """Raise ``ProviderFailed`` for a daemon whose containers would differ from what this provider promises."""
    check_machine(about)
    for option in about.get("SecurityOptions") or ():
        if "rootless" in option or "userns" in option:
            raise ProviderFailed(
                "the docker daemon gives containers other users than this host has",
                hint="start dockerd as root and without `userns-remap`",
            )
    if runtime.program not in about.get("Runtimes", {}):
        raise ProviderFailed(f"the docker daemon has no runtime `{runtime.program}`", hint=runtime.hint)


async def check_runtime(about: Mapping[str, Any], runtime: str) -> None:
    """Raise ``ProviderFailed`` for a runtime whose program does not start here, which the daemon does not check."""
    path = about["Runtimes"][runtime].get("path")
    if path is None or not os.path.isabs(path):
        return
    why = f"no answer within {_VERSION_TIMEOUT:.0f}s"
    with trio.move_on_after(_VERSION_TIMEOUT):
        try:
            tried = await trio.run_process(
                [path, "--version"], env={}, capture_stdout=True, capture_stderr=True, check=False
            )
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if tried.returncode == 0:
                return
            why = tried.stderr.decode(errors="replace").strip()[-200:] or f"exit status {tried.returncode}"
    raise ProviderFailed(
        f"the runtime `{runtime}` of the docker daemon, `{path}`, does not start: {why}", hint=f"{path} --version"
    )


def _check_user(provider: str) -> None:
    """Raise ``ProviderFailed`` for a user that no setting of the daemon or group membership would help."""
    if not trees.can_chown():
        raise ProviderFailed(
            f"{provider} needs root here, and membership in the group docker is not enough: "
            "only root can mount directories for the daemon without looking a path up twice",
            hint="run as root, or use provider `local`",
        )


def _check_reach(daemon: Path) -> None:
    """Raise ``ProviderFailed`` where the daemon's mount namespace cannot be entered."""
    try:
        Namespace(daemon).close()
    except OSError as error:
        raise ProviderFailed(f"the docker daemon cannot be shown directories of this host: {error}") from error
