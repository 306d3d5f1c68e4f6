"""See ``plan``."""

from __future__ import annotations

from runner.core.model import Outcome, succeeded
from runner.runtime.context import RunContext
from runner.steps.release.plan import Body


async def perform(body: Body, run: RunContext) -> Outcome:
    await run.close()
    await run.lease_holder.release(run.emit)
    return succeeded(f"workspace {run.workspace_id}")
