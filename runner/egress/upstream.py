"""The way from the gateway to a provider: https with the host's certificates, through the host's proxy if any."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed lacks it

import httpcore2

from runner.egress.http import Headers
from runner.errors import UsageError

CONNECT_SECONDS = 30.0
READ_SECONDS = 600.0  # a model may think that long before its next byte
MAX_CONNECTIONS = 256
_KEPT_SECONDS = 30.0
_TIMEOUTS = {"connect": CONNECT_SECONDS, "read": READ_SECONDS, "write": READ_SECONDS, "pool": READ_SECONDS}

_FAILURES = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.ProxyError,
    httpcore2.TimeoutException,
    ssl.SSLError,
)


class UpstreamFailed(Exception):
    """The provider cannot be reached, or did not go on. Never leaves the gateway."""


@dataclass(frozen=True)
class Answer:
    """An answer under way. Iterating ``body`` raises ``UpstreamFailed`` when it breaks off."""

    status: int
    headers: Headers  # names in lower case
    body: AsyncIterator[bytes]


class Upstream(Protocol):
    """Whatever stands for a provider: the provider itself, or a scripted double."""

    def send(self, method: str, target: str, headers: Headers, body: bytes) -> AbstractAsyncContextManager[Answer]:
        """Ask, and have the answer for the length of the block; leaving it early breaks the answer off.

        ``target`` is a path below the base URL, with its query. Raises ``UpstreamFailed``.
        """


def check_reach(base: str, reach: Mapping[str, str]) -> None:
    """Raises ``UsageError`` when the host's certificates or its proxy cannot be used."""
    _certificates(reach)
    _proxy(base, reach)


@asynccontextmanager
async def open_remote(base: str, reach: Mapping[str, str]) -> AsyncIterator[Upstream]:
    """A provider at its base URL, reached as ``reach`` of the settings says; connections are kept between requests.

    Raises what ``check_reach`` raises.
    """
    async with httpcore2.AsyncConnectionPool(
        ssl_context=_certificates(reach),
        proxy=_proxy(base, reach),
        max_connections=MAX_CONNECTIONS,
        keepalive_expiry=_KEPT_SECONDS,
    ) as pool:
        yield _Remote(base, pool)


class _Remote:
    def __init__(self, base: str, pool: httpcore2.AsyncConnectionPool) -> None:
        self._base = base.rstrip("/")
        self._host = urlsplit(base).netloc.encode()
        self._pool = pool

    @asynccontextmanager
    async def send(self, method: str, target: str, headers: Headers, body: bytes) -> AsyncIterator[Answer]:
        length = [(b"content-length", b"%d" % len(body))] if method == "POST" else []
        request = httpcore2.Request(
            method,
            self._base + target,
            headers=[(b"host", self._host), *headers, *length],
            content=body,
            extensions={"timeout": _TIMEOUTS},
        )
        try:
            response = await self._pool.handle_async_request(request)
        except _FAILURES as error:
            raise UpstreamFailed(_words(error)) from error
        try:
            async with aclosing(_body(response)) as chunks:
                yield Answer(response.status, [(name.lower(), value) for name, value in response.headers], chunks)
        finally:
            await response.aclose()


async def _body(response: httpcore2.Response) -> AsyncGenerator[bytes]:
    try:
        async for chunk in response.aiter_stream():
            yield chunk
    except _FAILURES as error:
        raise UpstreamFailed(_words(error)) from error


def _words(error: BaseException) -> str:
    """The first of an error and its causes that says something; the library keeps a cause as an argument."""
    cause = error.__cause__ or next((given for given in error.args if isinstance(given, BaseException)), None)
    return str(error) or (_words(cause) if cause is not None else type(error).__name__)


def _certificates(reach: Mapping[str, str]) -> ssl.SSLContext:
    file = reach.get("SSL_CERT_FILE")
    try:
        return ssl.create_default_context(cafile=file) if file else httpcore2.default_ssl_context()
    except OSError as error:
        why = f"`SSL_CERT_FILE` is `{file}`: {error.strerror or error}"
        raise UsageError(why, hint="it takes a file of certificates") from error


def _proxy(base: str, reach: Mapping[str, str]) -> httpcore2.Proxy | None:
    """The proxy for a base URL; those that are not https are on this host, and reached directly."""
    parts = urlsplit(base)
    named = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    name = next((name for name in named if reach.get(name)), None)
    bypassed = {"no": reach.get("NO_PROXY") or reach.get("no_proxy") or ""}
    if name is None or parts.scheme != "https" or proxy_bypass_environment(parts.netloc, bypassed):
        return None
    proxy = urlsplit(reach[name] if "://" in reach[name] else f"http://{reach[name]}")
    if proxy.scheme not in ("http", "https") or not proxy.hostname:
        raise UsageError(f"`{name}` is no proxy that models can be reached by", hint="it takes http://HOST:PORT")
    auth = (unquote(proxy.username), unquote(proxy.password or "")) if proxy.username else None
    return httpcore2.Proxy(f"{proxy.scheme}://{proxy.hostname}:{proxy.port or 80}", auth=auth)
