"""How long an answer is waited for that may still come: longer each time, for a share of what time is left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

SHARE = 1 / 3  # of the time that is left
MOST_WAITED = 240.0  # seconds of that; a CLI gives up after 300 in which it hears nothing
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a request is made again
UNREACHED_WAITED = 3.0  # seconds in all; a name or a certificate that is wrong stays so


@dataclass
class Patience:
    """How many more seconds one request is worth, and how many pass before it is made again."""

    left: float
    pause: float = FIRST_PAUSE

    @property
    def is_worn(self) -> bool:
        """Whether something has been waited for."""
        return self.pause > FIRST_PAUSE

    def wait(self, told: float = 0.0) -> float | None:
        """How long to wait now, at least what a provider has ``told``; ``None`` when that is not worth it."""
        pause = max(self.pause, told)
        if pause > self.left:
            return None
        self.left -= pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        return pause


def patience_until(deadline: float, now: float) -> Patience:
    return Patience(min(MOST_WAITED, SHARE * (deadline - now)))


def told_pause(headers: Mapping[bytes, bytes]) -> float:
    """How many seconds a provider asks to wait, by its own clock; 0 when it asks for nothing."""
    told = headers.get(b"retry-after", b"").decode(errors="replace")
    try:
        seconds = float(told)
    except ValueError:
        try:
            now = parsedate_to_datetime(headers.get(b"date", b"").decode(errors="replace"))
            seconds = (parsedate_to_datetime(told) - now).total_seconds()
        except (TypeError, ValueError):
            return 0.0
    return 0.0 if math.isnan(seconds) else seconds
