"""Mounts that keep the protected paths of a tree in place.

A protected entry is bound read-only onto itself. Each directory above it is bound onto itself too, since a mount point
cannot be moved: otherwise ``mv a b`` would take the protected entry away and leave its name free. A missing path gets
an empty placeholder for the life of the sandbox. It has no permission bit and was last changed in the first second of
the epoch, unlike anything that a person has, so that one left behind by a crash is recognised.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

from msgspec import Struct

from runner.core.errors import ProtectedLink
from runner.safefs import linux, safe_open

_CHANGED = 1  # seconds since the epoch


class Kind(Enum):
    ANCESTOR = "ancestor"
    PRESENT = "present"
    MISSING_FILE = "missing file"
    MISSING_DIRECTORY = "missing directory"


class Guard(Struct, frozen=True):
    """A mount over ``path``, relative to the tree; ``source`` is the entry itself, an ``O_PATH`` descriptor."""

    path: str
    kind: Kind
    source: int

    @property
    def is_placeholder(self) -> bool:
        return self.kind in (Kind.MISSING_FILE, Kind.MISSING_DIRECTORY)


@contextmanager
def open_guards(tree: int, protected: Sequence[str]) -> Iterator[list[Guard]]:
    """Open the mounts that protect ``protected`` in the open directory ``tree``, outermost first.

    Placeholders are in the tree until the block ends. A ``source`` belongs to the block; duplicate it to keep it.
    Raises ``ProtectedLink`` for a path that leads through a symbolic link.
    """
    guards: dict[tuple[str, ...], Guard] = {}
    try:
        for path in sorted(protected):
            _add_guards(tree, path, guards)
        yield [guards[parts] for parts in sorted(guards)]
    finally:
        for parts in sorted(guards, reverse=True):
            guard = guards[parts]
            if guard.is_placeholder:
                parent = guards[parts[:-1]].source if len(parts) > 1 else tree
                _remove_placeholder(parent, parts[-1], only=os.fstat(guard.source).st_ino)
            os.close(guard.source)


def _add_guards(tree: int, path: str, guards: dict[tuple[str, ...], Guard]) -> None:
    parts = tuple(part for part in path.split("/") if part)
    at = tree
    for depth, name in enumerate(parts, start=1):
        here = parts[:depth]
        last = depth == len(parts)
        known = guards.get(here)
        if known and known.kind is not Kind.ANCESTOR:
            return
        if known and not last:
            at = known.source
            continue
        guard = _open_guard(at, name, "/".join(here), last=last, directory=not last or path.endswith("/"))
        if known:
            os.close(known.source)
        guards[here] = guard
        if guard.kind is not Kind.ANCESTOR:
            return
        at = guard.source


def _open_guard(parent: int, name: str, path: str, *, last: bool, directory: bool) -> Guard:
    try:
        fd = _open(parent, name)
    except FileNotFoundError:
        try:
            _make_placeholder(parent, name, directory=directory)
        except OSError as error:
            if error.errno != errno.EOVERFLOW:
                raise
            with linux.files_owned_by(os.fstat(parent).st_uid):  # an idmapped directory, which does not know root
                _make_placeholder(parent, name, directory=directory)
        return Guard(path, Kind.MISSING_DIRECTORY if directory else Kind.MISSING_FILE, _open(parent, name))
    found = os.fstat(fd)
    if stat.S_ISLNK(found.st_mode):
        os.close(fd)
        raise ProtectedLink(f"`{path}` is a symbolic link", hint="protect what it points to, or remove the link")
    if is_placeholder(found.st_mode, found.st_mtime, found.st_size):
        return Guard(path, Kind.MISSING_DIRECTORY if stat.S_ISDIR(found.st_mode) else Kind.MISSING_FILE, fd)
    # A file where a directory is expected blocks the protected path: it is protected itself.
    return Guard(path, Kind.PRESENT if last or not stat.S_ISDIR(found.st_mode) else Kind.ANCESTOR, fd)


def _open(parent: int, name: str) -> int:
    return os.open(name, safe_open.PATH, dir_fd=parent)


def _make_placeholder(parent: int, name: str, *, directory: bool) -> None:
    if directory:
        os.mkdir(name, mode=0, dir_fd=parent)
    else:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0, dir_fd=parent))
    os.utime(name, (_CHANGED, _CHANGED), dir_fd=parent, follow_symlinks=False)


def _remove_placeholder(parent: int, name: str, *, only: int | None = None) -> None:
    """Remove a placeholder, ``only`` if it has this inode: a late process would find those of the next sandbox."""
    with suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not is_placeholder(found.st_mode, found.st_mtime, found.st_size) or only not in (None, found.st_ino):
            return
        if stat.S_ISDIR(found.st_mode):
            os.rmdir(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)


def remove_placeholders(tree: Path) -> None:
    """Remove the placeholders that a killed runner left in a tree, in which nothing may run any more."""
    for _, directories, files, parent in os.fwalk(tree) if tree.is_dir() else ():
        for name in (*directories, *files):
            with suppress(OSError):  # a directory that is not empty is no placeholder
                _remove_placeholder(parent, name)


def is_placeholder(mode: int, seconds: float, size: int) -> bool:
    """Tell whether these are the mode with its type, the last change, and the size of a placeholder."""
    marked = stat.S_IMODE(mode) == 0 and seconds == _CHANGED
    return marked and (stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and size == 0))
