"""Locks of open files, which the kernel lets go when their last descriptor is closed."""

from __future__ import annotations

import fcntl


def try_flock(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file or directory, unless somebody else has it."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
