"""What a guest adds, on every provider that has one: very many commands, and an end when it is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from runner.core.errors import WorkspaceLost
from runner.core.model import Exit
from runner.ports.provider import Workspace
from runner.testing.outside import cmdline, descendants, fields, living_of, marked
from runner.testing.place import STUBBORN, Place, carrying, read_until
from tests.support import dockerd
from tests.support.providers import BY_VOLUMES, DOCKER, GUESTS, GVISOR, PODS, PROCESS, inhabitants

KINDS = GUESTS


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.nightly)])
async def test_very_many_commands_at_once_end_with_their_own_status(place: Place, count: int) -> None:
    count = count // 4 if place.kind == GVISOR else count  # there each costs ten times as much
    running, all_run, ended = 0, trio.Event(), {}

    async def one(workspace: Workspace, number: int) -> None:
        nonlocal running
        async with workspace.exec(["sh", "-c", "read status; exit $status"]) as process:
            running += 1
            if running == count:
                all_run.set()
            await all_run.wait()
            await process.stdin.send_all(b"%d\n" % (number % 251))
            ended[number] = await process.wait()

    async with place.open() as workspace, trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, workspace, number)

    assert ended == {number: Exit(code=number % 251) for number in range(count)}


# --- a lost guest -----------------------------------------------------------------------------------


def _first(place: Place) -> int:
    """The guest of the only open workspace, as seen from outside: below bubblewrap where there is one."""
    if place.kind in (GVISOR, *BY_VOLUMES):
        return max(map(dockerd.first, dockerd.containers(place.handle.id)))  # others never start
    if place.kind == PODS:
        theirs = [pid for pid in living_of(place.uid) if cmdline(pid).split(b"\0")[1:2] == [b"/run/channel/socket"]]
        return next(pid for pid in theirs if int(fields(pid)[1]) not in theirs)
    if place.kind == DOCKER:
        parents = {pid: int(fields(pid)[1]) for pid in living_of(place.handle.uid)}  # each with its parent
        return next(pid for pid, parent in parents.items() if parent not in parents)
    living = [pid for pid in descendants(os.getpid()) if fields(pid)[0] != "Z"]
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in living}
    assert ("bwrap" in names.values()) == (place.kind != PROCESS)
    return next(pid for pid, name in names.items() if not name.startswith(("bwrap", "python")))  # the tests have forks


@pytest.mark.scenario("BEY-06")
async def test_everything_ends_with_a_lost_guest_at_once_and_the_workspace_opens_again(place: Place) -> None:
    daemon = f'(setsid sh -c "{STUBBORN}" >/dev/null 2>&1 &)'
    lost = 0

    async def command(workspace: Workspace, task_status: trio.TaskStatus[None]) -> None:
        nonlocal lost
        argv = ["sh", "-c", f"{daemon}; {STUBBORN}"]
        async with workspace.exec(argv, env={"MARK": place.mark}) as process:
            await read_until(process, b"ready")
            task_status.started()
            with pytest.raises(WorkspaceLost):
                await process.wait()
            lost += 1

    async with place.open() as workspace:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                await nursery.start(command, workspace)
            assert await carrying(place, workspace, place.mark) >= 10
            start = trio.current_time()
            os.kill(_first(place), signal.SIGKILL)
        with pytest.raises(WorkspaceLost):
            await workspace.run(["true"])
    assert trio.current_time() - start < 10
    assert lost == 5
    assert (marked(place.mark), inhabitants(place.handle)) == ([], [])

    async with place.open() as workspace:
        assert (await workspace.run(["true"])).exit.ok
