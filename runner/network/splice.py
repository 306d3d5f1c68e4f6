"""Bytes from one socket to another that the kernel moves, without a copy of them here."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress

import trio

AT_ONCE = 1 << 18  # bytes; the size of the pipe
_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK


async def splice(
    source: trio.socket.SocketType, target: trio.socket.SocketType, moved: Callable[[int], None], most: int | None
) -> int:
    """Move bytes until the end of ``source``, or ``most`` of them; return how many were moved.

    ``moved`` is told of each piece before it is sent on, and may raise. Raises ``trio.BrokenResourceError``.
    """
    ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with suppress(PermissionError):  # beyond an ordinary user's limit for pipes
            fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, AT_ONCE)
        return await _splice(source, target, ends, moved, most)
    except OSError as error:
        raise trio.BrokenResourceError from error
    finally:
        for end in ends:
            os.close(end)


async def _splice(
    source: trio.socket.SocketType,
    target: trio.socket.SocketType,
    pipe: tuple[int, int],
    moved: Callable[[int], None],
    most: int | None,
) -> int:
    total = 0
    while most is None or total < most:
        await trio.lowlevel.checkpoint()
        try:
            size = AT_ONCE if most is None else min(AT_ONCE, most - total)
            count = os.splice(source.fileno(), pipe[1], size, flags=_FLAGS)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(source)
            continue
        if not count:
            break
        moved(count)
        total += count
        while count:
            try:
                count -= os.splice(pipe[0], target.fileno(), count, flags=_FLAGS)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(target)
    return total
