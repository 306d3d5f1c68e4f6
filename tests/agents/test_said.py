"""What each CLI's stream says to a person who watches; the lines are of the real CLIs, as in ``test_transcripts``."""

from __future__ import annotations

import json

import pytest

import runner.agents
from runner import plugins
from tests.agents.record_transcripts import TRANSCRIPTS
from tests.agents.test_transcripts import CASES, cli_of

MADE = "$ echo made > made.txt"


def said(name: str, lines: list[str]) -> list[str]:
    """What is shown, but for blank lines."""
    agent = plugins.load(runner.agents, name).agent
    shown = "".join(agent.say(line) or "" for line in lines)
    return [line for line in shown.split("\n") if line.strip()]


SAID = {
    ("claude", "finished"): [MADE, "All done."],
    ("claude", "turn-limit"): ["$ true", "$ true"],
    ("claude", "wrong-key"): ["Failed to authenticate. API Error: 401 scripted 401"],
    ("codex", "finished"): [MADE, "All done."],
    ("codex", "over-quota"): ["exceeded retry limit, last status: 429 Too Many Requests"] * 2,
    ("gemini", "finished"): [MADE, "All done."],
    ("gemini", "unknown-model"): ["[API Error: scripted 404]"],
    ("goose", "finished"): [MADE, "All done."],
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
    assert cli_of(name).say("") == "\n\n"


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
