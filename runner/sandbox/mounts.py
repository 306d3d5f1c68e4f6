"""Sources of a sandbox's mounts: opened without following a link, then staged so that no path is looked up again.

Started as root, commands and bwrap itself run as a uid of their own, which cannot walk through root's directories. The
loop thread therefore moves to its own mount namespace and binds each source below one directory there: the host never
sees these mounts, and they end with the thread, however it ends. An ordinary user passes descriptors to bwrap instead.

Mounts that outlive the process are made below another directory, which is shared by all these namespaces: a mount made
or removed there in one of them is made or removed in all.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import itertools
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from runner.safefs import linux
from runner.safefs.linux import MS_BIND, MS_NOATIME, MS_NODEV, MS_NOSUID, MS_REC, MS_REMOUNT, MS_SHARED, MS_SLAVE
from runner.safefs.safe_open import open_linkless
from runner.sandbox.idmapped_mounts import idmap_mount, is_idmapped

_PREFIX = "runner-stage-"
_SHARED_BYTES = 256 << 20  # of memory at most, for templates; the mounts there take none

_numbers = itertools.count()


class MountSource(Struct, frozen=True):
    """A staged source: ``path`` is valid for the user that commands run as.

    A ``descriptor`` is for bwrap to inherit. bwrap closes the descriptors that it is told to bind and no others: one
    that it inherits without being told is a way out of the sandbox.
    """

    path: str
    descriptor: int | None = None

    def bwrap_options(self, target: str, *, writable: bool) -> list[str]:
        option, source = ("bind", self.path) if self.descriptor is None else ("bind-fd", str(self.descriptor))
        return [f"--{option}" if writable else f"--ro-{option}", source, target]


class OverlaySource(MountSource, frozen=True):
    """``path`` under a layer that takes every write, mounted by bwrap for a user who cannot mount."""

    layer: str = ""

    def bwrap_options(self, target: str, *, writable: bool) -> list[str]:
        return ["--overlay-src", self.path, "--overlay", f"{self.layer}/files", f"{self.layer}/work", target]


class MountStage(Protocol):
    """Makes the sources of one sandbox reachable for the user that its commands run as."""

    def add(self, source: int) -> MountSource:
        """Take over an ``O_PATH`` descriptor, which is closed with the stage."""

    def overlay(self, lower: MountSource, layer: MountSource) -> MountSource:
        """Put ``lower`` under a ``layer`` that takes every write and has the directories ``files`` and ``work``.

        Raises ``OSError`` where the user or the file system cannot do that.
        """

    def overlay_inside(self, lower: MountSource, layer: MountSource) -> MountSource:
        """Do the same as ``overlay``, visible only inside the sandbox."""

    def open(self, source: MountSource) -> int:
        """Open a source as ``O_PATH``; the caller closes it."""

    def close(self) -> None: ...


@contextmanager
def open_stage(uid: int | None, idmapped: Path | None = None) -> Iterator[MountStage]:
    """Stage the sources of one sandbox for the user ``uid``; ``None`` is the caller's own user.

    ``idmapped`` is a directory of another user that ``uid`` sees as its own.
    """
    stage = DescriptorStage() if uid is None else BindStage(uid, idmapped)
    try:
        yield stage
    finally:
        stage.close()


class DescriptorStage:
    """Stage of an ordinary user: bwrap inherits the descriptors."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def add(self, source: int) -> MountSource:
        self._descriptors.append(source)
        return MountSource(os.readlink(f"/proc/self/fd/{source}"), source)

    def overlay(self, lower: MountSource, layer: MountSource) -> MountSource:
        raise PermissionError(errno.EPERM, "an ordinary user cannot mount")

    def overlay_inside(self, lower: MountSource, layer: MountSource) -> MountSource:
        return OverlaySource(lower.path, layer=layer.path)

    def open(self, source: MountSource) -> int:
        return open_linkless(Path(source.path))

    def close(self) -> None:
        for fd in self._descriptors:
            os.close(fd)


class BindStage:
    """Stage of root: each source is bound below a directory that only ``uid`` can enter."""

    def __init__(self, uid: int, idmapped: Path | None = None) -> None:
        self._uid = uid
        self._idmapped = idmapped
        self._root = stage_directory() / str(next(_numbers))
        self._root.mkdir(mode=0o500)
        os.chown(self._root, uid, uid)
        self._targets: list[Path] = []

    def add(self, source: int) -> MountSource:
        try:
            kept = os.fstatvfs(source).f_flag & (os.ST_RDONLY | os.ST_NOEXEC)
            target = self._target(directory=stat.S_ISDIR(os.fstat(source).st_mode))
            if is_idmapped(source, self._idmapped, self._uid):
                idmap_mount(source, self._uid, target)
            else:
                linux.mount(target, MS_BIND | MS_REC, source=f"/proc/self/fd/{source}")
                linux.mount(target, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | kept)
        finally:
            os.close(source)
        return MountSource(str(target))

    def overlay(self, lower: MountSource, layer: MountSource) -> MountSource:
        target = self._target(directory=True)
        mount_overlay(lower, layer, target)
        return MountSource(str(target))

    def overlay_inside(self, lower: MountSource, layer: MountSource) -> MountSource:
        return self.overlay(lower, layer)

    def open(self, source: MountSource) -> int:
        return open_linkless(Path(source.path))

    def _target(self, *, directory: bool) -> Path:
        target = make_target(self._root / str(len(self._targets)), directory=directory)
        self._targets.append(target)
        return target

    def close(self) -> None:
        for target in reversed(self._targets):
            linux.unmount(target)
            if target.is_dir():
                target.rmdir()
            else:
                target.unlink()
        self._root.rmdir()


def make_target(target: Path, *, directory: bool) -> Path:
    """Make an empty directory or file to mount on."""
    if directory:
        target.mkdir()
    else:
        target.touch()
    return target


def mount_overlay(lower: MountSource, layer: MountSource, target: Path) -> None:
    options = f"lowerdir={lower.path},upperdir={layer.path}/files,workdir={layer.path}/work"
    linux.mount(target, MS_NOSUID | MS_NODEV, source="overlay", kind="overlay", options=options)


def mount_tmpfs(target: Path, options: str) -> None:
    linux.mount(target, MS_NOSUID | MS_NODEV, source="tmpfs", kind="tmpfs", options=options)


def stage_directory() -> Path:
    """Return the directory, private to the calling thread, that sources are bound below; open them after this call."""
    return _stage_directory(threading.get_native_id())


def can_stage() -> bool:
    """Tell whether this root may mount at all; in an unprivileged container it may not."""
    try:
        stage_directory()
    except OSError:
        return False
    return True


@cache
def _stage_directory(_thread: int) -> Path:
    with _locked_shared():
        clone = _clone_shared()
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount(Path("/"), MS_REC | MS_SLAVE)
        if clone is not None:
            _attach_shared(clone)
    place = _claim(_parent())
    mount_tmpfs(place, "mode=0711")
    atexit.register(_leave, place, os.getpid())
    return place


def shared_directory() -> Path:
    """Return the directory below which a mount is seen by every process of the runner on this host."""
    return _parent() / "runner-volumes"


def make_shared_directory() -> None:
    """Make ``shared_directory`` one, once a boot. Raises ``OSError`` where mounts are refused."""
    with _locked_shared():
        _make_shared()


def _make_shared() -> None:
    place = shared_directory()
    place.mkdir(mode=0o711, exist_ok=True)
    if not place.is_mount():
        mount_tmpfs(place, f"mode=0711,size={_SHARED_BYTES}")
    linux.mount(place, MS_SHARED)


@contextmanager
def _locked_shared() -> Iterator[None]:
    """Lock it on this host: a mount made while a namespace gets its copy would be missing there."""
    lock = os.open(shared_directory().with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _clone_shared() -> int | None:
    """Clone it with all mounts below, for another namespace; ``None`` where the kernel has no ``open_tree``."""
    try:
        _make_shared()
        return linux.clone_mount(shared_directory(), recursive=True)
    except OSError:
        return None


def _attach_shared(clone: int) -> None:
    """Replace the copy that came with the namespace, which receives others' mounts, but propagates none."""
    linux.unmount(shared_directory())
    try:
        linux.move_mount(clone, shared_directory())
    finally:
        os.close(clone)


def mount_shared(device: str, place: Path, kind: str, options: str) -> None:
    """Mount a block device for everybody, unless something is mounted there. Raises ``OSError``."""
    with _locked_shared():
        _make_shared()
        place.parent.mkdir(mode=0o711, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        if not place.is_mount():
            linux.mount(place, MS_NOSUID | MS_NODEV | MS_NOATIME, source=device, kind=kind, options=options)


def remove_stale_stages() -> None:
    """Remove the stage directories of processes that have died; the mounts went with them."""
    _remove_stale(_parent())


def _remove_stale(parent: Path) -> None:
    for other in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # locked by its process, or removed by another
            lock = os.open(other, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                other.rmdir()
            finally:
                os.close(lock)


def _parent() -> Path:
    return Path("/run" if os.access("/run", os.W_OK) else "/tmp")


def _claim(parent: Path) -> Path:
    """Make a directory that stays locked as long as this process lives; stale ones are removed."""
    _remove_stale(parent)
    while True:
        place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.fstat(lock).st_nlink:  # else another process took it for stale before it was locked
            return place
        os.close(lock)


def _leave(place: Path, owner: int) -> None:
    if os.getpid() != owner:  # a fork of ours shares the namespace
        return
    linux.unmount(place)
    with suppress(FileNotFoundError):
        place.rmdir()
