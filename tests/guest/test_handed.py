"""Listening sockets that a guest hands over: the host accepts there itself, whatever the guest does with them."""

from __future__ import annotations

import array
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress

import pytest
import trio

from runner.core.errors import WorkspaceLost
from runner.guest import binary
from runner.guest.client import Guest, open_guest
from runner.guest.framing import Mark, Parser, Phase, State, Type
from runner.ports.provider import Connection
from tests.support.fake_guest import hello, ready, state


async def _echo(connection: Connection) -> None:
    while data := await connection.receive_some(1 << 16):
        await connection.send_all(data)


@asynccontextmanager
async def real_guest(*, hands_over: bool = True) -> AsyncIterator[Guest]:
    ours, theirs = socket.socketpair()
    streams = [trio.SocketStream(trio.socket.from_stdlib_socket(ours))]

    async def connect() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if not streams:
            raise WorkspaceLost("it has ended")
        return streams.pop()

    with subprocess.Popen([binary.find().path], stdin=theirs, env={}) as popen:
        theirs.close()
        async with open_guest(connect, what="workspace `w`", kill_sandbox=popen.kill, hands_over=hands_over) as guest:
            yield guest
        popen.kill()


async def _said_back(port: int, size: int) -> bool:
    body = os.urandom(size)
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream, trio.open_nursery() as nursery:

        async def send() -> None:
            await stream.send_all(body)
            await stream.send_eof()

        nursery.start_soon(send)
        heard = b""
        while data := await stream.receive_some():
            heard += data
    return heard == body


@pytest.mark.parametrize("hands_over", [True, False])
async def test_a_connection_is_a_socket_of_the_host_where_the_guest_hands_over(hands_over: bool) -> None:
    seen = []

    async def serve(connection: Connection) -> None:
        seen.append(connection.socket is not None)
        await _echo(connection)

    with trio.fail_after(60):
        async with real_guest(hands_over=hands_over) as guest, guest.listen(0, serve) as listener:
            for _ in range(3):
                assert await _said_back(listener.port, 1 << 20)

    assert seen == [hands_over] * 3


async def test_what_was_sent_arrives_although_nobody_reads_what_the_other_end_still_says() -> None:
    async def serve(connection: Connection) -> None:
        await connection.receive_some(1)
        await connection.send_all(bytes(3 << 20))

    with trio.fail_after(60):
        async with real_guest() as guest, guest.listen(0, serve) as listener:
            stream = await trio.open_tcp_stream("127.0.0.1", listener.port)
            got = 0
            async with stream:
                await stream.send_all(bytes(1 << 15))
                with suppress(trio.BrokenResourceError):
                    while data := await stream.receive_some():
                        got += len(data)
                        await trio.sleep(0.01)
    assert got == 3 << 20


async def test_more_connections_than_may_be_open_wait_until_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.guest.client.most_accepted", lambda: 2)
    most = now = 0

    async def serve(connection: Connection) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await _echo(connection)
        now -= 1

    good = []

    async def talk(port: int) -> None:
        good.append(await _said_back(port, 1000))

    with trio.fail_after(60):
        async with real_guest() as guest, guest.listen(0, serve) as listener, trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(talk, listener.port)

    assert good == [True] * 10
    assert most <= 2


async def test_connections_end_with_their_listener() -> None:
    with trio.fail_after(60):
        async with real_guest() as guest:
            async with guest.listen(0, lambda connection: trio.sleep_forever()) as listener:
                stream = await trio.open_tcp_stream("127.0.0.1", listener.port)
                await trio.sleep(0.1)
            async with stream:
                with pytest.raises(trio.BrokenResourceError):
                    await stream.receive_some()
            with pytest.raises(OSError, match="connect"):
                await trio.open_tcp_stream("127.0.0.1", listener.port)


Hand = Callable[[trio.socket.SocketType, int], None]


def _hand(link: trio.socket.SocketType, id: int, descriptors: list[int], marks: Mark = Mark.HANDED) -> None:
    said = state(id, State(phase=Phase.RUNNING, pid=80, marks=marks))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    with socket.socket(fileno=os.dup(link.fileno())) as copy:
        copy.sendmsg([said], rights)


@asynccontextmanager
async def lying_guest(hand: Hand, killed: list[bool]) -> AsyncIterator[Guest]:
    """A guest that answers a request to listen by ``hand``."""
    ours, theirs = trio.socket.socketpair()
    streams = [trio.SocketStream(ours)]

    async def connect() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if not streams:
            raise WorkspaceLost("it has ended")
        return streams.pop()

    async def play() -> None:
        await theirs.send(hello() + ready())
        parser = Parser()
        with suppress(OSError):
            while data := await theirs.recv(1 << 16):
                for frame in parser.feed(data):
                    if frame.type is Type.LISTEN:
                        assert frame.stream == 1
                        hand(theirs, frame.id)
                    elif frame.type is Type.SIGNAL:
                        await theirs.send(state(frame.id, State(phase=Phase.GONE, pid=80, serial=1)))

    def kill() -> None:
        killed.append(True)
        theirs.shutdown(socket.SHUT_RDWR)

    with theirs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(play)
            async with open_guest(connect, what="workspace `w`", kill_sandbox=kill, hands_over=True) as guest:
                yield guest
            nursery.cancel_scope.cancel()


def nothing(link: trio.socket.SocketType, id: int) -> None:
    _hand(link, id, [])


def a_file(link: trio.socket.SocketType, id: int) -> None:
    with open("/dev/null") as file:
        _hand(link, id, [file.fileno()])


def a_datagram_socket(link: trio.socket.SocketType, id: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        _hand(link, id, [other.fileno()])


def a_socket_that_does_not_listen(link: trio.socket.SocketType, id: int) -> None:
    with socket.socket() as other:
        _hand(link, id, [other.fileno()])


def two_at_once(link: trio.socket.SocketType, id: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        _hand(link, id, [one.fileno()], Mark.NONE)
        _hand(link, id, [one.fileno()])


@pytest.mark.parametrize("hand", [nothing, a_file, a_datagram_socket, a_socket_that_does_not_listen, two_at_once])
async def test_a_guest_that_hands_over_something_else_is_ended(hand: Hand) -> None:
    killed: list[bool] = []
    with trio.fail_after(60):
        async with lying_guest(hand, killed) as guest:
            with pytest.raises(WorkspaceLost, match="broke the protocol"):
                async with guest.listen(0, _echo):
                    await guest.ping()

    assert killed == [True]


async def test_a_listener_that_blocks_stops_nothing_but_itself() -> None:
    """The guest shares its flags: it takes the connection away, and lets who accepts wait."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def hand(link: trio.socket.SocketType, id: int) -> None:
            _hand(link, id, [listening.fileno()])

        with trio.fail_after(60):
            async with lying_guest(hand, []) as guest, guest.listen(0, _echo):
                for _ in range(20):
                    stream = await trio.open_tcp_stream(*listening.getsockname())
                    listening.settimeout(0)
                    with suppress(BlockingIOError):
                        listening.accept()[0].close()
                    listening.setblocking(True)
                    await stream.aclose()
                    await trio.sleep(0.01)
