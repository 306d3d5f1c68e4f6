"""A runner that sleeps past the end of its lease, at any of its writes: it changes nothing that another has by then."""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from runner.core.clock import now_microseconds
from runner.core.errors import StoreFailed
from runner.core.model import CommandHolder, Fence, RunHolder
from runner.core.settings import Settings
from runner.events import events as ev
from runner.events.record import RunRecord
from runner.lifecycle.lease import TTL
from runner.ops.host.state import this_runner
from runner.ops.planning.facts import open_provider
from runner.ops.planning.make_plan import PlanResult, make_plan
from runner.ops.runs.dependencies import dependencies_of
from runner.ops.runs.recover import recover_runs
from runner.ports.provider import Provider
from runner.ports.store import Store
from runner.runtime.context import RunDependencies
from runner.runtime.lease_holder import LeaseHolder
from runner.store.sqlite import open_store
from tests.support.fake_provider import FakeProvider, Scripted
from tests.support.runs import apply_in
from tests.support.situations import Project, leftovers, processes_of

Away = Callable[["Host"], Awaitable[None]]


@dataclass
class Host:
    """One store, whose clock is ``ahead`` seconds; at the ``at``-th guarded write of a run ``away`` happens."""

    home: Path
    settings: Settings
    store: Store
    provider: Provider
    deps: RunDependencies
    ahead: float = 0.0
    at: int | None = None
    away: Away | None = None
    guarded: int = 0
    taken: int | None = None  # how many events the run had when its workspace was taken over
    kinds: list[str] = field(default_factory=list)

    async def append(self, run: str, events: Sequence[ev.Event], *, fence: Fence | None = None) -> list[ev.Recorded]:
        if fence is not None:
            self.guarded += 1
            self.kinds.append(type(events[-1]).__name__)
            if self.guarded == self.at and self.away is not None:
                await self.away(self)
        return await self.store.append(run, events, fence=fence)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def run(self, planned: PlanResult) -> RunRecord:
        (record,) = await apply_in(planned, self.settings, self, self.deps)
        return record

    async def recover(self) -> None:
        recovery = await recover_runs(self.settings, self.store, self.deps, [self.provider.name], None, dry_run=False)
        assert recovery.clean
        assert await self.store.leases() == []
        assert leftovers(self.home) == []


async def sleeps(host: Host) -> None:
    host.ahead += 2 * TTL


async def loses_its_workspace(host: Host) -> None:
    """What ``runner lease break`` does, while the first holder is away; nothing of that runs when it is done."""
    await sleeps(host)
    (row,) = await host.store.leases()
    await take_over(host.store, host.provider, row.workspace, host.deps.nonce)
    assert processes_of(host.home) == []
    host.taken = len(await host.store.events(row.workspace.partition("-")[0]))


async def take_over(store: Store, provider: Provider, workspace: str, nonce: str) -> None:
    lease_holder = LeaseHolder(workspace, CommandHolder("another", 7), store.lease)

    async def emit(*events: ev.Event) -> None:
        await store.append_to_workspace(workspace, events, fence=lease_holder.fence)

    before = await lease_holder.acquire(emit)
    assert isinstance(before.holder, RunHolder)
    for handle in await provider.list_owned(nonce):
        await provider.evict(handle)
    await emit(ev.WarningIssued("x.other", "is here now"))
    await lease_holder.release(emit)


@asynccontextmanager
async def host_in(home: Path, provider: str) -> AsyncIterator[Host]:
    home.mkdir()
    settings = Settings.from_env({"RUNNER_HOME": str(home / "state"), "PATH": os.environ["PATH"]})
    settings.home.mkdir()

    def play(argv: Sequence[str]) -> Scripted:
        for tree in settings.home.glob("projects/default/workspaces/*"):
            (tree / "made").write_text("work\n")
        return Scripted()

    made: Any = FakeProvider(settings.home, play) if provider == "fake" else open_provider(provider, settings)

    def now() -> int:
        return now_microseconds() + round(host.ahead * 1e6)

    path, runner = settings.home / "state.db", this_runner(settings.home)
    async with open_store(path, now=now, entropy=secrets.token_bytes, runner=runner) as store:
        host = Host(home, settings, store, made, replace(dependencies_of(settings, store), provider=lambda name: made))
        yield host


AGENT = "echo work > made; (setsid sleep 1000 >/dev/null 2>&1 &); sleep 0.1"


async def planned_on(project: Project, provider: str) -> PlanResult:
    project.script(
        AGENT,
        provider="process" if provider == "fake" else provider,
        workspace='repo_source: {type: local, path: repo}\nsetup_commands: [["true"]]',
        agent='post_hooks: [["true"]]',
        run='verify: {commands: [{run: "true"}]}',
    )
    return await make_plan(project.folder, Settings.from_env({"RUNNER_HOME": str(project.home / "unused")}))


async def guarded_writes(project: Project, provider: str, planned: PlanResult) -> list[str]:
    """Of a run that nothing happens to."""
    async with host_in(project.home / "whole", provider) as host:
        record = await host.run(planned)
        assert record.exit_code == 0, record.outcome
        await host.recover()
    return host.kinds


STRIDES = [
    pytest.param("fake", 5, id="fake-some"),
    pytest.param("fake", 1, id="fake-all", marks=pytest.mark.nightly),
    pytest.param("local", 16, id="local-some"),
    pytest.param("local", 1, id="local-all", marks=pytest.mark.nightly),
]


@pytest.mark.slow
@pytest.mark.scenario("WSM-13")
@pytest.mark.scenario("BEY-09")
@pytest.mark.parametrize(("provider", "stride"), STRIDES)
@pytest.mark.usefixtures("repository")
async def test_who_was_away_too_long_writes_nothing_more(project: Project, provider: str, stride: int) -> None:
    planned = await planned_on(project, provider)
    kinds = await guarded_writes(project, provider, planned)
    assert {"StepEnded", "SnapshotPublished", "WorkSaved", "ResourceRemovalStarted", "ResourceRemoved"} <= {*kinds}

    for at in range(1, len(kinds) + 1, stride):
        async with host_in(project.home / f"taken-{at}", provider) as host:
            host.at, host.away = at, loses_its_workspace

            record = await host.run(planned)

            after = [type(r.event) for r in await host.store.events(record.id)][host.taken :]
            assert {*after} <= {ev.StepEnded, ev.RunEnded}, (at, kinds[at - 1], host.kinds, record.outcome)
            assert after[-1] is ev.RunEnded
            assert (record.exit_code, record.outcome and record.outcome.reason) == (5, "lease"), (at, record.outcome)
            assert processes_of(host.home) == []
            await host.recover()
            assert [type(r.event) for r in await host.store.events(record.id)].count(ev.RunEnded) == 1


@pytest.mark.slow
@pytest.mark.scenario("WSM-13")
@pytest.mark.parametrize(("provider", "stride"), STRIDES)
@pytest.mark.usefixtures("repository")
async def test_a_lease_that_ended_while_nobody_came_is_had_again_to_save_the_work(
    project: Project, provider: str, stride: int
) -> None:
    planned = await planned_on(project, provider)
    kinds = await guarded_writes(project, provider, planned)

    for at in range(1, len(kinds) + 1, stride):
        async with host_in(project.home / f"slept-{at}", provider) as host:
            host.at, host.away = at, sleeps

            record = await host.run(planned)

            where = (at, kinds[at - 1], record.outcome)
            assert (record.exit_code, record.outcome and record.outcome.reason) == (5, "lease"), where
            assert "lease.lost" in [code for code, _ in record.warnings]
            assert (record.resources, record.left_behind) == ({}, ()), where
            assert await host.store.leases() == []
            assert leftovers(host.home) == [], where
            agent = record.steps["agent"]
            if agent.started is not None and record.saved_work is not None and agent.outcome and agent.outcome.ok:
                patch = host.settings.home / "runs" / record.id / str(record.saved_work.patch)
                assert "+work" in patch.read_text(), where


@pytest.mark.slow
@pytest.mark.scenario("WSM-13")
@pytest.mark.parametrize("deaf", [2, 1_000], ids=["for a while", "for good"])
async def test_a_refresh_that_fails_is_in_the_record_and_a_lease_that_none_extends_ends_the_run(
    project: Project, monkeypatch: pytest.MonkeyPatch, deaf: int
) -> None:
    """In a tenth of a second for five minutes, and nine for an hour."""
    monkeypatch.setattr("runner.runtime.lease_holder.REFRESH", 0.1)
    monkeypatch.setattr("runner.runtime.lease_holder.RETRY", (0.1,))
    monkeypatch.setitem(LeaseHolder.__init__.__kwdefaults__, "ttl", 9.0)
    project.script(f"echo work > made; sleep {1 if deaf == 2 else 300}", agent="stop_budget: 1s")
    planned = await make_plan(project.folder, Settings.from_env({"RUNNER_HOME": str(project.home / "unused")}))
    failures = count(1)

    async with host_in(project.home / "deaf", "local") as host:
        append = host.store.append

        async def refuse(run: str, events: Sequence[ev.Event], *, fence: Fence | None = None) -> list[ev.Recorded]:
            if isinstance(events[0], ev.LeaseRefreshed) and next(failures) <= deaf:
                raise StoreFailed("disk I/O error")
            return await append(run, events, fence=fence)

        monkeypatch.setattr(host.store, "append", refuse)
        record = await host.run(planned)
        free = not await host.store.leases()

    said = [message for code, message in record.warnings if code == "lease.refresh-failed"]
    assert said[0] == "refreshing the lease failed, and is tried again: disk I/O error"
    assert free
    if deaf == 2:
        assert said[1] == "refreshing the lease failed 2 times, last: disk I/O error"
        assert record.exit_code == 0, record.outcome
    else:
        assert (record.exit_code, record.cancelled_by) == (5, "lease")
        assert record.seconds < 9
        assert processes_of(host.home) == []


@pytest.mark.slow
@pytest.mark.scenario("WSM-13")
async def test_a_runner_that_was_stopped_by_a_signal_finds_its_workspace_taken(project: Project) -> None:
    project.script("echo work > made; sleep 300")
    process = project.start("apply", str(project.folder), "--output", "jsonl")
    run = next(json.loads(line)["run"] for line in process.stdout if "IsolationObserved" in line)
    settings = Settings.from_env({"RUNNER_HOME": str(project.home / "state"), "PATH": os.environ["PATH"]})
    later = now_microseconds() + round(2 * TTL * 1e6)

    process.send_signal(signal.SIGSTOP)
    async with open_store(settings.home / "state.db", now=lambda: later, entropy=secrets.token_bytes) as store:
        await take_over(store, open_provider("local", settings), f"{run}-1", store.nonce)
    running = [pid for pid, _ in processes_of(project.home) if pid != process.pid]
    process.send_signal(signal.SIGCONT)
    out, _ = await trio.to_thread.run_sync(process.communicate)

    assert running == []
    assert process.returncode == 5
    assert json.loads(out.splitlines()[-1])["outcome"]["reason"] == "lease"
    assert project.runner("recover").code == 0
    assert leftovers(project.home) == []
