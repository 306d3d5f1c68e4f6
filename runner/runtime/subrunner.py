"""Ask a sub-runner which command starts its agent.

A sub-runner is a script of this installation that prints one line and runs nothing. It is sourced on the host, in a
Bash of its own that knows only the environment it is given; the words of its line are then executed
inside the workspace, without a shell.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runner.core import plugins
from runner.core.capture import capture
from runner.core.errors import SubRunnerContract
from runner.core.last_line import last_line
from runner.core.settings import shipped
from runner.runtime.shell_words import split

MAX_LINE = 1 << 20  # bytes
_ERROR_TAIL = 4 << 10  # bytes of stderr that are looked at for its last line

# -p: neither BASH_ENV nor exported functions of the environment run before the script does.
_BASH = ("bash", "--noprofile", "--norc", "-p", "-c", 'set -euo pipefail; source "$1"; source "$2"', "runner")


def script_of(agent: str, suffix: str = "") -> Path:
    """Return the place of an agent's sub-runner, or of another script of it.

    Those of other distributions lie beside their module, never in a repository under work.
    """
    return (plugins.beside("runner.agents", agent) or shipped("runners")) / f"{agent}{suffix}.sh"


async def read_command(script: Path, env: Mapping[str, str]) -> list[str]:
    """Return the command line that a sub-runner prints for this environment, as words; nothing of it is run.

    Raises ``SubRunnerContract`` unless it exits 0 having printed exactly one line of quoted words. When the call ends,
    also by cancelling, the script and its processes have been killed.
    """
    common = str(shipped("runners") / "common.sh")
    done = await capture([*_BASH, common, str(script)], env, most=MAX_LINE, tail=_ERROR_TAIL, cwd="/")
    line = done.out
    if len(line) > MAX_LINE:
        raise _contract_error(script, f"printed more than {MAX_LINE} bytes")
    if done.code != 0:
        raise _contract_error(script, f"exited {done.code}: {last_line(done.err) or 'it said nothing on stderr'}")
    if line.count(b"\n") != 1 or not line.endswith(b"\n"):
        raise _contract_error(script, f"printed {len(line.splitlines())} lines, not exactly one")
    try:
        words = split(line[:-1].decode())
    except UnicodeDecodeError as error:
        raise _contract_error(script, f"printed what is not UTF-8, at byte {error.start + 1}") from None
    if not words:
        raise _contract_error(script, "printed an empty line")
    return words


def _contract_error(script: Path, what: str) -> SubRunnerContract:
    return SubRunnerContract(f"sub-runner `{script.name}` {what}")
