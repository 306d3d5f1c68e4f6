"""Folders in memory, for tests of what dies by a signal: it loses nothing that a disk would have had."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.safefs import trees

_MEMORY = Path("/dev/shm")


@contextmanager
def quick_folder(otherwise: Path) -> Iterator[Path]:
    """Make a folder for the length of the block; where there is no room in memory it is ``otherwise``."""
    if not os.access(_MEMORY, os.W_OK) or shutil.disk_usage(_MEMORY).free < 1 << 30:
        yield otherwise
        return
    for old in _MEMORY.glob("runner-crashing-*"):
        if time.time() - old.stat().st_mtime > 86_400:
            trees.remove(old)  # of tests that were killed
    folder = Path(tempfile.mkdtemp(prefix="runner-crashing-", dir=_MEMORY))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        trees.remove(folder)
