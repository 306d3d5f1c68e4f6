"""Store of a ``RUNNER_HOME``. Where runs were started and the store is gone, none is created."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from runner.artifacts.history import FILE, was_started
from runner.core.errors import StoreFailed
from runner.core.home import RUNS, STATE_FILE, WORKSPACES
from runner.core.model import ClockReference
from runner.core.settings import Settings
from runner.store.sqlite import Reader, SqliteStore, is_read_only, open_reader, open_store

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def now_microseconds() -> int:
    return time.time_ns() // 1000


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
async def open_state(settings: Settings) -> AsyncIterator[SqliteStore]:
    """Open the store; in a new home, create it. Raises what ``open_store`` raises."""
    known = has_history(settings)  # before the store is looked at, or another's first run could come between
    store = open_store(settings.home / STATE_FILE, now=now_microseconds, entropy=secrets.token_bytes, must_exist=known)
    async with store as opened:
        if await opened.anchor() is None and not is_read_only(
            settings.home
        ):  # so that the first who asks about the clock has something to compare with
            await opened.set_anchor(see_clock(now_microseconds()))
        yield opened


@asynccontextmanager
async def read_state(settings: Settings) -> AsyncIterator[Reader]:
    """Open the store for reading, also on a read-only medium."""
    known = has_history(settings)
    async with open_reader(settings.home / STATE_FILE, must_exist=known) as opened:
        yield opened


def has_history(settings: Settings) -> bool:
    """Tell by the directories whether a run, or a workspace outside of runs, was ever started here."""
    runs, workspaces = settings.home / RUNS, settings.home / WORKSPACES
    try:
        return any(map(was_started, runs.glob("*"))) or any(workspaces.glob(f"*/{FILE}"))
    except OSError:  # whoever opens the store will say what is wrong with the home
        return False
