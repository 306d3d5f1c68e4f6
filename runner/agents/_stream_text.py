"""The text that a person who watches is shown of each CLI's stream: the model's words, and each tool as it is called.

One function per CLI, for one line of its stream. Text without a line break at its end is continued by the next; a
command is ``$`` and its text, any other tool is in brackets, as is the exit status of a command that failed, and an
error of the CLI itself begins with ``!``. Answers of tools are not shown: the log has them.
"""

from __future__ import annotations

import re
import shlex

from runner.agents._cli import Line, at, items, text

CLAUDE_EXIT = re.compile(r"Exit code (\d{1,3})\b")
GEMINI_EXIT = re.compile(r"Command exited with code: (\d{1,3})\Z")


def claude_text(line: Line) -> str | None:
    if line.get("type") == "user":
        results = (part for part in items(line, "message", "content") if at(part, "is_error") is True)
        return "".join(_exit_line(CLAUDE_EXIT.match(text(result, "content"))) or "" for result in results)
    if line.get("type") != "assistant":
        return None
    if line.get("is_api_error_message") is True:
        return _complaint("\n".join(text(part, "text") for part in items(line, "message", "content")))
    parts = (_claude_part(part) for part in items(line, "message", "content"))
    return "".join(part for part in parts if part)


def _claude_part(part: object) -> str | None:
    match at(part, "type"):
        case "text":
            return _line(text(part, "text"))
        case "tool_use":
            return _call(text(part, "name"), at(part, "input"))
    return None


def codex_text(line: Line) -> str | None:
    item = at(line, "item")
    match line.get("type"), at(item, "type"):
        case "item.started", "command_execution":
            return _line(f"$ {shell_script(text(item, 'command'))}")
        case "item.completed", "command_execution":
            return _status_line(at(item, "exit_code"))
        case "item.completed", "agent_message":
            return _line(text(item, "text"))
        case "item.started", "mcp_tool_call":
            return _call(f"{text(item, 'server')}.{text(item, 'tool')}", at(item, "arguments"))
        case ("error", _):
            return _complaint(text(line, "message"))
        case ("turn.failed", _):
            return _complaint(text(line, "error", "message"))
    return None


def shell_script(command: str) -> str:
    """Return the script of a shell command, without the shell around it."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    return words[2] if len(words) == 3 and words[1] in ("-c", "-lc") else command


def gemini_text(line: Line) -> str | None:
    match line.get("type"):
        case "message" if line.get("role") == "assistant":
            words = text(line, "content")
            return words if line.get("delta") else _line(words)
        case "tool_use":
            return _call(text(line, "tool_name"), line.get("parameters"))
        case "tool_result":
            return _exit_line(GEMINI_EXIT.match(text(line, "output")))
        case "error":
            return _complaint(text(line, "message"))
        case "result" if line.get("status") != "success":
            return _complaint(text(line, "error", "message"))
    return None


def goose_text(line: Line) -> str | None:
    """Return the text of a line; a message comes in several lines, each with a further piece."""
    if line.get("type") != "message":
        return None
    if at(line, "message", "role") == "user":
        results = (at(part, "toolResult", "value", "structuredContent") for part in items(line, "message", "content"))
        return "".join(_status_line(at(result, "exit_code")) or "" for result in results)
    if at(line, "message", "role") != "assistant":
        return None
    made = at(line, "message", "metadata", "inference") is not None
    said = ""
    for part in items(line, "message", "content"):
        words = text(part, "text") or text(part, "message")
        if call := at(part, "toolCall", "value"):
            words = _call(text(call, "name"), at(call, "arguments"))
        said += words if made else _complaint(words) or ""
    return said


_SHELLS = ("Bash", "run_shell_command", "shell", "developer__shell")


def _call(name: str, given: object) -> str:
    command = text(given, "command")
    if name in _SHELLS and command:
        return f"\n$ {command}\n"
    values = given.values() if isinstance(given, dict) else ()
    about = next((value for value in values if isinstance(value, str) and "\n" not in value), "")
    return f"\n[{name}{' ' * bool(about)}{about[:200]}]\n"


def _exit_line(told: re.Match[str] | None) -> str | None:
    return _status_line(int(told[1])) if told else None


def _status_line(status: object) -> str | None:
    return _line(f"[exit {status}]") if isinstance(status, int) and status else None


def _line(words: str) -> str | None:
    return f"\n{words}\n" if words else None


def _complaint(words: str) -> str | None:
    """Return an error of the CLI itself as lines that begin with ``!``."""
    return _line("\n".join(f"! {line}" for line in words.splitlines() if line.strip()))
