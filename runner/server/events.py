"""Server-sent events of a run, to its end."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

import trio

from runner.events.events import Recorded, RunEnded, as_json
from runner.ports.store import Reader, RunRow
from runner.server.route import Server

SLOW = 30.0  # seconds to take one event, after which a client is told to come back when it can keep up
_SLOW = b'event: slow\ndata: {"reason": "an event was not taken within 30 s"}\n\n'
_PAGE = 100  # events of an ended run that are held
BEAT = 10.0  # seconds between signs of life, and looks whether anybody works on the run


class EventStream:
    """The answer that streams. It ends with the run, with ``lost`` when nobody works on it, ``slow`` when the client
    does not keep up, ``bye`` when we end. It holds one event at a time, however far behind its client is.
    """

    def __init__(self, server: Server, run: str, frames: AsyncGenerator[str]) -> None:
        self._server, self._run, self._frames = server, run, frames

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        metrics = self._server.metrics
        metrics.streams += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._stream(receive, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            metrics.streams -= 1

    async def _stream(
        self,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        turn = trio.Lock()

        async def say(text: str, *, last: bool = False) -> None:
            async with turn:
                began = trio.current_time()
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                slow = trio.current_time() - began > SLOW
                if slow:
                    self._server.metrics.dropped()
                    await send({"type": "http.response.body", "body": _SLOW, "more_body": True})
                if slow or last:
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                nursery.cancel_scope.cancel()

            async def stop() -> None:
                await self._server.stopping.wait()
                await say("event: bye\ndata: {}\n\n", last=True)

            async def beat() -> None:
                while True:
                    await trio.sleep(BEAT)
                    if await self._server.running.is_lost(self._run):
                        break
                    await say(": still here\n\n")
                await say("event: lost\ndata: {}\n\n", last=True)

            for task in (leave, stop, beat):
                nursery.start_soon(task)
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await say(frame)
            nursery.cancel_scope.cancel()


async def event_frames(store: Reader, run: RunRow, after: int) -> AsyncGenerator[str]:
    """Yield the events of a run above a number, past and coming, and all for a number that none has."""
    if after and not await store.events(run.id, after=after - 1, limit=1):
        after = 0
    found = store.watch(run.id, after=after) if run.ended is None else _past_events(store, run.id, after)
    async with aclosing(found) as events:
        async for recorded in events:
            kind, document = type(recorded.event).__name__, json.dumps(as_json(recorded))
            yield f"id: {recorded.seq}\nevent: {kind}\ndata: {document}\n\n"
            if isinstance(recorded.event, RunEnded):
                return


async def _past_events(store: Reader, run: str, after: int) -> AsyncGenerator[Recorded]:
    while page := await store.events(run, after=after, limit=_PAGE):
        for recorded in page:
            yield recorded
        after = page[-1].seq
