"""Listing of directories below a root that an agent may write, with what a scan needs of every entry.

Compiled workers list, one for each processor, where this installation has them; elsewhere Python does, with the same
results and three times as slowly. Python always lists the first few entries, since workers take longer to start.
Directories are opened as in ``safe_open``, files are not, and only a part of a large directory is in memory at a time.
All calls block: use a thread.
"""

from __future__ import annotations

import errno
import math
import os
import select
import signal
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from runner.core import compiled_programs
from runner.safefs import safe_open

T = TypeVar("T")
SETID = stat.S_ISUID | stat.S_ISGID

_FEW = 500  # entries after which workers are worth starting
_BATCH = 1_000  # entries of one directory in memory at a time
_MAX_WORKERS = 4  # as many answers as one interpreter can process
_PACKET = 1 << 16
_MAX_REQUESTS = 64, 4096  # of a packet: their number, and bytes before the last of them
_CHUNK = struct.Struct("=QIIIIiI")  # `struct chunk` of lister.c
_SPECIAL = struct.Struct("=QIHHII")  # `struct odd`
_NUMBER = struct.Struct("=I")


class SpecialEntry(NamedTuple):
    """An entry that is not a plain file; of a directory ``mode`` is the type alone."""

    name: str
    mode: int
    size: int  # bytes
    foreign: bool  # of another file system
    target: str  # of a link


class Chunk(NamedTuple):
    """A part of a directory. A plain file is regular, not larger than asked, and has no setuid or setgid bit.

    ``names`` holds the plain files with a slash before each and after the last. ``error`` is the errno that ended the
    listing of the directory, else 0.
    """

    files: int
    bytes: int
    names: str
    special: list[SpecialEntry]
    error: int


class Lister(Protocol, Generic[T]):
    """Iterate to receive answers, in any order, and ask for more meanwhile; it ends when all is answered.

    Raises ``OSError`` when a worker ended early.
    """

    def ask(self, path: str, about: T) -> None:
        """List a directory by its path relative to the root; ``about`` comes back with each part of it."""

    def __iter__(self) -> Iterator[tuple[T, Chunk]]: ...


@contextmanager
def open_lister(top: int, most: int, skipped: Sequence[str]) -> Iterator[Lister[Any]]:
    """Open a lister below the descriptor ``top``; ``most`` is for bytes of a file, ``skipped`` for names at the top."""
    program = compiled_programs.find("lister")
    if program is None or safe_open.opener() is not safe_open.open_in_kernel:
        yield _InProcessLister(top, most, frozenset(skipped))
    else:
        with ExitStack() as stack:
            first: _InProcessLister[Any] = _InProcessLister(top, most, frozenset(skipped), few=_FEW)
            yield _AdaptiveLister(
                first, lambda: stack.enter_context(open_worker_lister(program.path, top, most, skipped))
            )


@contextmanager
def open_in_process_lister(top: int, most: int, skipped: Sequence[str]) -> Iterator[Lister[Any]]:
    yield _InProcessLister(top, most, frozenset(skipped))


@contextmanager
def open_worker_lister(program: Path, top: int, most: int, skipped: Sequence[str]) -> Iterator[Lister[Any]]:
    count = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
    with ExitStack() as stack:
        yield _WorkerLister([stack.enter_context(_worker(program, top, most, skipped)) for _ in range(count)])


class _AdaptiveLister(Generic[T]):
    """Lists in this process first, and by workers once there are enough entries."""

    def __init__(self, first: _InProcessLister[T], start: Callable[[], Lister[T]]) -> None:
        self._first, self._start = first, start
        self._lister: Lister[T] = first

    def ask(self, path: str, about: T) -> None:
        self._lister.ask(path, about)

    def __iter__(self) -> Iterator[tuple[T, Chunk]]:
        yield from self._first
        if self._first.waiting:
            self._lister = self._start()
            for path, about in self._first.waiting:
                self._lister.ask(path, about)
            yield from self._lister


class _InProcessLister(Generic[T]):
    """Lists in this process, about ``few`` entries at most; requests that it has not begun are left ``waiting``."""

    def __init__(self, top: int, most: int, skipped: frozenset[str], few: float = math.inf) -> None:
        self._top, self._most, self._skipped = top, most, skipped
        self._device = os.fstat(top).st_dev
        self._open = safe_open.opener()
        self._left = few
        self.waiting: list[tuple[str, T]] = []

    def ask(self, path: str, about: T) -> None:
        self.waiting.append((path, about))

    def __iter__(self) -> Iterator[tuple[T, Chunk]]:
        while self.waiting and self._left > 0:
            path, about = self.waiting.pop()
            try:
                for chunk in self._list(path):
                    yield about, chunk
            except OSError as error:
                yield about, Chunk(files=0, bytes=0, names="/", special=[], error=error.errno or errno.EIO)
            if self._left < 0:
                self.waiting.append((path, about))

    def _list(self, path: str) -> Iterator[Chunk]:
        descriptor = self._open(self._top, path or ".", safe_open.DIRECTORY)
        try:
            if os.fstat(descriptor).st_dev != self._device:
                raise OSError(errno.EXDEV, path)
            with os.scandir(descriptor) as listing:
                kept = listing if path else (entry for entry in listing if entry.name not in self._skipped)
                while entries := list(islice(kept, _BATCH)):
                    self._left -= len(entries)
                    if self._left < 0:  # only at the first part of a directory, since `few` is smaller than a part
                        return
                    yield self._part(descriptor, entries)
        finally:
            os.close(descriptor)

    def _part(self, descriptor: int, entries: list[os.DirEntry[str]]) -> Chunk:
        names, special, size = [""], [], 0
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                special.append(SpecialEntry(entry.name, stat.S_IFDIR, 0, foreign=False, target=""))
                continue
            found = entry.stat(follow_symlinks=False)
            foreign = found.st_dev != self._device
            if not stat.S_ISREG(found.st_mode) or found.st_size > self._most or found.st_mode & SETID or foreign:
                target = os.readlink(entry.name, dir_fd=descriptor) if stat.S_ISLNK(found.st_mode) else ""
                special.append(
                    SpecialEntry(
                        name=entry.name, mode=found.st_mode, size=found.st_size, foreign=foreign, target=target
                    )
                )
            else:
                names.append(entry.name)
                size += found.st_size
        return Chunk(files=len(names) - 1, bytes=size, names="/".join([*names, ""]), special=special, error=0)


class _Worker:
    """A worker process. It has at most two packets of requests, so that neither side blocks on the other's reading."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.unanswered = self.last = 0  # requests, those of the last packet

    def send(self, packet: bytes, requests: int) -> None:
        self.channel.sendall(packet)
        self.unanswered += requests
        self.last = requests

    @property
    def ready(self) -> bool:
        return self.unanswered <= self.last


@contextmanager
def _worker(program: Path, top: int, most: int, skipped: Sequence[str]) -> Iterator[_Worker]:
    """Start a worker in a process group of its own, so that signals of the terminal do not reach it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _PACKET)
            actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0), (os.POSIX_SPAWN_DUP2, top, 3)]
            words = [str(program), str(most), *skipped]
            pid = os.posix_spawn(program, words, {}, file_actions=actions, setpgroup=0)
        try:
            yield _Worker(ours)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class _WorkerLister(Generic[T]):
    """Lists by workers."""

    def __init__(self, workers: list[_Worker]) -> None:
        self._workers = {worker.channel.fileno(): worker for worker in workers}
        self._waiting: list[tuple[str, T]] = []
        self._asked: dict[int, T] = {}
        self._number = 0
        self._poll = select.poll()
        for descriptor in self._workers:
            self._poll.register(descriptor, select.POLLIN)

    def ask(self, path: str, about: T) -> None:
        self._waiting.append((path, about))

    def __iter__(self) -> Iterator[tuple[T, Chunk]]:
        while self._waiting or self._asked:
            for worker in self._workers.values():
                self._feed(worker)
            for descriptor, _ in self._poll.poll():
                worker = self._workers[descriptor]
                packet = worker.channel.recv(_PACKET)
                if not packet:
                    raise OSError(errno.EPIPE, "the directory lister has ended")
                yield from self._answers(worker, packet)

    def _feed(self, worker: _Worker) -> None:
        if not worker.ready or not self._waiting:
            return
        most, most_bytes = _MAX_REQUESTS
        share = min(most, len(self._waiting) // (2 * len(self._workers)) + 1)
        packet, requests = bytearray(), 0
        while requests < share and len(packet) < most_bytes:
            path, about = self._waiting.pop()
            self._number = (self._number + 1) & 0xFFFFFFFF
            self._asked[self._number] = about
            packet += _NUMBER.pack(self._number) + os.fsencode(path) + b"\0"
            requests += 1
        worker.send(bytes(packet), requests)

    def _answers(self, worker: _Worker, packet: bytes) -> Iterator[tuple[T, Chunk]]:
        at = 0
        while at < len(packet):
            size, request, files, names, special, status, _ = _CHUNK.unpack_from(packet, at)
            start = at + _CHUNK.size
            at = start + names + special
            chunk = Chunk(
                files=files,
                bytes=size,
                names=os.fsdecode(packet[start : start + names] + b"/"),
                special=_special_entries(packet, start + names, at),
                error=max(status, 0),
            )
            if status == -1:
                yield self._asked[request], chunk
            else:
                worker.unanswered -= 1
                yield self._asked.pop(request), chunk


def _special_entries(packet: bytes, at: int, end: int) -> list[SpecialEntry]:
    found = []
    while at < end:
        size, mode, name, target, foreign, _ = _SPECIAL.unpack_from(packet, at)
        at += _SPECIAL.size
        texts = os.fsdecode(packet[at : at + name]), os.fsdecode(packet[at + name : at + name + target])
        found.append(SpecialEntry(name=texts[0], mode=mode, size=size, foreign=bool(foreign), target=texts[1]))
        at += name + target
    return found
