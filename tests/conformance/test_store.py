"""What every store promises, on each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import trio

from runner.errors import RunExists, RunnerError, RunOver, StoreFailed, UnknownRun
from runner.events import (
    EffectDone,
    EffectIntended,
    Event,
    PhaseEntered,
    ProviderChosen,
    Recorded,
    RunEnded,
    RunStarted,
    StepEnded,
    StepStarted,
    ViolationsFound,
    Warned,
)
from runner.model import IsolationClass, Reason, Violation, failed, succeeded
from runner.ports.store import RunRow, Store
from runner.store.memory import MemoryStore
from runner.store.sqlite import open_store

STARTED = RunStarted("fix", "sha256:1", "0.1.0", {"agent": "agent"}, 60.0)
ENDED = RunEnded(succeeded("done"), 0)


@asynccontextmanager
async def open_kind(kind: str, folder: Path) -> AsyncIterator[Store]:
    ticks = count(1_000)
    if kind == "memory":
        yield MemoryStore(lambda: next(ticks))
    else:
        async with open_store(folder / "state.db", now=lambda: next(ticks), entropy=bytes) as store:
            yield store


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with open_kind(request.param, tmp_path) as opened:
        yield opened


async def test_events_come_back_equal_numbered_from_one_and_dated(store: Store) -> None:
    events: list[Event] = [
        STARTED,
        PhaseEntered("work"),
        EffectIntended("provision", "workspace", "runner-a-1", "local"),
        EffectDone("provision", "workspace", "runner-a-1"),
        ProviderChosen("local", IsolationClass.NAMESPACES),
        StepEnded("agent", failed(Reason.EXIT, "exited 1", details=("x",))),
        ViolationsFound("scan", (Violation("a\\xff", "forbidden:*"),)),
    ]

    recorded = await store.append("a", events)

    assert [r.event for r in recorded] == events
    assert [(r.run, r.seq) for r in recorded] == [("a", n) for n in range(1, 8)]
    assert len({r.at for r in recorded}) == 1
    assert await store.events("a") == recorded


async def test_numbers_go_on_without_gaps_over_appends(store: Store) -> None:
    await store.append("a", [STARTED])
    await store.append("b", [STARTED, StepStarted("agent")])

    (second,) = await store.append("a", [StepStarted("agent")])

    assert second.seq == 2
    assert [r.seq for r in await store.events("a", after=1)] == [2]
    assert await store.events("unknown") == []


async def test_concurrent_appends_all_get_their_own_numbers(store: Store) -> None:
    await store.append("a", [STARTED])
    answers: list[list[Recorded]] = []

    async def one(number: int) -> None:
        answers.append(await store.append("a", [Warned("x.y", str(number)), Warned("x.y", str(number))]))

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
        await store.append("a", [StepStarted("agent"), ENDED])

    assert len(await store.events("a")) == 2, "all of an append or none of it"


async def test_events_of_a_run_that_never_started_are_refused(store: Store) -> None:
    with pytest.raises(StoreFailed, match="has not started"):
        await store.append("a", [StepStarted("agent")])


async def test_one_bad_append_does_not_fail_the_others(store: Store) -> None:
    await store.append("a", [STARTED, ENDED])
    await store.append("b", [STARTED])
    outcomes: dict[str, object] = {}

    async def one(name: str, run: str, *events: Event) -> None:
        try:
            outcomes[name] = [r.seq for r in await store.append(run, events)]
        except RunnerError as error:
            outcomes[name] = error.code

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, "good", "b", StepStarted("x"))
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
    await store.append("a", [RunEnded(failed(Reason.POLICY, "x"), 3)])

    assert await store.runs() == [
        RunRow("b", "fix", "running", None, "sha256:1", 1001, None),
        RunRow("a", "fix", "failed", 3, "sha256:1", 1000, 1002),
    ]


@pytest.mark.parametrize(("text", "found"), [("abd", "abd1"), ("abc", "abc"), ("last", "zz"), ("zz", "zz")])
async def test_a_run_is_found_by_a_prefix_or_last(store: Store, text: str, found: str) -> None:
    for run in ("abc", "abcd", "abd1", "zz"):
        await store.append(run, [STARTED])

    assert (await store.find(text)).id == found


@pytest.mark.parametrize(
    ("text", "words"),
    [("ab", "may be any of 3 runs"), ("x", "there is no run `x`"), ("%", "there is no run"), ("\x1b[2J", r"x1b\[2J")],
    ids=["ambiguous", "none", "no pattern", "control"],
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

    assert refused.value.hint == "one of: abd (fix), abc (fix)"


async def test_an_empty_store_has_no_last_run(store: Store) -> None:
    assert await store.runs() == []
    with pytest.raises(UnknownRun):
        await store.find("last")
