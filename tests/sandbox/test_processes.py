"""Killing a set of this host's processes."""

from __future__ import annotations

import os
import subprocess
from signal import SIGKILL

from runner.sandbox import processes


async def test_a_process_that_starts_during_a_look_is_found_by_the_next_one() -> None:
    """Every look reads a file of each process that it asks about, and a busy host starts some during each."""
    asked: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def belongs(pid: int) -> bool:
        asked.append(pid)
        if not started:
            started.append(subprocess.Popen(["sleep", "60"]))
        return pid == started[0].pid

    await processes.kill_all(belongs, what="the test")

    assert started[0].wait(10) == -SIGKILL
    assert started[0].pid in asked


async def test_a_look_asks_only_about_processes_that_the_one_before_did_not_know() -> None:
    asked: list[int] = []

    def belongs(pid: int) -> bool:
        asked.append(pid)
        if pid == os.getpid():
            subprocess.run(["true"], check=True)
        return False

    await processes.kill_all(belongs, what="the test")

    assert asked.count(os.getpid()) == 1
