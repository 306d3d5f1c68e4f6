"""Runner processes: which one is dead, so that others may end what it has left.

A lock of the operating system says so at once on the host and in the home where it is held. Nowhere else is it seen:
there a runner is dead when the store has not heard of it for a while, by the store's clock.
"""

from __future__ import annotations

from runner.ports.store import RunnerRow

BEAT = 10.0  # seconds between heartbeats
DEAD_AFTER = 60.0  # seconds without a heartbeat
FORGET_AFTER = 3_600.0  # seconds without a heartbeat after which nobody asks any more


def is_local(runner: RunnerRow, here: RunnerRow) -> bool:
    """Tell whether locks of a runner are seen here: the home is the same directory of the same host.

    After a restart of the host its boot is another, and in a container its name.
    """
    return runner.home == here.home and bool(here.home) and (runner.boot == here.boot or runner.host == here.host)


def is_dead(runner: RunnerRow | None, here: RunnerRow, now: int, *, locked: bool) -> bool:
    """Tell whether a runner is known to be dead, or to have ended, for ``None``.

    ``locked`` tells whether anybody has the lock here, which is the runner only where it is local.
    """
    if locked:
        return False
    return is_silent(runner, now) or (runner is not None and is_local(runner, here))


def is_silent(runner: RunnerRow | None, now: int) -> bool:
    """Tell whether the store has not heard of a runner for too long; of what it has it holds no lock."""
    return runner is None or now - runner.heartbeat > DEAD_AFTER * 1e6


def place(runner: RunnerRow, now: int) -> str:
    """Name a runner in a message."""
    return f"process {runner.pid} of host `{runner.host}`, last heard of {(now - runner.heartbeat) / 1e6:.0f} s ago"
