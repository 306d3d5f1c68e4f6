"""Pipes of a child: what came through them is received once, in order, whoever looked at it meanwhile."""

from __future__ import annotations

import os

import trio
from trio.testing import wait_all_tasks_blocked

from runner.sandbox.child_process import PipeReader


async def test_what_was_looked_at_while_a_reader_waited_is_received_by_it() -> None:
    """Regression: the reader saw end of file, and the last words of a command that could not start were lost."""
    ours, theirs = os.pipe()
    reader = PipeReader(ours)
    received: list[bytes] = []

    async def read() -> None:
        while chunk := await reader.receive_some(3):
            received.append(chunk)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        os.write(theirs, b"last words")
        os.close(theirs)
        reader.look_ahead()

    assert b"".join(received) == b"last words"
    assert reader.head == b"last words"
    await reader.aclose()
