"""Detect changes to protected paths by digests of names, modes, contents and link targets.

Paths are opened as ``runner.safefs.safe_open`` says, and read as a stream. Blocking; call it in a worker thread, and
only while nothing runs in the tree.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from runner.safefs import safe_open

MAX_READ = 1 << 30  # bytes; of what comes after, size and time of change stand for the content
_CHUNK = 1 << 20


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def digests(root: Path, paths: Iterable[str], *, checkpoint: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Digest what is at each path below ``root``; empty where there is nothing.

    ``checkpoint`` is called at each entry, and may raise to end this. For a path that cannot be reached without
    following a link, or cannot be read, the error is part of the digest.
    """
    with safe_open.open_directory(root) as top:
        return {path: _Content(top, checkpoint).digest(path.rstrip("/")) for path in paths}


class _Content:
    def __init__(self, top: int, checkpoint: Callable[[], None]) -> None:
        self._top = top
        self._open = safe_open.opener()
        self._checkpoint = checkpoint
        self._left = MAX_READ

    def digest(self, path: str) -> str:
        above, _, name = path.rpartition("/")
        try:
            holder = self._open(self._top, above or ".", safe_open.DIRECTORY)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"error {error.errno}"
        try:
            found = os.stat(name, dir_fd=holder, follow_symlinks=False)
        except FileNotFoundError:
            return ""
        finally:
            os.close(holder)
        hashed = sha256()
        waiting = [(path, found)]
        while waiting:
            here, found = waiting.pop()
            self._checkpoint()
            hashed.update(f"{here!r} {found.st_mode:o} ".encode(errors="surrogateescape"))
            try:
                waiting += reversed(self._entry(here, found, hashed))
            except OSError as error:
                hashed.update(f"error {error.errno}".encode())
        return hashed.hexdigest()

    def _entry(self, path: str, found: os.stat_result, hashed: _Hash) -> list[tuple[str, os.stat_result]]:
        """Add an entry to the digest; the entries in it, if it is a directory, by name."""
        if stat.S_ISLNK(found.st_mode):
            above, _, name = path.rpartition("/")
            holder = self._open(self._top, above or ".", safe_open.DIRECTORY)
            try:
                hashed.update(os.fsencode(os.readlink(name, dir_fd=holder)))
            finally:
                os.close(holder)
        elif stat.S_ISDIR(found.st_mode):
            fd = self._open(self._top, path, safe_open.DIRECTORY)
            try:
                with os.scandir(fd) as entries:
                    inner = [(f"{path}/{entry.name}", entry.stat(follow_symlinks=False)) for entry in entries]
            finally:
                os.close(fd)
            return sorted(inner, key=lambda entry: entry[0])
        elif stat.S_ISREG(found.st_mode):
            self._file(path, found, hashed)
        return []

    def _file(self, path: str, found: os.stat_result, hashed: _Hash) -> None:
        hashed.update(f"{found.st_size} ".encode())
        if found.st_size > self._left:
            hashed.update(f"{found.st_ino} {found.st_ctime_ns}".encode())
            return
        self._left -= found.st_size
        fd = self._open(self._top, path, safe_open.FILE)
        try:
            while chunk := os.read(fd, _CHUNK):
                hashed.update(chunk)
        finally:
            os.close(fd)
