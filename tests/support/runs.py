"""Runs from their start to their end, without a command around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.core.settings import Settings
from runner.events.record import RunRecord
from runner.ops.planning.make_plan import PlanResult
from runner.ops.runs.resume import ResumePlan, start_resumed
from runner.ops.runs.start import start_in, start_runs
from runner.ports.sink import Sink
from runner.ports.store import Store
from runner.runtime.context import RunDependencies


async def apply(planned: PlanResult, settings: Settings, sinks: Sequence[Sink] = (), **options: Any) -> list[RunRecord]:
    async with start_runs(planned, settings, sinks, **options) as started:
        return await started.wait()


async def apply_in(
    planned: PlanResult, settings: Settings, store: Store, deps: RunDependencies, **options: Any
) -> list[RunRecord]:
    async with start_in(planned, settings, store, deps, **options) as started:
        return await started.wait()


async def resume(resuming: ResumePlan, settings: Settings, sinks: Sequence[Sink] = ()) -> RunRecord:
    async with start_resumed(resuming, settings, sinks) as handle:
        return await handle.wait()
