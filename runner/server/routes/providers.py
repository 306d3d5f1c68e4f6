"""Route of providers: what this host can make workspaces with."""

from __future__ import annotations

from runner.server.provider_health import Providers
from runner.server.route import Call, api


async def _list(call: Call) -> Providers:
    return await call.server.health.latest()


ROUTES = (api("GET", "/providers", "List providers with what they can enforce on this host", _list, answer=Providers),)
