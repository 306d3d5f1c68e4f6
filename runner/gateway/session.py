"""A grant in use: each request is checked, forwarded with the key, metered while its answer passes, and reported.

Nothing of an answer is kept here beyond the piece that passes and, in ``Meter``, one event; so a slow client slows its
own answer down and costs no memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, urlencode

import trio

from runner.core.errors import UnfitSecret
from runner.core.model import ModelRefusal, Outcome, Reason, Usage, failed
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
    inner,
    json_of,
    model_matches,
    objects,
    read_body,
)
from runner.gateway.backoff import MAX_WAIT_UNREACHED, Backoff, backoff_until, requested_pause
from runner.gateway.budget import BudgetLedger, BudgetUsedUp
from runner.gateway.max_cost import max_cost_usd
from runner.gateway.meter import Meter
from runner.gateway.prices import cost_usd
from runner.network.http import LARGE_PLACES, Request, Response
from runner.network.served_session import (
    IDENTITY,
    JSON_TYPE,
    RequestRefused,
    ServedSession,
    is_encoded,
    select_headers,
)
from runner.network.upstream import Unreachable, Upstream, UpstreamFailed, UpstreamResponse
from runner.ports.gateway import ModelGrant, ModelRequest

MAX_FREE_REPORTED = 1000  # requests without tokens that are reported: an agent could make millions
SILENT_SECONDS = 10.0  # of a silent model that are worth a word
MAX_BROKEN = 3  # answers in a row that break off; the next request is not made
_MAX_ERROR = 64 << 10  # bytes of an error's body that are read, and searched for the key
_REQUEST_HEADERS = frozenset({b"accept", b"content-type", b"user-agent"})
_QUERY_KEYS = frozenset({"alt", "beta", "limit", "after", "after_id", "before_id", "pageSize", "pageToken"})
_RESPONSE_HEADERS = frozenset({b"content-type", b"retry-after", b"retry-after-ms", b"x-should-retry"})
_RESPONSE_PREFIXES = (b"anthropic-ratelimit-", b"x-ratelimit-", b"request-id", b"x-request-id")
_SHOULD_RETRY = b"x-should-retry"
_FINAL_STATUS = 400  # ends every CLI at once, and so does 403, of which they say that they could not log in
_DENIED_STATUS = 403
_STATUSES = {ModelRefusal.PATH: 404}
_TRANSIENT = frozenset({408, 425, 429})  # and all from 500 on
_REASONS = {ModelRefusal.BUDGET: Reason.BUDGET, ModelRefusal.MODEL: Reason.MODEL}
_FAILURE_TEXTS = {
    Reason.AUTH: "refuses the key",
    Reason.QUOTA: "has no more quota for it",
    Reason.MODEL: "does not know the model",
    Reason.GATEWAY: "cannot answer",
    Reason.CUT_OFF: "takes no more of this conversation",
}
_API_TYPES = re.compile(rb"text/event-stream|application/([\w.-]+\+)?json")
_TITLE = re.compile(rb"<title>([^<]{1,200})", re.IGNORECASE)
_MODEL_HINT = "hint: name the model that the CLI asks for, or another: `model` in the manifest, -m of a triage"


class ModelRefused(RequestRefused):
    """A request is answered here. ``reason`` is that of the agent step's outcome."""

    def __init__(
        self, refusal: ModelRefusal, message: str, *, status: int | None = None, reason: Reason | None = None
    ) -> None:
        super().__init__(refusal, message, status or _STATUSES.get(refusal, _FINAL_STATUS))
        self.model_refusal = refusal
        self.reason = reason or _REASONS.get(refusal, Reason.GATEWAY)


@dataclass(frozen=True)
class RequestFailure:
    """The fault of an answer. ``is_foreign``: it is not the API that answered."""

    reason: Reason
    message: str
    is_foreign: bool = False


@dataclass(eq=False)
class RequestLog:
    """The progress of one request. ``last_heard`` is when it was sent, or something came of an answer under way."""

    call: Call | None = None
    model: str = ""
    sent_bytes: int = 0
    is_helpers: bool = False
    max_cost: float = 0.0  # dollars, if the budget is strict
    is_unanswered: bool = False  # it went out, and no answer has come yet
    last_heard: float | None = None
    meter: Meter | None = None
    refusal: ModelRefusal | None = None
    failure: RequestFailure | None = None

    @property
    def wants_answer(self) -> bool:
        return self.call is not None and self.call.kind is Kind.ANSWER


class GatewaySession(ServedSession):
    """See the port. ``key`` is empty for a fake model; ``deadline`` is the agent's, trio time."""

    def __init__(
        self,
        grant: ModelGrant,
        api: Api,
        upstream: Upstream,
        key: str,
        on_request: Callable[[ModelRequest], None],
        *,
        deadline: float = math.inf,
    ) -> None:
        super().__init__(large_places=LARGE_PLACES)
        self._grant = grant
        self._api = api
        self._upstream = upstream
        self._key = key
        self._on_request = on_request
        self._deadline = deadline
        self._budget = BudgetLedger(grant.budget)
        self._refused: dict[ModelRefusal, tuple[Reason, str]] = {}
        self._broken = 0
        self._failure: RequestFailure | None = None
        self._has_tools = False  # a request has offered some
        self._waiting_for = ""
        self._under_way: set[RequestLog] = set()  # requests for answers
        self._given_up = False  # retries were of no use, and no answer has come since: the next request has none
        self._free_reported = 0

    @property
    def usage(self) -> Usage:
        return self._budget.usage

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._upstream.warnings

    @property
    def failure(self) -> Outcome | None:
        if spent := self._refused.get(ModelRefusal.BUDGET):
            return failed(*spent)
        if self._failure:
            return failed(self._failure.reason, self._failure.message, details=self._hints(self._failure))
        for refusal in (ModelRefusal.MODEL, ModelRefusal.REQUEST):
            refused = self._refused.get(refusal)
            if refused and refused[0] is not Reason.GATEWAY and not self._budget.turns:
                return failed(*refused, details=(_MODEL_HINT,) if refusal is ModelRefusal.MODEL else ())
        return None

    @property
    def waiting_for(self) -> str:
        return self._waiting_for

    @property
    def silent_seconds(self) -> float:
        heard = [log.last_heard for log in self._under_way if log.last_heard is not None]
        return trio.current_time() - min(heard) if heard else 0.0

    def _hints(self, failure: RequestFailure) -> tuple[str, ...]:
        if failure.reason is not Reason.PLATFORM and not failure.is_foreign:
            return ()
        variable = f"RUNNER_{self._grant.api.value.upper()}_URL"
        return (f"hint: look at `{variable}`, `HTTPS_PROXY` and `SSL_CERT_FILE` where runner is started",)

    def _error_body(self, refused: RequestRefused) -> bytes:
        return self._api.error(refused.status, ModelRefusal(refused.refusal), str(refused))

    async def _exchange(self, request: Request, response: Response) -> None:
        log = RequestLog(sent_bytes=len(request.body))
        admitted = served = False
        try:
            body = self._check(request, log)
            if log.wants_answer:
                self._under_way.add(log)
                await self._reserve(log.max_cost)
                admitted = True
            await self._forward(request, body, response, log)
            served = True
        except ModelRefused as refused:
            served = True
            log.refusal = refused.model_refusal
            self._refused.setdefault(refused.model_refusal, (refused.reason, str(refused)))
            await self._refuse(response, refused)
        finally:
            self._under_way.discard(log)
            self._waiting_for = "" if served or not log.wants_answer else _describe_wait(log)
            self._finish(request, response, log, admitted=admitted)

    async def _reserve(self, max_cost: float) -> None:
        try:
            await self._budget.reserve(max_cost)
        except BudgetUsedUp as error:
            raise ModelRefused(ModelRefusal.BUDGET, str(error), reason=error.reason) from error

    def _check(self, request: Request, log: RequestLog) -> bytes:
        """Return the body to forward. Raises ``ModelRefused``."""
        if request.header(b"upgrade"):
            raise ModelRefused(ModelRefusal.PATH, "the gateway has no websockets", status=426)
        if request.header(b"origin"):  # a page in a browser of this host, where a workspace has the host's loopback
            raise ModelRefused(ModelRefusal.PATH, "web pages are not answered", status=403)
        log.call = call = self._api.route(request.method, request.path)
        if call is None:
            what = f"{sanitize(request.method)} {sanitize(request.path)}"
            raise ModelRefused(ModelRefusal.PATH, f"`{what}` is not forwarded")
        if call.kind is Kind.LIST:
            return b""
        try:
            body = read_body(request.body)
        except BadBody as error:
            raise ModelRefused(ModelRefusal.REQUEST, str(error)) from error
        log.model = self._check_model(call.model or body.get("model"))
        offers = _offers_tools(body)
        self._has_tools = self._has_tools or offers
        log.is_helpers = self._has_tools and not offers
        if log.wants_answer:
            self._check_answerable(body)
            if self._grant.budget.strict:
                log.max_cost = self._max_cost(log.model, body, len(request.body))
        return request.body

    def _check_model(self, model: object) -> str:
        if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL or not model.isprintable():
            raise ModelRefused(ModelRefusal.REQUEST, "no model is named")
        if not any(model_matches(granted, model) for granted in self._grant.models):
            granted = ", ".join(self._grant.models)
            message = f"the model `{model}` is not granted to this run, only: {granted}"
            raise ModelRefused(ModelRefusal.MODEL, message)
        if self._grant.budget.cost_usd is not None and self._cost(model, Counts()) is None:
            message = f"the model `{model}` has no known price, and the budget is in dollars"
            raise ModelRefused(ModelRefusal.MODEL, message)
        return model

    def _check_answerable(self, body: Mapping[str, Any]) -> None:
        if self._broken >= MAX_BROKEN:
            raise ModelRefused(ModelRefusal.GATEWAY, f"{self._broken} answers in a row have broken off")
        if outside := self._api.external_access(body):
            message = f"{sanitize(outside)} is not granted: it leaves the conversation"
            raise ModelRefused(ModelRefusal.REQUEST, message, reason=Reason.DENIED)

    def _max_cost(self, model: str, body: Mapping[str, Any], sent_bytes: int) -> float:
        """Return the most that a request can cost. Raises ``ModelRefused`` when that is unknown."""
        cost = max_cost_usd(self._grant.api.value, model, body, sent_bytes)
        if cost is None:
            message = "the highest cost of this request is unknown: its input is not all in the request"
            raise ModelRefused(ModelRefusal.REQUEST, message)
        return cost

    async def _forward(self, request: Request, body: bytes, response: Response, log: RequestLog) -> None:
        assert log.call is not None
        headers = [*select_headers(request.headers, _REQUEST_HEADERS | self._api.forwarded), IDENTITY]
        if self._key:
            headers.append(self._api.auth(self._key))
        query = urlencode([pair for pair in parse_qsl(request.query.decode()) if pair[0] in _QUERY_KEYS])
        target = f"{log.call.path}?{query}" if query else log.call.path
        backoff = Backoff(0.0) if self._given_up else backoff_until(self._deadline, trio.current_time())
        while True:
            log.is_unanswered, log.failure, log.last_heard = True, None, trio.current_time()
            try:
                async with self._upstream.send(request.method, target, headers, body) as answer:
                    log.is_unanswered = False
                    if answer.status < 300:
                        self._given_up = False
                        await self._pass(answer, response, log)
                        return
                    text = await self._read_error(answer)
                    pause = self._pause(answer, text, backoff) if log.wants_answer else None
                    if pause is None:
                        self._given_up = self._given_up or backoff.has_waited
                        await self._pass_error(answer, text, response, log)
                        return
                    status, reason = answer.status, f"it answered {answer.status}, {_error_message(text)}"
            except UpstreamFailed as error:
                log.is_unanswered = False
                status, reason = 0, sanitize(str(error))
                if response.status:
                    self._cut(response, log, f"the provider broke off: {reason}")
                    return
                if isinstance(error, Unreachable):
                    backoff.left = min(backoff.left, MAX_WAIT_UNREACHED)
                pause = backoff.next_pause() if log.wants_answer else None
                if pause is None:
                    self._given_up = self._given_up or backoff.has_waited
                    log.failure = _upstream_failure(error, reason)
                    raise ModelRefused(ModelRefusal.GATEWAY, log.failure.message) from error
            self._report(request, log, status=status, retry_seconds=pause, retry_reason=reason)
            log.last_heard, log.failure = None, RequestFailure(Reason.GATEWAY, f"waited for the provider: {reason}")
            await trio.sleep(pause)

    def _pause(self, answer: UpstreamResponse, text: bytes, backoff: Backoff) -> float | None:
        """Return the pause before a request with this error is retried; ``None`` when the error is final."""
        headers = dict(answer.headers)
        if (answer.status not in _TRANSIENT and answer.status < 500) or headers.get(_SHOULD_RETRY) == b"false":
            return None
        return backoff.next_pause(max(requested_pause(headers), self._api.pause(text) or 0.0))

    async def _read_error(self, answer: UpstreamResponse) -> bytes:
        """Read the beginning of an error's body, without the key; nothing when it is compressed."""
        text = b""
        async for chunk in answer.body:
            text = (text + chunk)[:_MAX_ERROR]
            if len(text) == _MAX_ERROR:
                break
        return b"" if is_encoded(answer) else self._without_key(text)

    async def _pass(self, answer: UpstreamResponse, response: Response, log: RequestLog) -> None:
        headers = select_headers(answer.headers, _RESPONSE_HEADERS, _RESPONSE_PREFIXES)
        kind = dict(headers).get(b"content-type", b"").lower()
        log.meter = Meter(self._api, stream=kind.startswith(b"text/event-stream"))
        if is_encoded(answer):  # tokens could not be counted
            log.failure = RequestFailure(Reason.GATEWAY, "the provider answers in an encoding that was not asked for")
            raise ModelRefused(ModelRefusal.GATEWAY, log.failure.message)
        if kind and not _API_TYPES.match(kind):
            page = f": {_error_message(await self._read_error(answer))}" if kind.startswith(b"text/") else ""
            sent = sanitize(kind.decode(errors="replace"))
            message = f"what answers is not the provider's API: it sent `{sent}`{page}"
            log.failure = RequestFailure(Reason.GATEWAY, message, is_foreign=True)
            raise ModelRefused(ModelRefusal.GATEWAY, message)
        await response.start(answer.status, headers)
        try:
            async for chunk in answer.body:
                log.last_heard = trio.current_time()
                log.meter.feed(chunk)
                await response.send(chunk)
        finally:  # a client may hang up as soon as it has heard the last event
            if log.wants_answer and (end := log.meter.end()):
                self._record_end(end, log)
        if log.wants_answer and end is None:
            self._cut(response, log, "the provider broke off: its answer stopped before its end")

    def _record_end(self, end: End, log: RequestLog) -> None:
        message = sanitize(end.said)
        if end.reason in (None, Reason.CUT_OFF):
            self._broken = 0
            text = f"the model did not finish: {message}"
        else:
            self._broken += 1
            text = f"the provider {_FAILURE_TEXTS[end.reason]}: {message}"
        log.failure = RequestFailure(end.reason, text) if end.reason else None

    def _cut(self, response: Response, log: RequestLog, message: str) -> None:
        log.failure = RequestFailure(Reason.GATEWAY, message)
        log.refusal = ModelRefusal.GATEWAY
        self._broken += 1
        response.cut()

    async def _pass_error(self, answer: UpstreamResponse, text: bytes, response: Response, log: RequestLog) -> None:
        passed = select_headers(answer.headers, _RESPONSE_HEADERS, _RESPONSE_PREFIXES)
        headers = [(name, self._without_key(value)) for name, value in passed]
        status = answer.status
        if reason := Reason.GATEWAY if status < 400 else self._api.reason(status, text):
            message = f"the provider {_FAILURE_TEXTS[reason]}: it answered {status}, {_error_message(text)}"
            is_foreign = reason is Reason.GATEWAY and status < 500
            log.failure = RequestFailure(reason, message, is_foreign=is_foreign)
            if log.wants_answer and status != _FINAL_STATUS:  # rewritten: some CLIs go by the status in the body
                limits = [pair for pair in headers if pair[0].startswith(_RESPONSE_PREFIXES)]
                status = _DENIED_STATUS if reason is Reason.AUTH else _FINAL_STATUS
                headers = [*limits, (b"content-type", JSON_TYPE), (_SHOULD_RETRY, b"false")]
                text = self._api.error(status, ModelRefusal.GATEWAY, message)
        await response.start(status, headers)
        await response.send(text)

    def _without_key(self, text: bytes) -> bytes:
        """Remove the key in every form from what the provider says."""
        return self._redactor.clean(text.replace(self._key.encode(), b"[redacted]") if self._key else text)

    @cached_property
    def _redactor(self) -> Redactor:
        redactor = Redactor()
        with suppress(UnfitSecret):  # too short to be looked for in other forms
            redactor.register("key", self._key.encode())
        return redactor

    def _finish(self, request: Request, response: Response, log: RequestLog, *, admitted: bool) -> None:
        usage, estimated = Usage(), False
        if admitted:
            usage, estimated = self._usage_of(log)
            self._budget.charge(usage, turn=log.meter is not None, max_cost=log.max_cost)
            self._failure = self._failure if log.is_helpers else log.failure
        first = response.first_byte and response.first_byte - request.began
        self._report(
            request,
            log,
            status=response.status,
            received_bytes=response.sent_bytes,
            first_byte_seconds=first,
            usage=usage,
            estimated=estimated,
            refusal=log.refusal,
        )

    def _usage_of(self, log: RequestLog) -> tuple[Usage, bool]:
        """Return what a request used, and whether that is an estimate."""
        counts, estimated = Counts(), False
        if log.meter is not None:
            counts, estimated = log.meter.counts(log.sent_bytes)
        elif log.is_unanswered:
            counts, estimated = Meter(self._api, stream=True).counts(log.sent_bytes)
        cost = self._cost(log.model, counts)
        if estimated and log.max_cost and cost is not None:
            cost = min(cost, log.max_cost)
        usage = Usage(
            requests=1,
            input_tokens=counts.input,
            cached_tokens=counts.cached,
            cache_write_tokens=counts.written + counts.written_hour,
            output_tokens=counts.output,
            reasoning_tokens=counts.reasoning,
            cost_usd=cost,
        )
        return usage, estimated

    def _report(self, request: Request, log: RequestLog, *, status: int, **more: Any) -> None:
        reported = ModelRequest(
            call=log.call.name if log.call else sanitize(request.path),
            model=log.model,
            status=status,
            sent_bytes=log.sent_bytes,
            seconds=trio.current_time() - request.began,
            **{"received_bytes": 0, "first_byte_seconds": None, "usage": Usage(), **more},
        )
        self._free_reported += reported.usage.tokens == 0
        if self._free_reported <= MAX_FREE_REPORTED or reported.usage.tokens:
            self._on_request(reported)

    def _cost(self, model: str, counts: Counts) -> float | None:
        return cost_usd(self._grant.api.value, model, counts)


def _offers_tools(body: Mapping[str, Any]) -> bool:
    """Tell whether a request offers tools, as those of helpers (for a title, a summary) do not."""
    return any(place.get("tools") for place in (body, *objects(body.get("input"))))


def _describe_wait(log: RequestLog) -> str:
    """Describe what the client of a request that was ended here was waiting for."""
    if log.last_heard is None:
        return log.failure.message if log.failure else ""
    silent = trio.current_time() - log.last_heard
    return f"the model had not answered for {silent:.0f}s" if silent >= SILENT_SECONDS else ""


def _upstream_failure(error: UpstreamFailed, reason: str) -> RequestFailure:
    if isinstance(error, Unreachable):
        return RequestFailure(Reason.PLATFORM, f"`{error.host}` could not be reached: {reason}")
    return RequestFailure(Reason.GATEWAY, f"the provider broke off: {reason}")


def _error_message(text: bytes) -> str:
    """Return the message of an error, which all three APIs have in the same place; of a page, its title."""
    message = inner(json_of(text), "error").get("message")
    page = _TITLE.search(text) if text.lstrip().startswith(b"<") else None
    words = (page[1].strip() if page else text).decode(errors="replace")
    return sanitize(str(message or (f"a page, `{words}`" if page else words))) or "without a message"
