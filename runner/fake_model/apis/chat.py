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

    def answer(self, said: FakeAnswer) -> Mapping[str, Any]:
        message = {"role": "assistant", "content": said.say or None, **_calls(said)}
        choice = {"index": 0, "message": message, "finish_reason": _reason(said)}
        return {**_head(said, "chat.completion"), "choices": [choice], "usage": _usage(said)}

    def stream(self, said: FakeAnswer) -> Sequence[bytes]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": piece} for piece in pieces(said.say)]
        deltas += [_calls(said)] if said.calls else []
        head = _head(said, "chat.completion.chunk")
        events = [event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) for delta in deltas]
        end = event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _reason(said)}]})
        return [*events, end, event({**head, "choices": [], "usage": _usage(said)}), b"data: [DONE]\n\n"]


def _head(said: FakeAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{said.number}", "object": kind, "created": 0, "model": said.model}


def _calls(said: FakeAnswer) -> dict[str, Any]:
    calls = [
        {
            "index": index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for index, call in enumerate(said.calls)
    ]
    return {"tool_calls": calls} if calls else {}


def _reason(said: FakeAnswer) -> str:
    return "tool_calls" if said.calls else "stop"


def _usage(said: FakeAnswer) -> dict[str, Any]:
    counts = said.counts
    return {
        "prompt_tokens": counts.input,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens": counts.output,
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.input + counts.output,
    }


api: FakeApi = Chat()
