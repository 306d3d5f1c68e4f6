"""Apply a plan: run everything in it at once, under a limit, against the store and the adapters of this host."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.artifacts.layout import RunFiles
from runner.artifacts.run_files import read_account, write_comparisons
from runner.artifacts.run_lock import is_locked
from runner.core.errors import Attached, RunExists, RunnerError, RunOver
from runner.core.home import run_directory
from runner.core.ids import run_id
from runner.core.model import Status
from runner.core.nurseries import unwrapping_groups
from runner.core.redact import Redactor
from runner.core.settings import Settings
from runner.engine.execute import execute
from runner.engine.run import RunCancellation, execute_run, record_skipped_run
from runner.events.record import RunRecord, replay
from runner.manifest.kinds.project import Spec as ProjectSpec
from runner.manifest.load import DEFAULTS
from runner.ops.host.state import make_home, now_microseconds, open_state
from runner.ops.planning.make_plan import PlanResult
from runner.ops.planning.plan_inputs import plan_inputs_of
from runner.ops.planning.refusals import outside_of, refuse
from runner.ops.planning.stored_projects import RECORD
from runner.ops.runs.attach import follow
from runner.ops.runs.dependencies import Advise, dependencies_of, event_writer, ignore
from runner.ops.runs.secret_values import make_redactor, resolve_secrets
from runner.ops.signals import stop_at_signals
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

FRESH_SECONDS = 10.0  # that what planning found of a provider is taken for what it is


async def apply(
    planned: PlanResult,
    settings: Settings,
    sinks: Sequence[Sink],
    *,
    key: str | None = None,
    advise: Advise = ignore,
    redactor: Redactor | None = None,
    gateway: Gateway | None = None,
    warnings: Sequence[RunnerError] = (),
) -> list[RunRecord]:
    """Execute every run of a plan, as many at once as ``WORKSPACE_MAX`` allows; return their records in plan order.

    A run whose name and ``key`` the store already has is not started: the first one is followed to its end, and
    ``advise`` is told. Raises ``Rejected``, before anything is made, when this host lacks something or a secret is
    missing; ``redactor`` learns all secrets. ``gateway`` replaces the models' gateway, as a rehearsal does.
    ``warnings`` go into every record. Expired workspaces are removed first. The first signal stops the work of all
    runs, which then finalize; a second stops that too.
    """
    redactor = make_redactor(settings) if redactor is None else redactor
    outside = outside_of(settings, gateway, redactor)
    with unwrapping_groups():
        await refuse(planned, planned.plan.runs, settings, outside)
    make_home(settings)
    async with open_state(settings) as store:
        with unwrapping_groups():
            deps = dependencies_of(settings, store, outside, redactor)
            async with reaping(WorkspaceEnv(settings, store, deps, advise)):
                return await apply_all(planned, settings, store, deps, sinks, key=key, advise=advise, warnings=warnings)


async def apply_all(
    planned: PlanResult,
    settings: Settings,
    store: Store,
    deps: RunDependencies,
    sinks: Sequence[Sink],
    *,
    key: str | None = None,
    advise: Advise = ignore,
    warnings: Sequence[RunnerError] = (),
) -> list[RunRecord]:
    """Do what ``apply`` does, with an open store and its dependencies."""
    deps = replace(deps, seen=partial(_seen, planned))
    values = await resolve_secrets(planned.secrets, planned.plan.runs, settings, deps.redact)
    await _record_projects(planned, store)
    plans = {plan.name: plan for plan in planned.plan.runs}
    controls = {plan.name: RunCancellation(plan.stop_budget_seconds) for plan in planned.plan.runs}
    records: dict[str, RunRecord] = {}
    room = settings.max_workspaces - len(await store.workspaces())
    everything = trio.CapacityLimiter(max(room, 1))  # where there is none, the first run is refused
    groups = {plan.group: trio.CapacityLimiter(plan.max_parallel or settings.max_workspaces) for plan in plans.values()}

    async def one(name: str) -> None:
        plan, control = plans[name], controls[name]
        async with groups[plan.group], everything:
            paths = RunPaths(settings.home, run_id(secrets.token_bytes(8)))
            files = RunFiles(paths.directory, deps.redact.text)
            append = event_writer(store, [files, *sinks], deps.redact)
            digest, rehearsal, manifests = planned.plan.digest, deps.gateway.rehearsal, str(planned.path.resolve())
            try:
                begin: Callable[..., Awaitable[RunRecord]]
                if blocker := _blocked(plan, records, control):
                    outputs: dict[str, dict[str, object]] = {}
                    begin = partial(record_skipped_run, plan, reason=blocker, rehearsal=rehearsal)
                else:
                    outputs = outputs_for(plan, plans, records, settings)
                    ready = replace(plan, values={**plan.values, "outputs": outputs})
                    begin = partial(execute_run, ready, paths=paths, deps=deps, control=control, secrets=values[name])
                    begin = partial(begin, warnings=warnings)
                files.write_plan(plan, digest, plan_inputs_of(planned, plan, outputs), rehearsal)
                record = await begin(digest, id=paths.run, append=append, key=key, manifests=manifests)
                files.write_record(record)
            except RunOver:
                record = replay(paths.run, await store.events(paths.run))
                files.write_record(record)
            except RunExists as taken:
                files.discard()
                advise(Attached(f"{taken.message}: attached to it, nothing is started"))
                held = partial(is_locked, RunPaths(settings.home, taken.run).directory)
                record = await follow(taken.run, store, sinks, control, now=now_microseconds, is_locked=held)
            records[name] = record

    async with trio.open_nursery() as signals:
        await signals.start(stop_at_signals, list(controls.values()))
        await execute(Graph({name: plan.needs for name, plan in plans.items()}), one)
        signals.cancel_scope.cancel()
    write_comparisons([read_account(records[name], run_directory(settings.home, records[name].id)) for name in plans])
    return [records[name] for name in plans]


def _seen(planned: PlanResult, provider: str) -> Probe | None:
    """Return a probe that planning made moments ago; a change since then shows when the provider is used."""
    found = planned.facts.probes.get(provider)
    fresh = time.monotonic() - planned.probed < FRESH_SECONDS
    return found if fresh and found is not None and found.available else None


async def _record_projects(planned: PlanResult, store: Store) -> None:
    """Store the projects of the manifests, but not those of a fork."""
    for document in planned.documents.values():
        spec = document.spec
        if isinstance(spec, ProjectSpec) and document.file not in (DEFAULTS, RECORD) and not planned.request.untrusted:
            root, manifest = (str(place.resolve()) for place in (document.directory / spec.root, Path(document.file)))
            protected = tuple(spec.protected_paths)
            await store.put_project(ProjectRow(document.name, root, spec.workspace_isolation, protected, manifest))


def _blocked(plan: RunPlan, records: Mapping[str, RunRecord], control: RunCancellation) -> str | None:
    """Say why a run must not start: it was stopped before, or a run that it needs did not succeed."""
    if control.requested_at is not None:
        return "stopped before it began"
    bad = [need for need in plan.needs if records[need].status is not Status.SUCCEEDED]
    return f"needs {bad[0]}, which {records[bad[0]].status.value}" if bad else None


def outputs_for(
    plan: RunPlan, plans: Mapping[str, RunPlan], records: Mapping[str, RunRecord], settings: Settings
) -> dict[str, dict[str, object]]:
    """Return the values of ``outputs.RUN.NAME`` in templates: a file's text, or for a matrix the texts in member
    order.
    """
    found: dict[str, dict[str, object]] = {}
    for need in plan.needs:
        before = plans[need]
        kept = RunPaths(settings.home, records[need].id).directory / "output"
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
