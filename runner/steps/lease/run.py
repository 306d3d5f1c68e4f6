"""See ``plan``."""

from __future__ import annotations

from runner.model import Outcome, succeeded
from runner.steps._run import Run
from runner.steps.lease.plan import Body


async def perform(body: Body, run: Run) -> Outcome:
    await run.tenure.acquire(run.emit)
    return succeeded(f"workspace {run.workspace_id}")
