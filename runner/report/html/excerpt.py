"""Excerpts: the start or the end of a text that may have any length."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from runner.report.html.render import WIDEST


class Excerpt(Struct, frozen=True):
    """Lines of a text, each cut; ``omitted`` counts those before them, or behind them."""

    lines: tuple[str, ...] = ()
    omitted: int = 0


def start_of(lines: Iterable[str], most: int, room: int) -> Excerpt:
    """Return the first lines: at most so many, of at most ``room`` characters together."""
    kept: list[str] = []
    count = 0
    for line in lines:
        count += 1
        room -= len(line[:WIDEST])
        if room >= 0 and len(kept) == count - 1 < most:
            kept.append(line[: WIDEST + 1])
    return Excerpt((*kept,), count - len(kept))


def end_of(lines: Iterable[str], most: int, room: int) -> Excerpt:
    """Return the last lines, bounded alike."""
    kept: deque[str] = deque(maxlen=most)
    count = 0
    for line in lines:
        count += 1
        kept.append(line[: WIDEST + 1])
    taken = start_of(reversed(kept), most, room).lines
    return Excerpt(taken[::-1], count - len(taken))
