"""How the end of a server's process is told: by its status and after its last words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from runner.core.model import Exit
from runner.runtime.mcp_talk import talk


@pytest.mark.parametrize(
    ("ends_after", "told"),
    [
        pytest.param(0.1, ("exited 2", True), id="ends"),
        pytest.param(60, ("closed its output", True), id="stays"),
    ],
)
async def test_a_server_whose_output_ends_is_told_of_by_its_status_when_that_comes(
    autojump_clock: MockClock, ends_after: float, told: tuple[str, bool]
) -> None:
    said: list[str] = []

    async def wait() -> Exit:
        await trio.sleep(ends_after)
        return Exit(code=2)

    async def copy_log() -> None:
        await trio.sleep(ends_after + 1)
        said.append("no such option")

    async def count() -> None:
        await trio.lowlevel.checkpoint()
        process.oom_kills = 3

    process: Any = SimpleNamespace(wait=wait, count=count, oom_kills=0)
    killed: list[int] = []
    how = await talk(
        process,
        attach=trio.lowlevel.checkpoint,
        copy_log=copy_log,
        watch=trio.sleep_forever,
        restart=trio.Event(),
        on_oom=killed.append,
    )

    assert (how, said) == (told, ["no such option"] if ends_after < 1 else [])
    assert killed == [3]  # once
