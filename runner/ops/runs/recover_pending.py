"""Pending runs that nobody follows any more: their Jobs go on, and those that have none, or a hopeless one, end."""

from __future__ import annotations

from runner.cluster import job
from runner.cluster.clusters import Clusters, workspace_place
from runner.cluster.objects import ClusterObjects
from runner.core.errors import ProviderFailed, RunnerError
from runner.core.model import Outcome, Reason, Status, failed
from runner.core.settings import Settings
from runner.engine.recover import Recovered
from runner.events.record import RunRecord
from runner.ops.runs import pending
from runner.ops.runs.job_table import read_job
from runner.ports.store import RunRow, Store

_NOT_MADE = Outcome(status=Status.SKIPPED, message="who would have made its Job has ended")


async def recover_pending(store: Store, row: RunRow, settings: Settings, *, dry_run: bool) -> list[Recovered]:
    """Do what ``end_pending`` does, in the cluster of the settings; tell nothing of a run that somebody follows."""
    record = await pending.read_pending(store, row)
    if record is None:
        return []
    found = Recovered(run=row.id, name=row.name, outcome=row.status)
    if record.placed is None:
        if not dry_run:
            await pending.give_up(store, row.id, _NOT_MADE, 1)
        return [Recovered(run=row.id, name=row.name, outcome=_NOT_MADE.status.value)]
    try:
        async with Clusters(settings).connect(workspace_place(settings)) as (target, way):
            objects = ClusterObjects(way, target.server, target.namespace)
            state = await _look(record, objects)
            if not dry_run and await _end(store, record, objects, state):
                return [Recovered(run=row.id, name=row.name, outcome="failed", removed=(_what(record),))]
    except RunnerError as error:
        left = f"{_what(record)} cannot be looked at: {error.message}"
        return [Recovered(run=row.id, name=row.name, outcome=found.outcome, left=(left,))]
    kept = f"{_what(record)} goes on" + (f": {state.waits}" if state.waits else "")
    return [Recovered(run=row.id, name=row.name, outcome=found.outcome, kept=(kept,))]


async def end_pending(store: Store, row: RunRow, objects: ClusterObjects | None) -> bool:
    """End a pending run that nobody follows any more, unless its Job may begin it; tell whether it was ended.

    Raises ``ProviderFailed`` when its Job is in another cluster, or cannot be looked at.
    """
    record = await pending.read_pending(store, row)
    if record is None:
        return False
    if record.placed is None or objects is None:
        return await pending.give_up(store, row.id, _NOT_MADE, 1)
    return await _end(store, record, objects, await _look(record, objects))


async def _end(store: Store, record: RunRecord, objects: ClusterObjects, state: job.JobState) -> bool:
    assert record.placed is not None
    if not (state.over or state.hopeless):
        return False
    why = failed(Reason.PLATFORM, f"its Job has not begun it: {state.hopeless or state.why or 'it is over'}")
    ended = await pending.give_up(store, record.id, why, ProviderFailed.exit_code)
    if ended:
        await objects.delete(objects.path("jobs", record.placed.job, group=job.BATCH), propagationPolicy="Background")
    return ended


async def _look(record: RunRecord, objects: ClusterObjects) -> job.JobState:
    assert record.placed is not None
    if (record.placed.server, record.placed.namespace) != (objects.server, objects.namespace):
        where = f"namespace `{objects.namespace}` of {objects.server}"
        raise ProviderFailed(f"it is not in {where}", hint="set KUBECONFIG and RUNNER_KUBERNETES_NAMESPACE")
    return await read_job(objects, record.id)


def _what(record: RunRecord) -> str:
    assert record.placed is not None
    return f"job {record.placed.job} in namespace `{record.placed.namespace}` of {record.placed.server}"
