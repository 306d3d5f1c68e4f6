"""Manifests of older versions rewritten in the version of today, with every line that need not change as it is.

Each document is taken from version to version by its upgrade, read again, and compared with what the upgrade
says that it must hold; so a layout that the rewriting does not master is refused, never spoilt. Then it is
judged as a manifest of today, and what is wrong is shown where it stands in the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from types import ModuleType

from runner.core import plugins
from runner.core.errors import NotConvertible, RunnerError, UnreadableManifest, UnwritableManifest, in_order
from runner.core.sanitize import excerpt
from runner.manifest import text
from runner.manifest import upgrade as upgrades
from runner.manifest.load import files, judge
from runner.manifest.text import Tree
from runner.manifest.upgrade._rewrite import Rewrite

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Conversion:
    """A file before and after, with line breaks as ``\\n``; equal when it has nothing of an older version."""

    path: Path
    before: str
    after: str
    raw: bytes

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def content(self) -> bytes:
        """Return the new file content, with the byte order mark and line breaks of the old one."""
        ends = "\r\n" if b"\r\n" in self.raw else "\n"
        return (_BOM if self.raw.startswith(_BOM) else b"") + self.after.replace("\n", ends).encode()


def convert(path: Path) -> tuple[list[Conversion], list[RunnerError]]:
    """Convert the documents of a file or folder, as ``load`` finds them; with an error none must be written."""
    try:
        paths = files(path)
    except OSError as error:
        return [], [UnreadableManifest(f"`{excerpt(str(path))}` cannot be read: {(error.strerror or '').lower()}")]
    conversions, found = [], []
    for file in paths:
        try:
            conversion, errors = _convert_file(file)
        except RunnerError as error:
            found.append(error)
        else:
            conversions.append(conversion)
            found += errors
    return conversions, in_order(found)


def write(conversions: Sequence[Conversion]) -> None:
    """Write the files that changed, each whole or not at all, with the mode it has; none if one cannot be prepared.

    Raises ``UnwritableManifest``.
    """
    halves: list[tuple[Path, Path]] = []
    try:
        for conversion in conversions:
            if conversion.changed:
                target = Path(os.path.realpath(conversion.path))
                half = target.with_name(f".{token_hex(8)}")
                halves.append((half, target))
                half.write_bytes(conversion.content)
                half.chmod(target.stat().st_mode & 0o7777)
        for half, target in halves:
            os.replace(half, target)
    except OSError as error:
        for half, _ in halves:
            half.unlink(missing_ok=True)
        message = f"`{excerpt(str(target), 1000)}` cannot be written: {(error.strerror or '').lower()}"
        raise UnwritableManifest(message) from error


def _convert_file(path: Path) -> tuple[Conversion, list[RunnerError]]:
    file = str(path)
    raw = text.read(path, file)
    before = text.decode(file, raw)
    trees, found = text.parse(file, raw)
    after, end = "", 0
    starts = [0, *(position + 1 for position, character in enumerate(before) if character == "\n")]
    for tree in trees:
        rewritten, errors = _convert_document(tree, path)
        found += errors
        start = starts[tree.source.line]
        if rewritten is not None and start < end:
            found.append(_unmastered(tree, "start each document with a line `---`"))
        elif rewritten is not None:
            after += before[end:start] + rewritten
            end = start + len(tree.source.text)
    return Conversion(path, before, after + before[end:], raw), found


def _convert_document(tree: Tree, path: Path) -> tuple[str | None, list[RunnerError]]:
    """The new text of a document, ``None`` if it is of today, and what is wrong with it."""
    step = _upgrade_of(tree)
    if step is None or not isinstance(tree.data, dict) or not tree.sound:
        return None, []
    rewrite = Rewrite(tree.source)
    version = tree.node("apiVersion")
    rewrite.edit(version, rewrite.written(version).replace(tree.data["apiVersion"], step.NEXT))
    expected, found = step.upgrade(tree, rewrite)
    if expected is None:
        return rewrite.text, found
    again, errors = text.parse(tree.source.file, rewrite.text.encode())
    if errors or len(again) != 1 or not rewrite.whole or again[0].data != {**expected, "apiVersion": step.NEXT}:
        return rewrite.text, found or [_unmastered(tree, "write each field on a line of its own, without aliases")]
    rewritten, errors = _convert_document(again[0], path)
    if rewritten is None:
        _, errors = judge(again[0], path)
    for error in errors:
        error.at = rewrite.origin(error.at) if error.at else None
        error.also = tuple(map(rewrite.origin, error.also))
    known = {place for finding in found for place in (finding.at, *finding.also)}
    return rewritten or rewrite.text, [*found, *(error for error in errors if error.at not in known)]


def _upgrade_of(tree: Tree) -> ModuleType | None:
    version = tree.data.get("apiVersion") if isinstance(tree.data, dict) else None
    name = version.removeprefix("runner/") if isinstance(version, str) else ""
    return plugins.load(upgrades, name) if name in plugins.names(upgrades) else None


def _unmastered(tree: Tree, hint: str) -> RunnerError:
    return NotConvertible("the layout of this document cannot be converted", at=tree.place("apiVersion"), hint=hint)
