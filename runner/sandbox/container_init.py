"""A container's first process as this host sees it: its control groups, and killing it without the daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import trio

from runner.core.errors import Escaped, ProviderFailed
from runner.core.model import Limits
from runner.ports.provider import KILL_GRACE
from runner.sandbox import cgroup


class FirstProcess(Protocol):
    """The first process of a container, wherever it runs."""

    def group(self, limits: Limits) -> cgroup.Counters: ...
    async def wait_ended(self) -> None: ...
    def kill(self) -> None: ...


class InitProcess:
    """``what`` names the workspace in messages."""

    def __init__(self, pid: int, pidfd: int, what: str) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._what = what

    def group(self, limits: Limits) -> cgroup.ControlGroups:
        """Return the control groups that the daemon has put it in. Raises ``ProviderFailed``."""
        try:
            return cgroup.groups_of(self.pid, limits)
        except OSError as error:
            raise ProviderFailed(f"the limits of {self._what} cannot be read: {error}") from error

    async def wait_ended(self) -> None:
        await trio.lowlevel.wait_readable(self._pidfd)

    def kill(self) -> None:
        """Kill it, and with it everything in its container."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it, and wait until it is gone. Raises ``Escaped``."""
        self.kill()
        with trio.move_on_after(KILL_GRACE) as patience:
            await self.wait_ended()
        if patience.cancelled_caught:
            raise Escaped(f"the killed first process of {self._what} still lives: {self.pid}")


@contextmanager
def open_init_process(pid: int, container: str, what: str) -> Iterator[InitProcess]:
    """Open the process with this pid. Raises ``ProviderFailed`` unless it is the container's, or if it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError) as error:  # an ended container has the pid 0
        raise ProviderFailed(f"the guest of {what} ended at once") from error
    try:
        if container not in membership(pid):  # the pid is another's by now
            raise ProviderFailed(f"the guest of {what} ended at once")
        yield InitProcess(pid, pidfd, what)
    finally:
        os.close(pidfd)


def membership(pid: int) -> str:
    """Return the kernel's text of a process's control groups, which name its container; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""
