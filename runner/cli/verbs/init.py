"""``runner init [PATH]``: a first ``.runner/`` for a repository, or a copy of the quickstart. Overwrites nothing."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from shlex import quote

from runner.cli.output import Output

SUMMARY = "write a first .runner/ for this repository"
GROUP = "start here"
EXAMPLES = ("runner init", "runner init --test 'npm test'")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, default=Path(), help="the repository (default: this one)")
    parser.add_argument("--test", metavar="COMMAND", help="what runs the tests, where that is not found out")
    parser.add_argument("--pre-commit", action="store_true", help="write .pre-commit-config.yaml too")
    parser.add_argument("--quickstart", metavar="DIR", type=Path, help="copy the quickstart to this new directory")


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.app.init import begin
    from runner.app.quickstart import copy_quickstart
    from runner.errors import UsageError
    from runner.settings import current

    if args.quickstart is not None:
        if args.path != Path() or args.test is not None or args.pre_commit:
            raise UsageError("`--quickstart` goes with nothing else", hint="the directory is its value")
        trio.run(copy_quickstart, args.quickstart, current())
        out.line(f"wrote {args.quickstart}")
        out.line(f"\nNext: runner apply {quote(str(args.quickstart))}")
        return 0
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
