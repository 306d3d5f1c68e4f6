"""The pauses before a failed request is retried: longer each time, within a share of the time that is left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

MAX_SHARE = 1 / 3  # of the time that is left
MAX_WAIT = 240.0  # seconds of that; a CLI gives up after 300 in which it hears nothing
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a retry
MAX_WAIT_UNREACHED = 3.0  # seconds in all; a wrong name or certificate stays wrong


@dataclass
class Backoff:
    """The seconds that one request may still be delayed by retries, and the pause before the next."""

    left: float
    pause: float = FIRST_PAUSE

    @property
    def has_waited(self) -> bool:
        return self.pause > FIRST_PAUSE

    def next_pause(self, requested: float = 0.0) -> float | None:
        """Return the pause before the next retry, at least the ``requested`` one; ``None`` to give up."""
        pause = max(self.pause, requested)
        if pause > self.left:
            return None
        self.left -= pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        return pause


def backoff_until(deadline: float, now: float) -> Backoff:
    return Backoff(min(MAX_WAIT, MAX_SHARE * (deadline - now)))


def requested_pause(headers: Mapping[bytes, bytes]) -> float:
    """Return the seconds that a provider asks to wait, by its own clock; 0 when it does not ask."""
    value = headers.get(b"retry-after", b"").decode(errors="replace")
    try:
        seconds = float(value)
    except ValueError:
        try:
            now = parsedate_to_datetime(headers.get(b"date", b"").decode(errors="replace"))
            seconds = (parsedate_to_datetime(value) - now).total_seconds()
        except (TypeError, ValueError):
            return 0.0
    return 0.0 if math.isnan(seconds) else seconds
