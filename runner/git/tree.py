"""What git's trees and names may hold, decided without touching a disk or a repository.

A *leaf* is an ``Entry``; beside the three modes of the port it may have ``GITLINK``, which is never
written to a disk and never seen outside this room.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from runner.core.errors import BadRef, HostileTree, UnknownCommit
from runner.core.ids import BRANCH_HINT, is_branch, is_commit_id
from runner.policy.names import PATH_BYTES, Kind, collisions, judge_name, parents
from runner.ports.git import Author, Change, Entry, Snapshotting

FILE, EXECUTABLE, LINK, GITLINK = 0o100644, 0o100755, 0o120000, 0o160000
_DIRECTORY = 0o040000
_KINDS: dict[int, Kind] = {FILE: "file", EXECUTABLE: "file", LINK: "link"}


def check_commit_id(text: str) -> None:
    if not is_commit_id(text):
        raise UnknownCommit(f"`{text}` is not a full commit id", hint="a commit is 40 or 64 lower-case hex digits")


def check_branch(name: str) -> None:
    if not is_branch(name):
        raise BadRef(f"`{name}` is not a branch name", hint=BRANCH_HINT)


def check_names(leaves: Iterable[Entry]) -> None:
    """Raise ``HostileTree`` for a tree that could not be written faithfully, or safely, on every disk."""
    listed = list(leaves)
    files, above = {leaf.path for leaf in listed}, parents(leaf.path for leaf in listed)
    modes = {leaf.path: leaf.mode for leaf in listed} | dict.fromkeys(sorted(above), _DIRECTORY)
    for path, mode in modes.items():
        if len(path) > PATH_BYTES:
            raise HostileTree(f"`{shown(path[:60])}...` is too long a path: {len(path)} bytes")
        name = path.rpartition(b"/")[2].decode("utf-8", "surrogateescape")
        if rule := judge_name(name, _KINDS.get(mode, "directory")):
            raise HostileTree(f"`{shown(path)}` must never be written to a disk: {rule}")
    if len(files) < len(listed) or files & above:
        counted = Counter([*(leaf.path for leaf in listed), *(files & above)])
        raise HostileTree(f"`{shown(counted.most_common(1)[0][0])}` is in the tree twice")
    for path, other in collisions(files).items():
        raise HostileTree(f"`{shown(path)}` and `{shown(other)}` cannot both be on a disk that ignores case")


def shown(path: bytes) -> str:
    """A path for a message: printable, one line."""
    return path.decode("utf-8", "backslashreplace").encode("unicode_escape").decode("ascii")


def blob_id(content: bytes, *, like: str) -> str:
    """The id of a blob in a repository whose ids look ``like`` this one."""
    found = hasher(len(content), like=like)
    found.update(content)
    return found.hexdigest()


def hasher(size: int, *, like: str, kind: bytes = b"blob") -> hashlib._Hash:
    new = hashlib.sha1 if len(like) == 40 else hashlib.sha256
    return new(b"%s %d\0" % (kind, size), usedforsecurity=False)


def covers(excluded: frozenset[bytes]) -> Callable[[bytes], bool]:
    """A test for paths that are in ``excluded`` or below one that is."""

    def covered(path: bytes) -> bool:
        end = len(path)
        while end != -1:
            if path[:end] in excluded:
                return True
            end = path.rfind(b"/", 0, end)
        return False

    return covered


def kept(base: Iterable[Entry], found: Iterable[bytes], wanted: Snapshotting) -> list[Entry]:
    """The leaves of the base that a snapshot takes over without looking at the disk.

    These are the excluded ones, and submodules unless something was put in their place.
    """
    covered = covers(wanted.exclude)
    paths = set(found)
    taken = paths | parents(paths)
    return [leaf for leaf in base if covered(leaf.path) or (leaf.mode == GITLINK and leaf.path not in taken)]


def changes(before: Sequence[Entry], after: Sequence[Entry]) -> list[Change]:
    """What differs between the leaves of two trees, by path."""
    old = {leaf.path: leaf for leaf in before}
    found = [Change(path, "D", None) for path in old.keys() - {leaf.path for leaf in after}]
    for leaf in after:
        was = old.get(leaf.path)
        if was is None:
            found.append(Change(leaf.path, "A", leaf))
        elif was.mode & 0o170000 != leaf.mode & 0o170000:
            found.append(Change(leaf.path, "T", leaf))
        elif (was.mode, was.id) != (leaf.mode, leaf.id):
            found.append(Change(leaf.path, "M", leaf))
    return sorted(found, key=lambda change: change.path)


def commit_object(tree: str, base: str | None, wanted: Snapshotting) -> bytes:
    """The body of a commit object; both adapters store these bytes, so equal input gives an equal id."""
    who = _ident(wanted.author)
    parent = f"parent {base}\n" if base else ""
    message = wanted.message.replace("\0", "").rstrip("\n")
    return f"tree {tree}\n{parent}author {who}\ncommitter {who}\n\n{message}\n".encode()


def _ident(author: Author) -> str:
    name, email = (re.sub(r"[<>\x00-\x1f]", "", part).strip(" .,:;'\"\\") for part in (author.name, author.email))
    return f"{name} <{email}> {author.seconds} +0000"
