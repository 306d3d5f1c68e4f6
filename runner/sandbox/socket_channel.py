"""Channel to a guest that dials a Unix socket in its container; only the guest's own connections are accepted."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import trio

from runner.core.errors import WorkspaceLost
from runner.sandbox.container import CHANNEL, SOCKET, ContainerMounts
from runner.sandbox.container_init import InitProcess
from runner.sandbox.docker_api import Engine
from runner.sandbox.docker_mounts import DaemonStage

_CONNECT_TIMEOUT = 30.0  # seconds from a container's start to its guest's connection, on a busy host


@contextmanager
def open_socket_channel(
    engine: Engine, stage: DaemonStage, mounts: ContainerMounts, what: str
) -> Iterator[SocketChannel]:
    listener, directory = stage.listen(SOCKET)
    mounts.show(directory, CHANNEL)
    with listener:
        yield SocketChannel(listener, what)


class SocketChannel:
    """The channel of one container. ``what`` names the workspace in messages."""

    config: Mapping[str, Any] = {"Cmd": [f"{CHANNEL}/{SOCKET}"]}

    def __init__(self, listener: socket.socket, what: str) -> None:
        self.listener = listener
        self._listener = trio.socket.from_stdlib_socket(listener)
        self._what = what

    async def prepare(self, container: str) -> None:
        """Do nothing."""

    async def connect(self, init: InitProcess) -> trio.abc.Stream:
        """Accept the guest's next connection and close those of other processes. Raises ``WorkspaceLost``."""
        found: trio.SocketStream | None = None
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + _CONNECT_TIMEOUT
            nursery.start_soon(_cancel_at_end, init, nursery.cancel_scope)
            while found is None:
                accepted, _ = await self._listener.accept()
                if _peer(accepted) == init.pid:
                    found = trio.SocketStream(accepted)
                else:
                    accepted.close()
            nursery.cancel_scope.cancel()
        if found is None:
            raise WorkspaceLost(f"the guest of {self._what} has ended, or does not answer")
        return found


async def _cancel_at_end(init: InitProcess, scope: trio.CancelScope) -> None:
    await init.wait_ended()
    scope.cancel()


def _peer(connection: trio.socket.SocketType) -> int:
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)
