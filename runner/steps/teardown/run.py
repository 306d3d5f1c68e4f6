"""See ``plan``."""

from __future__ import annotations

from runner import events as ev
from runner.model import Outcome, Reason, failed, succeeded
from runner.steps._run import Run
from runner.steps.teardown.plan import Body
from runner.steps.verify.run import discard_checkout

STEP = "teardown"


async def perform(body: Body, run: Run) -> Outcome:
    if run.places.checkout.exists():
        await discard_checkout(run, STEP)
    if run.provider is None:
        return succeeded("nothing left")
    await run.close()
    if run.handle is not None and run.receipt is None:
        return failed(Reason.PLATFORM, f"the work was not saved, so `{run.handle.tree}` is kept")
    await run.emit(ev.EffectEnding(STEP, "workspace", run.workspace_id))
    # Asked of the provider, not remembered: making it may have been cancelled half-way.
    for handle in await run.provider.list_owned(run.ports.nonce):
        if handle.id == run.workspace_id:
            run.tenure.require()
            await run.provider.destroy(handle)
    await run.emit(ev.EffectGone(STEP, "workspace", run.workspace_id))
    return succeeded("nothing left")
