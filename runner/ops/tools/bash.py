"""Run a command line by the shell."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from runner.ops.tools._sandbox import CommandResult, place, run_command
from runner.ports.provider import Workspace

_SCRIPT = """
cd "$1" || exit 126
if command -v bash >/dev/null; then exec bash -c "$2"; fi
exec sh -c "$2"
"""


class Arguments(Struct, forbid_unknown_fields=True, kw_only=True):
    """A command line for bash, or for sh where there is no bash."""

    command: Annotated[str, Meta(min_length=1, max_length=100_000, description="The command line.")]
    workdir: Annotated[str, Meta(description="The directory to run it in, relative to the workspace.")] = "."
    timeout_ms: Annotated[int, Meta(ge=1, le=3_600_000, description="How long it may take.")] = 120_000


Result = CommandResult


async def call(workspace: Workspace, arguments: Arguments) -> CommandResult:
    argv = ["sh", "-c", _SCRIPT, "sh", place(arguments.workdir), arguments.command]
    return await run_command(workspace, argv, arguments.timeout_ms / 1000)
