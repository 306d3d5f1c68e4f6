"""Runs that a server has started: they go on when whoever asked for them has gone."""

from __future__ import annotations

import trio

from runner.core.errors import RunElsewhere, RunnerError
from runner.core.sanitize import excerpt
from runner.ops.planning.make_plan import PlanResult
from runner.ops.runs.start import RunHandle, start_runs
from runner.ops.workspaces.workspace_lease import WorkspaceEnv

_BEGIN = 30.0  # seconds for a run to begin, after which its id is told all the same


class Running:
    """The runs of this process. When its nursery is cancelled they end in order, within their stop budgets."""

    def __init__(self, env: WorkspaceEnv, nursery: trio.Nursery) -> None:
        self._env, self._nursery = env, nursery
        self._handles: dict[str, RunHandle] = {}

    async def start(self, planned: PlanResult, key: str | None) -> list[tuple[RunHandle, bool]]:
        """Start the runs of a plan; of each, tell whether an earlier one has its key. Raises as ``start_runs`` does."""
        runs: list[tuple[RunHandle, bool]] = await self._nursery.start(self._run, planned, key)
        return runs

    def cancel(self, run: str) -> None:
        """End the work of a run, or its finalize phase at a second call. Raises ``RunElsewhere``."""
        handle = self._handles.get(run)
        if handle is None:
            message = f"run `{excerpt(run)}` has ended, or another process executes it"
            raise RunElsewhere(message, hint="end it where it was started")
        handle.cancel()

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
        except RunnerError as error:
            if not told:
                raise
            self._env.advise(error)
        finally:
            for run in ours:
                self._handles.pop(run, None)
