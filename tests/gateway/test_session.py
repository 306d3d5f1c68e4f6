"""What passes through the gateway, what is refused there, and what it counts. No network: both ends are in memory."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import h11
import pytest
import trio
from _pytest.mark import ParameterSet
from trio.testing import MockClock, wait_all_tasks_blocked

from runner.core.errors import WorkspaceLost
from runner.core.model import Budget, ModelRefusal, Reason, Usage
from runner.gateway.backoff import MAX_WAIT, MAX_WAIT_UNREACHED
from runner.gateway.session import MAX_BROKEN, MAX_FREE_REPORTED
from runner.network.http import LARGE_BODY, MAX_BODY
from runner.ports.gateway import Api
from tests.support.gateway_wire import (
    CALLS,
    KEY,
    MODELS,
    Client,
    Connecting,
    Provider,
    Said,
    open_line,
    request,
    stream,
    used,
)

ALL = pytest.mark.parametrize("call", list(CALLS))
_AUTH = {Api.ANTHROPIC: ("x-api-key", KEY), Api.OPENAI: ("authorization", f"Bearer {KEY}")}
_AUTH[Api.GEMINI] = ("x-goog-api-key", KEY)


@ALL
async def test_a_request_goes_out_with_the_real_key_and_nothing_else_of_the_client(call: str) -> None:
    api, target = CALLS[call]
    provider = Provider(stream(call))
    body = json.dumps(request(call), indent=3).encode()
    async with open_line(api, provider) as line:
        heard = await line.connect().ask(
            "POST",
            f"{target}{'&' if '?' in target else '?'}key=placeholder",
            body,
            authorization="Bearer placeholder",
            x_api_key="placeholder",
            x_goog_api_key="placeholder",
            cookie="a=b",
            proxy_authorization="Basic placeholder",
            openai_organization="somebody",
            x_forwarded_for="10.0.0.1",
            accept="text/event-stream",
            accept_encoding="gzip",
        )

    asked = provider.asked[0]
    name, value = _AUTH[api]
    assert (heard.status, heard.whole) == (200, True)
    assert asked.body == body
    assert asked.headers == {name: value, "accept": "text/event-stream", "accept-encoding": "identity"}
    assert "placeholder" not in asked.target
    assert asked.target == (target.removeprefix("/v1") if api is Api.OPENAI else target)


@pytest.mark.parametrize("half", [True, False], ids=["half closed", "closed"])
async def test_a_client_that_hangs_up_while_the_provider_is_connected_to_ends_nothing_else(half: bool) -> None:
    """Connecting tries several addresses at once, so what is cancelled there is a group."""
    api, target = CALLS["messages"]
    provider = Connecting()
    others: list[int] = []
    async with open_line(api, provider) as line:
        client = line.connect()
        with trio.fail_after(5):
            await client.send("POST", target, json.dumps(request("messages")).encode())
            await provider.begun.wait()
            await (client.stream.send_eof() if half else client.stream.aclose())
            while not line.told:
                await trio.sleep(0.001)
        await wait_all_tasks_blocked()
        with trio.fail_after(5):
            others.append((await line.connect().ask("GET", "/nothing")).status)

    assert others == [404]


@ALL
async def test_an_answer_comes_through_byte_for_byte_and_piece_by_piece(call: str, autojump_clock: MockClock) -> None:
    """Each piece is there before the provider has said the next; the connection then takes another request."""
    api, target = CALLS[call]
    pieces = [b'data: {"a": 1}\n\n', b": ping\r\n\r\n", used(call, 5, 1)]
    provider = Provider(Said(pieces, kind=b"text/event-stream", pace=10))
    async with open_line(api, provider) as line:
        client = line.connect()
        for _ in range(2):
            start = trio.current_time()
            await client.send("POST", target, json.dumps(request(call)).encode())
            early = await client.receive(until=pieces[0])
            assert (early.body, trio.current_time() - start) == (pieces[0], pytest.approx(0, abs=1))
            rest = await client.receive()
            assert (rest.whole, rest.body) == (True, pieces[1] + pieces[2])
            assert early.headers["content-type"] == "text/event-stream"


async def test_headers_of_an_answer_pass_when_they_tell_of_limits_and_of_nobody() -> None:
    headers = [(b"retry-after", b"7"), (b"x-ratelimit-remaining-tokens", b"5"), (b"request-id", b"req_1")]
    provider = Provider(
        stream("messages", headers=[*headers, (b"set-cookie", b"a=b"), (b"anthropic-organization-id", b"o")])
    )
    async with open_line(Api.ANTHROPIC, provider) as line:
        heard = await line.connect().post("messages")

    assert set(heard.headers) == {
        "content-type",
        "retry-after",
        "x-ratelimit-remaining-tokens",
        "request-id",
        "transfer-encoding",
    }


# --- refusals ---------------------------------------------------------------------------------------


def _tools(call: str, tool: dict[str, Any]) -> dict[str, object]:
    return request(call, tools=[tool])


def _said_by(call: str, part: dict[str, Any]) -> dict[str, object]:
    if call == "gemini":
        return request(call, contents=[{"role": "user", "parts": [part]}])
    return request(call, **{"input" if call == "responses" else "messages": [{"role": "user", "content": [part]}]})


_IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
_OWN_IMAGE = {"type": "content", "content": [{"type": "image", "source": {"type": "file"}}]}
_REACHING = {
    "messages": {
        "web search": _tools("messages", {"type": "web_search_20260209", "name": "web_search"}),
        "code run by the provider": _tools("messages", {"type": "code_execution_20250825", "name": "x"}),
        "mcp server": request("messages", mcp_servers=[{"type": "url", "url": "https://evil.example"}]),
        "container": request("messages", container="c"),
        "dearer speed": request("messages", speed="fast"),
        "picture by url": _said_by("messages", _IMAGE),
        "picture in a tool's result": _said_by("messages", {"type": "tool_result", "content": [_IMAGE]}),
        "document's own picture": _said_by("messages", {"type": "document", "source": _OWN_IMAGE}),
    },
    "responses": {
        "web search": _tools("responses", {"type": "web_search"}),
        "mcp": _tools("responses", {"type": "mcp", "server_url": "https://evil.example"}),
        "tool in an item": request(
            "responses", input=[{"type": "additional_tools", "tools": [{"type": "code_interpreter"}]}]
        ),
        "tool in a namespace": _tools("responses", {"type": "namespace", "tools": [{"type": "file_search"}]}),
        "search for tools by the provider": _tools("responses", {"type": "tool_search"}),
        "search by the client's word only": _tools("responses", {"type": "web_search", "execution": "client"}),
        "stored prompt": request("responses", prompt={"id": "p"}),
        "unwatched": request("responses", background=True),
        "dearer tier": request("responses", service_tier="priority"),
        "picture by url": _said_by("responses", {"type": "input_image", "image_url": "https://x"}),
        "picture that a tool gave": request(
            "responses", input=[{"type": "function_call_output", "output": [{"image_url": "https://x"}]}]
        ),
        "file by id": _said_by("responses", {"type": "input_file", "file_id": "f"}),
    },
    "chat": {
        "picture": _said_by("chat", {"type": "image_url", "image_url": {"url": "https://x"}}),
        "search": request("chat", web_search_options={"a": 1}),
    },
    "gemini": {
        "google search": _tools("gemini", {"googleSearch": {"a": 1}}),
        "url context": _tools("gemini", {"url_context": {}}),
        "file by uri": _said_by("gemini", {"fileData": {"fileUri": "https://x"}}),
        "file by its other name": _said_by("gemini", {"file_data": {"file_uri": "https://x"}}),
        "cached content": request("gemini", cachedContent="c"),
    },
}


def _rows(table: Mapping[str, Mapping[str, object]]) -> list[ParameterSet]:
    return [pytest.param(call, body, id=f"{call}-{id}") for call, rows in table.items() for id, body in rows.items()]


@pytest.mark.parametrize(("call", "body"), _rows(_REACHING))
async def test_what_the_provider_would_fetch_or_run_itself_is_refused(call: str, body: dict[str, object]) -> None:
    """A workspace without network has none through its model either."""
    api, target = CALLS[call]
    provider = Provider(stream(call))
    async with open_line(api, provider) as line:
        heard = await line.connect().ask("POST", target, body)

    assert (heard.status, provider.asked) == (400, [])
    assert "leaves the conversation" in heard.json()["error"]["message"]
    assert [exchange.refusal for exchange in line.told] == [ModelRefusal.REQUEST]


_CLIENT_SIDE = {
    "messages": {
        "tools": request(
            "messages", tools=[{"name": "Bash", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}]
        ),
        "picture in the request": _said_by("messages", {"type": "image", "source": {"type": "base64", "data": "aGk="}}),
        "argument that looks like one": _said_by(
            "messages", {"type": "tool_use", "input": {"source": {"type": "url"}, "tools": [{"type": "mcp"}]}}
        ),
    },
    "responses": {
        "tools": request(
            "responses",
            tools=[{"type": "function", "name": "exec_command", "parameters": {"properties": {"tools": {}}}}],
            input=[{"type": "additional_tools", "tools": [{"type": "namespace", "tools": [{"type": "custom"}]}]}],
        ),
        "search for tools": _tools("responses", {"type": "tool_search", "execution": "client"}),
    },
    "chat": {"picture as data": _said_by("chat", {"image_url": {"url": "data:image/png;base64,aGk="}})},
    "gemini": {"tools": _tools("gemini", {"functionDeclarations": [{"name": "run_shell_command"}]})},
}


@pytest.mark.parametrize(("call", "body"), _rows(_CLIENT_SIDE))
async def test_what_stays_in_the_conversation_passes(call: str, body: dict[str, object]) -> None:
    api, target = CALLS[call]
    async with open_line(api, Provider(stream(call))) as line:
        assert (await line.connect().ask("POST", target, body)).status == 200


@ALL
@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"a": NaN,}', b'{"model": "a", "model": "b"}', b"[" * 100_000, b"[" + b"1," * 1_100_000],
    ids=["empty", "list", "cut", "trailing comma", "two models", "deep", "many values"],
)
async def test_a_body_that_cannot_be_judged_is_refused(call: str, body: bytes) -> None:
    api, target = CALLS[call]
    provider = Provider(stream(call))
    async with open_line(api, provider) as line:
        heard = await line.connect().ask("POST", target, body)

    assert (heard.status, provider.asked) == (400, [])
    assert line.session.failure is None


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("POST", "/v1/files", 404),
        ("GET", "/v1/messages", 404),
        ("POST", "/v1/messages/batches", 404),
        ("POST", "/v1/messages/../models", 404),
        ("POST", "http://evil.example/v1/messages", 404),
        ("HEAD", "/api/hello", 404),
        ("GET", "/v1/models", 200),
    ],
)
async def test_only_known_calls_pass(method: str, target: str, status: int) -> None:
    provider = Provider(Said([b"{}"]))
    async with open_line(Api.ANTHROPIC, provider) as line:
        client = line.connect()
        await client.send(method, target)
        heard = await client.receive()

    assert heard.status == status
    assert len(provider.asked) == (status == 200)


async def test_a_web_page_is_refused() -> None:
    provider = Provider(stream("messages"))
    async with open_line(Api.ANTHROPIC, provider) as line:
        heard = await line.connect().ask("POST", "/v1/messages", request("messages"), origin="https://evil.example")

    assert (heard.status, provider.asked) == (403, [])


async def test_a_websocket_is_refused_so_that_codex_falls_back_at_once() -> None:
    async with open_line(Api.OPENAI, Provider(Said())) as line:
        heard = await line.connect().ask("GET", "/v1/responses", connection="Upgrade", upgrade="websocket")

    assert heard.status == 426


@ALL
async def test_a_model_that_is_not_granted_is_refused_in_the_api_s_own_words(call: str) -> None:
    api = CALLS[call][0]
    provider = Provider(stream(call))
    async with open_line(api, provider, models=["other"]) as line:
        heard = await line.connect().post(call)
        verdict = line.session.failure

    assert (heard.status, provider.asked) == (400, [])
    assert f"`{MODELS[api]}` is not granted to this run, only: other" in heard.json()["error"]["message"]
    assert verdict.reason is Reason.MODEL


async def test_a_refused_helper_model_is_no_verdict_when_the_agent_s_own_has_answered() -> None:
    async with open_line(Api.ANTHROPIC, Provider(stream("messages")), models=["sonnet"]) as line:
        client = line.connect()
        await client.post("messages")
        helper = await client.post("messages", model="claude-haiku-5-5")

        assert (helper.status, line.session.failure) == (400, None)


# --- faults -----------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize(("status", "reason"), [(401, Reason.AUTH), (403, Reason.AUTH), (404, Reason.MODEL)])
async def test_an_error_that_stays_ends_the_client_and_is_the_verdict_until_an_answer_succeeds(
    call: str, status: int, reason: Reason
) -> None:
    """Whatever the provider's status: some clients would try again for minutes."""
    error = Said([b'{"error": {"message": "so it ', b'is"}}'], status=status, headers=[(b"retry-after", b"9")])
    provider = Provider(error, stream(call))
    async with open_line(call, provider) as line:
        client = line.connect()
        heard = await client.post(call)
        verdict = line.session.failure
        await client.post(call)

        assert heard.status == (403 if reason is Reason.AUTH else 400)  # a CLI says of 403 that it could not log in
        assert heard.json()["error"]["message"] == verdict.message if verdict else ""
        assert (heard.headers["x-should-retry"], "retry-after" in heard.headers) == ("false", False)
        assert verdict.reason is reason
        assert verdict.message.endswith(f"it answered {status}, so it is")
        assert line.session.failure is None
        assert (line.session.usage.requests, len(provider.asked)) == (2, 2)


@ALL
@pytest.mark.parametrize(("status", "reason"), [(429, Reason.QUOTA), (500, Reason.GATEWAY), (529, Reason.GATEWAY)])
async def test_an_error_that_may_pass_is_waited_for_while_it_is_worth_it(
    call: str, status: int, reason: Reason, autojump_clock: MockClock
) -> None:
    """Longer and longer, as a share of the time that is left: what an agent has found by then is worth that."""
    error = Said([b'{"error": {"message": "busy"}}'], status=status)
    async with open_line(call, Provider(error), seconds=120) as line:
        began = trio.current_time()
        heard = await line.connect().post(call)

        assert (heard.status, trio.current_time() - began) == (400, 1 + 2 + 4 + 8 + 16)
        assert [told.status for told in line.told] == [*[status] * 5, 400]
        assert [told.retry_seconds for told in line.told] == [1, 2, 4, 8, 16, None]
        assert line.told[0].retry_reason == f"it answered {status}, busy"
        assert line.session.usage.requests == 1
        assert line.session.failure.reason is reason
        assert f"it answered {status}, busy" in line.session.failure.message


async def test_a_cli_that_asks_again_after_all_that_waiting_is_answered_at_once(autojump_clock: MockClock) -> None:
    """Until the model has answered something, after which it is waited for anew."""
    busy = Said([b"{}"], status=500)
    provider = Provider(*[busy] * 7, stream("messages"), busy, stream("messages"))
    async with open_line(Api.ANTHROPIC, provider, seconds=120) as line:
        waited = []
        for _ in range(4):
            began = trio.current_time()
            heard = await line.connect().post("messages")
            waited.append((heard.status, trio.current_time() - began))

    assert waited == [(400, 31), (400, 0), (200, 0), (200, 1)]


async def test_nobody_waits_longer_than_a_cli_does(autojump_clock: MockClock) -> None:
    async with open_line(Api.ANTHROPIC, Provider(Said([b"{}"], status=500))) as line:
        began = trio.current_time()
        await line.connect().post("messages")

    assert MAX_WAIT - 30 < trio.current_time() - began <= MAX_WAIT


@ALL
async def test_a_redirection_is_an_error_that_nobody_pays_for(call: str) -> None:
    elsewhere = Said(status=302, headers=[(b"location", b"http://169.254.169.254/")])
    async with open_line(call, Provider(elsewhere)) as line:
        heard = await line.connect().post(call)

        assert (heard.status, "location" in heard.headers) == (400, False)
        assert (line.session.usage.requests, line.session.usage.tokens) == (1, 0)
        assert line.session.failure.reason is Reason.GATEWAY
        assert line.session.failure.message.endswith("it answered 302, without a message")


async def test_an_answer_that_cannot_be_counted_is_not_passed_on() -> None:
    coded = Said([b"coded"], headers=[(b"content-encoding", b"gzip")])
    provider = Provider(coded)
    async with open_line(Api.OPENAI, provider) as line:
        heard = await line.connect().post("responses")

        assert (heard.status, len(provider.asked), line.session.usage.tokens > 0) == (400, 1, True)
        assert line.session.failure.reason is Reason.GATEWAY
        assert line.session.failure.message.endswith("in an encoding that was not asked for")


async def test_of_an_error_that_cannot_be_read_the_status_is_enough() -> None:
    coded = Said([b"\x1f\x8b"], status=401, headers=[(b"content-encoding", b"gzip")])
    async with open_line(Api.OPENAI, Provider(coded)) as line:
        heard = await line.connect().post("responses")

        assert (heard.status, "content-encoding" in heard.headers) == (403, False)
        assert line.session.failure.reason is Reason.AUTH
        assert line.session.failure.message.endswith("it answered 401, without a message")


async def test_an_error_without_an_end_is_read_as_far_as_it_says_something(autojump_clock: MockClock) -> None:
    endless = Said([b"x" * (1 << 16)], status=401, stalls=10_000)
    async with open_line(Api.OPENAI, Provider(endless)) as line:
        began = trio.current_time()
        heard = await line.connect().post("responses")

        assert (heard.status, trio.current_time() - began) == (403, 0)


async def test_an_error_that_passes_is_not_heard_of(autojump_clock: MockClock) -> None:
    busy = Said([b"{}"], status=529)
    async with open_line(Api.ANTHROPIC, Provider(busy, Said(breaks=True), stream("messages"))) as line:
        heard = await line.connect().post("messages")

        assert (heard.status, line.session.failure) == (200, None)
        assert [told.status for told in line.told] == [529, 0, 200]


def _busy(retry_after: str) -> Said:
    date = (b"date", b"Wed, 21 Oct 2026 07:28:00 GMT")
    return Said([b"{}"], status=429, headers=[(b"retry-after", retry_after.encode()), date])


def _over_quota(**error: object) -> Said:
    return Said([json.dumps({"error": error}).encode()], status=429)


@pytest.mark.parametrize(
    ("call", "busy", "waited"),
    [
        pytest.param("messages", _busy("30"), 30.0, id="a wait that is worth it"),
        pytest.param("messages", _busy("3600"), 0.0, id="too long a wait"),
        pytest.param("messages", _busy("Wed, 21 Oct 2026 07:28:25 GMT"), 25.0, id="a date"),
        pytest.param("messages", _busy("0"), 1.0, id="at once"),
        pytest.param("messages", _busy("-1"), 1.0, id="nonsense"),
        pytest.param("messages", _busy("nan"), 1.0, id="no number"),
        pytest.param("messages", _busy("soon"), 1.0, id="no date"),
        pytest.param(
            "gemini",
            _over_quota(details=[{"@type": "RetryInfo", "retryDelay": "34.5s"}]),
            34.5,
            id="as long as the body says",
        ),
        pytest.param(
            "gemini",
            _over_quota(details=[{"violations": [{"quotaId": "GenerateRequestsPerDayPerProject"}]}]),
            0.0,
            id="until tomorrow",
        ),
        pytest.param("responses", _over_quota(code="insufficient_quota"), 0.0, id="without money"),
        pytest.param("responses", _over_quota(code="rate_limit_exceeded"), 1.0, id="for the minute"),
    ],
)
async def test_a_provider_may_say_how_long_to_wait(
    call: str, busy: Said, waited: float, autojump_clock: MockClock
) -> None:
    async with open_line(call, Provider(busy, stream(call)), seconds=120) as line:
        began = trio.current_time()
        heard = await line.connect().post(call)

        assert (heard.status, trio.current_time() - began) == (200 if waited else 400, waited)


async def test_answers_that_break_off_again_and_again_are_asked_for_no_more() -> None:
    broken = Said([b"data: {}\n\n"], kind=b"text/event-stream", breaks=True)
    provider = Provider(broken)
    async with open_line(Api.ANTHROPIC, provider) as line:
        for _ in range(MAX_BROKEN):
            await line.connect().post("messages")
        heard = await line.connect().post("messages")

        assert (heard.status, len(provider.asked)) == (400, MAX_BROKEN)
        assert "answers in a row have broken off" in heard.json()["error"]["message"]
        assert line.session.failure.reason is Reason.GATEWAY


@pytest.mark.parametrize(
    ("call", "body", "reason"),
    [
        ("messages", b'{"error": {"message": "Your credit balance is too low"}}', Reason.QUOTA),
        ("gemini", b'{"error": {"details": [{"reason": "API_KEY_INVALID"}]}}', Reason.AUTH),
    ],
)
async def test_an_api_s_own_way_to_say_so_is_known(call: str, body: bytes, reason: Reason) -> None:
    async with open_line(call, Provider(Said([body], status=400))) as line:
        await line.connect().post(call)

        assert line.session.failure.reason is reason


async def test_a_bad_request_of_the_agent_s_own_is_not_the_gateway_s_to_judge() -> None:
    async with open_line(Api.ANTHROPIC, Provider(Said([b'{"error": {}}'], status=400))) as line:
        await line.connect().post("messages")

        assert line.session.failure is None


async def test_a_key_in_an_error_does_not_come_through() -> None:
    error = Said([b'{"error": {"message": "bad key ' + KEY[:9].encode(), KEY[9:].encode() + b'"}}'], status=401)
    async with open_line(Api.OPENAI, Provider(error)) as line:
        heard = await line.connect().post("responses")
        verdict = line.session.failure

    assert heard.json()["error"]["message"].endswith("bad key [redacted]")
    assert KEY not in str(verdict)


async def test_a_key_in_what_is_waited_for_or_in_a_page_does_not_come_out(autojump_clock: MockClock) -> None:
    busy = Said([b'{"error": {"message": "slow, ' + KEY.encode() + b'"}}'], status=429)
    page = Said([b"<title>" + KEY.encode() + b"</title>"], kind=b"text/html")
    async with open_line(Api.OPENAI, Provider(busy, page)) as line:
        heard = await line.connect().post("responses")

    assert KEY not in heard.body.decode() + str(line.told) + str(line.session.failure)
    assert (line.told[0].retry_reason, b"[redacted]" in heard.body) == ("it answered 429, slow, [redacted]", True)


@pytest.mark.parametrize(
    "form",
    [
        base64.b64encode(KEY.encode()),
        base64.b64encode(b"user:" + KEY.encode()),
        KEY.encode().hex().encode(),
        KEY.encode().hex(":").encode(),
        KEY.replace("-", r"\u002d").encode(),
        KEY.replace("-", "&#45;").encode(),
        KEY.replace("-", "%2D").encode(),
        KEY.replace("-", r"\\u002D").encode(),
    ],
)
async def test_nor_does_one_that_is_written_otherwise_also_not_in_a_header(form: bytes) -> None:
    error = Said([b'{"error": {"message": "bad key <%s>"}}' % form], status=400, headers=[(b"x-request-id", form)])
    async with open_line(Api.OPENAI, Provider(error)) as line:
        heard = await line.connect().post("responses")
        verdict = line.session.failure

    assert "[redacted:key]" in heard.json()["error"]["message"]
    assert "[redacted:key]" in heard.headers["x-request-id"]
    assert form[8:].decode() not in f"{heard.body!r}{heard.headers}{verdict}"


async def test_a_provider_that_cannot_be_reached_is_the_platform_s_fault(autojump_clock: MockClock) -> None:
    """A name, a route or a certificate that is wrong: who started the run has to do something, nobody else can."""
    async with open_line(Api.ANTHROPIC, Provider(Said(unreachable=True))) as line:
        began = trio.current_time()
        heard = await line.connect().post("messages")
        verdict = line.session.failure

    assert (heard.status, [told.status for told in line.told]) == (400, [0, 0, 400])
    assert line.told[-1].refusal is ModelRefusal.GATEWAY
    assert (verdict.reason, verdict.message) == (Reason.PLATFORM, "`api.example` could not be reached: nobody there")
    assert trio.current_time() - began == MAX_WAIT_UNREACHED
    assert "`RUNNER_ANTHROPIC_URL`, `HTTPS_PROXY`" in verdict.details[0]


@pytest.mark.scenario("BEY-16", only="gateway")
@ALL
async def test_an_answer_that_breaks_off_is_cut_off_for_the_client_and_still_counted(call: str) -> None:
    api, target = CALLS[call]
    broken = Said([b"data: {}\n\n" * 40], kind=b"text/event-stream", breaks=True)
    async with open_line(api, Provider(broken)) as line:
        client = line.connect()
        await client.send("POST", target, json.dumps(request(call, pad="x" * 400)).encode())
        heard = await client.receive(until=b"data: {}\n\n" * 40)
        with pytest.raises(Exception, match="peer"):
            await client.receive()
        verdict = line.session.failure

    told = line.told[0]
    assert (heard.status, heard.whole) == (200, False)
    assert told.estimated
    assert told.usage.input_tokens > 100
    assert told.usage.output_tokens == 400 // 8
    assert verdict.reason is Reason.GATEWAY


async def test_a_client_that_goes_away_takes_its_request_along(autojump_clock: MockClock) -> None:
    provider = Provider(Said([b"data: {}\n\n"], kind=b"text/event-stream", stalls=500))
    async with open_line(Api.ANTHROPIC, provider) as line:
        client = line.connect()
        await client.send("POST", "/v1/messages", json.dumps(request("messages")).encode())
        await client.receive(until=b"{}")
        await client.stream.aclose()
        with trio.fail_after(20):
            while not line.told:
                await trio.sleep(0.01)

    assert provider.asked[0].broken_off
    assert (line.told[0].status, line.told[0].estimated) == (200, True)


async def test_a_client_that_goes_away_before_the_answer_has_paid_for_its_question(autojump_clock: MockClock) -> None:
    provider = Provider(Said(stalls=500, breaks=True))
    async with open_line(Api.ANTHROPIC, provider) as line:
        client = line.connect()
        await client.send("POST", "/v1/messages", json.dumps(request("messages", pad="x" * 4000)).encode())
        await trio.sleep(1)
        await client.stream.aclose()
        await trio.sleep(1)

    told = line.told[0]
    assert (told.status, told.estimated, told.usage.input_tokens > 1000) == (0, True, True)


async def test_a_lost_workspace_ends_its_connections_quietly() -> None:
    """As ``Workspace.listen`` promises: what a connection raises takes nothing else down."""

    class Lost:
        def __init__(self) -> None:
            self.said = [b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"]

        async def receive_some(self, max_bytes: int) -> bytes:
            if not self.said:
                await trio.sleep_forever()
            return self.said.pop()

        async def send_all(self, data: bytes) -> None:
            raise WorkspaceLost("gone")

    async with open_line(Api.ANTHROPIC, Provider(Said([b"{}"]))) as line:
        with trio.fail_after(5):
            await line.session.serve(Lost())  # type: ignore[arg-type]  # as much of a connection as it takes

    assert len(line.told) == 1


async def test_closing_a_session_breaks_off_what_is_under_way_and_serves_nobody_any_more() -> None:
    provider = Provider(Said([b"data: {}\n\n"], kind=b"text/event-stream", stalls=500))
    async with open_line(Api.ANTHROPIC, provider) as line:
        client = line.connect()
        await client.send("POST", "/v1/messages", json.dumps(request("messages")).encode())
        await client.receive(until=b"{}")
        line.session.close()
        with trio.fail_after(5):
            heard = await line.connect().ask("GET", "/v1/models")
            while not line.told:
                await trio.sleep(0.01)

    assert heard.status == 0
    assert provider.asked[0].broken_off


# --- counting ---------------------------------------------------------------------------------------


@ALL
async def test_usage_is_what_the_provider_says(call: str) -> None:
    api = CALLS[call][0]
    async with open_line(api, Provider(stream(call, 1000, 30))) as line:
        await line.connect().post(call)

    told = line.told[0]
    assert (told.usage.requests, told.usage.input_tokens, told.usage.output_tokens) == (1, 1000, 30)
    assert (told.estimated, told.model, told.refusal) == (False, MODELS[api], None)
    assert 0 <= told.first_byte_seconds <= told.seconds
    assert line.session.usage == told.usage


async def test_counting_tokens_and_listing_models_cost_nothing() -> None:
    provider = Provider(Said([b'{"input_tokens": 9, "usage": {"input_tokens": 9}}']))
    async with open_line(Api.ANTHROPIC, provider, budget=Budget(turns=1)) as line:
        client = line.connect()
        counted = await client.ask("POST", "/v1/messages/count_tokens", request("messages"))
        await client.ask("GET", "/v1/models?limit=5")

    assert counted.status == 200
    assert line.session.usage == Usage()
    assert provider.asked[1].target == "/v1/models?limit=5"


async def test_of_requests_without_end_that_cost_nothing_only_so_many_are_told() -> None:
    async with open_line(Api.ANTHROPIC, Provider(stream("messages"))) as line:
        client = line.connect()
        for _ in range(MAX_FREE_REPORTED + 5):
            await client.ask("GET", "/nowhere")
        await client.post("messages")

    assert (len(line.told), line.told[-1].call) == (MAX_FREE_REPORTED + 1, "messages")


# --- budgets ----------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize(
    ("budget", "reason", "words"),
    [
        (Budget(tokens=100), Reason.BUDGET, "110 of 100 tokens are used"),
        (Budget(turns=1), Reason.TURNS, "1 of 1 turns are used"),
        (Budget(cost_usd=0.00001), Reason.BUDGET, "of $0.0000 are used"),
    ],
    ids=["tokens", "turns", "cost"],
)
@pytest.mark.scenario("BEY-16", only="gateway")
async def test_a_request_over_the_budget_is_refused(call: str, budget: Budget, reason: Reason, words: str) -> None:
    provider = Provider(stream(call, 100, 10))
    async with open_line(call, provider, budget=budget) as line:
        client = line.connect()
        first = await client.post(call)
        second = await client.post(call)
        verdict = line.session.failure

    assert (first.status, second.status, len(provider.asked)) == (200, 400, 1)
    assert words in second.json()["error"]["message"]
    assert (verdict.reason, line.told[1].refusal) == (reason, ModelRefusal.BUDGET)


async def test_an_error_is_no_turn() -> None:
    error = Said([b"{}"], status=404)
    async with open_line(Api.ANTHROPIC, Provider(error, error, stream("messages")), budget=Budget(turns=1)) as line:
        client = line.connect()
        statuses = [(await client.post("messages")).status for _ in range(4)]

    assert statuses == [400, 400, 200, 400]


@pytest.mark.parametrize("budget", [Budget(tokens=1000), Budget(turns=10), Budget(cost_usd=0.0022)])
async def test_requests_at_once_overrun_the_budget_by_one_at_most(budget: Budget, autojump_clock: MockClock) -> None:
    provider = Provider(stream("messages", 90, 10, stalls=1))
    statuses: list[int] = []

    async def ask(client: Client) -> None:
        statuses.append((await client.post("messages")).status)

    async with open_line(Api.ANTHROPIC, provider, budget=budget) as line, trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(ask, line.connect())

    assert 10 <= statuses.count(200) <= 11 if budget.cost_usd is None else statuses.count(200) in (7, 8, 9)
    assert len(statuses) == 50
    assert line.session.usage.requests == statuses.count(200)


async def test_a_model_without_a_price_is_refused_when_the_budget_is_in_dollars() -> None:
    async with open_line(
        Api.OPENAI, Provider(stream("responses")), models=["house-model"], budget=Budget(cost_usd=1)
    ) as line:
        heard = await line.connect().post("responses", model="house-model")

    assert "has no known price" in heard.json()["error"]["message"]


# --- bounds -----------------------------------------------------------------------------------------


@pytest.mark.nightly
async def test_a_body_over_the_limit_is_refused() -> None:
    async with open_line(Api.ANTHROPIC, Provider(stream("messages"))) as line:
        client = line.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_try_to_send, client, b" " * (MAX_BODY + 1))
            heard = await client.receive()
            nursery.cancel_scope.cancel()

    assert heard.status == 413


async def _try_to_send(client: Client, body: bytes) -> None:
    await client.stream.send_all(b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body))
    client._protocol.send(
        h11.Request(method="POST", target="/", headers=[("host", "a"), ("content-length", str(len(body)))])
    )
    for at in range(0, len(body), LARGE_BODY):
        try:
            await client.stream.send_all(body[at : at + LARGE_BODY])
        except trio.BrokenResourceError:
            return


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"nonsense\r\n\r\n", id="no request"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="no host"),
        pytest.param(b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 200_000 + b"\r\n\r\n", id="large head"),
        pytest.param(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", id="two lengths"),
        pytest.param(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nz\r\n", id="bad chunk"),
    ],
)
async def test_what_is_no_request_is_answered_and_the_connection_closed(sent: bytes) -> None:
    async with open_line(Api.ANTHROPIC, Provider(Said())) as line:
        stream = line.connect().stream
        await stream.send_all(sent)
        heard = b""
        while chunk := await stream.receive_some(4096):
            heard += chunk

    assert heard.startswith(b"HTTP/1.1 4")
    assert line.told == []


async def test_a_client_that_asks_whether_to_go_on_is_told_so() -> None:
    async with open_line(Api.ANTHROPIC, Provider(stream("messages"))) as line:
        client = line.connect()
        body = json.dumps(request("messages")).encode()
        head = b"POST /v1/messages HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
        await client.stream.send_all(head % len(body))
        assert (await client.stream.receive_some(100)).startswith(b"HTTP/1.1 100 ")
        await client.stream.send_all(body)
        assert (await client.stream.receive_some(1000)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_that_a_hostile_client_says_gets_around_the_grant(seed: int, autojump_clock: MockClock) -> None:
    luck = random.Random(seed)
    provider = Provider(stream("messages"))
    bodies = [
        json.dumps(request("messages", model=model)).encode() for model in ("claude-opus-5-5", MODELS[Api.ANTHROPIC])
    ]
    async with open_line(Api.ANTHROPIC, provider) as line:
        for _ in range(100):
            body = luck.choice(bodies)
            head = b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
            sent = bytearray(head + body)
            for _ in range(luck.randint(1, 4)):
                at = luck.randrange(len(sent))
                sent[at : at + luck.randint(0, 3)] = luck.randbytes(luck.randint(0, 3))
            connection = line.connect().stream
            for at in range(0, len(sent), 60):
                with suppress(trio.BrokenResourceError):
                    await connection.send_all(bytes(sent[at : at + 60]))
            with trio.move_on_after(1), suppress(trio.BrokenResourceError):
                while await connection.receive_some():
                    pass
            await connection.aclose()

    assert 0 < len(provider.asked) < 100
    assert {json.loads(asked.body)["model"] for asked in provider.asked} <= {MODELS[Api.ANTHROPIC]}
    assert all(asked.headers["x-api-key"] == KEY for asked in provider.asked)


async def test_a_silent_client_is_let_go(autojump_clock: MockClock) -> None:
    async with open_line(Api.ANTHROPIC, Provider(Said())) as line:
        idle, half = line.connect().stream, line.connect().stream
        await half.send_all(b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n12")
        with trio.fail_after(700):
            assert await idle.receive_some(10) == b""
            assert (await half.receive_some(100)).startswith(b"HTTP/1.1 408")


async def test_large_requests_wait_for_each_other(autojump_clock: MockClock) -> None:
    """So that many connections cost bounded memory; small ones pass meanwhile."""
    body = json.dumps(request("messages", pad="x" * (2 * LARGE_BODY))).encode()
    provider = Provider(stream("messages", stalls=10))
    started = trio.current_time()
    async with open_line(Api.ANTHROPIC, provider) as line, trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(_send_large, line.connect(), body)
        await trio.sleep(1)
        large = len(provider.asked)
        await line.connect().post("messages")
        assert (large, trio.current_time() - started) == (2, pytest.approx(11, abs=0.5))


async def _send_large(client: Client, body: bytes) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.send, "POST", "/v1/messages", body)
    await client.receive()
