"""Warnings about an incident's directory: files too large for a plan, and files that no agent sees."""

from __future__ import annotations

from collections.abc import Iterator

from runner.core.errors import IncidentLarge, IncidentLeftOut, Place, RunnerError
from runner.core.sanitize import excerpt
from runner.spec.model import RunFacts

_READ = "content counts up to 16 MiB a file and 256 MiB, 1,000 files and 100 entries at the top"
_HINT = "put a copy in its place, or less, if it matters; the rest is there"


def incident_advice(found: RunFacts, at: Place | None = None) -> Iterator[RunnerError]:
    """Warnings about a run's incident."""
    large = [name for name, file in (found.incident_files or {}).items() if not file.whole]
    if large:
        more = f" and {len(large) - 1} more are" if len(large) > 1 else " is"
        message = f"the incident's `{excerpt(large[0])}`{more} in /incident only, planned by size and time, not content"
        yield IncidentLarge(message, at=at, hint=_READ)
    if found.left_out:
        yield left_out(found.left_out, at)


def left_out(words: str, at: Place | None = None) -> IncidentLeftOut:
    return IncidentLeftOut(f"left out of the incident: {words}", at=at, hint=_HINT)
