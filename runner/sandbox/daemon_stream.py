"""Calls to a docker daemon whose answer is read as it arrives, on a connection of their own.

Not the client library's: the daemon stops what it does when the connection is closed, and a library thread that waits
for the next line could only be stopped with the process.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import h11
import trio

from runner.core.errors import ProviderFailed
from runner.core.sanitize import sanitize
from runner.core.settings import without_secrets
from runner.sandbox.docker_api import Engine, unreachable

_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 20
_REFUSAL_BYTES = 1 << 14


@dataclass
class Answer:
    """The daemon's answer to one call: its ``status``, and the body, once."""

    status: int
    _engine: Engine
    _http: h11.Connection
    _stream: trio.abc.Stream

    async def chunks(self) -> AsyncGenerator[bytes]:
        while isinstance(event := await _next(self._engine, self._http, self._stream), h11.Data):
            yield bytes(event.data)

    async def objects(self) -> AsyncGenerator[Mapping[str, Any]]:
        """Yield each JSON object of the body, of which every line holds one. Raises ``ProviderFailed``."""
        rest = b""
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(bytes.strip, lines):
                    yield self._parse(line)
                if len(rest) > _LINE_BYTES:
                    raise ProviderFailed(f"a line of the docker daemon's answer exceeds {_LINE_BYTES >> 20} MiB")
        if rest.strip():
            yield self._parse(rest)

    def _parse(self, line: bytes) -> Mapping[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ProviderFailed(f"the docker daemon at `{without_secrets(self._engine.host)}` answers in no JSON")
        return found

    async def refusal(self) -> str:
        """Return the words of an answer that is an error."""
        body = b""
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > _REFUSAL_BYTES:
                    break
        try:
            words = json.loads(body)["message"]
        except (ValueError, LookupError, TypeError):
            words = body.decode(errors="replace")
        return sanitize(str(words).strip())


@asynccontextmanager
async def call(
    engine: Engine, method: str, target: str, headers: Sequence[tuple[str, str]] = (), body: bytes = b""
) -> AsyncIterator[Answer]:
    """Send one request and wait for the head of the answer. Raises ``ProviderFailed``."""
    try:
        stream, _ = await engine.dial()
    except (OSError, trio.BrokenResourceError) as error:
        raise unreachable(engine, error) from error
    async with stream:
        http = h11.Connection(h11.CLIENT)
        head = [("Host", "docker"), ("Content-Length", str(len(body))), *headers]
        request = h11.Request(method=method, target=target, headers=head)
        try:
            for part in (request, h11.Data(data=body), h11.EndOfMessage()):
                await stream.send_all(http.send(part) or b"")
        except trio.BrokenResourceError as error:
            raise unreachable(engine, error) from error
        found = await _next(engine, http, stream)
        yield Answer(found.status_code if isinstance(found, h11.Response) else 0, engine, http, stream)


async def _next(engine: Engine, http: h11.Connection, stream: trio.abc.Stream) -> object:
    try:
        while (event := http.next_event()) is h11.NEED_DATA:
            http.receive_data(bytes(await stream.receive_some(_READ_BYTES)))
    except (trio.BrokenResourceError, h11.RemoteProtocolError) as error:
        where = without_secrets(engine.host)
        raise ProviderFailed(f"the docker daemon at `{where}` broke off its answer: {error}") from error
    return event
