"""A stream of events to clients that do not keep up."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing

from runner.artifacts.run_lock import try_lock
from runner.core.home import run_directory
from runner.core.model import succeeded
from runner.events.events import RunEnded
from runner.ops.host.liveness import is_run_lost
from runner.server.events import SLOW, EventStream
from runner.server.metrics import Metrics
from runner.server.running import Running
from tests.store.test_sqlite import STARTED, store_in


async def test_a_client_that_is_too_slow_is_told_so_and_dropped(
    autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    """Nothing waits for it but the one event that it is sent."""
    lock = try_lock(run_directory(tmp_path, "r"))
    assert lock is not None
    made, sent, metrics = 0, list[bytes](), Metrics()

    async def frames() -> AsyncGenerator[str]:
        nonlocal made
        while True:
            made += 1
            yield f"data: {made}\n\n"

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))
        await trio.sleep(SLOW + 1 if len(sent) == 5 else 0.1)

    env: Any = SimpleNamespace(store=None, settings=SimpleNamespace(home=tmp_path))
    nobody: Any = None  # starts runs
    running = Running(env, nobody, ended=nobody)
    server: Any = SimpleNamespace(metrics=metrics, stopping=trio.Event(), env=env, running=running)
    await EventStream(server, "r", frames())({}, trio.sleep_forever, send)

    assert sent[:5] == [b"", b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n", b"data: 4\n\n"]
    assert (sent[5].partition(b"\n")[0], sent[6:]) == (b"event: slow", [b""])
    assert (made, metrics.streams) == (5, 0)
    os.close(lock)


async def test_a_run_whose_end_a_client_has_not_seen_yet_is_not_lost(tmp_path: Path) -> None:
    """Its runner has gone by then: it has ended in order."""
    async with store_in(tmp_path) as store:
        await store.append("r", [STARTED])
        assert await is_run_lost(store, tmp_path, "r")
        await store.append("r", [RunEnded(succeeded(), 0)])
        assert not await is_run_lost(store, tmp_path, "r")
