"""Processes of this host as ``/proc`` shows them, and killing a set of them without hitting a recycled pid."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import trio

from runner.core.errors import Escaped
from runner.ports.provider import KILL_GRACE

_QUIET_LOOKS = 5


def descendants(pid: int) -> Iterator[int]:
    """Yield the living descendants of a process, nearest first."""
    waiting = [pid]
    while waiting:
        for task in _read_words(f"/proc/{waiting.pop()}/task"):
            children = [int(child) for child in task]
            yield from children
            waiting += children


def _read_words(tasks: str) -> Iterator[list[str]]:
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(tasks):
            yield Path(tasks, task, "children").read_text().split()


def parent(pid: int) -> int:
    """Return the parent's pid. Raises ``FileNotFoundError`` or ``ProcessLookupError`` for an ended process."""
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def user(pid: int) -> int:
    """Return the real uid of a process. Raises as ``parent``."""
    with open(f"/proc/{pid}/status", "rb", buffering=0) as status:  # called for hundreds in a row
        return int(status.read().partition(b"\nUid:\t")[2].split(None, 1)[0])


def owner(pid: int) -> int:
    """Return the effective uid, or root for a non-dumpable process. Cheaper than ``user``. Raises as ``parent``."""
    return os.stat(f"/proc/{pid}").st_uid


def mounts(pid: int) -> str:
    """Return the kernel's text of a process's mounts; empty for an ended process or without permission."""
    try:
        return Path(f"/proc/{pid}/mountinfo").read_text(errors="replace")
    except OSError:
        return ""


def environment(pid: int) -> bytes:
    """Return the environment that its program was started with; empty as for ``mounts``."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def newest() -> int:
    """Return the newest pid of this host."""
    return int(Path("/proc/loadavg").read_text().split()[-1])


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


async def kill_all(belongs: Callable[[int], bool], *, what: str) -> None:
    """Kill every process for which ``belongs`` is true, also new ones. Raises ``Escaped`` for survivors.

    A look that finds none is enough if no process was started during it. Else the next one is at the new ones only:
    the kernel gives a pid again when it has given all others.
    """
    reached: list[int] = []
    quiet = 0  # looks in a row that found nothing
    innocent: set[int] = set()
    with trio.move_on_after(KILL_GRACE):
        while quiet < _QUIET_LOOKS:
            before, living = newest(), set(processes())
            # A zombie uses nothing, and only its parent can reap it.
            reached = signal_where(
                sorted(living - innocent), signal.SIGKILL, lambda pid: belongs(pid) and _stat(pid)[0] != "Z"
            )
            innocent = set() if reached else living
            if reached:
                quiet = 0
            elif newest() == before:
                break
            else:
                quiet += 1
            await trio.sleep(0.005)
    if reached:
        raise Escaped(f"killed processes of {what} still live: {', '.join(map(str, reached))}")


def signal_where(pids: Iterable[int], number: signal.Signals, belongs: Callable[[int], bool]) -> list[int]:
    """Signal the processes for which ``belongs`` is true, and return their pids.

    Asks again once it has a pidfd, so that a recycled pid is never signalled.
    """
    reached = []
    for pid in pids:
        try:
            if not belongs(pid):
                continue
            pidfd = os.pidfd_open(pid)
            try:
                if belongs(pid):
                    signal.pidfd_send_signal(pidfd, number)
                    reached.append(pid)
            finally:
                os.close(pidfd)
        except (ProcessLookupError, FileNotFoundError):
            continue
    return reached
