"""Outcomes of steps that raised and of whole runs, and the exit codes of runs. Pure."""

from __future__ import annotations

from runner.core.errors import (
    HostRefused,
    LeaseHeld,
    LeaseLost,
    McpServerFailed,
    OutOfMemory,
    RunnerError,
    WorkspaceLimit,
    WorkspaceLost,
    first_leaf,
)
from runner.core.model import Outcome, Reason, Status, failed
from runner.engine.stopping import RunCancellation
from runner.events.record import RunRecord


def outcome_of_error(group: ExceptionGroup[RunnerError | OSError], *, end_unknown: bool) -> Outcome:
    """Return the outcome of a step that raised; ``end_unknown`` while a command ran of which nobody knows the end."""
    error = first_leaf(group)
    if isinstance(error, OSError):
        error = HostRefused.of(error)
    assert isinstance(error, RunnerError)
    details = (f"hint: {error.hint}",) if error.hint else ()
    if end_unknown and isinstance(error, OutOfMemory):  # of which the command was ended, whatever it had done
        return failed(Reason.OOM, error.message, details=details)
    if end_unknown and isinstance(error, WorkspaceLost):
        message = f"the sandbox was lost while a command ran in it: {error.message}"
        return Outcome(status=Status.UNKNOWN, reason=Reason.UNKNOWN, message=message, details=details)
    reason = Reason.LEASE if isinstance(error, LeaseHeld | LeaseLost) else Reason.PLATFORM
    if isinstance(error, WorkspaceLimit):
        reason = Reason.LIMIT
    if isinstance(error, McpServerFailed):
        return failed(Reason.MCP, error.message, details=details)
    return failed(reason, f"{error.code}: {error.message}", details=details)


def verdict(record: RunRecord, control: RunCancellation) -> Outcome:
    """Return the run's outcome: the first step that failed decides, unless a signal or a lost lease ended the run."""
    if control.requested_at is not None:
        return Outcome(status=Status.CANCELLED, reason=Reason.CANCELLED, message="stopped by a signal")
    if control.lease_lost_at is not None:
        because = f": {control.lease_lost_reason}" if control.lease_lost_reason else ""
        return failed(Reason.LEASE, f"the lease of its workspace could not be kept{because}")
    for name, step in record.steps.items():
        if step.outcome is not None and not step.outcome.ok:
            return Outcome(
                status=step.outcome.status, reason=step.outcome.reason, message=f"{name}: {step.outcome.message}"
            )
    unreached = [name for name, step in record.steps.items() if not step.status.ended]
    if unreached:
        return failed(Reason.TIMEOUT, f"the deadline came before {unreached[0]}")
    return Outcome(status=Status.SUCCEEDED)


def exit_code(outcome: Outcome) -> int:
    """Return the process's exit code for a run's outcome."""
    match outcome.reason:
        case None:
            return 0
        case Reason.CANCELLED:
            return 130
        case Reason.TIMEOUT:
            return 124
        case Reason.POLICY:
            return 3
        case Reason.PLATFORM | Reason.UNKNOWN:
            return 4
        case Reason.LEASE | Reason.LIMIT:
            return 5
        case _:
            return 1
