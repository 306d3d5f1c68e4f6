"""Store of a ``RUNNER_HOME``. Where runs were started and the store is gone, none is created."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from runner.artifacts.history import FILE, was_started
from runner.core.clock import now_microseconds
from runner.core.errors import StoreFailed
from runner.core.home import RUNS, WORKSPACES
from runner.core.model import ClockReference
from runner.core.settings import Settings
from runner.ports.store import Reader, Store
from runner.store import open_reader, open_store

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def see_clock(now: int) -> ClockReference:
    """Compare a wall clock that shows ``now`` with the time since boot, sleep included."""
    since_boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    return ClockReference(_BOOT.read_text().strip(), now - since_boot)


def make_home(settings: Settings) -> None:
    """Create ``RUNNER_HOME``, for its owner only. Raises ``StoreFailed``."""
    try:
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreFailed(f"`{settings.home}` cannot be made: {error.strerror}", hint="set RUNNER_HOME") from error


@asynccontextmanager
async def open_state(settings: Settings) -> AsyncIterator[Store]:
    """Open the store; in a new home, create it. Raises what ``open_store`` raises."""
    known = has_history(settings)  # before the store is looked at, or another's first run could come between
    async with open_store(settings.store_url, must_exist=known) as opened:
        if opened.writable and await opened.anchor() is None:  # for the first who asks about the clock
            await opened.set_anchor(see_clock(now_microseconds()))
        yield opened


@asynccontextmanager
async def read_state(settings: Settings) -> AsyncIterator[Reader]:
    """Open the store for reading, also on a read-only medium."""
    known = has_history(settings)
    async with open_reader(settings.store_url, must_exist=known) as opened:
        yield opened


def has_history(settings: Settings) -> bool:
    """Tell by the directories whether a run, or a workspace outside of runs, was ever started here."""
    runs, workspaces = settings.home / RUNS, settings.home / WORKSPACES
    try:
        return any(map(was_started, runs.glob("*"))) or any(workspaces.glob(f"*/{FILE}"))
    except OSError:  # whoever opens the store will say what is wrong with the home
        return False
