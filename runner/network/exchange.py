"""HTTP/1 between a command and a host: each request and each answer is parsed, and framed anew.

Nothing here decides who may ask whom. ``Traffic`` is what is known of one connection, and what bounds it.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import h11
import trio
from msgspec import Struct

from runner.core.model import NetworkRefusal
from runner.core.nurseries import open_services
from runner.network.http import MAX_HEAD, Headers
from runner.network.splice import splice
from runner.network.tls_stream import TlsStream
from runner.ports.network import EgressConnection
from runner.ports.provider import Connection

HEAD_SECONDS = 60.0  # for the first bytes of a connection, and for the head of each request once it has begun
CHUNK = 128 << 10
_LARGE = 1 << 20  # bytes of a body
_MUCH = 1 << 18  # bytes of one direction, from which on a pipe is worth its descriptors
_BEGINNING = 4  # bytes of a credential that wait for more, so that a message that ends like it is not kept for ever
ENDED = (trio.BrokenResourceError, trio.ClosedResourceError)
# RFC 9110 section 7.6.1, and what is meant for a proxy.
_OF_ONE_HOP = frozenset(
    b"connection proxy-connection keep-alive te trailer upgrade proxy-authorization proxy-authenticate expect".split()
)


class Refused(Exception):
    """A connection is refused, or cut. Never leaves the session."""

    def __init__(self, refusal: NetworkRefusal, message: str, status: int = 403) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.status = status


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a session. ``connections`` are those at once, ``session_bytes`` those of all, both ways."""

    connections: int = 256
    session_bytes: int = 64 << 30
    idle_seconds: float = 600.0  # without a byte in either direction
    total_seconds: float = 12 * 3600.0


class Traffic:
    """A connection, as much of it as is known. ``scope`` ends it when nothing comes for too long, or after all."""

    def __init__(self, limits: Limits, left: list[int]) -> None:
        """``left`` is the bytes that the session may still carry."""
        self.host, self.port, self.address, self.rule, self.origin, self.credential = "", 0, "", "", "", ""
        self.sent_bytes = self.received_bytes = self.requests = 0
        self._limits, self._left = limits, left
        self._until = trio.current_time() + limits.total_seconds
        self.scope = trio.CancelScope()
        self.alive()

    def alive(self) -> None:
        self.scope.deadline = min(trio.current_time() + self._limits.idle_seconds, self._until)

    def sent(self, count: int) -> None:
        self.sent_bytes += count
        self._count(count)

    def received(self, count: int) -> None:
        self.received_bytes += count
        self._count(count)

    def _count(self, count: int) -> None:
        self.alive()
        self._left[0] -= count
        if self._left[0] < 0:
            most = self._limits.session_bytes >> 20
            raise Refused(NetworkRefusal.BYTES, f"commands of a step get at most {most} MiB over the network", 503)

    def ended(self, seconds: float, refusal: NetworkRefusal | None) -> EgressConnection:
        return EgressConnection(
            host=self.host,
            port=self.port,
            address=self.address,
            rule=self.rule,
            origin=self.origin,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            requests=self.requests,
            credential=self.credential,
            seconds=seconds,
            refusal=refusal,
        )

    def overdue(self) -> Refused:
        """Return the limit that ended ``scope``."""
        if trio.current_time() >= self._until:
            return Refused(NetworkRefusal.TIME, f"a connection ends after {self._limits.total_seconds:g} s", 504)
        return Refused(NetworkRefusal.IDLE, f"no byte came for {self._limits.idle_seconds:g} s", 504)


class Buffered(trio.abc.HalfCloseableStream):
    """One end of a connection, whose first bytes may have been read already."""

    def __init__(self, transport: Connection | trio.SocketStream | TlsStream | Buffered, first: bytes = b"") -> None:
        self._transport, self._first = transport, first

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive what was read already, whatever its size, and then from the connection."""
        if not self._first:
            data = await self._transport.receive_some(max_bytes or CHUNK)
            return data if isinstance(data, bytes) else bytes(data)
        await trio.lowlevel.checkpoint()
        data, self._first = self._first, b""
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._transport.send_all(data if isinstance(data, bytes) else bytes(data))

    @property
    def socket(self) -> trio.socket.SocketType | None:
        """The kernel's socket below, unless there are bytes that were read already, or TLS."""
        if self._first or isinstance(self._transport, TlsStream):
            return None
        return self._transport.socket

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        """Close the sending direction. Raises ``trio.BrokenResourceError`` with TLS, which can close both only."""
        if isinstance(self._transport, TlsStream):
            raise trio.BrokenResourceError
        await self._transport.send_eof()

    async def aclose(self) -> None:
        await self._transport.aclose()


Opening = Callable[[], Awaitable[bytes]]


class Wire:
    """One end of an HTTP/1 connection: a command's, or that of a host, which counts its bytes."""

    def __init__(self, stream: Buffered, traffic: Traffic, *, host: bool = False) -> None:
        self.stream, self.traffic = stream, traffic
        self._counts = host
        self.protocol = h11.Connection(h11.CLIENT if host else h11.SERVER, max_incomplete_event_size=MAX_HEAD)

    async def next_event(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self.protocol.next_event()) is h11.NEED_DATA:
            self.protocol.receive_data(await self.receive())
        return event  # type: ignore[return-value]  # the other sentinel is handled

    async def receive(self) -> bytes:
        """Receive bytes past the parser; empty at the end."""
        try:
            data = await self.stream.receive_some(CHUNK)
        except trio.BrokenResourceError as error:
            if isinstance(error.__cause__, ssl.SSLError):
                raise tls_failure(self.traffic.host, error.__cause__) from None
            raise
        if self._counts:
            self.traffic.received(len(data))
        return data

    async def head(self, seconds: float | None = None) -> h11.Request | None:
        """Return the head of the next request; ``None`` when there is no other."""
        with trio.move_on_after(HEAD_SECONDS if seconds is None else seconds):
            event = await self.next_event()
            return event if isinstance(event, h11.Request) else None
        raise Refused(NetworkRefusal.MALFORMED, "the request did not go on", 408)

    async def send(self, *events: h11.Event) -> None:
        data = b"".join(self.protocol.send(event) or b"" for event in events)
        if self._counts:
            self.traffic.sent(len(data))
        await self.stream.send_all(data)

    def again(self) -> bool:
        """Tell whether the connection takes another request after this one, and get ready for it."""
        if {self.protocol.our_state, self.protocol.their_state} != {h11.DONE}:
            return False
        self.protocol.start_next_cycle()
        return True

    async def answer(self, status: int, message: str) -> None:
        """Answer a request here, unless an answer is under way or the command has gone."""
        if self.protocol.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = f"runner: {message}\n".encode()
        headers = [("content-type", "text/plain"), ("content-length", str(len(body))), ("connection", "close")]
        with suppress(*ENDED):
            await self.send(h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())


class Watch:
    """Looks for credentials in what a host answers; what may be the beginning of one waits for the next piece."""

    def __init__(self, needles: Sequence[bytes]) -> None:
        self._needles = tuple(dict.fromkeys(needles))
        self._held = b""

    @property
    def is_idle(self) -> bool:
        """Tell whether there is nothing to look for."""
        return not self._needles

    def pass_on(self, data: bytes, *, last: bool = False) -> bytes:
        """Return what may be sent on by now. Raises ``Refused`` for a credential."""
        if self.is_idle:
            return data
        text = self._held + data if self._held else data
        if any(needle in text for needle in self._needles):
            raise Refused(NetworkRefusal.ECHO, "the host gave the credential back", 502)
        held = 0 if last else max((_begun(text, needle) for needle in self._needles), default=0)
        self._held = text[len(text) - held :] if held else b""
        return text[: len(text) - held]


_UNWATCHED = Watch(())


def _begun(text: bytes, needle: bytes) -> int:
    """Return how many bytes at the end of a text are the beginning of a needle, if they are enough to tell."""
    most = min(len(needle) - 1, len(text))
    return next((n for n in range(most, _BEGINNING - 1, -1) if text.endswith(needle[:n])), 0)


def tls_failure(host: str, error: BaseException | None) -> Refused:
    """Name the reason for which TLS with a host failed."""
    reason = getattr(error, "reason", None) or ""
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        why = "wants a certificate of its clients, and commands have none here"
    else:
        words = getattr(error, "verify_message", None) or reason.lower().replace("_", " ")
        why = f"cannot be verified: {words or 'no TLS'}"
    return Refused(NetworkRefusal.CERTIFICATE, f"`{host}` {why}", 502)


def end_to_end(headers: Headers, *less: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers that are not for the next hop only, without those that CGI reads as one of ``less``."""
    dropped = _OF_ONE_HOP.union(less)
    return [(name, value) for name, value in headers if name.replace(b"_", b"-") not in dropped]


async def forward(client: Wire, server: Wire, request: h11.Request, watch: Watch) -> None:
    """Send a request on and its answer back; after an upgrade, bytes until both ends are done."""
    failure: Refused | h11.ProtocolError | None = None
    if client.protocol.they_are_waiting_for_100_continue:
        await client.send(h11.InformationalResponse(status_code=100, headers=[]))

    async with open_services() as services:

        async def upload() -> None:
            nonlocal failure
            try:
                while isinstance(event := await _next_of_body(client), h11.Data):
                    await server.send(event)
                await server.send(h11.EndOfMessage())
            except (Refused, h11.ProtocolError) as error:
                failure = error
                services.cancel_scope.cancel()
            except ENDED:
                pass  # the answer says why, if there is one

        await server.send(request)
        services.start_soon(upload)
        upgraded = await _download(client, server, request, watch)
    if failure is not None:
        raise failure
    if upgraded:
        theirs = Buffered(server.stream, server.protocol.trailing_data[0])

        async def opening() -> bytes:
            return client.protocol.trailing_data[0] or await client.stream.receive_some(CHUNK)

        await copy(client.stream, theirs, server.traffic, opening, watch)


async def _next_of_body(client: Wire) -> h11.Event | type[h11.PAUSED]:
    with trio.move_on_after(HEAD_SECONDS):
        return await client.next_event()
    raise Refused(NetworkRefusal.MALFORMED, "the request did not go on", 408)


async def _download(client: Wire, server: Wire, request: h11.Request, watch: Watch) -> bool:
    """Send an answer back; return whether it ends HTTP on this connection.

    After a large body of known length, which passes by the parsers, both connections take no other request.
    """
    while True:
        try:
            answer = await server.next_event()
        except h11.RemoteProtocolError as error:
            raise Refused(
                NetworkRefusal.UNREACHABLE, f"the host does not answer as HTTP/1 wants: {error}", 502
            ) from None
        if isinstance(answer, h11.Response | h11.InformationalResponse):
            switches = answer.status_code == 101
            headers = list(answer.headers) if switches else end_to_end(answer.headers, b"alt-svc")
            head = b"\n".join((answer.reason, *(part for header in headers for part in header)))
            watch.pass_on(head, last=True)
            if switches:
                await client.send(h11.InformationalResponse(status_code=101, headers=headers))
                return True
            if isinstance(answer, h11.Response):
                large = _large_body(request, answer)
                headers += [(b"connection", b"close")] if large else []
                await client.send(h11.Response(status_code=answer.status_code, headers=headers, reason=answer.reason))
                if large:
                    await _stream(client, server, large, watch)
                    return False
        elif isinstance(answer, h11.Data):
            if data := watch.pass_on(bytes(answer.data)):
                await client.send(h11.Data(data=data))
        elif isinstance(answer, h11.EndOfMessage):
            rest = watch.pass_on(b"", last=True)
            await client.send(*([h11.Data(data=rest)] if rest else []), h11.EndOfMessage())
            return False
        else:
            raise trio.BrokenResourceError("the host has gone")


def _large_body(request: h11.Request, answer: h11.Response) -> int:
    """Return how long the body of an answer is, if that is known and much; 0 otherwise."""
    headers = dict(answer.headers)
    if request.method == b"HEAD" or answer.status_code in (204, 304) or b"transfer-encoding" in headers:
        return 0
    length = int(headers.get(b"content-length", b"0"))  # the parser has judged it
    return length if length >= _LARGE else 0


async def _stream(client: Wire, server: Wire, length: int, watch: Watch) -> None:
    """Send a body of this length back, whose beginning may have come with its head."""
    data = server.protocol.trailing_data[0][:length]
    while True:
        length -= len(data)
        if passed := watch.pass_on(data, last=not length):
            await client.stream.send_all(passed)
        if not length:
            return
        if watch.is_idle and (ends := _sockets(server.stream, client.stream)):
            if await splice(*ends, server.traffic.received, length) == length:
                return
            break
        if not (data := (await server.receive())[:length]):
            break
    raise trio.BrokenResourceError("the host has gone")


async def _pass_on(source: Buffered, target: Buffered, moved: Callable[[int], None], watch: Watch) -> None:
    """Copy one way until its end. Of much that nobody looks at, the kernel moves the rest."""
    total = 0
    while data := await source.receive_some(CHUNK):
        moved(len(data))
        if passed := watch.pass_on(data):
            await target.send_all(passed)
        total += len(data)
        if total >= _MUCH and watch.is_idle and (ends := _sockets(source, target)):
            await splice(*ends, moved, None)
            return


def _sockets(source: Buffered, target: Buffered) -> tuple[trio.socket.SocketType, trio.socket.SocketType] | None:
    one, other = source.socket, target.socket
    return (one, other) if one is not None and other is not None else None


async def copy(client: Buffered, server: Buffered, traffic: Traffic, opening: Opening, watch: Watch) -> None:
    """Copy both ways until both ends are done. ``opening`` gets the first bytes of the client."""
    failure: Refused | None = None

    async with trio.open_nursery() as nursery:

        async def one_way(copying: Callable[[], Awaitable[None]], to: Buffered) -> None:
            nonlocal failure
            try:
                await copying()
                await to.send_eof()
            except Refused as refused:
                failure = refused
                nursery.cancel_scope.cancel()
            except ENDED:
                nursery.cancel_scope.cancel()

        async def up() -> None:
            if data := await opening():
                traffic.sent(len(data))
                await server.send_all(data)
                await _pass_on(client, server, traffic.sent, _UNWATCHED)

        async def down() -> None:
            await _pass_on(server, client, traffic.received, watch)

        nursery.start_soon(one_way, up, server)
        nursery.start_soon(one_way, down, client)
    if failure is not None:
        raise failure
