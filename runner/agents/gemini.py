"""Gemini CLI, by its ``stream-json``: the ``result`` line says how the turn ended. Stopped, it exits 0 in silence."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from runner.agents._cli import Cli, Line, Turn, at, count, reason_of, text
from runner.model import Reason, Usage
from runner.ports.agent import Access, Preparation
from runner.ports.gateway import Api

_QUIET = {
    "GEMINI_CLI_TRUST_WORKSPACE": "true",
    "GEMINI_CLI_NO_RELAUNCH": "true",  # as its own child it would ignore TERM
    "TERM": "xterm-256color",
    "COLORTERM": "truecolor",
}


def _prepare(access: Access) -> Preparation:
    settings: dict[str, object] = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},  # or a redirected one has no way to log in
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
    }
    if access.turns is not None:
        settings["model"] = {"maxSessionTurns": access.turns}
    redirected = {"GOOGLE_GEMINI_BASE_URL": access.address} if access.address is not None else {}
    env = {**_QUIET, "GEMINI_API_KEY": access.key, **redirected}
    return Preparation(env, {".gemini/settings.json": json.dumps(settings)})


def _read(lines: Iterable[Line]) -> Turn:
    turn, saying = Turn(), False  # what it says comes in pieces
    for line in lines:
        match line.get("type"):
            case "init":
                turn = replace(turn, under_way=True)
            case "message" if line.get("role") == "assistant":
                words = text(line, "content")
                turn = replace(turn, said=turn.said + words if saying else words)
                saying = True
            case "tool_use":
                saying = False
            case "tool_result":
                turn = replace(turn, used=turn.used + (line.get("status") == "success"))
            case "result":
                turn = _ended(turn, line)
    return turn


def _ended(turn: Turn, line: Line) -> Turn:
    usage = _usage(line)
    if line.get("status") == "success":
        return replace(turn, under_way=False, finished=True, usage=usage)
    said = text(line, "error", "message")
    reason = Reason.TURNS if at(line, "error", "type") == "FatalTurnLimitedError" else reason_of(said)
    return replace(turn, under_way=False, said=said, reason=reason, usage=usage)


def _usage(line: Line) -> Usage:
    return Usage(
        input_tokens=count(line, "stats", "input_tokens"),
        cached_tokens=count(line, "stats", "cached"),
        output_tokens=count(line, "stats", "output_tokens"),
        cost_usd=None,
    )


agent = Cli("gemini", Api.GEMINI, _prepare, _read)
