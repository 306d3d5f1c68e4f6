"""See ``plan``."""

from __future__ import annotations

from runner.core.model import Outcome, succeeded
from runner.plan.model import NoBody
from runner.runtime.context import RunContext


async def perform(body: NoBody, run: RunContext) -> Outcome:
    await run.sandboxes.close()
    await run.lease_holder.release(run.emit)
    return succeeded(f"workspace {run.workspace_id}")
