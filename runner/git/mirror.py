"""What was fetched from a server is kept: a bare repository for each URL and depth, below ``RUNNER_HOME/mirrors``.

``repository`` has all that was ever fetched, so that the next fetch brings only what is new. ``ready/COMMIT``
has the packs of exactly one commit and its history; a run gets them as hard links: packs are never changed, only
unlinked, and no agent can reach them. Nobody borrows objects, so a mirror can go whenever nobody holds its lock, as
whoever reads or writes one does; the longest unused ones go when all together take more than their limit. All but the
lock blocks; adapters call it in a thread.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import trio
from trio.from_thread import check_cancelled

from runner.git import disk
from runner.safefs import trees

_KEPT = 4  # commits that are ready
_PACKS = 40  # in the repository: more, and it begins anew
_POLL = 0.05  # seconds


@dataclass(frozen=True)
class Mirror:
    path: Path

    @classmethod
    def of(cls, mirrors: Path, url: str, depth: int | None) -> Mirror:
        return cls(mirrors / hashlib.sha256(f"{depth} {url}".encode()).hexdigest()[:32])

    @property
    def repository(self) -> Path:
        return self.path / "repository"

    @property
    def copy(self) -> Path:
        return self.path / "copy"

    def ready(self, commit: str) -> Path:
        return self.path / "ready" / commit

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Exclude every other process and task; it is over when this process ends."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            lock = hold(self.path)
            if lock is not None:
                break
            await trio.sleep(_POLL)
        try:
            yield
        finally:
            os.close(lock)

    def has(self, commit: str) -> bool:
        """Whether a commit is ready. A mirror that holds it damaged is thrown away."""
        packs = self.ready(commit) / "pack"
        if not packs.is_dir():
            return False
        files = [*packs.glob("*.pack"), *packs.glob("*.idx")]
        if files and all(_is_sound(file, like=commit) for file in files):
            return True
        self.remove()
        return False

    def prepare(self, *, like: str) -> bool:
        """Make the repository if it is not there, or has become many packs; whether it is empty."""
        packs = self.repository / "objects" / "pack"
        if len(list(packs.glob("*.pack"))) > _PACKS or not (self.path / "ready").is_dir():
            self.remove()
            disk.make_private(self.repository, like=like)
            (self.path / "ready").mkdir()
        for part in packs.glob("tmp_*"):
            part.unlink()
        trees.remove(self.copy)
        return not any(packs.glob("*.pack"))

    def keep(self, repository: Path, commit: str) -> None:
        """Make ready what ``repository`` holds, which is one commit and its history; older ones go."""
        ready = self.ready(commit)
        new = self.path / "new"
        trees.remove(new)
        _link(repository, repository / "objects" / "pack", new, new / "pack")
        new.rename(ready)
        trees.remove(self.copy)
        for old in sorted(ready.parent.iterdir(), key=lambda p: p.stat().st_mtime_ns)[:-_KEPT]:
            trees.remove(old)

    def give(self, commit: str, into: Path) -> None:
        """Make the private repository ``into`` with a commit that is ready."""
        ready = self.ready(commit)
        disk.make_private(into, like=commit)
        _link(ready, ready / "pack", into, into / "objects" / "pack")
        os.utime(ready)

    def remove(self) -> None:
        trees.remove(self.path)


def hold(path: Path) -> int | None:
    """A descriptor that keeps everybody else from the mirror at ``path`` until it is closed; ``None``: it is in use."""
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def used_at(path: Path) -> float:
    """When a mirror was last used, in seconds since the epoch; 0 for one that is being removed or written."""
    try:
        return max(part.lstat().st_mtime for part in (path, *path.glob("ready/*")))
    except FileNotFoundError:
        return 0.0


def over_limit(mirrors: Path, limit: int) -> list[Path]:
    """Those that must go for the others to take ``limit`` bytes on disk at most, the longest unused ones."""
    found = sorted((path for path in mirrors.glob("*") if path.is_dir()), key=used_at, reverse=True)
    sums = accumulate(trees.bytes_on_disk(path) for path in found)
    return [path for path, total in zip(found, sums, strict=True) if total > limit]


def shrink(mirrors: Path, limit: int) -> None:
    """Remove what is over the limit and in nobody's use."""
    for path in over_limit(mirrors, limit):
        if (lock := hold(path)) is not None:
            trees.remove(path)
            os.close(lock)


def _link(source: Path, packs: Path, target: Path, into: Path) -> None:
    """Link the ``packs`` of ``source`` into the directory ``into`` of ``target``, and say where its history is cut."""
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in packs.iterdir():
        os.link(path, into / path.name)
    with suppress(FileNotFoundError):
        shutil.copyfile(source / "shallow", target / "shallow")


def _is_sound(path: Path, *, like: str) -> bool:
    """Whether a pack or its index has the content that its last bytes are the checksum of."""
    digest = hashlib.sha1(usedforsecurity=False) if len(like) == 40 else hashlib.sha256()
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - digest.digest_size
        while left > 0 and (chunk := file.read(min(disk.CHUNK, left))):
            check_cancelled()
            digest.update(chunk)
            left -= len(chunk)
        return file.read() == digest.digest()
