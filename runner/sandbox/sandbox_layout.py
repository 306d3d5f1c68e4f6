"""What a sandbox with mounts of its own shows, and where: the same on every provider that has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from runner.core.errors import ProviderFailed
from runner.core.model import Handle
from runner.ports.provider import PATH, Paths, SandboxSpec
from runner.sandbox.directories import WORKSPACES
from runner.sandbox.mounts import MountSource
from runner.sandbox.prepared_mounts import Room
from runner.sandbox.protected_paths import Guard, Kind

NO_IMAGE = "commands see this host's own system"  # of the providers that have none
NOT_WARM = "its workspaces open in milliseconds, so none is kept running"  # of the providers that need no pool
WORKSPACE, HOME = "/workspace", "/home/agent"
PATHS = Paths(WORKSPACE, "/output", "/incident", "/run/runner", HOME, "/skills", "/root/.kube")
ENV = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": HOME}

EMPTY = {Kind.MISSING_FILE: "nothing", Kind.MISSING_DIRECTORY: "nowhere"}
_SYSTEM_FILES = ("passwd", "group", "hosts")


class Recipe(Protocol):
    def show(self, place: MountSource, target: str, *, writable: bool = False) -> None: ...


def write_system_files(private: Path, uid: int) -> None:
    """The few files of ``/etc`` that a sandbox needs, and the two empty entries that stand for missing ones.

    ``uid`` is the user of commands as they see it.
    """
    directory = private / "system"
    directory.mkdir(mode=0o755)
    passwd = f"root:x:0:0:root:/nonexistent:/usr/sbin/nologin\nagent:x:{uid}:{uid}:agent:{HOME}:/bin/sh\n"
    (directory / "passwd").write_text(passwd)
    (directory / "group").write_text(f"root:x:0:\nagent:x:{uid}:\n")
    (directory / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (directory / "nothing").touch(mode=0o444)
    (directory / "nowhere").mkdir(mode=0o555)


def workspace_path(handle: Handle, room: Room) -> str:
    """Where commands find the workspace's tree."""
    return f"{WORKSPACE}/{WORKSPACES}/{handle.id}" if room.project else WORKSPACE


def show_all(recipe: Recipe, handle: Handle, spec: SandboxSpec, room: Room, guards: Sequence[Guard]) -> None:
    """Everything but ``/tmp``, which is each provider's own. Raises ``ProtectedLink``, ``ProviderFailed``."""
    workspace = workspace_path(handle, room)
    if room.project is not None:
        _show_project(recipe, handle, room, room.project)
    recipe.show(room.tree, workspace, writable=True)
    for guard in guards:
        place, writable = _place_of(guard, handle, spec, room)
        recipe.show(place, f"{workspace}/{guard.path}", writable=writable)
    recipe.show(room.home, PATHS.home, writable=True)
    recipe.show(room.output, PATHS.output, writable=True)
    recipe.show(room.runner, PATHS.runner)
    for name in _SYSTEM_FILES:
        recipe.show(room.add(handle.private / "system" / name), f"/etc/{name}")
    for toolchain in spec.toolchains:
        recipe.show(room.add(Path(toolchain)), toolchain)
    for mount in sorted(spec.mounts, key=lambda mount: mount.target):
        recipe.show(room.add(mount.source), mount.target, writable=mount.writable)


def _place_of(guard: Guard, handle: Handle, spec: SandboxSpec, room: Room) -> tuple[MountSource, bool]:
    """What is shown at a guarded path, and whether it can be written.

    Package managers' tools keep caches beside the packages, so what they write to a dependency goes to a layer. Raises
    ``ProviderFailed`` for one that would hide something of the tree.
    """
    dependency = next((mount.source for mount in spec.dependencies if mount.target == guard.path), None)
    if dependency is not None:
        if guard.kind is not Kind.MISSING_DIRECTORY:
            raise ProviderFailed(f"`{guard.path}` is in the tree already", hint="remove it from dependencies")
        return room.cover(dependency), True
    empty = EMPTY.get(guard.kind)
    place = room.add(handle.private / "system" / empty) if empty else room.places.add(os.dup(guard.source))
    return place, guard.kind is Kind.ANCESTOR


def _show_project(recipe: Recipe, handle: Handle, room: Room, project: MountSource) -> None:
    """The project, whole and writable; but which workspaces there are is not its agents' to change.

    That is a matter of permissions where commands run as another user, and of mounts else; then those that are made
    later can only be read.
    """
    recipe.show(project, WORKSPACE, writable=True)
    workspaces = handle.tree.parent
    if workspaces.stat().st_uid != handle.uid:
        return
    recipe.show(room.add(workspaces), f"{WORKSPACE}/{WORKSPACES}")
    for tree in sorted(workspaces.iterdir()):
        if tree != handle.tree:
            recipe.show(room.add(tree), f"{WORKSPACE}/{WORKSPACES}/{tree.name}", writable=True)
