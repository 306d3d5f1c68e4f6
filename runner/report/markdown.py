"""Runs as Markdown, for the summary of a CI job or a ticket.

Text of agents and their commands only appears in code spans and fences, so that none of it is a link, a picture, HTML
or a heading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from runner.core.errors import Rejected, RunnerError, in_order
from runner.core.model import Check, Status
from runner.core.sanitize import escape_unprintable, sanitize
from runner.report import compare
from runner.report.format import MARKS, commands, duration
from runner.report.run_files import Account
from runner.report.text import cluster_line, isolation_line, mcp_lines, network_line, usage_lines

MOST = 1 << 20  # bytes of what GitHub shows of one step
_WIDEST = 500  # characters of a line
_SHOWN = 50  # checks, violations or warnings of a run
_CUT = "\n_Cut here: GitHub shows no more than 1 MiB of a step._\n"
_TICKS = re.compile("`+")


def render(accounts: Sequence[Account], failure: RunnerError | None = None, *, room: int = MOST) -> str:
    """Render runs, what kept others from starting, and a comparison of each matrix.

    At most ``room`` bytes: the end is left out, with a note. ``""`` when nothing fits.
    """
    parts = [] if failure is None else [_refusal(failure)]
    for group, members in compare.groups(accounts).items():
        rows = [compare.row_of(account) for account in members]
        parts.append(f"### {len(rows)} members of {code(group)}\n\n{compare.markdown(rows)}\n")
    parts += [part for account in accounts for part in _run(account)]
    return _within(parts, room)


def code(text: str) -> str:
    """Wrap foreign text in a code span."""
    shown = sanitize(text, _WIDEST).strip() or " "
    ticks = "`" * (1 + max(map(len, _TICKS.findall(shown)), default=0))
    padding = " " if "`" in shown else ""
    return f"{ticks}{padding}{shown}{padding}{ticks}"


def _within(parts: Iterable[str], room: int) -> str:
    whole = ""
    left = room - len(_CUT.encode())
    for part in parts:
        left -= len(part.encode(errors="replace"))
        if left < 0:
            return whole + _CUT if room >= len(_CUT.encode()) else ""
        whole += part
    return whole


def _run(account: Account) -> Iterator[str]:
    """Return a run in parts, of which the last can be left out."""
    record = account.record
    outcome = record.outcome
    taken = f" in {duration(record.seconds)}" if record.seconds is not None else ""
    rehearsed = " (a rehearsal: no model was asked)" if record.rehearsal is not None else ""
    because = f"{code(outcome.message)}\n\n" if outcome is not None and outcome.message else ""
    title = f"### {MARKS[record.status]} {code(record.name)} {record.status.value}{taken}{rehearsed}"
    facts = {
        "NETWORK OPEN": ", ".join(record.open_network),
        "run": record.id,
        "plan": record.plan,
        "isolation": isolation_line(record),
        "baseline": record.preloaded.headline if record.preloaded is not None else "",
        "model": "; ".join(usage_lines(record)),
        "agent ran": commands(record.commands) if record.commands is not None else "",
        "cluster": cluster_line(record.cluster) if record.cluster is not None else "",
        "network": network_line(record.network.values()) if record.network else "",
        "mcp": "; ".join(mcp_lines(record)),
        "snapshot": record.snapshot.commit if record.snapshot is not None else "",
    }
    listed = "".join(f"- {name} {code(value)}\n" for name, value in facts.items() if value)
    yield f"{title}\n\n{because}{listed}\n"
    yield _steps(account)
    yield _list("verified", [_check(check) for checks in record.checks.values() for check in checks])
    yield _list("violations of policy", [code(str(violation)) for violation in record.violations])
    yield _list("warnings", [f"{one} {code(message)}" for one, message in record.warnings])
    yield _list("LEFT BEHIND", [code(left) for left in record.left_behind])
    for name, tail in account.tails.items():
        yield f"<details><summary>the end of what {name} printed</summary>\n\n{fence(tail)}\n</details>\n\n"


def _steps(account: Account) -> str:
    lines = ["| step | | time | |\n| --- | --- | --- | --- |\n"]
    for name, step in account.record.steps.items():
        message = step.outcome.message if step.outcome is not None else ""
        cell = code(message).replace("|", "\\|") if message else ""
        lines.append(f"| {name} | {MARKS[step.status]} {step.status.value} | {duration(step.seconds)} | {cell} |\n")
    return "".join([*lines, "\n"]) if len(lines) > 1 else ""


def _check(check: Check) -> str:
    return f"{MARKS[Status.SUCCEEDED if check.ok else Status.FAILED]} {code(str(check))}"


def _list(title: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    more = [f"and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return f"{title}:\n\n" + "".join(f"- {item}\n" for item in [*items[:_SHOWN], *more]) + "\n"


def fence(lines: Sequence[str]) -> str:
    """Wrap foreign lines in a fenced block, with a final line break."""
    shown = [escape_unprintable(line.expandtabs()[:_WIDEST]) for line in lines]
    longest = max((len(ticks) for line in shown for ticks in _TICKS.findall(line)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}text\n" + "".join(f"{line}\n" for line in shown) + f"{ticks}\n"


def _refusal(failure: RunnerError) -> str:
    findings = failure.findings if isinstance(failure, Rejected) else (failure,)
    lines = [
        f"{one.severity} `{one.code}`{f' at {code(str(one.at))}' if one.at else ''}: {code(one.message)}"
        for one in in_order(findings)
    ]
    return "### ✗ stopped by an error\n\n" + _list("findings", lines)
