"""OpenAI's two APIs, Responses and Chat Completions, with and without ``/v1`` in front."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from runner.core.model import ModelRefusal, Reason
from runner.gateway.api import (
    Api,
    Call,
    Counts,
    End,
    Kind,
    SmokeRequest,
    end_of,
    failed_end,
    inner,
    objects,
    reason_of,
    whole,
)

_CODES = {
    ModelRefusal.MODEL: "model_not_allowed",
    ModelRefusal.BUDGET: "budget_exceeded",
    ModelRefusal.GATEWAY: "gateway_unavailable",
}
_CLIENT_TOOLS = ("function", "custom", "local_shell", "apply_patch", "namespace")
_TIERS = (None, "auto", "default")
_LAST = ("response.completed", "response.incomplete", "response.failed")
_ERRORS = {
    "invalid_api_key": Reason.AUTH,
    "model_not_found": Reason.MODEL,
    "insufficient_quota": Reason.QUOTA,
    "rate_limit_exceeded": Reason.QUOTA,
    "context_length_exceeded": Reason.CUT_OFF,
}
_WHOLE = ("stop", "tool_calls", "function_call")


class OpenAi:
    forwarded = frozenset({b"openai-beta", b"originator", b"session-id", b"thread-id", b"session_id"})
    marks: tuple[bytes, ...] = (b"finish_reason", *(word.encode() for word in _LAST), b'"status"', b"error")
    headers: tuple[tuple[bytes, bytes], ...] = ()
    smoke = SmokeRequest(
        "gpt-4.1-nano",
        "/v1/chat/completions",
        {"model": "gpt-4.1-nano", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]},
    )
    models = "/models"

    def route(self, method: str, path: str) -> Call | None:
        below = path.removeprefix("/v1")
        match method, below:
            case "POST", "/responses" | "/chat/completions":
                return Call(below.removeprefix("/"), Kind.ANSWER, below)
            case "GET", "/models":
                return Call("models", Kind.LIST, below)
        return None

    def external_access(self, body: Mapping[str, Any]) -> str | None:
        for name in ("background", "prompt", "web_search_options"):
            if body.get(name):
                return f"`{name}`"
        if body.get("service_tier") not in _TIERS:
            return "`service_tier`"
        items = [*objects(body.get("input")), *objects(body.get("messages"))]
        if kind := _hosted([body, *items]):
            return f"the tool `{kind}`"
        return next((f"the {name} of another place" for name in map(_fetched, items) if name), None)

    def auth(self, key: str) -> tuple[bytes, bytes]:
        return b"authorization", f"Bearer {key}".encode()

    def counts(self, message: Mapping[str, Any]) -> tuple[Counts, bool] | None:
        usage = inner(message, "response", "usage") or inner(message, "usage")
        if not usage:
            return None
        form = "input" if "input_tokens" in usage else "prompt"
        given = inner(usage, f"{form}_tokens_details")
        made = "output" if form == "input" else "completion"
        cached, written = whole(given.get("cached_tokens")), whole(given.get("cache_write_tokens"))
        counts = Counts(
            fresh=max(0, whole(usage.get(f"{form}_tokens")) - cached - written),
            cached=cached,
            written=written,
            output=whole(usage.get(f"{made}_tokens")),
            reasoning=whole(inner(usage, f"{made}_tokens_details").get("reasoning_tokens")),
        )
        return counts, "type" not in message or message["type"] in _LAST

    def end(self, message: Mapping[str, Any]) -> End | None:
        kind = message.get("type")
        if kind in _LAST or message.get("object") == "response":
            return _end_of(inner(message, "response") or message, kind)
        error = message if kind == "error" and not inner(message, "error") else inner(message, "error")
        if error:
            return failed_end(error, _ERRORS)
        told = (choice.get("finish_reason") for choice in objects(message.get("choices")))
        return next(filter(None, (end_of(word, _WHOLE) for word in told)), None)

    def error(self, status: int, refusal: ModelRefusal, message: str) -> bytes:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": _CODES.get(refusal)}
        return json.dumps({"error": error}).encode()

    def reason(self, status: int, body: bytes) -> Reason | None:
        if status == 400 and b"maximum context length" in body:  # as servers say it that have no code for it
            return Reason.CUT_OFF
        return reason_of(status, body, _ERRORS)

    def pause(self, body: bytes) -> float | None:
        return math.inf if b"insufficient_quota" in body else None


def _end_of(response: Mapping[str, Any], kind: object) -> End:
    """Return the end of a response by the last event of its stream, or else by its own status."""
    match str(kind).removeprefix("response.") if kind in _LAST else response.get("status"):
        case "completed":
            return End()
        case "failed":
            return failed_end(inner(response, "error"), _ERRORS)
    return end_of(inner(response, "incomplete_details").get("reason") or "incomplete", ()) or End()


def _hosted(places: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the first tool that is not the client's own; tools are in the request, in its items, and in each other."""
    waiting = list(places)
    while waiting:
        for tool in objects(waiting.pop().get("tools")):
            kind = tool.get("type")
            if kind not in _CLIENT_TOOLS and (kind, tool.get("execution")) != ("tool_search", "client"):
                return str(kind)
            waiting.append(tool)
    return None


def _fetched(item: Mapping[str, Any]) -> str | None:
    """Name the part of an item that the provider would fetch, or has from elsewhere."""
    for part in (item, *objects(item.get("content")), *objects(item.get("output"))):
        picture = part.get("image_url")
        url = picture.get("url") if isinstance(picture, dict) else picture
        if url and not str(url).startswith("data:"):
            return "image"
        if part.get("file_url") or part.get("file_id") or inner(part, "file").get("file_id"):
            return "file"
    return None


api: Api = OpenAi()
