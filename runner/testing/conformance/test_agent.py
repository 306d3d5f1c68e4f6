"""The contract of every agent: its sub-runner's line, its preparation, and that only a completed turn is a success."""

from __future__ import annotations

import random
from pathlib import Path, PurePosixPath

import pytest

from runner.core.model import CommandStatus, Exit, Reason, Status
from runner.ports.agent import AgentResult, ModelAccess, ModelAgent
from runner.runtime.subrunner import read_command, script_of
from runner.testing.agents import AgentCandidate

KEY = "a-key-that-nobody-shows"
MODEL = "model; touch pwn $(touch pwn) 'x"
ENV = {
    "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "AGENT_HOME": "/home/agent", "LLM_MODEL": MODEL,
    "PROMPT_FILE": "/run/runner/prompt", "PROMPT": "x; touch pwn", "WORKSPACE_DIR": "/workspace", "INCIDENT_ID": "i-1",
    "RUN_ID": "r-1", "SESSION_ID": "00000000-0000-4000-8000-000000000000", "AGENT_SCRIPT": "/run/runner/script",
    "AGENT_MAX_TURNS": "7", "AGENT_SKILLS": "one two",
}  # fmt: skip
SECRETS = (
    ".env",
    ".netrc",
    ".ssh/id_rsa",
    ".claude/.credentials.json",
    ".codex/auth.json",
    ".config/goose/secrets.yaml",
)
ELSEWHERE = ("", ".", "..", "/etc/passwd", "../transcript.jsonl", "a/../../b.jsonl")
OK = Exit(code=0)
JUNK = (
    b"", b"\n", b"{", b"{}\n", b"[]\n", b'{"type": null}\n', b'{"type": ["result"], "subtype": {}}\n', b"\xff\xfe\n",
    b"[" * 100_000, b'{"a":' * 100_000 + b"\n", b'"' + b"x" * (1 << 20) + b'"\n', b"success\nDone.\n",
)  # fmt: skip


def ended(tmp_path: Path, stdout: bytes, exit: Exit = OK, stderr: bytes = b"") -> AgentResult:
    for stream, content in (("stdout", stdout), ("stderr", stderr)):
        (tmp_path / stream).write_bytes(content)
    return AgentResult(exit, tmp_path / "stdout", tmp_path / "stderr")


def of_model(candidate: AgentCandidate) -> ModelAgent:
    agent = candidate.load()
    if not isinstance(agent, ModelAgent):
        pytest.xfail("it works with no model")
    return agent


def finished_by(candidate: AgentCandidate) -> bytes:
    if candidate.finished is None:
        pytest.xfail("no output of a completed turn is beside it")
    return candidate.finished.read_bytes()


async def test_its_sub_runner_prints_one_line_of_words_whatever_the_values(
    agent: AgentCandidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = await read_command(script_of(agent.name), {**ENV, "AGENT_CLI": agent.name, "HOME": str(tmp_path)})

    assert words
    assert [*tmp_path.iterdir()] == []
    if isinstance(agent.load(), ModelAgent):
        assert any(MODEL in word for word in words), "the model is not on its command line as one word"


async def test_its_sub_runner_says_which_variable_is_missing(agent: AgentCandidate) -> None:
    of_model(agent)
    env = {name: value for name, value in ENV.items() if name != "LLM_MODEL"}

    with pytest.raises(Exception, match="LLM_MODEL"):
        await read_command(script_of(agent.name), {**env, "AGENT_CLI": agent.name})


def test_what_it_prepares_is_in_the_home_directory(agent: AgentCandidate) -> None:
    setup = of_model(agent).set_up(
        ModelAccess(model="some-model", key=KEY, base_url="http://127.0.0.1:4711/base", max_turns=3)
    )

    for place in (*setup.files, *setup.context, *setup.skill_folders):
        assert not PurePosixPath(place).is_absolute()
        assert ".." not in PurePosixPath(place).parts
    assert not any(KEY in word for word in setup.login), "the key is on a command line"


def test_it_talks_to_the_gateway_when_there_is_one(agent: AgentCandidate) -> None:
    setup = of_model(agent).set_up(ModelAccess(model="some-model", key=KEY, base_url="http://127.0.0.1:4711/base"))

    assert "127.0.0.1:4711" in "\n".join((*setup.env.values(), *setup.files.values()))


def test_exit_0_proves_nothing(agent: AgentCandidate, tmp_path: Path) -> None:
    outcome = of_model(agent).outcome(ended(tmp_path, b"I am done. Success!\n"))

    assert outcome.reason is Reason.NO_EVIDENCE


@pytest.mark.parametrize(
    ("exit", "reason"),
    [(Exit(code=127), Reason.EXIT), (Exit(code=137, oom=True), Reason.OOM), (Exit(), Reason.UNKNOWN)],
    ids=["not found", "out of memory", "unknown"],
)
def test_an_end_of_the_platform_s_is_told_as_that(
    agent: AgentCandidate, tmp_path: Path, exit: Exit, reason: Reason
) -> None:
    outcome = agent.load().outcome(ended(tmp_path, b"", exit))

    assert (outcome.ok, outcome.reason) == (False, reason)


@pytest.mark.parametrize("number", range(len(JUNK)))
def test_output_that_is_damaged_is_judged_and_no_success(agent: AgentCandidate, tmp_path: Path, number: int) -> None:
    found = of_model(agent)
    result = ended(tmp_path, JUNK[number] * 2, stderr=JUNK[number])

    assert not found.outcome(result).ok
    assert found.commands(result) == ()
    assert "\n" not in found.last_message(result)
    found.usage(result)
    for line in JUNK[number].decode(errors="replace").split("\n"):
        found.display(line)


def test_a_completed_turn_is_a_success_that_reports_its_use(agent: AgentCandidate, tmp_path: Path) -> None:
    result = ended(tmp_path, finished_by(agent))
    found = of_model(agent)

    assert found.outcome(result).status is Status.SUCCEEDED
    assert found.outcome(ended(tmp_path, finished_by(agent), Exit(code=1))).ok is False
    assert all(command.status is not CommandStatus.UNFINISHED for command in found.commands(result))
    assert found.usage(result) is not None


def test_a_stream_that_was_cut_before_its_last_line_is_no_success(agent: AgentCandidate, tmp_path: Path) -> None:
    lines = finished_by(agent).splitlines(keepends=True)
    found = of_model(agent)
    last = max(i for i in range(len(lines) + 1) if not found.outcome(ended(tmp_path, b"".join(lines[:i]))).ok)

    for i in range(last):
        assert not found.outcome(ended(tmp_path, b"".join(lines[:i]))).ok


def test_lines_that_are_changed_at_random_never_raise(agent: AgentCandidate, tmp_path: Path) -> None:
    whole, chance, found = finished_by(agent), random.Random(7), of_model(agent)
    for _ in range(50):
        changed = bytearray(whole)
        for _ in range(20):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        result = ended(tmp_path, bytes(changed))
        found.outcome(result), found.usage(result), found.commands(result), found.last_message(result)


@pytest.mark.parametrize("path", [*SECRETS, *ELSEWHERE])
def test_what_may_hold_a_key_or_lies_elsewhere_is_no_transcript(agent: AgentCandidate, path: str) -> None:
    assert not of_model(agent).is_transcript(path)


def test_its_writers_are_among_its_tools(agent: AgentCandidate) -> None:
    found = of_model(agent)

    assert {*found.writers, *found.native_names.values()} <= {*found.tools}
