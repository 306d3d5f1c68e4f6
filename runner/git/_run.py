"""Spawning git: own session, no terminal, files for its streams, the whole process group ends with the call."""

from __future__ import annotations

import os
import re
import signal
import subprocess  # noqa: TID251  # one synchronous question, before there is a loop: git's version
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import IO

import trio

STOP_GRACE = 2.0  # seconds between SIGTERM and SIGKILL; git removes its lock files on SIGTERM
WORDS_BYTES = 4096  # how much of git's own words is kept

Limits = tuple[int, int]  # bytes of memory, and of a file that is written

_LIMITED = """ulimit -v "$1" && ulimit -f "$2" && shift 2 && exec "$@\""""  # KiB, and blocks of 512 bytes a file


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: bytes
    words: str


def limited(limits: Limits, *, mortal: bool) -> list[str]:
    """Words before a command that bound what it takes.

    It dies of a file's size by SIGXFSZ (which ``ls-tree`` must, for it writes on), or gets an error and can say so.
    """
    memory, size = limits
    trap = "" if mortal else "trap '' XFSZ && "
    return ["/bin/sh", "-c", trap + _LIMITED, "sh", str(memory >> 10), str(size >> 9)]


async def run(
    argv: Sequence[str | bytes],
    *,
    env: Mapping[str, str],
    stdin: bytes = b"",
    stdout: IO[bytes] | None = None,
    inherited: Sequence[int] = (),
) -> Ended:
    """Run a command to its end; ``stdout`` takes the output unread, else it is returned.

    ``inherited`` are descriptors that it has beside the usual three. Files are made with the usual modes whatever the
    umask. Cancelling ends the command's whole group.
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
        return Ended(ended.returncode, output.read(), errors.read(WORDS_BYTES).decode("utf-8", "replace").strip())


async def _stop(process: trio.Process) -> None:
    # trio cancels this the moment the leader has ended; what it left behind is killed either way.
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
    """The version of a git binary, empty when it does not say one. It is asked once."""
    answer = subprocess.run([program, "--version"], env={}, stdout=subprocess.PIPE, timeout=10, check=False).stdout
    found = re.match(rb"git version (\d+)\.(\d+)", answer)
    return tuple(map(int, found.groups())) if found else ()
