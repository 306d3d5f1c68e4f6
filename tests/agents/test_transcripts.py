"""What the CLIs print, judged. The cases are streams of the real programs against scripted answers, with ids, paths and
ports replaced and what nobody reads left out: Claude Code 2.1.330, Codex 0.169.0, Gemini CLI 0.61.0, Goose 1.52.0.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import runner.agents
from runner import plugins
from runner.agents._cli import Cli
from runner.model import Exit, Reason, Status, Usage
from runner.ports.agent import Ended

CASES = Path(__file__).parents[1] / "cases" / "agents"
CLIS = ("claude", "codex", "gemini", "goose")
TERMED = Exit(signal=15)


def cli_of(name: str) -> Cli:
    agent: Cli = plugins.load(runner.agents, name).agent
    return agent


def ended(stdout: Path, exit: Exit, stderr: bytes = b"") -> Ended:
    errors = stdout.parent / "stderr"
    if stderr:
        errors.write_bytes(stderr)
    return Ended(exit, stdout, errors if stderr else Path("/dev/null"))


# CLI, case, how it exited, and what that is
ENDS = [
    ("claude", "finished", Exit(0), None, "All done."),
    ("claude", "empty-answer", Exit(0), None, ""),
    ("claude", "wrong-key", Exit(1), Reason.AUTH, "Failed to authenticate. API Error: 401 scripted 401"),
    ("claude", "unknown-model", Exit(1), Reason.MODEL, "There's an issue with the selected model"),
    ("claude", "over-quota", Exit(1), Reason.QUOTA, "API Error: Request rejected (429)"),
    ("claude", "provider-down", Exit(1), Reason.EXIT, "exited 1: API Error: 500 scripted 500."),
    ("claude", "cut-answer", Exit(1), Reason.EXIT, "exited 1: API Error: API returned an empty or malformed response"),
    ("claude", "turn-limit", Exit(1), Reason.TURNS, "Reached maximum number of turns (2)"),
    ("claude", "denied", Exit(0), Reason.DENIED, "1 tool call refused by the CLI's own rules, and none let through"),
    ("claude", "killed", Exit(143), Reason.CUT_OFF, "exited 143"),
    ("codex", "finished", Exit(0), None, "All done."),
    ("codex", "empty-answer", Exit(0), None, ""),
    ("codex", "wrong-key", Exit(1), Reason.AUTH, "unexpected status 401 Unauthorized"),
    ("codex", "unknown-model", Exit(1), Reason.MODEL, "unexpected status 404 Not Found"),
    ("codex", "over-quota", Exit(1), Reason.QUOTA, "exceeded retry limit, last status: 429"),
    ("codex", "provider-down", Exit(1), Reason.EXIT, "exited 1: We"),
    ("codex", "cut-answer", Exit(1), Reason.EXIT, "exited 1: stream disconnected before completion"),
    ("codex", "killed", TERMED, Reason.CUT_OFF, "died by signal 15"),
    ("gemini", "finished", Exit(0), None, "All done."),
    ("gemini", "empty-answer", Exit(0), None, ""),
    ("gemini", "cut-answer", Exit(0), None, "All done."),  # its one event had arrived whole
    ("gemini", "wrong-key", Exit(145), Reason.AUTH, "[API Error: "),
    ("gemini", "unknown-model", Exit(1), Reason.EXIT, "exited 1: [API Error: scripted 404]"),
    ("gemini", "over-quota", Exit(0), Reason.NO_EVIDENCE, "exited 0 without a completed turn"),
    ("gemini", "turn-limit", Exit(53), Reason.TURNS, "Reached max session turns"),
    ("gemini", "killed", Exit(0), Reason.NO_EVIDENCE, "exited 0 without a completed turn"),
    ("goose", "finished", Exit(0), None, "All done."),
    ("goose", "empty-answer", Exit(0), Reason.NO_EVIDENCE, "exited 0 without a completed turn: The model returned an"),
    ("goose", "cut-answer", Exit(0), Reason.NO_EVIDENCE, "exited 0 without a completed turn: All done."),
    ("goose", "wrong-key", Exit(1), Reason.AUTH, "Ran into this error: Authentication error"),
    ("goose", "unknown-model", Exit(0), Reason.MODEL, "Ran into this error: Request failed: Resource not found (404)"),
    ("goose", "over-quota", Exit(0), Reason.QUOTA, "Ran into this error: Rate limit exceeded"),
    ("goose", "provider-down", Exit(0), Reason.NO_EVIDENCE, "exited 0 without a completed turn: Ran into this error"),
    ("goose", "turn-limit", Exit(0), Reason.TURNS, "I've reached the maximum number of actions"),
    ("goose", "killed", TERMED, Reason.EXIT, "died by signal 15"),
]


@pytest.mark.scenario("BEY-07")
@pytest.mark.parametrize(("name", "case", "exit", "reason", "message"), ENDS, ids=[f"{e[0]} {e[1]}" for e in ENDS])
def test_only_a_completed_turn_is_a_success(
    name: str, case: str, exit: Exit, reason: Reason | None, message: str
) -> None:
    outcome = cli_of(name).judge(ended(CASES / name / f"{case}.jsonl", exit))

    assert outcome.reason is reason
    assert outcome.ok is (reason is None)
    assert outcome.message.startswith(message)


def test_every_case_is_judged() -> None:
    assert {(path.parent.name, path.stem) for path in CASES.glob("*/*.jsonl")} == {(end[0], end[1]) for end in ENDS}


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("claude", Usage(input_tokens=240, cached_tokens=40, output_tokens=20, cost_usd=0.000604)),
        ("codex", Usage(input_tokens=200, cached_tokens=40, output_tokens=20, reasoning_tokens=6, cost_usd=None)),
        ("gemini", Usage(input_tokens=200, cached_tokens=40, output_tokens=20, cost_usd=None)),
        ("goose", Usage(input_tokens=200, output_tokens=20, cost_usd=0.00056)),
    ],
)
def test_what_a_cli_says_that_it_used(name: str, usage: Usage) -> None:
    assert cli_of(name).usage(ended(CASES / name / "finished.jsonl", Exit(0))) == usage


@pytest.mark.parametrize("name", CLIS)
@pytest.mark.parametrize(
    ("exit", "status", "reason"),
    [
        (Exit(137, oom=True), Status.FAILED, Reason.OOM),
        (Exit(127), Status.FAILED, Reason.EXIT),
        (Exit(), Status.UNKNOWN, Reason.UNKNOWN),
        (Exit(0), Status.FAILED, Reason.NO_EVIDENCE),
    ],
    ids=["out of memory", "not there", "status unknown", "silence"],
)
def test_an_agent_that_printed_nothing(name: str, exit: Exit, status: Status, reason: Reason) -> None:
    outcome = cli_of(name).judge(ended(Path("/dev/null"), exit))

    assert (outcome.status, outcome.reason) == (status, reason)


def test_a_cli_that_is_not_there_is_named(tmp_path: Path) -> None:
    outcome = cli_of("goose").judge(ended(Path("/dev/null"), Exit(127)))

    assert outcome.message == "`goose` is not in the workspace"
    assert "workspace.toolchains" in outcome.details[0]


@pytest.mark.parametrize("name", CLIS)
def test_a_stream_that_was_cut_anywhere_is_no_success(name: str, tmp_path: Path) -> None:
    whole = (CASES / name / "finished.jsonl").read_bytes().rstrip(b"\n")
    luck = random.Random(name)
    for at in [*range(0, len(whole), 17), len(whole) - 1, *(luck.randrange(len(whole)) for _ in range(50))]:
        (tmp_path / "stdout").write_bytes(whole[:at])
        assert not cli_of(name).judge(ended(tmp_path / "stdout", Exit(0))).ok, at
    (tmp_path / "stdout").write_bytes(whole)
    assert cli_of(name).judge(ended(tmp_path / "stdout", Exit(0))).ok


@pytest.mark.parametrize("name", CLIS)
def test_strange_lines_are_passed_over(name: str, tmp_path: Path) -> None:
    """Values of other types, unknown kinds, deep nesting, half a character, the marker of a log that was cut."""
    good = (CASES / name / "finished.jsonl").read_bytes().splitlines()
    keys = {key for line in good for key in json.loads(line)}
    strange = [b"{", b"[]", b"null", b'{"type":null}', b'{"type":"new"}', b"\xff\xfe", b"\n[runner: 9 bytes cut here]"]
    strange += [b'{"type":' + b"[" * 100_000, b'{"a":' * 3000 + b"1" + b"}" * 3000]
    strange += [json.dumps({"type": kind} | dict.fromkeys(keys - {"type"}, value)).encode()
                for kind in ("assistant", "user", "message", "item.completed", "tool_result")
                for value in (None, 1, "x", [], {}, [1], {"content": [1, "x", None]})]  # fmt: skip
    (tmp_path / "stdout").write_bytes(b"\n".join([*strange, *good]) + b"\n")

    assert cli_of(name).judge(ended(tmp_path / "stdout", Exit(0))).ok


def test_what_is_said_is_safe_to_show(tmp_path: Path) -> None:
    line = {"type": "result", "subtype": "success", "is_error": False, "result": "done\x1b]0;owned\a\n\u202e!"}
    (tmp_path / "stdout").write_text(json.dumps(line))

    outcome = cli_of("claude").judge(ended(tmp_path / "stdout", Exit(0)))

    assert outcome.message.isprintable()


def test_a_complaint_on_stderr_is_told_when_the_stream_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "stdout").touch()

    outcome = cli_of("gemini").judge(ended(tmp_path / "stdout", Exit(41), b"Please set an Auth method\n"))

    assert outcome.message == "exited 41: Please set an Auth method"
