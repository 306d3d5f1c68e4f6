"""``runner runs show|compare``: show one run in any form, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from runner.ops.runs.history import StoredRun
    from runner.report.run_files import Account

FORMS = ("text", "json", "junit", "markdown")
COMPARED = ("text", "json", "markdown")


def show(stored: StoredRun, form: str, out: Output) -> None:
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
        case _:
            from runner.core.sanitize import sanitize
            from runner.report.progress import after
            from runner.report.text import WIDEST, render_run

            out.line(render_run(stored.record, stored.directory))
            for line in after(_account(stored), _tail(stored)):
                out.line(sanitize(line, WIDEST))


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
    rows = [compare.row_of(_account(stored)) for stored in different.values()]
    if form == "json":
        out.json(compare.document(rows))
    else:
        out.line((compare.markdown(rows) if form == "markdown" else compare.text(rows)).rstrip("\n"))


def _account(stored: StoredRun) -> Account:
    from runner.artifacts.run_files import read_account

    return read_account(stored.record, stored.directory)
