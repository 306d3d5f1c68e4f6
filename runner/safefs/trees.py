"""Operations on whole trees that an agent may have written: never through a link, at any depth, whatever the modes.

Blocking; call it in a worker thread, and only while nothing runs in the tree.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from runner.safefs.safe_open import DIRECTORY, open_directory

FIRST_UID = 0x70000000  # above what distributions, containers and directories hand out
UIDS = 1 << 24


@cache
def can_chown() -> bool:
    """Tell whether this process is root over the users of workspaces.

    Root in a user namespace of one user, as in ``unshare -r`` or a small container, is not, and is treated as the
    ordinary user that it is outside.
    """
    if os.geteuid() != 0:
        return False
    maps = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= FIRST_UID and first + count >= FIRST_UID + UIDS for first, _, count in maps)


def flush(volume: Path) -> None:
    """Write a mounted file system to its disk. Raises ``OSError`` for writes that failed, also earlier ones."""
    from runner.safefs import linux

    with open_directory(volume) as directory:
        linux.syncfs(directory)


def remove(top: Path) -> list[str]:
    """Remove a tree, and return what could not be removed, with reasons. A missing tree is no error.

    File systems that are mounted in it stay. Directories inside are first moved up to the top, so that neither depth
    nor path length matters, and a few descriptors are enough.
    """
    try:
        fd = _open_writable(top)
    except FileNotFoundError:
        return []
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
                within = _open_writable(name, fd)
                try:
                    _check_same(within, fd)
                    for inner in _empty(within):
                        number += 1
                        raised = f".{unguessed}-{number}"
                        os.rename(inner, raised, src_dir_fd=within, dst_dir_fd=fd)
                        waiting.append(raised)
                finally:
                    os.close(within)
                os.rmdir(name, dir_fd=fd)
            except OSError as error:
                left.append(f"{os.path.join(top, name)!r}: {error.strerror}")
    finally:
        os.close(fd)
    if not left:
        os.rmdir(top)
    return left


def _empty(fd: int) -> Iterator[str]:
    """Unlink everything in a directory but its directories, and yield those once they can be moved."""
    for entry in list(os.scandir(fd)):
        if entry.is_dir(follow_symlinks=False):
            within = _open_writable(entry.name, fd)
            try:
                _check_same(within, fd)
            finally:
                os.close(within)
            yield entry.name
        else:
            os.unlink(entry.name, dir_fd=fd)


def _check_same(within: int, fd: int) -> None:
    if os.fstat(within).st_dev != os.fstat(fd).st_dev:
        raise OSError(errno.EBUSY, "another file system is mounted there")


def _open_writable(name: Path | str, above: int | None = None) -> int:
    """Open a directory after making it writable for its owner. ``chmod`` by name would follow a link."""
    found = os.open(name, os.O_PATH | DIRECTORY, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{found}", 0o700)
        return os.open(".", DIRECTORY, dir_fd=found)
    finally:
        os.close(found)


def chown_tree(top: Path, uid: int) -> None:
    """Make everything in a tree belong to ``uid``, but files with several names, which other trees may share."""
    with open_directory(top) as fd:
        chown(fd, uid)
    for fd, entries in walk(top):
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            if found.st_uid != uid and not (stat.S_ISREG(found.st_mode) and found.st_nlink > 1):
                os.chown(entry.name, uid, uid, dir_fd=fd, follow_symlinks=False)


def walk(top: Path) -> Iterator[tuple[int, list[os.DirEntry[str]]]]:
    """Yield each directory of a tree, open, with its entries.

    Goes up by "..", so that one descriptor is enough at any depth; nothing may move in the tree meanwhile.
    """
    fd = os.open(top, DIRECTORY)
    levels: list[list[str]] = []
    try:
        while True:
            entries = list(os.scandir(fd))
            yield fd, entries
            levels.append([entry.name for entry in entries if entry.is_dir(follow_symlinks=False)])
            while not levels[-1]:
                levels.pop()
                if not levels:
                    return
                fd = _replace(fd, "..")
            fd = _replace(fd, levels[-1].pop())
    finally:
        os.close(fd)


def _replace(directory: int, name: str) -> int:
    found = os.open(name, DIRECTORY, dir_fd=directory)
    os.close(directory)
    return found


def chown(path: Path | int, uid: int) -> None:
    """Make one entry belong to ``uid`` and the group of that number; for an ordinary user the group stays."""
    os.chown(path, uid, uid if can_chown() else -1)


MAX_COPY_BYTES = 256 << 20
MAX_COPY_FILES = 10_000
OWN_LOG = re.compile(r"triage_.*\.log", re.DOTALL)  # the runner's own, beside an agent's output


def copy_out(
    source: Path, to: Path, *, only: Collection[str] | None = None, but: Collection[str] = (), to_people: bool = False
) -> list[str]:
    """Copy the regular files of an untrusted tree into a directory, replacing files of the same name.

    With ``only``, entries of the top with other names are left out; the files with the paths ``but`` always are.

    Returns what was not copied, with reasons: links, special files, everything beyond the limits. With ``to_people``
    also names with control characters, and at the top names of the runner's own logs. Follows no link on either side:
    a link or directory in the way of a file stays, and is returned.
    """
    to.mkdir(parents=True, exist_ok=True)
    copier = _Copier(only, but, to_people=to_people)
    copier.copy(os.open(source, DIRECTORY), os.open(to, DIRECTORY), "")
    return copier.left_out


class _Copier:
    def __init__(self, only: Collection[str] | None, but: Collection[str], *, to_people: bool) -> None:
        self.left_out: list[str] = []
        self._only = only
        self._but = but
        self._to_people = to_people
        self._bytes = self._files = 0

    def copy(self, source: int, to: int, place: str) -> None:
        """Copy one directory and close both descriptors. Recursion is bounded by the limit on depth."""
        try:
            for entry in sorted(os.scandir(source), key=lambda e: e.name):
                name = f"{place}{entry.name}"
                if (self._only is not None and not place and name not in self._only) or name in self._but:
                    continue
                try:
                    unfit = _unfit(entry.name, place) if self._to_people else None
                    reason = unfit or self._entry(entry, source, to, name)
                except OSError as error:
                    reason = error.strerror
                if reason:
                    self.left_out.append(f"{name!r}: {reason}")
        finally:
            os.close(source)
            os.close(to)

    def _entry(self, entry: os.DirEntry[str], source: int, to: int, name: str) -> str | None:
        if entry.is_dir(follow_symlinks=False):
            if name.count("/") >= 32:
                return "nested too deeply"
            if entry.name not in os.listdir(to):
                os.mkdir(entry.name, 0o755, dir_fd=to)
            self.copy(
                os.open(entry.name, DIRECTORY, dir_fd=source), os.open(entry.name, DIRECTORY, dir_fd=to), f"{name}/"
            )
            return None
        if not entry.is_file(follow_symlinks=False):
            return "not a regular file"
        size = entry.stat(follow_symlinks=False).st_size
        if self._files == MAX_COPY_FILES or self._bytes + size > MAX_COPY_BYTES:
            return f"over the limit of {MAX_COPY_FILES} files or {MAX_COPY_BYTES >> 20} MiB"
        self._files += 1
        self._bytes += _copy_file(entry.name, source, to, MAX_COPY_BYTES - self._bytes)
        return None


def _unfit(name: str, place: str) -> str | None:
    if not name.isprintable():
        return "its name is not plain text"
    return "the runner's own logs have such names" if not place and OWN_LOG.fullmatch(name) else None


def _copy_file(name: str, source: int, to: int, limit: int) -> int:
    """Copy through a new file that is renamed into place, so that readers never see half of it; returns its size."""
    half = f".{token_hex(8)}"
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
    with open(descriptor, "rb") as reading:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "changed while it was copied")
        made = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=to)
        try:
            with open(made, "wb") as writing:
                size = _copy_bytes(reading, writing, limit)
            os.rename(half, name, src_dir_fd=to, dst_dir_fd=to)
        except OSError:
            os.unlink(half, dir_fd=to)
            raise
    return size


def _copy_bytes(reading: BinaryIO, writing: BinaryIO, limit: int) -> int:
    size = 0
    while chunk := reading.read(1 << 20):
        size += len(chunk)
        if size > limit:
            raise OSError(errno.EFBIG, "grew while it was copied")
        writing.write(chunk)
    return size


def bytes_on_disk(top: Path) -> int:
    """Return the disk usage of a tree, counting files with several names once and following no link."""
    seen: set[tuple[int, int]] = set()
    size = 0
    for status in _statuses(top):
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
        size += status.st_blocks * 512
    return size


def _statuses(top: Path) -> Iterator[os.stat_result]:
    waiting = [str(top)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    yield entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:  # a file, or a tree so deep that its path is too long: this is a figure, not a proof
            continue
