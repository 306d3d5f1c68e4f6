"""The egress proxy: CONNECT, and requests with an absolute URL, to the hosts that a plan names.

A name is resolved once, and the address that was judged is the one that is dialled. One request with an absolute URL
is served a connection, so nothing can be hidden behind its end. Everything else is refused.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address

import h11
import trio
from msgspec import Struct
from msgspec.structs import asdict

from runner.core.hosts import Address, NetworkSpec, canonical_host, is_address, reachable
from runner.core.model import NetworkRefusal
from runner.network.http import MAX_HEAD, READ_SECONDS, Headers
from runner.network.served_session import ConnectionScopes
from runner.network.tls_name import MOST, Incomplete, server_name
from runner.ports.network import MAX_REPORTED, EgressConnection, EgressSession
from runner.ports.provider import Connection

CONNECT_SECONDS = 15.0  # for each address
RESOLVE_SECONDS = 15.0
IDLE_SECONDS = 600.0  # without a byte in either direction
MAX_CONNECTIONS = 256  # at once, of one session
_CHUNK = 64 << 10
_TARGET = re.compile(rb"http://([^/?#]+)([/?][^#]*)?")
_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:\[\]@]*)(?::([0-9]{1,5}))?")
# RFC 9110 section 7.6.1, and what is meant for a proxy.
_OF_ONE_HOP = frozenset(
    b"connection proxy-connection keep-alive te trailer upgrade proxy-authorization proxy-authenticate expect".split()
)
_ENDED = (trio.BrokenResourceError, trio.ClosedResourceError)

Resolve = Callable[[str], Awaitable[Sequence[Address]]]


class Refused(Exception):
    """A connection is refused. Never leaves the session."""

    def __init__(self, refusal: NetworkRefusal, message: str, status: int = 403) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.status = status


async def resolve(host: str) -> Sequence[Address]:
    """Return the addresses of a host, by the resolver of this host. Raises ``OSError``."""
    found = await trio.socket.getaddrinfo(host, None, type=trio.socket.SOCK_STREAM)
    return [ip_address(address[0]) for *_, address in found]


@asynccontextmanager
async def open_egress(
    allowed: NetworkSpec, tell: Callable[[EgressConnection], None], *, resolve: Resolve = resolve
) -> AsyncIterator[EgressSession]:
    """Open a session of the proxy of this host, which dials directly."""
    session = _Session(allowed, tell, resolve)
    try:
        yield session
    finally:
        session.close()


class _Traffic(Struct):
    """A connection, as much of it as is known."""

    host: str = ""
    port: int = 0
    address: str = ""
    rule: str = ""
    origin: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0


class _Session:
    def __init__(self, allowed: NetworkSpec, tell: Callable[[EgressConnection], None], resolve: Resolve) -> None:
        self._allowed, self._tell, self._resolve = allowed, tell, resolve
        self._connections = ConnectionScopes()
        self._told = 0
        self._more: Counter[tuple[int, NetworkRefusal | None]] = Counter()

    def close(self) -> None:
        """End the connections that are still served, and report those that were only counted."""
        self._connections.close()
        for (port, refusal), count in self._more.items():
            self._tell(EgressConnection(host="", port=port, refusal=refusal, count=count))

    async def serve(self, connection: Connection) -> None:
        began, traffic = trio.current_time(), _Traffic()
        refusal: NetworkRefusal | None = None
        with self._connections.serving():
            client = _Client(connection)
            try:
                await self._serve(client, traffic)
            except Refused as refused:
                refusal = refused.refusal
                await client.refuse(refused.status, str(refused))
            except (h11.RemoteProtocolError, h11.LocalProtocolError) as error:
                refusal = NetworkRefusal.MALFORMED
                await client.refuse(400, str(error))
            except _ENDED:
                pass
            finally:
                self._report(traffic, refusal, trio.current_time() - began)

    def _report(self, traffic: _Traffic, refusal: NetworkRefusal | None, seconds: float) -> None:
        if not traffic.host and refusal is None:
            return  # a client that opened a connection and said nothing
        self._told += 1
        if self._told > MAX_REPORTED:
            self._more[traffic.port, refusal] += 1
            return
        self._tell(EgressConnection(**asdict(traffic), seconds=seconds, refusal=refusal))

    async def _serve(self, client: _Client, traffic: _Traffic) -> None:
        head = await client.head()
        if head is None:
            return
        if len(self._connections) > MAX_CONNECTIONS:
            raise Refused(NetworkRefusal.BUSY, f"more than {MAX_CONNECTIONS} connections at once", 503)
        if head.method == b"CONNECT":
            host, port = _authority(head.target.decode("ascii"), None)
            server, _ = await self._dial(host, port, traffic)
            async with server:
                await _tunnel(client, server, host, traffic)
            return
        target = _TARGET.fullmatch(head.target)
        if target is None:
            raise Refused(NetworkRefusal.MALFORMED, "a request to a proxy has a whole http:// URL, or is CONNECT", 400)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in head.headers}:
            raise Refused(NetworkRefusal.MALFORMED, "a request says twice, and in two ways, how long it is", 400)
        host, port = _authority(target[1].decode("ascii"), 80)
        server, authority = await self._dial(host, port, traffic)
        async with server:
            request = h11.Request(
                method=head.method,
                target=target[2] or b"/",
                headers=[(b"host", authority.encode()), (b"connection", b"close"), *_end_to_end(head.headers, b"host")],
            )
            await _forward(client, server, request, traffic)

    async def _dial(self, host: str, port: int, traffic: _Traffic) -> tuple[trio.SocketStream, str]:
        """Connect to an allowed host; return the connection and the host's authority."""
        traffic.host, traffic.port = host[:255], port
        name = canonical_host(host)
        if name is None:
            raise Refused(NetworkRefusal.MALFORMED, f"`{host[:255]}` is not the name of a host", 400)
        traffic.host = name
        rule = self._allowed.rule_for(name, port)
        if rule is None:
            message = f"`{name}:{port}` is not among the hosts that the plan allows: {self._allowed}"
            raise Refused(NetworkRefusal.NOT_ALLOWED, message)
        traffic.rule, traffic.origin = str(rule), rule.origin
        addresses = reachable(await self._addresses(name), rule, name)
        if not addresses:
            message = f"`{name}` has private addresses only; a rule with `private: true` would allow them"
            raise Refused(NetworkRefusal.PRIVATE, message)
        for address in addresses:
            with trio.move_on_after(CONNECT_SECONDS):
                try:
                    server = await trio.open_tcp_stream(str(address), port, happy_eyeballs_delay=math.inf)
                except OSError:
                    continue
                traffic.address = str(address)
                shown = f"[{name}]" if ":" in name else name
                return server, shown if port == 80 else f"{shown}:{port}"
        raise Refused(NetworkRefusal.UNREACHABLE, f"`{name}:{port}` cannot be reached from this host", 502)

    async def _addresses(self, name: str) -> Sequence[Address]:
        if is_address(name):
            return [ip_address(name)]
        with trio.move_on_after(RESOLVE_SECONDS):
            try:
                return await self._resolve(name)
            except OSError:
                pass
        raise Refused(NetworkRefusal.UNRESOLVED, f"`{name}` is not a name that this host can resolve", 502)


def _authority(text: str, port: int | None) -> tuple[str, int]:
    found = _AUTHORITY.fullmatch(text)
    if found is None or not found[1] or (found[2] is None and port is None):
        raise Refused(NetworkRefusal.MALFORMED, "the host of a request is HOST:PORT", 400)
    number = int(found[2]) if found[2] is not None else port or 0
    if not 0 < number < 65536:
        raise Refused(NetworkRefusal.MALFORMED, f"{number} is not a port", 400)
    return found[1], number


class _Client:
    """The command's end of a connection, which speaks HTTP/1."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)

    async def head(self) -> h11.Request | None:
        event = await self.next_event()
        return event if isinstance(event, h11.Request) else None

    async def next_event(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self.protocol.next_event()) is h11.NEED_DATA:
            with trio.move_on_after(READ_SECONDS) as waiting:
                self.protocol.receive_data(await self.connection.receive_some(_CHUNK))
            if waiting.cancelled_caught:
                raise Refused(NetworkRefusal.MALFORMED, "the request did not go on", 408)
        return event  # type: ignore[return-value]  # the other sentinel is handled

    async def send(self, *events: h11.Event) -> int:
        data = b"".join(self.protocol.send(event) or b"" for event in events)
        await self.connection.send_all(data)
        return len(data)

    async def refuse(self, status: int, message: str) -> None:
        """Answer, unless an answer is under way or the command has gone."""
        if self.protocol.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = f"runner: {message}\n".encode()
        headers = [("content-type", "text/plain"), ("content-length", str(len(body))), ("connection", "close")]
        with suppress(*_ENDED):
            await self.send(h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())


async def _tunnel(client: _Client, server: trio.SocketStream, host: str, traffic: _Traffic) -> None:
    """Copy both ways until both ends are done, or nothing comes for too long."""
    await client.send(h11.Response(status_code=200, headers=[]))
    first, _ = client.protocol.trailing_data
    failure: Refused | None = None

    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope

        def alive() -> None:
            scope.deadline = trio.current_time() + IDLE_SECONDS

        async def up() -> None:
            nonlocal failure
            try:
                data = await _checked(client.connection, first, host)
                while data:
                    alive()
                    traffic.sent_bytes += len(data)
                    await server.send_all(data)
                    data = await client.connection.receive_some(_CHUNK)
                await server.send_eof()
            except Refused as refused:
                failure = refused
                scope.cancel()
            except _ENDED:
                scope.cancel()

        async def down() -> None:
            try:
                while data := await server.receive_some(_CHUNK):
                    alive()
                    traffic.received_bytes += len(data)
                    await client.connection.send_all(data)
                await client.connection.send_eof()
            except _ENDED:
                scope.cancel()

        alive()
        nursery.start_soon(up)
        nursery.start_soon(down)
    if failure is not None:
        raise failure


async def _checked(connection: Connection, data: bytes, host: str) -> bytes:
    """Return the first bytes of a client, whose TLS must ask for the host that it said it would."""
    while True:
        if not data:
            data = await connection.receive_some(_CHUNK)
        try:
            name = server_name(data)
            break
        except Incomplete:
            more = await connection.receive_some(_CHUNK)
            data += more
            if more and len(data) <= MOST:
                continue
        except ValueError:
            pass
        raise Refused(NetworkRefusal.OTHER_NAME, "the first message of TLS cannot be read")
    if name is not None and canonical_host(name) != canonical_host(host):
        raise Refused(NetworkRefusal.OTHER_NAME, f"TLS asks for `{name[:255]}` on a connection to `{host}`")
    return data


def _end_to_end(headers: Headers, *less: bytes) -> Headers:
    """Return the headers that are not for the next hop only."""
    return [(name, value) for name, value in headers if name not in _OF_ONE_HOP and name not in less]


async def _forward(client: _Client, server: trio.SocketStream, request: h11.Request, traffic: _Traffic) -> None:
    """Send one request on and its answer back, each framed anew."""
    wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)

    async def send(event: h11.Event) -> None:
        data = wire.send(event) or b""
        traffic.sent_bytes += len(data)
        await server.send_all(data)

    if client.protocol.they_are_waiting_for_100_continue:
        await client.send(h11.InformationalResponse(status_code=100, headers=[]))
    await send(request)
    while isinstance(event := await client.next_event(), h11.Data):
        await send(event)
    await send(h11.EndOfMessage())
    while True:
        answer = wire.next_event()
        if answer is h11.NEED_DATA:
            with trio.move_on_after(IDLE_SECONDS) as waiting:
                data = await server.receive_some(_CHUNK)
                traffic.received_bytes += len(data)
                wire.receive_data(data)
            if waiting.cancelled_caught:
                raise Refused(NetworkRefusal.UNREACHABLE, f"`{traffic.host}` has not answered", 504)
        elif isinstance(answer, h11.Response):
            headers = [*_end_to_end(answer.headers), (b"connection", b"close")]
            await client.send(h11.Response(status_code=answer.status_code, headers=headers))
        elif isinstance(answer, h11.Data | h11.EndOfMessage):
            await client.send(answer)
        if isinstance(answer, h11.EndOfMessage | h11.ConnectionClosed):
            return
