"""Routes of tools: each one checks that its workspace allows the tool before anything is done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated

from msgspec import Meta, Struct

from runner.core.errors import RunnerError
from runner.ops.tools import TOOLS
from runner.ops.workspaces.tools import outputs_of, tool
from runner.ports.store import WorkspaceRow
from runner.server.route import Call, api
from runner.server.routes.workspaces import visible
from runner.server.stream import PieceStream


async def call_tool(call: Call, row: WorkspaceRow, name: str) -> Struct:
    """Call a tool in a workspace, and count it."""
    try:
        result: Struct = await call.server.kept.call(row, name, call.body, by=call.token.name)
    except RunnerError as error:
        call.server.metrics.called(name, error.code)
        raise
    call.server.metrics.called(name, "ok")
    return result


def _handler(name: str) -> Callable[[Call], Awaitable[Struct]]:
    async def handle(call: Call) -> Struct:
        return await call_tool(call, await visible(call, change=True), name)

    return handle


class Piece(Struct, kw_only=True):
    """A part of an output, in bytes; default: all of it."""

    offset: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0
    limit: Annotated[int, Meta(ge=0)] = 1 << 30


async def _output(call: Call) -> PieceStream:
    row, query = await visible(call), call.query
    path = outputs_of(call.server.env, row.id).find(call.path["handle"])

    def pieces() -> Iterator[bytes]:
        left = query.limit
        with path.open("rb") as file:
            file.seek(query.offset)
            while chunk := file.read(min(left, 1 << 16)):
                left -= len(chunk)
                yield chunk

    return PieceStream(pieces(), name=path.name)


_OUTPUT = api(
    "GET",
    "/workspaces/{id}/outputs/{handle}",
    "Read the whole of an output that was too long for its answer",
    _output,
    answer=str,
    query=Piece,
    media="application/octet-stream",
)
_TOOLS = tuple(
    api(
        "POST",
        f"/workspaces/{{id}}/tools/{name}",
        (tool(name).__doc__ or "").strip().removesuffix("."),
        _handler(name),
        body=tool(name).Arguments,
        answer=tool(name).Result,
    )
    for name in TOOLS
)
ROUTES = (*_TOOLS, _OUTPUT)
