"""Look at changes, commit them, and switch branches. Nothing here reaches another repository."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from runner.core.errors import ToolArgument
from runner.core.ids import BRANCH_HINT, is_branch
from runner.core.sanitize import excerpt
from runner.ops.tools._sandbox import CommandResult, Sandbox, place, run_command

SECONDS = 60.0
_NO_PROGRAMS = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "commit.gpgSign=false", "user.name=agent")
_OPTIONS = ("-c", "user.email=agent@localhost", "--no-pager", *(word for pair in _NO_PROGRAMS for word in ("-c", pair)))
_ENV = {"GIT_LITERAL_PATHSPECS": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true"}
_PLAIN = ("--no-ext-diff", "--no-textconv", "--no-color")


class Arguments(Struct, forbid_unknown_fields=True, kw_only=True):
    """An action, and what it needs: ``commit`` a message, ``checkout`` a branch; files are for ``diff`` and ``commit``.

    ``commit`` without files commits every change.
    """

    action: Literal["status", "diff", "log", "commit", "checkout"]
    message: Annotated[str, Meta(max_length=100_000)] = ""
    branch: str = ""
    create: Annotated[bool, Meta(description="Makes the branch.")] = False
    staged: Annotated[bool, Meta(description="Shows what is staged; for `diff`.")] = False
    limit: Annotated[int, Meta(ge=1, le=1000, description="Number of commits; for `log`.")] = 20
    files: Annotated[list[str], Meta(max_length=1000)] = []


Result = CommandResult


async def call(sandbox: Sandbox, arguments: Arguments) -> CommandResult:
    for command in commands(arguments):
        done = await run_command(sandbox, ["git", *_OPTIONS, *command], SECONDS, env=_ENV)
        if done.exit_code != 0:
            break
    return done


def commands(arguments: Arguments) -> list[list[str]]:
    """Return the words of git's commands, in order. Raises ``ToolArgument``."""
    files = [place(file) for file in arguments.files]
    match arguments.action:
        case "status":
            return [["status", "--porcelain=v1", "--branch"]]
        case "diff":
            return [["diff", *_PLAIN, *(["--staged"] if arguments.staged else []), "--", *files]]
        case "log":
            return [["log", *_PLAIN, f"--max-count={arguments.limit}", "--format=%H %aI %an%n    %s"]]
        case "commit":
            if not arguments.message.strip():
                raise ToolArgument("a commit needs a message")
            return [["add", "--all", "--", *(files or ["."])], ["commit", "--message", arguments.message]]
        case "checkout":
            if not is_branch(arguments.branch):
                raise ToolArgument(f"`{excerpt(arguments.branch)}` cannot name a branch", hint=BRANCH_HINT)
            return [["switch", *(["--create"] if arguments.create else []), arguments.branch]]
