"""A server elsewhere, by streamable HTTP, as if it had standard streams.

Each message is a request of its own, on a connection that is kept for the next one; answers come in any order. The host
is judged as one of the network is, and gets the credential here.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import h11
import msgspec
import trio

from runner.core.codec import encode
from runner.core.hosts import NetworkSpec, host_port
from runner.mcp.bridge import FAILED, MAX_LINE, error_for
from runner.network.exchange import ENDED, Limits, Refused, Traffic, Wire
from runner.network.way import Way, resolve
from runner.ports.mcp import Message
from runner.ports.network import Credential, EgressConnection
from runner.ports.provider import Reader, Writer

AT_ONCE = 32  # requests under way; the others wait
_ACCEPT = b"application/json, text/event-stream"
_NOT_FOUND = 404  # the session has ended


@asynccontextmanager
async def reach(
    url: str,
    allowed: NetworkSpec,
    credential: Credential | None,
    tell: Callable[[EgressConnection], None],
    *,
    environment: Mapping[str, str],
) -> AsyncIterator[tuple[Writer, Reader]]:
    """Reach a server; see ``ports.mcp.OpenMcp``."""
    remote = _Remote(url, Way(allowed, environment, resolve), credential, tell)
    async with trio.open_nursery() as nursery:
        remote.nursery = nursery
        try:
            yield remote, remote
        finally:
            with trio.move_on_after(1) as goodbye:
                goodbye.shield = True
                await remote.say_goodbye()
            nursery.cancel_scope.cancel()
            await remote.end()


class _Remote:
    """Both streams of the server."""

    nursery: trio.Nursery

    def __init__(
        self, url: str, way: Way, credential: Credential | None, tell: Callable[[EgressConnection], None]
    ) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._secure else 80)
        self._target = (parts.path or "/").encode()
        shown = host_port(self._host, None if self._port in (80, 443) else self._port)
        self._headers = [(b"host", shown.encode())]
        self._credential, self._way, self._tell = credential, way, tell
        if credential is not None:
            self._headers.append(credential.injection.header_of(credential.secret.reveal()))
        self._session: list[tuple[bytes, bytes]] = []
        self._idle: list[tuple[Wire, float]] = []
        self._places = trio.Semaphore(AT_ONCE)
        self._send, self._receive = trio.open_memory_channel[bytes](math.inf)
        self._left = [Limits().session_bytes]
        self._opened: dict[Wire, float] = {}

    # --- as a writer ---------------------------------------------------------------------------------

    async def send_all(self, data: bytes) -> None:
        """Send a message, one line."""
        message = msgspec.json.decode(data)
        self.nursery.start_soon(self._exchange, message, data.rstrip(b"\n"))
        if message.get("method") == "notifications/initialized":
            self.nursery.start_soon(self._listen)
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    # --- as a reader ---------------------------------------------------------------------------------

    async def receive_some(self, max_bytes: int) -> bytes:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            return b""

    # --- requests ------------------------------------------------------------------------------------

    async def _exchange(self, message: Message, body: bytes) -> None:
        """Send a message and pass on what comes back. Its failure is an answer, too."""
        why = ""
        async with self._places:
            try:
                status = await self._ask(b"POST", body)
                if status == _NOT_FOUND and self._session:
                    self._end_session()
                    why = "its session has ended"
                elif status >= 400:
                    why = f"it answered {status}"
            except Refused as error:
                why = str(error)
            except (*ENDED, h11.ProtocolError):
                why = "the connection broke"
        if why and "id" in message and "method" in message:
            self._put(encode(error_for(message["id"], FAILED, why)))

    async def _listen(self) -> None:
        """Follow what answers no call, if the server has a stream for that; anew when it ends."""
        with suppress(Refused, h11.ProtocolError, *ENDED):
            while await self._ask(b"GET", b"") < 300:  # noqa: ASYNC110  # it does not wait for anything else
                await trio.sleep(1)

    async def say_goodbye(self) -> None:
        if self._session:
            with suppress(Refused, h11.ProtocolError, *ENDED):
                await self._ask(b"DELETE", b"")

    async def _ask(self, method: bytes, body: bytes) -> int:
        """Make a request, and pass on the messages of its answer; return the status."""
        wire = await self._wire()
        try:
            status = await self._converse(wire, method, body)
        except BaseException:
            await self._close(wire)
            raise
        if wire.again():
            self._idle.append((wire, trio.current_time()))
        else:
            await self._close(wire)
        return status

    async def _converse(self, wire: Wire, method: bytes, body: bytes) -> int:
        headers = [*self._headers, *self._session, (b"accept", _ACCEPT), (b"accept-encoding", b"identity")]
        if method == b"POST":
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        wire.traffic.requests += self._credential is not None
        await wire.send(
            h11.Request(method=method, target=self._target, headers=headers),
            *([h11.Data(data=body)] if body else []),
            h11.EndOfMessage(),
        )
        while isinstance(head := await wire.next_event(), h11.InformationalResponse):
            pass
        if not isinstance(head, h11.Response):
            raise trio.BrokenResourceError
        found = {name: value for name, value in head.headers}  # of a type of its own
        if (session := found.get(b"mcp-session-id")) and not self._session:
            self._session = [(b"mcp-session-id", session)]
        streams = found.get(b"content-type", b"").startswith(b"text/event-stream")
        await self._read(wire, streams=streams, keep=head.status_code < 300)
        return head.status_code

    async def _read(self, wire: Wire, *, streams: bool, keep: bool) -> None:
        """Pass on the messages in the body of an answer."""
        text, seen = bytearray(), 0
        while isinstance(part := await wire.next_event(), h11.Data):
            text += part.data
            if len(text) > MAX_LINE:
                raise trio.BrokenResourceError  # a message of any size would be kept whole
            while streams and keep and (end := _end_of_event(text, seen)) is not None:
                self._put_event(bytes(text[: end[0]]))
                del text[: end[1]]
                seen = 0
            seen = max(len(text) - 3, 0)  # the end of an event may be cut
        if keep and not streams and text.strip():
            self._put(bytes(text))

    def _put_event(self, event: bytes) -> None:
        lines = (line.removeprefix(b"data:").strip() for line in event.splitlines() if line.startswith(b"data:"))
        self._put(b"".join(lines))

    def _put(self, text: bytes) -> None:
        with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            line = b" ".join(text.split(b"\n")).strip()
            if line:
                self._send.send_nowait(line + b"\n")

    def _end_session(self) -> None:
        """End the output: whoever reads begins anew."""
        self._session = []
        self._send.close()

    # --- connections ---------------------------------------------------------------------------------

    async def _wire(self) -> Wire:
        while self._idle:
            wire, since = self._idle.pop()
            if trio.current_time() - since < 20:
                return wire
            await self._close(wire)
        traffic = Traffic(Limits(idle_seconds=math.inf), self._left)
        traffic.host, traffic.port = self._host, self._port
        traffic.credential = self._credential.injection.secret if self._credential is not None else ""
        began = trio.current_time()
        try:
            dial = self._way.dial_tls if self._secure else self._way.dial
            wire = Wire(await dial(self._host, self._port, traffic), traffic, host=True)
        except Refused as error:
            self._tell(traffic.ended(trio.current_time() - began, error.refusal))
            raise
        self._opened[wire] = began
        return wire

    async def _close(self, wire: Wire) -> None:
        began = self._opened.pop(wire, None)
        if began is not None:
            self._tell(wire.traffic.ended(trio.current_time() - began, None))
        await trio.aclose_forcefully(wire.stream)

    async def end(self) -> None:
        """Close the connections that are kept, and the output. Those of requests under way end with these."""
        self._send.close()
        with trio.CancelScope(shield=True):
            while self._idle:
                await self._close(self._idle.pop()[0])


def _end_of_event(text: bytearray, seen: int) -> tuple[int, int] | None:
    """Return where the first whole event ends, and where the next begins; none does in what was ``seen``."""
    found = [(at, at + len(mark)) for mark in (b"\n\n", b"\r\n\r\n") if (at := text.find(mark, seen)) >= 0]
    return min(found, default=None)
