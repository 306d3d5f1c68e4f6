"""A container with a guest beside what the docker client does with the same daemon, image and limits.

Run: ``python tests/benchmarks/bench_docker.py``, as root; the daemon is the tests' own. Compared, in turns, for docker
and, where runsc is installed, for gVisor: opening, one command and closing with ``docker run --rm``; a command in an
open workspace with ``docker exec``; standard output, 1 GiB or for gVisor 64 MiB of it, with that of ``docker exec``.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import trio

from runner.core.model import Limits
from runner.ports.provider import SandboxSpec, Workspace, WorkspaceRequest
from runner.providers.docker import RUNC, ContainerRuntime, DockerProvider
from runner.providers.gvisor import RUNSC
from runner.sandbox.docker_api import Engine
from tests.benchmarks.measure import side_by_side
from tests.support import dockerd

OPENINGS, COMMANDS, FLOODS = 15, 50, 3
MIB = 1 << 20
LIMITS = Limits(cpus=2, memory_bytes=1024 * MIB, pids=512)
WALLS = (
    *("--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only", "--tmpfs=/tmp"),
    *("--user=1000:1000", "--cpus=2", "--memory=1g", "--pids-limit=512", "--log-driver=none"),
)


def docker(*words: str) -> None:
    subprocess.run(["docker", "--host", dockerd.host(), *words], check=True, stdout=subprocess.DEVNULL)


async def one(workspace: Workspace) -> None:
    assert (await workspace.run(["/bin/true"])).exit.ok


def flooding(size: int) -> list[str]:
    return ["head", "-c", str(size), "/dev/zero"]


async def flood(workspace: Workspace, size: int) -> None:
    async with workspace.exec(flooding(size)) as process:
        while await process.stdout.receive_some(MIB):
            pass


def flood_by_client(container: str, size: int) -> None:
    words = ["docker", "--host", dockerd.host(), "exec", container, *flooding(size)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        while os.read(child.stdout.fileno(), MIB):
            pass


def show(what: str, ours: float, theirs: float, *, beside: str) -> None:
    print(f"{what} {ours * 1e3:.1f} ms; {beside} {theirs * 1e3:.1f} ms: {ours / theirs:.2f}")


async def main() -> None:
    for runtime, size in ((RUNC, 1024 * MIB), (RUNSC, 64 * MIB)):
        if runtime is RUNC or dockerd.no_gvisor() is None:
            print(f"{runtime.name}:")
            await measure(runtime, size)


async def measure(runtime: ContainerRuntime, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        provider = DockerProvider(Path(folder), Engine(dockerd.host()), runtime=runtime)
        request = WorkspaceRequest(
            id=f"bench-{os.getpid()}", run="run", nonce="nonce", limits=LIMITS, image=dockerd.IMAGE
        )
        handle = await provider.create(request)

        async def whole() -> None:
            async with provider.open(handle, SandboxSpec()) as workspace:
                await one(workspace)

        run = ("run", "--rm", f"--runtime={runtime.program}", *WALLS, dockerd.IMAGE, "/bin/true")
        client = await side_by_side(OPENINGS, whole, lambda: docker(*run))
        show("open, /bin/true, close", *client, beside="docker run --rm")
        async with provider.open(handle, SandboxSpec()) as workspace:
            ours = f"--filter=label=runner.workspace={handle.id}"
            words = ["docker", "--host", dockerd.host(), "ps", "--quiet", ours]
            name = subprocess.check_output(words, text=True).strip()
            command = await side_by_side(COMMANDS, lambda: one(workspace), lambda: docker("exec", name, "/bin/true"))
            show("/bin/true in an open workspace", *command, beside="docker exec")
            stream = await side_by_side(FLOODS, lambda: flood(workspace, size), lambda: flood_by_client(name, size))
            ours, theirs = (size / seconds / 1e6 for seconds in stream)
            print(f"stdout {ours:.0f} MB/s; docker exec {theirs:.0f} MB/s: {ours / theirs:.2f}")
        await provider.destroy(handle)


if __name__ == "__main__":
    if (why := dockerd.missing()) is not None:
        print(f"no docker daemon: {why}")
    else:
        try:
            trio.run(main)
        finally:
            dockerd.leave()
