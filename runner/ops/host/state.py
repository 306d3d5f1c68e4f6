"""Store of a ``RUNNER_HOME``. Where runs were started and the store is gone, none is created."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from runner.artifacts.history import FILE, was_started
from runner.core.clock import now_microseconds
from runner.core.errors import RunnerError, StoreFailed
from runner.core.home import RUNS, WORKSPACES
from runner.core.model import ClockReference
from runner.core.nurseries import open_services
from runner.core.settings import Settings
from runner.lifecycle.liveness import BEAT
from runner.ports.store import Reader, RunnerRow, Store
from runner.store import open_at_once, open_reader, open_store

if TYPE_CHECKING:
    import trio
else:
    from runner.core import trio_later as trio

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STAT = Path("/proc/self/stat")


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
    async with open_store(settings.store_url, must_exist=known, runner=this_runner(settings.home)) as opened:
        if opened.writable and await opened.anchor() is None:  # for the first who asks about the clock
            await opened.set_anchor(see_clock(now_microseconds()))
        async with _beating(opened):
            yield opened


@asynccontextmanager
async def _beating(store: Store) -> AsyncIterator[None]:
    """Let the store hear of this runner as long as the block runs, also while it ends after it was cancelled."""

    async def beat() -> None:
        with scope:
            while True:
                await trio.sleep(BEAT)
                with suppress(RunnerError):  # the next one may be heard, and until then others wait
                    await store.beat()

    scope = trio.CancelScope(shield=True)
    async with open_services() as services:
        services.start_soon(beat)
        try:
            yield
        finally:
            scope.cancel()
            with trio.CancelScope(shield=True), suppress(RunnerError):
                await store.leave()


def this_runner(home: Path) -> RunnerRow:
    """Identify this process, as one that opens a store."""
    try:
        found = home.stat()
        # The number of a device may be another after the next mount; not every file system has an id.
        place = f"{os.statvfs(home).f_fsid or found.st_dev}:{found.st_ino}"
    except OSError:
        place = ""  # nobody can have a lock there
    ticks = int(_STAT.read_text(errors="replace").rpartition(")")[2].split()[19])
    boot = _BOOT.read_text().strip()
    return RunnerRow(
        id=os.urandom(8).hex(), host=os.uname().nodename, boot=boot, home=place, pid=os.getpid(), ticks=ticks
    )


@asynccontextmanager
async def read_state(settings: Settings) -> AsyncIterator[Reader]:
    """Open the store for reading, also on a read-only medium."""
    known = has_history(settings)
    async with open_reader(settings.store_url, must_exist=known) as opened:
        yield opened


def read_state_at_once(settings: Settings) -> AbstractContextManager[Reader] | None:
    """Open the store for reading without a loop; ``None`` where it is not a file of this host."""
    return open_at_once(settings.store_url, must_exist=has_history(settings))


def has_history(settings: Settings) -> bool:
    """Tell by the directories whether a run, or a workspace outside of runs, was ever started here."""
    runs, workspaces = settings.home / RUNS, settings.home / WORKSPACES
    try:
        return any(map(was_started, runs.glob("*"))) or any(workspaces.glob(f"*/{FILE}"))
    except OSError:  # whoever opens the store will say what is wrong with the home
        return False
