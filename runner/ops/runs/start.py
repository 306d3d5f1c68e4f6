"""Start the runs of a plan at once, under a limit, against the store and the adapters of this host."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import trio
from msgspec import Struct, field
from msgspec.structs import replace

from runner.artifacts.layout import RunFiles
from runner.artifacts.run_files import read_account, write_comparisons
from runner.core import codec
from runner.core.errors import Attached, NotEnforced, RunExists, RunnerError, RunOver, UsageError
from runner.core.home import run_directory
from runner.core.ids import is_run_id, run_id
from runner.core.model import Status
from runner.core.nurseries import open_services, unwrapping_groups
from runner.core.redact import Redactor
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.engine.execute import execute
from runner.engine.run import execute_run, record_skipped_run
from runner.engine.stopping import RunCancellation
from runner.events.events import Recorded, RunEnded
from runner.events.record import RunRecord, replay
from runner.manifest.load import DEFAULTS
from runner.ops.host.liveness import is_run_lost
from runner.ops.host.state import make_home, open_state
from runner.ops.planning.make_plan import PlanResult
from runner.ops.planning.plan_inputs import plan_inputs_of
from runner.ops.planning.refusals import outside_of, refuse
from runner.ops.planning.stored_projects import RECORD
from runner.ops.runs.artifact_copy import open_copies
from runner.ops.runs.attach import follow
from runner.ops.runs.cancel import heed_requests
from runner.ops.runs.dependencies import Advise, dependencies_of, event_writer, ignore
from runner.ops.runs.history import directory_of
from runner.ops.runs.messages import check_messages, telling
from runner.ops.runs.pending import given_up_error
from runner.ops.runs.secret_values import make_redactor, resolve_secrets
from runner.ops.runs.telemetry import open_telemetry
from runner.ops.workspaces.maintenance import reaping
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.plan.graph import Graph
from runner.plan.model import RunPlan
from runner.ports.gateway import Gateway
from runner.ports.provider import Probe
from runner.ports.sink import Sink
from runner.ports.store import ProjectRow, Store
from runner.runtime.context import RunDependencies, RunPaths
from runner.safefs.safe_open import read_beneath
from runner.steps.verify.run import MAX_OUTPUT

if TYPE_CHECKING:
    from runner.manifest.kinds.project import Spec as ProjectSpec

FRESH_SECONDS = 10.0  # that what planning found of a provider is taken for what it is


class RunHandle(Struct, eq=False, kw_only=True):
    """A run that was started.

    ``id`` is its id; where an earlier run has its key, the earlier one's as soon as that shows.
    """

    id: str
    plan: RunPlan
    control: RunCancellation
    store: Store
    begun: trio.Event = field(default_factory=trio.Event)  # it has its first event, and its id stays
    ended: trio.Event = field(default_factory=trio.Event)
    record: RunRecord | None = None  # once it has ended

    def sink(self, recorded: Recorded) -> None:
        self.begun.set()

    def attach(self, run: str) -> None:
        """Stand for an earlier run from now on."""
        self.id = run
        self.begun.set()

    def end(self, record: RunRecord) -> None:
        self.record = record
        self.ended.set()

    def cancel(self) -> None:
        """Stop the run: the first call ends its work, the second its finalize phase as well."""
        self.control.stop()

    async def until_begun(self) -> None:
        """Wait for its first event."""
        await self.begun.wait()

    @asynccontextmanager
    async def events(self, after: int = 0) -> AsyncIterator[AsyncIterator[Recorded]]:
        """Iterate in the block over the run's events numbered above ``after``, past and coming, to its last."""
        await self.until_begun()
        async with (
            aclosing(self.store.watch(self.id, after=after)) as recorded,
            aclosing(_until_ended(recorded)) as events,
        ):
            yield events

    async def wait(self) -> RunRecord:
        """Return the run's record when it has ended. Cancelling stops the waiting only."""
        await self.ended.wait()
        assert self.record is not None
        return self.record


async def _until_ended(events: AsyncIterator[Recorded]) -> AsyncGenerator[Recorded]:
    async for recorded in events:
        yield recorded
        if isinstance(recorded.event, RunEnded):
            return


class StartedRuns(Struct, eq=False):
    """All runs of a plan, by name in plan order; those that wait for others or for room have not begun."""

    runs: Mapping[str, RunHandle]
    errors: Sequence[RunnerError] = ()  # none: a run that was started here has a record

    def cancel(self) -> None:
        """Stop every run, as ``RunHandle.cancel`` does; those that have not begun are skipped."""
        for handle in self.runs.values():
            handle.cancel()

    async def wait(self) -> list[RunRecord]:
        """Return the records of all runs when the last has ended. Cancelling stops the waiting only."""
        return [await handle.wait() for handle in self.runs.values()]


@asynccontextmanager
async def start_runs(
    planned: PlanResult,
    settings: Settings,
    sinks: Sequence[Sink] = (),
    *,
    key: str | None = None,
    ids: Mapping[str, str] | None = None,
    advise: Advise = ignore,
    redactor: Redactor | None = None,
    gateway: Gateway | None = None,
    warnings: Sequence[RunnerError] = (),
) -> AsyncIterator[StartedRuns]:
    """Start every run of a plan, as many at once as ``WORKSPACE_MAX`` allows; the block ends when all have ended.

    ``ids`` are wanted ones, by the name of the run. A run whose name and ``key`` the store already has is not started:
    the first one is followed to its end, and ``advise`` is told. ``sinks`` are told every event once it is durable.
    ``gateway`` replaces the models' gateway, as a rehearsal does. ``warnings`` go into every record. Expired workspaces
    are removed first.

    Raises, before anything is made, ``Rejected`` when this host lacks something or a secret is missing, and
    ``UsageError`` for an id that is none, or is taken; ``redactor`` learns all secrets. Cancelling the block ends the
    work of all runs, which then finalize.
    """
    redactor = make_redactor(settings) if redactor is None else redactor
    outside = outside_of(settings, gateway, redactor)
    with unwrapping_groups():
        await refuse(planned, planned.plan.runs, settings, outside)
    make_home(settings)
    async with open_state(settings) as store:
        with unwrapping_groups():
            deps = dependencies_of(settings, store, outside, redactor)
            starting = partial(start_in, planned, settings, store, deps, sinks, key=key, ids=ids, advise=advise)
            async with (
                reaping(WorkspaceEnv(settings=settings, store=store, deps=deps, advise=advise)),
                starting(warnings=warnings) as started,
            ):
                yield started


@asynccontextmanager
async def start_in(
    planned: PlanResult,
    settings: Settings,
    store: Store,
    deps: RunDependencies,
    sinks: Sequence[Sink] = (),
    *,
    key: str | None = None,
    ids: Mapping[str, str] | None = None,
    advise: Advise = ignore,
    warnings: Sequence[RunnerError] = (),
) -> AsyncIterator[StartedRuns]:
    """Do what ``start_runs`` does, with an open store and its dependencies."""
    deps = replace(deps, seen=partial(_seen, planned))
    handles = {plan.name: await _handle_of(plan, (ids or {}).get(plan.name), store) for plan in planned.plan.runs}
    values = await resolve_secrets(planned.secrets, planned.plan.runs, settings, deps.redact)
    check_messages(planned.plan.runs, values)
    await _record_projects(planned, store, settings, advise)
    most = settings.max_workspaces
    everything = trio.CapacityLimiter(_room(planned.plan.runs, most - len(await store.workspaces())))
    digest, rehearsal, manifests = planned.plan.digest, deps.gateway.rehearsal, str(planned.path.resolve())
    groups = {plan.group: trio.CapacityLimiter(plan.max_parallel or most) for plan in planned.plan.runs}

    async def one(name: str) -> None:
        handle = handles[name]
        plan, paths = handle.plan, RunPaths(settings.home, handle.id)
        telling_all = telling(plan, values[name], settings, advise)
        async with groups[plan.group], everything, telling_all as tell, copies.of(plan, paths) as copy:
            files = RunFiles(paths.directory, deps.redact.text)
            append = event_writer(store, [files, copy, *sinks, *telling_of, handle.sink, tell], deps.redact)
            try:
                blocker = _blocked(handle, handles)
                outputs = {} if blocker else outputs_for(plan, _needed(plan, handles), settings)
                begin: Callable[..., Awaitable[RunRecord]]
                if blocker:
                    begin = partial(record_skipped_run, plan, reason=blocker, rehearsal=rehearsal)
                else:
                    ready = replace(plan, values={**plan.values, "outputs": outputs})
                    begin = partial(execute_run, ready, paths=paths, deps=deps, control=handle.control)
                    begin = partial(begin, secrets=values[name], warnings=warnings)
                files.write_plan(plan, digest, plan_inputs_of(planned, plan, outputs), rehearsal)
                record = await begin(digest, id=paths.run, append=append, key=key, manifests=manifests)
                files.write_record(record)
            except RunOver:
                record = replay(paths.run, await store.events(paths.run))
                files.write_record(record)
            except RunExists as taken:
                files.discard()
                copy.discard()
                record = await _attach(handle, taken, settings, sinks, advise)
            copy.finish(record)
            handle.end(record)

    started = StartedRuns(handles)
    work = partial(execute, Graph({plan.name: plan.needs for plan in planned.plan.runs}), one)
    sending, telemetry = open_copies(settings, store, deps.redact), open_telemetry(settings, advise)
    async with telemetry as telling_of, sending as copies, ended_with(started, store, work):
        yield started
    records = [handle.record for handle in handles.values() if handle.record is not None]
    write_comparisons([read_account(record, run_directory(settings.home, record.id)) for record in records])


async def _attach(
    handle: RunHandle, taken: RunExists, settings: Settings, sinks: Sequence[Sink], advise: Advise
) -> RunRecord:
    """Follow the earlier run that has the key of this one, to its end."""
    advise(Attached(f"{taken.message}: attached to it, nothing is started"))
    handle.attach(taken.run)
    lost = partial(is_run_lost, handle.store, settings.home, taken.run)
    return await follow(taken.run, handle.store, sinks, handle.control, is_lost=lost)


@asynccontextmanager
async def ended_with(started: StartedRuns, store: Store, work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Do the work of some runs beside the block, which ends when they have; what cancels it stops them in order, and
    so do requests in the store.
    """
    stops = {handle.id: handle.control.stop for handle in started.runs.values()}

    async def shielded() -> None:
        with trio.CancelScope(shield=True):  # bounded by the stop budgets, once the runs are stopped
            await work()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shielded)
        try:
            async with open_services() as services:
                services.start_soon(heed_requests, store, lambda: stops)
                yield
                await started.wait()
        except BaseException:
            started.cancel()
            raise


async def _handle_of(plan: RunPlan, wanted: str | None, store: Store) -> RunHandle:
    """Make the handle of a run, with the ``wanted`` id.

    Raises ``UsageError`` unless that is one, and free or of a pending run, ``RunElsewhere`` for one that was given up.
    """
    if wanted is not None and not is_run_id(wanted):
        hint = "twelve of `0-9 a-z`, without i, l, o and u"
        raise UsageError(f"`{excerpt(wanted)}` is not an id of a run", hint=hint)
    if wanted is not None and (history := await store.events(wanted)):
        record = replay(wanted, history)
        if record.started:
            raise UsageError(f"there is a run `{wanted}` already", hint="leave the id out, and one is made")
        if record.ended is not None:
            raise given_up_error(record)
    control = RunCancellation(stop_budget_seconds=plan.stop_budget_seconds)
    return RunHandle(id=wanted or run_id(secrets.token_bytes(8)), plan=plan, control=control, store=store)


def _seen(planned: PlanResult, provider: str) -> Probe | None:
    """Return a probe that planning made moments ago; a change since then shows when the provider is used."""
    found = planned.facts.probes.get(provider)
    fresh = time.monotonic() - planned.probed < FRESH_SECONDS
    return found if fresh and found is not None and found.available else None


def _room(plans: Sequence[RunPlan], left: int) -> int:
    """Return how many runs fit at once, each with a workspace for itself and one for each MCP server in a sandbox.

    At least one, which is then refused.
    """
    servers = (sum(one.hosted for step in plan.steps for one in step.mcp_servers) for plan in plans)
    return max(left // (1 + max(servers, default=0)), 1)


async def _record_projects(planned: PlanResult, store: Store, settings: Settings, advise: Advise) -> None:
    """Store the projects of the manifests, but not those of a fork; say that a queue holds nothing on a host."""
    for queue in dict.fromkeys(plan.queue for plan in planned.plan.runs if plan.queue and settings.pod is None):
        advise(NotEnforced(f"queue `{queue}` holds no run that is not a Job", hint="runner apply --on kubernetes"))
    for document in planned.documents.values():
        spec = cast("ProjectSpec", document.spec)
        if document.kind == "Project" and document.file not in (DEFAULTS, RECORD) and not planned.request.untrusted:
            root, manifest = (str(place.resolve()) for place in (document.directory / spec.root, Path(document.file)))
            protected = tuple(spec.protected_paths)
            await store.put_project(
                ProjectRow(
                    name=document.name,
                    root=root,
                    workspace_isolation=spec.workspace_isolation,
                    protected_paths=protected,
                    manifest=manifest,
                )
            )


def _blocked(handle: RunHandle, handles: Mapping[str, RunHandle]) -> str | None:
    """Say why a run must not start: it was stopped before, or a run that it needs did not succeed."""
    if handle.control.requested_at is not None:
        return "stopped before it began"
    needed = {need: _record(handles[need]).status for need in handle.plan.needs}
    bad = [f"needs {need}, which {status.value}" for need, status in needed.items() if status is not Status.SUCCEEDED]
    return bad[0] if bad else None


def _record(handle: RunHandle) -> RunRecord:
    assert handle.record is not None, "the graph starts a run when those that it needs have ended"
    return handle.record


def _needed(plan: RunPlan, handles: Mapping[str, RunHandle]) -> list[tuple[RunPlan, RunRecord]]:
    return [(handles[need].plan, _record(handles[need])) for need in plan.needs]


def outputs_for(
    plan: RunPlan, needed: Iterable[tuple[RunPlan, RunRecord]], settings: Settings
) -> dict[str, dict[str, object]]:
    """Return the values of ``outputs.RUN.NAME`` in templates: a file's text, or for a matrix the texts in member
    order.

    A plan that was made to be carried out alone brings them along.
    """
    found: dict[str, dict[str, object]] = codec.typed(plan.values.get("outputs", {}), dict[str, dict[str, object]])
    for before, record in needed:
        kept = directory_of(settings, record.id) / "output"
        for name, file in before.outputs.items():
            text = read_beneath(kept, file, MAX_OUTPUT).decode(errors="replace")
            of_group = found.setdefault(before.group, {})
            if before.name == before.group:
                of_group[name] = text
            else:
                texts = of_group.setdefault(name, [])
                assert isinstance(texts, list)
                texts.append(text)
    return found
