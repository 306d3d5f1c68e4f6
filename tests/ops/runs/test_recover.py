"""``runner recover`` as a person uses it, beside runs that live, and what is said of a run that is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from runner.core.clock import now_microseconds
from runner.engine.pool import clear
from runner.events.events import ResourceIntended, RunStarted, SlotClaimed
from runner.ports.provider import WorkspaceRequest
from runner.store.memory import MemoryStore
from runner.store.sqlite import open_store
from tests.support.fake_provider import FakeProvider
from tests.support.folder_contents import folder
from tests.support.situations import Project, leftovers, processes_of, step

AGENT = """
echo work > made
sleep 300
"""


@contextmanager
def run_in_agent(project: Project, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A runner whose agent works, and the run's id; killed at the end of the block, and recovered."""
    process = project.start("apply", str(project.folder), "--output", "jsonl", *arguments)
    run = next(json.loads(line)["run"] for line in process.stdout if "IsolationObserved" in line)
    while not list((project.home / "state").glob("projects/default/workspaces/*/made")):
        time.sleep(0.01)  # another process makes it
    try:
        yield process, run
    finally:
        kill(process)
        project.runner("recover")


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["local", pytest.param("process", marks=pytest.mark.nightly)])
def test_a_lost_run_is_said_to_be_lost_until_it_is_recovered(project: Project, provider: str) -> None:
    project.script(AGENT, provider=provider)
    with run_in_agent(project) as (runner, run):
        assert "running" in project.runner("runs", "list").out
        kill(runner)

        listed, shown = project.runner("runs", "list"), project.runner("runs", "show", run)
        foreseen = project.runner("recover", "--dry-run")
        before = leftovers(project.home)
        done = project.runner("recover", run[:8], "--output", "json")

    assert f"{run}  work  lost " in listed.out
    assert shown.out.startswith("LOST work")
    assert f"runner recover {run}" in shown.out
    assert f"would be removed  workspace {run}-1 {provider}" in foreseen.out
    assert before != []
    assert done.code == 0
    (recovered,) = json.loads(done.out)["runs"]
    assert recovered["saved"] == "work.patch"
    assert leftovers(project.home) == []
    record = json.loads((project.home / "state" / "runs" / run / "run.json").read_text())
    assert record["status"] == "unknown"
    assert record["exit_code"] == 4
    assert step(record, "agent")["status"] == "unknown"
    assert "+work" in project.runner("runs", "patch", run).out
    assert project.runner("recover").out == "nothing to recover\n"


@pytest.mark.slow
def test_a_run_whose_runner_lives_is_not_touched(project: Project) -> None:
    project.script(AGENT)
    with run_in_agent(project) as (runner, run):
        before = {pid for pid, _ in processes_of(project.home)}

        everything, this = project.runner("recover"), project.runner("recover", run)

        assert (everything.code, everything.out) == (0, "nothing to recover\n")
        assert this.code == 5
        assert "error[store.run-unfinished]" in this.err
        assert runner.poll() is None
        assert before <= {pid for pid, _ in processes_of(project.home)}


@pytest.mark.slow
def test_an_apply_with_the_key_of_a_lost_run_says_at_once_to_recover_it(project: Project) -> None:
    project.script(AGENT)
    with run_in_agent(project, "--run-key", "k") as (runner, run):
        kill(runner)

        done = project.runner("apply", str(project.folder), "--run-key", "k", timeout=20)

    assert done.code == 5
    assert f"run `runner recover {run}`" in done.err


@pytest.mark.slow
def test_the_work_in_a_slot_that_a_loss_of_power_has_made_one_again_is_saved(project: Project) -> None:
    """Of a workspace that was had warm the record is not flushed, so that nobody waits; that of its slot is."""
    project.script(AGENT, provider="process")
    with run_in_agent(project) as (runner, run):
        kill(runner)
        state, slot = project.home / "state", "slot-a1b2"
        record = json.loads((state / "sandboxes" / f"{run}-1.json").read_text())
        (state / "sandboxes" / f"{run}-1.json").unlink()
        (state / "sandboxes" / f"{slot}.json").write_text(json.dumps({**record, "run": ""}))
        for place in ("sandboxes", "projects/default/workspaces"):
            (state / place / f"{run}-1").rename(state / place / slot)
        claim(state / "state.db", run, slot)

        cleared = project.runner("pool", "status")
        done = project.runner("recover")

    assert cleared.code == 0
    assert "saved    work.patch" in done.out
    assert "kept warm" not in done.out
    assert "+work" in project.runner("runs", "patch", run).out
    assert leftovers(project.home) == []


def claim(path: Path, run: str, slot: str) -> None:
    """Let a run have had its workspace from a pool."""

    async def write() -> None:
        async with open_store(path, now=now_microseconds, entropy=bytes) as store:
            await store.append(run, [SlotClaimed(f"{run}-1", slot)])

    trio.run(write)


async def test_a_keeper_that_begins_clears_no_slot_that_a_workspace_was_claimed_from(tmp_path: Path) -> None:
    store, provider = MemoryStore(now_microseconds), FakeProvider(tmp_path)
    for id in ("slot-1", "slot-2"):
        await provider.create(WorkspaceRequest(id=id, run="", nonce=store.nonce))
    await store.append(
        "r",
        [
            RunStarted(name="work", plan="", runner="", steps={}, deadline_seconds=1.0),
            ResourceIntended("", "workspace", "r-1", "fake"),
        ],
    )
    await store.append("r", [SlotClaimed("r-1", "slot-1")])

    assert await clear(store, [provider]) == {"slot-2": None}

    assert [handle.id for handle in await provider.list_owned(store.nonce)] == ["slot-1"]


@pytest.mark.slow
def test_work_that_can_not_be_saved_is_kept_and_said(project: Project) -> None:
    project.script(AGENT)
    with run_in_agent(project) as (runner, run):
        kill(runner)
        plan = project.home / "state" / "runs" / run / "plan.json"
        before = plan.read_bytes()
        plan.write_text("{}")

        done = project.runner("recover")
        kept = project.home / "state" / "projects" / "default" / "workspaces" / f"{run}-1"

        assert done.code == 0
        assert f"kept     {kept}: `{plan}` is not the plan of a run" in done.out
        assert (kept / "made").read_text() == "work\n"
        assert processes_of(project.home) == []
        assert "LEFT BEHIND" in project.runner("runs", "show", run).out

        plan.write_bytes(before)  # and when it can be, the next recovery does it
        again = project.runner("recover")

    assert "saved    work.patch" in again.out
    assert leftovers(project.home) == []


def test_the_directory_of_a_run_that_never_started_is_removed(project: Project) -> None:
    project.script("true")
    project.apply()
    stray = folder(project.home / "state" / "runs" / "abc")

    done = project.runner("recover")

    assert done.out == f"removed  {stray} (never started)\n"
    assert not stray.exists()


def test_a_store_that_is_damaged_is_not_sent_round_in_a_circle(project: Project) -> None:
    state = folder(project.home / "state")
    (state / "state.db").write_bytes(b"this is text" * 1000)

    listed, done = project.runner("runs", "list"), project.runner("recover")

    assert (listed.code, done.code) == (7, 7)
    for said in (listed.err, done.err):
        assert "runner store rebuild" in said
        assert "runner recover" not in said


def test_a_home_without_a_store_has_nothing_to_recover_and_stays_away(project: Project) -> None:
    done = project.runner("recover")

    assert (done.code, done.out) == (0, "nothing to recover\n")
    assert not (project.home / "state").exists()


def test_an_event_that_can_not_be_read_is_named_and_the_other_runs_are_recovered(project: Project) -> None:
    import sqlite3
    from contextlib import closing

    project.script("true")
    _, record = project.apply()
    (project.directory(record) / "events.jsonl").unlink()  # else it would know better than the store
    with closing(sqlite3.connect(project.home / "state" / "state.db")) as store, store:
        store.execute("UPDATE events SET body = '{' WHERE type = 'PhaseStarted'")
        store.execute("DELETE FROM events WHERE type = 'RunEnded'")
        store.execute("UPDATE runs SET ended = NULL")

    done = project.runner("recover")

    assert done.code == 7
    assert "LEFT BEHIND  " in done.out
    assert os.fspath(Path("state.db")) in done.out
