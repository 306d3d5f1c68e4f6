"""``runner runs show|compare``: show one run in any form, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from runner.core.settings import Settings
    from runner.ops.runs.history import StoredRun
    from runner.report.run_files import Account

FORMS = ("text", "json", "junit", "markdown", "html")
COMPARED = ("text", "json", "markdown", "html")


def show(stored: StoredRun, form: str, settings: Settings, out: Output) -> None:
    match form:
        case "json":
            from runner.report.json import record_document

            out.json(record_document(stored.record))
        case "junit":
            from runner.report import junit

            out.line(junit.render([_account(stored)]).rstrip("\n"))
        case "markdown":
            from runner.report import markdown

            out.line(markdown.render([_account(stored)]).rstrip("\n"))
        case "html":
            out.verbatim(page(stored, settings))
        case _:
            from runner.core.sanitize import sanitize
            from runner.report.progress import after
            from runner.report.text import WIDEST, render_run

            out.line(render_run(stored.record, stored.evidence))
            for line in after(_account(stored), _tail(stored)):
                out.line(sanitize(line, WIDEST))


def page(stored: StoredRun, settings: Settings) -> str:
    """Return the page of a run."""
    from functools import partial

    from runner.cli.signals import run_cancellable
    from runner.ops.runs.page import read_page
    from runner.report.html.run import render_run

    return render_run(run_cancellable(partial(read_page, stored, settings)))


def _tail(stored: StoredRun) -> Sequence[str]:
    """Return the last output of the step that made a run fail."""
    from runner.ops.runs.step_output import tail_of, translator_of
    from runner.report.run_files import blamed

    step = blamed(stored.record)
    if step is None:
        return ()
    agent = stored.record.steps[step].kind == "agent"
    return tail_of(stored.record, stored.directory, step, translator_of(_account(stored).agent) if agent else None)


def compare(pasts: Sequence[StoredRun], form: str, out: Output) -> None:
    """Compare runs, each once. Raises ``UsageError`` for a single one."""
    from runner.core.errors import UsageError
    from runner.report import compare

    different = {stored.record.id: stored for stored in pasts}
    if len(different) < 2:
        raise UsageError("there is only one run to compare", hint="runner runs compare RUN RUN; `runs show` shows one")
    accounts = [_account(stored) for stored in different.values()]
    rows = [compare.row_of(account) for account in accounts]
    if form == "html":
        from runner.report.html.run import render_comparison

        out.verbatim(render_comparison(accounts))
    elif form == "json":
        out.json(compare.document(rows))
    else:
        out.line((compare.markdown(rows) if form == "markdown" else compare.text(rows)).rstrip("\n"))


def _account(stored: StoredRun) -> Account:
    from runner.artifacts.run_files import read_account

    return read_account(stored.record, stored.directory)
