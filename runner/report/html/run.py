"""The page of a run, and of several beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from runner.core.model import Command
from runner.events.record import RunRecord
from runner.report import compare, progress, text
from runner.report.format import commands
from runner.report.html.diff import files_of
from runner.report.html.excerpt import Excerpt
from runner.report.html.investigation import MOST, CitedLines, render_report
from runner.report.html.render import render
from runner.report.run_files import Account, blamed
from runner.report.triage import Result, conclusions


class StoredFile(Struct, frozen=True):
    """A file of a run's directory; without a digest when it is too large."""

    name: str
    bytes: int
    sha256: str | None


class RunContents(Struct, frozen=True, kw_only=True):
    """A run with what its page shows beyond its account.

    ``actions`` are labels with commands. ``printed`` is the output of each step, ``commands`` are those of the agent.
    ``files`` is ``None`` where the checksums of an archive stand beside the page.
    """

    account: Account
    result: Result
    actions: Sequence[tuple[str, str]]
    printed: Mapping[str, Excerpt]
    commands: Sequence[Command]
    patch: Excerpt
    cited: Sequence[CitedLines]
    files: Sequence[StoredFile] | None


def render_run(contents: RunContents) -> str:
    """Render the page of one run."""
    return render("run.html", **values_of(contents))


def values_of(contents: RunContents) -> dict[str, object]:
    """Return what the templates of a run's page show."""
    record = contents.account.record
    step = blamed(record)
    lacking = (
        progress.why(contents.account, step, contents.printed.get(step, Excerpt()).lines, seen=True) if step else ()
    )
    links = {lines.place: lines.id for lines in contents.cited}
    return {
        "run": contents,
        "record": record,
        "text": text,
        "blamed": step,
        "because": text.because(record),
        "lacking": [line.strip() for line in lacking],
        "commands_line": commands(record.commands) if record.commands is not None else "",
        "diff": files_of(contents.patch.lines),
        "bars": _bars(record),
        "most": MOST,
        "conclusions": [*conclusions(contents.result.report or "")],
        "investigation": render_report(contents.result.report, links) if contents.result.report else "",
    }


def render_comparison(accounts: Sequence[Account]) -> str:
    """Render a page of several runs."""
    head, *rows = compare.table([compare.row_of(account) for account in accounts])
    pairs = list(zip(accounts, rows, strict=True))
    return render("compare.html", head=head, pairs=pairs, text=text)


def _bars(record: RunRecord) -> Mapping[str, tuple[str, str]]:
    """Return start and length of each step, in percent of the run; none before that has ended, and so has a length."""
    if record.ended is None:
        return {}
    ends = [step.ended for step in record.steps.values() if step.ended is not None]
    whole = max(1, max(ends, default=0) - record.started)
    return {
        name: (
            f"{100 * (step.started - record.started) / whole:.2f}",
            f"{100 * (step.ended - step.started) / whole:.2f}",
        )
        for name, step in record.steps.items()
        if step.started is not None and step.ended is not None
    }
