"""Dependency layers: what the commands of a manifest have installed, kept below ``RUNNER_HOME`` for the next runs.

The name of a layer is the digest of all that decides its content, and its commands saw nothing else: the files that
they read, the commands, the system, toolchains, network and credentials. A project has layers of its own, and so have
untrusted manifests. A layer appears whole, by one rename, and is sealed: one that has changed since is never given
again.

Each layer has a lock beside it. Whoever makes or removes the layer has it alone, runs that use the layer share it, and
the kernel releases it with the process.
"""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.core.codec import decode, digest, encode
from runner.core.home import LAYERS
from runner.core.hosts import NetworkSpec
from runner.core.locks import try_flock
from runner.core.model import Mount
from runner.ports.provider import IN_HOME, SandboxSpec, program_directory
from runner.runtime.context import write_new
from runner.runtime.mount_plan import MountPlan
from runner.safefs import trees
from runner.safefs.safe_open import open_directory, open_path
from runner.safefs.sealed_trees import Seal, SpecialFile, open_to_all, seal
from runner.spec.model import DependencySpec

MOST_FILES = 500_000  # of a layer: each of them is looked at whenever it is given
_FORMAT = 1
_RECORD = "layer.json"
_SYSTEM = Path("/etc/os-release")
_POLL = 0.05  # seconds


class NotKept(Exception):
    """A directory cannot be kept; the text says why."""


class Owner(Struct, frozen=True, kw_only=True):
    """The owner of layers: nobody else is given them. ``source`` is its repository."""

    project: str
    source: str
    untrusted: bool


class LayerRecord(Struct, frozen=True, kw_only=True):
    """The record of a layer: ``by`` whom it was made, and a seal of each directory of ``keep``."""

    by: str
    keep: tuple[str, ...]
    seals: tuple[Seal, ...]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.seals)


class Layer(Struct, frozen=True):
    """A layer that may be there or not; nothing may be kept at ``path`` but by it."""

    path: Path

    def read(self, checkpoint: Callable[[], None] = lambda: None) -> LayerRecord | None:
        """Return the record of the layer; ``None`` if there is none, or it has changed since it was kept."""
        try:
            record = decode((self.path / _RECORD).read_bytes(), LayerRecord)
            found = tuple(seal(place, checkpoint) for place in self._places(record.keep))
        except (OSError, ValueError):
            return None
        return record if found == record.seals else None

    def is_there(self) -> bool:
        """Tell whether a layer is kept, without a look at its content."""
        return (self.path / _RECORD).is_file()

    def touch(self) -> None:
        """Note that the layer was used."""
        os.utime(self.path)

    def mounts(self, keep: Sequence[str]) -> tuple[Mount, ...]:
        return tuple(Mount(place, target) for place, target in zip(self._places(keep), keep, strict=True))

    def _places(self, keep: Sequence[str]) -> Iterator[Path]:
        return (self.path / str(number) for number, _ in enumerate(keep))

    def keep(self, installation: Path, keep: Sequence[str], by: str) -> LayerRecord:
        """Keep directories of an installation, whose rest is removed. Raises ``NotKept`` and ``OSError``."""
        half = installation / "kept"
        half.mkdir(mode=0o700)
        for place, target in zip(Layer(half)._places(keep), keep, strict=True):
            _move(installation, target, place)
        for rest in (installation / "tree", installation / "home"):
            if left := trees.remove(rest):
                raise NotKept(f"what is beside it cannot be removed: {left[0]}")
        try:
            for place in Layer(half)._places(keep):
                open_to_all(place)
        except SpecialFile as special:
            raise NotKept(f"`{special}` is neither a file, a directory nor a link") from special
        record = LayerRecord(by=by, keep=tuple(keep), seals=tuple(map(seal, Layer(half)._places(keep))))
        if (files := sum(one.files for one in record.seals)) > MOST_FILES:
            raise NotKept(f"it has {files:,} files of at most {MOST_FILES:,}")
        with (half / _RECORD).open("xb") as file:
            file.write(encode(record))
            file.flush()
            os.fsync(file.fileno())
        trees.remove(self.path)  # one that has changed
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        half.rename(self.path)
        return record

    async def lock(self) -> tuple[LayerRecord | None, int]:
        """Wait until the layer is there, or this process may make it; return its record and the lock's descriptor.

        With a record the lock is shared. Without one it is exclusive, until ``share`` or its closing.
        """
        while (found := await self.try_lock()) is None:  # noqa: ASYNC110 - the holder may be another process
            await trio.sleep(_POLL)
        return found

    async def try_lock(self) -> tuple[LayerRecord | None, int] | None:
        """Lock as ``lock`` does, or return ``None`` while others make, use or remove the layer."""
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_flock(descriptor, fcntl.LOCK_SH):
                if (record := await trio.to_thread.run_sync(self.read, trio.from_thread.check_cancelled)) is not None:
                    self.touch()
                    return record, descriptor
                if try_flock(descriptor, fcntl.LOCK_EX):
                    return None, descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None


def lay_out(place: Path, files: Mapping[str, bytes], uid: int) -> None:
    """Make the directories of an installation, with the files of its command, for the user that it runs as."""
    trees.remove(place)
    for directory in (place, place / "tree", place / "home"):
        directory.mkdir(mode=0o755, parents=True)
    for name, content in files.items():
        write_new(place / "tree" / name, content, 0o755 if content.startswith(b"#!") else 0o644)
    if trees.can_chown():
        for directory in (place / "tree", place / "home"):
            trees.chown_tree(directory, uid)


def installation_spec(mount_plan: MountPlan, place: Path) -> SandboxSpec:
    """Return the sandbox spec of an installation."""
    tree = Mount(place / "tree", "/workspace", writable=True)
    return replace(mount_plan.sandbox_spec, tree=tree, home=place / "home")


def share(lock: int) -> None:
    """Let others use the layer that was made."""
    fcntl.flock(lock, fcntl.LOCK_SH)


def layer_of(
    home: Path,
    one: DependencySpec,
    *,
    owner: Owner,
    files: Sequence[str],
    image: str | None,
    mount_plan: MountPlan,
    network: NetworkSpec,
    credentials: Sequence[str],
) -> Layer:
    """Return the layer of a command. ``files`` are the hashes of its files; without an ``image`` it sees this host."""
    system = {"image": image} if image is not None else {"host": _host_system()}
    decided = {
        "format": _FORMAT,
        "owner": owner,
        "command": one,
        "files": files,
        "toolchains": [(path, _changed(program_directory(path))) for path in mount_plan.toolchains],
        "environment": mount_plan.environment,
        "network": (str(network), network.environment),
        "credentials": tuple(credentials),
        **system,
    }
    return Layer(home / LAYERS / digest(decided).removeprefix("sha256:")[:32])


def _host_system() -> tuple[str, str]:
    release = _SYSTEM.read_bytes() if _SYSTEM.is_file() else b""
    return platform.machine(), sha256(release).hexdigest()


def _changed(directory: str) -> int:
    """Return the time at which programs were last added to a toolchain or replaced."""
    try:
        return os.stat(directory).st_mtime_ns
    except OSError:
        return 0


def _move(installation: Path, target: str, to: Path) -> None:
    """Move a directory that commands have filled, reached through no link. Raises ``NotKept``."""
    home, path = target.startswith(IN_HOME), target.removeprefix(IN_HOME)
    top = installation / ("home" if home else "tree")
    try:
        with open_directory(top) as directory:
            os.close(open_path(directory, *path.split("/")))
        with open_directory(top / path):
            pass
    except OSError as error:
        raise NotKept(f"it has made no directory `{target}`: {error.strerror}") from error
    (top / path).rename(to)
