"""Sessions over HTTP, by the real server: the workspace of each, its tools, and its end."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import dockerd
from tests.support.faulty_docker import Refuses, faulty
from tests.support.needs import MEMORY
from tests.support.server import Served, create_token, serving
from tests.support.situations import Project, until


def active(served: Served, id: str) -> Any:
    """The session once it is active."""
    until(lambda: served.get(f"/sessions/{id}")["status"] == "active", seconds=60)
    return served.get(f"/sessions/{id}")


def seconds_to_have(served: Served, workspace: str) -> float:
    """From when a workspace was wanted until it was ready, by its journal."""
    [file] = served.project.home.glob(f"state/workspaces/{workspace}/events.jsonl")
    events = [*map(json.loads, file.read_text().splitlines())]
    begun = next(event["at"] for event in events if event["type"] == "WorkspaceRequested")
    ready = next(event["at"] for event in events if event.get("status") == "ready")
    return float(ready - begun) / 1e6


def agent_type(served: Served, name: str = "worker", **config: Any) -> None:
    served.post("/agent-types", {"name": name, "workspace": {"enabled": True, **config}})


@MEMORY.mark
@pytest.mark.scenario("CFG-01")
@pytest.mark.scenario("CFG-05")
@pytest.mark.scenario("CFG-06", only="http")
@pytest.mark.scenario("CFG-07")
@pytest.mark.scenario("CFG-08")
@pytest.mark.scenario("CFG-19")
@pytest.mark.scenario("LIF-01", only="http")
def test_a_session_has_the_workspace_of_its_agent_type_from_its_beginning_to_its_end(served: Served) -> None:
    waits = "until [ -e go ]; do sleep 0.1; done; echo set >up"
    agent_type(served, tools=["bash", "read"], resource_limits={"cpu": "500m"}, setup_commands=[waits])
    task = {"base_branch": "main", "pull_request_number": 42}

    begun = served.ask("POST", "/api/v1/sessions", {"agent_type": "worker", "task": task})

    assert (begun.status, begun.json["status"]) == (202, "provisioning")
    id = begun.json["id"]
    assert begun.headers["location"] == f"/api/v1/sessions/{id}"
    assert served.refused("POST", f"/sessions/{id}/tools/bash", {"command": "true"}) == (409, "session.state")
    config = "/api/v1/agent-types/worker/workspace-config"
    etag = served.ask("GET", config).headers["etag"]
    served.ask("PUT", config, {"enabled": False}, headers={"If-Match": etag})
    tree = served.project.home / "state" / "projects" / "default" / "workspaces" / begun.json["workspace_id"]
    until(tree.exists)
    assert served.get(f"/sessions/{id}")["status"] == "provisioning"
    (tree / "go").touch()
    session = active(served, id)
    workspace = served.get(f"/workspaces/{session['workspace_id']}")
    assert (workspace["agent_session_id"], workspace["status"]) == (id, "ready")
    assert (workspace["container_type"], workspace["deployment_mode"]) == ("agent_workspace", "self_hosted")
    assert workspace["resource_limits"] | {"disk": 0} == {"cpu": 0.5, "memory": 4 << 30, "disk": 0, "pids": 512}
    told = served.post(f"/sessions/{id}/tools/bash", {"command": "cat up /run/runner/task.json"})["stdout"]
    assert told.startswith("set\n")
    assert '"pull_request_number": 42' in told
    answer = served.ask("POST", f"/api/v1/sessions/{id}/tools/grep", {"pattern": "x"})
    assert (answer.status, answer.json["detail"]) == (403, "Tool 'grep' is not enabled for this agent type")

    ended = served.ask("DELETE", f"/api/v1/sessions/{id}").json

    assert (ended["status"], ended["workspace_id"]) == ("ended", None)
    assert served.get("/workspaces")["workspaces"] == []
    assert served.refused("POST", f"/sessions/{id}/tools/bash", {"command": "true"}) == (409, "session.state")
    assert [one["id"] for one in served.get("/sessions?status=ended")["sessions"]] == [id]
    later = served.post("/sessions", {"agent_type": "worker"})
    assert (later["status"], later["workspace_id"]) == ("active", None)


@pytest.mark.scenario("CFG-02")
def test_an_agent_type_without_a_workspace_has_sessions_and_no_tools(served: Served) -> None:
    served.post("/agent-types", {"name": "chat"})

    session = served.post("/sessions", {"agent_type": "chat"})

    assert (session["status"], session["workspace_id"], session["degraded"]) == ("active", None, False)
    tool = f"/sessions/{session['id']}/tools/bash"
    assert served.refused("POST", tool, {"command": "true"}) == (404, "workspace.disabled")
    assert served.get("/workspaces")["workspaces"] == []
    other = create_token(served.project.settings(), "shop", ("project:shop",))
    assert served.refused("GET", f"/sessions/{session['id']}", token=other) == (404, "session.unknown")
    assert served.get("/sessions", token=other)["sessions"] == []
    assert served.refused("POST", "/sessions", {"agent_type": "chat"}, token=other) == (403, "server.scope")


@pytest.mark.scenario("CFG-09")
def test_what_cannot_be_provisioned_is_tried_on_the_next_provider_and_then_goes_on_without(
    project: Project, tmp_path: Path
) -> None:
    """Of a daemon that makes no container, a repository that is not there, and a setup that fails."""
    with faulty(Path(dockerd.host().removeprefix("unix://")), tmp_path / "docker") as daemon:
        daemon.faults["POST /containers/create"] = [Refuses(), None, None, Refuses(), None]
        project.env |= {"DOCKER_HOST": daemon.host, "WORKSPACE_PROVIDERS": "gvisor,docker"}
        once = "session.not-provisioned"
        says = [once, once, once, "session.degraded", once, once, "session.degraded"]
        with serving(project, says=says) as served:
            agent_type(served, "set-up", base_image=dockerd.IMAGE, setup_commands=["echo set >up"])
            agent_type(served, "clone", base_image=dockerd.IMAGE)
            failing = {"setup_commands": ["exit 3"], "setup": {"on_failure": "fail"}}
            agent_type(served, "fails", base_image=dockerd.IMAGE, **failing)

            first = active(served, served.post("/sessions", {"agent_type": "set-up"})["id"])
            assert (first["degraded"], len(first["warnings"])) == (False, 1)
            assert "could not be made on `gvisor`" in first["warnings"][0]["message"]
            assert served.get(f"/workspaces/{first['workspace_id']}")["provider"] == "docker"
            assert served.post(f"/sessions/{first['id']}/tools/read", {"file_path": "up"})["content"] == "set\n"
            for name, task, why in (
                ("clone", {"repository_url": "https://127.0.0.1:1/none.git"}, "127.0.0.1"),
                ("fails", {}, "setup command 1 of 1 exited 3"),
            ):
                session = active(served, served.post("/sessions", {"agent_type": name, "task": task})["id"])
                assert (session["degraded"], session["workspace_id"]) == (True, None)
                assert (len(session["warnings"]), why in session["warnings"][1]["message"]) == (2, True)
                answer = served.ask("POST", f"/api/v1/sessions/{session['id']}/tools/read", {"file_path": "up"})
                assert (answer.status, answer.code) == (409, "session.degraded")
                assert why in answer.json["detail"]
            assert [one["id"] for one in served.get("/workspaces")["workspaces"]] == [first["workspace_id"]]
            served.ask("DELETE", f"/api/v1/sessions/{first['id']}")


def test_a_workspace_is_attached_to_one_session_at_a_time(served: Served) -> None:
    agent_type(served, tools=["read"])
    ids = [served.post("/sessions", {"agent_type": "worker"})["id"] for _ in range(2)]
    first, second = (active(served, id) for id in ids)
    shared = served.post("/workspaces")["id"]
    attach = f"/workspaces/{shared}/attach"
    assert served.refused("POST", attach, {"session_id": ids[0]}) == (409, "session.state")
    for session in (first, second):
        served.post(f"/workspaces/{session['workspace_id']}/detach")
    assert served.refused("POST", f"/sessions/{ids[0]}/tools/read", {"file_path": "."}) == (409, "session.degraded")

    assert served.post(attach, {"session_id": ids[0]})["agent_session_id"] == ids[0]

    answer = served.ask("POST", f"/api/v1{attach}", {"session_id": ids[1]})
    assert (answer.status, answer.code, ids[0] in answer.json["detail"]) == (409, "workspace.attached", True)
    assert served.post(f"/sessions/{ids[0]}/tools/read", {"file_path": "."})["content"] == ".git/\n"
    assert served.refused("POST", f"/sessions/{ids[0]}/tools/bash", {"command": "id"}) == (403, "tool.not-enabled")
    tree = served.project.home / "state" / "projects" / "default" / "workspaces" / shared
    assert served.get(f"/workspaces/find?path={tree}/.git")["id"] == shared
    served.ask("DELETE", f"/api/v1/sessions/{ids[0]}")
    assert served.get(f"/workspaces/{shared}")["agent_session_id"] is None
    assert served.post(attach, {"session_id": ids[1]})["agent_session_id"] == ids[1]
    for one in served.get("/workspaces")["workspaces"]:
        served.ask("DELETE", f"/api/v1/workspaces/{one['id']}")


@pytest.mark.scenario("CFG-10", only="http")
@pytest.mark.scenario("LIF-03", only="http")
@pytest.mark.scenario("LIF-04", only="http")
@pytest.mark.scenario("LIF-19")
@pytest.mark.scenario("LIF-21", only="http")
def test_warm_workspaces_are_there_when_the_server_starts_and_as_many_as_agent_types_say(project: Project) -> None:
    project.env |= {"DOCKER_HOST": dockerd.host()}

    def ready() -> int:
        """The slots that there are, if all of them are ready."""
        [pool] = served.get("/pools")["pools"]
        return sum(pool["slots"].values()) if sum(pool["slots"].values()) == pool["slots"]["ready"] else -1

    with serving(project) as served:
        assert served.refused(
            "POST", "/agent-types", {"name": "x", "workspace": {"enabled": True, "warm_pool": {"size": 1}}}
        ) == (400, "pool.none")
        agent_type(served, base_image=dockerd.IMAGE, provider="docker", warm_pool={"size": 1})
        until(lambda: ready() == 1)
    with serving(project, token="second") as served:
        until(lambda: ready() == 1)
        session = active(served, served.post("/sessions", {"agent_type": "worker"})["id"])
        assert served.get("/pools")["counts"] == {"hit": 1}
        assert served.post(f"/sessions/{session['id']}/tools/bash", {"command": "cat /run/runner/task.json; echo >x"})
        assert served.post(f"/sessions/{session['id']}/tools/glob", {"pattern": "x"})["matches"] == ["x"]
        until(lambda: ready() == 1)
        took = [seconds_to_have(served, session["workspace_id"])]
        while min(took) > 0.15 and len(took) < 10:  # a busy machine may take longer, now and then
            until(lambda: ready() == 1)
            more = active(served, served.post("/sessions", {"agent_type": "worker"})["id"])
            took.append(seconds_to_have(served, more["workspace_id"]))
            served.ask("DELETE", f"/api/v1/sessions/{more['id']}?discard=true")
        hits = len(took)
        assert min(took) <= 0.15, took
        until(lambda: ready() == 1)
        path = "/api/v1/agent-types/worker/workspace-config"
        config = served.ask("GET", path)
        for size in (2, 0):
            etag = {"If-Match": served.ask("GET", path).headers["etag"]}
            served.ask("PUT", path, {**config.json, "warm_pool": {"size": size}}, headers=etag)
            until(lambda size=size: ready() == size)  # type: ignore[misc]
        other = served.post("/workspaces", {"provider": "docker", "image": dockerd.IMAGE})["id"]
        assert served.get("/pools")["counts"] == {"hit": hits, "empty": 1}
        served.ask("DELETE", f"/api/v1/workspaces/{other}")
        served.ask("DELETE", f"/api/v1/sessions/{session['id']}?discard=true")


@pytest.mark.nightly
def test_of_200_sessions_at_once_the_first_10_get_workspaces_also_when_the_server_is_killed(project: Project) -> None:
    with serving(project, ends=-signal.SIGKILL) as served:
        agent_type(served, setup_commands=["sleep 20"])
        with ThreadPoolExecutor(190) as clients:
            ask = partial(served.ask, "POST", "/api/v1/sessions")
            answers = [*clients.map(ask, [{"agent_type": "worker"}] * 200)]
        refused = [answer for answer in answers if answer.status != 202]
        assert {(answer.status, answer.code) for answer in refused} == {(429, "workspace.limit")}
        assert "`WORKSPACE_MAX` is 10 (sessions " in refused[-1].json["detail"]
        begun = [answer.json["id"] for answer in answers if answer.status == 202]
        assert len(begun) == 10
        until(lambda: len(served.get("/workspaces?status=provisioning")["workspaces"]) == 10)
        served.process.kill()
        served.process.wait()
    with serving(project, token="second", says=["lease.taken-over"] * 10) as served:
        sessions = [active(served, id) for id in begun]
        assert {session["degraded"] for session in sessions} == {False}
        rows = served.get("/workspaces")["workspaces"]
        assert {row["id"] for row in rows} == {session["workspace_id"] for session in sessions}
        assert served.refused("POST", "/sessions", {"agent_type": "worker"}) == (429, "workspace.limit")
        assert len(served.get("/sessions")["sessions"]) == 10
        for id in begun:
            assert served.ask("DELETE", f"/api/v1/sessions/{id}").status == 200
        assert served.get("/workspaces")["workspaces"] == []
    assert project.json("lease", "list") == []
    assert [*(project.home / "state" / "sessions").iterdir()] == []
