"""Commands through a guest, beside a plain spawn on the host and a plain pipe.

Run: ``python tests/benchmarks/bench_guest.py``, as root and as an ordinary user. Targets: a trivial command in an
open workspace at most 3 times a plain spawn (median), 1,000 at once complete, output at least 0.5 of a pipe, an idle
workspace under 1 MiB in the runner; 100 obedient commands gone in 0.5 s, stubborn ones in grace and 1 s.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import trio

from runner.ports.provider import Provider, SandboxSpec, Workspace, WorkspaceRequest
from runner.providers.local import LocalProvider
from runner.providers.process import ProcessProvider
from tests.benchmarks.measure import side_by_side
from tests.benchmarks.sizes import rounds

ROUNDS = rounds(400)
MIB = 1 << 20
FLOOD = ["head", "-c", str(1024 * MIB), "/dev/zero"]
GRACE = 1.0


def plain() -> None:
    subprocess.run(["/bin/true"], stdin=subprocess.DEVNULL, capture_output=True, check=True)


async def one(workspace: Workspace) -> None:
    assert (await workspace.run(["/bin/true"])).exit.ok


async def many(workspace: Workspace, count: int) -> float:
    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(one, workspace)
    return time.perf_counter() - start


async def flood(workspace: Workspace) -> float:
    """MB/s of standard output."""
    start, size = time.perf_counter(), 0
    async with workspace.exec(FLOOD) as process:
        while chunk := await process.stdout.receive_some(MIB):
            size += len(chunk)
    return size / (time.perf_counter() - start) / 1e6


async def pipe() -> float:
    start, size = time.perf_counter(), 0
    with subprocess.Popen(FLOOD, stdout=subprocess.PIPE) as child:
        async with trio.lowlevel.FdStream(os.dup(child.stdout.fileno())) as stream:
            while chunk := await stream.receive_some(MIB):
                size += len(chunk)
    return size / (time.perf_counter() - start) / 1e6


async def stop(workspace: Workspace, script: str, count: int) -> float:
    """Seconds from cancelling ``count`` running commands until all are gone."""
    running = 0

    async def command() -> None:
        nonlocal running
        async with workspace.exec(["sh", "-c", script]) as process:
            await process.stdout.receive_some(10)
            running += 1
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(command)
        while running < count:
            await trio.sleep(0.01)
        start = time.perf_counter()
        nursery.cancel_scope.cancel()
    return time.perf_counter() - start


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def idle(provider: Provider, count: int) -> float:
    """MiB of the runner for each open workspace in which nothing happens."""
    handles = [await provider.create(WorkspaceRequest(id=f"idle{n}", run="run", nonce="nonce")) for n in range(count)]
    async with AsyncExitStack() as stack:
        for handle in handles[:3]:
            await stack.enter_async_context(provider.open(handle, SandboxSpec()))
        before = resident()
        for handle in handles[3:]:
            await one(await stack.enter_async_context(provider.open(handle, SandboxSpec())))
        used = resident() - before
    for handle in handles:
        await provider.destroy(handle)
    return used / (count - 3) / MIB


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for provider in (LocalProvider(Path(folder), grace=GRACE), ProcessProvider(Path(folder), grace=GRACE)):
            handle = await provider.create(WorkspaceRequest(id="bench", run="run", nonce="nonce"))
            async with provider.open(handle, SandboxSpec()) as workspace:
                ours, host = await side_by_side(ROUNDS, lambda w=workspace: one(w), plain)
                print(f"{provider.name}: /bin/true {ours * 1e3:.2f} ms; ", end="")
                print(f"plain spawn {host * 1e3:.2f} ms: {ours / host:.2f}")
                print(f"  100 at once in {await many(workspace, 100):.2f} s, ", end="")
                print(f"1,000 in {await many(workspace, 1000):.2f} s")
                rates = [(await flood(workspace), await pipe()) for _ in range(5)]
                ours, host = (statistics.median(rate) for rate in zip(*rates, strict=True))
                print(f"  stdout {ours:.0f} MB/s, a pipe {host:.0f} MB/s: {ours / host:.2f}")
                print(f"  cancel of 100: obedient {await stop(workspace, 'echo; exec sleep 60', 100):.2f} s, ", end="")
                stubborn = await stop(workspace, "trap '' TERM; echo; sleep 60", 100)
                print(f"ignoring TERM grace and {stubborn - GRACE:.2f} s")
            await provider.destroy(handle)
            print(f"  idle workspace: {await idle(provider, 103):.3f} MiB")


if __name__ == "__main__":
    trio.run(main)
