"""Host files shown to a sandbox: opened without following a link, then handed over so that no path is looked up again.

Started as root we run commands, and bwrap itself, as an own uid, which cannot walk through root's
directories. The loop thread therefore moves to a mount namespace of its own and binds each source to
a place below one directory there: the host never sees these mounts, and they end with the thread,
however it ends. An ordinary user passes the descriptors to bwrap instead.

Mounts that outlive us are made below one other directory, which all these namespaces have in common: whatever is
mounted or unmounted there in one of them is so in all.
"""

from __future__ import annotations

import atexit
import ctypes
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

from runner.core.errors import ProtectedLink
from runner.sandbox.idmapped_mounts import is_lent, lend

_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_NOATIME = 0x2, 0x4, 0x20, 0x400
_MS_BIND, _MS_REC, _MS_SLAVE, _MS_SHARED = 0x1000, 0x4000, 0x80000, 0x100000
_MNT_DETACH, _UMOUNT_NOFOLLOW = 0x2, 0x8
_OPEN_TREE, _MOVE_MOUNT, _AT_FDCWD = 428, 429, -100
_CLONE, _RECURSIVE, _FROM_EMPTY_PATH = 0x1, 0x8000, 0x4
_PREFIX = "runner-stage-"
_COMMON_BYTES = 256 << 20  # of memory at most, for templates; the mounts there take none

_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def open_linkless(path: Path) -> int:
    """An ``O_PATH`` descriptor of an absolute path that leads through no symbolic link; the caller closes it.

    Raises ``ProtectedLink``, and ``OSError`` for what is not there.
    """
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    for position, name in enumerate(path.parts[1:], start=2):
        try:
            inner = open_name(fd, name)
        finally:
            os.close(fd)
        fd = inner
        if stat.S_ISLNK(os.fstat(fd).st_mode):
            os.close(fd)
            link = Path(*path.parts[:position])
            raise ProtectedLink(f"`{link}` is a symbolic link", hint=f"name the real path: `{link.resolve()}`")
    return fd


def open_name(directory: int, name: str) -> int:
    """An ``O_PATH`` descriptor of an entry as it is; of the link itself, if it is one."""
    return os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=directory)


class Place:
    """One source. ``path`` is good for the user that commands run as; ``at`` gives bwrap's words for it.

    ``descriptor`` is what those words need to inherit, if anything. bwrap closes what it is told to bind
    and nothing else: a descriptor that it inherits without being told is a way out of the sandbox.
    """

    def __init__(self, path: str, option: str, source: str, descriptor: int | None = None) -> None:
        self.path = path
        self.descriptor = descriptor
        self._option = option
        self._source = source

    def at(self, target: str, *, writable: bool) -> list[str]:
        return [f"--{self._option}" if writable else f"--ro-{self._option}", self._source, target]


class Layered(Place):
    """``lower`` under a layer that takes every write, which bwrap mounts for a user who cannot."""

    def __init__(self, lower: Place, upper: Place) -> None:
        super().__init__(lower.path, "overlay", "")
        self._upper = upper.path

    def at(self, target: str, *, writable: bool) -> list[str]:
        return ["--overlay-src", self.path, "--overlay", f"{self._upper}/files", f"{self._upper}/work", target]


class Places(Protocol):
    """Where the sources of one opening can be reached by the user that its commands run as."""

    def add(self, source: int) -> Place:
        """Take over an ``O_PATH`` descriptor, which is closed with the places."""

    def layer(self, lower: Place, upper: Place) -> Place:
        """``lower`` under a layer that takes every write; ``upper`` has the directories ``files`` and ``work``.

        Raises ``OSError`` where that cannot be had.
        """

    def layer_inside(self, lower: Place, upper: Place) -> Place:
        """As ``layer``, for what only the sandbox sees."""

    def open(self, place: Place) -> int:
        """An ``O_PATH`` descriptor of it; the caller closes it."""

    def close(self) -> None: ...


@contextmanager
def open_places(uid: int | None, lent: Path | None = None) -> Iterator[Places]:
    """The places of one opening, gone with the block. ``uid`` is the user to stage for, ``None`` for ourselves.

    ``lent`` is a directory of somebody else that he sees as his own.
    """
    places = DescriptorPlaces() if uid is None else Staged(uid, lent)
    try:
        yield places
    finally:
        places.close()


class DescriptorPlaces:
    """For an ordinary user: bwrap inherits the descriptors."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def add(self, source: int) -> Place:
        self._descriptors.append(source)
        return Place(os.readlink(f"/proc/self/fd/{source}"), "bind-fd", str(source), source)

    def layer(self, lower: Place, upper: Place) -> Place:
        raise PermissionError(errno.EPERM, "an ordinary user cannot mount")

    def layer_inside(self, lower: Place, upper: Place) -> Place:
        return Layered(lower, upper)

    def open(self, place: Place) -> int:
        return open_linkless(Path(place.path))

    def close(self) -> None:
        for fd in self._descriptors:
            os.close(fd)


class Staged:
    """For root: each source is bound below a directory that only ``uid`` can enter."""

    def __init__(self, uid: int, lent: Path | None = None) -> None:
        self._uid = uid
        self._lent = lent
        self._root = stage() / str(next(_numbers))
        self._root.mkdir(mode=0o500)
        os.chown(self._root, uid, uid)
        self._targets: list[Path] = []

    def add(self, source: int) -> Place:
        try:
            kept = os.fstatvfs(source).f_flag & (os.ST_RDONLY | os.ST_NOEXEC)
            target = self._target(directory=stat.S_ISDIR(os.fstat(source).st_mode))
            if is_lent(source, self._lent, self._uid):
                lend(source, self._uid, target)
                return Place(str(target), "bind", str(target))
            _mount(f"/proc/self/fd/{source}", target, None, _MS_BIND | _MS_REC)
            _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_NOSUID | _MS_NODEV | kept)
        finally:
            os.close(source)
        return Place(str(target), "bind", str(target))

    def layer(self, lower: Place, upper: Place) -> Place:
        target = self._target(directory=True)
        options = f"lowerdir={lower.path},upperdir={upper.path}/files,workdir={upper.path}/work"
        _mount("overlay", target, "overlay", _MS_NOSUID | _MS_NODEV, options)
        return Place(str(target), "bind", str(target))

    def layer_inside(self, lower: Place, upper: Place) -> Place:
        return self.layer(lower, upper)

    def open(self, place: Place) -> int:
        return open_linkless(Path(place.path))

    def _target(self, *, directory: bool) -> Path:
        target = self._root / str(len(self._targets))
        if directory:
            target.mkdir()
        else:
            target.touch()
        self._targets.append(target)
        return target

    def close(self) -> None:
        for target in reversed(self._targets):
            _libc.umount2(os.fsencode(target), _MNT_DETACH)
            if target.is_dir():
                target.rmdir()
            else:
                target.unlink()
        self._root.rmdir()


def stage() -> Path:
    """The directory, private to the calling thread, that sources are bound below; open them after this call."""
    return _stage(threading.get_native_id())


def can_stage() -> bool:
    """Whether this root may mount at all; in an unprivileged container it may not."""
    try:
        stage()
    except OSError:
        return False
    return True


@cache
def _stage(_thread: int) -> Path:
    with _changing_common():
        clone = _clone_common()
        _check(_libc.unshare(_CLONE_NEWNS), "unshare")
        _mount(None, Path("/"), None, _MS_REC | _MS_SLAVE)
        if clone is not None:
            _put_common(clone)
    place = _claim(_parent())
    _mount("tmpfs", place, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0711")
    atexit.register(_leave, place, os.getpid())
    return place


def common() -> Path:
    """Where a mount is seen by every thread and process of the runner on this host, whichever makes it."""
    return _parent() / "runner-volumes"


def open_common() -> None:
    """Make ``common`` what it is, once a boot. Raises ``OSError`` where mounts are refused."""
    with _changing_common():
        _open_common()


def _open_common() -> None:
    place = common()
    place.mkdir(mode=0o711, exist_ok=True)
    if not place.is_mount():
        _mount("tmpfs", place, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=0711,size={_COMMON_BYTES}")
    _mount(None, place, None, _MS_SHARED)


@contextmanager
def _changing_common() -> Iterator[None]:
    """Alone on this host: a mount made while a namespace gets its ``common`` would be missing there."""
    lock = os.open(common().with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _clone_common() -> int | None:
    """It and what is mounted there, to be put into another namespace; ``None`` where the kernel cannot do that."""
    try:
        _open_common()
        flags = _CLONE | _RECURSIVE | os.O_CLOEXEC
        return _check(_libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(common()), flags), "open_tree")
    except OSError:
        return None


def _put_common(clone: int) -> None:
    """In the place of the copy that came with the namespace, which would hear of others' mounts, but tell of none."""
    place = os.fsencode(common())
    _libc.umount2(place, _MNT_DETACH)
    try:
        _check(_libc.syscall(_MOVE_MOUNT, clone, b"", _AT_FDCWD, place, _FROM_EMPTY_PATH), "move_mount")
    finally:
        os.close(clone)


def mount_in_common(device: str, place: Path, kind: str, options: str) -> None:
    """Mount a block device for everybody, unless something is mounted there. Raises ``OSError``."""
    with _changing_common():
        _open_common()
        place.parent.mkdir(mode=0o711, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        if not place.is_mount():
            _mount(device, place, kind, _MS_NOSUID | _MS_NODEV | _MS_NOATIME, options)


def unmount(place: Path) -> None:
    """All that is mounted on a place, though it be in use; then it goes when it is not."""
    while _libc.umount2(os.fsencode(place), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
        pass


def sweep() -> None:
    """Remove the directories of stages whose processes have died; the mounts went with them."""
    _sweep(_parent())


def _sweep(parent: Path) -> None:
    for other in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # held, or removed by another
            held = os.open(other, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                other.rmdir()
            finally:
                os.close(held)


def _parent() -> Path:
    return Path("/run" if os.access("/run", os.W_OK) else "/tmp")


def _claim(parent: Path) -> Path:
    """A fresh directory, locked as long as this process lives; those that a killed one left are removed."""
    _sweep(parent)
    while True:
        place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.fstat(lock).st_nlink:  # else taken for a left one before it was locked
            return place
        os.close(lock)


def _leave(place: Path, owner: int) -> None:
    if os.getpid() != owner:  # a fork of ours shares the namespace
        return
    _libc.umount2(os.fsencode(place), _MNT_DETACH)
    with suppress(FileNotFoundError):
        place.rmdir()


def _mount(source: str | None, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, str(target), kind)]
    data = None if options is None else os.fsencode(options)
    _check(_libc.mount(*words, ctypes.c_ulong(flags), data), f"mount {target}")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result
