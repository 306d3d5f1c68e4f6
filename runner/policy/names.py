"""Rules for names in a commit's tree: the same for what is fetched, what is on a disk, and what is published.

A tree is refused for a name that some disk takes for git's own directory, for one that no disk holds, and for two names
that some disks take for one (letters that differ in case, composition, or characters that HFS+ skips): whoever checks
it out there has other files than those that were verified. So the disks of macOS and Windows decide for all, and what
one run publishes, the next can start from. Control characters, bytes that are no text, and what only Windows reserves
are names like any other: nothing else is mistaken for them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from runner.core.patterns import pattern
from runner.policy.paths import fold

NAME_BYTES = 255
PATH_BYTES = 4000  # what is left of the kernel's 4096 below a root

Kind = Literal["file", "link", "directory"]

# A name as NTFS reads it ends before dots, spaces and the name of a stream, and `\` divides it. As git reads it for
# HFS+, it ends before bytes that are no text.
_END = r"(?:[. ]*(?::[^/\\]*)?[/\\]|[\udc80-\udcff\ufffe\uffff])"
_AS_GIT = pattern(rf"[/\\](?:\.git|git~1){_END}")
_SHORT = r"(?:gi7{0}~[1-9]|gi7{1}~[1-9]\d|gi7{2}~[1-9]\d\d|gi7~[1-9]\d{{3}})"  # that NTFS makes when there are many
_AS_GITMODULES = pattern(rf"[/\\](?:\.gitmodules|gitmod~[1-4]|{_SHORT.format('eba', 'eb', 'e')}){_END}")
_AS_GITATTRIBUTES = pattern(rf"[/\\](?:\.gitattributes|gitatt~[1-4]|{_SHORT.format('d29', 'd2', 'd')}){_END}")
# Code points that HFS+ drops from names: `.g<U+200C>it` is `.git` there.
_DROPPED = dict.fromkeys([*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF])


def judge_name(name: str, kind: Kind = "file") -> str | None:
    """The rule that one component of a path breaks: ``unsafe-name``, ``long-name``, ``nested-git`` or ``no-file``.

    The last is for ``.gitmodules`` and ``.gitattributes``, which git refuses as directories, and the first as a link.
    """
    if name in ("", ".", ".."):
        return "unsafe-name"
    if name.isascii() and len(name) <= NAME_BYTES and "gi" not in name.lower():  # nearly all that there are
        return None
    if len(name.encode(errors="surrogateescape")) > NAME_BYTES:
        return "long-name"
    text = fold(f"/{name}/")
    if _AS_GIT.search(text):
        return "nested-git"
    if kind != "file" and (_AS_GITMODULES.search(text) or (kind == "directory" and _AS_GITATTRIBUTES.search(text))):
        return "no-file"
    return None


def read_by_git(name: str) -> str | None:
    """Return the file that git takes this name for, if it reads it: ``.gitmodules`` or ``.gitattributes``."""
    text = fold(f"/{name}/")
    if _AS_GITMODULES.search(text):
        return ".gitmodules"
    return ".gitattributes" if _AS_GITATTRIBUTES.search(text) else None


def may_offend(folded: str) -> bool:
    """Tell whether one of these names can be git's own: ``folded``, with a slash before each and behind the last."""
    return _AS_GIT.search(folded) is not None


def collisions(paths: Collection[bytes]) -> Mapping[bytes, bytes]:
    """The files that some disks cannot hold beside others.

    Each with what it, or a directory above it, collides with.
    """
    names = {*paths, *parents(paths)}
    folded = {_fold(name) for name in names}
    if len(folded) == len(names):
        return {}
    spellings: dict[bytes, list[bytes]] = {}
    for name in sorted(names):
        spellings.setdefault(_fold(name), []).append(name)
    other = {
        name: next(one for one in alike if one != name)
        for alike in spellings.values()
        if len(alike) > 1
        for name in alike
    }
    found = {
        path: next((other[each] for each in sorted({path, *parents([path])}) if each in other), None)
        for path in sorted(paths)
    }
    return {path: beside for path, beside in found.items() if beside is not None}


def parents(paths: Iterable[bytes]) -> set[bytes]:
    """Every directory above any of the paths, without the root of a relative one."""
    above: set[bytes] = set()
    for path in paths:
        end = path.rfind(b"/")
        while end != -1 and path[:end] not in above:
            above.add(path[:end])
            end = path.rfind(b"/", 0, end)
    return above


def _fold(path: bytes) -> bytes:
    if path.isascii():
        return path.lower()
    text = unicodedata.normalize("NFD", path.decode(errors="surrogateescape").translate(_DROPPED))
    return unicodedata.normalize("NFD", text.casefold()).encode(errors="surrogateescape")
