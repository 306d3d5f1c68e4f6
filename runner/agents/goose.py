"""Goose, judged by its ``stream-json``. It exits 0 and says ``complete`` whatever happened: only a last message that
its model made, without a tool call, is a completed turn.

Hooks of plug-ins in a repository are run, and no setting prevents it that the repository could not undo.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import SplitResult, urlsplit

from msgspec.structs import replace

from runner.agents._cli import MCP_MARGIN, CliAgent, CommandLog, Line, TurnState, at, count, items, reason_of, text
from runner.agents._stream_text import goose_text
from runner.core.model import Command, CommandStatus, Reason, Usage
from runner.core.settings import shipped
from runner.ports.agent import AgentSetup, ModelAccess
from runner.ports.gateway import Api

_QUIET = {
    "GOOSE_PROVIDER": "openai",
    "GOOSE_MODE": "auto",
    "GOOSE_DISABLE_KEYRING": "1",
    "GOOSE_DISABLE_SESSION_NAMING": "true",  # by a request of its own, which would count as a turn
    "GOOSE_TELEMETRY_ENABLED": "false",
}
# Those of 1.52.0 that a profile has without a word; `skills` comes by the sub-runner, if the agent has any.
_PLATFORM = (
    "analyze", "apps", "chatrecall", "code_execution", "extensionmanager", "skills", "summarize", "summon", "todo",
    "tom",
)  # fmt: skip
_CONFIG = shipped("runners") / "context" / "goose-config.yaml"
_CONTEXT = {".config/goose/.goosehints": ".goosehints", ".goosehints": ".goosehints"}  # the first is where it looks
_COMPLAINTS = ("Ran into this error:", "Network error:")
_SHELLS = ("shell", "developer__shell")
_LIMITED = "maximum number of actions"
_REASONS = {"Authentication error": Reason.AUTH, "Rate limit exceeded": Reason.QUOTA}


def _set_up(access: ModelAccess) -> AgentSetup:
    redirected = _redirected(urlsplit(access.base_url)) if access.base_url is not None else {}
    model = f"GOOSE_MODEL: {json.dumps(access.model)}"
    config = re.sub(r"(?m)^GOOSE_MODEL:.*$", lambda _: model, _CONFIG.read_text(encoding="utf-8"))
    if access.mcp_servers:
        config += json.dumps({"extensions": _extensions(access)}).removeprefix("{").removesuffix("}") + "\n"
    env = {**_QUIET, "GOOSE_MODEL": access.model, "OPENAI_API_KEY": access.key, **redirected}
    return AgentSetup(env=env, files={".config/goose/config.yaml": config}, context=_CONTEXT)


def _extensions(access: ModelAccess) -> Mapping[str, object]:
    """Return the extensions of a profile: the servers, and not its own platform's, which are on unless it is told."""
    common: dict[str, object] = {"description": "", "bundled": False, "available_tools": []}
    off = {name: {**common, "enabled": False, "type": "platform", "name": name} for name in _PLATFORM}
    return off | {
        one.name: {
            **common,
            "enabled": True,
            "type": "streamable_http",
            "name": one.name,
            "uri": one.url,
            "timeout": round(one.timeout_seconds + MCP_MARGIN),
        }
        for one in access.mcp_servers
    }


def _redirected(url: SplitResult) -> dict[str, str]:
    """Split the base URL into host and the path down to the call, as Goose wants them."""
    host = f"{url.scheme}://{url.netloc}"
    return {"OPENAI_HOST": host, "OPENAI_BASE_PATH": f"{url.path.strip('/')}/chat/completions".lstrip("/")}


def _read_turn(lines: Iterable[Line]) -> TurnState:
    turn, answered, latest = TurnState(), False, ""
    for line in lines:
        match line.get("type"):
            case "message" if at(line, "message", "role") == "assistant":
                parts = items(line, "message", "content")
                made = at(line, "message", "metadata", "inference") is not None  # by the model, not by Goose itself
                answered = made and not any(at(part, "type") == "toolRequest" for part in parts)
                said = " ".join(text(part, "text") or text(part, "message") for part in parts)
                message = text(line, "message", "id")
                said = (turn.said if made and message and message == latest else "") + said  # it comes in pieces
                latest = message
                turn = replace(turn, under_way=made, said=said, reason=None if made else _reason(said.strip()))
            case "message":
                answers = [part for part in items(line, "message", "content") if at(part, "type") == "toolResponse"]
                ran = sum(at(answer, "toolResult", "status") == "success" for answer in answers)
                turn = replace(turn, used=turn.used + ran, denied=turn.denied + len(answers) - ran)
            case "complete":
                usage = _usage(line)
                turn = replace(turn, under_way=False, finished=answered and usage.tokens > 0, usage=usage)
    return replace(turn, said=turn.said.strip())


def _commands(lines: Iterable[Line]) -> tuple[Command, ...]:
    calls = CommandLog()
    for line in lines:
        for part in items(line, "message", "content"):
            asked, answer = at(part, "toolCall", "value"), at(part, "toolResult")
            if at(part, "type") == "toolRequest" and text(asked, "name") in _SHELLS:
                calls.ask(text(part, "id"), text(asked, "arguments", "command"))
            elif at(part, "type") == "toolResponse":
                denied = text(answer, "status") == "error"
                exit = at(answer, "value", "structuredContent", "exit_code")
                calls.end(text(part, "id"), exit, CommandStatus.DENIED if denied else CommandStatus.EXECUTED)
    return calls.all()


def _reason(said: str) -> Reason | None:
    if _LIMITED in said:
        return Reason.TURNS
    if not said.startswith(_COMPLAINTS):
        return None
    return next((reason for words, reason in _REASONS.items() if words in said), None) or reason_of(said)


def _usage(line: Line) -> Usage:
    cost = line.get("cost_usd")
    return Usage(
        input_tokens=count(line, "input_tokens"),
        cached_tokens=count(line, "cache_read_input_tokens"),
        cache_write_tokens=count(line, "cache_write_input_tokens"),
        output_tokens=count(line, "output_tokens"),
        cost_usd=float(cost) if isinstance(cost, int | float) else None,
    )


agent = CliAgent(
    program="goose",
    api=Api.OPENAI,
    set_up=_set_up,
    read_turn=_read_turn,
    package="@aaif/goose-binary-linux-x64",
    display_line=goose_text,
    read_commands=_commands,
    transcript=re.compile(r"\.local/share/goose/exports/[\w-]+\.json", re.ASCII),
    autorun_paths=(".agents/plugins",),
    variables=("GOOSE_",),
    image_files={".goosehints": ".goosehints", ".config/goose/config.yaml": "goose-config.yaml"},
)
