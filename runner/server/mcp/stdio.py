"""One MCP client on standard input and output, a message a line.

The client decides how long this lives: at the end of its input what it has called is cancelled, and its runs end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as types
import trio
from anyio import create_memory_object_stream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.lowlevel import Server as McpServer
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from runner.core.lines import lines
from runner.core.nurseries import open_services

MAX_LINE = 16 << 20  # bytes of a message
UNANSWERED = 1000  # requests, beyond which each is refused before the next is read
_DRAIN = 2.0  # seconds for answers at the end of the input

Read = Callable[[], Awaitable[bytes]]
Write = Callable[[bytes], Awaitable[None]]


async def talk(face: McpServer[Any], read: Read, write: Write) -> None:
    """Answer a client until it closes its end, or reads no more."""
    to_face, incoming = create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_face = create_memory_object_stream[SessionMessage](0)
    client = _Client(read, write)
    async with open_services() as services, from_face:
        services.start_soon(client.send, from_face, services.cancel_scope)
        services.start_soon(client.receive, to_face)
        await face.run(incoming, outgoing, face.create_initialization_options())


class _Client:
    """The other end, with the ids of requests that it has no answer to."""

    def __init__(self, read: Read, write: Write) -> None:
        self._read, self._write = read, write
        self._unanswered: set[types.RequestId] = set()
        self._quiet = trio.Event()
        self._turn = trio.Lock()

    async def send(self, from_face: MemoryObjectReceiveStream[SessionMessage], whole: trio.CancelScope) -> None:
        """Send what the face says; a client that has gone ends the ``whole``."""
        async for sent in from_face:
            try:
                await self._say(sent.message)
            except BrokenPipeError:
                whole.cancel()
            if isinstance(sent.message, types.JSONRPCResponse | types.JSONRPCError) and sent.message.id is not None:
                self._unanswered.discard(sent.message.id)
            if not self._unanswered:
                self._quiet.set()

    async def receive(self, to_face: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Pass messages on, to the end of the input; answers to them get a moment then."""
        async with to_face:
            async for line in lines(self._read, MAX_LINE):
                if (message := await self._accepted(line)) is not None:
                    await to_face.send(SessionMessage(message))
            if self._unanswered:
                self._quiet = trio.Event()
                with trio.move_on_after(_DRAIN):
                    await self._quiet.wait()

    async def _accepted(self, line: bytes | None) -> types.JSONRPCMessage | None:
        """Return the message of a line, unless that is refused."""
        if line is None:
            await self._refuse(None, types.INVALID_REQUEST, f"a message is longer than {MAX_LINE >> 20} MiB")
            return None
        try:
            message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValidationError:
            await self._refuse(None, types.PARSE_ERROR, "a line is not a message of JSON-RPC")
            return None
        if isinstance(message, types.JSONRPCRequest):
            if len(self._unanswered) >= UNANSWERED:
                text = f"{UNANSWERED} requests are not answered yet"
                await self._refuse(message.id, types.INTERNAL_ERROR, text)
                return None
            self._unanswered.add(message.id)
        elif isinstance(message, types.JSONRPCNotification) and message.method == "notifications/cancelled":
            self._unanswered.discard((message.params or {}).get("requestId", ""))  # it gets no answer
        return message

    async def _refuse(self, request: types.RequestId | None, code: int, message: str) -> None:
        error = types.ErrorData(code=code, message=message)
        await self._say(types.JSONRPCError(jsonrpc="2.0", id=request, error=error))

    async def _say(self, message: types.JSONRPCMessage) -> None:
        line = message.model_dump_json(by_alias=True, exclude_unset=True).encode()
        async with self._turn:
            await self._write(line + b"\n")
