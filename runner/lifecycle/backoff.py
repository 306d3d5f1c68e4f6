"""Pauses before a failed call is repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

TRIES = 4  # in all
FIRST = 0.4  # seconds; each further pause may be twice as long
SLOW = 5.0  # seconds: a call that took longer than that to fail has been patient already


def pauses(chance: Callable[[], float]) -> Iterator[float]:
    """Yield the seconds before each further try, between half and all of a growing bound, so that many callers spread.

    ``chance`` returns numbers between 0 and 1.
    """
    return (FIRST * 2**number * (1 + chance()) / 2 for number in range(TRIES - 1))
