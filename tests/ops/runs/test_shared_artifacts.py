"""Hosts that share PostgreSQL and S3: what runs on one is read, followed, cancelled, continued elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ops.runs.test_recover import AGENT, kill, run_in_agent
from tests.ops.runs.test_two_hosts import stop_hearts
from tests.support.artifact_stores import KEYS, bucket, client, s3_url
from tests.support.folder_contents import folder
from tests.support.git_servers import free_port
from tests.support.needs import POSTGRES
from tests.support.situations import Project, git, leftovers, step, until

pytestmark = [POSTGRES.mark, pytest.mark.slow]
SHARED = pytest.mark.scenario("BEY-20", only="artifacts in S3 or a folder that hosts share")
WORK = """
echo work > made
echo told > "$RUNNER_OUTPUT/report.md"
echo "the agent has worked"
"""


@pytest.fixture(params=["s3", "file"])
def hosts(request: pytest.FixtureRequest, project: Project) -> tuple[Project, Project]:
    """Two hosts with a repository that both can reach; nothing else on the disk is shared but the folder."""
    return _hosts(project, request.param)


@pytest.fixture
def on_s3(project: Project) -> tuple[Project, Project]:
    return _hosts(project, "s3")


def _hosts(project: Project, kind: str) -> tuple[Project, Project]:
    from tests.support.postgres import fresh_url

    share = s3_url(bucket()) if kind == "s3" else f"file://{folder(project.home / 'share')}"
    project.env |= {"RUNNER_DATABASE_URL": fresh_url(), "RUNNER_ARTIFACTS": share, **KEYS}
    return project, replace(project, home=folder(project.home / "other"), env=dict(project.env))


def started(here: Project, script: str, **more: str) -> str:
    """The id of a run that has ended."""
    here.script(script, **{"workspace": "repo_source: {type: local, path: repo}", "run": "snapshot: {}"} | more)
    here.runner("apply", str(here.folder))
    return str(here.json("runs", "list", "--all")[0]["id"])


@pytest.mark.scenario("BEY-27", only="another host")
def test_a_saved_plan_runs_on_another_host_and_is_watched_cancelled_and_recovered_from_here(
    on_s3: tuple[Project, Project],
) -> None:
    """With nothing of its manifests there: it runs as it was saved."""
    here, there = on_s3
    there = replace(there, folder=folder(there.home / "elsewhere"))
    here.script("echo begun; sleep 300")
    here.runner("plan", str(here.folder), "--save", str(there.folder / "plan.json"))

    with _executed(here, there, "7k3q9m2x4c6p") as (worker, run):
        attached = here.start("runs", "attach", run)
        assert attached.stdout is not None
        seen = next(line for line in attached.stdout if "begun" in line)
        cancelled = here.runner("runs", "cancel", run)
        rest, _ = attached.communicate(timeout=60)
        ended = worker.wait(timeout=60)
    with _executed(here, there, "7k3q9m2x4c6q") as (worker, run):
        kill(worker)
        stop_hearts(here)
        recovered = here.runner("recover", run)
        there.runner("recover")

    assert (seen.strip(), cancelled.code) == ("| begun", 0), cancelled.err
    assert (ended, attached.returncode, "CANCELLED work at agent" in rest) == (130, 130, True), rest
    assert f"{run} work: unknown" in recovered.out, recovered.err
    assert [one["status"] for one in here.json("runs", "list", "--all")] == ["unknown", "cancelled"]
    assert (leftovers(here.home), leftovers(there.home)) == ([], [])


@contextmanager
def _executed(here: Project, there: Project, run: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A saved plan that runs on another host, once its agent works."""
    worker = there.start("execute", "plan.json", "--id", run)
    try:
        until(lambda: "begun" in here.runner("runs", "logs", run, "agent").out, 60)
        yield worker, run
    finally:
        worker.kill()
        worker.communicate()


def lose(host: Project) -> None:
    """Take the disk of a host away."""
    (host.home / "state").rename(host.home / "away")


@SHARED
def test_what_a_run_left_is_read_and_delivered_on_another_host(
    hosts: tuple[Project, Project], repository: Path, tmp_path: Path
) -> None:
    here, there = hosts
    run = started(here, WORK)
    lose(here)

    alone = replace(there, env={**there.env, "RUNNER_ARTIFACTS": ""}).runner("runs", "show", run)
    shown, logs = there.runner("runs", "show", run), there.runner("runs", "logs", run, "agent")
    patch, delivered = there.runner("runs", "patch", run), there.runner("runs", "branch", run, "--unverified")
    exported = there.runner("runs", "export", run, "--to", str(tmp_path / "it.tar.gz"))

    assert "not on this host: name the store of its copy in RUNNER_ARTIFACTS" in alone.out
    assert f"  evidence   {there.home}" in shown.out
    assert "  copy       " in shown.out
    assert "the agent has worked" in logs.out
    assert "+work" in patch.out
    assert delivered.code == 0, delivered.err
    assert git(repository, "show", f"runner/{run}:made") == "work"
    assert exported.code == 0, exported.err
    with tarfile.open(tmp_path / "it.tar.gz") as archive:
        assert {f"run-{run}/{name}" for name in ("output/report.md", "plan.json", "work.patch")} <= {
            *archive.getnames()
        }
    assert not (there.home / "state" / "runs" / run).exists(), "nothing there looks as if it had run there"
    assert there.runner("recover").out == "nothing to recover\n"


@SHARED
def test_a_run_is_followed_while_it_lives_and_cancelled_from_another_host(on_s3: tuple[Project, Project]) -> None:
    here, there = on_s3
    here.script("echo work > made\nfor i in 1 2 3; do echo step $i; sleep 1; done\nsleep 300")
    with run_in_agent(here) as (runner, run):
        follower = there.start("runs", "logs", run, "--follow")
        assert follower.stdout is not None
        seen = [follower.stdout.readline() for _ in range(4)]
        assert there.runner("runs", "cancel", run).code == 0
        _, said = follower.communicate(timeout=60)
        runner.wait(60)

    assert seen == ["--- agent\n", "step 1\n", "step 2\n", "step 3\n"], said
    assert there.json("runs", "list", "--all")[0]["status"] == "cancelled"
    assert leftovers(here.home) == []
    lose(here)
    assert "step 3" in there.runner("runs", "logs", run, "agent").out


@SHARED
def test_who_attaches_elsewhere_sees_why_a_step_failed(on_s3: tuple[Project, Project]) -> None:
    """The screen of a run elsewhere reads what was fetched: nothing of it is where runs of this host are."""
    here, there = on_s3
    here.script("sleep 5\necho it broke >&2\nexit 3")
    runner = here.start("apply", str(here.folder), "--output", "jsonl")
    assert runner.stdout is not None
    run = json.loads(runner.stdout.readline())["run"]

    attached = there.runner("runs", "attach", run, timeout=120)

    runner.communicate(timeout=60)
    assert "   | it broke" in attached.out, attached.err
    assert "✗ agent" in attached.out
    assert "FAILED work at agent" in attached.out
    assert "error[" not in attached.err


@pytest.mark.nightly
@SHARED
def test_a_run_that_failed_is_continued_on_another_host(on_s3: tuple[Project, Project], repository: Path) -> None:
    here, there = on_s3
    run = started(here, WORK, run="snapshot: {}\nverify: {commands: [{run: [test, -e, never]}]}")
    assert there.json("runs", "show", run)["status"] == "failed"
    here.edit("never", "made")
    lose(here)

    resumed = there.runner("resume", run)

    assert resumed.code == 0, resumed.out + resumed.err
    record = there.record()
    assert (record["resumes"], step(record, "agent")["reused"]) == (run, run)
    assert "+work" in there.runner("runs", "patch", record["id"]).out


@SHARED
def test_no_run_is_lost_when_the_store_of_artifacts_is_away(on_s3: tuple[Project, Project], repository: Path) -> None:
    here, there = on_s3
    share = here.env["RUNNER_ARTIFACTS"]
    here.env["RUNNER_ARTIFACTS"] = s3_url("none", free_port())
    began = time.monotonic()
    here.script(WORK, workspace="repo_source: {type: local, path: repo}", run="snapshot: {}")
    done = here.runner("apply", str(here.folder))
    run = here.json("runs", "list", "--all")[0]["id"]
    record, shown = here.json("runs", "show", run), here.runner("runs", "show", run)

    assert (done.code, time.monotonic() - began < 55) == (0, True), done.err
    assert record["artifacts"] is None
    assert [one["code"] for one in record["warnings"]] == ["artifacts.unreachable"]
    assert "its files are on this host only" in shown.out
    assert "its files are on this host only" in (here.directory(record) / "report.txt").read_text()
    missing = there.runner("runs", "patch", run)
    assert (missing.code, "its host has not sent them" in missing.err) == (6, True)
    away = here.runner("recover")
    assert (away.code, f"UNSENT  {run}" in away.out) == (7, True)

    here.env["RUNNER_ARTIFACTS"] = share
    assert here.runner("recover").out == f"{run}: its files are sent\n"
    assert here.runner("recover").out == "nothing to recover\n"
    assert "+work" in there.runner("runs", "patch", run).out
    assert there.json("runs", "show", run)["artifacts"]["files"] > 5


@pytest.mark.nightly
def test_what_an_apply_left_is_sent_by_the_next(on_s3: tuple[Project, Project], repository: Path) -> None:
    here, there = on_s3
    share = here.env.pop("RUNNER_ARTIFACTS")
    run = started(here, WORK)
    (here.home / "state" / "unsent").mkdir()
    (here.home / "state" / "unsent" / run).touch()
    here.env["RUNNER_ARTIFACTS"] = share

    started(here, WORK)

    assert "+work" in there.runner("runs", "patch", run).out
    assert os.listdir(here.home / "state" / "unsent") == []


@SHARED
def test_a_run_whose_runner_was_killed_is_recovered_and_then_read_elsewhere(on_s3: tuple[Project, Project]) -> None:
    here, there = on_s3
    here.script(f"echo said\n{AGENT}")
    with run_in_agent(here) as (runner, run):
        follower = there.start("runs", "logs", run, "--follow")
        assert follower.stdout is not None
        assert [follower.stdout.readline(), follower.stdout.readline()] == ["--- agent\n", "said\n"]
        follower.terminate()
        follower.communicate()
        kill(runner)

        recovered = here.runner("recover")

    assert f"{run}: its files are sent" in recovered.out
    lose(here)
    assert "+work" in there.runner("runs", "patch", run).out


@SHARED
def test_a_copy_that_was_changed_is_refused_by_the_journal(on_s3: tuple[Project, Project], repository: Path) -> None:
    """Whoever may write to the bucket, and not to the journal, can write nothing that is taken for a run's."""
    here, there = on_s3
    run = started(here, WORK)
    name = here.env["RUNNER_ARTIFACTS"].partition("//")[2].partition("/")[0]
    key, s3 = f"team/a/runs/{run}/contents.json", client()
    contents = json.loads(s3.get_object(Bucket=name, Key=key)["Body"].read())  # type: ignore[attr-defined]
    contents["files"] = [file for file in contents["files"] if file["name"] != "output/report.md"]
    s3.put_object(Bucket=name, Key=key, Body=json.dumps(contents).encode())  # type: ignore[attr-defined]

    refused = there.runner("runs", "patch", run)

    assert (refused.code, "the journal vouches for" in refused.err) == (7, True)


@pytest.mark.nightly
def test_old_copies_are_collected_by_any_host(on_s3: tuple[Project, Project], repository: Path) -> None:
    here, there = on_s3
    run = started(here, WORK)
    there.runner("runs", "patch", run)
    there.env["RUN_RETENTION"] = "1s"
    time.sleep(1.1)

    foreseen, done = there.runner("gc", "--dry-run"), there.runner("gc")

    assert f"would be removed  copy {_place(here)}/runs/{run}/" in foreseen.out
    assert f"removed  copy {_place(here)}/runs/{run}/" in done.out
    assert there.runner("gc").out == "nothing removed\n"
    assert "its host has not sent them" in there.runner("runs", "export", run).err
    assert here.runner("runs", "patch", run).code == 0, "the directory on its own host is its own matter"


def _place(project: Project) -> str:
    return project.env["RUNNER_ARTIFACTS"].partition("?")[0]


def test_doctor_tries_the_store_of_artifacts(on_s3: tuple[Project, Project]) -> None:
    here, _ = on_s3
    assert f"✓ artifacts  {_place(here)}" in here.runner("doctor").out
    here.env["RUNNER_ARTIFACTS"] = s3_url("no-such-bucket")

    told = here.runner("doctor").out

    assert "✗ artifacts  s3://no-such-bucket/team/a answers NoSuchBucket" in told
    assert "= hint: make the bucket" in told
