"""Codex, judged by ``codex exec --json``: a turn is completed only when it says so and has not failed.

Its built-in provider ignores ``OPENAI_BASE_URL`` and tries a websocket first, so it gets a provider of its own. That
one uses the key of ``codex login``, which the runner feeds by standard input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from msgspec.structs import replace

from runner.agents._cli import MCP_MARGIN, CliAgent, CommandLog, Line, TurnState, at, count, reason_of, text
from runner.agents._stream_text import codex_text, shell_script
from runner.core.model import Command, CommandStatus, Usage
from runner.ports.agent import AgentSetup, ModelAccess
from runner.ports.gateway import Api

_RETRIES = 2
_DECLINED = "declined"


def _set_up(access: ModelAccess) -> AgentSetup:
    config = "check_for_update_on_startup = false\n"  # of a repository it takes no settings unless it was told to
    config += 'web_search = "disabled"\n'  # by its provider: a workspace without network has none that way either
    if access.base_url is not None:
        address = json.dumps(access.base_url)
        config += (
            'model_provider = "gateway"\n'
            "[model_providers.gateway]\n"
            f'name = "gateway"\nbase_url = {address}\nwire_api = "responses"\nrequires_openai_auth = true\n'
            f"request_max_retries = {_RETRIES}\nstream_max_retries = {_RETRIES}\n"
        )
    config += "[analytics]\nenabled = false\n"
    for one in access.mcp_servers:
        config += f"[mcp_servers.{one.name}]\nurl = {json.dumps(one.url)}\n"
        config += f"tool_timeout_sec = {one.timeout_seconds + MCP_MARGIN}\n"
    return AgentSetup(env={}, files={".codex/config.toml": config}, login=("codex", "login", "--with-api-key"))


def _read_turn(lines: Iterable[Line]) -> TurnState:
    turn = TurnState()
    for line in lines:
        match line.get("type"):
            case "turn.started":
                turn = replace(turn, under_way=True, finished=False)
            case "item.started" | "item.completed" as event:
                turn = _update_turn(turn, line, done=event == "item.completed")
            case "turn.completed":
                turn = replace(turn, under_way=False, finished=True, usage=(turn.usage or Usage()) + _usage(line))
            case "turn.failed":
                said = text(line, "error", "message")
                return replace(turn, under_way=False, finished=False, said=said, reason=reason_of(said))
    return turn


def _update_turn(turn: TurnState, line: Line, *, done: bool) -> TurnState:
    match at(line, "item", "type"):
        case "agent_message":
            return replace(turn, said=text(line, "item", "text"))
        case "mcp_tool_call":
            return replace(turn, used=turn.used + (done and text(line, "item", "status") == "completed"))
        case "command_execution":
            denied = text(line, "item", "status") == _DECLINED
            return replace(turn, used=turn.used + (done and not denied), denied=turn.denied + (done and denied))
    return turn


def _commands(lines: Iterable[Line]) -> tuple[Command, ...]:
    calls = CommandLog()
    for line in lines:
        if at(line, "item", "type") != "command_execution":
            continue
        item = line["item"]
        calls.ask(text(item, "id"), shell_script(text(item, "command")))
        if line.get("type") == "item.completed":
            denied = text(item, "status") == _DECLINED
            calls.end(
                text(item, "id"), at(item, "exit_code"), CommandStatus.DENIED if denied else CommandStatus.EXECUTED
            )
    return calls.all()


def _usage(line: Line) -> Usage:
    return Usage(
        input_tokens=count(line, "usage", "input_tokens"),
        cached_tokens=count(line, "usage", "cached_input_tokens"),
        output_tokens=count(line, "usage", "output_tokens"),
        reasoning_tokens=count(line, "usage", "reasoning_output_tokens"),
        cost_usd=None,
    )


agent = CliAgent(
    program="codex",
    api=Api.OPENAI,
    set_up=_set_up,
    read_turn=_read_turn,
    package="@openai/codex",
    display_line=codex_text,
    read_commands=_commands,
    transcript=re.compile(r"\.codex/sessions/\d{4}/\d\d/\d\d/rollout-[\w-]+\.jsonl", re.ASCII),
    variables=("CODEX_", "OPENAI_"),
)
