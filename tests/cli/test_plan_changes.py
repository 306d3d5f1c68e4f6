"""What ``runner plan`` says of changes since the last run: files by their lines, values as people read them."""

from __future__ import annotations

import json
import time

import pytest

from tests.support.situations import Project, document, git


def changes(project: Project, *arguments: str) -> list[str]:
    """The lines that say what has changed, without the manifest line of each."""
    project.env["COLUMNS"] = "200"
    done = project.runner("plan", ".", *arguments)
    lines = done.out[done.out.index("\nsince ") :].splitlines()[2:]
    return [line.partition("   all.runner.yaml")[0] for line in lines[: lines.index("")]]


def test_a_changed_script_is_named_with_its_lines(project: Project) -> None:
    project.script("echo one\necho two\necho three\n", provider="process")
    project.apply()
    (project.folder / "agent.sh").write_text("echo one\necho 2\necho three\n")

    assert changes(project) == [
        "~ work.provision.script agent.sh",
        "    @@ line 1 @@",
        "     echo one",
        "    -echo two",
        "    +echo 2",
        "     echo three",
    ]


def test_a_saved_plan_is_compared_by_lines_as_well(project: Project) -> None:
    project.script("echo one\n", provider="process")
    saved = project.folder / "plan.json"
    project.runner("plan", ".", "--save", str(saved))
    (project.folder / "agent.sh").write_text("echo 2\n")

    assert changes(project, "--against", str(saved))[2:] == ["    -echo one", "    +echo 2"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        pytest.param(b"x\0y", b"x\0yz", "agent.sh, 3 -> 4 bytes", id="no text"),
        pytest.param(b"#" * 70_000, b"#", "agent.sh, 70000 -> 1 bytes", id="large"),
    ],
)
def test_of_what_is_no_text_or_large_the_sizes_are_said(
    project: Project, before: bytes, after: bytes, said: str
) -> None:
    project.script("true", provider="process")
    (project.folder / "agent.sh").write_bytes(before)
    project.apply()
    (project.folder / "agent.sh").write_bytes(after)

    assert changes(project) == [f"~ work.provision.script {said}"]


def test_no_more_than_twenty_lines_of_a_text_are_shown_and_none_is_wider_than_a_line(project: Project) -> None:
    project.script("true\n", provider="process")
    project.apply()
    (project.folder / "agent.sh").write_text("".join(f"echo {'x' * 500} \x1b[31m {n}\n" for n in range(40)))

    first, *lines = changes(project)

    assert first == "~ work.provision.script agent.sh"
    assert (len(lines), lines[-1]) == (21, "    and 22 lines more")
    assert all(len(line) <= 140 and line.isprintable() for line in lines)


def test_a_text_of_many_lines_is_compared_at_once(project: Project) -> None:
    """Thousands of equal lines are what comparing takes longest for."""
    project.script("true\n", provider="process")
    (project.folder / "agent.sh").write_text("echo 1\n" + "\n" * 60_000)
    project.apply()
    (project.folder / "agent.sh").write_text("echo 1\n" + "\n" * 30_000 + "echo 2\n" + "\n" * 30_000)

    start = time.monotonic()
    lines = changes(project)

    assert (lines[1], len(lines)) == ("    @@ line 30001 @@", 22)
    assert time.monotonic() - start < 20


def test_a_secret_in_a_script_is_not_kept_with_the_run(project: Project) -> None:
    key = "sk-ant-0123456789-abcdefghijkl"
    project.env["ANTHROPIC_API_KEY"] = key
    project.script(f"echo {key} > /dev/null\n", provider="process")
    _, record = project.apply()

    assert key not in (project.directory(record) / "plan.json").read_text()
    (project.folder / "agent.sh").write_text("echo 2\n")
    assert all(key not in line for line in changes(project))


def test_a_prompt_and_inline_files_of_several_lines_are_compared_by_lines(project: Project) -> None:
    def write(prompt: list[str], content: str) -> None:
        files = json.dumps([{"path": "a.sh", "content": content}])
        project.write(
            document("AgentType", "worker", f"agent: script\nscript: {{files: {files}}}\n"
                     "workspace: {enabled: true, providers: [process]}"),
            document("IncidentRun", "work", f"agent_type: worker\nprompt: {json.dumps(chr(10).join(prompt))}"),
        )  # fmt: skip

    write(["fix it", "carefully", "and fast"], "echo 1\necho 2\n")
    project.apply()
    write(["fix it", "slowly", "and fast"], "echo 1\necho 3\n")

    shown = changes(project)

    assert "~ work.provision.files.a.sh.content" in shown
    assert {"    -echo 2", "    +echo 3", "    -carefully", "    +slowly"} < set(shown)


def test_no_value_is_shown_longer_than_a_line(project: Project) -> None:
    git(project.folder, "init", "-q")
    project.script("true", policy="forbidden_patterns: ['**/.env']")
    project.apply()

    shown = changes(project, "--untrusted")

    assert any(line.startswith('+ work.scan.policies[1] {"name": "defaults"') for line in shown), shown
    assert max(map(len, shown)) < 160


def test_durations_are_said_as_people_say_them(project: Project) -> None:
    project.script("true", provider="process", run="timeout: 20m")
    project.apply()
    project.edit("timeout: 20m", "timeout: 90s")

    assert "~ work.deadline_seconds 20m -> 1m30s" in changes(project)


@pytest.mark.parametrize("texts", ["null", "[1]", '{"x": 1}', '"text"'])
def test_a_plan_that_is_damaged_is_not_compared(project: Project, texts: str) -> None:
    project.script("echo one\n", provider="process")
    _, record = project.apply()
    kept = project.directory(record) / "plan.json"
    plan = json.loads(kept.read_text())
    plan["inputs"]["texts"] = json.loads(texts)
    kept.write_text(json.dumps(plan))
    (project.folder / "agent.sh").write_text("echo 2\n")

    assert "since run" not in project.runner("plan", ".").out
