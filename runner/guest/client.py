"""What providers use of a guest: commands, listeners, and the ladder that ends them. The connection is ``_link``'s."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import trio

from runner.core.errors import Escaped, ProviderFailed, WorkspaceLost
from runner.core.model import StopStage
from runner.core.sanitize import sanitize
from runner.guest import framing
from runner.guest._channels import Asked, Command, Listener, Relayed
from runner.guest._link import Link
from runner.guest.framing import MAX_RELAYED, Request, Shield
from runner.ports.provider import KILL_GRACE

_LEFT_GRACE = 1.0  # seconds for the rest of a tree that was sent TERM, once its main process has obeyed

__all__ = ["Command", "Guest", "Listener", "Relayed", "open_guest"]


@asynccontextmanager
async def open_guest(
    connect: Callable[[], Awaitable[trio.abc.Stream]],
    *,
    what: str,
    kill_sandbox: Callable[[], None],
    nonce: bytes | None = None,
) -> AsyncIterator[Guest]:
    """Serve a guest for the length of the block; with the block's end it is lost, and ends with all that it runs.

    ``connect`` is awaited for the first connection, and again for each that is lost; it raises ``WorkspaceLost`` when
    there is no other. ``what`` names the workspace in messages. ``kill_sandbox`` is called, at most once, for a guest
    that breaks the protocol or does not end what it should. A guest that is to be served again, by another process
    perhaps, must have been given the same ``nonce``, and have run nothing. Raises ``WorkspaceLost`` when no guest
    answers.
    """
    failure: BaseException | None = None
    serving = trio.CancelScope(shield=True)  # cancelling the block stops its commands, and for that it takes a guest

    async def serve() -> None:
        with serving:
            await guest.link.serve(connect)

    try:
        async with trio.open_nursery() as nursery:
            guest = Guest(nursery, what, kill_sandbox, nonce)
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
        failure = group.exceptions[0]  # the block's own, that the nursery has wrapped
    if failure is not None:
        raise failure


class Guest:
    """One guest, and every command that runs behind it."""

    def __init__(
        self, nursery: trio.Nursery, what: str, kill_sandbox: Callable[[], None], nonce: bytes | None = None
    ) -> None:
        self.link = Link(what, kill_sandbox, self._open_relayed, nonce)
        self._nursery = nursery
        self._what = what
        self._hurried = False
        self._graces: set[trio.CancelScope] = set()
        self._served = 0

    @property
    def shield(self) -> Shield:
        """What stands between commands and the guest."""
        return self.link.shield

    def hurry(self) -> None:
        """From now on nothing that is being stopped has any grace."""
        self._hurried = True
        for scope in self._graces:
            scope.cancel()

    async def ping(self) -> float:
        """Seconds there and back. Raises ``WorkspaceLost``."""
        start = trio.current_time()
        await self.link.ping()
        return trio.current_time() - start

    @asynccontextmanager
    async def exec(
        self, request: Request, *, grace: float, on_stop: Callable[[StopStage], None] | None = None
    ) -> AsyncIterator[Command]:
        """Have a command started, and own its process tree for the length of the block.

        The block does not wait for the start: what keeps the command from it is raised by ``wait``.

        What is left of the tree when the block ends, or is cancelled, is ended: TERM and ``grace`` seconds when the
        main process still runs (one second for the others once it has obeyed), KILL, and after ``KILL_GRACE`` the
        whole sandbox. ``on_stop`` is told of each that is needed, as it begins. Raises ``ProviderFailed`` for what
        cannot be asked for, ``WorkspaceLost``, and ``Escaped`` when even the sandbox does not end.
        """
        id = self.link.new_id()
        word = request.argv[0]
        name = f"`{sanitize(word)}` in `{sanitize(request.cwd)}` of {self._what}"
        try:
            asking = framing.execute(id, request)
        except ValueError as error:
            raise ProviderFailed(f"{name} cannot be started: {error}") from error
        command = Command(self.link.outbox, id, asking, name, word)
        self.link.ask(command)
        try:
            yield command
        finally:
            await self._end(command, grace, on_stop)

    @asynccontextmanager
    async def listen(self, port: int, serve: Callable[[Relayed], Awaitable[None]]) -> AsyncIterator[Listener]:
        """Listen on the workspace's loopback for the length of the block; port 0 takes any (see ``Listener.port``).

        ``serve`` gets each connection, in a task of the guest's; the connection is closed when that returns, and reset
        when it raises or when the block ends. A connection that breaks, or a lost guest, ends ``serve`` quietly.
        Raises ``ProviderFailed`` when the port cannot be had, ``WorkspaceLost``.
        """
        id = self.link.new_id()
        listener = Listener(self.link.outbox, id, framing.listen(id, port), f"port {port} in {self._what}", serve)
        self.link.ask(listener)
        try:
            await listener.started()
            yield listener
        finally:
            try:
                await self._end(listener, 0, None)
            finally:
                for scope in listener.scopes:  # there are no new ones now
                    scope.cancel()

    async def _end(self, asked: Asked, grace: float, on_stop: Callable[[StopStage], None] | None) -> None:
        asked.cancel()
        if not asked.quiet:
            with trio.CancelScope(shield=True):
                await self._stop(asked, grace, on_stop or (lambda stage: None))
                with trio.move_on_after(KILL_GRACE):
                    for stream in asked.outputs:
                        await stream.complete()
        self.link.drop(asked, *asked.farewell())

    async def _stop(self, asked: Asked, grace: float, tell: Callable[[StopStage], None]) -> None:
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

    def _open_relayed(self, listener: Listener, relayed: Relayed) -> bool:
        if self._served >= MAX_RELAYED:  # those whose connections are gone may take a while to notice
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
                listener.scopes.discard(scope)
                self._served -= 1
                if not relayed.closed:
                    self.link.reset(relayed)


async def _over(asked: Asked) -> None:
    while not asked.over:
        await asked.changed.wait()
