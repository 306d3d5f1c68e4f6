"""Google's Gemini API."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from runner.core.model import ModelRefusal, Reason
from runner.gateway.api import (
    MAX_MODEL,
    Api,
    Call,
    Counts,
    End,
    Kind,
    SmokeRequest,
    end_of,
    failed_end,
    inner,
    json_of,
    objects,
    reason_of,
    whole,
)

_CALL = re.compile(rf"/v1(?:beta)?/models/([\w.-]{{1,{MAX_MODEL}}}):(\w+)", re.ASCII)
_KINDS = {"generateContent": Kind.ANSWER, "streamGenerateContent": Kind.ANSWER, "countTokens": Kind.COUNT}
_STATES = {400: "INVALID_ARGUMENT", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 502: "UNAVAILABLE"}
_CLIENT_TOOLS = {"functionDeclarations", "function_declarations"}
_OPENED = ("fileData", "file_data")
_ERRORS = {
    "UNAUTHENTICATED": Reason.AUTH,
    "PERMISSION_DENIED": Reason.AUTH,
    "RESOURCE_EXHAUSTED": Reason.QUOTA,
    "NOT_FOUND": Reason.MODEL,
    "UNAVAILABLE": Reason.GATEWAY,
}
_SECONDS = re.compile(r"(\d{1,6}(?:\.\d{1,9})?)s", re.ASCII)


class Gemini:
    forwarded = frozenset({b"x-goog-api-client"})
    marks: tuple[bytes, ...] = (b"finishReason", b"blockReason", b"error")
    headers: tuple[tuple[bytes, bytes], ...] = ()
    smoke = SmokeRequest(
        "gemini-2.5-flash-lite",
        "/v1beta/models/gemini-2.5-flash-lite:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}], "generationConfig": {"maxOutputTokens": 1}},
    )
    models = "/v1beta/models?pageSize=1000"

    def route(self, method: str, path: str) -> Call | None:
        if method == "GET" and path in ("/v1beta/models", "/v1/models"):
            return Call("models", Kind.LIST, path)
        found = _CALL.fullmatch(path) if method == "POST" else None
        return Call(found[2], _KINDS[found[2]], path, found[1]) if found and found[2] in _KINDS else None

    def external_access(self, body: Mapping[str, Any]) -> str | None:
        for name in ("cachedContent", "cached_content"):
            if body.get(name):
                return f"`{name}`"
        tools = body.get("tools")
        for tool in objects(tools if isinstance(tools, list) else [tools]):
            if others := sorted(set(tool) - _CLIENT_TOOLS):
                return f"the tool `{others[0]}`"
        system = body.get("systemInstruction", body.get("system_instruction"))
        contents = body.get("contents")
        for content in (*objects([system]), *objects(contents if isinstance(contents, list) else [contents])):
            parts = content.get("parts")
            for part in objects(parts if isinstance(parts, list) else [parts]):
                if any(name in part for name in _OPENED):
                    return "a file of another place"
        return None

    def auth(self, key: str) -> tuple[bytes, bytes]:
        return b"x-goog-api-key", key.encode()

    def counts(self, message: Mapping[str, Any]) -> tuple[Counts, bool] | None:
        usage = message.get("usageMetadata")
        if not isinstance(usage, dict):
            return None
        cached, thought = whole(usage.get("cachedContentTokenCount")), whole(usage.get("thoughtsTokenCount"))
        sent = whole(usage.get("promptTokenCount")) + whole(usage.get("toolUsePromptTokenCount"))
        counts = Counts(
            fresh=max(0, sent - cached),
            cached=cached,
            output=whole(usage.get("candidatesTokenCount")) + thought,
            reasoning=thought,
        )
        is_last = any("finishReason" in candidate for candidate in objects(message.get("candidates")))
        return counts, is_last or "promptFeedback" in message

    def end(self, message: Mapping[str, Any]) -> End | None:
        if error := inner(message, "error"):
            return failed_end(error, _ERRORS)
        told = [candidate.get("finishReason") for candidate in objects(message.get("candidates"))]
        told.append(inner(message, "promptFeedback").get("blockReason"))
        return next(filter(None, (end_of(word, ("STOP",)) for word in told)), None)

    def error(self, status: int, refusal: ModelRefusal, message: str) -> bytes:
        error = {"code": status, "message": message, "status": _STATES.get(status, "INVALID_ARGUMENT")}
        return json.dumps({"error": error}).encode()

    def reason(self, status: int, body: bytes) -> Reason | None:
        if status == 400 and b"API_KEY_INVALID" in body:
            return Reason.AUTH
        if status == 400 and b"exceeds the maximum number of tokens" in body:
            return Reason.CUT_OFF
        return reason_of(status, body, _ERRORS)

    def pause(self, body: bytes) -> float | None:
        if b"PerDay" in body:  # what is used up until tomorrow
            return math.inf
        details = objects(inner(json_of(body), "error").get("details"))
        told = (_SECONDS.fullmatch(str(detail.get("retryDelay"))) for detail in details)
        return next((float(found[1]) for found in told if found), None)


api: Api = Gemini()
