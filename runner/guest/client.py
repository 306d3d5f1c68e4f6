"""A guest as providers use it: commands, listeners, and the stages of stopping them. ``_link`` has the connection."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import trio

from runner.core.errors import Escaped, ProviderFailed, WorkspaceLost
from runner.core.model import StopStage
from runner.core.sanitize import sanitize
from runner.guest import framing
from runner.guest._channels import Command, Listener, Relayed, RequestedChannel
from runner.guest._handed import HandedConnection, accept, most_accepted
from runner.guest._link import Link
from runner.guest.framing import MAX_RELAYED, Request, Shield
from runner.ports.provider import KILL_GRACE, Connection

_ACCEPT_AGAIN = 0.05  # seconds
_LEFT_GRACE = 1.0  # seconds for the descendants after TERM, once the main process has ended

__all__ = ["Command", "Guest", "Listener", "Relayed", "open_guest"]


@asynccontextmanager
async def open_guest(
    connect: Callable[[], Awaitable[trio.abc.Stream]],
    *,
    what: str,
    kill_sandbox: Callable[[], None],
    nonce: bytes | None = None,
    hands_over: bool = False,
) -> AsyncIterator[Guest]:
    """Serve a guest for the length of the block; at its end the guest is lost, and ends with all that it runs.

    ``connect`` is awaited for the first connection, and again after each lost one; it raises ``WorkspaceLost`` when
    there will be no other. ``what`` names the workspace in messages. ``kill_sandbox`` is called, at most once, for a
    guest that breaks the protocol or does not end its processes. A guest that another process has served before must
    get the same ``nonce``, and have run nothing. With ``hands_over`` the guest is a process of this kernel, and its
    connections are Unix sockets, over which it hands listening sockets. Raises ``WorkspaceLost`` when no guest answers.
    """
    failure: BaseException | None = None
    serving = trio.CancelScope(shield=True)  # a cancelled block still needs the guest to stop its commands

    async def serve() -> None:
        with serving:
            await guest.link.serve(connect)

    try:
        async with trio.open_nursery() as nursery:
            guest = Guest(nursery, what, kill_sandbox, nonce, hands_over=hands_over)
            nursery.start_soon(serve)
            try:
                await guest.link.greeted()
                yield guest
            finally:
                guest.link.lose(f"{what} is closed")
                serving.cancel()
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        failure = group.exceptions[0]  # the block's own, wrapped by the nursery
    if failure is not None:
        raise failure


class Guest:
    """A guest with its commands and listeners."""

    def __init__(
        self,
        nursery: trio.Nursery,
        what: str,
        kill_sandbox: Callable[[], None],
        nonce: bytes | None = None,
        *,
        hands_over: bool = False,
    ) -> None:
        self.link = Link(what, kill_sandbox, self._serve_relayed, nonce, hands_over=hands_over)
        self._nursery = nursery
        self._what = what
        self._hurried = False
        self._graces: set[trio.CancelScope] = set()
        self._served = 0

    @property
    def shield(self) -> Shield:
        """The protection of the guest from its commands."""
        return self.link.shield

    def hurry(self) -> None:
        """End the grace of everything that is being stopped, now and later."""
        self._hurried = True
        for scope in self._graces:
            scope.cancel()

    async def ping(self) -> float:
        """Return the round-trip time in seconds. Raises ``WorkspaceLost``."""
        start = trio.current_time()
        await self.link.ping()
        return trio.current_time() - start

    @asynccontextmanager
    async def exec(
        self, request: Request, *, grace: float, on_stop: Callable[[StopStage], None] | None = None
    ) -> AsyncIterator[Command]:
        """Start a command, and own its process tree for the length of the block.

        The block does not wait for the start: ``wait`` raises if it fails.

        When the block ends or is cancelled, the rest of the tree is stopped: TERM and ``grace`` seconds if the main
        process still runs (one second for its descendants once it has ended), KILL, and after ``KILL_GRACE`` the whole
        sandbox. ``on_stop`` is called as each of these stages begins. Raises ``ProviderFailed`` for a request that is
        invalid, ``WorkspaceLost``, and ``Escaped`` when even the sandbox does not end.
        """
        id = self.link.new_id()
        word = request.argv[0]
        name = f"`{sanitize(word)}` in `{sanitize(request.cwd)}` of {self._what}"
        try:
            frames = framing.execute(id, request)
        except ValueError as error:
            raise ProviderFailed(f"{name} cannot be started: {error}") from error
        command = Command(self.link.outbox, id, frames, name=name, word=word)
        self.link.ask(command)
        try:
            yield command
        finally:
            await self._end(command, grace, on_stop)

    @asynccontextmanager
    async def listen(self, port: int, serve: Callable[[Connection], Awaitable[None]]) -> AsyncIterator[Listener]:
        """Listen on the workspace's loopback for the length of the block; port 0 takes any (see ``Listener.port``).

        ``serve`` gets each connection in a task of its own, which is over before the block is; the connection is closed
        when it returns, and reset when it raises or the block ends. A broken connection or a lost guest ends ``serve``
        silently. Raises ``WorkspaceLost``, and ``ProviderFailed`` when the port is taken.
        """
        id = self.link.new_id()
        request = framing.listen(id, port, hands=self.link.hands_over)
        listener = Listener(
            outbox=self.link.outbox, id=id, request=request, name=f"port {port} in {self._what}", serve=serve
        )
        self.link.ask(listener)
        accepting = trio.CancelScope()
        try:
            await listener.started()
            if listener.handed is not None:
                self._nursery.start_soon(self._accept, listener, listener.handed, accepting)
            yield listener
        finally:
            accepting.cancel()
            if listener.handed is not None:
                with suppress(OSError):
                    listener.handed.shutdown(socket.SHUT_RDWR)  # also for a thread that waits there
                listener.handed.close()
            try:
                await self._end(listener, 0, None)
            finally:
                await listener.end_served()  # no new ones can come now

    async def _end(self, asked: RequestedChannel, grace: float, on_stop: Callable[[StopStage], None] | None) -> None:
        asked.cancel()
        if not asked.quiet:
            with trio.CancelScope(shield=True):
                await self._stop(asked, grace, on_stop or (lambda stage: None))
                with trio.move_on_after(KILL_GRACE):
                    for stream in asked.outputs:
                        await stream.complete()
        self.link.drop(asked, *asked.farewell())

    async def _stop(self, asked: RequestedChannel, grace: float, tell: Callable[[StopStage], None]) -> None:
        if asked.runs:
            tell(StopStage.TERM)
            asked.send_signal(signal.SIGTERM)
            with trio.move_on_after(0 if self._hurried else grace) as scope:
                self._graces.add(scope)
                while asked.runs:
                    await asked.changed.wait()
                with trio.move_on_after(_LEFT_GRACE):
                    await _over(asked)
            self._graces.discard(scope)
        if not asked.over:
            tell(StopStage.KILL)
            asked.send_signal(signal.SIGKILL)
            with trio.move_on_after(KILL_GRACE):
                await _over(asked)
        if not asked.over:
            tell(StopStage.SANDBOX)
            self.link.kill_sandbox()
            with trio.move_on_after(KILL_GRACE):
                await _over(asked)
        if not asked.over:
            pid = asked.state.pid if asked.state else "unknown"
            raise Escaped(f"{asked.name} (process {pid} there) still lives, and so does the sandbox around it")

    async def _accept(self, listener: Listener, handed: socket.socket, accepting: trio.CancelScope) -> None:
        places = trio.Semaphore(most_accepted())
        with accepting:
            while True:
                await places.acquire()
                try:
                    connection = await accept(handed)
                except OSError:  # no descriptor is left, or whoever dialled has gone
                    places.release()
                    await trio.sleep(_ACCEPT_AGAIN)
                    continue
                scope = trio.CancelScope()
                listener.scopes.add(scope)
                self._nursery.start_soon(self._serve_handed, listener, connection, scope, places)

    async def _serve_handed(
        self, listener: Listener, connection: HandedConnection, scope: trio.CancelScope, places: trio.Semaphore
    ) -> None:
        try:
            with scope, suppress(trio.BrokenResourceError, WorkspaceLost):
                await listener.serve(connection)
                await connection.finish()
        finally:
            connection.reset()
            listener.leave(scope)
            places.release()

    def _serve_relayed(self, listener: Listener, relayed: Relayed) -> bool:
        if self._served >= MAX_RELAYED:  # tasks of closed connections may take a while to end
            return False
        self._served += 1
        scope = trio.CancelScope()
        listener.scopes.add(scope)
        self._nursery.start_soon(self._serve, listener, relayed, scope)
        return True

    async def _serve(self, listener: Listener, relayed: Relayed, scope: trio.CancelScope) -> None:
        with scope:
            try:
                with suppress(trio.BrokenResourceError, WorkspaceLost):
                    await listener.serve(relayed)
                    relayed.close()
                    self.link.settle(relayed)
            finally:
                listener.leave(scope)
                self._served -= 1
                if not relayed.closed:
                    self.link.reset(relayed)


async def _over(asked: RequestedChannel) -> None:
    while not asked.over:
        await asked.changed.wait()
