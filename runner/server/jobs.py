"""Runs of a server as Jobs of a cluster. They go on when the server ends, and when one of several does."""

from __future__ import annotations

from collections.abc import Callable

import trio
from msgspec import Struct

from runner.core.clock import now_microseconds
from runner.core.errors import RunnerError
from runner.core.model import Status
from runner.core.nurseries import unwrapping_groups
from runner.events.record import RunRecord, replay
from runner.ops.planning.facts import usable_providers
from runner.ops.planning.make_plan import PlanResult
from runner.ops.runs.job_table import JobTable
from runner.ops.runs.jobs import JobRun, submit_to
from runner.ops.runs.recover import recover_runs
from runner.ops.runs.start import RunHandle
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.ports.store import RunRow
from runner.steps.provision.plan import project_of

_MADE = 30.0  # seconds for a Job to be made, after which the id of its run is told all the same
_MOST_NEVER = 1000  # runs of which is known why they never began


class WaitingRun(Struct, frozen=True):
    """A run that the store does not know: its Job has not begun, or for an ``error`` never will."""

    row: RunRow
    error: RunnerError | None = None


class JobRuns:
    """The runs whose Jobs this server follows. ``ended`` gets the record of each at its end."""

    def __init__(self, env: WorkspaceEnv, table: JobTable, ended: Callable[[RunRecord], None]) -> None:
        self._env, self._table, self._ended = env, table, ended
        self._runs: dict[str, JobRun] = {}
        self._rows: dict[str, RunRow] = {}
        self._never: dict[str, WaitingRun] = {}

    def find(self, run: str) -> JobRun | None:
        return self._runs.get(run)

    def waiting(self, run: str) -> WaitingRun | None:
        """Return a run that has not begun."""
        handle = self._runs.get(run)
        if handle is not None and not handle.begun.is_set():
            return WaitingRun(self._rows[run])
        return self._never.get(run)

    async def carry_out(
        self, planned: PlanResult, key: str | None, *, task_status: trio.TaskStatus[list[tuple[RunHandle, bool]]]
    ) -> None:
        """Make the Jobs of a plan and follow them. Raises as ``submit_runs`` does, and why no run has a Job."""
        env, told = self._env, False
        submitting = submit_to(self._table, planned, env.settings, env.store, key=key, advise=env.advise, shown=False)
        try:
            with unwrapping_groups():
                async with submitting as submitted, trio.open_nursery() as nursery:
                    runs = [*submitted.runs.values()]
                    for run in runs:
                        self._runs.setdefault(run.id, run)  # an earlier request may have its key
                        self._rows.setdefault(run.id, _row_of(run, planned.plan.digest))
                        nursery.start_soon(self._follow, run)
                    for run in (run for run in runs if not run.plan.needs):
                        with trio.move_on_after(_MADE):
                            await run.decided.wait()
                    if all(run.error is not None for run in runs):
                        raise submitted.errors[0]
                    task_status.started([(run, run.attached) for run in runs])
                    told = True
        except RunnerError as error:
            if not told:
                raise
            env.advise(error)

    async def _follow(self, run: JobRun) -> None:
        """Wait for the end of a run. One whose worker has died ends as after any crash."""
        try:
            await run.ended.wait()
            if self._runs.get(run.id) is not run:  # an earlier request has its key
                return
            if run.error is None and run.record is not None:
                if not run.attached:
                    self._ended(run.record)
                return
            assert run.error is not None
            self._env.advise(run.error)
            if run.begun.is_set():
                await self._recover(run.id)
            else:
                self._never[run.id] = WaitingRun(self._rows[run.id], run.error)
                if len(self._never) > _MOST_NEVER:
                    del self._never[next(iter(self._never))]
        finally:
            if self._runs.get(run.id) is run:
                del self._runs[run.id], self._rows[run.id]

    async def _recover(self, run: str) -> None:
        env = self._env
        try:
            await recover_runs(env.settings, env.store, env.deps, usable_providers(), run, dry_run=False)
            self._ended(replay(run, await env.store.events(run)))
        except RunnerError as error:
            env.advise(error)


def _row_of(run: JobRun, digest: str) -> RunRow:
    return RunRow(
        id=run.id,
        name=run.plan.name,
        status=Status.PENDING.value,
        exit_code=None,
        plan=digest,
        created=now_microseconds(),
        ended=None,
        project=project_of(run.plan),
    )
