"""The evidence of a run as a folder or one file that can be kept, sent and checked without the product.

Regular files of the run's directory only, each reached through no link, with their checksums in ``SHA256SUMS`` as
``sha256sum --check`` reads it. Equal files make an equal archive. Blocking; call it in a worker thread.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from trio.from_thread import check_cancelled

from runner import trees
from runner.beneath import open_beneath
from runner.errors import HostRefused, TargetExists

SUMS = "SHA256SUMS"
_CHUNK = 1 << 20
_SUFFIXES = (".tar.gz", ".tgz")


@dataclass(frozen=True)
class Exported:
    """``left_out``: links and special files, relative to the run's directory."""

    to: Path
    files: int
    size: int
    left_out: tuple[str, ...]


Put = Callable[[str, BinaryIO, int], str]  # a file's name, content and size; returns its checksum


def export(directory: Path, to: Path, *, name: str, at: int) -> Exported:
    """Copy a run's directory to the new folder or ``.tar.gz`` file ``to``, for the owner only.

    In an archive everything lies below ``name`` and has the time ``at``, seconds since the epoch. What is there
    already is left alone: ``TargetExists``. Raises ``HostRefused`` and leaves nothing when the disk does not take it,
    and nothing is left either when cancelled.
    """
    files, left_out = _listed(directory)
    target = _archive(to, name, at) if to.name.endswith(_SUFFIXES) else _folder(to)
    total = 0
    try:
        with target as put:
            sums = []
            for file in files:
                with open(open_beneath(directory, file), "rb") as stream:
                    size = os.fstat(stream.fileno()).st_size  # what a run under way adds after this is not in it
                    sums.append(_sum_line(put(file, stream, size), file))
                total += size
            text = os.fsencode("".join(sums))
            put(SUMS, BytesIO(text), len(text))
    except FileExistsError as error:
        raise TargetExists(f"`{to}` is there already", hint="name another place") from error
    except OSError as error:
        raise HostRefused.of(error) from error
    return Exported(to, len(files), total, tuple(left_out))


def _listed(directory: Path) -> tuple[list[str], list[str]]:
    """The regular files, and what else is no directory."""
    files: list[str] = []
    left_out: list[str] = []
    for folder, folders, names in os.walk(directory):
        check_cancelled()
        for name in (*folders, *names):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if not stat.S_ISDIR(mode):
                (files if stat.S_ISREG(mode) else left_out).append(os.path.relpath(path, directory))
    return sorted(files, key=os.fsencode), sorted(left_out, key=os.fsencode)


@contextmanager
def _folder(to: Path) -> Iterator[Put]:
    to.mkdir(mode=0o700)

    def put(name: str, content: BinaryIO, size: int) -> str:
        path = to / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        reading = _Reading(content, size)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            while chunk := reading.read(_CHUNK):
                file.write(chunk)
        return reading.digest.hexdigest()

    try:
        yield put
    except BaseException:
        trees.remove(to)
        raise


@contextmanager
def _archive(to: Path, top: str, at: int) -> Iterator[Put]:
    descriptor = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with (
            open(descriptor, "wb") as file,
            gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=at) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar,
        ):

            def put(name: str, content: BinaryIO, size: int) -> str:
                entry = tarfile.TarInfo(f"{top}/{name}")
                entry.size, entry.mtime, entry.mode = size, at, 0o600
                reading = _Reading(content, size)
                tar.addfile(entry, reading)
                return reading.digest.hexdigest()

            yield put
    except BaseException:
        to.unlink()
        raise


class _Reading:
    """A file's first ``size`` bytes, hashed as they are read."""

    def __init__(self, content: BinaryIO, size: int) -> None:
        self.digest = hashlib.sha256()
        self._content = content
        self._left = size

    def read(self, size: int = -1) -> bytes:
        check_cancelled()
        wanted = self._left if size < 0 else min(size, self._left)
        chunk = self._content.read(wanted)
        if wanted and not chunk:
            raise OSError(errno.EIO, "a file became shorter meanwhile")
        self._left -= len(chunk)
        self.digest.update(chunk)
        return chunk


def _sum_line(digest: str, name: str) -> str:
    """As ``sha256sum`` writes it: an odd name is escaped, which a backslash in front says."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n")
    return f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n"
