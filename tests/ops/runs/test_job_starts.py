"""How Jobs are made, waited for and given up, on a cluster that is a few lists: nothing runs in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from runner.cluster.objects import ClusterObjects, Refused
from runner.core.errors import JobNotStarted, RunnerError
from runner.core.model import Status
from runner.events.events import RunStarted
from runner.ops.host.state import this_runner
from runner.ops.planning.make_plan import PlanResult, make_plan
from runner.ops.runs.job_table import JobTable
from runner.ops.runs.jobs import SubmittedRuns
from runner.store.memory import MemoryStore
from tests.support.folder_contents import folder
from tests.support.situations import Project, document


class Lists(ClusterObjects):
    """Objects by path. ``refuse`` says of one why the cluster does not take it; Jobs wait for ever in a queue."""

    def __init__(self, refuse: Callable[[str], str] = lambda path: "") -> None:
        self.server, self.namespace, self.refuse = "https://cluster.example", "agents", refuse
        self.objects: dict[str, dict[str, Any]] = {}

    @property
    def jobs(self) -> list[str]:
        return [path.rpartition("/")[2] for path in self.objects if "/jobs/" in path]

    async def get(self, path: str, **query: str) -> Any:
        await trio.lowlevel.checkpoint()
        label, _, value = query.get("labelSelector", "").partition("=")
        found = [one for at, one in self.objects.items() if at.startswith(f"{path}/")]
        return self.objects.get(
            path, {"items": [one for one in found if one["metadata"]["labels"].get(label) == value]}
        )

    async def create(self, path: str, body: Any, *, again: bool = False) -> Any:
        await trio.lowlevel.checkpoint()
        if why := self.refuse(path):
            raise Refused(why, 403)
        at = f"{path}/{body['metadata']['name']}"
        if at in self.objects:
            return self.objects[at] if again else None
        self.objects[at] = {**body, "metadata": {**body["metadata"], "uid": str(uuid4())}}
        return self.objects[at]

    async def delete(self, path: str, *, grace: int | None = None, **query: str) -> None:
        await trio.lowlevel.checkpoint()
        self.objects.pop(path, None)


@pytest.fixture
def store(project: Project) -> MemoryStore:
    """A store whose runner is on another host, as that of a worker is."""
    return MemoryStore(
        runner=replace(this_runner(project.home), id="worker", host="other", boot="other", home="/other")
    )


async def planned_runs(project: Project, *names: str) -> PlanResult:
    """Runs that each need the one before."""
    needs = [f"\nneeds: [{before}]" for before in names]
    runs = [
        document("IncidentRun", name, f"agent_type: quick{need}")
        for name, need in zip(names, ["", *needs], strict=False)
    ]
    project.write(project.worker("quick", "true", "providers: [process]"), *runs)
    return await make_plan(project.folder, project.settings())


def submitted(
    project: Project, planned: PlanResult, store: MemoryStore, objects: ClusterObjects, key: str | None = None
) -> SubmittedRuns:
    share = folder(project.home / "share")
    settings = project.settings(RUNNER_WORKER_IMAGE="registry.example/worker:1", RUNNER_ARTIFACTS=f"file://{share}")
    told: list[RunnerError] = []
    table = JobTable(objects)
    return SubmittedRuns(planned, settings, store=store, table=table, sinks=[], key=key, advise=told.append)


async def begin(store: MemoryStore, runs: SubmittedRuns, name: str) -> str:
    """Do what the worker of a Job does first."""
    run = runs.runs[name].id
    await store.append(run, [RunStarted(name=name, plan="", runner="", steps={}, deadline_seconds=1e6)])
    return run


async def test_a_job_whose_plan_the_cluster_does_not_take_is_removed(
    project: Project, store: MemoryStore, autojump_clock: MockClock
) -> None:
    """Its pod would wait for the plan until its time is over."""
    cluster = Lists(lambda path: "exceeded quota: small, used: configmaps=10" if "/configmaps" in path else "")
    runs = submitted(project, await planned_runs(project, "work"), store, cluster)

    await runs.carry_out()

    assert ([error.code for error in runs.errors], cluster.jobs) == (["job.not-started"], [])


async def test_a_second_apply_with_the_key_of_a_job_that_waits_leaves_it(
    project: Project, store: MemoryStore, autojump_clock: MockClock
) -> None:
    cluster, planned = Lists(), await planned_runs(project, "work")
    first, second = (submitted(project, planned, store, cluster, key="build-7") for _ in range(2))

    async with trio.open_nursery() as nursery:
        for runs in (first, second):
            nursery.start_soon(runs.table.keep_looking)
            nursery.start_soon(runs.carry_out)
            await trio.sleep(60)
        assert len(cluster.jobs) == 1
        assert second.errors == []
        assert (first.runs["work"].attached, second.runs["work"].attached) == (False, True)
        nursery.cancel_scope.cancel()


async def test_a_stop_that_comes_as_the_run_begins_reaches_its_worker(
    project: Project, store: MemoryStore, autojump_clock: MockClock
) -> None:
    cluster = Lists()
    runs = submitted(project, await planned_runs(project, "work"), store, cluster)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(runs.table.keep_looking)
        nursery.start_soon(runs.carry_out)
        await trio.sleep(10.5)
        runs.cancel()
        await trio.sleep(0.01)
        run = await begin(store, runs, "work")
        await runs.runs["work"].begun.wait()
        while not (asked := await store.entries("cancel")):  # this clock runs ahead of threads
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()

    assert [entry.name for entry in asked] == [run]


async def test_a_run_that_is_stopped_while_its_job_waits_for_a_quota_ends_as_one_that_is_cancelled(
    project: Project, store: MemoryStore, autojump_clock: MockClock
) -> None:
    cluster = Lists(lambda path: "exceeded quota: small, used: count/jobs.batch=10")
    runs = submitted(project, await planned_runs(project, "work"), store, cluster)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(runs.carry_out)
        await trio.sleep(1)
        runs.cancel()

    assert [(type(error), error.exit_code) for error in runs.errors] == [(JobNotStarted, 130)]


async def test_a_second_apply_with_the_key_of_a_run_that_was_skipped_tells_the_same(
    project: Project, store: MemoryStore, autojump_clock: MockClock
) -> None:
    cluster = Lists(lambda path: "quick is forbidden")
    planned = await planned_runs(project, "first", "second")
    began = trio.current_time()
    for _ in range(2):
        runs = submitted(project, planned, store, cluster, key="build-7")
        await runs.carry_out()
        [skipped] = await runs.wait()

        assert (skipped.name, skipped.status) == ("second", Status.SKIPPED)
        assert trio.current_time() - began < 60, "its files are waited for, and there are none"
        assert [error.code for error in runs.errors] == ["job.not-started"]


async def test_who_ends_while_it_follows_runs_of_an_earlier_call_writes_nothing_of_them(
    project: Project, store: MemoryStore, autojump_clock: MockClock
) -> None:
    planned = await planned_runs(project, "first", "second")
    runs = submitted(project, planned, store, Lists(), key="build-7")
    begun = [await begin(store, runs, name) for name in runs.runs]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(runs.carry_out)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    await runs.leave()

    assert [[type(one.event) for one in await store.events(run)] for run in begun] == [[RunStarted]] * 2
