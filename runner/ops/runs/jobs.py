"""Carry out the runs of a plan as Jobs of a cluster, and follow them from here through the store that hosts share.

Each run is a Job with its own part of the plan. The worker in it does all that a run here does; this process makes the
Jobs in the order that the runs need, tells what keeps one from starting, and brings back what they have left. When it
dies, the Jobs that are made go on.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from hashlib import sha256
from itertools import product

import trio
from msgspec.structs import replace

from runner.cluster import job
from runner.cluster.objects import Object, Refused
from runner.core.errors import (
    ArtifactsMissing,
    Attached,
    HostRefused,
    JobLost,
    JobNotStarted,
    JobWaits,
    ProviderFailed,
    Rejected,
    RunElsewhere,
    RunExists,
    RunnerError,
    RunUnfinished,
    UnfitForJob,
)
from runner.core.ids import run_id
from runner.core.model import Outcome, Status
from runner.core.nurseries import open_services, unwrapping_groups
from runner.core.settings import Settings, size_text
from runner.engine.execute import execute
from runner.engine.stopping import RunCancellation
from runner.events.events import Recorded, RunPlaced, RunWaits
from runner.events.record import RunRecord, replay
from runner.ops.host.liveness import is_run_lost
from runner.ops.host.state import make_home, open_state
from runner.ops.planning.job_fitness import job_faults
from runner.ops.planning.make_plan import PlanResult
from runner.ops.planning.plan_file import text_of
from runner.ops.runs import pending
from runner.ops.runs.attach import follow
from runner.ops.runs.cancel import heed_requests, request_cancel
from runner.ops.runs.dependencies import Advise, ignore
from runner.ops.runs.fetched import following, read_back
from runner.ops.runs.history import locate
from runner.ops.runs.incident_copy import bring_to_incident, incident_of
from runner.ops.runs.job_run import JobRun, outcome_of, skipped
from runner.ops.runs.job_table import JobTable, open_jobs
from runner.ops.runs.start import outputs_for
from runner.plan.graph import Graph
from runner.plan.model import RunPlan
from runner.ports.sink import Sink
from runner.ports.store import Store

MOST_FOLLOWED = 20  # runs whose output is fetched while it grows; of more only the events are shown
_LATE = 60.0  # seconds for the end of a run to be written, beyond its deadline and stop budget
_LOOK = 1.0  # seconds between looks at the store's clock
_ALIVE = 5.0  # seconds between looks whether a worker lives
_FETCH = 180.0  # seconds for a worker to send what a run has left
_RECORD = 10.0  # seconds to record runs that are not made any more
_ENDLESS = "1000000"  # workspaces: in a cluster its quotas count


class SubmittedRuns:
    """The runs of a plan as Jobs, by name in plan order. ``shown`` brings here what they print and leave."""

    def __init__(
        self,
        planned: PlanResult,
        settings: Settings,
        *,
        store: Store,
        table: JobTable,
        sinks: Sequence[Sink],
        key: str | None,
        advise: Advise,
        shown: bool = True,
    ) -> None:
        self._planned, self._settings, self._store, self.table = planned, settings, store, table
        self._sinks, self._key, self._advise = sinks, key, advise
        self._told: set[str] = set()
        self.recorded = trio.Event()  # every run is pending in the store, or attached
        self.runs = {plan.name: self._handle(plan) for plan in planned.plan.runs}
        self._needed = {need for plan in planned.plan.runs for need in plan.needs}
        self._is_shown = shown and len(self.runs) <= MOST_FOLLOWED
        self._brings_back = shown
        rooms = {plan.group: plan.max_parallel or len(self.runs) for plan in planned.plan.runs}
        self._rooms = {group: trio.CapacityLimiter(room) for group, room in rooms.items()}

    def _handle(self, plan: RunPlan) -> JobRun:
        control = RunCancellation(stop_budget_seconds=plan.stop_budget_seconds + _LATE)
        return JobRun(id=self._id(plan.name), plan=plan, control=control, store=self._store)

    def _id(self, name: str) -> str:
        """Return the id of a run; of one with a key always the same, so that its Job is made once."""
        if self._key is None:
            return run_id(secrets.token_bytes(8))
        return run_id(sha256("\0".join((self._store.nonce, name, self._key)).encode()).digest())

    def cancel(self) -> None:
        """Stop every run, as at home: the first call ends its work, the second its finalize phase."""
        for run in self.runs.values():
            run.cancel()

    async def wait(self) -> list[RunRecord]:
        """Return the records of the runs that have one, once all are over."""
        for run in self.runs.values():
            await run.ended.wait()
        return [run.record for run in self.runs.values() if run.record is not None]

    @property
    def errors(self) -> list[RunnerError]:
        return [run.error for run in self.runs.values() if run.error is not None]

    async def leave(self) -> None:
        """Give up the runs that nobody will make, since this process ends; those that are Jobs go on."""
        with trio.move_on_after(_RECORD), suppress(RunnerError):
            for run in self.runs.values():
                if not run.made and not run.attached and not run.ended.is_set():
                    await pending.give_up(self._store, run.id, *skipped("who would have made its Job has ended"))

    def stops(self) -> dict[str, Callable[[], None]]:
        """Return what stops each run that no worker hears for yet, by its id."""
        return {run.id: run.cancel for run in self.runs.values() if run.is_pending and not run.attached}

    async def carry_out(self) -> None:
        async with trio.open_nursery() as nursery:
            for run in self.runs.values():
                nursery.start_soon(self._submit, run)
        self.recorded.set()
        await execute(Graph({name: run.plan.needs for name, run in self.runs.items()}), self._one)

    async def _one(self, name: str) -> None:
        run = self.runs[name]
        try:
            async with self._rooms[run.plan.group]:
                if not run.attached:
                    if (why := self._blocker(run)) is not None:
                        run.record = await self._give_up(run, *skipped(why))
                        return
                    await self._make(run)
                record = await self._follow(run)
                run.record = await self._bring_back(run, record) if record.started else record
        except RunnerError as error:
            run.error = error
            if run.is_pending and not run.attached:
                with suppress(RunnerError):
                    run.record = await self._give_up(run, *outcome_of(error))
        finally:
            if run.made:
                self.table.forget(run.id)
            run.decided.set()
            run.ended.set()

    def _blocker(self, run: JobRun) -> str | None:
        """Say why a run must not start."""
        if run.stops:
            return "stopped before it began"
        for need in run.plan.needs:
            record = self.runs[need].record
            if record is None or record.status is not Status.SUCCEEDED:
                return f"needs {need}, which {record.status.value if record is not None else 'did not start'}"
        return None

    async def _submit(self, run: JobRun) -> None:
        """Record a run as pending; of one that is there already, take over what nobody follows any more."""
        digest, manifests = self._planned.plan.digest, str(self._planned.path.resolve())
        try:
            await pending.submit(self._store, run.id, run.plan, digest, key=self._key, manifests=manifests)
        except RunExists as taken:
            row = await self._store.find(taken.run)
            left = row.id == run.id and pending.is_pending(row) and await pending.read_pending(self._store, row)
            if left and await self._store.take_run(row.id, row.runner):
                return
            run.id, run.attached = taken.run, True
            run.decided.set()
            self._advise(Attached(f"{taken.message}: attached to it, nothing is started"))

    async def _give_up(self, run: JobRun, outcome: Outcome, code: int) -> RunRecord | None:
        """End a run that has not begun, and tell the sinks; return nothing for one that has begun after all."""
        seen = run.seen
        if not await pending.give_up(self._store, run.id, outcome, code):
            return None
        history = await self._store.events(run.id)
        for recorded, sink in product(history[seen:], self._sinks):
            sink(recorded)
        return replay(run.id, history)

    # --- Jobs ------------------------------------------------------------------------------------

    async def _make(self, run: JobRun) -> None:
        """Make the Job of a run, and its plan: both, or nothing."""
        needed = [(self.runs[need].plan, record) for need in run.plan.needs if (record := self.runs[need].record)]
        outputs = outputs_for(run.plan, needed, self._settings)
        text = text_of(self._planned, replace(run.plan, values={**run.plan.values, "outputs": outputs}))
        require_size(run.plan, text)
        try:
            made = await self._create(run)
            try:
                await self.table.give_plan(run.id, text, made)
            except BaseException:  # its pod would wait for the plan until its time is over
                with trio.CancelScope(shield=True):
                    await self.table.delete(run.id)
                raise
        except Refused as error:
            hint = "see `runner cluster manifest`: what its account `runner-submitter` may do is needed here"
            raise JobNotStarted(f"run `{run.plan.name}` cannot be a Job: {error.message}", hint=hint) from error

    async def _create(self, run: JobRun) -> Object:
        """Make a Job, as soon as the namespace's quota lets it. Raises ``JobNotStarted`` when it is stopped before."""
        shape = self._shape(run)
        place = RunPlaced(job.job_name(run.id), self.table.namespace, self.table.server)
        if not await pending.tell(self._store, run.id, place):
            raise run.stopped("its Job was made")
        try:
            while (made := await self._try_to_make(run, shape)) is None:
                pass
        finally:
            self.table.end_turn(run.id)
        run.made = True
        run.decided.set()
        return made

    async def _try_to_make(self, run: JobRun, shape: job.JobShape) -> Object | None:
        """Make a Job; ``None`` when it is to be tried again: the quota is used up, or an earlier one just went."""
        try:
            return await self.table.make(shape)
        except Refused as error:
            if not job.is_quota(error.message):
                raise
            hint = "it is made when others are gone; Ctrl-C gives it up"
            waits = f"the quota of the namespace is used up: {error.message}"
            await self._tell(run, job.JobState(waits=waits, hint=hint))
            await self.table.wait_turn(run.id, run.asked)
            if run.stops:
                raise run.stopped("its Job was made") from error
            return None

    def _shape(self, run: JobRun) -> job.JobShape:
        settings, plan = self._settings, run.plan
        assert settings.worker_image is not None
        given = {
            "RUNNER_KUBERNETES_NAMESPACE": self.table.namespace,
            "RUNNER_KUBERNETES_RUNTIME_CLASS": settings.kubernetes_runtime_class or "",
            "RUNNER_KUBERNETES_STORAGE_CLASS": settings.kubernetes_storage_class or "",
            "RUNNER_KUBERNETES_SANDBOXES": settings.kubernetes_sandboxes,
            "WORKSPACE_DEFAULT_CPU": f"{settings.default_cpus:g}",
            "WORKSPACE_DEFAULT_MEMORY": size_text(settings.default_memory),
            "WORKSPACE_DEFAULT_DISK": size_text(settings.default_disk),
            "WORKSPACE_PROVIDERS": ",".join(settings.providers or ()),
            "WARM_POOL_SIZE": str(settings.warm_pool_size),
            "WORKSPACE_MAX": _ENDLESS,
            "TRACEPARENT": settings.traceparent,
        }
        return job.JobShape(
            run=run.id,
            name=plan.name,
            submission=self.table.submission,
            image=settings.worker_image,
            secret=settings.worker_secret,
            seconds=plan.worst_case()[1],
            stop_seconds=plan.stop_budget_seconds,
            environment={name: value for name, value in given.items() if value},
            arguments=("--run-key", self._key) if self._key is not None else (),
            queue=plan.queue,
            priority_class=settings.worker_priority,
            kubeconfig=settings.worker_kubeconfig if self._planned.wanted[plan.name].cluster is not None else None,
        )

    async def _tell(self, run: JobRun, state: job.JobState) -> None:
        """Tell for what a Job waits: its own record, and here once for all that wait for the same."""
        kind = state.waits.partition(":")[0]
        if kind != run.waits:
            run.waits = kind
            await pending.tell(self._store, run.id, RunWaits(state.waits))
        if kind and kind not in self._told:
            self._told.add(kind)
            self._advise(JobWaits(f"the Job of run `{run.plan.name}` waits: {state.waits}", hint=state.hint))

    # --- following -------------------------------------------------------------------------------

    async def _follow(self, run: JobRun) -> RunRecord:
        """Pass the events of a run to the sinks, and return its record. Raises ``JobNotStarted``, ``JobLost``."""
        stored = locate(self._settings, RunRecord(id=run.id))
        async with (
            following(stored, self._settings) if self._is_shown else nullcontext() as follower,
            open_services() as services,
        ):
            services.start_soon(self._heed, run)
            arrive = follower.arrive if follower is not None else None
            lost = partial(self._is_lost, run)
            try:
                record = await follow(
                    run.id,
                    self._store,
                    [partial(self._seen, run), *self._sinks],
                    run.control,
                    is_lost=lost,
                    arrive=arrive,
                    look=_LOOK,
                )
            except RunUnfinished as error:
                if run.attached and run.stops:
                    raise run.left() from error
                with suppress(ProviderFailed):
                    await self.table.look()
                why = self.table.state(run.id).why
                hint = f"`runner recover {run.id}` ends it"
                raise JobLost(f"{error.message}" + (f": {why}" if why else ""), hint=hint) from error
        if not record.started:
            await self._clear(run)
        return record

    async def _clear(self, run: JobRun) -> None:
        """Delete the Job of a run that was given up: a worker that begins just now ends by itself."""
        if run.made and await self.table.delete(run.id):
            with trio.move_on_after(run.plan.stop_budget_seconds + _LATE), suppress(ProviderFailed):
                await self.table.worker_ended(run.id)

    def _seen(self, run: JobRun, recorded: Recorded) -> None:
        run.sink(recorded)
        if run.begun.is_set():
            self.table.begun(run.id)

    async def _is_lost(self, run: JobRun) -> bool:
        """Tell whether nothing more comes of a run: its Job never begins it, or its worker is dead."""
        if run.begun.is_set() or not run.made:
            if trio.current_time() < run.looked + _ALIVE:
                return False
            run.looked = trio.current_time()
            return await is_run_lost(self._store, self._settings.home, run.id)
        state = self.table.state(run.id)
        if (error := run.why_never(state)) is None:
            await self._tell(run, state)
            return False
        run.heard = min(run.stops, 1)  # its end tells a worker that begins just now to stop
        if await pending.give_up(self._store, run.id, *outcome_of(error)):
            run.error = error
        else:  # it has begun, and its worker is told to stop
            run.heard = 0
            run.asked.set()
        return False

    async def _heed(self, run: JobRun) -> None:
        """Ask the worker to stop each time that this was asked for here, as soon as it has begun."""
        await run.begun.wait()
        while True:
            while run.heard < run.stops:
                run.heard += 1
                try:
                    await request_cancel(self._store, self._settings.home, run.id)
                except RunElsewhere as error:
                    if run.record is None:
                        error.severity = "warning"
                        self._advise(error)
            await run.asked.wait()
            run.asked = trio.Event()

    async def _bring_back(self, run: JobRun, record: RunRecord) -> RunRecord:
        """Fetch what a run has left, which its worker sends at last, and remove its Job."""
        stored = locate(self._settings, record)
        incident = incident_of(run.plan)
        is_needed = incident is not None or run.plan.name in self._needed
        deadline = trio.current_time() + _FETCH
        self.table.ended(run.id)
        while run.made and not self.table.state(run.id).over and trio.current_time() < deadline:  # noqa: ASYNC110
            await trio.sleep(_LOOK / 2)
        while (self._brings_back or is_needed) and record.status is not Status.SKIPPED:  # which leaves nothing
            record = replay(run.id, await self._store.events(run.id))
            try:
                await read_back(replace(stored, record=record), self._settings, whole=is_needed)
                for left in await trio.to_thread.run_sync(bring_to_incident, run.plan, stored):
                    self._warn(HostRefused(f"incident `{incident}` does not take {left}"))
                break
            except ArtifactsMissing as error:
                if run.made or trio.current_time() >= deadline:
                    self._warn(error)
                    break
            except RunnerError as error:
                self._warn(error)
                break
            await trio.sleep(_LOOK)
        if run.made and self.table.state(run.id).over:
            await self.table.delete(run.id)
        return replay(run.id, await self._store.events(run.id))

    def _warn(self, error: RunnerError) -> None:
        error.severity = "warning"
        self._advise(error)


@asynccontextmanager
async def submit_runs(
    planned: PlanResult,
    settings: Settings,
    sinks: Sequence[Sink] = (),
    *,
    key: str | None = None,
    advise: Advise = ignore,
) -> AsyncIterator[SubmittedRuns]:
    """Carry out every run of a plan as a Job, as many at once as the cluster lets; the block ends when all have ended.

    ``sinks`` are told every event of the runs, ``advise`` what Jobs wait for. Cancelling the block ends the following,
    never the Jobs. Raises ``Rejected``, before anything is made, for what a Job would not see or could not do.
    """
    check_jobs(planned, settings)
    make_home(settings)
    with unwrapping_groups():
        async with open_state(settings) as store, open_jobs(settings) as table:
            submitting = submit_to(table, planned, settings, store, sinks, key=key, advise=advise)
            async with submitting as runs, open_services() as services:
                services.start_soon(heed_requests, store, runs.stops)
                yield runs
                await runs.wait()


@asynccontextmanager
async def submit_to(
    table: JobTable,
    planned: PlanResult,
    settings: Settings,
    store: Store,
    sinks: Sequence[Sink] = (),
    *,
    key: str | None = None,
    advise: Advise = ignore,
    shown: bool = True,
) -> AsyncIterator[SubmittedRuns]:
    """Do what ``submit_runs`` does, with an open store and a cluster; unless ``shown``, without fetching anything."""
    check_jobs(planned, settings)
    await table.require_rights()
    runs = SubmittedRuns(planned, settings, store=store, table=table, sinks=sinks, key=key, advise=advise, shown=shown)
    try:
        with unwrapping_groups():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runs.carry_out)
                yield runs
                await runs.wait()
    finally:
        with trio.CancelScope(shield=True):
            await runs.leave()


def check_jobs(planned: PlanResult, settings: Settings) -> None:
    """Raise ``Rejected`` with everything that keeps the runs of a plan from being Jobs."""
    found = job_faults(planned, settings)
    for plan in planned.plan.runs:
        try:
            require_size(plan, text_of(planned, plan))
        except RunnerError as error:
            found.append(error)
    if found:
        raise Rejected(found)


def require_size(plan: RunPlan, text: str) -> None:
    """Raise ``UnfitForJob`` for a plan that no ConfigMap takes."""
    if len(text.encode()) > job.MAX_PLAN:
        message = f"the plan of run `{plan.name}` has {len(text.encode()) >> 10} KiB, and a ConfigMap takes 1023"
        raise UnfitForJob(message, hint="make its prompt, its script or the outputs that it names shorter")
