"""How much a benchmark measures: as much as it says, or little where it is only to be seen that it runs."""

from __future__ import annotations

import os

SMALL = "RUNNER_BENCH_SMALL"  # of the environment: set by the tests of the night


def rounds(wanted: int) -> int:
    """As many as ``wanted``, or three at most."""
    return min(wanted, 3) if SMALL in os.environ else wanted


def amount(wanted: int) -> int:
    """As much as ``wanted``, or a tenth."""
    return wanted // 10 if SMALL in os.environ else wanted
