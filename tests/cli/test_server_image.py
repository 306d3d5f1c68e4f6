"""The image of a server, built for real and started as people start it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient

from runner import __version__
from tests.support import agent_image, dockerd, server_image
from tests.support.http_servers import serving_http
from tests.support.situations import until
from tests.support.wheel import ROOT

pytestmark = [dockerd.DOCKER.mark, pytest.mark.nightly, pytest.mark.timeout(1800)]

TAG = server_image.TAG
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is made."""
    return tmp_path_factory.mktemp("server-image")


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[dockerd.Daemon]:
    """A daemon that has the image."""
    with server_image.building(folder) as daemon:
        daemon.make_image()
        yield daemon


class Container:
    """A container of the image with a read-only root, no capability, and a volume as its home."""

    def __init__(
        self,
        client: APIClient,
        words: list[str],
        *,
        binds: list[str],
        unconfined: bool = False,
        env: dict[str, str] | None = None,
        **more: object,
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
        self.id = client.create_container(TAG, words or None, environment=env, host_config=options)["Id"]
        client.start(self.id)

    def run(self, *words: str) -> str:
        started = self.client.exec_create(self.id, list(words))["Id"]
        out = self.client.exec_start(started).decode()
        assert self.client.exec_inspect(started)["ExitCode"] == 0, out
        return out

    def ask(self, method: str, path: str, token: str, body: object = None) -> Any:
        return json.loads(self.run(*server_image.asking(method, path, token, body)))

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
            [run] = server.ask("POST", "/runs", token, {})["runs"]
            until(lambda: server.ask("GET", f"/runs/{run['id']}", token)["exit_code"] is not None, 120)
            assert "hello" in server.run("runner", "runs", "logs", run["id"])
            assert server.run("id", "-u").strip() == "1000"
            server.run("python3", "/opt/plan-runner/health.py")
        finally:
            logs, code = server.logs(), server.end()
    assert code == 0, logs


def test_the_command_serves_and_the_health_check_sees_it(daemon: dockerd.Daemon) -> None:
    """Also where a proxy is named for what the server asks of others."""
    with daemon.client() as client:
        server = Container(client, [], binds=[], env={"http_proxy": "http://127.0.0.1:9"})
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


def test_an_index_gives_this_version_and_nothing_of_its_settings_stays(
    daemon: dockerd.Daemon, folder: Path, tmp_path: Path
) -> None:
    """As somebody has it whose runner came from there: their index, with a token, is named by pip's settings."""
    served, record = tmp_path / "index" / "plan-runner", tmp_path / "site" / f"plan_runner-{__version__}.dist-info"
    for directory in (served, record):
        directory.mkdir(parents=True)
    [wheel] = folder.glob("*.whl")
    shutil.copy(wheel, served)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plan-runner\nVersion: {__version__}\n")
    handler = partial(SimpleHTTPRequestHandler, directory=str(served.parent))
    with serving_http(handler) as port:
        url = f"http://me:index-token@127.0.0.1:{port}/"
        (tmp_path / "pip.conf").write_text(f"[global]\nextra-index-url = {url}\n")
        words = ["--tag", "plan-runner:index", "--pip-conf", str(tmp_path / "pip.conf"), "--network", "host"]
        env = {**os.environ, "DOCKER_HOST": daemon.host, "PYTHONPATH": f"{record.parent}:{ROOT}"}
        build = [sys.executable, "-m", "runner", "image", "build", "--server", "--ca", str(agent_image.CA), *words]
        subprocess.run(build, check=True, env=env, cwd="/")
    with daemon.client() as client:
        about = json.dumps([client.history("plan-runner:index"), client.inspect_image("plan-runner:index")])
        stages = client.images(filters={"dangling": True, "label": "plan-runner.stage"})
        done = client.create_container("plan-runner:index", ["--version"])["Id"]
        client.start(done)
        code, out = client.wait(done)["StatusCode"], client.logs(done).decode()
        client.remove_container(done)
        client.remove_image("plan-runner:index")
    assert (code, out.strip()) == (0, f"runner {__version__}")
    assert "index-token" not in about
    assert stages == []
