"""Watch a run from another process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from runner.core.errors import BadPlanFile
from runner.core.settings import Settings
from runner.engine.run import RunCancellation
from runner.events.record import RunRecord
from runner.ops.host.liveness import is_run_lost
from runner.ops.host.state import read_state
from runner.ops.planning.plan_file import read_document
from runner.ops.runs.attach import follow
from runner.ops.runs.history import StoredRun
from runner.ports.sink import Sink

_LATE = 60.0  # seconds for the end of a run to be written, beyond its deadline and stop budget


async def watch(stored: StoredRun, settings: Settings, sinks: Sequence[Sink]) -> RunRecord:
    """Pass past and coming events of a run to the sinks, and return its record at its end.

    Cancelling stops the watching only. Raises ``RunUnfinished`` when the run has lost its runner.
    """
    run = stored.record.id
    stop_budget = float(planned(stored).get("stop_budget_seconds", 0.0)) + _LATE
    async with read_state(settings) as store:
        lost = partial(is_run_lost, store, settings.home, run)
        return await follow(run, store, sinks, RunCancellation(stop_budget), is_lost=lost)


def planned(stored: StoredRun) -> dict[str, Any]:
    """Read the run's plan from its ``plan.json``; empty when that is gone."""
    try:
        (run,) = read_document(stored.directory / "plan.json")["runs"]
    except BadPlanFile:
        return {}
    return dict(run)
