"""One grant in use: each request is judged, let through with the key, metered while its answer passes, and told.

Nothing of an answer is kept here beyond the piece that passes and, in ``Meter``, one event; so a slow client slows its
own answer down and costs no memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlencode

import trio

from runner.egress.apis._api import MAX_MODEL, Api, BadBody, Call, Counts, Kind, admits, inner, read_body
from runner.egress.http import LARGE_PLACES, Headers, Reply, Request, serve_http
from runner.egress.meter import Meter
from runner.egress.prices import cost_usd
from runner.egress.upstream import Answer, Upstream, UpstreamFailed
from runner.errors import printable
from runner.model import Outcome, Reason, Usage, failed
from runner.ports.gateway import Exchange, Grant, Refusal
from runner.ports.provider import Connection

_JSON = b"application/json"
MOST_FREE = 1000  # requests without tokens that are told of: an agent could make millions
_MAX_ERROR = 64 << 10  # bytes of an error's body that are read, and searched for the key
_ASKED = frozenset({b"accept", b"content-type", b"user-agent"})
_QUERY = frozenset({"alt", "beta", "limit", "after", "after_id", "before_id", "pageSize", "pageToken"})
_ANSWERED = frozenset({b"content-type", b"retry-after", b"retry-after-ms", b"x-should-retry"})
_BEFORE, _SHOULD = b"retry-after", b"x-should-retry"
_TELLING = (b"anthropic-ratelimit-", b"x-ratelimit-", b"request-id", b"x-request-id")
_FINAL = 403  # and 400 end every CLI at once; after 401, 429 and 5xx some try again for minutes
_STATUS = {
    Refusal.PATH: 404,
    Refusal.REQUEST: 400,
    Refusal.MODEL: _FINAL,
    Refusal.BUDGET: _FINAL,
    Refusal.GATEWAY: _FINAL,
}
PAUSES = (1.0, 2.0)  # seconds before a request for an answer is made again that has failed in a way that may pass
PATIENCE = 5.0  # seconds that a provider may ask to wait instead; if it asks for more, there is no use in waiting
MOST_BROKEN = 3  # answers in a row that break off; the next request is not made
_PASSING = frozenset({408, 425, 429})  # and all from 500 on
_REASONS = {Refusal.BUDGET: Reason.BUDGET, Refusal.MODEL: Reason.MODEL}
_WORDS = {
    Reason.AUTH: "refuses the key",
    Reason.QUOTA: "has no more quota for it",
    Reason.MODEL: "does not know the model",
    Reason.GATEWAY: "cannot answer",
}


class Refused(Exception):
    """Why a request is answered here. Never leaves this module."""

    def __init__(
        self, refusal: Refusal, message: str, *, status: int | None = None, reason: Reason | None = None
    ) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.status = status or _STATUS[refusal]
        self.reason = reason or _REASONS.get(refusal, Reason.GATEWAY)


@dataclass
class _Note:
    """What becomes of one request."""

    call: Call | None = None
    model: str = ""
    sent_bytes: int = 0
    asked: bool = False  # it went out, and no answer has come yet
    meter: Meter | None = None
    refusal: Refusal | None = None
    fault: tuple[Reason, str] | None = None

    @property
    def answers(self) -> bool:
        return self.call is not None and self.call.kind is Kind.ANSWER


@dataclass
class _Purse:
    """What the budget has left, and how many requests are being answered from it."""

    grant: Grant
    usage: Usage = field(default_factory=Usage)
    turns: int = 0
    under_way: int = 0
    largest: Usage | None = None  # of one request, in tokens
    dearest: float = 0.0
    changed: trio.Event = field(default_factory=trio.Event)

    def used_up(self) -> tuple[Reason, str] | None:
        budget, usage = self.grant.budget, self.usage
        if budget.tokens is not None and usage.tokens >= budget.tokens:
            return Reason.BUDGET, f"{usage.tokens} of {budget.tokens} tokens are used"
        if budget.cost_usd is not None and (usage.cost_usd or 0.0) >= budget.cost_usd:
            return Reason.BUDGET, f"${usage.cost_usd:.4f} of ${budget.cost_usd:.4f} are used"
        if budget.turns is not None and self.turns >= budget.turns:
            return Reason.TURNS, f"{self.turns} of {budget.turns} turns are used"
        return None

    def has_room(self) -> bool:
        """Whether one more fits beside those under way, if each becomes as large as the largest so far."""
        budget, others = self.grant.budget, self.under_way
        if budget.turns is not None and self.turns + others >= budget.turns:
            return False
        if others == 0 or (budget.tokens is None and budget.cost_usd is None):
            return True
        if self.largest is None:  # nobody knows yet how large they are
            return False
        return not (
            (budget.tokens is not None and self.usage.tokens + others * self.largest.tokens >= budget.tokens)
            or (budget.cost_usd is not None and (self.usage.cost_usd or 0) + others * self.dearest >= budget.cost_usd)
        )

    async def admit(self) -> None:
        """Take part, when there is room. Raises ``Refused``."""
        while not (spent := self.used_up()) and not self.has_room():
            await self.changed.wait()
        if spent:
            raise Refused(Refusal.BUDGET, f"the budget of this run is used up: {spent[1]}", reason=spent[0])
        self.under_way += 1

    def settle(self, usage: Usage, *, turn: bool) -> None:
        self.under_way -= 1
        self.turns += turn
        self.usage += usage
        if usage.tokens and (self.largest is None or usage.tokens > self.largest.tokens):
            self.largest = usage
        self.dearest = max(self.dearest, usage.cost_usd or 0.0)
        self.changed.set()
        self.changed = trio.Event()


class GrantedSession:
    """See the port. ``key`` is empty for a double."""

    def __init__(
        self, grant: Grant, api: Api, upstream: Upstream, key: str, on_exchange: Callable[[Exchange], None]
    ) -> None:
        self._grant = grant
        self._api = api
        self._upstream = upstream
        self._key = key
        self._on_exchange = on_exchange
        self._purse = _Purse(grant)
        self._by_model: dict[str, Usage] = {}
        self._large = trio.Semaphore(LARGE_PLACES)
        self._scopes: set[trio.CancelScope] = set()
        self._refused: dict[Refusal, tuple[Reason, str]] = {}
        self._broken = 0
        self._fault: tuple[Reason, str] | None = None
        self._closed = False
        self._free = 0

    async def serve(self, connection: Connection) -> None:
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            if self._closed:
                scope.cancel()
            try:
                await serve_http(connection, self._exchange, self._large)
            finally:
                self._scopes.discard(scope)

    def close(self) -> None:
        """Break off what is still under way."""
        self._closed = True
        for scope in self._scopes:
            scope.cancel()

    @property
    def usage(self) -> Usage:
        return self._purse.usage

    @property
    def by_model(self) -> Mapping[str, Usage]:
        return dict(self._by_model)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._upstream.warnings

    @property
    def verdict(self) -> Outcome | None:
        if spent := self._refused.get(Refusal.BUDGET):
            return failed(*spent)
        if self._fault:
            return failed(*self._fault)
        if (refused := self._refused.get(Refusal.MODEL)) and not self._purse.turns:
            return failed(*refused)
        return None

    # --- one request ---

    async def _exchange(self, request: Request, reply: Reply) -> None:
        note = _Note(sent_bytes=len(request.body))
        admitted = False
        try:
            body = self._judge(request, note)
            if note.answers:
                await self._purse.admit()
                admitted = True
            await self._forward(request, body, reply, note)
        except Refused as refused:
            note.refusal = refused.refusal
            self._refused.setdefault(refused.refusal, (refused.reason, str(refused)))
            text = self._api.error(refused.status, refused.refusal, str(refused))
            await reply.send_all(refused.status, _JSON, text)
        finally:
            self._settle(request, reply, note, admitted=admitted)

    def _judge(self, request: Request, note: _Note) -> bytes:
        """The body to forward. Raises ``Refused``."""
        if request.header(b"upgrade"):
            raise Refused(Refusal.PATH, "there are no websockets here", status=426)
        if request.header(b"origin"):  # a page in a browser of this host, where a workspace has the host's loopback
            raise Refused(Refusal.PATH, "web pages are not answered", status=403)
        note.call = call = self._api.route(request.method, request.path)
        if call is None:
            raise Refused(Refusal.PATH, f"`{printable(request.method)} {printable(request.path)}` is not let through")
        if call.kind is Kind.LIST:
            return b""
        try:
            body = read_body(request.body)
        except BadBody as error:
            raise Refused(Refusal.REQUEST, str(error)) from error
        model = call.model or body.get("model")
        if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL or not model.isprintable():
            raise Refused(Refusal.REQUEST, "no model is named")
        note.model = model
        if not any(admits(granted, model) for granted in self._grant.models):
            granted = ", ".join(self._grant.models)
            raise Refused(Refusal.MODEL, f"the model `{model}` is not granted to this run, only: {granted}")
        if self._grant.budget.cost_usd is not None and self._cost(model, Counts()) is None:
            raise Refused(Refusal.MODEL, f"the model `{model}` has no known price, and the budget is in dollars")
        if note.answers and self._broken >= MOST_BROKEN:
            raise Refused(Refusal.GATEWAY, f"{self._broken} answers in a row have broken off")
        if note.answers and (found := self._api.reach(body)):
            raise Refused(Refusal.REQUEST, f"{printable(found)} is not granted: it leaves the conversation")
        return request.body

    async def _forward(self, request: Request, body: bytes, reply: Reply, note: _Note) -> None:
        assert note.call is not None
        headers = [*_passed(request.headers, self._api.forwarded), (b"accept-encoding", b"identity")]
        if self._key:
            headers.append(self._api.auth(self._key))
        query = urlencode([pair for pair in parse_qsl(request.query.decode()) if pair[0] in _QUERY])
        target = f"{note.call.path}?{query}" if query else note.call.path
        for pause in (*(PAUSES if note.answers else ()), None):
            note.asked, note.fault = True, None
            try:
                async with self._upstream.send(request.method, target, headers, body) as answer:
                    note.asked = False
                    if pause is None or (pause := _wait(answer, pause)) is None:
                        await self._pass(answer, reply, note)
                        self._broken = 0
                        return
                    status = answer.status
            except UpstreamFailed as error:
                note.asked = False
                what = "broke off" if reply.status else "could not be reached"
                note.fault = Reason.GATEWAY, f"the provider {what}: {printable(str(error))}"
                if reply.status:
                    note.refusal = Refusal.GATEWAY
                    self._broken += 1
                    reply.cut()
                    return
                if pause is None:
                    raise Refused(Refusal.GATEWAY, note.fault[1]) from error
                status = 0
            self._tell(request, note, status=status)
            await trio.sleep(pause)

    async def _pass(self, answer: Answer, reply: Reply, note: _Note) -> None:
        headers = [(name, value) for name, value in answer.headers if name in _ANSWERED or name.startswith(_TELLING)]
        coded = any(name == b"content-encoding" and value.lower() != b"identity" for name, value in answer.headers)
        if answer.status >= 300:  # a redirection, too: nobody follows it with a key
            await self._pass_error(answer, headers, reply, note, legible=not coded)
            return
        kinds = [value for name, value in headers if name == b"content-type"]
        note.meter = Meter(self._api, stream=any(kind.startswith(b"text/event-stream") for kind in kinds))
        if coded:  # nothing in it could be counted
            note.fault = Reason.GATEWAY, "the provider answers in an encoding that it was not asked for"
            raise Refused(Refusal.GATEWAY, note.fault[1])
        await reply.start(answer.status, headers)
        async for chunk in answer.body:
            note.meter.feed(chunk)
            await reply.send(chunk)

    async def _pass_error(self, answer: Answer, headers: Headers, reply: Reply, note: _Note, *, legible: bool) -> None:
        text = b""
        async for chunk in answer.body:
            text = (text + chunk)[:_MAX_ERROR]
            if len(text) == _MAX_ERROR:
                break
        if not legible:
            text = b""
        if self._key:
            text = text.replace(self._key.encode(), b"[redacted]")
        status = answer.status
        if reason := Reason.GATEWAY if status < 400 else self._api.reason(status, text):
            note.fault = reason, f"the provider {_WORDS[reason]}: it answered {status}, {_message(text)}"
            if note.answers:  # in our own words: some CLIs go by the status that the body names
                told = [pair for pair in headers if pair[0].startswith(_TELLING)]
                status, headers = _FINAL, [*told, (b"content-type", _JSON), (_SHOULD, b"false")]
                text = self._api.error(status, Refusal.GATEWAY, _message(text))
        await reply.start(status, headers)
        await reply.send(text)

    def _settle(self, request: Request, reply: Reply, note: _Note, *, admitted: bool) -> None:
        usage, estimated = Usage(), False
        if admitted:
            counts = Counts()
            if note.meter is not None:
                counts, estimated = note.meter.end(note.sent_bytes)
            elif note.asked:
                counts, estimated = Meter(self._api, stream=True).end(note.sent_bytes)
            usage = Usage(
                1,
                counts.input,
                counts.cached,
                counts.written + counts.written_hour,
                counts.output,
                counts.reasoning,
                self._cost(note.model, counts),
            )
            self._by_model[note.model] = self._by_model.get(note.model, Usage()) + usage
            self._purse.settle(usage, turn=note.meter is not None)
            self._fault = note.fault
        first = reply.first_byte and reply.first_byte - request.began
        self._tell(
            request,
            note,
            status=reply.status,
            received_bytes=reply.sent_bytes,
            first_byte_seconds=first,
            usage=usage,
            estimated=estimated,
            refusal=note.refusal,
        )

    def _tell(self, request: Request, note: _Note, *, status: int, **more: Any) -> None:
        exchange = Exchange(
            call=note.call.name if note.call else printable(request.path),
            model=note.model,
            status=status,
            sent_bytes=note.sent_bytes,
            seconds=trio.current_time() - request.began,
            **{"received_bytes": 0, "first_byte_seconds": None, "usage": Usage(), **more},
        )
        self._free += exchange.usage.tokens == 0
        if self._free <= MOST_FREE or exchange.usage.tokens:
            self._on_exchange(exchange)

    def _cost(self, model: str, counts: Counts) -> float | None:
        return cost_usd(self._grant.api.value, model, counts)


def _wait(answer: Answer, pause: float) -> float | None:
    """How long to wait before a request with this answer is made again; ``None`` when the answer is the last word."""
    told = dict(answer.headers)
    if (answer.status not in _PASSING and answer.status < 500) or told.get(_SHOULD) == b"false":
        return None
    if _BEFORE in told:
        try:
            pause = float(told[_BEFORE])
        except ValueError:
            return pause  # a date
    return pause if 0 <= pause <= PATIENCE else None


def _message(text: bytes) -> str:
    """What an error says, in all three APIs at the same place."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    said = str(inner(found, "error").get("message") or text.decode(errors="replace"))
    return printable(said) or "without a word"


def _passed(headers: Headers, own: frozenset[bytes]) -> Headers:
    return [(name, value) for name, value in headers if name in _ASKED or name in own]
