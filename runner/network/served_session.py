"""A session that serves HTTP connections from a workspace: they end with it, and it forwards or refuses each request.

The model gateway's session and the cluster's are built on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum

import trio

from runner.network.http import MAX_BODY, Headers, Request, Response, serve_http
from runner.network.upstream import UpstreamResponse
from runner.ports.provider import Connection

JSON_TYPE = b"application/json"
IDENTITY = (b"accept-encoding", b"identity")  # tokens and credentials could not be found in any other encoding


class RequestRefused(Exception):
    """A request is answered here and not forwarded. Never leaves the session."""

    def __init__(self, refusal: StrEnum, message: str, status: int) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.status = status


class ConnectionScopes:
    """The connections that a session serves, which end with it."""

    def __init__(self) -> None:
        self._scopes: set[trio.CancelScope] = set()
        self.closed = False

    def __len__(self) -> int:
        return len(self._scopes)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve a connection for the length of the block, or until the session is closed."""
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            if self.closed:
                scope.cancel()
            try:
                yield
            finally:
                self._scopes.discard(scope)

    def close(self) -> None:
        """End the connections that are still served."""
        self.closed = True
        for scope in self._scopes:
            scope.cancel()


class ServedSession(ABC):
    def __init__(self, *, large_places: int, max_body: int = MAX_BODY) -> None:
        """``large_places`` is how many large bodies it takes at a time, ``max_body`` the bytes of one."""
        self._large = trio.Semaphore(large_places)
        self._max_body = max_body
        self._connections = ConnectionScopes()

    async def serve(self, connection: Connection) -> None:
        """Serve one connection to its end, or until the session is closed."""
        with self._connections.serving():
            await serve_http(connection, self._exchange, self._large, max_body=self._max_body)

    def close(self) -> None:
        """End the connections that are still served."""
        self._connections.close()

    @abstractmethod
    async def _exchange(self, request: Request, response: Response) -> None:
        """Answer one request."""

    @abstractmethod
    def _error_body(self, refused: RequestRefused) -> bytes:
        """Return a body that clients of this API understand as an error."""

    async def _refuse(self, response: Response, refused: RequestRefused) -> None:
        await response.send_all(refused.status, JSON_TYPE, self._error_body(refused))


def select_headers(headers: Headers, names: Collection[bytes], prefixes: tuple[bytes, ...] = ()) -> Headers:
    """Return the headers with one of these names, or a name that begins with one of the prefixes."""
    return [(name, value) for name, value in headers if name in names or name.startswith(prefixes)]


def is_encoded(response: UpstreamResponse) -> bool:
    """Tell whether the body is compressed, although ``IDENTITY`` was asked for."""
    return any(name == b"content-encoding" and value.lower() != b"identity" for name, value in response.headers)
