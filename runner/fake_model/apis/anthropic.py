"""The fake model's Messages API of Anthropic."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runner.fake_model.api import FakeAnswer, FakeApi, Tools, event, pieces
from runner.gateway.api import inner, objects


class Anthropic:
    def tools(self, body: Mapping[str, Any]) -> Tools:
        return {str(tool.get("name")): inner(tool, "input_schema", "properties") for tool in objects(body.get("tools"))}

    def body(self, answer: FakeAnswer) -> Mapping[str, Any]:
        return {**_message(answer, _blocks(answer)), "stop_reason": _reason(answer), "usage": _usage(answer)}

    def stream(self, answer: FakeAnswer) -> Sequence[bytes]:
        start = {**_message(answer, []), "stop_reason": None, "usage": {**_usage(answer), "output_tokens": 1}}
        events = [event({"type": "message_start", "message": start}, "message_start")]
        for index, block in enumerate(_blocks(answer)):
            empty, deltas = _block_deltas(block)
            events.append(_block("start", index, content_block=empty))
            events += [_block("delta", index, delta=delta) for delta in deltas]
            events.append(_block("stop", index))
        end = {"type": "message_delta", "delta": {"stop_reason": _reason(answer)}, "usage": _usage(answer)}
        return [*events, event(end, "message_delta"), event({"type": "message_stop"}, "message_stop")]


def _message(answer: FakeAnswer, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_sequence": None,
    }


def _blocks(answer: FakeAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.think:
        blocks.append({"type": "thinking", "thinking": answer.think, "signature": "rehearsed"})
    if answer.say:
        blocks.append({"type": "text", "text": answer.say})
    return blocks + [
        {"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name, "input": call.arguments}
        for call in answer.calls
    ]


def _block_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as a stream begins it, and the deltas that fill it."""
    match block["type"]:
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
            signed = {"type": "signature_delta", "signature": block["signature"]}
            return {**block, "thinking": "", "signature": ""}, [*deltas, signed]
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
    text = json.dumps(block["input"])
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(text)]


def _block(what: str, index: int, **fields: Any) -> bytes:
    name = f"content_block_{what}"
    return event({"type": name, "index": index, **fields}, name)


def _reason(answer: FakeAnswer) -> str:
    return "tool_use" if answer.calls else "end_turn"


def _usage(answer: FakeAnswer) -> dict[str, int]:
    counts = answer.counts
    return {
        "input_tokens": counts.fresh,
        "cache_read_input_tokens": counts.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts.output,
    }


api: FakeApi = Anthropic()
