"""What each CLI's stream says to a person who watches; the lines are of the real CLIs, as in ``test_transcripts``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import runner.agents
from runner.core import plugins
from runner.core.model import Exit
from runner.ports.agent import AgentResult
from tests.agents.record_transcripts import TRANSCRIPTS
from tests.agents.test_transcripts import CASES, cli_of

MADE, DONE = "$ echo made > made.txt", "All done."


def said(name: str, lines: list[str]) -> list[str]:
    """What is shown, but for blank lines."""
    agent = plugins.load(runner.agents, name).agent
    shown = "".join(agent.display(line) or "" for line in lines)
    return [line for line in shown.split("\n") if line.strip()]


FAILING = ["$ exit 3", "[exit 3]", "$ cat > x <<'EOF'", "line", "EOF", "false", "[exit 1]", DONE]
SAID = {
    ("claude", "finished"): [MADE, DONE],
    ("claude", "turn-limit"): ["$ true", "$ true"],
    **{(name, "failing-command"): FAILING for name in ("claude", "codex", "gemini", "goose")},
    ("claude", "wrong-key"): ["! Failed to authenticate. API Error: 401 scripted 401"],
    ("codex", "finished"): [MADE, DONE],
    ("codex", "over-quota"): ["! exceeded retry limit, last status: 429 Too Many Requests"] * 2,
    ("gemini", "finished"): [MADE, DONE],
    ("gemini", "unknown-model"): ["! [API Error: scripted 404]"],
    ("goose", "finished"): [MADE, DONE],
}


@pytest.mark.parametrize(("name", "case"), SAID)
def test_words_and_commands_are_shown_and_nothing_else(name: str, case: str) -> None:
    folder = CASES if case == "finished" else TRANSCRIPTS
    lines = (folder / name / f"{case}.jsonl").read_text().splitlines()

    assert said(name, lines) == SAID[name, case]


@pytest.mark.parametrize("name", ["claude", "codex", "gemini", "goose"])
def test_what_is_no_line_of_the_stream_is_shown_as_it_is(name: str) -> None:
    assert said(name, ["Not logged in", "{half", "[1]", '{"type": 5}', '{"item": [], "message": 7}', "{}"]) == [
        "Not logged in",
        "{half",
        "[1]",
    ]
    assert cli_of(name).display("") == "\n\n"


def test_words_that_come_in_pieces_are_put_together() -> None:
    def gemini(**line: object) -> str:
        return json.dumps({"type": "message", "role": "assistant", "delta": True, **line})

    def goose(content: object) -> str:
        metadata = {"inference": {"provider": "openai"}}
        return json.dumps(
            {"type": "message", "message": {"role": "assistant", "content": [content], "metadata": metadata}}
        )

    call = {"type": "tool_use", "tool_name": "read_file", "parameters": {"limit": 5, "file_path": "/output/report.md"}}
    pieces = [gemini(content="I lo"), gemini(content="ok.\nNow"), json.dumps(call), gemini(content="end")]
    shell = {"toolCall": {"value": {"name": "shell", "arguments": {"command": "ls"}}}}

    assert said("gemini", pieces) == ["I look.", "Now", "[read_file /output/report.md]", "end"]
    assert said("goose", [goose({"text": "I lo"}), goose({"text": "ok"}), goose(shell)]) == ["I look", "$ ls"]


def test_a_shell_s_own_words_are_not_shown() -> None:
    def codex(command: str) -> str:
        return json.dumps({"type": "item.started", "item": {"type": "command_execution", "command": command}})

    assert said("codex", [codex("bash -lc 'ls | wc'"), codex("ls -l 'it'"), codex("bash -lc 'cut")]) == [
        "$ ls | wc",
        "$ ls -l 'it'",
        "$ bash -lc 'cut",
    ]


def test_the_script_agent_says_what_it_prints() -> None:
    assert said("script", ["a", '{"type": "x"}']) == ["a", '{"type": "x"}']


LIMITED = "I've reached the maximum number of actions I can do without user input. Would you like me to continue?"
ERROR = '{"error": {\n  "code": 500, "message": "down"\n}}'


def message(kind: str, /, *content: object, **more: object) -> dict[str, object]:
    return {"type": kind, "message": {"content": content, **more}}


WORDS = {"type": "text", "text": "I look\ndeeper."}
PIECE = {"type": "message", "role": "assistant", "delta": True}
SPOKE: dict[str, list[object]] = {
    "claude": [
        message("assistant", WORDS),
        message("assistant", {"type": "tool_use", "name": "Bash", "input": {"command": "x"}}),
        {**message("assistant", {"type": "text", "text": ERROR}), "is_api_error_message": True},
    ],
    "codex": [
        {"type": "item.completed", "item": {"type": "agent_message", "text": "I look\ndeeper."}},
        {"type": "error", "message": ERROR},
        {"type": "turn.failed", "error": {"message": ERROR}},
    ],
    "gemini": [
        {**PIECE, "content": "I lo"},
        {**PIECE, "content": "ok\ndeeper."},
        {"type": "result", "status": "error", "error": {"message": ERROR}},
    ],
    "goose": [
        message("message", WORDS, role="assistant", metadata={"inference": {"provider": "openai"}}),
        message("message", {"type": "text", "text": LIMITED}, role="assistant"),
        message("message", {"type": "error", "message": ERROR}, role="assistant"),
    ],
}


@pytest.mark.parametrize("name", SPOKE)
def test_the_last_words_are_the_models_whatever_the_cli_complains_of(name: str, tmp_path: Path) -> None:
    """The error was both the reason and the last words, and what the agent had said was lost."""
    (tmp_path / "out").write_text("".join(f"{json.dumps(line)}\n" for line in SPOKE[name]) + "half a line")

    assert cli_of(name).last_message(AgentResult(Exit(), tmp_path / "out", tmp_path / "err")) == "I look deeper."
    assert [line for line in said(name, [json.dumps(SPOKE[name][-1])]) if not line.startswith("! ")] == []


@pytest.mark.parametrize("name", SPOKE)
def test_an_agent_that_only_complained_has_no_last_words(name: str) -> None:
    failed = TRANSCRIPTS / name / "wrong-key.jsonl"

    assert cli_of(name).last_message(AgentResult(Exit(), failed, failed)) == ""
