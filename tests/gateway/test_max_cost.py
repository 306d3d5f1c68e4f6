"""A strict budget in dollars: no request is made whose answer could pass it, however many are made at once."""

from __future__ import annotations

import json
import random

import pytest
import trio
from trio.testing import MockClock

from runner.core.model import Budget, Reason
from runner.gateway.max_cost import DEFAULT_OUTPUT, HIDDEN_INPUT, max_cost_usd
from tests.support.gateway_wire import CALLS, MODELS, Provider, Said, open_line, request, stream

SONNET = "claude-sonnet-4-6"  # 3 dollars in, 6 into the cache for an hour, 15 out, for a million tokens


@pytest.mark.parametrize(
    ("api", "model", "body", "output"),
    [
        pytest.param("anthropic", SONNET, {"max_tokens": 100}, 100, id="Messages"),
        pytest.param("anthropic", SONNET, {}, DEFAULT_OUTPUT, id="no limit"),
        pytest.param("anthropic", SONNET, {"max_tokens": True}, DEFAULT_OUTPUT, id="a limit that is none"),
        pytest.param("openai", "gpt-4.1", {"max_output_tokens": 7}, 7, id="Responses"),
        pytest.param("openai", "gpt-4.1", {"max_completion_tokens": 7, "n": 3}, 21, id="Chat Completions"),
        pytest.param("gemini", "gemini-2.0-flash",
                     {"generationConfig": {"maxOutputTokens": 9, "candidateCount": 2}}, 18, id="Gemini"),
    ],
)  # fmt: skip
def test_the_most_is_every_byte_at_the_dearest_price_and_all_of_the_answer(
    api: str, model: str, body: dict[str, object], output: int
) -> None:
    dearest, out = {SONNET: (6, 15), "gpt-4.1": (2, 8), "gemini-2.0-flash": (0.1, 0.4)}[model]

    found = max_cost_usd(api, model, body, 1_000)

    assert found == pytest.approx(((1_000 + HIDDEN_INPUT) * dearest + output * out) / 1e6)


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "cachedContent"])
def test_of_what_is_not_in_the_request_there_is_no_telling(name: str) -> None:
    assert max_cost_usd("openai", "gpt-4.1", {name: "x", "max_output_tokens": 1}, 10) is None


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_is_asked_at_once_the_sum_never_passes_a_strict_budget(
    seed: int, autojump_clock: MockClock
) -> None:
    """Every answer costs as much as its request allows: the worst that a provider can do."""
    chance = random.Random(seed)
    api, target = CALLS["messages"]
    body = json.dumps(request("messages", max_tokens=500, model=MODELS[api])).encode()
    most = max_cost_usd(api.value, MODELS[api], json.loads(body), len(body))
    ceiling = most * chance.uniform(1, 6)
    provider = Provider(*[stream("messages", len(body), 500, pace=chance.uniform(0, 5)) for _ in range(40)])
    async with open_line(api, provider, budget=Budget(cost_usd=ceiling, strict=True)) as line:

        async def ask() -> None:
            client = line.connect()
            for _ in range(chance.randint(1, 5)):
                await trio.sleep(chance.uniform(0, 3))
                await client.ask("POST", target, body)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask)

    spent = line.session.usage.cost_usd
    assert 0 < spent <= ceiling
    assert line.session.failure.reason is Reason.BUDGET
    assert spent > ceiling - most  # and no more is left than one answer could take


async def test_an_answer_that_could_pass_what_is_left_is_not_asked_for(autojump_clock: MockClock) -> None:
    api, target = CALLS["messages"]
    provider = Provider(stream("messages"))
    async with open_line(api, provider, budget=Budget(cost_usd=0.01, strict=True)) as line:
        answer = await line.connect().ask("POST", target, json.dumps(request("messages", max_tokens=32_000)).encode())

    assert answer.status == 400
    assert line.session.usage.requests == 0
    assert "an answer can cost $0." in line.session.failure.message
    assert "and $0.0100 of $0.0100 are left" in line.session.failure.message


async def test_an_answer_that_is_cut_off_counts_for_no_more_than_it_could_cost(autojump_clock: MockClock) -> None:
    """Its bytes are counted then, of which a stream has many for a token."""
    api, target = CALLS["messages"]
    body = json.dumps(request("messages", max_tokens=5)).encode()
    most = max_cost_usd(api.value, MODELS[api], json.loads(body), len(body))
    provider = Provider(Said([b": ping\n\n" * 100_000], kind=b"text/event-stream", breaks=True))
    async with open_line(api, provider, budget=Budget(cost_usd=1, strict=True)) as line:
        await line.connect().ask("POST", target, body)

    assert line.session.usage.cost_usd == most
