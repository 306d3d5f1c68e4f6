"""Delivery where the command line cannot easily go: time limits, and runs that have not ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from runner.cli.signals import run_cancellable
from runner.core.errors import PushTimedOut, RunUnfinished, UnknownCommit
from runner.core.model import Status
from runner.core.settings import Settings
from runner.ops.runs.deliver import make_branch, push, source_of
from runner.ops.runs.history import StoredRun, find_run
from tests.support.folder_contents import folder, put
from tests.support.situations import Project


def settings(project: Project, path: str = "") -> Settings:
    env = {"PATH": path + os.environ["PATH"], "HOME": str(project.home), "RUNNER_HOME": str(project.home / "state")}
    return Settings.from_env(env)


@pytest.fixture
def ran(project: Project, repository: Path) -> Project:
    project.script("echo x > made", workspace="repo_source: {type: local, path: repo}", run="snapshot: {}")
    done, _ = project.apply()
    assert done.code == 0, done.out + done.err
    return project


async def test_a_push_has_a_time_limit_and_says_how_to_learn_what_became_of_it(ran: Project) -> None:
    fake = folder(ran.folder / "bin")
    put(fake / "ssh", "#!/bin/sh\nsleep 600\n", 0o755)
    told = settings(ran, f"{fake}:")

    with trio.fail_after(60), pytest.raises(PushTimedOut) as caught:
        await push(
            await find_run(told, "last"), told, to="git@host.example:shop", branch=None, unverified=True, seconds=0.5
        )

    assert caught.value.exit_code == 124
    assert caught.value.hint.startswith("push again")


@pytest.mark.parametrize(
    ("status", "hint"),
    [(Status.RUNNING, "wait for its end"), (Status.LOST, "its runner has died: run `runner recover`")],
)
async def test_a_run_that_has_not_ended_is_not_delivered(ran: Project, status: Status, hint: str) -> None:
    stored = await find_run(settings(ran), "last")
    stored.record.ended, stored.record.status = None, status

    with pytest.raises(RunUnfinished) as caught:
        await make_branch(stored, settings(ran), into=None, name=None, unverified=True)

    assert caught.value.hint == hint


async def test_the_source_is_the_one_of_the_plan(ran: Project) -> None:
    stored = await find_run(settings(ran), "last")

    assert source_of(stored) == ran.folder / "repo"
    (stored.directory / "plan.json").unlink()
    assert source_of(StoredRun(stored.record, stored.directory, stored.repository)) is None


def test_an_error_comes_out_as_itself() -> None:
    async def fails() -> None:
        await trio.sleep(0)
        raise UnknownCommit("gone")

    with pytest.raises(UnknownCommit):
        run_cancellable(fails)
