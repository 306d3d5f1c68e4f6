"""Directories of a workspace on this host, and copies of them elsewhere, where commands work on them.

``Mirror`` remembers on the disk which side is ahead, so work is fetched also after the runner was killed.
"""

from __future__ import annotations

import json
import os
import posixpath
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import trio

from runner.core.errors import ProviderFailed
from runner.core.model import Handle
from runner.ports.provider import SandboxSpec
from runner.safefs import trees
from runner.sandbox.sandbox_layout import PATHS
from runner.sandbox.tar_trees import stamps

MOST = 16 << 30  # bytes that are fetched of a workspace without a disk limit


@dataclass(frozen=True)
class Volume:
    """A volume elsewhere for this host's directory ``source``, mounted at ``target``.

    A ``kept`` one belongs to the workspace and is fetched, a ``passing`` one is removed with the sandbox, and a
    ``shared`` one belongs to the project.
    """

    name: str
    source: Path
    target: str
    writable: bool = False
    kept: bool = False
    passing: bool = False
    shared: bool = False


class Mirror:
    """Note on the disk of which side has the newer files.

    ``stamps`` are those of each volume when it and the directory here were last the same. Those that are ``ahead`` have
    to be fetched.
    """

    def __init__(self, handle: Handle) -> None:
        self._file = handle.private / "system" / "mirror.json"
        try:
            found = json.loads(self._file.read_text())
        except OSError:
            found = {}
        self.stamps: dict[str, dict[str, str]] = found.get("stamps", {})
        self.ahead: list[str] = found.get("ahead", [])

    def daemon_is_ahead(self, volumes: Iterable[str]) -> None:
        """Note that commands may write to these volumes from now on."""
        self.ahead = [*volumes]
        self._write()

    def same(self, stamps: Mapping[str, dict[str, str]]) -> None:
        """Note that these volumes are as here, and that nothing runs."""
        self.stamps, self.ahead = {**self.stamps, **stamps}, []
        self._write()

    def lost(self) -> None:
        """Note that only what is here is left."""
        self.stamps, self.ahead = {}, []
        self._write()

    def _write(self) -> None:
        part = self._file.with_suffix(".part")
        with part.open("w") as file:
            json.dump({"stamps": self.stamps, "ahead": self.ahead}, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._file)


class Inputs:
    """Directories that the runner still writes to while a sandbox is open, such as that of the prompt."""

    def __init__(self, volumes: Sequence[Volume], put: Callable[[Sequence[Volume]], Awaitable[None]]) -> None:
        self._volumes = [volume for volume in volumes if volume.passing and not volume.writable]
        self._put = put
        self._sent = stamps_of(self._volumes)

    async def send_changed(self) -> None:
        """Send what was written since the last call. Nothing is removed there that was removed here."""
        stamps = await trio.to_thread.run_sync(stamps_of, self._volumes)
        changed = [volume for volume in self._volumes if stamps[volume.name] != self._sent[volume.name]]
        self._sent = stamps
        await self._put(changed)


def prepare_scratch(handle: Handle, spec: SandboxSpec, scratch: Path) -> None:
    """Check that a sandbox can be opened, and make an empty scratch directory. Raises as ``open``."""
    handle.tree.lstat()
    for mount in spec.dependencies:
        if (handle.tree / mount.target).exists():
            raise ProviderFailed(f"`{mount.target}` is in the tree already", hint="remove it from dependencies")
    trees.remove(scratch)
    scratch.mkdir(mode=0o700)


def volumes_of(handle: Handle, spec: SandboxSpec, project: str | None = None) -> list[Volume]:
    """List the volumes of a sandbox, that of the tree, or of the ``project`` that has it, first. Blocking."""

    def named(name: str) -> str:
        return f"runner-{handle.slot or handle.id}-{name}"

    def kept(name: str, source: Path, target: str) -> Volume:
        return Volume(named(name), source, target, writable=True, kept=True)

    def passing(source: Path, target: str, *, writable: bool) -> Volume:
        return Volume(named(secrets.token_hex(6)), source, target, writable=writable, passing=True)

    def sent_once(source: Path, target: str) -> Volume:
        content = sorted(stamps(source).items())
        return Volume(
            named(sha256(f"{target} {content}".encode(errors="surrogateescape")).hexdigest()[:12]), source, target
        )

    tree = kept("tree", handle.tree, PATHS.workspace)
    if project is not None:
        tree = Volume(project, handle.tree, PATHS.workspace, writable=True, shared=True)
    elif spec.tree is not None or not spec.tree_writable:
        tree = passing(spec.tree.source if spec.tree else handle.tree, PATHS.workspace, writable=True)
    home = kept("home", handle.private / "home", PATHS.home)
    if spec.fresh_home:
        home = passing(handle.private / "scratch", PATHS.home, writable=True)
    below = [(mount.source, posixpath.join(PATHS.workspace, mount.target)) for mount in spec.dependencies]
    return [
        tree,
        home,
        kept("output", handle.private / "output", PATHS.output),
        passing(handle.private / "runner", PATHS.runner, writable=False),
        *(passing(mount.source, mount.target, writable=mount.writable) for mount in spec.mounts),
        *(sent_once(Path(toolchain), toolchain) for toolchain in spec.toolchains),
        *(passing(source, target, writable=True) for source, target in below),
    ]


def paths_of_dependencies(spec: SandboxSpec) -> list[str]:
    """List the paths of the tree that belong to other volumes."""
    return [mount.target.rstrip("/") for mount in spec.dependencies]


def stamps_of(volumes: Sequence[Volume]) -> dict[str, dict[str, str]]:
    return {volume.name: stamps(volume.source) for volume in volumes}
