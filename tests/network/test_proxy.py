"""The egress proxy over real sockets: what gets through, what a hostile program inside tries, and what is told."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec import Struct

from runner.core.errors import UsageError
from runner.core.hosts import Address, NetworkSpec, parse_rule
from runner.core.model import NetworkRefusal
from runner.core.nurseries import open_services
from runner.network import exchange, proxy_client
from runner.network.exchange import Limits
from runner.network.proxy import open_egress
from runner.ports.network import MAX_REPORTED, EgressConnection
from runner.runtime.network import proxy_variables
from tests.support.needs import SSHD

LIMITS = Limits()
NO_REACH: Mapping[str, str] = {}
NAMES = {"a.test": "127.0.0.1", "b.test": "127.0.0.1", "meta.test": "169.254.169.254"}
NAMES["mixed.test"] = "8.8.8.8 10.0.0.1"


async def resolve(host: str) -> Sequence[Address]:
    if host not in NAMES:
        raise OSError("no such name")
    return [*map(ip_address, NAMES[host].split())]


async def until_open(port: int) -> None:
    with trio.fail_after(20):
        while True:
            with suppress(OSError):
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                return
            await trio.sleep(0.05)


class House(Struct):
    """A proxy, and servers of this host behind it."""

    proxy: int
    told: list[EgressConnection]

    async def ask(self, data: bytes) -> bytes:
        """All that the proxy answers to some bytes, until it closes."""
        async with await trio.open_tcp_stream("127.0.0.1", self.proxy) as stream:
            await stream.send_all(data)
            with trio.fail_after(20):
                return b"".join([chunk async for chunk in stream])

    async def last(self, count: int = 1) -> EgressConnection:
        """What was told last, once so much was."""
        with trio.fail_after(20):
            while len(self.told) < count:
                await trio.sleep(0.01)
        return self.told[-1]

    async def refused(self, data: bytes) -> tuple[int, NetworkRefusal | None]:
        answer = await self.ask(data)
        return int(answer.split()[1]), (await self.last()).refusal


@asynccontextmanager
async def house(
    *rules: str, private: bool = True, limits: Limits = LIMITS, reach: Mapping[str, str] = NO_REACH
) -> AsyncIterator[House]:
    allowed = NetworkSpec(tuple(parse_rule(rule, private=private) for rule in rules))
    told: list[EgressConnection] = []
    egress = open_egress(allowed, told.append, reach=reach, resolve=resolve, limits=limits)
    async with egress as session, open_services() as services:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def serve(stream: trio.SocketStream) -> None:
            async with stream:
                await session.serve(stream)

        services.start_soon(trio.serve_listeners, serve, listeners)
        yield House(listeners[0].socket.getsockname()[1], told)


@asynccontextmanager
async def server(answer: bytes, context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that answers the first bytes of each connection, and what it got."""
    got: list[bytes] = []

    async def serve(stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError):  # of a client that never finished its handshake
                got.append(await stream.receive_some(1 << 16))
                await stream.send_all(answer)

    plain = await trio.open_tcp_listeners(0, host="127.0.0.1")
    listeners = [trio.SSLListener(one, context) for one in plain] if context is not None else plain
    async with open_services() as services:
        services.start_soon(trio.serve_listeners, serve, listeners)
        yield plain[0].socket.getsockname()[1], got


async def test_a_tunnel_carries_both_ways_and_is_told_with_its_rule() -> None:
    async with server(b"pong") as (port, got), house(f"a.test:{port}") as inside:
        answer = await inside.ask(b"CONNECT A.test.:%d HTTP/1.1\r\nHost: x\r\n\r\nping" % port)

        assert answer.endswith(b"\r\n\r\npong")
        assert got == [b"ping"]
        told = await inside.last()
    assert (told.host, told.port, told.address, told.rule) == ("a.test", port, "127.0.0.1", f"a.test:{port}")
    assert (told.sent_bytes, told.received_bytes, told.refusal) == (4, 4, None)


async def test_without_the_proxy_there_is_no_way_and_what_was_under_way_is_cut() -> None:
    """It fails closed: a session that has ended dials nothing, whoever still listens for it."""
    dialled: list[str] = []

    async def resolved(host: str) -> Sequence[Address]:
        dialled.append(host)
        return await resolve(host)

    async with server(b"pong") as (port, got), open_services() as services:
        rules = NetworkSpec((parse_rule(f"a.test:{port}", private=True),))
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        proxy = listeners[0].socket.getsockname()[1]
        connect = b"CONNECT a.test:%d HTTP/1.1\r\nHost: x\r\n\r\n" % port
        async with open_egress(rules, lambda one: None, reach=NO_REACH, resolve=resolved) as session:
            services.start_soon(trio.serve_listeners, session.serve, listeners)
            before = await trio.open_tcp_stream("127.0.0.1", proxy)
            await before.send_all(connect)
            assert b"200" in await before.receive_some()
        with trio.fail_after(20):
            for stream in (before, await trio.open_tcp_stream("127.0.0.1", proxy)):
                async with stream:
                    with suppress(trio.BrokenResourceError):
                        await stream.send_all(connect)
                        assert await stream.receive_some() == b""
    assert (dialled, got) == (["a.test"], [b""])  # which is the end of the one


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("how", [b"Content-Length: %d", b"Transfer-Encoding: chunked"])
async def test_a_large_answer_is_as_whole_as_the_host_sends_it(how: bytes, missing: int, method: bytes) -> None:
    """Those of known length are moved by the kernel."""
    body = os.urandom(5 << 20)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if b"chunked" in how else body
    found = b"HTTP/1.1 200 OK\r\n" + how.replace(b"%d", b"%d" % len(body)) + b"\r\n\r\n"
    if method == b"GET":
        found += sent[: len(sent) - missing]
    async with server(found) as (port, _), house(f"a.test:{port}") as inside:
        answer = await inside.ask(b"%b http://a.test:%d/ HTTP/1.1\r\nHost: x\r\n\r\n" % (method, port))

        told = await inside.last()
    head, _, got = answer.partition(b"\r\n\r\n")
    assert b"200" in head
    assert told.received_bytes == len(found)
    if method == b"HEAD":
        assert got == b""
    elif b"chunked" in how:
        assert got.endswith(b"0\r\n\r\n") is not bool(missing)
    else:
        assert got == body[: len(body) - missing]


async def test_much_goes_through_a_tunnel_both_ways_and_all_of_it_is_counted() -> None:
    async def echo(stream: trio.SocketStream) -> None:
        async with stream:
            async for data in stream:
                await stream.send_all(data)

    body = os.urandom(5 << 20)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with open_services() as services, house(f"a.test:{port}") as inside:
        services.start_soon(trio.serve_listeners, echo, listeners)
        async with await trio.open_tcp_stream("127.0.0.1", inside.proxy) as stream:
            await stream.send_all(b"CONNECT a.test:%d HTTP/1.1\r\nHost: x\r\n\r\n" % port)
            assert b"200" in await stream.receive_some(1 << 10)

            async def send() -> None:
                await stream.send_all(body)
                await stream.send_eof()

            services.start_soon(send)
            with trio.fail_after(30):
                assert b"".join([chunk async for chunk in stream]) == body
        told = await inside.last()
    assert (told.sent_bytes, told.received_bytes) == (len(body), len(body))


async def test_a_request_with_a_url_is_framed_anew_and_one_a_connection() -> None:
    found = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nKeep-Alive: 5\r\nSet-Cookie: a\r\n\r\nok"
    async with server(found) as (port, got), house(f"a.test:{port}") as inside:
        second = b"GET http://b.test/ HTTP/1.1\r\nHost: b.test\r\n\r\n"
        head = b"GET http://a.test:%d/x?y HTTP/1.1\r\nHost: evil.test\r\nProxy-Authorization: z\r\nA: b\r\n\r\n" % port
        answer = await inside.ask(head + second)

    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"ok")
    assert b"keep-alive" not in answer.lower()
    (asked,) = got
    lines = asked.lower().split(b"\r\n")
    assert lines[0] == b"get /x?y http/1.1"
    assert b"host: a.test:%d" % port in lines
    assert not [line for line in lines if line.startswith((b"proxy-", b"host: evil", b"get http"))]
    assert len(inside.told) == 1


@pytest.mark.parametrize(
    ("request_line", "status", "refusal"),
    [
        ("CONNECT b.test:443 HTTP/1.1", 403, NetworkRefusal.NOT_ALLOWED),
        ("CONNECT a.test:22 HTTP/1.1", 403, NetworkRefusal.NOT_ALLOWED),
        ("CONNECT 127.0.0.1:443 HTTP/1.1", 403, NetworkRefusal.NOT_ALLOWED),
        ("CONNECT [::1]:443 HTTP/1.1", 403, NetworkRefusal.NOT_ALLOWED),
        ("CONNECT a.test:443 HTTP/1.1", 403, NetworkRefusal.PRIVATE),
        ("CONNECT meta.test:443 HTTP/1.1", 403, NetworkRefusal.PRIVATE),
        ("CONNECT gone.test:443 HTTP/1.1", 502, NetworkRefusal.UNRESOLVED),
        ("CONNECT a.test HTTP/1.1", 400, NetworkRefusal.MALFORMED),
        ("CONNECT a.test:0 HTTP/1.1", 400, NetworkRefusal.MALFORMED),
        ("CONNECT u:p@a.test:443 HTTP/1.1", 400, NetworkRefusal.MALFORMED),
        ("CONNECT 0177.0.0.1:443 HTTP/1.1", 400, NetworkRefusal.MALFORMED),
        ("CONNECT 2130706433:443 HTTP/1.1", 400, NetworkRefusal.MALFORMED),
        ("CONNECT a.test%00.evil:443 HTTP/1.1", 400, NetworkRefusal.MALFORMED),
        ("GET http://b.test/ HTTP/1.1", 403, NetworkRefusal.NOT_ALLOWED),
        ("GET http://a.test/ HTTP/1.1", 403, NetworkRefusal.PRIVATE),
        ("GET http://u@a.test/ HTTP/1.1", 400, NetworkRefusal.MALFORMED),
        ("GET https://a.test/ HTTP/1.1", 400, NetworkRefusal.MALFORMED),
        ("GET file:///etc/passwd HTTP/1.1", 400, NetworkRefusal.MALFORMED),
        ("GET / HTTP/1.1", 400, NetworkRefusal.MALFORMED),
        ("PUT http://a.test/ HTTP/1.1\r\nContent-Length:1\r\nTransfer-Encoding:chunked", 400, NetworkRefusal.MALFORMED),
        ("GET http://a.test/ HTTP/1.1\r\nA: b\r\n c\0d", 400, NetworkRefusal.MALFORMED),
        ("nonsense", 400, NetworkRefusal.MALFORMED),
    ],
)  # fmt: skip
async def test_what_is_not_allowed_is_refused_and_told(request_line: str, status: int, refusal: NetworkRefusal) -> None:
    async with house("a.test", "meta.test", "gone.test", private=False) as inside:
        found = await inside.refused(f"{request_line}\r\nHost: a.test\r\n\r\n".encode())

    assert found == (status, refusal)


async def test_the_address_that_was_judged_is_the_one_that_is_dialled() -> None:
    """A name server that answers otherwise the second time is asked once."""
    answers = ["127.0.0.1", "169.254.169.254"]

    async def rebinding(host: str) -> Sequence[Address]:
        return [ip_address(answers.pop(0))]

    async with server(b"pong") as (port, _):
        allowed = NetworkSpec((parse_rule(f"a.test:{port}", private=True),))
        told: list[EgressConnection] = []
        ours, theirs = trio.testing.memory_stream_pair()
        egress = open_egress(allowed, told.append, reach={}, resolve=rebinding)
        async with egress as session, trio.open_nursery() as nursery:
            nursery.start_soon(session.serve, theirs)
            await ours.send_all(b"CONNECT a.test:%d HTTP/1.1\r\nHost: a\r\n\r\nping" % port)
            assert b"200" in await ours.receive_some()
            await ours.send_eof()

    assert [one.address for one in told] == ["127.0.0.1"]
    assert answers == ["169.254.169.254"]


@pytest.mark.parametrize(("asked", "through"), [("a.test", True), ("b.test", False)])
async def test_tls_must_ask_for_the_host_of_its_connection(certificate: Path, asked: str, through: bool) -> None:
    """Else an allowed host would be a door to others on the same machines."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate, certificate.with_suffix(".key"))
    ours = ssl.create_default_context(cafile=certificate)
    async with server(b"pong", theirs) as (port, got), house(f"a.test:{port}") as inside:
        async with await trio.open_tcp_stream("127.0.0.1", inside.proxy) as stream:
            await stream.send_all(b"CONNECT a.test:%d HTTP/1.1\r\nHost: a\r\n\r\n" % port)
            assert b"200" in await stream.receive_some()
            secure = trio.SSLStream(stream, ours, server_hostname=asked)
            try:
                await secure.send_all(b"ping")
                answered = await secure.receive_some() == b"pong"
            except trio.BrokenResourceError:
                answered = False
        await inside.last()

    assert answered is through
    assert got == [b"ping"] * through
    assert [one.refusal for one in inside.told] == [None if through else NetworkRefusal.OTHER_NAME]


async def test_a_server_that_speaks_first_is_heard() -> None:
    async def greet(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(b"SSH-2.0-x\r\n")
            await stream.receive_some()

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with open_services() as services, house(f"a.test:{port}") as inside:
        services.start_soon(trio.serve_listeners, greet, listeners)
        async with await trio.open_tcp_stream("127.0.0.1", inside.proxy) as stream:
            await stream.send_all(b"CONNECT a.test:%d HTTP/1.0\r\n\r\n" % port)
            heard = b""
            with trio.fail_after(10):
                while not heard.endswith(b"SSH-2.0-x\r\n"):
                    heard += await stream.receive_some()


async def test_silence_ends_a_tunnel() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    limits = Limits(idle_seconds=0.2)
    async with open_services() as services, house(f"a.test:{port}", limits=limits) as inside:
        services.start_soon(trio.serve_listeners, lambda stream: trio.sleep_forever(), listeners)

        assert b"200" in await inside.ask(b"CONNECT a.test:%d HTTP/1.0\r\n\r\n" % port)


@pytest.mark.parametrize(
    "begun",
    [b"", b"CONNECT a.te", b"PUT http://a.test:%d/ HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf"],
    ids=["silent", "a line", "a body"],
)
async def test_a_request_that_does_not_go_on_is_refused(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    """And nothing else ends with it: an error would take the workspace down."""
    for module in (exchange, proxy_client):
        monkeypatch.setattr(module, "HEAD_SECONDS", 0.2)
    waits = await trio.open_tcp_listeners(0, host="127.0.0.1")
    silent = waits[0].socket.getsockname()[1]
    rules = (f"a.test:{waits[0].socket.getsockname()[1]}",)
    async with open_services() as services, server(b"pong") as (port, _), house(f"a.test:{port}", *rules) as inside:
        services.start_soon(trio.serve_listeners, lambda stream: trio.sleep_forever(), waits)
        begun = begun.replace(b"%d", b"%d" % silent)
        assert await inside.refused(begun) == (408, NetworkRefusal.MALFORMED)
        assert b"pong" in await inside.ask(b"CONNECT a.test:%d HTTP/1.0\r\n\r\nping" % port)


async def test_more_connections_than_a_session_takes_are_refused_and_the_rest_goes_on() -> None:
    async with server(b"pong") as (port, _), house(f"a.test:{port}", limits=Limits(connections=8)) as inside:
        waiting = [await trio.open_tcp_stream("127.0.0.1", inside.proxy) for _ in range(8)]
        with trio.fail_after(20):
            status, refusal = await inside.refused(b"CONNECT a.test:%d HTTP/1.0\r\n\r\n" % port)
        assert (status, refusal) == (503, NetworkRefusal.BUSY)
        for stream in waiting:
            await stream.aclose()
        await trio.sleep(0.2)

        assert b"pong" in await inside.ask(b"CONNECT a.test:%d HTTP/1.0\r\n\r\nping" % port)


async def test_millions_of_attempts_are_counted_and_not_listed() -> None:
    told: list[EgressConnection] = []
    async with open_egress(NetworkSpec((parse_rule("a.test"),)), told.append, reach={}, resolve=resolve) as session:
        for _ in range(MAX_REPORTED + 50):
            ours, theirs = trio.testing.memory_stream_pair()
            await ours.send_all(b"CONNECT b.test:443 HTTP/1.0\r\n\r\n")
            await session.serve(theirs)

    assert sum(one.count for one in told) == MAX_REPORTED + 50
    assert len(told) == MAX_REPORTED + 1
    assert (told[-1].host, told[-1].count, told[-1].refusal) == ("", 50, NetworkRefusal.NOT_ALLOWED)


async def test_the_end_of_a_session_ends_its_connections() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    told: list[EgressConnection] = []
    allowed = NetworkSpec((parse_rule(f"a.test:{port}", private=True),))
    ours, theirs = trio.testing.memory_stream_pair()
    async with open_services() as services, trio.open_nursery() as nursery:
        services.start_soon(trio.serve_listeners, lambda stream: trio.sleep_forever(), listeners)
        async with open_egress(allowed, told.append, reach={}, resolve=resolve) as session:
            nursery.start_soon(session.serve, theirs)
            await ours.send_all(b"CONNECT a.test:%d HTTP/1.0\r\n\r\n" % port)
            assert b"200" in await ours.receive_some()

    assert [one.refusal for one in told] == [None]


def socks(host: str, port: int, command: int = 1) -> bytes:
    return bytes([5, command, 0, 3, len(host)]) + host.encode() + port.to_bytes(2, "big")


GREETING = b"\x05\x01\x00"


async def test_socks_carries_both_ways_under_the_same_rules() -> None:
    async with server(b"pong") as (port, got), house(f"a.test:{port}") as inside:
        answer = await inside.ask(GREETING + socks("A.test", port) + b"ping")

        assert answer == b"\x05\x00" + b"\x05\x00\x00\x01" + bytes(6) + b"pong"
        assert got == [b"ping"]
        told = await inside.last()
    assert (told.host, told.port, told.address, told.refusal) == ("a.test", port, "127.0.0.1", None)


@pytest.mark.parametrize(
    ("request_", "answer", "refusal"),
    [
        (GREETING + socks("b.test", 443), b"\x05\x00\x05\x02", NetworkRefusal.NOT_ALLOWED),
        (GREETING + socks("meta.test", 443), b"\x05\x00\x05\x02", NetworkRefusal.PRIVATE),
        (GREETING + socks("gone.test", 443), b"\x05\x00\x05\x04", NetworkRefusal.UNRESOLVED),
        (GREETING + socks("a.test\0b.test", 443), b"\x05\x00\x05\x01", NetworkRefusal.MALFORMED),
        (GREETING + socks("0x7f.1", 443), b"\x05\x00\x05\x01", NetworkRefusal.MALFORMED),
        (GREETING + bytes([5, 1, 0, 1, 127, 0, 0, 1, 1, 187]), b"\x05\x00\x05\x02", NetworkRefusal.NOT_ALLOWED),
        (GREETING + bytes([5, 1, 0, 4]) + bytes(15) + b"\x01\x01\xbb", b"\x05\x00\x05\x02", NetworkRefusal.NOT_ALLOWED),
        (GREETING + socks("a.test", 443, 3), b"\x05\x00\x05\x07", NetworkRefusal.MALFORMED),
        (GREETING + socks("a.test", 443, 2), b"\x05\x00\x05\x07", NetworkRefusal.MALFORMED),
        (GREETING + bytes([5, 1, 0, 9]), b"\x05\x00\x05\x08", NetworkRefusal.MALFORMED),
        (b"\x05\x01\x02", b"\x05\xff", NetworkRefusal.MALFORMED),
        (b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00", b"HTTP/1.1 400", NetworkRefusal.MALFORMED),
    ],
    ids=[
        "not allowed", "private", "no name", "NUL", "a number", "an address", "IPv6", "datagrams", "from outside",
        "another kind", "with a user", "SOCKS4",
    ],
)  # fmt: skip
async def test_socks_refuses_what_the_other_ways_do(request_: bytes, answer: bytes, refusal: NetworkRefusal) -> None:
    async with house("a.test", "meta.test", "gone.test", private=False) as inside:
        answered = await inside.ask(request_)

        assert answered.startswith(answer)
        assert (await inside.last()).refusal is refusal


def reach_of(proxy: House) -> dict[str, str]:
    url = f"http://me:pass%20word@127.0.0.1:{proxy.proxy}"
    return {"HTTP_PROXY": url, "https_proxy": url, "NO_PROXY": "b.test"}


async def test_the_proxy_of_this_host_connects_by_name() -> None:
    """Another of ours is it; that it wants a password is another test's."""
    async with (
        server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as (port, got),
        house(f"a.test:{port}") as company,
        house(f"a.test:{port}", f"b.test:{port}", reach=reach_of(company)) as inside,
    ):
        assert (await inside.ask(b"CONNECT a.test:%d HTTP/1.0\r\n\r\nping" % port)).endswith(b"ok")
        assert (await inside.ask(b"GET http://a.test:%d/x HTTP/1.0\r\n\r\n" % port)).endswith(b"ok")
        assert (await inside.ask(b"CONNECT b.test:%d HTTP/1.0\r\n\r\nping" % port)).endswith(b"ok")

        await inside.last(3)
        through = f"proxy 127.0.0.1:{company.proxy}"
        assert [one.address for one in inside.told] == [through, through, "127.0.0.1"]
        assert [(one.host, one.refusal) for one in company.told] == [("a.test", None)] * 2
        assert got[1].startswith(b"GET /x HTTP/1.1\r\nhost: a.test:%d" % port)


@pytest.mark.parametrize(
    ("rule", "host", "refusal"),
    [
        ("gone.test", "gone.test", NetworkRefusal.UNREACHABLE),  # which is what the proxy said
        ("*.gone.test", "any.gone.test", NetworkRefusal.UNRESOLVED),
        ("mixed.test", "mixed.test", NetworkRefusal.PRIVATE),
        ("a.test", "b.test", NetworkRefusal.NOT_ALLOWED),
    ],
    ids=["a name that only the proxy knows", "a name that a command chose", "one private address", "another host"],
)
async def test_before_the_proxy_of_this_host_names_are_judged_as_far_as_they_are_known(
    rule: str, host: str, refusal: NetworkRefusal
) -> None:
    async with house("b.test") as company, house(rule, private=False, reach=reach_of(company)) as inside:
        answer = await inside.ask(f"CONNECT {host}:443 HTTP/1.0\r\n\r\n".encode())

        assert (await inside.last()).refusal is refusal
        assert (b"the proxy 127.0.0.1:" in answer) is (refusal is NetworkRefusal.UNREACHABLE)
        assert len(company.told) == (refusal is NetworkRefusal.UNREACHABLE)


async def test_a_proxy_of_this_host_gets_its_password_and_nothing_else_does() -> None:
    refused = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
    async with server(refused) as (proxy, got):
        reach = {"HTTPS_PROXY": f"http://me:pass%20word@127.0.0.1:{proxy}"}
        async with house("b.test", reach=reach, private=True) as inside:
            answer = await inside.ask(b"CONNECT b.test:443 HTTP/1.1\r\nHost: b\r\nProxy-Authorization: mine\r\n\r\n")

    assert b"answered 407" in answer
    assert got[0].lower().count(b"proxy-authorization") == 1
    assert b"Basic bWU6cGFzcyB3b3Jk" in got[0]


@pytest.mark.parametrize(
    ("limits", "refusal"),
    [
        (Limits(idle_seconds=0.3), NetworkRefusal.IDLE),
        (Limits(total_seconds=0.3), NetworkRefusal.TIME),
        (Limits(session_bytes=3), NetworkRefusal.BYTES),
    ],
    ids=["idle", "total", "bytes"],
)
async def test_a_connection_beyond_a_limit_is_cut_and_told(limits: Limits, refusal: NetworkRefusal) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with open_services() as services, house(f"a.test:{port}", limits=limits) as inside:
        services.start_soon(trio.serve_listeners, lambda stream: trio.sleep_forever(), listeners)

        await inside.ask(b"CONNECT a.test:%d HTTP/1.0\r\n\r\nping" % port)
        assert (await inside.last()).refusal is refusal


async def test_a_proxy_that_does_not_speak_http_is_an_error_at_once() -> None:
    with pytest.raises(UsageError, match="`ALL_PROXY` is not a proxy that speaks HTTP"):
        async with house("a.test", reach={"ALL_PROXY": "socks5://127.0.0.1:1"}):
            pass


@SSHD.mark
async def test_ssh_goes_through_by_the_variables_of_git(tmp_path: Path) -> None:
    """As far as the key of a real server, whose name the proxy resolved; who logs in is not ours to try."""
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    server = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-h", str(key), "-o", "ListenAddress=127.0.0.1"]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    async with open_services() as services, house(f"a.test:{port}") as inside:
        daemon = partial(trio.run_process, [*server, "-p", str(port)], check=False, stderr=subprocess.DEVNULL)
        services.start_soon(daemon)
        await until_open(port)
        git = proxy_variables(inside.proxy, ssh=True)
        options = f"-o StrictHostKeyChecking=accept-new -o UserKnownHostsFile={tmp_path}/known -o BatchMode=yes"
        for host, told in (("a.test", None), ("b.test", NetworkRefusal.NOT_ALLOWED)):
            command = f"{git['GIT_SSH_COMMAND']} {options} -p {port} {host} true"
            run = partial(trio.run_process, ["sh", "-c", command], env={**os.environ, **git}, check=False)
            done = await run(capture_stderr=True)
            assert (await inside.last()).refusal is told
            inside.told.clear()
    assert b"is not among the hosts" in done.stderr
    assert key.with_suffix(".pub").read_text().split()[1] in (tmp_path / "known").read_text()
