"""Pauses before a server that has ended is started anew."""

from __future__ import annotations

from collections.abc import Callable

WINDOW = 60.0  # seconds
FREE = 3  # crashes in them that cost no pause
STEPS = (5.0, 15.0, 45.0)  # seconds, for those beyond
JITTER = 0.1  # at most, as a part of a pause, so that several servers do not start at once


class Restarts:
    """The crashes of one server. Those of more than ``WINDOW`` seconds ago count no more.

    Pauses grow from crash to crash until the server has lived longer than that. ``chance`` returns numbers from 0 to 1.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._crashes: list[float] = []
        self._pauses = 0

    def pause(self, started: float, now: float) -> float:
        """Return the seconds before a server is started anew that has crashed ``now``; 0 for at once."""
        if now - started > WINDOW:
            self._crashes, self._pauses = [], 0
        self._crashes = [*(at for at in self._crashes if now - at <= WINDOW), now]
        if len(self._crashes) <= FREE and not self._pauses:
            return 0.0
        self._pauses += 1
        return STEPS[min(self._pauses, len(STEPS)) - 1] * (1 + JITTER * self._chance())
