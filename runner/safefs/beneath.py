"""Reaching files below a directory that an agent can write: by descriptor, never through a link.

``openat2`` refuses links, mount points and leaving in one step, whatever is renamed meanwhile; where the
kernel or a seccomp filter refuses it, a path is opened name by name with ``O_NOFOLLOW``. Only the root's
own last name is guarded: what lies above it must not be the agent's. All calls block: use a thread.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_OPENAT2 = 437  # the same on every architecture
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 1, 2, 4, 8

Opener = Callable[[int, str, int], int]


@contextmanager
def opened(root: Path) -> Iterator[int]:
    """A descriptor of the directory ``root`` for the block. Raises ``OSError``; ``ENOTDIR`` for a link."""
    descriptor = os.open(root, DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_beneath(root: Path, relative: str) -> int:
    """A descriptor of the file ``relative`` to ``root``, read-only, non-blocking, reached through no link.

    Raises ``OSError`` as ``open`` does; ``ELOOP`` or ``ENOTDIR`` for a link on the way, ``EXDEV`` for a
    path that is absolute or holds ``..``.
    """
    if relative.startswith("/") or ".." in relative.split("/"):
        raise OSError(errno.EXDEV, "the path leaves its root", relative)
    with opened(root) as top:
        return opener()(top, relative, FILE)


def read_beneath(root: Path, relative: str, limit: int) -> bytes:
    """The regular file ``relative`` to ``root``. Raises as ``open_beneath``; ``EFBIG`` above ``limit`` bytes."""
    descriptor = open_beneath(root, relative)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", relative)
        text = bytearray()
        while len(text) <= limit and (chunk := os.read(descriptor, min(1 << 20, limit + 1 - len(text)))):
            text += chunk
    finally:
        os.close(descriptor)
    if len(text) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit} bytes", relative)
    return bytes(text)


@cache
def opener() -> Opener:
    """How this kernel opens a relative path below a descriptor without following a link."""
    with opened(Path("/")) as top:
        try:
            os.close(open_in_kernel(top, ".", DIRECTORY))
        except OSError:  # ENOSYS before Linux 5.6, EPERM under older seccomp profiles
            return open_by_name
    return open_in_kernel


def open_in_kernel(top: int, relative: str, flags: int) -> int:
    """``openat2``, which refuses links, mount points and leaving in one step."""
    import ctypes  # 10 ms that only a run needs

    how = struct.pack("QQQ", flags, 0, _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH)
    descriptor: int = _libc().syscall(_OPENAT2, top, os.fsencode(relative), how, ctypes.c_size_t(len(how)))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), relative)
    return descriptor


def open_by_name(top: int, relative: str, flags: int) -> int:
    """The same in steps; a mount of the same file system is not noticed."""
    *above, last = relative.split("/")
    holder = os.dup(top)
    try:
        for name in above:
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=holder)
            os.close(holder)
            holder = below
        return os.open(last, flags, dir_fd=holder)
    finally:
        os.close(holder)


@cache
def _libc() -> ctypes.CDLL:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)
