"""Bounds of what the bridge and a gateway keep for those who do not read."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from runner.mcp.bridge import UNREAD, UNREAD_BYTES, UNSENT, Bridge, BridgeOptions, Inbox, Lists
from runner.mcp.gateway import Gateway

PING = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n'


@pytest.mark.parametrize(("size", "kept"), [(0, UNREAD), (8 << 20, UNREAD_BYTES // (8 << 20))], ids=["many", "large"])
async def test_notifications_that_nobody_reads_are_dropped_and_answers_are_not(size: int, kept: int) -> None:
    inbox = Inbox()
    for number in range(2 * UNREAD):
        inbox.put(number, size=size, may_be_lost=True)
    assert len(inbox) == kept
    inbox.put("answer", size=size)
    assert [await inbox.get() for _ in range(kept + 1)] == [*range(kept), "answer"]
    inbox.put("next", size=size, may_be_lost=True)
    assert await inbox.get() == "next"


async def test_a_server_that_reads_nothing_gets_no_more_after_64_mib() -> None:
    """Whoever waits for it learns that in time; what was cut off in the middle would be no message."""
    sent = bytearray()

    class Deaf:
        """The ends of a server that answers its handshake and reads no more."""

        answered = trio.Event()

        async def send_all(self, line: bytes) -> None:
            sent.extend(line)
            self.answered.set()
            await trio.sleep_forever()

        async def receive_some(self, most: int) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        async def aclose(self) -> None:
            await trio.lowlevel.checkpoint()

    async def approve(found: Lists) -> Lists:
        return found

    deaf, bridge = Deaf(), Bridge(BridgeOptions(), approve, print)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bridge.attach, deaf, deaf)
        await deaf.answered.wait()
        bridge.ready.set()
        session = bridge.open_session("tests", {})

        async def ask(number: int) -> None:
            params = {"name": "echo", "arguments": {"text": "x" * (8 << 20)}}
            async for _ in bridge.exchange(session, {"id": number, "method": "tools/call", "params": params}):
                pass

        bridge.lists["tools"] = {"echo": {"name": "echo"}}
        for number in range(32):
            nursery.start_soon(ask, number)
        await trio.testing.wait_all_tasks_blocked()
        assert UNSENT <= bridge._unsent < UNSENT + (9 << 20)
        nursery.cancel_scope.cancel()
    assert json.loads(bytes(sent))["method"] == "initialize"


async def test_a_gateway_whose_client_reads_nothing_reads_no_more_of_it() -> None:
    read = 0

    async def asking() -> bytes:
        nonlocal read
        await trio.lowlevel.checkpoint()
        read += 1
        return PING

    async def stuck(raw: bytes) -> None:
        await trio.sleep_forever()

    with trio.move_on_after(1):
        await Gateway({}).talk(asking, stuck)
    assert read <= 3 * UNREAD
