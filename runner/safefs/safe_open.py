"""Opening files of trees that somebody hostile may write: by descriptor, never through a link.

``openat2`` refuses links, mount points and leaving the root in one step, whatever is renamed meanwhile; where the
kernel or a seccomp filter refuses ``openat2``, a path is opened name by name. Only the last name of a root is guarded:
whoever writes the tree must not be able to change what lies above it. All calls block: use a thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from runner.core.errors import ProtectedLink

FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Opener = Callable[[int, str, int], int]


@contextmanager
def open_directory(root: Path) -> Iterator[int]:
    """Open the directory ``root`` for the block. Raises ``OSError``; ``ENOTDIR`` for a link."""
    descriptor = os.open(root, DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_linkless(path: Path) -> int:
    """Open an absolute path as ``O_PATH``; the caller closes it.

    Raises ``ProtectedLink`` for a symbolic link anywhere in it, and ``OSError`` for what is not there.
    """
    top = os.open("/", PATH | os.O_DIRECTORY)
    try:
        return open_path(top, *path.parts[1:])
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        link = Path("/", error.filename)
        message, hint = f"`{link}` is a symbolic link", f"name the real path: `{link.resolve()}`"
        raise ProtectedLink(message, hint=hint) from error
    finally:
        os.close(top)


def open_path(top: int, *names: str) -> int:
    """Open names one below the other as ``O_PATH``, from a descriptor on, entering what is mounted there.

    Raises ``OSError``; ``ELOOP`` for a symbolic link, whose path is then its ``filename``.
    """
    descriptor = os.dup(top)
    for position, name in enumerate(names, start=1):
        try:
            below = os.open(name, PATH, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = below
        if stat.S_ISLNK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), "/".join(names[:position]))
    return descriptor


def open_beneath(root: Path, relative: str) -> int:
    """Open the file ``relative`` to ``root``, read-only, non-blocking, through no link.

    Raises ``OSError`` as ``open`` does; ``ELOOP`` or ``ENOTDIR`` for a link on the way, ``EXDEV`` for a
    path that is absolute or holds ``..``.
    """
    if relative.startswith("/") or ".." in relative.split("/"):
        raise OSError(errno.EXDEV, "the path leaves its root", relative)
    with open_directory(root) as top:
        return opener()(top, relative, FILE)


def read_beneath(root: Path, relative: str, limit: int) -> bytes:
    """Read the regular file ``relative`` to ``root``. Raises as ``open_beneath``; ``EFBIG`` above ``limit`` bytes."""
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
    """Choose how to open a relative path below a descriptor: ``open_in_kernel`` where the kernel can, else by name."""
    with open_directory(Path("/")) as top:
        try:
            os.close(open_in_kernel(top, ".", DIRECTORY))
        except OSError:  # ENOSYS before Linux 5.6, EPERM under older seccomp profiles
            return open_by_name
    return open_in_kernel


def open_in_kernel(top: int, relative: str, flags: int) -> int:
    """Open through ``openat2``, which refuses links, mount points and leaving in one step."""
    from runner.safefs import linux

    resolve = linux.RESOLVE_NO_XDEV | linux.RESOLVE_NO_MAGICLINKS | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_BENEATH
    return linux.openat2(top, relative, flags, resolve)


def open_by_name(top: int, relative: str, flags: int) -> int:
    """Open name by name; unlike in the kernel, mount points on the way are entered."""
    *above, last = relative.split("/")
    holder = open_path(top, *above)
    try:
        return os.open(last, flags, dir_fd=holder)
    finally:
        os.close(holder)
