"""The host's ends of byte streams, and the queue of frames for the guest. No input and no output.

Each end knows by offsets what the other side has received, so that a lost connection loses and repeats nothing;
framing.py has the rules. Nothing here waits for a connection: whoever has one empties the ``Outbox``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import trio

from runner.guest import framing
from runner.guest.framing import MAX_CHUNK, MAX_RELAYED, OFFSET, WINDOW, Type, Violation

_STEP = WINDOW // 4  # an acknowledgement of less waits for something else to be sent
_BATCH_BYTES = 1 << 18
_MAX_LEFT = WINDOW + (1 << 20)  # as much as a command can leave in the guest and in a pipe
_MAX_ANSWERS = 4 * MAX_RELAYED


class Bell:
    """Wakes all tasks that wait for a change; costs nothing while there are none."""

    def __init__(self) -> None:
        self._event: trio.Event | None = None

    def ring(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        if self._event is None:
            self._event = trio.Event()
        await self._event.wait()


class Outbox:
    """The queue to the guest: small frames in order, acknowledgements, then streams in turn.

    Accepts nothing while closed: the channels know what a lost connection has to be told again.
    """

    def __init__(self) -> None:
        self._open = False
        self._frames: deque[bytes] = deque()
        self._acknowledging: dict[Incoming, None] = {}
        self._overdue = False  # an acknowledgement does not wait for something else to be sent
        self._streams: OrderedDict[Outgoing, None] = OrderedDict()
        self._filled = Bell()
        self._emptied = Bell()

    def close(self) -> None:
        self._open = False
        self._frames.clear()
        self._acknowledging.clear()
        self._streams.clear()

    def open(self, frames: list[bytes]) -> None:
        self._open = True
        self._frames.extend(frames)
        self._filled.ring()

    def say(self, *frames: bytes) -> bool:
        """Queue frames; whether they were accepted."""
        if self._open:
            self._frames.extend(frames)
            self._filled.ring()
        return self._open

    def acknowledge(self, stream: Incoming, *, overdue: bool) -> None:
        if self._open:
            self._acknowledging[stream] = None
            if overdue:
                self._overdue = True
                self._filled.ring()

    def leave(self, stream: Incoming) -> None:
        self._acknowledging.pop(stream, None)

    def add(self, stream: Outgoing) -> None:
        """Send from the stream in its turns, until it has nothing more."""
        if self._open:
            self._streams[stream] = None
            self._filled.ring()

    async def next(self) -> bytes:
        """Wait for something to send, and return it."""
        while not (batch := self._collect()):
            await self._filled.wait()
        return batch

    def _collect(self) -> bytes:
        if not (self._overdue or self._frames or self._streams):
            return b""
        parts = [*self._frames, *(stream.acknowledgement() for stream in self._acknowledging)]
        self._acknowledging.clear()
        self._overdue = False
        self._frames.clear()
        self._emptied.ring()
        size = 0
        while self._streams and size < _BATCH_BYTES:
            stream, _ = self._streams.popitem(last=False)
            if part := stream.next():
                parts.append(part)
                size += len(part)
                self._streams[stream] = None
        return b"".join(parts)

    async def has_room(self) -> None:
        """Wait while too many answers are queued for a guest that does not read."""
        while len(self._frames) > _MAX_ANSWERS:
            await self._emptied.wait()


class Incoming:
    """A stream out of the workspace. Bytes received before its end or loss can be read, then end of file."""

    def __init__(self, outbox: Outbox, id: int, stream: int) -> None:
        self._outbox = outbox
        self._id = id
        self._stream = stream
        self._buffer = bytearray()
        self._received = 0
        self._next = 0  # the next offset on this connection: less than received while bytes are repeated
        self._acknowledged = 0
        self._end: int | None = None
        self._finished = False
        self._keeping = False
        self._fault: Callable[[], Exception] | None = None
        self._bell = Bell()

    async def receive_some(self, max_bytes: int) -> bytes:
        """Receive at most ``max_bytes``; empty at end of file. Cancelling loses nothing."""
        if self._buffer or self.ended:
            await trio.lowlevel.checkpoint()
        while not self._buffer and not self.ended:
            await self._bell.wait()
        if self._fault:
            raise self._fault()
        chunk = bytes(memoryview(self._buffer)[:max_bytes])
        del self._buffer[:max_bytes]
        self._passed_on()
        return chunk

    @property
    def ended(self) -> bool:
        """Tell whether nothing more will come."""
        return self._finished or self._end is not None

    @property
    def whole(self) -> bool:
        """Tell whether its end of file has come and everything before it was read."""
        return self._end is not None and not self._buffer

    def take(self, payload: bytes | memoryview) -> None:
        """Process ``DATA``. Raises ``Violation``."""
        if self._finished:
            return  # sent before the guest knew that nobody reads
        offset = framing.read_offset(payload)
        end = offset + len(payload) - OFFSET.size
        if not self._next <= offset <= self._received:
            raise Violation("bytes of a stream are missing, or come twice")
        if end > self._acknowledged + WINDOW or (self._end is not None and end > self._end):
            raise Violation("a stream has more bytes than it may")
        self._next = end
        if end > self._received:
            self._buffer += payload[OFFSET.size + self._received - offset :]
            self._received = end
            if self._keeping:
                self._keep()
            self._bell.ring()

    def take_end(self, length: int) -> None:
        """Process ``EOF``. Raises ``Violation``."""
        if self._finished:
            return
        if not self._next <= length == self._received:
            raise Violation("a stream does not end where its bytes do")
        self._next = length + 1
        self._end = length
        self._passed_on()
        self._bell.ring()

    def acknowledgement(self) -> bytes:
        self._acknowledged = self._position
        return framing.offset(Type.ACK, self._id, self._stream, self._acknowledged)

    def resume(self) -> list[bytes]:
        """Return the frames for a new connection."""
        if self._finished:
            return []
        frame = self.acknowledgement()
        self._next = self._acknowledged
        return [frame]

    @property
    def _position(self) -> int:
        passed = self._received if self._keeping else self._received - len(self._buffer)
        return passed + (passed == self._end)

    def _passed_on(self) -> None:
        if not self._finished and (ahead := self._position - self._acknowledged):
            self._outbox.acknowledge(self, overdue=ahead >= _STEP)

    async def complete(self) -> None:
        """Receive the rest once the writers are gone, whether or not anybody reads it."""
        self._keeping = True
        self._keep()
        while not self.ended:
            await self._bell.wait()

    def _keep(self) -> None:
        if len(self._buffer) > _MAX_LEFT:
            self.finish()
        self._passed_on()

    def finish(self, last: bytes = b"", *, fault: Callable[[], Exception] | None = None) -> None:
        """End the stream with ``last``. Readers get ``fault``, if given, unless the stream has ended already."""
        if not self.ended:
            self._fault = fault
        self._finished = True
        self._buffer += last
        self._outbox.leave(self)
        self._bell.ring()


class Outgoing:
    """A stream into the workspace."""

    def __init__(self, outbox: Outbox, id: int) -> None:
        self._outbox = outbox
        self._id = id
        self._buffer = bytearray()  # from ``_start`` to ``_end``
        self._start = 0  # offset up to which all is acknowledged and was sent on this connection
        self._acked = 0
        self._sent = 0  # on this connection, including the end
        self._most = 0  # ever
        self._end = 0
        self._closed = False
        self._fresh = True
        self._fault: Callable[[], Exception] | None = None
        self._bell = Bell()

    async def send_all(self, data: bytes) -> None:
        """Queue all of ``data``; when cancelled, some of it may be queued.

        Raises ``trio.BrokenResourceError`` when the reading side is closed, ``trio.ClosedResourceError`` after
        ``close``, ``WorkspaceLost`` when the guest is lost.
        """
        await trio.lowlevel.checkpoint()
        self._check()
        at = 0
        while at < len(data):
            if room := max(0, WINDOW - (self._end - self._acked)):
                with memoryview(data) as view:
                    self._buffer += view[at : at + room]
                self._end += min(room, len(data) - at)
                at += room
                self._outbox.add(self)
            else:
                await self._bell.wait()
                self._check()

    async def aclose(self) -> None:
        """Send the end of file; no error when the reading side is closed."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._closed = True
        self._outbox.add(self)
        self._bell.ring()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def done(self) -> bool:
        """Tell whether the other side has passed on the end of file."""
        return self._closed and self._acked > self._end

    def next(self) -> bytes:
        """Return the next frame; empty when there is none."""
        if self._fault or self._sent >= self._end + self._closed:
            return b""
        at = self._sent - self._start
        if chunk := bytes(memoryview(self._buffer)[at : at + MAX_CHUNK]):
            frame = framing.data(self._id, framing.STDIN, self._sent, chunk)
        else:
            frame = framing.offset(Type.EOF, self._id, framing.STDIN, self._sent)
        self._sent += len(chunk) or 1
        self._most = max(self._most, self._sent)
        self._trim()
        return frame

    def take(self, acked: int) -> None:
        """Process ``ACK``. Raises ``Violation``."""
        least = self._acked if self._fresh else self._acked + 1
        if not least <= acked <= self._most:
            raise Violation("an acknowledgement goes back, or beyond what was sent")
        self._fresh = False
        self._acked = acked
        self._trim()
        self._bell.ring()

    def interrupt(self) -> None:
        """Note a lost connection: the next one may repeat the last acknowledgement."""
        self._fresh = True

    def resume(self) -> None:
        """Send again from the acknowledged offset."""
        self._sent = self._acked
        self._trim()
        self._outbox.add(self)

    def finish(self, fault: Callable[[], Exception]) -> None:
        """Close the reading side; further writes raise ``fault``."""
        if not self._fault:
            self._fault = fault
            self._buffer.clear()
            self._start = self._end
            self._bell.ring()

    def _trim(self) -> None:
        # The acknowledged offset may be ahead of what was sent again; a connection must not skip bytes.
        if (size := min(self._acked, self._sent, self._end) - self._start) > 0:
            del self._buffer[:size]
            self._start += size

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("the stream is closed")
        if self._fault:
            raise self._fault()
