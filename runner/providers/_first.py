"""A container's first process, which is its guest: how it reaches us, and how it is ended without the daemon."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from runner.errors import Escaped, ProviderFailed, WorkspaceLost
from runner.model import Limits
from runner.ports.provider import KILL_GRACE
from runner.providers import _cgroup

_ARRIVAL = 30.0  # seconds from a container's start to its guest's first word, on a busy host


class First:
    """``what`` names the workspace in messages."""

    def __init__(self, pid: int, pidfd: int, listener: socket.socket, what: str) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._listener = trio.socket.from_stdlib_socket(listener)
        self._what = what
        self._patience = _ARRIVAL

    def group(self, limits: Limits) -> _cgroup.Group:
        """What the daemon keeps its container within. Raises ``ProviderFailed``."""
        try:
            return _cgroup.group_of(self.pid, limits)
        except OSError as error:
            raise ProviderFailed(f"the limits of {self._what} cannot be read: {error}") from error

    async def connect(self) -> trio.abc.Stream:
        """Its next connection; whatever else runs there as its user is turned away. Raises ``WorkspaceLost``."""
        found: trio.SocketStream | None = None
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + self._patience
            nursery.start_soon(self._cancel_at_end, nursery.cancel_scope)
            while found is None:
                accepted, _ = await self._listener.accept()
                if _peer(accepted) == self.pid:
                    found = trio.SocketStream(accepted)
                else:
                    accepted.close()
            nursery.cancel_scope.cancel()
        if found is None:
            raise WorkspaceLost(f"the guest of {self._what} has ended, or does not answer")
        return found

    async def _cancel_at_end(self, scope: trio.CancelScope) -> None:
        await trio.lowlevel.wait_readable(self._pidfd)
        scope.cancel()

    def kill(self) -> None:
        """All that runs in its container ends with it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it, and wait until it is gone. Raises ``Escaped``."""
        self.kill()
        with trio.move_on_after(KILL_GRACE) as patience:
            await trio.lowlevel.wait_readable(self._pidfd)
        if patience.cancelled_caught:
            raise Escaped(f"the killed first process of {self._what} still lives: {self.pid}")


@contextmanager
def open_first(pid: int, container: str, listener: socket.socket, what: str) -> Iterator[First]:
    """The process with this pid, if it is the container's. Raises ``ProviderFailed`` when that has ended already."""
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError) as error:  # an ended container has the pid 0
        raise ProviderFailed(f"the guest of {what} has ended at once") from error
    try:
        if container not in _membership(pid):  # the pid is another's by now
            raise ProviderFailed(f"the guest of {what} has ended at once")
        yield First(pid, pidfd, listener, what)
    finally:
        os.close(pidfd)


def _membership(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def _peer(connection: trio.socket.SocketType) -> int:
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)
