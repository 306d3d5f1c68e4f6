"""Expiry of workspaces, and whether this host's clock can be trusted about it.

Times are microseconds since the epoch by the store's clock.
"""

from __future__ import annotations

from runner.core.model import ClockReference

STEADY = 300.0  # seconds that a wall clock may move against the time since boot


def expiry(created: int, used: int, *, ttl_seconds: float, max_age_seconds: float | None) -> int:
    """Return the moment at which a workspace expires, last used at ``used`` and created at ``created``."""
    by_use = used + round(ttl_seconds * 1e6)
    return by_use if max_age_seconds is None else min(by_use, created + round(max_age_seconds * 1e6))


def expired(expires: int | None, now: int) -> bool:
    return expires is not None and expires <= now


def why_unsteady(before: ClockReference | None, seen: ClockReference, *, newest: int, now: int) -> str | None:
    """Return why nothing may be removed for its age now; ``None`` when the clock has been steady.

    ``before`` is the previous reading. ``newest`` is the time of the newest event.
    """
    if now < newest:
        return f"the clock is {_seconds(newest - now)} behind the newest event"
    if before is None or before.boot != seen.boot:
        return None
    moved = seen.offset - before.offset
    if abs(moved) <= STEADY * 1e6:
        return None
    return f"the clock was set {'forward' if moved > 0 else 'back'} by {_seconds(abs(moved))} since the last look"


def _seconds(microseconds: int) -> str:
    return f"{microseconds / 1e6:,.0f} s"
