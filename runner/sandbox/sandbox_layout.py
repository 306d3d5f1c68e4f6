"""The paths inside a sandbox, and what is mounted there: the same on every provider that has mounts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from runner.core.errors import ProviderFailed
from runner.core.home import WORKSPACES
from runner.core.model import Handle
from runner.ports.provider import IN_HOME, PATH, Paths, SandboxSpec
from runner.sandbox.mounts import MountSource
from runner.sandbox.prepared_mounts import PreparedMounts
from runner.sandbox.protected_paths import Guard, Kind

NO_IMAGE = "commands see this host's own system"  # why a provider has no images
NOT_WARM = "its workspaces open in milliseconds, so none is kept running"  # why a provider needs no pool
WORKSPACE, HOME = "/workspace", "/home/agent"
PATHS = Paths(
    workspace=WORKSPACE,
    output="/output",
    incident="/incident",
    runner="/run/runner",
    home=HOME,
    skills="/skills",
    kube="/root/.kube",
)
ENV = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": HOME}

EMPTY = {Kind.MISSING_FILE: "nothing", Kind.MISSING_DIRECTORY: "nowhere"}
_SYSTEM_FILES = ("passwd", "group", "hosts")


class MountTable(Protocol):
    def show(self, place: MountSource, target: str, *, writable: bool = False) -> None: ...


def write_system_files(private: Path, uid: int) -> None:
    """Write the files of ``/etc`` that a sandbox needs, and two empty entries to mount over placeholders.

    ``uid`` is the user of commands inside.
    """
    directory = private / "system"
    directory.mkdir(mode=0o755)
    (directory / "passwd").write_bytes(passwd(uid))
    (directory / "group").write_bytes(group(uid))
    (directory / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (directory / "nothing").touch(mode=0o444)
    (directory / "nowhere").mkdir(mode=0o555)


def passwd(uid: int) -> bytes:
    return f"root:x:0:0:root:/nonexistent:/usr/sbin/nologin\nagent:x:{uid}:{uid}:agent:{HOME}:/bin/sh\n".encode()


def group(uid: int) -> bytes:
    return f"root:x:0:\nagent:x:{uid}:\n".encode()


def workspace_path(handle: Handle, prepared: PreparedMounts) -> str:
    """Return where commands find the workspace's tree."""
    return f"{WORKSPACE}/{WORKSPACES}/{handle.id}" if prepared.project else WORKSPACE


def mount_all(
    table: MountTable, handle: Handle, spec: SandboxSpec, prepared: PreparedMounts, guards: Sequence[Guard]
) -> None:
    """Mount everything but ``/tmp``, which differs by provider. Raises ``ProtectedLink``, ``ProviderFailed``."""
    workspace = workspace_path(handle, prepared)
    if prepared.project is not None:
        _mount_project(table, handle, prepared, prepared.project)
    table.show(prepared.tree, workspace, writable=True)
    for guard in guards:
        place, writable = _source_of(guard, guard.path, handle, spec, prepared)
        table.show(place, f"{workspace}/{guard.path}", writable=writable)
    table.show(prepared.home, PATHS.home, writable=True)
    for guard in prepared.home_guards:
        place, writable = _source_of(guard, f"{IN_HOME}{guard.path}", handle, spec, prepared)
        table.show(place, f"{PATHS.home}/{guard.path}", writable=writable)
    table.show(prepared.output, PATHS.output, writable=True)
    table.show(prepared.runner, PATHS.runner)
    for name in _SYSTEM_FILES:
        table.show(prepared.add(handle.private / "system" / name), f"/etc/{name}")
    for toolchain in spec.toolchains:
        table.show(prepared.add(Path(toolchain)), toolchain)
    for mount in sorted(spec.mounts, key=lambda mount: mount.target):
        table.show(prepared.add(mount.source), mount.target, writable=mount.writable)


def _source_of(
    guard: Guard, target: str, handle: Handle, spec: SandboxSpec, prepared: PreparedMounts
) -> tuple[MountSource, bool]:
    """Return the source of the mount of a guard for ``target``, and whether it is writable.

    Tools keep caches beside the packages of a dependency, so writes to it go to a layer. Raises ``ProviderFailed`` for
    a dependency that would hide something of the tree.
    """
    dependency = next((mount.source for mount in spec.dependencies if mount.target == target), None)
    if dependency is not None:
        if guard.kind is not Kind.MISSING_DIRECTORY:
            where = "home" if target.startswith(IN_HOME) else "tree"
            raise ProviderFailed(f"`{target}` is in the {where} already", hint="remove it from dependencies")
        return prepared.add_overlay(dependency), True
    empty = EMPTY.get(guard.kind)
    place = prepared.add(handle.private / "system" / empty) if empty else prepared.stage.add(os.dup(guard.source))
    return place, guard.kind is Kind.ANCESTOR


def _mount_project(table: MountTable, handle: Handle, prepared: PreparedMounts, project: MountSource) -> None:
    """Mount the project writable, but keep commands from adding or removing workspaces.

    Permissions do that where commands run as another user, else mounts; then workspaces that are made later are
    read-only.
    """
    table.show(project, WORKSPACE, writable=True)
    workspaces = handle.tree.parent
    if workspaces.stat().st_uid != handle.uid:
        return
    table.show(prepared.add(workspaces), f"{WORKSPACE}/{WORKSPACES}")
    for tree in sorted(workspaces.iterdir()):
        if tree != handle.tree:
            table.show(prepared.add(tree), f"{WORKSPACE}/{WORKSPACES}/{tree.name}", writable=True)
