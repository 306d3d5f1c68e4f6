"""Connections of a server: how long each may rest, how many there are, and what they speak, which is HTTP/1.

One whose client takes nothing of what it is sent is cut off, by whatever socket it came; hypercorn itself would wait
for such a client for ever, at the end of the server too. Of more connections than the server has files for, those that
have rested longest are closed; where none rests, the new one is told so.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

UNREAD_SECONDS = 60.0  # that a client takes nothing
KEPT_SECONDS = 75.0  # that a connection rests between requests, longer than nginx lets it before it closes it
BACKLOG = 1024  # connections that wait to be accepted
MOST = 4096  # connections, where the limit of open files is twice that
_PIECE = 1 << 16  # bytes that have to be taken in that time
_BUSY = (
    b"HTTP/1.1 503 \r\nconnection: close\r\nretry-after: 5\r\ncontent-type: text/plain\r\ncontent-length: 43\r\n\r\n"
    b"the server answers on too many connections\n"
)


class _Http1(H11Protocol):
    async def _check_protocol(self, event: h11.Request) -> None:
        """Stay with HTTP/1, which a server may that is asked for another: limits and proxies in front count on it."""


class Connection(TCPServer):
    """Until its first request a connection has ``keep_alive_timeout`` seconds, then more between one and the next.

    ``head`` is that of an answer whose body comes at once, which is sent with its first piece: one write, not two.
    ``None`` says that the next thing to be sent is a head. ``resting`` are the connections of a server that answer
    nothing, those that have rested longest first, each with the time until which it may.
    """

    head: bytes | None = b""
    resting: dict[Connection, float]

    async def _idle_timeout(self) -> None:
        """Wait to be stopped: ``_close_overdue`` ends all, where hypercorn starts a task each time that one rests."""
        await trio.sleep_forever()

    async def _read_data(self) -> None:
        await self.idle_task.stop()
        made = self.protocol
        made.protocol = _Http1(
            app=made.app,
            config=made.config,
            context=made.context,
            task_group=made.task_group,
            connection_state=made.state,
            ssl=made.ssl,
            client=made.client,
            server=made.server,
            send=made.send,
        )
        await super()._read_data()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Closed):
            async with self.send_lock:
                pass  # an answer that is on its way goes out first
            await super().protocol_send(event)
        elif isinstance(event, Updated) and event.idle:
            self.resting[self] = trio.current_time() + KEPT_SECONDS
        else:  # a request has come
            self.resting.pop(self, None)
            self.head = None

    async def _send(self, data: bytes) -> None:
        if self.head is None and not data.startswith(b"HTTP/1.1 1"):  # an interim answer has no body
            self.head = data if b"\r\ncontent-length: " in data else b""
            if self.head:
                return
        elif self.head:
            data, self.head = self.head + data, b""
        if not data:
            return  # an end that needs no byte
        try:
            self.send_lock.acquire_nowait()  # without a turn of the loop, unless something else is on its way
        except trio.WouldBlock:
            await self.send_lock.acquire()
        try:
            with trio.CancelScope() as unread:
                for start in range(0, len(data), _PIECE):
                    unread.deadline = trio.current_time() + UNREAD_SECONDS
                    await self.stream.send_all(data[start : start + _PIECE])
            if unread.cancelled_caught:
                await trio.aclose_forcefully(self.stream)
                await self.protocol.handle(Closed())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self.protocol.handle(Closed())
        finally:
            self.send_lock.release()


def most_connections() -> tuple[int, int]:
    """Return how many connections a server answers, and how many files it may open, half of which are for its work."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (MOST if files == resource.RLIM_INFINITY else min(MOST, files // 2)), files


async def serve_connections(
    app: Any,
    config: Config,
    listener: socket.socket,
    *,
    stopping: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve what connects until ``stopping`` is set, and then what has begun, for ``graceful_timeout`` at most."""
    listener.listen(BACKLOG)
    listening: Any = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    if (tls := config.create_ssl_context()) is not None:
        listening = trio.SSLListener(listening, tls, https_compatible=True)
    context, wrapped = WorkerContext(None), ASGIWrapper(app)
    most, _ = most_connections()
    held: set[Connection] = set()
    resting: dict[Connection, float] = {}

    async def connected(stream: Any) -> None:
        spared = None
        if len(held) >= most:
            if not resting:
                if isinstance(stream, trio.SocketStream):  # TLS would wait for the client
                    with suppress(trio.BrokenResourceError):
                        await stream.send_all(_BUSY)
                return  # which closes it
            spared = next(iter(resting))
            del resting[spared]
            held.remove(spared)
        connection = Connection(wrapped, config, context, state=ConnectionState({}), stream=stream)
        connection.resting = resting
        resting[connection] = trio.current_time() + config.keep_alive_timeout
        held.add(connection)
        try:
            if spared is not None:
                await trio.aclose_forcefully(spared.stream)
            await connection
        except trio.ClosedResourceError:
            pass  # it was spared in its TLS handshake
        finally:
            resting.pop(connection, None)
            held.discard(connection)

    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(partial(trio.serve_listeners, connected, [listening], handler_nursery=connections))
            accepting.start_soon(_close_overdue, resting)
            task_status.started()
            await stopping.wait()
            accepting.cancel_scope.cancel()
        await context.terminated.set()
        await _close_resting(resting)
        connections.cancel_scope.deadline = trio.current_time() + config.graceful_timeout


async def _close_overdue(resting: Mapping[Connection, float]) -> None:
    while True:
        await trio.sleep(1)
        await _close_resting(resting, trio.current_time())


async def _close_resting(resting: Mapping[Connection, float], now: float = inf) -> None:
    """Close the connections that may rest no longer, by default all; what gets a request meanwhile goes on."""
    for connection in [*resting]:
        if connection in resting and resting[connection] <= now:
            await trio.aclose_forcefully(connection.stream)
