"""Claude Code, by its ``stream-json``: the ``result`` line says how the turn ended, exit 0 does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from runner.agents._cli import Cli, Line, Turn, at, count, items, reason_of_status, text
from runner.model import Reason, Usage
from runner.ports.agent import Access, Preparation
from runner.ports.gateway import Api

_ENDS = {"error_max_turns": Reason.TURNS, "error_max_budget_usd": Reason.BUDGET}
_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "CLAUDE_CODE_MAX_RETRIES": "2",  # its default keeps it busy for three minutes with a key that is wrong
}


def _prepare(access: Access) -> Preparation:
    redirected = {"ANTHROPIC_BASE_URL": access.address} if access.address is not None else {}
    return Preparation({**_QUIET, "ANTHROPIC_API_KEY": access.key, **redirected})


def _read(lines: Iterable[Line]) -> Turn:
    turn = Turn()
    for line in lines:
        match line.get("type"):
            case "system" if line.get("subtype") == "init":
                turn = replace(turn, under_way=True)
            case "assistant":
                turn = replace(turn, under_way=True, finished=False)
            case "user":
                results = [part for part in items(line, "message", "content") if at(part, "type") == "tool_result"]
                turn = replace(turn, used=turn.used + sum(at(result, "is_error") is not True for result in results))
            case "result":
                turn = _ended(turn, line)
    return turn


def _ended(turn: Turn, line: Line) -> Turn:
    """The last of several ``result`` lines counts."""
    finished = line.get("subtype") == "success" and line.get("is_error") is False
    reason = _ENDS.get(text(line, "subtype")) or reason_of_status(line.get("api_error_status"))
    said = text(line, "result") or "; ".join(str(error) for error in items(line, "errors"))
    if said.startswith("Not logged in"):
        reason = Reason.AUTH
    denied = len(items(line, "permission_denials"))
    reason = None if finished else reason
    return Turn(finished=finished, reason=reason, said=said, denied=denied, used=turn.used, usage=_usage(line))


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


agent = Cli("claude", Api.ANTHROPIC, _prepare, _read)
