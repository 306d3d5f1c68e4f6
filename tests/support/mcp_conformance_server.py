"""A server of MCP, with no library, that has what the protocol's conformance suite asks servers for."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="  # of one pixel
WAV = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAAAAA=="
IMAGE = {"type": "image", "data": PNG, "mimeType": "image/png"}
LOGS = ("Tool execution started", "Tool processing data", "Tool execution completed")
NAMED = {"username": {"type": "string", "description": "who"}, "email": {"type": "string", "description": "where"}}
DEFAULTS = {
    "name": {"type": "string", "default": "John Doe"},
    "age": {"type": "integer", "default": 30},
    "score": {"type": "number", "default": 95.5},
    "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    "verified": {"type": "boolean", "default": True},
}
TITLED = [{"const": f"value{n}", "title": f"{word} Option"} for n, word in ((1, "First"), (2, "Second"), (3, "Third"))]
ENUMS = {
    "untitledSingle": {"type": "string", "enum": ["option1", "option2", "option3"]},
    "titledSingle": {"type": "string", "oneOf": TITLED},
    "legacyEnum": {"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": ["One", "Two", "Three"]},
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": ["option1", "option2", "option3"]}},
    "titledMulti": {"type": "array", "items": {"anyOf": TITLED}},
}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}},
    },
    "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
    "additionalProperties": False,
}
ASKED = {
    "test_elicitation": {"properties": NAMED, "required": [*NAMED]},
    "test_elicitation_sep1034_defaults": {"properties": DEFAULTS},
    "test_elicitation_sep1330_enums": {"properties": ENUMS},
}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def resource(uri: str, value: str, kind: str = "text/plain") -> dict[str, Any]:
    return {"type": "resource", "resource": {"uri": uri, "mimeType": kind, "text": value}}


CONTENT: dict[str, list[dict[str, Any]]] = {
    "test_simple_text": [text("This is a simple text response for testing.")],
    "test_image_content": [IMAGE],
    "test_audio_content": [{"type": "audio", "data": WAV, "mimeType": "audio/wav"}],
    "test_embedded_resource": [resource("test://embedded-resource", "This is an embedded resource content.")],
    "test_multiple_content_types": [
        text("Multiple content types test:"),
        IMAGE,
        resource("test://mixed-content-resource", '{"test":"data","value":123}', "application/json"),
    ],
}
PROMPTS: dict[str, tuple[str, ...]] = {
    "test_simple_prompt": (),
    "test_prompt_with_arguments": ("arg1", "arg2"),
    "test_prompt_with_embedded_resource": ("resourceUri",),
    "test_prompt_with_image": (),
}
RESOURCES = ("test://static-text", "test://static-binary", "test://watched-resource")
CAPABILITIES: dict[str, Any] = {
    "tools": {},
    "prompts": {},
    "resources": {"subscribe": True},
    "logging": {},
    "completions": {},
}


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def ask(method: str, params: dict[str, Any]) -> Any:
    say(id="asked", method=method, params=params)
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("id") == "asked":
            return message.get("result", message.get("error"))
    return None


def call(name: str, arguments: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    if name in CONTENT:
        return {"content": CONTENT[name]}
    if name == "test_error_handling":
        return {"isError": True, "content": [text("This tool intentionally returns an error for testing")]}
    if name == "test_tool_with_logging":
        for said in LOGS:
            say(method="notifications/message", params={"level": "info", "data": said})
            time.sleep(0.05)
    if name == "test_tool_with_progress" and "progressToken" in meta:
        for done in (0, 50, 100):
            told = {"progressToken": meta["progressToken"], "progress": done, "total": 100}
            say(method="notifications/progress", params=told)
            time.sleep(0.05)
    if name == "test_sampling":
        messages = [{"role": "user", "content": text(arguments["prompt"])}]
        answer = ask("sampling/createMessage", {"messages": messages, "maxTokens": 100})
        return {"content": [text(f"LLM response: {answer['content']['text']}")]}
    if name in ASKED:
        schema = {"type": "object", **ASKED[name]}
        answer = ask("elicitation/create", {"message": arguments.get("message", "who?"), "requestedSchema": schema})
        action, content = answer["action"], json.dumps(answer.get("content"))
        return {"content": [text(f"Elicitation completed: action={action}, content={content}")]}
    return {"content": [text("done")]}


def tools() -> list[dict[str, Any]]:
    names = [*CONTENT, "test_error_handling", "test_tool_with_logging", "test_tool_with_progress", *ASKED]
    wanted = {"test_sampling": "prompt", "test_elicitation": "message"}
    found = []
    for name in [*names, "test_sampling"]:
        properties = {wanted[name]: {"type": "string"}} if name in wanted else {}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        found.append({"name": name, "description": name, "inputSchema": schema})
    return [*found, {"name": "json_schema_2020_12_tool", "description": "schema", "inputSchema": SCHEMA}]


def prompt(name: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    if name == "test_simple_prompt":
        content = [text("This is a simple prompt for testing.")]
    elif name == "test_prompt_with_arguments":
        content = [text(f"Prompt with arguments: arg1='{given['arg1']}', arg2='{given['arg2']}'")]
    elif name == "test_prompt_with_image":
        content = [IMAGE, text("Please analyze the image above.")]
    else:
        content = [
            resource(given["resourceUri"], "Embedded resource content for testing."),
            text("Please process the embedded resource above."),
        ]
    return [{"role": "user", "content": one} for one in content]


def read(uri: str) -> dict[str, Any]:
    if uri == "test://static-binary":
        return {"uri": uri, "mimeType": "image/png", "blob": PNG}
    if uri.startswith("test://template/"):
        id = uri.split("/")[3]
        body = json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})
        return {"uri": uri, "mimeType": "application/json", "text": body}
    return {"uri": uri, "mimeType": "text/plain", "text": "This is the content of the static text resource."}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        server = {"name": "conformance", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": CAPABILITIES, "serverInfo": server}
    if method == "tools/list":
        return {"tools": tools()}
    if method == "tools/call":
        return call(params["name"], params.get("arguments") or {}, params.get("_meta") or {})
    if method == "prompts/list":
        described = {name: [{"name": one, "required": True} for one in wanted] for name, wanted in PROMPTS.items()}
        return {"prompts": [{"name": one, "description": one, "arguments": described[one]} for one in PROMPTS]}
    if method == "prompts/get":
        return {"messages": prompt(params["name"], params.get("arguments") or {})}
    if method == "resources/list":
        return {"resources": [{"uri": one, "name": one, "description": one} for one in RESOURCES]}
    if method == "resources/templates/list":
        template = {"uriTemplate": "test://template/{id}/data", "name": "template", "description": "a template"}
        return {"resourceTemplates": [template]}
    if method == "resources/read":
        return {"contents": [read(params["uri"])]}
    if method == "completion/complete":
        return {"completion": {"values": [], "total": 0, "hasMore": False}}
    return {}


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            say(id=message["id"], result=answer(message["method"], message.get("params") or {}))


if __name__ == "__main__":
    main()
