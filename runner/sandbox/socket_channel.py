"""A guest that dials: the Unix socket that it finds in its container, and the only connections that are taken there."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import trio

from runner.core.errors import WorkspaceLost
from runner.sandbox import container
from runner.sandbox.container_init import First
from runner.sandbox.docker_api import Engine
from runner.sandbox.docker_mounts import DaemonStage

_ARRIVAL = 30.0  # seconds from a container's start to its guest's first word, on a busy host


@contextmanager
def open_dialled(engine: Engine, places: DaemonStage, recipe: container.Recipe, what: str) -> Iterator[Dialled]:
    listener, directory = places.listen(container.SOCKET)
    recipe.show(directory, container.CHANNEL)
    with listener:
        yield Dialled(listener, what)


class Dialled:
    """The channel of one container. ``what`` names the workspace in messages."""

    config: Mapping[str, Any] = {"Cmd": [f"{container.CHANNEL}/{container.SOCKET}"]}

    def __init__(self, listener: socket.socket, what: str) -> None:
        self.listener = listener
        self._listener = trio.socket.from_stdlib_socket(listener)
        self._what = what

    async def prepare(self, container: str) -> None:
        """There is nothing to do before it starts."""

    async def connect(self, first: First) -> trio.abc.Stream:
        """Its next connection; whatever else runs there as its user is turned away. Raises ``WorkspaceLost``."""
        found: trio.SocketStream | None = None
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + _ARRIVAL
            nursery.start_soon(_cancel_at_end, first, nursery.cancel_scope)
            while found is None:
                accepted, _ = await self._listener.accept()
                if _peer(accepted) == first.pid:
                    found = trio.SocketStream(accepted)
                else:
                    accepted.close()
            nursery.cancel_scope.cancel()
        if found is None:
            raise WorkspaceLost(f"the guest of {self._what} has ended, or does not answer")
        return found


async def _cancel_at_end(first: First, scope: trio.CancelScope) -> None:
    await first.wait_ended()
    scope.cancel()


def _peer(connection: trio.socket.SocketType) -> int:
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)
