"""``runner init [PATH]``: write a first ``.runner/``, or copy the quickstart. Overwrites nothing."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from runner.ops.init.begin import InitResult

SUMMARY = "write a first .runner/ for this repository"
GROUP = "start here"
EXAMPLES = ("runner init", "runner init --test 'npm test'")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, default=Path(), help="the repository (default: this one)")
    parser.add_argument("--test", metavar="COMMAND", help="what runs the tests, where that is not found out")
    parser.add_argument("--ci", choices=("github", "gitlab"), help="write the job of this CI too")
    parser.add_argument("--pre-commit", action="store_true", help="write .pre-commit-config.yaml too")
    parser.add_argument("--quickstart", metavar="DIR", type=Path, help="copy the quickstart to this new directory")


def main(args: Namespace, out: Output) -> int:
    from runner.cli.signals import run_cancellable
    from runner.core.errors import UsageError
    from runner.core.settings import current
    from runner.ops.init.begin import begin
    from runner.ops.init.quickstart import copy_quickstart

    if args.quickstart is not None:
        if args.path != Path() or args.test is not None or args.ci is not None or args.pre_commit:
            raise UsageError("`--quickstart` goes with nothing else", hint="the directory is its value")
        run_cancellable(copy_quickstart, args.quickstart, current())
        out.line(f"wrote {args.quickstart}")
        out.line(f"\nNext: runner apply {quote(str(args.quickstart))}")
        return 0
    started = partial(
        begin, args.path, current(), test=args.test, hooks=args.pre_commit, ci_of=args.ci, tell=out.complain
    )
    begun = run_cancellable(started)
    for line in _table(_rows(begun)):
        out.line(line)
    for name, text in begun.left.items():
        out.line(f"\nfor {name}:\n\n{text.rstrip()}")
    out.line()
    code = _tell(begun, out)
    out.line("Next: runner plan, then runner apply" if code == 0 else "Then: rm -r .runner, and runner init again")
    if more := _more(begun):
        out.line(f"Also: {more}")
    return code


def _rows(begun: InitResult) -> Iterator[tuple[str, str, str]]:
    """Yield what was written: a file, a line of it, and its purpose."""
    way, lent = begun.taken.way, begun.taken.lent
    agent = ".runner/agent.runner.yaml"
    yield agent, "script: {path: agent.sh}", "plays the agent, and changes nothing yet"
    yield agent, "providers: [local]", "a sandbox on this machine, without a network"
    if way.tools:
        where = ", ".join(lent.toolchains) or "of the system"
        yield agent, f"toolchains: [{', '.join(way.tools)}]", f"programs of your PATH, read-only: {where}"
    if begun.seen.dependencies:
        names = ", ".join(begun.seen.dependencies)
        yield agent, f"dependencies: [{names}]", "yours, in workspace and clean checkout; never changed"
    for one in begun.taken.installs:
        made = f"made once, with the network of {one.network}: {one.words}"
        yield agent, f"dependencies: [{', '.join(one.command.keep)}]", made
    for line in way.setup:
        yield ".runner/check.runner.yaml", f"setup: {line}", "before the tests"
    yield ".runner/check.runner.yaml", f"run: {way.words}", _ended(begun)
    yield ".runner/policy.runner.yaml", 'allowed_paths: ["**"]', "what an agent may change: narrow it"
    for path in begun.written:
        if (name := str(path.relative_to(begun.seen.top))).split("/")[0] != ".runner":
            yield name, "", "runs the manifests" if "pre-commit" not in name else "checks the manifests"


def _more(begun: InitResult) -> str:
    """Return the options that write what was not written."""
    names = [path.name for path in begun.written]
    options = {
        "runner.yml": "--ci github writes a job for pull requests",
        ".pre-commit-config.yaml": "--pre-commit a hook",
    }
    return ", ".join(words for name, words in options.items() if name not in names)


def _ended(begun: InitResult) -> str:
    if begun.taken.worked:
        return f"the tests: passed in a sandbox in {begun.taken.seconds:.1f}s"
    if begun.taken.slow:
        return f"the tests: still running after {begun.taken.seconds:.0f}s in a sandbox"
    return "the tests: not tried" if begun.untried else "the tests: did not pass in a sandbox yet"


def _table(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Format rows in columns, with each file named once."""
    listed = [*rows]
    first, second = (max(len(row[column]) for row in listed) for column in (0, 1))
    before = ""
    for file, line, purpose in listed:
        yield f"{file if file != before else '':{first}}  {line:{min(second, 48)}}  {purpose}".rstrip()
        before = file


def _tell(begun: InitResult, out: Output) -> int:
    """Show the results of trials; return the exit status."""
    from runner.ops.init.trial import explain

    if begun.untried is not None:
        out.line(f"Nothing was tried: {begun.untried.message}")
        out.line(f"  = hint: {begun.untried.hint or 'see `runner doctor`'}")
        return begun.untried.exit_code
    if begun.taken.worked or begun.taken.slow:
        return 0
    for tried in begun.tried:
        why, hint = explain(tried, begun.seen.top)
        out.line(f"✗ `{tried.way.words}`: {why}")
        if tried is begun.taken or tried.why:
            for line in tried.tail:
                out.line(f"    | {line}")
        if hint:
            out.line(f"  = hint: {hint}")
    return 1
