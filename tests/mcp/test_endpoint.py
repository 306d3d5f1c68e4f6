"""The bridge of an agent's MCP server, between a real server and clients on connections as workspaces relay them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import trio

from runner.core.model import McpVerdict
from runner.core.nurseries import open_services
from runner.core.redact import Redactor
from runner.mcp.endpoint import AgentBridge, open_bridge
from runner.ports.mcp import MAX_REPORTED, Lists, McpCall, McpGrant
from tests.support.mcp_agent import PROGRAM


class Client:
    """A client on connections of its own, with no library: what it sends is what is tested."""

    def __init__(self, bridge: AgentBridge, services: trio.Nursery) -> None:
        self._bridge, self._services = bridge, services
        self._session = ""
        self._id = 0
        self._idle: list[trio.StapledStream[Any, Any]] = []

    async def _connection(self) -> Any:
        if self._idle:
            return self._idle.pop()
        ours, theirs = trio.testing.memory_stream_pair()
        self._services.start_soon(self._serve, theirs)
        return ours

    async def _serve(self, stream: Any) -> None:
        try:
            await self._bridge.serve(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            await trio.aclose_forcefully(stream)

    async def post(self, message: dict[str, Any], **headers: str) -> tuple[int, Any]:
        body = json.dumps(message).encode()
        named = {"host": "127.0.0.1", "content-length": str(len(body)), **headers}
        named |= {"mcp-session-id": self._session} if self._session else {}
        head = "POST /mcp HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in named.items()) + "\r\n"
        stream = await self._connection()
        try:
            await stream.send_all(head.encode() + body)
            status, found, text = await _answer(stream)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        self._idle.append(stream)
        self._session = found.get("mcp-session-id", self._session)
        if found.get("content-type", "").startswith("text/event-stream"):
            text = [line[5:].encode() for line in text.decode().splitlines() if line.startswith("data:")][-1]
        return status, json.loads(text) if text else None

    async def post_raw(self, framed: str, piece: bytes, count: int) -> tuple[int, dict[str, str], bytes]:
        """Send ``count`` pieces, of which the other end takes what it likes."""
        ours, theirs = trio.testing.lockstep_stream_pair()
        self._services.start_soon(self._serve, theirs)
        head = f"POST /mcp HTTP/1.1\r\nhost: 127.0.0.1\r\nmcp-session-id: {self._session}\r\n{framed}\r\n\r\n"
        chunk = b"%x\r\n%s\r\n" % (len(piece), piece) if framed.endswith("chunked") else piece

        async def send() -> None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await ours.send_all(head.encode())
                for _ in range(count):
                    await ours.send_all(chunk)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            answer = await _answer(ours)
            nursery.cancel_scope.cancel()
        await trio.aclose_forcefully(ours)
        return answer

    async def begin(self) -> None:
        params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        status, _ = await self.post({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})
        assert status == 200
        await self.post({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def call(self, tool: str, **arguments: Any) -> Any:
        self._id += 1
        params = {"name": tool, "arguments": arguments}
        id = self._id
        _, answer = await self.post({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
        assert answer["id"] == id
        return answer.get("result", answer.get("error"))


async def _answer(stream: Any) -> tuple[int, dict[str, str], bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive_some(1 << 16)
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "content-length" in found:
        while len(rest) < int(found["content-length"]):
            rest += await stream.receive_some(1 << 16)
        return int(first.split()[1]), found, rest
    while not rest.endswith(b"0\r\n\r\n"):
        rest += await stream.receive_some(1 << 16)
    return int(first.split()[1]), found, rest


@asynccontextmanager
async def bridged(
    told: list[McpCall], said: list[str] | None = None, max_reported: int = MAX_REPORTED, **grant: Any
) -> AsyncIterator[Client]:
    async def approve(found: Lists) -> Lists:
        await trio.lowlevel.checkpoint()
        return found

    grant.setdefault("secrets", Redactor())
    tell = (said if said is not None else []).append
    start = partial(
        trio.lowlevel.open_process, [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process = await start()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        opened = open_bridge(McpGrant(**grant), approve, tell, told.append, max_reported=max_reported)
        async with opened as bridge, open_services() as services:
            services.start_soon(bridge.attach, process.stdin, process.stdout)
            await bridge.wait_ready()
            client = Client(bridge, services)
            await client.begin()
            yield client
    finally:
        process.kill()
        await process.wait()


async def test_what_an_agent_may_call_is_judged_here() -> None:
    told: list[McpCall] = []
    async with bridged(told, tools=("echo", "lie"), max_calls=3) as client:
        for tool in ("echo", "deaf", "lie", "echo", "echo"):
            await client.call(tool, text="x")
        assert (await client.post({"jsonrpc": "2.0", "id": 9, "method": "ping"}))[1]["result"] == {}
    assert [(one.tool, one.verdict) for one in told] == [
        ("echo", McpVerdict.ANSWERED),
        ("deaf", McpVerdict.NOT_ALLOWED),
        ("lie", McpVerdict.ANSWERED),
        ("echo", McpVerdict.ANSWERED),
        ("echo", McpVerdict.BUDGET),
    ]


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"origin": "http://evil.example"}, 403), ({"host": "evil.example"}, 403), ({"mcp-session-id": "x"}, 404)],
    ids=["a page", "another name", "no session"],
)
async def test_only_a_client_with_a_session_is_answered(headers: dict[str, str], status: int) -> None:
    async with bridged([]) as client:
        client._session = ""  # as one that has none
        assert (await client.post({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, **headers))[0] == status


async def test_an_answer_with_a_secret_is_withheld_and_an_error_of_the_server_is_one() -> None:
    told: list[McpCall] = []
    said: list[str] = []
    async with bridged(told, said, secrets=Redactor({"docs.KEY": b"s3cret-value"})) as client:
        assert "s3cret" not in json.dumps(await client.call("echo", text="a s3cret-value b"))
        assert (await client.call("echo", text="plain"))["content"][0]["text"] == "plain"
    assert [one.verdict for one in told] == [McpVerdict.SECRET, McpVerdict.ANSWERED]
    assert said == ["a message of it had secret docs.KEY in it, and was withheld"]


async def test_so_many_calls_are_told_one_by_one_and_more_together() -> None:
    told: list[McpCall] = []
    async with bridged(told, max_reported=10, tools=("echo",)) as client:
        for _ in range(15):
            await client.call("deaf")
    assert (len(told), told[-1].count, told[-1].tool) == (11, 5, "")


async def storm(client: Client, count: int, at_once: int, chance: random.Random) -> tuple[int, int]:
    """Make calls of which some are cancelled and some time out; return answers, and those to another call."""
    answered = wrong = 0
    limit = trio.CapacityLimiter(at_once)

    async def one(number: int) -> None:
        nonlocal answered, wrong
        async with limit:
            text, kind = f"{number}-{chance.random()}", chance.random()
            with trio.move_on_after(chance.random() * 0.02 if kind < 0.3 else 60):
                slow = kind < 0.4
                given = {"seconds": chance.choice((0.05, 0.2, 6)), "text": text} if slow else {"text": text}
                found = await client.call("slow" if slow else "echo", **given)
                if "content" in found:
                    answered += 1
                    wrong += found["content"][0]["text"] != text

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number)
    return answered, wrong


async def test_of_a_hundred_calls_at_once_none_gets_the_answer_of_another() -> None:
    async with bridged([], timeout=5.0) as client:
        answered, wrong = await storm(client, 300, 100, random.Random(7))
    assert (answered > 100, wrong) == (True, 0)


@pytest.mark.nightly
async def test_of_ten_thousand_calls_with_timeouts_and_cancels_none_gets_the_answer_of_another() -> None:
    async with bridged([], timeout=5.0) as client:
        answered, wrong = await storm(client, 10_000, 100, random.Random(11))
    assert (answered > 5_000, wrong) == (True, 0)


@pytest.mark.nightly
async def test_the_bridge_adds_a_millisecond_at_most() -> None:
    """Calls through the bridge and HTTP, less the same calls on the server's own streams: what a tenth take at most,
    since others may use the machine.
    """
    process = await trio.lowlevel.open_process(
        [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    direct, bridge = [], []
    call = {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "echo", "arguments": {"text": "x"}}}
    for number in range(500):
        began = time.perf_counter()
        await process.stdin.send_all(json.dumps({**call, "id": number}).encode() + b"\n")
        assert json.loads(await process.stdout.receive_some())["id"] == number
        direct.append(time.perf_counter() - began)
    process.kill()
    await process.wait()
    async with bridged([]) as client:
        for _ in range(500):
            began = time.perf_counter()
            await client.call("echo", text="x")
            bridge.append(time.perf_counter() - began)
    added = sorted(bridge)[50] - sorted(direct)[50]
    assert added < 0.001, f"{added * 1000:.3f} ms"
