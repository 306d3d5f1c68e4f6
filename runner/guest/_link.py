"""The connection to a guest, made again when it is lost, and the table of what is open behind it.

Two tasks serve a guest, one that receives and one that sends; their changes wake the tasks that wait for them. Every
frame is checked against what was said before: the guest may be under the control of its workspace's commands, and must
then harm nothing but that workspace. A lost guest is recorded here and raised where somebody waits, never in the tasks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable
from itertools import count

import trio

from runner.core.errors import WorkspaceLost
from runner.guest import framing
from runner.guest._channels import Channel, Listener, Relayed, RequestedChannel
from runner.guest._handed import Handing
from runner.guest._streams import Bell, Incoming, Outbox
from runner.guest.framing import (
    MAX_COMMANDS,
    MAX_RELAYED,
    NONCE_BYTES,
    RELAY,
    Frame,
    Mark,
    Parser,
    Phase,
    Shield,
    Type,
    Violation,
)

_GREETING = 10.0  # seconds from a connection to the end of the guest's list
_READ_BYTES = 1 << 18
_TURN = 256  # frames of one chunk before other tasks get their turn

_AT_FIRST = frozenset({Type.HELLO})
_IN_LIST = frozenset({Type.STATE, Type.OPEN, Type.ACK, Type.RESET, Type.READY})
_AFTERWARDS = frozenset({Type.DATA, Type.EOF, Type.ACK, Type.STATE, Type.OPEN, Type.RESET, Type.PONG})
_OF_STREAMS = frozenset({Type.DATA, Type.EOF, Type.ACK})


class Link:
    """``kill_sandbox`` is called at most once; the guest is then lost or about to be.

    ``open_relayed`` is called with each new connection, once it is in the table, and says whether anybody serves it.
    ``nonce`` identifies the host to a guest that was connected to another link before. With ``hands_over`` the guest is
    a process of this host's kernel, and its connections are Unix sockets.
    """

    def __init__(
        self,
        what: str,
        kill_sandbox: Callable[[], None],
        open_relayed: Callable[[Listener, Relayed], bool],
        nonce: bytes | None = None,
        *,
        hands_over: bool = False,
    ) -> None:
        self.shield = Shield.NONE
        self.hands_over = hands_over
        self._handing = Handing()
        self.outbox = Outbox()
        self.lost: str | None = None
        self._kind = WorkspaceLost
        self._what = what
        self._kill_sandbox: Callable[[], None] | None = kill_sandbox
        self._open_relayed = open_relayed
        self._nonce = nonce or os.urandom(NONCE_BYTES)
        self._guest_nonce: bytes | None = None
        self._channels: dict[int, Channel] = {}
        self._last_id = 0
        self._last_relayed = RELAY
        self._relayed = 0
        self._tokens = count(1)
        self._pings: dict[int, Bell] = {}
        self._changed = Bell()
        # Of one connection:
        self._allowed = _AT_FIRST
        self._greeting = trio.CancelScope()
        self._before = RELAY  # the last relayed connection that an earlier connection announced
        self._strangers: set[int] = set()  # ids in the guest's list that the host has dropped
        self._hear: dict[Type, Callable[[Frame], None]] = {
            Type.HELLO: self._hear_hello,
            Type.STATE: self._hear_state,
            Type.OPEN: self._hear_open,
            Type.DATA: self._hear_data,
            Type.EOF: self._hear_end,
            Type.ACK: self._hear_acknowledgement,
            Type.RESET: self._hear_reset,
            Type.READY: self._hear_ready,
            Type.PONG: self._hear_pong,
        }

    # --- what the host does ---

    def new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def ask(self, channel: RequestedChannel) -> None:
        """Start a command or a listener, now or when there is a connection. Raises ``WorkspaceLost``."""
        self.check()
        self._channels[channel.id] = channel
        channel.ask()

    def drop(self, channel: Channel, *farewell: bytes) -> None:
        """Remove a channel from the table, and let the guest forget it."""
        if self._channels.pop(channel.id, None):
            self._relayed -= isinstance(channel, Relayed)
            channel.let_go()
            if farewell and not self.outbox.say(*farewell) and channel.listed:
                self._strangers.add(channel.id)  # the guest's list, now under way, has it already

    def settle(self, channel: Relayed) -> None:
        """Drop a closed connection once its other end has received everything."""
        if farewell := channel.farewell():
            self.drop(channel, *farewell)

    def kill_sandbox(self) -> None:
        if kill := self._kill_sandbox:
            self._kill_sandbox = None
            kill()

    def lose(self, words: str, kind: type[WorkspaceLost] = WorkspaceLost) -> None:
        """Record that the guest is lost, with the state of everything behind it."""
        if self.lost is None:
            self.lost, self._kind = words, kind
            self.outbox.close()
            for channel in self._channels.values():
                channel.lose(self._fault)
            for ping in self._pings.values():
                ping.ring()
            self._channels.clear()
            self._handing.close()
            self._changed.ring()

    def check(self) -> None:
        """Raise ``WorkspaceLost`` if the guest is lost."""
        if self.lost is not None:
            raise self._fault()

    def _fault(self) -> Exception:
        return self._kind(self.lost or "")

    async def greeted(self) -> None:
        """Wait for the first guest's list. Raises ``WorkspaceLost``."""
        while self._guest_nonce is None or self._allowed is not _AFTERWARDS:
            self.check()
            await self._changed.wait()

    async def ping(self) -> None:
        """Wait for the answer to a ping. Raises ``WorkspaceLost``."""
        self.check()
        token = next(self._tokens)
        bell = self._pings[token] = Bell()
        self.outbox.say(_ping(token))
        await bell.wait()
        self.check()

    # --- connections ---

    async def serve(self, connect: Callable[[], Awaitable[trio.abc.Stream]]) -> None:
        """Serve connections until there are no more, or the guest breaks the protocol. Raises nothing."""
        try:
            while True:
                stream = await connect()
                async with stream:
                    await self._converse(stream)
        except WorkspaceLost as lost:
            self.lose(lost.message, type(lost))
        except Violation as violation:
            self.kill_sandbox()
            self.lose(f"the guest of {self._what} broke the protocol: {violation}")

    async def _converse(self, stream: trio.abc.Stream) -> None:
        """Serve one connection until it is lost. Raises ``Violation``, and ``WorkspaceLost`` for a silent guest."""
        self._greet()
        violation: Violation | None = None
        with self._greeting:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, stream, nursery.cancel_scope)
                violation = await self._receive(stream)
                nursery.cancel_scope.cancel()
        self.outbox.close()
        if violation:
            raise violation
        if self._greeting.cancelled_caught:
            raise WorkspaceLost(f"the guest of {self._what} did not answer within {_GREETING:.0f}s")

    def _greet(self) -> None:
        self._allowed = _AT_FIRST
        self._greeting = trio.CancelScope(deadline=trio.current_time() + _GREETING)
        self._before = self._last_relayed
        self._strangers = set()
        self._handing.close()
        for channel in self._channels.values():
            channel.interrupt()

    async def _send(self, stream: trio.abc.Stream, connection: trio.CancelScope) -> None:
        try:
            await stream.send_all(framing.hello(self._nonce))
            while True:
                await stream.send_all(await self.outbox.next())
        except trio.BrokenResourceError:
            connection.cancel()

    async def _receive(self, stream: trio.abc.Stream) -> Violation | None:
        parser = Parser()
        try:
            while chunk := await self._next_chunk(stream):
                for number, frame in enumerate(parser.feed(chunk), 1):
                    self._take(frame)
                    if not number % _TURN:
                        await trio.lowlevel.checkpoint()
                await self.outbox.has_room()
        except trio.BrokenResourceError:
            pass
        except Violation as violation:
            return violation
        return None

    async def _next_chunk(self, stream: trio.abc.Stream) -> bytes:
        if self.hands_over:
            assert isinstance(stream, trio.SocketStream)
            return await self._handing.receive(stream, _READ_BYTES)
        return bytes(await stream.receive_some(_READ_BYTES))

    # --- what the guest says ---

    def _take(self, frame: Frame) -> None:
        if frame.type not in self._allowed:
            raise Violation(f"a {frame.type.name} came out of place")
        if frame.stream and frame.type not in _OF_STREAMS:
            raise Violation(f"a {frame.type.name} names a stream")
        self._hear[frame.type](frame)

    def _find(self, id: int) -> Channel | None:
        """``None`` for what was let go: more of it may be on its way."""
        channel = self._channels.get(id)
        if channel is None and not (0 < id <= self._last_id or RELAY < id <= self._last_relayed):
            raise Violation("a frame is about what was never opened")
        return channel

    def _note_stranger(self, id: int) -> None:
        if id in self._strangers or len(self._strangers) >= MAX_COMMANDS + MAX_RELAYED:
            raise Violation("a list says something twice, or is too long")
        self._strangers.add(id)

    def _hear_hello(self, frame: Frame) -> None:
        hello = framing.read_hello(frame.payload)
        if self._guest_nonce not in (None, hello.nonce):
            raise Violation("another guest answers")
        self._guest_nonce = hello.nonce
        self.shield = hello.shield
        self._allowed = _IN_LIST

    def _hear_state(self, frame: Frame) -> None:
        state = framing.read_state(frame.payload)
        channel = self._find(frame.id)
        if Mark.HANDED in state.marks:
            handed = self._handing.take()
            if isinstance(channel, Listener):
                channel.take(handed)
            else:
                handed.close()
        if channel is None and frame.id < RELAY and state.phase >= Phase.FAILED:
            if self._allowed is _IN_LIST:
                self._note_stranger(frame.id)
        elif isinstance(channel, RequestedChannel):
            channel.hear(state)
        else:
            raise Violation("a state is about what has none")

    def _hear_open(self, frame: Frame) -> None:
        listener = framing.read_word(frame.payload)
        if frame.id <= RELAY or not 0 < listener <= self._last_id:
            raise Violation("a connection has no listener")
        channel = self._channels.get(frame.id)
        if channel is not None:
            if channel.listed or not isinstance(channel, Relayed) or channel.listener != listener:
                raise Violation("a connection is opened twice")
            channel.listed = True
        elif self._allowed is _IN_LIST and frame.id <= self._before:
            self._note_stranger(frame.id)
        elif self._allowed is not _IN_LIST and frame.id <= self._last_relayed:
            raise Violation("a connection is opened twice")
        else:
            self._open(frame.id, listener)

    def _open(self, id: int, listener: int) -> None:
        if self._relayed >= MAX_RELAYED:
            raise Violation("there are too many connections")
        self._last_relayed = max(self._last_relayed, id)
        channel = self._channels[id] = Relayed(self.outbox, id, listener)
        self._relayed += 1
        owner = self._channels.get(listener)
        if owner is not None and not isinstance(owner, Listener):
            raise Violation("a connection has no listener")
        if owner is None or not self._open_relayed(owner, channel):
            self.reset(channel)

    def reset(self, channel: Relayed) -> None:
        self.drop(channel, framing.frame(Type.RESET, channel.id))

    def _hear_data(self, frame: Frame) -> None:
        if stream := self._output(frame):
            stream.take(frame.payload)

    def _hear_end(self, frame: Frame) -> None:
        if stream := self._output(frame):
            stream.take_end(framing.read_offset(frame.payload))

    def _output(self, frame: Frame) -> Incoming | None:
        channel = self._find(frame.id)
        if channel is None:
            return None
        if not 0 < frame.stream <= len(channel.outputs):
            raise Violation("a channel has no such stream")
        return channel.outputs[frame.stream - 1]

    def _hear_acknowledgement(self, frame: Frame) -> None:
        if channel := self._find(frame.id):
            if frame.stream >= len(channel.inputs):
                raise Violation("a channel has no such stream")
            channel.inputs[frame.stream].take(framing.read_offset(frame.payload))
            if isinstance(channel, Relayed):
                self.settle(channel)

    def _hear_reset(self, frame: Frame) -> None:
        if channel := self._find(frame.id):
            channel.hear_reset()
            if isinstance(channel, Relayed):
                self.drop(channel)

    def _hear_ready(self, frame: Frame) -> None:
        """Answer the guest's list with what it lacks, and continue."""
        answer = [framing.frame(Type.RESET if id > RELAY else Type.FORGET, id) for id in self._strangers]
        for channel in list(self._channels.values()):
            if isinstance(channel, Relayed) and not channel.listed:
                channel.hear_reset()
                self.drop(channel)
            else:
                answer += channel.resume()
        answer.append(framing.frame(Type.READY))
        answer += map(_ping, self._pings)
        self._allowed = _AFTERWARDS
        self._greeting.deadline = math.inf
        self.outbox.open(answer)
        for channel in self._channels.values():
            for stream in channel.inputs:
                stream.resume()
        self._changed.ring()

    def _hear_pong(self, frame: Frame) -> None:
        """Take an answer for its ping and all earlier ones."""
        value = framing.read_offset(frame.payload)
        if value not in self._pings:
            raise Violation("a PONG without a PING")
        for token in [token for token in self._pings if token <= value]:
            self._pings.pop(token).ring()


def _ping(token: int) -> bytes:
    return framing.frame(Type.PING, payload=framing.OFFSET.pack(token))
