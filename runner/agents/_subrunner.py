"""Ask a sub-runner which command starts its agent.

A sub-runner is a shipped script that prints one line and runs nothing. It is sourced on the host, in a
Bash of its own that knows only the environment it is given; the words of its line are then executed
inside the workspace, without a shell.
"""

from __future__ import annotations

import os
import signal
import subprocess  # noqa: TID251  # PIPE and DEVNULL only; trio spawns
from collections.abc import Mapping
from pathlib import Path

import trio

from runner.agents._lines import last_line
from runner.agents._words import split
from runner.errors import SubRunnerContract

LONGEST_LINE = 1 << 20  # bytes
_ERROR_TAIL = 4 << 10  # bytes of stderr that are looked at for its last line

# -p: neither BASH_ENV nor exported functions of the environment run before the script does.
_BASH = ("bash", "--noprofile", "--norc", "-p", "-c", 'set -euo pipefail; source "$1"', "runner")


async def command_of(script: Path, env: Mapping[str, str]) -> list[str]:
    """The command line that a sub-runner prints for this environment, as words; nothing of it is run.

    Raises ``SubRunnerContract`` unless it exits 0 having printed exactly one line of quoted words. When
    the call ends, also by cancelling, the script and what it started have been killed.
    """
    code, line, errors = await _capture([*_BASH, str(script)], env)
    if len(line) > LONGEST_LINE:
        raise _broken(script, f"printed more than {LONGEST_LINE} bytes")
    if code != 0:
        raise _broken(script, f"exited {code}: {last_line(errors) or 'it said nothing on stderr'}")
    if line.count(b"\n") != 1 or not line.endswith(b"\n"):
        raise _broken(script, f"printed {len(line.splitlines())} lines, not exactly one")
    try:
        words = split(line[:-1].decode())
    except UnicodeDecodeError as error:
        raise _broken(script, f"printed what is not UTF-8, at byte {error.start + 1}") from None
    if not words:
        raise _broken(script, "printed an empty line")
    return words


def _broken(script: Path, what: str) -> SubRunnerContract:
    return SubRunnerContract(f"sub-runner `{script.name}` {what}")


async def _capture(argv: list[str], env: Mapping[str, str]) -> tuple[int, bytes, bytes]:
    """Run a command in a session of its own: status, the head of its stdout, the tail of its stderr.

    One byte more than ``LONGEST_LINE`` ends it. When it ends, its background jobs end as well.
    """
    process = await trio.lowlevel.open_process(
        argv,
        env=dict(env),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = process.stdout, process.stderr
    line, errors = bytearray(), bytearray()

    def kill() -> None:
        os.killpg(process.pid, signal.SIGKILL)  # never after `wait`: until then the number is the process's own

    async def read_line() -> None:
        async for chunk in stdout:
            line.extend(chunk)
            if len(line) > LONGEST_LINE:
                kill()
                break

    async def read_errors() -> None:
        async for chunk in stderr:
            errors.extend(chunk)
            del errors[:-_ERROR_TAIL]

    try:
        async with stdout, stderr, trio.open_nursery() as nursery:
            nursery.start_soon(read_line)
            nursery.start_soon(read_errors)
            try:
                await _exit_of(process)
            finally:
                kill()
    finally:
        with trio.CancelScope(shield=True):
            code = await process.wait()
    return code, bytes(line), bytes(errors)


async def _exit_of(process: trio.Process) -> None:
    """Wait until a process has ended, leaving it to be reaped."""
    pidfd = os.pidfd_open(process.pid)
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
