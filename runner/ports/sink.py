"""Who watches a run: consoles and files that draw from the one event stream."""

from __future__ import annotations

from typing import Protocol

from runner.events.events import Recorded


class Sink(Protocol):
    def __call__(self, recorded: Recorded) -> None:
        """See one durable event, in order within its run. Must not block and must not raise."""
