"""Reports for a CI: JUnit, a summary in Markdown, annotations, and the table of a matrix.

They are written at the end from the events that a sink has seen, however the end comes: also for runs that failed or
were stopped, and after an error of the runner itself.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from runner.artifacts.published import OutputFile
    from runner.core.errors import RunnerError
    from runner.core.settings import Settings
    from runner.events.events import Recorded
    from runner.events.record import RunRecord
    from runner.report.github import Note
    from runner.report.run_files import Account


def add_report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--junit", metavar="FILE", type=Path, help="write each step and check as JUnit XML")
    parser.add_argument(
        "--summary", metavar="FILE", type=Path, help="write it as Markdown (in GitHub Actions: the job's summary)"
    )


class Reports:
    """Sink that collects records, and the findings for annotations."""

    def __init__(self, args: Namespace, out: Output, settings: Settings) -> None:
        from runner.artifacts.published import OutputFile

        self._out = out
        self._settings = settings
        self._records: dict[str, RunRecord] = {}
        self._findings: list[RunnerError] = []
        self.order: tuple[str, ...] = ()  # the names of the runs as the plan has them, once there is one
        self._aside = getattr(args, "output", "text") != "text"
        self._junit = OutputFile.replacing(args.junit) if args.junit is not None else None
        self._summary = self._open_summary(args.summary)

    def __call__(self, recorded: Recorded) -> None:
        from runner.events.record import RunRecord, fold

        fold(self._records.setdefault(recorded.run, RunRecord(id=recorded.run)), recorded)

    def findings(self, findings: Sequence[RunnerError]) -> None:
        """Show warnings, and keep them for the annotations."""
        self._findings += findings
        self._out.findings(findings)

    def accounts(self) -> list[Account]:
        """Return the runs that were seen, in plan order."""
        from runner.artifacts.run_files import read_account
        from runner.ops.runs.history import directory_of

        places = {name: place for place, name in enumerate(self.order)}
        records = sorted(self._records.values(), key=lambda record: places.get(record.name, len(places)))
        return [read_account(record, directory_of(self._settings, record.id)) for record in records]

    def write(self, failure: RunnerError | None) -> None:
        """Write all requested reports. Raises ``HostRefused`` when a file cannot be written any more."""
        if self._junit is None and self._summary is None and not self._out.manners.annotates:
            return
        accounts = self.accounts()
        if self._junit is not None:
            from runner.report import junit  # with an XML library that is slow to import

            self._junit.write(junit.render(accounts, failure))
        if self._summary is not None:
            from runner.report import markdown

            self._summary.write(markdown.render(accounts, failure, room=self._summary.room(markdown.MOST)))
        if self._out.manners.annotates:
            self._annotate(accounts, failure)

    def _annotate(self, accounts: Sequence[Account], failure: RunnerError | None) -> None:
        from runner.core.errors import Rejected, in_order
        from runner.report.github import listed, note_of, notes_of, violations_of

        stopped = failure.findings if isinstance(failure, Rejected) else (failure,) if failure is not None else ()
        notes = [self._in_repository(note_of(finding)) for finding in in_order([*self._findings, *stopped])]
        for account in accounts:
            notes += map(self._in_repository, notes_of(account))
        for several in zip_longest(*map(violations_of, accounts)):  # GitHub shows few: each run has its turn
            notes += filter(None, several)
        self._out.commands(listed(notes, "runner runs show RUN"), aside=self._aside)

    def _in_repository(self, note: Note) -> Note:
        """Return the place of a manifest as GitHub knows it, also when started in a subdirectory."""
        from dataclasses import replace

        root = self._settings.ci.get("GITHUB_WORKSPACE")
        if root is None or note.at is None:
            return note
        relative = os.path.relpath(os.path.abspath(note.at.file), root)
        return note if relative.startswith("..") else replace(note, at=note.at._replace(file=relative))

    def _open_summary(self, path: Path | None) -> OutputFile | None:
        """Open the named file; else GitHub's, to which every command of a step appends."""
        from runner.artifacts.published import OutputFile
        from runner.core.errors import ReportNotWritten

        given = self._settings.ci.get("GITHUB_STEP_SUMMARY") if self._out.manners.annotates else None
        if path is not None and str(path) != given:
            return OutputFile.replacing(path)
        if not given:
            return None
        try:
            return OutputFile.appending(Path(given))
        except ReportNotWritten as error:
            if path is not None:
                raise
            error.severity = "warning"
            self.findings([error])
            return None


@contextmanager
def open_reports(args: Namespace, out: Output, settings: Settings) -> Iterator[Reports]:
    """Open the reports of the block's runs. Raises ``ReportNotWritten`` at once if one cannot be written."""
    from runner.core.errors import RunnerError

    reports = Reports(args, out, settings)
    failure: RunnerError | None = None
    try:
        yield reports
    except RunnerError as error:
        failure = error
        raise
    except BaseException as error:
        failure = RunnerError(f"stopped by {type(error).__name__}")
        raise
    finally:
        reports.write(failure)


def show_comparisons(accounts: Sequence[Account], out: Output) -> None:
    """Show a table for each matrix."""
    from runner.report import compare

    for members in compare.groups(accounts).values():
        out.line()
        out.line(compare.text([compare.row_of(account) for account in members]))
