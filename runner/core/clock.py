"""The wall clock of this host."""

from __future__ import annotations

import time


def now_microseconds() -> int:
    """Return the time in microseconds since the epoch."""
    return time.time_ns() // 1000
