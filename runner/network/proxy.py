"""The egress proxy: CONNECT, SOCKS5, and requests with an absolute URL, to the hosts that a plan names.

A name is resolved once, and the address that was judged is the one that is dialled. One request with an absolute URL
is served a connection, so nothing can be hidden behind its end. Everything else is refused.

Theory of operation. A connection's first bytes say how it asks (``HttpClient``, ``SocksClient``), ``Way`` dials, and
then bytes are copied. To a host that gets a credential TLS is ended here, with a certificate of the session's own
authority, and each request is sent on with the credential in a TLS of our own, which verifies the host.
"""

from __future__ import annotations

import math
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import h11
import trio

from runner.core.clock import now_microseconds
from runner.core.hosts import NetworkSpec, canonical_host
from runner.core.injection import TLS_PORT
from runner.core.model import NetworkRefusal
from runner.core.nurseries import open_services
from runner.network.exchange import (
    ENDED,
    HEAD_SECONDS,
    Buffered,
    Limits,
    Refused,
    Traffic,
    Watch,
    Wire,
    copy,
    end_to_end,
    forward,
)
from runner.network.proxy_client import HttpClient, ProxyClient, authority, check_length, client_of
from runner.network.served_session import IDENTITY, ConnectionScopes
from runner.network.tls_name import MOST, Incomplete, server_name
from runner.network.tls_stream import TlsStream
from runner.network.way import Resolve, Way, resolve
from runner.ports.network import MAX_REPORTED, Credential, EgressConnection, EgressSession, Trust
from runner.ports.provider import Connection

if TYPE_CHECKING:
    from runner.network.authority import Authority

# By which some servers take another method or path than the request line says.
_OVERRIDES = (b"x-http-method-override", b"x-http-method", b"x-method-override", b"x-original-url", b"x-rewrite-url")
_NOTHING = Watch(())
LIMITS = Limits()


@asynccontextmanager
async def open_egress(
    allowed: NetworkSpec,
    tell: Callable[[EgressConnection], None],
    credentials: Sequence[Credential] = (),
    *,
    reach: Mapping[str, str],
    resolve: Resolve = resolve,
    limits: Limits = LIMITS,
) -> AsyncIterator[EgressSession]:
    """Open a session of the proxy of this host, with the network ``reach`` of the settings.

    Raises ``UsageError`` when a proxy or certificates that it names cannot be used.
    """
    session = _Session(Way(allowed, reach, resolve), tell, credentials, limits)
    try:
        yield session
    finally:
        session.close()


class _Session:
    def __init__(
        self, way: Way, tell: Callable[[EgressConnection], None], credentials: Sequence[Credential], limits: Limits
    ) -> None:
        self._way, self._tell, self._limits = way, tell, limits
        self._connections = ConnectionScopes()
        self._left = [limits.session_bytes]
        self._told = 0
        self._more: Counter[tuple[int, NetworkRefusal | None]] = Counter()
        self._credentials: dict[tuple[str, int], list[Credential]] = {}
        for one in credentials:
            self._credentials.setdefault((one.injection.host, one.injection.port), []).append(one)
        self._authority: Authority | None = None
        if credentials:
            from runner.network.authority import Authority  # with cryptography, which is slow to import

            self._authority = Authority(datetime.fromtimestamp(now_microseconds() / 1e6, UTC))
        self._contexts: dict[str, ssl.SSLContext] = {}

    @property
    def trust(self) -> Trust | None:
        if self._authority is None and not self._way.own_certificates:
            return None
        from runner.network.authority import trust_in

        own = [self._authority.der] if self._authority is not None else []
        return trust_in([*own, *self._way.certificates().get_ca_certs(binary_form=True)])

    def close(self) -> None:
        """End the connections that are still served, and report those that were only counted."""
        self._connections.close()
        for (port, refusal), count in self._more.items():
            self._tell(EgressConnection(host="", port=port, refusal=refusal, count=count))

    async def serve(self, connection: Connection) -> None:
        began, traffic = trio.current_time(), Traffic(self._limits, self._left)
        refused: Refused | None = None
        client: ProxyClient = HttpClient(Buffered(connection), traffic)
        with self._connections.serving():
            try:
                with traffic.scope:
                    client = await client_of(connection, traffic)
                    await self._serve(client, traffic)
                if traffic.scope.cancelled_caught:
                    refused = traffic.overdue()
            except Refused as error:
                refused = error
            except h11.ProtocolError as error:
                refused = Refused(NetworkRefusal.MALFORMED, str(error), 400)
            except ENDED:
                pass
            finally:
                self._report(traffic, refused.refusal if refused else None, trio.current_time() - began)
            if refused is not None:
                with trio.move_on_after(HEAD_SECONDS), suppress(*ENDED):
                    await client.refuse(refused)

    def _report(self, traffic: Traffic, refusal: NetworkRefusal | None, seconds: float) -> None:
        if not traffic.host and refusal is None:
            return  # a client that opened a connection and said nothing
        self._told += 1
        if self._told > MAX_REPORTED:
            self._more[traffic.port, refusal] += 1
            return
        self._tell(traffic.ended(seconds, refusal))

    async def _serve(self, client: ProxyClient, traffic: Traffic) -> None:
        asked = await client.asked()
        if asked is None:
            return
        if len(self._connections) > self._limits.connections:
            raise Refused(NetworkRefusal.BUSY, f"more than {self._limits.connections} connections at once", 503)
        traffic.host, traffic.port = asked.host[:255], asked.port
        name = canonical_host(asked.host)
        if name is None:
            raise Refused(NetworkRefusal.MALFORMED, f"`{asked.host[:255]}` is not the name of a host", 400)
        traffic.host = name
        credentials = self._credentials.get((name, asked.port))
        if asked.request is not None:
            assert isinstance(client, HttpClient)  # no other asks for a URL
            if credentials:
                raise _wants_tls(name)
            server, request = await self._way.dial_http(name, asked.port, asked.request, traffic)
            async with server:
                await forward(client.wire, Wire(server, traffic, host=True), request, _NOTHING)
        elif credentials:
            await self._with_credentials(client, name, asked.port, credentials, traffic)
        else:
            server = await self._way.dial(name, asked.port, traffic)
            async with server:
                stream = await client.accept()
                await copy(stream, server, traffic, lambda: _opening(stream, name), _NOTHING)

    async def _with_credentials(
        self, client: ProxyClient, name: str, port: int, credentials: Sequence[Credential], traffic: Traffic
    ) -> None:
        assert self._authority is not None  # made with the credentials
        traffic.credential = credentials[0].injection.secret
        context = self._contexts.get(name)
        if context is None:
            context = self._contexts[name] = self._authority.server_context(name)
        server = await self._way.dial(name, port, traffic)
        async with server:
            stream = await client.accept()
            reached: Buffered | Refused | None = None

            async def reach() -> None:
                nonlocal reached
                try:
                    reached = await self._way.begin_tls(server, name)
                except Refused as refused:
                    reached = refused
                ready.set()

            async with open_services() as services:  # both handshakes at once
                ready = trio.Event()
                services.start_soon(reach)
                secure = await _end_tls(stream, name, context)
                await ready.wait()
            await _serve_requests(secure, reached, credentials, traffic)


async def _end_tls(stream: Buffered, name: str, context: ssl.SSLContext) -> TlsStream:
    """Make the handshake of a command that wants a host. Raises ``Refused``."""
    first = await _opening(stream, name)
    if first[:1] != b"\x16":
        raise _wants_tls(name)
    secure = TlsStream(Buffered(stream, first), context, server_side=True)
    try:
        with trio.fail_after(HEAD_SECONDS):
            await secure.do_handshake()
    except (*ENDED, trio.TooSlowError):
        message = "the command does not trust the certificates of `SSL_CERT_FILE`"
        raise Refused(NetworkRefusal.CERTIFICATE, message) from None
    return secure


def _wants_tls(name: str) -> Refused:
    message = f"`{name}` gets a credential here, so that the connection to it has to be TLS"
    return Refused(NetworkRefusal.CERTIFICATE, message)


async def _serve_requests(
    secure: TlsStream, reached: Buffered | Refused | None, credentials: Sequence[Credential], traffic: Traffic
) -> None:
    """Serve the requests of a command to a host that was reached, or tell it why not."""
    down = Wire(Buffered(secure), traffic)
    try:
        if not isinstance(reached, Buffered):
            assert reached is not None
            raise reached
        async with reached:
            await _exchanges(down, Wire(reached, traffic, host=True), traffic.host, traffic.port, credentials)
    except Refused as refused:
        await down.answer(refused.status, str(refused))
        raise
    except h11.ProtocolError as error:
        await down.answer(400, str(error))
        raise
    finally:
        await secure.aclose()


async def _exchanges(down: Wire, up: Wire, name: str, port: int, credentials: Sequence[Credential]) -> None:
    """Serve the requests of a connection to a host, each with its credential."""
    seconds: float | None = None
    while (head := await down.head(seconds)) is not None:
        request, watch = _with_credential(head, name, port, credentials)
        up.traffic.requests += 1
        await forward(down, up, request, watch)
        if not (down.again() and up.again()):
            return
        seconds = math.inf  # but for the limits of the connection


def _with_credential(
    head: h11.Request, name: str, port: int, credentials: Sequence[Credential]
) -> tuple[h11.Request, Watch]:
    """Return a command's request as the host gets it. Raises ``Refused`` for one that may not have the credential."""
    check_length(head)
    method, path = head.method.decode("ascii"), head.target.partition(b"?")[0].decode("ascii")
    asked = [value.decode("ascii") for key, value in head.headers if key == b"host"]
    hosts = [(canonical_host(host), number) for host, number in (authority(one, TLS_PORT) for one in asked)]
    if hosts != [(name, port)]:
        raise Refused(NetworkRefusal.OTHER_NAME, f"a request on the connection to `{name}` is for another host", 421)
    chosen = next((one for one in credentials if one.injection.allows(method, path)), None)
    if method == "TRACE" or not path.startswith("/") or chosen is None:
        message = f"`{method} {path[:255]}` is not among the requests that the plan allows to `{name}`"
        raise Refused(NetworkRefusal.REQUEST, message)
    value = chosen.secret.reveal()
    header = chosen.injection.header_of(value)
    less = (header[0], b"host", b"authorization", b"accept-encoding", *_OVERRIDES)
    headers = [(b"host", asked[0].encode()), *end_to_end(head.headers, *less), IDENTITY, header]
    protocols = [one.strip() for key, value in head.headers if key == b"upgrade" for one in value.split(b",")]
    # The requests after a change to HTTP/2 would not be judged.
    protocols = [one for one in protocols if not one.lower().startswith((b"h2c", b"http"))]
    headers += [(b"connection", b"upgrade"), (b"upgrade", b", ".join(protocols))] if protocols else []
    watch = Watch((value.strip(), header[1].rpartition(b" ")[2]))
    return h11.Request(method=head.method, target=head.target, headers=headers), watch


async def _opening(stream: Buffered, host: str) -> bytes:
    """Return the first bytes of a client, whose TLS must ask for the host that it said it would."""
    data = await stream.receive_some()
    while True:
        try:
            name = server_name(data)
            break
        except Incomplete:
            more = await stream.receive_some()
            data += more
            if more and len(data) <= MOST:
                continue
        except ValueError:
            pass
        raise Refused(NetworkRefusal.OTHER_NAME, "the first message of TLS cannot be read")
    if name is not None and canonical_host(name) != host:
        raise Refused(NetworkRefusal.OTHER_NAME, f"TLS asks for `{name[:255]}` on a connection to `{host}`")
    return data
