"""See ``plan``."""

from __future__ import annotations

from runner.core.model import Outcome, succeeded
from runner.runtime.context import RunContext
from runner.steps.lease.plan import Body


async def perform(body: Body, run: RunContext) -> Outcome:
    await run.lease_holder.acquire(run.emit)
    return succeeded(f"workspace {run.workspace_id}")
