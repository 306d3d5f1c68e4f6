"""Connections of a server. One whose client takes nothing of what it is sent is cut off, by whatever socket it came.

hypercorn itself would wait for such a client for ever, at the end of the server too.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

UNREAD_SECONDS = 60.0  # that a client takes nothing
BACKLOG = 1024  # connections that wait to be accepted
_PIECE = 1 << 16  # bytes that have to be taken in that time


class Connection(TCPServer):
    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        async with self.send_lock:
            try:
                for start in range(0, len(event.data), _PIECE):
                    with trio.fail_after(UNREAD_SECONDS):
                        await self.stream.send_all(event.data[start : start + _PIECE])
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await self.protocol.handle(Closed())
            except trio.TooSlowError:
                await trio.aclose_forcefully(self.stream)
                await self.protocol.handle(Closed())


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
    context = WorkerContext(None)
    connected = partial(Connection, ASGIWrapper(app), config, context, ConnectionState({}))
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            serving = partial(trio.serve_listeners, connected, [listening], handler_nursery=connections)
            accepting.start_soon(serving)
            task_status.started()
            await stopping.wait()
            accepting.cancel_scope.cancel()
        await context.terminated.set()
        connections.cancel_scope.deadline = trio.current_time() + config.graceful_timeout
