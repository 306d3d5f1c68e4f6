"""Routes that watch the server itself."""

from __future__ import annotations

from msgspec import Struct

from runner.core.errors import OutOfScope, ServerStopping
from runner.server.metrics import MEDIA
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


async def _metrics(call: Call) -> str:
    if not call.token.admin:
        raise OutOfScope("metrics are of all projects", hint="use a token with the scope admin:ro")
    return await call.server.metrics.render(call.server.env, await call.server.health.latest())


ROUTES = (
    Route(
        method="GET",
        path="/metrics",
        summary="Show metrics in the text format of Prometheus",
        handle=_metrics,
        answer=str,
        media=MEDIA,
    ),
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
