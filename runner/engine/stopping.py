"""Stopping: the signals, deadlines, budgets and losses that end a run or a step of it, and which of them did."""

from __future__ import annotations

import math

import trio
from msgspec import Struct, field

from runner.core.model import Outcome, Reason, Status, StopReason, StopStage, failed
from runner.core.settings import limit
from runner.events import events as ev
from runner.plan.model import Step
from runner.ports.provider import STOP_GRACE


class RunCancellation(Struct, kw_only=True):
    """Cancels a run: the first signal ends its work, the second its finalize phase and its sandboxes.

    A command that is being stopped has its grace only as long as its sandbox is open. Sandboxes have half of the stop
    budget, so that the other half is left to save and tear down, whatever ignores TERM.
    """

    stop_budget_seconds: float
    work: trio.CancelScope = field(default_factory=trio.CancelScope)
    finalize: trio.CancelScope = field(default_factory=trio.CancelScope)
    sandboxes: trio.CancelScope = field(default_factory=trio.CancelScope)
    requested_at: float | None = None  # trio time of the first signal
    forced_at: float | None = None  # and of the second
    lease_lost_at: float | None = None  # when the run's lease ended, or was about to
    lease_lost_reason: str | None = None  # why, if that is known

    def stop(self) -> None:
        if self.requested_at is None:
            self.requested_at = trio.current_time()
            self.work.cancel()
            self.start_stop_budget(self.requested_at)
        elif self.forced_at is None:
            self.forced_at = trio.current_time()
            self.finalize.cancel()
            self.sandboxes.cancel()

    def on_lease_lost(self, why: str | None = None) -> None:
        """End the work before somebody else can have the workspace."""
        if self.lease_lost_at is None:
            self.lease_lost_at, self.lease_lost_reason = trio.current_time(), why
            self.work.cancel()
            self.start_stop_budget(self.lease_lost_at)

    def start_stop_budget(self, ended: float) -> None:
        """Start the stop budget at ``ended``, unless it has started already."""
        self.finalize.deadline = min(self.finalize.deadline, ended + self.stop_budget_seconds)
        self.sandboxes.deadline = min(self.sandboxes.deadline, ended + self.stop_budget_seconds / 2)


class StopCauses(Struct, kw_only=True):
    """The moments that may stop one step, in trio time: its ``own`` deadline, its phase's (``outer``), a signal, its
    disk.

    The clock decides, since several scopes may have expired by now: the earliest moment is the cause, whatever came
    while the step was ending.
    """

    step: Step
    control: RunCancellation
    own: float
    outer: float
    finalizing: bool
    over_at: float | None = None  # when the workspace was seen to be larger than its limit
    overfull: str = ""  # in words

    def explain(self, stage: StopStage, command: float) -> ev.StopStageReached:
        """Build the event of a stop stage for this step's command, whose own deadline is ``command``."""
        sandboxes = self.control.sandboxes
        if stage is StopStage.TERM:
            grace = min(STOP_GRACE, max(0.0, sandboxes.deadline - trio.current_time()))
            return ev.StopStageReached(self.step.id, stage, self._reason(command), grace)
        if not sandboxes.cancel_called:  # the grace has passed
            return ev.StopStageReached(self.step.id, stage, self._reason(command))
        insisted = _moment(self.control.forced_at) <= sandboxes.deadline
        return ev.StopStageReached(
            self.step.id, stage, StopReason.SECOND_SIGNAL if insisted else StopReason.STOP_BUDGET
        )

    def outcome(self, awaited: str = "") -> Outcome:
        """Return the outcome of the stopped step; ``awaited`` says what it was waiting for."""
        because = f": {awaited}" if awaited else ""
        match self._reason():
            case StopReason.STEP_DEADLINE:
                return failed(
                    Reason.TIMEOUT, f"stopped at its deadline of {limit(self.step.deadline_seconds)}{because}"
                )
            case StopReason.RUN_DEADLINE:
                return failed(Reason.TIMEOUT, f"stopped at the run's deadline{because}")
            case StopReason.STOP_BUDGET:
                return failed(Reason.TIMEOUT, "stopped when the stop budget was used up")
            case StopReason.LEASE_LOST:
                return failed(Reason.LEASE, "stopped because the lease of its workspace was ending")
            case StopReason.DISK_FULL:
                return failed(Reason.DISK, f"stopped: {self.overfull}")
            case _:
                return Outcome(status=Status.CANCELLED, reason=Reason.CANCELLED, message="stopped")

    def _reason(self, command: float = math.inf) -> StopReason:
        if self.finalizing:
            signal = (_moment(self.control.forced_at), StopReason.SECOND_SIGNAL)
            outer = (self.outer, StopReason.STOP_BUDGET)
        else:
            signal = (_moment(self.control.requested_at), StopReason.SIGNAL)
            outer = (self.outer, StopReason.RUN_DEADLINE)
        lost = (_moment(self.control.lease_lost_at), StopReason.LEASE_LOST)
        full = (_moment(self.over_at), StopReason.DISK_FULL)
        own = (self.own, StopReason.STEP_DEADLINE)
        moments = (signal, lost, full, own, outer, (command, StopReason.COMMAND_DEADLINE))
        at, reason = min(moments, key=lambda moment: moment[0])  # the first of equal ones
        return reason if at <= trio.current_time() else StopReason.FAILURE


def _moment(at: float | None) -> float:
    return math.inf if at is None else at
