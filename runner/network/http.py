"""An HTTP/1.1 server for the workspace: one connection, its requests one after the other, each limited in size and
time.

h11 does the parsing; here are only the limits, and who waits for whom. A client that goes away while it is served
cancels its request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

import h11
import trio

from runner.core.errors import WorkspaceLost
from runner.core.nurseries import open_services
from runner.ports.provider import Connection

MAX_HEAD = 64 << 10
MAX_BODY = 64 << 20
LARGE_BODY = 1 << 20  # a body above this waits for one of a few places, so that many connections cost bounded memory
LARGE_PLACES = 2
WINDOW = 256 << 10  # bytes of an answer that wait for a client
IDLE_SECONDS = 600.0  # between requests, and for each piece of an answer to be taken
READ_SECONDS = 60.0  # for each piece of a request, once it has begun
_CHUNK = 64 << 10

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Request:
    """A request. ``began`` is when its first byte arrived, trio time."""

    method: str
    target: bytes
    headers: Headers  # names in lower case
    body: bytes
    began: float

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("ascii")

    @property
    def query(self) -> bytes:
        return self.target.partition(b"?")[2]

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")


class BadRequest(Exception):
    """A request of a client cannot be answered. Never leaves this module."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Response:
    """The response to one request: ``start`` once, ``send`` any number of times. The server sends the end.

    Pieces that are ready at the same time are sent together, and none waits for another.
    """

    def __init__(self, wire: HttpConnection, *, bodiless: bool) -> None:
        self._wire = wire
        self._bodiless = bodiless
        self.status = 0
        self.sent_bytes = 0
        self.first_byte: float | None = None
        self.is_cut = False

    def cut(self) -> None:
        """Mark the response as incomplete: the client gets no end, and the connection is closed."""
        self.is_cut = True

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._wire.put(h11.Response(status_code=status, headers=list(headers)))

    async def send(self, data: bytes) -> None:
        """Send a piece; waits only while the client is behind by a window."""
        if self.first_byte is None:
            self.first_byte = trio.current_time()
        self.sent_bytes += len(data)
        if not self._bodiless:
            await self._wire.put(data)

    async def send_all(self, status: int, content_type: bytes, body: bytes) -> None:
        await self.start(status, [(b"content-type", content_type), (b"content-length", b"%d" % len(body))])
        await self.send(body)


Handler = Callable[[Request, Response], Awaitable[None]]


async def serve_http(
    connection: Connection, serve: Handler, large: trio.Semaphore, *, max_body: int = MAX_BODY
) -> None:
    """Answer the requests of one connection until it ends. ``large`` is shared by all connections.

    Raises what the connection raises.
    """
    wire = HttpConnection(connection, large, max_body)
    try:
        while True:
            try:
                request = await wire.receive()
            except (BadRequest, h11.RemoteProtocolError) as error:
                await wire.refuse(error)
                return
            if request is None:
                return
            async with open_services() as services:
                services.start_soon(wire.watch, services.cancel_scope)
                services.start_soon(wire.write, services.cancel_scope)
                reply = Response(wire, bodiless=request.method == "HEAD")
                await serve(request, reply)
                if not reply.is_cut:
                    await wire.put(h11.EndOfMessage())
                await wire.drained()
            wire.release()
            if wire.gone or not wire.again():
                return
    finally:
        wire.release()


class HttpConnection:
    def __init__(self, connection: Connection, large: trio.Semaphore, max_body: int) -> None:
        self.gone = False
        self._max_body = max_body
        self._connection = connection
        self._large = large
        self._holds_place = False
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._framed = b""
        self._pieces: list[bytes] = []  # of the body, behind what is framed
        self._waiting_bytes = 0
        self._sending = False
        self._filled, self._emptied = trio.Event(), trio.Event()

    async def receive(self) -> Request | None:
        """Return the next request with its body; ``None`` when there is no other. Raises ``BadRequest`` and h11's
        errors.
        """
        with trio.move_on_after(IDLE_SECONDS):
            while (head := self._protocol.next_event()) is h11.NEED_DATA:
                if not await self._feed(IDLE_SECONDS):
                    return None
        if not isinstance(head, h11.Request):
            return None
        began = trio.current_time()
        if self._protocol.they_are_waiting_for_100_continue:
            await self._say(h11.InformationalResponse(status_code=100, headers=[]))
        body = await self._body()
        return Request(
            method=head.method.decode(),
            target=bytes(head.target),
            headers=list(head.headers),
            body=body,
            began=began,
        )

    async def _body(self) -> bytes:
        body = bytearray()
        while True:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                if not await self._feed(READ_SECONDS):
                    raise BadRequest(408, "the request did not go on")
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._max_body:
                    raise BadRequest(413, f"a request has at most {self._max_body >> 10} KiB")
                if len(body) > LARGE_BODY and not self._holds_place:
                    await self._large.acquire()
                    self._holds_place = True
            else:
                return bytes(body)

    async def _feed(self, seconds: float) -> bool:
        """Pass the next bytes to the parser; false when none come in that time."""
        with trio.move_on_after(seconds):
            data = await self._connection.receive_some(_CHUNK)
            self._protocol.receive_data(data)
            return True
        return False

    async def watch(self, serving: trio.CancelScope) -> None:
        """Cancel the request that is served when the client goes away; bytes that it sends meanwhile belong to its next
        request.
        """
        ahead = 0
        while ahead <= MAX_HEAD:
            try:
                data = await self._connection.receive_some(_CHUNK)
            except trio.BrokenResourceError:
                data = b""
            self._protocol.receive_data(data)
            ahead += len(data)
            if not data:
                self.gone = True
                serving.cancel()
                return

    async def put(self, part: h11.Event | bytes) -> None:
        """Queue a part of the response; waits while more than a window is queued."""
        while self._waiting_bytes > WINDOW:
            await self._emptied.wait()
        if isinstance(part, bytes):
            self._pieces.append(part)
            self._waiting_bytes += len(part)
        else:
            self._frame()
            self._framed += self._protocol.send(part) or b""
        self._filled.set()

    async def write(self, serving: trio.CancelScope) -> None:
        """Send everything that is queued at once; cancel the request when the client does not take it."""
        while True:
            await self._filled.wait()
            self._filled = trio.Event()
            self._frame()
            data, self._framed, self._waiting_bytes = self._framed, b"", 0
            if not await self._send(data):
                self.gone = True
                serving.cancel()
                return
            self._emptied.set()
            self._emptied = trio.Event()

    async def drained(self) -> None:
        """Wait until everything queued is sent."""
        while self._filled.is_set() or self._sending:
            await self._emptied.wait()

    def _frame(self) -> None:
        if self._pieces:
            self._framed += self._protocol.send(h11.Data(data=b"".join(self._pieces))) or b""
            self._pieces.clear()

    async def _send(self, data: bytes) -> bool:
        self._sending = True
        with trio.move_on_after(IDLE_SECONDS) as waiting, suppress(trio.BrokenResourceError, WorkspaceLost):
            await self._connection.send_all(data)
            self._sending = False
        return not (waiting.cancelled_caught or self._sending)

    def again(self) -> bool:
        """Tell whether the connection takes another request after this one."""
        states = {self._protocol.our_state, self._protocol.their_state}
        if states != {h11.DONE}:
            return False
        self._protocol.start_next_cycle()
        return True

    async def refuse(self, error: Exception) -> None:
        if self._protocol.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        status = error.status if isinstance(error, BadRequest) else getattr(error, "error_status_hint", 400)
        text = f"{HTTPStatus(status).phrase}: {error}\n".encode()
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(text)), (b"connection", b"close")]
        await self._say(h11.Response(status_code=status, headers=headers), h11.Data(data=text), h11.EndOfMessage())

    async def _say(self, *events: h11.Event) -> None:
        await self._connection.send_all(b"".join(self._protocol.send(event) or b"" for event in events))

    def release(self) -> None:
        if self._holds_place:
            self._holds_place = False
            self._large.release()
