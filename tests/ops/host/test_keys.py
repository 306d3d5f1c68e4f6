"""What `runner doctor` says of keys, and asks of providers when it may spend."""

from __future__ import annotations

import pytest
import trio

from runner.core.errors import KeyMissing, UsageError
from runner.core.settings import Settings
from runner.fake_model.provider import serve_fake_model
from runner.fake_model.script import Turn
from runner.gateway.gateway import ModelGateway, usable_key
from runner.ops.host.keys import agent_keys, spend
from runner.ports.gateway import Api, ModelGrant

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
    assert "`GEMINI_API_KEY` is not a key" in (found["gemini"].problem or "")
    assert [key.model for key in found.values()] == ["sonnet", "gpt-6.1-sol", "gemini-2.5-pro", "gpt-4.1"]
    assert KEY not in repr(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("sk-ключ", "is not ASCII", id="not ASCII"),
        pytest.param("sk 1", "holds a blank", id="a blank"),
        pytest.param("x" * (1 << 20), "it has 1048576 characters", id="a megabyte"),
    ],
)
def test_why_a_key_is_none_is_said_without_it(text: str, words: str) -> None:
    with pytest.raises(KeyMissing, match=words) as refused:
        usable_key(settings(GEMINI_API_KEY=text).model_keys["gemini"])

    assert text not in refused.value.message


def test_a_url_that_is_none_stops_only_who_needs_it_and_shows_no_password() -> None:
    bad = settings(ANTHROPIC_API_KEY=KEY, OPENAI_API_KEY=KEY, RUNNER_OPENAI_URL="https://me:hunter2@x.org/v1?key=k1")
    found = {key.agent: key.problem for key in agent_keys(bad)}

    assert found["claude"] is None
    assert (found["codex"] or "").startswith("`RUNNER_OPENAI_URL` is `https://...@x.org/v1?...`; write an https URL")
    assert ("RUNNER_OPENAI_URL", "https://...@x.org/v1?...", "environment") in bad.rows()
    with pytest.raises(UsageError, match="RUNNER_OPENAI_URL") as refused:
        ModelGateway(bad).check(ModelGrant(Api.OPENAI, ("gpt-4.1",)))
    assert "hunter2" not in f"{refused.value.message}{refused.value.hint}"


async def test_a_provider_is_asked_once_and_what_it_costs_is_said() -> None:
    async with serve_fake_model([Turn(say="Hi")]) as port:
        url = f"http://127.0.0.1:{port}"
        place = {"RUNNER_ANTHROPIC_URL": url, "RUNNER_OPENAI_URL": f"{url}/v1", "RUNNER_GEMINI_URL": url}
        asking = settings(ANTHROPIC_API_KEY=KEY, OPENAI_API_KEY=KEY, GEMINI_API_KEY=KEY, **place)
        with trio.fail_after(60):
            answered = await spend(asking, set(Api))

    assert [(one.api, one.usage.requests, one.problem) for one in answered] == [(api, 1, None) for api in sorted(Api)]
    assert all(one.usage.tokens > 0 and (one.usage.cost_usd or 1) < 0.01 for one in answered)


async def test_a_provider_that_does_not_answer_is_a_problem() -> None:
    (answered,) = await spend(settings(OPENAI_API_KEY=KEY, RUNNER_OPENAI_URL="http://127.0.0.1:1/v1"), {Api.OPENAI})

    assert answered.problem
    assert KEY not in repr(answered)
