"""``runner init [PATH]``: a first ``.runner/`` for a repository. Overwrites nothing."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from runner.cli.output import Output

SUMMARY = "write a first .runner/ for this repository"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, default=Path(), help="the repository (default: this one)")
    parser.add_argument("--test", metavar="COMMAND", help="what runs the tests, where that is not found out")
    parser.add_argument("--pre-commit", action="store_true", help="write .pre-commit-config.yaml too")


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.app.init import begin
    from runner.settings import current

    begun = trio.run(partial(begin, args.path, current(), test=args.test, hooks=args.pre_commit))
    for path in begun.written:
        out.line(f"wrote {path.relative_to(begun.top)}")
    out.line(f"tests: {begun.test}")
    for note in begun.notes:
        out.line(f"note: {note}")
    for name, text in begun.left.items():
        out.line(f"\nfor {name}:\n\n{text.rstrip()}")
    out.line("\nNext: runner plan, then runner apply")
    return 0
