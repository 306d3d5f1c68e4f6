"""A directory of one user shown to another as his own: what he makes there belongs to its owner on the disk.

The kernel does the mapping, for one user and one group, on a mount that only one opening has. Nothing on the disk
changes its owner for it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.sandbox import child_process

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CLONE, _CLOEXEC, _EMPTY_PATH, _FROM_EMPTY_PATH = 0x1, os.O_CLOEXEC, 0x1000, 0x4
_IDMAP, _NO_SUID, _NO_DEVICES = 0x100000, 0x2, 0x4
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)


def is_lent(directory: int, lent: Path | None, uid: int) -> bool:
    """Whether an open directory is the one that is lent to ``uid``, whose own it is not."""
    found = os.fstat(directory)
    return lent is not None and found.st_uid != uid and os.path.samestat(found, lent.stat())


def lend(directory: int, uid: int, target: Path) -> None:
    """Mount an open directory at ``target`` as if all that its owner and group have in it were those of ``uid``.

    What is mounted below it is not shown. Raises ``OSError`` where the kernel or the file system cannot do it.
    """
    mount = mapped(directory, uid)
    try:
        words = (mount, b"", _AT_FDCWD, os.fsencode(target), _FROM_EMPTY_PATH)
        _check(_libc.syscall(_MOVE_MOUNT, *words), "move_mount")
    finally:
        os.close(mount)


def why_not_lent(directory: int, uid: int) -> str | None:
    """Why a directory cannot be lent to a user; ``None`` when it can be."""
    try:
        os.close(mapped(directory, uid))
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def mapped(directory: int, uid: int) -> int:
    """A mount of an open directory as ``lend`` says, that is nowhere yet; the caller closes it. Raises ``OSError``."""
    owner = os.fstat(directory)
    name = os.fsencode(f"/proc/self/fd/{directory}")
    mount: int = _check(_libc.syscall(_OPEN_TREE, _AT_FDCWD, name, _CLONE | _CLOEXEC), "open_tree")
    try:
        with child_process.user_namespace((owner.st_uid, uid), (owner.st_gid, uid)) as namespace:
            attributes = struct.pack("QQQQ", _IDMAP | _NO_SUID | _NO_DEVICES, 0, 0, namespace)
            words = (mount, b"", _EMPTY_PATH, attributes, len(attributes))
            _check(_libc.syscall(_MOUNT_SETATTR, *words), "mount_setattr")
    except OSError:
        os.close(mount)
        raise
    return mount


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Make what this thread makes on a disk meanwhile belong to ``uid``; a mount may know that user, and not us."""
    _libc.setfsgid(uid)
    _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result
