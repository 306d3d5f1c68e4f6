"""``runner resume`` as a person uses it: nothing that succeeded is done twice, nothing stale is taken over."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.artifacts.run_lock import try_lock
from runner.cli.main import main
from runner.cli.output import Output
from tests.support.situations import Done, Project, document, git, step

CLONED = "repo_source: {type: local, path: repo}\nsetup_commands: [echo once > setup.txt]"
AGENT = "echo work > made; echo $RUNNER_RUN_ID; echo report > $RUNNER_OUTPUT/report.md"


class Here(Project):
    """A project whose commands run in this process, which is several times as fast."""

    def runner(self, *arguments: str, timeout: float = 60) -> Done:
        out, err = io.StringIO(), io.StringIO()
        return Done(main(arguments, Output(out, err)), out.getvalue(), err.getvalue())


@pytest.fixture
def here(project: Project, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setenv("RUNNER_HOME", str(project.home / "state"))
    monkeypatch.setenv("HOME", str(project.home))
    return Here(project.folder, project.home)


def write(project: Project, check: str, **changes: Any) -> None:
    """A run whose agent does well, and the check that its work has to pass."""
    given = {
        "script": AGENT,
        "workspace": CLONED,
        "run": f"prompt: go\nverify: {{commands: [{{run: [sh, -c, '{check}']}}]}}",
        **changes,
    }
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
    return {
        entry["step"]: ("" if entry["reused"] else "! ") + entry["reason"] for entry in json.loads(done.out)["steps"]
    }


@pytest.mark.slow
@pytest.mark.scenario("BEY-15")
@pytest.mark.parametrize("provider", ["local", pytest.param("process", marks=pytest.mark.nightly)])
def test_a_run_is_continued_at_the_check_that_was_wrong(here: Here, provider: str) -> None:
    write(here, "test -f mode", provider=provider)
    failed, first = here.apply()
    runs = here.runner("runs", "list", "--all", "--output", "json").out
    told = here.runner("resume", first["id"], "--explain")
    untouched = here.runner("runs", "list", "--all", "--output", "json").out
    write(here, "grep work made && grep once setup.txt && test ! -e .git", provider=provider)

    done, record = resume(here)

    assert told.code == 0, told.err
    assert f"  agent      taken over as in run {first['id']}   key sha256:" in told.out
    assert "  provision  runs again: its workspace is gone\n" in told.out
    assert "  verify     runs again: it did not succeed: 1 of 1 checks failed: " in told.out
    assert told.out.endswith("Nothing started.\n")
    assert runs == untouched

    assert (failed.code, done.code) == (1, 0), done.out + done.err
    assert record["resumes"] == first["id"] != record["id"]
    taken = {s["id"]: s["reused"] for s in record["steps"] if s["reused"]}
    assert taken == dict.fromkeys(("clone", "setup", "agent", "scan", "snapshot"), first["id"])
    assert step(record, "agent")["outcome"]["message"] == f"as in run {first['id']}"
    assert record["snapshot"]["commit"] == first["snapshot"]["commit"]
    assert record["snapshot"]["branch"] == f"runner/{record['id']}"
    assert not (here.directory(record) / "logs" / "agent.stdout").exists()
    assert (here.directory(record) / "output" / "report.md").read_text() == "report\n"
    patches = [(here.directory(run) / "work.patch").read_bytes() for run in (first, record)]
    assert patches[0] == patches[1]
    assert here.runner("runs", "branch", record["id"]).code == 0
    assert f"resumes {first['id']}" in here.runner("runs", "list", "--all").out
    assert f"   resumes {first['id']}" in done.out


@pytest.mark.slow
def test_a_branch_that_has_moved_costs_no_work_that_was_done(here: Here, repository: Path) -> None:
    write(here, "test -f mode")
    _, first = here.apply()
    (repository / "mode").write_text("")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "second")
    before, now = first["snapshot"]["base"], git(repository, "rev-parse", "HEAD")

    told = here.runner("resume", "last", "--explain")
    (here.folder / "agent.sh").write_text(AGENT + "; true")
    again = explained(here)
    done, record = resume(here)

    assert f"note: main is at {now[:12]} by now; the work stays on {before[:12]}\n" in told.out
    assert "agent      taken over" in told.out
    assert again["clone"] == f"! base commit changed from {before[:12]} to {now[:12]}"
    assert done.code == 0, done.out + done.err
    assert record["snapshot"]["base"] == now


@pytest.mark.slow
def test_an_agent_that_failed_runs_again_from_the_base(here: Here) -> None:
    write(here, "true", script="echo work > made; exit 3")
    _, first = here.apply()
    why = explained(here)
    write(here, "true", script="test ! -e made && echo other > different")

    done, record = resume(here, first["id"][:8])

    assert why["agent"].startswith("! it did not succeed: ")
    assert why["clone"] == "! agent runs again, and needs it"
    assert why["scan"] == "! its need agent runs again"
    assert done.code == 0, done.out + done.err
    assert record["resumes"] == first["id"]
    assert not [s for s in record["steps"] if s["reused"]]
    assert "different" in (here.directory(record) / "work.patch").read_text()


@pytest.mark.nightly
def test_work_that_policy_kept_back_is_done_again(here: Here) -> None:
    write(here, "true", script="echo work > made; echo key > secret.pem", policy="forbidden_patterns: ['*.pem']")
    failed, _ = here.apply()
    write(here, "true", script="echo work > made; echo key > secret.pem", policy="forbidden_patterns: ['*.key']")

    why = explained(here)
    done, record = resume(here)

    assert (failed.code, done.code) == (3, 0), done.out + done.err
    assert why["agent"] == "! what was saved lacks 1 files that broke policy"
    assert why["scan"] == "! policy changed"
    assert "secret.pem" in (here.directory(record) / "work.patch").read_text()


@pytest.mark.slow
def test_work_without_a_repository_is_gone_on_with_too(here: Here) -> None:
    (here.folder / "incident").mkdir()
    (here.folder / "incident" / "incident.json").write_text("{}")
    run = "incident: {directory: incident}\nverify: {report: {path: report.md, min_bytes: %d}}"
    script = "echo work > made; mkdir -p sub; echo more > sub/x; echo report > $RUNNER_OUTPUT/report.md"
    here.script(script, run=run % 1_000)
    failed, first = here.apply()
    here.script(script, run=run % 3)

    done, record = resume(here)

    assert (failed.code, done.code) == (1, 0), done.out + done.err
    assert step(record, "agent")["reused"] == step(record, "scan")["reused"] == first["id"]
    assert record["saved_work"]["changed"] == first["saved_work"]["changed"] == 2
    patches = [(here.directory(run) / "work.patch").read_bytes() for run in (first, record)]
    assert patches[0] == patches[1]


@pytest.mark.slow
def test_a_chain_of_resumed_runs_names_the_run_that_did_the_work(here: Here) -> None:
    write(here, "exit 3")
    _, first = here.apply()
    write(here, "exit 4")
    _, second = resume(here)
    shutil.rmtree(here.home / "state" / "runs" / first["id"])
    shutil.rmtree(here.home / "state" / "snapshots" / f"{first['id']}.git")
    write(here, "true")

    done, third = resume(here, second["id"])

    assert done.code == 0, done.out + done.err
    assert (third["resumes"], step(third, "agent")["reused"]) == (second["id"], first["id"])
    assert third["snapshot"]["commit"] == first["snapshot"]["commit"]


def test_a_run_that_succeeded_has_nothing_to_resume(here: Here) -> None:
    here.script("true")
    _, record = here.apply()

    for arguments in ((), ("--explain",)):
        done = here.runner("resume", "last", *arguments)
        assert (done.code, done.out) == (0, f"run {record['id']} succeeded: there is nothing to resume\n")
    assert json.loads(here.runner("resume", "last", "--output", "json").out)["id"] == record["id"]


SPOILS = {
    "plan.json torn": lambda run, home: (run / "plan.json").write_text("{"),
    "plan.json gone": lambda run, home: (run / "plan.json").unlink(),
    "plan.json of another run": lambda run, home: replace_in(run / "plan.json", '"digest": "sha256:', '"digest": "x'),
    "plan.json of another version": lambda run, home: replace_in(run / "plan.json", '"keys"', '"other"'),
    "the run's directory": lambda run, home: shutil.rmtree(run),
    "its output": lambda run, home: shutil.rmtree(run / "output"),
    "its repository": lambda run, home: shutil.rmtree(home / "snapshots"),
    "the objects of its repository": lambda run, home: shutil.rmtree(next(home.glob("snapshots/*/objects"))),
}


def replace_in(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.slow
def test_work_that_another_process_is_at_is_left_to_it(here: Here) -> None:
    here.script("true", run="verify: {report: {path: x, min_bytes: 1}}")
    _, record = here.apply()
    held = try_lock(here.directory(record))

    busy = here.runner("resume", "last")
    os.close(held)
    free = here.runner("resume", "last")

    assert (busy.code, "error[store.run-unfinished]: another process is working on run" in busy.err) == (5, True)
    assert free.code == 1
    assert f"   resumes {record['id']}" in free.out


@pytest.mark.slow
def test_what_is_not_there_any_more_is_said_and_nothing_started(here: Here) -> None:
    write(here, "exit 3")
    _, record = here.apply()
    state = here.home / "state"
    shutil.copytree(state, here.home / "copy")

    for name, spoil in SPOILS.items():
        spoil(here.directory(record), state)
        done = here.runner("resume", "last")
        assert done.code == 7, name
        assert "error[run.work-missing]" in done.err, name
        assert "= hint: start it anew: runner apply" in done.err, name
        assert len(list((state / "runs").glob("*"))) <= 1, name
        shutil.rmtree(state)
        shutil.copytree(here.home / "copy", state)


@pytest.mark.slow
def test_a_run_that_lives_or_is_lost_is_not_resumed(here: Here) -> None:
    here.script("echo work > made; sleep 300")
    process = here.start("apply", str(here.folder), "--output", "jsonl")
    run = next(json.loads(line)["run"] for line in process.stdout if "IsolationObserved" in line)

    lives = here.runner("resume", run)
    process.kill()
    process.communicate()
    lost = here.runner("resume", run)
    here.runner("recover")
    why = explained(here, run)
    here.script("echo ran")
    done, record = resume(here, run)

    assert (lives.code, lost.code) == (5, 5)
    assert "has not ended" in lives.err
    assert f"run `runner recover {run}` first" in lost.err
    assert why["agent"] == "! it did not succeed: its runner died while it ran"
    assert done.code == 0, done.out + done.err
    assert record["resumes"] == run


@pytest.mark.slow
def test_a_run_of_a_larger_plan_is_resumed_alone_with_what_the_others_put_out(here: Here) -> None:
    worker = "agent: script\nscript: {path: %s.sh}\nworkspace: {enabled: true, providers: [local]}"
    (here.folder / "finder.sh").write_text("date +%s%N > $RUNNER_OUTPUT/cause.md")
    (here.folder / "fixer.sh").write_text("cat > $RUNNER_OUTPUT/cause.md")
    find = document("IncidentRun", "find", "agent_type: finder\noutputs: {cause: {file: cause.md}}")
    fix = "matrix: {agent_type: [fixer, other]}\nneeds: [find]\nprompt: because {{ outputs.find.cause }}"
    workers = [document("AgentType", n, worker % f) for n, f in (("finder", "finder"), ("fixer", "fixer"))]
    other = document("AgentType", "other", worker % "fixer")

    def check(least: int, more: str = "") -> None:
        asks = f"{fix}{more}\nverify: {{report: {{path: cause.md, min_bytes: {least}}}}}"
        here.write(*workers, other, find, document("IncidentRun", "fix", asks))

    check(1_000)
    failed = here.runner("apply", str(here.folder))
    runs = {row["name"]: row["id"] for row in json.loads(here.runner("runs", "list", "--all", "--output", "json").out)}
    check(10)
    done, record = resume(here, runs["fix.other"])
    changed = explained(here, runs["fix.fixer"])
    check(10, " twice")
    again = explained(here, runs["fix.fixer"])
    _, repeated = resume(here, runs["fix.fixer"])
    here.write(*workers, find, document("IncidentRun", "fix", "agent_type: fixer"))
    gone = here.runner("resume", runs["fix.fixer"])

    assert (failed.code, done.code) == (1, 0), done.out + done.err
    assert record["name"] == "fix.other"
    assert step(record, "agent")["reused"] == runs["fix.other"]
    assert changed["agent"] == f"as in run {runs['fix.fixer']}"
    assert again["agent"] == "! prompt changed"
    cause = (here.home / "state" / "runs" / runs["find"] / "output" / "cause.md").read_text()
    assert (here.directory(repeated) / "output" / "cause.md").read_text() == f"because {cause} twice"
    assert len(json.loads(here.runner("runs", "list", "--all", "--output", "json").out)) == 5
    assert (gone.code, "error[run.not-resumable]" in gone.err) == (2, True)


@pytest.mark.nightly
def test_manifests_that_have_moved_are_named(here: Here) -> None:
    write(here, "exit 3")
    _, first = here.apply()
    write(here, "true")
    here.folder.rename(here.folder.with_name("moved"))

    nowhere = here.runner("resume", "last")
    done, record = resume(here, "last", str(here.folder.with_name("moved")))

    assert nowhere.code == 2
    assert done.code == 0, done.out + done.err
    assert step(record, "agent")["reused"] == first["id"]
    here.folder.with_name("moved").rename(here.folder)


@pytest.mark.nightly
def test_a_provider_that_has_become_weaker_does_not_go_on(host_without_user_namespaces: Project) -> None:
    project = host_without_user_namespaces
    within, project.within = project.within, ()
    project.script("true", provider="local, process", run="verify: {report: {path: x, min_bytes: 1}}")
    project.apply()
    project.within = within

    done = project.runner("resume", "last")

    assert done.code == 2
    assert "error[plan.stale]: `local` is no longer available" in done.err


@pytest.mark.nightly
def test_work_is_gone_on_with_when_its_run_came_to_its_deadline(here: Here) -> None:
    write(here, "sleep 100", run="prompt: go\ntimeout: 4s\nverify: {commands: [{run: sleep 100}]}")
    late, first = here.apply()
    write(here, "true")

    done, record = resume(here)

    assert (late.code, done.code) == (124, 0), done.out + done.err
    assert first["cancelled_by"] == "deadline"
    assert step(record, "agent")["reused"] == first["id"]


@pytest.mark.nightly
def test_the_agents_own_commits_come_along_with_the_snapshot_that_they_came_to(here: Here) -> None:
    commit = "git -c user.name=a -c user.email=a@b commit -qm mine"
    agent = {"script": f"echo work > made; git add -A; {commit}", "workspace": "repo_source: {type: local, path: repo}"}
    write(here, "exit 3", **agent)
    _, first = here.apply()
    write(here, "true", **agent)

    done, record = resume(here)
    branch = here.runner("runs", "branch", "last", "--commits", "--name", "own")
    write(here, "true", **agent, policy="max_file_size: 1M")
    again, other = resume(here, first["id"])

    assert (done.code, again.code) == (0, 0), done.out + done.err + again.out + again.err
    assert record["commits"]["commit"] == first["commits"]["commit"]
    assert (here.directory(record) / record["commits"]["bundle"]).is_file()
    assert branch.code == 0, branch.err
    assert git(here.folder / "repo", "log", "-1", "--format=%H", "own") == first["commits"]["commit"]
    assert other["commits"]["withheld"] == "this snapshot was made again, of what they came to"
