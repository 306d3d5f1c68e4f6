"""``runner completion SHELL``: a script for the shell to source, made from the arguments of every verb."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from runner.cli.output import Output

SUMMARY = "print a completion script for bash, zsh or fish"
GROUP = "this host"
EXAMPLES = ("runner completion bash", "runner completion fish")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def main(args: Namespace, out: Output) -> int:
    import shtab

    import runner.cli.verbs
    from runner import plugins
    from runner.cli.parser import parser_of

    whole = parser_of(plugins.names(runner.cli.verbs))
    for parser in _parsers(whole):
        for action in parser._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    out.line(shtab.complete(whole, args.shell))
    return 0


def _parsers(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    """A parser and those of its verbs, at any depth."""
    yield parser
    if parser._subparsers is not None:
        for action in parser._subparsers._group_actions:
            for inner in dict(action.choices or {}).values():
                yield from _parsers(inner)
