"""A client as the CLIs are, a provider that is a script of this test, and a session between the two."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import h11
import trio
from trio.testing import memory_stream_pair

from runner.core.model import Budget
from runner.core.nurseries import open_services
from runner.gateway.session import GatewaySession
from runner.network.http import Headers
from runner.network.upstream import Unreachable, UpstreamFailed, UpstreamResponse
from runner.ports.gateway import Api, ModelGrant, ModelRequest

KEY = "sk-real-0123456789abcdef"
MODELS = {Api.ANTHROPIC: "claude-sonnet-5-5", Api.OPENAI: "gpt-6.1-sol", Api.GEMINI: "gemini-2.5-pro"}
CALLS = {  # what a CLI asks for an answer by
    "messages": (Api.ANTHROPIC, "/v1/messages?beta=true"),
    "responses": (Api.OPENAI, "/v1/responses"),
    "chat": (Api.OPENAI, "/v1/chat/completions"),
    "gemini": (Api.GEMINI, "/v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse"),
}


@dataclass
class Heard:
    """An answer; ``whole`` is false when the connection ended before it did."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One connection. Not for two tasks at once."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._protocol = h11.Connection(h11.CLIENT)

    async def send(self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        if self._protocol.our_state is h11.DONE:
            self._protocol.start_next_cycle()
        named = [*{"host": "model", "content-length": str(len(body)), **headers}.items()]
        await self._put(h11.Request(method=method, target=target, headers=named))
        await self._put(h11.Data(data=body))
        await self._put(h11.EndOfMessage())

    async def _put(self, event: h11.Event) -> None:
        await self.stream.send_all(self._protocol.send(event))

    async def receive(self, until: bytes | None = None) -> Heard:
        """The answer, or what there is of it once ``until`` is in it."""
        heard = Heard()
        while until is None or until not in heard.body:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                try:
                    self._protocol.receive_data(await self.stream.receive_some(1 << 16))
                except trio.BrokenResourceError:
                    return heard
            elif isinstance(event, h11.Response):
                heard.status = event.status_code
                heard.headers = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                heard.body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                heard.whole = True
                return heard
            elif isinstance(event, h11.ConnectionClosed):
                return heard
        return heard

    async def ask(self, method: str, target: str, body: object = None, **headers: str) -> Heard:
        """Send a request, ``body`` as JSON unless it is bytes, and hear the answer."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        await self.send(method, target, raw, {name.replace("_", "-"): text for name, text in headers.items()})
        try:
            return await self.receive()
        except h11.RemoteProtocolError:  # cut off
            return Heard()

    async def post(self, call: str, **fields: object) -> Heard:
        """Ask for an answer with the least body of such a call, and these fields."""
        return await self.ask("POST", CALLS[call][1], request(call, **fields))


@dataclass
class Said:
    """What a provider answers, with ``pace`` after each piece and ``stalls`` after the last; it may then break off."""

    pieces: Sequence[bytes] = ()
    status: int = 200
    kind: bytes = b"application/json"
    headers: Headers = ()
    pace: float = 0.0
    stalls: float = 0.0
    breaks: bool = False
    unreachable: bool = False


@dataclass
class Asked:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    broken_off: bool = False


class Provider:
    """Answers each request with the next of ``said``, the last one again and again."""

    def __init__(self, *said: Said) -> None:
        self._said = list(said)
        self.asked: list[Asked] = []

    @asynccontextmanager
    async def send(self, method: str, target: str, headers: Headers, body: bytes) -> AsyncIterator[UpstreamResponse]:
        await trio.lowlevel.checkpoint()
        asked = Asked(method, target, {name.decode(): value.decode() for name, value in headers}, body)
        self.asked.append(asked)
        said = self._said.pop(0) if len(self._said) > 1 else self._said[0]
        if said.unreachable:
            raise Unreachable("nobody there", "api.example")
        if said.breaks and not said.pieces:
            await trio.sleep(said.stalls)
            raise UpstreamFailed("nobody there")
        async with aclosing(_pieces(said, asked)) as pieces:
            yield UpstreamResponse(said.status, [(b"content-type", said.kind), *said.headers], pieces)


class Connecting:
    """A provider that never is reached, tried at two addresses at once."""

    warnings: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.begun = trio.Event()

    @asynccontextmanager
    async def send(self, method: str, target: str, headers: Headers, body: bytes) -> AsyncIterator[UpstreamResponse]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(trio.sleep_forever)
            self.begun.set()
        yield UpstreamResponse(200, [], _pieces(Said(), Asked(method, target, {}, body)))


async def _pieces(said: Said, asked: Asked) -> AsyncGenerator[bytes]:
    asked.broken_off = True
    for piece in said.pieces:
        yield piece
        await trio.sleep(said.pace)
    await trio.sleep(said.stalls)
    if said.breaks:
        raise UpstreamFailed("it hung up")
    asked.broken_off = False


@dataclass
class Line:
    """A session, a way to connect to it, and what it told."""

    session: GatewaySession
    connect: Callable[[], Client]
    told: list[ModelRequest]


@asynccontextmanager
async def open_line(
    call: str | Api,
    upstream: Any,
    *,
    models: Sequence[str] = (),
    budget: Budget | None = None,
    key: str = KEY,
    seconds: float = math.inf,
) -> AsyncIterator[Line]:
    """A line for a call, or for any of an API. ``seconds`` are what the agent has from now on."""
    api = CALLS[call][0] if call in CALLS else Api(call)
    told: list[ModelRequest] = []
    grant = ModelGrant(api, tuple(models) or (MODELS[api],), budget or Budget())
    module = import_module(f"runner.gateway.apis.{api.value}").api
    deadline = trio.current_time() + seconds
    session = GatewaySession(
        grant=grant, api=module, upstream=upstream, key=key, on_request=told.append, deadline=deadline
    )
    async with open_services() as services:

        async def serve(stream: Any) -> None:
            try:
                await session.serve(stream)
            except trio.BrokenResourceError:
                pass
            finally:
                await stream.aclose()

        def connect() -> Client:
            near, far = memory_stream_pair()
            services.start_soon(serve, far)
            return Client(near)

        yield Line(session, connect, told)
    session.close()


def request(call: str, **fields: object) -> dict[str, object]:
    """The least body of a request for an answer."""
    api, _ = CALLS[call]
    bodies: dict[Api, dict[str, object]] = {
        Api.ANTHROPIC: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 10},
        Api.OPENAI: {"messages": [{"role": "user", "content": "hello"}]} if call == "chat" else {"input": []},
        Api.GEMINI: {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]},
    }
    model = {} if api is Api.GEMINI else {"model": MODELS[api], "stream": True}
    return {**model, **bodies[api], **fields}


def used(call: str, input: int, output: int) -> bytes:
    """The last events of a stream, which say what was used and that it is all."""
    said: dict[str, dict[str, object]] = {
        "messages": {"type": "message_delta", "usage": {"input_tokens": input, "output_tokens": output}},
        "responses": {
            "type": "response.completed",
            "response": {"id": "r", "usage": {"input_tokens": input, "output_tokens": output}},
        },
        "chat": {"choices": [], "usage": {"prompt_tokens": input, "completion_tokens": output}},
        "gemini": {
            "candidates": [{"finishReason": "STOP"}],
            "usageMetadata": {"promptTokenCount": input, "candidatesTokenCount": output},
        },
    }
    end: dict[str, object] = {"messages": {"type": "message_stop"}, "chat": {"choices": [{"finish_reason": "stop"}]}}
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in (said[call], end.get(call)) if event)


def stream(call: str, input: int = 10, output: int = 2, **options: Any) -> Said:
    """An answer by server-sent events that says what was used."""
    return Said([b"data: {}\n\n", used(call, input, output)], kind=b"text/event-stream", **options)
