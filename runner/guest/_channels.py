"""Channels to a guest: commands, listeners and relayed connections.

Each keeps what the guest has said of it, checks what it says next, and can tell a new connection what the last one may
have lost. No input and no output.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable

import trio

from runner.core.errors import ProviderFailed
from runner.core.model import Exit
from runner.guest import framing
from runner.guest._streams import Bell, Incoming, Outbox, Outgoing
from runner.guest.framing import STDERR, STDOUT, Mark, Phase, Stage, State, Type, Violation
from runner.ports.provider import Connection

_STAGES = {
    Stage.NONE: "the guest gives no reason",
    Stage.REQUEST: "the guest refused the request",
    Stage.FORK: "no process could be made",
    Stage.LIMITS: "its limits or its user could not be set",
    Stage.DIRECTORY: "its directory cannot be entered",
    Stage.LISTEN: "the port cannot be listened on",
}


def _nobody_reads() -> Exception:
    return trio.BrokenResourceError("the reading side is closed")


class Channel:
    """``inputs`` are its streams into the workspace, ``outputs`` those out of it, by number."""

    inputs: tuple[Outgoing, ...] = ()
    outputs: tuple[Incoming, ...] = ()

    def __init__(self, outbox: Outbox, id: int) -> None:
        self.id = id
        self.listed = False  # the guest has spoken of it on this connection
        self.changed = Bell()
        self._outbox = outbox
        self._lost: Callable[[], Exception] | None = None

    @property
    def over(self) -> bool:
        """Tell whether nothing of the channel is left in the workspace."""
        return self._lost is not None

    def interrupt(self) -> None:
        """Note that the connection was lost."""
        self.listed = False
        for stream in self.inputs:
            stream.interrupt()

    def resume(self) -> list[bytes]:
        """Return the frames for a new connection, once the guest has listed what it knows. Raises ``Violation``."""
        return [frame for stream in self.outputs for frame in stream.resume()]

    def hear_reset(self) -> None:
        raise Violation("a listener has no stream")

    def lose(self, fault: Callable[[], Exception]) -> None:
        """Note that the guest is lost."""
        self._lost = self._lost or fault
        for outgoing in self.inputs:
            outgoing.finish(fault)
        for incoming in self.outputs:
            incoming.finish()
        self.changed.ring()

    def let_go(self) -> None:
        """End all streams: the guest forgets the channel, so nothing may be sent about it any more."""
        for outgoing in self.inputs:
            outgoing.finish(_nobody_reads)
        for incoming in self.outputs:
            incoming.finish()


class RequestedChannel(Channel):
    """A command or listener, with a state. ``request`` is the frames that start it, ``name`` its name in messages."""

    def __init__(self, outbox: Outbox, id: int, request: bytes, name: str) -> None:
        super().__init__(outbox, id)
        self.name = name
        self.state: State | None = None
        self._request = request
        self._asked = False
        self._serial = 0
        self._signals: list[tuple[int, int]] = []  # serial and number of those not yet confirmed
        self._failure = ""

    @property
    def over(self) -> bool:
        return super().over or (self.state is not None and self.state.phase >= Phase.FAILED)

    @property
    def runs(self) -> bool:
        """Tell whether its main process may still run."""
        return not self.over

    @property
    def quiet(self) -> bool:
        """Tell whether the guest will send nothing more about it."""
        return self.over and all(stream.ended for stream in self.outputs)

    def ask(self) -> None:
        self._asked = self._outbox.say(self._request)

    async def started(self) -> None:
        """Wait until the guest has accepted it. Raises ``ProviderFailed``, ``WorkspaceLost``."""
        while self.state is None:
            self.check()
            await self.changed.wait()
        self.check()

    def check(self) -> None:
        """Raise the failure or loss that keeps it from ever ending."""
        if self._failure:
            raise ProviderFailed(self._failure)
        if self._lost:
            raise self._lost()

    def send_signal(self, number: int) -> None:
        self._serial += 1
        self._signals.append((self._serial, number))
        self._outbox.say(framing.signal(self.id, self._serial, number))

    def cancel(self) -> None:
        """Take back a request that no connection has carried."""
        if not self._asked and not self.over:
            self._mark_unsent()

    def farewell(self) -> list[bytes]:
        """Return the frames that make the guest forget it, once it is over."""
        return [framing.frame(Type.FORGET, self.id)] if self._asked else []

    def hear(self, state: State) -> None:
        """Process a ``STATE``. Raises ``Violation``."""
        if not self._asked or state.serial > self._serial:
            raise Violation("a state of what was not asked for")
        if self.state is not None:
            _check_progress(self.state, state, again=not self.listed)
        self.listed = True
        self.state = state
        self._request = b""
        self._signals = [entry for entry in self._signals if entry[0] > state.serial]
        if state.phase is Phase.FAILED:
            self._fail(state)
        if state.phase >= Phase.FAILED:
            for outgoing in self.inputs:
                outgoing.finish(_nobody_reads)
        self.changed.ring()

    def resume(self) -> list[bytes]:
        if not self.listed:
            return self._ask_again()
        if self.over:
            return super().resume()
        return super().resume() + [framing.signal(self.id, serial, number) for serial, number in self._signals]

    def _ask_again(self) -> list[bytes]:
        if self.state is not None:
            raise Violation("the guest has forgotten a channel that it should keep")
        if self._signals:
            self._mark_unsent()
            return []
        self._asked = True
        return [self._request]

    def _mark_unsent(self) -> None:
        self._asked = False
        self.state = State(phase=Phase.GONE, marks=Mark.UNKNOWN)
        self.let_go()
        self.changed.ring()

    def _fail(self, state: State) -> None:
        reason = f"{_STAGES.get(state.stage, 'it did not start')}: {os.strerror(state.status)}"
        self._failure = f"{self.name} cannot be started: {reason}"


def _check_progress(before: State, state: State, *, again: bool) -> None:
    """Check a new state; with ``again`` it may repeat the last one, as it does first on a new connection."""
    known = (before.phase, before.serial)
    if (
        state.phase < before.phase
        or state.serial < before.serial
        or ((state.phase, state.serial) == known and not again)
    ):
        raise Violation("a state goes back, or comes twice")
    if state.phase is not before.phase and (before.phase is Phase.FAILED or (before.phase, state.phase) == (2, 3)):
        raise Violation("a command has failed to start and has run")


class Command(RequestedChannel):
    """A running command, as the port's ``Process`` says."""

    def __init__(self, outbox: Outbox, id: int, request: bytes, name: str, word: str) -> None:
        super().__init__(outbox, id, request, name)
        self.stdin = Outgoing(outbox, id)
        self.stdout = Incoming(outbox, id, STDOUT)
        self.stderr = Incoming(outbox, id, STDERR)
        self.inputs = (self.stdin,)
        self.outputs = (self.stdout, self.stderr)
        self._word = word
        self._exit: Exit | None = None

    @property
    def runs(self) -> bool:
        return self._exit is None and not self.over

    async def wait(self) -> Exit:
        """Wait for the main process; a program that cannot be run exits as from a shell. Any number of tasks may wait.

        Raises ``ProviderFailed`` when it could not be started, ``WorkspaceLost`` when its end is unknown.
        """
        if self._exit:
            await trio.lowlevel.checkpoint()
        while not self._exit:
            self.check()
            await self.changed.wait()
        return self._exit

    def hear(self, state: State) -> None:
        ended = _exit(state) if state.phase in (Phase.EXITED, Phase.GONE) else None
        super().hear(state)
        self._exit = self._exit or ended

    def hear_reset(self) -> None:
        self.stdin.finish(_nobody_reads)

    def _mark_unsent(self) -> None:
        super()._mark_unsent()
        self._exit = Exit()

    def _fail(self, state: State) -> None:
        line = b""
        if state.stage is Stage.EXEC:
            self._exit = Exit(code=127 if state.status == errno.ENOENT else 126)
            line = f"{self._word}: {os.strerror(state.status)}\n".encode(errors="surrogateescape")
        else:
            super()._fail(state)
        self.stdout.finish()
        self.stderr.finish(line)


def _exit(state: State) -> Exit:
    if state.marks & Mark.UNKNOWN:
        return Exit()
    code, number = divmod(state.status, 256)
    if not 0 <= code < 256 or (number & 0x7F and code) or number & 0x7F == 0x7F or number == 0x80:
        raise Violation("a state has no wait status")
    return Exit(signal=number & 0x7F) if number else Exit(code=code)


class Listener(RequestedChannel):
    """A port of the workspace's loopback whose connections are relayed to the host, or accepted there if ``handed``."""

    def __init__(
        self, outbox: Outbox, id: int, request: bytes, name: str, serve: Callable[[Connection], Awaitable[None]]
    ) -> None:
        super().__init__(outbox, id, request, name)
        self.serve = serve
        self.scopes: set[trio.CancelScope] = set()  # of the connections that are served
        self._served = trio.lowlevel.ParkingLot()
        self.handed: socket.socket | None = None

    def leave(self, scope: trio.CancelScope) -> None:
        """Take a connection for one that is served no longer."""
        self.scopes.discard(scope)
        if not self.scopes:
            self._served.unpark_all()

    async def end_served(self) -> None:
        """End whoever serves a connection, and wait until nobody does: what they tell of it is told by then."""
        for scope in self.scopes:
            scope.cancel()
        with trio.CancelScope(shield=True):
            while self.scopes:
                await self._served.park()

    def take(self, handed: socket.socket) -> None:
        """Take the listening socket, which comes again on each new connection."""
        if self.handed is None and not self.over:
            self.handed = handed
        else:
            handed.close()

    @property
    def port(self) -> int:
        return self.state.pid if self.state else 0

    @property
    def runs(self) -> bool:
        return False  # there is no process that could end by itself


class Relayed(Channel):
    """A connection that was made inside the workspace."""

    def __init__(self, outbox: Outbox, id: int, listener: int) -> None:
        super().__init__(outbox, id)
        self.listener = listener
        self.listed = True
        self._in = Incoming(outbox, id, STDOUT)
        self._out = Outgoing(outbox, id)
        self.inputs = (self._out,)
        self.outputs = (self._in,)
        self.socket = None
        self.closed = False
        self._whole = False  # everything from the other end had been read when it was closed

    async def receive_some(self, max_bytes: int) -> bytes:
        """Empty at its end, or when the guest is lost. Raises ``trio.BrokenResourceError`` when it was reset."""
        return await self._in.receive_some(max_bytes)

    async def send_all(self, data: bytes) -> None:
        """Send as to a command's standard input, with the same exceptions."""
        await self._out.send_all(data)

    async def send_eof(self) -> None:
        await self._out.aclose()

    async def aclose(self) -> None:
        """Stop receiving and send the end of file; data sent before still arrives."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._whole = self._in.whole
            self._in.finish()
            self._out.close()

    def farewell(self) -> list[bytes]:
        """Return the frames that end a closed connection, once its other end has received everything."""
        if not self.closed or not self._out.done:
            return []
        if self._whole:
            return [self._in.acknowledgement(), framing.frame(Type.FORGET, self.id)]
        return [framing.frame(Type.RESET, self.id)]

    def hear_reset(self) -> None:
        self._in.finish(fault=_nobody_reads)
        self._out.finish(_nobody_reads)
