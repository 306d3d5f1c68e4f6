"""What every store promises, on each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from runner.core.errors import LeaseHeld, LeaseLost, RunExists, RunnerError, RunOver, StoreFailed, UnknownRun
from runner.core.model import (
    CommandHolder,
    Fence,
    IsolationClass,
    Lease,
    Reason,
    RunHolder,
    Violation,
    failed,
    succeeded,
)
from runner.events import events as ev
from runner.ports.store import RunRow, Store
from tests.conformance.conftest import OpenOn

STARTED = ev.RunStarted(name="fix", plan="sha256:1", runner="0.1.0", steps={"agent": "agent"}, deadline_seconds=60.0)
ENDED = ev.RunEnded(succeeded("done"), 0)


async def test_events_come_back_equal_numbered_from_one_and_dated(store: Store) -> None:
    events: list[ev.Event] = [
        STARTED,
        ev.PhaseStarted("work"),
        ev.ResourceIntended("provision", "workspace", "runner-a-1", "local"),
        ev.ResourceCreated("provision", "workspace", "runner-a-1"),
        ev.ProviderChosen("local", IsolationClass.NAMESPACES),
        ev.StepEnded("agent", failed(Reason.EXIT, "exited 1", details=("x",))),
        ev.ViolationsFound("scan", (Violation("a\\xff", "forbidden:*"),)),
    ]

    recorded = await store.append("a", events)

    assert [r.event for r in recorded] == events
    assert [(r.run, r.seq) for r in recorded] == [("a", n) for n in range(1, 8)]
    assert len({r.at for r in recorded}) == 1
    assert await store.events("a") == recorded


async def test_numbers_go_on_without_gaps_over_appends(store: Store) -> None:
    await store.append("a", [STARTED])
    await store.append("b", [STARTED, ev.StepStarted("agent")])

    (second,) = await store.append("a", [ev.StepStarted("agent")])

    assert second.seq == 2
    assert [r.seq for r in await store.events("a", after=1)] == [2]
    assert await store.events("unknown") == []


async def test_concurrent_appends_all_get_their_own_numbers(store: Store) -> None:
    await store.append("a", [STARTED])
    answers: list[list[ev.Recorded]] = []

    async def one(number: int) -> None:
        answers.append(
            await store.append("a", [ev.WarningIssued("x.y", str(number)), ev.WarningIssued("x.y", str(number))])
        )

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(one, number)

    history = await store.events("a")
    assert [r.seq for r in history] == list(range(1, 102))
    assert sorted((r for answer in answers for r in answer), key=lambda r: r.seq) == history[1:]
    assert all(second.seq == first.seq + 1 for first, second in answers)


async def test_a_run_ends_once(store: Store) -> None:
    await store.append("a", [STARTED, ENDED])

    with pytest.raises(RunOver, match="`a` has ended already"):
        await store.append("a", [ev.StepStarted("agent"), ENDED])

    assert len(await store.events("a")) == 2, "all of an append or none of it"


async def test_events_of_a_run_that_never_started_are_refused(store: Store) -> None:
    with pytest.raises(StoreFailed, match="has not started"):
        await store.append("a", [ev.StepStarted("agent")])


async def test_one_bad_append_does_not_fail_the_others(store: Store) -> None:
    await store.append("a", [STARTED, ENDED])
    await store.append("b", [STARTED])
    outcomes: dict[str, object] = {}

    async def one(name: str, run: str, *events: ev.Event) -> None:
        try:
            outcomes[name] = [r.seq for r in await store.append(run, events)]
        except RunnerError as error:
            outcomes[name] = error.code

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, "good", "b", ev.StepStarted("x"))
        nursery.start_soon(one, "bad", "a", ENDED)

    assert outcomes == {"good": [2], "bad": "store.run-over"}


@pytest.mark.parametrize(
    ("name", "key", "taken"),
    [
        pytest.param("fix", "k", True, id="same name and key"),
        pytest.param("fix", "other", False, id="another key"),
        pytest.param("triage", "k", False, id="another run of the plan"),
        pytest.param("fix", None, False, id="no key"),
    ],
)
async def test_a_key_starts_one_run_of_each_name(store: Store, name: str, key: str | None, taken: bool) -> None:
    await store.append("a", [replace(STARTED, key="k")])
    await store.append("a", [replace(STARTED, key="k", attempt=2)])

    if taken:
        with pytest.raises(RunExists) as refused:
            await store.append("b", [replace(STARTED, name=name, key=key), ENDED])
        assert refused.value.run == "a"
        assert await store.events("b") == []
    else:
        await store.append("b", [replace(STARTED, name=name, key=key)])


async def test_of_many_starts_with_one_key_one_succeeds(store: Store) -> None:
    holders: list[str] = []

    async def start(run: str) -> None:
        try:
            await store.append(run, [replace(STARTED, key="k")])
            holders.append(run)
        except RunExists as exists:
            holders.append(exists.run)

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(start, f"r{number}")

    assert len(set(holders)) == 1
    assert len(await store.runs()) == 1


async def test_runs_are_listed_newest_first_with_how_they_ended(store: Store) -> None:
    await store.append("a", [STARTED])
    await store.append("b", [STARTED])
    await store.append("a", [ev.RunEnded(failed(Reason.POLICY, "x"), 3)])

    assert await store.runs() == [
        RunRow(id="b", name="fix", status="running", exit_code=None, plan="sha256:1", created=1001, ended=None),
        RunRow(id="a", name="fix", status="failed", exit_code=3, plan="sha256:1", created=1000, ended=1002),
    ]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        pytest.param({}, "edcba", id="all"),
        pytest.param({"status": "running"}, "edcb", id="status"),
        pytest.param({"exit_code": 0}, "a", id="exit code"),
        pytest.param({"name": "fix*"}, "ca", id="pattern"),
        pytest.param({"name": "fix[1]"}, "c", id="brackets are themselves"),
        pytest.param({"name": "fi?"}, "", id="question mark is itself"),
        pytest.param({"name": "FIX"}, "", id="case counts"),
        pytest.param({"since": 1_003}, "ed", id="since"),
        pytest.param({"projects": ["shop", "till"]}, "eca", id="projects"),
        pytest.param({"projects": []}, "", id="no projects"),
        pytest.param({"projects": ["shop"], "limit": 1}, "e", id="page of a project"),
        pytest.param({"limit": 2}, "ed", id="limit"),
        pytest.param({"before": (1_003, "d")}, "cba", id="below a run"),
        pytest.param({"before": (1_003, "d"), "limit": 1}, "c", id="next page"),
        pytest.param({"before": (1_003, "zz")}, "dcba", id="below one that is gone"),
        pytest.param({"name": "other", "before": (1_004, "e"), "limit": 1}, "d", id="page of a filter"),
    ],
)
async def test_runs_are_listed_by_filter_and_page(store: Store, wanted: dict[str, Any], found: str) -> None:
    projects = ("till", "default", "shop", "default", "shop")
    for run, name, project in zip("abcde", ("fix", "other", "fix[1]", "other", "other"), projects, strict=True):
        await store.append(run, [replace(STARTED, name=name, project=project)])
    await store.append("a", [ENDED])

    assert "".join(row.id for row in await store.runs(**wanted)) == found
    assert await store.run_counts() == {"running": 4, "succeeded": 1}


async def test_runs_of_one_moment_are_on_one_page_or_the_next_and_never_on_both(open_on: OpenOn) -> None:
    async with open_on(lambda: 5) as store:
        for run in "bdac":
            await store.append(run, [STARTED])
        pages, before = [], None
        while rows := await store.runs(before=before, limit=3):
            pages.append([row.id for row in rows])
            before = (rows[-1].created, rows[-1].id)

    assert pages == [["d", "c", "b"], ["a"]]


async def test_a_listed_run_says_which_one_it_continues(store: Store) -> None:
    await store.append("a", [STARTED])
    await store.append("b", [replace(STARTED, resumes="a", rehearsal="r.yaml", manifests="/p/\udcff")])

    assert [row.resumes for row in await store.runs()] == ["a", None]
    assert (await store.find("b")).rehearsal == "r.yaml"


@pytest.mark.parametrize(("text", "found"), [("abd", "abd1"), ("abc", "abc"), ("last", "zz"), ("zz", "zz")])
async def test_a_run_is_found_by_a_prefix_or_last(store: Store, text: str, found: str) -> None:
    for run in ("abc", "abcd", "abd1", "zz"):
        await store.append(run, [STARTED])

    assert (await store.find(text)).id == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ab", "may be any of 3 runs"),
        ("x", "there is no run `x`"),
        ("%", "there is no run"),
        ("\x1b[2J", r"x1b\[2J"),
        ("\udcff", "there is no run"),
        ("", "the id of the run is empty"),
    ],
    ids=["ambiguous", "none", "no pattern", "control", "no text", "empty"],
)
async def test_a_run_that_cannot_be_told_is_an_error(store: Store, text: str, words: str) -> None:
    for run in ("abc", "abcd", "abd1"):
        await store.append(run, [STARTED])

    with pytest.raises(UnknownRun, match=words):
        await store.find(text)


async def test_an_ambiguous_prefix_lists_the_candidates(store: Store) -> None:
    for run in ("abc", "abd"):
        await store.append(run, [STARTED])

    with pytest.raises(UnknownRun) as refused:
        await store.find("ab")

    assert refused.value.hint == "name one of: abd (fix), abc (fix)"


async def test_of_many_candidates_the_newest_are_listed(store: Store) -> None:
    for number in range(10):
        await store.append(f"ab{number}", [STARTED])

    with pytest.raises(UnknownRun, match="any of 10 runs") as refused:
        await store.find("ab")

    assert str(refused.value.hint).startswith("name one of: ab9 (fix), ab8 (fix)")
    assert str(refused.value.hint).endswith("ab2 (fix), and 2 more")


async def test_an_empty_store_has_no_last_run(store: Store) -> None:
    assert await store.runs() == []
    with pytest.raises(UnknownRun):
        await store.find("last")


async def test_a_store_dates_events_by_its_own_clock(open_on: OpenOn) -> None:
    async with open_on(lambda: 5_000) as store:
        (started,) = await store.append("a", [STARTED])

        assert (await store.now(), started.at) == (5_000, 5_000)


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_who_watches_a_run_sees_its_past_and_then_what_comes(store: Store, after: int) -> None:
    await store.append("a", [STARTED, ev.StepStarted("agent")])
    seen: list[int] = []

    async def append() -> None:
        for event in (ev.StepEnded("agent", succeeded()), ENDED, ev.ResourceRemoved("", "workspace", "w")):
            await trio.sleep(0.01)
            await store.append("b", [STARTED])
            await store.append("a", [event])

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery, aclosing(store.watch("a", after=after)) as events:
            nursery.start_soon(append)
            async for recorded in events:
                seen.append(recorded.seq)
                if recorded.seq == 5:  # beyond the end, for that is for the caller to say
                    break

    assert seen == list(range(after + 1, 6))


async def test_events_are_read_in_pages(store: Store) -> None:
    await store.append("a", [STARTED, ev.StepStarted("agent"), ev.StepEnded("agent", succeeded()), ENDED])
    pages = [[one.seq for one in await store.events("a", after=after, limit=3)] for after in (0, 3, 4, 9)]

    assert pages == [[1, 2, 3], [4], [], []]


async def test_who_stops_to_watch_disturbs_nobody(store: Store) -> None:
    await store.append("a", [STARTED])
    with trio.move_on_after(0.05):
        async with aclosing(store.watch("a")) as events:
            async for _ in events:
                pass

    (ended,) = await store.append("a", [ENDED])

    assert ended.seq == 2


# --- leases ---------------------------------------------------------------------------------------

EXEC = CommandHolder("exec", 7)
TTL = 60.0
WHOLE = 60_000_000  # of that, in the store's microseconds


@dataclass
class Leasing:
    """A store whose time stands still unless a test moves it, with a run `a` that has started."""

    store: Store
    at: int = 1_000

    def acquiring(self, fence: int, holder: str = "a", *, forced: bool = False) -> ev.LeaseAcquired:
        return ev.LeaseAcquired(
            workspace="w", lease=f"w.{fence}", holder=RunHolder(holder), fence=fence, ttl_seconds=TTL, forced=forced
        )

    async def acquire(self, fence: int, holder: str = "a", *, forced: bool = False) -> Fence:
        event = self.acquiring(fence, holder, forced=forced)
        await self.store.append_to_workspace("w", [event])
        return Fence("w", event.lease, fence)

    async def everything(self) -> tuple[object, ...]:
        store = self.store
        return await store.events("a"), await store.workspace_events("w"), await store.runs(), await store.leases()


@pytest.fixture
async def leasing(open_on: OpenOn) -> AsyncIterator[Leasing]:
    async with open_on(lambda: leasing.at) as store:
        leasing = Leasing(store)
        await store.append("a", [STARTED])
        yield leasing


@pytest.mark.scenario("WSM-08")
async def test_a_lease_says_whose_it_is_and_until_when(leasing: Leasing) -> None:
    assert await leasing.store.lease("w") == Lease(workspace="w", fence=0)

    await leasing.acquire(1)

    assert await leasing.store.lease("w") == Lease(
        workspace="w", fence=1, id="w.1", holder=RunHolder("a"), acquired=1_000, refreshed=1_000, expires=1_000 + WHOLE
    )


@pytest.mark.scenario("WSM-09")
async def test_a_second_acquisition_is_refused_while_the_lease_is_live(leasing: Leasing) -> None:
    await leasing.acquire(1)
    leasing.at += WHOLE - 1
    before = await leasing.everything()

    with pytest.raises(LeaseHeld, match="`w` is in use by run a"):
        await leasing.acquire(2, "b")
    with pytest.raises(LeaseHeld):
        await leasing.store.append("a", [ev.WarningIssued("x.y", "not alone"), leasing.acquiring(2)])

    assert await leasing.everything() == before


@pytest.mark.scenario("WSM-10")
async def test_a_released_workspace_is_had_by_the_next(leasing: Leasing) -> None:
    fence = await leasing.acquire(1)

    await leasing.store.append_to_workspace("w", [ev.LeaseReleased("w", "w.1")], fence=fence)
    with pytest.raises(LeaseLost):
        await leasing.store.append_to_workspace("w", [ev.LeaseReleased("w", "w.1")])

    assert await leasing.store.leases() == []
    assert (await leasing.store.lease("w")).holder is None


@pytest.mark.scenario("WSM-11")
async def test_an_expired_lease_is_taken_over_once(leasing: Leasing) -> None:
    await leasing.acquire(1)
    leasing.at += WHOLE

    await leasing.acquire(2, "b")
    with pytest.raises(LeaseHeld, match="run b"):
        await leasing.acquire(2, "c")

    assert (await leasing.store.lease("w")).holder == RunHolder("b")


async def test_a_dead_holders_lease_is_taken_by_force_once(leasing: Leasing) -> None:
    await leasing.acquire(1)

    await leasing.acquire(2, "b", forced=True)
    with pytest.raises(LeaseHeld, match="has a new holder"):
        await leasing.acquire(2, "c", forced=True)

    assert (await leasing.store.lease("w")).holder == RunHolder("b")


@pytest.mark.scenario("WSM-12")
async def test_a_refresh_extends_a_lease_that_is_live(leasing: Leasing) -> None:
    await leasing.acquire(1)
    leasing.at += WHOLE - 1
    await leasing.store.append("a", [ev.LeaseRefreshed("w", "w.1", TTL)])

    extended = await leasing.store.lease("w")
    leasing.at = extended.expires
    with pytest.raises(LeaseLost, match="it has ended"):
        await leasing.store.append("a", [ev.LeaseRefreshed("w", "w.1", TTL)])

    assert (extended.refreshed, extended.expires) == (WHOLE + 999, 2 * WHOLE + 999)
    assert await leasing.store.lease("w") == extended


async def expire(leasing: Leasing) -> None:
    leasing.at += WHOLE


async def be_taken_over(leasing: Leasing) -> None:
    await leasing.acquire(2, "b", forced=True)


async def release(leasing: Leasing) -> None:
    await leasing.store.append_to_workspace("w", [ev.LeaseReleased("w", "w.1")])


async def release_to_another(leasing: Leasing) -> None:
    await release(leasing)
    await leasing.acquire(2, "b")


GUARDED: dict[str, ev.Event] = {
    "record": ev.StepEnded("agent", succeeded()),
    "snapshot": ev.SnapshotPublished(
        commit="c" * 40, tree="t" * 40, base=None, branch=None, entries=1, ignored=0, changed=1
    ),
    "teardown": ev.ResourceRemoved("teardown", "workspace", "w"),
    "refresh": ev.LeaseRefreshed("w", "w.1", TTL),
    "end": ENDED,
}


@pytest.mark.scenario("BEY-09")
@pytest.mark.parametrize("ending", [expire, be_taken_over, release, release_to_another])
@pytest.mark.parametrize("event", GUARDED.values(), ids=GUARDED)
async def test_who_has_lost_its_lease_writes_nothing(
    leasing: Leasing, ending: Callable[[Leasing], Awaitable[None]], event: ev.Event
) -> None:
    store = leasing.store
    await store.append("a", [ev.ResourceIntended("provision", "workspace", "w", "local")])
    fence = await leasing.acquire(1)
    await store.append("a", [ev.StepStarted("agent")], fence=fence)
    await ending(leasing)
    before = await leasing.everything()

    with pytest.raises(LeaseLost):
        await store.append("a", [ev.WarningIssued("x.y", "not alone"), event], fence=fence)
    with pytest.raises(LeaseLost):
        await store.append_to_workspace("w", [ev.WarningIssued("x.y", "not alone"), event], fence=fence)

    assert await leasing.everything() == before


async def test_a_lease_stays_when_what_came_with_its_release_is_refused(leasing: Leasing) -> None:
    await leasing.store.append("a", [ENDED])
    fence = await leasing.acquire(1)
    before = await leasing.everything()

    with pytest.raises(RunOver):
        await leasing.store.append("a", [ev.LeaseReleased("w", "w.1"), ENDED], fence=fence)

    assert await leasing.everything() == before


async def test_a_refused_holder_harms_none_that_write_with_it(leasing: Leasing) -> None:
    store = leasing.store
    stale = await leasing.acquire(1)
    live = await leasing.acquire(2, "b", forced=True)
    outcomes: list[str] = []

    async def one(events: list[ev.Event], fence: Fence | None) -> None:
        try:
            await store.append("a", events, fence=fence)
            outcomes.append(f"{len(events)} written")
        except RunnerError as error:
            outcomes.append(error.code)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, [ev.WarningIssued("x.y", "first")], live)
        nursery.start_soon(one, [ev.WarningIssued("x.y", "old")], stale)
        nursery.start_soon(one, [leasing.acquiring(3, "c")], None)
        nursery.start_soon(one, [ev.WarningIssued("x.y", "last"), ev.LeaseRefreshed("w", "w.2", TTL)], live)

    assert sorted(outcomes) == ["1 written", "2 written", "lease.held", "lease.lost"]
    texts = [r.event.message for r in await store.events("a") if isinstance(r.event, ev.WarningIssued)]
    assert sorted(texts) == ["first", "last"]


async def test_of_many_who_want_a_lease_one_gets_it(leasing: Leasing) -> None:
    got: list[int] = []

    async def one(number: int) -> None:
        with suppress(LeaseHeld):
            await leasing.acquire(1, str(number))
            got.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(one, number)

    assert [RunHolder(str(number)) for number in got] == [(await leasing.store.lease("w")).holder]
    assert len(await leasing.store.workspace_events("w")) == 1


async def test_numbers_of_leases_rise_while_somebody_may_hold_an_old_one(leasing: Leasing) -> None:
    """A run with a lease and no workspace yet: after somebody has broken that, its old number stays bad."""
    store = leasing.store
    await store.append(
        "a", [ev.LeaseAcquired(workspace="a-1", lease="a-1.1", holder=RunHolder("a"), fence=1, ttl_seconds=TTL)]
    )
    await store.append_to_workspace(
        "a-1",
        [ev.LeaseAcquired(workspace="a-1", lease="a-1.2", holder=EXEC, fence=2, ttl_seconds=TTL, forced=True)],
    )
    await store.append_to_workspace("a-1", [ev.LeaseReleased("a-1", "a-1.2")])

    assert await store.lease("a-1") == Lease(workspace="a-1", fence=2)
    await store.append("a", [ENDED])
    assert await store.leases() == []


async def test_leases_are_listed_the_oldest_first_with_those_that_have_expired(leasing: Leasing) -> None:
    for workspace in ("z", "w", "b"):
        await leasing.store.append_to_workspace(
            workspace,
            [ev.LeaseAcquired(workspace=workspace, lease=f"{workspace}.1", holder=EXEC, fence=1, ttl_seconds=TTL)],
        )
        leasing.at += WHOLE
    await leasing.store.append_to_workspace("w", [ev.LeaseReleased("w", "w.1")])

    assert [row.workspace for row in await leasing.store.leases()] == ["z", "b"]


async def test_a_workspace_has_a_journal_of_its_own(leasing: Leasing) -> None:
    store = leasing.store
    fence = await leasing.acquire(1)

    (second,) = await store.append_to_workspace("w", [ev.WarningIssued("x.y", "text")], fence=fence)
    (other,) = await store.append_to_workspace("v", [ev.WarningIssued("x.y", "text")])

    assert (second.run, second.seq, other.seq) == ("w", 2, 1)
    assert await store.workspace_events("w", after=1) == [second]
    assert [type(r.event) for r in await store.workspace_events("w")] == [ev.LeaseAcquired, ev.WarningIssued]
    assert await store.events("w") == []
