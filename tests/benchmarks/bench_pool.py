"""A workspace from a warm pool: from the wish to the end of the first command inside, beside doing the same cold.

Run: ``python tests/benchmarks/bench_pool.py [HANDOVERS]``, as root; the daemon is the tests' own. Keeper and claimer
are one process, and use the socket as two would. Each hand-over begins when the pool is full again, so that no
container is being started meanwhile. Compared: a workspace that is made and opened cold, and ``docker run --rm``, 15
of each.
"""

from __future__ import annotations

import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import trio

from runner.core.model import Handle, Limits, SlotKey, SlotState
from runner.core.settings import Settings
from runner.lifecycle.pool import name_of
from runner.ops.pool.handoff import warm
from runner.ops.pool.pool import open_pool
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.ports.store import PoolRow
from runner.providers.docker import DockerProvider
from runner.sandbox.docker_api import Engine
from runner.store.sqlite import open_store
from tests.benchmarks.sizes import amount
from tests.support import dockerd

HANDOVERS, OTHERS, SIZE = amount(200), 15, 2
LIMITS = Limits(cpus=2, memory_bytes=1 << 30, pids=512)
OPENING = SandboxSpec(protected=(".env", "deploy/key"))
WRITE = ["/bin/sh", "-c", "! touch .env deploy/key 2> /dev/null"]


def shown(what: str, times: list[float]) -> str:
    ordered = sorted(times)
    median, late = statistics.median(ordered), ordered[min(len(ordered) - 1, round(len(ordered) * 0.99))]
    return f"{what}: median {median * 1e3:.1f} ms, p99 {late * 1e3:.1f}, best {ordered[0] * 1e3:.1f}, n = {len(times)}"


def fill(handle: Handle) -> None:
    (handle.tree / ".env").write_text("secret")
    (handle.tree / "deploy").mkdir()
    (handle.tree / "deploy" / "key").write_text("secret")


async def use(provider: DockerProvider, handle: Handle) -> float:
    """When the first command had ended; a second one finds that both paths are protected."""
    async with provider.open(handle, OPENING) as workspace:
        await workspace.run(["/bin/true"])
        ended = time.perf_counter()
        result = await workspace.run(WRITE)
        assert result.exit.ok, result
    return ended


async def measure_handoff(provider: DockerProvider, key: SlotKey, home: Path) -> float:
    start = time.perf_counter()
    request = WorkspaceRequest(
        id=f"bench-{secrets.token_hex(4)}", run="run", nonce="nonce", limits=LIMITS, image=key.image
    )
    handle = await warm(home, provider, key, request)
    assert isinstance(handle, Handle), handle
    fill(handle)
    took = await use(provider, handle) - start
    await provider.destroy(handle)
    return took


async def cold(provider: DockerProvider, image: str) -> float:
    start = time.perf_counter()
    request = WorkspaceRequest(id=f"bench-{secrets.token_hex(4)}", run="run", nonce="nonce", limits=LIMITS, image=image)
    handle = await provider.create(request)
    fill(handle)
    took = await use(provider, handle) - start
    await provider.destroy(handle)
    return took


def run_by_client(folder: Path) -> float:
    mounts = [f"--volume={folder}:/workspace", f"--volume={folder}/.env:/workspace/.env:ro"]
    words = ["docker", "--host", dockerd.host(), "run", "--rm", "--network=none", "--cpus=2", "--memory=1g", *mounts]
    start = time.perf_counter()
    subprocess.run([*words, dockerd.IMAGE, "/bin/true"], check=True)
    return time.perf_counter() - start


async def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        settings = Settings.from_env({"RUNNER_HOME": folder, "DOCKER_HOST": dockerd.host()})
        provider, key = (
            DockerProvider(home, Engine(dockerd.host())),
            SlotKey(provider="docker", image=dockerd.image_id(), limits=LIMITS),
        )
        times: list[float] = []
        async with open_store(home / "state.db", now=lambda: time.time_ns() // 1000, entropy=os.urandom) as store:
            from runner.ops.runs.dependencies import dependencies_of

            env = WorkspaceEnv(settings=settings, store=store, deps=dependencies_of(settings, store))
            async with open_pool(env, [PoolRow(name_of(key), key, SIZE)], print):
                while len(times) < count:
                    while [slot.state for slot in await store.slots()] != [SlotState.READY] * SIZE:
                        await trio.sleep(0.02)
                    times.append(await measure_handoff(provider, key, home))
        print(shown("warm, from the wish to the first command's end", times))
        print(shown("made and opened cold", [await cold(provider, str(key.image)) for _ in range(OTHERS)]))
        tree = home / "tree"
        tree.mkdir()
        (tree / ".env").touch()
        print(shown("docker run --rm", [run_by_client(tree) for _ in range(OTHERS)]))


if __name__ == "__main__":
    if (why := dockerd.missing()) is not None:
        print(f"no docker daemon: {why}")
    else:
        try:
            trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else HANDOVERS)
        finally:
            dockerd.leave()
