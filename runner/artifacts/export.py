"""Export the evidence of a run as a folder or one file that can be kept, sent and checked without the product.

It consists of the regular files of the run's directory, each reached through no link, and the ``added`` ones:
``report.md``, the log of an incident. Secrets are redacted once more, since by now this host may know some that it did
not know then. ``EXPORT.json`` lists the files, their names, what was redacted in each, and what was left out and why;
``SHA256SUMS`` has all checksums as ``sha256sum --check`` reads it. Equal files make an equal archive. Blocking; call it
in a worker thread.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO

from trio.from_thread import check_cancelled

from runner.core.errors import HostRefused, TargetExists, UsageError
from runner.core.redact import GZIP, Redactor
from runner.core.sanitize import escape_unprintable
from runner.plan.model import Json
from runner.safefs import trees
from runner.safefs.safe_open import open_beneath

FORMAT = "runner/export/v1"
CONTENTS = "EXPORT.json"
SUMS = "SHA256SUMS"
MAX_BYTES = 1 << 30  # bytes of all files together
MAX_FILE_BYTES = 256 << 20
_MEMORY = 8 << 20  # bytes of a file on its way that are not put on a disk
_CHUNK = 1 << 20
_SUFFIXES = (".tar.gz", ".tgz")
_OTHER_SUFFIXES = (".7z", ".bz2", ".gz", ".rar", ".tar", ".tbz", ".txz", ".xz", ".zip", ".zst")  # which are not written
_NAME_BYTES = 200
_UNSAFE = re.compile(r'[<>:"\\|?*]')  # what a name must not have somewhere

Opener = Callable[[], IO[bytes]]  # a file from its start; raises ``OSError``


@dataclass(frozen=True)
class OmittedFile:
    """A file that was left out. ``name`` is relative to the run's directory, and printable."""

    name: str
    why: str


@dataclass(frozen=True)
class ExportResult:
    """The result of an export. ``redacted`` are the files in which secrets were redacted."""

    to: Path
    files: int
    size: int
    redacted: tuple[str, ...]
    left_out: tuple[OmittedFile, ...]


Put = Callable[[str, IO[bytes], int], None]


def export(
    directory: Path,
    to: Path,
    *,
    name: str,
    at: int,
    redactor: Redactor,
    added: Mapping[str, Opener],
) -> ExportResult:
    """Copy a run's directory, and the ``added`` files by their names there, to the new folder or ``.tar.gz`` file
    ``to``.

    For the owner only. In an archive everything lies below ``name`` and has the time ``at``, seconds since the epoch.
    Raises ``TargetExists`` when ``to`` exists; ``HostRefused`` when the disk fails; ``UsageError`` for the name of
    another kind of archive. Nothing is left after an error or a cancellation.
    """
    is_archive = to.name.lower().endswith(_SUFFIXES)
    if not is_archive and to.name.lower().endswith(_OTHER_SUFFIXES):
        raise UsageError(
            f"`{to.name}` cannot be written as its name says", hint="use a name that ends in .tar.gz, or a folder"
        )
    sources, left_out = list_files(directory)
    contents = _Archive(
        redactor, [OmittedFile(redactor.text(escape_unprintable(one.name)), one.why) for one in left_out]
    )
    sources |= added
    target = _archive(to, name, at) if is_archive else _folder(to)
    try:
        with target as put:
            for source in sorted(sources, key=os.fsencode):
                check_cancelled()
                contents.take(source, sources[source], put)
            contents.finish(name, put)
    except FileExistsError as error:
        raise TargetExists(f"`{to}` exists already", hint="name another place") from error
    except OSError as error:
        raise HostRefused.of(error) from error
    return contents.exported(to)


def list_files(directory: Path) -> tuple[dict[str, Opener], list[OmittedFile]]:
    """List the regular files, and what else is not a directory."""
    files: dict[str, Opener] = {}
    left_out: list[OmittedFile] = []
    for folder, folders, names in os.walk(directory):
        check_cancelled()
        for name in (*folders, *names):
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, directory)
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode):
                files[relative] = _opener(directory, relative)
            elif not stat.S_ISDIR(mode):
                left_out.append(OmittedFile(relative, "a link" if stat.S_ISLNK(mode) else "not a regular file"))
    return files, sorted(left_out, key=lambda one: os.fsencode(one.name))


def _opener(directory: Path, relative: str) -> Opener:
    return lambda: open(open_beneath(directory, relative), "rb")


class _Archive:
    """The files that have been put so far."""

    def __init__(self, redactor: Redactor, left_out: list[OmittedFile]) -> None:
        self._redactor = redactor
        self._left_out = left_out
        self._files: list[dict[str, Json]] = []
        self._sums: list[str] = []
        self._names: set[str] = {CONTENTS.casefold(), SUMS.casefold()}
        self._size = 0

    def take(self, source: str, opener: Opener, put: Put) -> None:
        """Put a file, or note why it is left out."""
        shown = self._redactor.text(escape_unprintable(source))
        with opener() as file, SpooledTemporaryFile(max_size=_MEMORY) as clean:
            size = _size(file)  # what a run under way adds after this is not in it
            if why := self._refused(source, file, size):
                self._left_out.append(OmittedFile(shown, why))
                return
            found, text = _copy_redacted(file, size, clean.write, self._redactor)
            if found and not text:
                self._left_out.append(OmittedFile(shown, f"not text, and shows {', '.join(sorted(found))}"))
                return
            name = self._named(self._redactor.text(source))
            entry: dict[str, Json] = {"name": name, **({"was": shown} if shown != name else {})}
            self._put(entry | ({"redacted": list[Json](sorted(found))} if found else {}), clean, put)

    def finish(self, run: str, put: Put) -> None:
        document: Json = {
            "format": FORMAT,
            "run": run.removeprefix("run-"),
            "files": list(self._files),
            "left_out": [{"name": one.name, "why": one.why} for one in self._left_out],
        }
        text = json.dumps(document, indent=1, ensure_ascii=False).encode(errors="backslashreplace")
        self._put({"name": CONTENTS}, BytesIO(text + b"\n"), put)
        sums = "".join(self._sums).encode()
        put(SUMS, BytesIO(sums), len(sums))

    def exported(self, to: Path) -> ExportResult:
        redacted = tuple(str(entry["name"]) for entry in self._files if "redacted" in entry)
        return ExportResult(
            to=to, files=len(self._sums), size=self._size, redacted=redacted, left_out=tuple(self._left_out)
        )

    def _refused(self, source: str, file: IO[bytes], size: int) -> str | None:
        if size > MAX_FILE_BYTES or self._size + size > MAX_BYTES:
            return f"{size} bytes are too many"
        if source.endswith(".bundle"):
            return "packed by git, so that it cannot be searched; `runner runs branch --commits` delivers it"
        return _archive_fault(source, file, self._redactor)

    def _put(self, entry: dict[str, Json], content: IO[bytes], put: Put) -> None:
        size = _size(content)
        digest = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto
        content.seek(0)
        put(str(entry["name"]), content, size)
        self._sums.append(f"{digest}  {entry['name']}\n")
        self._files.append(entry | {"bytes": size, "sha256": digest})
        self._size += size

    def _named(self, source: str) -> str:
        """Return a name that every system can write, no terminal interprets, and no other file has."""
        name = "/".join(_safe_name(part) for part in source.split("/"))
        stem, number = name, 1
        while name.casefold() in self._names:
            number += 1
            name = f"{stem}~{number}"
        self._names.add(name.casefold())
        return name


def _safe_name(part: str) -> str:
    plain = "".join(character if character.isprintable() else "_" for character in _UNSAFE.sub("_", part))
    short = plain.encode()[:_NAME_BYTES].decode(errors="ignore")
    return short.rstrip(". ") or "_"


def _size(file: IO[bytes]) -> int:
    """Return the size of a file; leaves it at its start."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    return size


def _copy_redacted(
    file: IO[bytes], size: int, write: Callable[[bytes], object], redactor: Redactor
) -> tuple[set[str], bool]:
    """Copy the first ``size`` bytes without secrets; return the names of these, and whether it is text."""
    stream, left, text = redactor.stream(), size, True
    while left and (chunk := file.read(min(_CHUNK, left))):
        check_cancelled()
        left -= len(chunk)
        text = text and b"\0" not in chunk
        write(stream.feed(chunk))
    write(stream.end())
    return stream.found, text


def _archive_fault(source: str, file: IO[bytes], redactor: Redactor) -> str | None:
    """Return why an archive is left out: it has secrets, or cannot be searched. Leaves ``file`` at its start."""
    is_packed = file.read(len(GZIP)) == GZIP
    file.seek(0)
    if not is_packed and not source.endswith(_SUFFIXES):
        return None
    try:
        found = redactor.names_packed(file, check_cancelled, MAX_FILE_BYTES)
    except ValueError as error:
        return f"an archive {error}"
    file.seek(0)
    return f"an archive that shows {', '.join(sorted(found))}" if found else None


@contextmanager
def _folder(to: Path) -> Iterator[Put]:
    to.mkdir(mode=0o700)

    def put(name: str, content: IO[bytes], size: int) -> None:
        path = to / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            while chunk := content.read(_CHUNK):
                check_cancelled()
                file.write(chunk)

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
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.GNU_FORMAT) as tar,
        ):

            def put(name: str, content: IO[bytes], size: int) -> None:
                entry = tarfile.TarInfo(f"{top}/{name}")
                entry.size, entry.mtime, entry.mode = size, at, 0o600
                tar.addfile(entry, _Cancellable(content))

            yield put
    except BaseException:
        to.unlink()
        raise


class _Cancellable(io.RawIOBase):
    """A file whose reading can be cancelled."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content

    def read(self, size: int = -1) -> bytes:
        check_cancelled()
        return self._content.read(size)
