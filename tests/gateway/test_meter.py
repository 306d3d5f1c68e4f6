"""Models, tokens and prices: the pure parts."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from runner.gateway.api import Counts, model_matches
from runner.gateway.meter import MAX_EVENT, Meter
from runner.gateway.prices import cost_usd


@pytest.mark.parametrize(
    ("granted", "asked", "is_admitted"),
    [
        ("claude-sonnet-5-5", "claude-sonnet-5-5", True),
        ("claude-sonnet-5-5", "claude-sonnet-5-5-20260901", True),
        ("claude-sonnet-5", "claude-sonnet-5-5", False),
        ("claude-sonnet-5-5", "claude-sonnet-5", False),
        ("sonnet", "claude-sonnet-5-5", True),
        ("sonnet", "claude-3-5-sonnet-20241022", True),
        ("sonnet", "claude-3-5-sonnet-latest", True),
        ("sonnet", "claude-haiku-5-5", False),
        ("sonnet", "sonnet-evil", False),
        ("sonnet", "gpt-sonnet-5", False),
        ("gpt-4.1", "gpt-4.1-2025-04-14", True),
        ("gpt-4.1", "gpt-4.1-mini", False),
        ("gpt-4.1", "gpt-4x1", False),
        ("gpt-5", "gpt-5-pro", False),
        ("gemini-2.5-pro", "gemini-2.5-pro-001", True),
        ("gemini-2.5-pro", "gemini-2.5-pro-tts", False),
        ("o3", "o3-pro", False),
    ],
)
def test_a_name_in_a_manifest_stands_for_itself_its_snapshots_and_its_family(
    granted: str, asked: str, is_admitted: bool
) -> None:
    assert model_matches(granted, asked) is is_admitted


def event(**message: object) -> bytes:
    return f"event: x\ndata: {json.dumps(message)}\n\n".encode()


ANTHROPIC = [
    event(
        type="message_start",
        message={
            "usage": {
                "input_tokens": 10,
                "cache_read_input_tokens": 500,
                "cache_creation_input_tokens": 70,
                "cache_creation": {"ephemeral_1h_input_tokens": 30, "ephemeral_5m_input_tokens": 40},
                "output_tokens": 1,
            }
        },
    ),
    event(type="content_block_delta", delta={"text": "the word usage, and \n\n data: {"}),
    event(type="message_delta", usage={"output_tokens": 90, "output_tokens_details": {"thinking_tokens": 60}}),
    event(type="message_stop"),
]
RESPONSES = [
    event(type="response.created", response={"usage": None}),
    event(
        type="response.completed",
        response={
            "usage": {
                "input_tokens": 580,
                "input_tokens_details": {"cached_tokens": 500, "cache_write_tokens": 70},
                "output_tokens": 90,
                "output_tokens_details": {"reasoning_tokens": 60},
            }
        },
    ),
]
CHAT = [
    event(choices=[{"delta": {"content": "a"}}], usage=None),
    event(
        choices=[],
        usage={
            "prompt_tokens": 580,
            "prompt_tokens_details": {"cached_tokens": 500, "cache_write_tokens": 70},
            "completion_tokens": 90,
            "completion_tokens_details": {"reasoning_tokens": 60},
        },
    ),
    b"data: [DONE]\n\n",
]
GEMINI = [
    event(candidates=[{}], usageMetadata={"promptTokenCount": 580, "candidatesTokenCount": 3}),
    event(
        candidates=[{"finishReason": "STOP"}],
        usageMetadata={
            "promptTokenCount": 550,
            "toolUsePromptTokenCount": 30,
            "cachedContentTokenCount": 500,
            "candidatesTokenCount": 30,
            "thoughtsTokenCount": 60,
        },
    ),
]
STREAMS = {
    "anthropic": (ANTHROPIC, Counts(fresh=10, cached=500, written=40, written_hour=30, output=90, reasoning=60)),
    "openai": (RESPONSES, Counts(fresh=10, cached=500, written=70, written_hour=0, output=90, reasoning=60)),
    "chat": (CHAT, Counts(fresh=10, cached=500, written=70, written_hour=0, output=90, reasoning=60)),
    "gemini": (GEMINI, Counts(fresh=580, cached=500, written=0, written_hour=0, output=90, reasoning=60)),
}
EACH = pytest.mark.parametrize("name", STREAMS)


def meter(name: str, *, stream: bool = True) -> Meter:
    return Meter(import_module(f"runner.gateway.apis.{'openai' if name == 'chat' else name}").api, stream=stream)


@EACH
@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_a_stream_s_counts_do_not_depend_on_how_it_is_cut_up(name: str, size: int) -> None:
    events, counts = STREAMS[name]
    whole = b"".join(events)
    read = meter(name)
    for at in range(0, len(whole), size):
        read.feed(whole[at : at + size])

    assert read.counts(1000) == (counts, False)


@EACH
def test_an_answer_that_is_no_stream_is_counted_as_well(name: str) -> None:
    events, counts = STREAMS[name]
    last = json.loads(next(e for e in reversed(events) if b"usage" in e).partition(b"data: ")[2])
    body = (
        {"type": "message", **json.loads(events[0].partition(b"data: ")[2])["message"]} if name == "anthropic" else last
    )
    if name == "openai":
        body = last["response"]
    read = meter(name, stream=False)
    read.feed(json.dumps([body] if name == "gemini" else body).encode())

    found, estimated = read.counts(1000)
    assert not estimated
    assert found.input == {"gemini": 580}.get(name, counts.input)


@EACH
def test_a_stream_that_was_cut_off_is_estimated_from_its_bytes(name: str) -> None:
    """So that an agent that hangs up before the counts come is not free of charge."""
    events, _ = STREAMS[name]
    said = b"data: {}\n\n" * 800
    read = meter(name)
    read.feed(events[0])
    read.feed(said)
    counts, estimated = read.counts(4000)

    assert estimated
    assert counts.input in (580, 1000)
    assert counts.output >= 1000


def test_nothing_is_kept_of_an_event_that_is_too_long() -> None:
    read = meter("anthropic")
    for _ in range(MAX_EVENT // 65_536 + 10):
        read.feed(b"x" * 65_536)
    assert len(read._rest) <= MAX_EVENT
    read.feed(b"\n" + b"".join(ANTHROPIC))

    assert read.counts(10) == (STREAMS["anthropic"][1], False)


@pytest.mark.parametrize(
    ("api", "model", "counts", "cost"),
    [
        pytest.param("anthropic", "claude-sonnet-5-5", Counts(fresh=1_000_000), 2.0, id="input"),
        pytest.param("anthropic", "claude-sonnet-5-5", Counts(output=1_000_000, reasoning=9), 10.0, id="output"),
        pytest.param("anthropic", "claude-sonnet-5-5", Counts(cached=1_000_000), 0.1, id="cached"),
        pytest.param("anthropic", "claude-sonnet-5-5", Counts(written=1_000_000), 2.5, id="written"),
        pytest.param("anthropic", "claude-sonnet-5-5", Counts(written_hour=1_000_000), 4.0, id="for an hour"),
        pytest.param("anthropic", "claude-sonnet-5-5-20260901", Counts(fresh=1_000_000), 2.0, id="snapshot"),
        pytest.param("anthropic", "claude-sonnet-9", Counts(fresh=1), None, id="unknown"),
        pytest.param("openai", "gpt-4o-2024-05-13", Counts(fresh=1_000_000), 5.0, id="snapshot of its own price"),
        pytest.param("openai", "gpt-6.1-sol", Counts(fresh=200_000, output=1_000_000), 10.4, id="short prompt"),
        pytest.param("openai", "gpt-6.1-sol", Counts(fresh=300_000, output=1_000_000), 16.2, id="long prompt"),
        pytest.param("gemini", "gemini-2.5-pro", Counts(fresh=100, cached=100), 0.0001375, id="gemini"),
    ],
)
def test_what_tokens_cost(api: str, model: str, counts: Counts, cost: float | None) -> None:
    assert cost_usd(api, model, counts) == (pytest.approx(cost) if cost is not None else None)
