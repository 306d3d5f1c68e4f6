"""Running commands of a workspace without a guest: each ends with its block, all end with the workspace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from runner.ports.provider import KILL_GRACE


class Stoppable(Protocol):
    async def end(self, grace: float) -> None: ...
    def kill(self) -> None: ...


class RunningCommands:
    """``grace`` is the time between TERM and KILL, in seconds."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._commands: dict[Stoppable, trio.Event] = {}

    @asynccontextmanager
    async def track(self, command: Stoppable) -> AsyncIterator[None]:
        """End the command with the block. Ending is shielded, and raises what ``end`` raises."""
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
        """End the grace of commands that are being stopped, and wait for them."""
        for command in self._commands:
            command.kill()
        with trio.move_on_after(KILL_GRACE):
            for over in tuple(self._commands.values()):
                await over.wait()
