"""Turn a scripted turn into an answer, whatever the API: text, and calls of tools that the request has offered."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from posixpath import dirname
from typing import Any, Protocol

from runner.fake_model.script import Call, Turn
from runner.gateway.api import Counts

PIECE = 24  # characters of text in one event of a stream

_SHELLS = (
    "Bash",
    "exec_command",
    "shell_command",
    "run_shell_command",
    "shell",
    "developer__shell",
    "exec",
)
_WRITERS = ("Write", "write_file", "write")

# By which CLIs offer a tool of an MCP server: what stands before the server's name, and between that and the tool's.
_MCP_NAMES = (("mcp__", "__"), ("mcp_", "_"), ("", "__"))

Tools = Mapping[str, Mapping[str, Any] | None]  # parameters by name; ``None`` for a tool that takes text


@dataclass(frozen=True)
class ToolCall:
    """``arguments`` are the tool's parameters, or the text of one that takes text."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True)
class FakeAnswer:
    """An answer of the fake model. ``number`` is unique in a session."""

    number: int
    model: str
    think: str
    say: str
    calls: tuple[ToolCall, ...]
    counts: Counts


class FakeApi(Protocol):
    def tools(self, body: Mapping[str, Any]) -> Tools: ...

    def body(self, answer: FakeAnswer) -> Mapping[str, Any]:
        """Return the answer to a request that wants no stream."""

    def stream(self, answer: FakeAnswer) -> Sequence[bytes]:
        """Return the answer as server-sent events."""


class ToolMissing(Exception):
    """The request does not offer the tool that a turn needs. Never leaves the fake model."""


def answer_of(turn: Turn, number: int, model: str, tools: Tools, sent_bytes: int) -> FakeAnswer:
    """Turn a turn into an answer to a request with these tools. Raises ``ToolMissing``."""
    calls = []
    if turn.write is not None:
        calls.append(_write_call(f"call_{number}_w", tools, turn.write.path, turn.write.content))
    if turn.run is not None:
        calls.append(_shell_call(f"call_{number}_r", tools, turn.run))
    if turn.call is not None:
        calls.append(_any_call(f"call_{number}_c", tools, turn.call))
    text = f"{turn.think or ''}{turn.say or ''}{calls}"
    counts = Counts(fresh=sent_bytes // 4, output=len(text) // 4)
    if used := turn.usage:
        fresh = max(0, used.input - used.cached)
        counts = Counts(fresh=fresh, cached=used.cached, output=used.output, reasoning=used.reasoning)
    return FakeAnswer(
        number=number, model=model, think=turn.think or "", say=turn.say or "", calls=tuple(calls), counts=counts
    )


def pieces(text: str) -> list[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def _any_call(id: str, tools: Tools, call: Call) -> ToolCall:
    if call.server is None:
        return ToolCall(id, call.tool, call.arguments)
    names = [f"{before}{call.server}{between}{call.tool}" for before, between in _MCP_NAMES]
    name = next((name for name in names if name in tools), None)
    if name is None and tools.get("exec", ...) is None:  # a tool that takes a script, in which the others are functions
        script = f"const r = await tools.{names[0]}({json.dumps(call.arguments)}); text(JSON.stringify(r));"
        return ToolCall(id, "exec", script)
    if name is None:
        what = f"`{call.tool}` of MCP server `{call.server}`"
        raise ToolMissing(f"the turn calls {what}, which is not offered, only: {', '.join(tools)}")
    return ToolCall(id, name, call.arguments)


def _shell_call(id: str, tools: Tools, command: str) -> ToolCall:
    name = next((name for name in _SHELLS if name in tools), None)
    if name is None:
        raise ToolMissing(f"the turn runs a command, and no shell tool is offered, only: {', '.join(tools)}")
    parameters = tools[name]
    if parameters is None:
        code = f"const r = await tools.exec_command({{cmd: {json.dumps(command)}}}); text(JSON.stringify(r));"
        return ToolCall(id, name, code)
    key = "cmd" if "cmd" in parameters else "command"
    is_list = isinstance(parameters.get(key), dict) and parameters[key].get("type") == "array"
    return ToolCall(id, name, {key: ["bash", "-lc", command] if is_list else command})


def _write_call(id: str, tools: Tools, path: str, content: str) -> ToolCall:
    name = next((name for name in _WRITERS if tools.get(name)), None)
    parameters = tools[name] if name else None
    if name is None or parameters is None:
        folder, file, text = (shlex.quote(part) for part in (dirname(path) or ".", path, content))
        return _shell_call(id, tools, f"mkdir -p -- {folder} && printf %s {text} > {file}")
    place = "file_path" if "file_path" in parameters else "path"
    body = "file_text" if "file_text" in parameters else "content"
    return ToolCall(id, name, {place: path, body: content})
