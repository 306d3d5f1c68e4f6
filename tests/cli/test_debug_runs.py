"""What a run with ``debug`` keeps of its agent's session, and that nothing of it can fail the run."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from runner.core.model import Status
from runner.core.settings import shipped
from runner.events.record import RunRecord
from runner.report.text import render_run
from runner.runtime import subrunner
from runner.steps.session import run as session
from tests.cli.test_models import apply_with_double, program, tools, write
from tests.support.situations import Project, document, outcome_of

__all__ = ["tools"]  # the fixture

SECRET = "hunter2-or-three-9f8e"

# It leaves a transcript as the real one does, and beside it what must not be kept.
AGENT = f"""\
#!/bin/bash
set -eu
cat > /dev/null
while [[ "$1" != --session-id ]]; do shift; done
mkdir -p ~/.claude/projects/-workspace/"$2"/subagents
cd ~/.claude/projects/-workspace
echo '{{"type":"user","message":"{SECRET}"}}' > "$2.jsonl"
echo '{{"type":"assistant"}}' > "$2/subagents/agent-1.jsonl"
printf '%s' '{{"key":"x"}}' > ~/.claude/.credentials.json
cat STREAM
"""


def bash(id: str, command: str) -> dict[str, Any]:
    call = {"type": "tool_use", "id": id, "name": "Bash", "input": {"command": command}}
    return {"type": "assistant", "message": {"content": [call]}}


def answer(id: str, said: str, *, bad: bool = False) -> dict[str, Any]:
    result = {"type": "tool_result", "tool_use_id": id, "is_error": bad, "content": said}
    return {"type": "user", "message": {"content": [result]}}


STREAM = [
    bash("a", "ls"),
    answer("a", ""),
    bash("b", "cat <<x\ny\x1b[2J\nx"),
    answer("b", "Exit code 3", bad=True),
    bash("c", "kubectl get secret"),
    answer("c", "<tool_use_error>No such tool available: Bash</tool_use_error>", bad=True),
    bash("d", f"echo {SECRET}"),
    {"type": "result", "subtype": "success", "is_error": False, "result": "Found it."},
]
ASKED = """
exec 3<> "/dev/tcp/127.0.0.1/${ANTHROPIC_BASE_URL##*:}"
body='{"model":"claude-sonnet-5-5","messages":[],"max_tokens":9,"tools":[{"name":"Bash","input_schema":{}}]}'
printf 'POST /v1/messages HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n' >&3
printf 'Content-Length: %d\\r\\nConnection: close\\r\\n\\r\\n%s' "${#body}" "$body" >&3
cat <&3 > /dev/null
"""


@pytest.fixture
def claude(project: Project, tools: Path) -> Path:
    """A stand-in for Claude Code, and a run with ``debug`` that it works in."""
    (tools / "claude.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in STREAM))
    program(tools, "claude", AGENT.replace("cat STREAM", f"{ASKED}\ncat {tools}/claude.jsonl"))
    project.env["DEBUG_TOKEN"] = SECRET
    write(project, tools, "agent: claude", run="debug: true")
    return tools


POST_HOOKS = shipped("runners")


def archived(project: Project, record: RunRecord) -> dict[str, str]:
    path = project.directory(record) / "logs" / session.ARCHIVE
    if not path.exists():
        return {}
    with tarfile.open(path) as archive:
        assert all(member.isreg() and (member.mtime, member.uid, member.mode) == (0, 0, 0o600) for member in archive)
        return {member.name: (archive.extractfile(member) or io.BytesIO()).read().decode() for member in archive}


def hook(project: Project, tools: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the agent's own post-hook be this one."""
    runners = project.home / "shipped" / "runners"
    shutil.copytree(POST_HOOKS, runners)
    (runners / "claude-post.sh").write_text(text)
    real = shipped
    monkeypatch.setattr(subrunner, "shipped", lambda name: runners if name == "runners" else real(name))


def warned(record: RunRecord) -> str:
    return "\n".join(message for _, message in record.warnings)


@pytest.mark.scenario("TRI-27")
async def test_the_commands_are_headed_by_the_incident_and_its_directory_has_them(
    project: Project, tools: Path, claude: Path
) -> None:
    (project.folder / "incident").mkdir()
    (project.folder / "incident" / "incident.json").write_text('{"incidentId": "INC-7"}')
    write(project, tools, "agent: claude", run="debug: true\nincident: {directory: incident}")

    record = await apply_with_double(project)

    assert record.exit_code == 0, record.outcome
    logs = project.folder / "incident" / "logs"
    assert "# Incident: INC-7" in (logs / "agent-commands-executed.log").read_text().splitlines()
    with tarfile.open(logs / "agent-session.tar.gz") as archive:
        assert any(name.endswith(".jsonl") for name in archive.getnames())


@pytest.mark.scenario("TRI-11")
@pytest.mark.scenario("TRI-26")
@pytest.mark.scenario("TRI-27")
async def test_a_debug_run_keeps_the_transcripts_and_the_commands(project: Project, claude: Path) -> None:
    record = await apply_with_double(project)

    assert record.exit_code == 0, record.outcome
    kept = archived(project, record)
    (top, below) = sorted(kept, key=len)
    assert top.startswith(".claude/projects/-workspace/")
    assert below == top.removesuffix(".jsonl") + "/subagents/agent-1.jsonl"
    listing = (project.directory(record) / "logs" / session.COMMANDS).read_text().splitlines()
    head, lines = listing[:5], listing[6:]
    assert [line.split(":")[0] for line in head] == ["# Agent", "# Time", "# Incident", "# Session", "# Commands"]
    assert head[0] == "# Agent: claude"
    assert head[2] == f"# Incident: {record.id}"
    assert head[3].removeprefix("# Session: ") in top
    assert head[4] == "# Commands: 4, of which 1 refused and 1 cut off"
    assert lines == [
        "$ ls",
        "$ cat <<x",
        "> y\\x1b[2J",
        "> x  # exit 3",
        "$ kubectl get secret  # refused",
        f"$ echo {SECRET}  # cut off",
    ]
    outcome = outcome_of(record, "session")
    assert (outcome.message, outcome.warnings) == ("2 transcripts, 4 commands", ())
    assert "  agent ran  3 commands, 1 of them cut, 1 refused" in render_run(record, project.home).splitlines()


@pytest.mark.scenario("TRI-11")
async def test_a_secret_is_in_nothing_that_is_kept(project: Project, claude: Path) -> None:
    text = project.manifest.read_text()
    secret = f"agent: claude\n  secrets: [{{name: TOKEN, from: {{file: {project.home}/token}}, steps: [agent]}}]"
    project.manifest.write_text(text.replace("agent: claude", secret))
    (project.home / "token").write_text(SECRET)
    (project.home / "token").chmod(0o600)

    record = await apply_with_double(project)

    assert record.exit_code == 0, record.outcome
    kept = archived(project, record)
    assert any("[redacted:TOKEN]" in text for text in kept.values())
    logs = (path.read_bytes() for path in (project.directory(record) / "logs").iterdir())
    assert not any(SECRET.encode() in (gzip.decompress(log) if log[:2] == b"\x1f\x8b" else log) for log in logs)


# what the hook does, and what is said of it
BROKEN = {
    "fails": ("exit 3", "runners/claude-post.sh exited 3"),
    "is no script": ("(((", "runners/claude-post.sh exited 2"),
    "floods": ("yes .claude/.credentials.json", "was stopped after"),
    "hangs": ("sleep 100", "was stopped after"),
    "says nothing": ("", ""),
    "lies": (
        "printf '%s\\n' /etc/passwd ../../etc/passwd .claude/.credentials.json .claude/projects/../.credentials.json"
        " .claude/projects/x/link.jsonl .claude/projects/x/gone.jsonl .claude/projects/x/fifo.jsonl; cd ~;"
        " mkdir -p .claude/projects/x; ln -s /etc/passwd .claude/projects/x/link.jsonl;"
        " mkfifo .claude/projects/x/fifo.jsonl",
        "4 of the paths that it printed are not transcripts of claude",
    ),
    "leads elsewhere": (
        "cd ~ && mkdir elsewhere && echo x > elsewhere/a.jsonl && mkdir -p .claude/projects &&"
        " ln -s ../../elsewhere .claude/projects/x && echo .claude/projects/x/a.jsonl",
        ".claude/projects/x/a.jsonl: ",
    ),
    "names too much": (
        "cd ~ && mkdir -p .claude/projects/x && truncate -s 20M .claude/projects/x/big.jsonl &&"
        " echo .claude/projects/x/big.jsonl && for ((i = 0; i < 120; i++)); do echo .claude/projects/x/$i.jsonl; done",
        "21 transcripts are left out: there are more than 100",
    ),
}


BY_DAY = ("fails", "hangs", "lies", "leads elsewhere")


@pytest.mark.scenario("TRI-11")
@pytest.mark.scenario("TRI-28")
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how in BY_DAY else pytest.mark.nightly) for how in BROKEN]
)
async def test_a_hook_that_goes_wrong_fails_nothing_and_gets_nothing_kept(
    project: Project, claude: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, said = BROKEN[how]
    hook(project, claude, text, monkeypatch)
    monkeypatch.setattr(session, "HOOK_SECONDS", 0.5)

    record = await apply_with_double(project)

    assert (record.exit_code, record.steps["session"].status) == (0, Status.SUCCEEDED), record.outcome
    assert archived(project, record) == {}
    assert said in warned(record)
    assert (project.directory(record) / "logs" / session.COMMANDS).exists()


@pytest.mark.scenario("TRI-26")
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
async def test_without_debug_the_hook_runs_as_well_and_what_it_names_is_kept_of_a_failure(
    project: Project, tools: Path, claude: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    write(project, tools, "agent: claude")
    hook(project, claude, f"touch /output/hooked; {(POST_HOOKS / 'claude-post.sh').read_text()}", monkeypatch)
    if fails:
        (tools / "claude.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in STREAM[:-1]))

    record = await apply_with_double(project)

    assert record.exit_code == int(fails), record.outcome
    assert (project.directory(record) / "output" / "hooked").exists()
    assert bool(archived(project, record)) is fails
    assert (project.directory(record) / "logs" / session.COMMANDS).exists() is fails


@pytest.mark.scenario("TRI-26")
async def test_a_missing_hook_is_a_warning_without_debug_too(
    project: Project, tools: Path, claude: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, tools, "agent: claude")
    hook(project, claude, "", monkeypatch)
    (project.home / "shipped" / "runners" / "claude-post.sh").unlink()

    record = await apply_with_double(project)

    assert record.exit_code == 0, record.outcome
    assert "there is no runners/claude-post.sh" in warned(record)


@pytest.mark.scenario("TRI-26")
async def test_the_agents_hook_comes_after_those_of_its_type_and_the_run_and_after_a_timeout(
    project: Project, tools: Path, claude: Path
) -> None:
    """In finalize, when the run's own deadline has ended the agent."""
    program(tools, "claude", AGENT.replace("cat STREAM", "printf '%s\\n' \"$(head -1 FILE)\"; sleep 100").replace(
        "FILE", f"{tools}/claude.jsonl"))  # fmt: skip
    project.write(
        document("AgentType", "worker", f"agent: claude\npost_hooks: [echo type >> $RUNNER_OUTPUT/order]\nworkspace: "
                 f"{{enabled: true, providers: [local], toolchains: [{tools}]}}"),
        document("IncidentRun", "work", "agent_type: worker\nprompt: do it\ndebug: true\ntimeout: 4s\n"
                 "post_hooks: [echo run >> $RUNNER_OUTPUT/order]"),
    )  # fmt: skip

    record = await apply_with_double(project)

    assert record.exit_code == 124
    begun = {name: step.started for name, step in record.steps.items()}
    assert (begun["agent"] or 0) < (begun["post_hook"] or 0) < (begun["session"] or 0)
    assert record.commands is not None
    assert (record.commands.executed, record.commands.unfinished) == (0, 1)
    assert len(archived(project, record)) == 2
    assert "$ ls  # cut off" in (project.directory(record) / "logs" / session.COMMANDS).read_text()
