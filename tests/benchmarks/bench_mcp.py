"""Calls of a hosted MCP server through the bridge beside the same server attached directly, and over HTTP.

Run: ``python tests/benchmarks/bench_mcp.py``, as root. Target: the bridge takes at most 1 ms (median) more than a
client that has the server to itself, in the same sandbox. Also 100 calls at once, and what they cost in memory.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from runner.mcp.bridge import Bridge, BridgeOptions, Lists
from runner.ports.provider import Process, SandboxSpec, WorkspaceRequest
from runner.providers.local import LocalProvider
from tests.benchmarks.sizes import rounds
from tests.server.test_hosted_mcp import PROGRAM, state, write
from tests.support.server import Connection, Served, serving
from tests.support.situations import Project, until

ROUNDS = rounds(500)
AT_ONCE = 100
SERVER = ["python3", "-c", PROGRAM.read_text()]
CALL = {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "echo", "arguments": {"text": "x" * 100}}}


async def timed(ask: Callable[[int], Awaitable[object]], number: int) -> float:
    begun = time.perf_counter()
    await ask(number)
    return time.perf_counter() - begun


async def direct(process: Process, number: int, rest: bytearray) -> None:
    """One call by a client that has the server to itself."""
    await process.stdin.send_all(json.dumps({**CALL, "id": number}).encode() + b"\n")
    while b"\n" not in rest:
        rest += await process.stdout.receive_some(1 << 16)
    line, _, after = bytes(rest).partition(b"\n")
    rest[:] = after
    assert json.loads(line)["id"] == number


async def bridged(folder: Path) -> None:
    async def approve(found: Lists) -> Lists:
        return found

    provider = LocalProvider(folder / "home")
    handle = await provider.create(WorkspaceRequest(id="bench", run="", nonce="bench"))
    bridge, rest = Bridge(BridgeOptions(), approve, print), bytearray()
    async with (
        provider.open(handle, SandboxSpec()) as workspace,
        workspace.exec(SERVER) as own,
        workspace.exec(SERVER) as shared,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(bridge.attach, shared.stdin, shared.stdout)
        await bridge.ready.wait()
        session = bridge.open_session("bench", {})

        async def through(number: int) -> None:
            async for message in bridge.exchange(session, {**CALL, "id": number}):
                assert message["id"] == number

        times: tuple[list[float], list[float]] = ([], [])
        for number in range(1, ROUNDS + 1):
            times[0].append(await timed(lambda number: direct(own, number, rest), number))
            times[1].append(await timed(through, number))
        plain, more = map(statistics.median, times)
        print(f"a call: direct {plain * 1e3:.2f} ms, through the bridge {more * 1e3:.2f}: ", end="")
        print(f"{(more - plain) * 1e3:+.2f} ms")

        begun = time.perf_counter()
        async with trio.open_nursery() as calls:
            for number in range(AT_ONCE):
                calls.start_soon(through, number)
        print(f"{AT_ONCE} calls at once through the bridge: {(time.perf_counter() - begun) * 1e3:.0f} ms, all answered")
        nursery.cancel_scope.cancel()
    await provider.destroy(handle)


class HttpClient:
    """A session with a hosted server, over one connection that stays open."""

    def __init__(self, served: Served) -> None:
        self._connection = Connection(served.socket, 60)
        self._headers = {
            "Authorization": f"Bearer {served.token}",
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        }
        client = {"name": "bench", "version": "1"}
        params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
        self.say({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})

    def say(self, message: dict[str, Any]) -> Any:
        self._connection.request("POST", "/mcp/servers/docs/mcp", json.dumps(message), self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        if session := response.headers["mcp-session-id"]:
            self._headers["Mcp-Session-Id"] = session
        return json.loads(answer)


def memory(served: Served) -> int:
    """MiB that a server has."""
    return int(Path(f"/proc/{served.process.pid}/status").read_text().partition("VmRSS:")[2].split()[0]) >> 10


async def many(served: Served, count: int) -> None:
    clients = [HttpClient(served) for _ in range(count)]
    before = memory(served)
    begun = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for number, client in enumerate(clients):
            nursery.start_soon(trio.to_thread.run_sync, client.say, {**CALL, "id": number})
    seconds = time.perf_counter() - begun
    print(f"{count} clients at once over HTTP: {seconds * 1e3:.0f} ms, all answered, ", end="")
    print(f"{memory(served) - before} MiB more")


def over_http(folder: Path) -> None:
    project = Project(folder / "project", folder / "served")
    project.folder.mkdir()
    project.home.mkdir()
    write(project)
    with serving(project, "--mcp-servers", str(project.folder / "servers"), "--rate", "1000000") as served:
        until(lambda: state(served)["state"] == "ready")
        client = HttpClient(served)
        times = []
        for number in range(ROUNDS):
            begun = time.perf_counter()
            client.say({**CALL, "id": number})
            times.append(time.perf_counter() - begun)
        print(f"a call over HTTP: {statistics.median(times) * 1e3:.2f} ms")
        trio.run(many, served, AT_ONCE)
    for row in project.json("workspace", "list"):
        project.runner("workspace", "destroy", "--discard", row["id"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        trio.run(bridged, Path(name))
        over_http(Path(name))
