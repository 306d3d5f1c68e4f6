"""Who carries a run out: a lock of the operating system on the run's directory, which ends with the process.

It needs no pid, so a number that was given out again deceives nobody, and no file that could be removed by
accident. Taken before a run's first event and released after its last, so that a run without an end whose
directory nobody holds has lost its runner.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY
_PATIENCE = 2.0  # seconds; whoever only looks holds for microseconds


def claim(directory: Path) -> int:
    """Make a run's directory and hold it: a descriptor, and closing it lets go. Raises ``FileExistsError``."""
    while True:
        directory.mkdir(parents=True, mode=0o700)
        with suppress(FileNotFoundError):  # taken, before it was held, for one whose runner has died
            held = os.open(directory, _FLAGS)
            fcntl.flock(held, fcntl.LOCK_EX)
            if _is_at(held, directory):
                return held
            os.close(held)


def take(directory: Path) -> int | None:
    """Hold the directory of a run whose runner has died, as ``claim`` does; ``None`` while another process holds it.

    One that is gone is made again.
    """
    patience = time.monotonic() + _PATIENCE
    while True:
        directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            held = os.open(directory, _FLAGS)
            if _try(held, fcntl.LOCK_EX) and _is_at(held, directory):
                return held
            somebody = not _try(held, fcntl.LOCK_SH)  # else others only look as well
            os.close(held)
            if somebody or time.monotonic() > patience:
                return None


def is_held(directory: Path) -> bool:
    """Whether a process carries the run out, or recovers it, now."""
    try:
        looking = os.open(directory, _FLAGS)
    except FileNotFoundError:
        return False
    try:
        return not _try(looking, fcntl.LOCK_SH)
    finally:
        os.close(looking)


def _try(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(held: int, directory: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(held), directory.stat())
    except FileNotFoundError:
        return False
