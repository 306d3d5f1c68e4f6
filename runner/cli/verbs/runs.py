"""``runner runs``: what happened, from the journal, and the way out for it. A RUN is a unique prefix or ``last``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.cli.verbs import _deliver

if TYPE_CHECKING:
    from pathlib import Path

    from runner.app.history import Past
    from runner.ports.store import RunRow

SUMMARY = "what happened: list, show, logs; its work: patch, branch, apply, push; its evidence: export"


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    listing = verbs.add_parser("list", help="every run, newest first", allow_abbrev=False)
    listing.add_argument("--output", choices=("text", "json"), default="text")

    def add(name: str, summary: str) -> ArgumentParser:
        verb: ArgumentParser = verbs.add_parser(name, help=summary, allow_abbrev=False)
        verb.add_argument("run", metavar="RUN", help="an id, its beginning, or `last`")
        return verb

    for name, summary in (("show", "the report of a run"), ("logs", "what its steps printed"), ("patch", "its work")):
        verb = add(name, summary)
        if name == "show":
            verb.add_argument("--output", choices=("text", "json"), default="text")
        if name == "logs":
            verb.add_argument("step", nargs="?", metavar="STEP", help="only this step")
    _deliver.add_arguments(add)


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.app import history
    from runner.settings import current

    settings = current()
    if args.what == "list":
        _list(trio.run(history.list_runs, settings), args.output, out)
        return 0
    past = trio.run(partial(history.find_run, settings, args.run))
    match args.what:
        case what if what in _deliver.VERBS:
            _deliver.deliver(past, args, settings, out)
        case "show":
            _show(past, args.output, out)
        case "logs":
            for file in history.logs_of(past, args.step):
                _heading(file, args.step, out)
                _print_file(file, out)
        case "patch":
            _print_file(history.patch_of(past), out)
    return 0


def _list(rows: list[RunRow], form: str, out: Output) -> None:
    from datetime import UTC, datetime

    from runner.plan.model import plain

    if form == "json":
        out.json(plain(rows))
        return
    for row in rows:
        at = datetime.fromtimestamp(row.created / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        resumes = f"  resumes {row.resumes}" if row.resumes else ""
        out.line(f"{row.id}  {at}  {row.status:<10} {row.name}{resumes}")


def _show(past: Past, form: str, out: Output) -> None:
    from runner.report.json import record_document
    from runner.report.text import render_run

    if form == "json":
        out.json(record_document(past.record))
    else:
        out.line(render_run(past.record, past.directory))


def _heading(file: Path, step: str | None, out: Output) -> None:
    if step is None:
        out.line(f"--- {file.stem} {file.suffix[1:]}")


def _print_file(file: Path, out: Output) -> None:
    """Raw bytes into a file or pipe; on a terminal, what could command it is escaped."""
    from runner.errors import printable

    with file.open("rb") as stream:
        if not out.live:
            out.stdout.flush()
            while chunk := stream.read(1 << 20):
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            return
        for line in stream:
            out.line(printable(line.decode(errors="replace").rstrip("\r\n"), 10_000))
