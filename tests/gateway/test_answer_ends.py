"""How answers end, told from outside: a CLI may take half of one for its work, and say that it has finished."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from runner.core.model import ModelRefusal, Reason
from runner.events.events import Event, WarningIssued
from runner.gateway.meter import MAX_EVENT
from runner.ports.gateway import Api
from runner.steps.agent.model import tell_silence
from tests.support.gateway_wire import CALLS, Provider, Said, open_line, request, stream

ALL = pytest.mark.parametrize("call", list(CALLS))
TOOLS: dict[str, Any] = {"tools": [{"name": "Bash"}]}


def events(*messages: object) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(message).encode() for message in messages)


def said(*messages: object) -> Said:
    return Said([events(*messages)], kind=b"text/event-stream")


def whole(message: object, **options: Any) -> Said:
    return Said([json.dumps(message).encode()], **options)


_STOP = {"type": "message_stop"}
_DELTA = {"type": "message_delta", "usage": {"output_tokens": 5}}
_FAILED = {"code": "server_error", "message": "it broke"}

_LIMITED = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
_OVER_RATE = {"error": {"code": "rate_limit_exceeded", "message": "slow"}}


def claude(stop_reason: str) -> Said:
    return said({**_DELTA, "delta": {"stop_reason": stop_reason}}, _STOP)


def claude_error(kind: str, *before: object) -> Said:
    return said(*before, {"type": "error", "error": {"type": kind, "message": "so it is"}})


# what a provider says last, by the call; how that ends
ENDS: dict[str, tuple[str, Said, Reason | None]] = {
    "claude, whole": ("messages", claude("end_turn"), None),
    "claude, a tool": ("messages", claude("tool_use"), None),
    "claude, no stream": ("messages", whole({"type": "message", "stop_reason": "end_turn"}), None),
    "claude, length": ("messages", claude("max_tokens"), Reason.CUT_OFF),
    "claude, refused": ("messages", claude("refusal"), Reason.CUT_OFF),
    "claude, length, no stream": ("messages", whole({"type": "message", "stop_reason": "max_tokens"}), Reason.CUT_OFF),
    "claude, no last event": ("messages", said({**_DELTA, "delta": {"stop_reason": "end_turn"}}), Reason.GATEWAY),
    "claude, overloaded": ("messages", claude_error("overloaded_error"), Reason.GATEWAY),
    "claude, too many": ("messages", claude_error("rate_limit_error", _DELTA), Reason.QUOTA),
    "codex, whole": ("responses", said({"type": "response.completed", "response": {"id": "r"}}), None),
    "codex, no stream": ("responses", whole({"object": "response", "status": "completed", "error": None}), None),
    "codex, length": ("responses", said({"type": "response.incomplete", "response": _LIMITED}), Reason.CUT_OFF),
    "codex, incomplete": ("responses", whole({"object": "response", "status": "incomplete"}), Reason.CUT_OFF),
    "codex, failed": ("responses", said({"type": "response.failed", "response": {"error": _FAILED}}), Reason.GATEWAY),
    "codex, too many": ("responses", said({"type": "response.failed", "response": _OVER_RATE}), Reason.QUOTA),
    "codex, error": ("responses", said({"type": "error", **_FAILED}), Reason.GATEWAY),
    "codex, no last event": ("responses", said({"type": "response.output_item.done", "item": {}}), Reason.GATEWAY),
    "chat, whole": ("chat", said({"choices": [{}]}, {"choices": [{"finish_reason": "stop"}]}), None),
    "chat, a tool": ("chat", said({"choices": [{"finish_reason": "tool_calls"}]}, {"choices": []}), None),
    "chat, length": ("chat", said({"choices": [{"finish_reason": "length"}]}), Reason.CUT_OFF),
    "chat, filtered": ("chat", whole({"choices": [{"finish_reason": "content_filter"}]}), Reason.CUT_OFF),
    "chat, error": ("chat", said({"choices": [{"finish_reason": None}]}, {"error": _FAILED}), Reason.GATEWAY),
    "chat, no last event": ("chat", said({"choices": [{"delta": {"content": "a"}}]}), Reason.GATEWAY),
    "gemini, whole": ("gemini", said({"candidates": [{"finishReason": "STOP"}]}), None),
    "gemini, a list": ("gemini", whole([{"candidates": [{}]}, {"candidates": [{"finishReason": "STOP"}]}]), None),
    "gemini, length": ("gemini", said({"candidates": [{"finishReason": "MAX_TOKENS"}]}), Reason.CUT_OFF),
    "gemini, safety": ("gemini", said({"candidates": [{"finishReason": "SAFETY"}]}), Reason.CUT_OFF),
    "gemini, prompt refused": ("gemini", said({"promptFeedback": {"blockReason": "SAFETY"}}), Reason.CUT_OFF),
    "gemini, error": ("gemini", said({"error": {"code": 503, "message": "overloaded"}}), Reason.GATEWAY),
    "gemini, no last event": ("gemini", said({"candidates": [{"content": {}}]}), Reason.GATEWAY),
}


@pytest.mark.parametrize(("call", "answer", "reason"), ENDS.values(), ids=ENDS)
async def test_an_answer_is_whole_only_when_it_says_so(call: str, answer: Said, reason: Reason | None) -> None:
    async with open_line(call, Provider(answer)) as line:
        heard = await line.connect().post(call)
        verdict = line.session.failure

    assert (verdict and verdict.reason) is reason
    assert heard.status == (0 if verdict and "before its end" in verdict.message else 200)


@ALL
@pytest.mark.parametrize("body", [b"", b"nonsense", b'data: {"half": \n\n', b"data: 7\n\n", b"[]"], ids=str)
@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json", b""], ids=["stream", "json", "unnamed"])
async def test_what_says_nothing_is_no_answer(call: str, body: bytes, kind: bytes) -> None:
    """The client gets no end of it either, and so cannot take it for one."""
    api, target = CALLS[call]
    async with open_line(api, Provider(Said([body], kind=kind))) as line:
        client = line.connect()
        await client.send("POST", target, json.dumps(request(call)).encode())
        try:
            heard_all = (await client.receive()).whole
        except Exception:  # noqa: BLE001  # of the client's own library
            heard_all = False
        verdict = line.session.failure

    assert not heard_all
    assert line.told[0].refusal is ModelRefusal.GATEWAY
    assert (verdict.reason, verdict.message) == (
        Reason.GATEWAY,
        "the provider broke off: its answer stopped before its end",
    )


@ALL
@pytest.mark.parametrize("kind", [b"text/html; charset=utf-8", b"text/plain", b"application/octet-stream"], ids=str)
async def test_what_is_no_api_s_content_does_not_come_through(call: str, kind: bytes) -> None:
    """A company's proxy asks for a login, and that with status 200."""
    api = CALLS[call][0]
    page = Said([b"<html><head><title>Sign in</title></head>", b"<body>...</body></html>"], kind=kind)
    async with open_line(api, Provider(page)) as line:
        heard = await line.connect().post(call)
        verdict = line.session.failure

    assert (heard.status, b"<html" in heard.body) == (400, False)
    assert verdict.reason is Reason.GATEWAY
    assert verdict.message.startswith("what answers is not the provider's API: it sent `")
    assert ("a page, `Sign in`" in verdict.message) is kind.startswith(b"text/")
    assert f"`RUNNER_{api.value.upper()}_URL`" in verdict.details[0]


@ALL
@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_page_says_nothing_of_keys_and_models(call: str, status: int) -> None:
    page = Said([b"<html>\n<head><title>404 Not Found</title></head>nginx, model of its kind</html>"], status=status)
    async with open_line(call, Provider(page)) as line:
        await line.connect().post(call)
        verdict = line.session.failure

    assert (verdict.reason, len(verdict.details)) == (Reason.GATEWAY, 1)
    assert verdict.message == f"the provider cannot answer: it answered {status}, a page, `404 Not Found`"


@pytest.mark.parametrize(
    ("call", "status", "body", "reason"),
    [
        ("messages", 404, {"type": "error", "error": {"type": "not_found_error", "message": "model: x"}}, Reason.MODEL),
        ("responses", 403, {"error": {"code": "model_not_found", "message": "no access"}}, Reason.MODEL),
        ("responses", 400, {"error": {"code": "context_length_exceeded", "message": "long"}}, Reason.CUT_OFF),
        ("messages", 400, {"error": {"message": "prompt is too long: 210000 tokens > 200000 maximum"}}, Reason.CUT_OFF),
        ("chat", 400, {"error": {"message": "This model's maximum context length is 8192 tokens."}}, Reason.CUT_OFF),
        ("gemini", 400, {"error": {"message": "The input exceeds the maximum number of tokens"}}, Reason.CUT_OFF),
        ("responses", 429, {"error": {"code": "insufficient_quota", "message": "pay"}}, Reason.QUOTA),
        ("chat", 404, {"object": "error", "message": "The model `x` does not exist."}, Reason.MODEL),
        ("chat", 404, {"detail": "Not Found"}, Reason.GATEWAY),
        ("chat", 404, {"error": {"message": "Invalid URL (POST /v1/v1/chat/completions)"}}, Reason.GATEWAY),
        ("gemini", 404, {"error": {"status": "NOT_FOUND", "message": "models/x is not found"}}, Reason.MODEL),
        ("gemini", 400, {"error": {"status": "INVALID_ARGUMENT", "message": "a field"}}, None),
    ],
)
async def test_an_error_is_what_the_api_calls_it(
    call: str, status: int, body: dict[str, Any], reason: Reason | None
) -> None:
    async with open_line(call, Provider(whole(body, status=status))) as line:
        heard = await line.connect().post(call)
        verdict = line.session.failure

    assert (verdict and verdict.reason) is reason
    assert (heard.json() == body) is (status == 400)  # by which a CLI may know that it has to be brief


async def test_an_event_that_is_too_long_to_be_read_is_nothing_against_an_answer() -> None:
    long = {"type": "response.completed", "response": {"output": ["x" * MAX_EVENT]}}
    async with open_line(Api.OPENAI, Provider(said({}, long))) as line:
        await line.connect().post("responses")

        assert line.session.failure is None


async def test_the_last_line_of_a_stream_needs_no_end() -> None:
    last = events({"candidates": [{"finishReason": "STOP"}]}).rstrip(b"\n")
    async with open_line(Api.GEMINI, Provider(Said([last], kind=b"text/event-stream"))) as line:
        await line.connect().post("gemini")

        assert line.session.failure is None


async def test_what_was_cut_off_is_forgotten_once_the_model_has_gone_on() -> None:
    cut = claude("max_tokens")
    async with open_line(Api.ANTHROPIC, Provider(cut, stream("messages"))) as line:
        await line.connect().post("messages")
        before = line.session.failure
        await line.connect().post("messages")

        assert (before is not None, line.session.failure) == (True, None)


@pytest.mark.parametrize("is_cut", [True, False], ids=["the work is cut off", "a helper is"])
async def test_a_helper_s_answer_says_nothing_of_the_work(is_cut: bool) -> None:
    """A title, or a summary, that is cut off or asked for at the end."""
    cut = claude("max_tokens")
    answers = (cut, stream("messages")) if is_cut else (stream("messages"), cut)
    async with open_line(Api.ANTHROPIC, Provider(*answers)) as line:
        await line.connect().post("messages", **TOOLS)
        await line.connect().post("messages")

        assert (line.session.failure is not None) is is_cut


async def test_a_run_whose_every_request_reaches_out_is_denied_and_one_that_goes_on_is_not() -> None:
    reaching = request("responses", tools=[{"type": "web_search"}])
    async with open_line(Api.OPENAI, Provider(stream("responses"))) as line:
        await line.connect().ask("POST", "/v1/responses", reaching)
        refused = line.session.failure
        await line.connect().post("responses")

        assert (refused.reason, "the tool `web_search` is not granted" in refused.message) == (Reason.DENIED, True)
        assert line.session.failure is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Said(stalls=500, breaks=True), "the model had not answered for 25s"),
        (Said([b"data: {}\n\n"], kind=b"text/event-stream", stalls=500), "the model had not answered for 25s"),
        (Said([b"{}"], status=500), "waited for the provider: it answered 500, {}"),
        (stream("messages"), ""),
    ],
    ids=["nothing came", "nothing more came", "only errors came", "it answered"],
)
async def test_what_the_agent_waited_for_is_known(answer: Said, words: str, autojump_clock: MockClock) -> None:
    async with open_line(Api.ANTHROPIC, Provider(answer)) as line:
        client = line.connect()
        await client.send("POST", "/v1/messages", json.dumps(request("messages")).encode())
        await trio.sleep(25)
        await client.stream.aclose()
        await trio.sleep(1)

        assert line.session.waiting_for == words


async def test_how_long_a_model_has_been_silent_is_known(autojump_clock: MockClock) -> None:
    slow = Said([b"data: {}\n\n"] * 2, kind=b"text/event-stream", pace=40)
    async with open_line(Api.ANTHROPIC, Provider(slow)) as line:
        client = line.connect()
        silent = [line.session.silent_seconds]
        await client.send("POST", "/v1/messages", json.dumps(request("messages")).encode())
        for seconds in (30, 5, 15):
            await trio.sleep(seconds)
            silent.append(line.session.silent_seconds)
        await client.stream.aclose()
        await trio.sleep(1)
        silent.append(line.session.silent_seconds)

    assert silent == [0, 30, 35, 10, 0]


class Silent:
    """A session whose model says something when 100 s have passed."""

    @property
    def silent_seconds(self) -> float:
        now = trio.current_time()
        return now if now < 100 else now - 100


async def test_a_model_that_is_silent_is_told_and_not_again_and_again(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    told: list[tuple[float, str]] = []

    def tell(event: Event) -> None:
        assert isinstance(event, WarningIssued)
        told.append((trio.current_time(), event.message))

    with trio.move_on_at(400):
        await tell_silence(Silent(), "agent", tell)  # type: ignore[arg-type]  # as much of one as it takes

    assert told == [
        (at, f"the model has not answered for {silent}s")
        for at, silent in ((60, 60), (160, 60), (220, 120), (340, 240))
    ]
