"""Trees of this host as streams to and from a place that shares no file with it. Blocking; call it in a thread.

What comes back was written by commands, and perhaps by a daemon that lies: names, depth, number and sizes are checked
before anything is written, and no link is followed. The tree that it is written to must be closed to everybody else.
"""

from __future__ import annotations

import os
import stat
import struct
import tarfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple

from runner.core.errors import ProviderFailed
from runner.sandbox.protected_paths import is_placeholder

MAX_ENTRIES = 1_000_000
MAX_PATH = 4_000  # bytes; the kernel takes 4,095 with the place of the tree
_COMPARED = 1 << 20  # bytes of a file that is compared before it is written
_CHUNK = 1 << 20
_PIECE = 1 << 17
_BLOCK = 4096
_END_OF_TIME = 1 << 60  # seconds
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


def tar_trees(sources: Iterable[Source]) -> Iterator[bytes]:
    """Yield sources as one archive, in pieces, each for a daemon to unpack while the next is read. Raises ``OSError``.

    Nothing stands behind its two last blocks: podman's unpacker reads no further, and the rest meets a broken pipe.
    """
    held = bytearray()
    for head, content in _tar_entries(sources):
        held += head
        for piece in content:
            held += piece
            if len(held) >= _PIECE:
                yield bytes(held)
                held.clear()
    yield bytes(held) + bytes(2 * tarfile.BLOCKSIZE)


def _tar_entries(sources: Iterable[Source]) -> Iterator[tuple[bytes, Iterable[bytes]]]:
    """Yield the head of each entry, and its content with what fills the last block."""
    for source in sources:
        if source.content is not None:
            entry = tarfile.TarInfo(source.name)
            entry.mode, entry.uid, entry.gid = source.mode or 0o644, source.uid, source.uid
            entry.size = len(source.content)
            yield _head(entry), (source.content, _filling(entry.size))
            continue
        for path, name in _walk(source.path):
            if source.only is None or name in source.only:
                with suppress(FileNotFoundError):
                    yield from _tar_entry(path, source.name + name, source.uid)


def _head(entry: tarfile.TarInfo) -> bytes:
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _filling(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def _walk(top: Path) -> Iterator[tuple[str, str]]:
    """Yield everything in a tree, a directory before what is in it: the path, and ``/a/b`` or nothing for the top.

    What has come here can be read, so only the placeholder of a protected directory cannot.
    """
    waiting = [(os.fspath(top), "")]
    while waiting:
        path, name = waiting.pop()
        yield path, name
        with suppress(FileNotFoundError):  # others work in the directory of a shared project
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode) and mode & stat.S_IRUSR:
                waiting += [(entry.path, f"{name}/{entry.name}") for entry in os.scandir(path)]


def _tar_entry(path: str, name: str, uid: int) -> Iterator[tuple[bytes, Iterable[bytes]]]:
    found = os.lstat(path)
    entry = tarfile.TarInfo(name)
    entry.mode, entry.uid, entry.gid, entry.mtime = stat.S_IMODE(found.st_mode), uid, uid, int(found.st_mtime)
    if stat.S_ISREG(found.st_mode):
        if found.st_size:  # a placeholder cannot be read
            with _opened(path) as file:
                entry.size = found.st_size
                yield _head(entry), chain(_content(file, entry.size), [_filling(entry.size)])
            return
    elif stat.S_ISDIR(found.st_mode):
        entry.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif stat.S_ISFIFO(found.st_mode):
        entry.type = tarfile.FIFOTYPE
    else:
        return  # sockets and devices of this host mean nothing elsewhere
    yield _head(entry), ()


def stamps(top: Path) -> dict[str, str]:
    """Return a text for each entry of a tree that differs once the entry was changed; no file is read."""
    return {name: found for path, name in _walk(top) if (found := stamp(path)) is not None}


def stamp(path: str, directory: int | None = None) -> str | None:
    """Return the stamp of what is at a path, which may be relative to a directory; ``None`` if nothing is."""
    try:
        s = os.lstat(path, dir_fd=directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    same = "" if stat.S_ISDIR(s.st_mode) else f" {s.st_ino} {s.st_size} {s.st_ctime_ns}"
    return f"{s.st_mode:o}{same}"


def blocks(size: int) -> int:
    """Return the bytes that a file takes on most disks."""
    return (size + _BLOCK - 1) // _BLOCK * _BLOCK


def tar_bytes(stream: IO[bytes], check: Callable[[], None]) -> int:
    """Return the bytes that what is in an archive takes; ``check`` and errors as for ``read_tar``."""
    size = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK, errors="surrogateescape") as archive:
            for entry in archive:
                check()
                size += blocks(entry.size)
    except tarfile.TarError as error:
        raise ProviderFailed(f"the files of a workspace cannot be measured: {error}") from error
    return size


HEAD = struct.Struct("=QqIHH")  # `struct packed` of files.h


def pack_trees(sources: Iterable[Source]) -> Iterator[bytes]:
    """Yield sources as `guest unpack` takes them, in pieces of some size. Raises ``OSError``.

    A directory comes twice, at last with its own mode and time: what is in it must be written first.
    """
    held = bytearray()
    directories: list[bytes] = []
    for source in sources:
        for record, path, size in _records(source, directories):
            held += record
            if path is not None:
                with _opened(path) as file:
                    for piece in _content(file, size):
                        held += piece
                        if len(held) >= _CHUNK:
                            yield bytes(held)
                            held.clear()
            elif len(held) >= _CHUNK:
                yield bytes(held)
                held.clear()
    yield bytes(held) + b"".join(reversed(directories)) + HEAD.pack(0, 0, 0, 0, 0)


def _records(source: Source, directories: list[bytes]) -> Iterator[tuple[bytes, str | None, int]]:
    """Yield the beginning of each entry, and the file that has its content."""
    parents = source.name.split("/")[:-1]
    for depth in range(len(parents)):
        yield _record("/".join(parents[: depth + 1]), stat.S_IFDIR | 0o755, 0), None, 0
    if source.content is not None:
        mode = stat.S_IFREG | (source.mode or 0o644)
        yield _record(source.name, mode, 0, size=len(source.content)) + source.content, None, 0
        return
    for path, below in _walk(source.path):
        if source.only is not None and below not in source.only:
            continue
        found = os.lstat(path)
        name, seconds, kind = source.name + below, int(found.st_mtime), stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFDIR:
            yield _record(name, stat.S_IFDIR | 0o700, seconds), None, 0
            directories.append(_record(name, found.st_mode, seconds))
        elif kind == stat.S_IFREG:
            yield (
                _record(name, found.st_mode, seconds, size=found.st_size),
                path if found.st_size else None,
                found.st_size,
            )
        elif kind == stat.S_IFLNK:
            yield _record(name, found.st_mode, seconds, target=os.readlink(path)), None, 0
        elif kind == stat.S_IFIFO:
            yield _record(name, found.st_mode, seconds), None, 0


def _record(name: str, mode: int, seconds: int, *, size: int = 0, target: str = "") -> bytes:
    words, link = os.fsencode(name), os.fsencode(target)
    return HEAD.pack(size, seconds, mode, len(words), len(link)) + words + link


def _opened(path: str) -> IO[bytes]:
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0)


def _content(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield just ``size`` bytes; a file that has become shorter is filled up."""
    while size:
        piece = file.read(min(size, _PIECE)) or bytes(min(size, _PIECE))
        size -= len(piece)
        yield piece


def names_below(top: Path) -> Iterator[str]:
    """Yield the names of all entries of a tree, relative to it."""
    return (name.removeprefix("/") for _, name in _walk(top) if name)


class Packed(NamedTuple):
    """An entry of a tree that comes; ``mode`` has its type, ``read`` gives the next bytes of its content."""

    name: str
    target: str
    mode: int
    seconds: float
    size: int
    read: Callable[[int], bytes]


def read_tar(
    stream: IO[bytes], to: Path, *, most: int, without: frozenset[str] = frozenset(), check: Callable[[], None]
) -> None:
    """Make the directory ``to`` like the archive's one top directory; files that are the same already stay untouched.

    ``without`` are directories relative to the top that are left out when they are empty, as placeholders of protected
    paths always are. ``check`` is called before
    each entry, and may raise. Raises ``ProviderFailed`` for an archive that nobody should write, and for more than
    ``most`` bytes.
    """
    receiver, top = _Receiver(to, most), None
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK, errors="surrogateescape") as archive:
            for number, entry in enumerate(archive):
                check()
                if number == MAX_ENTRIES:
                    raise ProviderFailed(f"a workspace holds more than {MAX_ENTRIES:,} files and directories")
                if top is not None:
                    name = _below(top, entry.name)
                    if entry.islnk():
                        receiver.link(name, _below(top, entry.linkname))
                    elif not is_placeholder(
                        (packed := _packed(archive, entry, name)).mode, packed.seconds, packed.size
                    ):
                        receiver.receive(packed)
                elif entry.isdir():
                    receiver.directories[""] = entry.mode, _seconds(entry)
                    top = _relative(entry.name)
                else:
                    raise ProviderFailed(f"the files of a workspace begin with no directory, but `{entry.name!r}`")
    except tarfile.TarError as error:
        raise ProviderFailed(f"the files of a workspace cannot be read: {error}") from error
    if top is None:
        raise ProviderFailed("the files of a workspace are missing")
    for name in without:
        if receiver.seen.get(name) == set():
            receiver.leave_out(name)
    remove_all_but(to, receiver.names)
    receiver.finish()


def read_packed(entries: Iterable[Packed], to: Path, *, most: int, links: Mapping[str, str]) -> set[str]:
    """Write entries into the directory ``to``, and ``links`` to files of theirs; return their names.

    Raises as ``read_tar``.
    """
    receiver = _Receiver(to, most)
    for entry in entries:
        receiver.receive(entry)
    for name, target in links.items():
        receiver.link(name, target)
    receiver.finish()
    return receiver.names


def remove_all_but(top: Path, names: Container[str]) -> None:
    """Remove what a tree has under other names, relative to it."""
    from runner.safefs import trees

    waiting = [(os.fspath(top), "")]
    while waiting:
        path, name = waiting.pop()
        for entry in os.scandir(path):
            below = f"{name}{entry.name}"
            is_directory = entry.is_dir(follow_symlinks=False)
            if below not in names:
                trees.remove(Path(entry.path)) if is_directory else os.unlink(entry.path)
            elif is_directory:
                waiting.append((entry.path, f"{below}/"))


_TYPES = {
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
    **dict.fromkeys(tarfile.REGULAR_TYPES, stat.S_IFREG),
}


def _packed(archive: tarfile.TarFile, entry: tarfile.TarInfo, name: str) -> Packed:
    content = archive.extractfile(entry) if entry.isreg() else None
    read = content.read if content else bytes
    mode = _TYPES.get(entry.type, 0) | stat.S_IMODE(entry.mode)
    return Packed(name=name, target=entry.linkname, mode=mode, seconds=_seconds(entry), size=entry.size, read=read)


def _seconds(entry: tarfile.TarInfo) -> float:
    """Return when an entry was changed; a moment that no clock has, or no number, becomes the epoch."""
    return entry.mtime if abs(entry.mtime) < _END_OF_TIME else 0.0


def _below(top: str, name: str) -> str:
    """Return a name relative to the top: docker calls that by the last part of its path, podman by none."""
    found = _relative(name)
    if not top:
        return found
    first, _, below = found.partition("/")
    if first != top or not below:
        raise ProviderFailed(f"the files of a workspace have a second top, `{name!r}`")
    return below


class _Receiver:
    """``seen`` has the names in each directory that came, ``directories`` their modes and times."""

    def __init__(self, to: Path, most: int) -> None:
        self._to = os.fspath(to)
        self._left = most
        self._most = most
        self._files: set[str] = set()
        self.directories: dict[str, tuple[int, float]] = {}  # set at the end
        self.seen: dict[str, set[str]] = {"": set()}
        self.names: set[str] = set()

    def receive(self, entry: Packed) -> None:
        path, kind = self._admit(entry.name), stat.S_IFMT(entry.mode)
        if kind == stat.S_IFDIR:
            _make_directory(path)
            self.directories[entry.name], self.seen[entry.name] = (entry.mode, entry.seconds), set()
        elif kind == stat.S_IFREG:
            self._left -= entry.size
            if entry.size < 0 or self._left < 0:
                raise ProviderFailed(f"a workspace holds more than {self._most >> 20} MiB")
            _write(path, entry)
            self._files.add(entry.name)
        elif kind == stat.S_IFLNK:
            if not entry.target or "\0" in entry.target:
                raise ProviderFailed(f"a workspace has an impossible link: {entry.name[-200:]!r}")
            _link(path, entry.target)
        elif kind == stat.S_IFIFO:
            _clear(path)
            os.mkfifo(path, _kept(entry.mode))
        else:
            raise ProviderFailed(f"a workspace holds a device: {entry.name[-200:]!r}")

    def link(self, name: str, target: str) -> None:
        """Give a file that came another name."""
        path = self._admit(name)
        if target not in self._files:
            raise ProviderFailed(f"a workspace links to a file that it does not have: {target[-200:]!r}")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(path), os.lstat(self._path(target))):
                return
        _clear(path)
        os.link(self._path(target), path, follow_symlinks=False)

    def leave_out(self, name: str) -> None:
        """Take a directory for one that did not come."""
        self.names.discard(name)
        del self.directories[name]

    def finish(self) -> None:
        for name, (mode, seconds) in sorted(self.directories.items(), reverse=True):
            path = self._path(name)
            os.chmod(path, _kept(mode) | stat.S_IRWXU)
            os.utime(path, (seconds, seconds))

    def _admit(self, name: str) -> str:
        """Return where an entry belongs."""
        parent, _, last = name.rpartition("/")
        names, path = self.seen.get(parent), self._path(name)
        if names is None or last in ("", ".", "..") or "\0" in name or last in names:
            raise ProviderFailed(f"a workspace has an impossible name: {name[-200:]!r}")
        if len(os.fsencode(path)) > MAX_PATH:
            raise ProviderFailed(f"a workspace nests directories deeper than {MAX_PATH:,} bytes: {name[-200:]!r}")
        names.add(last)
        self.names.add(name)
        return path

    def _path(self, name: str) -> str:
        return f"{self._to}/{name}" if name else self._to


def _kept(mode: int) -> int:
    """Return the mode of a file here, which its owner can read at least: the runner is one."""
    return mode & _KEPT_MODE | stat.S_IRUSR


def _relative(name: str) -> str:
    return name.removeprefix("./").strip("/").removesuffix(".")


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.chmod(path, 0o700)
        else:
            os.unlink(path)
            os.mkdir(path, 0o700)


def _write(path: str, entry: Packed) -> None:
    mode, left = _kept(entry.mode), entry.size
    part = entry.read(min(left, _COMPARED))
    if left <= _COMPARED and _is(path, part, mode):
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        _clear(path)
        fd = os.open(path, flags, 0o600)
    try:
        while part:
            left -= len(part)
            while part:
                part = part[os.write(fd, part) :]
            part = entry.read(min(left, _CHUNK))
        if left:
            raise ProviderFailed("the files of a workspace end too early")
        os.fchmod(fd, mode)
        os.utime(fd, (entry.seconds, entry.seconds))
    finally:
        os.close(fd)


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
