"""One run of a project by the engine, with its clock, signals and journal in the test's hand."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, cast

from runner.agents.script import agent
from runner.cluster.clusters import Clusters
from runner.core.ids import run_id
from runner.core.model import Fence
from runner.core.settings import Settings, shipped
from runner.engine.run import execute_run
from runner.engine.stopping import RunCancellation
from runner.events import events as ev
from runner.events.record import RunRecord
from runner.gateway.gateway import ModelGateway
from runner.git import open_git
from runner.network.proxy import open_egress
from runner.ops.planning.facts import open_provider
from runner.ops.planning.make_plan import make_plan
from runner.plan.model import RunPlan
from runner.runtime.context import RunDependencies, RunPaths
from runner.runtime.subrunner import read_command
from runner.store.memory import MemoryStore
from tests.support.situations import Project

Watch = Callable[[ev.Recorded, RunCancellation], None]


class Machine:
    """What runs of one test share: settings, ports, a store in memory whose times are ``now``, else just numbers."""

    def __init__(self, project: Project, now: Callable[[], int] | None = None) -> None:
        self.project = project
        self.settings = Settings.from_env({"RUNNER_HOME": str(project.home / "state"), "PATH": "/usr/bin:/bin"})
        self.settings.home.mkdir(parents=True, exist_ok=True)
        self.store = MemoryStore(now=now or itertools.count(1).__next__)
        self.deps = RunDependencies(
            provider=lambda name: open_provider(name, self.settings),
            git=open_git(self.settings),
            agent=lambda name: agent,
            sub_runner=lambda name, env: read_command(shipped("runners") / f"{name}.sh", env),
            gateway=ModelGateway(self.settings),
            cluster=Clusters(self.settings),
            open_egress=open_egress,
            mcp=cast(Any, None),
            model_key=lambda api: "",
            model_url=lambda api: None,
            lease=self.store.lease,
            nonce=self.store.nonce,
            now=lambda: 1_000_000,
            chance=lambda: 1.0,
        )

    async def run(
        self,
        watch: Watch = lambda recorded, control: None,
        alter: Callable[[RunPlan], RunPlan] = lambda plan: plan,
    ) -> RunRecord:
        """Carry the project's run out, as ``alter`` changes its plan; ``watch`` sees each event once it is durable, and
        may stop the run."""
        planned = await make_plan(self.project.folder, self.settings)
        plan = alter(planned.plan.runs[0])
        control = RunCancellation(stop_budget_seconds=plan.stop_budget_seconds)

        async def append(run: str, events: Sequence[ev.Event], fence: Fence | None) -> Sequence[ev.Recorded]:
            recorded = await self.store.append(run, events, fence=fence)
            for one in recorded:
                watch(one, control)
            return recorded

        paths = RunPaths(self.settings.home, run_id(secrets.token_bytes(8)))
        paths.logs.mkdir(parents=True)
        return await execute_run(
            plan,
            planned.plan.digest,
            id=paths.run,
            paths=paths,
            deps=self.deps,
            append=append,
            control=control,
        )
