"""The sink port: consoles and files that follow the one event stream of a run."""

from __future__ import annotations

from typing import Protocol

from runner.events.events import Recorded


class Sink(Protocol):
    def __call__(self, recorded: Recorded) -> None:
        """Handle one durable event, in order within its run. Must not block and must not raise."""
