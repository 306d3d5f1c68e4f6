"""Runs over HTTP, by the real server: started, followed and ended."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server import Served, create_token, serving
from tests.support.situations import Project, document, until


@pytest.fixture
def served(project: Project) -> Iterator[Served]:
    project.script("echo ran >file")
    with serving(project, "--manifests", str(project.folder)) as server:
        yield server


def follow(served: Served, run: str, after: int = 0) -> list[dict[str, Any]]:
    """The events of a run to its end, as its stream tells them."""
    answer = served.ask("GET", f"/api/v1/runs/{run}/events", headers={"Last-Event-ID": str(after)})
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    frames = [frame.split("\n") for frame in answer.raw.decode().split("\n\n") if frame and not frame.startswith(":")]
    events: list[dict[str, Any]] = [json.loads(data.removeprefix("data: ")) for _, _, data in frames]
    assert [(f"id: {event['seq']}", f"event: {event['type']}") for event in events] == [(a, b) for a, b, _ in frames]
    return events


def test_a_run_is_started_followed_and_shown(served: Served) -> None:
    answer = served.ask("POST", "/api/v1/runs", {"run": "work"})
    [run] = answer.json["runs"]
    assert (answer.status, run["name"], run["attached"]) == (202, "work", False)
    assert answer.headers["location"] == f"/api/v1/runs/{run['id']}"

    events = follow(served, run["id"])

    assert (events[0]["type"], events[-1]["type"]) == ("RunStarted", "RunEnded")
    assert [event["seq"] for event in events] == [*range(1, len(events) + 1)]
    assert follow(served, run["id"], len(events) - 2) == events[-2:]
    assert follow(served, run["id"], len(events)) == []  # as a client asks that has heard of the end
    assert follow(served, run["id"], len(events) + 1) == events
    assert served.get(f"/runs/{run['id']}")["status"] == "succeeded"
    assert "SUCCEEDED" in served.ask("GET", f"/api/v1/runs/{run['id']}/report").raw.decode()
    [listed] = served.get("/runs?state=succeeded&name=w*")["runs"]
    assert (listed["id"], listed["exit_code"]) == (run["id"], 0)
    assert served.get("/runs?state=failed") == {"runs": [], "next": None}
    assert served.refused("POST", f"/runs/{run['id']}/cancel") == (409, "run.elsewhere")


def test_no_answer_shows_a_secret_of_a_run(project: Project) -> None:
    token = "npm_A8s7df6A9s8d7f6as8d7fQ"
    project.env["CI_TOKEN"] = token
    project.script(
        """
        echo "plain $TOKEN"; printf %s "$TOKEN" | base64 >&2; echo "a$TOKEN" >file; echo "$TOKEN" >$RUNNER_OUTPUT/r.md
        echo "error of $TOKEN" >&2; exit 3
        """,
        agent="secrets: [{name: TOKEN, from: {env: CI_TOKEN}, steps: [agent]}]",
    )
    with serving(project, "--manifests", str(project.folder), "--listen", "127.0.0.1:0") as served:
        id = served.post("/runs", {})["runs"][0]["id"]
        raw = served.ask("GET", f"/api/v1/runs/{id}/events").raw
        names = [one["name"] for one in served.get(f"/runs/{id}/artifacts")["artifacts"]]
        paths = ("", "/logs", "/report", "/artifacts", *(f"/artifacts/{name}" for name in names))
        shown = {path: served.ask("GET", f"/api/v1/runs/{id}{path}") for path in paths}

    assert b"plain [redacted:TOKEN]\n" in shown["/logs"].raw
    assert {one.status for one in shown.values()} == {200}
    assert len(names) > 3
    for form in (token.encode(), base64.b64encode(token.encode())[:-4], token.encode().hex().encode()):
        assert form not in raw
        assert [path for path, one in shown.items() if form in one.raw] == []


def test_a_second_request_with_a_key_starts_nothing(project: Project) -> None:
    project.script("echo ran >file")
    with serving(project, "--manifests", str(project.folder), says=["run.attached"]) as served:
        [run] = served.post("/runs", {"key": "once"})["runs"]
        follow(served, run["id"])

        assert served.post("/runs", {"key": "once"})["runs"] == [{**run, "attached": True}]

        assert [one["id"] for one in served.get("/runs")["runs"]] == [run["id"]]


def test_what_cannot_be_run_is_refused_with_all_that_is_wrong(served: Served) -> None:
    assert served.refused("POST", "/runs", {"run": "wrok"})[0] == 400
    assert served.refused("POST", "/runs", {"task": {"branhc": "x"}})[0] == 400
    assert served.refused("GET", "/runs?state=odd") == (400, "server.request")
    assert served.refused("GET", "/runs/last") == (404, "store.unknown-run")
    served.project.edit("agent_type: worker", "agent_type: gone")
    answer = served.ask("POST", "/api/v1/runs", {})
    assert (answer.status, answer.json["errors"][0]["code"]) == (400, "manifest.unknown-reference")
    assert served.get("/runs") == {"runs": [], "next": None}


BODY = {
    "agent.runner.yaml": document(
        "AgentType", "worker", "agent: script\nscript: {path: do.sh}\nworkspace: {enabled: true}"
    ),
    "run.runner.yaml": document("IncidentRun", "sent", "agent_type: worker"),
    "do.sh": "echo sent; echo new >file",
}
HOST = """
agent: script
script: {path: do.sh}
secrets: [{name: A, from: {command: [touch, RAN]}, steps: [agent]}]
workspace: {enabled: true, repo_source: {type: local, path: PLACE}, toolchains: [/etc]}
"""


def test_manifests_of_a_request_run_without_anything_of_the_host(served: Served) -> None:
    sent = {"manifests": BODY}
    [run] = served.post("/runs", sent)["runs"]
    assert follow(served, run["id"])[-1]["outcome"]["status"] == "succeeded"
    assert b"sent\n" in served.ask("GET", f"/api/v1/runs/{run['id']}/logs?step=agent").raw
    names = {one["name"]: one["bytes"] for one in served.get(f"/runs/{run['id']}/artifacts")["artifacts"]}
    patch = served.ask("GET", f"/api/v1/runs/{run['id']}/artifacts/work.patch")
    assert (len(patch.raw), patch.headers["content-disposition"]) == (
        names["work.patch"],
        "attachment; filename*=UTF-8''work.patch",
    )
    for name in ("../../state.db", "%2e%2e/%2e%2e/state.db", "nothing", "logs", "%00", "/etc/passwd"):
        assert served.refused("GET", f"/runs/{run['id']}/artifacts/{name}") == (404, "store.unknown-run")

    mark = served.project.home / "ran"
    host = HOST.replace("PLACE", str(served.project.folder)).replace("RAN", str(mark))
    answer = served.ask(
        "POST", "/api/v1/runs", {"manifests": BODY | {"agent.runner.yaml": document("AgentType", "worker", host)}}
    )
    assert (answer.status, {one["code"] for one in answer.json["errors"]}) == (400, {"policy.untrusted"})
    assert {one["at"].rpartition(":")[0] for one in answer.json["errors"]} == {
        "agent.runner.yaml:7",
        "agent.runner.yaml:8",
    }
    assert not mark.exists()
    for name in ("../a.yaml", "/a.yaml", ".git/config", "a/./b", "a" * 200, "a\0b", ""):
        assert served.refused("POST", "/runs", {"manifests": {name: ""}}) == (400, "server.request")
    assert served.refused("POST", "/runs", {"manifests": {"a": "", "a/b": ""}}) == (400, "server.request")
    assert served.refused("POST", "/runs", {"manifests": {f"{n}": "" for n in range(201)}}) == (400, "server.request")
    ours = create_token(served.project.settings(), "default", ("project:default",))
    for path in ("/runs", "/plans"):
        assert served.refused("POST", path, sent, token=ours) == (403, "server.scope")


def test_a_plan_is_shown_and_then_carried_out_as_it_is(served: Served) -> None:
    plan = served.post("/plans")
    assert [run["name"] for run in plan["plan"]["runs"]] == ["work"]
    assert (
        served.ask("POST", "/api/v1/plans?format=text", {}).raw.decode().startswith(f"plan work  {plan['digest'][:19]}")
    )
    page = served.ask("POST", "/api/v1/plans?format=html", {})
    assert (page.headers["content-type"], page.raw[:15]) == ("text/html; charset=utf-8", b"<!DOCTYPE html>")
    assert served.get("/runs") == {"runs": [], "next": None}

    [run] = served.post("/runs", {"plan": plan["id"], "key": "one"})["runs"]

    assert served.get(f"/runs/{run['id']}")["plan"] == plan["digest"]
    assert served.refused("POST", "/runs", {"plan": plan["id"], "run": "work"}) == (400, "server.request")
    for id in ("0" * 32, "../state", ""):
        assert served.refused("POST", "/runs", {"plan": id}) == (404, "server.unknown-plan")
    served.project.edit("path: agent.sh", "path: other.sh")
    assert served.refused("POST", "/runs", {"plan": plan["id"]}) == (400, "plan.stale")


def test_a_token_of_a_project_starts_what_the_server_has_for_it(served: Served) -> None:
    served.project.script("echo ran >file", run="project: shop")
    served.project.add(
        document("Project", "shop", "workspace_isolation: true"), document("IncidentRun", "other", "agent_type: worker")
    )
    ours, reading = (
        create_token(served.project.settings(), n, (f"project:{s}",)) for n, s in (("a", "shop"), ("b", "shop:ro"))
    )
    asked = {"run": "work"}
    assert served.refused("POST", "/runs", {}, token=ours) == (403, "server.scope")
    assert served.refused("POST", "/runs", {"run": "other"}, token=ours) == (403, "server.scope")
    elsewhere = asked | {"task": {"repository_url": "https://git.example.org/secret"}}
    assert served.refused("POST", "/runs", elsewhere, token=ours) == (403, "server.scope")
    assert served.post("/plans", asked, token=reading)["missing"] == []
    assert served.refused("POST", "/runs", asked, token=reading) == (403, "server.scope")
    [run] = served.post("/runs", asked, token=ours)["runs"]
    assert follow(served, run["id"])[-1]["exit_code"] == 0
    assert [one["name"] for one in served.get("/projects", token=reading)["projects"]] == ["shop"]
    assert served.get("/projects/shop", token=reading)["workspace_isolation"] is True
    assert served.refused("GET", "/projects/till", token=reading) == (404, "store.unknown-project")


def test_a_token_of_a_project_sees_the_runs_of_its_project_only(served: Served) -> None:
    served.project.script("echo ran >file", run="project: shop")
    served.project.add(document("Project", "shop", "workspace_isolation: true"))
    [run] = served.post("/runs", {"run": "work"})["runs"]
    follow(served, run["id"])
    ours, theirs, reading = (
        create_token(served.project.settings(), scope.replace(":", "-"), (f"project:{scope}",))
        for scope in ("shop", "till", "shop:ro")
    )

    assert [one["project"] for one in served.get("/runs", token=ours)["runs"]] == ["shop"]
    assert served.get("/runs?project=till")["runs"] == served.get("/runs", token=theirs)["runs"] == []
    assert served.get("/runs?project=shop", token=theirs)["runs"] == []
    assert served.get(f"/runs/{run['id']}", token=reading)["status"] == "succeeded"
    for path in ("", "/report", "/events"):
        assert served.refused("GET", f"/runs/{run['id']}{path}", token=theirs) == (404, "store.unknown-run")
    assert served.refused("POST", f"/runs/{run['id']}/cancel", token=reading) == (403, "server.scope")
    assert served.refused("POST", f"/runs/{run['id']}/cancel", token=ours) == (409, "run.elsewhere")


def test_a_run_that_is_cancelled_saves_what_it_has(project: Project) -> None:
    project.script("echo begun >file; sleep 300")
    with serving(project, "--manifests", str(project.folder)) as served:
        [run] = served.post("/runs")["runs"]
        until(lambda: any(project.home.glob("state/projects/*/workspaces/*/file")))
        other = create_token(project.settings(), "shop", ("project:shop",))
        assert served.refused("POST", f"/runs/{run['id']}/cancel", token=other) == (404, "store.unknown-run")
        assert served.ask("POST", f"/api/v1/runs/{run['id']}/cancel").status == 204

        assert follow(served, run["id"])[-1]["exit_code"] == 130

        record = served.get(f"/runs/{run['id']}")
        assert (record["status"], record["saved_work"]["changed"]) == ("cancelled", 1)


def test_a_server_that_is_told_to_end_ends_its_runs_in_order_and_its_streams(project: Project) -> None:
    project.script("echo begun >file; sleep 300")
    with serving(project, "--manifests", str(project.folder)) as served:
        [run] = served.post("/runs")["runs"]
        until(lambda: any(project.home.glob("state/projects/*/workspaces/*/file")))
        stream = served.send("GET", f"/api/v1/runs/{run['id']}/events")
        response = stream.getresponse()
        served.process.send_signal(signal.SIGTERM)
        assert response.read().endswith(b"event: bye\ndata: {}\n\n")
        stream.close()
    assert project.record()["status"] == "cancelled"


def test_a_server_without_manifests_starts_no_runs(project: Project) -> None:
    with serving(project) as served:
        assert served.refused("POST", "/runs", {}) == (404, "server.no-manifests")
