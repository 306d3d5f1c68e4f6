"""What ``apply`` leaves for a CI: files, annotations and tables, from real runs that end in every way."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from argparse import Namespace
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest

from runner.cli.output import Output
from runner.cli.reports import open_reports
from runner.core.settings import Settings
from tests.support.situations import Project, document, until

GITHUB = {"GITHUB_ACTIONS": "true"}
FAILS = """
echo "::add-mask::from the agent"; echo '##[error]from the agent'
exit 3
"""


def matrix(project: Project, scripts: dict[str, str], run: str = "") -> None:
    """A run ``triage`` with a member for each script."""
    types = [project.worker(name, script) for name, script in scripts.items()]
    project.write(*types, document("IncidentRun", "triage", f"matrix: {{agent_type: [{', '.join(scripts)}]}}\n{run}"))


def cases(path: Path) -> dict[str, str]:
    found = ElementTree.parse(path).iter("testcase")
    return {case.attrib["name"]: case[0].tag if len(case) else "passed" for case in found}


@pytest.mark.scenario("BEY-17", only="JUnit")
def test_junit_has_the_steps_and_checks_of_a_run_that_failed(project: Project) -> None:
    project.script(
        "printf '# Cause\\nload\\n' > $RUNNER_OUTPUT/r.md", run="verify: {report: {path: r.md, sections: [Cause, Fix]}}"
    )
    (project.folder / "runs.xml").write_text("old")

    done = project.runner("apply", ".", "--junit", "runs.xml")

    assert done.code == 1
    found = cases(project.folder / "runs.xml")
    assert found["agent"] == found["verify: report section `Cause`"] == "passed"
    assert (found["verify"], found["verify: report section `Fix`"]) == ("failure", "failure")
    assert ' failures="2" errors="0" ' in (project.folder / "runs.xml").read_text()
    assert project.runner("runs", "show", "last", "--output", "junit").out == (project.folder / "runs.xml").read_text()
    assert "- ✗ `` report section `Fix` ``" in project.runner("runs", "show", "last", "--output", "markdown").out
    assert sorted(path.name for path in project.folder.iterdir()) == ["agent.sh", "all.runner.yaml", "runs.xml"]


def test_reports_are_written_of_a_run_that_is_stopped(project: Project) -> None:
    project.script("echo begun; sleep 1000")
    process = project.start("apply", ".", "--junit", "runs.xml", "--summary", "summary.md")
    until(lambda: [*project.home.glob("state/runs/*/logs/agent.stdout")])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)

    assert process.returncode == 130
    assert cases(project.folder / "runs.xml")["agent"] == "failure"
    assert "### ! `work` cancelled" in (project.folder / "summary.md").read_text()


def test_reports_say_why_nothing_was_started(project: Project) -> None:
    project.write(document("IncidentRun", "work", "agent_type: nobody"))
    project.env = {**GITHUB, "GITHUB_STEP_SUMMARY": str(project.home / "step.md")}

    done = project.runner("apply", ".", "--junit", "runs.xml")

    assert done.code == 2
    assert list(cases(project.folder / "runs.xml").values()) == ["failure"]
    assert "### ✗ stopped by an error" in (project.home / "step.md").read_text()
    assert done.out.startswith("::error file=all.runner.yaml,line=5,")


def test_reports_say_that_something_broke(tmp_path: Path) -> None:
    args = Namespace(junit=tmp_path / "runs.xml", summary=tmp_path / "summary.md")

    with (
        pytest.raises(ZeroDivisionError),
        open_reports(args, Output(StringIO(), StringIO()), Settings.from_env({"HOME": "/"})),
    ):
        _ = 1 / 0

    assert list(cases(tmp_path / "runs.xml").values()) == ["failure"]
    assert "`stopped by ZeroDivisionError`" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("name", ["file/runs.xml", "folder", "pipe"])
@pytest.mark.parametrize("option", ["--junit", "--summary"])
def test_a_report_that_can_not_be_written_is_said_before_anything_starts(
    project: Project, option: str, name: str
) -> None:
    project.script("true")
    (project.folder / "folder").mkdir()
    (project.folder / "file").write_text("")
    os.mkfifo(project.folder / "pipe")

    done = project.runner("apply", ".", option, name)

    assert done.code == 2
    assert "error[report.not-written]" in done.err
    assert not (project.home / "state" / "runs").exists()


def test_a_directory_for_reports_is_made(project: Project) -> None:
    project.script("true")

    done = project.runner("apply", ".", "--junit", "a/b/runs.xml", "--summary", "c/summary.md")

    assert done.code == 0, done.err
    assert cases(project.folder / "a" / "b" / "runs.xml")["agent"] == "passed"
    assert (project.folder / "c" / "summary.md").exists()


READERS = ("reader", "terminal", "disk", "closed")
EVENTS = ("--output", "jsonl")


@pytest.mark.parametrize(
    ("gone", "options"),
    [
        *(pytest.param(gone, (), id=gone) for gone in READERS),
        pytest.param("both readers", (), id="both readers", marks=pytest.mark.nightly),
        pytest.param("reader", EVENTS, id="reader of events"),
        *(
            pytest.param(gone, EVENTS, id=f"{gone} of events", marks=pytest.mark.nightly)
            for gone in ("both readers", *READERS[1:])
        ),
    ],
)
def test_a_run_outlives_who_reads_of_it(project: Project, gone: str, options: tuple[str, ...]) -> None:
    """As with ``| head -1``, or with a full disk behind a CI's log: it ends as it would have, and says so."""
    project.script("sleep 0.3; exit 3")
    reader, writer = pty.openpty() if gone == "terminal" else os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    words = [sys.executable, "-m", "runner", "apply", ".", "--junit", "runs.xml", *options]
    ends = {"reader": (writer, full), "disk": (full, full), "closed": (None, None)}
    stdout, stderr = ends.get(gone, (writer, writer))
    closing = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"] if gone == "closed" else []
    process = subprocess.Popen(
        [*closing, *words], cwd=project.folder, env=project.variables | {"TERM": "xterm"}, stdout=stdout, stderr=stderr
    )
    os.close(writer)
    if writer in (stdout, stderr):
        os.read(reader, 1)
    os.close(reader)
    os.close(full)

    assert process.wait(60) == 1
    assert cases(project.folder / "runs.xml")["agent"] == "failure"
    assert "run" not in cases(project.folder / "runs.xml")
    assert project.record()["status"] == "failed"


@pytest.mark.scenario("BEY-17", only="GitHub annotations")
def test_in_github_a_failed_run_is_an_annotation_and_nothing_that_an_agent_says(project: Project) -> None:
    project.script(FAILS)
    (project.home / "step.md").write_text("before\n")
    project.env = {
        **GITHUB,
        "GITHUB_STEP_SUMMARY": str(project.home / "step.md"),
        "GITHUB_WORKSPACE": str(project.folder.parent),
    }

    done = project.runner("apply", ".")
    logs = project.runner("runs", "logs", "last")

    assert done.code == 1
    commands = [
        line for line in f"{done.out}{done.err}".splitlines() if line.lstrip().startswith("::") or "##[" in line
    ]
    assert len(commands) == 1
    assert commands[0].startswith(
        "::error file=project/all.runner.yaml,line=5,col=1,endColumn=2,title=run work%3A exit::"
    )
    assert (project.home / "step.md").read_text().startswith("before\n### ✗ `work` failed")
    assert "\n\\x3a:add-mask::from the agent\n#\\x23[error]from the agent\n" in logs.out


def test_in_azure_nothing_that_an_agent_says_is_a_command_and_nobody_is_annotated(project: Project) -> None:
    project.script("echo '##vso[task.setvariable variable=PATH]/tmp'; echo 'x ##VSO[task.complete]' >&2; exit 3")
    project.env = {"TF_BUILD": "True"}

    shown = [project.runner("apply", "."), project.runner("runs", "logs", "last")]
    shown += [project.runner("runs", "show", "last", "--output", form) for form in ("text", "json")]

    assert shown[0].code == 1
    assert "#\\x23vso[task.setvariable variable=PATH]/tmp\n" in shown[1].out
    assert "##vso[" not in "".join(done.out + done.err for done in shown).lower()
    assert "::error" not in shown[0].out + shown[0].err


@pytest.mark.scenario("BEY-17", only="JSON Lines")
def test_json_lines_are_the_events_of_the_run_also_in_github(project: Project) -> None:
    project.script(FAILS)
    project.env = GITHUB

    done = project.runner("apply", ".", "--output", "jsonl")

    (kept,) = (project.home / "state" / "runs").glob("*/events.jsonl")
    printed, written = ([json.loads(line) for line in text.splitlines()] for text in (done.out, kept.read_text()))
    assert printed == written
    assert done.err.startswith("::error file=all.runner.yaml,line=5,")


def test_a_summary_that_github_names_and_nobody_can_write_ends_nothing(project: Project) -> None:
    project.script("true")
    project.env = {**GITHUB, "GITHUB_STEP_SUMMARY": str(project.home / "missing" / "step.md")}

    done = project.runner("apply", ".")

    assert done.code == 0
    assert "warning[report.not-written]" in done.err


@pytest.mark.scenario("BEY-14")
def test_members_of_a_matrix_run_at_once_under_their_limit_and_are_compared(project: Project) -> None:
    """Of three that take the same time there are two at a time, and never three."""
    begin = "cd $RUNNER_OUTPUT; date +%s%N > began; sleep 1.5; date +%s%N > ended; printf '# Cause\\nload\\n' > r.md"
    matrix(
        project,
        {"a": begin, "b": begin, "c": f"{begin}; exit 3"},
        "verify: {report: {path: r.md, sections: [Cause]}}",
    )
    project.edit("[a, b, c]", "[a, b, c], max_parallel: 2")

    done = project.runner("apply", ".")

    assert done.code == 1
    runs = [path for path in (project.home / "state" / "runs").iterdir()]
    spans = [tuple(int((run / "output" / name).read_text()) for name in ("began", "ended")) for run in runs]
    together = [sum(began <= moment < ended for began, ended in spans) for moment, _ in spans]
    assert max(together) == 2
    head, *rows = done.out.rstrip().splitlines()[-4:]
    assert head.split() == ["member", "outcome", "time", "sections", "report"]
    assert [(row.split()[0], row.split()[2]) for row in rows] == [
        ("triage.a", "succeeded"),
        ("triage.b", "succeeded"),
        ("triage.c", "failed:"),
    ]
    kept = [json.loads((run / "comparison.json").read_text()) for run in runs]
    assert kept[0] == kept[1] == kept[2]
    ids = [member["run"] for member in kept[0]["members"]]
    assert sorted(ids) == sorted(run.name for run in runs)
    assert project.json("runs", "compare", *ids) == kept[0]
    assert project.runner("runs", "compare", *ids).out.splitlines() == [head, *rows]


@pytest.mark.parametrize("runs", [("last",), ("last", "last")])
def test_a_run_is_not_compared_with_itself(project: Project, runs: tuple[str, ...]) -> None:
    project.script("true")
    project.runner("apply", ".")

    done = project.runner("runs", "compare", *runs)

    assert done.code == 2
    assert "error[cli.usage]: there is only one run to compare" in done.err
