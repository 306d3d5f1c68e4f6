"""Manifests whose text is standard input: ``runner triage --print | runner apply -``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_rehearse import STAND_IN
from tests.support.situations import Done, Project


def run_with_input(project: Project, text: str, *arguments: str) -> Done:
    command = [sys.executable, "-m", "runner", *arguments]
    done = subprocess.run(
        command, cwd=project.folder, env=project.variables, input=text, capture_output=True, text=True, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_a_place_in_standard_input_is_called_that(project: Project) -> None:
    done = run_with_input(project, "apiVersion: runner/v1\nkind: Job\n", "validate", "-")

    assert done.code == 2
    assert "--> <stdin>:2:7" in done.err


def test_files_are_found_from_where_the_command_is_given_and_resume_wants_the_text_again(project: Project) -> None:
    project.script("echo ran; exit 3")
    manifest = project.manifest
    text = manifest.read_text()
    manifest.unlink()
    done = run_with_input(project, text, "apply", "-")
    again = project.runner("resume", "last")
    manifest.write_text(text.replace("agent.sh", "other.sh"))
    (project.folder / "other.sh").write_text("true")
    named = project.runner("resume", "last", str(manifest))

    assert (done.code, project.logs("agent", "stderr")) == (1, ""), done.err
    assert again.code == 2
    assert "were standard input, which is gone" in again.err
    assert named.code == 0, named.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "-", "--task-file", "-"), "both the manifests and the task would be standard input"),
        (("apply", "-", "--task-file", "-"), "both the manifests and the task would be standard input"),
        (("apply", "-"), "`<stdin>` holds no manifests"),
    ],
)
def test_what_would_need_it_twice_or_finds_nothing_is_refused(
    project: Project, arguments: tuple[str, ...], words: str
) -> None:
    done = project.runner(*arguments)

    assert done.code == 2
    assert words in done.err


def test_what_is_printed_of_a_new_incident_can_be_applied(project: Project) -> None:
    (project.folder / "tools" / "bin").mkdir(parents=True)
    (project.folder / "tools" / "bin" / "claude").write_text(STAND_IN)
    (project.folder / "tools" / "bin" / "claude").chmod(0o755)
    words = ("--namespace", "payments", "--resource", "deploy/x", "--provider", "local", "--toolchain", "tools")
    project.env["ANTHROPIC_API_KEY"] = "sk-none"
    printed = project.runner("triage", "-w", "INC-1", *words, "--print")
    again = project.runner("triage", "-w", "INC-1", *words, "--print")
    planned = run_with_input(project, printed.out, "plan", "-")

    assert (printed.code, planned.code) == (0, 0), planned.err
    assert "INC-1/incident.json is new: the manifest is about it\n" in printed.err
    assert json.loads((Path(project.folder) / "INC-1" / "incident.json").read_text())["namespace"] == "payments"
    assert (again.out, again.err) == (printed.out, "")
