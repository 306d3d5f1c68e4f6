"""A run's events as server-sent events: from a number on, past and coming, to its end."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

import trio

from runner.events.events import Recorded, RunEnded, as_json
from runner.ops.host.liveness import is_run_lost
from runner.server.route import Server

BEAT = 10.0  # seconds between signs of life, and looks whether anybody works on the run


class EventStream:
    """The answer that streams. It ends with the run, with ``lost`` when nobody works on it, ``bye`` when we end."""

    def __init__(self, server: Server, run: str, after: int) -> None:
        self._server, self._run, self._after = server, run, after

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        turn = trio.Lock()

        async def say(text: str, *, last: bool = False) -> None:
            async with turn:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                if last:
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
                    if await is_run_lost(self._server.env.store, self._server.env.settings.home, self._run):
                        break
                    await say(": still here\n\n")
                await say("event: lost\ndata: {}\n\n", last=True)

            for task in (leave, stop, beat):
                nursery.start_soon(task)
            async with aclosing(self._server.env.store.watch(self._run, after=self._after)) as events:
                async for recorded in events:
                    await say(_frame(recorded))
                    if isinstance(recorded.event, RunEnded):
                        break
            nursery.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _frame(recorded: Recorded) -> str:
    return f"id: {recorded.seq}\nevent: {type(recorded.event).__name__}\ndata: {json.dumps(as_json(recorded))}\n\n"
