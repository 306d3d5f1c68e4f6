"""The fake model: a provider whose answers are a script. It needs no key, and reaches nothing beyond this host.

Each request that offers tools takes the next turn of the script, whatever it says; one without tools is a helper's,
such as for a session's title, and gets a line of text. At the end of the script the answer is an error.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs

import trio

from runner.core.model import ModelRefusal
from runner.core.nurseries import open_services
from runner.fake_model.api import FakeApi, ToolMissing, answer_of
from runner.fake_model.script import Turn
from runner.gateway.api import Api as ApiModule
from runner.gateway.api import Call, Kind, read_body
from runner.gateway.gateway import check_prices, open_session
from runner.network.http import LARGE_PLACES, Headers, Request, Response, serve_http
from runner.network.upstream import UpstreamFailed, UpstreamResponse
from runner.ports.gateway import Api, ModelGrant, ModelRequest, ModelSession

_JSON = b"application/json"
_HELPER_TEXT = "rehearsal"  # what a request without tools is told


class FakeModel:
    """Replaces one API's provider for one session."""

    def __init__(self, api: Api, turns: Sequence[Turn]) -> None:
        self._api: ApiModule = import_module(f"runner.gateway.apis.{api.value}").api
        self._name = api
        self._turns = list(turns)
        self._count = 0  # of requests
        self._taken = 0  # of turns
        self._unplayed: list[str] = []

    @property
    def warnings(self) -> tuple[str, ...]:
        left = len(self._turns) - self._taken
        unasked = (
            [f"{left} of the rehearsal's {len(self._turns)} turns {'was' if left == 1 else 'were'} not asked for"]
            if left
            else []
        )
        return (*self._unplayed, *unasked)

    @asynccontextmanager
    async def send(self, method: str, target: str, headers: Headers, body: bytes) -> AsyncIterator[UpstreamResponse]:
        await trio.lowlevel.checkpoint()
        path, _, query = target.partition("?")
        call = self._api.route(method, path)
        if call is None:
            yield self._refuse(404, f"`{path}` is not a call")
        elif call.kind is Kind.LIST:
            yield _json_response({"object": "list", "data": [], "models": []})
        elif call.kind is Kind.COUNT:
            yield _json_response({"input_tokens": len(body) // 4, "totalTokens": len(body) // 4})
        else:
            asked_body = read_body(body)
            async with self._answer(call, asked_body, len(body), alt=parse_qs(query).get("alt")) as answer:
                yield answer

    @asynccontextmanager
    async def _answer(
        self, call: Call, asked_body: Mapping[str, Any], sent_bytes: int, *, alt: list[str] | None
    ) -> AsyncIterator[UpstreamResponse]:
        api = self._fake_api(call)
        tools = api.tools(asked_body)
        model = call.model or str(asked_body.get("model"))
        self._count += 1
        turn = self._next() if tools else Turn(say=_HELPER_TEXT)
        if turn is None:
            yield self._refuse(400, "the rehearsal's script has no more turns")
            return
        await trio.sleep(turn.stall or 0)
        if turn.fail is not None:
            yield self._refuse(turn.fail.status, turn.fail.message, retry_after=turn.fail.retry_after)
            return
        try:
            answer = answer_of(turn, self._count, model, tools, sent_bytes)
        except ToolMissing as error:
            self._unplayed.append(f"turn {self._taken} of the rehearsal was not played: {error}")
            yield self._refuse(400, str(error))
            return
        streams = alt == ["sse"] if self._name is Api.GEMINI else bool(asked_body.get("stream"))
        kind = b"text/event-stream" if streams else _JSON
        pieces = api.stream(answer) if streams else [json.dumps(api.body(answer)).encode()]
        async with aclosing(_play(turn, pieces)) as body:
            yield UpstreamResponse(200, [(b"content-type", kind)], body)

    def _next(self) -> Turn | None:
        if self._taken == len(self._turns):
            return None
        self._taken += 1
        return self._turns[self._taken - 1]

    def _fake_api(self, call: Call) -> FakeApi:
        by_name = {"responses": "responses", "chat/completions": "chat"}
        api: FakeApi = import_module(f"runner.fake_model.apis.{by_name.get(call.name, self._name.value)}").api
        return api

    def _refuse(self, status: int, message: str, *, retry_after: float | None = None) -> UpstreamResponse:
        text = self._api.error(status, ModelRefusal.REQUEST, message)
        waits = [(b"retry-after", b"%d" % retry_after)] if retry_after else []
        return UpstreamResponse(status, [(b"content-type", _JSON), *waits], _pieces([text]))


class RehearsalGateway:
    """The gateway with the fake model behind it; ``rehearsal`` is the file of the turns, as it was named."""

    def __init__(self, name: str, turns: Sequence[Turn]) -> None:
        self.rehearsal: str | None = name
        self._turns = turns

    def check(self, grant: ModelGrant) -> None:
        """Check the prices; no key is needed."""
        check_prices(grant)

    @asynccontextmanager
    async def open(self, grant: ModelGrant, on_request: Callable[[ModelRequest], None]) -> AsyncIterator[ModelSession]:
        self.check(grant)
        async with open_session(grant, FakeModel(grant.api, self._turns), "", on_request) as session:
            yield session


@asynccontextmanager
async def serve_fake_model(turns: Sequence[Turn]) -> AsyncIterator[int]:
    """Serve a fake model of every API on a port of this host's loopback for the length of the block; yield the port.

    Each API's requests take the turns for themselves.
    """
    doubles = {api: FakeModel(api, turns) for api in Api}
    large = trio.Semaphore(LARGE_PLACES)

    async def answer(request: Request, reply: Response) -> None:
        path = request.target.decode()
        api = _api_of(request.path)
        target = path.removeprefix("/v1") if api is Api.OPENAI else path
        try:
            async with doubles[api].send(request.method, target, request.headers, request.body) as answered:
                await reply.start(answered.status, answered.headers)
                async for piece in answered.body:
                    await reply.send(piece)
        except UpstreamFailed:
            reply.cut()

    async def serve(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await serve_http(stream, answer, large)

    async with open_services() as services:
        listeners = await services.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield listeners[0].socket.getsockname()[1]


def _api_of(path: str) -> Api:
    if path.startswith("/v1/messages"):
        return Api.ANTHROPIC
    return Api.GEMINI if path.startswith(("/v1beta/", "/v1/models/")) else Api.OPENAI


async def _play(turn: Turn, pieces: Sequence[bytes]) -> AsyncGenerator[bytes]:
    """Yield the pieces at the turn's pace, and only a part of them when it is cut off."""
    last = max(1, len(pieces) // 2) if turn.cut_off else len(pieces)
    for piece in pieces[:last]:
        yield piece if last > 1 or not turn.cut_off else piece[: len(piece) // 2]
        if turn.pace is not None:
            await trio.sleep(1 / turn.pace)
    if turn.cut_off:
        raise UpstreamFailed("the rehearsal cuts the answer off here")


def _json_response(message: Mapping[str, Any]) -> UpstreamResponse:
    return UpstreamResponse(200, [(b"content-type", _JSON)], _pieces([json.dumps(message).encode()]))


async def _pieces(pieces: Sequence[bytes]) -> AsyncGenerator[bytes]:
    for piece in pieces:
        yield piece
