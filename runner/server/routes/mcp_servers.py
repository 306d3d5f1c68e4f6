"""Routes of hosted MCP servers: what there is, and each one's own endpoint, as streamable HTTP.

An answer is JSON, unless something that belongs to the call comes first: then it is a stream of both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any

import trio
from msgspec import Meta, Struct
from starlette.responses import Response

from runner.core.codec import encode
from runner.core.errors import BadRequest, McpSession, OutOfScope, ServerFailed, UnknownMcpServer
from runner.core.sanitize import excerpt
from runner.mcp.bridge import INVALID_REQUEST, MAX_LINE, Bridge, Inbox, Message, Session, error_for, read_message
from runner.ops.mcp.hosting import HostedServer
from runner.ops.mcp.registrations import deregister, exists, register
from runner.server.route import BASE, Call, Reply, Route, api

SESSION = "mcp-session-id"
BEAT = 15.0  # seconds between signs of life on a stream
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class McpServer(Struct, kw_only=True):
    """A hosted server. ``pending``: something of it has changed since it was approved."""

    name: str
    state: str
    detail: str
    workspace: str | None
    crashes: int
    tools: list[str]
    pending: bool


class NewMcpServer(Struct, kw_only=True, forbid_unknown_fields=True):
    """A server to host in a sandbox of its own, from now on and whenever this server runs."""

    name: Annotated[str, Meta(min_length=1, max_length=63)]
    spec: Annotated[
        dict[str, Any], Meta(description="As in a manifest of the kind McpServer, but for what is of the server's host")
    ]


class McpServers(Struct):
    mcp_servers: list[McpServer]


def _shown(server: HostedServer) -> McpServer:
    record = server.record
    return McpServer(
        name=record.name,
        state=record.state,
        detail=record.detail,
        workspace=record.workspace,
        crashes=record.crashes,
        tools=[*server.bridge.enabled()],
        pending=record.pending,
    )


def _named(call: Call) -> HostedServer:
    """Return the server of the path. Raises ``OutOfScope`` and ``UnknownMcpServer``."""
    if not call.token.may_change(None):
        raise OutOfScope(f"token `{call.token.name}` may not use MCP servers", hint="use a token with the scope admin")
    return _seen(call)


async def _create(call: Call) -> Reply:
    call.require_change(None)
    hosting, body = call.server.hosting, call.body
    assert hosting is not None  # of whatever answers over HTTP
    if body.name in hosting.servers:
        raise exists(body.name)
    home = call.server.env.settings.home
    await trio.to_thread.run_sync(partial(register, home, body.name, body.spec, trusted=False))
    await hosting.look()
    if (server := hosting.servers.get(body.name)) is None:
        deregister(home, body.name)
        raise ServerFailed("manifests of this server's MCP servers have errors", hint="look at its log")
    location = {"location": f"{BASE}/mcp-servers/{body.name}"}
    return Reply(value=_shown(server), status=201, headers=location)


async def _get_one(call: Call) -> McpServer:
    return _shown(_seen(call))


async def _delete_one(call: Call) -> None:
    server, hosting = _seen(call), call.server.hosting
    call.require_change(None)
    await trio.to_thread.run_sync(deregister, call.server.env.settings.home, server.spec.name)
    if hosting is not None:
        await hosting.look()


def _seen(call: Call) -> HostedServer:
    """Return the server of the path. Raises ``UnknownMcpServer``, also when the token may not see it."""
    hosting = call.server.hosting
    found = None if hosting is None else hosting.servers.get(call.path["id"])
    if found is None or not call.token.admin:
        raise UnknownMcpServer(f"there is no hosted server `{excerpt(call.path['id'])}`")
    return found


async def _list(call: Call) -> McpServers:
    hosting = call.server.hosting
    return McpServers([_shown(one) for one in hosting.servers.values()] if hosting and call.token.admin else [])


async def _post(call: Call) -> Any:
    bridge = _named(call).bridge
    try:
        message = read_message(call.body)
    except ValueError as error:
        return _json(error_for(None, INVALID_REQUEST, str(error)), status=400)
    if message.get("method") == "initialize" and "id" in message:
        return await _initialize(call, bridge, message)
    session = _session(call, bridge)
    if "method" in message and "id" in message:
        return Exchange(bridge, session, message)
    bridge.notify(session, message)
    return Response(status_code=202, headers=_HEADERS)


async def _initialize(call: Call, bridge: Bridge, message: Message) -> Response:
    answer = await bridge.initialize(message)
    if "error" in answer:
        return _json(answer)
    session = bridge.open_session(call.token.name, message.get("params") or {})
    return _json(answer, headers={SESSION: session.id})


def _session(call: Call, bridge: Bridge) -> Session:
    """Return the session of a request. Raises ``BadRequest`` and ``McpSession``."""
    id = call.headers.get(SESSION, "")
    if not id:
        raise BadRequest("`Mcp-Session-Id` is missing", hint="initialize a session first")
    session = bridge.session(id, call.token.name)
    if session is None:
        raise McpSession("the session has ended", hint="initialize another")
    return session


async def _get(call: Call) -> Any:
    bridge = _named(call).bridge
    return Listening(call.server.stopping, _session(call, bridge))


async def _delete(call: Call) -> None:
    bridge = _named(call).bridge
    bridge.close_session(_session(call, bridge))


def _json(message: Message, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(message), status, {**_HEADERS, **(headers or {})}, "application/json")


class _Stream:
    """An answer of server-sent events."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def begin(self) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def say(self, raw: bytes) -> None:
        await self._send({"type": "http.response.body", "body": raw, "more_body": True})

    async def message(self, message: Message) -> None:
        await self.say(b"event: message\ndata: " + encode(message) + b"\n\n")

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class Exchange:
    """The answer to a request of a client."""

    def __init__(self, bridge: Bridge, session: Session, message: Message) -> None:
        self._messages: AsyncGenerator[Message] = bridge.exchange(session, message)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async with aclosing(self._messages) as messages:
            first = await anext(messages)
            if "method" not in first:
                await _json(first)(scope, receive, send)
                return
            stream = _Stream(send)
            await stream.begin()
            await stream.message(first)
            async for message in messages:
                await stream.message(message)
            await stream.end()


class Listening:
    """The stream of what answers no call. It ends with the session, its client, or the server."""

    def __init__(self, stopping: trio.Event, session: Session) -> None:
        self._stopping, self._session = stopping, session

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        inbox, stream = Inbox(), _Stream(send)
        before, self._session.stream = self._session.stream, inbox
        if before is not None:
            before.put(None)  # a client has one
        try:
            await stream.begin()
            await self._follow(inbox, stream, receive)
            await stream.end()
        finally:
            if self._session.stream is inbox:
                self._session.stream = None

    async def _follow(self, inbox: Inbox, stream: _Stream, receive: Receive) -> None:
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                inbox.put(None)

            async def stop() -> None:
                await self._stopping.wait()
                inbox.put(None)

            nursery.start_soon(leave)
            nursery.start_soon(stop)
            while True:
                message: Message | None = {}
                with trio.move_on_after(BEAT):
                    message = await inbox.get()
                if message is None:
                    break
                await (stream.message(message) if message else stream.say(b": still here\n\n"))
            nursery.cancel_scope.cancel()


_MCP = "/mcp/servers/{id}/mcp"
ROUTES = (
    api("GET", "/mcp-servers", "List hosted MCP servers", _list, answer=McpServers),
    api(
        "POST",
        "/mcp-servers",
        "Register an MCP server, which is hosted from now on",
        _create,
        body=NewMcpServer,
        answer=McpServer,
        status=201,
    ),
    api("GET", "/mcp-servers/{id}", "Show a hosted MCP server", _get_one, answer=McpServer),
    api("DELETE", "/mcp-servers/{id}", "End a registered MCP server for good; its files are saved", _delete_one),
    Route(
        method="POST",
        path=_MCP,
        summary="Send a message to a hosted MCP server",
        handle=_post,
        answer=dict[str, Any],
        raw_bytes=MAX_LINE,
        forms=("text/event-stream",),
    ),
    Route(
        method="GET",
        path=_MCP,
        summary="Follow what a hosted MCP server says beside its answers",
        handle=_get,
        answer=str,
        media="text/event-stream",
    ),
    Route(method="DELETE", path=_MCP, summary="End a session with a hosted MCP server", handle=_delete),
)
