"""What the CLIs print, judged. The cases are streams of the real programs against scripted answers, with ids, paths and
ports replaced and what nobody reads left out: Claude Code 2.1.330, Codex 0.169.0, Gemini CLI 0.61.0, Goose 1.52.0.

Those in ``transcripts`` are made by ``record_transcripts.py``; those in ``cases`` are what the double cannot be told.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import runner.agents
from runner.agents._cli import CliAgent
from runner.core import plugins
from runner.core.model import CommandStatus, Exit, Reason, Status, Usage
from runner.ports.agent import AgentResult
from tests.agents.record_transcripts import CASES as RECORDED
from tests.agents.record_transcripts import TRANSCRIPTS, verdict_of

CASES = Path(__file__).parents[1] / "cases" / "agents"
CLIS = ("claude", "codex", "gemini", "goose")
TERMED = Exit(signal=15)


def cli_of(name: str) -> CliAgent:
    agent: CliAgent = plugins.load(runner.agents, name).agent
    return agent


def ended(stdout: Path, exit: Exit, stderr: bytes = b"") -> AgentResult:
    errors = stdout.parent / "stderr"
    if stderr:
        errors.write_bytes(stderr)
    return AgentResult(exit, stdout, errors if stderr else Path("/dev/null"))


EXPECTED = [
    (name, case, value)
    for name in CLIS
    for case, value in json.loads((TRANSCRIPTS / name / "expected.json").read_text()).items()
]


@pytest.mark.scenario("BEY-07")
@pytest.mark.parametrize(("name", "case", "expected"), EXPECTED, ids=[f"{e[0]} {e[1]}" for e in EXPECTED])
def test_what_a_recorded_session_comes_to(name: str, case: str, expected: dict[str, Any]) -> None:
    exit = Exit(**expected["exit"])

    assert {"exit": expected["exit"], **verdict_of(cli_of(name), name, case, exit)} == expected
    assert (expected["status"] == "succeeded") is (case in GOOD or (name, case) == UNSEEN)


GOOD = ("finished", "failing-command")
UNSEEN = ("codex", "denied")  # its stream does not have what it was refused


def test_every_case_is_recorded_of_every_cli() -> None:
    recorded = {(path.parent.name, path.stem) for path in TRANSCRIPTS.glob("*/*.jsonl")}

    assert recorded == {(name, case) for case, how in RECORDED.items() for name in how.clis}
    assert recorded == {(name, case) for name, case, _ in EXPECTED}


@pytest.mark.parametrize("name", CLIS)
def test_a_command_is_executed_refused_or_cut_off(name: str) -> None:
    """As the golden data has it, where a reviewer may pass over it."""
    found = {case: value["commands"] for cli, case, value in EXPECTED if cli == name}

    assert [status for status, _, _ in found["stopped"]] == ["executed", "unfinished"]
    assert [text for _, _, text in found["failing-command"]] == ["exit 3", "cat > x <<'EOF'\nline\nEOF\nfalse"]
    assert [exit for _, exit, _ in found["failing-command"]] == [3, 1]
    assert "executed" not in [status for status, _, _ in found["denied"]]


@pytest.mark.parametrize("name", CLIS)
def test_commands_of_a_stream_that_was_cut_anywhere_are_a_beginning_of_all(name: str, tmp_path: Path) -> None:
    stream = (TRANSCRIPTS / name / "failing-command.jsonl").read_bytes()
    everything = [command.text for command in cli_of(name).commands(ended(_written(tmp_path, stream), Exit(0)))]
    for at in range(0, len(stream), 97):
        found = cli_of(name).commands(ended(_written(tmp_path, stream[:at]), TERMED))

        assert [command.text for command in found] == everything[: len(found)]
        assert all(command.status is not CommandStatus.DENIED for command in found)


def _written(folder: Path, stream: bytes) -> Path:
    (folder / "stdout").write_bytes(stream)
    return folder / "stdout"


KEPT = {
    "claude": (".claude/projects/-workspace/0a-1b.jsonl", ".claude/projects/-w/0a/subagents/agent-1.jsonl"),
    "codex": (".codex/sessions/2026/11/22/rollout-2026-11-22T10-37-05-0a1b.jsonl",),
    "gemini": (".gemini/tmp/workspace/chats/session-2026-11-22T10-37-60116528.jsonl",),
    "goose": (".local/share/goose/exports/0a-1b.json",),
}
NEVER = (
    ".codex/auth.json",
    ".claude/.credentials.json",
    ".claude.json",
    ".codex/shell_snapshots/1.sh",
    ".codex/log/codex-login.log",
    ".gemini/settings.json",
    ".gemini/.env",
    ".config/goose/config.yaml",
    ".local/share/goose/sessions/sessions.db",
    ".local/state/goose/logs/llm_request.0.jsonl",
    "{kept}/../../auth.json",
    "/{kept}",
    "../{kept}",
    "{kept}\n",
    "{kept}.env",
    "x{kept}",
)


@pytest.mark.scenario("TRI-11")
@pytest.mark.parametrize("name", CLIS)
def test_only_transcripts_are_kept(name: str) -> None:
    agent = cli_of(name)

    assert all(agent.is_transcript(path) for path in KEPT[name])
    assert not any(agent.is_transcript(path.format(kept=kept)) for path in NEVER for kept in KEPT[name])
    assert not any(agent.is_transcript(path) for other in CLIS if other != name for path in KEPT[other])


# CLI, case, how it exited, and what that is
ENDS = [
    ("claude", "empty-answer", Exit(0), None, ""),
    ("claude", "cut-answer", Exit(1), Reason.EXIT, "exited 1: API Error: API returned an empty or malformed response"),
    ("claude", "denied", Exit(0), Reason.DENIED, "1 tool call refused by the CLI's own rules, and none let through"),
    ("claude", "finished", Exit(0), None, "All done."),
    ("codex", "empty-answer", Exit(0), None, ""),
    ("codex", "cut-answer", Exit(1), Reason.EXIT, "exited 1: stream disconnected before completion"),
    ("codex", "finished", Exit(0), None, "All done."),
    ("gemini", "empty-answer", Exit(0), None, ""),
    ("gemini", "cut-answer", Exit(0), None, "All done."),  # its one event had arrived whole
    ("gemini", "finished", Exit(0), None, "All done."),
    ("goose", "empty-answer", Exit(0), Reason.NO_EVIDENCE, "exited 0 without a completed turn: The model returned an"),
    ("goose", "cut-answer", Exit(0), Reason.NO_EVIDENCE, "exited 0 without a completed turn: All done."),
    ("goose", "finished", Exit(0), None, "All done."),
]


@pytest.mark.scenario("BEY-07")
@pytest.mark.parametrize(("name", "case", "exit", "reason", "message"), ENDS, ids=[f"{e[0]} {e[1]}" for e in ENDS])
def test_only_a_completed_turn_is_a_success(
    name: str, case: str, exit: Exit, reason: Reason | None, message: str
) -> None:
    outcome = cli_of(name).outcome(ended(CASES / name / f"{case}.jsonl", exit))

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
    outcome = cli_of(name).outcome(ended(Path("/dev/null"), exit))

    assert (outcome.status, outcome.reason) == (status, reason)


def test_a_cli_that_is_not_there_is_named(tmp_path: Path) -> None:
    outcome = cli_of("goose").outcome(ended(Path("/dev/null"), Exit(127)))

    assert outcome.message == "`goose` is not in the workspace"
    assert "workspace.toolchains" in outcome.details[0]


@pytest.mark.parametrize("name", CLIS)
def test_a_stream_that_was_cut_anywhere_is_no_success(name: str, tmp_path: Path) -> None:
    whole = (CASES / name / "finished.jsonl").read_bytes().rstrip(b"\n")
    luck = random.Random(name)
    for at in [*range(0, len(whole), 17), len(whole) - 1, *(luck.randrange(len(whole)) for _ in range(50))]:
        (tmp_path / "stdout").write_bytes(whole[:at])
        assert not cli_of(name).outcome(ended(tmp_path / "stdout", Exit(0))).ok, at
    (tmp_path / "stdout").write_bytes(whole)
    assert cli_of(name).outcome(ended(tmp_path / "stdout", Exit(0))).ok


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

    assert cli_of(name).outcome(ended(tmp_path / "stdout", Exit(0))).ok


def test_what_is_said_is_safe_to_show(tmp_path: Path) -> None:
    line = {"type": "result", "subtype": "success", "is_error": False, "result": "done\x1b]0;owned\a\n\u202e!"}
    (tmp_path / "stdout").write_text(json.dumps(line))

    outcome = cli_of("claude").outcome(ended(tmp_path / "stdout", Exit(0)))

    assert outcome.message.isprintable()


def test_a_complaint_on_stderr_is_told_when_the_stream_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "stdout").touch()

    complaints = b"Please set an Auth method\n Project hooks disabled because the folder is not trusted.\n"
    outcome = cli_of("gemini").outcome(ended(tmp_path / "stdout", Exit(41), complaints))

    assert (outcome.reason, outcome.message) == (Reason.AUTH, "Please set an Auth method")


def _gemini(*lines: dict[str, Any]) -> bytes:
    start = {"type": "init"}, {"type": "message", "role": "assistant", "content": "All done.", "delta": True}
    return b"".join(json.dumps(line).encode() + b"\n" for line in (*start, *lines))


_RESULT = {"type": "result", "status": "success", "stats": {}}
_LOOP = {"type": "error", "severity": "warning", "message": "Loop detected, stopping execution"}
_ENDED = {"type": "error", "severity": "error", "message": "Model stream ended without a finish reason."}
_MORE = {"type": "message", "role": "assistant", "content": "Really.", "delta": True}


@pytest.mark.parametrize(
    ("lines", "reason", "message"),
    [
        ((_LOOP, _RESULT), Reason.CUT_OFF, _LOOP["message"]),
        ((_ENDED, _RESULT), Reason.CUT_OFF, _ENDED["message"]),
        ((_ENDED, {**_RESULT, "status": "error"}), Reason.CUT_OFF, _ENDED["message"]),
        ((_ENDED,), Reason.CUT_OFF, _ENDED["message"]),
        (({**_ENDED, "message": "Maximum session turns exceeded"}, _RESULT), Reason.TURNS, "Maximum session turns"),
        (({**_LOOP, "message": "Trying another model"}, _RESULT), None, "All done."),
        ((_ENDED, _MORE, _RESULT), None, "Really."),
    ],
    ids=["loop", "no end", "no end, and it says so", "no result", "turns", "only a warning", "it went on"],
)
def test_what_gemini_complains_of_last_is_why_it_ended(
    lines: tuple[dict[str, Any], ...], reason: Reason | None, message: str, tmp_path: Path
) -> None:
    """It calls such an end a success, in its result as by its exit."""
    outcome = cli_of("gemini").outcome(ended(_written(tmp_path, _gemini(*lines)), Exit(0)))

    assert (outcome.reason, outcome.message.startswith(message)) == (reason, True)
    assert outcome.ok is (reason is None)
    assert cli_of("gemini").display(json.dumps(_LOOP)) == "\n! Loop detected, stopping execution\n"
