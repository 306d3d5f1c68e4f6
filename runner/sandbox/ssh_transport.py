"""Connections to a docker daemon through ssh, as docker's own client makes them, but never asking anybody.

The user's ssh configuration, keys and agent say how. A host whose key ssh does not know is refused.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import partial
from tempfile import TemporaryFile
from typing import Any
from urllib.parse import urlsplit

import trio
from docker.transport.basehttpadapter import BaseHTTPAdapter
from requests.exceptions import RequestException
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from runner.core.sanitize import excerpt
from runner.sandbox import child_process

_CONNECT = 10  # seconds
_WORDS_BYTES = 2_000
_READ_BYTES = 1 << 20


def words_for(host: str) -> list[str]:
    """Return the command that connects its standard input and output to the daemon at ``ssh://USER@HOST:PORT``."""
    where = urlsplit(host)
    port = ["-p", str(where.port)] if where.port else []
    target = f"{where.username}@{where.hostname}" if where.username else str(where.hostname)
    never_ask = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}", "-o", "ServerAliveInterval=15"]
    return ["ssh", *never_ask, *port, "-T", "--", target, "docker", "system", "dial-stdio"]


def dial(host: str, environment: Mapping[str, str]) -> tuple[trio.abc.Stream, Callable[[], None]]:
    """Connect, and return what closes the connection at once as well. Raises ``OSError``."""
    child = child_process.start(words_for(host), env=environment)
    return _ChildStream(child), child.kill


class _ChildStream(trio.abc.Stream):
    """The standard input and output of a child process."""

    def __init__(self, child: child_process.Child) -> None:
        self._child = child

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._child.stdin.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._child.stdin.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._child.stdout.receive_some(max_bytes or _READ_BYTES)

    async def aclose(self) -> None:
        self._child.kill()
        with trio.CancelScope(shield=True):
            await self._child.wait()
            await self._child.aclose()


class SshAdapter(BaseHTTPAdapter):  # type: ignore[misc]  # untyped
    """Carries the client library's requests, each connection by an ssh of its own; ``close`` ends them all."""

    def __init__(self, host: str, environment: Mapping[str, str], timeout: float) -> None:
        super().__init__()
        self._said = TemporaryFile()  # noqa: SIM115  # closed by close
        self._pool = _Pool(words_for(host), environment, self._said.fileno(), timeout)

    def get_connection_with_tls_context(self, request: Any, verify: Any, proxies: Any = None, cert: Any = None) -> Any:
        return self._pool

    def request_url(self, request: Any, proxies: Any) -> str:
        return str(request.path_url)

    def send(self, *arguments: Any, **options: Any) -> Any:
        """Send a request. Raises ``OSError`` with the last words of ssh."""
        try:
            return super().send(*arguments, **options)
        except RequestException as error:
            self._said.seek(0)
            words = self._said.read(_WORDS_BYTES).decode(errors="replace")
            raise ConnectionError(excerpt(" ".join(words.split()), 300) or str(error)) from error

    def close(self) -> None:
        self._pool.close()
        self._said.close()
        super().close()


class _Pool(HTTPConnectionPool):
    def __init__(self, words: list[str], environment: Mapping[str, str], said: int, timeout: float) -> None:
        super().__init__("docker", timeout=timeout, maxsize=1)
        self._start = partial(child_process.start_on_socket, words, env=environment, stderr=said)
        self._made: list[_Connection] = []

    def _new_conn(self) -> Any:
        self._made.append(_Connection(self._start, self.timeout.read_timeout))
        return self._made[-1]

    def close(self) -> None:
        super().close()
        for connection in self._made:
            connection.close()


class _Connection(HTTPConnection):
    def __init__(self, start: Callable[[], tuple[socket.socket, Callable[[], None]]], timeout: Any) -> None:
        super().__init__("docker", timeout=timeout)
        self._start = start
        self._end: Callable[[], None] | None = None

    def connect(self) -> None:
        self.sock, self._end = self._start()
        self.sock.settimeout(self.timeout)

    def close(self) -> None:
        super().close()
        if self._end is not None:
            self._end()
            self._end = None
