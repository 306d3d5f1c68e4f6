"""A run in the store before its worker begins it: a row of its own, which every host sees, and can give up.

Of whoever gives it up and the worker that begins it the store lets one succeed.
"""

from __future__ import annotations

from runner import __version__
from runner.core.errors import RunElsewhere, RunOver
from runner.core.model import Outcome, Reason, Status
from runner.events import events as ev
from runner.events.record import RunRecord, replay
from runner.lifecycle.liveness import is_silent
from runner.plan.model import RunPlan
from runner.ports.store import Reader, RunRow, Store
from runner.steps.provision.plan import project_of

CANCELLED = Outcome(status=Status.CANCELLED, reason=Reason.CANCELLED, message="stopped before it began")
CANCELLED_CODE = 130


def is_pending(row: RunRow) -> bool:
    return row.status == Status.PENDING.value


async def submit(store: Store, run: str, plan: RunPlan, digest: str, *, key: str | None, manifests: str) -> None:
    """Record a run that is to be carried out elsewhere. Raises ``RunExists``."""
    submitted = ev.RunSubmitted(
        name=plan.name, plan=digest, runner=__version__, key=key, manifests=manifests, project=project_of(plan)
    )
    await store.append(run, [submitted])


async def tell(store: Store, run: str, event: ev.RunPlaced | ev.RunWaits) -> bool:
    """Record what happens to a pending run; tell whether it is one."""
    try:
        await store.append(run, [event])
    except RunOver:
        return False
    return True


async def give_up(store: Store, run: str, outcome: Outcome, code: int) -> bool:
    """End a pending run, so that nobody begins it; tell whether it was one."""
    try:
        await store.append(run, [ev.RunWithdrawn(), ev.RunEnded(outcome, code)])
    except RunOver:
        return False
    return True


async def read_pending(store: Reader, row: RunRow) -> RunRecord | None:
    """Return the record of a pending run that nobody follows any more; ``None`` while somebody does."""
    runners = {one.id: one for one in await store.runners()}
    if not is_silent(runners.get(row.runner or ""), await store.now()):
        return None
    return replay(row.id, await store.events(row.id))


async def cancel_pending(store: Store, row: RunRow) -> bool:
    """Give up a pending run that nobody follows any more; tell whether it was one. Its Job ends when it starts."""
    return await read_pending(store, row) is not None and await give_up(store, row.id, CANCELLED, CANCELLED_CODE)


def given_up_error(record: RunRecord) -> RunElsewhere:
    """Return the error of a worker that comes too late."""
    why = record.outcome.message if record.outcome is not None else "nobody says why"
    return RunElsewhere(f"run `{record.id}` was given up before it began: {why}", hint=f"runner runs show {record.id}")
