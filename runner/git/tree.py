"""What git's trees and names may hold, decided without touching a disk or a repository.

A *leaf* is an ``Entry``; beside the three modes of the port it may have ``GITLINK``, which is never
written to a disk and never seen outside this room.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from runner.errors import BadRef, HostileTree, UnknownCommit
from runner.ids import BRANCH_HINT, is_branch, is_commit_id
from runner.ports.git import Author, Change, Entry, Snapshotting

FILE, EXECUTABLE, LINK, GITLINK = 0o100644, 0o100755, 0o120000, 0o160000

# Code points that HFS+ drops from names: `.g<U+200C>it` is `.git` there.
_DROPPED = dict.fromkeys([*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF])
_REFUSED = (".git", "git~1")
_REFUSED_LINKS = (*_REFUSED, ".gitmodules", "gitmod~1")
_STREAM = re.compile(r":.*", re.DOTALL)


def check_commit_id(text: str) -> None:
    if not is_commit_id(text):
        raise UnknownCommit(f"`{text}` is not a full commit id", hint="a commit is 40 or 64 lower-case hex digits")


def check_branch(name: str) -> None:
    if not is_branch(name):
        raise BadRef(f"`{name}` is not a branch name", hint=BRANCH_HINT)


def is_hostile(name: bytes, *, link: bool = False) -> bool:
    """Whether one component of a path must never reach a disk.

    These are ``..``, and ``.git`` as some file system reads it; for a link ``.gitmodules`` as well,
    because git refuses it.
    """
    if name in (b"", b".", b".."):
        return True
    refused = _REFUSED_LINKS if link else _REFUSED
    for part in name.split(b"\\"):
        text = part.decode("utf-8", "surrogateescape").translate(_DROPPED).casefold()
        if _STREAM.sub("", text).rstrip(". ") in refused:
            return True
    return False


def check_names(leaves: Iterable[Entry]) -> None:
    """Raise ``HostileTree`` for a tree that could not be written faithfully, or safely, on every disk."""
    seen: dict[bytes, bytes] = {}  # folded path of a directory or leaf: its spelling, ending in / for a directory
    for leaf in leaves:
        end = leaf.path.find(b"/")
        while end != -1:
            _admit(seen, leaf.path[: end + 1], leaf.path)
            end = leaf.path.find(b"/", end + 1)
        if _admit(seen, leaf.path, leaf.path):
            raise HostileTree(f"`{shown(leaf.path)}` is in the tree twice")
        if is_hostile(leaf.path.rpartition(b"/")[2], link=leaf.mode == LINK):
            raise HostileTree(f"`{shown(leaf.path)}` must never be written to a disk")


def _admit(seen: dict[bytes, bytes], path: bytes, whole: bytes) -> bool:
    """Note a directory or leaf; whether it was known with this very spelling."""
    folded = _fold(path.rstrip(b"/"))
    known = seen.get(folded)
    if known == path:
        return True
    if known is not None:
        raise HostileTree(f"`{shown(whole)}` and `{shown(known)}` cannot both be on a disk that ignores case")
    if path.endswith(b"/") and is_hostile(path[:-1].rpartition(b"/")[2]):
        raise HostileTree(f"`{shown(whole)}` must never be written to a disk")
    seen[folded] = path
    return False


def _fold(path: bytes) -> bytes:
    if path.isascii():
        return path.lower()
    text = unicodedata.normalize("NFD", path.decode("utf-8", "surrogateescape"))
    return unicodedata.normalize("NFD", text.casefold()).encode("utf-8", "surrogateescape")


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


def parents(paths: Iterable[bytes]) -> set[bytes]:
    """Every directory above any of the paths, without the root."""
    above: set[bytes] = set()
    for path in paths:
        end = path.rfind(b"/")
        while end != -1 and path[:end] not in above:
            above.add(path[:end])
            end = path.rfind(b"/", 0, end)
    return above


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
