"""Runs that a server has started: they go on when whoever asked for them has gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from runner.core.errors import RunnerError
from runner.events.record import RunRecord
from runner.ops.host.liveness import is_run_lost
from runner.ops.planning.make_plan import PlanResult
from runner.ops.runs.cancel import request_cancel
from runner.ops.runs.history import StoredRun
from runner.ops.runs.resume import ResumePlan, plan_resume, start_resumed
from runner.ops.runs.start import RunHandle, start_runs
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.ports.store import RunRow

if TYPE_CHECKING:
    from runner.server.jobs import JobRuns

_BEGIN = 30.0  # seconds for a run to begin, after which its id is told all the same


class Running:
    """The runs of this process. When its nursery is cancelled they end in order, within their stop budgets.

    ``ended`` gets the record of each one at its end. With ``jobs`` runs that start are Jobs of a cluster, and go on.
    """

    def __init__(
        self,
        env: WorkspaceEnv,
        nursery: trio.Nursery,
        *,
        ended: Callable[[RunRecord], None],
        jobs: JobRuns | None = None,
    ) -> None:
        self._env, self._nursery, self._ended, self._jobs = env, nursery, ended, jobs
        self._handles: dict[str, RunHandle] = {}

    async def start(self, planned: PlanResult, key: str | None) -> list[tuple[RunHandle, bool]]:
        """Start the runs of a plan; of each, tell whether an earlier one has its key.

        Raises as ``start_runs`` and ``submit_runs`` do.
        """
        work = self._run if self._jobs is None else self._jobs.carry_out
        runs: list[tuple[RunHandle, bool]] = await self._nursery.start(work, planned, key)
        return runs

    async def is_lost(self, run: str) -> bool:
        """Tell whether nothing more comes of a run that has not ended."""
        return await is_run_lost(self._env.store, self._env.settings.home, run)

    async def resume(self, stored: StoredRun) -> RunHandle:
        """Continue a run as a new one. Raises as ``plan_resume`` and ``start_resumed`` do."""
        resuming = await plan_resume(stored, None, self._env.settings)
        run: RunHandle = await self._nursery.start(self._continue, resuming)
        return run

    async def cancel(self, run: RunRow) -> None:
        """End the work of a run, or its finalize phase at a second call; raises like ``request_cancel``."""
        own = self._handles.get(run.id) if run.ended is None else None
        handle = own or (None if self._jobs is None else self._jobs.find(run.id))
        if handle is not None:
            handle.cancel()
        else:
            await request_cancel(self._env.store, self._env.settings.home, run.id)

    async def _run(
        self,
        planned: PlanResult,
        key: str | None,
        *,
        task_status: trio.TaskStatus[list[tuple[RunHandle, bool]]],
    ) -> None:
        ours: dict[str, RunHandle] = {}
        told = False
        try:
            async with start_runs(planned, self._env.settings, key=key, advise=self._env.advise) as started:
                found = []
                for id, handle in [(handle.id, handle) for handle in started.runs.values()]:
                    if not handle.plan.needs:
                        with trio.move_on_after(_BEGIN):
                            await handle.begun.wait()
                    if handle.id == id:
                        ours[id] = handle
                    found.append((handle, handle.id != id))
                self._handles |= ours
                task_status.started(found)
                told = True
                await started.wait()
                for handle in ours.values():
                    self._ended(await handle.wait())
        except RunnerError as error:
            if not told:
                raise
            self._env.advise(error)
        finally:
            for run in ours:
                self._handles.pop(run, None)

    async def _continue(self, resuming: ResumePlan, *, task_status: trio.TaskStatus[RunHandle]) -> None:
        run: RunHandle | None = None
        try:
            async with start_resumed(resuming, self._env.settings, advise=self._env.advise) as run:
                self._handles[run.id] = run
                with trio.move_on_after(_BEGIN):
                    await run.begun.wait()
                task_status.started(run)
                self._ended(await run.wait())
        except RunnerError as error:
            if run is None:
                raise
            self._env.advise(error)
        finally:
            if run is not None:
                self._handles.pop(run.id, None)
