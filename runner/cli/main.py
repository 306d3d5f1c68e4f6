"""The entry point: arguments to a verb, and the one place where every error becomes text and an exit code."""

from __future__ import annotations

import errno
import gc
import os
import resource
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

import runner.cli.verbs
from runner import __version__, plugins
from runner.cli.output import Output, standard, to_nowhere
from runner.errors import HostRefused, Rejected, RunnerError, UsageError, nearest

BUG = 70
_HELP = (("--help",), ("-h",))


class _Parser(ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """The parser of a verb complains itself, so that the hint leads to the verb's help."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{self.prog} --help`")


def parser_of(names: Iterable[str], *, summary: bool = False) -> ArgumentParser:
    """The parser of these verbs; as a ``summary`` it knows none of their arguments."""
    parser = _Parser(
        prog="runner",
        description="Plan, policy and proof for AI agents.",
        epilog="Exit codes: 0 success, 1 run failed, 2 bad input, 3 policy, 4 platform, 5 in use, "
        "6 not found, 7 state damaged, 9 plan differs, 70 bug, 124 deadline, 130 cancelled.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"runner {__version__}")
    # Without ``prog`` argparse formats a usage text to take it from.
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", prog="runner", parser_class=_Parser, required=True)
    for name in names:
        module = plugins.load(runner.cli.verbs, name)
        parser_of_verb = verbs.add_parser(name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False)
        if not summary:
            module.add_arguments(parser_of_verb)
    return parser


def _meant(arguments: Sequence[str]) -> Sequence[str]:
    """The verbs that need a parser: the one that comes first, or all of them behind an option but for the version."""
    if tuple(arguments) == ("--version",):
        return ()
    known = plugins.names(runner.cli.verbs)
    if not arguments or arguments[0].startswith("-"):
        return known
    if arguments[0] not in known:
        raise UsageError(f"`{arguments[0]}` is not a verb", hint=nearest(arguments[0], known))
    return arguments[:1]


def main(arguments: Sequence[str], out: Output) -> int:
    """Run one command and return its exit code; never raises, never shows a traceback for bad input."""
    try:
        args = parser_of(_meant(arguments), summary=tuple(arguments) in _HELP).parse_args(arguments)
        code: int = import_module(f"runner.cli.verbs.{args.verb}").main(args, out)
    except RunnerError as error:
        _tell(out, error.findings if isinstance(error, Rejected) else [error])
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        to_nowhere(sys.stdout)
        return 1
    except Exception as error:  # noqa: BLE001  # the top: anything but what the host refuses is our bug, said as such
        if refused := HostRefused.in_any(error):
            _tell(out, [refused])
            return refused.exit_code
        _report_bug(out)
        return BUG
    return code


def _tell(out: Output, findings: Sequence[RunnerError]) -> None:
    """Show them all; where no more file can be opened, and so nothing imported that would say it better, in short."""
    try:
        out.findings(findings)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        for finding in findings:
            out.complain(f"error[{finding.code}]: {finding.message}")


def _report_bug(out: Output) -> None:
    import traceback

    out.complain(f"error[bug]: this is a bug in runner {__version__}; nothing of it is your fault")
    out.complain(traceback.format_exc())


def entry() -> int:
    """The program: a process of our own, so its collector and its libraries are ours to tune."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold secrets; what we start inherits it
    gc.set_threshold(200_000)  # importing makes much and drops little: one look at what a run imports takes 40 ms
    # Written, never read: no package that happens to be installed may hook into how manifests are validated.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # noqa: TID251
    code = main(sys.argv[1:], standard())
    gc.freeze()  # or Python looks at every object twice more before it ends
    return code
