"""How Jobs are made, waited for and given up, on a cluster that is a few lists: nothing runs in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from runner.cluster.job import job_name
from runner.cluster.objects import ClusterObjects, Refused
from runner.core.errors import JobNotStarted, RunnerError
from runner.core.model import Status
from runner.events.events import RunStarted
from runner.events.record import replay
from runner.ops.host.state import this_runner
from runner.ops.planning.make_plan import PlanResult, make_plan
from runner.ops.runs.cancel import heed_requests, request_cancel
from runner.ops.runs.job_table import JobTable
from runner.ops.runs.jobs import SubmittedRuns
from runner.ops.runs.recover_pending import end_pending
from runner.store.memory import MemoryStore
from tests.support.folder_contents import folder
from tests.support.situations import Project, document

PULLING = {"waiting": {"reason": "ErrImagePull", "message": "the registry does not answer"}}


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
        if not query:
            return self.objects.get(path)
        return {"items": [one for one in found if one["metadata"]["labels"].get(label) == value]}

    async def create(self, path: str, body: Any, *, again: bool = False) -> Any:
        await trio.lowlevel.checkpoint()
        if why := self.refuse(path):
            raise Refused(why, 403)
        at = f"{path}/{body['metadata']['name']}"
        if at in self.objects:
            return self.objects[at] if again else None
        self.objects[at] = {**body, "metadata": {**body["metadata"], "uid": str(uuid4())}}
        return self.objects[at]

    def begins(self, run: str, state: dict[str, Any]) -> None:
        """Give the Job of a run a pod whose container is in a state."""
        [job] = (one for path, one in self.objects.items() if path.endswith(f"/jobs/{job_name(run)}"))
        job["spec"]["suspend"] = False
        status = {"containerStatuses": [{"name": "runner", "image": "worker:1", "state": state}]}
        self.objects[self.path("pods", "p")] = {"metadata": job["metadata"], "status": status}

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


async def told(store: MemoryStore, runs: SubmittedRuns) -> str:
    """What the store says that a run waits for, once it does: this clock runs ahead of threads."""
    while not (waits := replay("", await store.events(runs.runs["work"].id)).waits):
        await trio.sleep(0.01)
    return waits


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
        second.cancel()
        with trio.fail_after(60):
            await second.runs["work"].ended.wait()
        assert [(error.code, error.exit_code) for error in second.errors] == [("store.run-unfinished", 130)]
        assert (len(cluster.jobs), [row.status for row in await store.runs()]) == (1, ["pending"])
        nursery.cancel_scope.cancel()


async def test_a_run_whose_job_waits_is_pending_in_the_store_and_is_cancelled_from_anywhere(
    project: Project, store: MemoryStore, autojump_clock: MockClock
) -> None:
    cluster = Lists()
    runs = submitted(project, await planned_runs(project, "work"), store, cluster)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(runs.table.keep_looking)
        nursery.start_soon(heed_requests, store, runs.stops)
        nursery.start_soon(runs.carry_out)
        await runs.runs["work"].decided.wait()
        cluster.begins(runs.runs["work"].id, PULLING)
        waits = await told(store, runs)
        [row] = await store.runs(status="pending")
        await request_cancel(store, project.home, row.id)
        await runs.runs["work"].ended.wait()
        nursery.cancel_scope.cancel()

    [ended] = await store.runs()
    assert (row.name, row.id) == ("work", runs.runs["work"].id)
    assert waits.startswith("its node cannot pull image")
    assert (ended.status, ended.exit_code) == ("cancelled", 130)


@pytest.mark.parametrize("comes_back", [True, False], ids=["comes back", "stays away"])
async def test_an_image_that_does_not_come_is_waited_for_while_a_registry_may_come_back(
    project: Project, store: MemoryStore, autojump_clock: MockClock, comes_back: bool
) -> None:
    cluster = Lists()
    runs = submitted(project, await planned_runs(project, "work"), store, cluster)
    run = runs.runs["work"]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(runs.table.keep_looking)
        nursery.start_soon(runs.carry_out)
        await run.decided.wait()
        cluster.begins(run.id, PULLING)
        waits = await told(store, runs)
        await trio.sleep(60)
        assert waits == "its node cannot pull image `worker:1`: ErrImagePull: the registry does not answer"
        if comes_back:
            cluster.begins(run.id, {"running": {}})
        await trio.sleep(200)
        if not comes_back:
            with trio.fail_after(60):
                await run.ended.wait()
        [row] = await store.runs()
        nursery.cancel_scope.cancel()

    assert row.status == ("pending" if comes_back else "failed")
    assert [error.message for error in runs.errors] == (
        [] if comes_back else [f"the Job of run `work` has not started in 180s: {waits}"]
    )


async def test_a_pending_run_that_nobody_follows_ends_unless_its_job_may_begin_it(
    project: Project, store: MemoryStore, autojump_clock: MockClock
) -> None:
    cluster = Lists(lambda path: "exceeded quota: small" if "/jobs" in path and "second" in waiting else "")
    waiting: set[str] = set()
    planned = await planned_runs(project, "work")
    first, second = (submitted(project, planned, store, cluster) for _ in range(2))
    async with trio.open_nursery() as nursery:
        for name, runs in (("first", first), ("second", second)):
            waiting.add(name)
            nursery.start_soon(runs.carry_out)
            await trio.sleep(1)
        nursery.cancel_scope.cancel()
    made, unmade = (runs.runs["work"].id for runs in (first, second))
    followed = [await end_pending(store, await store.find(run), cluster) for run in (made, unmade)]
    await store.leave()  # as who has submitted them does at its end

    left = [await end_pending(store, await store.find(run), cluster) for run in (made, unmade)]
    before = [(await store.find(run)).status for run in (made, unmade)]
    await cluster.delete(cluster.path("jobs", job_name(made), group="batch/v1"))
    again = await end_pending(store, await store.find(made), cluster)

    assert (followed, left, again) == ([False, False], [False, True], True)
    assert (before, (await store.find(made)).status) == (["pending", "failed"], "failed")


async def test_a_later_apply_with_the_key_of_a_pending_run_that_nobody_follows_takes_it_over(
    project: Project, store: MemoryStore, autojump_clock: MockClock
) -> None:
    planned, cluster = await planned_runs(project, "work"), Lists()
    first, second = (submitted(project, planned, store, cluster, key="build-7") for _ in range(2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.carry_out)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    await store.leave()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(second.carry_out)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()

    assert (second.runs["work"].attached, second.runs["work"].made) == (False, True)
    assert len(cluster.jobs) == 1


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
    for errors in (["job.not-started"], []):  # of the second call the first one's record tells
        runs = submitted(project, planned, store, cluster, key="build-7")
        await runs.carry_out()
        found = [(record.name, record.status) for record in await runs.wait()]

        assert found == [("first", Status.FAILED), ("second", Status.SKIPPED)]
        assert trio.current_time() - began < 60, "its files are waited for, and there are none"
        assert [error.code for error in runs.errors] == errors


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
