"""Scan a whole tree that an agent could write.

Everything is opened as ``runner.safefs.safe_open`` says, and no file is read. All calls block: use a thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from runner.core.model import Violation
from runner.core.sanitize import printable_path
from runner.policy.names import NAME_BYTES, PATH_BYTES, Kind, judge_name, may_offend
from runner.policy.paths import PathPolicy, State, fold, matcher, oversized
from runner.safefs import listing, safe_open
from runner.safefs.listing import SETID, Chunk, Lister, SpecialEntry

_STRIDE = 1_000  # entries between two questions whether to stop
_SPECIAL = {"p": "FIFO", "s": "socket", "c": "character device", "b": "block device"}

RawPath = bytes
OpenLister = Callable[[int, int, Sequence[str]], AbstractContextManager[Lister["_Place"]]]


class ScanResult(Struct, frozen=True, kw_only=True):
    """The result of a scan. A tree is clean when there are no violations; a truncated scan always has one.

    ``offending`` holds the paths of the violations as they are on disk, all of them unless ``truncated``; a directory
    stands for what is below it. ``outside`` counts new files in submodules, which no work has.
    ``bytes`` sums the sizes of regular files, holes included.
    """

    files: int
    directories: int
    bytes: int
    violations: tuple[Violation, ...]
    truncated: bool
    offending: frozenset[RawPath]
    outside: int = 0


def scan(
    root: Path,
    policy: PathPolicy,
    *,
    skip_top: Sequence[str] = (".git",),
    limit_entries: int = 2_000_000,
    limit_violations: int = 1_000,
    should_stop: Callable[[], bool] = lambda: False,
    open_lister: OpenLister = listing.open_lister,
) -> ScanResult:
    """Walk everything below ``root`` but the ``skip_top`` entries, and judge each entry.

    Rules besides the policy's ``forbidden:PATTERN`` and ``max-file-size``, and those of ``judge_name``:
    ``special-file``, ``setuid`` (or setgid), ``link-outside``, ``mount``, ``unreadable`` (also for a directory that
    changes meanwhile), and ``scan-limit`` for a path longer than a tree may have, or when one of the limits or
    ``should_stop`` (asked every 1,000 entries) ended the walk. No file is opened. Raises ``OSError`` when ``root``
    cannot be opened or a program that lists is killed, and whatever ``should_stop`` raises.
    """
    with safe_open.open_directory(root) as top, open_lister(top, policy.max_file_size, skip_top) as lister:
        walk = _Walk(
            lister=lister,
            policy=policy,
            limit_entries=limit_entries,
            limit_violations=limit_violations,
            should_stop=should_stop,
        )
        walk.run()
    return ScanResult(
        files=walk.files,
        directories=walk.directories,
        bytes=walk.bytes,
        violations=tuple(sorted(walk.violations, key=lambda v: (v.path, v.rule))),
        truncated=walk.truncated,
        offending=frozenset(walk.offending),
    )


class _Stopped(Exception):
    pass


class _Place(NamedTuple):
    """A directory: its path, the matcher's state in it, and the pattern that forbids all of it."""

    path: str
    state: State
    inherited: str | None

    def at(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name


class _Walk:
    """One scan under way."""

    def __init__(
        self,
        lister: Lister[_Place],
        policy: PathPolicy,
        limit_entries: int,
        limit_violations: int,
        should_stop: Callable[[], bool],
    ) -> None:
        self.files = self.directories = self.bytes = 0
        self.violations: list[Violation] = []
        self.offending: set[RawPath] = set()
        self.truncated = False
        self._entries = self._asked = 0
        self._lister = lister
        self._max_file_size = policy.max_file_size
        self._forbidden = matcher(policy.forbidden)
        self._limit_entries, self._limit_violations = limit_entries, limit_violations
        self._should_stop = should_stop

    def run(self) -> None:
        self._lister.ask("", _Place("", self._forbidden.root, None))
        try:
            for place, chunk in self._lister:
                self._count(chunk.files + len(chunk.special))
                self._judge(place, chunk)
        except _Stopped as reason:
            self.truncated = True
            self.violations.append(Violation(".", "scan-limit", str(reason)))

    def _count(self, entries: int) -> None:
        self._entries += entries
        if self._entries > self._limit_entries:
            raise _Stopped(f"more than {self._limit_entries} entries")
        if self._entries >= self._asked:
            self._asked = self._entries + _STRIDE
            if self._should_stop():
                raise _Stopped("stopped before the end")

    def _judge(self, place: _Place, chunk: Chunk) -> None:
        self.files += chunk.files
        self.bytes += chunk.bytes
        self._judge_names(place, chunk.names)
        for entry in chunk.special:
            if stat.S_ISDIR(entry.mode):
                self._directory(place, entry.name)
            else:
                self._special_entry(place, entry)
        if chunk.error:
            rule = "mount" if chunk.error == errno.EXDEV else "unreadable"
            self._add(place.path, rule, os.strerror(chunk.error))

    def _judge_names(self, place: _Place, names: str) -> None:
        """Judge files that are as they should be but for their names."""
        text = fold(names)
        long = len(os.fsencode(place.path)) + NAME_BYTES >= PATH_BYTES
        if place.inherited or long or may_offend(text) or self._forbidden.may_forbid(place.state, text):
            for name in names[1:-1].split("/") if len(names) > 1 else ():
                self._judge_name(place, name, "file")

    def _judge_name(self, place: _Place, name: str, kind: Kind) -> tuple[str | None, bool]:
        """Judge an entry's name: which pattern forbids it, and whether it may have others below it.

        A link may be taken for a directory, so it counts as one where patterns are tried.
        """
        text = fold(f"/{name}/")
        path, pattern = place.at(name), place.inherited
        if not pattern and self._forbidden.may_forbid(place.state, text):
            pattern = self._forbidden.forbidding(self._forbidden.enter(place.state, name), directory=kind != "file")
        if pattern:
            self._add(path, f"forbidden:{pattern}")
        rule = judge_name(name, kind)
        if rule:
            self._add(path, rule)
        if long := len(os.fsencode(path)) > PATH_BYTES:
            self._add(path, "scan-limit", os.strerror(errno.ENAMETOOLONG))
        return pattern, not rule and not long

    def _directory(self, place: _Place, name: str) -> None:
        self.directories += 1
        path = place.at(name)
        pattern, enter = self._judge_name(place, name, "directory")
        if enter:
            self._lister.ask(path, _Place(path, self._forbidden.enter(place.state, name), pattern))

    def _special_entry(self, place: _Place, entry: SpecialEntry) -> None:
        path = place.at(entry.name)
        if stat.S_ISREG(entry.mode):
            self._special_file(path, entry)
        elif not stat.S_ISLNK(entry.mode):
            kind = stat.filemode(entry.mode)[0]
            self._add(path, "special-file", _SPECIAL.get(kind, "changed during the scan"))
        elif leaves_tree(path.count("/"), entry.target):
            self._add(path, "link-outside", printable_path(entry.target))
        self._judge_name(place, entry.name, "file" if stat.S_ISREG(entry.mode) else "link")

    def _special_file(self, path: str, entry: SpecialEntry) -> None:
        self.files += 1
        self.bytes += entry.size
        if entry.size > self._max_file_size:
            violation = oversized(path, entry.size, self._max_file_size)
            self._add(path, violation.rule, violation.detail)
        if entry.mode & SETID:
            self._add(path, "setuid")
        if entry.foreign:
            self._add(path, "mount")

    def _add(self, path: str, rule: str, detail: str = "") -> None:
        self.violations.append(Violation(printable_path(path), rule, detail))
        self.offending.add(os.fsencode(path))
        if len(self.violations) >= self._limit_violations:
            raise _Stopped(f"{self._limit_violations} violations, and perhaps more")


def leaves_tree(depth: int, target: str) -> bool:
    """Tell whether a link ``depth`` directories below the root may lead out of it.

    A ``..`` behind a name counts as leaving: that name may itself be a link, and then ``..`` goes up from wherever it
    leads. With leading ``..`` only, links that are each judged inside stay inside together.
    """
    names = [name for name in target.split("/") if name not in ("", ".")]
    climbed = next((at for at, name in enumerate(names) if name != ".."), len(names))
    return target.startswith("/") or climbed > depth or ".." in names[climbed:]
