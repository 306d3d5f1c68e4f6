"""Gemini CLI, judged by its ``stream-json``: the ``result`` line says how the turn ended. Stopped, it exits 0 in
silence.

It ignores the repository's own settings, hooks, extensions and MCP servers only in a folder that it does not trust.
There it has no mode in which everything is allowed, so a policy file lists what is; commands get a pattern of
arguments, for without that it would inspect them and refuse every ``git``. It also skips the repository's GEMINI.md
there, which is therefore named like one of the home directory's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from posixpath import relpath

from msgspec.structs import replace

from runner.agents._cli import MCP_MARGIN, CliAgent, CommandLog, Line, TurnState, at, count, reason_of, text
from runner.agents._stream_text import GEMINI_EXIT, gemini_text
from runner.core.model import Command, CommandStatus, Reason, Usage
from runner.ports.agent import AgentSetup, McpAccess, ModelAccess
from runner.ports.gateway import Api

_ATTEMPTS = 3  # the gateway has tried again already
_QUIET = {
    "GEMINI_CLI_TRUST_WORKSPACE": "false",
    "GEMINI_CLI_NO_RELAUNCH": "true",  # as its own child it would ignore TERM
    "TERM": "xterm-256color",
    "COLORTERM": "truecolor",
}
_CONTEXT = {".gemini/GEMINI.md": "GEMINI.md", "GEMINI.md": "GEMINI.md"}  # the first is where it looks


# It ends itself while its last lines wait in the pipe that its output goes to, and they would be lost; so each waits
# until it is written. What it starts is not to be loaded with this.
_DRAIN = ".gemini/drain.cjs"
_DRAIN_SCRIPT = "process.stdout._handle?.setBlocking?.(true)\ndelete process.env.NODE_OPTIONS\n"

_SHELL = "run_shell_command"
_REFUSED = ("policy_violation", "tool_not_registered")
_BLOCKED = "Blocked: "
_LOOP = "Loop detected"


# `ALL_BUILTIN_TOOL_NAMES` of 0.61.0, without those that need a person at the terminal.
_TOOLS = (
    "activate_skill", "get_internal_docs", "glob", "google_web_search", "grep_search", "invoke_agent",
    "list_directory", "list_mcp_resources", "read_file", "read_many_files", "read_mcp_resource", "replace",
    "run_shell_command", "update_topic", "web_fetch", "write_file", "write_todos",
)  # fmt: skip
_NATIVE = {  # its names for the tools of the triage document
    "Bash": "run_shell_command", "Edit": "replace", "Glob": "glob", "Grep": "grep_search", "Read": "read_file",
    "Skill": "activate_skill", "Write": "write_file",
}  # fmt: skip


def _set_up(access: ModelAccess) -> AgentSetup:
    project = relpath(f"{access.workspace}/GEMINI.md", f"{access.home}/.gemini")
    settings: dict[str, object] = {
        "security": {
            "auth": {"selectedType": "gemini-api-key"},  # or a redirected one has no way to log in
            "folderTrust": {"enabled": False},  # or it does not start in a folder that is not trusted
        },
        "general": {"enableAutoUpdate": False, "maxAttempts": _ATTEMPTS},
        "privacy": {"usageStatisticsEnabled": False},
        "context": {"fileName": ["GEMINI.md", project], "includeDirectories": list(access.extra_directories)},
    }
    if access.mcp_servers:
        settings |= _mcp_settings(access.mcp_servers)
        settings["context"] = {"fileName": ["GEMINI.md"], "includeDirectories": list(access.extra_directories)}
    tools = access.tools
    if tools is not None:
        settings["tools"] = {"core": tools or ["none"]}
    if access.max_turns is not None:
        settings["model"] = {"maxSessionTurns": access.max_turns}
    redirected = {"GOOGLE_GEMINI_BASE_URL": access.base_url} if access.base_url is not None else {}
    drained = {"NODE_OPTIONS": f"--require={json.dumps(f'{access.home}/{_DRAIN}')}"}
    env = {**_QUIET, "GEMINI_API_KEY": access.key, **redirected, **drained}
    files = {".gemini/settings.json": json.dumps(settings), ".gemini/policies/runner.toml": _policy(access)}
    return AgentSetup(env=env, files={**files, _DRAIN: _DRAIN_SCRIPT}, context=_CONTEXT)


def _mcp_settings(servers: Sequence[McpAccess]) -> dict[str, object]:
    """Return the settings for servers.

    It connects to none in a folder that it does not trust, so its sub-runner lets it trust that one once it has read
    all settings, the repository's not among them. No hook may run then.
    """
    return {
        "mcpServers": {
            one.name: {"httpUrl": one.url, "timeout": round((one.timeout_seconds + MCP_MARGIN) * 1000)}
            for one in servers
        },
        "mcp": {"allowed": [one.name for one in servers]},
        "hooksConfig": {"enabled": False},
    }


def _policy(access: ModelAccess) -> str:
    tools = access.tools
    if tools is None:
        return _rule("*", 500) + _rule(_SHELL, 600, any_arguments=True)
    rules = _rule("*", 500, decision="deny")
    rules += "".join(_rule(f"mcp_{one.name}_*", 600) for one in access.mcp_servers)
    rules += "".join(_rule(tool, 600, any_arguments=tool == _SHELL) for tool in tools)
    return rules


def _rule(tool: str, priority: int, *, decision: str = "allow", any_arguments: bool = False) -> str:
    pattern = 'argsPattern = "."\n' if any_arguments else ""
    return (
        f'[[rule]]\ntoolName = "{tool}"\n{pattern}decision = "{decision}"\npriority = {priority}\n'
        "allowRedirection = true\n"
    )


def _read_turn(lines: Iterable[Line]) -> TurnState:
    turn, saying = TurnState(), False  # what it says comes in pieces
    for line in lines:
        match line.get("type"):
            case "init":
                turn = replace(turn, under_way=True)
            case "message" if line.get("role") == "assistant":
                words = text(line, "content")
                turn = replace(turn, said=turn.said + words if saying else words, reason=None)
                saying = True
            case "tool_use":
                turn, saying = replace(turn, reason=None), False
            case "tool_result":
                denied = _denied(line)
                used = line.get("status") == "success" and not denied
                turn = replace(turn, used=turn.used + used, denied=turn.denied + denied)
            case "error":
                complaint, why = text(line, "message"), _stop_reason(line)
                turn, saying = replace(turn, said=complaint if why else turn.said or complaint, reason=why), False
            case "result":
                turn = _end_turn(turn, line)
    return turn


def _stop_reason(line: Line) -> Reason | None:
    """Return the reason for which an error ends the work, if nothing follows it: a loop is reported as a warning."""
    said = text(line, "message")
    if "session turns" in said:
        return Reason.TURNS
    return Reason.CUT_OFF if line.get("severity") == "error" or said.startswith(_LOOP) else None


def _denied(line: Line) -> bool:
    blocked = text(line, "output").startswith(_BLOCKED)  # as a success, for the model to try otherwise
    return blocked if line.get("status") == "success" else text(line, "error", "type") in _REFUSED


def _commands(lines: Iterable[Line]) -> tuple[Command, ...]:
    calls = CommandLog()
    for line in lines:
        match line.get("type"):
            case "tool_use" if line.get("tool_name") == _SHELL:
                calls.ask(text(line, "tool_id"), text(line, "parameters", "command"))
            case "tool_result":
                told = GEMINI_EXIT.match(text(line, "output"))
                exit = int(told[1]) if told else None  # of commands that printed something it does not say
                calls.end(
                    text(line, "tool_id"), exit, CommandStatus.DENIED if _denied(line) else CommandStatus.EXECUTED
                )
    return calls.all()


def _end_turn(turn: TurnState, line: Line) -> TurnState:
    usage = _usage(line)
    if line.get("status") == "success":
        return replace(turn, under_way=False, finished=turn.reason is None, usage=usage)
    said = text(line, "error", "message") or turn.said
    is_limit = at(line, "error", "type") == "FatalTurnLimitedError"
    reason = Reason.TURNS if is_limit else reason_of(said) or turn.reason
    return replace(turn, under_way=False, said=said, reason=reason, usage=usage)


def _usage(line: Line) -> Usage:
    return Usage(
        input_tokens=count(line, "stats", "input_tokens"),
        cached_tokens=count(line, "stats", "cached"),
        output_tokens=count(line, "stats", "output_tokens"),
        cost_usd=None,
    )


agent = CliAgent(
    program="gemini",
    api=Api.GEMINI,
    set_up=_set_up,
    read_turn=_read_turn,
    package="@google/gemini-cli",
    display_line=gemini_text,
    read_commands=_commands,
    exit_reasons={41: Reason.AUTH, 173: Reason.QUOTA},  # no key; 429 as a status of one byte
    noise=re.compile(rb"Project hooks disabled|\[STARTUP\]"),
    transcript=re.compile(r"\.gemini/tmp/[\w.-]+/chats/session-[\w.-]+\.jsonl", re.ASCII),
    tools=_TOOLS,
    writers=("run_shell_command", "write_file", "replace"),
    native_names=_NATIVE,
    variables=("GEMINI_", "GOOGLE_"),
    image_files={"GEMINI.md": "GEMINI.md"},
)
