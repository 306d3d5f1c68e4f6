"""How long to wait before a call that failed is made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

TRIES = 4  # in all
FIRST = 0.4  # seconds; each further pause may be twice as long
SLOW = 5.0  # seconds: a call that took longer than that to fail has been patient already


def pauses(chance: Callable[[], float]) -> Iterator[float]:
    """Seconds before each further try, between half of what it may be and all, so that many do not come at once.

    ``chance`` gives numbers between 0 and 1.
    """
    return (FIRST * 2**number * (1 + chance()) / 2 for number in range(TRIES - 1))
