"""Goose, by its ``stream-json``. It exits 0 and says ``complete`` whatever happened: only a last message that its model
made, without a call for a tool, is a completed turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from runner.agents._cli import Cli, Line, Turn, at, count, items, reason_of, text
from runner.model import Reason, Usage
from runner.ports.agent import Access, Preparation
from runner.ports.gateway import Api

_QUIET = {
    "GOOSE_PROVIDER": "openai",
    "GOOSE_MODE": "auto",
    "GOOSE_DISABLE_KEYRING": "1",
    "GOOSE_TELEMETRY_ENABLED": "false",
}
_COMPLAINTS = ("Ran into this error:", "Network error:")
_LIMITED = "maximum number of actions"
_REASONS = {"Authentication error": Reason.AUTH, "Rate limit exceeded": Reason.QUOTA}


def _prepare(access: Access) -> Preparation:
    redirected = {"OPENAI_HOST": access.address} if access.address is not None else {}
    config = f"GOOSE_PROVIDER: openai\nGOOSE_MODEL: {json.dumps(access.model)}\n"
    env = {**_QUIET, "GOOSE_MODEL": access.model, "OPENAI_API_KEY": access.key, **redirected}
    return Preparation(env, {".config/goose/config.yaml": config})


def _read(lines: Iterable[Line]) -> Turn:
    turn, answered = Turn(), False
    for line in lines:
        match line.get("type"):
            case "message" if at(line, "message", "role") == "assistant":
                parts = items(line, "message", "content")
                made = at(line, "message", "metadata", "inference") is not None  # by the model, not by Goose itself
                answered = made and not any(at(part, "type") == "toolRequest" for part in parts)
                said = " ".join(text(part, "text") or text(part, "message") for part in parts).strip()
                turn = replace(turn, under_way=made, said=said, reason=None if made else _reason(said))
            case "message":
                answers = [part for part in items(line, "message", "content") if at(part, "type") == "toolResponse"]
                ran = sum(at(answer, "toolResult", "status") == "success" for answer in answers)
                turn = replace(turn, used=turn.used + ran)
            case "complete":
                usage = _usage(line)
                turn = replace(turn, under_way=False, finished=answered and usage.tokens > 0, usage=usage)
    return turn


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


agent = Cli("goose", Api.OPENAI, _prepare, _read)
