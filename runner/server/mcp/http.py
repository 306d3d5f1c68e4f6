"""Sessions of MCP clients over HTTP, by the SDK: whose they are, how many, and what can be asked for again."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import count

import mcp_types as types
import trio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, AuthorizationContext
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore, StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from runner.ops.host.tokens import StoredToken
from runner.ops.tools import TOOLS
from runner.server.border import MAX_BODY, Receive, Scope, Send
from runner.server.mcp.endpoint import Handle
from runner.server.mcp.face import Access, Context, make_face, session_access
from runner.server.mcp.tools import all_tools
from runner.server.route import Server

SESSIONS = 50  # of a token
KEPT_BYTES = 4 << 20  # of a session's messages, for a client that has lost its connection
_TOKEN = "runner.token"  # in the scope of a request


async def run(server: Server, *, task_status: trio.TaskStatus[Handle]) -> None:
    """Answer what is passed to the handler that this starts with, until it is cancelled."""
    sessions = _Sessions(make_face(server, partial(_access, server)), max_request_body_size=MAX_BODY)

    async def handle(token: StoredToken, scope: Scope, receive: Receive, send: Send) -> None:
        known = AccessToken(token="", client_id=token.name, scopes=[*token.scopes], subject=token.sha256)
        await sessions.handle_request({**scope, "user": AuthenticatedUser(known), _TOKEN: token}, receive, send)

    async with sessions.run():
        task_status.started(handle)
        await trio.sleep_forever()


async def _access(server: Server, context: Context) -> Access:
    """Return what the token of a request may do."""
    assert context.request is not None
    token: StoredToken = context.request.scope[_TOKEN]
    if token.session is not None:
        return await session_access(server, token.session, token.name)
    tools = {name: tool for name, tool in all_tools().items() if not tool.names_host}
    if token.reads_only:
        tools = {name: tool for name, tool in tools.items() if tool.reads and name not in TOOLS}
    return Access(token=token, tools=tools)


class _Sessions(StreamableHTTPSessionManager):
    """The SDK's sessions, each of one token, which has so many at most."""

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        if sum(owner == requestor for owner in self._session_owners.values()) >= SESSIONS:
            return None
        self.event_store = _Kept()  # in one for all, a client would get what another's request of the same id got
        return super()._admit_session(requestor)


class _Kept(EventStore):
    """The last messages of a session, by the ids that they were sent with."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._messages: deque[tuple[int, str, types.JSONRPCMessage | None, int]] = deque()
        self._bytes = 0

    async def store_event(self, stream_id: str, message: types.JSONRPCMessage | None) -> str:
        id, size = next(self._ids), 100 if message is None else len(message.model_dump_json())
        self._messages.append((id, stream_id, message, size))
        self._bytes += size
        while self._bytes > KEPT_BYTES:
            self._bytes -= self._messages.popleft()[-1]
        return str(id)

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        """Send what came after a message on its stream, and return that, ``None`` when it is not kept."""
        streams = [stream for id, stream, _, _ in self._messages if str(id) == last_event_id]
        for id, stream, message, _ in [*self._messages]:
            if stream in streams and id > int(last_event_id) and message is not None:
                await send_callback(EventMessage(message, str(id)))
        return streams[0] if streams else None
