"""One grant in use: each request is judged, let through with the key, metered while its answer passes, and told.

Nothing of an answer is kept here beyond the piece that passes and, in ``Meter``, one event; so a slow client slows its
own answer down and costs no memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, urlencode

import trio

from runner.core.errors import UnfitSecret
from runner.core.model import Outcome, Reason, Usage, failed
from runner.core.redact import Redactor
from runner.core.sanitize import sanitize
from runner.gateway.api import (
    MAX_MODEL,
    Api,
    BadBody,
    Call,
    Counts,
    End,
    Kind,
    admits,
    inner,
    json_of,
    objects,
    read_body,
)
from runner.gateway.max_cost import most_usd
from runner.gateway.meter import Meter
from runner.gateway.patience import UNREACHED_WAITED, Patience, patience_until, told_pause
from runner.gateway.prices import cost_usd
from runner.network.http import LARGE_PLACES, Headers, Reply, Request, serve_http
from runner.network.upstream import Answer, Unreachable, Upstream, UpstreamFailed
from runner.ports.gateway import Exchange, Grant, Refusal
from runner.ports.provider import Connection

_JSON = b"application/json"
MOST_FREE = 1000  # requests without tokens that are told of: an agent could make millions
_MAX_ERROR = 64 << 10  # bytes of an error's body that are read, and searched for the key
_ASKED = frozenset({b"accept", b"content-type", b"user-agent"})
_QUERY = frozenset({"alt", "beta", "limit", "after", "after_id", "before_id", "pageSize", "pageToken"})
_ANSWERED = frozenset({b"content-type", b"retry-after", b"retry-after-ms", b"x-should-retry"})
_SHOULD = b"x-should-retry"
_TELLING = (b"anthropic-ratelimit-", b"x-ratelimit-", b"request-id", b"x-request-id")
_FINAL = 400  # ends every CLI at once, and so does 403, of which they say that they could not log in
_DENIED = 403
_STATUS = {
    Refusal.PATH: 404,
    Refusal.REQUEST: 400,
    Refusal.MODEL: _FINAL,
    Refusal.BUDGET: _FINAL,
    Refusal.GATEWAY: _FINAL,
}
SILENT = 10.0  # seconds without a word from a model that are worth one
MOST_BROKEN = 3  # answers in a row that break off; the next request is not made
_PASSING = frozenset({408, 425, 429})  # and all from 500 on
_REASONS = {Refusal.BUDGET: Reason.BUDGET, Refusal.MODEL: Reason.MODEL}
_WORDS = {
    Reason.AUTH: "refuses the key",
    Reason.QUOTA: "has no more quota for it",
    Reason.MODEL: "does not know the model",
    Reason.GATEWAY: "cannot answer",
    Reason.CUT_OFF: "takes no more of this conversation",
}
_KINDS = re.compile(rb"text/event-stream|application/([\w.-]+\+)?json")
_TITLE = re.compile(rb"<title>([^<]{1,200})", re.IGNORECASE)


class Refused(Exception):
    """Why a request is answered here. Never leaves this module."""

    def __init__(
        self, refusal: Refusal, message: str, *, status: int | None = None, reason: Reason | None = None
    ) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.status = status or _STATUS[refusal]
        self.reason = reason or _REASONS.get(refusal, Reason.GATEWAY)


@dataclass(frozen=True)
class _Fault:
    """Why a request got no answer that counts. ``is_foreign``: something else answered in the place of the API."""

    reason: Reason
    said: str
    is_foreign: bool = False


@dataclass(eq=False)
class _Note:
    """What becomes of one request."""

    call: Call | None = None
    model: str = ""
    sent_bytes: int = 0
    is_helpers: bool = False
    most: float = 0.0  # dollars that it can cost, if the budget is strict
    asked: bool = False  # it went out, and no answer has come yet
    heard: float | None = None  # when something last came of an answer that is waited for, or when it was asked for
    meter: Meter | None = None
    refusal: Refusal | None = None
    fault: _Fault | None = None

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
    reserved: float = 0.0  # dollars that those under way can cost at most, if the budget is strict
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

    async def admit(self, most: float) -> None:
        """Take part with a request that costs ``most`` dollars at most, when there is room. Raises ``Refused``."""
        while not (spent := self.used_up() or self._beyond(most)) and not (self.has_room() and self._covers(most)):
            await self.changed.wait()
        if spent:
            raise Refused(Refusal.BUDGET, f"the budget of this run is used up: {spent[1]}", reason=spent[0])
        self.under_way += 1
        self.reserved += most

    @property
    def _left(self) -> float:
        budget = self.grant.budget
        if not budget.strict or budget.cost_usd is None:
            return math.inf
        return budget.cost_usd - (self.usage.cost_usd or 0.0)

    def _beyond(self, most: float) -> tuple[Reason, str] | None:
        """Why a request can never be made any more of a strict budget."""
        if most <= self._left:
            return None
        budget = self.grant.budget.cost_usd
        return Reason.BUDGET, f"an answer can cost ${most:.4f}, and ${self._left:.4f} of ${budget:.4f} are left"

    def _covers(self, most: float) -> bool:
        return self.reserved + most <= self._left

    def settle(self, usage: Usage, *, turn: bool, most: float) -> None:
        self.under_way -= 1
        self.reserved -= most
        self.turns += turn
        self.usage += usage
        if usage.tokens and (self.largest is None or usage.tokens > self.largest.tokens):
            self.largest = usage
        self.dearest = max(self.dearest, usage.cost_usd or 0.0)
        self.changed.set()
        self.changed = trio.Event()


class GrantedSession:
    """See the port. ``key`` is empty for a double; ``deadline`` is when the agent has to have finished, trio time."""

    def __init__(
        self,
        grant: Grant,
        api: Api,
        upstream: Upstream,
        key: str,
        on_exchange: Callable[[Exchange], None],
        *,
        deadline: float = math.inf,
    ) -> None:
        self._grant = grant
        self._api = api
        self._upstream = upstream
        self._key = key
        self._on_exchange = on_exchange
        self._deadline = deadline
        self._purse = _Purse(grant)
        self._by_model: dict[str, Usage] = {}
        self._large = trio.Semaphore(LARGE_PLACES)
        self._scopes: set[trio.CancelScope] = set()
        self._refused: dict[Refusal, tuple[Reason, str]] = {}
        self._broken = 0
        self._fault: _Fault | None = None
        self._has_tools = False  # a request has offered some
        self._awaited = ""
        self._under_way: set[_Note] = set()  # requests for answers
        self._given_up = False  # waiting was of no use, and no answer has come since: who asks again does not wait
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
            return failed(self._fault.reason, self._fault.said, details=self._hints(self._fault))
        for refusal in (Refusal.MODEL, Refusal.REQUEST):
            refused = self._refused.get(refusal)
            if refused and refused[0] is not Reason.GATEWAY and not self._purse.turns:
                hint = "hint: name the model that the CLI asks for, or another: `model` in the manifest, -m of a triage"
                return failed(*refused, details=(hint,) if refusal is Refusal.MODEL else ())
        return None

    @property
    def awaited(self) -> str:
        return self._awaited

    @property
    def silent_seconds(self) -> float:
        heard = [note.heard for note in self._under_way if note.heard is not None]
        return trio.current_time() - min(heard) if heard else 0.0

    def _hints(self, fault: _Fault) -> tuple[str, ...]:
        if fault.reason is not Reason.PLATFORM and not fault.is_foreign:
            return ()
        variable = f"RUNNER_{self._grant.api.value.upper()}_URL"
        return (f"hint: look at `{variable}`, `HTTPS_PROXY` and `SSL_CERT_FILE` where runner is started",)

    # --- one request ---

    async def _exchange(self, request: Request, reply: Reply) -> None:
        note = _Note(sent_bytes=len(request.body))
        admitted = served = False
        try:
            body = self._judge(request, note)
            if note.answers:
                self._under_way.add(note)
                await self._purse.admit(note.most)
                admitted = True
            await self._forward(request, body, reply, note)
            served = True
        except Refused as refused:
            served = True
            note.refusal = refused.refusal
            self._refused.setdefault(refused.refusal, (refused.reason, str(refused)))
            text = self._api.error(refused.status, refused.refusal, str(refused))
            await reply.send_all(refused.status, _JSON, text)
        finally:
            self._under_way.discard(note)
            self._awaited = "" if served or not note.answers else _awaited(note)
            self._settle(request, reply, note, admitted=admitted)

    def _judge(self, request: Request, note: _Note) -> bytes:
        """The body to forward. Raises ``Refused``."""
        if request.header(b"upgrade"):
            raise Refused(Refusal.PATH, "there are no websockets here", status=426)
        if request.header(b"origin"):  # a page in a browser of this host, where a workspace has the host's loopback
            raise Refused(Refusal.PATH, "web pages are not answered", status=403)
        note.call = call = self._api.route(request.method, request.path)
        if call is None:
            raise Refused(Refusal.PATH, f"`{sanitize(request.method)} {sanitize(request.path)}` is not let through")
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
        offers = _offers_tools(body)
        self._has_tools = self._has_tools or offers
        note.is_helpers = self._has_tools and not offers
        if note.answers and self._broken >= MOST_BROKEN:
            raise Refused(Refusal.GATEWAY, f"{self._broken} answers in a row have broken off")
        if note.answers and (found := self._api.reach(body)):
            why = f"{sanitize(found)} is not granted: it leaves the conversation"
            raise Refused(Refusal.REQUEST, why, reason=Reason.DENIED)
        if note.answers and self._grant.budget.strict:
            note.most = self._most(model, body, len(request.body))
        return request.body

    def _most(self, model: str, body: Mapping[str, Any], sent_bytes: int) -> float:
        """What a request can cost. Raises ``Refused`` when there is no telling."""
        most = most_usd(self._grant.api.value, model, body, sent_bytes)
        if most is None:
            raise Refused(Refusal.REQUEST, "nobody can tell what this can cost: its input is not all in the request")
        return most

    async def _forward(self, request: Request, body: bytes, reply: Reply, note: _Note) -> None:
        assert note.call is not None
        headers = [*_passed(request.headers, self._api.forwarded), (b"accept-encoding", b"identity")]
        if self._key:
            headers.append(self._api.auth(self._key))
        query = urlencode([pair for pair in parse_qsl(request.query.decode()) if pair[0] in _QUERY])
        target = f"{note.call.path}?{query}" if query else note.call.path
        patience = Patience(0.0) if self._given_up else patience_until(self._deadline, trio.current_time())
        while True:
            note.asked, note.fault, note.heard = True, None, trio.current_time()
            try:
                async with self._upstream.send(request.method, target, headers, body) as answer:
                    note.asked = False
                    if answer.status < 300:
                        self._given_up = False
                        await self._pass(answer, reply, note)
                        return
                    text = await self._read_error(answer)
                    pause = self._pause(answer, text, patience) if note.answers else None
                    if pause is None:
                        self._given_up = self._given_up or patience.is_worn
                        await self._pass_error(answer, text, reply, note)
                        return
                    status, why = answer.status, f"it answered {answer.status}, {_message(text)}"
            except UpstreamFailed as error:
                note.asked = False
                status, why = 0, sanitize(str(error))
                if reply.status:
                    self._cut(reply, note, f"the provider broke off: {why}")
                    return
                if isinstance(error, Unreachable):
                    patience.left = min(patience.left, UNREACHED_WAITED)
                pause = patience.wait() if note.answers else None
                if pause is None:
                    self._given_up = self._given_up or patience.is_worn
                    if isinstance(error, Unreachable):
                        note.fault = _Fault(Reason.PLATFORM, f"`{error.host}` could not be reached: {why}")
                    else:
                        note.fault = _Fault(Reason.GATEWAY, f"the provider broke off: {why}")
                    raise Refused(Refusal.GATEWAY, note.fault.said) from error
            self._tell(request, note, status=status, again_seconds=pause, why=why)
            note.heard, note.fault = None, _Fault(Reason.GATEWAY, f"the provider was waited for: {why}")
            await trio.sleep(pause)

    def _pause(self, answer: Answer, text: bytes, patience: Patience) -> float | None:
        """How long to wait before a request with this error is made again; ``None`` when that is the last word."""
        told = dict(answer.headers)
        if (answer.status not in _PASSING and answer.status < 500) or told.get(_SHOULD) == b"false":
            return None
        return patience.wait(max(told_pause(told), self._api.pause(text) or 0.0))

    async def _read_error(self, answer: Answer) -> bytes:
        """The beginning of what a provider says in place of an answer, without the key; nothing that is not legible."""
        text = b""
        async for chunk in answer.body:
            text = (text + chunk)[:_MAX_ERROR]
            if len(text) == _MAX_ERROR:
                break
        return b"" if _is_coded(answer) else self._without_key(text)

    async def _pass(self, answer: Answer, reply: Reply, note: _Note) -> None:
        headers = _passed_back(answer)
        kind = dict(headers).get(b"content-type", b"").lower()
        note.meter = Meter(self._api, stream=kind.startswith(b"text/event-stream"))
        if _is_coded(answer):  # nothing in it could be counted
            note.fault = _Fault(Reason.GATEWAY, "the provider answers in an encoding that it was not asked for")
            raise Refused(Refusal.GATEWAY, note.fault.said)
        if kind and not _KINDS.match(kind):
            page = f": {_message(await self._read_error(answer))}" if kind.startswith(b"text/") else ""
            what = sanitize(kind.decode(errors="replace"))
            said = f"what answers is not the provider's API: it sent `{what}`{page}"
            note.fault = _Fault(Reason.GATEWAY, said, is_foreign=True)
            raise Refused(Refusal.GATEWAY, said)
        await reply.start(answer.status, headers)
        try:
            async for chunk in answer.body:
                note.heard = trio.current_time()
                note.meter.feed(chunk)
                await reply.send(chunk)
        finally:  # a client may hang up as soon as it has heard the last event
            if note.answers and (end := note.meter.end()):
                self._judge_end(end, note)
        if note.answers and end is None:
            self._cut(reply, note, "the provider broke off: its answer stopped before its end")

    def _judge_end(self, end: End, note: _Note) -> None:
        """Remember what is wrong with an answer that has come to its end."""
        if end.reason in (None, Reason.CUT_OFF):
            self._broken = 0
            note.fault = _Fault(end.reason, f"the model did not finish: {sanitize(end.said)}") if end.reason else None
        else:
            self._broken += 1
            note.fault = _Fault(end.reason, f"the provider {_WORDS[end.reason]}: {sanitize(end.said)}")

    def _cut(self, reply: Reply, note: _Note, why: str) -> None:
        note.fault = _Fault(Reason.GATEWAY, why)
        note.refusal = Refusal.GATEWAY
        self._broken += 1
        reply.cut()

    async def _pass_error(self, answer: Answer, text: bytes, reply: Reply, note: _Note) -> None:
        headers = [(name, self._without_key(value)) for name, value in _passed_back(answer)]
        status = answer.status
        if reason := Reason.GATEWAY if status < 400 else self._api.reason(status, text):
            said = f"the provider {_WORDS[reason]}: it answered {status}, {_message(text)}"
            note.fault = _Fault(reason, said, is_foreign=reason is Reason.GATEWAY and status < 500)
            if note.answers and status != _FINAL:  # in our own words: some CLIs go by the status that the body names
                told = [pair for pair in headers if pair[0].startswith(_TELLING)]
                status = _DENIED if reason is Reason.AUTH else _FINAL
                headers = [*told, (b"content-type", _JSON), (_SHOULD, b"false")]
                text = self._api.error(status, Refusal.GATEWAY, said)
        await reply.start(status, headers)
        await reply.send(text)

    def _without_key(self, text: bytes) -> bytes:
        """What the provider says, without the key, however it is written there."""
        return self._redactor.clean(text.replace(self._key.encode(), b"[redacted]") if self._key else text)

    @cached_property
    def _redactor(self) -> Redactor:
        redactor = Redactor()
        with suppress(UnfitSecret):  # too short to be looked for in other forms
            redactor.register("key", self._key.encode())
        return redactor

    def _settle(self, request: Request, reply: Reply, note: _Note, *, admitted: bool) -> None:
        usage, estimated = Usage(), False
        if admitted:
            counts = Counts()
            if note.meter is not None:
                counts, estimated = note.meter.counts(note.sent_bytes)
            elif note.asked:
                counts, estimated = Meter(self._api, stream=True).counts(note.sent_bytes)
            usage = Usage(
                1,
                counts.input,
                counts.cached,
                counts.written + counts.written_hour,
                counts.output,
                counts.reasoning,
                self._cost_of(note, counts, estimated=estimated),
            )
            self._by_model[note.model] = self._by_model.get(note.model, Usage()) + usage
            self._purse.settle(usage, turn=note.meter is not None, most=note.most)
            self._fault = self._fault if note.is_helpers else note.fault
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
            call=note.call.name if note.call else sanitize(request.path),
            model=note.model,
            status=status,
            sent_bytes=note.sent_bytes,
            seconds=trio.current_time() - request.began,
            **{"received_bytes": 0, "first_byte_seconds": None, "usage": Usage(), **more},
        )
        self._free += exchange.usage.tokens == 0
        if self._free <= MOST_FREE or exchange.usage.tokens:
            self._on_exchange(exchange)

    def _cost_of(self, note: _Note, counts: Counts, *, estimated: bool) -> float | None:
        """An estimate is no more than the request could cost, where that is known."""
        cost = self._cost(note.model, counts)
        return min(cost, note.most) if estimated and note.most and cost is not None else cost

    def _cost(self, model: str, counts: Counts) -> float | None:
        return cost_usd(self._grant.api.value, model, counts)


def _offers_tools(body: Mapping[str, Any]) -> bool:
    """Whether a request gives its model something to work with, as those of helpers (for a title, a summary) do not."""
    return any(place.get("tools") for place in (body, *objects(body.get("input"))))


def _awaited(note: _Note) -> str:
    """What the client of a request that was broken off was waiting for."""
    if note.heard is None:
        return note.fault.said if note.fault else ""
    silent = trio.current_time() - note.heard
    return f"the model had not answered for {silent:.0f}s" if silent >= SILENT else ""


def _is_coded(answer: Answer) -> bool:
    return any(name == b"content-encoding" and value.lower() != b"identity" for name, value in answer.headers)


def _passed_back(answer: Answer) -> Headers:
    return [(name, value) for name, value in answer.headers if name in _ANSWERED or name.startswith(_TELLING)]


def _message(text: bytes) -> str:
    """What an error says, in all three APIs at the same place; of a page, its title."""
    said = inner(json_of(text), "error").get("message")
    page = _TITLE.search(text) if text.lstrip().startswith(b"<") else None
    words = (page[1].strip() if page else text).decode(errors="replace")
    return sanitize(str(said or (f"a page, `{words}`" if page else words))) or "without a word"


def _passed(headers: Headers, own: frozenset[bytes]) -> Headers:
    return [(name, value) for name, value in headers if name in _ASKED or name in own]
