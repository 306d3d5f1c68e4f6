"""Connections of a server: of clients that read nothing, that leave, that are too many, and that speak otherwise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypercorn.config import Config

from runner.server import connections
from runner.server.connections import serve_connections
from tests.support.server import Served, serving
from tests.support.situations import Project, until


class Endless:
    """An application that streams until its client is gone."""

    def __init__(self) -> None:
        self.gone = trio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            while not self.gone.is_set():
                await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
                await trio.lowlevel.checkpoint()


def listen(kind: str, tmp_path: Path) -> socket.socket:
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        return listener
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("ends", [False, True], ids=["while the server runs", "when the server ends"])
async def test_a_client_that_never_reads_is_cut_off(
    kind: str, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stopping, app = Config(), trio.Event(), Endless()
    config.graceful_timeout = 0.1
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 3600.0 if ends else 0.1)
    listener = listen(kind, tmp_path)
    with closing(listener), trio.fail_after(60), closing(socket.socket(listener.family)) as client:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_connections, app, config, listener, stopping=stopping))
            client.connect(listener.getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if ends:
                await trio.lowlevel.wait_readable(client)
            else:
                await app.gone.wait()
            stopping.set()


async def test_an_answer_that_is_on_its_way_is_not_cut_off_by_what_its_client_sends_next(tmp_path: Path) -> None:
    """The rest of a body that nobody waits for may end the connection, not what was said before."""
    config, stopping, size = Config(), trio.Event(), 8 << 20
    config.graceful_timeout = 0.1

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * size})

    listener = listen("unix", tmp_path)
    with closing(listener), trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_connections, app, config, listener, stopping=stopping))
            async with await trio.open_unix_socket(str(tmp_path / "s")) as client:
                await client.send_all(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
                await trio.testing.wait_all_tasks_blocked(0.01)
                await client.send_all(b"no length\r\n")
                await trio.testing.wait_all_tasks_blocked(0.01)
                got = b"".join([piece async for piece in client])
            stopping.set()

    assert len(got.partition(b"\r\n\r\n")[2]) == size


def connect(served: Served, stack: ExitStack) -> socket.socket:
    client = stack.enter_context(socket.socket(socket.AF_UNIX))
    client.settimeout(20)
    client.connect(str(served.socket))
    return client


def test_a_connection_ends_when_its_client_leaves(served: Served) -> None:
    """It would count against the server's open files for as long as connections are kept between requests."""

    def open_files() -> int:
        return len(os.listdir(f"/proc/{served.process.pid}/fd"))

    served.ask("GET", "/healthz")
    before = open_files()
    with ExitStack() as stack:
        for ends in (False, True) * 10:
            client = connect(served, stack)
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
            if ends:
                client.shutdown(socket.SHUT_WR)
            else:
                client.close()
        until(lambda: open_files() <= before, seconds=30)


async def test_clients_that_have_left_take_no_place_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stopping = Config(), trio.Event()
    config.keep_alive_timeout, config.graceful_timeout = 3600, 0.1
    monkeypatch.setattr(connections, "MOST", 3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def ask(stream: trio.SocketStream) -> bytes:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return bytes(await stream.receive_some())

    listener = listen("unix", tmp_path)
    with closing(listener), trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_connections, app, config, listener, stopping=stopping))
            async with await trio.open_unix_socket(str(tmp_path / "s")) as kept:
                assert (await ask(kept)).startswith(b"HTTP/1.1 204 ")
                for _ in range(5):
                    async with await trio.open_unix_socket(str(tmp_path / "s")) as leaving:
                        assert (await ask(leaving)).startswith(b"HTTP/1.1 204 ")
                        await trio.testing.wait_all_tasks_blocked(0.01)
                    await trio.testing.wait_all_tasks_blocked(0.01)
                assert (await ask(kept)).startswith(b"HTTP/1.1 204 ")
            stopping.set()


async def test_of_too_many_connections_those_that_have_rested_longest_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are answered stay; where all are, a new one is told so and closed."""
    config, stopping, app = Config(), trio.Event(), Endless()
    config.keep_alive_timeout, config.graceful_timeout = 3600, 0.1
    monkeypatch.setattr(connections, "MOST", 3)
    listener = listen("unix", tmp_path)
    with closing(listener), trio.fail_after(60), ExitStack() as stack:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_connections, app, config, listener, stopping=stopping))

            async def connected() -> trio.SocketStream:
                stream = await trio.open_unix_socket(str(tmp_path / "s"))
                stack.callback(stream.socket.close)
                return stream

            async def ask(stream: trio.SocketStream) -> bytes:
                await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return bytes(await stream.receive_some(12))

            answered = await connected()
            assert await ask(answered) == b"HTTP/1.1 200"
            resting = [await connected() for _ in range(10)]
            for stream in resting[:8]:
                assert await stream.receive_some() == b""
            for stream in resting[8:]:
                assert await ask(stream) == b"HTTP/1.1 200"
            refused = b"".join([piece async for piece in await connected()])
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert len(refused.partition(b"\r\n\r\n")[2]) == int(refused.partition(b"content-length: ")[2][:2])
            assert await answered.receive_some(1) != b""
            stopping.set()


async def test_connections_that_rest_too_long_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a request sooner than one between two; one that is answered stays, until the server ends."""
    config, stopping, endless = Config(), trio.Event(), Endless()
    config.keep_alive_timeout, config.graceful_timeout = 0.1, 0.1
    monkeypatch.setattr(connections, "KEPT_SECONDS", 1.1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/endless":
            await endless(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def connected(path: str = "") -> trio.SocketStream:
        stream = await trio.open_unix_socket(str(tmp_path / "s"))
        if path:
            await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert await stream.receive_some(12) == b"HTTP/1.1 200"
        return stream

    listener = listen("unix", tmp_path)
    with closing(listener), trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_connections, app, config, listener, stopping=stopping))
            began = trio.current_time()
            async with (
                await connected("/endless") as answered,
                await connected("/") as kept,
                await connected() as silent,
            ):
                times = []
                for stream in (silent, kept):
                    _ = [piece async for piece in stream]
                    times.append(trio.current_time() - began)
                assert await answered.receive_some(1) != b""
                async with await connected("/") as last:
                    stopping.set()
                    _ = [piece async for piece in last]

    assert times[0] < 1.1 <= times[1]


def test_http_1_is_all_that_is_spoken(served: Served) -> None:
    """By HTTP/2 without TLS a client would pass by what a proxy in front has judged, and by our own limits."""
    get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    asked = {
        "an upgrade": get + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
        "from the first byte": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
        "a websocket": get + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGVzdA==\r\n"
        b"Sec-WebSocket-Version: 13\r\n\r\n",
        "something else": b"\x16\x03\x01\0\xff\0\0\r\n\r\n",
    }
    found: dict[str, bytes] = {}
    with ExitStack() as stack:
        for name, raw in asked.items():
            client = connect(served, stack)
            client.sendall(raw)
            found[name] = b""
            with suppress(ConnectionResetError):
                found[name] = client.recv(12)

    assert found == {
        "an upgrade": b"HTTP/1.1 200",
        "from the first byte": b"HTTP/1.1 403",
        "a websocket": b"HTTP/1.1 403",
        "something else": b"HTTP/1.1 400",
    }


MANY = """
import resource, socket, sys
port, count, sent = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, count + 100))
held = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(count)]
for one in held:
    try:
        one.sendall(sent)
    except OSError:
        pass  # it had rested longest
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sent", ["", "GET /healthz HTTP/1.1\r\n", "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=len
)
@pytest.mark.parametrize("files", [None, 1024, 64])
def test_ten_thousand_connections_at_once_keep_nobody_out(project: Project, sent: str, files: int | None) -> None:
    """Their number and memory are bounded, whatever they send; whoever comes then is answered. A server that may open
    few files says so, and stays.
    """
    says: tuple[str, ...] = ()
    most = connections.MOST + 100
    if files is not None:
        project.within = ("prlimit", f"--nofile={files}")
        says, most = ("server.few-connections",), files
    with serving(project, "--listen", "127.0.0.1:0", says=says) as served, ExitStack() as stack:
        process = Path(f"/proc/{served.process.pid}")

        def memory() -> int:
            [line] = [line for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS")]
            return int(line.split()[1]) >> 10

        before = memory()
        words = [sys.executable, "-c", MANY, served.url.rpartition(":")[2], "5000", sent]
        crowds = [
            stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(2)
        ]
        for crowd in crowds:
            assert crowd.stdout is not None
            assert crowd.stdout.readline() == b"\n"
        assert [served.ask("GET", path).status for path in ("/healthz", "/readyz", "/api/v1/workspaces")] == [200] * 3
        assert len(os.listdir(process / "fd")) < most
        assert memory() - before < 300
        for crowd in crowds:
            crowd.communicate()
        until(lambda: len(os.listdir(process / "fd")) < 100, seconds=60)
