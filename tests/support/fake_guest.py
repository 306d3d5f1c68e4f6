"""A guest in Python, for faults and exact times: it speaks the protocol, and its commands are scripts.

Written without the client's code, so that a misreading of the protocol is not made twice.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable

import trio

from runner.guest import framing
from runner.guest.framing import (
    MAX_CHUNK,
    STDERR,
    STDOUT,
    WINDOW,
    Frame,
    Parser,
    Phase,
    Shield,
    Stage,
    State,
    Type,
)

PIPE = 1 << 16  # bytes that a command can write and the guest need not read
STATE = struct.Struct("<BBHIiI")


def hello(nonce: bytes = b"the fake guest's", shield: Shield = Shield.INIT, version: int = framing.VERSION) -> bytes:
    return framing.frame(Type.HELLO, payload=struct.pack("<HH16s", version, shield, nonce))


def state(id: int, state: State) -> bytes:
    packed = STATE.pack(state.phase, state.marks, state.stage, state.pid, state.status, state.serial)
    return framing.frame(Type.STATE, id, packed)


def ready() -> bytes:
    return framing.frame(Type.READY)


def opened(id: int, listener: int) -> bytes:
    return framing.frame(Type.OPEN, id, struct.pack("<I", listener))


def words_of(request: bytes) -> tuple[str, list[str], dict[str, str]]:
    """The directory, words and environment of an ``EXEC``."""
    _, _, _, limits, words, _ = struct.unpack_from("<IIiIII", request)
    cwd, *rest = [word.decode() for word in request[24 + 24 * limits :].split(b"\0")[:-1]]
    return cwd, rest[:words], dict(word.split("=", 1) for word in rest[words:])


class Refused(Exception):
    """Raised by a script: the command does not start."""

    def __init__(self, stage: Stage, number: int) -> None:
        self.stage = stage
        self.number = number


class Into:
    """A stream into the workspace."""

    def __init__(self) -> None:
        self.unread = bytearray()
        self.got = 0
        self.ended = self.broken = False
        self.passed = 0
        self.next = 0  # on this connection


class Out:
    """A stream out of the workspace, kept from what is acknowledged on."""

    def __init__(self) -> None:
        self.kept = bytearray()
        self.acked = self.sent = 0
        self.ended = self.end_acked = False

    @property
    def got(self) -> int:
        return self.acked + len(self.kept)


class Channel:
    """What has streams. Each ``says_*`` is a frame to be sent."""

    def __init__(self, guest: FakeGuest, id: int, *outs: int) -> None:
        self.guest = guest
        self.id = id
        self.stdin = Into()
        self.outs = {number: Out() for number in outs}
        self.says_in = False

    def pass_on(self, offset: int) -> None:
        self.says_in = self.says_in or offset > self.stdin.passed
        self.stdin.passed = offset
        self.guest.change()


class Played(Channel):
    """A command. Its script sets what it is deaf to, and whether it leaves something behind that only KILL ends."""

    def __init__(self, guest: FakeGuest, id: int, request: bytes) -> None:
        super().__init__(guest, id, STDOUT, STDERR)
        self.cwd, self.argv, self.env = words_of(request)
        self.state = State(phase=Phase.RUNNING, pid=1000 + id)
        self.signals: list[int] = []
        self.deaf: set[int] = set()
        self.leaves = False
        self.scope = trio.CancelScope()
        self.says_state = True

    async def read(self, size: int = 1 << 16) -> bytes:
        while not self.stdin.unread and not self.stdin.ended:
            await self.guest.changed()
        chunk = bytes(self.stdin.unread[:size])
        del self.stdin.unread[:size]
        self.pass_on(self.stdin.got - len(self.stdin.unread) + (self.stdin.ended and not self.stdin.unread))
        return chunk

    async def write(self, content: bytes, stream: int = STDOUT) -> None:
        out = self.outs[stream]
        while content:
            while len(out.kept) >= WINDOW + PIPE:
                await self.guest.changed()
            room = WINDOW + PIPE - len(out.kept)
            out.kept += content[:room]
            content = content[room:]
            self.guest.change()

    def close_stdin(self) -> None:
        self.stdin.broken = self.says_in = True
        self.guest.change()

    async def signalled(self, number: int) -> None:
        while number not in self.signals:
            await self.guest.changed()

    def become(self, phase: Phase, **more: int) -> None:
        kept = {"status": self.state.status, "marks": self.state.marks, "stage": self.state.stage, **more}
        self.state = State(phase=phase, pid=self.state.pid, serial=len(self.signals), **kept)
        self.says_state = True
        self.guest.change()


class Inside(Channel):
    """A connection that was made inside, as a program there has it."""

    def __init__(self, guest: FakeGuest, id: int, listener: int) -> None:
        super().__init__(guest, id, STDOUT)
        self.listener = listener
        self.says_open = True
        self.reset = False

    def send(self, content: bytes, *, end: bool = False) -> None:
        self.outs[STDOUT].kept += content
        self.outs[STDOUT].ended = end
        self.guest.change()

    async def receive(self) -> bytes:
        """All up to its end, or until it is reset."""
        while not self.stdin.ended and not self.reset:
            await self.guest.changed()
        return bytes(self.stdin.unread)


Script = Callable[[Played], Awaitable[int]]


class FakeGuest:
    """``play`` runs a command and gives its wait status. ``serve`` may be called again for a new connection."""

    def __init__(self, nursery: trio.Nursery, play: Script) -> None:
        self._nursery = nursery
        self._play = play
        self._event = trio.Event()
        self._connection = trio.CancelScope()
        self.commands: dict[int, Played] = {}
        self.played: list[Played] = []
        self.ports: dict[int, bytes] = {}
        self.relayed: dict[int, Inside] = {}
        self.forgotten: list[int] = []
        self._pieces = b""
        self._last = framing.RELAY

    def change(self) -> None:
        self._event.set()
        self._event = trio.Event()

    async def changed(self) -> None:
        await self._event.wait()

    def connect(self, listener: int) -> Inside:
        self._last += 1
        made = self.relayed[self._last] = Inside(self, self._last, listener)
        self.change()
        return made

    async def serve(self, stream: trio.abc.Stream) -> None:
        """One connection, until it is lost or there is another."""
        self._connection.cancel()
        self._heard_ready = self._said_ready = False
        self._pongs: list[bytes] = []
        self._states = list(self.ports.values())
        self._pieces = b""
        for command in self.commands.values():
            command.says_state = True
        for inside in self.relayed.values():
            inside.says_open = True
        for channel in [*self.commands.values(), *self.relayed.values()]:
            channel.says_in = True
            channel.stdin.next = channel.stdin.passed
        async with stream, trio.open_nursery() as nursery:
            self._connection = nursery.cancel_scope
            nursery.start_soon(self._write, stream, nursery.cancel_scope)
            parser = Parser()
            try:
                while chunk := await stream.receive_some(1 << 18):
                    if self._connection is not nursery.cancel_scope:
                        break
                    for frame in parser.feed(bytes(chunk)):
                        self._hear(frame)
                    self.change()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            nursery.cancel_scope.cancel()

    async def _write(self, stream: trio.abc.Stream, connection: trio.CancelScope) -> None:
        try:
            await stream.send_all(hello())
            while True:
                if batch := b"".join(self._say()):
                    await stream.send_all(batch)
                else:
                    await self.changed()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            connection.cancel()

    def _say(self) -> list[bytes]:
        said = self._states + self._pongs
        self._states, self._pongs = [], []
        for command in self.commands.values():
            if command.says_state:
                said.append(state(command.id, command.state))
                command.says_state = False
            said += self._say_streams(command)
        for inside in self.relayed.values():
            if inside.says_open:
                said.append(opened(inside.id, inside.listener))
                inside.says_open = False
            said += self._say_streams(inside)
        if not self._said_ready:
            said.append(ready())
            self._said_ready = True
        return said

    def _say_streams(self, channel: Channel) -> list[bytes]:
        said = []
        if channel.says_in:
            broken = channel.stdin.broken
            acked = framing.offset(Type.ACK, channel.id, 0, channel.stdin.passed)
            said.append(framing.frame(Type.RESET, channel.id) if broken else acked)
            channel.says_in = False
        for number, out in channel.outs.items() if self._heard_ready else ():
            while out.sent < (allowed := min(out.got, out.acked + WINDOW)):
                chunk = bytes(out.kept[out.sent - out.acked : allowed - out.acked][:MAX_CHUNK])
                said.append(framing.data(channel.id, number, out.sent, chunk))
                out.sent += len(chunk)
            if out.ended and out.sent == out.got:
                said.append(framing.offset(Type.EOF, channel.id, number, out.sent))
                out.sent += 1
        return said

    def _hear(self, frame: Frame) -> None:
        channel = self.commands.get(frame.id) or self.relayed.get(frame.id)
        match frame.type:
            case Type.READY:
                self._heard_ready = True
                for known in [*self.commands.values(), *self.relayed.values()]:
                    for out in known.outs.values():
                        out.sent = out.acked + out.end_acked
            case Type.EXEC:
                self._pieces += frame.payload
                if frame.stream:
                    assert frame.id not in self.commands
                    self._start(frame.id)
            case Type.LISTEN:
                self._states.append(self._listening(frame.id, Phase.RUNNING))
            case Type.SIGNAL if frame.id in self.ports:
                self._states.append(self._listening(frame.id, Phase.GONE, 1))
            case Type.SIGNAL:
                assert isinstance(channel, Played)
                self._signal(channel, *struct.unpack("<II", frame.payload))
            case Type.FORGET:
                assert isinstance(channel, Inside) or frame.id in self.ports or channel.state.phase >= Phase.FAILED
                self.forgotten.append(frame.id)
                for known in (self.commands, self.ports, self.relayed):
                    known.pop(frame.id, None)
            case Type.RESET if isinstance(channel, Inside):
                channel.reset = not (channel.stdin.ended and channel.outs[STDOUT].end_acked)
                self.change()
                del self.relayed[frame.id]
            case Type.PING:
                self._pongs.append(framing.frame(Type.PONG, payload=bytes(frame.payload)))
            case Type.ACK:
                assert channel
                _acknowledge(channel.outs[frame.stream], framing.read_offset(frame.payload))
            case Type.DATA | Type.EOF:
                assert frame.stream == 0
                _take(channel, frame)
            case Type.HELLO:
                pass
            case other:
                raise AssertionError(f"the host says {other.name}")

    def _listening(self, id: int, phase: Phase, serial: int = 0) -> bytes:
        self.ports[id] = state(id, State(phase=phase, pid=8080, serial=serial))
        return self.ports[id]

    def _start(self, id: int) -> None:
        command = self.commands[id] = Played(self, id, self._pieces)
        self.played.append(command)
        self._pieces = b""
        self._nursery.start_soon(self._run, command)

    async def _run(self, command: Played) -> None:
        try:
            with command.scope:
                status = await self._play(command)
        except Refused as refused:
            command.become(Phase.FAILED, status=refused.number, stage=refused.stage)
            return
        if command.scope.cancelled_caught:
            status = command.signals[-1]
        command.become(Phase.EXITED, status=status)
        if command.leaves:
            await command.signalled(9)
        for out in command.outs.values():
            out.ended = True
        command.become(Phase.GONE)

    def _signal(self, command: Played, serial: int, number: int) -> None:
        if serial <= len(command.signals):
            return
        command.signals.append(number)
        assert len(command.signals) == serial
        if number not in command.deaf:
            command.scope.cancel()
        command.become(command.state.phase)


def _acknowledge(out: Out, acked: int) -> None:
    assert out.acked <= acked <= out.got + out.ended
    out.sent = max(out.sent, acked)
    out.end_acked = acked > out.got
    acked -= out.end_acked
    del out.kept[: acked - out.acked]
    out.acked = acked


def _take(channel: Channel | None, frame: Frame) -> None:
    if channel is None or channel.stdin.broken:
        return
    stdin, at = channel.stdin, framing.read_offset(frame.payload)
    if frame.type is Type.EOF:
        assert at == stdin.got
        stdin.ended = True
    else:
        assert stdin.next <= at <= stdin.got
        stdin.next = at + len(frame.payload) - 8
        new = bytes(frame.payload[8 + stdin.got - at :])
        stdin.unread += new
        stdin.got += len(new)
        assert stdin.got - stdin.passed <= WINDOW
    if isinstance(channel, Inside):
        channel.pass_on(stdin.got + stdin.ended)
