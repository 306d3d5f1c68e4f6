"""Registered MCP servers: over HTTP and by the command, of images, in containers, and from one start to the next."""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from runner.safefs import trees
from runner.sandbox.cgroup import locate
from runner.testing.outside import marked
from tests.server.test_hosted_mcp import PROGRAM, ask, events, hosting, state, tree, write
from tests.support import cluster, dockerd
from tests.support.cluster.double import NAMESPACE
from tests.support.needs import MEMORY, USERS
from tests.support.server import Served, create_token, serving
from tests.support.situations import Project, processes_of, until
from tests.support.unprivileged import USER, Podman

IMAGE = "runner-tests-mcp:1"


def make_image() -> None:
    """An image that starts the server by itself, in a directory of its own and with a variable."""
    with dockerd.session().client() as client:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.add(PROGRAM, "opt/served/main.py")
        made = client.create_container(dockerd.IMAGE, ["true"])["Id"]
        try:
            client.put_archive(made, "/", buffer.getvalue())
            changes = ["WORKDIR /opt/served", "ENV OF_IMAGE=yes", 'ENTRYPOINT ["python3"]', 'CMD ["main.py"]']
            repository, _, tag = IMAGE.partition(":")
            client.commit(made, repository, tag, changes=changes)
        finally:
            client.remove_container(made)


@pytest.fixture
def on_docker(project: Project) -> Iterator[Project]:
    project.env |= {"DOCKER_HOST": dockerd.host(), "WORKSPACE_PROVIDERS": "docker"}
    yield project
    for row in project.json("workspace", "list"):
        project.runner("workspace", "destroy", "--discard", row["id"])


@pytest.mark.scenario("LIF-06")
@pytest.mark.scenario("LIF-07")
def test_a_registered_image_is_hosted_whenever_the_server_runs(on_docker: Project) -> None:
    project = on_docker
    make_image()
    with serving(project) as served:
        made = served.post("/mcp-servers", {"name": "docs", "spec": {"image": IMAGE, "stdio_bridge": True}})
        assert (made["name"], made["state"]) == ("docs", "starting")
        until(lambda: state(served)["state"] == "ready")
        found = served.get("/mcp-servers/docs")
        row = served.get(f"/workspaces/{found['workspace']}")
        assert {name: row[name] for name in ("container_type", "lifecycle", "status", "expires_at")} == {
            "container_type": "mcp_server",
            "lifecycle": "persistent",
            "status": "ready",
            "expires_at": None,
        }
        assert (row["provider"], len(dockerd.containers(row["id"]))) == ("docker", 1)
        assert json.loads(ask(served, "seen"))[1]["OF_IMAGE"] == "yes"
        assert served.refused("POST", "/mcp-servers", {"name": "docs", "spec": {"image": IMAGE}}) == (409, "mcp.exists")
    assert dockerd.containers(row["id"]) == []
    with serving(project, token="again") as served:
        until(lambda: state(served)["state"] == "ready")
        assert state(served)["workspace"] == row["id"]
        assert ask(served, "echo", text="hi") == "hi"
        assert served.ask("DELETE", "/api/v1/mcp-servers/docs").status == 204
        assert served.refused("GET", "/mcp-servers/docs") == (404, "mcp.unknown-server")
        assert dockerd.containers(row["id"]) == []
        assert served.refused("GET", f"/workspaces/{row['id']}")[0] == 404
    with serving(project, token="third") as served:
        assert served.get("/mcp-servers")["mcp_servers"] == []


@pytest.mark.scenario("LIF-22", only="docker")
@pytest.mark.scenario("LIF-22", only="gvisor")
def test_a_crashed_server_in_a_container_is_started_again(on_docker: Project) -> None:
    dockerd.GVISOR.require()
    names = ("docker", "gvisor")
    for name in names:
        write(on_docker, name, provider=name, image=dockerd.IMAGE)
    with hosting(on_docker) as served:
        until(lambda: {state(served, name)["state"] for name in names} == {"ready"})
        for name in names:
            with pytest.RaisesGroup(pytest.RaisesExc(MCPError, match="has ended"), flatten_subgroups=True):
                ask(served, "die", name, code=3)
            assert ask(served, "echo", name, text="again") == "again"
            assert state(served, name)["crashes"] == 1
            written = events(on_docker, state(served, name)["workspace"])
            (ended,) = (one for one in written if one["type"] == "McpServerEnded")
            assert (ended["how"], ended["pause_seconds"]) == ("exited 3", 0)


COMMAND = ["python3", "-c", PROGRAM.read_text()]


def test_what_is_registered_from_elsewhere_names_nothing_of_this_host(served: Served) -> None:
    reader = create_token(served.project.settings(), "reader", ("admin:ro",))
    other = create_token(served.project.settings(), "other", ("project:shop",))
    write(served.project, "docs")

    def refused(spec: Any, name: str = "docs", **more: Any) -> tuple[int, str]:
        answer = served.ask("POST", "/api/v1/mcp-servers", {"name": name, "spec": spec}, **more)
        (found,) = answer.json.get("errors", [answer.json])
        assert found.get("at", "server").startswith("server")
        return answer.status, found["code"]

    for spec, code in (
        ({}, "manifest.bad-value"),
        ({"command": []}, "manifest.bad-value"),
        ({"command": ["x"], "stdio_bridge": False}, "manifest.bad-value"),
        ({"command": ["x"], "comand": 1}, "manifest.unknown-field"),
        ({"command": ["x"], "toolchains": ["/opt"]}, "policy.untrusted"),
        ({"command": ["x"], "secrets": [{"name": "A", "from": {"env": "HOME"}}]}, "policy.untrusted"),
        ({"command": ["x"], "network": {"allow": [{"host": "a.b", "private": True}]}}, "policy.untrusted"),
    ):
        assert refused(spec) == (400, code), spec
    assert refused({"command": ["x"]}, "../docs") == (400, "manifest.name")
    assert refused({"command": ["x"]}, token=reader) == (403, "server.scope")
    assert refused({"command": ["x"]}, token=other) == (403, "server.scope")
    assert [*(served.project.home / "state" / "mcp-servers").iterdir()] == []
    served.post("/mcp-servers", {"name": "docs", "spec": {"command": COMMAND}})
    until(lambda: state(served)["state"] == "ready")
    assert served.get("/mcp-servers", token=other)["mcp_servers"] == []
    assert served.refused("GET", "/mcp-servers/docs", token=other) == (404, "mcp.unknown-server")
    assert served.refused("DELETE", "/mcp-servers/docs", token=other) == (404, "mcp.unknown-server")
    assert served.refused("DELETE", "/mcp-servers/docs", token=reader) == (403, "server.scope")
    assert state(served)["state"] == "ready"
    assert served.ask("DELETE", "/api/v1/mcp-servers/docs").status == 204
    assert served.get("/mcp-servers")["mcp_servers"] == []
    assert served.refused("DELETE", "/mcp-servers/docs") == (404, "mcp.unknown-server")


def test_a_person_on_the_host_registers_a_manifest_that_names_what_is_there(served: Served) -> None:
    project = served.project
    key = project.folder / "servers" / "key"
    file = write(project, "own", secrets=[{"name": "KEY", "from": {"file": "key"}}])
    key.write_text("of this host")
    key.chmod(0o600)
    done = project.runner("mcp", "register", str(file))
    assert (done.code, done.out) == (0, "own is registered\n"), done.err
    assert project.runner("mcp", "register", str(file)).errors == ["mcp.exists"]
    write(project, "other")
    assert project.runner("mcp", "register", str(file.parent)).errors == ["manifest.nothing-to-run"]
    until(lambda: state(served, "own")["state"] == "ready")
    assert json.loads(ask(served, "seen", "own"))[1]["KEY"] == "of this host"
    assert project.runner("mcp", "deregister", "own").code == 0
    assert project.runner("mcp", "deregister", "own").errors == ["mcp.unknown-server"]
    until(lambda: served.get("/mcp-servers")["mcp_servers"] == [])
    until(lambda: project.json("workspace", "list") == [])


def times_throttled(provider: str, workspace: str, mark: str) -> int:
    """How often the processes of a hosted server had to wait, as the host counts it."""
    pid = dockerd.first(dockerd.containers(workspace)[0]) if provider == "gvisor" else marked(mark)[0]
    v1, v2 = locate(Path("/proc/self/mountinfo").read_text(), Path(f"/proc/{pid}/cgroup").read_text())
    return int((v1.get("cpu", v2) / "cpu.stat").read_text().partition("nr_throttled ")[2].split()[0])


@MEMORY.mark
@USERS.mark
@pytest.mark.scenario("LIF-16", only="mcp")
@pytest.mark.scenario("LIF-17", only="mcp")
@pytest.mark.scenario("LIF-18", only="mcp")
@pytest.mark.parametrize("provider", ["local", "docker", pytest.param("gvisor", marks=pytest.mark.nightly)])
def test_limits_hold_for_a_server(project: Project, provider: str) -> None:
    project.env |= {"WORKSPACE_PROVIDERS": provider} | ({} if provider == "local" else {"DOCKER_HOST": dockerd.host()})
    image = {} if provider == "local" else {"image": dockerd.IMAGE}
    limits = {"memory": "128M", "disk": "32M", "cpu": "200m"}
    mark = f"limits-{os.getpid()}"
    more = {"resource_limits": limits, "health": {"interval": "1s"}, "env": {"MARK": mark}}
    write(project, provider=provider, **more, **image)
    with hosting(project) as served:
        until(lambda: state(served)["state"] == "ready")
        workspace = state(served)["workspace"]
        before = times_throttled(provider, workspace, mark)
        until(
            lambda: ask(served, "spin", seconds=1) and times_throttled(provider, workspace, mark) >= before + 3,
            seconds=120,
        )
        assert ask(served, "fill", mebibytes=64) == "No space left on device"
        assert 16 << 20 < int(ask(served, "read")) < 32 << 20
        assert state(served)["crashes"] == 0
        assert ask(served, "eat") == "eating"
        crashes = 1 if provider == "gvisor" else 0  # to the host that is one program, which is killed whole
        told = "McpServerEnded" if provider == "gvisor" else "OomKilled"
        until(lambda: told in [one["type"] for one in events(project, workspace)])
        until(lambda: state(served)["state"] in ("ready", "unhealthy"))
        assert ask(served, "echo", text="hi") == "hi"
        assert state(served)["crashes"] == crashes
        with pytest.RaisesGroup(pytest.RaisesExc(MCPError, match="has ended"), flatten_subgroups=True):
            ask(served, "gorge")
        assert ask(served, "echo", text="again") == "again"  # started anew
        written = events(project, workspace)
    kills = [one["count"] for one in written if one["type"] == "OomKilled"]
    ends = [one["how"] for one in written if one["type"] == "McpServerEnded"]
    whole = "ran out of memory, and its sandbox was killed whole"
    assert (kills, len(ends)) == (([], 2) if provider == "gvisor" else ([1, 1], 1))
    assert all(whole in how if provider == "gvisor" else how == "was killed: out of memory" for how in ends)


@pytest.mark.nightly
@pytest.mark.parametrize("provider", ["local", "docker", "gvisor"])
def test_a_killed_host_leaves_nothing_that_recover_does_not_end(project: Project, provider: str) -> None:
    project.env |= {"WORKSPACE_PROVIDERS": provider} | ({} if provider == "local" else {"DOCKER_HOST": dockerd.host()})
    file = write(project, **({} if provider == "local" else {"image": dockerd.IMAGE}))
    with hosting(project, ends=-signal.SIGKILL) as served:
        until(lambda: state(served)["state"] == "ready")
        workspace = state(served)["workspace"]
        place = tree(project, workspace)
        served.process.kill()
        served.process.wait()
        assert project.runner("recover").code == 0
        assert provider == "local" or dockerd.containers(workspace) == []
        assert processes_of(project.home) == project.json("lease", "list") == []
        assert [one["state"] for one in project.json("mcp", "hosted", "list")] == ["stopped"]
        assert [row["id"] for row in project.json("workspace", "list")] == [workspace]
        file.rename(file.with_suffix(".off"))  # and whom no manifest names any more goes with the next host
        write(project, "other", **({} if provider == "local" else {"image": dockerd.IMAGE}))
        with serving(project, "--mcp-servers", str(file.parent), token="next") as after:
            until(lambda: state(after, "other")["state"] == "ready")
            assert workspace not in [row["id"] for row in project.json("workspace", "list")]
            assert not place.exists()


@pytest.mark.nightly
@pytest.mark.parametrize("provider", ["local", "docker"])
def test_an_ordinary_user_hosts_a_server(project: Project, provider: str) -> None:
    """On `docker`: the user's own podman, whose files are in volumes."""
    USERS.require()
    place = Path(tempfile.mkdtemp(prefix="runner-hosted-"))
    place.chmod(0o755)
    own = Project(place / "project", place / "home", {"WORKSPACE_PROVIDERS": provider}, user=USER)
    try:
        for folder in (own.folder, own.home):
            folder.mkdir()
        image = {}
        if provider == "docker":
            Podman.component.require()
            own.env["DOCKER_HOST"] = dockerd.session_of(Podman).host
            image = {"image": dockerd.IMAGE}
        write(own, **image)
        for path in (own.folder, own.home, *own.folder.rglob("*")):
            os.chown(path, USER, USER)
        assert own.runner("token", "create", "own", "--scope", "admin").code == 0  # which makes the home
        with hosting(own, keep=True) as served:
            until(lambda: state(served)["state"] == "ready")
            before = state(served)["workspace"]
        with hosting(own, token="again") as served:
            until(lambda: state(served)["state"] == "ready")
            assert state(served)["workspace"] == before  # with its files
            assert ask(served, "echo", text="hi") == "hi"
            assert own.json("workspace", "list")[0]["provider"] == provider
            said = own.runner("mcp", "hosted", "logs", "docs").out
            assert ("limits that `local` cannot enforce here: " in said) is (provider == "local")
            with pytest.RaisesGroup(pytest.RaisesExc(MCPError, match="has ended"), flatten_subgroups=True):
                ask(served, "die", code=1)
            assert ask(served, "echo", text="again") == "again"
    finally:
        trees.remove(place)


@pytest.mark.nightly
def test_a_server_in_a_pod_is_started_again_and_keeps_its_workspace(project: Project) -> None:
    """The cluster is the double, which like any other does not say what an image starts."""
    project.env |= {"KUBECONFIG": str(cluster.double_kubeconfig()), "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE}
    write(project, provider="kubernetes", image=dockerd.IMAGE)
    with hosting(project, keep=True, says=None) as served:
        until(lambda: state(served)["state"] == "ready")
        with pytest.RaisesGroup(pytest.RaisesExc(MCPError, match="has ended"), flatten_subgroups=True):
            ask(served, "die", code=3)
        assert ask(served, "echo", text="again") == "again"
        found = state(served)
        assert found["crashes"] == 1
    with hosting(project, token="again", says=None) as served:
        until(lambda: state(served)["state"] == "ready")
        assert ask(served, "echo", text="hi") == "hi"
        assert state(served)["workspace"] == found["workspace"]
