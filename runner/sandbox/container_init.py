"""A container's first process as this host sees it: what keeps it within its limits, and its end without the daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from runner.core.errors import Escaped, ProviderFailed
from runner.core.model import Limits
from runner.ports.provider import KILL_GRACE
from runner.sandbox import cgroup


class First:
    """``what`` names the workspace in messages."""

    def __init__(self, pid: int, pidfd: int, what: str) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._what = what

    def group(self, limits: Limits) -> cgroup.Group:
        """What the daemon keeps its container within. Raises ``ProviderFailed``."""
        try:
            return cgroup.group_of(self.pid, limits)
        except OSError as error:
            raise ProviderFailed(f"the limits of {self._what} cannot be read: {error}") from error

    async def wait_ended(self) -> None:
        """Wait until it has."""
        await trio.lowlevel.wait_readable(self._pidfd)

    def kill(self) -> None:
        """All that runs in its container ends with it."""
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
def open_first(pid: int, container: str, what: str) -> Iterator[First]:
    """The process with this pid, if it is the container's. Raises ``ProviderFailed`` when that has ended already."""
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError) as error:  # an ended container has the pid 0
        raise ProviderFailed(f"the guest of {what} has ended at once") from error
    try:
        if container not in membership(pid):  # the pid is another's by now
            raise ProviderFailed(f"the guest of {what} has ended at once")
        yield First(pid, pidfd, what)
    finally:
        os.close(pidfd)


def membership(pid: int) -> str:
    """The control groups of a process in the kernel's text, which name its container; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""
