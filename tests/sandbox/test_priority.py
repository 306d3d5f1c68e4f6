"""A runner with real-time priority starts sandboxes, and what runs in them has none: it would heed no limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.core.model import Limits
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers.local import LocalProvider
from tests.support.needs import ROOT

pytestmark = ROOT.mark  # nobody else has such a priority to give up


@pytest.mark.nightly
async def test_commands_have_no_real_time_priority(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path)
    limits = Limits(cpus=1, memory_bytes=1 << 29, pids=200)
    handle = await provider.create(WorkspaceRequest(id="w", run="run", nonce="nonce", limits=limits))
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        async with provider.open(handle, SandboxSpec()) as workspace:
            said = await workspace.run(["/bin/sh", "-c", "cat /proc/self/stat"])
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        await provider.destroy(handle)
    assert said.stdout.split()[40] == b"0"
