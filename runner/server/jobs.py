"""Runs of a server as Jobs of a cluster. They go on when the server ends, and when one of several does."""

from __future__ import annotations

from collections.abc import Callable

import trio

from runner.core.errors import RunnerError
from runner.core.nurseries import unwrapping_groups
from runner.events.record import RunRecord, replay
from runner.ops.planning.facts import usable_providers
from runner.ops.planning.make_plan import PlanResult
from runner.ops.runs.cancel import heed_requests
from runner.ops.runs.job_run import JobRun
from runner.ops.runs.job_table import JobTable
from runner.ops.runs.jobs import submit_to
from runner.ops.runs.recover import recover_runs
from runner.ops.runs.recover_pending import end_pending
from runner.ops.runs.start import RunHandle
from runner.ops.workspaces.workspace_lease import WorkspaceEnv

_MADE = 30.0  # seconds for the Jobs of a plan to be made, after which the ids of its runs are told all the same
_LEFT = 60.0  # seconds between looks for pending runs that nobody follows


class JobRuns:
    """The runs whose Jobs this server follows. ``ended`` gets the record of each at its end."""

    def __init__(self, env: WorkspaceEnv, table: JobTable, ended: Callable[[RunRecord], None]) -> None:
        self._env, self._table, self._ended = env, table, ended
        self._runs: dict[str, JobRun] = {}

    def find(self, run: str) -> JobRun | None:
        """Return a run that this server has submitted, and that has not ended."""
        return self._runs.get(run)

    async def keep(self) -> None:
        """Stop pending runs when that is asked for, and end those that another server has left; never returns."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(heed_requests, self._env.store, self._stops)
            nursery.start_soon(self._end_left)

    def _stops(self) -> dict[str, Callable[[], None]]:
        return {id: run.cancel for id, run in self._runs.items() if run.is_pending}

    async def _end_left(self) -> None:
        while True:
            try:
                for row in await self._env.store.runs(status="pending"):
                    if row.id not in self._runs:
                        await end_pending(self._env.store, row, self._table.objects)
            except RunnerError as error:  # the next look may succeed
                self._env.advise(error)
            await trio.sleep(_LEFT)

    async def carry_out(
        self, planned: PlanResult, key: str | None, *, task_status: trio.TaskStatus[list[tuple[RunHandle, bool]]]
    ) -> None:
        """Make the Jobs of a plan and follow them. Raises as ``submit_runs`` does, and why no run has a Job."""
        env, told = self._env, False
        submitting = submit_to(self._table, planned, env.settings, env.store, key=key, advise=env.advise, shown=False)
        try:
            with unwrapping_groups():
                async with submitting as submitted, trio.open_nursery() as nursery:
                    await submitted.recorded.wait()
                    runs = [*submitted.runs.values()]
                    for run in runs:
                        if not run.attached:
                            self._runs[run.id] = run
                        nursery.start_soon(self._follow, run)
                    with trio.move_on_after(_MADE):
                        for run in (run for run in runs if not run.plan.needs):
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
            if run.attached:
                return
            if run.record is not None:
                self._ended(run.record)
            if run.error is not None:
                self._env.advise(run.error)
            if run.record is None and run.begun.is_set():
                await self._recover(run.id)
        finally:
            if self._runs.get(run.id) is run:
                del self._runs[run.id]

    async def _recover(self, run: str) -> None:
        env = self._env
        try:
            await recover_runs(env.settings, env.store, env.deps, usable_providers(), run, dry_run=False)
            self._ended(replay(run, await env.store.events(run)))
        except RunnerError as error:
            env.advise(error)
