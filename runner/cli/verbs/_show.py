"""``runner runs show|compare``: one run in any form, or several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from runner.ops.runs.history import Past
    from runner.report.run_files import Account

FORMS = ("text", "json", "junit", "markdown")
COMPARED = ("text", "json", "markdown")


def show(past: Past, form: str, out: Output) -> None:
    match form:
        case "json":
            from runner.report.json import record_document

            out.json(record_document(past.record))
        case "junit":
            from runner.report import junit

            out.line(junit.render([_account(past)]).rstrip("\n"))
        case "markdown":
            from runner.report import markdown

            out.line(markdown.render([_account(past)]).rstrip("\n"))
        case _:
            from runner.core.sanitize import sanitize
            from runner.report.progress import after
            from runner.report.text import WIDEST, render_run

            out.line(render_run(past.record, past.directory))
            for line in after(_account(past), _tail(past)):
                out.line(sanitize(line, WIDEST))


def _tail(past: Past) -> Sequence[str]:
    """The end of what the step printed that decided against a run."""
    from runner.ops.runs.step_output import say_of, tail_of
    from runner.report.run_files import blamed

    step = blamed(past.record)
    if step is None:
        return ()
    agent = past.record.steps[step].kind == "agent"
    return tail_of(past.record, past.directory, step, say_of(_account(past).agent) if agent else None)


def compare(pasts: Sequence[Past], form: str, out: Output) -> None:
    """Each run once. Raises ``UsageError`` when there is one only."""
    from runner.core.errors import UsageError
    from runner.report import compare

    different = {past.record.id: past for past in pasts}
    if len(different) < 2:
        raise UsageError("there is only one run to compare", hint="runner runs compare RUN RUN; `runs show` shows one")
    rows = [compare.row_of(_account(past)) for past in different.values()]
    if form == "json":
        out.json(compare.document(rows))
    else:
        out.line((compare.markdown(rows) if form == "markdown" else compare.text(rows)).rstrip("\n"))


def _account(past: Past) -> Account:
    from runner.artifacts.run_files import account_of

    return account_of(past.record, past.directory)
