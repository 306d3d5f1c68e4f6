"""Mirrors of remote repositories: a bare repository for each URL and depth, below ``RUNNER_HOME/mirrors``.

``repository`` has everything that was ever fetched, so that the next fetch transfers only new objects.
``ready/COMMIT`` has the packs of exactly one commit and its history; a run gets them as hard links: packs are never
changed, only unlinked, and no agent can reach them. Every reader and writer of a mirror holds its lock, and no other
repository borrows its objects, so one that is not locked can be removed; those unused for longest are, when all
together exceed their limit. Everything but the lock blocks; adapters call it in a thread.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import accumulate
from pathlib import Path

import trio
from msgspec import Struct
from trio.from_thread import check_cancelled

from runner.core.locks import try_flock
from runner.git import disk
from runner.safefs import trees

_MAX_READY = 4  # commits
_MAX_PACKS = 40  # a repository with more is made again
_POLL = 0.05  # seconds


class Mirror(Struct, frozen=True):
    path: Path

    @classmethod
    def for_url(cls, mirrors: Path, url: str, depth: int | None) -> Mirror:
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
    async def lock(self) -> AsyncIterator[None]:
        """Exclude every other process and task for the length of the block; the lock ends with this process."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            descriptor = try_lock(self.path)
            if descriptor is not None:
                break
            await trio.sleep(_POLL)
        try:
            yield
        finally:
            os.close(descriptor)

    def has_ready(self, commit: str) -> bool:
        """Tell whether a commit is ready; remove the mirror if its packs are damaged."""
        packs = self.ready(commit) / "pack"
        if not packs.is_dir():
            return False
        files = [*packs.glob("*.pack"), *packs.glob("*.idx")]
        if files and all(_is_sound(file, like=commit) for file in files):
            return True
        self.remove()
        return False

    def prepare(self, *, like: str) -> bool:
        """Make the repository if it is missing or has too many packs; return whether it is empty."""
        packs = self.repository / "objects" / "pack"
        if len(list(packs.glob("*.pack"))) > _MAX_PACKS or not (self.path / "ready").is_dir():
            self.remove()
            disk.init_private(self.repository, like=like)
            (self.path / "ready").mkdir()
        for part in packs.glob("tmp_*"):
            part.unlink()
        trees.remove(self.copy)
        return not any(packs.glob("*.pack"))

    def add_ready(self, repository: Path, commit: str) -> None:
        """Make the commit that ``repository`` consists of ready; the oldest ready ones are removed."""
        ready = self.ready(commit)
        new = self.path / "new"
        trees.remove(new)
        _link_packs(repository, repository / "objects" / "pack", new, new / "pack")
        new.rename(ready)
        trees.remove(self.copy)
        for old in sorted(ready.parent.iterdir(), key=lambda p: p.stat().st_mtime_ns)[:-_MAX_READY]:
            trees.remove(old)

    def copy_ready(self, commit: str, into: Path) -> None:
        """Make the private repository ``into`` from a commit that is ready."""
        ready = self.ready(commit)
        disk.init_private(into, like=commit)
        _link_packs(ready, ready / "pack", into, into / "objects" / "pack")
        os.utime(ready)

    def remove(self) -> None:
        trees.remove(self.path)


def try_lock(path: Path) -> int | None:
    """Lock the mirror at ``path`` and return the descriptor, whose closing unlocks it; ``None`` while it is in use."""
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if try_flock(lock):
        return lock
    os.close(lock)
    return None


def last_used(path: Path) -> float:
    """Return the time of a mirror's last use in seconds since the epoch; 0 while it is being removed or written."""
    try:
        return max(part.lstat().st_mtime for part in (path, *path.glob("ready/*")))
    except FileNotFoundError:
        return 0.0


def over_limit(mirrors: Path, limit: int) -> list[Path]:
    """List the mirrors to remove, longest unused, so that the others take at most ``limit`` bytes on disk."""
    found = sorted((path for path in mirrors.glob("*") if path.is_dir()), key=last_used, reverse=True)
    sums = accumulate(trees.bytes_on_disk(path) for path in found)
    return [path for path, total in zip(found, sums, strict=True) if total > limit]


def evict(mirrors: Path, limit: int) -> None:
    """Remove the mirrors over the limit that are not in use."""
    for path in over_limit(mirrors, limit):
        if (lock := try_lock(path)) is not None:
            trees.remove(path)
            os.close(lock)


def _link_packs(source: Path, packs: Path, target: Path, into: Path) -> None:
    """Link the ``packs`` of ``source`` into the directory ``into`` of ``target``, and copy where its history is cut."""
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in packs.iterdir():
        os.link(path, into / path.name)
    with suppress(FileNotFoundError):
        shutil.copyfile(source / "shallow", target / "shallow")


def _is_sound(path: Path, *, like: str) -> bool:
    """Compare a pack or its index with the checksum that it ends with."""
    digest = hashlib.sha1(usedforsecurity=False) if len(like) == 40 else hashlib.sha256()
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - digest.digest_size
        while left > 0 and (chunk := file.read(min(disk.CHUNK, left))):
            check_cancelled()
            digest.update(chunk)
            left -= len(chunk)
        return file.read() == digest.digest()
