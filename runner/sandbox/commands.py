"""The commands that run in an open workspace without a guest: each ends with its block, all end with the workspace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from runner.ports.provider import KILL_GRACE


class Stoppable(Protocol):
    async def end(self, grace: float) -> None: ...
    def kill(self) -> None: ...


class Running:
    """``grace`` is how long a command has between TERM and KILL, in seconds."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._commands: dict[Stoppable, trio.Event] = {}

    @asynccontextmanager
    async def own(self, command: Stoppable) -> AsyncIterator[None]:
        """Have the command for the length of the block. Ending it is shielded, and raises what ``end`` raises."""
        over = self._commands[command] = trio.Event()
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                try:
                    await command.end(self._grace)
                finally:
                    del self._commands[command]
                    over.set()

    async def kill(self) -> None:
        """End the grace of commands that are being stopped, and wait until they are."""
        for command in self._commands:
            command.kill()
        with trio.move_on_after(KILL_GRACE):
            for over in tuple(self._commands.values()):
                await over.wait()
