"""Run a command line by the shell, a new one or one that has a name and goes on where its last call ended.

A shell that has a name is its state in the home: between calls nothing runs, and no call can meet what another
printed. A call that was ended leaves the shell as it was before.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from runner.ops.tools._sandbox import CommandResult, Sandbox, place, run_command

_SCRIPT = """
cd "$1" || exit 126
if command -v bash >/dev/null; then exec bash -c "$2"; fi
exec sh -c "$2"
"""


_IN_SHELL = """
mkdir -p "${1%/*}" || exit 126
if command -v bash >/dev/null; then exec bash -c "$4" bash "$1" "$2" "$3"; fi
exec sh -c "$5" sh "$1" "$2" "$3"
"""
# The state is kept as the shell ends, by whatever way but a signal, and replaced all at once. Words of the shell itself
# are left out: they are those of each new process.
_START = """
__runner_root=$PWD __runner_state=$1 __runner_at=$2 __runner_command=$3
set --
if [ -f "$__runner_state" ]; then . "$__runner_state"; fi
if [ -n "$__runner_at" ]; then cd "$__runner_at" || exit 126; fi
trap __runner_keep EXIT
trap 'trap - EXIT; exit 143' TERM
"""
_BASH = (
    _START
    + """
__runner_keep() {
    set +eux
    local IFS=$' \\t\\n' __runner_name
    {
        for __runner_name in $(compgen -v); do
            case $__runner_name in
                __runner*|BASH*|COMP_*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HIST*|HOST*|IFS|LINENO) ;;
                MACHTYPE|OPT*|OSTYPE|PIPESTATUS|PPID|PWD|RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_) ;;
                *) declare -p "$__runner_name" ;;
            esac
        done
        unset -f __runner_keep
        declare -f
        printf 'cd -- %q || cd "$__runner_root"\\n' "$PWD"
    } >|"$__runner_state.part" 2>/dev/null && mv -f "$__runner_state.part" "$__runner_state"
}
eval "$__runner_command"
"""
)
_SH = (
    _START
    + """
__runner_keep() {
    set +eux
    __runner_cwd=$PWD
    export __runner_cwd
    __runner_part=$__runner_state.part
    { export -p; echo 'cd "$__runner_cwd" || cd "$__runner_root"'; } >|"$__runner_part"
    mv -f "$__runner_part" "$__runner_state"
}
eval "$__runner_command"
"""
)


class Arguments(Struct, forbid_unknown_fields=True, kw_only=True):
    """A command line for bash, or for sh where there is no bash."""

    command: Annotated[str, Meta(min_length=1, max_length=100_000, description="The command line.")]
    workdir: Annotated[
        str, Meta(description="Relative to the workspace; default: its root, or where the shell is.")
    ] = ""
    shell: Annotated[
        str,
        Meta(
            pattern="^([a-z0-9][a-z0-9-]{0,62})?$",
            description="A name: directory, variables and functions are those that the last call with it has left.",
        ),
    ] = ""
    timeout_ms: Annotated[int, Meta(ge=1, le=3_600_000, description="How long it may take.")] = 120_000


Result = CommandResult


async def call(sandbox: Sandbox, arguments: Arguments) -> CommandResult:
    paths, command = sandbox.workspace.paths, arguments.command
    at = arguments.workdir and f"{paths.workspace}/{place(arguments.workdir)}"
    if arguments.shell:
        state = f"{paths.home}/.tool-shells/{arguments.shell}"
        words = ["sh", "-c", _IN_SHELL, "sh", state, at, command, _BASH, _SH]
    elif not at and await sandbox.has_bash():
        words = ["bash", "-c", command]
    else:
        words = ["sh", "-c", _SCRIPT, "sh", at or ".", command]
    return await run_command(sandbox, words, arguments.timeout_ms / 1000)
