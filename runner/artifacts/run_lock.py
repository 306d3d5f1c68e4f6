"""The lock of a run: a lock of the operating system on the run's directory, which ends with the process.

It needs no pid, which could be reused, and no file that could be removed by accident. The runner takes it before the
run's first event and releases it after the last, so a run without an end whose directory is not locked has lost its
runner.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from runner.core.locks import try_flock

_FLAGS = os.O_RDONLY | os.O_DIRECTORY
_PATIENCE = 2.0  # seconds; ``is_locked`` holds the lock for microseconds


def create_locked(directory: Path) -> int:
    """Make a run's directory and lock it; closing the descriptor unlocks it. Raises ``FileExistsError``."""
    while True:
        directory.mkdir(parents=True, mode=0o700)
        with suppress(FileNotFoundError):  # removed before it was locked, as if its runner had died
            held = os.open(directory, _FLAGS)
            fcntl.flock(held, fcntl.LOCK_EX)
            if _is_still_at(held, directory):
                return held
            os.close(held)


def try_lock(directory: Path) -> int | None:
    """Lock the directory of a run whose runner has died, as ``create_locked`` does; ``None`` while another process has
    the lock. A directory that is gone is made again.
    """
    patience = time.monotonic() + _PATIENCE
    while True:
        directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            held = os.open(directory, _FLAGS)
            if try_flock(held, fcntl.LOCK_EX) and _is_still_at(held, directory):
                return held
            has_owner = not try_flock(held, fcntl.LOCK_SH)  # else others only look as well
            os.close(held)
            if has_owner or time.monotonic() > patience:
                return None


def is_locked(directory: Path) -> bool:
    """Tell whether a process executes the run, or recovers it, now."""
    try:
        looking = os.open(directory, _FLAGS)
    except FileNotFoundError:
        return False
    try:
        return not try_flock(looking, fcntl.LOCK_SH)
    finally:
        os.close(looking)


def _is_still_at(held: int, directory: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(held), directory.stat())
    except FileNotFoundError:
        return False
