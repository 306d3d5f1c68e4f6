"""Calls of tools at the server beside the exec channel itself, and its cheapest answer beside a bare route.

Run: ``python tests/benchmarks/bench_server.py``, as root. Targets: a warm ``bash true`` or ``read`` takes at most 3 ms
(median) more than the same command in an open workspace; GET of a workspace-config at least 0.8 times the requests a
second of a bare Starlette route that answers the same by the same HTTP server.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import trio

from runner.ports.provider import SandboxSpec, Workspace, WorkspaceRequest
from runner.providers.local import LocalProvider
from tests.benchmarks.measure import side_by_side
from tests.benchmarks.sizes import rounds
from tests.support.server import Connection, Served, serving
from tests.support.situations import Project

ROUNDS = rounds(100)
REQUESTS = rounds(100)
CONFIG = "/api/v1/agent-types/worker/workspace-config"
BARE = """
import sys, trio
from hypercorn.config import Config
from hypercorn.trio import serve
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

path, answer = sys.argv[1], sys.argv[2].encode()
async def get(request):
    if request.method == "POST":
        await request.body()
    return Response(answer, media_type="application/json")

config = Config()
config.bind = [f"unix:{path}"]
config.accesslog = config.errorlog = None
config.keep_alive_timeout = 3600
trio.run(serve, Starlette(routes=[Route("/config", get, methods=["GET", "POST"])]), config)
"""


class Client:
    """One connection that stays open."""

    def __init__(self, socket: Path, token: str = "") -> None:
        self._connection = Connection(socket, 60)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: object = None) -> bytes:
        raw = None if body is None else json.dumps(body)
        self._connection.request(method, path, raw, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        assert response.status in (200, 201), answer
        return answer


@contextlib.contextmanager
def bare(folder: Path, answer: bytes) -> Iterator[Client]:
    socket = folder / "bare.sock"
    with subprocess.Popen([sys.executable, "-c", BARE, str(socket), answer.decode()]) as process:
        while not socket.exists():
            time.sleep(0.01)
        try:
            yield Client(socket)
        finally:
            process.terminate()


async def tools(client: Client, other: Client, workspace: Workspace) -> None:
    async def bare_route() -> None:
        other.ask("POST", "/config", {})

    id = json.loads(client.ask("POST", "/api/v1/workspaces", {"provider": "local"}))["id"]
    calls: dict[str, tuple[dict[str, str], list[str]]] = {
        "bash": ({"command": "true"}, ["bash", "-c", "true"]),
        "read": ({"file_path": "file"}, ["cat", "file"]),
    }
    client.ask("POST", f"/api/v1/workspaces/{id}/tools/write", {"file_path": "file", "content": "text\n" * 100})
    await workspace.run(["sh", "-c", "seq 100 >file"])
    for tool, (arguments, argv) in calls.items():

        async def raw(argv: list[str] = argv) -> None:
            assert (await workspace.run(argv)).exit.ok

        def ours(tool: str = tool, arguments: dict[str, str] = arguments) -> None:
            client.ask("POST", f"/api/v1/workspaces/{id}/tools/{tool}", arguments)

        channel, served = await side_by_side(ROUNDS, raw, ours)
        route, _ = await side_by_side(ROUNDS, bare_route, ours)
        print(f"{tool}: {served * 1e3:.1f} ms, the exec channel {channel * 1e3:.1f} ms: ", end="")
        print(f"{(served - channel) * 1e3:.1f} ms more, of which a bare route takes {route * 1e3:.1f}")


def rate(ask: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        ask()
    return count / (time.perf_counter() - start)


def config(connect: Callable[[], Client], other: Client) -> None:
    rates = []
    for _ in range(10):
        client = connect()  # the server keeps none that rests
        both = (lambda client=client: client.ask("GET", CONFIG)), (lambda: other.ask("GET", "/config"))
        rates.append([rate(ask, REQUESTS) for ask in both])
    ours, theirs = (statistics.median(column) for column in zip(*rates, strict=True))
    print(f"GET workspace-config: {ours:.0f} a second, a bare route {theirs:.0f}: {ours / theirs:.2f}")


async def main(served: Served, folder: Path) -> None:
    client = Client(served.socket, served.token)
    client.ask("POST", "/api/v1/agent-types", {"name": "worker"})
    provider = LocalProvider(folder / "raw")
    handle = await provider.create(WorkspaceRequest(id="bench", run="run", nonce="nonce"))
    with bare(folder, client.ask("GET", CONFIG)) as other:
        async with provider.open(handle, SandboxSpec()) as workspace:
            await tools(client, other, workspace)
        config(lambda: Client(served.socket, served.token), other)
    await provider.destroy(handle)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chmod(folder, 0o711)
        project = Project(folder, folder / "home")
        project.home.mkdir()
        with serving(project, "--rate", "1000000") as served:
            trio.run(main, served, folder)
