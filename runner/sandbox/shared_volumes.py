"""Projects whose workspaces share a directory, each in one volume of a daemon that sees nothing of this host.

All sandboxes of a project have its volume, so they see each other's files at once. The volume is brought up to date
before one opens, and the directory here whenever one of them refreshes or ends; a lock keeps all runners of this home
from doing both. ``SharedProject`` remembers on the disk what the two sides had when they were last the same. What was
changed on both since then stays as it is here. Names are relative to the project's directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from runner.core.home import WORKSPACES
from runner.sandbox.tar_trees import stamp, stamps

PROJECT_VOLUME = "runner.project-"  # begins the name of each volume
_BETWEEN_LOOKS = 0.05  # seconds

Stamps = Mapping[str, str]


class SharedProject:
    """``here`` are the stamps of what is on both sides, as it is here, and ``there`` those that a guest gave.

    ``place`` is the project's directory. Blocking; nobody else may have it open.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._file = place.with_name(f".{place.name}.volume")  # the name of no project
        try:
            found = json.loads(self._file.read_text())
        except OSError:
            found = {}
        self.volume: str = found.get("volume") or f"{PROJECT_VOLUME}{secrets.token_hex(8)}"
        self.here: dict[str, str] = found.get("here", {})
        self.there: dict[str, str] = found.get("there", {})

    def workspaces(self) -> list[str]:
        """List the workspaces of the project that are here."""
        return sorted(os.listdir(self.place / WORKSPACES))

    def changed(self) -> tuple[dict[str, str], list[str]]:
        """Return the stamps of what is here now, and list what was removed, each after what was below it."""
        now = {name[1:]: found for name, found in stamps(self.place).items() if name}
        return now, sorted(self.here.keys() - now.keys(), reverse=True)

    def sent(self, now: Stamps) -> None:
        """Note that the volume has what was found here."""
        self.here = {**now}
        self._save()

    def wanted(self, listed: Stamps) -> list[str]:
        """List what has changed there and not here."""
        known = {*self.workspaces()}
        return [
            name
            for name, found in listed.items()
            if self.there.get(name) != found and _may_come(name, known) and self._is_as_it_was(name)
        ]

    def fetched(self, listed: Stamps, names: Iterable[str]) -> None:
        """Note that these have come, and remove here what was removed there."""
        for name in names:
            self._note(name)
        gone = self.here.keys() - listed.keys()
        for name in sorted(gone, reverse=True):
            if name.partition("/")[0] != WORKSPACES or name.count("/") > 1:
                self._remove(name)
        self.there = {**listed}
        self._save()

    def forget(self) -> None:
        """Forget the volume, which is gone: only what is here is left."""
        self._file.unlink(missing_ok=True)

    def _note(self, name: str) -> None:
        now = stamp(f"{self.place}/{name}")
        if now is not None:
            self.here[name] = now

    def _remove(self, name: str) -> None:
        path = f"{self.place}/{name}"
        try:
            if self._is_as_it_was(name):
                os.rmdir(path) if stat.S_ISDIR(os.lstat(path).st_mode) else os.unlink(path)
                del self.here[name]
        except OSError:
            pass  # it is gone, or somebody here has put something into it

    def _is_as_it_was(self, name: str) -> bool:
        """Tell whether something is here as it was when the two sides were the same, or nothing is."""
        return stamp(f"{self.place}/{name}") in (None, self.here.get(name))

    def _save(self) -> None:
        part = self._file.with_suffix(".part")
        with part.open("w") as file:
            json.dump({"volume": self.volume, "here": self.here, "there": self.there}, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._file)


@asynccontextmanager
async def open_shared(place: Path) -> AsyncIterator[SharedProject]:
    """Open what is known of a project's volume, as the only one among all runners of this home."""
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while not _lock(directory):  # noqa: ASYNC110  # who has it may be another process
            await trio.sleep(_BETWEEN_LOOKS)
        yield await trio.to_thread.run_sync(SharedProject, place)
    finally:
        os.close(directory)


def _lock(directory: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _may_come(name: str, known: set[str]) -> bool:
    """Tell whether something of a volume belongs here: which workspaces there are, only the runner says."""
    first, _, below = name.partition("/")
    if first != WORKSPACES:
        return True
    workspace, _, rest = below.partition("/")
    return bool(rest) and workspace in known
