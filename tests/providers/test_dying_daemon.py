"""Whole runs in containers whose daemon dies under them, for good or for a while, and many workspaces at once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trio

from runner.core.model import Fence
from runner.core.settings import Settings
from runner.engine.recover import recover
from runner.engine.stopping import RunCancellation
from runner.events import events as ev
from runner.events.record import RunRecord
from runner.runtime.context import RunPaths
from runner.testing.place import MIB
from tests.support import dockerd
from tests.support.dockerd import IMAGE, Daemon
from tests.support.situations import Project, leftovers
from tests.support.state_machine import Machine

pytestmark = [
    pytest.mark.nightly,
    # The client leaves the socket of a connection that breaks to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

STEPS = ("provision", "setup", "agent", "post_hook", "scan", "snapshot", "save", "teardown", "release")


@pytest.fixture(scope="module")
def mortal() -> Iterator[Daemon]:
    with dockerd.mortal("dying") as daemon:
        yield daemon


class Contained(Machine):
    """Runs of one project in containers of a daemon that may die."""

    def __init__(self, project: Project, daemon: Daemon) -> None:
        super().__init__(project)
        env = {"RUNNER_HOME": str(project.home / "state"), "PATH": "/usr/bin:/bin", "DOCKER_HOST": daemon.host}
        self.settings = Settings.from_env(env)

    async def recover(self, record: RunRecord) -> None:
        async def append(run: str, events: Sequence[ev.Event], fence: Fence | None) -> Sequence[ev.Recorded]:
            return await self.store.append(run, events, fence=fence)

        paths = RunPaths(self.settings.home, record.id)
        recovered = await recover(record, "no plan", paths=paths, deps=self.deps, append=append)
        assert recovered.left == ()


@pytest.mark.parametrize("comes_back", [False, True], ids=["for good", "for a while"])
@pytest.mark.parametrize("during", STEPS)
async def test_a_daemon_that_is_killed_in_any_step_leaves_nothing_behind(
    mortal: Daemon, project: Project, during: str, comes_back: bool
) -> None:
    project.script(
        "echo work > made; sleep 3",
        provider="docker",
        workspace=f'base_image: {IMAGE}\nsetup_commands: ["sleep 1"]',
        agent="post_hooks: [[sleep, '1']]",
        run="snapshot: {message: work}\ntimeout: 60s",
    )
    machine = Contained(project, mortal)
    back: list[threading.Thread] = []

    def watch(recorded: ev.Recorded, control: RunCancellation) -> None:
        if recorded.event == ev.StepStarted(during):
            mortal.kill()
            if comes_back:
                back.append(threading.Thread(target=mortal.start))
                back[0].start()

    start = time.monotonic()
    record = await machine.run(watch)
    assert time.monotonic() - start < 60 + 30
    for thread in back:
        thread.join()
    if not comes_back:
        await trio.to_thread.run_sync(mortal.start)

    assert record.exit_code in (0, 4)
    assert record.steps[during].started is not None
    assert not record.unfinished()
    await machine.recover(record)
    with mortal.client() as client:
        assert client.containers(all=True) == []
    assert leftovers(project.home) == []


MANY = """
import json, os, secrets, sys, trio
from pathlib import Path
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers.docker import DockerProvider
from runner.sandbox.docker_api import Engine

MANY, FEW = 50, 2
host, image, home = sys.argv[1:]
provider = DockerProvider(Path(home), Engine(host), grace=0.2)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def make():
    name = f"many-{secrets.token_hex(6)}"
    return await provider.create(WorkspaceRequest(id=name, run="run-1", nonce="nonce", image=image))

async def use_all(handles):
    peaks, waiting = [], len(handles)
    together = trio.Event()

    async def use(handle):
        nonlocal waiting
        async with provider.open(handle, SandboxSpec()) as workspace:
            waiting -= 1
            if not waiting:
                together.set()
            await together.wait()
            done = await workspace.run(["sh", "-c", f"echo {handle.id} > mine; cat mine; exit 7"])
            assert (done.exit.code, done.stdout.decode().strip()) == (7, handle.id), done
            peaks.append(resident())

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            for handle in handles:
                nursery.start_soon(use, handle)
    return max(peaks)

async def main():
    handles = [await make() for _ in range(FEW + MANY)]
    before = await use_all(handles[:FEW])
    peak = await use_all(handles[FEW:])
    for handle in handles:
        await provider.destroy(handle)
    left = [handle.id for handle in await provider.list_owned("nonce")]
    print(json.dumps({"each": (peak - before) / MANY, "ids": [handle.id for handle in handles], "left": left}))

trio.run(main)
"""


def test_fifty_workspaces_at_once_are_each_whole_and_small(tmp_path: Path) -> None:
    """What one costs the runner is the memory that it has more than with two of them."""
    words = [sys.executable, "-c", MANY, dockerd.host(), IMAGE, str(tmp_path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[2])
    told = json.loads(done.stdout)
    print(f"50 workspaces at once: {told['each'] / 1024:.0f} KiB of the runner's memory each")

    assert told["each"] < MIB
    assert told["left"] == []
    assert [found for id in told["ids"] for found in dockerd.containers(id)] == []
    assert not [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "/many-" in line]
