"""Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Mapping
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

_TYPES = {400: "invalid_request_error", 403: "permission_error", 404: "not_found_error", 502: "api_error"}
_CLIENT_TOOLS = ("bash_", "text_editor_", "computer_", "memory_", "tool_search_tool_")
_ERRORS = {
    "authentication_error": Reason.AUTH,
    "permission_error": Reason.AUTH,
    "billing_error": Reason.QUOTA,
    "rate_limit_error": Reason.QUOTA,
    "not_found_error": Reason.MODEL,
    "overloaded_error": Reason.GATEWAY,
}
_WHOLE = ("end_turn", "tool_use", "stop_sequence", "pause_turn", "compaction")


class Anthropic:
    forwarded = frozenset({b"anthropic-version", b"anthropic-beta"})
    marks: tuple[bytes, ...] = (b"message_stop", b"stop_reason", b"error")
    headers: tuple[tuple[bytes, bytes], ...] = ((b"anthropic-version", b"2023-06-01"),)
    smoke = SmokeRequest(
        "claude-haiku-5-5",
        "/v1/messages",
        {"model": "claude-haiku-5-5", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]},
    )
    models = "/v1/models?limit=1000"

    def route(self, method: str, path: str) -> Call | None:
        match method, path:
            case "POST", "/v1/messages":
                return Call("messages", Kind.ANSWER, path)
            case "POST", "/v1/messages/count_tokens":
                return Call("count_tokens", Kind.COUNT, path)
            case "GET", "/v1/models":
                return Call("models", Kind.LIST, path)
        return None

    def external_access(self, body: Mapping[str, Any]) -> str | None:
        for name in ("mcp_servers", "container"):
            if body.get(name):
                return f"`{name}`"
        for name, usual in (("speed", "standard"), ("inference_geo", "global")):
            if body.get(name, usual) not in (None, usual):
                return f"`{name}`"
        for tool in objects(body.get("tools")):
            kind = tool.get("type")
            if kind not in (None, "custom") and not str(kind).startswith(_CLIENT_TOOLS):
                return f"the tool `{kind}`"
        blocks = [body.get("system"), *(message.get("content") for message in objects(body.get("messages")))]
        return _fetched(blocks)

    def auth(self, key: str) -> tuple[bytes, bytes]:
        return b"x-api-key", key.encode()

    def counts(self, message: Mapping[str, Any]) -> tuple[Counts, bool] | None:
        usage = inner(message, "message", "usage") or inner(message, "usage")
        if not usage:
            return None
        hour = whole(inner(usage, "cache_creation").get("ephemeral_1h_input_tokens"))
        counts = Counts(
            fresh=whole(usage.get("input_tokens")),
            cached=whole(usage.get("cache_read_input_tokens")),
            written=max(0, whole(usage.get("cache_creation_input_tokens")) - hour),
            written_hour=hour,
            output=whole(usage.get("output_tokens")),
            reasoning=whole(inner(usage, "output_tokens_details").get("thinking_tokens")),
        )
        return counts, message.get("type") in ("message", "message_delta")

    def end(self, message: Mapping[str, Any]) -> End | None:
        match message.get("type"):
            case "error":
                return failed_end(inner(message, "error"), _ERRORS)
            case "message":
                return end_of(message.get("stop_reason"), _WHOLE)
            case "message_delta":  # of a whole answer something follows
                end = end_of(inner(message, "delta").get("stop_reason"), _WHOLE)
                return end if end and end.reason else None
            case "message_stop":
                return End()
        return None

    def error(self, status: int, refusal: ModelRefusal, message: str) -> bytes:
        kind = _TYPES.get(status, "invalid_request_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()

    def reason(self, status: int, body: bytes) -> Reason | None:
        if status == 400 and b"credit balance" in body:
            return Reason.QUOTA
        if status == 400 and b"prompt is too long" in body:
            return Reason.CUT_OFF
        return reason_of(status, body, _ERRORS)

    def pause(self, body: bytes) -> float | None:
        return None


def _fetched(contents: list[object]) -> str | None:
    """Name a picture or document that is not in the request itself."""
    while contents:
        for block in objects(contents.pop()):
            if block.get("type") in ("image", "document", "container_upload"):
                kind = inner(block, "source").get("type", "file")
                if kind not in ("base64", "text", "content"):
                    return f"a source of type `{kind}`"
                contents.append(inner(block, "source").get("content"))
            contents.append(block.get("content"))
    return None


api: Api = Anthropic()
