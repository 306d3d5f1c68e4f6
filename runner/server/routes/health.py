"""Routes that watch the server itself."""

from __future__ import annotations

from msgspec import Struct

from runner.core.errors import ServerStopping
from runner.server.route import Call, Route


class Health(Struct):
    status: str


async def _alive(call: Call) -> Health:
    return Health("ok")


async def _ready(call: Call) -> Health:
    """Answer when requests can be worked on: the store is there, and the server is not about to end."""
    if call.server.stopping.is_set():
        raise ServerStopping("the server is stopping")
    await call.server.env.store.now()
    return Health("ready")


ROUTES = (
    Route(method="GET", path="/healthz", summary="Tell that the server lives", handle=_alive, answer=Health, open=True),
    Route(
        method="GET",
        path="/readyz",
        summary="Tell that the server takes requests",
        handle=_ready,
        answer=Health,
        open=True,
    ),
)
