"""Trees of this host as tar streams to and from a place that shares no file with it. Blocking; call it in a thread.

What comes back was written by commands, and perhaps by a daemon that lies: names, depth, number and sizes are checked
before anything is written, and no link is followed. The tree that it is written to must be closed to everybody else.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from runner.core.errors import ProviderFailed

MAX_ENTRIES = 1_000_000
MAX_PATH = 4_000  # bytes; the kernel takes 4,095 with the place of the tree
_COMPARED = 1 << 20  # bytes of a file that is compared before it is written
_CHUNK = 1 << 20
_KEPT_MODE = 0o777  # commands cannot give a file more on any provider that has its own users


@dataclass(frozen=True)
class Source:
    """A tree of this host, or ``content``, that goes to ``name`` in an archive with the owner ``uid``.

    With ``only``, just the entries with these names relative to the tree go.
    """

    name: str
    path: Path
    uid: int
    mode: int | None = None
    content: bytes | None = None
    only: frozenset[str] | None = None


def write_tar(sources: Iterable[Source], out: IO[bytes]) -> None:
    """Write sources as one archive. Raises ``OSError``."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for source in sources:
            if source.content is not None:
                _add_content(archive, source)
            else:
                for path, name in _walk(source.path):
                    if source.only is None or name in source.only:
                        _add(archive, path, source.name + name, source.uid)


def _add_content(archive: tarfile.TarFile, source: Source) -> None:
    from io import BytesIO

    assert source.content is not None
    entry = tarfile.TarInfo(source.name)
    entry.mode, entry.uid, entry.gid, entry.size = source.mode or 0o644, source.uid, source.uid, len(source.content)
    archive.addfile(entry, BytesIO(source.content))


def _walk(top: Path) -> Iterator[tuple[str, str]]:
    """Yield everything in a tree, a directory before what is in it: the path, and ``/a/b`` or nothing for the top."""
    waiting = [(os.fspath(top), "")]
    while waiting:
        path, name = waiting.pop()
        yield path, name
        if stat.S_ISDIR(os.lstat(path).st_mode):
            waiting += [(entry.path, f"{name}/{entry.name}") for entry in os.scandir(path)]


def _add(archive: tarfile.TarFile, path: str, name: str, uid: int) -> None:
    found = os.lstat(path)
    entry = tarfile.TarInfo(name)
    entry.mode, entry.uid, entry.gid, entry.mtime = stat.S_IMODE(found.st_mode), uid, uid, int(found.st_mtime)
    if stat.S_ISREG(found.st_mode):
        entry.size = found.st_size
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            archive.addfile(entry, file)
        return
    if stat.S_ISDIR(found.st_mode):
        entry.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif stat.S_ISFIFO(found.st_mode):
        entry.type = tarfile.FIFOTYPE
    else:
        return  # sockets and devices of this host mean nothing elsewhere
    archive.addfile(entry)


def stamps(top: Path) -> dict[str, str]:
    """Return a text for each entry of a tree that differs once the entry was changed; no file is read."""
    found = {}
    for path, name in _walk(top):
        s = os.lstat(path)
        same = "" if stat.S_ISDIR(s.st_mode) else f" {s.st_ino} {s.st_size} {s.st_ctime_ns}"
        found[name] = f"{s.st_mode:o}{same}"
    return found


def read_tar(
    stream: IO[bytes], to: Path, *, most: int, without: frozenset[str] = frozenset(), check: Callable[[], None]
) -> None:
    """Make the directory ``to`` like the archive's one top directory; files that are the same already stay untouched.

    ``without`` are directories relative to the top that are left out when they are empty. ``check`` is called before
    each entry, and may raise. Raises ``ProviderFailed`` for an archive that nobody should write, and for more than
    ``most`` bytes.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|", errors="surrogateescape") as archive:
            _Receiver(to, most, without, check).receive(archive)
    except tarfile.TarError as error:
        raise ProviderFailed(f"the files of a workspace cannot be read: {error}") from error


class _Receiver:
    def __init__(self, to: Path, most: int, without: frozenset[str], check: Callable[[], None]) -> None:
        self._to = os.fspath(to)
        self._left = most
        self._most = most
        self._without = without
        self._check = check
        self._directories: dict[str, tuple[int, float]] = {}  # mode and time of each, which are set at the end
        self._seen: dict[str, set[str]] = {}  # the names in each directory
        self._files: set[str] = set()
        self._top = ""

    def receive(self, archive: tarfile.TarFile) -> None:
        for number, entry in enumerate(archive):
            self._check()
            if number == MAX_ENTRIES:
                raise ProviderFailed(f"a workspace holds more than {MAX_ENTRIES:,} files and directories")
            if self._seen:
                self._entry(archive, entry, self._below_top(entry.name))
            elif entry.isdir():
                self._directories[""], self._seen[""] = (entry.mode, entry.mtime), set()
                self._top = _relative(entry.name)
            else:
                raise ProviderFailed(f"the files of a workspace begin with no directory, but `{entry.name!r}`")
        if not self._directories:
            raise ProviderFailed("the files of a workspace are missing")
        self._remove_others()
        for name, (mode, seconds) in sorted(self._directories.items(), reverse=True):
            path = self._path(name)
            os.chmod(path, mode & _KEPT_MODE)
            os.utime(path, (seconds, seconds))

    def _below_top(self, name: str) -> str:
        """Return a name relative to the top: docker calls that by the last part of its path, podman by none."""
        found = _relative(name)
        if not self._top:
            return found
        top, _, below = found.partition("/")
        if top != self._top or not below:
            raise ProviderFailed(f"the files of a workspace have a second top, `{name!r}`")
        return below

    def _path(self, name: str) -> str:
        return f"{self._to}/{name}" if name else self._to

    def _entry(self, archive: tarfile.TarFile, entry: tarfile.TarInfo, name: str) -> None:
        parent, _, last = name.rpartition("/")
        names = self._seen.get(parent)
        if names is None or last in ("", ".", "..") or "\0" in name or last in names:
            raise ProviderFailed(f"a workspace has an impossible name: {name[-200:]!r}")
        if len(os.fsencode(self._path(name))) > MAX_PATH:
            raise ProviderFailed(f"a workspace nests directories deeper than {MAX_PATH:,} bytes: {name[-200:]!r}")
        path = self._path(name)
        if entry.isdir():
            _make_directory(path)
            self._directories[name], self._seen[name] = (entry.mode, entry.mtime), set()
        elif entry.isreg():
            self._left -= entry.size
            if entry.size < 0 or self._left < 0:
                raise ProviderFailed(f"a workspace holds more than {self._most >> 20} MiB")
            content = archive.extractfile(entry)
            assert content is not None  # of a regular file
            _write(path, content, entry)
            self._files.add(name)
        elif entry.issym():
            _link(path, entry.linkname)
        elif entry.islnk():
            self._hard_link(path, entry)
        elif entry.isfifo():
            _clear(path)
            os.mkfifo(path, entry.mode & _KEPT_MODE)
        else:
            raise ProviderFailed(f"a workspace holds a device: {name[-200:]!r}")
        names.add(last)

    def _hard_link(self, path: str, entry: tarfile.TarInfo) -> None:
        target = self._below_top(entry.linkname)
        if target not in self._files:
            raise ProviderFailed(f"a workspace links to a file that it does not have: {target[-200:]!r}")
        try:
            if os.path.samestat(os.lstat(path), os.lstat(self._path(target))):
                return
        except FileNotFoundError:
            pass
        _clear(path)
        os.link(self._path(target), path, follow_symlinks=False)

    def _remove_others(self) -> None:
        from runner.safefs import trees

        for name, names in sorted(self._seen.items(), reverse=True):
            path = self._path(name)
            if name in self._without and not names:
                os.chmod(path, 0o700)
                os.rmdir(path)
                del self._directories[name]
                continue
            for other in os.scandir(path):
                gone = other.name not in names
                if gone and other.is_dir(follow_symlinks=False):
                    trees.remove(Path(other.path))
                elif gone:
                    os.unlink(other.path)


def _relative(name: str) -> str:
    return name.removeprefix("./").strip("/").removesuffix(".")


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            os.mkdir(path, 0o700)
        else:
            os.chmod(path, 0o700)


def _write(path: str, content: IO[bytes], entry: tarfile.TarInfo) -> None:
    mode = entry.mode & _KEPT_MODE
    first = content.read(_COMPARED)
    if entry.size <= _COMPARED and _is(path, first, mode):
        return
    _clear(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        while first:
            file.write(first)
            first = content.read(_CHUNK)
        os.fchmod(file.fileno(), mode)
        file.flush()
        os.utime(file.fileno(), (entry.mtime, entry.mtime))


def _is(path: str, content: bytes, mode: int) -> bool:
    """Tell whether this regular file is there with this content already."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size != len(content) or stat.S_IMODE(found.st_mode) != mode:
            return False
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
            return found.st_nlink == 1 and file.read() == content
    except OSError:
        return False


def _link(path: str, target: str) -> None:
    try:
        if os.readlink(path) == target:
            return
    except OSError:
        pass
    _clear(path)
    os.symlink(target, path)


def _clear(path: str) -> None:
    """Remove what is at a path, whatever it is."""
    from runner.safefs import trees

    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            trees.remove(Path(path))
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass
