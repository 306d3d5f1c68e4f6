"""Run git in a session of its own: no terminal, files for its streams, the whole process group ends with the call."""

from __future__ import annotations

import os
import re
import signal
import subprocess  # noqa: TID251  # one synchronous question, before there is a loop: git's version
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import IO, NamedTuple

import trio
from msgspec import Struct

STOP_GRACE = 2.0  # seconds between SIGTERM and SIGKILL; git removes its lock files on SIGTERM
STDERR_BYTES = 4096  # how much of git's messages is kept

_ULIMITS = """ulimit -v "$1" && ulimit -f "$2" && shift 2 && exec "$@\""""  # KiB, and blocks of 512 bytes a file


class ProcessLimits(NamedTuple):
    """Limits of one process; ``file_bytes`` is for each file that it writes."""

    memory_bytes: int
    file_bytes: int


class GitResult(Struct, frozen=True):
    code: int
    stdout: bytes
    stderr: str


def with_limits(limits: ProcessLimits, *, die_on_file_size: bool) -> list[str]:
    """Return a prefix of a command line that applies limits to the command.

    Beyond the file size the command dies by SIGXFSZ (as ``ls-tree`` must, which ignores errors), or sees an error.
    """
    trap = "" if die_on_file_size else "trap '' XFSZ && "
    return ["/bin/sh", "-c", trap + _ULIMITS, "sh", str(limits.memory_bytes >> 10), str(limits.file_bytes >> 9)]


async def run(
    argv: Sequence[str | bytes],
    *,
    env: Mapping[str, str],
    stdin: bytes = b"",
    stdout: IO[bytes] | None = None,
    inherited: Sequence[int] = (),
) -> GitResult:
    """Run a command to its end; its output goes to ``stdout`` or else into the result.

    ``inherited`` are descriptors that it has beside the usual three. New files get the usual modes whatever the umask
    of this process. Cancelling ends the command's process group.
    """
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        source.write(stdin)
        source.seek(0)
        ended: subprocess.CompletedProcess[bytes] = await trio.run_process(
            list(argv),
            stdin=source.fileno(),
            stdout=(stdout or output).fileno(),
            stderr=errors.fileno(),
            check=False,
            deliver_cancel=_stop,
            env=env,
            cwd="/",
            umask=0o022,
            start_new_session=True,
            pass_fds=tuple(inherited),
        )
        output.seek(0)
        errors.seek(0)
        return GitResult(ended.returncode, output.read(), errors.read(STDERR_BYTES).decode("utf-8", "replace").strip())


async def _stop(process: trio.Process) -> None:
    # trio cancels this the moment the leader has ended; the rest of its group is killed either way.
    try:
        _signal(process, signal.SIGTERM)
        await trio.sleep(STOP_GRACE)
    finally:
        _signal(process, signal.SIGKILL)


def _signal(process: trio.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@cache
def version(program: str) -> tuple[int, ...]:
    """Return the version of a git binary, empty when it prints none; it runs once in this process."""
    answer = subprocess.run([program, "--version"], env={}, stdout=subprocess.PIPE, timeout=10, check=False).stdout
    found = re.match(rb"git version (\d+)\.(\d+)", answer)
    return tuple(map(int, found.groups())) if found else ()
