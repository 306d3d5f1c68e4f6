"""A message of a gibibyte at each face of MCP, and a gibibyte of messages that nobody reads: memory stays bounded, and
what comes after is answered.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from runner.core.hosts import NetworkRule, NetworkSpec
from runner.mcp.remote import reach
from tests.cli.test_mcp_gateway import Client, gateway
from tests.mcp.test_endpoint import bridged
from tests.server.test_hosted_mcp import ask, client, hosting, said, state, write
from tests.server.test_mcp import HELLO, READY, hear, raw, say
from tests.support import dockerd
from tests.support.mcp_agent import server
from tests.support.needs import USERS
from tests.support.server import Served
from tests.support.situations import Project, until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
GIBIBYTE = 1 << 30
MIBS = 1 << 20
GROWTH = 100 << 20  # of memory: a message may have 16 MiB, and is there a few times while it is read
PIECE = b"x" * MIBS


@contextmanager
def bounded(pid: int | str, growth: int = GROWTH) -> Iterator[None]:
    """The peak of a process's memory in the block is at most ``growth`` over what it had before."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is what it has
    before = peak(pid)
    yield
    assert peak(pid) - before < growth, f"{(peak(pid) - before) >> 20} MiB more"


def peak(pid: int | str) -> int:
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) << 10


@USERS.mark
@pytest.mark.nightly
@pytest.mark.parametrize("provider", ["local", "docker", "gvisor"])
def test_of_a_hosted_server(provider: str, project: Project) -> None:
    more = {}
    if provider != "local":
        project.env |= {"DOCKER_HOST": dockerd.host(), "WORKSPACE_PROVIDERS": provider}
        more = {"image": dockerd.IMAGE}
    write(project, stdio_bridge={"timeout": "300s"}, **more)
    refused = "-- a message of more than 16 MiB was refused"
    with hosting(project) as served:
        until(lambda: state(served)["state"] == "ready")

        async def main() -> None:
            async with client(served) as mcp, trio.open_nursery() as nursery:
                nursery.start_soon(said, mcp, "big")
                await trio.to_thread.run_sync(
                    until, lambda: refused in project.runner("mcp", "hosted", "logs", "docs").out
                )
                assert await said(mcp, "echo", text="hi") == "hi"
                nursery.cancel_scope.cancel()

        with bounded(served.process.pid):
            trio.run(main)
        assert state(served)["crashes"] == 0


def test_of_a_client_over_http(project: Project) -> None:
    write(project)
    with hosting(project) as served:
        until(lambda: state(served)["state"] == "ready")
        for path in ("/mcp", "/mcp/servers/docs/mcp"):
            for framed in (b"Content-Length: %d" % GIBIBYTE, b"Transfer-Encoding: chunked"):
                with bounded(served.process.pid):
                    assert post(served, path, framed) == 413, (path, framed)
        assert ask(served, "echo", text="hi") == "hi"


def post(served: Served, path: str, framed: bytes) -> int:
    """The status of the answer to a body of a gibibyte, of which we send what it takes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(served.socket))
        fields = (
            b"Host: localhost",
            b"Authorization: Bearer " + served.token.encode(),
            b"Content-Type: application/json",
            b"Accept: application/json, text/event-stream",
            framed,
        )
        head = b"\r\n".join((b"POST %s HTTP/1.1" % path.encode(), *fields, b"", b""))
        chunked = framed.endswith(b"chunked")
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head)
            for _ in range(GIBIBYTE // MIBS):
                connection.sendall(b"%x\r\n%s\r\n" % (MIBS, PIECE) if chunked else PIECE)
        return int(connection.recv(1 << 16).split()[1])


@pytest.mark.nightly
def test_of_a_client_on_standard_input(project: Project) -> None:
    with raw(project) as process:
        say(process, HELLO, READY)
        assert "result" in hear(process)
        with bounded(process.pid):
            assert process.stdin is not None
            for _ in range(GIBIBYTE // MIBS):
                process.stdin.write(PIECE)
            say(process, b"")
            assert hear(process)["error"] == {"code": -32600, "message": "a message is longer than 16 MiB"}
        say(process, {"id": 2, "method": "ping"})
        assert hear(process)["result"] == {}


@pytest.mark.nightly
def test_of_a_client_of_a_gateway(project: Project) -> None:
    project.write(server(), server("other"))
    with gateway(project) as client, bounded(client.process.pid):
        assert client.process.stdin is not None
        for _ in range(GIBIBYTE // MIBS):
            client.process.stdin.write(PIECE)
        client.process.stdin.write(b"\n")
        assert client.call("docs__echo", text="hi") == "hi"
        assert [one["error"]["message"] for one in client.told if "error" in one] == ["a message is longer than 16 MiB"]


async def test_of_an_agent_of_a_run() -> None:
    async with bridged([]) as client:
        for framed in (f"content-length: {GIBIBYTE}", "transfer-encoding: chunked"):
            with bounded("self"):
                assert (await client.post_raw(framed, PIECE, GIBIBYTE // MIBS))[0] == 413
        assert (await client.call("echo", text="hi"))["content"][0]["text"] == "hi"


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
async def test_of_a_server_elsewhere(kind: bytes) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.receive_some(1 << 16)
            await stream.send_all(
                b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind, GIBIBYTE)
            )
            for _ in range(GIBIBYTE // MIBS):
                await stream.send_all(PIECE)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        allowed = NetworkSpec((NetworkRule("127.0.0.1", port, private=True, origin=""),), origin="")
        opened = reach(f"http://127.0.0.1:{port}/mcp", allowed, None, lambda connection: None, environment={})
        async with opened as (stdin, stdout):
            with bounded("self"):
                await stdin.send_all(b'{"jsonrpc":"2.0","id":7,"method":"tools/call"}\n')
                answered = json.loads(await stdout.receive_some(1 << 16))
            assert (answered["id"], answered["error"]["message"]) == (7, "the connection broke")
        nursery.cancel_scope.cancel()


@pytest.mark.nightly
def test_of_what_a_client_does_not_read(project: Project) -> None:
    """Neither what its server tells it nor what it has asked for itself is kept in any number."""
    write(project, stdio_bridge={"timeout": "300s"})
    project.write(server(stdio_bridge={"timeout": "300s"}), server("other"))
    with hosting(project) as served:
        until(lambda: state(served)["state"] == "ready")

        async def flood() -> None:
            async with client(served) as mcp:
                found = await mcp.call_tool("echo", {"text": "hi"})
                assert found.content
                await said(mcp, "flood", count=128, bytes=8 << 20)

        session = begin(served)
        with closing(served.send("GET", "/mcp/servers/docs/mcp", headers={"Mcp-Session-Id": session})):  # and not read
            with bounded(served.process.pid, 2 * GROWTH):
                trio.run(flood)
            assert ask(served, "echo", text="hi") == "hi"
    with gateway(project) as own:
        with bounded(own.process.pid, 2 * GROWTH):
            ask_and_read_nothing(own)
        own.process.send_signal(signal.SIGTERM)
        own.process.wait(60)


def ask_and_read_nothing(own: Client) -> None:
    own.say(id=10, method="tools/call", params={"name": "docs__flood", "arguments": {"count": 128, "bytes": 8 << 20}})
    assert own.process.stdin is not None
    os.set_blocking(own.process.stdin.fileno(), False)
    asked = b"".join(b'{"jsonrpc":"2.0","id":%d,"method":"tools/list"}\n' % number for number in range(20, 50_000))
    sent, quiet = 0, 0
    while sent < len(asked) and quiet < 50:
        try:
            sent, quiet = sent + os.write(own.process.stdin.fileno(), asked[sent:]), 0
        except BlockingIOError:
            time.sleep(0.1)
            quiet += 1
    assert sent < len(asked)


def begin(served: Served) -> str:
    """The id of a new session with the hosted server."""
    answer = served.ask("POST", "/mcp/servers/docs/mcp", {"jsonrpc": "2.0", **HELLO})
    return str(answer.headers["mcp-session-id"])
