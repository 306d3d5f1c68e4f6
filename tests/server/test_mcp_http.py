"""MCP at `/mcp` of the server, with the client of the official SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from runner.ops.tools import TOOLS
from runner.server.mcp.tools import all_tools
from tests.server.test_mcp import HELLO, READY, call, refused
from tests.support.server import Answer, Served, create_token, serving
from tests.support.situations import Project, until

# the SDK's client leaves the parser of a stream to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
BOTH = {"Accept": "application/json, text/event-stream"}


@pytest.fixture
def served(project: Project) -> Iterator[Served]:
    project.script("echo begun; while [ ! -e go ]; do sleep 0.1; done")
    with serving(project, "--listen", "127.0.0.1:0", "--manifests", str(project.folder)) as server:
        yield server


@asynccontextmanager
async def client(served: Served, token: str, mode: str = "auto") -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(f"{served.url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


def say(served: Served, message: Any, *, session: str = "", **more: Any) -> Answer:
    headers = {**BOTH, **({"Mcp-Session-Id": session} if session else {}), **more.pop("headers", {})}
    return served.ask("POST", "/mcp", {"jsonrpc": "2.0", **message}, headers=headers, **more)


def begin(served: Served, **more: Any) -> str:
    """The id of a new session of MCP."""
    answer = say(served, HELLO, **more)
    assert answer.status == 200, answer.raw
    session = str(answer.headers["mcp-session-id"])
    assert say(served, READY, session=session, **more).status == 202
    return session


def session_of(served: Served, **workspace: Any) -> str:
    served.post("/agent-types", {"name": "worker", "workspace": {"enabled": True, **workspace}})
    id = str(served.post("/sessions", {"agent_type": "worker"})["id"])
    until(lambda: served.get(f"/sessions/{id}")["status"] == "active", seconds=60)
    return id


def test_the_token_of_a_session_has_the_tools_of_its_agent_type_and_nothing_else(served: Served) -> None:
    id = session_of(served, tools=["bash", "read"])
    first = served.post(f"/sessions/{id}/token")["token"]
    token = served.post(f"/sessions/{id}/token")["token"]

    async def work() -> None:
        async with client(served, token) as mcp:
            assert [tool.name for tool in (await mcp.list_tools()).tools] == ["bash", "read"]
            assert (await call(mcp, "bash", command="echo hello >a; pwd"))["stdout"] == "/workspace\n"
            assert (await call(mcp, "read", file_path="a"))["content"] == "hello\n"
            assert await refused(mcp, "git", args=["status"]) == "tool.not-enabled"
            assert await refused(mcp, "bash", session=id, command="true") == "server.request"
            with pytest.raises(MCPError, match="there is no tool `run_apply`"):
                await mcp.call_tool("run_apply", {})

    trio.run(work)
    assert served.get("/sessions", token=token)["sessions"] == []
    assert served.refused("POST", f"/sessions/{id}/tools/bash", {"command": "true"}, token=token)[0] == 404
    mine = begin(served, token=token)
    assert say(served, {"id": 2, "method": "tools/list"}, session=mine).status == 404  # it is not the admin's
    for refusal, status in (
        (say(served, HELLO, token=first), 401),
        (say(served, HELLO, token=token, headers={"Origin": "https://evil.example.org"}), 403),
        (say(served, HELLO, token=token, headers={"Host": "evil.example.org"}), 403),
        (say(served, HELLO, token=token, headers={"Content-Type": "text/plain"}), 415),
    ):
        assert refusal.status == status, refusal.raw
    served.ask("DELETE", f"/api/v1/sessions/{id}?discard=true")
    ended = say(served, {"id": 2, "method": "tools/list"}, session=mine, token=token)
    assert ended.status == 401
    where = ended.headers["www-authenticate"].split('"')[1]
    described = served.ask("GET", where.removeprefix(served.url), token="").json
    assert (described["resource"], described["bearer_methods_supported"]) == (f"{served.url}/mcp", ["header"])


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_runs_are_followed_and_cancelled(served: Served, mode: str) -> None:
    """By both generations of the protocol: one with sessions, and one whose requests stand alone."""
    reader = create_token(served.project.settings(), "reader", ("admin:ro",))

    async def work() -> None:
        async with client(served, served.token, mode) as mcp:
            here = [name for name in all_tools() if name not in ("project_create", "triage")]
            assert [tool.name for tool in (await mcp.list_tools()).tools] == here
            told: list[str] = []
            apply = {"wait": True}

            async def progress(number: float, total: float | None, message: str | None) -> None:
                told.append(message or "")
                if message == "StepStarted agent":
                    scope.cancel()

            with trio.CancelScope() as scope:
                await mcp.call_tool("run_apply", apply, progress_callback=progress)
            assert told[0] == "RunStarted"
            run = (await call(mcp, "run_list"))["runs"][0]["id"]
            assert (await call(mcp, "run_events", run=run, wait_seconds=60))["state"] == "cancelled"
        async with client(served, reader, mode) as mcp:
            names = [tool.name for tool in (await mcp.list_tools()).tools]
            assert ("run_get" in names, "run_apply" in names, {*names} & {*TOOLS}) == (True, False, set())
            assert (await call(mcp, "run_get", run=run))["id"] == run

    trio.run(work)


@pytest.mark.nightly
def test_what_was_missed_is_said_again_to_the_same_client_only(served: Served) -> None:
    command = "touch begun; while [ ! -e go ]; do sleep 0.1; done; cat go"
    version = {"Mcp-Protocol-Version": "2025-11-25"}
    hello = {**HELLO, "params": {**HELLO["params"], "protocolVersion": "2025-11-25"}}  # type: ignore[dict-item]
    begun: list[tuple[str, str, Path]] = []
    for _ in range(2):  # each has request 2
        id = served.post("/workspaces")["id"]
        tree = served.project.home / "state" / "projects" / "default" / "workspaces" / id
        session = str(say(served, hello).headers["mcp-session-id"])
        call = {"name": "bash", "arguments": {"workspace": id, "command": command}}
        message = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
        headers = {**BOTH, **version, "Mcp-Session-Id": session}
        with closing(served.send("POST", "/mcp", message, headers=headers)) as connection:
            last = _line(connection, b"id: ")
            until((tree / "begun").exists)
        begun.append((session, last, tree))
    for number, (_, _, tree) in enumerate(begun):
        (tree / "going").write_text(str(number))
        (tree / "going").rename(tree / "go")
    for number, (session, last, tree) in enumerate(begun):
        headers = {"Accept": "text/event-stream", **version, "Mcp-Session-Id": session, "Last-Event-ID": last}
        with closing(served.send("GET", "/mcp", headers=headers)) as connection:
            answer = json.loads(_line(connection, b"data: "))
        assert answer["result"]["structuredContent"]["stdout"] == str(number)
        assert served.ask("DELETE", f"/api/v1/workspaces/{tree.name}?discard=true").status == 200


def _line(connection: HTTPConnection, begins: bytes) -> str:
    """The rest of the first line of a stream that begins so, and does not end there."""
    with connection.getresponse() as stream:
        while line := stream.readline():
            if line.startswith(begins) and line.strip() != begins.strip():
                return line.removeprefix(begins).decode().strip()
    raise AssertionError("the stream has ended")


@pytest.mark.nightly
def test_what_is_no_message_or_too_much_harms_nothing(served: Served) -> None:
    session = begin(served)
    for raw, status in (
        (b"{", 400),
        (b'{"jsonrpc": "2.0"}', 400),
        (b"\xff\x00", 400),
        (b"[1]", 400),
        (b"[" * 100_000, 400),
        (b" " * ((16 << 20) + 1), 413),
    ):
        headers = {**BOTH, "Mcp-Session-Id": session}
        assert served.ask("POST", "/mcp", raw, headers=headers).status == status, raw[:9]
    assert served.ask("PUT", "/mcp", {}, headers=BOTH).status == 405
    assert say(served, {"id": 2, "method": "tools/list"}, session="unknown").status == 404
    assert say(served, {"id": 2, "method": "tools/list"}, headers={"Mcp-Protocol-Version": "1999-01-01"}).status == 400
    for _ in range(49):
        begin(served)
    assert say(served, HELLO).status == 503
    other = create_token(served.project.settings(), "other", ("admin:ro",))
    begin(served, token=other)
    assert served.ask("DELETE", "/mcp", headers={"Mcp-Session-Id": session}).status == 200
    begin(served)
