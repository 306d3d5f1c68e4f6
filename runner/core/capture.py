"""Run a command of this host for its output: bounded, without input, and ended with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess  # noqa: TID251  # PIPE and DEVNULL only; trio spawns
from collections.abc import Mapping, Sequence

import trio
from msgspec import Struct

_DRAIN_SECONDS = 1.0  # for the output of a command that has ended, which a process out of reach may keep open


class Captured(Struct, frozen=True):
    """The end of a command: its exit, the head of its stdout and the tail of its stderr."""

    code: int
    out: bytes
    err: bytes


async def capture(
    argv: Sequence[str], env: Mapping[str, str], *, most: int, tail: int = 0, cwd: str | None = None
) -> Captured:
    """Run a command in a session of its own. One byte more than ``most`` ends it; of stderr the last ``tail`` are kept.

    When the call ends, also by cancelling, the command and its background jobs have been killed. Raises ``OSError``
    when it cannot be started.
    """
    process = await trio.lowlevel.open_process(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = process.stdout, process.stderr
    out, err = bytearray(), bytearray()

    def kill() -> None:
        os.killpg(process.pid, signal.SIGKILL)  # never after `wait`: until then the number is the process's own

    async def read_out() -> None:
        async for chunk in stdout:
            out.extend(chunk)
            if len(out) > most:
                kill()
                break

    async def read_err() -> None:
        async for chunk in stderr:
            err.extend(chunk)
            del err[: max(len(err) - tail, 0)]

    try:
        async with stdout, stderr, trio.open_nursery() as nursery:
            nursery.start_soon(read_out)
            nursery.start_soon(read_err)
            try:
                await _ended(process)
            finally:
                kill()
            nursery.cancel_scope.deadline = trio.current_time() + _DRAIN_SECONDS
    finally:
        with trio.CancelScope(shield=True):
            code = await process.wait()
    return Captured(code, bytes(out), bytes(err))


async def _ended(process: trio.Process) -> None:
    """Wait until a process has ended, without reaping it."""
    pidfd = os.pidfd_open(process.pid)
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
