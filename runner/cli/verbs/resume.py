"""``runner resume RUN [PATH]``: continue a run that did not succeed as a new run, without repeating what did."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.cli.reports import Reports, add_report_arguments, open_reports
from runner.cli.requests import add_quiet_argument
from runner.core.home import run_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from runner.core.redact import Redactor
    from runner.core.settings import Settings
    from runner.events.record import RunRecord
    from runner.ops.runs.resume import ResumePlan
    from runner.ports.sink import Sink

SUMMARY = "continue a run at the step that failed, as a new run"
GROUP = "runs"
EXAMPLES = ("runner resume last", "runner resume 7k3q --explain")
MOST = 30 * 86_400.0  # seconds


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="an id, its beginning, or `last`")
    parser.add_argument("path", nargs="?", type=Path, help="its manifests (default: where they were)")
    parser.add_argument("--timeout", metavar="SECONDS", help="how long the new run, and its agent, may take")
    parser.add_argument("--explain", action="store_true", help="only say which steps would run again, and why")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    add_quiet_argument(parser)
    add_report_arguments(parser)


def main(args: Namespace, out: Output) -> int:
    from runner.cli.signals import run_cancellable
    from runner.core.model import Status
    from runner.core.sanitize import sanitize
    from runner.core.settings import current
    from runner.ops.runs.history import find_run
    from runner.ops.runs.output_copy import copy_output
    from runner.ops.runs.resume import plan_resume
    from runner.ops.runs.secret_values import make_redactor

    settings = current()
    redactor = make_redactor(settings)
    out.clean = redactor.text
    seconds = _seconds(args.timeout) if args.timeout is not None else None

    async def whole(reports: Reports) -> int:
        past = await find_run(settings, args.run)
        if past.record.status is Status.SUCCEEDED:
            _show(past.record, args.output, out, [f"run {past.record.id} succeeded: there is nothing to resume"])
            return 0
        resuming = await plan_resume(past, args.path, settings, seconds=seconds)
        reports.findings(resuming.planned.warnings)
        if args.explain:
            _explain(resuming, args.output, out)
            return 0
        record = await _carry_on(args, resuming, settings, reports, out=out, redactor=redactor)
        for left in copy_output(run_directory(settings.home, record.id), record):
            out.complain(sanitize(f"not copied: {left}", 1_000))
        return record.exit_code or 0

    with open_reports(args, out, settings) as reports:
        return run_cancellable(whole, reports)


def _seconds(text: str) -> float:
    from runner.core.errors import UsageError
    from runner.core.sanitize import excerpt
    from runner.core.settings import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST:
        hint = "write a duration such as 900, 15m or 1h30m, from 1s to 30d"
        raise UsageError(f"`--timeout` is `{excerpt(text)}`", hint=hint)
    return seconds


async def _carry_on(
    args: Namespace, resuming: ResumePlan, settings: Settings, reports: Reports, *, out: Output, redactor: Redactor
) -> RunRecord:
    """Continue the run and show it: on an incident as ``triage`` does, any other as ``apply``."""
    from msgspec.structs import replace

    from runner.cli.live_view import open_screen
    from runner.cli.plain_view import open_console, show_ends
    from runner.cli.signals import stop_at_signals
    from runner.ops.runs.header import header_of
    from runner.ops.runs.resume import start_resumed
    from runner.ops.triage.place import flags_of
    from runner.report import triage

    async def carried_on(*sinks: Sink) -> RunRecord:
        async with (
            start_resumed(resuming, settings, sinks, redactor=redactor, advise=lambda one: out.findings([one])) as run,
            stop_at_signals(run.cancel),
        ):
            return await run.wait()

    notes = [f"note: {note}" for note in resuming.notes]
    if args.output == "json":
        out.outlive()
        record = await carried_on(reports)
        _show(record, args.output, out, [])
        return record
    header = replace(header_of(resuming.plan), flags=flags_of(resuming.plan, settings))
    if header.incident is not None:
        _print(notes, out)
        headers = {resuming.plan.name: header}
        async with open_screen(out, headers, settings, face=triage, quiet=args.quiet) as screen:
            record = await carried_on(screen, reports)
        screen.finish(record)
        return record
    async with open_console(out, "text", [resuming.plan], settings, quiet=args.quiet) as sink:
        record = await carried_on(sink, reports)
    _print(notes, out)
    show_ends([record], settings, out)
    return record


def _show(record: RunRecord, form: str, out: Output, lines: list[str]) -> None:
    from runner.report.json import record_document

    if form == "json":
        out.json(record_document(record))
    else:
        _print(lines, out)


def _explain(resuming: ResumePlan, form: str, out: Output) -> None:
    if form == "json":
        out.json(resuming.document())
    else:
        _print(_lines(resuming), out)


def _lines(resuming: ResumePlan) -> Iterator[str]:
    from runner.report.format import duration

    name, limit = resuming.plan.name, duration(resuming.plan.deadline_seconds)
    yield f"run {resuming.run} of {name} would be continued as a new run, which has {limit}:"
    for step in resuming.steps:
        taken = f"taken over {step.reason}   key {resuming.keys[step.step][:19]}"
        yield f"  {step.step:<10} {taken if step.run else f'runs again: {step.reason}'}"
    yield from (f"note: {note}" for note in resuming.notes)
    yield "Nothing started."


def _print(lines: Iterable[str], out: Output) -> None:
    from runner.core.sanitize import sanitize
    from runner.report.text import WIDEST

    for line in lines:
        out.line(sanitize(line, WIDEST))
