"""Telling OpenTelemetry of runs, where `RUNNER_TELEMETRY` says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from runner.core.settings import Settings
from runner.ops.runs.dependencies import Advise, ignore
from runner.ports.sink import Sink
from runner.ports.store import Store


@asynccontextmanager
async def open_telemetry(settings: Settings, advise: Advise) -> AsyncIterator[list[Sink]]:
    """Yield the sinks that tell of runs in the block; at its end what they have is sent, or ``advise`` told of it.

    Raises ``TelemetryUnusable`` before the block.
    """
    if settings.telemetry == "none":
        yield []
        return
    from runner.telemetry.otel import telemetry

    opened = telemetry(settings.traceparent)
    try:
        yield [opened]
    finally:
        if (unsent := await opened.flush()) is not None:
            advise(unsent)


async def tell_again(settings: Settings, store: Store, run: str) -> None:
    """Tell the whole history of a run whose runner has died: what was told of it before has the same ids."""
    async with open_telemetry(settings, ignore) as sinks:
        for recorded in await store.events(run) if sinks else ():
            for sink in sinks:
                sink(recorded)
