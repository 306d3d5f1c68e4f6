"""Parser of every verb, its ``--help``, and errors for arguments in our own words.

A verb's ``EXAMPLES`` serve all of its parsers: each shows those that begin with its own words.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, RawDescriptionHelpFormatter, _SubParsersAction
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import runner.cli.verbs
from runner import __version__
from runner.core import plugins
from runner.core.errors import UsageError, nearest
from runner.core.sanitize import excerpt

GROUPS = {  # with the verbs that come first there
    "start here": ("init", "plan", "apply"),
    "runs": ("runs",),
    "on call": ("triage",),
    "manifests and policy": ("validate",),
    "workspaces": ("workspace",),
    "server": ("serve",),
    "this host": (),
}
_DESCRIPTION = "Plan, policy and proof for AI agents."
EXIT_CODES = """\
Exit codes: 0 success, 1 a run failed, 2 bad input, 3 policy, 4 the platform, 5 in use, 6 not found, 7 state
damaged, 9 the plan differs, 70 a bug, 124 deadline, 130 cancelled"""
SHOWN = 3  # examples of a verb that has verbs of its own

# What other tools call it; the first that there is here is meant.
_ELSEWHERE = {
    "ls": ("list",),
    "ps": ("list",),
    "get": ("show",),
    "cat": ("logs", "show"),
    "tail": ("logs",),
    "diff": ("patch", "plan"),
    "rm": ("destroy",),
    "run": ("apply", "exec"),
    "up": ("apply",),
    "check": ("validate",),
    "lint": ("validate",),
    "fmt": ("convert",),
    "status": ("runs",),
    "--incident": ("--workspace",),
}
# argparse's words, and ours
_WORDS = (
    (r"the following arguments are required: (.+)", r"\1 is missing"),
    (r"argument (\S+): expected (?:one|at least one) argument", r"`\1` needs a value"),
    (r"argument (\S+): not allowed with argument (\S+)", r"`\1` and `\2` exclude each other"),
    (r"argument (\S+): ignored explicit argument (.+)", r"`\1` takes no value"),
    (r"argument (\S+): invalid (?:int|float) value: '(.*)'", r"`\1` takes a number, not `\2`"),
    (r"one of the arguments (.+) is required", r"one of \1 is missing"),
    (r"argument (\S+): (.+)", r"\1: \2"),
)


class Parser(ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Let the verb's own parser complain, so that the hint leads to the verb's help."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0])
        return known, unknown

    def _refuse(self, word: str) -> NoReturn:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            raise UsageError(f"`{excerpt(word)}` is an argument too many for `{self.prog}`", hint=self._see)
        actions = [action for action in self._actions if action.help != SUPPRESS]
        hint = meant(name, [option for action in actions for option in action.option_strings])
        if any(action.dest == name.lstrip("-") for action in actions if not action.option_strings):
            usage = " ".join(str(action.metavar) for action in actions if not action.option_strings)
            hint = f"write it without `{name}`: {self.prog} {usage}"
        if name.startswith("-C"):
            hint = f"write it first: runner -C DIR {self.prog.removeprefix('runner ')}"
        raise UsageError(f"`{excerpt(name)}` is not an option of `{self.prog}`", hint=hint or self._see)

    def _check_value(self, action: Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if isinstance(action, _SubParsersAction):
            raise UsageError(
                f"`{excerpt(value)}` is not a verb of `{self.prog}`",
                hint=meant(value, choices) or nearest(value, choices),
            )
        name = "/".join(action.option_strings) or str(action.metavar or action.dest)
        raise UsageError(f"`{excerpt(str(value))}` is not a value of `{name}`", hint=nearest(str(value), choices))

    def error(self, message: str) -> NoReturn:
        for pattern, ours in _WORDS:
            if found := re.fullmatch(pattern, message, re.DOTALL):
                message = found.expand(ours)
                break
        raise UsageError(message, hint=self._see)

    @property
    def _see(self) -> str:
        return f"see `{self.prog} --help`"


class _Whole(Parser):
    def format_help(self) -> str:
        return f"{overview()}\n"


def overview() -> str:
    """Return the help of ``runner`` itself, with the verbs in their groups. No verb is imported for it."""

    def said(verb: str, constant: str) -> str:
        return str(plugins.fact(runner.cli.verbs, verb, constant))

    lines = [_DESCRIPTION, "", "usage: runner [-C DIR] VERB ...", ""]
    for group, first in GROUPS.items():
        known = plugins.names(runner.cli.verbs)
        verbs = [*first, *(verb for verb in known if said(verb, "GROUP") == group and verb not in first)]
        lines += [f"{group}:", *(f"  {verb:<11} {said(verb, 'SUMMARY')}" for verb in verbs), ""]
    lines += ["options:", "  -C DIR      as if started in DIR, as git and make have it; before the verb"]
    lines += ["  --version   show the version", "  -h, --help  show this; `runner VERB --help` shows a verb's"]
    return "\n".join([*lines, "", EXIT_CODES])


def meant(word: str, choices: Sequence[str]) -> str | None:
    """Return the hint for a near miss, or for another tool's word; ``None`` when there is neither."""
    from difflib import get_close_matches

    for ours in _ELSEWHERE.get(word, ()):
        if ours in choices:
            return f"did you mean `{ours}`?"
    known = {choice.lstrip("-"): choice for choice in choices}  # else all short options were near each other
    for near in get_close_matches(word.lstrip("-"), known, n=1):
        return f"did you mean `{known[near]}`?"
    return None


def parser_of(names: Iterable[str]) -> ArgumentParser:
    """Build the parser of these verbs."""
    parser = _Whole(prog="runner", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"runner {__version__}")
    parser.add_argument("-C", metavar="DIR", action=_Late, help="as if started in DIR; before the verb")
    # Without ``prog`` argparse formats a usage text to take it from.
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", prog="runner", parser_class=Parser, required=True)
    for name in names:
        module = plugins.load(runner.cli.verbs, name)
        parser_of_verb = verbs.add_parser(name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False)
        module.add_arguments(parser_of_verb)
        _show_examples(parser_of_verb, module.EXAMPLES)
    return parser


class _Late(Action):
    """Refuse ``-C`` behind another option: the directory has to be entered before anything is read."""

    def __call__(self, parser: ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise ArgumentError(self, "it comes first, as in `runner -C DIR plan`")


def parsers(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    """Yield a parser and those of its verbs, at any depth."""
    yield parser
    if parser._subparsers is not None:
        for action in parser._subparsers._group_actions:
            for inner in dict(action.choices or {}).values():
                yield from parsers(inner)


def _show_examples(verb: ArgumentParser, examples: Sequence[str]) -> None:
    for parser in parsers(verb):
        own = [example for example in examples if f"{example} ".startswith(f"{parser.prog} ")]
        few = own if parser._subparsers is None else own[:SHOWN]
        parser.epilog = "\n".join(["examples:", *(f"  {example}" for example in few)])
        parser.formatter_class = RawDescriptionHelpFormatter
