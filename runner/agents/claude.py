"""Claude Code, judged by its ``stream-json``: the ``result`` line says how the turn ended, exit 0 does not.

Its sub-runner makes it skip the settings, hooks, skills and MCP servers of the repository, and with them the
repository's instructions to agents. Those are imported by the file in the home directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from runner.agents._cli import (
    MCP_MARGIN,
    CliAgent,
    CommandLog,
    Line,
    TurnState,
    at,
    count,
    items,
    reason_of_status,
    text,
)
from runner.agents._stream_text import CLAUDE_EXIT, claude_text
from runner.core.model import Command, CommandStatus, Reason, Usage
from runner.ports.agent import AgentSetup, ModelAccess
from runner.ports.gateway import Api

_NOT_STARTED = "<tool_use_error>"  # before it began
_REFUSED = (f"{_NOT_STARTED}Blocked", "No such tool available", "requested permissions to", "Permission to use")
_KILLED = ("Exit code 137", "Exit code 143")
_ENDS = {"error_max_turns": Reason.TURNS, "error_max_budget_usd": Reason.BUDGET}
# Of many names, from documentation and older versions, those that the stream of 2.1.330 lists when `--tools` asks.
_TOOLS = (
    "Bash", "CronCreate", "CronDelete", "CronList", "Edit", "EnterWorktree", "ExitWorktree", "Glob", "Grep",
    "ListAgents", "Monitor", "NotebookEdit", "Read", "ReportFindings", "ScheduleWakeup", "SendMessage", "Skill",
    "Task", "TaskCreate", "TaskGet", "TaskList", "TaskStop", "TaskUpdate", "ToolSearch", "WebFetch", "WebSearch",
    "Workflow", "Write",
)  # fmt: skip
_MCP = ".claude/runner-mcp.json"  # as the sub-runner names it
_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "CLAUDE_CODE_MAX_RETRIES": "2",  # its default keeps it busy for three minutes with a key that is wrong
}


def _set_up(access: ModelAccess) -> AgentSetup:
    redirected = {"ANTHROPIC_BASE_URL": access.base_url} if access.base_url is not None else {}
    imports = f"@{access.workspace}/CLAUDE.md\n@{access.workspace}/AGENTS.md\n"
    env, files = {**_QUIET, "ANTHROPIC_API_KEY": access.key, **redirected}, {".claude/CLAUDE.md": imports}
    if access.mcp_servers:
        servers = {one.name: {"type": "http", "url": one.url} for one in access.mcp_servers}
        files[_MCP] = json.dumps({"mcpServers": servers})
        longest = max(one.timeout_seconds for one in access.mcp_servers) + MCP_MARGIN
        env["MCP_TOOL_TIMEOUT"] = str(round(longest * 1000))
    return AgentSetup(env=env, files=files)


def _read_turn(lines: Iterable[Line]) -> TurnState:
    turn = TurnState()
    for line in lines:
        match line.get("type"):
            case "system" if line.get("subtype") == "init":
                turn = replace(turn, under_way=True)
            case "assistant":
                turn = replace(turn, under_way=True, finished=False)
            case "user":
                results = list(_results(line))
                refused = sum(_denied(result) for result in results)
                used = sum(at(result, "is_error") is not True for result in results)
                turn = replace(turn, used=turn.used + used, denied=turn.denied + refused)
            case "result":
                turn = _end_turn(turn, line)
    return turn


def _results(line: Line) -> Iterator[Line]:
    return (part for part in items(line, "message", "content") if at(part, "type") == "tool_result")


def _result_text(result: Line) -> str:
    parts = items(result, "content")
    return text(result, "content") or " ".join(text(part, "text") for part in parts)


def _denied(result: Line) -> bool:
    """Tell whether the result of a tool call is that the CLI's own rules do not allow it."""
    said = _result_text(result)
    return at(result, "is_error") is True and not CLAUDE_EXIT.match(said) and any(words in said for words in _REFUSED)


def _commands(lines: Iterable[Line]) -> tuple[Command, ...]:
    calls = CommandLog()
    killed: list[str] = []  # when it is stopped it says so of its command, and then nothing more
    for line in lines:
        killed = [] if line.get("type") in ("assistant", "result") else killed
        match line.get("type"):
            case "assistant":
                for part in items(line, "message", "content"):
                    if at(part, "type") == "tool_use" and at(part, "name") == "Bash":
                        calls.ask(text(part, "id"), text(part, "input", "command"))
            case "user":
                for result in _results(line):
                    _end_command(calls, line, result)
                    killed += [text(result, "tool_use_id")] if _result_text(result).startswith(_KILLED) else []
    for id in killed:
        calls.end(id, status=CommandStatus.UNFINISHED)
    return calls.all()


def _end_command(calls: CommandLog, line: Line, result: Line) -> None:
    id = text(result, "tool_use_id")
    if _denied(result) or _result_text(result).startswith(_NOT_STARTED):
        calls.end(id, status=CommandStatus.DENIED)
    elif at(result, "is_error") is True:
        told = CLAUDE_EXIT.match(_result_text(result))
        calls.end(id, int(told[1]) if told else None)
    else:
        goes_on = at(line, "tool_use_result", "backgroundTaskId") is not None
        calls.end(id, None if goes_on else 0)


def _end_turn(turn: TurnState, line: Line) -> TurnState:
    """Apply a ``result`` line; the last of several counts."""
    finished = line.get("subtype") == "success" and line.get("is_error") is False
    reason = _ENDS.get(text(line, "subtype")) or reason_of_status(line.get("api_error_status"))
    said = text(line, "result") or "; ".join(str(error) for error in items(line, "errors"))
    if said.startswith("Not logged in"):
        reason = Reason.AUTH
    denied = max(turn.denied, len(items(line, "permission_denials")))
    reason = None if finished else reason
    return TurnState(finished=finished, reason=reason, said=said, denied=denied, used=turn.used, usage=_usage(line))


def _usage(line: Line) -> Usage:
    models = at(line, "modelUsage")
    used = Usage()
    for model in models.values() if isinstance(models, dict) else ():
        cached, written = count(model, "cacheReadInputTokens"), count(model, "cacheCreationInputTokens")
        used += Usage(
            input_tokens=count(model, "inputTokens") + cached + written,
            cached_tokens=cached,
            cache_write_tokens=written,
            output_tokens=count(model, "outputTokens"),
        )
    cost = line.get("total_cost_usd")
    return replace(used, cost_usd=float(cost) if isinstance(cost, int | float) else None)


agent = CliAgent(
    program="claude",
    api=Api.ANTHROPIC,
    set_up=_set_up,
    read_turn=_read_turn,
    package="@anthropic-ai/claude-code",
    display_line=claude_text,
    read_commands=_commands,
    transcript=re.compile(r"\.claude/projects/[\w.-]+/[\w-]+(/subagents/[\w.-]+)?\.jsonl", re.ASCII),
    tools=_TOOLS,
    writers=("Bash", "Write", "Edit", "NotebookEdit"),
    variables=("ANTHROPIC_", "CLAUDE_"),
    model_variable="CLAUDE_MODEL",
)
