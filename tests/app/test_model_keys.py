"""What `runner doctor` says of keys, and asks of providers when it may spend."""

from __future__ import annotations

import trio

from runner.app.keys import agent_keys, spend
from runner.egress.double import serve_double
from runner.egress.turns import Turn
from runner.ports.gateway import Api
from runner.settings import Settings

KEY = "sk-0123456789"


def settings(**env: str) -> Settings:
    return Settings.from_env({"RUNNER_HOME": "/nowhere", **env})


def test_each_cli_is_shown_with_its_model_and_where_its_key_is() -> None:
    found = {key.agent: key for key in agent_keys(settings(CODEX_API_KEY=KEY, GEMINI_API_KEY=" "))}

    assert {name: key.variable for name, key in found.items()} == {
        "claude": None,
        "codex": "CODEX_API_KEY",
        "gemini": None,
        "goose": "CODEX_API_KEY",
    }
    assert "`ANTHROPIC_API_KEY` is not set" in (found["claude"].problem or "")
    assert "`GEMINI_API_KEY` is no key" in (found["gemini"].problem or "")
    assert [key.model for key in found.values()] == ["sonnet", "gpt-6.1-sol", "gemini-2.5-pro", "gpt-4.1"]
    assert KEY not in repr(found)


async def test_a_provider_is_asked_once_and_what_it_costs_is_said() -> None:
    async with serve_double([Turn(say="Hi")]) as port:
        url = f"http://127.0.0.1:{port}"
        place = {"RUNNER_ANTHROPIC_URL": url, "RUNNER_OPENAI_URL": f"{url}/v1", "RUNNER_GEMINI_URL": url}
        asking = settings(ANTHROPIC_API_KEY=KEY, OPENAI_API_KEY=KEY, GEMINI_API_KEY=KEY, **place)
        with trio.fail_after(10):
            answered = await spend(asking, set(Api))

    assert [(one.api, one.usage.requests, one.problem) for one in answered] == [(api, 1, None) for api in sorted(Api)]
    assert all(one.usage.tokens > 0 and (one.usage.cost_usd or 1) < 0.01 for one in answered)


async def test_a_provider_that_does_not_answer_is_a_problem() -> None:
    (answered,) = await spend(settings(OPENAI_API_KEY=KEY, RUNNER_OPENAI_URL="http://127.0.0.1:1/v1"), {Api.OPENAI})

    assert answered.problem
    assert KEY not in repr(answered)
