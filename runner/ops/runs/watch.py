"""Watch a run from another process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from runner.artifacts.stored_plan import read_plan
from runner.core.errors import BadPlanFile
from runner.core.settings import Settings
from runner.engine.stopping import RunCancellation
from runner.events.record import RunRecord
from runner.ops.host.liveness import is_run_lost
from runner.ops.host.state import read_state
from runner.ops.runs.attach import follow
from runner.ops.runs.fetched import following
from runner.ops.runs.history import StoredRun
from runner.plan.model import RunPlan
from runner.ports.sink import Sink

_LATE = 60.0  # seconds for the end of a run to be written, beyond its deadline and stop budget


async def watch(stored: StoredRun, settings: Settings, sinks: Sequence[Sink]) -> RunRecord:
    """Pass past and coming events of a run to the sinks, and return its record at its end.

    Cancelling stops the watching only. Raises ``RunUnfinished`` when the run has lost its runner.
    """
    run = stored.record.id
    plan = planned(stored)
    stop_budget = (plan.stop_budget_seconds if plan is not None else 0.0) + _LATE
    async with read_state(settings) as store, following(stored, settings) as follower:
        lost = partial(is_run_lost, store, settings.home, run)
        control = RunCancellation(stop_budget_seconds=stop_budget)
        arrive = follower.arrive if follower is not None else None
        return await follow(run, store, sinks, control, is_lost=lost, arrive=arrive)


def planned(stored: StoredRun) -> RunPlan | None:
    """Read the run's plan; ``None`` when that is gone, or of another version."""
    try:
        return read_plan(stored.directory).run
    except BadPlanFile:
        return None
