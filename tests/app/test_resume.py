"""``runner resume`` as a person uses it: nothing that succeeded is done twice, nothing stale is taken over."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.situations import Done, Project, git, leftovers, step

CLONED = "repo_source: {type: local, path: repo}\nsetup_commands: [echo once > setup.txt]"
AGENT = "echo work > made; echo $RUNNER_RUN_ID; echo report > $RUNNER_OUTPUT/report.md"


def write(project: Project, check: str, **changes: Any) -> None:
    """A run whose agent does well, and the check that its work has to pass."""
    given = {"script": AGENT, "workspace": CLONED, "run": f"prompt: go\nverify: {{commands: [{{run: [sh, -c, '{check}']}}]}}", **changes}
    given["run"] = f"{given['run']}\nsnapshot: {{branch: 'runner/{{{{ run.id }}}}'}}"
    project.script(**given)


def resume(project: Project, run: str = "last", *arguments: str) -> tuple[Done, dict[str, Any]]:
    """Resume a run, and the newest run's record."""
    done = project.runner("resume", run, *arguments)
    shown = project.runner("runs", "show", "last", "--output", "json")
    return done, json.loads(shown.out)


def explained(project: Project, run: str = "last") -> dict[str, str]:
    done = project.runner("resume", run, "--explain", "--output", "json")
    assert done.code == 0, done.err
    return {entry["step"]: ("" if entry["reused"] else "! ") + entry["reason"] for entry in json.loads(done.out)["steps"]}


@pytest.mark.slow
@pytest.mark.scenario("BEY-15")
@pytest.mark.parametrize("provider", ["local", "process"])
def test_a_run_is_continued_at_the_check_that_was_wrong(project: Project, repository: Path, provider: str) -> None:
    write(project, "test -f mode", provider=provider)
    failed, first = project.apply()
    write(project, "grep work made && grep once setup.txt && test ! -e .git", provider=provider)

    done, record = resume(project)

    assert (failed.code, done.code) == (1, 0), done.out + done.err
    assert record["resumes"] == first["id"] != record["id"]
    taken = {s["id"]: s["reused"] for s in record["steps"] if s["reused"]}
    assert taken == dict.fromkeys(("clone", "setup", "agent", "scan", "snapshot"), first["id"])
    assert step(record, "agent")["outcome"]["message"] == f"as in run {first['id']}"
    assert record["snapshot"]["commit"] == first["snapshot"]["commit"]
    assert record["snapshot"]["branch"] == f"runner/{record['id']}"
    assert not (project.directory(record) / "logs" / "agent.stdout").exists()
    assert (project.directory(record) / "output" / "report.md").read_text() == "report\n"
    patches = [project.runner("runs", "patch", run["id"]).out for run in (first, record)]
    assert patches[0] == patches[1] != ""
    assert project.runner("runs", "branch", record["id"]).code == 0
    assert f"resumes {first['id']}" in project.runner("runs", "list").out
    assert f"resumes    run {first['id']}" in done.out


BASE = "{! its workspace is gone}"


@pytest.mark.slow
def test_explaining_starts_nothing_and_says_of_each_step_why(project: Project, repository: Path) -> None:
    write(project, "test -f mode")
    _, first = project.apply()
    runs = project.runner("runs", "list").out

    told = project.runner("resume", first["id"], "--explain")

    print(told.out)
    assert told.code == 0, told.err
    assert f"  agent      taken over as in run {first['id']}   key sha256:" in told.out
    assert "  provision  runs again: its workspace is gone\n" in told.out
    assert "  verify     runs again: it did not succeed: 1 of 1 checks failed: " in told.out
    assert told.out.endswith("Nothing started.\n")
    assert project.runner("runs", "list").out == runs


@pytest.mark.slow
def test_what_has_changed_is_named_and_what_rests_on_it_runs_again(project: Project, repository: Path) -> None:
    write(project, "test -f mode")
    _, first = project.apply()
    same = explained(project)
    (project.folder / "agent.sh").write_text(AGENT + "; true")
    script = explained(project)
    write(project, "test -f mode", run="prompt: stop\nverify: {commands: [{run: [test, -f, mode], timeout: 9s}]}")
    prompt = explained(project)
    write(project, "test -f mode", workspace=CLONED + "\nprotected_paths: [AGENTS.md]")
    protected = explained(project)
    write(project, "test -f mode", workspace="repo_source: {type: local, path: repo}")
    without = explained(project)
    write(project, "test -f mode", agent="post_hooks: [[touch, hooked]]")
    hooked = explained(project)
    write(project, "test -f mode", policy="max_file_size: 1M")
    policy = explained(project)

    assert [text for text in same.values() if not text.startswith("! ")] == [f"as in run {first['id']}"] * 5
    assert script["agent"] == "! script changed"
    assert script["setup"] == "! agent runs again, and needs it"
    assert script["scan"] == "! its need agent runs again"
    assert prompt["agent"] == "! prompt changed"
    assert protected["setup"] == protected["agent"] == "! mounts changed"
    assert without["agent"] == "! setup is gone, and the saved work has what it did"
    assert hooked["post_hook"] == "! it is new"
    assert hooked["agent"] == "! post_hook runs again, and needs it"
    assert policy["agent"] == f"as in run {first['id']}"
    assert (policy["scan"], policy["snapshot"]) == ("! policy changed", "! policy changed")


@pytest.mark.slow
def test_a_branch_that_has_moved_costs_no_work_that_was_done(project: Project, repository: Path) -> None:
    write(project, "test -f mode")
    _, first = project.apply()
    (repository / "mode").write_text("")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "second")
    before, now = first["snapshot"]["base"], git(repository, "rev-parse", "HEAD")

    told = project.runner("resume", "last", "--explain")
    (project.folder / "agent.sh").write_text(AGENT + "; true")
    again = explained(project)
    done, record = resume(project)

    assert f"note: main is at {now[:12]} by now; the work stays on {before[:12]}\n" in told.out
    assert "agent      taken over" in told.out
    assert again["clone"] == f"! base commit changed from {before[:12]} to {now[:12]}"
    assert done.code == 0, done.out + done.err
    assert record["snapshot"]["base"] == now


@pytest.mark.slow
def test_an_agent_that_failed_runs_again_from_the_base(project: Project, repository: Path) -> None:
    write(project, "true", script="echo work > made; exit 3")
    _, first = project.apply()
    why = explained(project)
    write(project, "true", script="test ! -e made && echo other > different")

    done, record = resume(project, first["id"][:8])

    assert why["agent"].startswith("! it did not succeed: ")
    assert why["clone"] == "! agent runs again, and needs it"
    assert why["scan"] == "! its need agent runs again"
    assert done.code == 0, done.out + done.err
    assert record["resumes"] == first["id"]
    assert not [s for s in record["steps"] if s["reused"]]
    assert "different" in project.runner("runs", "patch", "last").out


@pytest.mark.slow
def test_work_that_policy_kept_back_is_done_again(project: Project, repository: Path) -> None:
    write(project, "true", script="echo work > made; echo key > secret.pem", policy="forbidden_patterns: ['*.pem']")
    failed, _ = project.apply()
    write(project, "true", script="echo work > made; echo key > secret.pem", policy="forbidden_patterns: ['*.key']")

    why = explained(project)
    done, record = resume(project)

    assert (failed.code, done.code) == (3, 0), done.out + done.err
    assert why["agent"] == "! what was saved lacks 1 files that broke policy"
    assert why["scan"] == "! policy changed"
    assert "secret.pem" in project.runner("runs", "patch", record["id"]).out


@pytest.mark.slow
def test_work_without_a_repository_is_gone_on_with_too(project: Project) -> None:
    (project.folder / "incident").mkdir()
    (project.folder / "incident" / "incident.json").write_text("{}")
    run = "incident: {directory: incident}\nverify: {report: {path: report.md, min_bytes: %d}}"
    script = "echo work > made; mkdir -p sub; echo more > sub/x; echo report > $RUNNER_OUTPUT/report.md"
    project.script(script, run=run % 1_000)
    failed, first = project.apply()
    project.script(script, run=run % 3)

    done, record = resume(project)

    assert (failed.code, done.code) == (1, 0), done.out + done.err
    assert step(record, "agent")["reused"] == step(record, "scan")["reused"] == first["id"]
    assert record["receipt"]["changed"] == first["receipt"]["changed"] == 2
    patches = [(project.directory(run) / "work.patch").read_bytes() for run in (first, record)]
    assert patches[0] == patches[1]


@pytest.mark.slow
def test_a_chain_of_resumed_runs_names_the_run_that_did_the_work(project: Project, repository: Path) -> None:
    write(project, "exit 3")
    _, first = project.apply()
    write(project, "exit 4")
    _, second = resume(project)
    shutil.rmtree(project.home / "state" / "runs" / first["id"])
    shutil.rmtree(project.home / "state" / "snapshots" / f"{first['id']}.git")
    write(project, "true")

    done, third = resume(project, second["id"])

    assert done.code == 0, done.out + done.err
    assert (third["resumes"], step(third, "agent")["reused"]) == (second["id"], first["id"])
    assert third["snapshot"]["commit"] == first["snapshot"]["commit"]


def test_a_run_that_succeeded_has_nothing_to_resume(project: Project) -> None:
    project.script("true")
    _, record = project.apply()

    for arguments in ((), ("--explain",)):
        done = project.runner("resume", "last", *arguments)
        assert (done.code, done.out) == (0, f"run {record['id']} succeeded: there is nothing to resume\n")
    assert json.loads(project.runner("resume", "last", "--output", "json").out)["id"] == record["id"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "code", "error"),
    [
        pytest.param(lambda run, home: (run / "plan.json").write_text("{"), 7, "run.work-missing", id="plan torn"),
        pytest.param(lambda run, home: (run / "plan.json").unlink(), 7, "run.work-missing", id="plan gone"),
        pytest.param(lambda run, home: shutil.rmtree(run), 7, "run.work-missing", id="all gone"),
        pytest.param(lambda run, home: shutil.rmtree(home / "snapshots"), 7, "run.work-missing", id="work gone"),
        pytest.param(
            lambda run, home: shutil.rmtree(next(home.glob("snapshots/*/objects"))), 7, "run.work-missing", id="damaged"
        ),
        pytest.param(lambda run, home: shutil.rmtree(run / "output"), 7, "run.work-missing", id="output gone"),
    ],
)
def test_what_is_not_there_any_more_is_said_and_nothing_started(
    project: Project, repository: Path, spoil: Any, code: int, error: str
) -> None:
    write(project, "exit 3")
    _, record = project.apply()
    spoil(project.directory(record), project.home / "state")

    done = project.runner("resume", "last")

    assert done.code == code
    assert f"error[{error}]" in done.err
    assert "= hint:" in done.err
    assert len(project.runner("runs", "list").out.splitlines()) == 1
