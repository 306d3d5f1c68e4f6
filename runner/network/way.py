"""The way from this host to the hosts of a plan: names are resolved, addresses judged, connections made.

Behind a proxy of this host's own, which its environment names, the proxy dials, and resolves the name once more. So
all addresses that are known here have to be allowed; and where this host cannot resolve names, only a host that a rule
names in full is asked for. A command cannot choose such a name.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Literal

import h11
import trio

from runner.core.hosts import Address, NetworkSpec, host_port, is_address, reachable
from runner.core.model import NetworkRefusal
from runner.network.exchange import ENDED, Buffered, Refused, Traffic, Wire, tls_failure
from runner.network.host_proxy import HostProxy, check_proxies, find_proxy
from runner.network.tls_stream import TlsStream

CONNECT_SECONDS = 15.0  # for each address
RESOLVE_SECONDS = 15.0

Resolve = Callable[[str], Awaitable[Sequence[Address]]]


async def resolve(host: str) -> Sequence[Address]:
    """Return the addresses of a host, by the resolver of this host. Raises ``OSError``."""
    found = await trio.socket.getaddrinfo(host, None, type=trio.socket.SOCK_STREAM)
    return [ip_address(address[0]) for *_, address in found]


class Way:
    def __init__(self, allowed: NetworkSpec, reach: Mapping[str, str], resolve: Resolve) -> None:
        """Raises ``UsageError`` when a proxy or certificates that ``reach`` names cannot be used."""
        self._allowed, self._reach, self._resolve = allowed, reach, resolve
        self._tls: ssl.SSLContext | None = None
        check_proxies(reach)

    @property
    def own_certificates(self) -> bool:
        """Tell whether this host trusts other certificates than the usual ones."""
        return bool(self._reach.get("SSL_CERT_FILE"))

    def certificates(self) -> ssl.SSLContext:
        """Return a TLS context with what this host trusts, for HTTP/1.1."""
        if self._tls is None:
            from runner.network.upstream import certificates  # with a client library that other sessions do without

            self._tls = certificates(self._reach)
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    async def dial(self, name: str, port: int, traffic: Traffic) -> Buffered:
        """Connect to a canonical host. Raises ``Refused``."""
        proxy = self._proxy("https", name, port)
        addresses = await self._judged(name, port, traffic, proxy)
        if proxy is None:
            return Buffered(await _first_of(addresses, name, port, traffic))
        server = await self._dial_proxy(proxy, traffic)
        try:
            return await _tunnel(server, proxy, host_port(name, port), traffic)
        except BaseException:
            await trio.aclose_forcefully(server)
            raise

    async def dial_http(
        self, name: str, port: int, request: h11.Request, traffic: Traffic
    ) -> tuple[Buffered, h11.Request]:
        """Connect to a canonical host for one request, and return it as it is to be sent; it begins with ``Host``.

        Raises ``Refused``.
        """
        proxy = self._proxy("http", name, port)
        addresses = await self._judged(name, port, traffic, proxy)
        headers, target = [*request.headers], request.target
        if proxy is None:
            server = Buffered(await _first_of(addresses, name, port, traffic))
        else:
            server = await self._dial_proxy(proxy, traffic)
            headers, target = [*headers, *proxy.headers], b"http://%s%s" % (headers[0][1], target)
        return server, h11.Request(method=request.method, target=target, headers=headers)

    async def dial_tls(self, name: str, port: int, traffic: Traffic) -> Buffered:
        """Connect to a canonical host with TLS, and verify that it is the one. Raises ``Refused``."""
        return await self.begin_tls(await self.dial(name, port, traffic), name)

    async def begin_tls(self, server: Buffered, name: str) -> Buffered:
        """Begin TLS on the connection to a canonical host, and verify that it is the one. Raises ``Refused``."""
        return await _secure(server, self.certificates(), name)

    async def _dial_proxy(self, proxy: HostProxy, traffic: Traffic) -> Buffered:
        traffic.address = f"proxy {proxy}"
        with trio.move_on_after(CONNECT_SECONDS):
            try:
                server = Buffered(await trio.open_tcp_stream(proxy.host, proxy.port))
            except OSError as error:
                message = f"the proxy {proxy} of this host cannot be reached: {error.strerror or error}"
                raise Refused(NetworkRefusal.UNREACHABLE, message, 502) from None
            return await _secure(server, self.certificates(), proxy.host) if proxy.secure else server
        raise Refused(NetworkRefusal.UNREACHABLE, f"the proxy {proxy} of this host does not answer", 504)

    def _proxy(self, scheme: Literal["http", "https"], name: str, port: int) -> HostProxy | None:
        if is_address(name) and ip_address(name).is_loopback:
            return None
        return find_proxy(scheme, host_port(name, port), self._reach)

    async def _judged(self, name: str, port: int, traffic: Traffic, proxy: HostProxy | None) -> Sequence[Address]:
        """Return the addresses that may be dialled, at least one of them unless a proxy resolves the name itself."""
        rule = self._allowed.rule_for(name, port)
        if rule is None:
            message = f"`{name}:{port}` is not among the hosts that the plan allows: {self._allowed}"
            raise Refused(NetworkRefusal.NOT_ALLOWED, message)
        traffic.rule, traffic.origin = str(rule), rule.origin
        found = await self._addresses(name)
        if not found and (proxy is None or rule.host != name):
            raise Refused(NetworkRefusal.UNRESOLVED, f"`{name}` is not a name that this host can resolve", 502)
        addresses = reachable(found, rule, name)
        if found and (not addresses or (proxy is not None and len(addresses) < len(found))):
            message = f"`{name}` has private addresses{'' if addresses else ' only'}"
            raise Refused(NetworkRefusal.PRIVATE, f"{message}; a rule with `private: true` would allow them")
        return addresses

    async def _addresses(self, name: str) -> Sequence[Address]:
        if is_address(name):
            return [ip_address(name)]
        with trio.move_on_after(RESOLVE_SECONDS), suppress(OSError):
            return await self._resolve(name)
        return []


async def _first_of(addresses: Sequence[Address], name: str, port: int, traffic: Traffic) -> trio.SocketStream:
    for address in addresses:
        with trio.move_on_after(CONNECT_SECONDS):
            try:
                server = await trio.open_tcp_stream(str(address), port, happy_eyeballs_delay=math.inf)
            except OSError:
                continue
            traffic.address = str(address)
            return server
    raise Refused(NetworkRefusal.UNREACHABLE, f"`{host_port(name, port)}` cannot be reached from this host", 502)


async def _tunnel(server: Buffered, proxy: HostProxy, place: str, traffic: Traffic) -> Buffered:
    """Let a proxy connect to a host, by its name."""
    wire = Wire(server, traffic, host=True)
    headers = [(b"host", place.encode()), *proxy.headers]
    await wire.send(h11.Request(method=b"CONNECT", target=place.encode(), headers=headers))
    with trio.move_on_after(CONNECT_SECONDS):
        while isinstance(answer := await wire.next_event(), h11.InformationalResponse):
            pass
        if isinstance(answer, h11.Response) and answer.status_code // 100 == 2:
            return Buffered(server, wire.protocol.trailing_data[0])
        status = f"answered {answer.status_code}" if isinstance(answer, h11.Response) else "hung up"
        raise Refused(NetworkRefusal.UNREACHABLE, f"the proxy {proxy} of this host {status} for `{place}`", 502)
    raise Refused(NetworkRefusal.UNREACHABLE, f"the proxy {proxy} of this host does not connect `{place}`", 504)


async def _secure(server: Buffered, context: ssl.SSLContext, name: str) -> Buffered:
    """Begin TLS with a host, and verify it."""
    stream = TlsStream(server, context, server_hostname=name)
    try:
        with trio.fail_after(CONNECT_SECONDS):
            await stream.do_handshake()
    except (*ENDED, trio.TooSlowError) as error:
        await trio.aclose_forcefully(server)
        raise tls_failure(name, error.__cause__) from None
    return Buffered(stream)
