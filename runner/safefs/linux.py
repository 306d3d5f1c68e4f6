"""Linux calls that Python has no function for: mounts, namespaces, ``openat2``, by ctypes.

Each raises ``OSError`` with the name of the call where a file name would be. Loading ctypes takes 10 ms, so modules
that are imported without a run import this one inside the functions that use it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_FS, CLONE_NEWNS, CLONE_NEWUSER = 0x200, 0x20000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_NOATIME = 0x2, 0x4, 0x20, 0x400
MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE, MS_SHARED = 0x1000, 0x4000, 1 << 18, 1 << 19, 1 << 20
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, _MOUNT_ATTR_IDMAP = 0x1, 0x2, 0x4, 0x100000
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 1, 2, 4, 8

# By number, since not every libc has functions for them; the numbers are the same on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_FROM_EMPTY_PATH, _MOVE_TO_EMPTY_PATH = 0x1, 0x4, 0x40
_MNT_DETACH, _UMOUNT_NOFOLLOW = 0x2, 0x8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmat.restype = ctypes.c_void_p


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), call)
    return result


def mount(target: Path, flags: int, *, source: str | None = None, kind: str | None = None, options: str = "") -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, str(target), kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(options)), f"mount {target}")


def unmount(target: Path) -> None:
    """Detach everything that is mounted on ``target``, even if it is in use; nothing mounted is no error."""
    while _libc.umount2(os.fsencode(target), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
        pass


def clone_mount(source: Path | int, *, recursive: bool) -> int:
    """Make a detached bind mount of a path or an open file; with ``recursive`` of what is mounted below it too."""
    directory, path, empty = (source, b"", _AT_EMPTY_PATH) if isinstance(source, int) else (_AT_FDCWD, bytes(source), 0)
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | empty | (_AT_RECURSIVE if recursive else 0)
    return _check(_libc.syscall(_OPEN_TREE, directory, path, flags), "open_tree")


def move_mount(detached: int, target: Path | int) -> None:
    """Attach a detached mount at a path or an open file."""
    directory, path = (target, b"") if isinstance(target, int) else (_AT_FDCWD, bytes(target))
    flags = _MOVE_FROM_EMPTY_PATH | (_MOVE_TO_EMPTY_PATH if not path else 0)
    _check(_libc.syscall(_MOVE_MOUNT, detached, b"", directory, path, flags), f"move_mount {target}")


def set_mount_attributes(mount: int, attributes: int, *, user_namespace: int | None = None) -> None:
    """Set attributes of an open mount and of all mounts below it, and map its users by ``user_namespace``."""
    if user_namespace is not None:
        attributes |= _MOUNT_ATTR_IDMAP
    wanted = struct.pack("4Q", attributes, 0, 0, user_namespace or 0)
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    _check(_libc.syscall(_MOUNT_SETATTR, mount, b"", flags, wanted, len(wanted)), "mount_setattr")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(namespace: int, kind: int) -> None:
    _check(_libc.setns(namespace, kind), "setns")


def openat2(directory: int, path: str, flags: int, resolve: int) -> int:
    how = struct.pack("QQQ", flags, 0, resolve)
    return _check(_libc.syscall(_OPENAT2, directory, os.fsencode(path), how, ctypes.c_size_t(len(how))), path)


def syncfs(directory: int) -> None:
    """Write a whole file system to its disk. Raises ``OSError`` also for earlier writes that failed."""
    _check(_libc.syncfs(directory), "syncfs")


@contextmanager
def files_owned_by(uid: int) -> Iterator[None]:
    """Make files that this thread creates in the block belong to ``uid``; a mount may know that user, and not ours."""
    _libc.setfsgid(uid)
    _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())


def share_page() -> int:
    """Make a page of memory that every user may attach by the returned number, until this process ends."""
    number = _check(_libc.shmget(0, 4096, 0o666), "shmget")
    _libc.shmat(number, None, 0)
    _libc.shmctl(number, 0, None)  # IPC_RMID: it goes with its last process
    return number
