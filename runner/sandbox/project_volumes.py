"""Volumes of projects whose workspaces share a directory, at a daemon that sees nothing of this host.

Files come from the guest of an open sandbox. Where none is open, or commands have closed a directory to it, a container
without a network, in which a guest is root and nothing else runs, lists, sends and removes them.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio

from runner.core.errors import ProviderFailed, WorkspaceLost
from runner.core.home import WORKSPACES
from runner.core.model import Handle, Limits
from runner.core.nurseries import unwrapping_groups
from runner.guest.client import Guest, open_guest
from runner.sandbox.attach_channel import AttachChannel
from runner.sandbox.container import Container, ContainerMounts
from runner.sandbox.daemon_container import DaemonInit, DaemonLimits
from runner.sandbox.docker_api import Engine
from runner.sandbox.docker_facts import image_file, read_image
from runner.sandbox.guest_files import SECONDS, fetch_files, list_files, remove_files
from runner.sandbox.sandbox_layout import ENV, WORKSPACE
from runner.sandbox.shared_volumes import SharedProject, open_shared
from runner.sandbox.tar_trees import Source, tar_trees

_ANY_OWNER = ("DAC_OVERRIDE", "FOWNER")  # capabilities for what commands have closed

Make = Callable[[Handle, str, Mapping[str, Any]], Awaitable[str]]
Labels = Callable[[Handle], dict[str, str]]


class ProjectVolumes:
    """``make`` makes a container for a workspace, ``labels`` are those of what it has; ``most`` bytes are fetched."""

    def __init__(self, engine: Engine, make: Make, labels: Labels, *, uid: int, most: int) -> None:
        self._engine = engine
        self._make = make
        self._labels = labels
        self._uid = uid
        self._most = most

    async def send(self, handle: Handle) -> str:
        """Bring the volume of a workspace's project up to date, and return its name."""
        async with open_shared(_place(handle)) as project:
            labels = {name: word for name, word in self._labels(handle).items() if name not in _OF_ONE}
            labels["runner.project"] = handle.project
            is_new = project.volume not in await self._engine.volumes(labels)
            if is_new:
                project.here.clear()
                project.there.clear()
                await self._engine.make_volume(project.volume, labels)
            now, gone = await trio.to_thread.run_sync(project.changed)
            if gone:
                async with self._open_keeper(handle, project.volume) as guest:
                    await remove_files(guest, WORKSPACE, gone)
            changed = frozenset(f"/{name}" for name, _ in now.items() - project.here.items())
            if is_new or changed:
                container = await self._make(handle, "files", _carrying(handle, project.volume))
                # Docker gives no owner to the directory that it unpacks into, podman unpacks into no mount below it.
                to, name = (WORKSPACE, ".") if read_image(handle)["podman"] else ("/", WORKSPACE.lstrip("/"))
                source = Source(name, project.place, self._uid, only=None if is_new else changed)
                await self._engine.put(container, to, partial(tar_trees, [source]))
            await trio.to_thread.run_sync(project.sent, now)
            return project.volume

    async def fetch(self, handle: Handle, guest: Guest) -> bool:
        """Bring the project's directory up to date by the guest of a sandbox; tell whether that could be done."""
        with trio.move_on_after(SECONDS), suppress(ProviderFailed, WorkspaceLost, OSError), unwrapping_groups():
            async with open_shared(_place(handle)) as project:
                await self._fetch(project, guest)
            return True
        return False

    async def retrieve(self, handle: Handle) -> None:
        """Bring the project's directory up to date when the workspace has no sandbox."""
        async with open_shared(_place(handle)) as project:
            if project.volume not in await self._engine.volumes({"runner.project": handle.project}):
                await trio.to_thread.run_sync(project.forget)
                raise WorkspaceLost(f"somebody removed volume `{project.volume}` before it was fetched")
            async with self._open_keeper(handle, project.volume) as guest:
                await self._fetch(project, guest)

    async def _fetch(self, project: SharedProject, guest: Guest) -> None:
        listed = (await list_files(guest, [WORKSPACE]))[WORKSPACE]
        names, came = await trio.to_thread.run_sync(project.wanted, listed), set[str]()
        if names:
            came = await fetch_files(guest, WORKSPACE, sorted(names), listed, to=project.place, most=self._most)
        await trio.to_thread.run_sync(project.fetched, listed, came)

    async def mounts(self, handle: Handle, volume: str) -> list[dict[str, Any]]:
        """Mount the directory of the workspaces so that commands can change each of them, but not which there are."""
        within = f"{await self._engine.place_of_volume(volume)}/{WORKSPACES}"
        target = f"{WORKSPACE}/{WORKSPACES}"
        names = await trio.to_thread.run_sync(sorted, (path.name for path in handle.tree.parent.iterdir()))
        return [
            {"Type": "bind", "Source": within, "Target": target, "ReadOnly": True},
            *({"Type": "bind", "Source": f"{within}/{name}", "Target": f"{target}/{name}"} for name in names),
        ]

    @asynccontextmanager
    async def releasing(self, handle: Handle, is_last: Callable[[], bool]) -> AsyncIterator[None]:
        """Remove a workspace from the volume of its project, or the volume when it is the last; then, the block."""
        if not _place(handle).is_dir():
            yield
            return
        async with open_shared(_place(handle)) as project:
            if await trio.to_thread.run_sync(is_last):
                await self._engine.remove_volume(project.volume)
                await trio.to_thread.run_sync(project.forget)
            elif image_file(handle.private).exists():
                async with self._open_keeper(handle, project.volume) as guest:
                    await self._empty(project, guest, f"{WORKSPACES}/{handle.id}")
            yield

    async def _empty(self, project: SharedProject, guest: Guest, top: str) -> None:
        listed = (await list_files(guest, [WORKSPACE]))[WORKSPACE]
        names = sorted((name for name in listed if f"{name}/".startswith(f"{top}/")), reverse=True)
        await remove_files(guest, WORKSPACE, names)
        for name in names:
            project.here.pop(name, None)
            project.there.pop(name, None)
        await trio.to_thread.run_sync(project.sent, project.here)

    @asynccontextmanager
    async def _open_keeper(self, handle: Handle, volume: str) -> AsyncIterator[Guest]:
        """Start a container that has the volume, and in which nothing runs but a guest, which is root."""
        what, labels = f"project `{handle.project}`", {**self._labels(handle), "runner.keeper": secrets.token_hex(8)}
        container = Container(
            image=read_image(handle)["image"],
            uid=self._uid,
            labels=labels,
            limits=Limits(),
            env=ENV,
            runtime="",
            capabilities=_ANY_OWNER,
            has_health_check=read_image(handle)["health"],
        )
        config = {**container.config(ContainerMounts()), **AttachChannel.config}
        del config["HostConfig"]["Runtime"]
        config["HostConfig"]["Mounts"] = [_mount(volume)]
        channel = AttachChannel(self._engine, what)
        made = await self._make(handle, "project", config)
        init = DaemonInit(self._engine, made, DaemonLimits(), what)
        try:
            await channel.prepare(made)
            await self._engine.start(made)
            async with open_guest(partial(channel.connect, init), what=what, kill_sandbox=init.kill) as guest:
                yield guest
        except WorkspaceLost as lost:
            raise ProviderFailed(f"the files of {what} cannot be reached: {lost.message}") from lost
        finally:
            with trio.CancelScope(shield=True):
                channel.close()
                await init.end()
                await self._engine.remove(labels)


_OF_ONE = ("runner.run", "runner.workspace")  # labels


def _place(handle: Handle) -> Path:
    assert handle.project_tree is not None
    return handle.project_tree


def _carrying(handle: Handle, volume: str) -> dict[str, Any]:
    image = read_image(handle)["image"]
    return {"Image": image, "Entrypoint": ["-"], "HostConfig": {"Mounts": [_mount(volume)]}}


def _mount(volume: str) -> dict[str, Any]:
    return {"Type": "volume", "Source": volume, "Target": WORKSPACE, "VolumeOptions": {"NoCopy": True}}
