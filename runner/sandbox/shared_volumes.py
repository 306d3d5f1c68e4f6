"""Projects whose workspaces share a directory, each in one volume of a daemon that sees nothing of this host.

All sandboxes of a project have its volume, so they see each other's files at once. The volume is brought up to date
before one opens, and the directory here whenever one of them refreshes or ends; a lock keeps all runners of this home
from doing both. ``SharedProject`` remembers on the disk what the two sides had when they were last the same. What was
changed on both since then stays as it is here. Names are relative to the project's directory.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import trio

from runner.core.home import WORKSPACES
from runner.core.locks import try_flock
from runner.safefs.safe_open import DIRECTORY, open_directory, opener
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
            if self.there.get(name) != found and _may_come(name, known) and self._is_wanted(name)
        ]

    def fetched(self, listed: Stamps, names: Iterable[str]) -> None:
        """Note what has come, and remove here what was removed there."""
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
        now = self._stamp(name)
        if now is not None:
            self.here[name] = now

    def _remove(self, name: str) -> None:
        if self._stamp(name) == self.here[name]:
            try:
                with self._opened_above(name) as (directory, last):
                    is_directory = stat.S_ISDIR(os.lstat(last, dir_fd=directory).st_mode)
                    (os.rmdir if is_directory else os.unlink)(last, dir_fd=directory)
            except OSError:
                return  # somebody here has put something into it
        del self.here[name]

    def _is_wanted(self, name: str) -> bool:
        """Tell whether what is here is as it was, or was removed here while it changed there."""
        before, now = self.here.get(name), self._stamp(name)
        return now == before or (now is None and name in self.there)

    def _stamp(self, name: str) -> str | None:
        with suppress(OSError), self._opened_above(name) as (directory, last):
            return stamp(last, directory)
        return None

    @contextmanager
    def _opened_above(self, name: str) -> Iterator[tuple[int, str]]:
        """Open the directory of a name, through no link: those of commands, and names that a guest told, lead away."""
        above, _, last = name.rpartition("/")
        with open_directory(self.place) as top:
            directory = opener()(top, above or ".", DIRECTORY)
            try:
                yield directory, last
            finally:
                os.close(directory)

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
        while not try_flock(directory):  # noqa: ASYNC110  # who has it may be another process
            await trio.sleep(_BETWEEN_LOOKS)
        yield await trio.to_thread.run_sync(SharedProject, place)
    finally:
        os.close(directory)


def _may_come(name: str, known: set[str]) -> bool:
    """Tell whether something of a volume belongs here: which workspaces there are, only the runner says."""
    first, *below = parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        return False
    return first != WORKSPACES or (len(below) > 1 and below[0] in known)
