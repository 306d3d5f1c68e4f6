"""Supervision of a process that is an MCP server, for servers of a run and those that the runner hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

from runner.core.errors import ImageMissing
from runner.core.sanitize import excerpt
from runner.ports.mcp import ServerRefused
from runner.ports.provider import Images, ImageStart, Process, Provider

MISSES = 3  # looks in turn that a server may leave unanswered
COUNT_SECONDS = 5.0  # between looks at what was killed for lack of memory
_DRAIN = 2.0  # seconds for what is left in its pipes


async def start_of_image(provider: Provider, image: str | None, name: str | None, command: Sequence[str]) -> ImageStart:
    """Return what ``image``, which the manifest calls ``name``, says of its program; nothing where no image is used.

    Raises ``ImageMissing``, also when neither it nor ``command`` says what to start.
    """
    if image is None or not isinstance(provider, Images):
        return ImageStart()
    start = await provider.start_of(image)
    if not command and not start.command:
        text = f"`{provider.name}` does not know what image `{excerpt(name or image)}` starts"
        raise ImageMissing(text, hint="write a `command`")
    return start


async def talk(
    process: Process,
    *,
    attach: Callable[[], Awaitable[None]],
    copy_log: Callable[[], Awaitable[None]],
    watch: Callable[[], Awaitable[str]],
    restart: trio.Event,
    on_oom: Callable[[int], None],
) -> tuple[str, bool]:
    """Let clients talk with a server until one thing ends that; return how it ended, and whether it was a crash.

    ``attach`` carries messages until the output ends, ``copy_log`` reads the other output, and ``watch`` returns when
    the server is to be ended, with the reason. Whoever wants it to be started anew sets ``restart``. ``on_oom`` is told
    of processes that were killed for lack of memory, soon and at the end. The caller ends the process. Cancelling ends
    the talk.
    """
    tasks, count = _Talk(process), _counting(process, on_oom)

    async def keep_counting() -> None:
        while True:
            await trio.sleep(COUNT_SECONDS)
            await count()

    try:
        async with trio.open_nursery() as services:
            for task in (
                partial(tasks.carry, attach),
                tasks.wait,
                partial(tasks.copy, copy_log),
                partial(tasks.look, watch),
                partial(tasks.again, restart),
                keep_counting,
            ):
                services.start_soon(task)
            await tasks.finished.wait()
            services.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):  # bounded by the provider
            await count()
    return tasks.how


class _Talk:
    """The tasks of a talk, of which the first that has a reason ends all; ``how`` is that."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._over, self._copied = trio.Event(), trio.Event()
        self.finished, self.how = trio.Event(), ("", False)

    def _finish(self, text: str, *, crashed: bool = True) -> None:
        if not self.finished.is_set():
            self.how = text, crashed
            self.finished.set()

    async def carry(self, attach: Callable[[], Awaitable[None]]) -> None:
        try:
            await attach()
            with trio.move_on_after(_DRAIN):
                await self._over.wait()
                return  # how it ended is said with its last words
            self._finish("closed its output")
        except ServerRefused as error:
            self._finish(str(error))

    async def wait(self) -> None:
        ended = await self._process.wait()
        self._over.set()
        with trio.move_on_after(_DRAIN):
            await self._copied.wait()
        self._finish(str(ended), crashed=not ended.ok)

    async def copy(self, copy_log: Callable[[], Awaitable[None]]) -> None:
        await copy_log()
        self._copied.set()

    async def look(self, watch: Callable[[], Awaitable[str]]) -> None:
        self._finish(await watch())

    async def again(self, restart: trio.Event) -> None:
        await restart.wait()
        self._finish("was asked to start anew", crashed=False)


def _counting(process: Process, on_oom: Callable[[int], None]) -> Callable[[], Awaitable[None]]:
    """Return what tells of processes that were killed since it was called last."""
    killed = 0

    async def count() -> None:
        nonlocal killed
        await process.count()
        if process.oom_kills > killed:
            more, killed = process.oom_kills - killed, process.oom_kills
            on_oom(more)

    return count
