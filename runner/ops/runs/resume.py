"""Resume a run: continue it as a new run, at the first step that has to be run again.

The manifests are planned anew, since they may have been corrected. Each step's inputs are compared by content with
those of the earlier run, so that nothing succeeded runs twice and nothing stale is reused. A branch that moved is
ignored while the work is reused: it stays on its base.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.artifacts.layout import RunFiles
from runner.artifacts.run_lock import try_lock
from runner.core.errors import NotResumable, RunnerError, RunOver, RunUnfinished, WorkMissing, nearest
from runner.core.ids import run_id
from runner.core.model import Reason, Status
from runner.core.nurseries import unwrapping_groups
from runner.core.plural import plural
from runner.core.redact import Redactor
from runner.core.settings import Settings
from runner.engine.run import execute_run
from runner.engine.stopping import RunCancellation
from runner.events.record import RunRecord, replay
from runner.git import open_git
from runner.lifecycle.resume import SCAN, Decided, Earlier, decide
from runner.manifest import STDIN
from runner.ops.host.state import open_state
from runner.ops.planning.facts import require_not_weaker
from runner.ops.planning.make_plan import PlanResult, make_plan
from runner.ops.planning.plan_inputs import (
    ANEW,
    PlanInputs,
    checkout_of,
    keys_of,
    made_anew,
    plan_inputs_of,
    read_plan_inputs,
)
from runner.ops.planning.refusals import refuse
from runner.ops.runs.artifact_copy import open_copies
from runner.ops.runs.dependencies import Advise, dependencies_of, event_writer, ignore
from runner.ops.runs.fetched import read_back
from runner.ops.runs.history import StoredRun, find_run
from runner.ops.runs.messages import check_messages, telling
from runner.ops.runs.previous_attempt import load_previous_attempt
from runner.ops.runs.secret_values import resolve_secrets
from runner.ops.runs.start import RunHandle, StartedRuns, ended_with
from runner.ops.runs.telemetry import open_telemetry
from runner.plan.keys import digests
from runner.plan.model import Json, RunPlan, Step
from runner.ports.sink import Sink
from runner.ports.store import Store
from runner.report.format import duration
from runner.report.run_files import used
from runner.runtime.context import ResumeSource, ResumeState, RunDependencies, RunPaths
from runner.spec.model import Facts, RunFacts
from runner.steps.agent.plan import AgentBody


class ResumePlan(Struct, frozen=True, kw_only=True):
    """Plan of a resumed run: each step of its work with the reason why it is reused or not; ``notes`` change
    nothing.
    """

    run: str
    plan: RunPlan
    planned: PlanResult
    steps: tuple[Decided, ...]
    keys: Mapping[str, str]
    notes: tuple[str, ...]
    outputs: Mapping[str, object]
    resumption: ResumeState

    def document(self) -> dict[str, Json]:
        steps: list[Json] = [
            {"step": s.step, "reused": s.run is not None, "run": s.run, "key": self.keys[s.step], "reason": s.reason}
            for s in self.steps
        ]
        return {
            "run": self.run,
            "name": self.plan.name,
            "deadline_seconds": self.plan.deadline_seconds,
            "notes": list(self.notes),
            "steps": steps,
        }


@asynccontextmanager
async def start_resumed(
    resuming: ResumePlan,
    settings: Settings,
    sinks: Sequence[Sink] = (),
    *,
    redactor: Redactor | None = None,
    advise: Advise = ignore,
) -> AsyncIterator[RunHandle]:
    """Continue a run as a new one; the block ends when that has ended. Cancelling it is as for ``start_runs``.

    Raises ``RunUnfinished`` while another process continues the same work, ``WorkMissing``, and ``Rejected``.
    """
    async with open_state(settings) as store:
        with unwrapping_groups():
            deps = dependencies_of(settings, store, redactor=redactor)
            async with start_resumed_in(resuming, settings, store, deps, sinks, advise=advise) as handle:
                yield handle


@asynccontextmanager
async def start_resumed_in(
    resuming: ResumePlan,
    settings: Settings,
    store: Store,
    deps: RunDependencies,
    sinks: Sequence[Sink] = (),
    *,
    advise: Advise = ignore,
) -> AsyncIterator[RunHandle]:
    """Do what ``start_resumed`` does, with an open store and its dependencies."""
    telemetry, sending = open_telemetry(settings, advise), open_copies(settings, store, deps.redact)
    async with _holding(resuming.resumption.kept), telemetry as telling_of, sending as copies:
        plan, digest = resuming.plan, resuming.planned.plan.digest
        await refuse(resuming.planned, [plan], settings, deps, reused=resuming.resumption.reused)
        paths = RunPaths(settings.home, run_id(secrets.token_bytes(8)))
        reused = resuming.resumption.reused
        values = await resolve_secrets(resuming.planned.secrets, [plan], settings, deps.redact, done=reused)
        check_messages([plan], values)
        files = RunFiles(paths.directory, deps.redact.text)
        files.write_plan(plan, digest, plan_inputs_of(resuming.planned, plan, resuming.outputs))
        handle = RunHandle(
            id=paths.run, plan=plan, control=RunCancellation(stop_budget_seconds=plan.stop_budget_seconds), store=store
        )

        async def carry_on() -> None:
            async with telling(plan, values[plan.name], settings, advise) as tell, copies.of(plan, paths) as copy:
                try:
                    handle.record = await execute_run(
                        replace(plan, values={**plan.values, "outputs": resuming.outputs}),
                        digest,
                        id=paths.run,
                        paths=paths,
                        deps=deps,
                        append=event_writer(store, [files, copy, *sinks, *telling_of, handle.sink, tell], deps.redact),
                        control=handle.control,
                        manifests=str(resuming.planned.path.resolve()),
                        resumption=resuming.resumption,
                        secrets=values[plan.name],
                    )
                except RunOver:
                    handle.record = replay(paths.run, await store.events(paths.run))
                files.write_record(handle.record)
            copy.finish(handle.record)
            handle.ended.set()

        async with ended_with(StartedRuns({plan.name: handle}), store, carry_on):
            yield handle


@asynccontextmanager
async def _holding(kept: ResumeSource | None) -> AsyncIterator[None]:
    """Lock the source run for the block so that gc cannot remove it, and check that its work is still there."""
    if kept is None:
        yield
        return
    held = await trio.to_thread.run_sync(try_lock, kept.directory)
    if held is None:
        run = kept.directory.name
        raise RunUnfinished(f"another process is working on run `{run}`", hint="try again when it is done")
    try:
        _check_kept(kept)
        yield
    finally:
        os.close(held)


async def plan_resume(
    stored: StoredRun, path: Path | None, settings: Settings, *, seconds: float | None = None
) -> ResumePlan:
    """Plan how to continue a run that did not succeed. Starts nothing.

    ``path`` is where its manifests are now, if they moved. ``seconds`` replaces the time limit of the new run and its
    agent, by default that of the manifests or of the earlier run.

    Raises ``NotResumable``, ``RunUnfinished``, ``WorkMissing``, ``StalePlan`` for a provider that has become weaker,
    and what planning raises.
    """
    _check_ended(stored.record)
    await read_back(stored, settings)
    inputs = read_plan_inputs(stored.directory, stored.record)
    if path is None and inputs.manifests.name == STDIN.name:
        message = f"the manifests of run `{stored.record.id}` were standard input, which is gone"
        raise NotResumable(message, hint="put them into a file: runner resume RUN FILE")
    source = await _source(stored, settings)
    before = inputs if source is stored else read_plan_inputs(source.directory, source.record)
    earlier = Earlier(source.record.id, before.keys, source.record.steps, _lacking(source.record))
    if seconds is not None:
        inputs = replace(inputs, request=replace(inputs.request, seconds=seconds))
    resuming = await _choose(_Continued(stored.record, inputs, earlier, before), path or inputs.manifests, settings)
    resuming = await _within_cost(stored.record, resuming, settings)
    if not resuming.resumption.reused:
        return await _told(stored, resuming, settings)
    kept = await _kept(source, resuming, settings)
    return replace(resuming, resumption=replace(resuming.resumption, kept=kept))


async def _within_cost(record: RunRecord, resuming: ResumePlan, settings: Settings) -> ResumePlan:
    """Lower the agent's budget to what the continued runs have left of their cost limit."""
    ceiling, agents = (
        resuming.planned.request.run_cost,
        [s for s in resuming.plan.steps if isinstance(s.body, AgentBody)],
    )
    if ceiling is None or all(step.id in resuming.resumption.reused for step in agents):
        return resuming
    spent = used(record).cost_usd or 0.0
    while record.resumes is not None:
        record = (await find_run(settings, record.resumes)).record
        spent += used(record).cost_usd or 0.0
    left = max(0.0, ceiling - spent)
    steps = tuple(_costing(step, left) for step in resuming.plan.steps)
    note = f"${left:.2f} are left of the ${ceiling:.2f} that it may cost"
    return replace(resuming, plan=replace(resuming.plan, steps=steps), notes=(*resuming.notes, note))


def _costing(step: Step, left: float) -> Step:
    body = step.body
    if not isinstance(body, AgentBody) or body.model is None:
        return step
    budget = replace(body.model.budget, cost_usd=min(left, body.model.budget.cost_usd or 0.0))
    return replace(step, body=replace(body, model=replace(body.model, budget=budget)))


def _short(record: RunRecord, plan: RunPlan) -> Iterator[str]:
    late = record.outcome is not None and record.outcome.reason is Reason.TIMEOUT
    if late and plan.deadline_seconds <= record.deadline_seconds:
        had, has = duration(record.deadline_seconds), duration(plan.deadline_seconds)
        yield f"it has {has}, and the {had} of run {record.id} were not enough: give it more with --timeout"


async def _told(stored: StoredRun, resuming: ResumePlan, settings: Settings) -> ResumePlan:
    """Add a note if the previous deadline was too short, and pass the previous attempt to the agent."""
    resuming = replace(resuming, notes=(*resuming.notes, *_short(stored.record, resuming.plan)))
    if "incident" not in resuming.plan.values or (attempt := await load_previous_attempt(stored, settings)) is None:
        return resuming
    draft = "its draft, " if attempt.draft else ""
    ran = plural(len(attempt.commands), "command")
    note = f"the agent is told of run {attempt.run}: {draft}{ran} and its last words"
    resumption = replace(resuming.resumption, attempt=attempt)
    return replace(resuming, notes=(*resuming.notes, note), resumption=resumption)


def _check_ended(record: RunRecord) -> None:
    if record.ended is None:
        lost = record.status is Status.LOST
        what = "has lost its runner" if lost else "has not ended"
        hint = f"run `runner recover {record.id}` first" if lost else f"runner runs show {record.id}"
        raise RunUnfinished(f"run `{record.id}` {what}", hint=hint)
    if record.rehearsal is not None:
        raise NotResumable(f"run `{record.id}` is a rehearsal", hint="rehearse again")
    if record.status is Status.SKIPPED:
        because = record.outcome.message if record.outcome is not None else ""
        raise NotResumable(f"run `{record.id}` never started: {because}", hint=ANEW)


async def _source(stored: StoredRun, settings: Settings) -> StoredRun:
    """Find the newest run that did work, or took all of it over, with its files on this host."""
    while stored.record.resumes is not None and not _has_work(stored.record):
        stored = await find_run(settings, stored.record.resumes)
    await read_back(stored, settings, whole=True)
    return stored


def _has_work(record: RunRecord) -> bool:
    names = list(record.steps)
    before = [record.steps[name] for name in names[: names.index(SCAN)]]
    if any(step.started is not None and step.kind == "agent" and step.reused is None for step in before):
        return True
    return all(step.status is Status.SUCCEEDED for step in before) and _lacking(record) is None


def _lacking(record: RunRecord) -> str | None:
    """Say why the work of a run cannot be reused."""
    saved_work = record.saved_work
    if saved_work is None or saved_work.commit is None:
        return "its work was not saved"
    if saved_work.withheld and not saved_work.left_out:
        return "what was saved may show secrets"
    if saved_work.withheld:
        return f"what was saved lacks {len(saved_work.left_out)} files that broke policy"
    return None


class _Continued(Struct, frozen=True):
    """The run to continue; ``earlier`` and its inputs ``before`` are of the run whose work is reused."""

    record: RunRecord
    inputs: PlanInputs
    earlier: Earlier
    before: PlanInputs


async def _choose(run: _Continued, path: Path, settings: Settings) -> ResumePlan:
    """Plan the manifests as they are now, on the base of the work if that lets steps be reused."""
    request = replace(run.inputs.request, only=run.inputs.group, offline=False)
    planned = await make_plan(path, settings, request)
    resuming = _decided(run, planned)
    name, base = run.record.name, run.before.commit
    found, asked = planned.facts.of(name).commit, checkout_of(planned, name)
    if resuming.resumption.reused or found is None or base is None or found == base or asked != run.before.checkout:
        return resuming
    held = await make_plan(path, settings, request, pinned=Facts({}, {name: RunFacts(commit=base)}))
    on_base = _decided(run, held)
    if not on_base.resumption.reused:
        return resuming
    note = f"{base.branch} is at {found.commit[:12]} by now; the work stays on {base.commit[:12]}"
    return replace(on_base, notes=(note,))


def _decided(run: _Continued, planned: PlanResult) -> ResumePlan:
    plan = _member(run.record.name, planned)
    _check_needs(plan, run.inputs)
    for name, probe in run.before.probes.items():
        if name in planned.facts.probes:
            require_not_weaker(planned.facts.probes[name], Facts({name: probe}))
    outputs, works = run.inputs.outputs, plan.phase("work")
    keys = keys_of(plan, planned.facts, outputs)
    steps = decide(plan, keys, {step.id for step in works if made_anew(step)}, run.earlier)
    ids = digests(works, keys)
    reused = {step.step: (step.run, ids[step.step]) for step in steps if step.run is not None}
    return ResumePlan(
        run=run.record.id,
        plan=plan,
        planned=planned,
        steps=steps,
        keys=ids,
        notes=(),
        outputs=outputs,
        resumption=ResumeState(run.record.id, reused),
    )


def _member(name: str, planned: PlanResult) -> RunPlan:
    runs = {plan.name: plan for plan in planned.plan.runs}
    if name not in runs:
        raise NotResumable(f"`{planned.path}` no longer has run `{name}`", hint=nearest(name, runs))
    return runs[name]


def _check_needs(plan: RunPlan, inputs: PlanInputs) -> None:
    if new := [need for need in plan.needs if need not in inputs.needs]:
        message = f"run `{plan.name}` needs `{new[0]}` by now, and does not have its outputs"
        raise NotResumable(message, hint="start both anew: runner apply")


async def _kept(source: StoredRun, resuming: ResumePlan, settings: Settings) -> ResumeSource:
    """Describe the work to reuse, after checking that it is there. Raises ``WorkMissing``."""
    record = source.record
    assert record.saved_work is not None  # or nothing would be reused
    assert record.saved_work.commit is not None
    repository = source.repository
    snapshot = record.snapshot if "snapshot" in resuming.resumption.reused else None
    kept = ResumeSource(
        repository=repository,
        commit=record.saved_work.commit,
        base=record.base,
        directory=source.directory,
        snapshot=snapshot,
        commits=record.commits,
    )
    _check_kept(kept)
    try:
        await open_git(settings).entries(repository, kept.commit)
    except RunnerError as error:
        raise WorkMissing(f"the work of run `{record.id}` is damaged: {error.message}", hint=ANEW) from error
    return kept


def _check_kept(kept: ResumeSource) -> None:
    wanted = [kept.repository, kept.directory / "output"]
    if kept.commits is not None and kept.commits.bundle is not None:
        wanted.append(kept.directory / kept.commits.bundle)
    if gone := [path for path in wanted if not path.exists()]:
        raise WorkMissing(f"the work of run `{kept.directory.name}` is gone: `{gone[0]}`", hint=ANEW)
