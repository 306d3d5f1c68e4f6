"""What is on disk below a root that an agent could write: the scan of a whole tree.

Everything is reached as ``runner.beneath`` says, and no file is opened. All calls block: use a thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from runner import beneath
from runner.model import Violation
from runner.policy.paths import PathPolicy, State, fold, matcher, oversized, printable

_CHUNK = 1_000  # entries of one directory held at a time, so that a wide one costs no memory
_SETID = stat.S_ISUID | stat.S_ISGID
_SPECIAL = {"p": "FIFO", "s": "socket", "c": "character device", "b": "block device"}
_GIT = ".git"
_UNOPENED = {errno.EXDEV: "mount", errno.ENAMETOOLONG: "scan-limit"}  # any other error: unreadable

RawPath = bytes


@dataclass(frozen=True)
class ScanResult:
    """What a scan saw. A tree is clean when there are no violations; a truncated scan always has one.

    ``offending`` holds the paths of the violations as they are on disk, all of them unless ``truncated``;
    a directory stands for what is below it. ``bytes`` sums the sizes of regular files, holes included.
    """

    files: int
    directories: int
    bytes: int
    violations: tuple[Violation, ...]
    truncated: bool
    offending: frozenset[RawPath]


def scan(
    root: Path,
    policy: PathPolicy,
    *,
    skip_top: Sequence[str] = (".git",),
    limit_entries: int = 2_000_000,
    limit_violations: int = 1_000,
    should_stop: Callable[[], bool] = lambda: False,
) -> ScanResult:
    """Walk everything below ``root`` but the ``skip_top`` entries, and judge each entry.

    Rules besides the policy's ``forbidden:PATTERN`` and ``max-file-size``: ``special-file``, ``setuid``
    (or setgid), ``link-outside``, ``nested-git``, ``mount``, ``unreadable`` (also for a directory that
    changes meanwhile), and ``scan-limit`` for a path longer than the system allows, or when one of the
    limits or ``should_stop`` (asked every 1,000 entries) ended the walk. No file is opened. Raises
    ``OSError`` when ``root`` cannot be opened, and whatever ``should_stop`` raises.
    """
    with beneath.opened(root) as top:
        walk = _Walk(top, policy, limit_entries, limit_violations, should_stop)
        walk.run(frozenset(skip_top))
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


@dataclass(frozen=True)
class _Place:
    """An open directory: its path, the matcher's state in it, and the pattern that forbids all of it."""

    path: str
    descriptor: int
    state: State
    inherited: str | None

    def at(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name


class _Walk:
    """One scan under way."""

    def __init__(
        self,
        top: int,
        policy: PathPolicy,
        limit_entries: int,
        limit_violations: int,
        should_stop: Callable[[], bool],
    ) -> None:
        self.files = self.directories = self.bytes = 0
        self.violations: list[Violation] = []
        self.offending: set[RawPath] = set()
        self.truncated = False
        self._entries = 0
        self._top = top
        self._device = os.fstat(top).st_dev
        self._open = beneath.opener()
        self._max_file_size = policy.max_file_size
        self._forbidden = matcher(policy.forbidden)
        self._limit_entries, self._limit_violations = limit_entries, limit_violations
        self._should_stop = should_stop
        self._pending: list[tuple[str, State, str | None]] = [("", self._forbidden.root, None)]

    def run(self, skip_top: frozenset[str]) -> None:
        try:
            while self._pending:
                path, state, inherited = self._pending.pop()
                self._directory(path, state, inherited, skip_top if not path else frozenset())
        except _Stopped as reason:
            self.truncated = True
            self.violations.append(Violation(".", "scan-limit", str(reason)))

    def _directory(self, path: str, state: State, inherited: str | None, skipped: frozenset[str]) -> None:
        try:
            with self._listing(path) as (descriptor, listing):
                place = _Place(path, descriptor, state, inherited)
                while entries := list(islice(listing, _CHUNK)):
                    self._count(len(entries))
                    self._judge(place, [entry for entry in entries if entry.name not in skipped])
        except OSError as error:
            self._add(path, _UNOPENED.get(error.errno or 0, "unreadable"), os.strerror(error.errno or 0))

    @contextmanager
    def _listing(self, path: str) -> Iterator[tuple[int, Iterator[os.DirEntry[str]]]]:
        descriptor = self._open(self._top, path or ".", beneath.DIRECTORY)
        try:
            if os.fstat(descriptor).st_dev != self._device:
                raise OSError(errno.EXDEV, path)
            with os.scandir(descriptor) as listing:
                yield descriptor, listing
        finally:
            os.close(descriptor)

    def _judge(self, place: _Place, entries: list[os.DirEntry[str]]) -> None:
        most, device = self._max_file_size, self._device
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                self._irregular(place, entry)
                continue
            found = entry.stat(follow_symlinks=False)
            self.files += 1
            self.bytes += found.st_size
            if found.st_size > most or found.st_mode & _SETID or found.st_dev != device:
                self._odd_file(place.at(entry.name), found)
        self._judge_names(place, entries)

    def _judge_names(self, place: _Place, entries: list[os.DirEntry[str]]) -> None:
        names = [entry.name for entry in entries]
        if place.inherited or self._forbidden.may_forbid(place.state, names):
            for entry in entries:
                if pattern := self._forbidding(place, entry):
                    self._add(place.at(entry.name), f"forbidden:{pattern}")
        if _GIT in fold("/".join(names)):
            for name in names:
                if fold(name) == _GIT:
                    self._add(place.at(name), "nested-git")

    def _forbidding(self, place: _Place, entry: os.DirEntry[str]) -> str | None:
        directory = not entry.is_file(follow_symlinks=False)
        state = self._forbidden.enter(place.state, entry.name)
        return place.inherited or self._forbidden.forbidding(state, directory=directory)

    def _odd_file(self, path: str, found: os.stat_result) -> None:
        if found.st_size > self._max_file_size:
            violation = oversized(path, found.st_size, self._max_file_size)
            self._add(path, violation.rule, violation.detail)
        if found.st_mode & _SETID:
            self._add(path, "setuid")
        if found.st_dev != self._device:
            self._add(path, "mount")

    def _irregular(self, place: _Place, entry: os.DirEntry[str]) -> None:
        path = place.at(entry.name)
        if entry.is_dir(follow_symlinks=False):
            self.directories += 1
            if fold(entry.name) != _GIT:
                below = self._forbidden.enter(place.state, entry.name)
                self._pending.append((path, below, self._forbidding(place, entry)))
        elif entry.is_symlink():
            target = os.readlink(entry.name, dir_fd=place.descriptor)
            if leaves_tree(path.count("/"), target):
                self._add(path, "link-outside", printable(target))
        else:
            kind = stat.filemode(entry.stat(follow_symlinks=False).st_mode)[0]
            self._add(path, "special-file", _SPECIAL.get(kind, "changed during the scan"))

    def _count(self, entries: int) -> None:
        self._entries += entries
        if self._entries > self._limit_entries:
            raise _Stopped(f"more than {self._limit_entries} entries")
        if self._should_stop():
            raise _Stopped("stopped before the end")

    def _add(self, path: str, rule: str, detail: str = "") -> None:
        self.violations.append(Violation(printable(path), rule, detail))
        self.offending.add(os.fsencode(path))
        if len(self.violations) >= self._limit_violations:
            raise _Stopped(f"{self._limit_violations} violations, and perhaps more")


def leaves_tree(depth: int, target: str) -> bool:
    """Whether a link ``depth`` directories below the root may lead out of it.

    A ``..`` behind a name counts as leaving: that name may itself be a link, and then ``..`` goes up from
    wherever it leads. With leading ``..`` only, links that are each judged inside stay inside together.
    """
    names = [name for name in target.split("/") if name not in ("", ".")]
    climbed = next((at for at, name in enumerate(names) if name != ".."), len(names))
    return target.startswith("/") or climbed > depth or ".." in names[climbed:]
