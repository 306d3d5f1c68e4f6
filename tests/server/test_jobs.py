"""A server whose runs are Jobs, on the double: it makes them, tells of them, and may end before they do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from tests.ops.runs.test_jobs import JOBS, WORK, api, names, newest, plays, project, step_of
from tests.ops.runs.test_two_hosts import stop_hearts
from tests.providers.test_kubernetes import Api
from tests.server.test_runs import follow
from tests.server.test_webhooks import ALERT, HOOKS, PUSH, alertmanager, github
from tests.support.folder_contents import folder
from tests.support.needs import POSTGRES, ROOT
from tests.support.server import Served, serving
from tests.support.situations import Project, document, until

__all__ = ["api", "project"]  # the fixtures

pytestmark = [ROOT.mark, POSTGRES.mark, pytest.mark.slow]


def served_by(project: Project, *says: str, token: str = "tests") -> AbstractContextManager[Served]:
    options = ("--manifests", str(project.folder), "--on", "kubernetes")
    return serving(project, *options, says=says, token=token)


def start(served: Served, **more: str) -> str:
    [run] = served.post("/runs", {"run": "work", **more})["runs"]
    return str(run["id"])


def jobs(api: Api) -> list[str]:
    return [str(one["metadata"]["name"]) for one in api("GET", JOBS)["items"]]


def test_a_run_of_a_server_is_a_job_and_is_followed_and_shown_there(project: Project, api: Api) -> None:
    plays(project, WORK, run="snapshot: {}")
    with served_by(project) as served:
        run = start(served)
        made = jobs(api)
        events = follow(served, run)
        logs = served.ask("GET", f"/api/v1/runs/{run}/logs?step=agent").raw
        files = {one["name"] for one in served.get(f"/runs/{run}/artifacts")["artifacts"]}
        until(lambda: jobs(api) == [], 30)

    assert made == [f"runner-{run}"]
    assert (events[0]["type"], events[-1]["type"], events[-1]["exit_code"]) == ("RunSubmitted", "RunEnded", 0)
    assert b"the agent works in a pod" in logs
    assert "output/report.md" in files
    assert not (project.home / "state" / "runs" / run).exists(), "it ran elsewhere"


def test_a_run_whose_job_waits_is_pending_for_every_replica_until_one_of_them_cancels_it(
    project: Project, api: Api
) -> None:
    plays(project, WORK)
    api("POST", "/double/unschedulable", "0/3 nodes are available: 3 Insufficient memory.")
    other = replace(project, home=folder(project.home / "other"))
    options = ("--manifests", str(project.folder), "--on", "kubernetes")
    # Whether it tells before its end that the Job is given up depends on when it looks.
    with serving(project, *options, says=None) as served, serving(other, token="others") as replica:
        run, again = (start(served, key="build-7") for _ in range(2))
        until(lambda: replica.get("/runs")["runs"][0]["waits"], 30)
        listed, shown = replica.get("/runs?state=pending")["runs"][0], replica.get(f"/runs/{run}")
        table = other.runner("runs", "list", "--all").out
        cancelled = replica.ask("POST", f"/api/v1/runs/{run}/cancel").status
        until(lambda: jobs(api) == [], 30)
        last = follow(replica, run)[-1]

    assert again == run
    assert (listed["id"], listed["state"], shown["status"]) == (run, "pending", "pending")
    assert [told for told in (listed["waits"], shown["waits"], table) if "no node has room for it" not in told] == []
    assert (cancelled, last["type"], last["exit_code"]) == (204, "RunEnded", 130)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        pytest.param({"RUNNER_WORKER_IMAGE": ""}, "no image is named for the workers", id="worker image"),
        pytest.param({"RUNNER_ARTIFACTS": ""}, "no store of artifacts is named", id="artifacts"),
    ],
)
def test_a_server_whose_runs_can_be_no_jobs_does_not_start(
    project: Project, setting: dict[str, str], words: str
) -> None:
    plays(project, WORK)
    project.env |= setting

    done = project.runner("serve", "--manifests", str(project.folder), "--on", "kubernetes")

    assert (done.code, done.errors) == (2, ["job.unfit"]), done.err
    assert words in done.err


@pytest.mark.nightly
def test_a_message_of_a_webhook_makes_a_job(project: Project, api: Api) -> None:
    project.env["HUB"] = "it is a secret"
    plays(project, "echo for $RUNNER_TASK_BRANCH", workspace="repo_source: {type: none}")
    project.add(HOOKS.split("---")[0])
    with served_by(project) as served:
        assert github(served, PUSH, "push").json["accepted"] == 1
        until(lambda: served.get("/runs")["runs"] != [], 60)
        run = served.get("/runs")["runs"][0]["id"]
        made = jobs(api)
        last = follow(served, run)[-1]
        logs = served.ask("GET", f"/api/v1/runs/{run}/logs?step=agent").raw
        until(lambda: jobs(api) == [], 30)

    assert (made, last["exit_code"]) == ([f"runner-{run}"], 0)
    assert b"for next" in logs


@pytest.mark.nightly
def test_an_alert_makes_a_job_which_gets_its_incident(project: Project, api: Api) -> None:
    project.env["HUB"] = "it is a secret"
    work = 'cat /incident/incident.json; echo because > "$RUNNER_OUTPUT/report.md"'
    plays(project, work, workspace="repo_source: {type: none}")
    project.add(HOOKS.split("---")[2])
    (project.folder / "example").mkdir()
    (project.folder / "example" / "incident.json").write_text("{}")
    with served_by(project) as served:
        assert alertmanager(served, ALERT).json["accepted"] == 1
        until(lambda: served.get("/runs")["runs"] != [], 60)
        run = served.get("/runs")["runs"][0]["id"]
        last = follow(served, run)[-1]
        logs = served.ask("GET", f"/api/v1/runs/{run}/logs?step=agent").raw
        until(lambda: jobs(api) == [], 30)
        reports = [*project.home.rglob("incidents/page-*/output/report.md")]

    assert last["exit_code"] == 0
    assert ALERT["fingerprint"].encode() in logs
    assert [report.read_text() for report in reports] == ["because\n"]


@pytest.mark.nightly
def test_a_job_goes_on_when_its_server_ends_and_the_next_one_shows_it(project: Project, api: Api) -> None:
    """A run that needs it has no Job yet: nobody would make one, so it ends as skipped."""
    plays(project, "sleep 8; echo done")
    project.add(document("IncidentRun", "next", "agent_type: worker\nneeds: [work]"))
    with served_by(project) as served:
        run, after = (one["id"] for one in served.post("/runs", {})["runs"])
        until(lambda: step_of(project, "agent") == "running", 60)
    with served_by(project, token="others") as served:
        events = follow(served, run)
        skipped = served.get(f"/runs/{after}")

    assert (events[-1]["type"], events[-1]["exit_code"]) == ("RunEnded", 0)
    assert (skipped["status"], skipped["outcome"]["message"]) == ("skipped", "who would have made its Job has ended")
    api("DELETE", f"{JOBS}/runner-{run}")  # nobody followed it to its end: else it goes after an hour


@pytest.mark.nightly
def test_a_run_whose_worker_dies_is_ended_by_its_server(project: Project, api: Api) -> None:
    plays(project, "sleep 300")
    with served_by(project, "job.lost") as served:
        run = start(served)
        until(lambda: step_of(project, "agent") == "running", 60)
        [pod] = [name for name in names(api, "pods") if name.startswith(f"runner-{run}-") and len(name) == 25]
        api("POST", "/double/kill", pod)
        stop_hearts(project)
        until(lambda: newest(project)["status"] == "unknown", 60)
        shown = served.get(f"/runs/{run}")["status"]
        api("DELETE", f"{JOBS}/runner-{run}")

    assert shown == "unknown"
