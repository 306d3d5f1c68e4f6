"""Limits where there is cgroup version 2 alone, as on current distributions: the suite's own checks, in a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import microvm

CHECKS = (
    "test_memory_over_the_limit_ends_the_offender_and_says_why_and_the_workspace_lives",
    "test_kills_for_memory_are_counted_also_when_the_command_goes_on",
    "test_a_fork_bomb_stays_under_its_limit",
    "test_processors_are_limited",
    "test_isolation_read_back_is_what_holds",
)


@pytest.mark.nightly
@microvm.MACHINE.mark
def test_limits_hold_on_cgroup_version_2(tmp_path: Path) -> None:
    chosen = f"({' or '.join(CHECKS)}) and local and not docker and not gvisor and not without"

    ran = microvm.run_tests(["-q", "-k", chosen, "tests/conformance/test_provider.py"], below=tmp_path, seconds=900)

    assert ran.status == 0, ran.console[-6000:]
    assert ran.console.count(" passed") == 2
