"""Keys of agents on this host, and a paid test request with each."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module

import trio

import runner.agents
from runner.core import plugins
from runner.core.errors import KeyMissing, UsageError
from runner.core.model import Budget, Usage
from runner.core.settings import Settings
from runner.gateway.api import SmokeRequest
from runner.gateway.gateway import ModelGateway, usable_key
from runner.manifest.load import defaults
from runner.ports.agent import ModelAgent
from runner.ports.gateway import Api, ModelGrant, ModelRequest, ModelSession

PATIENCE = 30.0  # seconds for one answer


@dataclass(frozen=True)
class AgentKey:
    """An agent's CLI and default model. ``variable`` holds its key, or ``problem`` says why none does."""

    agent: str
    api: Api
    model: str
    variable: str | None
    problem: str | None


@dataclass(frozen=True)
class KeyTest:
    """Answer of a provider to a tiny paid request; ``problem`` says what was wrong with it."""

    api: Api
    model: str
    seconds: float
    usage: Usage
    problem: str | None


def agent_keys(settings: Settings) -> tuple[AgentKey, ...]:
    return tuple(
        _key(name, agent, settings)
        for name in plugins.importable(runner.agents)
        if isinstance(agent := plugins.load(runner.agents, name).agent, ModelAgent)
    )


def _key(name: str, agent: ModelAgent, settings: Settings) -> AgentKey:
    key, own = settings.model_keys[agent.api.value], defaults().get(f"AgentType {name}")
    model = own.written["model"] if own is not None else ""
    try:
        usable_key(key)
        settings.model_url(agent.api.value)
    except KeyMissing as error:
        return AgentKey(agent=name, api=agent.api, model=model, variable=None, problem=error.message)
    except UsageError as error:
        return AgentKey(agent=name, api=agent.api, model=model, variable=None, problem=f"{error.message}; {error.hint}")
    return AgentKey(agent=name, api=agent.api, model=model, variable=key.variable, problem=None)


async def spend(settings: Settings, apis: set[Api]) -> list[KeyTest]:
    """Send one tiny request to each provider through the gateway. All together cost less than a cent."""
    return [await _ask(api, settings) for api in sorted(apis)]


async def _ask(api: Api, settings: Settings) -> KeyTest:
    import h11

    sent = import_module(f"runner.gateway.apis.{api.value}").api
    tiny: SmokeRequest = sent.smoke
    told: list[ModelRequest] = []
    body = json.dumps(tiny.body).encode()
    wire = h11.Connection(h11.CLIENT)
    headers = [*sent.headers, ("host", "gateway"), ("content-type", "application/json")]
    headers += [("content-length", str(len(body))), ("connection", "close")]
    request = h11.Request(method="POST", target=tiny.target, headers=headers)
    words = b"".join(wire.send(part) or b"" for part in (request, h11.Data(data=body), h11.EndOfMessage()))
    start = trio.current_time()
    async with ModelGateway(settings).open(ModelGrant(api, (tiny.model,), Budget(turns=1)), told.append) as session:
        with trio.move_on_after(PATIENCE):
            async with _connected(session) as stream:
                await stream.send_all(words)
                while await stream.receive_some():
                    pass
    problem = None if told and told[-1].status == 200 else "no answer came"
    if session.failure is not None:
        problem = session.failure.message
    return KeyTest(api=api, model=tiny.model, seconds=trio.current_time() - start, usage=session.usage, problem=problem)


@asynccontextmanager
async def _connected(session: ModelSession) -> AsyncIterator[trio.SocketStream]:
    ours, theirs = map(trio.SocketStream, trio.socket.socketpair())

    async def serve() -> None:
        async with theirs:
            await session.serve(theirs)

    async with ours, trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        yield ours
        nursery.cancel_scope.cancel()
