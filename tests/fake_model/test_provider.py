"""The double, behind the gateway and by itself: each turn in each API's own shape, and its ways to fail."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from runner.core.errors import Rejected, Unpriced, UnreadableManifest
from runner.core.model import Budget, Reason
from runner.core.settings import shipped
from runner.fake_model.provider import FakeModel, RehearsalGateway, serve_fake_model
from runner.fake_model.script import Turn, Used, Write, read_turns
from runner.ports.gateway import Api, ModelGrant
from tests.support.gateway_wire import CALLS, MODELS, Client, Heard, Line, open_line, request

ALL = pytest.mark.parametrize("call", list(CALLS))


def _declared(call: str, name: str, parameters: Mapping[str, object]) -> dict[str, object]:
    schema = {"type": "object", "properties": parameters}
    match call:
        case "messages":
            return {"name": name, "input_schema": schema}
        case "responses":
            return {"type": "function", "name": name, "parameters": schema}
        case "chat":
            return {"type": "function", "function": {"name": name, "parameters": schema}}
    return {"functionDeclarations": [{"name": name, "parametersJsonSchema": schema}]}


TEXT = {"type": "string"}
SHELLS = {
    "messages": ("Bash", "command"),
    "responses": ("exec_command", "cmd"),
    "chat": ("shell", "command"),
    "gemini": ("run_shell_command", "command"),
}


def offering(call: str, **fields: object) -> dict[str, object]:
    """A request with the shell tool of the CLI that makes this call."""
    name, key = SHELLS[call]
    return request(call, tools=[_declared(call, name, {key: TEXT})], **fields)


def events(heard: Heard) -> list[dict[str, Any]]:
    lines = [line[6:] for line in heard.body.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def text_of(call: str, heard: Heard) -> str:
    """What was said, put together from the pieces of a stream."""
    found = ""
    for event in events(heard):
        match call:
            case "messages":
                found += event.get("delta", {}).get("text", "")
            case "responses":
                found += event["delta"] if event["type"] == "response.output_text.delta" else ""
            case "chat":
                found += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            case "gemini":
                parts = event["candidates"][0]["content"]["parts"]
                found += "".join(part.get("text", "") for part in parts if not part.get("thought"))
    return found


def called(call: str, heard: Heard) -> list[tuple[str, Any]]:
    """The tools that were called, with their arguments."""
    found: list[tuple[str, Any]] = []
    for event in events(heard):
        match call:
            case "messages":
                if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                    found.append((event["content_block"]["name"], ""))
                elif event.get("delta", {}).get("type") == "input_json_delta":
                    found[-1] = (found[-1][0], found[-1][1] + event["delta"]["partial_json"])
            case "responses":
                item = event.get("item", {})
                if event["type"] == "response.output_item.done" and "call" in item["type"]:
                    found.append((item["name"], item.get("arguments") or json.dumps(item["input"])))
            case "chat":
                calls = [one for choice in event["choices"] for one in choice["delta"].get("tool_calls", ())]
                found += [(one["function"]["name"], one["function"]["arguments"]) for one in calls]
            case "gemini":
                parts = [
                    part["functionCall"] for part in event["candidates"][0]["content"]["parts"] if "text" not in part
                ]
                found += [(part["name"], json.dumps(part["args"])) for part in parts]
    return [(name, json.loads(arguments)) for name, arguments in found]


@asynccontextmanager
async def rehearsing(call: str, turns: Sequence[Turn], **options: Any) -> AsyncIterator[tuple[Line, Client, str]]:
    api, target = CALLS[call]
    async with open_line(api, FakeModel(api, turns), key="", **options) as line:
        yield line, line.connect(), target


@ALL
@pytest.mark.scenario("BEY-18", only="double")
async def test_a_turn_thinks_speaks_and_calls_the_cli_s_own_tools(call: str) -> None:
    name, key = SHELLS[call]
    turn = Turn(think="hm", say="I look at it, and at all that is there.", run="ls -l", usage=Used(input=9, output=3))
    async with rehearsing(call, [turn, Turn(say="done")]) as (line, client, target):
        first = await client.ask("POST", target, offering(call))
        second = await client.ask("POST", target, offering(call))

    assert (text_of(call, first), called(call, first)) == (turn.say, [(name, {key: "ls -l"})])
    assert (text_of(call, second), called(call, second)) == ("done", [])
    assert (line.told[0].usage.input_tokens, line.told[0].usage.output_tokens, line.told[0].estimated) == (9, 3, False)


ON_PATH = {"file_path": TEXT, "content": TEXT}
WRITTEN = {"file_path": "a/b", "content": "it's"}
BY_BASH = {"command": ["bash", "-lc", "mkdir -p -- a && printf %s 'it'\"'\"'s' > a/b"]}


@pytest.mark.parametrize(
    ("call", "tools", "expected"),
    [
        pytest.param("messages", {"Bash": {"command": TEXT}, "Write": ON_PATH}, ("Write", WRITTEN), id="claude"),
        pytest.param("gemini", {"write_file": ON_PATH}, ("write_file", WRITTEN), id="gemini"),
        pytest.param(
            "chat",
            {"write": {"path": TEXT, "content": TEXT}},
            ("write", {"path": "a/b", "content": "it's"}),
            id="goose",
        ),
        pytest.param(
            "responses", {"shell": {"command": {"type": "array"}}}, ("shell", BY_BASH), id="by a shell that takes words"
        ),
    ],
)
async def test_a_file_is_written_by_the_tool_for_it_or_by_the_shell(
    call: str, tools: Mapping[str, Mapping[str, object]], expected: tuple[str, object]
) -> None:
    offered = [_declared(call, name, parameters) for name, parameters in tools.items()]
    turn = Turn(write=Write(path="a/b", content="it's"))
    async with rehearsing(call, [turn]) as (_, client, target):
        heard = await client.ask("POST", target, request(call, tools=offered))

    assert called(call, heard) == [expected]


async def test_codex_s_tool_that_takes_a_program_gets_one() -> None:
    """Models that codex knows by name are offered their tools in the first item, in a namespace."""
    tools = [{"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}]
    body = request("responses", input=[{"type": "additional_tools", "tools": tools}])
    async with rehearsing("responses", [Turn(run='echo "hi"')]) as (_, client, target):
        heard = await client.ask("POST", target, body)

    assert called("responses", heard) == [
        ("exec", 'const r = await tools.exec_command({cmd: "echo \\"hi\\""}); text(JSON.stringify(r));')
    ]


@pytest.mark.parametrize(
    ("call", "path"),
    [
        ("messages", ("content", 0, "text")),
        ("responses", ("output", 0, "content", 0, "text")),
        ("chat", ("choices", 0, "message", "content")),
        ("gemini", ("candidates", 0, "content", "parts", 0, "text")),
    ],
)
async def test_an_answer_need_not_be_a_stream(call: str, path: tuple[str | int, ...]) -> None:
    async with rehearsing(call, [Turn(say="short")]) as (line, client, target):
        target = target.replace("streamGenerateContent?alt=sse", "generateContent")
        heard = await client.ask("POST", target, offering(call, **({} if call == "gemini" else {"stream": False})))

    found = heard.json()
    for key in path:
        found = found[key]
    assert found == "short"
    assert line.told[0].usage.output_tokens > 0
    assert not line.told[0].estimated


@ALL
async def test_a_request_without_tools_is_a_helper_s_and_takes_no_turn(call: str) -> None:
    async with rehearsing(call, [Turn(say="mine")]) as (_, client, target):
        helper = await client.ask("POST", target, request(call))
        own = await client.ask("POST", target, offering(call))
        after = await client.ask("POST", target, offering(call))

    assert (text_of(call, helper), text_of(call, own)) == ("rehearsal", "mine")
    assert (after.status, after.json()["error"]["message"]) == (400, "the rehearsal's script has no more turns")


@ALL
async def test_a_turn_that_needs_a_tool_that_is_not_offered_says_so(call: str) -> None:
    tools = [_declared(call, "Read", {"path": TEXT})]
    async with rehearsing(call, [Turn(run="ls")]) as (line, client, target):
        heard = await client.ask("POST", target, request(call, tools=tools))
        warnings = line.session.warnings

    assert heard.status == 400
    assert [warning.partition(":")[0] for warning in warnings] == ["turn 1 of the rehearsal was not played"]
    assert "no shell tool is offered, only: Read" in heard.json()["error"]["message"]


@ALL
async def test_a_turn_calls_a_tool_that_nobody_offered(call: str) -> None:
    turn = Turn.model_validate({"call": {"tool": "Delete", "arguments": {"path": "x"}}})
    async with rehearsing(call, [turn]) as (_, client, target):
        heard = await client.ask("POST", target, offering(call))

    assert heard.status == 200
    assert b"Delete" in heard.body


@ALL
async def test_a_turn_fails_as_the_provider_would(call: str) -> None:
    turn = Turn.model_validate({"fail": {"status": 429, "message": "slow down", "retry_after": "700s"}})
    async with rehearsing(call, [turn]) as (line, client, target):
        heard = await client.ask("POST", target, offering(call))

        assert heard.status == 400
        assert heard.json()["error"]["message"].endswith("it answered 429, slow down")
        assert [told.status for told in line.told] == [400]  # for the provider asks for more patience than there is
        assert line.session.failure.reason is Reason.QUOTA


@ALL
async def test_a_turn_stalls_and_takes_its_time(call: str, autojump_clock: MockClock) -> None:
    turn = Turn.model_validate({"say": "x" * 240, "stall": "100s", "pace": 1})
    async with rehearsing(call, [turn]) as (line, client, target):
        heard = await client.ask("POST", target, offering(call))

    told = line.told[0]
    assert text_of(call, heard) == "x" * 240
    assert told.first_byte_seconds == pytest.approx(100, abs=1)
    assert 110 < told.seconds < 125


@ALL
async def test_a_turn_is_cut_off(call: str) -> None:
    async with rehearsing(call, [Turn(say="x" * 240, cut_off=True)]) as (line, client, target):
        heard = await client.ask("POST", target, offering(call))

        assert not heard.whole
        assert line.session.failure.reason is Reason.GATEWAY


async def test_given_figures_overrun_a_budget() -> None:
    turns = [Turn(run="ls", usage=Used(input=900, cached=100, output=200, reasoning=50))] * 3
    async with rehearsing("messages", turns, budget=Budget(tokens=1000)) as (line, client, target):
        statuses = [(await client.ask("POST", target, offering("messages"))).status for _ in range(2)]

        assert (statuses, line.session.usage.tokens, line.session.usage.cached_tokens) == ([200, 400], 1100, 100)


async def test_a_double_by_itself_speaks_every_api_on_one_port() -> None:
    async with serve_fake_model([Turn(say="hello")]) as port:
        said = []
        for call, (_, target) in CALLS.items():
            if call != "chat":  # its script has been played to the other call of that API
                async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                    heard = await Client(stream).ask("POST", target, offering(call))
                    said.append(text_of(call, heard))
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            listed = await Client(stream).ask("GET", "/v1/models")

    assert said == ["hello", "hello", "hello"]
    assert listed.json()["data"] == []


async def test_each_session_of_a_rehearsal_begins_with_the_first_turn() -> None:
    rehearsal = RehearsalGateway("a.yaml", [Turn(say="first")])
    for _ in range(2):
        async with rehearsal.open(ModelGrant(Api.ANTHROPIC, ("sonnet",)), lambda exchange: None) as session:
            near, far = trio.socket.socketpair()
            async with (
                trio.SocketStream(near) as ours,
                trio.SocketStream(far) as theirs,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(session.serve, theirs)
                heard = await Client(ours).ask("POST", "/v1/messages", offering("messages"))
                nursery.cancel_scope.cancel()

        assert text_of("messages", heard) == "first"


def test_a_rehearsal_needs_no_key_but_refuses_what_the_real_run_would() -> None:
    rehearsal = RehearsalGateway("a.yaml", [Turn(say="x")])
    rehearsal.check(ModelGrant(Api.OPENAI, (MODELS[Api.OPENAI],), Budget(cost_usd=1)))

    with pytest.raises(Unpriced):
        rehearsal.check(ModelGrant(Api.OPENAI, ("house-model",), Budget(cost_usd=1)))


# --- scripts ----------------------------------------------------------------------------------------


def test_the_shipped_script_shows_all_that_a_turn_can_be() -> None:
    turns = read_turns(shipped("manifests") / "rehearsals" / "everything.turns.yaml")

    assert {name for turn in turns for name in turn.model_fields_set} == set(Turn.model_fields)


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        pytest.param("turns:\n  - {sya: hello}\n", "manifest.unknown-field", "2:6", id="unknown field"),
        pytest.param("turns: []\n", "manifest.bad-value", "1:8", id="no turns"),
        pytest.param("turns:\n  - {}\n", "manifest.bad-value", "2:5", id="nothing done"),
        pytest.param("turns:\n  - {fail: {status: 200}}\n", "manifest.bad-value", "2:21", id="no error"),
        pytest.param("turns:\n  - {fail: {status: 400}, say: x}\n", "manifest.bad-value", "2:27", id="fails and says"),
        pytest.param("turns:\n  - {say: x, stall: soon}\n", "manifest.bad-value", "2:21", id="no duration"),
        pytest.param("turns:\n  - {say: x\n", "manifest.syntax", "2:12", id="no YAML"),
        pytest.param("- say: x\n", "manifest.bad-value", None, id="a list"),
    ],
)
def test_what_is_wrong_with_a_script_is_said_at_its_place(
    tmp_path: Path, text: str, code: str, place: str | None
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(Rejected) as caught:
        read_turns(file)

    finding = caught.value.findings[0]
    assert (finding.code, finding.at and f"{finding.at.line}:{finding.at.column}") == (code, place)


def test_a_script_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UnreadableManifest, match="cannot be read: no such file"):
        read_turns(tmp_path / "a.yaml")
