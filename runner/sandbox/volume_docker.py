"""Containers of any docker daemon that this user can reach, on this host or another: nothing is mounted from here.

A workspace's directories are here, where everything but commands works on them, and in volumes of the daemon, where
commands do. Opening sends what has changed here since; when the sandbox has ended, what commands changed is fetched.
``Mirror`` remembers on the disk which side is ahead, so work is fetched also after the runner was killed, by ``evict``.
Inputs are volumes named after their content, sent once. The guest is a layer on the image of each workspace.
"""

from __future__ import annotations

import json
import os
import posixpath
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import trio

from runner.core.errors import CleanUpIncomplete, ProviderFailed, WorkspaceLost
from runner.core.model import Feature, Handle, IsolationClass
from runner.guest import binary
from runner.ports.provider import STOP_GRACE, Probe, SandboxSpec, Workspace, WorkspaceRequest
from runner.safefs import trees
from runner.safefs.safe_open import open_directory
from runner.sandbox.attach_channel import AttachChannel
from runner.sandbox.container import GUEST, Container, ContainerMounts
from runner.sandbox.daemon_container import DaemonInit, DaemonLimits
from runner.sandbox.directories import WorkspaceDirectories
from runner.sandbox.docker_api import Engine
from runner.sandbox.docker_facts import check_machine, image_volumes, missing_limits, tmp_bytes, versions_of
from runner.sandbox.guest_workspace import GuestWorkspace, SandboxContext, open_dialling_guest
from runner.sandbox.sandbox_layout import ENV, PATHS, group, passwd
from runner.sandbox.tar_trees import Source, read_tar, stamp, write_tar

UID = 1000  # of commands
MOST = 16 << 30  # bytes that are fetched of a workspace without a disk limit
_COVER_BYTES = 1 << 16  # of a tmpfs over a volume that the image declares

_NO_DISK = "the daemon keeps the files, and docker limits no volume"
_CHECKED = "checked before anything is published, not prevented: the files are in a volume of the daemon"
_NOT_WARM = "the connection to a container's guest goes through the daemon, and cannot be handed over"
_ALONE = "workspaces that share a project need its directory, and this daemon mounts nothing of this host"


@dataclass(frozen=True)
class Volume:
    """A volume of the daemon for the host's directory ``source``, mounted at ``target``.

    A ``kept`` one belongs to the workspace and is fetched; one with ``writable`` alone is thrown away with the sandbox.
    """

    name: str
    source: Path
    target: str
    writable: bool = False
    kept: bool = False


class VolumeDocker:
    """The provider ``docker`` where the daemon sees nothing of this host. ``grace`` as for ``LocalProvider``."""

    name = "docker"

    def __init__(self, home: Path, engine: Engine, *, grace: float = STOP_GRACE) -> None:
        self._directories = WorkspaceDirectories(home, self.name, own_users=False)
        self._engine = engine
        self._grace = grace

    async def probe(self) -> Probe:
        missing = {Feature.DISK: _NO_DISK, Feature.PROTECTED_PATHS: _CHECKED, Feature.WARM_POOL: _NOT_WARM}
        versions: dict[str, str] = {}
        reason = hint = None
        try:
            guest = binary.find()
            about = await self._engine.about()
            versions = versions_of(about, guest)
            missing |= missing_limits(about)
            check_machine(about)
        except ProviderFailed as error:
            reason, hint = error.message, error.hint
        return Probe(
            provider=self.name,
            available=reason is None,
            isolation=IsolationClass.NAMESPACES,
            missing=missing,
            versions=versions,
            reason=reason,
            hint=hint,
            needs_image=True,
        )

    async def image(self, name: str) -> str:
        return str((await self._engine.image(name))["Id"])

    async def labels(self, image: str) -> Mapping[str, str]:
        labels: Mapping[str, str] | None = (await self._engine.image(image))["Config"].get("Labels")
        return labels or {}

    async def create(self, request: WorkspaceRequest) -> Handle:
        if request.image is None:
            raise ProviderFailed(f"`{self.name}` needs an image", hint="name one as `workspace.base_image`")
        if request.tree is not None or request.shared:
            raise ProviderFailed(f"workspace `{request.id}` cannot be made: {_ALONE}", hint="use provider `local`")
        image = await self._engine.image(request.image)
        covered = image_volumes(image)
        await self._directories.prepare(request)
        handle = await trio.to_thread.run_sync(self._directories.create, request)
        try:
            layer = await self._add_guest(handle, str(image["Id"]))
            found = {"image": layer, "volumes": covered}
            await trio.to_thread.run_sync(_image_file(handle.private).write_text, json.dumps(found))
        except BaseException:
            with trio.CancelScope(shield=True), suppress(ProviderFailed, CleanUpIncomplete):
                await self.destroy(handle)
            raise
        return handle

    async def _add_guest(self, handle: Handle, image: str) -> str:
        """Make the workspace's image: the one asked for, with the guest and a user for commands."""
        guest = binary.find().path
        words = [Source("etc/passwd", guest, 0, content=passwd(UID)), Source("etc/group", guest, 0, content=group(UID))]
        words.append(Source(GUEST.lstrip("/"), guest, 0, 0o755, guest.read_bytes()))
        labels = self._labels(handle)
        _image_file(handle.private).parent.mkdir(mode=0o700)
        made = await self._make(handle, "image", {"Image": image, "Entrypoint": ["-"]})
        try:
            await self._engine.put(made, "/", partial(write_tar, words))
            return await self._engine.commit(made, labels)
        finally:
            with trio.CancelScope(shield=True):
                await self._engine.remove(labels)

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[Workspace]:
        self._directories.check(handle)
        if spec.protected:
            raise ProviderFailed("this docker daemon cannot protect paths", hint="use provider `local`")
        what, mirror = _what(handle), Mirror(handle)
        await self._end(handle)
        volumes = list(_volumes(handle, spec))
        scratch = handle.private / "scratch"
        tree = scratch if spec.tree or not spec.tree_writable else handle.tree
        await trio.to_thread.run_sync(trees.remove, scratch)
        scratch.mkdir(mode=0o700)
        with open_directory(tree) as descriptor:
            try:
                carrier = await self._send(handle, volumes, mirror)
                container = await self._make(handle, "sandbox", self._config(handle, spec, volumes))
                channel = AttachChannel(self._engine, what)
                limits = DaemonLimits()
                init = DaemonInit(self._engine, container, limits, what)
                fetch_tree = partial(self._fetch_one, carrier, volumes[0], tree, spec)
                context = self._context(handle, spec, limits, descriptor, fetch_tree)
                try:
                    await channel.prepare(container)
                    mirror.daemon_is_ahead()
                    await self._engine.start(container)
                    async with self._reach(channel, init, context, what) as workspace:
                        yield workspace
                finally:
                    with trio.CancelScope(shield=True):
                        channel.close()
                        await init.end()
                        await self._fetch(handle, carrier, [volume for volume in volumes if volume.kept], spec)
            finally:
                with trio.CancelScope(shield=True), suppress(ProviderFailed):
                    await self._engine.remove(self._labels(handle))
                    for volume in volumes:
                        if volume.writable and not volume.kept:
                            await self._engine.remove_volume(volume.name)
                trees.remove(scratch)

    @asynccontextmanager
    async def _reach(
        self, channel: AttachChannel, init: DaemonInit, context: SandboxContext, what: str
    ) -> AsyncIterator[GuestWorkspace]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(init.serve)
            opened = open_dialling_guest(partial(channel.connect, init), context, what=what, kill_sandbox=init.kill)
            async with AsyncExitStack() as stack:
                try:
                    workspace = await stack.enter_async_context(opened)
                except WorkspaceLost as lost:
                    raise ProviderFailed(f"the guest of {what} does not start: {lost.message}") from lost
                yield workspace
            nursery.cancel_scope.cancel()

    def _config(self, handle: Handle, spec: SandboxSpec, volumes: Sequence[Volume]) -> dict[str, Any]:
        found = _read_image(handle)
        container = Container(
            image=found["image"],
            uid=UID,
            labels=self._labels(handle),
            limits=handle.limits,
            env=ENV,
            runtime="",
        )
        config = container.config(ContainerMounts())
        covered = [(place, _COVER_BYTES, 0o755) for place in found["volumes"]]
        if any(volume.target == PATHS.kube for volume in volumes):
            covered.append((posixpath.dirname(PATHS.kube), _COVER_BYTES, 0o755))  # the image's own may be closed
        covered.append(("/tmp", tmp_bytes(handle.limits), 0o1777))
        config["HostConfig"]["Mounts"] = [*map(_mount, volumes), *(_tmpfs(*words) for words in covered)]
        del config["HostConfig"]["Runtime"]
        return {**config, **AttachChannel.config}

    def _context(
        self,
        handle: Handle,
        spec: SandboxSpec,
        limits: DaemonLimits,
        tree: int,
        refresh: Callable[[], Awaitable[None]],
    ) -> SandboxContext:
        return SandboxContext(
            provider=self.name,
            isolation=IsolationClass.NAMESPACES,
            uid=UID,
            paths=PATHS,
            tree=tree,
            env={**ENV, **spec.environment},
            group=limits,
            grace=self._grace,
            refresh=refresh,
        )

    # --- files ---

    async def _send(self, handle: Handle, volumes: Sequence[Volume], mirror: Mirror) -> str:
        """Bring volumes up to date, and return a container that has them all and never starts."""
        labels = self._labels(handle)
        there = set(await self._engine.volumes(labels))
        stamps = await trio.to_thread.run_sync(_stamps, [volume for volume in volumes if volume.kept])
        stale = [v for v in volumes if v.name not in there or (v.kept and stamps[v.name] != mirror.stamps.get(v.name))]
        for volume in stale:
            if volume.name in there:
                await self._engine.remove_volume(volume.name)
            await self._engine.make_volume(volume.name, labels)
        carrier = await self._carrier(handle, volumes)
        if stale:
            sources = [Source(_place(volume).lstrip("/"), volume.source, UID) for volume in stale]
            await self._engine.put(carrier, "/", partial(write_tar, sources))
        mirror.same(stamps)
        return carrier

    async def _carrier(self, handle: Handle, volumes: Sequence[Volume]) -> str:
        mounts = [_mount(replace(volume, target=_place(volume), writable=True)) for volume in volumes]
        image = _read_image(handle)["image"]
        return await self._make(
            handle, "files", {"Image": image, "Entrypoint": ["-"], "HostConfig": {"Mounts": mounts}}
        )

    async def _fetch(self, handle: Handle, carrier: str, volumes: Sequence[Volume], spec: SandboxSpec) -> None:
        for volume in volumes:
            await self._fetch_one(carrier, volume, volume.source, spec, handle.limits.disk_bytes or MOST)
        Mirror(handle).same(await trio.to_thread.run_sync(_stamps, volumes))

    async def _fetch_one(self, carrier: str, volume: Volume, to: Path, spec: SandboxSpec, most: int = MOST) -> None:
        without = frozenset(mount.target.rstrip("/") for mount in spec.dependencies)

        def read(stream: IO[bytes], check: Callable[[], None]) -> None:
            read_tar(stream, to, most=most, without=without, check=check)

        await self._engine.get(carrier, _place(volume), read)

    async def _end(self, handle: Handle) -> None:
        """End everything that a killed runner has left in the workspace, and fetch what it had not."""
        await self._engine.remove(self._labels(handle))
        if not Mirror(handle).ahead:
            return
        kept = [volume for volume in _volumes(handle, SandboxSpec()) if volume.kept]
        carrier = await self._carrier(handle, kept)
        try:
            await self._fetch(handle, carrier, kept, SandboxSpec())
        finally:
            with trio.CancelScope(shield=True), suppress(ProviderFailed):
                await self._engine.remove(self._labels(handle))

    # --- the rest of the port ---

    async def chown_to_workspace_user(self, handle: Handle) -> None:
        await trio.lowlevel.checkpoint()  # files here are the runner's own

    async def list_owned(self, nonce: str) -> list[Handle]:
        return await trio.to_thread.run_sync(self._directories.list_owned, nonce)

    async def evict(self, handle: Handle) -> None:
        self._directories.check(handle)
        try:
            await self._end(handle)
        except ProviderFailed as error:
            raise CleanUpIncomplete(f"{_what(handle)} cannot be ended: {error.message}", hint=error.hint) from error

    async def destroy(self, handle: Handle) -> None:
        self._directories.check(handle)
        if self._directories.owner(handle) is not None:
            labels = self._labels(handle)
            try:
                await self._engine.remove(labels)
                for volume in await self._engine.volumes(labels):
                    await self._engine.remove_volume(volume)
                await self._engine.remove_images(labels)
            except ProviderFailed as error:
                raise CleanUpIncomplete(
                    f"containers or volumes of {_what(handle)} may remain: {error.message}", hint=error.hint
                ) from error
        await trio.to_thread.run_sync(self._directories.destroy, handle)

    async def _make(self, handle: Handle, kind: str, config: Mapping[str, Any]) -> str:
        host = {"NetworkMode": "none", **config.get("HostConfig", {})}
        whole = {**config, "Labels": self._labels(handle), "NetworkDisabled": True, "HostConfig": host}
        return await self._engine.make(f"runner-{handle.id}-{kind}-{secrets.token_hex(4)}", whole)

    def _labels(self, handle: Handle) -> dict[str, str]:
        """Return the labels of what the daemon has of a workspace. Raises ``WorkspaceLost`` when it is gone."""
        owner = self._directories.owner(handle)
        if owner is None:
            raise WorkspaceLost(f"{_what(handle)} is gone")
        words = {"product": "runner", "provider": self.name, "nonce": owner[1], "run": owner[0], "workspace": handle.id}
        return {f"runner.{key}": word for key, word in words.items()}


class Mirror:
    """Which side has the newer files of a workspace, on the disk. ``stamps`` are of when both were last the same."""

    def __init__(self, handle: Handle) -> None:
        self._file = handle.private / "system" / "mirror.json"
        try:
            found = json.loads(self._file.read_text())
        except OSError:
            found = {}
        self.stamps: dict[str, str] = found.get("stamps", {})
        self.ahead: bool = found.get("ahead", False)

    def daemon_is_ahead(self) -> None:
        self._write({"ahead": True})

    def same(self, stamps: Mapping[str, str]) -> None:
        self.stamps = dict(stamps)
        self._write({"stamps": self.stamps})

    def _write(self, state: Mapping[str, Any]) -> None:
        part = self._file.with_suffix(".part")
        with part.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._file)


def _volumes(handle: Handle, spec: SandboxSpec) -> Iterator[Volume]:
    """Yield the volumes of a sandbox, that of the tree first."""

    def kept(name: str, source: Path, target: str) -> Volume:
        return Volume(f"runner-{handle.id}-{name}", source, target, writable=True, kept=True)

    def discarded(source: Path, target: str) -> Volume:
        return Volume(f"runner-{handle.id}-{secrets.token_hex(6)}", source, target, writable=True)

    def given(source: Path, target: str) -> Volume:
        if not source.is_dir():
            raise ProviderFailed(f"`{source}` cannot be sent to the docker daemon: not a directory")
        content = sha256(f"{target} {stamp(source)}".encode()).hexdigest()[:12]
        return Volume(f"runner-{handle.id}-{content}", source, target)

    if spec.tree is not None or not spec.tree_writable:
        yield discarded(spec.tree.source if spec.tree else handle.tree, PATHS.workspace)
    else:
        yield kept("tree", handle.tree, PATHS.workspace)
    if spec.fresh_home:
        yield discarded(handle.private / "scratch", PATHS.home)
    else:
        yield kept("home", handle.private / "home", PATHS.home)
    yield kept("output", handle.private / "output", PATHS.output)
    yield given(handle.private / "runner", PATHS.runner)
    for mount in spec.mounts:
        yield given(mount.source, mount.target)
    for toolchain in spec.toolchains:
        yield given(Path(toolchain), toolchain)
    for mount in spec.dependencies:
        yield discarded(mount.source, posixpath.join(PATHS.workspace, mount.target.rstrip("/")))


def _stamps(volumes: Sequence[Volume]) -> dict[str, str]:
    return {volume.name: stamp(volume.source) for volume in volumes}


def _place(volume: Volume) -> str:
    """Return where a container that only carries files has a volume."""
    return f"/runner/{volume.name}"


def _mount(volume: Volume) -> dict[str, Any]:
    options = {"NoCopy": True}
    read_only = not volume.writable
    return {
        "Type": "volume",
        "Source": volume.name,
        "Target": volume.target,
        "ReadOnly": read_only,
        "VolumeOptions": options,
    }


def _tmpfs(target: str, size: int, mode: int) -> dict[str, Any]:
    return {"Type": "tmpfs", "Target": target, "TmpfsOptions": {"SizeBytes": size, "Mode": mode}}


def _image_file(private: Path) -> Path:
    return private / "system" / "image.json"


def _read_image(handle: Handle) -> Mapping[str, Any]:
    """Read what ``create`` has stored of the image. Raises ``WorkspaceLost``."""
    try:
        found: Mapping[str, Any] = json.loads(_image_file(handle.private).read_text())
    except OSError as error:
        raise WorkspaceLost(f"{_what(handle)} is gone: {error}") from error
    return found


def _what(handle: Handle) -> str:
    return f"workspace `{handle.id}`"
