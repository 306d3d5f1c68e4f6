"""Supervision of a process that is an MCP server, for servers of a run and those that the runner hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from runner.ports.mcp import ServerRefused
from runner.ports.provider import Process

MISSES = 3  # looks in turn that a server may leave unanswered
_DRAIN = 2.0  # seconds for what is left in its pipes


async def talk(
    process: Process,
    *,
    attach: Callable[[], Awaitable[None]],
    copy_log: Callable[[], Awaitable[None]],
    watch: Callable[[], Awaitable[str]],
    restart: trio.Event,
) -> tuple[str, bool]:
    """Let clients talk with a server until one thing ends that; return how it ended, and whether it was a crash.

    ``attach`` carries messages until the output ends, ``copy_log`` reads the other output, and ``watch`` returns when
    the server is to be ended, with the reason. Whoever wants it to be started anew sets ``restart``. The caller ends
    the process. Cancelling ends the talk.
    """
    how: tuple[str, bool] | None = None
    over, copied = trio.Event(), trio.Event()

    def finish(text: str, *, crashed: bool = True) -> None:
        nonlocal how
        how = how or (text, crashed)
        services.cancel_scope.cancel()

    async def carry() -> None:
        try:
            await attach()
            with trio.move_on_after(_DRAIN):
                await over.wait()
                return  # how it ended is said with its last words
            finish("closed its output")
        except ServerRefused as error:
            finish(str(error))

    async def wait() -> None:
        ended = await process.wait()
        over.set()
        with trio.move_on_after(_DRAIN):
            await copied.wait()
        finish(str(ended), crashed=not ended.ok)

    async def copy() -> None:
        await copy_log()
        copied.set()

    async def look() -> None:
        finish(await watch())

    async def again() -> None:
        await restart.wait()
        finish("was asked to start anew", crashed=False)

    async with trio.open_nursery() as services:
        for task in (carry, wait, copy, look, again):
            services.start_soon(task)
    assert how is not None  # every way out says it
    return how
