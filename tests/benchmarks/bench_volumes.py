"""Files of a workspace that lies in a volume of the daemon, into it and out of it, beside ``docker cp`` of as many.

Run: ``python tests/benchmarks/bench_volumes.py``, as root; the daemon is the tests' own. Both write to and read from a
file system in memory on this side. Listing is compared with ``find`` inside the container, the reading of what it
says included.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import trio

from runner.core.model import Handle
from runner.ports.provider import SandboxSpec, Workspace, WorkspaceRequest
from runner.sandbox.docker_api import Engine
from runner.sandbox.volume_docker import VolumeDocker
from tests.benchmarks.measure import side_by_side
from tests.benchmarks.sizes import amount, rounds
from tests.support import dockerd

FILES, LISTED, ROUNDS = amount(10_000), amount(100_000), rounds(3)
FILL = """
import os
for i in range({files}):
    os.makedirs(f"{top}/{{i // 100}}", exist_ok=True)
    with open(f"{top}/{{i // 100}}/{{i}}", "wb") as file:
        file.write(os.urandom({size}))
"""


def docker(*words: str) -> str:
    return subprocess.check_output(["docker", "--host", dockerd.host(), *words], text=True, stderr=subprocess.DEVNULL)


def show(what: str, ours: float, theirs: float, *, beside: str) -> None:
    print(f"{what} {ours:.2f} s; {beside} {theirs:.2f} s: {theirs / ours:.2f} of its speed")


async def fill(workspace: Workspace, files: int, size: int, top: str = "made") -> None:
    assert (await workspace.run(["python3", "-c", FILL.format(files=files, size=size, top=top)])).exit.ok


async def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        provider = VolumeDocker(folder / "home", Engine(dockerd.host()))
        handle = await provider.create(WorkspaceRequest(id="bench", run="run", nonce="nonce", image=dockerd.IMAGE))
        try:
            await measure(provider, handle, folder)
        finally:
            await provider.destroy(handle)


async def measure(provider: VolumeDocker, handle: Handle, folder: Path) -> None:
    async with provider.open(handle, SandboxSpec()) as workspace:
        container = docker("ps", "-q", "--filter", f"label=runner.workspace={handle.id}").strip()
        out = folder / "out"
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):  # each anew, or nothing has changed
            await fill(workspace, FILES, 10_240)
            begun = time.perf_counter()
            await workspace.refresh()
            times[0].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            docker("cp", f"{container}:/workspace/made", str(out))
            times[1].append(time.perf_counter() - begun)
            shutil.rmtree(out)
            shutil.rmtree(handle.tree / "made")
            await workspace.run(["rm", "-r", "made"])
            await workspace.refresh()
        show(f"{FILES:,} new files out", *(min(each) for each in times), beside="docker cp")
        await fill(workspace, LISTED, 0, "many")
        await workspace.refresh()
        words = ["find", ".", "-printf", "%m %s %p\\n"]
        listing = await side_by_side(
            ROUNDS, workspace.refresh, lambda: docker("exec", "-w/workspace", container, *words)
        )
        show(f"{LISTED:,} files of which none has changed", *listing, beside="find in the container")
        await workspace.run(["rm", "-r", "many"])

    source = folder / "source"
    subprocess.run(["python3", "-c", FILL.format(files=FILES, size=10_240, top=source)], check=True)
    times = ([], [])
    for number in range(ROUNDS):
        shutil.copytree(source, handle.tree / f"in-{number}")
        begun = time.perf_counter()
        async with provider.open(handle, SandboxSpec()):
            times[0].append(time.perf_counter() - begun)
            container = docker("ps", "-q", "--filter", f"label=runner.workspace={handle.id}").strip()
            begun = time.perf_counter()
            docker("cp", str(source), f"{container}:/workspace/theirs")
            times[1].append(time.perf_counter() - begun)
    show(f"{FILES:,} new files in, with opening", *(min(each) for each in times), beside="docker cp")


if __name__ == "__main__":
    if (why := dockerd.missing()) is not None:
        print(f"no docker daemon: {why}")
    else:
        try:
            trio.run(main)
        finally:
            dockerd.leave()
