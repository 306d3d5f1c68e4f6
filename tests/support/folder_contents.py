"""Folders of files: how they are made, and all of one in one value, to say that nothing has changed."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path


def everything(top: Path, *, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Each path below ``top``, ``.git`` included, with its mode and a hash of its content."""
    found = {}
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = Path(folder, name)
            relative = str(path.relative_to(top))
            if relative.startswith(without):
                continue
            status = path.lstat()
            content = b""
            if stat.S_ISREG(status.st_mode):
                content = path.read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                content = os.fsencode(path.readlink())
            found[relative] = f"{status.st_mode:o} {hashlib.sha256(content).hexdigest()}"
    return found


def folder(path: Path, mode: int = 0o777) -> Path:
    """Make a folder, and those that it lies in."""
    path.mkdir(mode, parents=True, exist_ok=True)
    return path


def put(path: Path, content: str | bytes = "", mode: int | None = None) -> Path:
    """Write a file, in folders that are made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if mode is not None:
        path.chmod(mode)
    return path
