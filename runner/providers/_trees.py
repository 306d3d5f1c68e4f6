"""Work on whole trees that an agent may have shaped: never through a link, however deep, whatever its modes.

Blocking; call it in a worker thread, and only while nothing runs in the tree.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove(top: Path) -> list[str]:
    """Remove a tree; what could not be removed, with its reason. A tree that is not there is removed.

    Directories found inside are first moved up to the top, so that neither depth nor the length of a
    path matters, and a few descriptors are enough.
    """
    try:
        os.chmod(top, 0o700)
    except FileNotFoundError:
        return []
    fd = os.open(top, _FLAGS)
    left: list[str] = []
    number = 0
    unguessed = token_hex(8)
    try:
        waiting = [entry.name for entry in os.scandir(fd)]
        while waiting:
            name = waiting.pop()
            try:
                if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=fd)
                    continue
                for inner in _empty(fd, name):
                    number += 1
                    raised = f".{unguessed}-{number}"
                    os.rename(f"{name}/{inner}", raised, src_dir_fd=fd, dst_dir_fd=fd)
                    waiting.append(raised)
                os.rmdir(name, dir_fd=fd)
            except OSError as error:
                left.append(f"{os.path.join(top, name)!r}: {error.strerror}")
    finally:
        os.close(fd)
    if not left:
        os.rmdir(top)
    return left


def _empty(top: int, name: str) -> Iterator[str]:
    """Unlink everything in a directory but its directories, and make those ready to be moved."""
    os.chmod(name, 0o700, dir_fd=top)
    fd = os.open(name, _FLAGS, dir_fd=top)
    try:
        for entry in list(os.scandir(fd)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=fd)
                yield entry.name
            else:
                os.unlink(entry.name, dir_fd=fd)
    finally:
        os.close(fd)


def give(top: Path, uid: int) -> None:
    """Make everything in a tree belong to ``uid``. A file with several names that is not its own is left alone."""
    fd = os.open(top, _FLAGS)
    try:
        own(fd, uid)
        levels = [_inner(fd, uid)]
        # Up again by "..": one descriptor is open however deep the tree is.
        while levels:
            if levels[-1]:
                inner = os.open(levels[-1].pop(), _FLAGS, dir_fd=fd)
                levels.append(_inner(inner, uid))
            else:
                levels.pop()
                inner = os.open("..", _FLAGS, dir_fd=fd)
            os.close(fd)
            fd = inner
    finally:
        os.close(fd)


def own(path: Path | int, uid: int) -> None:
    """Make one entry belong to ``uid`` and its group; an ordinary user keeps the group that it has."""
    os.chown(path, uid, uid if os.geteuid() == 0 else -1)


def _inner(fd: int, uid: int) -> list[str]:
    """Give the entries of one directory; the names of its directories."""
    directories = []
    for entry in os.scandir(fd):
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            directories.append(entry.name)
        elif stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            continue
        if found.st_uid != uid:
            os.chown(entry.name, uid, uid, dir_fd=fd, follow_symlinks=False)
    return directories
