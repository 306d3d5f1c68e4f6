"""Foreign output as one line that is safe to show."""

from __future__ import annotations

from runner.errors import printable


def last_line(output: bytes) -> str:
    """The last line that is not blank, escaped and cut; empty when there is none."""
    lines = output.decode(errors="replace").strip().splitlines()
    return printable(lines[-1].strip()) if lines else ""
