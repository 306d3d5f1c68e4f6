"""Compare runs side by side, members of a matrix or any others: how each ended, what it took, and its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from runner.core.codec import plain
from runner.core.model import Status
from runner.core.sanitize import sanitize
from runner.plan.model import Json
from runner.report.format import MARKS, columns, cost, count, duration, others, size
from runner.report.run_files import Account, report_bytes, sections, used

FORMAT = "runner/comparison/v1"
WIDEST = 40  # columns of a cell

_HEADS = ("member", "outcome", "time", "tokens", "cost", "commands", "sections", "report")


class Row(Struct, frozen=True, kw_only=True):
    """One run. ``None`` stands for what it lacks, or is unknown: a report, a price, an agent's commands.

    ``sections`` counts those of ``sections_wanted`` that the report has.
    """

    run: str
    name: str
    agent: str
    model: str
    incident: str
    status: Status
    reason: str | None
    seconds: float | None
    tokens: int
    cost_usd: float | None
    executed: int | None
    denied: int | None
    unfinished: int | None
    sections: int | None
    sections_wanted: int | None
    report_bytes: int | None
    rehearsal: bool


def row_of(account: Account) -> Row:
    record = account.record
    usage, found = used(record), sections(record)
    outcome, commands = record.outcome, record.commands
    return Row(
        run=record.id,
        name=record.name,
        agent=account.agent,
        model=account.model,
        incident=account.incident,
        status=record.status,
        reason=outcome.reason.value if outcome is not None and outcome.reason is not None else None,
        seconds=record.seconds,
        tokens=usage.tokens,
        cost_usd=usage.cost_usd,
        executed=commands.executed if commands is not None else None,
        denied=commands.denied if commands is not None else None,
        unfinished=commands.unfinished if commands is not None else None,
        sections=found[0] if found else None,
        sections_wanted=found[1] if found else None,
        report_bytes=report_bytes(record),
        rehearsal=record.rehearsal is not None,
    )


def groups(accounts: Sequence[Account]) -> Mapping[str, Sequence[Account]]:
    """Group the members of each matrix with several, in the order of the accounts."""
    found: dict[str, list[Account]] = {}
    for account in accounts:
        found.setdefault(account.group, []).append(account)
    return {group: members for group, members in found.items() if group and len(members) > 1}


def document(rows: Sequence[Row]) -> Json:
    return {"format": FORMAT, "members": [plain(row) for row in rows]}


def text(rows: Sequence[Row]) -> str:
    """Render a table for a terminal, without empty columns and without a final line break."""
    cells = [[sanitize(cell, WIDEST) for cell in line] for line in table(rows)]
    widths = [max(columns(line[at]) for line in cells) for at in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell + " " * (width - columns(cell)) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def markdown(rows: Sequence[Row]) -> str:
    """Render a table of Markdown, with a final line break."""
    head, *body = table(rows)
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells of all rows below those of their heads, without empty columns."""
    lines = [list(_HEADS), *(_cells(row) for row in rows)]
    if len({row.name for row in rows}) < len(rows):
        for line, row in zip(lines[1:], rows, strict=True):
            line[0] += f" {row.run}"
    filled = [at for at in range(len(_HEADS)) if any(line[at] for line in lines[1:])]
    return [[line[at] for at in filled] for line in lines]


def _cells(row: Row) -> list[str]:
    reason = f": {row.reason}" if row.reason and row.reason != row.status.value else ""
    return [
        row.name,
        f"{MARKS[row.status]} {row.status.value}{reason}{' (rehearsal)' * row.rehearsal}",
        duration(row.seconds),
        count(row.tokens) if row.tokens else "",
        cost(row.cost_usd) if row.tokens and row.cost_usd is not None else "",
        _commands(row),
        f"{row.sections} of {row.sections_wanted}" if row.sections_wanted else "",
        size(row.report_bytes) + "B" * (row.report_bytes < 1024) if row.report_bytes is not None else "",
    ]


def _commands(row: Row) -> str:
    """Count all that ran, and those that were cut off or refused."""
    if row.executed is None or row.denied is None or row.unfinished is None:
        return ""
    return f"{row.executed + row.unfinished}{others(row.denied, row.unfinished)}"
