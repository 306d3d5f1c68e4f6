"""Agent types over HTTP, and the workspaces that theirs get, by the real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.git_servers import https
from tests.support.needs import MEMORY, POSTGRES
from tests.support.postgres import fresh_url
from tests.support.server import Served, create_token, serving
from tests.support.situations import Project, commit, git

FIELDS = {"enabled", "repo_source", "tools", "resource_limits", "checkout_on_start", "base_image", "setup_commands"}


def put(served: Served, name: str, **config: Any) -> Any:
    """Change a configuration as a client does: read it, and send it back with its ETag."""
    path = f"/api/v1/agent-types/{name}/workspace-config"
    before = served.ask("GET", path)
    answer = served.ask("PUT", path, {**before.json, **config}, headers={"If-Match": before.headers["etag"]})
    assert answer.status == 200, answer.raw
    return answer.json


@pytest.mark.scenario("CFG-18")
@pytest.mark.scenario("CFG-21", only="http")
def test_a_configuration_has_every_field_and_a_new_agent_type_no_workspace(served: Served) -> None:
    served.post("/agent-types", {"name": "worker"})

    config = served.get("/agent-types/worker/workspace-config")

    assert set(config) >= FIELDS
    assert config["enabled"] is False
    assert served.refused("POST", "/workspaces", {"agent_type": "worker"}) == (404, "workspace.disabled")
    assert served.refused("GET", "/agent-types/gone/workspace-config") == (404, "server.unknown-agent-type")
    assert served.refused("POST", "/agent-types", {"name": "worker"}) == (409, "server.agent-type-exists")
    assert [one["name"] for one in served.get("/agent-types")["agent_types"]] == ["worker"]
    assert served.ask("DELETE", "/api/v1/agent-types/worker").status == 204
    assert served.get("/agent-types") == {"agent_types": []}


@pytest.mark.scenario("CFG-20")
def test_a_tool_that_there_is_not_is_named_beside_those_that_there_are(served: Served) -> None:
    served.post("/agent-types", {"name": "worker"})
    path = "/api/v1/agent-types/worker/workspace-config"
    etag = {"If-Match": served.ask("GET", path).headers["etag"]}

    answer = served.ask("PUT", path, {"enabled": True, "tools": ["bash", "ssh", "ftp"]}, headers=etag)

    assert (answer.status, answer.code) == (400, "tool.unknown")
    assert answer.json["detail"] == "`ftp`, `ssh` cannot be tools"
    assert answer.json["hint"] == "valid tools: bash, read, write, edit, glob, grep, git"
    bad = {
        "repo_source": {"type": "fixed", "branch": "-x"},
        "resource_limits": {"cpu": "many", "memory": "4X", "disk": 1},
        "base_image": "A B",
        "setup_commands": [""],
    }
    found = served.ask("PUT", path, bad, headers=etag).json
    assert (found["status"], len(found["errors"])) == (400, 7)
    assert served.ask("PUT", path, {"repo_source": {"type": "svn"}}, headers=etag).status == 400
    assert served.get("/agent-types/worker/workspace-config")["enabled"] is False


def test_a_change_is_made_to_what_was_read_and_is_for_workspaces_that_come_after(project: Project) -> None:
    with serving(project, says=["workspace.setup"]) as served:
        served.post("/agent-types", {"name": "worker", "workspace": {"enabled": True, "tools": ["read"]}})
        path = "/api/v1/agent-types/worker/workspace-config"
        old = served.ask("GET", path).headers["etag"]
        before = served.post("/workspaces", {"agent_type": "worker"})["id"]

        put(served, "worker", tools=["read", "bash"], setup_commands=["echo set >up", "exit 3", "touch never"])

        assert served.refused("PUT", path.removeprefix("/api/v1"), {}, headers={"If-Match": old}) == (
            412,
            "server.changed",
        )
        assert served.refused("PUT", path.removeprefix("/api/v1"), {}) == (400, "server.request")
        assert served.refused("POST", f"/workspaces/{before}/tools/bash", {"command": "true"}) == (
            403,
            "tool.not-enabled",
        )
        after = served.post("/workspaces", {"agent_type": "worker"})
        assert after["warnings"] == ["setup command 2 of 3 exited 3; the rest were skipped"]
        assert served.get(f"/workspaces/{after['id']}")["warnings"] == after["warnings"]
        assert served.tool(after["id"], "bash", command="ls")["stdout"] == "up\n"
        for id in (before, after["id"]):
            served.ask("DELETE", f"/api/v1/workspaces/{id}?discard=true")


def test_of_changes_at_once_to_what_was_read_one_is_made(served: Served) -> None:
    served.post("/agent-types", {"name": "worker"})
    path = "/api/v1/agent-types/worker/workspace-config"
    etag = {"If-Match": served.ask("GET", path).headers["etag"]}

    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(served.ask, "PUT", path, {"base_image": f"image:{n}"}, headers=etag) for n in range(20)]
        answers = [one.result() for one in asked]

    [made] = [one for one in answers if one.status == 200]
    assert sorted(one.status for one in answers) == [200] + [412] * 19
    assert served.ask("GET", path).json == made.json


@MEMORY.mark
def test_the_code_and_the_limits_are_those_of_the_configuration(
    project: Project, repository: Path, tmp_path: Path
) -> None:
    git(repository, "checkout", "-qb", "next")
    (repository / "next").write_text("")
    commit(repository)
    (tmp_path / "served").mkdir()
    git(tmp_path / "served", "clone", "-q", "--bare", str(repository), "repo.git")
    with https(tmp_path / "served", tmp_path) as server:
        project.env |= server.env
        url = f"{server.url}/repo.git"
        with serving(project) as served:
            fixed = {"type": "fixed", "url": url, "branch": "next"}
            limits = {"cpu": "500m", "memory": "256M", "disk": "64M"}
            served.post(
                "/agent-types",
                {"name": "fixed", "workspace": {"enabled": True, "repo_source": fixed, "resource_limits": limits}},
            )
            made = served.post("/workspaces", {"agent_type": "fixed", "task": {"repository_url": "https://x.test/y"}})
            assert (made["repository_url"], made["branch"]) == (url, "next")
            assert made["resource_limits"] == {"cpu": 0.5, "memory": 256 << 20, "disk": 64 << 20, "pids": 512}
            assert served.tool(made["id"], "glob", pattern="n*")["matches"] == ["next"]
            empty = {**served.get("/agent-types/fixed/workspace-config"), "checkout_on_start": False}
            put(served, "fixed", **empty)
            other = served.post("/workspaces", {"agent_type": "fixed"})
            assert (other["repository_url"], served.tool(other["id"], "glob", pattern="**")["matches"]) == (None, [])
            for id in (made["id"], other["id"]):
                served.ask("DELETE", f"/api/v1/workspaces/{id}")


def test_agent_types_take_an_admin(served: Served) -> None:
    served.post("/agent-types", {"name": "worker", "workspace": {"enabled": True}})
    settings = served.project.settings()
    shop = create_token(settings, "shop", ("project:shop",))
    reader = create_token(settings, "reader", ("admin:ro",))

    assert served.refused("GET", "/agent-types/worker", token=shop) == (404, "server.unknown-agent-type")
    assert served.get("/agent-types", token=shop) == {"agent_types": []}
    assert served.get("/agent-types/worker", token=reader)["name"] == "worker"
    assert served.refused("DELETE", "/agent-types/worker", token=reader) == (403, "server.scope")
    assert served.refused("POST", "/agent-types", {"name": "x"}, token=reader) == (403, "server.scope")


@pytest.mark.scenario("CFG-19")
def test_agent_types_in_a_folder_are_files_whose_comments_survive(project: Project, tmp_path: Path) -> None:
    folder = tmp_path / "types"
    folder.mkdir()
    file = folder / "worker.yaml"
    file.write_text("# of the shop\nenabled: true   # since May\nprovider: local\ntools: [bash]\n")
    with serving(project, "--agent-types", str(folder), says=["tool.unknown"]) as served:
        session = served.post("/sessions", {"agent_type": "worker"})["id"]
        assert put(served, "worker", tools=["bash", "read"])["tools"] == ["bash", "read"]
        assert file.read_text() == (
            "# of the shop\nenabled: true   # since May\nprovider: local\ntools: [bash, read]\n"
        )
        file.write_text("tools: [bash, ftp]\n")
        answer = served.ask("GET", "/api/v1/agent-types/worker/workspace-config")
        assert (answer.status, answer.json["errors"][0]["code"]) == (400, "tool.unknown"), answer.raw
        served.post("/agent-types", {"name": "other"})
        assert (folder / "other.yaml").read_text() == "{}\n"
        assert served.ask("DELETE", f"/api/v1/sessions/{session}?discard=true").status == 200
    done = project.runner("serve", "--agent-types", str(folder))
    assert (done.code, "tool.unknown" in done.err, f"{file}:1:8" in done.err) == (2, True, True), done.err


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=POSTGRES.mark)])
def test_servers_of_one_store_answer_as_the_last_change_says(kind: str, project: Project) -> None:
    """What a server remembers of the store is true at each request, whoever has written."""
    shared = project.home / "shared"
    shared.mkdir()
    project.env["RUNNER_DATABASE_URL"] = fresh_url() if kind == "postgresql" else f"sqlite://{shared / 'state.db'}"
    other = replace(project, home=project.home / "other")
    other.home.mkdir()
    path = "/api/v1/agent-types/worker/workspace-config"
    with serving(project) as here, serving(other, token="other") as there:
        here.post("/agent-types", {"name": "worker"})
        for turn in range(20):
            writer, reader = (here, there) if turn % 2 else (there, here)
            before = reader.ask("GET", path).headers["etag"]
            assert writer.ask("PUT", path, {"setup": {"timeout": turn + 1}}, headers={"If-Match": before}).status == 200
            assert reader.ask("GET", path).json["setup"]["timeout"] == turn + 1
        assert there.ask("GET", path, token=here.token).status == 200
        assert other.runner("token", "revoke", "tests").code == 0
        assert [one.ask("GET", path, token=here.token).status for one in (here, there)] == [401, 401]
