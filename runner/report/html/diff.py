"""A patch as changed files, for a page."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

_KINDS = {"+": "added", "-": "removed", "@": "hunk"}


class FileDiff(Struct):
    """One changed file. ``lines`` are pairs of a kind (``added``, ``removed``, ``hunk`` or nothing) and the line."""

    name: str
    lines: list[tuple[str, str]] = []
    added: int = 0
    removed: int = 0


def files_of(patch: Iterable[str]) -> list[FileDiff]:
    """Split a patch that git wrote; contents of binary files are left out."""
    found: list[FileDiff] = []
    within, binary = False, False
    for line in patch:
        if line.startswith("diff --git "):
            found.append(FileDiff(name=_name(line)))
            within = binary = False
        elif not found or binary:
            continue
        elif within or line.startswith("@@"):
            _add(found[-1], line)
            within = True
        elif line.startswith("GIT binary patch"):
            found[-1].lines.append(("hunk", "binary, not shown"))
            binary = True
        elif not line.startswith(("index ", "--- ", "+++ ")):
            found[-1].lines.append(("hunk", line))
    return found


def _add(file: FileDiff, line: str) -> None:
    kind = _KINDS.get(line[:1], "")
    file.lines.append((kind, line))
    file.added += kind == "added"
    file.removed += kind == "removed"


def _name(line: str) -> str:
    """Return the name after the change; a name with a space has nothing that ends it but its own repetition."""
    names = line.removeprefix("diff --git ")
    half = names[len(names) // 2 + 1 :]
    return half.removeprefix("b/") if names == f"a/{half[2:]} {half}" else names
