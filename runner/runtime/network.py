"""The way from a step's commands to the hosts that its plan allows; each connection becomes an event."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio
from msgspec.structs import asdict

from runner.core.hosts import NetworkSpec
from runner.events import events as ev
from runner.ports.network import EgressConnection
from runner.ports.provider import Workspace
from runner.runtime.context import RunContext
from runner.runtime.exec import emit_all

_NO_PROXY = "localhost,127.0.0.1,::1"


@asynccontextmanager
async def open_network(
    run: RunContext, workspace: Workspace, step: str, allowed: NetworkSpec
) -> AsyncIterator[Mapping[str, str]]:
    """Let commands reach the allowed hosts for the length of the block; yield the variables that lead there."""
    if not allowed:
        yield {}
        return
    send, receive = trio.open_memory_channel[ev.Event](math.inf)

    def tell(one: EgressConnection) -> None:
        send.send_nowait(ev.ConnectionEnded(step=step, **asdict(one)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(emit_all, receive, run.emit)
        with send:
            async with run.deps.open_egress(allowed, tell) as session, workspace.listen(session.serve) as port:
                yield proxy_variables(f"http://127.0.0.1:{port}")


def proxy_variables(url: str) -> dict[str, str]:
    """Return the variables by which programs find a proxy, in both spellings, since some know only one.

    ``NODE_USE_ENV_PROXY`` makes Node read them, from version 22.21 on.
    """
    named = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "ALL_PROXY": url, "NO_PROXY": _NO_PROXY}
    return {**named, **{name.lower(): value for name, value in named.items()}, "NODE_USE_ENV_PROXY": "1"}
