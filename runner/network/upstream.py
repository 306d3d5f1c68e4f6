"""Connections to providers and clusters: https with the host's certificates, through the host's proxy if any."""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpcore2
import trio

from runner.core.errors import UsageError
from runner.network.host_proxy import find_proxy
from runner.network.http import Headers

CONNECT_SECONDS = 30.0
READ_SECONDS = 600.0  # a model may think that long before its next byte
MAX_CONNECTIONS = 256
_KEEPALIVE_SECONDS = 30.0

_FAILURES = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.ProxyError,
    httpcore2.TimeoutException,
    ssl.SSLError,
)

# What libraries put around their words, beside the host, which is named anyway.
_ERROR_NOISE = re.compile(r"\[(Errno -?\d+|SSL(: \w+)?)\] ?| \(_ssl\.c:\d+\)|error connecting to \([^)]*\): ", re.I)
_CONNECT_FAILURES = (httpcore2.ConnectError, httpcore2.ConnectTimeout, httpcore2.ProxyError, ssl.SSLError)


class UpstreamFailed(Exception):
    """The provider cannot be reached, or stalled. Never leaves the gateway."""


class Unreachable(UpstreamFailed):
    """No connection to ``host`` was made: a name, a route, a certificate or a proxy of this host is in the way."""

    def __init__(self, why: str, host: str) -> None:
        super().__init__(why)
        self.host = host


@dataclass(frozen=True)
class UpstreamResponse:
    """A response under way. Iterating ``body`` raises ``UpstreamFailed`` when it breaks off.

    ``upgraded`` is the connection itself after a change of the protocol, in place of a body.
    """

    status: int
    headers: Headers  # names in lower case
    body: AsyncIterator[bytes]
    upgraded: UpgradedStream | None = None


class UpgradedStream:
    """A connection that speaks no HTTP any more. Its methods raise ``trio.BrokenResourceError`` when it is lost."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream = stream

    async def send_all(self, data: bytes) -> None:
        try:
            await self._stream.write(data)
        except (*_FAILURES, trio.ClosedResourceError) as error:
            raise trio.BrokenResourceError from error

    async def receive_some(self, max_bytes: int) -> bytes:
        try:
            return await self._stream.read(max_bytes)
        except (*_FAILURES, trio.ClosedResourceError) as error:
            raise trio.BrokenResourceError from error


class Upstream(Protocol):
    """A provider, or a fake model in its place.

    ``warnings`` are for the caller once there are no more responses.
    """

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def send(
        self, method: str, target: str, headers: Headers, body: bytes
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send a request, and yield the response for the length of the block; leaving it early breaks the response off.

        ``target`` is a path below the base URL, with its query. Raises ``UpstreamFailed`` and ``Unreachable``.
        """


def check_remote(base: str, reach: Mapping[str, str]) -> None:
    """Raise ``UsageError`` when the named certificates or the host's proxy cannot be used."""
    if reach.get("SSL_CERT_FILE"):  # the host's own are not read for nothing: that takes longer than all else here
        _certificates(base, reach)
    proxy_of(base, reach)


@asynccontextmanager
async def open_remote(
    base: str,
    reach: Mapping[str, str],
    *,
    certificates: ssl.SSLContext | None = None,
    server_name: str | None = None,
    read_seconds: float | None = READ_SECONDS,
) -> AsyncIterator[Upstream]:
    """Open a provider at its base URL, with the network ``reach`` of the settings; connections are kept between
    requests.

    ``certificates`` replace the host's, and ``server_name`` the server's own. Without ``read_seconds`` it may be silent
    for ever. Raises what ``check_remote`` raises.
    """
    proxy = proxy_of(base, reach)
    through = f"{proxy.url.host.decode()}:{proxy.url.port}" if proxy is not None else ""
    async with httpcore2.AsyncConnectionPool(
        ssl_context=certificates or _certificates(base, reach),
        proxy=proxy,
        max_connections=MAX_CONNECTIONS,
        keepalive_expiry=_KEEPALIVE_SECONDS,
    ) as pool:
        yield _RemoteUpstream(base, pool, server_name, read_seconds, through=through)


class _RemoteUpstream:
    warnings: tuple[str, ...] = ()

    def __init__(
        self,
        base: str,
        pool: httpcore2.AsyncConnectionPool,
        server_name: str | None,
        read_seconds: float | None,
        *,
        through: str,
    ) -> None:
        self._through = f" (through the proxy {through})" if through else ""
        self._base = base.rstrip("/")
        timeouts = {"connect": CONNECT_SECONDS, "read": read_seconds, "write": READ_SECONDS, "pool": READ_SECONDS}
        self._extensions = {"timeout": timeouts, **({"sni_hostname": server_name} if server_name else {})}
        self._host = urlsplit(base).netloc.encode()
        self._pool = pool

    @asynccontextmanager
    async def send(self, method: str, target: str, headers: Headers, body: bytes) -> AsyncIterator[UpstreamResponse]:
        length = [(b"content-length", b"%d" % len(body))] if method == "POST" else []
        request = httpcore2.Request(
            method,
            self._base + target,
            headers=[(b"host", self._host), *headers, *length],
            content=body,
            extensions={**self._extensions, "trace": _closing_cancelled()},
        )
        try:
            response = await self._pool.handle_async_request(request)
        except _CONNECT_FAILURES as error:
            why = (_system_message(error) or _error_message(error)) + self._through
            raise Unreachable(why, self._host.decode()) from error
        except _FAILURES as error:
            raise UpstreamFailed(_error_message(error)) from error
        try:
            async with aclosing(_body(response)) as chunks:
                headers = [(name.lower(), value) for name, value in response.headers]
                upgraded = UpgradedStream(response.extensions["network_stream"]) if response.status == 101 else None
                yield UpstreamResponse(response.status, headers, chunks, upgraded)
        finally:
            await response.aclose()


def _closing_cancelled() -> Callable[[str, Mapping[str, Any]], Awaitable[None]]:
    """Return what closes a connection whose TLS handshake is cancelled; the library closes those that fail."""
    made: list[httpcore2.AsyncNetworkStream] = []

    async def trace(event: str, about: Mapping[str, Any]) -> None:
        if event.endswith("connect_tcp.complete"):
            made.append(about["return_value"])
        elif event.endswith("start_tls.failed") and made:
            with trio.CancelScope(shield=True):
                await made.pop().aclose()

    return trace


async def _body(response: httpcore2.Response) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(response.aiter_stream()) as pieces:  # closed, too, when nobody asks for more
            async for chunk in pieces:
                yield chunk
    except _FAILURES as error:
        raise UpstreamFailed(_error_message(error)) from error


def _error_message(error: BaseException) -> str:
    """Return the first message among an error and its causes; the library keeps a cause as an argument."""
    if isinstance(error, httpcore2.ProxyError):
        return f"the proxy answered {error}"
    if words := _ERROR_NOISE.sub("", str(error)):
        return words + (f": {why}" if (why := _system_message(error)) else "")
    cause = _cause(error)
    return _error_message(cause) if cause is not None else type(error).__name__


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or next((given for given in error.args if isinstance(given, BaseException)), None)


def _system_message(error: BaseException) -> str:
    """Return the operating system's message about a connection, such as that it was refused, from among the causes."""
    found: BaseException | None = error
    while found is not None and not (isinstance(found, OSError) and found.errno and found.strerror):
        found = found.exceptions[0] if isinstance(found, BaseExceptionGroup) else _cause(found)
    said = _ERROR_NOISE.sub("", found.strerror).lower() if isinstance(found, OSError) and found.strerror else ""
    return "" if said in str(error).lower() else said


def certificates(reach: Mapping[str, str]) -> ssl.SSLContext:
    """Return a TLS context with the certificates that this host trusts. Raises ``UsageError``."""
    file = reach.get("SSL_CERT_FILE")
    try:
        return ssl.create_default_context(cafile=file) if file else httpcore2.default_ssl_context()
    except OSError as error:
        why = f"`SSL_CERT_FILE` is `{file}`: {error.strerror or error}"
        raise UsageError(why, hint="name a file of certificates") from error


def _certificates(base: str, reach: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the TLS context; ``None`` for plain http."""
    return certificates(reach) if urlsplit(base).scheme == "https" else None


def proxy_of(base: str, reach: Mapping[str, str]) -> httpcore2.Proxy | None:
    """Return the proxy for a base URL; those that are not https are on this host, and reached directly."""
    parts = urlsplit(base)
    found = find_proxy("https", parts.netloc, reach) if parts.scheme == "https" else None
    if found is None:
        return None
    auth = (found.user, found.password) if found.user else None
    return httpcore2.Proxy(f"{'https' if found.secure else 'http'}://{found}", auth=auth)
