"""A docker daemon that fails as it is told: a relay before a real one, on a socket of its own."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_CHUNK = 1 << 16
_LISTEN = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(64)
asked = socket.socket(fileno=0)
socket.send_fds(asked, [b"x"], [listener.fileno()])
listener.close()
asked.recv(1)
"""
_FAILED = (
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\n"
    b'Connection: close\r\nContent-Length: 23\r\n\r\n{"message":"it failed"}'
)


class Request(NamedTuple):
    method: str
    path: str  # without the version
    whole: bytes


class Fault:
    """What becomes of one request. By itself, nothing happens to it."""

    def before(self, request: Request) -> bytes | None:
        """An answer in the daemon's place, which then hears nothing of the request."""
        return None

    def after(self, request: Request, answer: bytes) -> bytes:
        """The daemon's answer as the client gets it; empty for a connection that breaks."""
        return answer


class Refuses(Fault):
    def before(self, request: Request) -> bytes | None:
        return _FAILED


class Breaks(Fault):
    """The daemon does what it was asked to, and nobody hears of it."""

    def after(self, request: Request, answer: bytes) -> bytes:
        return b""


class Fails(Fault):
    """The daemon does what it was asked to, and says that it did not."""

    def after(self, request: Request, answer: bytes) -> bytes:
        return _FAILED


@dataclass(frozen=True)
class Dawdles(Fault):
    """The daemon gets the request so much later, and does what it was asked to."""

    seconds: float

    def before(self, request: Request) -> bytes | None:
        time.sleep(self.seconds)
        return None


@dataclass(frozen=True)
class Says(Fault):
    """The daemon's answer, with one text in another's place, as long as that one."""

    pattern: bytes
    instead: bytes

    def after(self, request: Request, answer: bytes) -> bytes:
        said = re.sub(self.pattern, self.instead, answer)
        assert len(said) == len(answer)
        return said


@dataclass
class Faulty:
    """``faults`` maps a pattern of ``METHOD /path`` to the faults of the next such requests, of which the last stays
    unless ``None`` comes after it."""

    real: Path
    socket: Path
    faults: dict[str, list[Fault | None]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"

    def next_fault(self, request: Request) -> Fault:
        line = f"{request.method} {request.path}"
        self.seen.append(line)
        for pattern, faults in self.faults.items():
            if re.match(pattern, line):
                return (faults[0] if len(faults) == 1 else faults.pop(0)) or Fault()
        return Fault()

    def relay(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            request = _read_request(client)
            if request is None:
                return
            fault = self.next_fault(request)
            answer = fault.before(request)
            if answer is None:
                answer = fault.after(request, _ask(self.real, request.whole))
            client.sendall(answer)


@contextmanager
def faulty(real: Path, place: Path) -> Iterator[Faulty]:
    relay = Faulty(real, place)
    with _listening(place, beside=real) as listener:
        accepting = threading.Thread(target=_accept, args=(listener, relay))
        accepting.start()
        try:
            yield relay
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


@contextmanager
def _listening(place: Path, *, beside: Path) -> Iterator[socket.socket]:
    """A listener whose process, as the kernel tells it, sees the mounts of the one behind another socket.

    Those of the tests' own process may be others: its sandboxes have been staged where only it sees them.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(beside))
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    words = ["nsenter", f"--target={pid}", "--mount", "python3", "-SIc", _LISTEN, str(place)]
    with ours, subprocess.Popen(words, stdin=theirs) as listening:
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        with socket.socket(fileno=descriptors[0]) as listener:
            yield listener
        ours.close()
        assert listening.wait() == 0


def _accept(listener: socket.socket, relay: Faulty) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=relay.relay, args=(client,), daemon=True).start()


def _read_request(client: socket.socket) -> Request | None:
    head = b""
    while b"\r\n\r\n" not in head:
        if not (chunk := client.recv(_CHUNK)):
            return None
        head += chunk
    head, _, body = head.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    while found and len(body) < int(found[1]):
        body += client.recv(_CHUNK)
    method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
    head = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", head) + b"\r\nConnection: close"
    return Request(method, re.sub(r"^/v[0-9.]+", "", target), head + b"\r\n\r\n" + body)


def _ask(daemon: Path, request: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(daemon))
        connection.sendall(request)
        answer = b""
        while chunk := connection.recv(_CHUNK):
            answer += chunk
    return answer
