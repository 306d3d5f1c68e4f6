"""The files of a workspace in pods: its directories, and its disk limit, which those here never have."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from msgspec.structs import replace

from runner.core.errors import WorkspaceLost
from runner.core.model import Handle
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.sandbox.docker_facts import image_file, read_image
from runner.sandbox.mirrored import MOST, Volume, volumes_of


def storage_class_of(handle: Handle) -> str | None:
    """Return the StorageClass of the volume that limits a workspace's disk. Raises ``WorkspaceLost``."""
    found: str | None = read_image(handle).get("storage_class")
    return found


def fetched_at_most(handle: Handle) -> int:
    """Return the bytes of a workspace's files that are fetched at a time; sparse ones are larger than their disk."""
    return max(handle.limits.disk_bytes or 0, MOST)


def note_of(request: WorkspaceRequest, storage_class: str | None, sandboxes: str) -> Callable[[Path], None]:
    """Return what notes of a workspace, in its private directory, what its pods are made of, and by."""
    disk = request.limits.disk_bytes
    limit = {} if disk is None else {"disk": disk, "storage_class": storage_class}

    def fill(private: Path) -> None:
        image_file(private).parent.mkdir(mode=0o700)
        image_file(private).write_text(json.dumps({"image": request.image, "sandboxes": sandboxes, **limit}))

    return fill


def request_here(request: WorkspaceRequest) -> WorkspaceRequest:
    """Return a request for the directories here."""
    return replace(request, limits=replace(request.limits, disk_bytes=None))


def as_here(handle: Handle) -> Handle:
    """Return a handle as the directories here know it."""
    return replace(handle, limits=replace(handle.limits, disk_bytes=None))


def with_disk(handle: Handle) -> Handle:
    """Return a handle of the directories here with its limit; half of a workspace has none."""
    with suppress(WorkspaceLost, ValueError):
        return replace(handle, limits=replace(handle.limits, disk_bytes=read_image(handle).get("disk")))
    return handle


def pod_volumes(handle: Handle, spec: SandboxSpec) -> list[Volume]:
    """List the volumes of a sandbox as ``volumes_of`` does; toolchains have the same name in each pod. Blocking."""
    return [
        dataclasses.replace(volume, name=f"toolchain-{sha256(volume.target.encode()).hexdigest()[:12]}")
        if is_toolchain(volume)
        else volume
        for volume in volumes_of(handle, spec)
    ]


def is_toolchain(volume: Volume) -> bool:
    """Tell whether a volume is sent once, and never changes."""
    return not (volume.kept or volume.passing or volume.shared)
