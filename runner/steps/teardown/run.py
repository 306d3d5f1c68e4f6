"""See ``plan``."""

from __future__ import annotations

from runner.core.model import Outcome, Reason, failed, succeeded
from runner.plan.model import NoBody
from runner.runtime.context import RunContext
from runner.runtime.removal import remove, remove_abandoned
from runner.steps.verify.run import discard_checkout

STEP = "teardown"


async def perform(body: NoBody, run: RunContext) -> Outcome:
    if run.paths.checkout.exists():
        await discard_checkout(run, STEP)
    await remove_abandoned(run, STEP)
    for workspace, provider in run.workspace.servers.items():
        await remove(run, STEP, provider, workspace)
    if run.workspace.provider is None:
        return succeeded("nothing left")
    await run.sandboxes.close()
    if run.workspace.handle is not None and run.results.saved_work is None:
        kept = run.paths.name_of(run.workspace.handle)
        return failed(Reason.PLATFORM, f"the work was not saved, so `{kept}` is kept")
    await remove(run, STEP, run.workspace.provider, run.workspace_id)
    return succeeded("nothing left")
