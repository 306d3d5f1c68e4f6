"""Workspaces and their tools over HTTP, by the real server."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import dockerd
from tests.support.needs import MEMORY
from tests.support.server import Answer, Served, create_token, serving
from tests.support.situations import Project, git, until


@MEMORY.mark
@pytest.mark.scenario("LIF-08", only="http")
@pytest.mark.scenario("LIF-10", only="http")
@pytest.mark.scenario("LIF-11", only="http")
@pytest.mark.scenario("LIF-12", only="http")
@pytest.mark.scenario("LIF-15", only="http")
def test_the_life_of_a_workspace(served: Served) -> None:
    made = served.post("/workspaces")
    path = f"/workspaces/{made['id']}"
    assert (made["status"], made["provider"], made["lifecycle"], made["lease"]) == ("ready", "local", "ephemeral", None)
    assert made["resource_limits"] | {"disk": 0} == {"cpu": 2.0, "memory": 4 << 30, "disk": 0, "pids": 512}

    served.tool(made["id"], "write", file_path="kept", content="work\n")
    journal = served.project.home / "state" / "workspaces" / made["id"] / "events.jsonl"
    until(lambda: '"tool": "write", "outcome": "ok", ' in journal.read_text())
    assert '"by": "tests"' in journal.read_text()
    used = served.get(path)
    assert used["expires_at"] > made["expires_at"]
    assert used["last_used_at"] > made["last_used_at"]
    assert used["lease"]["state"] == "live"

    stopped = served.post(f"{path}/stop")
    assert (stopped["status"], stopped["lease"]) == ("stopped", None)
    assert stopped["last_used_at"] > used["last_used_at"]
    assert served.refused("POST", f"{path}/tools/read", {"file_path": "kept"}) == (409, "workspace.state")
    assert served.post(f"{path}/resume")["status"] == "ready"
    assert served.tool(made["id"], "read", file_path="kept")["content"] == "work\n"

    gone = json.loads(served.ask("DELETE", f"/api/v1{path}").raw)
    assert gone["changed_files"] == 1
    assert (Path(gone["saved_in"]) / "work.patch").read_text().endswith("+work\n")
    assert served.refused("GET", path) == (404, "store.unknown-workspace")
    assert served.refused("DELETE", path) == (404, "store.unknown-workspace")
    assert served.get("/workspaces") == {"workspaces": [], "next": None}


def test_a_snapshot_outlives_its_workspace_and_begins_another(served: Served) -> None:
    first = served.post("/workspaces", {"tools": ["read", "write", "bash"]})["id"]
    served.tool(first, "write", file_path="src/kept.txt", content="as it was")
    taken = served.post(f"/workspaces/{first}/snapshot")
    assert (taken["workspace_id"], taken["changed_files"]) == (first, 1)
    served.tool(first, "write", file_path="src/kept.txt", content="changed")
    served.tool(first, "write", file_path="later.txt", content="unsaved")
    assert served.get(f"/workspaces/{first}")["snapshot_id"] == taken["snapshot_id"]
    removed = served.ask("DELETE", f"/api/v1/workspaces/{first}").json
    assert removed["changed_files"] == 2, "what was written after the snapshot is saved too"

    for commit, content in ((taken["snapshot_id"], "as it was"), (removed["snapshot_id"], "changed")):
        second = served.post("/workspaces/from-snapshot", {"snapshot_id": commit})
        assert second["tools"] == ["read", "write", "bash"]
        assert served.tool(second["id"], "read", file_path="src/kept.txt")["content"] == content
        assert served.ask("DELETE", f"/api/v1/workspaces/{second['id']}?discard=true").status == 200

    body = {"snapshot_id": taken["snapshot_id"]}
    assert served.refused("POST", "/workspaces/from-snapshot", {"snapshot_id": "0" * 40})[1] == "store.unknown-snapshot"
    assert served.refused("POST", "/workspaces/from-snapshot", {"snapshot_id": "x"}) == (400, "server.request")
    other = create_token(served.project.settings(), "other", ("project:other",))
    assert served.refused("POST", "/workspaces/from-snapshot", body, token=other) == (404, "store.unknown-snapshot")


@pytest.mark.scenario("LIF-02", only="http")
def test_a_provider_that_is_named_is_the_only_one(project: Project) -> None:
    project.env |= {"DOCKER_HOST": dockerd.host()}
    with serving(project) as served:
        made = served.post("/workspaces", {"provider": "docker", "image": dockerd.IMAGE})
        assert (made["provider"], made["status"]) == ("docker", "ready")
        assert served.tool(made["id"], "bash", command="echo inside")["stdout"] == "inside\n"
        assert served.ask("DELETE", f"/api/v1/workspaces/{made['id']}").status == 200
        assert served.refused("POST", "/workspaces", {"provider": "firecracker"})[0] == 400
        assert served.refused("POST", "/workspaces", {"provider": "gvisor", "image": "absent:1"})[0] in (404, 503)
        assert served.get("/workspaces")["workspaces"] == []


def test_nothing_is_done_over_http_where_nothing_isolates_it(served: Served) -> None:
    assert served.refused("POST", "/workspaces", {"provider": "process"}) == (403, "policy.isolation")
    id = served.project.json("workspace", "create", "--provider", "process")["id"]

    assert served.refused("POST", f"/workspaces/{id}/tools/read", {"file_path": "."}) == (403, "policy.isolation")

    assert served.ask("DELETE", f"/api/v1/workspaces/{id}").status == 200


@pytest.mark.scenario("CFG-05", only="http")
def test_a_tool_that_is_not_in_the_list_is_refused_on_the_route(served: Served) -> None:
    id = served.post("/workspaces", {"tools": ["read", "grep"]})["id"]

    answer = served.ask("POST", f"/api/v1/workspaces/{id}/tools/bash", {"command": "touch ran"})

    assert (answer.status, answer.json["detail"]) == (403, "Tool 'bash' is not enabled for this agent type")
    assert served.tool(id, "read", file_path=".")["content"] == ".git/\n"
    assert served.refused("POST", "/workspaces", {"tools": ["bash", "ssh"]}) == (400, "tool.unknown")
    assert served.ask("DELETE", f"/api/v1/workspaces/{id}").status == 200


@pytest.mark.scenario("LIF-09", only="http")
def test_a_call_that_runs_when_its_workspace_is_destroyed_is_asked_to_end(served: Served) -> None:
    id = served.post("/workspaces")["id"]
    script = "trap 'echo told >told; exit 3' TERM; echo begun >begun; sleep 300 & wait"
    call = served.send("POST", f"/api/v1/workspaces/{id}/tools/bash", {"command": script})
    tree = served.project.home / "state" / "projects" / "default" / "workspaces" / id
    until((tree / "begun").exists)

    gone = served.ask("DELETE", f"/api/v1/workspaces/{id}").json

    answer = call.getresponse()
    assert (answer.status, json.loads(answer.read())["code"]) == (409, "tool.stopped")
    call.close()
    assert "+told\n" in (Path(gone["saved_in"]) / "work.patch").read_text()


SOCKETS = "find / '(' -path /proc -o -path /sys -o -path /usr ')' -prune -o -type s -print 2>/dev/null"


def test_a_workspace_does_not_reach_the_server_that_has_made_it(project: Project) -> None:
    with serving(project, "--listen", "127.0.0.1:0") as served:
        id = served.post("/workspaces")["id"]
        port = served.url.rpartition(":")[2]
        program = f"""import os, socket
for host in ("127.0.0.1", "::1", "0.0.0.0", "localhost", socket.gethostname()):
    try: socket.create_connection((host, {port}), 2); print("reaches", host)
    except OSError: pass
print(os.path.exists({str(project.home)!r}))
print([line.split()[-1] for line in open("/proc/net/unix") if "@" in line or "server" in line])
"""
        served.tool(id, "write", file_path="try.py", content=program)
        tried = served.tool(id, "bash", command=f"python3 try.py; env | grep -i -e proxy -e docker; {SOCKETS}")
        served.ask("DELETE", f"/api/v1/workspaces/{id}?discard=true")

    assert (tried["stdout"], tried["stderr"]) == ("False\n[]\n", "")


def test_calls_at_once_wait_for_each_other_and_are_all_answered_when_the_workspace_goes(served: Served) -> None:
    id = served.post("/workspaces")["id"]
    path = f"/api/v1/workspaces/{id}"
    served.tool(id, "write", file_path="file", content="end\n")

    def edit(number: int) -> Answer:
        body = {"file_path": "file", "old_string": "end\n", "new_string": f"{number}\nend\n"}
        return served.ask("POST", f"{path}/tools/edit", body)

    def write(number: int) -> Answer:
        return served.ask("POST", f"{path}/tools/write", {"file_path": f"w{number}", "content": f"{number}\n"})

    with ThreadPoolExecutor(12) as pool:
        assert {answer.status for answer in pool.map(edit, range(24))} == {200}
        content = served.tool(id, "read", file_path="file")["content"].split()
        assert sorted(content) == sorted([*map(str, range(24)), "end"])
        late = [pool.submit(write, number) for number in range(24)]
        gone = pool.submit(served.ask, "DELETE", path).result()
        statuses = [one.result().status for one in late]

    assert gone.status == 200
    assert {*statuses} <= {200, 404, 409}
    patch = (Path(gone.json["saved_in"]) / "work.patch").read_text()
    assert patch.count("+++ b/w") >= statuses.count(200)
    assert served.refused("GET", f"/workspaces/{id}") == (404, "store.unknown-workspace")


@pytest.mark.scenario("LIF-05", only="http")
def test_there_is_no_room_beyond_the_limit(project: Project) -> None:
    project.env["WORKSPACE_MAX"] = "1"
    with serving(project) as served:
        id = served.post("/workspaces")["id"]
        answer = served.ask("POST", "/api/v1/workspaces", {})
        assert (answer.status, answer.code) == (429, "workspace.limit")
        assert id in answer.json["hint"]
        served.ask("DELETE", f"/api/v1/workspaces/{id}")


@pytest.mark.scenario("LIF-13", only="http")
def test_an_expired_workspace_is_removed_while_the_server_runs(project: Project) -> None:
    project.env["WORKSPACE_TTL"] = "1s"
    id = project.json("workspace", "create")["id"]
    time.sleep(1.1)  # its time to live
    with serving(project, says=["workspace.expired"]) as served:
        until(lambda: served.ask("GET", f"/api/v1/workspaces/{id}").status == 404)
        time.sleep(1)  # it is told once all of the workspace is gone


def test_what_a_token_may_not_see_is_not_there(served: Served) -> None:
    for name in ("shop", "bank"):
        done = served.project.runner("project", "create", name, "--workspace-isolation")
        assert done.code == 0, done.err
    settings = served.project.settings()
    shop = create_token(settings, "shop", ("project:shop",))
    reader = create_token(settings, "reader", ("project:shop:ro",))
    theirs = served.post("/workspaces", {"project": "bank"})["id"]
    ours = served.post("/workspaces", {"project": "shop"}, token=shop)["id"]

    absent = served.ask("GET", f"/api/v1/workspaces/{'0' * len(theirs)}", token=shop)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/stop"), ("POST", "/resume")):
        answer = served.ask(method, f"/api/v1/workspaces/{theirs}{path}", token=shop)
        assert (answer.status, answer.raw) == (404, absent.raw.replace(b"0" * len(theirs), theirs.encode()))
    call = f"/workspaces/{theirs}/tools/bash"
    assert served.refused("POST", call, {"command": "true"}, token=shop) == (404, "store.unknown-workspace")
    assert [one["id"] for one in served.get("/workspaces", token=shop)["workspaces"]] == [ours]
    assert served.refused("POST", "/workspaces", {}, token=shop) == (403, "server.scope")
    assert served.refused("POST", "/workspaces", {"project": "bank"}, token=shop) == (403, "server.scope")
    assert served.get(f"/workspaces/{ours}", token=reader)["project"] == "shop"
    call = f"/workspaces/{ours}/tools/read"
    assert served.refused("POST", call, {"file_path": "."}, token=reader) == (403, "server.scope")
    for id in (ours, theirs):
        served.ask("DELETE", f"/api/v1/workspaces/{id}")


def test_a_clone_is_made_and_lists_are_paged(served: Served, repository: Path) -> None:
    git(repository, "branch", "next")
    ids = [served.post("/workspaces")["id"] for _ in range(3)][::-1]
    first = served.get("/workspaces?limit=2")
    rest = served.get(f"/workspaces?limit=2&cursor={first['next']}")

    assert [one["id"] for one in (*first["workspaces"], *rest["workspaces"])] == ids
    assert rest["next"] is None
    assert served.refused("GET", "/workspaces?limit=0") == (400, "server.request")
    assert served.refused("POST", "/workspaces", {"repository_url": "ext::sh -c id"})[0] == 400
    for id in ids:
        served.ask("DELETE", f"/api/v1/workspaces/{id}")


def test_a_server_that_is_told_to_end_finishes_what_it_works_on(project: Project) -> None:
    with serving(project) as served:
        id = served.post("/workspaces")["id"]
        call = served.send(
            "POST", f"/api/v1/workspaces/{id}/tools/bash", {"command": "echo >begun; sleep 2; echo done"}
        )
        until((project.home / "state" / "projects" / "default" / "workspaces" / id / "begun").exists)
        served.process.terminate()
        answer = call.getresponse()
        assert json.loads(answer.read())["stdout"] == "done\n"
        call.close()
    assert project.json("lease", "list") == []
    assert project.runner("workspace", "destroy", id).code == 0


def test_what_a_server_that_was_killed_had_open_can_be_used_again(project: Project) -> None:
    with serving(project, ends=-signal.SIGKILL) as served:
        id = served.post("/workspaces")["id"]
        served.tool(id, "write", file_path="kept", content="")
        served.process.kill()
        served.process.wait()
    with serving(project, token="second", says=["lease.taken-over"]) as served:
        assert served.tool(id, "glob", pattern="*")["matches"] == ["kept"]
        assert served.ask("DELETE", f"/api/v1/workspaces/{id}").status == 200
