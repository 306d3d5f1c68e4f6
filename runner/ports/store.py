"""What keeps events. The journal is the truth; every other table is a projection written in the same transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runner.events import Event, Recorded


@dataclass(frozen=True)
class RunRow:
    """A run as listings show it. Times are microseconds since the epoch, UTC."""

    id: str
    name: str
    status: str
    exit_code: int | None
    plan: str
    created: int
    ended: int | None


class Store(Protocol):
    @property
    def nonce(self) -> str:
        """This store's identity, put on everything that runs of it create."""

    async def append(self, run: str, events: Sequence[Event]) -> list[Recorded]:
        """Make events durable, all or none, and return them as recorded; numbers have no gaps.

        Returning means that they survive a kill and a power cut. Appends of concurrent callers share
        one commit. A cancelled caller's events may or may not be there, never in part.
        Raises ``StoreFailed`` (disk full, I/O), ``StoreBusy``, and ``RunExists`` for a ``RunStarted`` whose key
        and name another run has.
        """

    async def events(self, run: str, *, after: int = 0) -> list[Recorded]:
        """The events of a run in order, those numbered above ``after``."""

    async def runs(self) -> list[RunRow]:
        """Every run, newest first."""

    async def find(self, run: str) -> RunRow:
        """The run whose id starts with ``run``, or the newest for ``last``. Raises ``UnknownRun``."""
