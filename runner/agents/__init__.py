"""Agent CLIs: one module each, which judges the CLI's output and holds all that is particular to it.

What they share is for those of other distributions too.
"""

from __future__ import annotations

from runner.agents._cli import (
    CliAgent,
    CommandLog,
    Line,
    TurnState,
    at,
    count,
    items,
    line_of,
    lines,
    reason_of,
    reason_of_status,
    text,
)

__all__ = [
    "CliAgent",
    "CommandLog",
    "Line",
    "TurnState",
    "at",
    "count",
    "items",
    "line_of",
    "lines",
    "reason_of",
    "reason_of_status",
    "text",
]
