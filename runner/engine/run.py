"""One run: work under its deadline, then finalize under a budget of its own, each step an outcome.

Finalize begins after work has ended, for whatever reason. The two phases are siblings, so work needs no shield;
sandboxes and their services live in a nursery around both.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner import __version__
from runner.core.errors import (
    Escaped,
    LeaseLost,
    RunnerError,
    first_leaf,
)
from runner.core.model import (
    Fence,
    Outcome,
    Reason,
    RunHolder,
    Status,
    failed,
    succeeded,
)
from runner.core.redact import Secret
from runner.engine.execute import execute
from runner.engine.outcomes import exit_code, outcome_of_error, verdict
from runner.engine.stopping import RunCancellation, StopCauses
from runner.events import events as ev
from runner.events.record import RunRecord, fold
from runner.lifecycle.lease import TTL
from runner.plan.model import RunPlan, Step, graph_of, network_of
from runner.ports.provider import KILL_GRACE
from runner.runtime.context import CurrentStep, EventBuffer, ResumeState, RunContext, RunDependencies, RunPaths
from runner.runtime.disk_watch import outgrown, too_large, watched
from runner.runtime.lease_holder import LeaseHolder, renew_until_released
from runner.runtime.removal import fall_back
from runner.runtime.run_workspace import RunWorkspace
from runner.runtime.sandbox_session import SandboxSession
from runner.steps.provision.plan import ProvisionBody, project_of
from runner.steps.provision.run import next_fit

Append = Callable[[str, Sequence[ev.Event], Fence | None], Awaitable[Sequence[ev.Recorded]]]


class Uncopied(OSError):
    """The host refused the copies that an ``Append`` writes beside the store; ``recorded`` are stored all the same."""

    recorded: Sequence[ev.Recorded] = ()


async def execute_run(
    plan: RunPlan,
    digest: str,
    *,
    id: str,
    paths: RunPaths,
    deps: RunDependencies,
    append: Append,
    control: RunCancellation,
    key: str | None = None,
    manifests: str | None = None,
    resumption: ResumeState | None = None,
    secrets: Mapping[str, Secret] | None = None,
    warnings: Sequence[RunnerError] = (),
) -> RunRecord:
    """Run one run to its one terminal event and return its record.

    ``secrets`` are those that its steps name; ``deps.redact`` and ``append`` know them already. ``warnings`` are
    recorded at its start. With a ``resumption`` it continues the work of an earlier run, and does not perform the steps
    that it reuses.

    Raises ``RunExists`` when the store has a run of this name and ``key``; then nothing was started. Raises ``RunOver``
    when somebody else has taken its workspace over and has ended the run.

    Cancel it by ``control`` only. Cancelling the caller's scope ends work as well, and finalize still runs within the
    stop budget. A bug in a step propagates after that.
    """
    record = RunRecord(id=id)
    lease_holder = LeaseHolder(record.workspace, RunHolder(id), deps.lease)
    journal = _Journal(record, append, control, lease_holder)
    await journal.write(*_begun(plan, digest, deps, warnings, key=key, manifests=manifests, resumption=resumption))
    reused = resumption.reused if resumption is not None else {}
    last: list[ev.Event] = []
    events = EventBuffer(journal.emit)
    try:
        with control.sandboxes:
            async with trio.open_nursery() as services:
                run = RunContext(
                    id=id,
                    plan=plan,
                    digest=digest,
                    paths=paths,
                    deps=deps,
                    events=events,
                    lease_holder=lease_holder,
                    workspace=RunWorkspace(),
                    sandboxes=SandboxSession(services, events.emit),
                    rehearsal=deps.gateway.rehearsal,
                    resume_source=resumption.kept if resumption is not None else None,
                    attempt=resumption.attempt if resumption is not None else None,
                    secrets=secrets or {},
                )
                services.start_soon(_keep_lease, journal, plan.stop_budget_seconds)
                await _run_phases(_PhaseRunner(run=run, record=record, plan=plan, control=control, reused=reused))
                services.cancel_scope.cancel()
    except* LeaseLost:
        # The workspace is another's now, and whatever of it is left. That this run has ended is still for us to say.
        last += (ev.StepEnded(name, _LOST) for name in record.unfinished())
    await journal.write(*last, *_ended(record, control, deps))
    return record


def _begun(
    plan: RunPlan,
    digest: str,
    deps: RunDependencies,
    warnings: Sequence[RunnerError],
    *,
    key: str | None,
    manifests: str | None,
    resumption: ResumeState | None,
) -> list[ev.Event]:
    started = ev.RunStarted(
        name=plan.name,
        plan=digest,
        runner=__version__,
        steps={step.id: step.kind for step in plan.steps},
        deadline_seconds=plan.deadline_seconds,
        key=key,
        resumes=resumption.run if resumption is not None else None,
        rehearsal=deps.gateway.rehearsal,
        manifests=manifests,
        project=project_of(plan),
        routine=tuple(step.id for step in plan.steps if step.routine),
        open_network=tuple(step.id for step in plan.steps if network_of(step).open),
    )
    return [started, *(ev.WarningIssued(warning.code, warning.message) for warning in warnings)]


_LOST = failed(Reason.LEASE, "its workspace was taken over by another")


class _Journal(Struct):
    """Writes the events of one run and folds them into its record."""

    record: RunRecord
    append: Append
    control: RunCancellation
    lease_holder: LeaseHolder

    async def write(self, *events: ev.Event, fence: Fence | None = None) -> None:
        """Append events, shielded: a cancelled step still reports its end, and the store bounds its own waiting."""
        with trio.CancelScope(shield=True):
            try:
                written = await self.append(self.record.id, events, fence)
            except Uncopied as refusal:
                self._fold(refusal.recorded)
                raise
            self._fold(written)

    def _fold(self, written: Sequence[ev.Recorded]) -> None:
        for recorded in written:
            fold(self.record, recorded)

    async def emit(self, *events: ev.Event) -> None:
        """Append events behind the lease's fence.

        A refusal means that the holder was away for longer than its lease: whatever runs is ended. The events are
        written all the same if nobody else has had the workspace since, else ``LeaseLost`` is raised.
        """
        fence = self.lease_holder.fence
        with trio.CancelScope(shield=True):
            try:
                await self.write(*events, fence=fence)
            except LeaseLost as refusal:
                if fence is None:
                    raise
                self.control.on_lease_lost()
                self.control.sandboxes.cancel()
                if await self.lease_holder.regain(fence, self.write):
                    events = (ev.WarningIssued(refusal.code, refusal.message), *events)
                await self.write(*events, fence=self.lease_holder.fence)


async def _keep_lease(journal: _Journal, stop_budget_seconds: float) -> None:
    async def warn(message: str) -> None:
        await journal.emit(ev.WarningIssued("lease.refresh-failed", message))

    # Of a stop budget longer than that, what is left after the lease cannot be used; but the run can begin.
    margin = min(stop_budget_seconds + KILL_GRACE, TTL / 4)
    why = await renew_until_released(journal.lease_holder, journal.write, margin=margin, warn=warn)
    if journal.lease_holder.fence is not None:
        journal.control.on_lease_lost(why)


async def record_skipped_run(
    plan: RunPlan,
    digest: str,
    *,
    id: str,
    append: Append,
    reason: str,
    key: str | None,
    rehearsal: str | None = None,
    manifests: str | None = None,
) -> RunRecord:
    """Record a run that does not start, with the reason; it counts as failed."""
    record = RunRecord(id=id)
    kinds = {step.id: step.kind for step in plan.steps}
    events = (
        ev.RunStarted(
            name=plan.name,
            plan=digest,
            runner=__version__,
            steps=kinds,
            deadline_seconds=plan.deadline_seconds,
            key=key,
            rehearsal=rehearsal,
            manifests=manifests,
            project=project_of(plan),
        ),
        ev.RunEnded(Outcome(status=Status.SKIPPED, message=reason), 1),
    )
    for recorded in await append(id, events, None):
        fold(record, recorded)
    return record


def _ended(record: RunRecord, control: RunCancellation, deps: RunDependencies) -> list[ev.Event]:
    outcome = verdict(record, control)
    text = "what was written before secret {} was known may show it"
    late = [ev.WarningIssued("secret.late", text.format(name)) for name in deps.redact.late]
    return [*late, ev.RunEnded(outcome, exit_code(outcome))]


async def _run_phases(phases: _PhaseRunner) -> None:
    try:
        await _work(phases)
    finally:
        await _finalize(phases)


async def _work(phase: _PhaseRunner) -> None:
    control = phase.control
    with control.work as work:
        work.deadline = phase.deadline = trio.current_time() + phase.plan.deadline_seconds
        control.start_stop_budget(work.deadline)
        phase.run.events.pending.append(ev.PhaseStarted("work"))
        await phase.perform(phase.plan.phase("work"))


async def _finalize(phase: _PhaseRunner) -> None:
    plan, record, control = phase.plan, phase.record, phase.control
    phase.finalizing = True
    control.start_stop_budget(trio.current_time())
    with control.finalize as finalize:
        finalize.shield = True
        if control.requested_at is not None:
            await phase.run.emit(ev.CancelRequested("signal"))
        elif control.lease_lost_at is not None:
            await phase.run.emit(ev.CancelRequested("lease"))
        elif control.work.cancel_called:
            await phase.run.emit(ev.CancelRequested("deadline"))
        phase.run.events.pending.append(ev.PhaseStarted("finalize"))
        # The agent ran, but work ended before its hooks: they come first now, while there are sandboxes.
        phase.deadline = control.sandboxes.deadline
        if overdue := _overdue_hooks(plan, record):
            await phase.perform(overdue)
        phase.deadline = finalize.deadline
        await phase.perform(plan.phase("finalize"))


def _overdue_hooks(plan: RunPlan, record: RunRecord) -> list[Step]:
    """List the steps that should have followed an agent that has started, and have not."""
    overdue: dict[str, Step] = {}
    for step in plan.phase("work"):
        begun = all(need in overdue or record.steps[need].started is not None for need in step.needs)
        if step.post_agent and record.steps[step.id].status is Status.PENDING and begun:
            overdue[step.id] = step
    return list(overdue.values())


_OF_PLACE = (Reason.PLATFORM, Reason.SETUP, Reason.TIMEOUT, Reason.OOM, Reason.UNKNOWN)


class _PhaseRunner(Struct, kw_only=True):
    """Performs the steps of one phase, and skips those whose needs did not succeed."""

    run: RunContext
    record: RunRecord
    plan: RunPlan
    control: RunCancellation
    reused: Mapping[str, tuple[str, str]]
    deadline: float = math.inf
    finalizing: bool = False

    async def perform(self, steps: Sequence[Step]) -> None:
        by_id = {step.id: step for step in steps}

        async def one(id: str) -> None:
            await self._step(by_id[id])

        try:
            await execute(graph_of(tuple(steps)), one)
        finally:
            await self._tell()

    async def _tell(self) -> None:
        if self.run.events.pending:
            await self.run.emit()

    def _outcome(self, name: str) -> Outcome | None:
        """Return the outcome of a step that has ended."""
        told = (
            event.outcome for event in self.run.events.pending if isinstance(event, ev.StepEnded) and event.step == name
        )
        return next(told, self.record.steps[name].outcome)

    async def _step(self, step: Step) -> None:
        """Perform a step; when its provider turns out unable, repeat the steps up to it on the next of the chain.

        The run falls back when making, cloning or setup failed, or when no sandbox could be opened for the agent; each
        provider is tried once. A setup command that exits with an error counts, with ``on_failure: fail``: nobody can
        tell from outside whether it is wrong or lacks something on this provider, and nothing that it did is kept. A
        failure that would be the same everywhere does not count, such as policy; nor does an end by a signal or the
        run's deadline.
        """
        await self._attempt(step)
        if not step.repeated_on_fallback:
            return
        await self._tell()
        work = self.plan.phase("work")
        again = [one for one in work[: work.index(step) + 1] if one.repeated_on_fallback]
        while (fallen := self._fallen(again)) and await next_fit(_provisioning(self.plan), self.run):
            failed, outcome = fallen
            names = tuple(one.id for one in again)
            leaving, _ = self._context(failed)
            await fall_back(leaving, failed.id, outcome, self.record.attempt + 1, names)
            for one in again:
                await self._attempt(one)
            await self._tell()

    def _fallen(self, steps: Sequence[Step]) -> tuple[Step, Outcome] | None:
        """Return the first failed step and its outcome, if another provider may do better."""
        run = self.run
        if run.results.agent_started or run.workspace.provider is None or self.control.work.cancel_called:
            return None
        for step in steps:
            outcome = self.record.steps[step.id].outcome
            if outcome is not None and not outcome.ok:
                return (step, outcome) if outcome.reason in _OF_PLACE else None
        return None

    async def _attempt(self, step: Step) -> None:
        if blocker := self._blocked(step):
            self.run.events.pending.append(ev.StepEnded(step.id, Outcome(status=Status.SKIPPED, message=blocker)))
            return
        reused = [ev.StepReused(step.id, *self.reused[step.id])] if step.id in self.reused else []
        await self.run.emit(ev.StepStarted(step.id), *reused)
        outcome: Outcome | None = None
        run, stops = self._context(step)
        try:
            with trio.CancelScope(deadline=min(stops.own, stops.outer)) as scope:
                work = _restore(step, run, reused[0].from_run) if reused else _perform(step, run)
                outcome = await self._within_disk(stops, scope, work)
        except* (RunnerError, OSError) as group:  # out of whatever nurseries it came through
            outcome = outcome_of_error(group, end_unknown=run.step.end_unknown)
            if isinstance(error := first_leaf(group), Escaped):
                await self.run.emit(ev.ProcessEscaped(step.id, error.message))
        finally:
            if step.secrets:
                self.run.sandboxes.begin_close()  # no later step may find what was in this one's sandbox
            self.run.events.pending.append(ev.StepEnded(step.id, outcome or stops.outcome(run.step.awaited)))

    def _context(self, step: Step) -> tuple[RunContext, StopCauses]:
        """Return the context of a step that begins now, and what may stop it."""
        own = trio.current_time() + step.deadline_seconds
        stops = StopCauses(step=step, control=self.control, own=own, outer=self.deadline, finalizing=self.finalizing)
        return replace(self.run, current_step=CurrentStep(step.id, stops.explain)), stops

    async def _within_disk(self, stops: StopCauses, scope: trio.CancelScope, work: Awaitable[Outcome]) -> Outcome:
        """Perform a step, and cancel it when its workspace exceeds a disk limit that the provider does not enforce."""
        measure, limit = watched(self.run, stops.step), self.run.plan.limits.disk_bytes or 0
        if measure is None:
            return await work

        async def watch() -> None:
            stops.overfull = too_large(await outgrown(measure, limit), limit)
            stops.over_at = trio.current_time()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            outcome = await work
            nursery.cancel_scope.cancel()
        size = await measure()
        return failed(Reason.DISK, too_large(size, limit)) if size > limit and outcome.ok else outcome

    def _blocked(self, step: Step) -> str | None:
        for need in step.needs:
            outcome = self._outcome(need)
            status = self.record.steps[need].status if outcome is None else outcome.status
            if step.when == "ended" and status is not Status.SKIPPED:
                continue
            if outcome is None or not outcome.ok or status is Status.SKIPPED:
                return f"{need} {status.value}"
        return None


def _provisioning(plan: RunPlan) -> ProvisionBody:
    (body,) = (step.body for step in plan.steps if step.kind == "provision")
    assert isinstance(body, ProvisionBody)
    return body


async def _perform(step: Step, run: RunContext) -> Outcome:
    module = import_module(f"runner.steps.{step.kind}.run")
    outcome: Outcome = await module.perform(step.body, run)
    return outcome


async def _restore(step: Step, run: RunContext, of: str) -> Outcome:
    module = import_module(f"runner.steps.{step.kind}.run")
    if hasattr(module, "restore"):
        await module.restore(step.body, run)
    return succeeded(f"as in run {of}")
