"""The fake model's Gemini API of Google."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.fake_model.api import FakeAnswer, FakeApi, Tools, event, pieces
from runner.gateway.api import inner, objects


class Gemini:
    def tools(self, body: Mapping[str, Any]) -> Tools:
        declared = [one for tool in objects(body.get("tools")) for one in objects(tool.get("functionDeclarations"))]
        return {str(one.get("name")): _parameters(one) for one in declared}

    def body(self, answer: FakeAnswer) -> Mapping[str, Any]:
        return {**_candidate(answer, [*_texts(answer), *_calls(answer)], finish=True), "usageMetadata": _usage(answer)}

    def stream(self, answer: FakeAnswer) -> Sequence[bytes]:
        texts = [event(_candidate(answer, [text], finish=False)) for text in _texts(answer)]
        last = {**_candidate(answer, _calls(answer), finish=True), "usageMetadata": _usage(answer)}
        return [*texts, event(last)]


def _parameters(declared: Mapping[str, Any]) -> Mapping[str, Any]:
    return inner(declared, "parametersJsonSchema", "properties") or inner(declared, "parameters", "properties")


def _candidate(answer: FakeAnswer, parts: list[dict[str, Any]], *, finish: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"index": 0, "content": {"role": "model", "parts": parts}}
    if finish:
        candidate["finishReason"] = "STOP"
    return {"candidates": [candidate], "modelVersion": answer.model, "responseId": f"resp-{answer.number}"}


def _texts(answer: FakeAnswer) -> list[dict[str, Any]]:
    thought = [{"text": piece, "thought": True} for piece in pieces(answer.think)]
    return [*thought, *({"text": piece} for piece in pieces(answer.say))]


def _calls(answer: FakeAnswer) -> list[dict[str, Any]]:
    return [{"functionCall": {"id": call.id, "name": call.name, "args": call.arguments}} for call in answer.calls]


def _usage(answer: FakeAnswer) -> dict[str, int]:
    counts = answer.counts
    return {
        "promptTokenCount": counts.input,
        "cachedContentTokenCount": counts.cached,
        "candidatesTokenCount": counts.output - counts.reasoning,
        "thoughtsTokenCount": counts.reasoning,
        "totalTokenCount": counts.input + counts.output,
    }


api: FakeApi = Gemini()
