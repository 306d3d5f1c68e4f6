"""``runner completion SHELL``: print a script for the shell to source, made from the arguments of every verb.

Names that change, such as ids of runs, the script asks for when needed: ``runner completion --names runs``.
"""

from __future__ import annotations

from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Sequence

SUMMARY = "print a completion script for bash, zsh or fish"
GROUP = "this host"
EXAMPLES = ("runner completion bash", "runner completion fish")

# What completes an argument, by its metavar, or by that behind its option.
_ASKED = {
    "RUN": "runs",
    "ID": "workspaces",
    "WORKSPACE": "workspaces",
    "POOL": "pools",
    "--run NAME": "names",
    "--name NAME": "names",
    "--policy NAME": "policies",
    "--project NAME": "projects",
    "--context NAME": "contexts",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", nargs="?", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    parser.add_argument("--names", metavar="KIND", help=SUPPRESS)


def main(args: Namespace, out: Output) -> int:
    if args.names is not None:
        return _names(args.names, out)
    if args.shell is None:
        from runner.core.errors import UsageError

        raise UsageError("SHELL is missing", hint="runner completion bash, zsh or fish")
    import shtab

    import runner.cli.verbs
    from runner.cli.parser import parser_of, parsers
    from runner.core import plugins

    whole = parser_of(plugins.names(runner.cli.verbs))
    known = _known()
    for parser in parsers(whole):
        for action in parser._actions:
            if parser.prog.startswith("runner project") and action.dest == "name":
                action.complete = _asked("projects")  # type: ignore[attr-defined]  # where shtab looks for it
            else:
                _complete(action, known)
    out.line(shtab.complete(whole, args.shell))
    return 0


def _complete(action: Action, known: dict[str, Sequence[str]]) -> None:
    """Tell shtab the values of arguments that are not choices of the parser."""
    import shtab

    words = [*(f"{option} {action.metavar}" for option in action.option_strings), str(action.metavar)]
    if found := next((known[word] for word in words if word in known), None):
        action.choices = found
    elif kind := next((_ASKED[word] for word in words if word in _ASKED), None):
        action.complete = _asked(kind)  # type: ignore[attr-defined]
    elif action.metavar == "DIR":
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif action.type is Path or str(action.metavar) in ("FILE", "PATH"):
        action.complete = shtab.FILE  # type: ignore[attr-defined]


def _known() -> dict[str, Sequence[str]]:
    """Return values that stay the same for an installed version."""
    import runner.agents
    from runner.core import plugins
    from runner.manifest import schema
    from runner.manifest.load import kinds
    from runner.ops.planning.facts import provider_names
    from runner.ops.runs.history import STATES
    from runner.report.rules import rules

    return {
        "--agent NAME": [name for name in plugins.known(runner.agents) if name != "script"],
        "--provider NAME": provider_names(),
        "--probe PROVIDER": provider_names(),
        "--status STATUS": STATES,
        "--explain CODE": ["list", *rules()],
        "KIND": [*kinds(), *schema.others(), "catalog"],
    }


def _asked(kind: str) -> dict[str, object]:
    """Return how each shell asks for names of a kind: by this program's path, whatever else has its name."""
    ask = f"command runner completion --names {kind} 2>/dev/null"
    function = f"_runner_names_of_{kind}"
    return {
        "bash": function,
        "zsh": function,
        "fish": f"({ask})",
        "preamble": {
            "bash": f'{function}() {{ compgen -W "$({ask})" -- "$1"; }}',
            "zsh": f'{function}() {{ compadd -- ${{(f)"$({ask})"}} }}',
        },
    }


def _names(kind: str, out: Output) -> int:
    """Print the names of a kind, one a line; none when they cannot be read, since the shell shows no errors."""
    from runner.cli.completion_names import KINDS
    from runner.core.errors import RunnerError, UsageError, nearest
    from runner.core.sanitize import sanitize
    from runner.core.settings import current

    if kind not in KINDS:
        raise UsageError(f"`{sanitize(kind)}` is not a kind of name that is completed", hint=nearest(kind, KINDS))
    try:
        for name in KINDS[kind](current()):
            out.line(sanitize(name))
    except (OSError, RunnerError):
        return 1
    return 0
