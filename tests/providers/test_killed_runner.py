"""What is left when the runner itself is killed: no process, and nothing that cannot be removed."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from runner.ports.provider import WorkspaceRequest
from runner.testing.outside import alive, descendants, living_of, marked
from tests.support.needs import ROOT
from tests.support.providers import (
    DOCKER,
    GUESTS,
    GVISOR,
    LOCAL,
    PODMAN,
    PODS,
    ROOT_PODMAN,
    ROOTLESS,
    VOLUMES,
    inhabitants,
    make,
)

# Those whose containers this host can tell by their cgroup, and whose work is not kept where they run.
HERE = [kind for kind in GUESTS if kind not in (PODMAN, ROOT_PODMAN, ROOTLESS, PODS)]

RUNNER = """
import sys, trio
from pathlib import Path
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from tests.support.providers import make

_, kind, home, mark, stopping = sys.argv
SCRIPT = "trap '' TERM; (setsid sleep 4321 >/dev/null 2>&1 &); setsid sleep 4321 & sleep 4321 & echo ready; wait"

async def stubborn(workspace, task_status):
    async with workspace.exec(["sh", "-c", SCRIPT], env={"MARK": mark}) as process:
        await process.stdout.receive_some(100)
        task_status.started()
        await trio.sleep_forever()

async def main():
    provider = make(kind, Path(home), grace=10)
    handle = await provider.create(WorkspaceRequest(id=mark, run="run", nonce="nonce"))
    async with provider.open(handle, SandboxSpec()) as workspace, trio.open_nursery() as nursery:
        for _ in range(5):
            await nursery.start(stubborn, workspace)
        if stopping:
            nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.sleep(0.1)
            print("ready", flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.scenario("BEY-06")
@pytest.mark.parametrize("stopping", ["", "stopping"], ids=["running", "being stopped"])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.nightly) if k == GVISOR else k for k in HERE])
async def test_nothing_outlives_a_killed_runner_and_what_is_left_is_found_and_removed(
    tmp_path: Path, kind: str, stopping: str
) -> None:
    """Twenty processes of five commands ignore TERM, ten of them in sessions of their own, five without a parent."""
    mark = secrets.token_hex(8)
    successor = make(kind, tmp_path, grace=10)
    command = [sys.executable, "-c", RUNNER, kind, str(tmp_path), mark, stopping]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as runner:
        try:
            assert runner.stdout.readline() == b"ready\n"
            (handle,) = await successor.list_owned("nonce")
            family = inhabitants(handle) if kind in (DOCKER, VOLUMES, GVISOR) else descendants(runner.pid)
            assert len(marked(mark)) == (0 if kind == GVISOR else 20)  # this host does not see its commands
            assert len(family) > 20
            assert set(marked(mark)) < set(family)
        finally:
            start = time.monotonic()
            runner.kill()
    while left := [pid for pid in family if alive(pid)] or marked(mark):
        assert time.monotonic() - start < 8, left  # the grace is ten seconds
        await trio.sleep(0.01)
    print(f"nothing lived after {time.monotonic() - start:.3f} s")

    await successor.destroy(handle)
    assert not handle.tree.exists()


OPENERS = """
import os, random, signal, sys, time, trio
from pathlib import Path
from runner.ports.provider import SandboxSpec
from runner.providers.local import LocalProvider

_, home, nonce = sys.argv
provider = LocalProvider(Path(home))
(handle,) = trio.run(provider.list_owned, nonce)

async def opening():
    async with provider.open(handle, SandboxSpec()):
        await trio.sleep_forever()

for _ in range(25):
    runner = os.fork()
    if not runner:
        trio.run(opening)
    while not Path(f"/proc/{runner}/task/{runner}/children").read_text():
        time.sleep(0.0005)
    time.sleep(random.uniform(0, 0.02))
    os.kill(runner, signal.SIGKILL)
    os.waitpid(runner, 0)
"""


@pytest.mark.slow
@pytest.mark.scenario("BEY-06")
@ROOT.mark  # who gives a workspace a user of its own, by whom to find it all
async def test_nothing_outlives_a_runner_that_was_killed_while_it_opened(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    provider = make(LOCAL, tmp_path, grace=10)
    handle = await provider.create(WorkspaceRequest(id=mark, run="run", nonce=mark))
    command = [sys.executable, "-c", OPENERS, str(tmp_path), mark]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    await trio.sleep(1)
    with trio.move_on_after(10):
        while living_of(handle.uid):
            await trio.sleep(0.05)

    left = living_of(handle.uid)
    await provider.destroy(handle)
    assert left == []


@ROOT.mark
def test_the_stage_of_a_killed_runner_is_removed_by_the_next_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    program = "from runner.sandbox.mounts import stage_directory; print(stage_directory(), flush=True); input()"
    start = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": Path(__file__).parents[2]}
    with subprocess.Popen(start, **pipes) as living, subprocess.Popen(start, **pipes) as killed:
        places = [Path(runner.stdout.readline().decode().strip()) for runner in (living, killed)]
        killed.kill()
        killed.wait()
        with subprocess.Popen(start, **pipes) as successor:
            successor.stdout.readline()
            assert [place.exists() for place in places] == [True, False]
            successor.communicate(b"\n")
        living.communicate(b"\n")

    assert not places[0].exists()
