"""Return foreign output as one line that is safe to show."""

from __future__ import annotations

import os
from pathlib import Path

from runner.core.sanitize import sanitize

_TAIL = 8 << 10  # bytes


def last_line(output: bytes) -> str:
    """Return the last line that is not blank, escaped and cut; empty when there is none."""
    lines = output.decode(errors="replace").strip().splitlines()
    return sanitize(lines[-1].strip()) if lines else ""


def tail(path: Path) -> bytes:
    """Read the end of a file, as much as is searched for its last line."""
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL))
        return stream.read()
