"""The fake's two promises: scripted time is virtual, and scripted faults are raised where they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from runner.core.errors import ProviderFailed
from runner.core.model import Exit
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from tests.support.fake_provider import FakeProvider, Scripted

REQUEST = WorkspaceRequest(id="w", run="run", nonce="nonce")


async def test_an_hour_of_a_scripted_command_costs_nothing(tmp_path: Path, autojump_clock: MockClock) -> None:
    fake = FakeProvider(tmp_path, lambda argv: Scripted(Exit(code=3), stdout=b"done", seconds=3600))
    async with fake.open(await fake.create(REQUEST), SandboxSpec()) as workspace:
        before = trio.current_time()
        result = await workspace.run(["make"])

    assert (result.exit, result.stdout, trio.current_time() - before) == (Exit(code=3), b"done", 3600)
    assert fake.asked == [("make",)]


@pytest.mark.parametrize("method", ["create", "destroy"])
async def test_a_fault_is_raised_by_the_method_it_names(tmp_path: Path, method: str) -> None:
    fake = FakeProvider(tmp_path, faults={method: ProviderFailed("out of order")})
    with pytest.raises(ProviderFailed, match="out of order"):
        await fake.destroy(await fake.create(REQUEST))
