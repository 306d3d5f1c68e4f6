"""Bundles of private repositories: a list of commits, and a pack with all that they need."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from runner.core.errors import GitFailed
from runner.git import disk

_SIGNATURES = (b"# v2 git bundle\n", b"# v3 git bundle\n")
_MOST_LINES = 100
_LONGEST = 1024  # bytes of a line


def header(commits: Sequence[str]) -> bytes:
    """Return what comes before the pack: the commits, each under a name of its own."""
    wide = len(commits[0]) == 64  # ids of SHA-256
    signature = "# v3 git bundle\n@object-format=sha256\n" if wide else "# v2 git bundle\n"
    return "".join(
        [signature, *(f"{commit} refs/heads/run-{number}\n" for number, commit in enumerate(commits)), "\n"]
    ).encode()


def skip_header(file: BinaryIO) -> str:
    """Read up to the pack, and return the first commit. Raises ``GitFailed``."""
    first = ""
    if file.readline(_LONGEST) in _SIGNATURES:
        for _ in range(_MOST_LINES):
            line = file.readline(_LONGEST)
            if line == b"\n" and first:
                return first
            if not first and not line.startswith((b"@", b"-")):
                first = line.partition(b" ")[0].decode(errors="replace")
    raise GitFailed("a bundle of a private repository is damaged")


def prepare(bundle: Path, shallow: Path | None, into: Path) -> None:
    """Make the empty private repository for the objects of a bundle, cut as its own was."""
    with bundle.open("rb") as file:
        commit = skip_header(file)
    disk.init_private(into, like=commit)
    if shallow is not None:
        shutil.copyfile(shallow, into / "shallow")
