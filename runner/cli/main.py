"""The entry point: arguments to a verb, and the one place where every error becomes text and an exit code."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import NoReturn

import runner.cli.verbs
from runner import __version__, plugins
from runner.cli.output import Output, standard
from runner.errors import Rejected, RunnerError, UsageError, nearest

BUG = 70


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{self.prog} --help`")


def parser_of(chosen: Collection[str]) -> ArgumentParser:
    """The whole parser; arguments only of the chosen verbs, since the others will not be parsed."""
    parser = _Parser(
        prog="runner",
        description="Plan, policy and proof for AI agents.",
        epilog="Exit codes: 0 success, 1 run failed, 2 bad input, 3 policy, 4 platform, 6 not found, "
        "7 state damaged, 9 plan differs, 70 bug, 124 deadline, 130 cancelled.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"runner {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser, required=True)
    for name in plugins.names(runner.cli.verbs):
        module = plugins.load(runner.cli.verbs, name)
        verb = verbs.add_parser(name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False)
        if name in chosen:
            module.add_arguments(verb)
    return parser


def _chosen(arguments: Sequence[str]) -> list[str]:
    verb = next((word for word in arguments if not word.startswith("-")), None)
    known = plugins.names(runner.cli.verbs)
    if verb is not None and verb not in known:
        raise UsageError(f"`{verb}` is not a verb", hint=nearest(verb, known))
    return [] if verb is None else [verb]


def main(arguments: Sequence[str], out: Output) -> int:
    """Run one command and return its exit code; never raises, never shows a traceback for bad input."""
    try:
        args = parser_of(_chosen(arguments)).parse_args(arguments)
        code: int = import_module(f"runner.cli.verbs.{args.verb}").main(args, out)
    except RunnerError as error:
        out.findings(error.findings if isinstance(error, Rejected) else [error])
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception:  # noqa: BLE001  # the top: anything else is our bug, said as such
        _report_bug(out)
        return BUG
    return code


def _report_bug(out: Output) -> None:
    import traceback

    print(f"error[bug]: this is a bug in runner {__version__}; nothing of it is your fault", file=out.stderr)
    print(traceback.format_exc(), file=out.stderr)


def entry() -> int:
    return main(sys.argv[1:], standard())
