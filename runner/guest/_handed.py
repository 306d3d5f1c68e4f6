"""Listening sockets that guests hand over, and the connections that the host accepts on them itself.

Their bytes pass through the kernel that both share, and not through the guest. The guest keeps the same socket, and may
be under the control of commands: so a thread accepts, which a socket that blocks would stop, and nothing else. What is
accepted is the host's alone.
"""

from __future__ import annotations

import array
import errno
import os
import resource
import socket
import struct
from contextlib import suppress

import trio

from runner.guest.framing import MAX_RELAYED, Violation

_SPACE = socket.CMSG_LEN(array.array("i").itemsize)  # the kernel drops any descriptor after the first
_SHARE = 8  # of this process's descriptors, so that no workspace takes those that others need
_BUFFER = 1 << 18  # bytes that wait in the kernel for the host, or for the other end; the kernel doubles it
_RESET = struct.pack("ii", 1, 0)
_UNACKNOWLEDGED = frozenset({4, 9, 11})  # states of TCP: FIN_WAIT1, LAST_ACK, CLOSING
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.1  # seconds from one look at what the other end has not taken to the next


def most_accepted() -> int:
    """Return how many connections of a listener are open at once; more wait in the kernel."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_RELAYED if files == resource.RLIM_INFINITY else max(1, min(MAX_RELAYED, files // _SHARE))


class Handing:
    """The descriptor that has come on a Unix socket and of which the guest has not spoken yet."""

    def __init__(self) -> None:
        self._found: socket.socket | None = None

    async def receive(self, stream: trio.SocketStream, count: int) -> bytes:
        """Receive from a guest. Raises ``Violation``, and ``trio.BrokenResourceError`` as the stream does."""
        try:
            data, ancillary, _, _ = await stream.socket.recvmsg(count, _SPACE, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise trio.BrokenResourceError from error
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for descriptor in array.array("i", content):
                    self._take(descriptor)
        return bytes(data)

    def _take(self, descriptor: int) -> None:
        found: socket.socket | None = None
        try:
            found = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
        if self._found is None and found is not None and _is_listening(found):
            self._found = found
            return
        if found is not None:
            found.close()
        raise Violation("what it hands over is no listening socket, or one too many")

    def take(self) -> socket.socket:
        """Return what was handed over. Raises ``Violation``."""
        found, self._found = self._found, None
        if found is None:
            raise Violation("it says that it has handed over what has not come")
        return found

    def close(self) -> None:
        if self._found is not None:
            self._found.close()
            self._found = None


def _is_listening(found: socket.socket) -> bool:
    with suppress(OSError):
        kind = (found.family, found.type, found.proto)
        wanted = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        return kind == wanted and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


async def accept(listener: socket.socket) -> HandedConnection:
    """Wait for the next connection. Raises ``OSError`` once the listener is shut down."""
    if listener.fileno() < 0:
        raise OSError(errno.EBADF, "it is closed")
    await trio.lowlevel.wait_readable(listener)
    return HandedConnection(await trio.to_thread.run_sync(_accept, listener, abandon_on_cancel=True))


def _accept(listener: socket.socket) -> socket.socket:
    accepted, _ = listener.accept()
    accepted.setblocking(False)
    return accepted


class HandedConnection:
    """The host's end of a connection that it has accepted itself; see the port's ``Connection``."""

    def __init__(self, accepted: socket.socket) -> None:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            accepted.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))

    @property
    def socket(self) -> trio.socket.SocketType:
        return self._stream.socket

    async def receive_some(self, max_bytes: int) -> bytes:
        return bytes(await self._stream.receive_some(max_bytes))

    async def send_all(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    async def finish(self) -> None:
        """Send the end of file, and close once the other end has everything: what it still says would cost it that."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        wait = _FIRST_LOOK
        while self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _UNACKNOWLEDGED:
            await trio.sleep(wait)
            wait = min(2 * wait, _LAST_LOOK)
        self.socket.close()

    def reset(self) -> None:
        """Close, so that whoever reads there does not take it for the end."""
        with suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.socket.close()
