"""Trees that are kept and shown to others: made readable for all, then sealed.

A seal covers names, types, modes, sizes, link targets, inodes and times of change of everything in a tree. The kernel
sets a file's time of change at each write to it, so an equal seal means equal content, without reading any. A copy has
another seal.

Never through a link. Blocking; call it in a worker thread, and only while nothing runs in the tree.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from msgspec import Struct

from runner.safefs.trees import can_chown, walk


class Seal(Struct, frozen=True):
    """The digest of a tree's state, its number of files and their size."""

    digest: str
    files: int
    bytes: int


class SpecialFile(ValueError):
    """An entry of a tree is no file, directory or link; the text is its name."""


def open_to_all(top: Path) -> None:
    """Make everything in a tree this process's own, readable and writable for every user. Raises ``SpecialFile``."""
    _open_entry(top, None, top.lstat())
    for fd, entries in walk(top):
        for entry in entries:
            _open_entry(entry.name, fd, entry.stat(follow_symlinks=False))


def _open_entry(name: str | Path, directory: int | None, found: os.stat_result) -> None:
    if can_chown():
        os.chown(name, 0, 0, dir_fd=directory, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        os.chmod(name, 0o777, dir_fd=directory)
    elif stat.S_ISREG(found.st_mode):
        os.chmod(name, 0o777 if found.st_mode & 0o111 else 0o666, dir_fd=directory)
    else:
        raise SpecialFile(str(name))


def seal(top: Path, checkpoint: Callable[[], None] = lambda: None) -> Seal:
    """Return the seal of a tree, whose own name and place do not matter. Raises ``OSError``.

    ``checkpoint`` is called in each directory, and may raise.
    """
    parts: list[str] = []
    files = size = 0
    for fd, entries in walk(top):
        checkpoint()
        lines: list[str] = []
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            link = os.readlink(entry.name, dir_fd=fd) if stat.S_ISLNK(found.st_mode) else ""
            times = f"{found.st_mtime_ns} {found.st_ctime_ns}"
            lines.append(f"{entry.name}\0{link}\0{found.st_mode} {found.st_size} {times} {found.st_ino}")
            if stat.S_ISREG(found.st_mode):
                files += 1
                size += found.st_size
        lines.sort()
        parts.append("\0".join([str(os.fstat(fd).st_ino), *lines]))
    parts.sort()
    text = "\0\0".join(parts).encode("utf-8", "surrogateescape")
    return Seal(sha256(text).hexdigest(), files, size)
