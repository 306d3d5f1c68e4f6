"""What every store promises of runs that are carried out elsewhere, before somebody there begins them."""

from __future__ import annotations

from itertools import count

import pytest
import trio
from msgspec.structs import replace

from runner.core.errors import RunExists, RunOver
from runner.core.model import Outcome, Reason, Status
from runner.events import events as ev
from runner.ports.store import RunnerRow, Store
from tests.conformance.conftest import OpenOn

SUBMITTED = ev.RunSubmitted(name="fix", plan="sha256:1", runner="0.1.0", manifests="/srv/m", project="shop")
STARTED = ev.RunStarted(
    name="fix", plan="sha256:1", runner="0.1.0", steps={}, deadline_seconds=60.0, manifests="/srv/m", project="shop"
)
PLACED, WAITS = ev.RunPlaced("runner-a", "agents", "https://cluster.example"), ev.RunWaits("no node has room")
GIVEN_UP = [ev.RunWithdrawn(), ev.RunEnded(Outcome(status=Status.CANCELLED, reason=Reason.CANCELLED), 130)]


async def test_a_submitted_run_is_listed_as_pending_until_it_begins(store: Store) -> None:
    await store.append("a", [SUBMITTED])
    await store.append("a", [PLACED, WAITS])
    [before] = await store.runs(status="pending")

    await store.append("a", [STARTED])

    [after] = await store.runs(status="running")
    assert (before.name, before.project, before.manifests, before.plan) == ("fix", "shop", "/srv/m", "sha256:1")
    assert replace(after, status="pending", runner=before.runner) == before, "it keeps its place in the list"
    assert await store.runs(status="pending") == []


async def test_who_submits_a_run_is_named_and_heard_of(open_on: OpenOn) -> None:
    runner = RunnerRow(id="r1", host="h", boot="b", home="/h", pid=7, ticks=1)
    async with open_on(count(1_000).__next__, runner) as store:
        await store.append("a", [SUBMITTED])

        assert [row.id for row in await store.runners()] == ["r1"]
        assert (await store.find("a")).runner == "r1"


@pytest.mark.parametrize("event", [PLACED, WAITS, ev.RunWithdrawn()], ids=lambda event: type(event).__name__)
async def test_what_is_only_for_a_pending_run_is_refused_once_it_has_begun(store: Store, event: ev.Event) -> None:
    await store.append("a", [SUBMITTED])
    await store.append("a", [STARTED])

    with pytest.raises(RunOver):
        await store.append("a", [event, GIVEN_UP[1]])

    assert [row.status for row in await store.runs()] == ["running"]
    assert len(await store.events("a")) == 2


async def test_a_run_that_was_given_up_does_not_begin(store: Store) -> None:
    await store.append("a", [SUBMITTED])
    await store.append("a", GIVEN_UP)

    for late in ([STARTED], GIVEN_UP, [WAITS]):
        with pytest.raises(RunOver):
            await store.append("a", late)

    [row] = await store.runs()
    assert (row.status, row.exit_code, len(await store.events("a"))) == ("cancelled", 130, 3)


async def test_of_a_beginning_and_a_giving_up_at_once_one_succeeds(store: Store) -> None:
    for number in range(20):
        run, done = f"r{number}", []
        await store.append(run, [SUBMITTED])

        async def attempt(run: str, done: list[str], events: list[ev.Event]) -> None:
            try:
                await store.append(run, events)
                done.append(type(events[0]).__name__)
            except RunOver:
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt, run, done, [STARTED])
            nursery.start_soon(attempt, run, done, GIVEN_UP)

        status = (await store.find(run)).status
        assert (done, status) in ((["RunStarted"], "running"), (["RunWithdrawn"], "cancelled"))


async def test_a_run_is_submitted_once_and_a_key_submits_one_of_each_name(store: Store) -> None:
    await store.append("a", [replace(SUBMITTED, key="k")])

    for run in ("a", "b"):
        with pytest.raises(RunExists) as refused:
            await store.append(run, [replace(SUBMITTED, key="k")])
        assert refused.value.run == "a"

    await store.append("a", [replace(STARTED, key="k")])
    assert [row.id for row in await store.runs()] == ["a"]
