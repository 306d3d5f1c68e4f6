"""``runner rehearse``: the whole pipeline with a script in the model's place; nobody can take it for the real one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from tests.support.situations import Done, Project, document

# What every agent's CLI does: it asks, does what the model says with its shell tool, and asks again with the result.
STAND_IN = """\
#!/usr/bin/env python3
import json, os, subprocess, sys, urllib.request
assert not any(name.endswith("_API_KEY") and os.environ[name].startswith("sk-") for name in os.environ)
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    asked = {"model": "claude-sonnet-5-5", "messages": messages, "tools": [
        {"name": "Bash", "input_schema": {"properties": {"command": {"type": "string"}}}}]}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode())) as answer:
            content = json.load(answer)["content"]
    except urllib.error.HTTPError as error:
        said = json.load(error)["error"]["message"]
        print(json.dumps({"type": "result", "subtype": "success", "is_error": True, "result": said}))
        sys.exit(1)
    messages.append({"role": "assistant", "content": content})
    calls = [block for block in content if block["type"] == "tool_use"]
    if not calls:
        said = next(block["text"] for block in content if block["type"] == "text")
        print(json.dumps({"type": "result", "subtype": "success", "is_error": False, "result": said}))
        break
    for call in calls:
        done = subprocess.run(call["input"]["command"], shell=True, capture_output=True, text=True)
        messages.append({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "content": done.stdout}]})
"""
TURNS = """\
turns:
  - {say: I look., run: ls, usage: {input: 900, output: 100}}
  - {write: {path: found/it.txt, content: "here\\n"}, usage: {input: 900, output: 100}}
  - {say: It is done.}
"""


@pytest.fixture
def claude() -> Iterator[Path]:
    """A toolchain with the stand-in, where every user may go."""
    folder = Path(tempfile.mkdtemp(prefix="runner-tools-"))
    (folder / "bin").mkdir()
    program = folder / "bin" / "claude"
    program.write_text(STAND_IN)
    for path in (folder, folder / "bin", program):
        path.chmod(0o755)
    yield folder
    rmtree(folder)


def write(project: Project, tools: Path, *, budget: str = "{}", turns: str = TURNS) -> None:
    spec = f"agent: claude\nbudget: {budget}\nworkspace: {{enabled: true, providers: [local], toolchains: [{tools}]}}"
    project.write(
        document("AgentType", "worker", spec), document("IncidentRun", "work", "agent_type: worker\nprompt: x")
    )
    (project.folder / "a.turns.yaml").write_text(turns)


def rehearse(project: Project, *arguments: str) -> tuple[Done, dict[str, Any]]:
    done = project.runner("rehearse", str(project.folder), "--turns", "a.turns.yaml", *arguments)
    return done, project.record()


@pytest.mark.scenario("BEY-18", only="rehearsal")
def test_a_rehearsal_does_the_work_without_a_key_and_says_first_what_it_is(project: Project, claude: Path) -> None:
    write(project, claude)
    done, record = rehearse(project)

    directory = project.directory(record)
    assert (done.code, record["status"], record["rehearsal"]) == (0, "succeeded", "a.turns.yaml")
    assert done.out.startswith("a rehearsal: no model is asked, a.turns.yaml stands for it\n")
    assert "REHEARSAL: no model was asked, a.turns.yaml stood for it\nSUCCEEDED work" in done.out
    assert (directory / "report.txt").read_text().startswith("REHEARSAL: no model was asked")
    assert list(json.loads((directory / "plan.json").read_text()))[:2] == ["format", "rehearsal"]
    assert json.loads((directory / "run.json").read_text())["rehearsal"] == "a.turns.yaml"
    assert "+here" in (directory / "work.patch").read_text()
    assert [warning["message"] for warning in record["warnings"]] == []
    (usage,) = record["models"].values()
    assert (usage["requests"], usage["input_tokens"] > 1800, usage["cost_usd"] > 0) == (3, True, True)


def test_turns_that_nobody_asked_for_are_said_and_a_listing_tells_rehearsals(project: Project, claude: Path) -> None:
    """A script that is longer than the work has rehearsed something else."""
    write(project, claude, turns=TURNS + "  - {run: ls}\n  - {say: Really.}\n")
    done, record = rehearse(project)
    listed = project.runner("runs", "list").out

    assert (done.code, record["status"]) == (0, "succeeded")
    (warning,) = record["warnings"]
    assert warning["message"] == "agent: 2 of the rehearsal's 5 turns were not asked for"
    assert listed.rstrip().endswith("a rehearsal")


def test_a_turn_that_could_not_be_played_is_said_of_a_run_that_failed_as_well(project: Project, claude: Path) -> None:
    program = claude / "bin" / "claude"
    program.write_text(program.read_text().replace('"Bash"', '"Read"'))
    write(project, claude)
    done, record = rehearse(project)

    assert (done.code, record["status"]) == (1, "failed")
    why = "the turn runs a command, and no shell tool is offered, only: Read"
    assert [warning["message"] for warning in record["warnings"]] == [
        f"agent: turn 1 of the rehearsal was not played: {why}",
        "agent: 2 of the rehearsal's 3 turns were not asked for",
    ]


@pytest.mark.scenario("BEY-16", only="rehearsal")
def test_a_rehearsed_overrun_ends_as_a_real_one_would_and_cannot_be_resumed(project: Project, claude: Path) -> None:
    write(project, claude, budget="{tokens: 1500}")
    done, record = rehearse(project)
    resumed = project.runner("resume", "last")

    outcome = next(step for step in record["steps"] if step["id"] == "agent")["outcome"]
    assert (done.code, outcome["reason"]) == (1, "budget")
    assert "2000 of 1500 tokens are used" in outcome["message"]
    assert (resumed.code, "is a rehearsal" in resumed.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "turns", "words"),
    [
        pytest.param((), "", "--turns", id="no script"),
        pytest.param(("--turns", "nowhere.yaml"), "", "nowhere.yaml", id="script that is not there"),
        pytest.param(("--turns", "a.turns.yaml"), "turns: [{sya: x}]", "a.turns.yaml:1:10", id="script with a mistake"),
    ],
)
def test_a_script_that_is_none_starts_nothing(
    project: Project, arguments: tuple[str, ...], turns: str, words: str
) -> None:
    project.script("true")
    (project.folder / "a.turns.yaml").write_text(turns)
    done = project.runner("rehearse", str(project.folder), *arguments)

    assert (done.code, words in done.err) == (2, True)
    assert not (project.home / "state" / "runs").exists()


def test_an_apply_with_the_same_key_is_not_satisfied_by_a_rehearsal(project: Project) -> None:
    project.script("true")
    (project.folder / "a.turns.yaml").write_text(TURNS)
    _, rehearsed = rehearse(project, "--run-key", "k")
    _, applied = project.apply("--run-key", "k")

    assert rehearsed["id"] != applied["id"]
    assert (rehearsed["rehearsal"], applied["rehearsal"]) == ("a.turns.yaml", None)
