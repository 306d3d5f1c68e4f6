"""Listening in a workspace: connections to its own loopback are served from outside, and only while that is wanted."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import trio

from runner.ports.provider import Connection, Workspace
from runner.testing.place import MIB, Place

Dial = Callable[[int], trio.SocketStream]  # of a provider that runs nothing, and plays what commands would connect to

# So many connections at once, each with so many bytes, and its own end before the echo's is awaited.
CLIENT = """
import os, socket, sys, threading
port, count, size = map(int, sys.argv[1:])
good, all_open = [], threading.Barrier(count)
def talk():
    body = os.urandom(size)
    with socket.create_connection(("127.0.0.1", port)) as end:
        all_open.wait()
        def send():
            end.sendall(body)
            end.shutdown(socket.SHUT_WR)
        sender = threading.Thread(target=send)
        sender.start()
        with end.makefile("rb") as reader:
            good.append(reader.read() == body)
        sender.join()
threads = [threading.Thread(target=talk) for _ in range(count)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(good.count(True))
"""
KNOCK = "import socket, sys; print(socket.socket().connect_ex(('127.0.0.1', int(sys.argv[1]))) == 0)"
HOLD = """
import socket, sys
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
end.send(b"a")
print(end.recv(1))
"""


async def _echo(connection: Connection) -> None:
    while chunk := await connection.receive_some(1 << 16):
        await connection.send_all(chunk)


async def _echoed(place: Place, workspace: Workspace, port: int, count: int, size: int) -> int:
    """Count those of so many connections at once that got back what they said."""
    if dial := getattr(place.provider, "dial", None):
        return await _echoed_by_fake(dial, port, count, size)
    with trio.fail_after(60):
        done = await workspace.run(["python3", "-SIc", CLIENT, str(port), str(count), str(size)])
    assert (done.exit.code, done.stderr) == (0, b"")
    return int(done.stdout)


async def _echoed_by_fake(dial: Dial, port: int, count: int, size: int) -> int:
    good = 0

    async def talk() -> None:
        nonlocal good
        body, heard = os.urandom(size), bytearray()

        async def send() -> None:
            await stream.send_all(body)
            await stream.send_eof()

        async with dial(port) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(send)
            while chunk := await stream.receive_some():
                heard += chunk
        good += heard == body

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(talk)
    return good


async def _answers(place: Place, workspace: Workspace, port: int) -> bool:
    """True if anything listens on a port of the workspace's loopback."""
    if hasattr(place.provider, "listening"):
        return port in place.provider.listening
    done = await workspace.run(["python3", "-SIc", KNOCK, str(port)])
    return done.stdout == b"True\n"


@pytest.mark.parametrize(("count", "size"), [(100, 1000), (3, 2 * MIB)], ids=["many", "large"])
async def test_connections_to_the_workspace_s_own_loopback_are_served_from_outside(
    place: Place, count: int, size: int
) -> None:
    async with place.open() as workspace, workspace.listen(_echo) as port:
        assert await _echoed(place, workspace, port, count, size) == count
        assert (await workspace.effective()).interfaces == (("lo",) if place.isolated else None)


async def test_nothing_listens_before_and_after_the_block(place: Place) -> None:
    async with place.open() as workspace:
        async with workspace.listen(_echo) as port:
            assert await _answers(place, workspace, port)

        assert not await _answers(place, workspace, port)

        async with workspace.listen(_echo, port=port) as again:
            assert again == port
            assert await _echoed(place, workspace, port, 1, 10) == 1


async def test_a_connection_is_closed_when_its_server_returns_and_at_the_end_of_the_block(place: Place) -> None:
    """And its server has ended by then: whatever it tells at last is told in time."""
    served, cut = [], trio.Event()

    async def serve(connection: Connection) -> None:
        served.append(await connection.receive_some(10))
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.05)
            cut.set()

    async def hold(port: int) -> None:
        if dial := getattr(place.provider, "dial", None):
            async with dial(port) as stream:
                await stream.send_all(b"a")
                assert await stream.receive_some() == b""
        else:
            done = await workspace.run(["python3", "-SIc", HOLD, str(port)])
            assert done.stdout == b"b''\n" or b"reset" in done.stderr

    with trio.fail_after(60):
        async with place.open() as workspace, trio.open_nursery() as nursery:
            async with workspace.listen(serve) as port:
                nursery.start_soon(hold, port)
                while not served:
                    await trio.sleep(0.01)
            assert cut.is_set()

    assert served == [b"a"]


async def test_what_happens_in_the_block_comes_out_as_it_is(place: Place) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with place.open() as workspace, workspace.listen(_echo):
            raise LookupError("mine")
