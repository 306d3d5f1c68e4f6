"""Jobs of a cluster that a process has made: made, looked at all with the same few requests, and deleted."""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import trio

from runner.cluster import job
from runner.cluster.clusters import Clusters, workspace_place
from runner.cluster.objects import ClusterObjects, Object
from runner.cluster.pod_access import JOB_RIGHTS, require_rights
from runner.core.errors import ProviderFailed
from runner.core.ids import run_id
from runner.core.nurseries import first_of, open_services
from runner.core.settings import Settings

_SOON, _LATER = 1.0, 5.0  # seconds between looks at the cluster, while something is about to change there and else
_ASKED = 3  # Jobs without a pod whose events are read at each look
_PAUSE = 5.0  # seconds until a quota is tried again
_HEARD = 0.2  # seconds between looks at a worker that is told to end


class JobTable:
    """The Jobs of a process, by their runs. All have one label, by which they are looked at."""

    def __init__(self, objects: ClusterObjects) -> None:
        self.objects = objects
        self.submission = run_id(secrets.token_bytes(8))
        self._states: dict[str, job.JobState] = {}
        self._submissions: dict[str, str] = {}  # of the runs' Jobs; another process may have made one before
        self._refused: dict[str, trio.Event] = {}  # turns of those that the quota has no room for, in their order
        self._waiting: set[str] = set()  # runs whose Job is about to begin, or to be over
        self._is_allowed = False

    @property
    def namespace(self) -> str:
        return self.objects.namespace

    @property
    def server(self) -> str:
        return self.objects.server

    async def require_rights(self) -> None:
        """Raise ``ProviderFailed`` unless this process may make Jobs; asked until the cluster has said yes."""
        if not self._is_allowed:
            await require_rights(self.objects, JOB_RIGHTS)
            self._is_allowed = True

    async def make(self, shape: job.JobShape) -> Object | None:
        """Make a Job, or return the one that the run has; ``None`` when that is gone by now. Raises ``Refused``."""
        made = await self.objects.create(self.objects.path("jobs", group=job.BATCH), job.job(shape), again=True)
        if made is None:
            return None
        self._submissions[shape.run] = str((made["metadata"].get("labels") or {}).get(job.SUBMISSION, self.submission))
        self._states.setdefault(shape.run, job.JobState())
        self._waiting.add(shape.run)
        return made

    async def wait_turn(self, run: str, stopped: trio.Event) -> None:
        """Wait until a run whose Job the quota has refused may ask again, or is stopped.

        The first that was refused asks after a pause, the next one as soon as that has its Job.
        """
        turn = self._refused.setdefault(run, trio.Event())
        with trio.move_on_after(_PAUSE if run == next(iter(self._refused)) else math.inf):
            await first_of(turn.wait, stopped.wait)
        self._refused[run] = trio.Event()

    def end_turn(self, run: str) -> None:
        """Let the next run ask, if this one was refused before."""
        if self._refused.pop(run, None) is not None and self._refused:
            next(iter(self._refused.values())).set()

    async def give_plan(self, run: str, text: str, made: Object) -> None:
        """Make the plan that a Job waits for. Raises ``Refused``."""
        await self.objects.create(self.objects.path("configmaps"), job.plan_map(run, text, made))

    def state(self, run: str) -> job.JobState:
        """Return the state of a run's Job as it was at the last look."""
        return self._states.get(run, job.JobState())

    def begun(self, run: str) -> None:
        self._waiting.discard(run)

    def ended(self, run: str) -> None:
        """From now on the end of the run's Job is waited for."""
        if run in self._states:
            self._waiting.add(run)

    async def delete(self, run: str) -> bool:
        """Delete a Job with its pod and its plan; tell whether the cluster took that. Otherwise it goes by itself."""
        path = self.objects.path("jobs", job.job_name(run), group=job.BATCH)
        try:
            await self.objects.delete(path, propagationPolicy="Background")
        except ProviderFailed:
            return False
        return True

    def forget(self, run: str) -> None:
        """End what ``make`` has begun: nobody asks for the Job of a run any more."""
        self._waiting.discard(run)
        del self._states[run], self._submissions[run]

    async def worker_ended(self, run: str) -> None:
        """Wait until no worker of a deleted Job runs any more, nor will."""
        selector = f"{job.RUN}={run},{job.SUBMISSION}={self._submissions[run]}"
        while True:
            found = await self.objects.get(self.objects.path("pods"), labelSelector=selector)
            if not any(map(_may_run, (found or {}).get("items") or ())):
                return
            await trio.sleep(_HEARD)

    async def keep_looking(self) -> None:
        """Look again and again, and at most a tenth of the time; never returns."""
        while True:
            began = trio.current_time()
            with suppress(ProviderFailed):  # what is known stays so, and the runs are followed in the store
                await self.look()
            took = trio.current_time() - began
            await trio.sleep(max(_SOON if self._waiting else _LATER, 9 * took))

    async def look(self) -> None:
        """Look at the Jobs now. Raises ``ProviderFailed``."""
        made = {*self._states}
        if not made:
            return
        first, *others = sorted({*self._submissions.values()})
        selector = f"{job.SUBMISSION} in ({','.join((first, *others))})" if others else f"{job.SUBMISSION}={first}"
        jobs = _by_run(await self.objects.list_all(self.objects.path("jobs", group=job.BATCH), labelSelector=selector))
        pods = _by_run(await self.objects.list_all(self.objects.path("pods"), labelSelector=selector))
        left = _ASKED
        for run in made & self._states.keys():
            if run not in jobs:
                self._states[run] = job.GONE
                continue
            events: Sequence[Object] = ()
            if not pods[run] and left:
                left, events = left - 1, await self._events(run)
            if run in self._states:
                self._states[run] = job.judge(jobs[run][0], pods[run], events)

    async def _events(self, run: str) -> Sequence[Object]:
        selector = f"involvedObject.kind=Job,involvedObject.name={job.job_name(run)}"
        with suppress(ProviderFailed):  # not everybody may read them
            found = await self.objects.get(self.objects.path("events"), fieldSelector=selector)
            return (found or {}).get("items") or ()
        return ()


@asynccontextmanager
async def open_jobs(settings: Settings) -> AsyncIterator[JobTable]:
    """Connect to the cluster that Jobs are made in, and look at them while the block runs.

    Raises ``ProviderFailed``, and the errors of the kubeconfig.
    """
    async with Clusters(settings).connect(workspace_place(settings)) as (target, way):
        table = JobTable(ClusterObjects(way, target.server, target.namespace))
        async with open_services() as services:
            services.start_soon(table.keep_looking)
            yield table


async def read_job(objects: ClusterObjects, run: str) -> job.JobState:
    """Return the state of the Job of a run, whoever has made it. Raises ``ProviderFailed``."""
    found = await objects.get(objects.path("jobs", job.job_name(run), group=job.BATCH))
    if found is None:
        return job.GONE
    pods = await objects.get(objects.path("pods"), labelSelector=f"{job.RUN}={run}")
    return job.judge(found, (pods or {}).get("items") or ())


def _may_run(pod: Object) -> bool:
    phase = (pod.get("status") or {}).get("phase")
    return phase == "Running" or (phase == "Pending" and "deletionTimestamp" not in pod["metadata"])


def _by_run(listed: Sequence[Object]) -> Mapping[str, list[Object]]:
    found: dict[str, list[Object]] = defaultdict(list)
    for one in listed:
        found[str(one["metadata"].get("labels", {}).get(job.RUN, ""))].append(one)
    return found
