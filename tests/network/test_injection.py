"""Credentials that the proxy adds, over real TLS: who gets them, who does not, and that commands never see them."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import h11
import pytest
import trio
from msgspec import Struct

from runner.core.hosts import NetworkSpec, parse_rule
from runner.core.injection import Injection, canonical_path
from runner.core.model import NetworkRefusal
from runner.core.nurseries import open_services
from runner.core.redact import Secret
from runner.network.proxy import open_egress
from runner.ports.network import Credential, EgressConnection
from runner.runtime.network import proxy_variables, trust_variables
from tests.network.test_proxy import resolve, until_open
from tests.support.needs import program

TOKEN = b"t0ken-of-the-registry"
BEARER = Injection(host="a.test", secret="T", how="bearer")


class Seen(Struct):
    """The requests that a server got, as its h11 had them."""

    port: int = 0
    heads: list[h11.Request] = []

    def header(self, name: bytes, at: int = -1) -> list[bytes]:
        return [value for key, value in self.heads[at].headers if key == name]


Answer = Callable[[h11.Request, bytes], bytes]


def hello(request: h11.Request, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nAlt-Svc: h3\r\n\r\nhello"


@asynccontextmanager
async def api(certificate: Path, answer: Answer = hello) -> AsyncIterator[Seen]:
    """A server of HTTP/1.1 with TLS."""
    seen = Seen()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))

    async def serve(stream: trio.SSLStream[trio.SocketStream]) -> None:
        wire = h11.Connection(h11.SERVER)
        body = b""
        try:
            while data := await stream.receive_some(1 << 16):
                wire.receive_data(data)
                while (event := wire.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                    if isinstance(event, h11.Request):
                        seen.heads.append(event)
                        body = b""
                    elif isinstance(event, h11.Data):
                        body += event.data
                    elif isinstance(event, h11.EndOfMessage):
                        await stream.send_all(answer(seen.heads[-1], body))
                        wire = h11.Connection(h11.SERVER)
                        break
        except trio.BrokenResourceError:
            pass

    plain = await trio.open_tcp_listeners(0, host="127.0.0.1")
    seen.port = plain[0].socket.getsockname()[1]
    async with open_services() as services:
        services.start_soon(trio.serve_listeners, serve, [trio.SSLListener(one, context) for one in plain])
        yield seen


class Inside(Struct):
    """A command's view: the proxy, and the certificates that it trusts."""

    proxy: int
    trust: bytes
    java: bytes
    told: list[EgressConnection]

    async def tunnel(self, place: str) -> trio.SocketStream:
        stream = await trio.open_tcp_stream("127.0.0.1", self.proxy)
        await stream.send_all(f"CONNECT {place} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return stream

    async def ask(self, data: bytes, place: str, *, until: bytes = b"", name: str = "a.test") -> bytes:
        """All that the host answers to some bytes, until it closes or has said something."""
        async with await self.tunnel(place) as stream:
            head = await stream.receive_some()
            if b" 200 " not in head:
                return head
            context = ssl.create_default_context(cadata=self.trust.decode())
            secure = trio.SSLStream(stream, context, server_hostname=name, https_compatible=True)
            with trio.fail_after(20):
                await secure.send_all(data)
                answer = b""
                while (more := await secure.receive_some()) and not (until and until in answer + more):
                    answer += more
                return answer + more

    async def last(self) -> EgressConnection:
        with trio.fail_after(20):
            while not self.told:
                await trio.sleep(0.01)
        return self.told[-1]


@asynccontextmanager
async def inside(certificate: Path, *injections: Injection, trusted: bool = True) -> AsyncIterator[Inside]:
    rules = tuple(parse_rule(f"{one.host}:{one.port}", private=True) for one in injections)
    credentials = [Credential(one, Secret("T", TOKEN)) for one in injections]
    told: list[EgressConnection] = []
    reach = {"SSL_CERT_FILE": str(certificate)} if trusted else {}
    egress = open_egress(NetworkSpec(rules), told.append, credentials, reach=reach, resolve=resolve)
    async with egress as session, open_services() as services:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def serve(stream: trio.SocketStream) -> None:
            async with stream:
                await session.serve(stream)

        services.start_soon(trio.serve_listeners, serve, listeners)
        trust = session.trust
        assert trust is not None
        yield Inside(listeners[0].socket.getsockname()[1], trust.certificates, trust.java, told)


def bearer(seen: Seen, **more: object) -> Injection:
    return Injection(**{"host": "a.test", "secret": "T", "how": "bearer", "port": seen.port, **more})  # type: ignore[arg-type]


def get(seen: Seen, target: str = "/x", more: str = "", *, host: str = "a.test", method: str = "GET") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {host}:{seen.port}\r\n{more}\r\n".encode()


CLOSE = "Connection: close\r\n"


@pytest.mark.parametrize(
    ("injection", "header", "value"),
    [
        ({"how": "bearer"}, b"authorization", b"Bearer t0ken-of-the-registry"),
        ({"how": "basic", "name": "me"}, b"authorization", b"Basic bWU6dDBrZW4tb2YtdGhlLXJlZ2lzdHJ5"),
        ({"how": "header", "name": "Private-Token"}, b"private-token", b"t0ken-of-the-registry"),
    ],
    ids=["bearer", "basic", "header"],
)
async def test_requests_get_the_credential_and_lose_what_the_command_wrote_in_its_place(
    certificate: Path, injection: dict[str, str], header: bytes, value: bytes
) -> None:
    async with api(certificate) as seen, inside(certificate, bearer(seen, **injection)) as command:
        mine = f"Authorization: mine\r\nPrivate-Token: mine\r\nX: y\r\n{CLOSE}"
        answer = await command.ask(get(seen, more=mine), f"a.test:{seen.port}")

        assert answer.endswith(b"hello")
        assert b"alt-svc" not in answer.lower()
        assert seen.header(header) == [value]
        assert seen.header(b"x") == [b"y"]
        assert b"mine" not in seen.header(b"authorization")
        told = await command.last()
    assert (told.refusal, told.requests, told.credential) == (None, 1, "T")


async def test_each_request_of_a_connection_gets_it_and_is_counted(certificate: Path) -> None:
    async with api(certificate) as seen, inside(certificate, bearer(seen)) as command:
        body = "Content-Length: 3\r\n\r\nabc"
        put = f"PUT /x HTTP/1.1\r\nHost: a.test:{seen.port}\r\n{body}".encode()
        answer = await command.ask(get(seen) + put + get(seen, more=CLOSE), f"a.test:{seen.port}")

        assert answer.count(b"hello") == 3
        assert [head.method for head in seen.heads] == [b"GET", b"PUT", b"GET"]
        assert all(seen.header(b"authorization", at) == [b"Bearer " + TOKEN] for at in range(3))
        assert (await command.last()).requests == 3


@pytest.mark.parametrize(
    ("rules", "method", "target", "through"),
    [
        (("GET /repos/acme/**",), "GET", "/repos/acme/x/pulls?state=open", True),
        (("GET /repos/acme/**",), "HEAD", "/repos/acme/x", True),
        (("GET /repos/acme/**",), "DELETE", "/repos/acme/x", False),
        (("GET /repos/acme/**",), "GET", "/repos/other/x", False),
        (("GET /repos/acme/**",), "GET", "/repos/acme/../other/x", False),
        (("GET /repos/acme/**",), "GET", "/repos/acme/%2e%2e/other/x", False),
        (("GET /repos/acme/**",), "GET", "/repos/acme/..%2Fother", False),
        (("GET /repos/acme/**",), "GET", "/repos/acme/%252e%252e/other", False),
        (("GET /repos/acme/**",), "GET", "/repos/acme/..;/other", False),
        (("GET /repos/acme/**",), "GET", "/repos/acme/..\\other", False),
        (("GET /repos/acme/**",), "GET", "//repos/acme/x", False),
        (("/repos/*/issues",), "POST", "/repos/x/issues", True),
        (("/repos/*/issues",), "POST", "/repos/x/y/issues", False),
        (("/repos/*/issues",), "POST", "/repos/x%2Fy/issues", False),
        (("GET /@acme%2Fpkg", "GET /%61"), "GET", "/@acme%2fpkg", True),
        (("GET /a",), "GET", "/%61", True),
        ((), "TRACE", "/", False),
        ((), "DELETE", "/../x", True),
    ],
)
async def test_only_the_named_requests_are_sent(
    certificate: Path, rules: tuple[str, ...], method: str, target: str, through: bool
) -> None:
    allow = tuple(rule for rule in rules)
    async with api(certificate) as seen, inside(certificate, bearer(seen, allow=allow)) as command:
        answer = await command.ask(get(seen, target, CLOSE, method=method), f"a.test:{seen.port}")

        assert (answer.split()[1] == b"200") is through
        assert len(seen.heads) == through
        assert (await command.last()).refusal is (None if through else NetworkRefusal.REQUEST)


@pytest.mark.parametrize(
    ("request_", "refusal"),
    [
        (b"GET / HTTP/1.1\r\nHost: b.test\r\n\r\n", NetworkRefusal.OTHER_NAME),
        (b"GET https://b.test/ HTTP/1.1\r\nHost: a.test:%d\r\n\r\n", NetworkRefusal.REQUEST),
        (b"GET / HTTP/1.1\r\nHost: a.test:%d\r\nHost: b.test\r\n\r\n", NetworkRefusal.MALFORMED),
        (b"PUT / HTTP/1.1\r\nHost: a.test:%d\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
         NetworkRefusal.MALFORMED),
        (b"GET / HTTP/1.1\r\nHost: a.test:%d\r\nA: b\r\n\tc\r\n: d\r\n\r\n", NetworkRefusal.MALFORMED),
        (b"GET /a\x00b HTTP/1.1\r\nHost: a.test:%d\r\n\r\n", NetworkRefusal.MALFORMED),
        (b"GET / HTTP/1.1\r\n Host: b.test\r\nHost: a.test:%d\r\n\r\n", NetworkRefusal.MALFORMED),
        (b"GET / HTTP/1.1\r\nHost: a.test:%d\r\n , b.test\r\n\r\n", NetworkRefusal.MALFORMED),
        (b"GET / HTTP/1.1\r\nHost: a.test:%d\r\nX: a\rT: mine\r\n\r\n", NetworkRefusal.MALFORMED),
        (b"PUT / HTTP/1.1\r\nHost: a.test:%d\r\nTransfer-Encoding : chunked\r\n\r\n", NetworkRefusal.MALFORMED),
        (b"PUT / HTTP/1.1\r\nHost: a.test:%d\r\nTransfer-Encoding: chunked\r\n , x\r\n\r\n",
         NetworkRefusal.MALFORMED),
        (b"PUT / HTTP/1.1\r\nHost: a.test:%d\r\nTransfer-Encoding: xchunked\r\n\r\n", NetworkRefusal.MALFORMED),
        (b"PUT / HTTP/1.1\r\nHost: a.test:%d\r\nContent-Length: +1\r\n\r\n", NetworkRefusal.MALFORMED),
        (b"PUT / HTTP/1.1\r\nHost: a.test:%d\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
         NetworkRefusal.MALFORMED),
        (b"CONNECT a.test:%d HTTP/1.1\r\nHost: a.test:%d\r\n\r\n", NetworkRefusal.REQUEST),
        (b"OPTIONS * HTTP/1.1\r\nHost: a.test:%d\r\n\r\n", NetworkRefusal.REQUEST),
        (b"GET / HTTP/1.0\r\n\r\n", NetworkRefusal.OTHER_NAME),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", NetworkRefusal.OTHER_NAME),
    ],
    ids=["another host", "another URL", "two hosts", "two lengths", "a header of no name", "NUL", "folded at the start",
         "folded host", "CR", "space before a colon", "folded coding", "unknown coding", "signed length",
         "different lengths", "CONNECT", "no path", "no host", "HTTP/2"],
)  # fmt: skip
async def test_a_request_that_may_be_read_in_two_ways_is_not_sent(
    certificate: Path, request_: bytes, refusal: NetworkRefusal
) -> None:
    async with api(certificate) as seen, inside(certificate, bearer(seen)) as command:
        await command.ask(request_.replace(b"%d", b"%d" % seen.port), f"a.test:{seen.port}")

        assert (await command.last()).refusal is refusal
        assert not seen.heads


@pytest.mark.parametrize(
    ("second", "refusal"),
    [
        (b"GET /a HTTP/1.1\r\nHost: b.test\r\n\r\n", NetworkRefusal.OTHER_NAME),
        (b"GET /b HTTP/1.1\r\nHost: a.test:%d\r\n\r\n", NetworkRefusal.REQUEST),
    ],
    ids=["another host", "another path"],
)
async def test_a_later_request_of_a_connection_is_judged_as_the_first(
    certificate: Path, second: bytes, refusal: NetworkRefusal
) -> None:
    async with api(certificate) as seen, inside(certificate, bearer(seen, allow=("GET /a",))) as command:
        asked = get(seen, "/a") + second.replace(b"%d", b"%d" % seen.port)
        answer = await command.ask(asked, f"a.test:{seen.port}")

        assert answer.startswith(b"HTTP/1.1 200")
        assert [head.target for head in seen.heads] == [b"/a"]
        assert (await command.last()).refusal is refusal


CHUNKED = "Transfer-Encoding: chunked\r\nTrailer: T\r\n\r\n1;T=mine\r\na\r\n0\r\nT: mine\r\n"


@pytest.mark.parametrize(
    ("more", "through"),
    [
        ("X-HTTP-Method-Override: DELETE\r\nX_HTTP_Method_Override: DELETE\r\n", set()),
        ("X_Original_URL: /other\r\nA_B: mine\r\n", set()),  # as CGI reads `X-Original-URL` and `A-B`
        ("Connection: close, a-b, host\r\nKeep-Alive: 1\r\nTE: trailers\r\n", set()),
        ("X: y\r\n A-B: mine\r\n", {b"x"}),
        (CHUNKED, {b"transfer-encoding"}),
        ("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n", {b"http2-settings"}),
        ("Connection: Upgrade\r\nUpgrade: x, HTTP/2.0\r\n", {b"connection", b"upgrade"}),
    ],
    ids=["method", "underscores", "hop by hop", "folded", "trailers", "h2c", "h2c in a list"],
)
async def test_what_servers_may_read_as_another_request_or_credential_is_dropped(
    certificate: Path, more: str, through: set[bytes]
) -> None:
    async with api(certificate) as seen, inside(certificate, bearer(seen, how="header", name="A-B")) as command:
        answer = await command.ask(get(seen, more=more), f"a.test:{seen.port}", until=b"hello")

        assert answer.startswith(b"HTTP/1.1 200")
        assert {name for name, _ in seen.heads[0].headers} == {b"host", b"accept-encoding", b"a-b"} | through
        assert seen.header(b"a-b") == [TOKEN]
        assert seen.header(b"upgrade") in ([], [b"x"])


async def test_a_body_is_asked_for_only_when_its_request_may_be_sent(certificate: Path) -> None:
    async with api(certificate) as seen, inside(certificate, bearer(seen, allow=("PUT /a",))) as command:
        wait = f"Expect: 100-continue\r\nContent-Length: 3\r\n{CLOSE}"
        sent, refused = [
            await command.ask(get(seen, path, wait, method="PUT") + b"abc", f"a.test:{seen.port}")
            for path in ("/a", "/b")
        ]

        assert sent.startswith(b"HTTP/1.1 100 \r\n\r\nHTTP/1.1 200 OK")
        assert refused.startswith(b"HTTP/1.1 403")
        assert [(head.target, dict(head.headers).get(b"expect")) for head in seen.heads] == [(b"/a", None)]


async def test_http_1_is_all_that_is_spoken(certificate: Path) -> None:
    async with api(certificate) as seen, inside(certificate, bearer(seen)) as command:
        for offered, taken in ((["h2", "http/1.1"], "http/1.1"), (["h2"], None)):
            async with await command.tunnel(f"a.test:{seen.port}") as stream:
                assert b"200" in await stream.receive_some()
                context = ssl.create_default_context(cadata=command.trust.decode())
                context.set_alpn_protocols(offered)
                secure = trio.SSLStream(stream, context, server_hostname="a.test")
                await secure.do_handshake()
                assert secure.selected_alpn_protocol() == taken


OK = b"HTTP/1.1 200 OK\r\n"
SAYS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;%s\r\na\r\n0\r\nT: %s\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: https://b.test/\r\nContent-Length: 0\r\n\r\n", None),
        (b"HTTP/1.1 302 Found\r\nLocation: https://b.test/%s\r\nContent-Length: 0\r\n\r\n", NetworkRefusal.ECHO),
        (b"HTTP/1.1 400 no %s\r\nContent-Length: 0\r\n\r\n", NetworkRefusal.ECHO),
        (OK + b"X-%s: y\r\nContent-Length: 0\r\n\r\n", NetworkRefusal.ECHO),
        (b"HTTP/1.1 103 Early Hints\r\nLink: %s\r\n\r\n" + OK + b"Content-Length: 0\r\n\r\n", NetworkRefusal.ECHO),
        (SAYS.replace(b"%s", TOKEN), None),
        (b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", NetworkRefusal.UNREACHABLE),
        (OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\na", NetworkRefusal.UNREACHABLE),
        (b"HTTP/2 200\r\n\r\n", NetworkRefusal.UNREACHABLE),
    ],
    ids=["redirect", "in its place", "in the reason", "in a name", "in a hint", "trailers", "unasked upgrade",
         "different lengths", "HTTP/2"],
)  # fmt: skip
async def test_an_answer_brings_nothing_but_itself(
    certificate: Path, said: bytes, refusal: NetworkRefusal | None
) -> None:
    """A redirect is the command's to follow, on another connection, which has no credential."""

    def answer(request: h11.Request, body: bytes) -> bytes:
        return said.replace(b"%s", TOKEN)

    async with api(certificate, answer) as seen, inside(certificate, bearer(seen)) as command:
        answered = await command.ask(get(seen, more=CLOSE), f"a.test:{seen.port}")

        assert TOKEN not in answered
        assert (b"https://b.test/" in answered) is (refusal is None and b"302" in said)
        told = await command.last()
        assert (told.refusal, told.requests, len(seen.heads)) == (refusal, 1, 1)


async def test_a_host_that_gives_the_credential_back_is_cut_off(certificate: Path) -> None:
    """In pieces as well, the first of which must not be sent on."""

    def echo(request: h11.Request, body: bytes) -> bytes:
        value = dict(request.headers)[b"authorization"]
        return b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + b"you said " + value

    async with api(certificate, echo) as seen, inside(certificate, bearer(seen)) as command:
        answer = await command.ask(get(seen), f"a.test:{seen.port}")

        assert TOKEN[:4] not in answer
        assert (await command.last()).refusal is NetworkRefusal.ECHO


@pytest.mark.parametrize("tail", [b"", b"you said " + TOKEN])
async def test_a_large_answer_of_known_length_is_whole_and_watched_to_its_end(certificate: Path, tail: bytes) -> None:
    """It passes by the parsers, and its connection takes no other request."""
    body = os.urandom(3 << 20) + tail

    def large(request: h11.Request, asked: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async with api(certificate, large) as seen, inside(certificate, bearer(seen)) as command:
        answer = await command.ask(get(seen) + get(seen), f"a.test:{seen.port}")

        head, _, got = answer.partition(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        assert got == (body if not tail else body[: len(got)])
        assert TOKEN[:4] not in got[-50:]
        told = await command.last()
        assert (told.refusal, told.requests) == (NetworkRefusal.ECHO if tail else None, 1)


async def test_an_upgrade_passes_and_then_bytes_do(certificate: Path) -> None:
    def upgrade(request: h11.Request, body: bytes) -> bytes:
        return b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: chat\r\n\r\nfirst"

    async with api(certificate, upgrade) as seen, inside(certificate, bearer(seen)) as command:
        wants = "Connection: Upgrade\r\nUpgrade: chat\r\n"
        answer = await command.ask(get(seen, more=wants), f"a.test:{seen.port}", until=b"first")

        assert answer.startswith(b"HTTP/1.1 101")
        assert seen.header(b"upgrade") == [b"chat"]
        assert seen.header(b"authorization") == [b"Bearer " + TOKEN]


async def test_a_request_without_tls_is_refused_where_the_host_gets_a_credential(certificate: Path) -> None:
    async with api(certificate) as seen, inside(certificate, bearer(seen)) as command:
        async with await trio.open_tcp_stream("127.0.0.1", command.proxy) as stream:
            await stream.send_all(b"GET http://a.test:%d/ HTTP/1.1\r\nHost: a.test:%d\r\n\r\n" % (seen.port, seen.port))
            answer = b"".join([data async for data in stream])

        assert b"the connection to it has to be TLS" in answer
        assert (await command.last()).refusal is NetworkRefusal.CERTIFICATE
        assert not seen.heads


async def test_a_host_that_cannot_be_verified_gets_nothing(certificate: Path) -> None:
    async with api(certificate) as seen, inside(certificate, bearer(seen), trusted=False) as command:
        answer = await command.ask(get(seen), f"a.test:{seen.port}")

        assert b"`a.test` cannot be verified: self-signed certificate" in answer
        assert (await command.last()).refusal is NetworkRefusal.CERTIFICATE
        assert not seen.heads


async def test_a_host_that_wants_a_certificate_of_its_clients_is_refused_by_name(certificate: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    key = str(certificate.with_suffix(".key"))
    server = ["openssl", "s_server", "-accept", f"127.0.0.1:{port}", "-cert", str(certificate), "-key", key, "-www"]
    async with open_services() as services:
        run = partial(trio.run_process, [*server, "-Verify", "1", "-verify_return_error"], capture_stderr=True)
        services.start_soon(partial(run, capture_stdout=True, check=False))
        await until_open(port)
        async with inside(certificate, Injection(host="a.test", secret="T", how="bearer", port=port)) as command:
            answer = await command.ask(get(Seen(port)), f"a.test:{port}")

            assert b"wants a certificate of its clients" in answer
            assert (await command.last()).refusal is NetworkRefusal.CERTIFICATE


async def test_a_command_that_ends_tls_ends_its_connection(certificate: Path) -> None:
    """Its last record is no data: whoever reads on for ever holds up everything."""
    async with api(certificate) as seen, inside(certificate, bearer(seen)) as command:
        async with await command.tunnel(f"a.test:{seen.port}") as stream:
            assert b"200" in await stream.receive_some()
            context = ssl.create_default_context(cadata=command.trust.decode())
            secure = trio.SSLStream(
                stream, context, server_hostname="a.test"
            )  # which waits for the end of the other side
            await secure.send_all(get(seen))
            assert b"200" in await secure.receive_some()
            await secure.aclose()
        assert (await command.last()).requests == 1


async def test_without_tls_there_is_no_credential(certificate: Path) -> None:
    async with api(certificate) as seen, inside(certificate, bearer(seen)) as command:
        async with await command.tunnel(f"a.test:{seen.port}") as stream:
            assert b"200" in await stream.receive_some()
            await stream.send_all(get(seen))
            assert await stream.receive_some() == b""

        assert (await command.last()).refusal is NetworkRefusal.CERTIFICATE
        assert not seen.heads


def test_a_path_has_one_spelling() -> None:
    assert canonical_path("/a/%7eb/%c3%a9%2fc") == "/a/~b/%C3%A9%2Fc"
    assert canonical_path("/a/") == "/a/"
    assert canonical_path("a") is None


CLIENTS = {
    "curl": "curl -s $URL/curl",
    "wget": "wget -q -O- --ca-certificate=$SSL_CERT_FILE $URL/wget",  # GnuTLS reads no variable
    "urllib": "python3 -c \"import urllib.request as u; u.urlopen('$URL/urllib').read()\"",
    "git": "git ls-remote $URL/git/x.git",
    "pip": "python3 -m pip --retries 0 download --no-deps --index-url $URL/pip/simple -d $HOME/p x-y-z",
    "npm": "npm view x --fetch-retries 0 --registry $URL/npm/",
    "go": "go list -m example.org/x@latest",
    "java": "java $HOME/Get.java $URL/java",
}
JAVA = """
public class Get {
    public static void main(String[] words) throws Exception { new java.net.URL(words[0]).openStream().readAllBytes(); }
}
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "client", [pytest.param(name, marks=program(words.split()[0]).mark) for name, words in CLIENTS.items()]
)
async def test_real_clients_find_proxy_and_authority_by_themselves(
    certificate: Path, client: str, tmp_path: Path
) -> None:
    """As far as their first request, which the server counts as theirs by its path."""
    (tmp_path / "Get.java").write_text(JAVA)
    async with api(certificate) as seen, inside(certificate, bearer(seen)) as command:
        (tmp_path / "all.pem").write_bytes(command.trust)
        (tmp_path / "all.p12").write_bytes(command.java)
        trusted, java = trust_variables(str(tmp_path / "all.pem"), str(tmp_path / "all.p12"))
        env = {**proxy_variables(command.proxy, java=java), **trusted, "URL": f"https://a.test:{seen.port}"}
        env |= {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "GOFLAGS": "-mod=mod"}
        env |= {"GOPROXY": f"https://a.test:{seen.port}/go", "GONOSUMDB": "*"}
        run = partial(trio.run_process, ["timeout", "30", "sh", "-c", CLIENTS[client]], env=env, check=False)
        done = await run(capture_stdout=True, capture_stderr=True)

        assert [head.target.split(b"/")[1] for head in seen.heads][:1] == [client.encode()], done.stderr
        assert seen.header(b"authorization", 0) == [b"Bearer " + TOKEN]
