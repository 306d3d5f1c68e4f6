"""One run: work under its deadline, then settle under a budget of its own, each step an outcome.

Work and settle are siblings. Settle begins after work has ended, for whatever reason, so no shield is
needed inside work; sandboxes and their services live in a nursery around both.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import trio

from runner import __version__
from runner import events as ev
from runner.engine.execute import execute
from runner.errors import Escaped, HostRefused, RunnerError, leaf
from runner.model import Outcome, Reason, Status, failed
from runner.plan.model import RunPlan, Step, graph_of
from runner.record import RunRecord, fold
from runner.steps._run import Places, Ports, Run

Append = Callable[[str, Sequence[ev.Event]], Awaitable[Sequence[ev.Recorded]]]


@dataclass
class Control:
    """How a signal reaches a run: the first ends its work, the second its settling and its sandboxes.

    A command that is being stopped has its grace only as long as its sandbox is open. Sandboxes have half of the
    stop budget, so that the other half is left to save and tear down, whatever ignores TERM.
    """

    stop_budget_seconds: float
    work: trio.CancelScope = field(default_factory=trio.CancelScope)
    settle: trio.CancelScope = field(default_factory=trio.CancelScope)
    sandboxes: trio.CancelScope = field(default_factory=trio.CancelScope)
    requested_at: float | None = None  # trio time of the first signal

    def stop(self) -> None:
        if self.requested_at is None:
            self.requested_at = trio.current_time()
            self.work.cancel()
            self.bound(self.requested_at)
        else:
            self.settle.cancel()
            self.sandboxes.cancel()

    def bound(self, ended: float) -> None:
        """Let the stop budget begin at ``ended``, unless it has begun already."""
        self.settle.deadline = min(self.settle.deadline, ended + self.stop_budget_seconds)
        self.sandboxes.deadline = min(self.sandboxes.deadline, ended + self.stop_budget_seconds / 2)


async def carry_out(
    plan: RunPlan,
    digest: str,
    *,
    id: str,
    places: Places,
    ports: Ports,
    append: Append,
    control: Control,
    key: str | None = None,
) -> RunRecord:
    """Run one run to its one terminal event and return its record.

    Raises ``RunExists`` when the store has a run of this name and ``key``; then nothing was started.

    ``control`` is the only way to cancel it; cancelling the caller's scope ends work as well and still
    settles, within the run's stop budget. A bug in a step propagates after settling.
    """
    record = RunRecord(id)

    async def emit(*events: ev.Event) -> None:
        # Shielded: a step that was cancelled still says so, and the store bounds its own waiting.
        with trio.CancelScope(shield=True):
            for recorded in await append(id, events):
                fold(record, recorded)

    kinds = {step.id: step.kind for step in plan.steps}
    await emit(ev.RunStarted(plan.name, digest, __version__, kinds, plan.deadline_seconds, key=key))
    with control.sandboxes:
        async with trio.open_nursery() as services:
            run = Run(id=id, plan=plan, places=places, ports=ports, emit=emit, services=services)
            try:
                await _work(_Stage(run, record, plan, control))
            finally:
                await _settle(_Stage(run, record, plan, control))
            services.cancel_scope.cancel()
    outcome = _verdict(record, control)
    left = tuple(f"{kind} {name} {place}".rstrip() for (kind, name), place in record.effects.items())
    await emit(ev.RunEnded(outcome, exit_code(outcome), left))
    return record


async def pass_over(plan: RunPlan, digest: str, *, id: str, append: Append, reason: str, key: str | None) -> RunRecord:
    """Record a run that is not started, with the reason; it counts as failed."""
    record = RunRecord(id)
    kinds = {step.id: step.kind for step in plan.steps}
    events = (
        ev.RunStarted(plan.name, digest, __version__, kinds, plan.deadline_seconds, key=key),
        ev.RunEnded(Outcome(Status.SKIPPED, message=reason), 1),
    )
    for recorded in await append(id, events):
        fold(record, recorded)
    return record


async def _work(stage: _Stage) -> None:
    control = stage.control
    with control.work as work:
        work.deadline = stage.deadline = trio.current_time() + stage.plan.deadline_seconds
        control.bound(work.deadline)
        await stage.run.emit(ev.PhaseEntered("work"))
        await stage.perform(stage.plan.phase("work"))


async def _settle(stage: _Stage) -> None:
    plan, record, control = stage.plan, stage.record, stage.control
    control.bound(trio.current_time())
    with control.settle as settle:
        settle.shield = True
        if control.requested_at is not None:
            await stage.run.emit(ev.CancelRequested("signal"))
        elif control.work.cancel_called:
            await stage.run.emit(ev.CancelRequested("deadline"))
        await stage.run.emit(ev.PhaseEntered("settle"))
        # The agent ran, but work ended before its hooks: they come first now, while there are sandboxes.
        stage.deadline = control.sandboxes.deadline
        await stage.perform(
            [
                step
                for step in plan.phase("work")
                if step.kind == "post_hook"
                and record.steps[step.id].status is Status.PENDING
                and all(record.steps[need].started for need in step.needs)
            ]
        )
        stage.deadline = settle.deadline
        await stage.perform(plan.phase("settle"))


@dataclass
class _Stage:
    """Performs steps of one run, deciding on skipping by the outcomes of needs."""

    run: Run
    record: RunRecord
    plan: RunPlan
    control: Control
    deadline: float = math.inf

    async def perform(self, steps: Sequence[Step]) -> None:
        by_id = {step.id: step for step in steps}

        async def one(id: str) -> None:
            await self._step(by_id[id])

        await execute(graph_of(tuple(steps)), one)

    async def _step(self, step: Step) -> None:
        if blocker := self._blocked(step):
            await self.run.emit(ev.StepEnded(step.id, Outcome(Status.SKIPPED, message=blocker)))
            return
        await self.run.emit(ev.StepStarted(step.id))
        outcome: Outcome | None = None
        own = trio.current_time() + step.deadline_seconds
        try:
            with trio.CancelScope(deadline=min(self.deadline, own)):
                outcome = await _perform(step, self.run)
        except* (RunnerError, OSError) as group:  # out of whatever nurseries it came through
            outcome = _broken(group)
            if isinstance(error := leaf(group), Escaped):
                await self.run.emit(ev.Overdue(step.id, error.message))
        finally:
            await self.run.emit(ev.StepEnded(step.id, outcome or self._stopped(step, own)))

    def _stopped(self, step: Step, own: float) -> Outcome:
        """Why a step was cancelled. Asked of the clock, for several scopes may have expired by now."""
        if self.control.requested_at is None and trio.current_time() >= min(self.deadline, own):
            whose = f"its deadline of {step.deadline_seconds:g}s" if own <= self.deadline else "the run's deadline"
            return failed(Reason.TIMEOUT, f"stopped at {whose}")
        return Outcome(Status.CANCELLED, Reason.CANCELLED, "stopped")

    def _blocked(self, step: Step) -> str | None:
        for need in step.needs:
            ended = self.record.steps[need]
            if step.when == "ended" and ended.status is not Status.SKIPPED:
                continue
            if ended.outcome is None or not ended.outcome.ok or ended.status is Status.SKIPPED:
                return f"{need} {ended.status.value}"
        return None


def _broken(group: ExceptionGroup[RunnerError | OSError]) -> Outcome:
    error = leaf(group)
    if isinstance(error, OSError):
        error = HostRefused.of(error)
    assert isinstance(error, RunnerError)
    details = (f"hint: {error.hint}",) if error.hint else ()
    return failed(Reason.PLATFORM, f"{error.code}: {error.message}", details=details)


async def _perform(step: Step, run: Run) -> Outcome:
    module = import_module(f"runner.steps.{step.kind}.run")
    outcome: Outcome = await module.perform(step.body, run)
    return outcome


def _verdict(record: RunRecord, control: Control) -> Outcome:
    """The run's outcome: the first step that went wrong decides, and a signal says why."""
    if control.requested_at is not None:
        return Outcome(Status.CANCELLED, Reason.CANCELLED, "stopped by a signal")
    for name, step in record.steps.items():
        if step.outcome is not None and not step.outcome.ok:
            return Outcome(step.outcome.status, step.outcome.reason, f"{name}: {step.outcome.message}")
    unreached = [name for name, step in record.steps.items() if not step.status.ended]
    if unreached:
        return failed(Reason.TIMEOUT, f"the deadline came before {unreached[0]}")
    return Outcome(Status.SUCCEEDED)


def exit_code(outcome: Outcome) -> int:
    """The process's exit code for a run's outcome."""
    match outcome.reason:
        case None:
            return 0
        case Reason.CANCELLED:
            return 130
        case Reason.TIMEOUT:
            return 124
        case Reason.POLICY:
            return 3
        case Reason.PLATFORM:
            return 4
        case _:
            return 1
