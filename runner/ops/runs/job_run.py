"""A run that is, or will be, a Job: its handle, and the decision whether it still may begin."""

from __future__ import annotations

import math

import trio
from msgspec import field

from runner.cluster import job
from runner.core.errors import JobLost, JobNotStarted, RunnerError, RunUnfinished
from runner.core.model import Outcome, Reason, Status, failed
from runner.core.nurseries import first_of
from runner.events.events import Recorded, RunStarted
from runner.events.record import RunRecord
from runner.ops.runs import pending
from runner.ops.runs.start import RunHandle

PULL_SECONDS = 180.0  # for an image to come after a first refusal: nodes try again, five times in that time
_STOPPED = 130  # as a run ends that is cancelled


class JobRun(RunHandle, kw_only=True):
    """A run that is, or will be, a Job. ``error`` is why its end is not known here, or why it has not begun.

    ``control`` is of the following only. Of the ``stops`` that were asked for, the worker was told ``heard``.
    """

    made: bool = False  # its Job, by us
    attached: bool = False  # an earlier call carries it out
    decided: trio.Event = field(default_factory=trio.Event)  # its Job is made, or there will be none
    stops: int = 0
    heard: int = 0
    asked: trio.Event = field(default_factory=trio.Event)
    error: RunnerError | None = None
    looked: float = -math.inf
    seen: int = 0  # the number of its last event
    waits: str = ""  # what it waits for, less what changes about that
    failing: float = math.inf  # since when its image does not come

    @property
    def is_pending(self) -> bool:
        return not self.begun.is_set() and not self.ended.is_set()

    def sink(self, recorded: Recorded) -> None:
        self.seen = recorded.seq
        if isinstance(recorded.event, RunStarted):
            self.begun.set()

    def stopped(self, when: str) -> JobNotStarted:
        """Return the error of a run that somebody has stopped before it began."""
        error = JobNotStarted(f"run `{self.plan.name}` was stopped before {when}")
        error.exit_code = _STOPPED
        return error

    def cancel(self) -> None:
        """Stop the run; one that an earlier call carries out is only left."""
        if self.attached:
            self.control.stop()
        self.stops += 1
        self.asked.set()

    def left(self) -> RunUnfinished:
        """Return the error of a call that was stopped while it followed the run of an earlier one."""
        hint = f"see it by `runner runs attach {self.id}`; `runner runs cancel {self.id}` ends it"
        error = RunUnfinished(
            f"run `{self.id}` goes on: an earlier call has begun it, and this one only left it", hint=hint
        )
        error.exit_code = _STOPPED
        return error

    async def until_begun(self) -> None:
        """Wait for its first event from its worker, or for its end."""
        await first_of(self.begun.wait, self.ended.wait)

    async def wait(self) -> RunRecord:
        """Return its record when it has ended. Raises why there is none."""
        await self.ended.wait()
        if self.record is None:
            assert self.error is not None
            raise self.error
        return self.record

    def why_never(self, state: job.JobState) -> RunnerError | None:
        """Say why a run that has not begun never will."""
        name, now = self.plan.name, trio.current_time()
        self.failing = min(self.failing, now) if state.failing else math.inf
        if self.stops:
            return self.stopped("it began")
        if state.hopeless:
            return JobNotStarted(f"the Job of run `{name}` does not start: {state.hopeless}", hint=state.hint)
        if now >= self.failing + PULL_SECONDS:
            message = f"the Job of run `{name}` has not started in {PULL_SECONDS:.0f}s: {state.waits}"
            return JobNotStarted(message, hint=state.hint)
        if state.over:
            hint = "look at RUNNER_DATABASE_URL in the Secret of RUNNER_WORKER_SECRET" if not state.why else None
            why = state.why or "its worker has written to another store"
            return JobLost(f"the Job of run `{name}` is over before the run began: {why}", hint=hint)
        return None


def outcome_of(error: RunnerError) -> tuple[Outcome, int]:
    """Return how a run ends that an error keeps from beginning, and its exit code."""
    if error.exit_code == _STOPPED:
        return pending.CANCELLED, pending.CANCELLED_CODE
    return failed(Reason.PLATFORM, error.message), error.exit_code


def skipped(why: str) -> tuple[Outcome, int]:
    """Return how a run ends that must not begin, and its exit code."""
    return Outcome(status=Status.SKIPPED, message=why), 1
