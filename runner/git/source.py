"""A user's repository on this host: found, judged and compared without running anything of it.

Its directories are found by looking, not by asking git, so that neither its configuration nor
its hooks have a say. The index is read for its stat data only: what git last saw unchanged is unchanged.
What reads one is imported where there is one.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import BadSource
from runner.git import disk
from runner.git.ignore import IgnoreRules
from runner.git.tree import GITLINK
from runner.ports.git import Entry

if TYPE_CHECKING:
    from dulwich.index import IndexEntry

_SKIP_WORKTREE = 0x4000  # of an index entry's extended flags: not on the disk on purpose
_SMALL = 1 << 16  # bytes: a .git file, a commondir file


@dataclass(frozen=True)
class Place:
    """Where a repository is: its work tree (``None`` when bare), its git directory, the one shared by work trees."""

    top: Path
    bare: bool
    git: Path
    common: Path


def find(path: Path) -> Place:
    """The repository that ``path`` is in. Raises ``BadSource`` as the port's ``inspect`` says."""
    path = Path(os.path.realpath(path))
    if not os.path.exists(path):
        raise BadSource(f"`{path}` does not exist")
    if not path.is_dir():
        raise BadSource(f"`{path}` is not a directory")
    for folder in (path, *path.parents):
        if place := _at(folder):
            _check(path, place)
            return place
    raise BadSource(f"`{path}` is not a git repository", hint="git init there, or use `type: none` for an empty tree")


def _at(folder: Path) -> Place | None:
    own = folder / ".git"
    if own.is_file():
        text = _small(own)
        if not text.startswith("gitdir: "):
            raise BadSource(f"`{own}` does not say where its repository is")
        git = Path(os.path.normpath(folder / text.removeprefix("gitdir: ")))
        return Place(folder, False, git, common(git))
    for git, bare in ((own, False), (folder, True)):
        if (git / "HEAD").is_file() and (git / "objects").is_dir():
            return Place(folder, bare, git, git)
    return None


def common(git: Path) -> Path:
    """The directory with the objects and branches of a git directory: another one for a linked work tree."""
    own = git / "commondir"
    return Path(os.path.normpath(git / _small(own))) if own.is_file() else git


def _small(path: Path) -> str:
    with path.open("rb") as file:
        text = os.fsdecode(file.read(_SMALL)).rstrip("\n")
    if "\0" in text:
        raise BadSource(f"`{path}` does not say where its repository is")
    return text


def _check(path: Path, place: Place) -> None:
    for part in (path, place.top, place.git, place.common, place.common / "objects"):
        try:
            owner = part.stat().st_uid
        except OSError as error:
            raise BadSource(f"`{part}` of the repository at `{place.top}`: {error.strerror}") from error
        if owner != os.geteuid():
            raise BadSource(f"`{part}` belongs to another user (uid {owner})", hint="make a clone of your own")
    for file in (place.git / "index", place.git / "commondir", place.common / "config", place.common / "packed-refs"):
        if file.exists() and not file.is_file():  # git would wait for what is in a FIFO
            raise BadSource(f"`{file}` of the repository at `{place.top}` is not a regular file")
    for name in ("alternates", "http-alternates"):
        if (place.common / "objects" / "info" / name).exists():
            raise BadSource(
                f"`{place.top}` borrows objects from another repository",
                hint="git repack -a -d, then remove objects/info/alternates",
            )


def uncommitted(place: Place, head: Sequence[Entry]) -> list[bytes]:
    """The paths whose files differ from HEAD's leaves: changed, deleted, or untracked and not ignored."""
    if place.bare:
        return []
    index = read_index(place.git / "index", like=head[0].id if head else "0" * 40)
    committed = {leaf.path: leaf for leaf in head}
    known = index.entries
    submodules = {leaf.path for leaf in head if leaf.mode == GITLINK}
    submodules |= {path for path, entry in known.items() if entry.mode == GITLINK}
    with disk.Directories(place.top) as directories:
        found, _ = disk.walk(
            place.top,
            ignores=IgnoreRules(lambda folder: _ignore_file(directories, folder), extra=_exclude_file(place)),
            tracked=committed.keys() | known.keys(),
            exclude=frozenset(submodules),
        )
        changed = [each.path for each in found if _differs(directories, each, index, committed.get(each.path))]
    absent = committed.keys() - {each.path for each in found} - submodules
    changed += [path for path in absent if path not in known or not known[path].extended_flags & _SKIP_WORKTREE]
    return sorted(changed)


@dataclass(frozen=True)
class SeenIndex:
    """What git saw of a work tree; ``written`` is the index's own time, in nanoseconds."""

    entries: Mapping[bytes, IndexEntry]
    written: int

    def vouches(self, found: disk.Found, leaf: Entry) -> bool:
        """Whether git saw this file when it held the leaf's content, and it has not been touched since.

        As in git, a file changed no earlier than the index was written proves nothing.
        """
        return self.vouched(found) == leaf.id

    def vouched(self, found: disk.Found) -> str | None:
        """The id of a file's content, if git saw it and the file has not been touched since."""
        known = self.entries.get(found.path)
        if known is None:
            return None
        now = found.stat
        untouched = (
            now.st_mtime_ns < self.written
            and (known.mtime, known.ctime) == (divmod(now.st_mtime_ns, 10**9), divmod(now.st_ctime_ns, 10**9))
            and (known.size, known.ino) == (now.st_size & 0xFFFFFFFF, now.st_ino & 0xFFFFFFFF)
        )
        return known.sha.decode() if untouched else None


def read_index(path: Path, *, like: str) -> SeenIndex:
    """An index with ids ``like`` this one; empty when there is none. Raises ``BadSource``."""
    if not path.exists():
        return SeenIndex({}, 0)
    from dulwich.index import IndexEntry, UnsupportedIndexFormat, read_index_dict
    from dulwich.object_format import SHA1, SHA256

    ids = SHA256 if len(like) == 64 else SHA1
    try:
        with path.open("rb") as file:
            entries, written = read_index_dict(file, object_format=ids), os.fstat(file.fileno()).st_mtime_ns
    except (AssertionError, ValueError, UnsupportedIndexFormat, struct.error) as error:
        raise BadSource(f"the index `{path}` cannot be read: {error}") from error
    return SeenIndex({path: e for path, e in entries.items() if isinstance(e, IndexEntry)}, written)


def _ignore_file(directories: disk.Directories, folder: bytes) -> bytes | None:
    path = folder + b"/.gitignore" if folder else b".gitignore"
    try:
        above = directories.open(folder)
        if not stat.S_ISREG(os.lstat(b".gitignore", dir_fd=above).st_mode):
            return None
    except FileNotFoundError:
        return None
    return b"".join(disk.read(directories, path))


def _exclude_file(place: Place) -> bytes:
    path = place.common / "info" / "exclude"
    return path.read_bytes() if path.is_file() else b""


def _differs(directories: disk.Directories, found: disk.Found, index: SeenIndex, leaf: Entry | None) -> bool:
    if leaf is None or leaf.mode != found.mode:
        return True
    return not index.vouches(found, leaf) and disk.identify(directories, found, like=leaf.id) != leaf.id


def copy(place: Place, paths: Sequence[bytes], into: Path) -> None:
    """Make ``into`` have these paths as the work tree has them now, present or not."""
    with disk.Directories(place.top) as source, disk.Directories(into) as target:
        for path in paths:
            disk.remove(target, path)
        for path in paths:
            folder, _, name = path.rpartition(b"/")
            try:
                status = os.lstat(name, dir_fd=source.open(folder))
            except (FileNotFoundError, NotADirectoryError):
                continue
            if not stat.S_ISDIR(status.st_mode):
                disk.write(target, path, disk.mode_of(status), disk.read(source, path))
