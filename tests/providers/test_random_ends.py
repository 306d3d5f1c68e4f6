"""Commands of any shape that are ended at any moment, very many of them: an outside look finds nothing afterwards."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import trio

from runner.core.errors import WorkspaceLost
from runner.core.model import Handle
from runner.ports.provider import Provider, SandboxSpec, Workspace, WorkspaceRequest
from runner.providers.local import LocalProvider
from runner.testing.outside import living_of, marked

WORKSPACES, COMMANDS, LATEST = 4, 25, 0.02
CHILDREN = (
    "sleep 1000",
    "setsid sleep 1000",
    "(setsid sleep 1000 >/dev/null 2>&1 &)",
    "(trap '' TERM; setsid sleep 1000; true)",
    "while :; do sleep 0.001; done",
    "cat /dev/zero",
)
MAINS = ("exit 3", "wait", "exec sleep 1000", "exec cat", "kill -9 $$", "kill -STOP $$")


def script(random: Random) -> str:
    ignoring = random.choice(("", "", "trap '' TERM; "))
    children = random.choices(CHILDREN, k=random.randrange(5))
    return ignoring + "".join(f"{child} & " for child in children) + random.choice(MAINS)


async def leave(workspace: Workspace, argv: list[str], moment: float) -> None:
    async with workspace.exec(argv):
        await trio.sleep(moment)


async def meet_the_deadline(workspace: Workspace, argv: list[str], moment: float) -> None:
    with trio.move_on_after(moment):
        async with workspace.exec(argv) as process:
            await process.wait()
            await trio.sleep_forever()


async def be_cancelled(workspace: Workspace, argv: list[str], moment: float) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meet_the_deadline, workspace, argv, 1000)
        await trio.sleep(moment)
        nursery.cancel_scope.cancel()


async def outlast_the_sandbox(workspace: Workspace, argv: list[str], moment: float) -> None:
    await trio.sleep(moment)
    try:
        async with workspace.exec(argv) as process:
            await process.wait()
    except WorkspaceLost:
        pass


ENDS = (leave, meet_the_deadline, be_cancelled, outlast_the_sandbox)


async def open_once(provider: Provider, handle: Handle, mark: str, random: Random, ended: Counter[str]) -> None:
    """Open a workspace, run commands in it that are ended at once, and close it while some still run."""
    async with (
        trio.open_nursery() as outer,
        provider.open(handle, SandboxSpec(env={"MARK": mark})) as workspace,
        trio.open_nursery() as inner,
    ):
        for _ in range(COMMANDS):
            end = random.choice(ENDS)
            nursery = outer if end is outlast_the_sandbox else inner
            nursery.start_soon(end, workspace, ["sh", "-c", script(random)], random.uniform(0, LATEST))
            ended[end.__name__] += 1


def living(handles: list[Handle], mark: str) -> list[int]:
    """Whatever runs as one of the workspaces' users, where they have users of their own."""
    users = {handle.uid for handle in handles} - {os.geteuid()}
    return living_of(*users) + marked(mark)


@pytest.mark.slow
@pytest.mark.scenario("BEY-06")
@pytest.mark.parametrize("count", [160, pytest.param(10_000, marks=pytest.mark.nightly)])
async def test_however_and_whenever_commands_are_ended_none_is_left(tmp_path: Path, count: int) -> None:
    random, mark, ended = Random(count), f"random-{os.getpid()}", Counter[str]()
    provider = LocalProvider(tmp_path, grace=0.01)
    handles = [
        await provider.create(WorkspaceRequest(id=f"{mark}-{n}", run="run", nonce="nonce")) for n in range(WORKSPACES)
    ]
    while ended.total() < count:
        async with trio.open_nursery() as nursery:
            for handle in handles:
                nursery.start_soon(open_once, provider, handle, mark, random, ended)
        assert living(handles, mark) == []
    for handle in handles:
        await provider.destroy(handle)
    print(f"{ended.total()} commands ended, no process left: {dict(ended)}")
