"""The gateway with a provider at the end of a real way: https, certificates, a proxy; and what it needs for that."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from runner.core.errors import KeyMissing, Unpriced, UsageError
from runner.core.model import Budget, Reason
from runner.core.nurseries import open_services
from runner.core.settings import Settings
from runner.fake_model.provider import serve_fake_model
from runner.fake_model.script import Turn
from runner.gateway.gateway import ModelGateway
from runner.ports.gateway import Api, ModelGrant, ModelRequest
from tests.support.certificates import make_certificate
from tests.support.gateway_wire import KEY, Client, request

GRANT = ModelGrant(Api.ANTHROPIC, ("sonnet",))
TOOLS = [{"name": "Bash", "input_schema": {"properties": {"command": {}}}}]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of ``localhost``, with its key beside it."""
    return make_certificate(tmp_path_factory.mktemp("tls") / "server.pem", "DNS:localhost")


@asynccontextmanager
async def open_provider(certificate: Path) -> AsyncIterator[int]:
    """A double behind TLS, and its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))

    async with serve_fake_model([Turn(say="hello")] * 5) as double, open_services() as services:

        async def serve(stream: trio.SSLStream[trio.SocketStream]) -> None:
            async with stream, await trio.open_tcp_stream("127.0.0.1", double) as other:
                await _join(stream, other)

        def wrapped(listener: trio.SocketListener) -> trio.SSLListener[trio.SocketStream]:
            return trio.SSLListener(listener, context, https_compatible=True)

        plain = await trio.open_tcp_listeners(0, host="127.0.0.1")
        services.start_soon(trio.serve_listeners, serve, [wrapped(listener) for listener in plain])
        yield plain[0].socket.getsockname()[1]


@asynccontextmanager
async def open_proxy() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A proxy for CONNECT, its port, and the heads of the requests that it got."""
    heads: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        head = await stream.receive_some(4096)
        heads.append(head)
        port = int(head.split()[1].rpartition(b":")[2])
        async with stream, await trio.open_tcp_stream("127.0.0.1", port) as other:
            await stream.send_all(b"HTTP/1.1 200 yes\r\n\r\n")
            await _join(stream, other)

    async with open_services() as services:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        services.start_soon(trio.serve_listeners, serve, listeners)
        yield listeners[0].socket.getsockname()[1], heads


async def _join(one: trio.abc.Stream, other: trio.abc.Stream) -> None:
    async def copy(source: trio.abc.Stream, sink: trio.abc.Stream) -> None:
        try:
            while data := await source.receive_some():
                await sink.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await sink.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(copy, one, other)
        nursery.start_soon(copy, other, one)


def settings(port: int, **env: str) -> Settings:
    return Settings.from_env({"ANTHROPIC_API_KEY": KEY, "RUNNER_ANTHROPIC_URL": f"https://localhost:{port}", **env})


async def ask(settings: Settings, times: int = 1) -> tuple[list[ModelRequest], Reason | None, bytes]:
    """What asking a model makes of it."""
    told: list[ModelRequest] = []
    async with ModelGateway(settings).open(GRANT, told.append) as session, open_services() as services:

        async def serve(stream: trio.SocketStream) -> None:
            async with stream:
                await session.serve(stream)

        near, far = trio.socket.socketpair()
        services.start_soon(serve, trio.SocketStream(far))
        client = Client(trio.SocketStream(near))
        with trio.fail_after(60):
            for _ in range(times):
                heard = await client.ask("POST", "/v1/messages", request("messages", tools=TOOLS))
        await client.stream.aclose()
    return told, session.failure and session.failure.reason, heard.body


async def test_a_provider_is_reached_by_https_with_the_host_s_certificates(certificate: Path) -> None:
    async with open_provider(certificate) as port:
        told, verdict, body = await ask(settings(port, SSL_CERT_FILE=str(certificate)), times=3)

    assert ([one.status for one in told], verdict) == ([200, 200, 200], None)
    assert b"hello" in body


async def test_a_certificate_that_nobody_vouches_for_is_the_platform_s_fault(certificate: Path) -> None:
    async with open_provider(certificate) as port:
        told, verdict, body = await ask(settings(port))

    assert ([one.status for one in told], verdict) == ([0, 0, 400], Reason.PLATFORM)
    assert b"certificate" in body.lower()


async def test_nobody_at_the_url_is_the_platform_s_fault() -> None:
    told, verdict, _ = await ask(settings(1))

    assert ([one.status for one in told], verdict) == ([0, 0, 400], Reason.PLATFORM)


@pytest.mark.parametrize(
    ("env", "through"),
    [
        pytest.param({"HTTPS_PROXY": "http://me:p%40ss@127.0.0.1:{}"}, True, id="proxy"),
        pytest.param({"https_proxy": "127.0.0.1:{}"}, True, id="without a scheme"),
        pytest.param({"HTTPS_PROXY": "http://127.0.0.1:{}", "NO_PROXY": "a.example,localhost"}, False, id="exempt"),
        pytest.param({"HTTP_PROXY": "http://127.0.0.1:{}"}, False, id="for http only"),
    ],
)
async def test_the_host_s_proxy_is_used_where_it_is_meant(
    certificate: Path, env: Mapping[str, str], through: bool
) -> None:
    async with open_provider(certificate) as port, open_proxy() as (proxy, heads):
        given = {name: text.format(proxy) for name, text in env.items()}
        told, verdict, _ = await ask(settings(port, SSL_CERT_FILE=str(certificate), **given))

    assert ([one.status for one in told], verdict, bool(heads)) == ([200], None, through)
    assert all(KEY.encode() not in head for head in heads)
    if "me:p" in env.get("HTTPS_PROXY", ""):
        assert b"Basic bWU6cEBzcw==" in heads[0]


async def test_a_proxy_that_refuses_is_not_taken_for_the_provider() -> None:
    """Its 403 is not one that the key gets."""

    async def refuse(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(4096)
            await stream.send_all(b"HTTP/1.1 403 Not from here\r\ncontent-length: 0\r\n\r\n")

    async with open_services() as services:
        listeners = await services.start(partial(trio.serve_tcp, refuse, 0, host="::1"))
        proxy = f"http://[::1]:{listeners[0].socket.getsockname()[1]}"
        _, verdict, body = await ask(settings(1, HTTPS_PROXY=proxy))

    assert verdict is Reason.PLATFORM
    assert b"the proxy answered 403 Not from here" in body


@pytest.mark.parametrize(
    ("env", "words"),
    [
        pytest.param({}, "`ANTHROPIC_API_KEY` is not set", id="missing"),
        pytest.param({"ANTHROPIC_API_KEY": ""}, "`ANTHROPIC_API_KEY` is not set", id="empty"),
        pytest.param({"ANTHROPIC_API_KEY": "  "}, "`ANTHROPIC_API_KEY` is not a key", id="blank"),
        pytest.param({"ANTHROPIC_API_KEY": "sk-1\n"}, "`ANTHROPIC_API_KEY` is not a key", id="line's end"),
        pytest.param({"ANTHROPIC_API_KEY": "sk-é"}, "`ANTHROPIC_API_KEY` is not a key", id="not ASCII"),
        pytest.param({"OPENAI_API_KEY": "sk-1"}, "`ANTHROPIC_API_KEY` is not set", id="another's"),
    ],
)
async def test_a_key_that_is_none_is_named_before_anything_is_made(env: dict[str, str], words: str) -> None:
    gateway = ModelGateway(Settings.from_env(env))

    with pytest.raises(KeyMissing, match=words):
        gateway.check(GRANT)
    with pytest.raises(KeyMissing, match=words):
        async with gateway.open(GRANT, lambda exchange: None):
            pass


@pytest.mark.parametrize(
    ("api", "env"),
    [
        (Api.ANTHROPIC, "ANTHROPIC_API_KEY"),
        (Api.OPENAI, "OPENAI_API_KEY"),
        (Api.OPENAI, "CODEX_API_KEY"),
        (Api.GEMINI, "GEMINI_API_KEY"),
        (Api.GEMINI, "GOOGLE_API_KEY"),
    ],
)
def test_each_documented_key_is_taken(api: Api, env: str) -> None:
    settings = Settings.from_env({env: KEY})

    ModelGateway(settings).check(ModelGrant(api, ("any",)))
    assert KEY not in repr(settings)


@pytest.mark.parametrize(
    ("model", "priced"),
    [("sonnet", True), ("claude-sonnet-5-5", True), ("claude-sonnet-5-5-20260901", True), ("claude-next", False)],
)
def test_a_budget_in_dollars_needs_a_price(model: str, priced: bool) -> None:
    gateway = ModelGateway(Settings.from_env({"ANTHROPIC_API_KEY": KEY}))
    grant = ModelGrant(Api.ANTHROPIC, (model,), Budget(cost_usd=1))

    if priced:
        gateway.check(grant)
    else:
        with pytest.raises(Unpriced, match="claude-next"):
            gateway.check(grant)
    gateway.check(ModelGrant(Api.ANTHROPIC, (model,), Budget(tokens=1)))


async def test_who_is_on_this_host_is_asked_without_anybody_s_certificates() -> None:
    """They take longer to read than all else that a triage does before its agent starts."""
    env = {"ANTHROPIC_API_KEY": KEY, "RUNNER_ANTHROPIC_URL": "http://127.0.0.1:1", "SSL_CERT_FILE": "/nowhere"}
    gateway = ModelGateway(Settings.from_env(env))

    gateway.check(GRANT)
    async with gateway.open(GRANT, lambda exchange: None) as session:
        assert session.failure is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RUNNER_OPENAI_URL", "http://models.example"),
        ("RUNNER_OPENAI_URL", "https://me@models.example"),
        ("RUNNER_OPENAI_URL", "https://models.example/v1?key=1"),
        ("RUNNER_OPENAI_URL", "models.example"),
        ("RUNNER_OPENAI_URL", "https://models.example:99999"),
        ("RUNNER_OPENAI_URL", "https://[::1"),
        ("RUNNER_OPENAI_URL", "https://modèles.example"),
        ("RUNNER_OPENAI_URL", "https://models example"),
        ("SSL_CERT_FILE", "/nowhere/certificates.pem"),
        ("HTTPS_PROXY", "socks5://127.0.0.1:1"),
        ("HTTPS_PROXY", "http://127.0.0.1:port"),
        ("HTTPS_PROXY", "127.0.0.1:99999"),
        ("HTTPS_PROXY", "http://me:a#b@127.0.0.1:1"),
        ("HTTPS_PROXY", "http://[::1"),
    ],
)
def test_a_way_that_cannot_be_gone_is_said_before_anything_is_made(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name) as refused:
        ModelGateway(Settings.from_env({"OPENAI_API_KEY": KEY, name: text})).check(ModelGrant(Api.OPENAI, ("any",)))
    assert (refused.value.hint or "").startswith(("write an https URL", "name a file", "write http://"))
