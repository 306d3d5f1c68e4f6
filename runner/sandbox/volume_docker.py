"""Containers of any docker daemon that this user can reach, on this host or another: nothing is mounted from here.

A workspace's directories are here, where everything but commands works on them, and in volumes of the daemon, where
commands do. Opening sends what has changed here since; when the sandbox has ended, what commands changed is fetched.
``Mirror`` remembers on the disk which side is ahead, so work is fetched also after the runner was killed, by ``evict``.
Inputs are volumes named after their content, sent once. The guest is a layer on the image of each workspace.
"""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import trio
from msgspec import structs

from runner.core.errors import CleanUpIncomplete, ProviderFailed, WorkspaceLost
from runner.core.home import WORKSPACES
from runner.core.model import Feature, Handle, IsolationClass
from runner.guest import binary
from runner.ports.provider import STOP_GRACE, Paths, Probe, SandboxSpec, Workspace, WorkspaceRequest
from runner.safefs import trees
from runner.safefs.safe_open import open_directory
from runner.sandbox.attach_channel import AttachChannel
from runner.sandbox.container import GUEST, Container, ContainerMounts
from runner.sandbox.daemon_container import DaemonInit, DaemonLimits
from runner.sandbox.daemon_images import DaemonImages
from runner.sandbox.directories import WorkspaceDirectories
from runner.sandbox.docker_api import Engine
from runner.sandbox.docker_facts import (
    TMP,
    check_machine,
    image_facts,
    image_file,
    image_volumes,
    is_podman,
    missing_limits,
    read_image,
    tmp_bytes,
    versions_of,
)
from runner.sandbox.guest_files import GuestFiles
from runner.sandbox.guest_workspace import SandboxContext, open_dialling_guest
from runner.sandbox.mirrored import (
    MOST,
    Inputs,
    Mirror,
    Volume,
    paths_of_dependencies,
    prepare_scratch,
    stamps_of,
    volumes_of,
)
from runner.sandbox.project_volumes import ProjectVolumes
from runner.sandbox.protected_paths import Guard, Kind, open_guards, remove_placeholders
from runner.sandbox.sandbox_layout import ENV, PATHS, group, passwd
from runner.sandbox.shared_volumes import PROJECT_VOLUME
from runner.sandbox.tar_trees import Source, read_tar, tar_bytes, tar_trees

UID = 1000  # of commands
_TMPFS = "rw,exec,nosuid,nodev"  # in the form that podman heeds too
_COVER_BYTES = 1 << 16  # of a tmpfs over a volume that the image declares

_NO_DISK = "the daemon keeps the files, and docker limits no volume"
_CHECKED = "commands write to a volume of the daemon, which is in a machine that mounts no part of it read-only"
_PODMAN = "podman's system call filter allows new user namespaces"
_DESKTOP = "Docker Desktop"
_NOT_WARM = "the connection to a container's guest goes through the daemon, and cannot be handed over"
_NOT_MADE = "what commands install is kept on this host, and this daemon mounts nothing of it"
_IN_PLACE = "its tree is a directory of this host, and this daemon mounts nothing of it"
_OPEN = "nothing keeps commands from removing each other's workspaces in a machine that mounts no part of a volume"


class VolumeDocker(DaemonImages):
    """The provider ``docker`` where the daemon sees nothing of this host. ``grace`` as for ``LocalProvider``."""

    name = "docker"

    def __init__(self, home: Path, engine: Engine, *, grace: float = STOP_GRACE) -> None:
        self._directories = WorkspaceDirectories(home, self.name, own_users=False)
        self._engine = engine
        self._grace = grace
        self._projects = ProjectVolumes(engine, self._make, self._labels, uid=UID, most=MOST)
        self._measures: dict[str, Callable[[], Awaitable[int]]] = {}  # of the sandboxes that are open, by workspace

    async def probe(self) -> Probe:
        missing = {
            Feature.DISK: _NO_DISK,
            Feature.WARM_POOL: _NOT_WARM,
            Feature.DEPENDENCY_COMMANDS: _NOT_MADE,
        }
        versions: dict[str, str] = {}
        escapes: dict[str, str] = {}
        reason = hint = None
        try:
            guest = binary.find()
            about = await self._engine.about()
            versions = versions_of(about, guest)
            missing |= missing_limits(about)
            if about.get("OperatingSystem") == _DESKTOP:
                missing |= {Feature.PROTECTED_PATHS: _CHECKED, Feature.SHARED_PROJECT: _OPEN}
            escapes = {"user-namespace": _PODMAN} if is_podman(about) else {}
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
            watched=frozenset({Feature.PROTECTED_PATHS, Feature.DISK}),
            escapes=escapes,
        )

    async def create(self, request: WorkspaceRequest) -> Handle:
        if request.image is None:
            raise ProviderFailed(f"`{self.name}` needs an image", hint="name one as `workspace.base_image`")
        await self._directories.prepare(request)
        if request.tree is not None and not request.shared:  # which nobody has
            raise ProviderFailed(f"workspace `{request.id}` cannot be made: {_IN_PLACE}", hint="use provider `local`")
        image = await self._engine.image(request.image)
        image_volumes(image)
        handle = await trio.to_thread.run_sync(self._directories.create, request)
        try:
            layer = await self._add_guest(handle, str(image["Id"]))
            facts = image_facts(image, layer, podman=is_podman(await self._engine.about()))
            await trio.to_thread.run_sync(image_file(handle.private).write_text, facts)
        except BaseException:
            with trio.CancelScope(shield=True), suppress(ProviderFailed, CleanUpIncomplete):
                await self.destroy(handle)
            raise
        return handle

    async def _add_guest(self, handle: Handle, image: str) -> str:
        """Make the workspace's image: the one asked for, with the guest and a user for commands."""
        guest = binary.find().path
        words = [Source("etc/passwd", guest, 0, content=passwd(UID)), Source("etc/group", guest, 0, content=group(UID))]
        words.append(Source(GUEST.lstrip("/"), guest, 0, mode=0o755, content=guest.read_bytes()))
        labels = self._labels(handle)
        image_file(handle.private).parent.mkdir(mode=0o700)
        tmp = image_file(handle.private).with_name("tmp")
        tmp.mkdir()
        tmp.chmod(0o1777)  # podman gives a tmpfs the mode of the directory below it
        words.append(Source("tmp", tmp, 0))
        made = await self._make(handle, "image", {"Image": image, "Entrypoint": ["-"]})
        try:
            await self._engine.put(made, "/", partial(tar_trees, words))
            return await self._engine.commit(made, labels)
        finally:
            with trio.CancelScope(shield=True):
                await self._engine.remove(labels)

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[Workspace]:
        self._directories.check(handle)
        what = _what(handle)
        await self.retrieve(handle)
        scratch = handle.private / "scratch"
        seen = scratch if spec.tree or not spec.tree_writable else handle.tree
        volumes = await self._prepare(handle, spec, scratch, shares=handle.project_tree is not None)
        mirror, channel, limits = Mirror(handle), AttachChannel(self._engine, what), DaemonLimits()
        shared, own = [v for v in volumes if v.shared], [v for v in volumes if not v.shared]
        kept, fetched = [volume for volume in volumes if volume.kept], False
        roots = {} if shared else {volumes[0].target: seen}
        roots |= {volume.target: volume.source for volume in kept}
        files = GuestFiles(roots, () if shared else paths_of_dependencies(spec), handle.limits.disk_bytes or MOST)
        with open_directory(seen) as tree, open_guards(tree, () if seen is scratch else spec.protected) as guards:
            try:
                carrier = await self._send(handle, own, mirror)
                container = await self._make(handle, "sandbox", await self._config(handle, volumes, guards))
                init = DaemonInit(self._engine, container, limits, what)
                context = SandboxContext(
                    provider=self.name,
                    isolation=IsolationClass.NAMESPACES,
                    uid=UID,
                    paths=_paths(handle, volumes),
                    tree=tree,
                    env={**ENV, **spec.environment},
                    group=limits,
                    grace=self._grace,
                    refresh=partial(self._refresh, handle, files, carrier, replace(volumes[0], source=seen), spec),
                    before_exec=Inputs(own, partial(self._put, handle, carrier)).send_changed,
                )
                try:
                    await channel.prepare(container)
                    mirror.daemon_is_ahead(volume.name for volume in (*kept, *shared))
                    await self._engine.start(container)
                    connect = partial(channel.connect, init)
                    async with open_dialling_guest(connect, context, what=what, kill_sandbox=init.kill) as workspace:
                        await files.begin(workspace.guest)
                        self._measures[handle.id] = partial(self._measure, files, carrier, volumes)
                        try:
                            yield workspace
                        finally:
                            with trio.CancelScope(shield=True):
                                await workspace.kill()
                                fetched = await files.fetch([volume.target for volume in kept])
                                if shared:
                                    fetched = await self._projects.fetch(handle, workspace.guest) and fetched
                finally:
                    with trio.CancelScope(shield=True):
                        channel.close()
                        await init.end()
                        await self._fetch(handle, carrier, [] if fetched else [*kept, *shared], spec)
                        mirror.same(await trio.to_thread.run_sync(stamps_of, kept))
            finally:
                self._measures.pop(handle.id, None)
                with trio.CancelScope(shield=True), suppress(ProviderFailed):
                    await self._engine.remove(self._labels(handle))
                    for volume in volumes:
                        if volume.passing:
                            await self._engine.remove_volume(volume.name)
                    await trio.to_thread.run_sync(trees.remove, scratch)

    async def _prepare(self, handle: Handle, spec: SandboxSpec, scratch: Path, *, shares: bool) -> list[Volume]:
        """Make the volumes of a sandbox known, after the project of its workspace was sent if it shows that."""
        try:
            await trio.to_thread.run_sync(prepare_scratch, handle, spec, scratch)
            is_whole = shares and spec.tree is None and spec.tree_writable
            project = await self._projects.send(handle) if is_whole else None
            return await trio.to_thread.run_sync(volumes_of, handle, spec, project)
        except FileNotFoundError as error:
            raise WorkspaceLost(f"{_what(handle)} is gone: `{error.filename}`") from error

    async def _guard_mounts(self, handle: Handle, tree: Volume, guards: Sequence[Guard]) -> list[dict[str, Any]]:
        """Mount parts of a volume from where the daemon has it; nothing runs yet that could make links of them."""
        found = await self._projects.mounts(handle, tree.name) if tree.shared else []
        within = f"/{WORKSPACES}/{handle.id}" if tree.shared else ""
        place = await self._engine.place_of_volume(tree.name) if guards else ""
        return found + [
            {
                "Type": "bind",
                "Source": f"{place}{within}/{guard.path}",
                "Target": f"{tree.target}{within}/{guard.path}",
                "ReadOnly": guard.kind is not Kind.ANCESTOR,
            }
            for guard in guards
        ]

    async def _config(self, handle: Handle, volumes: Sequence[Volume], guards: Sequence[Guard]) -> dict[str, Any]:
        found, guarded = read_image(handle), await self._guard_mounts(handle, volumes[0], guards)
        container = Container(
            image=found["image"],
            uid=UID,
            labels=self._labels(handle),
            limits=handle.limits,
            env=ENV,
            runtime="",
            has_health_check=found["health"],
        )
        config = container.config(ContainerMounts())
        covered = dict.fromkeys(found["volumes"], f"{_TMPFS},size={_COVER_BYTES},mode=755")
        if any(volume.target == PATHS.kube for volume in volumes):  # the image's own may be closed
            covered[posixpath.dirname(PATHS.kube)] = f"{_TMPFS},size={_COVER_BYTES},mode=755"
        covered[TMP] = f"{_TMPFS},size={tmp_bytes(handle.limits)},mode=1777"
        covered["/var/tmp"] = f"{_TMPFS},size={tmp_bytes(handle.limits) // 4},mode=1777"  # podman's own has no size
        config["HostConfig"] |= {"Mounts": [*map(_mount, volumes), *guarded], "Tmpfs": covered}
        del config["HostConfig"]["Runtime"]
        return {**config, **AttachChannel.config}

    # --- files ---

    async def _send(self, handle: Handle, volumes: Sequence[Volume], mirror: Mirror) -> str:
        """Bring volumes up to date, and return a container that has them all and never starts."""
        labels = self._labels(handle)
        there = set(await self._engine.volumes(labels))
        now = await trio.to_thread.run_sync(stamps_of, [volume for volume in volumes if volume.kept])
        for volume in volumes:
            before = mirror.stamps.get(volume.name)
            if volume.kept and (before is None or before.keys() - now[volume.name].keys()):
                await self._engine.remove_volume(volume.name)  # an archive cannot remove what is not here
                there.discard(volume.name)
            if volume.name not in there:
                await self._engine.make_volume(volume.name, labels)
        carrier = await self._carrier(handle, volumes)
        await self._put(handle, carrier, [volume for volume in volumes if volume.name not in there])
        for volume in volumes:
            if volume.kept and volume.name in there:
                changed = now[volume.name].items() - mirror.stamps[volume.name].items()
                await self._put(handle, carrier, [volume], frozenset(name for name, _ in changed))
        mirror.same(now)
        return carrier

    async def _put(
        self, handle: Handle, carrier: str, volumes: Sequence[Volume], only: frozenset[str] | None = None
    ) -> None:
        if not volumes or only == frozenset():
            return
        if not read_image(handle)["podman"]:
            sources = [Source(_place(volume).lstrip("/"), volume.source, UID, only=only) for volume in volumes]
            await self._engine.put(carrier, "/", partial(tar_trees, sources))
            return
        async with trio.open_nursery() as nursery:  # podman unpacks into no mount below
            for volume in volumes:
                source = Source(".", volume.source, UID, only=only)
                nursery.start_soon(self._engine.put, carrier, _place(volume), partial(tar_trees, [source]))

    async def _carrier(self, handle: Handle, volumes: Sequence[Volume]) -> str:
        mounts = [_mount(replace(volume, target=_place(volume), writable=True)) for volume in volumes]
        image = read_image(handle)["image"]
        return await self._make(
            handle, "files", {"Image": image, "Entrypoint": ["-"], "HostConfig": {"Mounts": mounts}}
        )

    async def _fetch(self, handle: Handle, carrier: str, volumes: Sequence[Volume], spec: SandboxSpec) -> None:
        for volume in volumes:
            if volume.shared:
                await self._projects.retrieve(handle)
                continue
            await self._fetch_one(carrier, volume, volume.source, spec, handle.limits.disk_bytes or MOST)

    async def _refresh(
        self, handle: Handle, files: GuestFiles, carrier: str, volume: Volume, spec: SandboxSpec
    ) -> None:
        if volume.shared:
            if files.guest is None or not await self._projects.fetch(handle, files.guest):
                await self._projects.retrieve(handle)
        elif not await files.fetch([volume.target]):
            await self._fetch_one(carrier, volume, volume.source, spec)

    async def _fetch_one(self, carrier: str, volume: Volume, to: Path, spec: SandboxSpec, most: int = MOST) -> None:
        without = frozenset(paths_of_dependencies(spec))

        def read(stream: IO[bytes], check: Callable[[], None]) -> None:
            read_tar(stream, to, most=most, without=without, check=check)

        await self._engine.get(carrier, _place(volume), read)

    async def disk_bytes(self, handle: Handle, here: Callable[[], Awaitable[int]]) -> int:
        if measure := self._measures.get(handle.id):
            with suppress(ProviderFailed, WorkspaceLost):  # it ends just now
                return await measure()
        return await here()

    async def _measure(self, files: GuestFiles, carrier: str, volumes: Sequence[Volume]) -> int:
        """Ask the guest, and the daemon where commands have closed a directory to it."""
        writable = [volume for volume in volumes if volume.writable]
        with suppress(ProviderFailed):
            return await files.measure([volume.target for volume in writable])
        sizes: list[int] = []
        for volume in writable:
            await self._engine.get(carrier, _place(volume), lambda *archive: sizes.append(tar_bytes(*archive)))
        return sum(sizes)

    async def retrieve(self, handle: Handle) -> None:
        self._directories.check(handle)
        mirror = Mirror(handle)
        if not mirror.ahead:
            return
        labels = self._labels(handle)
        await self._engine.remove(labels)
        if any(name.startswith(PROJECT_VOLUME) for name in mirror.ahead):
            await self._projects.retrieve(handle)
        volumes = await trio.to_thread.run_sync(volumes_of, handle, SandboxSpec())
        kept = [volume for volume in volumes if volume.name in mirror.ahead]
        gone = {volume.name for volume in kept} - set(await self._engine.volumes(labels))
        if gone:
            mirror.lost()
            raise WorkspaceLost(f"somebody removed volume `{min(gone)}` of {_what(handle)} before it was fetched")
        carrier = await self._carrier(handle, kept)
        try:
            await self._fetch(handle, carrier, kept, SandboxSpec())
            mirror.same(await trio.to_thread.run_sync(stamps_of, kept))
        finally:
            with trio.CancelScope(shield=True), suppress(ProviderFailed):
                await self._engine.remove(labels)

    # --- the rest of the port ---

    async def chown_to_workspace_user(self, handle: Handle) -> None:
        await trio.lowlevel.checkpoint()  # files here are the runner's own

    async def list_owned(self, nonce: str) -> list[Handle]:
        return await trio.to_thread.run_sync(self._directories.list_owned, nonce)

    async def evict(self, handle: Handle) -> None:
        self._directories.check(handle)
        try:
            await self._engine.remove(self._labels(handle))
            await self.retrieve(handle)
        except ProviderFailed as error:
            raise CleanUpIncomplete(f"{_what(handle)} cannot be ended: {error.message}", hint=error.hint) from error
        await trio.to_thread.run_sync(remove_placeholders, handle.tree)

    async def destroy(self, handle: Handle) -> None:
        self._directories.check(handle)
        async with AsyncExitStack() as stack:
            if self._directories.owner(handle) is not None:
                await self._remove_there(handle, stack)
            await trio.to_thread.run_sync(self._directories.destroy, handle)

    async def _remove_there(self, handle: Handle, stack: AsyncExitStack) -> None:
        """Remove what the daemon has of a workspace; its project is kept from others until the stack is closed."""
        labels = self._labels(handle)
        try:
            await self._engine.remove(labels)
            if handle.project_tree is not None:
                releasing = self._projects.releasing(handle, lambda: not self._directories.neighbours(handle))
                await stack.enter_async_context(releasing)
            for volume in await self._engine.volumes(labels):
                await self._engine.remove_volume(volume)
            await self._engine.remove_images(labels)
        except ProviderFailed as error:
            raise CleanUpIncomplete(
                f"containers or volumes of {_what(handle)} may remain: {error.message}", hint=error.hint
            ) from error

    async def _make(self, handle: Handle, kind: str, config: Mapping[str, Any]) -> str:
        host = {"NetworkMode": "none", **config.get("HostConfig", {})}
        labels = {**self._labels(handle), **config.get("Labels", {})}
        whole = {**config, "Labels": labels, "NetworkDisabled": True, "HostConfig": host}
        return await self._engine.make(f"runner-{handle.id}-{kind}-{secrets.token_hex(4)}", whole)

    def _labels(self, handle: Handle) -> dict[str, str]:
        """Return the labels of what the daemon has of a workspace. Raises ``WorkspaceLost`` when it is gone."""
        owner = self._directories.owner(handle)
        if owner is None:
            raise WorkspaceLost(f"{_what(handle)} is gone")
        words = {"product": "runner", "provider": self.name, "nonce": owner[1], "run": owner[0], "workspace": handle.id}
        return {f"runner.{key}": word for key, word in words.items()}


def _paths(handle: Handle, volumes: Sequence[Volume]) -> Paths:
    if not volumes[0].shared:
        return PATHS
    return structs.replace(PATHS, workspace=f"{PATHS.workspace}/{WORKSPACES}/{handle.id}")


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


def _what(handle: Handle) -> str:
    return f"workspace `{handle.id}`"
