"""The image of a server, built for real and started as people start it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import APIClient

from tests.support import agent_image, dockerd
from tests.support.situations import until
from tests.support.wheel import make_wheel

pytestmark = [dockerd.DOCKER.mark, pytest.mark.nightly, pytest.mark.timeout(1800)]

TAG = "plan-runner:tests"
HOME = "/var/lib/plan-runner"
MANIFESTS = """\
apiVersion: runner/v1
kind: AgentType
metadata: {{name: worker}}
spec:
  agent: script
  script: {{path: agent.sh}}
  workspace: {{enabled: true, repo_source: {{type: none}}, {workspace}}}
---
apiVersion: runner/v1
kind: IncidentRun
metadata: {{name: hello}}
spec: {{agent_type: worker}}
"""
ASK = """\
import json, sys, urllib.request
url, token, body = sys.argv[1:]
headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
request = urllib.request.Request(f"http://127.0.0.1:8700{url}", body.encode() or None, headers)
print(urllib.request.urlopen(request).read().decode())
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dockerd.Daemon]:
    """A daemon that has the image, of this checkout's wheel."""
    folder = tmp_path_factory.mktemp("server-image")
    wheel = make_wheel(folder, platform.machine())
    with agent_image.building(folder / "docker") as daemon:
        env = {**os.environ, "DOCKER_HOST": daemon.host}
        words = ["--wheel", str(wheel), "--tag", TAG, "--network", "host", "--ca", str(agent_image.CA)]
        subprocess.run([sys.executable, "-m", "runner", "image", "build", "--server", *words], check=True, env=env)
        with daemon.client() as client:
            repository, _, tag = dockerd.IMAGE.partition(":")
            client.import_image_from_data(dockerd.root_file_system(), repository=repository, tag=tag)
        yield daemon


class Container:
    """A container of the image with a read-only root, no capability, and a volume as its home."""

    def __init__(
        self, client: APIClient, words: list[str], *, binds: list[str], unconfined: bool = False, **more: object
    ) -> None:
        self.client = client
        self.volume = client.create_volume()["Name"]
        options = client.create_host_config(
            read_only=True,
            tmpfs=["/tmp"],
            cap_drop=["ALL"],
            network_mode="none",
            binds=[f"{self.volume}:{HOME}", *binds],
            security_opt=["no-new-privileges", *(["seccomp=unconfined"] if unconfined else [])],
            **more,
        )
        if unconfined:  # what the command line calls systempaths=unconfined
            options |= {"MaskedPaths": [], "ReadonlyPaths": []}
        self.id = client.create_container(TAG, words or None, host_config=options)["Id"]
        client.start(self.id)

    def run(self, *words: str) -> str:
        started = self.client.exec_create(self.id, list(words))["Id"]
        out = self.client.exec_start(started).decode()
        assert self.client.exec_inspect(started)["ExitCode"] == 0, out
        return out

    def ask(self, token: str, url: str, body: object = None) -> dict[str, object]:
        text = "" if body is None else json.dumps(body)
        answer: dict[str, object] = json.loads(self.run("python3", "-c", ASK, url, token, text))
        return answer

    def logs(self) -> str:
        return str(self.client.logs(self.id).decode())

    def end(self) -> int:
        self.client.stop(self.id, timeout=40)
        code = int(self.client.inspect_container(self.id)["State"]["ExitCode"])
        self.client.remove_container(self.id, v=True)
        self.client.remove_volume(self.volume)
        return code


@pytest.mark.parametrize("provider", ["local", "docker"])
def test_a_server_in_a_container_does_a_run(daemon: dockerd.Daemon, provider: str, tmp_path: Path) -> None:
    """For `local` docker allows namespaces; for `docker` it lends its socket. The user is neither time root."""
    tmp_path.chmod(0o755)
    workspace = "providers: [local]" if provider == "local" else f"providers: [docker], base_image: {dockerd.IMAGE}"
    (tmp_path / "all.runner.yaml").write_text(MANIFESTS.format(workspace=workspace))
    (tmp_path / "agent.sh").write_text("#!/bin/sh\necho made > made; echo hello\n")
    (tmp_path / "agent.sh").chmod(0o755)
    binds, groups = [f"{tmp_path}:/manifests:ro"], []
    if provider == "docker":
        binds.append(f"{daemon.socket}:/var/run/docker.sock")
        groups = [daemon.socket.stat().st_gid]
    words = ["serve", "--listen", "0.0.0.0:8700", "--behind-proxy", "--manifests", "/manifests"]
    with daemon.client() as client:
        server = Container(client, words, binds=binds, unconfined=provider == "local", group_add=groups)
        try:
            until(lambda: "listening on http://0.0.0.0:8700" in server.logs(), 60)
            token = server.run("runner", "token", "create", "ci", "--scope", "admin").strip()
            started = server.ask(token, "/api/v1/runs", {})
            [run] = started["runs"]  # type: ignore[misc]
            until(lambda: server.ask(token, f"/api/v1/runs/{run['id']}").get("exit_code") is not None, 120)
            assert "hello" in server.run("runner", "runs", "logs", str(run["id"]))
            assert server.run("id", "-u").strip() == "1000"
            server.run("python3", "/opt/plan-runner/health.py")
        finally:
            logs, code = server.logs(), server.end()
    assert code == 0, logs


def test_the_command_serves_and_the_health_check_sees_it(daemon: dockerd.Daemon) -> None:
    with daemon.client() as client:
        server = Container(client, [], binds=[])
        try:
            until(lambda: client.inspect_container(server.id)["State"]["Health"]["Status"] == "healthy", 90)
        finally:
            code = server.end()
    assert code == 0


def test_nothing_is_left_of_what_builds_and_the_user_is_an_ordinary_one(daemon: dockerd.Daemon) -> None:
    absent = "! command -v gcc cc make pip pip3 npm && ! ls /run/host /run/build /run/wheel /opt/plan-runner/bin/pip*"
    of_root = "find / -xdev -perm /6000 -type f"
    with daemon.client() as client:
        about = client.inspect_image(TAG)
        history = json.dumps([client.history(TAG), about])
        done = client.create_container(
            TAG, ["-c", f"{absent}; {of_root}; git --version"], entrypoint=["sh"], user="4711"
        )
        client.start(done)
        code, out = client.wait(done)["StatusCode"], client.logs(done, stderr=False).decode()
        client.remove_container(done)
    assert (code, out.split()[:2], len(out.splitlines())) == (0, ["git", "version"], 1), out
    assert about["Config"]["User"] == "1000:1000"
    assert about["Config"]["Entrypoint"] == ["runner"]
    assert 0.2e9 < about["Size"] < 0.5e9
    assert str(agent_image.CA) not in history
