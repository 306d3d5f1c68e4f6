"""What is left when the runner itself is killed: no process, and nothing that ``destroy`` cannot remove."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from runner.ports.provider import Provider
from runner.providers.local import Local
from runner.providers.process import OnHost

RUNNER = """
import sys, trio
from pathlib import Path
from runner.ports.provider import Opening, WorkspaceRequest
from runner.providers.{module} import {name}

async def main():
    provider = {name}(Path(sys.argv[1]))
    handle = await provider.create(WorkspaceRequest("left-{module}", "run", "nonce"))
    async with provider.open(handle, Opening(protected={protected})) as workspace:
        script = "(setsid sleep 4321 >/dev/null 2>&1 &) ; echo ready; exec sleep 4321"
        async with workspace.exec(["sh", "-c", script]) as process:
            await process.stdout.receive_some(100)
            print("ready", flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.parametrize(("provider", "protected"), [(Local, ("AGENTS.md",)), (OnHost, ())], ids=["local", "process"])
async def test_a_killed_runner_s_workspace_is_found_and_removed_with_all_that_runs_in_it(
    tmp_path: Path, provider: type[Local] | type[OnHost], protected: tuple[str, ...]
) -> None:
    module = provider.__module__.rpartition(".")[2]
    program = RUNNER.format(module=module, name=provider.__name__, protected=protected)
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline() == b"ready\n"
        runner.send_signal(signal.SIGKILL)

    successor: Provider = provider(tmp_path)
    (left,) = await successor.list_owned("nonce")
    await successor.destroy(left)

    assert not left.tree.exists()
    with trio.fail_after(5):
        while _sleepers():
            await trio.sleep(0.01)


def _sleepers() -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x004321\x00":
                found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root stages mounts")
def test_the_stage_of_a_killed_runner_is_removed_by_the_next_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    program = "from runner.providers._mounts import stage; print(stage(), flush=True); input()"
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
