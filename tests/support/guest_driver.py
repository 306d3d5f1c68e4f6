"""A host for tests: it speaks to a guest over a socket, takes nothing that framing.py forbids, and reads ``/proc``.

Blocking and simple, so that a test can stop between any two frames, cut a connection at any byte, or not read at all.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from runner.guest import framing
from runner.guest.framing import (
    MAX_CHUNK,
    OFFSET,
    RELAY,
    STDERR,
    STDIN,
    STDOUT,
    WINDOW,
    Frame,
    Hello,
    Mark,
    Parser,
    Phase,
    Request,
    State,
    Type,
)
from runner.testing.outside import alive, descendants, eventually

NONCE = b"the host's nonce"
PATH = "/usr/local/bin:/usr/bin:/bin"


class Lost(Exception):
    """The connection was cut, or the guest closed it."""


class Wire:
    """A connection that is cut once so many bytes have gone either way."""

    def __init__(self, socket: socket.socket | Pipes, *, up: float = float("inf"), down: float = float("inf")) -> None:
        self.socket = socket
        self.left = [up, down]
        self.passed = [0, 0]

    def send(self, data: bytes) -> None:
        part = data[: int(min(self.left[0], len(data)))]
        try:
            self.socket.sendall(part)
        except OSError as error:
            raise Lost from error
        self._count(0, len(part))
        if len(part) < len(data):
            raise Lost

    def receive(self, timeout: float) -> bytes:
        """Empty when nothing came in time."""
        if not self.left[1]:
            raise Lost
        if not select.select([self.socket], [], [], timeout)[0]:
            return b""
        try:
            chunk = self.socket.recv(int(min(self.left[1], 1 << 18)))
        except OSError as error:
            raise Lost from error
        if not chunk:
            raise Lost
        self._count(1, len(chunk))
        return chunk

    def _count(self, way: int, size: int) -> None:
        self.left[way] -= size
        self.passed[way] += size


@dataclass(eq=False)
class Channel:
    """A command, a listener or a relayed connection, and what the host knows of it."""

    host: Host
    id: int
    request: bytes = b""
    listener: int = 0
    reads: bool = True  # whether its output is acknowledged
    state: State | None = None
    output: dict[int, bytearray] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    over: bool = False  # a relayed connection that was reset
    stdin: bytearray = field(default_factory=bytearray)
    closed: bool = False
    acked: int = 0
    broken: bool = False  # nobody reads its stdin
    signals: list[int] = field(default_factory=list)
    # of this connection
    sent: int = 0
    told: int = -1
    next: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next = dict.fromkeys(self.output, 0)

    @property
    def out(self) -> bytes:
        return bytes(self.output[STDOUT])

    @property
    def err(self) -> bytes:
        return bytes(self.output[STDERR])

    @property
    def phase(self) -> int:
        return self.state.phase if self.state else 0

    @property
    def done(self) -> bool:
        """Whether nothing more will come of it."""
        return self.phase == Phase.FAILED or (self.phase == Phase.GONE and self.ended >= self.output.keys())

    @property
    def finished(self) -> bool:
        """Whether both directions of a relayed connection have ended and are acknowledged."""
        return self.closed and self.acked > len(self.stdin) and STDOUT in self.ended and self.reads

    def write(self, data: bytes) -> None:
        self.stdin += data
        self.host.pump(self)

    def end(self) -> None:
        self.closed = True
        self.host.pump(self)

    def kill(self, number: int) -> None:
        self.signals.append(number)
        self.host.send(framing.signal(self.id, len(self.signals), number))

    def read(self) -> None:
        """Acknowledge what was held back, and go on reading."""
        self.reads = True
        for stream in self.output:
            self.host.acknowledge(self, stream)

    def forget(self) -> None:
        self.host.forget(self)

    def wait(self, seconds: float = 30) -> Ended:
        self.host.until(lambda: self.done, seconds)
        assert self.state is not None
        return Ended(self.state, self.out, self.err)


class Ended(NamedTuple):
    state: State
    out: bytes
    err: bytes

    @property
    def code(self) -> int:
        """As Python's: the exit code, or the negative signal."""
        assert self.state.phase is Phase.GONE, self.state
        assert not self.state.marks & Mark.UNKNOWN
        return os.waitstatus_to_exitcode(self.state.status)


class Host:
    """One guest's host. ``connect`` gives a connection each time that there is none; it raises ``Lost`` for no more."""

    def __init__(self, connect: Callable[[], Wire], *, nonce: bytes = NONCE, first_id: int = 1) -> None:
        self.connect = connect
        self.nonce = nonce
        self.guest = 0  # its pid
        self.mark = "none"  # in the environment of its commands
        self.killed = False
        self.slowness = 0.0  # seconds between a guest's list and our answer
        self.channels: dict[int, Channel] = {}
        self.opened: list[Channel] = []  # relayed connections, in the order in which they were heard of
        self.served: Callable[[Channel], None] = lambda connection: None
        self.hello: Hello | None = None
        self.connections = 0
        self.wire: Wire | None = None
        self.pongs: list[int] = []
        self._last = first_id - 1
        self._listing = False
        self._listed: set[int] = set()
        self._known: set[int] = set()  # all that we have ever asked for
        self._farewells: list[bytes] = []  # to what the guest lists and we have let go

    # --- what a test does ---

    def start(self, *argv: str, env: Mapping[str, str] | None = None, reads: bool = True, **request: Any) -> Channel:
        whole = {"PATH": PATH, "MARK": self.mark} if env is None else env
        return self.ask(lambda id: framing.execute(id, Request(argv=argv, env=whole, **request)), reads=reads)

    def listen(self, port: int = 0) -> Channel:
        """A listener that is there, or has failed."""
        listener = self.ask(lambda id: framing.listen(id, port), streams=())
        self.until(lambda: listener.phase)
        return listener

    def ask(
        self, request: Callable[[int], bytes], *, streams: Sequence[int] = (STDOUT, STDERR), reads: bool = True
    ) -> Channel:
        self._last += 1
        channel = Channel(self, self._last, request(self._last), reads=reads, output={s: bytearray() for s in streams})
        self.channels[channel.id] = channel
        self._known.add(channel.id)
        self.send(channel.request)
        return channel

    def run(self, *argv: str, stdin: bytes = b"", **request: Any) -> Ended:
        command = self.start(*argv, **request)
        command.write(stdin)
        command.end()
        ended = command.wait()
        command.forget()
        return ended

    def forget(self, channel: Channel) -> None:
        del self.channels[channel.id]
        self.send(framing.frame(Type.FORGET, channel.id))

    def reset(self, connection: Channel) -> None:
        del self.channels[connection.id]
        connection.over = True
        self.send(framing.frame(Type.RESET, connection.id))

    def until(self, condition: Callable[[], object], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, [(c.id, c.state, c.out[-200:] if c.output else b"") for c in self.channels.values()][:20]
            self.step(left)

    def step(self, seconds: float) -> None:
        """Take what comes next, or connect again when the connection is lost."""
        try:
            if self.wire is None:
                self._meet()
            else:
                self._hear_all(self.wire.receive(seconds))
        except Lost:
            self.hang_up()

    def idle(self, seconds: float) -> None:
        """Take whatever comes for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.step(left)

    def ping(self, seconds: float = 30) -> None:
        token = len(self.pongs) + 1
        self.send(framing.frame(Type.PING, payload=OFFSET.pack(token)))
        self.until(lambda: token in self.pongs, seconds)

    def kill_guest(self) -> None:
        self.killed = True
        os.kill(self.guest, signal.SIGKILL)

    def hang_up(self) -> None:
        if self.wire is not None:
            self.wire.socket.close()
        self.wire = None

    close = hang_up

    def send(self, data: bytes) -> None:
        """To the guest, if there is a connection; what is lost is said again on the next."""
        try:
            if self.wire is not None and not self._listing:
                self.wire.send(data)
        except Lost:
            self.hang_up()

    # --- connections ---

    def _meet(self) -> None:
        self.wire = self.connect()
        self.connections += 1
        self.parser = Parser()
        self._listed = set()
        self._farewells = []
        self._heard_hello = False
        for channel in self.channels.values():
            channel.told = -1
            channel.next = {stream: len(got) for stream, got in channel.output.items()}
        self.wire.send(framing.hello(self.nonce))
        self._listing = True
        try:
            deadline = time.monotonic() + 60
            while self._listing:
                assert time.monotonic() < deadline
                self._hear_all(self.wire.receive(1))
        finally:
            self._listing = False

    def _answer(self) -> None:
        """What the guest's list shows to have been lost, and where its streams go on."""
        time.sleep(self.slowness)
        answer = []
        for channel in list(self.channels.values()):
            if channel.id in self._listed:
                serial = channel.state.serial if channel.state else 0
                for stream in channel.output:
                    channel.next[stream] = self._acknowledged(channel, stream)
                    answer.append(framing.offset(Type.ACK, channel.id, stream, channel.next[stream]))
                answer += [framing.signal(channel.id, n, s) for n, s in enumerate(channel.signals, 1) if n > serial]
            elif channel.id & RELAY:
                channel.over = True
                del self.channels[channel.id]
            else:
                assert channel.state is None, "it has forgotten what it should keep"
                answer.append(channel.request)
                answer += [framing.signal(channel.id, n, s) for n, s in enumerate(channel.signals, 1)]
            channel.sent = channel.acked
        answer += self._farewells
        self._listing = False
        assert self.wire is not None
        self.wire.send(b"".join(answer) + framing.frame(Type.READY))
        for channel in list(self.channels.values()):
            self.pump(channel)

    def pump(self, channel: Channel) -> None:
        while not channel.broken and channel.sent <= len(channel.stdin) and channel.sent - channel.acked < WINDOW:
            room = min(MAX_CHUNK, WINDOW - (channel.sent - channel.acked))
            chunk = bytes(channel.stdin[channel.sent : channel.sent + room])
            if chunk:
                frame = framing.data(channel.id, STDIN, channel.sent, chunk)
            elif channel.closed:
                frame = framing.offset(Type.EOF, channel.id, STDIN, channel.sent)
            else:
                break
            if self.wire is None or self._listing:
                break
            channel.sent += len(chunk) or 1
            self.send(frame)

    def acknowledge(self, channel: Channel, stream: int) -> None:
        self.send(framing.offset(Type.ACK, channel.id, stream, self._acknowledged(channel, stream)))

    def _acknowledged(self, channel: Channel, stream: int) -> int:
        return len(channel.output[stream]) + (stream in channel.ended) if channel.reads else 0

    # --- what the guest says ---

    def _hear_all(self, received: bytes) -> None:
        for frame in self.parser.feed(received):
            self._hear(frame)

    def _hear(self, frame: Frame) -> None:
        if self._heard_hello is (frame.type is Type.HELLO):
            raise AssertionError(f"{frame.type.name} out of place")
        assert not (self._listing and frame.type in (Type.DATA, Type.EOF, Type.PONG)), "before its READY"
        if frame.type is Type.HELLO:
            self._heard_hello = True
            hello = framing.read_hello(frame.payload)
            assert self.hello in (None, hello)
            self.hello = hello
        elif frame.type is Type.READY:
            assert self._listing
            self._answer()
        elif frame.type is Type.PONG:
            self.pongs.append(framing.read_offset(frame.payload))
        else:
            self._hear_channel(frame)

    def _hear_channel(self, frame: Frame) -> None:
        first = frame.id not in self._listed
        self._listed.add(frame.id)
        if frame.type is Type.OPEN:
            assert first
            self._hear_open(frame)
        channel = self.channels.get(frame.id)
        if channel is None:
            assert first or frame.id not in self._known or frame.type is not Type.STATE, "a final state is the last one"
            if frame.type is Type.OPEN:
                self._farewells.append(framing.frame(Type.RESET, frame.id))
            if frame.type is Type.STATE and framing.read_state(frame.payload).phase >= Phase.FAILED:
                self._farewells.append(framing.frame(Type.FORGET, frame.id))
            return
        match frame.type:
            case Type.STATE:
                self._hear_state(channel, framing.read_state(frame.payload), first)
            case Type.DATA:
                self._hear_data(channel, frame)
            case Type.EOF:
                length = framing.read_offset(frame.payload)
                assert channel.next[frame.stream] <= length == len(channel.output[frame.stream])
                channel.next[frame.stream] = length + 1
                channel.ended.add(frame.stream)
                self._take(channel, frame.stream)
            case Type.ACK:
                offset = framing.read_offset(frame.payload)
                assert frame.stream == STDIN
                assert channel.request[4:5] != bytes([Type.LISTEN])
                assert (
                    max(channel.told, channel.acked - (channel.told < 0))
                    < offset
                    <= len(channel.stdin) + channel.closed
                )
                channel.told = channel.acked = offset
                self.pump(channel)
            case Type.RESET:
                channel.broken = True
                if channel.id & RELAY:
                    channel.over = True
                    del self.channels[channel.id]
            case _:
                assert frame.type is Type.OPEN
        if channel.id & RELAY and not channel.over:
            self.served(channel)
            if channel.finished and channel.id in self.channels:
                channel.forget()

    def _hear_open(self, frame: Frame) -> None:
        assert frame.id & RELAY
        if frame.id not in self.channels and frame.id > max((c.id for c in self.opened), default=RELAY):
            connection = Channel(
                self, frame.id, listener=framing.read_word(frame.payload), output={STDOUT: bytearray()}
            )
            self.channels[frame.id] = connection
            self.opened.append(connection)

    def _hear_state(self, channel: Channel, state: State, first: bool) -> None:
        if before := channel.state:
            known, now = (before.phase, before.serial), (state.phase, state.serial)
            assert state.phase >= before.phase, (before, state)
            assert state.serial >= before.serial
            assert first or known != now, "a state that says nothing new"
            assert state.phase is before.phase or before.phase is not Phase.FAILED
        assert state.serial <= len(channel.signals)
        channel.state = state

    def _hear_data(self, channel: Channel, frame: Frame) -> None:
        at, chunk = framing.read_offset(frame.payload), frame.payload[OFFSET.size :]
        got = channel.output[frame.stream]
        assert channel.next[frame.stream] <= at <= len(got), "a gap, or bytes that come twice"
        channel.next[frame.stream] = at + len(chunk)
        got += chunk[max(0, len(got) - at) :]
        self._take(channel, frame.stream)

    def _take(self, channel: Channel, stream: int) -> None:
        if channel.reads:
            self.acknowledge(channel, stream)


# --- guests ---


class Pipes:
    """Two pipes in the place of a socket."""

    def __init__(self, hears: int, says: int) -> None:
        self.hears = hears
        self.says = says

    def fileno(self) -> int:
        return self.hears

    def recv(self, size: int) -> bytes:
        return os.read(self.hears, size)

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.says, data) :]

    def close(self) -> None:
        os.close(self.hears)
        os.close(self.says)


@contextmanager
def inherited(
    *words: str | Path, user: int | None = None, env: Mapping[str, str] | None = None, pipes: bool = False
) -> Iterator[Host]:
    """A guest with a socket pair, or two pipes, as its channel. It has to end by itself, well, with all that it ran."""
    if pipes:
        (stdin, says), (hears, stdout) = os.pipe(), os.pipe()
        theirs, ours = (stdin, stdout), Pipes(hears, says)
    else:
        ours, end = socket.socketpair()
        theirs = (end.detach(), subprocess.DEVNULL)
    guest = subprocess.Popen(
        words,
        stdin=theirs[0],
        stdout=theirs[1],
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        env=env or {},
    )
    for fd in theirs:
        if fd >= 0:
            os.close(fd)
    host = Host(once(Wire(ours)))
    host.guest = guest.pid
    host.step(10)
    try:
        yield host
        assert host.killed or guest.poll() is None, "the guest has ended"
    finally:
        children = descendants(guest.pid)
        host.hang_up()
        try:
            status = guest.wait(30)
        except subprocess.TimeoutExpired:
            guest.kill()
            guest.wait()
            raise
    assert status == (-signal.SIGKILL if host.killed else 0)
    eventually(lambda: not any(map(alive, children)), 10 if host.killed else 0)


def once(wire: Wire) -> Callable[[], Wire]:
    wires = [wire]

    def connect() -> Wire:
        if not wires:
            raise AssertionError("the guest has closed its channel")
        return wires.pop()

    return connect


@contextmanager
def dialling(program: Path, folder: Path, *, budgets: Sequence[Mapping[str, float]] = ()) -> Iterator[Host]:
    """A guest that dials a socket in ``folder``; connections are cut as the budgets say, then no more."""
    place = folder / secrets.token_hex(4)
    left = list(budgets)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(8)
        listener.settimeout(30)
        guest = subprocess.Popen([program, str(place)], env={})

        def connect() -> Wire:
            return Wire(listener.accept()[0], **(left.pop(0) if left else {}))

        host = Host(connect)
        host.guest = guest.pid
        try:
            yield host
            assert guest.poll() is None, "the guest has ended"
        finally:
            children = descendants(guest.pid)
            host.hang_up()
            guest.kill()
            guest.wait()
        eventually(lambda: not any(map(alive, children)))
