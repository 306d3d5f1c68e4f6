"""Route of providers: what this host can make workspaces with."""

from __future__ import annotations

from runner.server.provider_health import Providers
from runner.server.route import BASE, Call, Route


async def _list(call: Call) -> Providers:
    return await call.server.health.latest()


ROUTES = (
    Route(
        method="GET",
        path=f"{BASE}/providers",
        summary="List providers with what they can enforce on this host",
        handle=_list,
        answer=Providers,
    ),
)
