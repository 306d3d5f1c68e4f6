"""Runs that a server has started: they go on when whoever asked for them has gone."""

from __future__ import annotations

from collections.abc import Callable

import trio

from runner.core.errors import RunnerError
from runner.events.record import RunRecord
from runner.ops.planning.make_plan import PlanResult
from runner.ops.runs.cancel import request_cancel
from runner.ops.runs.history import StoredRun
from runner.ops.runs.resume import ResumePlan, plan_resume, start_resumed
from runner.ops.runs.start import RunHandle, start_runs
from runner.ops.workspaces.workspace_lease import WorkspaceEnv

_BEGIN = 30.0  # seconds for a run to begin, after which its id is told all the same


class Running:
    """The runs of this process. When its nursery is cancelled they end in order, within their stop budgets.

    ``ended`` gets the record of each one at its end.
    """

    def __init__(self, env: WorkspaceEnv, nursery: trio.Nursery, *, ended: Callable[[RunRecord], None]) -> None:
        self._env, self._nursery, self._ended = env, nursery, ended
        self._handles: dict[str, RunHandle] = {}

    async def start(self, planned: PlanResult, key: str | None) -> list[tuple[RunHandle, bool]]:
        """Start the runs of a plan; of each, tell whether an earlier one has its key. Raises as ``start_runs`` does."""
        runs: list[tuple[RunHandle, bool]] = await self._nursery.start(self._run, planned, key)
        return runs

    async def resume(self, stored: StoredRun) -> RunHandle:
        """Continue a run as a new one. Raises as ``plan_resume`` and ``start_resumed`` do."""
        resuming = await plan_resume(stored, None, self._env.settings)
        run: RunHandle = await self._nursery.start(self._continue, resuming)
        return run

    async def cancel(self, run: str) -> None:
        """End the work of a run, or its finalize phase at a second call; raises like ``request_cancel``."""
        if (handle := self._handles.get(run)) is not None:
            handle.cancel()
        else:
            await request_cancel(self._env.store, self._env.settings.home, run)

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
