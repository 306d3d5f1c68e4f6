"""See ``plan``."""

from __future__ import annotations

from runner.core.model import Outcome, succeeded
from runner.runtime.context import Run
from runner.steps.lease.plan import Body


async def perform(body: Body, run: Run) -> Outcome:
    await run.tenure.acquire(run.emit)
    return succeeded(f"workspace {run.workspace_id}")
