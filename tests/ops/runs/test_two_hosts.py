"""Two ``RUNNER_HOME``s with one store: neither ends what the other works on while that may live."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest
from msgspec import structs

from runner.core.errors import PoolKept
from runner.core.model import SlotState
from runner.lifecycle.liveness import DEAD_AFTER
from runner.ops.pool.pool import clear_left, open_pool, status
from runner.ops.workspaces.workspace_lease import open_workspace_env
from runner.ports.store import SlotRow
from tests.ops.runs.test_recover import AGENT, kill, run_in_agent
from tests.support.folder_contents import folder
from tests.support.needs import POSTGRES, ROOT
from tests.support.situations import Project, document, leftovers, until


@pytest.fixture(
    params=[
        pytest.param("sqlite", marks=pytest.mark.nightly),
        pytest.param("postgresql", marks=POSTGRES.mark),
    ]
)
def hosts(request: pytest.FixtureRequest, project: Project) -> tuple[Project, Project]:
    """Two hosts: what is a lock in the home of one is nothing in that of the other."""
    if request.param == "sqlite":
        url = f"sqlite://{folder(project.home / 'shared') / 'state.db'}"
    else:
        from tests.support.postgres import fresh_url

        url = fresh_url()
    project.env["RUNNER_DATABASE_URL"] = url
    project.script(AGENT)
    return project, replace(project, home=folder(project.home / "other"))


def stop_hearts(project: Project) -> None:
    """Let as much time pass by the store's clock as a dead runner is waited for."""
    url, query = project.env["RUNNER_DATABASE_URL"], f"heartbeat = heartbeat - {round(DEAD_AFTER * 1e6) + 1}"
    if url.startswith("sqlite:"):
        with closing(sqlite3.connect(url.removeprefix("sqlite://"))) as store, store:
            store.execute(f"UPDATE runners SET {query}")
    else:
        from tests.support.postgres import server

        server().execute(f"UPDATE kb.runners SET {query}", url.rpartition("/")[2])


@pytest.mark.slow
def test_a_run_that_lives_on_another_host_is_not_touched(hosts: tuple[Project, Project]) -> None:
    here, there = hosts
    with run_in_agent(here) as (runner, run):
        everything, this = there.runner("recover"), there.runner("recover", run)
        listed = there.json("runs", "list", "--all")
        leases = there.json("lease", "list")
        logs = there.runner("runs", "logs", run)
        collected = there.runner("gc")

        assert (everything.code, everything.out) == (0, "nothing to recover\n")
        assert this.code == 5
        assert f"run `{run}` is worked on by process {runner.pid} of host" in this.err
        assert [row["status"] for row in listed] == ["running"]
        assert [lease["state"] for lease in leases] == ["live"]
        assert "error[artifacts.missing]" in logs.err
        assert collected.code == 0
        assert runner.poll() is None
        assert not (there.home / "state" / "runs" / run).exists()


@pytest.mark.slow
def test_a_run_of_another_host_is_ended_when_its_runner_is_known_to_be_dead(hosts: tuple[Project, Project]) -> None:
    here, there = hosts
    with run_in_agent(here) as (runner, run):
        kill(runner)
        too_early = there.runner("recover", run)
        stop_hearts(here)

        listed = there.json("runs", "list", "--all")
        done = there.runner("recover", run)
        again = there.runner("recover")

        assert too_early.code == 5, "it is not known to be dead"
        assert [row["status"] for row in listed] == ["lost"]
        assert f"{run} work: unknown" in done.out
        assert "run `runner recover` on the host" in done.out, "its workspace is not here"
        assert done.code != 0
        assert again.out == "nothing to recover\n"

        at_home = here.runner("recover")
        assert "saved    work.patch" in at_home.out
        assert leftovers(here.home) == []
        assert here.json("runs", "show", run)["status"] == "unknown"


@pytest.mark.slow
def test_on_its_own_host_a_run_is_recovered_at_once(hosts: tuple[Project, Project]) -> None:
    here, there = hosts
    with run_in_agent(here) as (runner, _):
        kill(runner)

        assert "saved    work.patch" in here.runner("recover").out
        assert there.runner("recover").out == "nothing to recover\n"


@pytest.mark.slow
def test_a_run_is_followed_from_another_host_until_its_runner_is_dead(hosts: tuple[Project, Project]) -> None:
    here, there = hosts
    with run_in_agent(here) as (runner, run):
        follower = there.start("runs", "attach", run)
        kill(runner)
        time.sleep(1)
        assert follower.poll() is None

        stop_hearts(here)
        _, said = follower.communicate(timeout=20)

    assert follower.returncode == 5
    assert f"run `{run}` has lost its runner" in said


async def test_pools_that_a_keeper_keeps_elsewhere_are_left_to_it(project: Project) -> None:
    settings = project.settings(RUNNER_DATABASE_URL=f"sqlite://{project.home / 'state.db'}")
    other = structs.replace(settings, home=project.home / "other")
    async with open_workspace_env(settings) as here, open_workspace_env(other) as there:
        assert there.store.runner is not None
        await there.store.register()
        await there.store.put_slot(
            SlotRow(id="slot-1", pool="pool", state=SlotState.READY, keeper=there.store.runner.id)
        )

        with pytest.raises(PoolKept, match=f"are kept by process {os.getpid()} of host"):
            async with open_pool(here, [], print):
                pass

        assert await clear_left(here, dry_run=False) == []
        assert (await status(here)).kept
        assert len(await there.store.slots()) == 1


@pytest.mark.slow
def test_a_workspace_that_a_command_runs_in_elsewhere_is_left_to_it(hosts: tuple[Project, Project]) -> None:
    here, there = hosts
    id = here.json("workspace", "create")["id"]
    command = here.start("workspace", "exec", id, "--", "sleep", "300")
    try:
        until(lambda: here.json("lease", "list"))
        verbs = ("lease", "release"), ("lease", "break", "--yes"), ("workspace", "destroy", "--discard")
        refused = [there.runner(*verb, id) for verb in verbs]
        leases = there.json("lease", "list")
        swept = [there.runner("recover"), there.runner("gc")]

        assert [done.code for done in refused] == [5, 5, 5]
        assert f"process {command.pid} of host" in refused[1].err
        assert [lease["state"] for lease in leases] == ["live"]
        assert [done.code for done in swept] == [0, 0]
        assert command.poll() is None
    finally:
        kill(command)
    stop_hearts(here)
    dead = [there.runner(*verb, id) for verb in verbs]
    assert [done.code for done in dead] == [5, 5, 5], "its files are not there"
    assert there.runner("recover").out == "nothing to recover\n"
    assert here.runner("workspace", "destroy", id, "--discard").code == 0


@pytest.mark.scenario("BEY-20", only="several hosts share one PostgreSQL store")
@pytest.mark.slow
def test_a_run_is_cancelled_from_another_host(hosts: tuple[Project, Project]) -> None:
    here, there = hosts
    with run_in_agent(here) as (runner, run):
        told = there.runner("runs", "cancel", run)
        runner.wait(60)

        assert (told.code, told.out) == (0, f"run {run} was told to stop\n")
        assert there.json("runs", "list")[0]["status"] == "cancelled"
        again = there.runner("runs", "cancel", run)
        assert (again.code, f"run `{run}` has ended" in again.err) == (5, True)
        assert leftovers(here.home) == []
    shown = there.runner("runs", "show", run).out
    assert ("not on this host: the run was on another" in shown, str(there.home) in shown) == (True, False)
    assert f"  evidence   {here.home}" in here.runner("runs", "show", run).out


def test_a_run_without_a_runner_is_not_waited_for(hosts: tuple[Project, Project]) -> None:
    here, _ = hosts
    with run_in_agent(here) as (runner, run):
        kill(runner)

        refused = here.runner("runs", "cancel", run)

        assert (refused.code, f"`runner recover {run}` ends it" in refused.err) == (5, True)


@pytest.mark.scenario("BEY-20", only="several hosts share one PostgreSQL store")
@pytest.mark.slow
def test_a_host_that_was_paused_until_another_ended_its_run_writes_nothing_afterwards(
    hosts: tuple[Project, Project],
) -> None:
    here, there = hosts
    with run_in_agent(here) as (runner, run):
        os.killpg(runner.pid, signal.SIGSTOP)
        try:
            stop_hearts(here)
            ended = there.runner("recover", run)
            before = there.json("runs", "show", run)
        finally:
            os.killpg(runner.pid, signal.SIGCONT)
        runner.send_signal(signal.SIGTERM)
        _, said = runner.communicate(timeout=60)

        assert f"{run} work: unknown" in ended.out
        assert runner.returncode != 0, said
        assert there.json("runs", "show", run) == before


SLOW_AGENT = "for turn in 1 2 3 4 5 6 7 8 9 10; do echo $turn; sleep 2; done"


@ROOT.mark
@POSTGRES.mark
@pytest.mark.nightly
def test_a_database_that_dies_again_and_again_costs_no_run_and_no_event(project: Project) -> None:
    """Every 5 to 40 s, for up to 8 s, under a hundred runs of two hosts in network namespaces of their own."""
    from tests.support import postgres

    chance = random.Random(seed := random.randrange(1 << 32))
    with postgres.running() as server:
        server.folder.chmod(0o755)
        project.env |= {
            "RUNNER_DATABASE_URL": f"postgresql://postgres@/postgres?host={server.folder}&port={server.port}"
        }
        project.env |= {"WORKSPACE_MAX": "20"}
        names = [f"worker-{number}" for number in range(50)]
        matrix = f"matrix: {{agent_type: [{', '.join(names)}], max_parallel: 6}}"
        project.write(*(project.worker(name, SLOW_AGENT) for name in names), document("IncidentRun", "work", matrix))
        hosts = [replace(project, home=folder(project.home / name), within=("unshare", "--net")) for name in "ab"]
        working = [host.start("apply", str(host.folder), "--yes", "--quiet") for host in hosts]
        deaths = 0
        while any(process.poll() is None for process in working):
            for _ in range(chance.randrange(5, 40)):
                time.sleep(1 if any(process.poll() is None for process in working) else 0)
            server.stop()
            time.sleep(chance.uniform(0, 8))
            server.start()
            deaths += 1

        said = [process.communicate() for process in working]
        assert [process.returncode for process in working] == [0, 0], f"seed {seed}, {said}"
        assert deaths > 3
        stored = server.execute("SELECT run, seq, body::json->>'type' FROM kb.events")
        kept = [row for host in hosts for row in _kept_events(host)]
        assert sorted(kept) == sorted(stored), f"seed {seed}"
        for run in (by_run := {run: [row for row in kept if row[0] == run] for run, _, _ in kept}):
            counts = Counter(kind for _, _, kind in by_run[run])
            assert [seq for _, seq, _ in by_run[run]] == [*range(1, len(by_run[run]) + 1)], run
            assert (counts["RunStarted"], counts["RunEnded"], counts["StepStarted"]) == (1, 1, counts["StepEnded"]), run
        assert len(by_run) == 100
        assert {row["status"] for row in hosts[0].json("runs", "list", "--all", "--limit", "200")} == {"succeeded"}
        assert [leftovers(host.home) for host in hosts] == [[], []]


def _kept_events(host: Project) -> list[tuple[str, int, str]]:
    """Run, number and type of each event that a host has in the directories of its runs."""
    files = (host.home / "state" / "runs").glob("*/events.jsonl")
    lines = ((file.parent.name, json.loads(line)) for file in files for line in file.read_text().splitlines())
    return [(run, line["seq"], line["type"]) for run, line in lines]
