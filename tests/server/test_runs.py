"""Runs over HTTP, by the real server: started, followed and ended."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from runner.ops.host.tokens import create_token
from tests.support.server import Served, serving
from tests.support.situations import Project, until


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
    assert served.get(f"/runs/{run['id']}")["status"] == "succeeded"
    assert "SUCCEEDED" in served.ask("GET", f"/api/v1/runs/{run['id']}/report").raw.decode()
    [listed] = served.get("/runs?state=succeeded&name=w*")["runs"]
    assert (listed["id"], listed["exit_code"]) == (run["id"], 0)
    assert served.get("/runs?state=failed") == {"runs": [], "next": None}
    assert served.refused("POST", f"/runs/{run['id']}/cancel") == (409, "run.elsewhere")


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
