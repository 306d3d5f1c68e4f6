"""Messages of services to the real server, in the form that the services document."""

from __future__ import annotations

import copy
import hmac
import json
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_runs import follow
from tests.support.needs import program
from tests.support.server import Answer, Served, serving
from tests.support.situations import Project, until

URL = "https://github.example/octo/shop"
SHA = "6dcb09b5b57875f334f61aebed695e2e4193db5e"
REPO = {"id": 35129377, "full_name": "octo/shop", "clone_url": f"{URL}.git", "html_url": URL, "ssh_url": ""}
PULL = {
    "action": "opened",
    "number": 2,
    "pull_request": {
        "head": {"ref": "changes", "sha": SHA, "repo": REPO},
        "base": {"ref": "main", "sha": "f95f852bd8fca8fcc58a9a2d6c842781e32a215e", "repo": REPO},
    },
    "repository": REPO,
    "sender": {"login": "octocat"},
}
PUSH = {"ref": "refs/heads/next", "after": SHA, "before": "0" * 40, "repository": REPO, "commits": []}
PROJECT = {"id": 1, "git_http_url": f"{URL}.git", "git_ssh_url": "git@github.example:octo/shop.git", "web_url": URL}
MERGE = {
    "object_kind": "merge_request",
    "project": PROJECT,
    "object_attributes": {
        "iid": 7,
        "action": "open",
        "source_branch": "changes",
        "target_branch": "main",
        "source_project_id": 1,
        "target_project_id": 1,
        "last_commit": {"id": SHA},
    },
}
ALERT = {
    "status": "firing",
    "labels": {
        "alertname": "KubePodCrashLooping",
        "namespace": "payments",
        "pod": "checkout-7",
        "severity": "critical",
    },
    "annotations": {"summary": "checkout restarts"},
    "startsAt": "2026-11-21T02:41:00Z",
    "endsAt": "0001-01-01T00:00:00Z",
    "fingerprint": "c9c2f1e0a7b3d4e5",
}
ALERTS = {"version": "4", "groupKey": "{}:{}", "status": "firing", "receiver": "runner", "alerts": [ALERT]}

HOOKS = f"""
apiVersion: runner/v1
kind: IncidentRun
metadata: {{name: review}}
spec:
  agent_type: worker
  task: {{repository_url: "{URL}"}}
  webhook: {{from: github, secret: {{env: HUB}}, events: [push, pull_request.opened]}}
---
apiVersion: runner/v1
kind: IncidentRun
metadata: {{name: merge}}
spec:
  agent_type: worker
  task: {{repository_url: "{URL}"}}
  webhook: {{from: gitlab, secret: {{env: HUB}}, events: [merge_request]}}
---
apiVersion: runner/v1
kind: IncidentRun
metadata: {{name: page}}
spec:
  agent_type: worker
  incident: {{directory: example}}
  webhook: {{from: alertmanager, secret: {{env: HUB}}, labels: {{severity: critical}}, per_hour: 3}}
"""


@pytest.fixture
def served(project: Project) -> Iterator[Served]:
    project.env["HUB"] = "it is a secret"
    project.script(
        "cat /incident/incident.json 2>/dev/null; "
        "echo $RUNNER_TASK_REPOSITORY_URL $RUNNER_TASK_BRANCH $RUNNER_TASK_COMMIT"
        " $RUNNER_TASK_PULL_REQUEST_NUMBER; true >file",
        workspace="repo_source: {type: none}",
    )
    project.add(HOOKS)
    (project.folder / "example").mkdir()
    (project.folder / "example" / "incident.json").write_text("{}")
    with serving(project, "--manifests", str(project.folder)) as server:
        yield server


def github(served: Served, payload: object, event: str = "pull_request", secret: str = "it is a secret") -> Answer:
    body = json.dumps(payload).encode()
    signature = "sha256=" + hmac.new(secret.encode(), body, sha256).hexdigest()
    headers = {"X-GitHub-Event": event, "X-Hub-Signature-256": signature, "X-GitHub-Delivery": "72d3162e"}
    return served.ask("POST", "/api/v1/webhooks/review", body, token="", headers=headers)


def gitlab(served: Served, payload: object) -> Answer:
    headers = {"X-Gitlab-Event": "Merge Request Hook", "X-Gitlab-Token": "it is a secret"}
    return served.ask("POST", "/api/v1/webhooks/merge", payload, token="", headers=headers)


def alertmanager(served: Served, *alerts: object) -> Answer:
    return served.ask("POST", "/api/v1/webhooks/page", {**ALERTS, "alerts": alerts}, token="it is a secret")


def ran(served: Served, name: str, count: int = 1) -> str:
    """What the agent of the newest run printed, once there are so many of them."""
    until(lambda: len(served.get(f"/runs?name={name}")["runs"]) == count)
    run = served.get(f"/runs?name={name}")["runs"][0]["id"]
    assert follow(served, run)[-1]["exit_code"] == 0
    return served.ask("GET", f"/api/v1/runs/{run}/logs?step=agent").raw.decode()


def changed(value: Any, *path: str, to: object) -> Any:
    copied = at = copy.deepcopy(value)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return copied


def test_a_pull_request_starts_its_run_once(served: Served) -> None:
    answer = github(served, PULL)
    assert (answer.status, answer.json) == (202, {"accepted": 1, "ignored": []})
    assert ran(served, "review").strip() == f"{URL} changes {SHA} 2"

    assert github(served, PULL).json == {"accepted": 0, "ignored": ["it was there before"]}
    assert github(served, PUSH, "push").json["accepted"] == 1
    assert ran(served, "review", 2).split()[1] == "next"
    assert gitlab(served, MERGE).json["accepted"] == 1
    assert ran(served, "merge").strip() == f"{URL} changes {SHA} 7"


def test_a_message_that_is_not_proved_or_not_for_the_run_starts_nothing(served: Served) -> None:
    fork = changed(PULL, "pull_request", "head", "repo", to={**REPO, "id": 5})
    other = changed(PULL, "repository", to={**REPO, "clone_url": f"{URL}-of-others.git", "html_url": ""})
    for payload, event in (
        (fork, "pull_request"),
        (other, "pull_request"),
        (changed(PULL, "action", to="closed"), "pull_request"),
        ({"zen": "Design for failure."}, "ping"),
        (changed(PUSH, "ref", to="refs/tags/v1"), "push"),
        (changed(PUSH, "after", to="0" * 40), "push"),
        ({}, "pull_request"),
        ({"pull_request": 7, "repository": [REPO]}, "pull_request"),
    ):
        answer = github(served, payload, event)
        assert (answer.status, answer.json["accepted"], len(answer.json["ignored"])) == (202, 0, 1), payload
    assert gitlab(served, changed(MERGE, "object_attributes", "source_project_id", to=9)).json["accepted"] == 0
    assert github(served, PULL, secret="another").code == "server.unauthorized"
    for name, headers in (("review", {}), ("review", {"X-Hub-Signature-256": "sha256=é"}), ("nothing", {})):
        path = f"/webhooks/{name}"
        assert served.refused("POST", path, PULL, headers=headers) == (401, "server.unauthorized")
    named = {"severity": "critical", "pod": "a;b", "namespace": "x"}
    assert alertmanager(served, {**ALERT, "labels": named}).json["accepted"] == 0

    assert served.get("/runs")["runs"] == []


def test_alerts_become_incidents_each_of_them_once_and_not_too_many(served: Served) -> None:
    calm = {**ALERT, "labels": {**ALERT["labels"], "severity": "warning"}, "fingerprint": "b"}
    answer = alertmanager(served, ALERT, calm, {**ALERT, "status": "resolved"})
    assert answer.json == {"accepted": 1, "ignored": ["an alert has other labels", "an alert is not firing"]}
    incident = json.loads(ran(served, "page").rpartition("}")[0] + "}")
    assert (incident["faultType"], incident["resource"]["name"]) == ("KubePodCrashLooping", "checkout-7")

    assert alertmanager(served, ALERT).json["accepted"] == 0
    again = {**ALERT, "startsAt": "2026-11-21T05:00:00Z"}
    assert alertmanager(served, again, {**ALERT, "fingerprint": "c"}).json["accepted"] == 2
    assert (alertmanager(served, {**ALERT, "fingerprint": "d"}).status) == 503
    ran(served, "page", 3)


def test_a_webhook_without_its_secret_is_refused_before_the_server_listens(project: Project) -> None:
    project.script("true")
    project.add(HOOKS)

    done = project.runner("serve", "--manifests", str(project.folder))

    assert (done.code, done.out) == (2, "")
    assert "error[secret.missing]" in done.err
    assert "variable `HUB` is not set" in done.err


THEIRS = "https://github.com/Codertocat/Hello-World"
EXAMPLES = "@octokit/webhooks-examples@7.6.1"


@pytest.fixture
def examples(request: pytest.FixtureRequest) -> list[tuple[str, dict[str, Any]]]:
    """Every message that GitHub has published as an example, with its event; installed once and kept."""
    program("npm").require()
    folder = Path(request.config.cache.mkdir("webhooks-examples"))
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    subprocess.run(["npm", "install", *quiet, "--prefix", str(folder), EXAMPLES], check=True)
    files = sorted(folder.glob("node_modules/@octokit/webhooks-examples/*/index.json"))
    assert files
    events = [event for file in files for event in json.loads(file.read_text())]
    return [(event["name"], payload) for event in events for payload in event["examples"]]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_each_message_that_github_has_published_is_answered_rightly(
    project: Project, examples: list[tuple[str, dict[str, Any]]]
) -> None:
    project.env["HUB"] = "it is a secret"
    project.script("true >file", workspace="repo_source: {type: none}")
    project.add(HOOKS.replace(URL, THEIRS))
    (project.folder / "example").mkdir()
    (project.folder / "example" / "incident.json").write_text("{}")
    wrong: list[tuple[str, object]] = []
    started = 0
    with serving(project, "--manifests", str(project.folder), "--rate", "10000") as served:
        for event, payload in examples:
            answer = github(served, payload, event)
            wanted = (payload.get("repository") or {}).get("clone_url") == f"{THEIRS}.git"
            match event, payload.get("action"):
                case "push", _:
                    wanted &= payload["ref"].startswith("refs/heads/") and not payload["deleted"]
                case "pull_request", "opened":
                    pull = payload["pull_request"]
                    wanted &= pull["head"]["repo"]["id"] == pull["base"]["repo"]["id"]
                case _:
                    wanted = False
            told = answer.json
            if answer.status != 202 or (told["accepted"] == 1) != wanted or bool(told["ignored"]) == wanted:
                wrong.append((event, told))
            started += told.get("accepted", 0)
    assert wrong == []
    assert len(examples) > 300
    assert started > 0
