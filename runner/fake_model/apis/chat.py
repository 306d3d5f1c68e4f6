"""The fake model's Chat Completions API of OpenAI."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runner.fake_model.api import FakeAnswer, FakeApi, Tools, event, pieces
from runner.gateway.api import inner, objects


class Chat:
    def tools(self, body: Mapping[str, Any]) -> Tools:
        functions = [inner(tool, "function") for tool in objects(body.get("tools"))]
        return {str(function.get("name")): inner(function, "parameters", "properties") for function in functions}

    def body(self, answer: FakeAnswer) -> Mapping[str, Any]:
        message = {"role": "assistant", "content": answer.say or None, **_calls(answer)}
        choice = {"index": 0, "message": message, "finish_reason": _reason(answer)}
        return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def stream(self, answer: FakeAnswer) -> Sequence[bytes]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": piece} for piece in pieces(answer.say)]
        deltas += [_calls(answer)] if answer.calls else []
        head = _head(answer, "chat.completion.chunk")
        events = [event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) for delta in deltas]
        end = event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _reason(answer)}]})
        return [*events, end, event({**head, "choices": [], "usage": _usage(answer)}), b"data: [DONE]\n\n"]


def _head(answer: FakeAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": 0, "model": answer.model}


def _calls(answer: FakeAnswer) -> dict[str, Any]:
    calls = [
        {
            "index": index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for index, call in enumerate(answer.calls)
    ]
    return {"tool_calls": calls} if calls else {}


def _reason(answer: FakeAnswer) -> str:
    return "tool_calls" if answer.calls else "stop"


def _usage(answer: FakeAnswer) -> dict[str, Any]:
    counts = answer.counts
    return {
        "prompt_tokens": counts.input,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens": counts.output,
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.input + counts.output,
    }


api: FakeApi = Chat()
