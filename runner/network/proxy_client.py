"""The command's end of a connection to the egress proxy: how it asks for a host, and how it is answered.

The first byte tells SOCKS5 (RFC 1928) from HTTP/1.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol

import h11
import trio
from msgspec import Struct

from runner.core.hosts import canonical_host, host_port
from runner.core.model import NetworkRefusal
from runner.network.exchange import HEAD_SECONDS, Buffered, Refused, Traffic, Wire, end_to_end
from runner.ports.provider import Connection

_TARGET = re.compile(rb"http://([^/?#]+)([/?][^#]*)?")
_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:\[\]@]*)(?::([0-9]{1,5}))?")
_VERSION, _NO_AUTHENTICATION, _CONNECT = 5, 0, 1
_IPV4, _NAME, _IPV6 = 1, 3, 4
_GRANTED, _FAILED, _FORBIDDEN, _UNREACHABLE, _NO_SUCH_COMMAND, _NO_SUCH_ADDRESS = 0, 1, 2, 4, 7, 8
_REPLIES = {
    NetworkRefusal.MALFORMED: _FAILED,
    NetworkRefusal.BUSY: _FAILED,
    NetworkRefusal.UNRESOLVED: _UNREACHABLE,
    NetworkRefusal.UNREACHABLE: _UNREACHABLE,
}


class Asked(Struct, frozen=True):
    """A host as the command wrote it. ``request`` is the one for a URL, with the target and headers for the host."""

    host: str
    port: int
    request: h11.Request | None = None


class ProxyClient(Protocol):
    async def asked(self) -> Asked | None:
        """Return the host that is asked for; ``None`` if nothing is. Raises ``Refused``."""

    async def accept(self) -> Buffered:
        """Say that the host is there, and return the connection to it from here on."""

    async def refuse(self, refused: Refused) -> None:
        """Say why not, unless it is too late for that."""


async def client_of(connection: Connection, traffic: Traffic) -> ProxyClient:
    """Wait for the first bytes of a connection. Raises ``Refused`` when none come."""
    with trio.move_on_after(HEAD_SECONDS):
        first = await connection.receive_some(1 << 16)
        if first[:1] == bytes([_VERSION]):
            return SocksClient(connection, first)
        return HttpClient(Buffered(connection, first), traffic)
    raise Refused(NetworkRefusal.MALFORMED, "the request did not go on", 408)


class HttpClient:
    def __init__(self, stream: Buffered, traffic: Traffic) -> None:
        self.wire = Wire(stream, traffic)

    async def asked(self) -> Asked | None:
        head = await self.wire.head()
        if head is None:
            return None
        if head.method == b"CONNECT":
            return Asked(*authority(head.target.decode("ascii"), None))
        found = _TARGET.fullmatch(head.target)
        if found is None:
            raise Refused(NetworkRefusal.MALFORMED, "a request to a proxy has a whole http:// URL, or is CONNECT", 400)
        check_length(head)
        host, port = authority(found[1].decode("ascii"), 80)
        named = host_port(canonical_host(host) or host, None if port == 80 else port).encode()
        headers = [(b"host", named), (b"connection", b"close"), *end_to_end(head.headers, b"host")]
        return Asked(host, port, h11.Request(method=head.method, target=found[2] or b"/", headers=headers))

    async def accept(self) -> Buffered:
        await self.wire.send(h11.Response(status_code=200, headers=[]))
        return Buffered(self.wire.stream, self.wire.protocol.trailing_data[0])

    async def refuse(self, refused: Refused) -> None:
        await self.wire.answer(refused.status, str(refused))


class SocksClient:
    def __init__(self, connection: Connection, first: bytes) -> None:
        self._connection, self._data = connection, first
        self._may_reply = False

    async def asked(self) -> Asked | None:
        with trio.move_on_after(HEAD_SECONDS):
            _, count = await self._take(2)
            if _NO_AUTHENTICATION not in await self._take(count):
                await self._connection.send_all(bytes([_VERSION, 0xFF]))
                raise Refused(NetworkRefusal.MALFORMED, "SOCKS is spoken here without a user")
            await self._connection.send_all(bytes([_VERSION, _NO_AUTHENTICATION]))
            self._may_reply = True
            version, command, _, kind = await self._take(4)
            if version != _VERSION:
                raise Refused(NetworkRefusal.MALFORMED, "SOCKS of another version")
            host = await self._host(kind)
            port = int.from_bytes(await self._take(2))
            if command != _CONNECT:  # datagrams, and connections from outside
                await self._reply(_NO_SUCH_COMMAND)
                raise Refused(NetworkRefusal.MALFORMED, "SOCKS makes connections here, nothing else")
            return Asked(host, port)
        raise Refused(NetworkRefusal.MALFORMED, "the request did not go on")

    async def _host(self, kind: int) -> str:
        if kind == _IPV4:
            return str(IPv4Address(await self._take(4)))
        if kind == _IPV6:
            return f"[{IPv6Address(await self._take(16))}]"
        if kind == _NAME:
            (length,) = await self._take(1)
            return (await self._take(length)).decode("latin-1")
        await self._reply(_NO_SUCH_ADDRESS)
        raise Refused(NetworkRefusal.MALFORMED, "an address that SOCKS does not know")

    async def accept(self) -> Buffered:
        await self._reply(_GRANTED)
        return Buffered(self._connection, self._data)

    async def refuse(self, refused: Refused) -> None:
        await self._reply(_REPLIES.get(refused.refusal, _FORBIDDEN))

    async def _reply(self, code: int) -> None:
        """Answer the request, once, with no address: none here means anything to a command."""
        if self._may_reply:
            self._may_reply = False
            await self._connection.send_all(bytes([_VERSION, code, 0, _IPV4]) + bytes(6))

    async def _take(self, count: int) -> bytes:
        while len(self._data) < count:
            more = await self._connection.receive_some(1 << 16)
            if not more:
                raise trio.BrokenResourceError("the command has gone")
            self._data += more
        taken, self._data = self._data[:count], self._data[count:]
        return taken


def authority(text: str, port: int | None) -> tuple[str, int]:
    """Return the host and the port of an authority. Raises ``Refused``."""
    found = _AUTHORITY.fullmatch(text)
    if found is None or not found[1] or (found[2] is None and port is None):
        raise Refused(NetworkRefusal.MALFORMED, "the host of a request is HOST:PORT", 400)
    number = int(found[2]) if found[2] is not None else port or 0
    if not 0 < number < 65536:
        raise Refused(NetworkRefusal.MALFORMED, f"{number} is not a port", 400)
    return found[1], number


def check_length(head: h11.Request) -> None:
    """Raise ``Refused`` for a request that may be of two lengths."""
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in head.headers}:
        raise Refused(NetworkRefusal.MALFORMED, "a request says twice, and in two ways, how long it is", 400)
