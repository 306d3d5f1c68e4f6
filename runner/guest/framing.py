"""The guest protocol, version 1, as bytes: no input, no output, no clock.

Theory of operation
-------------------

*Frames.* Everything is a frame: ``HEADER`` (length of the payload, type, stream, zero, id; little endian)
and at most ``MAX_PAYLOAD`` bytes. An id names a *channel*: a command or a listener, whose ids the host
chooses, rising and never used again; or a relayed connection, whose ids the guest chooses, rising and with
``RELAY`` set. Anything against these rules is a ``Violation``, and the side that sees it closes the connection.

*Streams.* Channels carry byte streams: 0 into the workspace, 1 and 2 out of it (a command's stdout and stderr;
a relayed connection has 0 and 1). ``DATA`` holds the offset of its first byte, and bytes; ``EOF`` the length
of the stream. ``ACK`` says how far the receiver has passed the bytes on, and one more once it has passed on
the end. A sender keeps what is not acknowledged, and never has more than ``WINDOW`` bytes of it: a slow
reader slows its writer and nobody else. ``RESET`` from the guest on a command says that it reads stream 0 no
more; on a relayed connection either side gives it up with it, and the channel is over for both.

*Loss and return.* On each new connection both sides say ``HELLO``, then what they know, then ``READY``. The guest
knows the ``STATE`` of each command and listener, ``OPEN`` of each relayed connection, and of each stream 0 its
``ACK``, or ``RESET`` if it reads no more. The host answers with ``ACK`` of each other stream and with what the
guest's list shows to have been lost: requests, signals with a serial above the one in ``STATE``, ``FORGET``.
After the other side's ``READY`` a sender starts again from what is acknowledged, or further. So bytes that were
received and not yet passed on may come twice: their receiver drops them by their offset. The nonces in ``HELLO``
stay the same for the lives of the guest and of the host's client; a changed one is another guest.

*Commands.* ``EXEC`` in pieces (``stream`` 1 marks the last, and nothing comes between them) starts a command.
Its ``STATE`` goes upwards through ``Phase``, each once a connection and again when a signal was carried out:
``EXITED`` is its main process, ``GONE`` that no process of its tree is left. ``SIGNAL`` goes to the whole tree;
the guest repeats signal 9 until nothing is left, and keeps a status until ``FORGET``, which is allowed once the
phase is final. What was on its way when a side let a channel go is no violation.

*Relay.* ``LISTEN`` makes the guest listen on the workspace's loopback; signal 9 ends that. Each connection there
is ``OPEN`` with the listener's id; the host answers with data or with ``RESET``, and says ``FORGET`` once
both directions have ended and are acknowledged.

*Handing over.* A host that shares a kernel with the guest, on a Unix socket, may ask (``stream`` 1 of ``LISTEN``) for
the listening socket itself. Each ``STATE`` of it that is marked ``HANDED`` comes with bytes that carry the descriptor,
one at a time; then the host accepts the connections, and the guest none.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import STRICT, IntEnum, IntFlag
from typing import NamedTuple

from msgspec import Struct

VERSION = 1
HEADER = struct.Struct("<IBBHI")
MAX_PAYLOAD = 1 << 16
WINDOW = 1 << 18  # bytes of one stream that are sent and not acknowledged
MAX_REQUEST = 4 << 20  # bytes of one EXEC; the kernel takes about 2 MiB of arguments and environment
MAX_COMMANDS = 4096  # that a guest keeps at once, listeners included
MAX_RELAYED = 1024
RELAY = 1 << 31
NONCE_BYTES = 16
KEEP = 0xFFFFFFFF  # a request's uid or gid: the guest's own

STDIN, STDOUT, STDERR = 0, 1, 2

OFFSET = struct.Struct("<Q")
_HELLO = struct.Struct("<HH16s")
_SIGNAL = struct.Struct("<II")
_STATE = struct.Struct("<BBHIiI")
_REQUEST = struct.Struct("<IIiIII")
_LIMIT = struct.Struct("<IIQQ")
_WORD = struct.Struct("<I")
MAX_CHUNK = MAX_PAYLOAD - OFFSET.size


class Type(IntEnum):
    HELLO = 1
    EXEC = 2
    DATA = 3
    EOF = 4
    ACK = 5
    SIGNAL = 6
    STATE = 7
    FORGET = 8
    LISTEN = 9
    OPEN = 10
    RESET = 11
    PING = 12
    PONG = 13
    READY = 14


class Phase(IntEnum):
    """``FAILED`` and ``GONE`` are final."""

    RUNNING = 1
    EXITED = 2
    FAILED = 3  # never became the program that was asked for; ``status`` is an errno
    GONE = 4


class Stage(IntEnum):
    """The step at which a command failed to start."""

    NONE = 0
    REQUEST = 1  # the request cannot be read, or there are too many
    FORK = 2  # processes, pipes or memory could not be had
    LIMITS = 3  # limits, oom score, user or confinement could not be set
    DIRECTORY = 4
    EXEC = 5
    LISTEN = 6


class Mark(IntFlag, boundary=STRICT):
    """``TAMPERED``: the command's supervisor was killed from inside. ``UNKNOWN``: and its status was lost with it.

    ``HANDED``: the listening socket has come, for the host to accept its connections.
    """

    NONE = 0
    TAMPERED = 1
    UNKNOWN = 2
    HANDED = 4


class Shield(IntFlag, boundary=STRICT):
    """The protection of the guest from its commands, as its ``HELLO`` says."""

    NONE = 0
    INIT = 1  # it is the first process of a pid namespace
    SIGNALS = 2  # Landlock keeps each command's signals in its own tree
    CALLS = 4  # tried after seccomp was told: system calls that lead out of a sandbox are refused


class Violation(Exception):
    """The other side broke the protocol. The words say how; bytes of it are never in them."""


class Frame(NamedTuple):
    type: Type
    id: int = 0
    stream: int = 0
    payload: bytes | memoryview = b""


class Hello(Struct, frozen=True):
    nonce: bytes
    shield: Shield = Shield.NONE


class State(Struct, frozen=True, kw_only=True):
    """The state of a command: ``status`` is a wait status, or an errno with ``FAILED``; ``pid`` is the one inside.

    For a listener ``pid`` is its port. ``serial`` is that of the last signal that was carried out.
    """

    phase: Phase
    pid: int = 0
    status: int = 0
    serial: int = 0
    stage: Stage = Stage.NONE
    marks: Mark = Mark.NONE


class Request(Struct, frozen=True, kw_only=True):
    """A command to start. ``env`` is the whole environment; ``limits`` maps ``RLIMIT`` numbers to soft and hard values.

    A first word without a slash is looked for in the environment's ``PATH``. ``oom_score_adj`` 0 leaves it alone.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str = "/"
    uid: int = KEEP
    gid: int = KEEP
    oom_score_adj: int = 0
    limits: Mapping[int, tuple[int, int]] = {}


def frame(type: Type, id: int = 0, payload: bytes = b"", *, stream: int = 0) -> bytes:
    return HEADER.pack(len(payload), type, stream, 0, id) + payload


def hello(nonce: bytes) -> bytes:
    return frame(Type.HELLO, payload=_HELLO.pack(VERSION, 0, nonce))


def data(id: int, stream: int, offset: int, chunk: bytes) -> bytes:
    """Encode at most ``MAX_CHUNK`` bytes of a stream."""
    return HEADER.pack(OFFSET.size + len(chunk), Type.DATA, stream, 0, id) + OFFSET.pack(offset) + chunk


def offset(type: Type, id: int, stream: int, value: int) -> bytes:
    """``EOF`` or ``ACK``."""
    return frame(type, id, OFFSET.pack(value), stream=stream)


def signal(id: int, serial: int, number: int) -> bytes:
    return frame(Type.SIGNAL, id, _SIGNAL.pack(serial, number))


def listen(id: int, port: int, *, hands: bool = False) -> bytes:
    return frame(Type.LISTEN, id, _WORD.pack(port), stream=hands)


def execute(id: int, request: Request) -> bytes:
    """The ``EXEC`` frames of a request. Raises ``ValueError`` for one with a NUL, or over ``MAX_REQUEST``."""
    words = [request.cwd, *request.argv, *(f"{name}={value}" for name, value in request.env.items())]
    if any("\0" in word for word in words):
        raise ValueError("a word of the command or of its environment holds a NUL")
    head = _REQUEST.pack(
        request.uid, request.gid, request.oom_score_adj, len(request.limits), len(request.argv), len(request.env)
    )
    limits = [_LIMIT.pack(number, 0, soft, hard) for number, (soft, hard) in request.limits.items()]
    body = b"".join([head, *limits, *(os.fsencode(word) + b"\0" for word in words)])
    if len(body) > MAX_REQUEST:
        raise ValueError(f"the command and its environment take {len(body)} bytes; at most {MAX_REQUEST} can be sent")
    pieces = [body[at : at + MAX_PAYLOAD] for at in range(0, len(body), MAX_PAYLOAD)]
    return b"".join(frame(Type.EXEC, id, piece, stream=piece is pieces[-1]) for piece in pieces)


_SIZES = {
    Type.HELLO: _HELLO.size,
    Type.EOF: OFFSET.size,
    Type.ACK: OFFSET.size,
    Type.SIGNAL: _SIGNAL.size,
    Type.STATE: _STATE.size,
    Type.FORGET: 0,
    Type.LISTEN: _WORD.size,
    Type.OPEN: _WORD.size,
    Type.RESET: 0,
    Type.PING: OFFSET.size,
    Type.PONG: OFFSET.size,
    Type.READY: 0,
}


_TYPES = {type.value: type for type in Type}


class Parser:
    """Bytes of one connection into frames, holding at most one frame that is not whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[Frame]:
        """The frames that are whole by now. Raises ``Violation``; the connection is of no use then."""
        view = memoryview(self._rest + received if self._rest else received)
        at = 0
        while len(view) - at >= HEADER.size:
            length, type, stream, zero, id = HEADER.unpack_from(view, at)
            kind = _check(length, type, stream, zero)
            end = at + HEADER.size + length
            if end > len(view):
                break
            yield Frame(kind, id, stream, view[at + HEADER.size : end])
            at = end
        self._rest = bytes(view[at:])


def _check(length: int, type: int, stream: int, zero: int) -> Type:
    kind = _TYPES.get(type)
    if kind is None or zero or stream > STDERR:
        raise Violation("a frame has an unknown type or stream")
    if kind is Type.DATA:
        fits = OFFSET.size < length <= MAX_PAYLOAD
    elif kind is Type.EXEC:
        fits = 0 < length <= MAX_PAYLOAD
    else:
        fits = length == _SIZES[kind]
    if not fits:
        raise Violation(f"a frame of type {kind.name} has {length} bytes")
    return kind


def read_hello(payload: bytes | memoryview) -> Hello:
    """Read a ``HELLO``. Raises ``Violation`` for another version."""
    version, shield, nonce = _HELLO.unpack(payload)
    if version != VERSION:
        raise Violation(f"the other side speaks version {version}, not {VERSION}")
    try:
        return Hello(nonce, Shield(shield))
    except ValueError as error:
        raise Violation("the guest claims a shield that is not known") from error


def read_offset(payload: bytes | memoryview) -> int:
    value: int = OFFSET.unpack_from(payload)[0]
    return value


def read_word(payload: bytes | memoryview) -> int:
    value: int = _WORD.unpack(payload)[0]
    return value


def read_state(payload: bytes | memoryview) -> State:
    phase, marks, stage, pid, status, serial = _STATE.unpack(payload)
    try:
        return State(phase=Phase(phase), pid=pid, status=status, serial=serial, stage=Stage(stage), marks=Mark(marks))
    except ValueError as error:
        raise Violation("a state has an unknown phase, stage or mark") from error
