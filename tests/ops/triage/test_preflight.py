"""``runner triage --check``: each thing that a triage needs, asked for no money and in no more than five seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from runner.core.settings import Settings
from runner.fake_model.provider import serve_fake_model
from runner.fake_model.script import Turn
from runner.ops.triage.preflight import PATIENCE, PreflightCheck, preflight, rights_told
from runner.ops.triage.request import NOWHERE, TriageRequest
from runner.ports.cluster import ClusterPermissions
from tests.support.needs import MEMORY

KEYS = {
    "claude": ("ANTHROPIC_API_KEY", "RUNNER_ANTHROPIC_URL", ""),
    "codex": ("OPENAI_API_KEY", "RUNNER_OPENAI_URL", "/v1"),
    "gemini": ("GEMINI_API_KEY", "RUNNER_GEMINI_URL", ""),
    "goose": ("OPENAI_API_KEY", "RUNNER_OPENAI_URL", "/v1"),
}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name in KEYS:
        (tmp_path / "bin" / name).touch(mode=0o755)
    return tmp_path


def wanted(tools: Path, agent: str, provider: str = "process") -> TriageRequest:
    return TriageRequest(directory=tools, agent=agent, providers=(provider,), image=None, toolchains=(str(tools),))


def found(checked: list[PreflightCheck], what: str) -> PreflightCheck:
    return next(one for one in checked if one.what == what)


@MEMORY.mark
@pytest.mark.parametrize("agent", KEYS)
async def test_what_is_there_is_said_to_be_there(tools: Path, agent: str) -> None:
    variable, url, path = KEYS[agent]
    async with serve_fake_model([Turn(say="never asked")]) as port:
        env = {variable: "sk-test-9f8e7d6c", url: f"http://127.0.0.1:{port}{path}"}
        checked = await preflight(wanted(tools, agent), Settings.from_env(env))

    assert [(one.what, one.good) for one in checked] == [
        ("incident", None),
        ("key", True),
        ("provider", True),
        ("agent", True),
        ("cluster", None),
    ]
    assert found(checked, "key").text.startswith(f"{variable} is accepted by 127.0.0.1 in ")
    assert found(checked, "agent").text == f"{tools}/bin/{agent}"


@pytest.mark.parametrize(("version", "good"), [("1.52.0", True), ("1.50.0", None)])
async def test_the_version_of_a_cli_is_said(tools: Path, version: str, good: bool | None) -> None:
    (tools / "package.json").write_text(json.dumps({"name": "@aaif/goose-binary-linux-x64", "version": version}))

    agent = found(await preflight(wanted(tools, "goose"), Settings.from_env({})), "agent")

    assert (agent.good, agent.text) == (good, f"{tools}/bin/goose {version}")
    assert agent.hint == (None if good else "install the tested one: npm install @aaif/goose-binary-linux-x64@1.52.0")


async def answering(status: bytes, tools: Path) -> PreflightCheck:
    """What is said of the key when its provider answers like this."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(lambda **how: trio.serve_tcp(serve, 0, host="127.0.0.1", **how))
        port = listeners[0].socket.getsockname()[1]
        env = {"ANTHROPIC_API_KEY": "sk-test-9f8e7d6c", "RUNNER_ANTHROPIC_URL": f"http://127.0.0.1:{port}"}
        checked = await preflight(wanted(tools, "claude"), Settings.from_env(env))
        nursery.cancel_scope.cancel()
    return found(checked, "key")


@pytest.mark.parametrize(
    ("status", "good", "words"),
    [
        (b"401 Unauthorized", False, "ANTHROPIC_API_KEY is refused by 127.0.0.1 (401)"),
        (b"403 Forbidden", False, "ANTHROPIC_API_KEY is refused by 127.0.0.1 (403)"),
        (b"503 Busy", None, "127.0.0.1 answers 503, which says nothing about ANTHROPIC_API_KEY"),
    ],
)
async def test_a_key_is_judged_by_its_provider(tools: Path, status: bytes, good: bool | None, words: str) -> None:
    key = await answering(status, tools)

    assert (key.good, key.text) == (good, words)


LISTS = {
    "claude": {"data": [{"id": "claude-sonnet-5-5"}, {"id": "claude-opus-5-5"}], "has_more": False},
    "codex": {"object": "list", "data": [{"id": "gpt-6.1-sol"}, {"id": "gpt-4.1"}]},
    "gemini": {"models": [{"name": "models/gemini-2.5-pro"}, {"name": "models/gemini-3.5-flash"}]},
    "goose": {"object": "list", "data": [{"id": "gpt-6.1-sol"}, {"id": "gpt-4.1"}]},
}


async def judged(tools: Path, agent: str, model: str | None, listed: object) -> list[PreflightCheck]:
    """What is said of a model when its provider lists these."""
    variable, url, path = KEYS[agent]
    body = json.dumps(listed).encode()

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(lambda **how: trio.serve_tcp(serve, 0, host="127.0.0.1", **how))
        port = listeners[0].socket.getsockname()[1]
        env = {variable: "sk-test-9f8e7d6c", url: f"http://127.0.0.1:{port}{path}"}
        checked = await preflight(replace(wanted(tools, agent), model=model), Settings.from_env(env))
        nursery.cancel_scope.cancel()
    return [one for one in checked if one.what == "model"]


@pytest.mark.parametrize("agent", KEYS)
async def test_a_model_is_compared_with_what_its_provider_offers(tools: Path, agent: str) -> None:
    (usual,) = await judged(tools, agent, None, LISTS[agent])
    (wrong,) = await judged(tools, agent, "gpt-6.1-sool", LISTS[agent])

    assert (usual.good, usual.text.endswith(" is offered by 127.0.0.1")) == (True, True)
    assert (wrong.good, wrong.text) == (False, "`gpt-6.1-sool` is not one of 2 models of 127.0.0.1")
    assert wrong.hint


@pytest.mark.parametrize(
    "listed",
    [{}, [], {"data": []}, {"data": "x"}, {"data": [1]}, {"data": [{"id": "claude-opus-5-5"}], "has_more": True}],
    ids=str,
)
async def test_of_a_model_nothing_is_said_without_a_whole_list(tools: Path, listed: object) -> None:
    assert await judged(tools, "claude", None, listed) == []


async def test_what_is_missing_is_said_with_what_to_do(tools: Path) -> None:
    (tools / "bin" / "claude").unlink()
    env = {"DOCKER_HOST": f"unix://{tools}/nothing.sock"}

    here = await preflight(wanted(tools, "claude"), Settings.from_env(env))
    contained = await preflight(wanted(tools, "claude", "docker"), Settings.from_env(env))

    assert found(here, "key").text == "no key for the agent's model: `ANTHROPIC_API_KEY` is not set"
    hint = "npm install -g @anthropic-ai/claude-code, or --toolchain DIR, with the agent's CLI in DIR/bin"
    assert found(here, "agent") == PreflightCheck("agent", False, "`claude` is not on this host", hint)
    assert found(contained, "provider").good is False
    assert found(contained, "provider").hint


@pytest.mark.parametrize(
    ("triage", "what", "good", "words"),
    [
        (TriageRequest(directory=NOWHERE, memory="5"), "plan", False, "--memory: `5` is not a size"),
        (TriageRequest(directory=NOWHERE, tools=("Foo",)), "plan", False, "--allowed-tools: `Foo` is not a tool"),
        (
            TriageRequest(directory=NOWHERE, tools=("Read",)),
            "plan",
            None,
            "--allowed-tools: with Read alone the agent cannot write",
        ),
        (TriageRequest(directory=Path("/nonexistent/INC-1")), "incident", None, "is not there yet"),
    ],
)
async def test_what_a_run_would_refuse_is_said(
    tools: Path, triage: TriageRequest, what: str, good: bool | None, words: str
) -> None:
    said = {"memory": "--memory", "tools": "--allowed-tools"}
    place = replace(triage, providers=("local",), image=None, toolchains=(str(tools),), given_as=said)

    checked = await preflight(place, Settings.from_env({"RUNNER_HOME": str(tools / "home")}))

    assert found(checked, what).good is good
    assert words in found(checked, what).text
    assert found(checked, "agent").good is True


@pytest.mark.parametrize(
    ("known", "good", "text"),
    [
        ({}, None, "not known in payments; whether the rest can be read is not known: why"),
        ({"nodes": False}, None, "none in payments; no nodes; whether the rest can be read is not known: why"),
        ({"pods": True, "logs": True, "events": False}, False, "pods logs in payments; no events; whether the rest"),
    ],
    ids=["nothing", "something", "too few"],
)
def test_a_right_that_nobody_knows_of_is_not_said_to_lack(known: dict[str, bool], good: bool | None, text: str) -> None:
    told = rights_told(
        ClusterPermissions(
            cluster="prod-eu",
            namespace="payments",
            **known,
            warnings=("whether the rest can be read is not known: why",),
        )
    )

    assert told.good is good
    assert told.text.startswith(text)


async def test_what_does_not_answer_is_said_in_five_seconds(tools: Path, autojump_clock: MockClock) -> None:
    server = trio.socket.socket()
    with server:
        await server.bind(("127.0.0.1", 0))
        server.listen(1)
        env = {
            "ANTHROPIC_API_KEY": "sk-x-9f8e7d6c",
            "RUNNER_ANTHROPIC_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
        }

        checked = await preflight(wanted(tools, "claude"), Settings.from_env(env))

    assert trio.current_time() == PATIENCE
    assert found(checked, "key") == PreflightCheck("key", False, "no answer in 5s")
