"""A program that runs in a container, over the websocket of the API server: its input, its output and its end.

Each message is of one channel, which its first byte names (``v4.channel.k8s.io``). That protocol cannot end the input
alone; programs that are run here know where it ends.
"""

from __future__ import annotations

import json
import secrets
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote, urlencode

import trio
from wsproto.connection import Connection as Protocol
from wsproto.connection import ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from runner.network.http import Headers
from runner.network.upstream import UpgradedStream, Upstream, UpstreamFailed

PROTOCOL = "v4.channel.k8s.io"
MAX_REFUSAL = 1 << 14  # bytes of an answer that is no websocket
_STDIN, _STDOUT, _STDERR, _ERROR = range(4)
_PIECE = 1 << 16
_READ_BYTES = 1 << 18
_MAX_WORDS = 1 << 12  # kept of a program's standard error and of the status


class ExecRefused(Exception):
    """The API server does not run the program. ``status`` is 0 when there is none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ExecStream(trio.abc.Stream):
    """Standard input and output of a program. ``exit_code`` is known at the end of its output, if the end was told."""

    def __init__(self, stream: UpgradedStream) -> None:
        self._stream = stream
        self._protocol = Protocol(ConnectionType.CLIENT)
        self._ahead = b""
        self._ended = False
        self._sending = trio.Lock()
        self._status = b""
        self._channel: int | None = None  # of the message that is not complete
        self.words = b""  # of its standard error

    @property
    def exit_code(self) -> int | None:
        try:
            status = json.loads(self._status)
            if status["status"] == "Success":
                return 0
            return next(int(cause["message"]) for cause in status["details"]["causes"] if cause["reason"] == "ExitCode")
        except (ValueError, LookupError, TypeError, StopIteration):
            return None

    @property
    def said(self) -> str:
        """Return what the program, or the node in its place, has said of a failure."""
        with suppress(ValueError, LookupError, TypeError):
            status: dict[str, Any] = json.loads(self._status)
            return self.words.decode(errors="replace").strip() or str(status["message"])
        return self.words.decode(errors="replace").strip()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        for at in range(0, len(view), _PIECE):
            message = bytes([_STDIN]) + bytes(view[at : at + _PIECE])
            async with self._sending:
                try:
                    framed = self._protocol.send(BytesMessage(data=message))
                except LocalProtocolError as error:
                    raise trio.BrokenResourceError from error
                await self._stream.send_all(framed)

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive output; nothing at its end. Raises ``trio.BrokenResourceError`` when the connection is lost."""
        most = max_bytes or _READ_BYTES
        while not self._ahead and not self._ended:
            chunk = await self._stream.receive_some(_READ_BYTES)
            if not chunk:
                self._ended = True
                break
            try:
                self._protocol.receive_data(chunk)
                for event in self._protocol.events():
                    await self._take(event)
            except (RemoteProtocolError, LocalProtocolError) as error:
                raise trio.BrokenResourceError from error
        if not self._ahead:
            await trio.lowlevel.checkpoint()
        found, self._ahead = self._ahead[:most], self._ahead[most:]
        return found

    async def _take(self, event: object) -> None:
        if isinstance(event, BytesMessage):
            data = bytes(event.data)
            if self._channel is None:
                self._channel, data = (data[0] if data else _STDOUT), data[1:]
            self._hear(self._channel, data)
            if event.message_finished:
                self._channel = None
        elif isinstance(event, Ping):
            async with self._sending:
                await self._stream.send_all(self._protocol.send(event.response()))
        elif isinstance(event, CloseConnection):
            self._ended = True

    def _hear(self, channel: int, data: bytes) -> None:
        if channel == _STDOUT:
            self._ahead += data
        elif channel == _STDERR:
            self.words = (self.words + data)[:_MAX_WORDS]
        elif channel == _ERROR:
            self._status = (self._status + data)[:_MAX_WORDS]

    async def finish(self) -> int | None:
        """Read to the end of the output, and return the exit code, if it was told."""
        while await self.receive_some():
            pass
        return self.exit_code

    async def aclose(self) -> None:
        with trio.move_on_after(1), suppress(trio.BrokenResourceError, LocalProtocolError):
            if self._protocol.state is ConnectionState.OPEN:
                await self._stream.send_all(self._protocol.send(CloseConnection(code=1000)))


@asynccontextmanager
async def open_exec(
    upstream: Upstream, namespace: str, pod: str, container: str, words: Sequence[str]
) -> AsyncIterator[ExecStream]:
    """Run a program in a container for the length of the block. Raises ``ExecRefused``, ``UpstreamFailed``.

    When the block ends, the program's input does; whether that ends the program is its own affair.
    """
    query = [("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
    query += [("command", word) for word in words]
    target = f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}/exec?{urlencode(query)}"
    headers: Headers = [
        (b"connection", b"Upgrade"),
        (b"upgrade", b"websocket"),
        (b"sec-websocket-version", b"13"),
        (b"sec-websocket-key", b64encode(secrets.token_bytes(16))),
        (b"sec-websocket-protocol", PROTOCOL.encode()),
    ]
    async with upstream.send("GET", target, headers, b"") as answer:
        if answer.upgraded is None:
            text = b""
            with suppress(UpstreamFailed):
                async for chunk in answer.body:
                    text += chunk
                    if len(text) > MAX_REFUSAL:
                        break
            raise ExecRefused(answer.status, message_of(text))
        stream = ExecStream(answer.upgraded)
        try:
            yield stream
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()


def message_of(text: bytes) -> str:
    """Return the message of a ``Status``, or the text itself."""
    with suppress(ValueError, LookupError, TypeError):
        return str(json.loads(text)["message"])
    return text.decode(errors="replace").strip()[:500]
