"""Where a process is, for a person who has to deal with it."""

from __future__ import annotations

from pathlib import Path


def in_group(pid: int) -> str:
    """Its control groups, as in `` in cgroup `/runner-w` ``; empty if they are our own, or it has ended."""
    try:
        groups = _groups(str(pid)) - _groups("self")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return f" in cgroup {', '.join(f'`{group}`' for group in sorted(groups))}" if groups else ""


def _groups(pid: str) -> set[str]:
    lines = Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines()
    return {line.split(":", 2)[2] for line in lines}
