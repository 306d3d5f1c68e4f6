"""``runner resume RUN [PATH]``: continue a run that did not succeed as a new run, without repeating what did."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.cli.reports import Reports, add_report_arguments, open_reports

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from runner.app.resume import Resuming
    from runner.record import RunRecord

SUMMARY = "continue a run at the step that failed, as a new run"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="an id, its beginning, or `last`")
    parser.add_argument("path", nargs="?", type=Path, help="its manifests (default: where they were)")
    parser.add_argument("--explain", action="store_true", help="only say which steps would run again, and why")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    add_report_arguments(parser)


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.app.history import find_run
    from runner.app.resume import consider, resume
    from runner.app.secret_values import redactor_of
    from runner.cli.console import open_console
    from runner.model import Status
    from runner.report.text import render_run
    from runner.settings import current

    settings = current()
    redactor = redactor_of(settings)
    out.clean = redactor.text

    async def whole(reports: Reports) -> int:
        past = await find_run(settings, args.run)
        if past.record.status is Status.SUCCEEDED:
            _show(past.record, args.output, out, [f"run {past.record.id} succeeded: there is nothing to resume"])
            return 0
        resuming = await consider(past, args.path, settings)
        reports.findings(resuming.planned.warnings)
        if args.explain:
            _explain(resuming, args.output, out)
            return 0
        if args.output == "json":
            out.outlive()
            record = await resume(resuming, settings, [reports], redactor=redactor)
        else:
            with open_console(out, "text") as sink:
                record = await resume(resuming, settings, [sink, reports], redactor=redactor)
        report = render_run(record, settings.home / "runs" / record.id, brief=not out.redraws)
        _show(record, args.output, out, ["", *(f"note: {note}" for note in resuming.notes), *report.split("\n")])
        return record.exit_code or 0

    with open_reports(args, out, settings) as reports:
        return trio.run(whole, reports)


def _show(record: RunRecord, form: str, out: Output, lines: list[str]) -> None:
    from runner.report.json import record_document

    if form == "json":
        out.json(record_document(record))
    else:
        _print(lines, out)


def _explain(resuming: Resuming, form: str, out: Output) -> None:
    if form == "json":
        out.json(resuming.document())
    else:
        _print(_lines(resuming), out)


def _lines(resuming: Resuming) -> Iterator[str]:
    yield f"run {resuming.run} of {resuming.plan.name} would be continued as a new run:"
    for step in resuming.steps:
        taken = f"taken over {step.reason}   key {resuming.keys[step.step][:19]}"
        yield f"  {step.step:<10} {taken if step.run else f'runs again: {step.reason}'}"
    yield from (f"note: {note}" for note in resuming.notes)
    yield "Nothing started."


def _print(lines: Iterable[str], out: Output) -> None:
    from runner.errors import printable
    from runner.report.text import WIDEST

    for line in lines:
        out.line(printable(line, WIDEST))
