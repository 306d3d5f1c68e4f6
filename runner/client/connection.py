"""Connections to a server, by http, https or a Unix socket: one client that blocks, and one for trio."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpcore2
import msgspec
from msgspec import Struct

from runner.client.requests import Ask
from runner.core.codec import encode
from runner.core.errors import Place, Rejected, RunnerError, ServerFailed, UsageError
from runner.core.sanitize import excerpt
from runner.core.settings import is_url
from runner.network.upstream import certificates, proxy_of

SECONDS = {"connect": 30.0, "read": 600.0, "write": 60.0, "pool": 60.0}  # a start may pull what it needs first
_UNIX = "unix:"
_FAILED = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ProxyError, httpcore2.TimeoutException)

T = TypeVar("T")


class _Place(Struct, frozen=True):
    """Place of a server and how its requests begin. ``socket`` is a path."""

    base: str
    headers: list[tuple[bytes, bytes]]
    socket: str | None

    @staticmethod
    def of(url: str, token: str) -> _Place:
        """Raises ``UsageError`` for a URL that a token must not be sent to."""
        headers = [(b"authorization", f"Bearer {token}".encode()), (b"content-type", b"application/json")]
        if url.startswith(_UNIX):
            return _Place("http://localhost", headers, url.removeprefix(_UNIX))
        if not is_url(url, "http", "https") or "@" in url:
            raise UsageError(f"`{excerpt(url)}` is not the URL of a server", hint="https://HOST, or unix:PATH")
        parts = urlsplit(url)
        if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
            message = f"the token would be sent to `{excerpt(parts.netloc)}` in clear text"
            raise UsageError(message, hint="write https://")
        return _Place(url.rstrip("/"), headers, None)

    def request(self, ask: Ask[Any]) -> dict[str, Any]:
        body = {} if ask.body is None else {"content": encode(ask.body)}
        timeouts = {"extensions": {"timeout": SECONDS}}
        return {"method": ask.method, "url": self.base + ask.target, "headers": self.headers, **body, **timeouts}

    def options(self, reach: Mapping[str, str]) -> dict[str, Any]:
        if self.socket is not None:
            return {"uds": self.socket}
        if self.base.startswith("http://"):
            return {}
        return {"ssl_context": certificates(reach), "proxy": proxy_of(self.base, reach)}


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Client:
    """Client that blocks. ``reach`` are variables that say how the network is reached, such as a proxy."""

    def __init__(self, url: str, token: str, *, reach: Mapping[str, str] | None = None) -> None:
        """Raises ``UsageError``."""
        self._place = _Place.of(url, token)
        self._pool = httpcore2.ConnectionPool(**self._place.options(reach or {}))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def send(self, ask: Ask[T]) -> T:
        """Send a request and return its answer. Raises what the server tells, and ``ServerFailed``."""
        try:
            answer = self._pool.request(**self._place.request(ask))
        except _FAILED as error:
            raise _away(error) from error
        return _answered(ask, answer)

    def follow(self, run: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the events of a run numbered above ``after``, past and coming, to its end.

        Raises what the server tells, and ``ServerFailed`` when it ends before the run does.
        """
        ask = _events(run, after)
        reader = _EventReader()
        try:
            with self._pool.stream(**self._place.request(ask)) as answer:
                if answer.status != 200:
                    answer.read()
                    _answered(ask, answer)
                for chunk in answer.iter_stream():
                    yield from reader.feed(chunk)
        except _FAILED as error:
            raise _away(error) from error
        reader.check()


class AsyncClient:
    """Client for trio, otherwise like ``Client``."""

    def __init__(self, url: str, token: str, *, reach: Mapping[str, str] | None = None) -> None:
        """Raises ``UsageError``."""
        self._place = _Place.of(url, token)
        self._pool = httpcore2.AsyncConnectionPool(**self._place.options(reach or {}))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.aclose()

    async def send(self, ask: Ask[T]) -> T:
        """Send a request and return its answer. Raises as ``Client.send``."""
        try:
            answer = await self._pool.request(**self._place.request(ask))
        except _FAILED as error:
            raise _away(error) from error
        return _answered(ask, answer)

    async def follow(self, run: str, after: int = 0) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of a run. Raises as ``Client.follow``; close it when it is not read to its end."""
        ask = _events(run, after)
        reader = _EventReader()
        try:
            async with self._pool.stream(**self._place.request(ask)) as answer:
                if answer.status != 200:
                    await answer.aread()
                    _answered(ask, answer)
                async for chunk in answer.aiter_stream():
                    for event in reader.feed(chunk):
                        yield event
        except _FAILED as error:
            raise _away(error) from error
        reader.check()


def _events(run: str, after: int) -> Ask[bytes]:
    return Ask(method="GET", path=f"/runs/{run}/events", query={"after": after}, answer=bytes)


class _EventReader:
    """Reads the events of a stream, in whatever pieces it comes."""

    def __init__(self) -> None:
        self._rest, self._last = b"", ""

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        *frames, self._rest = (self._rest + chunk).split(b"\n\n")
        for frame in frames:
            fields = dict(line.split(": ", 1) for line in frame.decode().split("\n") if line[:1] != ":")
            self._last = fields.get("event", self._last)
            if "id" in fields:
                yield json.loads(fields["data"])

    def check(self) -> None:
        """Raise ``ServerFailed`` unless the run has ended."""
        if self._last != "RunEnded":
            why = {"bye": "the server ends", "lost": "nobody works on the run any more"}
            raise ServerFailed(why.get(self._last, "the server hung up"), hint="ask for the run later")


def _away(error: Exception) -> ServerFailed:
    return ServerFailed(f"the server cannot be reached: {str(error) or type(error).__name__}")


def _answered(ask: Ask[T], answer: httpcore2.Response) -> T:
    try:
        if answer.status < 300:
            return ask.read(answer.content)
        raise _told(msgspec.json.decode(answer.content, type=dict[str, Any]))
    except (ValueError, KeyError, TypeError) as error:
        raise ServerFailed(f"the answer, with status {answer.status}, is not that of a runner's server") from error


def _told(problem: dict[str, Any]) -> RunnerError:
    """Return the error that a server tells of, as it would be here."""
    if problem.get("errors"):
        return Rejected(map(_told, problem["errors"]))
    file, _, rest = (problem.get("at") or "").rpartition(":")[0].rpartition(":")
    line, column = rest, (problem.get("at") or "").rpartition(":")[2]
    at = Place(file, int(line), int(column)) if file else None
    kind = _kinds().get(problem["code"], ServerFailed)
    return kind(problem["detail"], at=at, hint=problem.get("hint"))


def _kinds(of: type[RunnerError] = RunnerError) -> dict[str, type[RunnerError]]:
    found = {of.code: of} if "code" in vars(of) and of.__init__ is RunnerError.__init__ else {}
    for kind in of.__subclasses__():
        found |= _kinds(kind)
    return found
