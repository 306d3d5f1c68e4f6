"""The rules for git's trees and names, decided without touching a disk or a repository.

Beside the three modes of the port a ``TreeEntry`` may have ``GITLINK`` (a submodule), which is never written to a disk
and never leaves this room.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from runner.core.errors import BadRef, HostileTree, UnknownCommit
from runner.core.ids import BRANCH_HINT, is_branch, is_commit_id
from runner.core.sanitize import printable_path
from runner.policy.names import PATH_BYTES, Kind, collisions, judge_name, parents
from runner.ports.git import Author, Change, SnapshotOptions, TreeEntry

FILE, EXECUTABLE, LINK, GITLINK = 0o100644, 0o100755, 0o120000, 0o160000
_DIRECTORY = 0o040000
_KINDS: dict[int, Kind] = {FILE: "file", EXECUTABLE: "file", LINK: "link"}


def check_commit_id(text: str) -> None:
    if not is_commit_id(text):
        raise UnknownCommit(f"`{text}` is not a full commit id", hint="a commit is 40 or 64 lower-case hex digits")


def check_branch(name: str) -> None:
    if not is_branch(name):
        raise BadRef(f"`{name}` is not a branch name", hint=BRANCH_HINT)


def check_names(entries: Iterable[TreeEntry]) -> None:
    """Raise ``HostileTree`` for a tree that could not be written faithfully, or safely, on every disk."""
    listed = list(entries)
    files, above = {entry.path for entry in listed}, parents(entry.path for entry in listed)
    modes = {entry.path: entry.mode for entry in listed} | dict.fromkeys(sorted(above), _DIRECTORY)
    for path, mode in modes.items():
        if len(path) > PATH_BYTES:
            raise HostileTree(f"`{printable_path(path[:60])}...` is too long a path: {len(path)} bytes")
        name = path.rpartition(b"/")[2].decode("utf-8", "surrogateescape")
        if rule := judge_name(name, _KINDS.get(mode, "directory")):
            raise HostileTree(f"`{printable_path(path)}` must never be written to a disk: {rule}")
    if len(files) < len(listed) or files & above:
        counted = Counter([*(entry.path for entry in listed), *(files & above)])
        raise HostileTree(f"`{printable_path(counted.most_common(1)[0][0])}` is in the tree twice")
    for path, other in collisions(files).items():
        raise HostileTree(
            f"`{printable_path(path)}` and `{printable_path(other)}` cannot both be on a disk that ignores case"
        )


def blob_id(content: bytes, *, like: str) -> str:
    """Return the id of a blob in a repository whose ids look ``like`` this one."""
    found = hasher(len(content), like=like)
    found.update(content)
    return found.hexdigest()


def hasher(size: int, *, like: str, kind: bytes = b"blob") -> hashlib._Hash:
    new = hashlib.sha1 if len(like) == 40 else hashlib.sha256
    return new(b"%s %d\0" % (kind, size), usedforsecurity=False)


def covers(excluded: frozenset[bytes]) -> Callable[[bytes], bool]:
    """Return a test for paths that are in ``excluded`` or below one that is."""

    def covered(path: bytes) -> bool:
        end = len(path)
        while end != -1:
            if path[:end] in excluded:
                return True
            end = path.rfind(b"/", 0, end)
        return False

    return covered


def carried_over(base: Iterable[TreeEntry], found: Iterable[bytes], options: SnapshotOptions) -> list[TreeEntry]:
    """List the entries of the base that a snapshot takes over without looking at the disk.

    These are the excluded ones, and submodules unless something was put in their place.
    """
    covered = covers(options.exclude)
    paths = set(found)
    taken = paths | parents(paths)
    return [entry for entry in base if covered(entry.path) or (entry.mode == GITLINK and entry.path not in taken)]


def changes(before: Sequence[TreeEntry], after: Sequence[TreeEntry]) -> list[Change]:
    """List the differences between the entries of two trees, by path."""
    old = {entry.path: entry for entry in before}
    found = [Change(path, "D", None) for path in old.keys() - {entry.path for entry in after}]
    for entry in after:
        was = old.get(entry.path)
        if was is None:
            found.append(Change(entry.path, "A", entry))
        elif was.mode & 0o170000 != entry.mode & 0o170000:
            found.append(Change(entry.path, "T", entry))
        elif (was.mode, was.id) != (entry.mode, entry.id):
            found.append(Change(entry.path, "M", entry))
    return sorted(found, key=lambda change: change.path)


def commit_object(tree: str, base: str | None, options: SnapshotOptions) -> bytes:
    """Return the body of a commit object; both adapters store these bytes, so equal input gives an equal id."""
    who = _ident(options.author)
    parent = f"parent {base}\n" if base else ""
    message = options.message.replace("\0", "").rstrip("\n")
    return f"tree {tree}\n{parent}author {who}\ncommitter {who}\n\n{message}\n".encode()


def _ident(author: Author) -> str:
    name, email = (re.sub(r"[<>\x00-\x1f]", "", part).strip(" .,:;'\"\\") for part in (author.name, author.email))
    return f"{name} <{email}> {author.seconds} +0000"
