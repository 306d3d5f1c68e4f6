"""Routes of tools: each one checks that its workspace allows the tool before anything is done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import Struct

from runner.ops.tools import TOOLS
from runner.ops.workspaces.tools import tool
from runner.server.route import BASE, Call, Route
from runner.server.routes.workspaces import visible


def _handler(name: str) -> Callable[[Call], Awaitable[Struct]]:
    async def handle(call: Call) -> Struct:
        row = await visible(call, change=True)
        result: Struct = await call.server.kept.call(row, name, call.body, by=call.token.name)
        return result

    return handle


ROUTES = tuple(
    Route(
        method="POST",
        path=f"{BASE}/workspaces/{{id}}/tools/{name}",
        summary=(tool(name).__doc__ or "").strip().removesuffix("."),
        handle=_handler(name),
        body=tool(name).Arguments,
        answer=tool(name).Result,
    )
    for name in TOOLS
)
