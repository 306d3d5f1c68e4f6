"""Handles of started runs: what a server has of them, in a thread of its own and without signals."""

from __future__ import annotations

import pytest
import trio

from runner.core.errors import UsageError
from runner.core.ids import run_id
from runner.core.model import Status
from runner.events.events import CancelRequested, Recorded, RunEnded, StepStarted
from runner.ops.planning.make_plan import PlanResult, make_plan
from runner.ops.runs.history import find_run
from runner.ops.runs.start import start_runs
from tests.support.runs import apply
from tests.support.situations import Project, document


async def three_runs(project: Project) -> PlanResult:
    project.write(
        project.worker("slow", "sleep 1000", "providers: [process]"),
        project.worker("quick", "true", "providers: [process]"),
        document("IncidentRun", "a", "agent_type: slow"),
        document("IncidentRun", "b", "agent_type: quick"),
        document("IncidentRun", "c", "agent_type: quick\nneeds: [a]"),
    )
    return await make_plan(project.folder, project.settings())


async def test_each_run_is_watched_stopped_and_awaited_by_its_handle(project: Project) -> None:
    async with start_runs(await three_runs(project), project.settings()) as started:
        a, b, c = (started.runs[name] for name in "abc")
        assert (await b.wait()).status is Status.SUCCEEDED
        async with a.events() as events:
            async for recorded in events:
                if isinstance(recorded.event, StepStarted) and recorded.event.step == "agent":
                    assert a.record is None
                    a.cancel()
        assert isinstance(recorded.event, RunEnded)
        assert (await a.wait()).status is Status.CANCELLED
        assert (await c.wait()).status is Status.SKIPPED
        async with c.events(after=1) as events:
            assert [type(recorded.event) async for recorded in events] == [RunEnded]

    found = await find_run(project.settings(), a.id)
    assert found.record.status is Status.CANCELLED


async def test_who_leaves_the_block_early_cancels_the_runs_which_finalize(project: Project) -> None:
    ids = {"a": run_id(bytes(range(8)))}
    heard: list[Recorded] = []

    with trio.CancelScope() as scope:
        async with start_runs(await three_runs(project), project.settings(), [heard.append], ids=ids) as started:
            await started.runs["b"].wait()
            scope.cancel()

    assert started.runs["a"].id == ids["a"]
    assert (await find_run(project.settings(), ids["a"])).record.ended is not None
    assert not any(isinstance(recorded.event, CancelRequested) and recorded.run != ids["a"] for recorded in heard)


def test_runs_need_no_main_thread(project: Project) -> None:
    """Only there are signals received."""

    async def whole() -> list[Status]:
        async with trio.open_nursery() as nursery:
            planned = await make_plan(project.folder, project.settings())
            nursery.cancel_scope.deadline = trio.current_time() + 60
            return [record.status for record in await apply(planned, project.settings())]

    project.script("true", provider="process")
    done: list[list[Status]] = []

    async def in_thread() -> None:
        await trio.to_thread.run_sync(lambda: done.append(trio.run(whole)))

    trio.run(in_thread)
    assert done == [[Status.SUCCEEDED]]


@pytest.mark.parametrize(("wanted", "words"), [("../../etc", "is not an id"), ("again", "is a run")])
async def test_an_id_that_is_none_or_is_taken_starts_nothing(project: Project, wanted: str, words: str) -> None:
    project.script("true", provider="process")
    planned = await make_plan(project.folder, project.settings())
    (name,) = (run.name for run in planned.plan.runs)
    (first,) = await apply(planned, project.settings())

    with pytest.raises(UsageError, match=words):
        await apply(planned, project.settings(), ids={name: first.id if wanted == "again" else wanted})


async def test_events_of_a_key_that_a_run_has_are_those_of_that_run(project: Project) -> None:
    project.script("true", provider="process")
    planned = await make_plan(project.folder, project.settings())
    (first,) = await apply(planned, project.settings(), key="k")

    async with start_runs(planned, project.settings(), key="k") as started:
        (again,) = started.runs.values()
        async with again.events() as events:
            assert {recorded.run async for recorded in events} == {first.id}
    assert again.id == first.id
