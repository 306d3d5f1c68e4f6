"""The fake model's Responses API of OpenAI."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.fake_model.api import FakeAnswer, FakeApi, ToolCall, Tools, event, pieces
from runner.gateway.api import inner, objects

_OF_MCP = "mcp__"  # begins the namespace of an MCP server


class Responses:
    def tools(self, body: Mapping[str, Any]) -> Tools:
        """List the tools of the request, of its items and of their namespaces; the name of one of an MCP server begins
        with that of its namespace.
        """
        places: list[Mapping[str, Any]] = [body, *objects(body.get("input"))]
        found: dict[str, Mapping[str, Any] | None] = {}
        while places:
            place = places.pop()
            namespace = str(place.get("name")) if place.get("type") == "namespace" else ""
            before = f"{namespace}__" if namespace.startswith(_OF_MCP) else ""
            for tool in objects(place.get("tools")):
                if tool.get("type") == "namespace":
                    places.append(tool)
                else:
                    is_text = tool.get("type") == "custom"
                    name = f"{before}{tool.get('name')}"
                    found[name] = None if is_text else inner(tool, "parameters", "properties")
        return found

    def body(self, answer: FakeAnswer) -> Mapping[str, Any]:
        return _response(answer, "completed", list(_items(answer)))

    def stream(self, answer: FakeAnswer) -> Sequence[bytes]:
        events = [_event("response.created", response=_response(answer, "in_progress", []))]
        for index, item in enumerate(_items(answer)):
            place = {"output_index": index, "item_id": item["id"]}
            events.append(_event("response.output_item.added", output_index=index, item={**item, **_empty(item)}))
            if item["type"] == "message":
                text = {**place, "content_index": 0}
                events += [_event("response.output_text.delta", **text, delta=piece) for piece in pieces(answer.say)]
            events.append(_event("response.output_item.done", output_index=index, item=item))
        events.append(_event("response.completed", response=self.body(answer)))
        return [event({**fields, "sequence_number": at}, str(fields["type"])) for at, fields in enumerate(events)]


def _event(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": name, **fields}


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": [], "status": "in_progress"} if item["type"] == "message" else {}


def _response(answer: FakeAnswer, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    counts = answer.counts
    usage = {
        "input_tokens": counts.input,
        "input_tokens_details": {"cached_tokens": counts.cached},
        "output_tokens": counts.output,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.input + counts.output,
    }
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "model": answer.model,
        "output": output,
        "usage": usage if status == "completed" else None,
    }


def _items(answer: FakeAnswer) -> Iterable[dict[str, Any]]:
    if answer.think:
        summary = [{"type": "summary_text", "text": answer.think}]
        yield {"type": "reasoning", "id": f"rs_{answer.number}", "summary": summary, "encrypted_content": None}
    if answer.say:
        content = [{"type": "output_text", "text": answer.say, "annotations": []}]
        yield {
            "type": "message",
            "id": f"msg_{answer.number}",
            "role": "assistant",
            "status": "completed",
            "content": content,
        }
    yield from map(_call, answer.calls)


def _call(call: ToolCall) -> dict[str, Any]:
    common = {"id": f"fc_{call.id}", "call_id": call.id, "name": call.name, "status": "completed"}
    if isinstance(call.arguments, str):
        return {**common, "type": "custom_tool_call", "namespace": "functions", "input": call.arguments}
    if call.name.startswith(_OF_MCP) and (parts := call.name.removeprefix(_OF_MCP).partition("__"))[1]:
        common |= {"namespace": f"{_OF_MCP}{parts[0]}", "name": parts[2]}
    return {**common, "type": "function_call", "arguments": json.dumps(call.arguments)}


api: FakeApi = Responses()
