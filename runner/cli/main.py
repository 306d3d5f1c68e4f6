"""Entry point: arguments to a verb, and the one place where errors become text and an exit code."""

from __future__ import annotations

import errno
import gc
import os
import resource
import sys
from collections.abc import Sequence
from importlib import import_module

import runner.cli.verbs
from runner import __version__
from runner.cli.output import Output, standard, to_nowhere
from runner.cli.parser import meant, overview, parser_of
from runner.cli.remote import refuse_elsewhere
from runner.cli.stand_ins import set_stand_ins
from runner.core import plugins
from runner.core.errors import HostRefused, Rejected, RunnerError, UsageError, nearest
from runner.core.sanitize import excerpt

BUG = 70
_HELP = ("--help", "-h")
_ALONE = ("--version", *_HELP)
_FILES = 1 << 14


def _meant(arguments: Sequence[str]) -> Sequence[str]:
    """Return the verbs that need a parser: the first word, or all of them after an option."""
    known = plugins.names(runner.cli.verbs)
    if not arguments or arguments[0].startswith("-"):
        return known
    if arguments[0] not in known:
        hint = meant(arguments[0], known) or nearest(arguments[0], known)
        raise UsageError(f"`{excerpt(arguments[0])}` is not a verb", hint=hint)
    return arguments[:1]


def _enter(arguments: Sequence[str]) -> Sequence[str]:
    """Change to the directory of each leading ``-C DIR``, and return the other arguments.

    As in git, every path that is given or shown is then relative to DIR.
    """
    while arguments and arguments[0].startswith("-C"):
        directory, arguments = arguments[0][2:], arguments[1:]
        if not directory:
            if not arguments or not arguments[0]:
                raise UsageError("`-C` needs a directory", hint="runner -C DIR VERB")
            directory, arguments = arguments[0], arguments[1:]
        try:
            os.chdir(directory)
        except OSError as error:
            raise UsageError(f"`-C {excerpt(directory)}`: {(error.strerror or '').lower()}") from error
    return arguments


def main(arguments: Sequence[str], out: Output) -> int:
    """Run one command and return its exit code; never raises, never shows a traceback for bad input."""
    try:
        arguments = _enter(arguments)
        if len(arguments) == 1 and arguments[0] in _ALONE:  # a parser would take longer than everything else
            out.line(overview() if arguments[0] in _HELP else f"runner {__version__}")
            return 0
        args = parser_of(_meant(arguments)).parse_args(arguments)
        refuse_elsewhere(args)
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
    """Show all errors; in short when files cannot be opened, and so nothing can be imported."""
    try:
        out.findings(findings)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        for finding in findings:
            out.complain(f"error[{finding.code}]: {finding.message}")


def _report_bug(out: Output) -> None:
    import traceback

    out.complain(f"error[bug]: this is a bug in runner {__version__}; it is not your fault")
    out.complain(traceback.format_exc())


def _allow_files() -> None:
    """Raise the soft limit of open files, which is low for the sake of old programs: each connection takes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FILES and (hard > soft or hard == resource.RLIM_INFINITY):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (_FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard), hard)
        )


def _forbid_cores() -> None:
    """Let no core be made of this process and what it starts: it would hold secrets.

    The kernel feeds a program that takes cores (``core_pattern`` with a pipe) also where the limit is 0, but not at 1.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    most = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


def entry() -> int:
    """Run as a program: the process is our own, so collector and libraries are tuned for it."""
    _forbid_cores()
    _allow_files()
    gc.set_threshold(200_000)  # importing makes much and drops little: one look at what a run imports takes 40 ms
    set_stand_ins()
    return main(sys.argv[1:], standard())
